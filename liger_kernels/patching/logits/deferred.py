"""Logits that have not been computed yet, inside the forward of a patched model.

While a patched model's own forward runs with labels, its LM head answers with :class:`DeferredLogits`: an object that
knows the hidden states, the head and the shape of the product, and has not multiplied. What models do to their logits
on the way to the loss (a scale, a tanh soft-cap, a cast, a slice, a change of shape) is written down.
``torch.nn.functional.cross_entropy`` then runs as one fused kernel over hidden states and weight, with whatever
arguments upstream's own loss function gave it; **anything else that touches the object gets real logits**, computed at
that moment by the head itself, with their gradient, so that no code can tell the difference but by the memory it takes.
What leaves the forward is a tensor (``lazy.py``).

No loss function of upstream is copied or replaced: shifting, flattening, padding, dividing by ``num_items_in_batch``
and the keyword arguments that are passed around stay upstream's, in every version.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from liger_kernels.ops.loss.schedules.chosen import balanced_because, unsharded_because
from liger_kernels.patching.logits.lazy import Computation, defer
from liger_kernels.patching.logits.linked import FusedLoss, Step, linked, replayed
from liger_kernels.patching.logits.product import Product, Request, count, rows
from liger_kernels.patching.recipes.probe import PLAIN

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_MODEL = "liger_kernels.patching.logits.model"  # whose frame called the model's forward


class DeferredLogits:
    """Stands for ``head(hidden)`` [..., vocabulary] after some recorded operations; see the module's docstring."""

    def __init__(self, product: Product, shape: tuple[int, ...], dtype: torch.dtype):
        self._product = product
        self.shape = torch.Size(shape)
        self.ndim = len(shape)
        self.dtype = dtype
        self.device = product.device
        # How to get here from the product, call by call: replayed on the real logits ...
        self._trail: tuple[Step, ...] = ()
        self._passed: tuple[weakref.ref[DeferredLogits], ...] = ()  # what there was before each call
        # ... and the same for the fused loss: rows, classes, a bias, and cap * tanh(scale / cap * logits).
        self._views: tuple[tuple[Any, ...], ...] = ()
        self._vocabulary: int | None = None
        self._bias: torch.Tensor | None = None
        self._scale = 1.0
        self._cap: float | None = None
        self._real: torch.Tensor | None = None

    # What is known without multiplying.

    @property
    def requires_grad(self) -> bool:
        product = self._product
        return product.grad and (
            product.hidden.requires_grad or any(parameter.requires_grad for parameter in product.head.parameters())
        )

    @property
    def is_leaf(self) -> bool:
        return not self.requires_grad

    @property
    def token_accuracy(self) -> torch.Tensor | None:
        """What the fused loss found on its way, if it was asked for it and has run."""
        return self._product.token_accuracy

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def is_floating_point(self) -> bool:
        return True

    # What is written down.

    def float(self) -> Any:
        return self._then("float", (), dtype=torch.float32)

    def contiguous(self) -> Any:
        return self._then("contiguous", ())

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if isinstance(args[0], torch.dtype):
                return self._then("to", args, dtype=args[0])
            if isinstance(args[0], (torch.device, str)) and torch.device(args[0]) == self.device:
                return self
        return self.materialize("Tensor.to").to(*args, **kwargs)

    def type(self, dtype: Any = None) -> Any:
        return self.to(dtype) if isinstance(dtype, torch.dtype) else self.materialize("Tensor.type").type(dtype)

    def view(self, *shape: Any) -> Any:
        return self._reshape("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshape("reshape", shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if start_dim == 0 and end_dim % self.ndim == self.ndim - 2:
            return self._reshape("reshape", (-1, self.shape[-1]))
        return self.materialize("Tensor.flatten").flatten(start_dim, end_dim)

    def tanh(self) -> Any:
        if self._cap is not None:
            return self.materialize("Tensor.tanh").tanh()
        # tanh(a z) is cap * tanh(scale / cap * z) with cap 1 and scale a
        return self._then("tanh", (), cap=1.0)

    def __mul__(self, factor: Any) -> Any:
        return self._scaled("__mul__", factor, factor)

    __rmul__ = __mul__
    mul = multiply = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self._scaled("__truediv__", divisor, 1 / divisor if _is_number(divisor) and divisor else 0)

    div = divide = true_divide = __truediv__

    def __getitem__(self, index: Any) -> Any:
        recorded = self._sliced(index)
        return recorded if recorded is not None else self.materialize("Tensor.__getitem__")[index]

    def _scaled(self, name: str, operand: Any, factor: Any) -> Any:
        # After a tanh, only a positive factor is a soft-cap; the number is a value of the model, not a tensor.
        if not _is_number(operand) or factor == 0 or (self._cap is not None and factor < 0):
            return getattr(self.materialize(f"Tensor.{name}"), name)(operand)
        cap = self._cap * factor if self._cap is not None else None
        return self._then(name, (operand,), scale=self._scale * factor, cap=cap)

    def __add__(self, bias: Any) -> Any:
        """One number that does not train for each class, such as the ``final_logits_bias`` of BART, is a bias of the
        head. Where it is wider than the logits it is added in that dtype, except under autocast, which casts biases."""
        product = self._product
        recorded = (
            type(bias) in PLAIN
            and not bias.requires_grad
            and bias.numel() == self.shape[-1] == bias.shape[-1]
            and bias.dim() <= self.ndim
            and bias.device == self.device
            and self._scale == 1.0
            and self._cap is self._bias is product.split is None
            and (product.autocast is not None or torch.promote_types(self.dtype, bias.dtype) == self.dtype)
        )
        if not recorded:
            return self.materialize("Tensor.__add__") + _materialized(bias, "Tensor.__add__")
        dtype = torch.promote_types(self.dtype, bias.dtype)
        return self._then("__add__", (bias,), bias=bias.reshape(-1), dtype=dtype)

    def _reshape(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        features = self.shape[-1]
        count = self.shape[:-1].numel()
        if len(sizes) == 2 and sizes[0] in (-1, count) and sizes[1] in (-1, features) and sizes != (-1, -1):
            return self._then(name, shape, view=(), shape=(count, features))
        return getattr(self.materialize(f"Tensor.{name}"), name)(*shape)

    def _sliced(self, index: Any) -> Any:
        """The recorded slice, or None where ``index`` is not plain slices of rows, or of the first classes, or a mask
        of rows."""
        if type(index) is torch.Tensor and index.dtype == torch.bool and index.shape == self.shape[:-1]:
            places = index.to(self.device).nonzero(as_tuple=True)  # waits for the mask once, as upstream does
            return self._then("__getitem__", (places,), view=places, shape=(places[0].shape[0], self.shape[-1]))
        index = index if isinstance(index, tuple) else (index,)
        if sum(1 for i in index if i is Ellipsis) > 1 or not all(i is Ellipsis or isinstance(i, slice) for i in index):
            return None
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (self.ndim - len(index) + 1), *index[at + 1 :])
        index = (*index, *[slice(None)] * (self.ndim - len(index)))
        if len(index) != self.ndim or any(i.step is not None and i.step < 1 for i in index):
            return None
        shape = tuple(len(range(*i.indices(size))) for i, size in zip(index, self.shape, strict=True))
        *leading, last = index
        changes: dict[str, Any] = {"shape": shape}
        if last != slice(None) and shape[-1] != self.shape[-1]:
            if last.start not in (None, 0) or last.step not in (None, 1):
                return None
            changes["vocabulary"] = shape[-1]
        if any(i != slice(None) for i in leading):
            changes["view"] = tuple(leading)
        return self._then("__getitem__", (index,), **changes)

    def _then(self, name: str, args: tuple[Any, ...], **changes: Any) -> Any:
        if self._real is not None:
            return getattr(self.materialize(None), name)(*args)
        new = DeferredLogits(self._product, changes.get("shape", self.shape), changes.get("dtype", self.dtype))
        new._trail = (*self._trail, (name, args))
        if not torch.compiler.is_compiling():
            new._passed = (*self._passed, weakref.ref(self))
        new._views = (*self._views, changes["view"]) if "view" in changes else self._views
        new._vocabulary = changes.get("vocabulary", self._vocabulary)
        new._bias = changes.get("bias", self._bias)
        new._scale = changes.get("scale", self._scale)
        new._cap = changes.get("cap", self._cap)
        return new

    # What computes.

    def materialize(self, reason: str | None) -> torch.Tensor:
        """The real logits, computed once; ``reason``, if there is one, is counted in the model's report.

        Raises:
            RuntimeError: an autograd.Function was given these logits, and the gradient of its result would be lost.
        """
        self._refuse_functions()
        if self._real is None:
            # From the nearest tensor that somebody has: the model may return it, and then it stands before this one in
            # the graph, as upstream.
            for done in range(len(self._passed) - 1, -1, -1):
                passed = self._passed[done]()
                if passed is not None:
                    real = passed.materialize(reason)
                    break
            else:
                done, real = 0, self._product.compute(reason)
            with torch.set_grad_enabled(self._product.grad):
                self._real = replayed(self._trail[done:], real)
        return self._real

    def _refuse_functions(self) -> None:
        """Autograd sees no tensor in these logits, so an ``autograd.Function`` that gets them has no edge to the head.
        Inside its forward, gradients are off though they were on where the head ran."""
        if torch.is_grad_enabled() or not self._product.grad or torch.compiler.is_compiling():
            return
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != _MODEL:
            if (name := _function_of(frame)) is not None:
                raise RuntimeError(
                    f"{name} is an autograd.Function and was given the logits of a patched model inside the model's "
                    "own forward, where they are no tensor yet: their gradient would be lost. Give it logits.clone(), "
                    "or leave linear_cross_entropy out of the kernels of patch()"
                )
            frame = frame.f_back

    def released(self) -> torch.Tensor:
        """The tensor that leaves the forward; lazy where nobody has needed a value yet."""
        if self._real is not None:
            return self._real
        product = self._product
        result = product.tensor()
        if self._trail:
            with torch.set_grad_enabled(product.grad):
                replay = functools.partial(replayed, self._trail)
                result = defer(Computation(self.shape, self.dtype, self.device, replay, (result,)))
        return result

    def cross_entropy(self, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
        """The fused loss, or None where these logits or arguments are not what the kernels compute."""
        self._refuse_functions()
        product = self._product
        packing, fallbacks = product.forward.packing, product.forward.fallbacks
        if self._real is not None or self.ndim != 2 or not isinstance(target, torch.Tensor) or target.dim() != 1:
            return None
        if target.is_floating_point() or target.device != self.device or self._scale == 0:
            return None
        if options.pop("size_average") is not None or options.pop("reduce") is not None:
            return None
        options["class_weight"] = options.pop("weight")
        options.update(logit_scale=self._scale, softcap=self._cap, extras=product.forward.extras)
        if product.logits is not None and type(product.logits) is not torch.Tensor:
            return None  # sharded: upstream's own loss knows what to do with it
        if packing is not None:
            target = packing.weigh(product.hidden, lambda x: rows(x[..., None], self._views)[..., 0], target, options)
        # A compiled program knows no tensor without a value.
        lazy = product.lazy is None and not torch.compiler.is_compiling()
        request = Request(product, target, self._views, self._vocabulary, self._bias, options, lazy)
        if product.logits is None:
            dtype = product.autocast if product.autocast is not None else product.hidden.dtype
            smoothing = options["label_smoothing"]
            reason = balanced_because(dtype, smoothing, product.memory)
            if product.split is not None and (why := unsharded_because(dtype, smoothing)) is not None:
                product.compute(f"{why}: a head that is split over ranks computes its logits")
            else:
                if reason is not None:
                    count(fallbacks, f"memory={product.memory!r} does not go with {reason}: 'balanced' ran")
                loss = product.ask(request)
                if loss is not None:
                    self._note(loss, target, options)
                    return loss.to(self.dtype)  # PyTorch's loss has the dtype of its logits
                count(fallbacks, "the head's weight is sharded in its own call")
                if type(product.logits) is not torch.Tensor:
                    return None
        loss = request.loss_of_logits(product.compute(None))
        product.token_accuracy = request.token_accuracy
        self._note(loss, target, options)
        return loss.to(self.dtype)

    def _note(self, loss: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> None:
        """Remember how ``loss`` came about, for whoever asks for the gradient of these logits."""
        product = self._product
        if torch.compiler.is_compiling():
            product.losses = None
        elif loss.requires_grad and product.losses is not None:
            of_values = {**options, "logit_scale": 1.0, "softcap": None, "extras": ()}
            of_logits = product.logits is not None
            product.losses.append(FusedLoss(loss, self._trail, target, of_values, of_logits))

    @property
    def gathers(self) -> bool:
        """Whether log-probabilities may be gathered from these logits after the forward."""
        return self._product.forward.gathers

    def row(self, i: int) -> DeferredLogits:
        """One of the first dimension."""
        return self._then("__getitem__", (i,), view=(i,), shape=self.shape[1:])

    def linked(self, loss: Any, logits: torch.Tensor) -> Any:
        """``loss`` of the model, from which the gradient of ``logits`` can be had: these, as they leave the forward."""
        product = self._product
        if not isinstance(loss, torch.Tensor):
            return loss
        return linked(loss, logits, self._trail, product.losses, product.forward.fallbacks)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        if function is F.cross_entropy:
            bound = _CROSS_ENTROPY.bind(*args, **kwargs)
            bound.apply_defaults()
            options = dict(bound.arguments)
            logits, target = options.pop("input"), options.pop("target")
            if isinstance(logits, cls):
                loss = logits.cross_entropy(target, options)
                if loss is not None:
                    return loss
        elif function is torch.tanh and isinstance(args[0], cls):
            return args[0].tanh()
        return function(*_materialized(args, name), **_materialized(kwargs, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_real", "_product"):  # protocols that a tensor offers differently
            raise AttributeError(name)
        return getattr(self.materialize(f"Tensor.{name}"), name)


def _materialized(arguments: Any, reason: str) -> Any:
    return tree_map(lambda x: x.materialize(reason) if isinstance(x, DeferredLogits) else x, arguments)


def _function_of(frame: Any) -> str | None:
    """The name of the autograd.Function whose forward runs in ``frame``; None where there is none."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, torch.autograd.function.FunctionCtx):
        return type(first).__name__.removesuffix("Backward")
    if code.co_name != "forward" or isinstance(first, torch.nn.Module):
        return None
    kinds = [torch.autograd.Function]  # one with a setup_context gets no context
    for kind in kinds:
        if getattr(inspect.unwrap(kind.forward), "__code__", None) is code:
            return kind.__name__
        kinds += kind.__subclasses__()
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _forward_operator(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        real = self.materialize(f"Tensor.{name}")
        return getattr(real, name)(*_materialized(args, f"Tensor.{name}"))

    operator.__name__ = name
    return operator


_OPERATORS = (
    "radd iadd sub rsub isub imul itruediv rtruediv floordiv mod pow rpow matmul rmatmul neg abs invert "
    "eq ne lt le gt ge and or xor setitem iter bool float int index contains array"
)
for _name in _OPERATORS.split():  # they are looked up on the class, where __getattr__ does not reach
    setattr(DeferredLogits, f"__{_name}__", _forward_operator(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]  # a tensor is hashed by identity, too
