"""The model around a patched head: when its loss is fused, and what leaves its forward."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from liger_kernels.ops import CountedTargets
from liger_kernels.ops.runtime.compiling import is_exporting
from liger_kernels.patching.blocks import hold_as
from liger_kernels.patching.following import mode_check
from liger_kernels.patching.logits.deferred import DeferredLogits
from liger_kernels.patching.logits.gathered import gathered_from, gathers_from
from liger_kernels.patching.logits.head import HeadRecipe, is_plain_linear, patched_heads
from liger_kernels.patching.logits.lazy import LazyTensor, lazy_output
from liger_kernels.patching.logits.packing import captured, plain_count
from liger_kernels.patching.logits.product import count
from liger_kernels.patching.logits.running import Forward, running
from liger_kernels.patching.offload import INPUTS, LayerInputs
from liger_kernels.patching.rehearsal import rehearse
from liger_kernels.patching.report import REPORT
from liger_kernels.patching.swap import Recipe, recipe_of
from liger_kernels.patching.swap import replace as replace_class

IGNORE = -100  # upstream's own, which its loss function does not ask the model for


@dataclass(frozen=True)
class ModelRecipe(Recipe):
    """A model whose head defers its logits while the model's own forward runs with labels.

    Its forward understands what trl passes to a model that it knows to be patched: ``return_token_accuracy`` (then the
    output has ``token_accuracy``, from the pass of the loss), ``skip_logits`` (logits are computed only when they are
    read, as always) and ``use_token_scaling`` (only False). Upstream's forward never sees them.

    With a ``loss_reduction`` other than "token" the rows of the loss are weighted, in evaluation too, and whatever
    would leave them unweighted raises.
    """

    live = None
    loss_reduction: str = "token"
    gives_way: ClassVar[bool] = False

    def namespace(self, base: Any) -> dict[str, Any]:
        plain = _plain(base)
        found = {"forward": plain} if self.loss_reduction == "token" else _weighted(base, plain, self.loss_reduction)
        return {**found, "set_output_embeddings": _set_output_embeddings(base)}


def _position_of_labels(forward: Callable[..., Any]) -> int | None:
    """Among the arguments without self."""
    names = list(inspect.signature(forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None


def _plain(base: Any) -> Callable[..., Any]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    def upstream(self: Any, *args: Any, **kwargs: Any) -> Any:  # looked up late: another patch may replace it
        return base.forward(self, *args, **kwargs)

    def offloading(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs: LayerInputs = self.__dict__.setdefault(INPUTS, LayerInputs())
        with inputs.offloaded(self._liger_kernels.fallbacks):
            return upstream(self, *args, **kwargs)

    wants_upstream = mode_check()
    released = torch.compiler.disable(_released)  # a compiled forward ends where its output changes class
    original = base.forward
    known_position = _position_of_labels(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        skip_logits = kwargs.pop("skip_logits", False)
        accuracy = kwargs.pop("return_token_accuracy", False)
        if kwargs.pop("use_token_scaling", False):
            raise NotImplementedError(
                "use_token_scaling=True (trl's loss_type='dft') scales each token's loss by its probability, which "
                "the fused loss does not do: set use_liger_kernel=False and patch the model with "
                "liger_kernels.patch(model), so that trl computes this loss from the logits"
            )
        report = self._liger_kernels
        if not torch.compiler.is_compiling():
            report.forwards += 1
            if report.forwards == 1 and not wants_upstream():  # which launches nothing
                ids = args[0] if args else kwargs.get("input_ids")
                rehearse(self, kwargs.get("inputs_embeds") if ids is None else ids)
        elif is_exporting():  # a program for others to run
            return upstream(self, *args, **kwargs)
        labels = kwargs.get("labels")
        position = known_position if base.forward is original else _position_of_labels(base.forward)
        if labels is None and position is not None and len(args) > position:
            labels = args[position]
        run = upstream
        if report.offload is not None and self.training and torch.is_grad_enabled() and not wants_upstream():
            run = upstream if torch.compiler.is_compiling() else offloading
        before = running.forward
        state = None
        if labels is not None and not wants_upstream():
            # In evaluation, whoever reads the logits wants them; it is no fallback.
            fallbacks = report.fallbacks if self.training or skip_logits else Counter()
            if self.loss_function is not ForCausalLMLoss:  # a user's own, or one of another kind: it gets real logits
                name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
                count(fallbacks, f"the loss function is {name}, not ForCausalLMLoss")
            else:
                outer = self.get_output_embeddings()
                heads = patched_heads(outer)
                if heads:
                    packing = before.packing if before is not None else None
                    extras = ("token_accuracy",) if accuracy else ()
                    state = Forward(heads, outer, fallbacks, extras, packing, _counted(labels, kwargs))
                else:
                    count(fallbacks, "the head was replaced after patch(): call patch(model) again")
        elif labels is None and before is not None and _shares_a_head(self, before):
            state = before  # a causal LM inside of another one, which computes the loss of its logits
        elif labels is None and before is None and gathers_from(self) and not wants_upstream():
            outer = self.get_output_embeddings()
            state = Forward(patched_heads(outer), outer, report.fallbacks, gathers=True)
        if state is None and before is None:
            output = run(self, *args, **kwargs)
        else:
            running.forward = state
            try:
                output = run(self, *args, **kwargs)
            finally:
                running.forward = before
        # Not inside the try, where no graph can end: Dynamo would then compile nothing of this function itself.
        if (labels is None and not (state is not None and state.gathers)) or (state is None and not accuracy):
            return output
        return released(output, labels, kwargs.get("shift_labels")) if accuracy else released(output)

    return forward


def _counted(labels: Any, kwargs: dict[str, Any]) -> CountedTargets | None:
    """How many of the targets count that upstream's loss makes of ``labels``, or takes from ``shift_labels``."""
    targets = labels if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
    seen = isinstance(targets, torch.Tensor) and not torch.compiler.is_compiling()
    return CountedTargets(targets, IGNORE) if seen else None


