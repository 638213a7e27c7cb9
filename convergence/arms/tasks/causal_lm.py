"""A causal language model: it computes its loss from labels, and decodes and generates text."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from convergence import ours
from convergence.arms.hooks import differ, kept_activations, observed_hidden_states
from convergence.arms.large import is_large, sample
from convergence.arms.lifetimes import Lifetimes
from convergence.arms.quantities import (
    BY_ELEMENT,
    DECODING,
    EVALUATION,
    EVALUATION_LOGITS,
    HIDDEN,
    INITIAL,
    LOGITS,
    LOSS,
    TARGET_LOGIT,
    TRAINING_LOGITS,
    WITHOUT_GRADIENTS,
    Moment,
    Remark,
)
from convergence.arms.tasks.task import Task
from convergence.arms.trajectory import Trajectory
from convergence.models.data import IGNORE, Batch, Step

PROMPT_TOKENS = 7
GENERATED_TOKENS = 4
CHANGED_LATER = "the logits that the caller holds changed in a later forward"


class CausalLM(Task):
    """Its batches are :class:`Batch`."""

    def train_batch(
        self, model: Any, step: Step, batch: Batch, result: Trajectory, at: Moment, lifetimes: Lifetimes
    ) -> None:
        """Forward and backward of one micro batch. What it makes is gone when this returns, if nobody else holds it."""
        is_initial = at.phase == INITIAL
        with (
            contextlib.nullcontext() if step.whole else ours.head_in_chunks(model, batch.labels.numel()),
            observed_head(model, batch, result, at, step, lifetimes) as head,
            # Whoever hooks a module may be answered by other code. The optimizers' phases take these steps without.
            kept_activations(model, self.head(model), result, at)
            if is_initial and step.trains
            else contextlib.nullcontext(),
            observed_hidden_states(model, result, at, lifetimes) if is_initial else contextlib.nullcontext(),
        ):
            logits: Any = None
            before: torch.Tensor | None = None
            if step.label_smoothing is not None:
                logits = model(**batch.inputs()).logits
                head.observe_outputs(logits)
                loss = step.smoothed_loss(logits, batch)
            else:
                outputs = model(**step.labelled(batch))
                lifetimes.watch("the outputs", outputs)
                lifetimes.watch("the loss", outputs.loss)
                lifetimes.watch_graph(outputs.loss)
                loss = step.loss(outputs)
                if step.reads_logits:
                    logits = outputs.logits
                    if logits is None:
                        result.notes.append(Remark(at, "the caller reads outputs.logits and finds None"))
            if logits is not None:
                lifetimes.watch("the logits", logits)
                before = logits.detach().clone()
                result.record(TRAINING_LOGITS, at, logits)
            if step.between is not None:
                model(**step.labelled(step.between))
                if before is not None and bool(differ(logits.detach(), before)):
                    result.complaints.append(Remark(at, CHANGED_LATER))
                    before = None
            (loss * step.scale).backward()
            if before is not None and bool(differ(logits.detach(), before)):
                result.complaints.append(Remark(at, "the logits that the caller holds changed during backward"))
        result.record(LOSS, at, loss)

    def evaluate(self, model: Any, batch: Batch, result: Trajectory, at: Moment, device: torch.device) -> None:
        """Loss and logits of ``batch`` without gradients; after an optimizer's steps, its loss while training, too."""
        ids, labels = batch.input_ids.to(device), batch.labels.to(device)
        for name in (EVALUATION,) if at.phase == INITIAL else (WITHOUT_GRADIENTS, EVALUATION):
            at = at._replace(step=name)
            model.train(name == WITHOUT_GRADIENTS)
            with (
                torch.no_grad(),
                ours.head_in_chunks(model, labels.numel()),
                observed_hidden_states(model, result, at) if at.phase == INITIAL else contextlib.nullcontext(),
            ):
                outputs = model(input_ids=ids, labels=labels, use_cache=False)
            result.record(LOSS, at, outputs.loss)
        result.record(EVALUATION_LOGITS, at, outputs.logits)
        model.train()

    def decode(self, model: Any, batch: Batch, result: Trajectory, device: torch.device) -> None:
        """One token at a time, with a cache: the text's own tokens, which are the same in every arm. A caller who holds
        the logits of a token must find them as they were after the next one."""
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        ids = batch.input_ids.to(device)[:, : PROMPT_TOKENS + GENERATED_TOKENS]
        model.eval()
        with torch.no_grad():
            steps = decoded(model, ids, PROMPT_TOKENS, left_padding(ids))
            next(steps)
            for number in range(1, GENERATED_TOKENS + 1):
                at = Moment(INITIAL, DECODING, number)
                with observed_hidden_states(model, result, at):
                    logits = next(steps)
                result.record(EVALUATION_LOGITS, at, logits)
                held.append((logits, logits.clone()))
            if any(bool(differ(logits, before)) for logits, before in held):
                result.complaints.append(Remark(at, CHANGED_LATER))
        model.train()

    def generate(self, model: Any, batch: Batch, result: Trajectory, device: torch.device) -> None:
        ids = batch.input_ids.to(device)[:, :PROMPT_TOKENS]
        model.eval()
        with torch.no_grad():
            generated = model.generate(
                input_ids=ids,
                attention_mask=left_padding(ids),
                max_new_tokens=GENERATED_TOKENS,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        model.train()
        result.generated = generated.sequences[:, PROMPT_TOKENS:].cpu()
        result.scores = torch.stack(generated.scores).double().cpu()

    def computed(self, model: Any, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        outputs = model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False)
        return outputs.loss, [outputs.logits]

    def head(self, model: Any) -> Collection[nn.Module]:
        return set(model.get_output_embeddings().modules())


def left_padding(ids: torch.Tensor) -> torch.Tensor:
    """The attention mask of ``ids`` [batch, length] where each row begins with one token more of padding than the row
    before it, the first with none: prompts of different lengths, whose next tokens have different positions."""
    places = torch.arange(ids.shape[1], device=ids.device)
    return (places >= torch.arange(len(ids), device=ids.device).unsqueeze(1)).long()


def decoded(model: Any, ids: torch.Tensor, prompt: int, mask: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
    """The logits [batch, prompt, vocab] of the first ``prompt`` tokens of ``ids`` [batch, length], then the logits
    [batch, 1, vocab] of each later token, which goes through ``model`` alone with the cache of all before it. Each
    forward runs when its logits are asked for. A ``mask`` [batch, length] says which tokens are no padding."""
    cache, begin = _empty_cache(model, ids), 0
    for end in range(prompt, ids.shape[1] + 1):
        given = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, begin:end]
            given = {"attention_mask": mask[:, :end], "position_ids": positions}
        outputs = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **given)
        cache, begin = outputs.past_key_values, end
        yield outputs.logits


