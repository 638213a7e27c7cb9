"""One arm's training: a :class:`Run` says what is trained and how, its :class:`Trajectory` is everything observed.

Every arm of a case goes through the same three phases from the same initial weights:

1. *initial*: every step of the profile, one after the other, at the initial weights. This is where power comes from: no
   noise has accumulated. Each step's weights differ from the initial ones by one unit in the last place, the same in
   every arm: rounding errors that hang on the weights would otherwise be the same in every step and not average out.
   Then decoding with a cache.
2. *SGD* over the steps that train, then evaluation and generation. SGD decides, because it shows a gradient's scale.
3. *AdamW* over the same steps, because users run it; it hides the scale of a gradient.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from convergence.data import IGNORE, Batch, Step

# Small enough that the loss falls: a step that overshoots turns rounding noise into chaos, which hides faults.
SGD_LEARNING_RATE = 0.02
ADAMW_LEARNING_RATE = 2e-3
# With the usual 1e-8, AdamW's first step is the sign of the gradient, and where that is rounding noise an honest
# candidate takes a full step the other way (measured: errors 50 times PyTorch's own). Gradients are near 1e-2 here.
ADAMW_EPS = 1e-3
DECODING = "decoding"
PROMPT_TOKENS = 7
GENERATED_TOKENS = 4
INITIAL, SGD, ADAMW = "initial", "SGD", "AdamW"
TARGET_LOGIT = "gradient of the logits, at the target"
LOGITS = "gradient of the logits"
HIDDEN = "gradient of the hidden states entering the head"
TRAINING_LOGITS = "logits that the caller reads in training"


class InFloat64(TorchFunctionMode):
    """Turns every explicit float32 into float64: upstream's norms, rotary angles, softmax and loss ask for float32 by
    name, and a truth that is rounded there is as noisy as the float32 baseline that it judges."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.multinomial:  # a GPU draws other random numbers in float64: the truth samples what others do
            return func(args[0].to(torch.float32), *args[1:], **(kwargs or {}))

        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})

    def _backward(
        self, loss: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        """What a backward pass computes again (checkpointing) is widened, too. A mode is off inside of its own handler,
        and in ``torch.autograd.backward``, which asks for a handler as well: so this is what that function calls."""
        gradients = (torch.ones_like(loss) if gradient is None else gradient,)
        wanted = () if inputs is None else tuple(inputs)
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            graph._engine_run_backward(
                (loss,), gradients, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True
            )


@dataclass
class Run:
    """What one arm trains.

    Args:
        template: the unpatched float32 model on the CPU; it is copied, never touched.
        steps: the steps of the profile.
        evaluation: the batch that is evaluated after SGD.
        dtype: of the parameters. float64 is the truth. Buffers stay float32 as ``from_pretrained`` leaves them.
        device: where it trains.
        patch: applied before anything runs; None for truth and baseline.
        construct: None for a patch of one model, which is called with the arm's copy of the template. Otherwise the
            patch is one of classes: it is called with a copy that is thrown away, and the arm is what ``construct()``
            returns afterwards, with the template's weights.
        rounded_to: the dtype whose initial weights the truth shares (default: ``dtype``).
        nudge: when given, the seed of a perturbation of every initial weight by one unit in the last place.
        only: when given, the names of the steps that are run, at the initial weights, and nothing after them.
    """

    template: nn.Module
    steps: list[Step]
    evaluation: Batch
    dtype: torch.dtype
    device: torch.device
    patch: Callable[[nn.Module], Any] | None = None
    construct: Callable[[], nn.Module] | None = None
    rounded_to: torch.dtype | None = None
    nudge: int | None = None
    only: frozenset[str] | None = None


class CannotApply(RuntimeError):
    """The patch itself raised, before anything was trained; the cause is what it raised."""


@dataclass
class Trajectory:
    """What one arm showed.

    Attributes:
        values: ``values[quantity][step]`` is a tensor in the dtype it arrived in; once trained, on the CPU.
        generated: the greedily generated tokens [batch, tokens], and ``scores`` [tokens, batch, vocab] they came from.
        complaints: what went wrong while it ran, in words.
        notes: what the caller was not given, in words.
        model: the trained model.
    """

    values: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    generated: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    model: Any = None

    def record(self, quantity: str, step: str, value: torch.Tensor) -> None:
        self.values.setdefault(quantity, {})[step] = value.detach().clone()

    def to_cpu(self) -> None:
        """Move all values in one copy per dtype: each copy waits for the GPU, which several processes may share."""
        places: dict[tuple[torch.dtype, torch.device], list[tuple[str, str]]] = {}
        for quantity, by_step in self.values.items():
            for step, value in by_step.items():
                if value.device.type != "cpu":
                    places.setdefault((value.dtype, value.device), []).append((quantity, step))
        for where in places.values():
            values = [self.values[quantity][step] for quantity, step in where]
            moved = torch.cat([value.flatten() for value in values]).cpu().split([value.numel() for value in values])
            for (quantity, step), value, flat in zip(where, values, moved, strict=True):
                self.values[quantity][step] = flat.view(value.shape)


def nudged(weight: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """``weight`` with every element moved by about one unit in the last place of ``dtype``, up or down."""
    sign = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
    return (weight.double() * (1 + sign * torch.finfo(dtype).eps)).to(dtype)


def build(run: Run) -> Any:
    """The arm's model with its initial weights, on its device, in its dtype: a copy of the template, unpatched, or what
    was constructed anew after a patch of classes.

    Raises:
        CannotApply: the patch of classes raised.
    """
    model: Any = copy.deepcopy(run.template)
    if run.patch is not None and run.construct is not None:
        apply(run.patch, model)
        model = run.construct()
        model.load_state_dict(run.template.state_dict())
    rounded = run.rounded_to or run.dtype
    generator = torch.Generator().manual_seed(run.nudge or 0)
    for parameter in model.parameters():
        weight = parameter.data.to(rounded)
        if run.nudge is not None:
            weight = nudged(weight, rounded, generator)
        parameter.data = weight.to(run.dtype)
    return model.to(run.device)


def apply(patch: Callable[[nn.Module], Any], model: Any) -> None:
    try:
        patch(model)
    except Exception as error:
        raise CannotApply(f"{type(error).__name__}: {error}") from error


def train(run: Run, model: Any = None) -> Trajectory:
    """Train one arm through all phases: a new one, or ``model``, which was built (and patched) before.

    Raises:
        CannotApply: the patch raised. Whatever is raised after that comes as it is.
    """
    result = Trajectory()
    mode = InFloat64() if run.dtype is torch.float64 else contextlib.nullcontext()
    with transformers_warnings(result.warnings), mode:
        result.model = model = build(run) if model is None else model
        if run.patch is not None and run.construct is None:
            apply(run.patch, model)
        _train(run, model, result)
        result.to_cpu()
    return result


def _train(run: Run, model: Any, result: Trajectory) -> None:
    initial = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    steps = [moved(step, run.device) for step in run.steps]
    rounded = run.rounded_to or run.dtype

    # Two steps computed alike, bit for bit, would be one sample of noise that counts twice. So no two of them start
    # from the same weights: each from its own, one unit in the last place away.
    def near_initial(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: nudged(weight, rounded, generator) for name, weight in initial.items()}

    for seed, step in enumerate(steps):
        if run.only is not None and step.name not in run.only:
            continue
        _set_weights(model, near_initial(seed))
        _accumulate(model, step, result, INITIAL)
    if run.only is None or DECODING in run.only:
        _set_weights(model, initial)
        _decode(model, run.evaluation, result, run.device)
    if run.only is not None:
        return

    optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        SGD: lambda: torch.optim.SGD(model.parameters(), lr=SGD_LEARNING_RATE),
        ADAMW: lambda: torch.optim.AdamW(model.parameters(), lr=ADAMW_LEARNING_RATE, eps=ADAMW_EPS),
    }
    for seed, (phase, make) in enumerate(optimizers.items(), start=len(steps)):
        start = near_initial(seed)
        _set_weights(model, start)
        optimizer = make()
        for step in steps:
            if step.trains:
                _accumulate(model, step, result, phase)
                optimizer.step()
        for name, parameter in model.named_parameters():
            result.record(f"parameter {name}", f"{phase}: end", parameter)
            result.record(f"displacement of {name}", f"{phase}: end", parameter.detach() - start[name].to(run.device))
        if phase == SGD:
            _evaluate(model, run.evaluation, result, run.device)


def _set_weights(model: Any, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _accumulate(model: Any, step: Step, result: Trajectory, phase: str) -> None:
    """Forward and backward of every micro batch of ``step``; record losses, gradients and, at first, the head's."""
    model.zero_grad(set_to_none=True)
    targets = sum(int((batch.labels[:, 1:] != IGNORE).sum()) for batch in step.batches)
    with _frozen(model, step.frozen):
        for i, batch in enumerate(step.batches):
            label = f"{phase}: {step.name}" + (f", batch {i + 1}" if len(step.batches) > 1 else "")
            with (
                contextlib.nullcontext() if step.whole else _chunked_head(model, batch),
                _observed_head(model, batch, result, label if phase == INITIAL else None, step) as head,
                # Whoever hooks a module may be answered by other code. The optimizers' phases take these steps without.
                _kept_activations(model, result, label if phase == INITIAL and step.trains else None),
            ):
                kwargs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
                if batch.position_ids is not None:
                    kwargs["position_ids"] = batch.position_ids
                if batch.attention_mask is not None:
                    kwargs["attention_mask"] = batch.attention_mask
                logits: Any = None
                before: torch.Tensor | None = None
                if step.label_smoothing is not None:
                    logits = model(**kwargs).logits
                    head.observe_outputs(logits)
                    loss = F.cross_entropy(
                        logits[:, :-1].float().flatten(0, 1),
                        batch.labels[:, 1:].flatten(),
                        ignore_index=IGNORE,
                        label_smoothing=step.label_smoothing,
                    )
                else:
                    if step.num_items:
                        kwargs["num_items_in_batch"] = targets
                    outputs = model(**kwargs, labels=batch.labels)
                    loss = outputs.loss if step.num_items else outputs.loss / len(step.batches)
                    if step.reads_logits:
                        logits = outputs.logits
                        if logits is None:
                            result.notes.append(f"{label}: the caller reads outputs.logits and finds None")
                if logits is not None:
                    before = logits.detach().clone()
                    result.record(TRAINING_LOGITS, label, logits)
                (loss * step.scale).backward()
                if before is not None and bool(_differ(logits.detach(), before)):
                    result.complaints.append(f"{label}: the logits that the caller holds changed during backward")
            result.record("loss", label, loss)
        norms = []
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                result.record(f"gradient of {name}", f"{phase}: {step.name}", parameter.grad)
                norms.append(parameter.grad.double().norm())
        if norms:
            result.record("gradient norm", f"{phase}: {step.name}", torch.stack(norms).norm())


def _decode(model: Any, batch: Batch, result: Trajectory, device: torch.device) -> None:
    """One token at a time, with a cache: the text's own tokens, which are the same in every arm."""
    ids = batch.input_ids.to(device)
    model.eval()
    with torch.no_grad():
        outputs = model(input_ids=ids[:, :PROMPT_TOKENS], past_key_values=_empty_cache(model, ids), use_cache=True)
        logits = []
        for token in ids[:, PROMPT_TOKENS : PROMPT_TOKENS + GENERATED_TOKENS].split(1, dim=1):
            outputs = model(input_ids=token, past_key_values=outputs.past_key_values, use_cache=True)
            logits.append(outputs.logits)
    model.train()
    result.record("logits", f"{INITIAL}: {DECODING}", torch.cat(logits, 1))


def _evaluate(model: Any, batch: Batch, result: Trajectory, device: torch.device) -> None:
    ids, labels = batch.input_ids.to(device), batch.labels.to(device)
    with torch.no_grad(), _chunked_head(model, batch):
        outputs = model(input_ids=ids, labels=labels, use_cache=False)
        result.record("loss", f"{SGD}: without gradients", outputs.loss)
    model.eval()
    with torch.no_grad():
        with _chunked_head(model, batch):
            outputs = model(input_ids=ids, labels=labels, use_cache=False)
        result.record("loss", f"{SGD}: evaluation", outputs.loss)
        result.record("logits", f"{SGD}: evaluation", outputs.logits)
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


def _empty_cache(model: Any, ids: torch.Tensor) -> Any:
    """A cache with room for all of ``ids`` [batch, length]: some versions make one that the first input fills."""
    import transformers

    upstream: Any = transformers
    if getattr(model.config, "cache_implementation", None) == "hybrid":  # Gemma 2 and 3 up to 4.52 work with no other
        return upstream.HybridCache(model.config, *ids.shape, device=ids.device, dtype=model.dtype)
    knows_layers = "config" in inspect.signature(upstream.DynamicCache.__init__).parameters
    return upstream.DynamicCache(config=model.config) if knows_layers else upstream.DynamicCache()


def moved(step: Step, device: torch.device) -> Step:
    step = copy.copy(step)
    step.batches = [
        Batch(*(None if t is None else t.to(device) for t in (b.input_ids, b.labels, b.position_ids, b.attention_mask)))  # type: ignore[arg-type]
        for b in step.batches
    ]
    return step


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


def status(model: Any) -> Any:
    """Our own patch's report on ``model``; None where the model is not patched by us."""
    import liger_kernels

    return liger_kernels.status(model)


def fuses_head(model: Any) -> bool:
    report = status(model)
    return report is not None and report.fuses_head


@contextlib.contextmanager
def _chunked_head(model: Any, batch: Batch) -> Iterator[None]:
    """Inside, our fused head works through ``batch`` in several chunks with a partial last one, as on real batches: 63
    rows are 4 * 13 + 11. With the schedule that slices the vocabulary, it takes several slabs."""
    if not fuses_head(model):
        yield
        return
    from liger_kernels.ops.linear_cross_entropy import linear_cross_entropy_chunk_size, linear_cross_entropy_slab_size

    slab = model.get_output_embeddings().weight.shape[0] // 5 + 1
    with linear_cross_entropy_chunk_size(batch.labels.numel() // 5 + 1), linear_cross_entropy_slab_size(slab):
        yield


class _HeadObserver:
    """Records the gradients that arrive at the logits and at the hidden states entering the head in one backward."""

    def __init__(self, batch: Batch, result: Trajectory, label: str | None) -> None:
        self.batch, self.result, self.label = batch, result, label
        self.chunks: list[tuple[int, torch.Tensor]] = []

    def observe_outputs(self, logits: torch.Tensor) -> None:
        """The caller's own loss reads ``outputs.logits``: observe what arrives there."""
        if self.label is not None and logits.requires_grad:
            logits.register_hook(self.logits_grad)

    def pre_hook(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self.result.record(HIDDEN, str(self.label), grad))

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.logits_grad)

    def chunk(self, start: int, grad: torch.Tensor) -> None:
        self.chunks.append((start, grad))

    def logits_grad(self, grad: torch.Tensor) -> None:
        """Record ``grad`` [..., vocab] of [batch, length] rows; the last position may be missing (the loss cuts it)."""
        rows = grad.flatten(0, -2)
        batch, length = self.batch.labels.shape
        kept = len(rows) // batch
        full = rows.new_zeros(batch, length, rows.shape[-1])
        full[:, :kept] = rows.unflatten(0, (batch, kept))
        self.result.record(LOGITS, str(self.label), full)
        targets = self.batch.labels[:, 1:]
        at_target = full[:, :-1].gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        self.result.record(TARGET_LOGIT, str(self.label), at_target[targets != IGNORE])

    def finish(self) -> None:
        if self.chunks:
            self.logits_grad(torch.cat([grad for _, grad in sorted(self.chunks, key=lambda chunk: chunk[0])]))


@contextlib.contextmanager
def _observed_head(
    model: Any, batch: Batch, result: Trajectory, label: str | None, step: Step
) -> Iterator[_HeadObserver]:
    """Inside, one forward and backward are observed at the head (not at all where ``label`` is None).

    A fused head never has logits, and a forward hook on it would make it compute them: there the op hands out each
    chunk's gradient. Everywhere else a tensor hook clones what autograd delivers. Where the caller reads the logits, a
    fused head computes them a second time or instead, so the raw output of the head is not one thing to observe there.
    """
    observer = _HeadObserver(batch, result, label)
    if label is None:
        yield observer
        return
    head = model.get_output_embeddings()
    with contextlib.ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(observer.pre_hook).remove)
        if not (step.reads_logits or step.label_smoothing is not None):
            if fuses_head(model):
                from liger_kernels.ops import observe_logits_grad

                stack.enter_context(observe_logits_grad(observer.chunk))
            else:
                stack.callback(head.register_forward_hook(observer.hook).remove)
        yield observer
        observer.finish()


@contextlib.contextmanager
def _kept_activations(model: Any, result: Trajectory, label: str | None) -> Iterator[None]:
    """Inside, what every innermost module but the head returns must stay as it was (not watched where ``label`` is
    None). Autograd's own check does not see a kernel that writes: it bumps no version."""
    if label is None:
        yield
        return
    head = set(model.get_output_embeddings().modules())
    kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def hook(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                kept.append((path, output.detach(), output.detach().clone()))

        return keep

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if not module._modules and module not in head:
                stack.callback(module.register_forward_hook(hook(path)).remove)
        yield
    changed = torch.stack([_differ(now, before) for _, now, before in kept]).tolist() if kept else []
    for path in dict.fromkeys(path for (path, *_), differs in zip(kept, changed, strict=True) if differs):
        result.complaints.append(f"{label}: the output of {path} changed after it had been returned")


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether both hold other bits anywhere, a NaN's included: a tensor, so that nobody waits for it here."""
    return (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).any()


@contextlib.contextmanager
def transformers_warnings(found: list[str]) -> Iterator[None]:
    """Collects what transformers warns of: in many broken set-ups it warns and goes on."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    # What is warned of once in a process is warned of once in every arm: arms of other processes are compared with it.
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.removeHandler(handler)