def _shares_a_head(model: Any, forward: Forward) -> bool:
    """Whether ``model`` runs as a part of the model whose ``forward`` is running."""
    return any(mine is head for mine in patched_heads(model.get_output_embeddings()) for head in forward.heads)


def _weighted(base: Any, plain: Callable[..., Any], mode: str) -> dict[str, Any]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    wants_upstream = mode_check()
    names = list(inspect.signature(base.forward).parameters)[1:]  # without self

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments.get("labels") is None:
            return plain(self, *args, **kwargs)
        if wants_upstream() or (torch.compiler.is_compiling() and is_exporting()):
            raise RuntimeError(
                f"loss_reduction={mode!r}: torch.jit.trace, torch.export and transforms of torch.func get upstream's "
                "loss, which weighs no rows: unpatch the model, or patch it with loss_reduction='token'"
            )
        if self.loss_function is not ForCausalLMLoss:
            name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
            raise ValueError(
                f"the loss function is {name}; loss_reduction={mode!r} weighs the rows of transformers' "
                "ForCausalLMLoss only: unpatch the model, or patch it with loss_reduction='token'"
            )
        if "num_items_in_batch" in kwargs:
            kwargs["num_items_in_batch"] = plain_count(kwargs["num_items_in_batch"], mode)
        packing = captured(arguments, mode)
        before = running.forward
        running.forward = Forward([], self, Counter(), packing=packing)
        try:
            output = plain(self, *args, **kwargs)
        finally:
            running.forward = before
        if not packing.applied:
            raise RuntimeError(
                f"loss_reduction={mode!r}: this forward's loss was computed from logits that had been computed "
                "before, where its rows cannot be weighted; real logits have been computed because of "
                f"{dict(self._liger_kernels.fallbacks)}"
            )
        running.weighted = True
        return output

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """``base.__call__``, and the check that it came by the forward above where it computed a loss."""
        if kwargs.get("labels") is None:
            return base.__call__(self, *args, **kwargs)
        before, running.weighted = running.weighted, False
        try:
            output = base.__call__(self, *args, **kwargs)
            weighted = running.weighted
        finally:
            running.weighted = before
        if not weighted:
            raise RuntimeError(
                f"loss_reduction={mode!r}: the model's forward was replaced on the instance after it was patched "
                "(as trl's SFTTrainer does), and the loss was not computed by the model's own. With a trainer, use "
                "`class PackedTrainer(liger_kernels.PackingLossMixin, SFTTrainer)`, and SFTConfig(loss_type='nll') "
                "where trl's default is another"
            )
        return output

    return {"forward": forward, "__call__": call}


