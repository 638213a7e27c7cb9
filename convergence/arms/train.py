"""One arm's training: from a :class:`Run` to its :class:`Trajectory`.

Every arm of a case goes through the same three phases from the same initial weights:

1. *initial*: every step of the profile, one after the other, at the initial weights. This is where power comes from: no
   noise has accumulated. Each step's weights differ from the initial ones by one unit in the last place, the same in
   every arm: rounding errors that hang on the weights would otherwise be the same in every step and not average out.
   After each step that trains later, an evaluation at its weights. Then decoding with a cache.
2. *SGD* over the steps that train, then evaluation and generation. SGD decides, because it shows a gradient's scale.
3. *AdamW* over the same steps, because users run it; it hides the scale of a gradient.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from convergence import ours
from convergence.arms.hooks import differ, kept_activations, observed_arm, observed_head, observed_hidden_states
from convergence.arms.large import is_large, nudged
from convergence.arms.lifetimes import Lifetimes
from convergence.arms.quantities import (
    ADAMW,
    DECODING,
    EVALUATION,
    EVALUATION_LOGITS,
    INITIAL,
    LOSS,
    SGD,
    TRAINING_LOGITS,
    WITHOUT_GRADIENTS,
    Moment,
    Remark,
)
from convergence.arms.trajectory import Run, Trajectory, apply, build
from convergence.judge import long_run
from convergence.models.data import Batch, Step
from convergence.report import progress

# Small enough that the loss falls: a step that overshoots turns rounding noise into chaos, which hides faults.
SGD_LEARNING_RATE = 0.02
ADAMW_LEARNING_RATE = 2e-3
# With the usual 1e-8, AdamW's first step is the sign of the gradient, and where that is rounding noise an honest
# candidate takes a full step the other way (measured: errors 50 times PyTorch's own). Gradients are near 1e-2 here.
ADAMW_EPS = 1e-3
Weights = Iterable[tuple[str, torch.Tensor]]  # by name, in the model's order

PROMPT_TOKENS = 7
GENERATED_TOKENS = 4


def train(run: Run, model: Any = None) -> Trajectory:
    """Train one arm through all phases: a new one, or ``model``, which was built (and patched) before.

    Raises:
        CannotApply: the patch raised. Whatever is raised after that comes as it is.
    """
    return observed(run, _train, model)


def observed(run: Run, observe: Callable[[Run, Any, Trajectory], None], model: Any = None) -> Trajectory:
    """What ``observe(run, model, trajectory)`` records of one arm; ``model`` and errors as for :func:`train`."""
    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with observed_arm(run) as result:
        result.model = model = build(run) if model is None else model
        if run.patch is not None and run.construct is None:
            apply(run.patch, model)
        observe(run, model, result)
    steps = len(result.values.get(LOSS, ()))
    result.costs["step, ms"] = 1e3 * (time.perf_counter() - began) / max(1, steps)
    if on_gpu:
        result.costs["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def _train(run: Run, model: Any, result: Trajectory) -> None:
    rounded = run.rounded_to or run.dtype
    steps = [step.to(run.device) for step in run.steps]
    # Nothing is lost: they were rounded so when the model was built. Who takes but one step needs no copy of them.
    again = bool(run.phases) or len(steps) > 1
    initial = {
        name: p.detach().to(rounded, copy=True).cpu() if again else p.detach() for name, p in model.named_parameters()
    }

    # Two steps computed alike, bit for bit, would be one sample of noise that counts twice. So no two of them start
    # from the same weights: each from its own, one unit in the last place away.
    def near_initial(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in initial.items():
            weight = weight.to(run.device if is_large(weight) else "cpu", rounded)
            yield name, nudged(weight, rounded, generator)

    ended, parts = 0, len(steps) + len(run.phases) * sum(step.trains for step in steps)

    def accumulate(step: Step, phase: str) -> None:
        nonlocal ended
        _accumulate(model, step, result, phase)
        ended += 1
        progress.reach(f"{phase}, {step.name}", ended, parts)

    def asked(name: str) -> bool:
        return run.only is None or name in run.only

    evaluations = 0
    for seed, step in enumerate(steps):
        evaluates = bool(run.phases) and step.trains and asked(EVALUATION)
        if not (asked(step.name) or evaluates):
            continue
        _set_weights(model, near_initial(seed))
        if asked(step.name):
            accumulate(step, INITIAL)
        if evaluates:
            evaluations += 1
            _evaluate(model, run.evaluation, result, Moment(INITIAL, EVALUATION, evaluations), run.device)
    if run.phases and asked(DECODING):
        _set_weights(model, initial.items())
        _decode(model, run.evaluation, result, run.device)
    if run.only is not None:
        return

    optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        SGD: lambda: torch.optim.SGD(model.parameters(), lr=SGD_LEARNING_RATE),
        ADAMW: lambda: torch.optim.AdamW(model.parameters(), lr=ADAMW_LEARNING_RATE, eps=ADAMW_EPS),
    }
    for seed, phase in enumerate(run.phases, start=len(steps)):
        _set_weights(model, near_initial(seed))
        optimizer = optimizers[phase]()
        for step in steps:
            if step.trains:
                accumulate(step, phase)
                optimizer.step()
        for parameter, start in zip(model.named_parameters(), near_initial(seed), strict=True):
            result.record_end([parameter], dict([start]), phase)
        if phase == SGD:
            _evaluate(model, run.evaluation, result, Moment(SGD, EVALUATION), run.device)
            _generate(model, run.evaluation, result, run.device)
    if run.curve and run.rounded_to is None:
        _set_weights(model, initial.items())
        result.curve = long_run.train(model, run.curve, optimizers[ADAMW](), run.device)


def _set_weights(model: Any, weights: Weights) -> None:
    with torch.no_grad():
        for (_, parameter), (_, weight) in zip(model.named_parameters(), weights, strict=True):
            parameter.copy_(weight)


def _accumulate(model: Any, step: Step, result: Trajectory, phase: str) -> None:
    """Forward and backward of every micro batch of ``step``; record losses, gradients and, at first, the head's."""
    model.zero_grad(set_to_none=True)
    with _frozen(model, step.frozen):
        for i, batch in enumerate(step.batches):
            at = Moment(phase, step.name, i + 1 if len(step.batches) > 1 else None)
            lifetimes = Lifetimes()
            _train_batch(model, step, batch, result, at, lifetimes)
            if not result.alive:  # once is enough, and Python's collector takes its time
                result.alive += [Remark(at, what) for what in lifetimes.left()]
        gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        result.record_gradients(gradients, Moment(phase, step.name))