def _empty_cache(model: Any, ids: torch.Tensor) -> Any:
    """A cache with room for all of ``ids`` [batch, length]: some versions make one that the first input fills."""
    import transformers

    upstream: Any = transformers
    if getattr(model.config, "cache_implementation", None) == "hybrid":  # Gemma 2 and 3 up to 4.52 work with no other
        return upstream.HybridCache(model.config, *ids.shape, device=ids.device, dtype=model.dtype)
    knows_layers = "config" in inspect.signature(upstream.DynamicCache.__init__).parameters
    return upstream.DynamicCache(config=model.config) if knows_layers else upstream.DynamicCache()


class HeadObserver:
    """Records the gradients that arrive at the logits and at the hidden states entering the head in one backward."""

    def __init__(self, batch: Batch, result: Trajectory, at: Moment, lifetimes: Lifetimes) -> None:
        self.batch, self.result, self.at, self.lifetimes = batch, result, at, lifetimes
        self.chunks: dict[int, torch.Tensor] = {}

    def observe_outputs(self, logits: torch.Tensor) -> None:
        """Observe what arrives at the head's output, or where the caller's own loss reads ``outputs.logits``."""
        if self.at.phase == INITIAL and logits.requires_grad:
            self.lifetimes.watch("the logits", logits)
            logits.register_hook(self.logits_grad)

    def pre_hook(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.lifetimes.watch("what entered the head", args[0])
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self.result.record(HIDDEN, self.at, grad))

    def chunk(self, start: int, grad: torch.Tensor) -> None:
        self.chunks[start] = self.chunks[start] + grad if start in self.chunks else grad

    def logits_grad(self, grad: torch.Tensor) -> None:
        """Record ``grad`` [..., vocab] of [batch, length] rows; the last position may be missing (the loss cuts it)."""
        rows = grad.flatten(0, -2)
        batch, length = self.batch.labels.shape
        full = rows.unflatten(0, (batch, len(rows) // batch))
        if full.shape[1] < length:
            full = torch.nn.functional.pad(full, (0, 0, 0, length - full.shape[1]))
        self.result.record(LOGITS, self.at, full)
        if is_large(full):
            self.result.record(BY_ELEMENT, self.at, sample(full))
        targets = self.batch.labels[:, 1:]
        at_target = full[:, :-1].gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        self.result.record(TARGET_LOGIT, self.at, at_target[targets != IGNORE])

    def finish(self) -> None:
        if self.chunks:
            self.logits_grad(torch.cat([self.chunks[start] for start in sorted(self.chunks)]))


@contextlib.contextmanager
def observed_head(
    model: Any, batch: Batch, result: Trajectory, at: Moment, step: Step, lifetimes: Lifetimes
) -> Iterator[HeadObserver]:
    """Inside, one forward and backward are observed at the head; only in the initial phase.

    A fused head never has logits, and a forward hook on it would make it compute them: there the op hands out each
    chunk's gradient. Everywhere else a tensor hook clones what autograd delivers. Where the caller reads the logits, a
    fused head computes them a second time or instead, so the raw output of the head is not one thing to observe there.
    """
    observer = HeadObserver(batch, result, at, lifetimes)
    if at.phase != INITIAL:
        yield observer
        return
    head = model.get_output_embeddings()
    with contextlib.ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(observer.pre_hook).remove)
        if not (step.reads_logits or step.label_smoothing is not None):
            if ours.fuses_head(model):
                stack.enter_context(ours.observe_logits_grad(observer.chunk))
            else:
                hook = head.register_forward_hook(lambda module, args, logits: observer.observe_outputs(logits))
                stack.callback(hook.remove)
        yield observer
        observer.finish()