def _set_output_embeddings(base: Any) -> Callable[..., Any]:
    def set_output_embeddings(self: Any, new_embeddings: Any) -> Any:
        """Upstream's own (``resize_token_embeddings`` calls it). The new head computes the loss as the old one did."""
        before = patched_heads(self.get_output_embeddings())
        result = base.set_output_embeddings(self, new_embeddings)
        head = self.get_output_embeddings()
        if before and isinstance(head, nn.Module) and recipe_of(head) is None:
            recipe = recipe_of(before[0])
            if isinstance(recipe, HeadRecipe) and (is_plain_linear(head) or not recipe.fused):
                replace_class("", head, recipe, self.__dict__[REPORT], [])
                hold_as(before[0], head)
        return result

    return set_output_embeddings


def _released(output: Any, labels: torch.Tensor | None = None, shift_labels: torch.Tensor | None = None) -> Any:
    """What leaves the forward: an output whose logits are computed when they are read; of any other kind, real ones.

    With ``labels`` it has the token accuracy, too; a tuple has it at the end.
    """
    if isinstance(output, OrderedDict) and is_dataclass(output):
        lazy = {}
        accuracy = None if labels is None else _token_accuracy(output.values(), output["logits"], labels, shift_labels)
        for name, value in list(output.items()):
            if isinstance(value, DeferredLogits):
                output[name] = gathered_from(value) if value.gathers else value.released()
                if output.get("loss") is not None:
                    output["loss"] = value.linked(output["loss"], output[name])
                if isinstance(output[name], LazyTensor):
                    lazy[name] = output[name]
            else:
                _resolved(value)
        if lazy or accuracy is not None:
            output.__class__ = lazy_output(type(output), tuple(lazy), accuracy is not None)
        if accuracy is not None:
            output["token_accuracy"] = accuracy
        return output
    real = _resolved(output)
    if type(output) is tuple:  # the loss is first, as upstream has it
        for value, logits in zip(output, real, strict=True):
            if isinstance(value, DeferredLogits):
                real = (value.linked(real[0], logits), *real[1:])
    if isinstance(output, tuple) and labels is not None:
        return (*real, _token_accuracy(output, output[1], labels, shift_labels))
    return real


def _resolved(value: Any) -> Any:
    """``value`` with computed logits in place of deferred ones, in whatever containers an own forward put them."""
    if isinstance(value, DeferredLogits):
        return value.materialize("the forward returns them in something else than a ModelOutput")
    if isinstance(value, dict):
        for key, item in value.items():
            if (resolved := _resolved(item)) is not item:
                value[key] = resolved
    elif isinstance(value, list):
        value[:] = map(_resolved, value)
    elif isinstance(value, tuple):
        items = [_resolved(item) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type):
        changes = {k: new for k, old in vars(value).items() if (new := _resolved(old)) is not old}
        return replace(value, **changes) if changes else value
    return value


def _token_accuracy(
    values: Iterable[Any], logits: Any, labels: torch.Tensor, shift_labels: torch.Tensor | None
) -> torch.Tensor:
    """The share of targets that have the largest logit: from the pass of the loss, else from the logits themselves."""
    for value in values:
        if isinstance(value, DeferredLogits) and value.token_accuracy is not None:
            return value.token_accuracy
    with torch.no_grad():
        targets = F.pad(labels, (0, 1), value=IGNORE)[..., 1:] if shift_labels is None else shift_labels
        targets = targets.to(logits.device)
        counted = targets != IGNORE
        return ((logits.argmax(-1) == targets) & counted).sum() / counted.sum().clamp(min=1)