def _train_batch(model: Any, step: Step, batch: Batch, result: Trajectory, at: Moment, lifetimes: Lifetimes) -> None:
    """Forward and backward of one micro batch. What it makes is gone when this returns, if nobody else holds it."""
    is_initial = at.phase == INITIAL
    with (
        contextlib.nullcontext() if step.whole else ours.head_in_chunks(model, batch.labels.numel()),
        observed_head(model, batch, result, at, step, lifetimes) as head,
        # Whoever hooks a module may be answered by other code. The optimizers' phases take these steps without.
        kept_activations(model, result, at) if is_initial and step.trains else contextlib.nullcontext(),
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
        (loss * step.scale).backward()
        if before is not None and bool(differ(logits.detach(), before)):
            result.complaints.append(Remark(at, "the logits that the caller holds changed during backward"))
    result.record(LOSS, at, loss)


def _decode(model: Any, batch: Batch, result: Trajectory, device: torch.device) -> None:
    """One token at a time, with a cache: the text's own tokens, which are the same in every arm."""
    ids = batch.input_ids.to(device)[:, : PROMPT_TOKENS + GENERATED_TOKENS]
    model.eval()
    with torch.no_grad():
        steps = decoded(model, ids, PROMPT_TOKENS)
        next(steps)
        for number in range(1, GENERATED_TOKENS + 1):
            at = Moment(INITIAL, DECODING, number)
            with observed_hidden_states(model, result, at):
                logits = next(steps)
            result.record(EVALUATION_LOGITS, at, logits)
    model.train()


def _evaluate(model: Any, batch: Batch, result: Trajectory, at: Moment, device: torch.device) -> None:
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


def _generate(model: Any, batch: Batch, result: Trajectory, device: torch.device) -> None:
    ids = batch.input_ids.to(device)
    model.eval()
    with torch.no_grad():
        generated = model.generate(
            input_ids=ids[:, :PROMPT_TOKENS],
            attention_mask=torch.ones_like(ids[:, :PROMPT_TOKENS]),
            max_new_tokens=GENERATED_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    model.train()
    result.generated = generated.sequences[:, PROMPT_TOKENS:].cpu()
    result.scores = torch.stack(generated.scores).double().cpu()


def decoded(model: Any, ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """The logits [batch, prompt, vocab] of the first ``prompt`` tokens of ``ids`` [batch, length], then the logits
    [batch, 1, vocab] of each later token, which goes through ``model`` alone with the cache of all before it. Each
    forward runs when its logits are asked for."""
    outputs = model(input_ids=ids[:, :prompt], past_key_values=_empty_cache(model, ids), use_cache=True)
    yield outputs.logits
    for token in ids[:, prompt:].unsqueeze(-1).unbind(1):
        outputs = model(input_ids=token, past_key_values=outputs.past_key_values, use_cache=True)
        yield outputs.logits


def _empty_cache(model: Any, ids: torch.Tensor) -> Any:
    """A cache with room for all of ``ids`` [batch, length]: some versions make one that the first input fills."""
    import transformers

    upstream: Any = transformers
    if getattr(model.config, "cache_implementation", None) == "hybrid":  # Gemma 2 and 3 up to 4.52 work with no other
        return upstream.HybridCache(model.config, *ids.shape, device=ids.device, dtype=model.dtype)
    knows_layers = "config" in inspect.signature(upstream.DynamicCache.__init__).parameters
    return upstream.DynamicCache(config=model.config) if knows_layers else upstream.DynamicCache()


@contextlib.contextmanager
def _frozen(model: Any, part: str | None) -> Iterator[None]:
    """Inside, the head's parameters ("head") or all others ("body") do not train."""
    if part is None:
        yield
        return
    head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    chosen = [p for p in model.parameters() if (id(p) in head) == (part == "head")]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)
