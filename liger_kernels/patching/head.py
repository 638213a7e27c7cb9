"""The LM head and the model around it: who answers with deferred logits, when, and what leaves the forward."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass, make_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_kernels.patching.deferred import DeferredLogits, Product, Request, count
from liger_kernels.patching.packing import captured, plain_count
from liger_kernels.patching.swap import Recipe, recipe_of

IGNORE = -100  # upstream's own, which its loss function does not ask the model for
# Hooks of these packages gather, shard and move weights around a module's call and pass its output through. They want
# to surround the fused loss. Any other forward hook on a head is somebody's who expects logits.
_INFRASTRUCTURE = ("torch.distributed.", "deepspeed.", "accelerate.")


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """An LM head that, armed, answers with deferred logits.

    With ``fused`` the product itself waits (a plain linear layer); without, the head computes its logits at once and
    only the cross entropy over them is ours (an adapter, a quantised layer, or by the user's choice). ``memory`` is the
    schedule of the fused loss, as in :func:`liger_kernels.ops.linear_cross_entropy`.
    """

    fused: bool
    memory: str | None = None

    @property
    def kernel(self) -> str:
        return "linear_cross_entropy" if self.fused else "cross_entropy"

    @property
    def detail(self) -> str:
        return "loss of hidden states and weight, no logits" if self.fused else "loss of the head's own logits"

    def namespace(self, base: Any) -> dict[str, Any]:
        fused, memory = self.fused, self.memory

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            fallbacks = self._liger_kernels_armed
            if fallbacks is None or self._liger_kernels_request is not None or len(args) != 1 or kwargs:
                return base.__call__(self, *args, **kwargs)
            hidden = args[0]
            obstacle = _obstacle(self) if fused else None
            if fused and obstacle is None:
                extras = self._liger_kernels_extras
                product = Product(hidden, self, self.out_features, fallbacks, extras=extras, memory=memory)
                dtype = product.autocast if product.autocast is not None else hidden.dtype
            else:
                logits = base.__call__(self, hidden)
                if obstacle is not None:
                    count(fallbacks, obstacle)
                product = Product(hidden, self, logits.shape[-1], fallbacks, logits, self._liger_kernels_extras)
                dtype = logits.dtype
            product.packing = self._liger_kernels_packing
            return DeferredLogits(product, (*hidden.shape[:-1], product.features), dtype)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            request: Request | None = self._liger_kernels_request
            if request is None:
                return base.forward(self, *args, **kwargs)
            return request.loss(args[0], self.weight, self.bias)

        def fused_loss(self: Any, hidden: torch.Tensor, request: Request) -> torch.Tensor:
            """The loss, by the head's own call, so that whatever gathers its weights does so around the kernel."""
            self._liger_kernels_request = request
            try:
                return base.__call__(self, hidden)
            finally:
                self._liger_kernels_request = None

        def real_logits(self: Any, hidden: torch.Tensor) -> torch.Tensor:
            """The logits, by the head's own call, armed or not."""
            armed = self._liger_kernels_armed
            self._liger_kernels_armed = None
            try:
                return base.__call__(self, hidden)
            finally:
                self._liger_kernels_armed = armed

        return {
            "_liger_kernels_armed": None,
            "_liger_kernels_extras": (),
            "_liger_kernels_request": None,
            "_liger_kernels_packing": None,
            "__call__": call,
            "forward": forward,
            "fused_loss": fused_loss,
            "real_logits": real_logits,
        }


def _obstacle(head: Any) -> str | None:
    """Why the head has to compute its logits itself right now."""
    if "forward" in head.__dict__:
        return "the head's forward was replaced on the instance (by a device map?): patch the model before"
    for hook in head._forward_hooks.values():
        owner = getattr(getattr(hook, "func", hook), "__module__", None) or ""
        if not owner.startswith(_INFRASTRUCTURE):
            return "a forward hook on the head expects logits"
    if type(head.weight) not in (nn.Parameter, torch.Tensor) and not head._forward_pre_hooks:
        return f"the head's weight is a {type(head.weight).__name__}"  # sharded, and nothing gathers it
    return None


@dataclass(frozen=True)
class ModelRecipe(Recipe):
    """A model that arms its head while its own forward runs in training with labels.

    Its forward understands what trl passes to a model that it knows to be patched: ``return_token_accuracy`` (then the
    output has ``token_accuracy``, from the pass of the loss), ``skip_logits`` (with labels: in evaluation, too, logits
    are computed only when they are read) and ``use_token_scaling`` (only False). Upstream's forward never sees them.

    With a ``loss_reduction`` other than "token" the rows of the loss are weighted, in evaluation too, and whatever
    would leave them unweighted raises.
    """

    loss_reduction: str = "token"

    def namespace(self, base: Any) -> dict[str, Any]:
        return self._plain(base) if self.loss_reduction == "token" else self._weighted(base)

    def _plain(self, base: Any) -> dict[str, Any]:
        from transformers.loss.loss_utils import ForCausalLMLoss

        def upstream(self: Any, *args: Any, **kwargs: Any) -> Any:  # looked up late: another patch may replace it
            return base.forward(self, *args, **kwargs)

        released = torch.compiler.disable(_released)  # a compiled forward ends where its output changes class
        names = list(inspect.signature(base.forward).parameters)
        position = names.index("labels") - 1 if "labels" in names else None  # without self

        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            skip_logits = kwargs.pop("skip_logits", False)
            accuracy = kwargs.pop("return_token_accuracy", False)
            if kwargs.pop("use_token_scaling", False):
                raise NotImplementedError(
                    "use_token_scaling=True (trl's loss_type='dft') scales each token's loss by its probability, which "
                    "the fused loss does not do: set use_liger_kernel=False and patch the model with "
                    "liger_kernels.patch(model), so that trl computes this loss from the logits"
                )
            labels = kwargs.get("labels")
            if labels is None and position is not None and len(args) > position:
                labels = args[position]
            if labels is None or not (self.training or skip_logits or accuracy):
                return upstream(self, *args, **kwargs)
            if self.loss_function is not ForCausalLMLoss:  # a user's own, or one of another kind: it gets real logits
                name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
                count(self._liger_kernels.fallbacks, f"the loss function is {name}, not ForCausalLMLoss")
                output = upstream(self, *args, **kwargs)
                return released(output, labels, kwargs.get("shift_labels")) if accuracy else output
            heads = patched_heads(self.get_output_embeddings())
            for head in heads:
                head._liger_kernels_armed = self._liger_kernels.fallbacks
                head._liger_kernels_request = None  # in a compiled program's guards, not the same as the class's
                if accuracy:
                    head._liger_kernels_extras = ("token_accuracy",)
            try:
                output = upstream(self, *args, **kwargs)
            finally:
                for head in heads:
                    head._liger_kernels_armed = None
                    if accuracy:
                        head._liger_kernels_extras = ()
            # Not inside the try, where no graph can end: Dynamo would then compile nothing of this function itself.
            return released(output, labels, kwargs.get("shift_labels")) if accuracy else released(output)

        return {"forward": forward}

    def _weighted(self, base: Any) -> dict[str, Any]:
        from transformers.loss.loss_utils import ForCausalLMLoss

        mode = self.loss_reduction
        plain: Callable[..., Any] = self._plain(base)["forward"]
        names = list(inspect.signature(base.forward).parameters)[1:]  # without self

        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            if arguments.get("labels") is None:
                return plain(self, *args, **kwargs)
            if self.loss_function is not ForCausalLMLoss:
                name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
                raise ValueError(
                    f"the loss function is {name}; loss_reduction={mode!r} weighs the rows of transformers' "
                    "ForCausalLMLoss only: unpatch the model, or patch it with loss_reduction='token'"
                )
            if "num_items_in_batch" in kwargs:
                kwargs["num_items_in_batch"] = plain_count(kwargs["num_items_in_batch"], mode)
            packing = captured(arguments, mode)
            computes = not (self.training or kwargs.get("skip_logits"))
            heads = patched_heads(self.get_output_embeddings())
            for head in heads:
                head._liger_kernels_packing = packing
            try:
                # In evaluation, too, the loss is computed before the logits: only there its rows can be weighted.
                output = plain(self, *args, **{**kwargs, "skip_logits": True})
            finally:
                for head in heads:
                    head._liger_kernels_packing = None
            if not packing.applied:
                raise RuntimeError(
                    f"loss_reduction={mode!r}: this forward's loss was computed from logits that had been computed "
                    "before, where its rows cannot be weighted; real logits have been computed because of "
                    f"{dict(self._liger_kernels.fallbacks)}"
                )
            self.__dict__["_liger_kernels_weighted"] = True
            return _computed(output) if computes else output

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            """``base.__call__``, and the check that it came by the forward above where it computed a loss."""
            if kwargs.get("labels") is None:
                return base.__call__(self, *args, **kwargs)
            self.__dict__["_liger_kernels_weighted"] = False
            output = base.__call__(self, *args, **kwargs)
            if not self.__dict__.pop("_liger_kernels_weighted"):
                raise RuntimeError(
                    f"loss_reduction={mode!r}: the model's forward was replaced on the instance after it was patched "
                    "(as trl's SFTTrainer does), and the loss was not computed by the model's own. With a trainer, use "
                    "`class PackedTrainer(liger_kernels.PackingLossMixin, SFTTrainer)`, and SFTConfig(loss_type='nll') "
                    "where trl's default is another"
                )
            return output

        return {"forward": forward, "__call__": call}


def patched_heads(head: Any) -> list[Any]:
    """The patched linear layers in what a model calls its output embeddings: itself, or inside an adapter's wrapper."""
    if isinstance(recipe_of(head), HeadRecipe):
        return [head]
    modules: Iterator[nn.Module] = head.modules() if isinstance(head, nn.Module) else iter(())
    return [module for module in modules if isinstance(recipe_of(module), HeadRecipe)]


def _released(output: Any, labels: torch.Tensor | None = None, shift_labels: torch.Tensor | None = None) -> Any:
    """What leaves the forward: an output whose logits are computed when they are read; a tuple has real ones.

    With ``labels`` it has the token accuracy, too; a tuple has it at the end.
    """
    if isinstance(output, tuple):
        real = tuple(_resolve(value, "a tuple output") for value in output)
        return real if labels is None else (*real, _token_accuracy(output, output[1], labels, shift_labels))
    if isinstance(output, OrderedDict) and is_dataclass(output):
        names = tuple(name for name, value in output.items() if isinstance(value, DeferredLogits))
        accuracy = None if labels is None else _token_accuracy(output.values(), output["logits"], labels, shift_labels)
        if names or accuracy is not None:
            output.__class__ = lazy_output(type(output), names, accuracy is not None)
        if accuracy is not None:
            output["token_accuracy"] = accuracy
    return output


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


def _computed(output: Any) -> Any:
    """An output whose logits are computed, without a note of it: nothing was to be saved."""
    if isinstance(output, OrderedDict):
        for name, value in list(OrderedDict.items(output)):
            output[name] = value.materialize(None) if isinstance(value, DeferredLogits) else value
    return output


def _resolve(value: Any, reason: str) -> Any:
    return value.materialize(reason) if isinstance(value, DeferredLogits) else value


@functools.cache
def lazy_output(base: Any, names: tuple[str, ...], accuracy: bool = False) -> type:
    """The subclass of the output class ``base`` whose entries ``names`` may be deferred logits, and which has another
    entry ``token_accuracy`` where ``accuracy`` says so.

    Reading such an entry by attribute, key or position computes it and stores it. Whoever walks over the values (DDP,
    accelerate, pytree, pickle) finds an opaque object there, which is neither a tensor nor a container.
    """

    def read(self: Any, name: str) -> Any:
        value = self.__dict__.get(name)
        if isinstance(value, DeferredLogits) and not self.__dict__.get("_liger_kernels_filling"):
            value = value.materialize(f"outputs.{name} was read")
            self[name] = value
        return value

    def lazy_field(name: str) -> property:
        def write(self: Any, value: Any) -> None:
            self.__dict__[name] = value

        return property(lambda self: read(self, name), write)

    parent: Any = make_dataclass(base.__name__, [("token_accuracy", Any, None)], bases=(base,)) if accuracy else base

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_liger_kernels_filling"] = True  # upstream's checks read every field
        try:
            parent.__init__(self, *args, **kwargs)
        finally:
            del self.__dict__["_liger_kernels_filling"]

    def getitem(self: Any, key: Any) -> Any:
        if isinstance(key, str):
            return read(self, key) if key in names else base.__getitem__(self, key)
        keys = tuple(self.keys())[key]
        return self[keys] if isinstance(keys, str) else tuple(self[k] for k in keys)

    def get(self: Any, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (this is what get means here)

    def reduce(self: Any) -> Any:
        return _load_output, (base, names, accuracy, dict(OrderedDict.items(self)))

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__init__": init,
        "__getitem__": getitem,
        "get": get,
        "__reduce__": reduce,
        **{name: lazy_field(name) for name in names},
    }
    return type(base.__name__, (parent,), namespace)


def _load_output(base: type, names: tuple[str, ...], accuracy: bool, items: dict[str, Any]) -> Any:
    return lazy_output(base, names, accuracy)(**items)
