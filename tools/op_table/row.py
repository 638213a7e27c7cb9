"""A row of the table of ops: an op with its options, its reference, and the inputs that both take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from liger_kernels import ops

# A letter is a dimension: n rows, k columns or w, twice as many; of rope h and g heads, s tokens, d and r columns; o
# features of a linear layer's result, a ranks of its adapter; e experts, c of them for a token, m features within one,
# t twice as many; v classes, i of them chosen; l labels of a packed row.
SIZES = {"h": 2, "g": 1, "s": 3, "d": 8, "r": 6, "o": 9, "a": 6, "1": 1, "e": 4, "c": 2, "m": 6, "t": 12}
SIZES |= {"v": 11, "i": 3, "l": 24}
Sizes = dict[str, int]

RUNS, BATCH = "run to run", "in any batch"


class Drawn(NamedTuple):
    """How a leaf is drawn, on the CPU, so that every device gets the same numbers.

    Attributes:
        draw: makes it of its shape and of the sizes of all dimensions.
        dtype: its dtype where that is not the asked one.
        has_grad: whether anybody wants its gradient.
    """

    draw: Callable[[tuple[int, ...], Sizes], torch.Tensor]
    dtype: torch.dtype | None = None
    has_grad: bool = True


def _normal(shape: tuple[int, ...], _: Sizes) -> torch.Tensor:
    return torch.randn(shape)


def _small(shape: tuple[int, ...], _: Sizes) -> torch.Tensor:
    """What is multiplied by it keeps its size."""
    return shape[-1] ** -0.5 * torch.randn(shape)


def _head(shape: tuple[int, ...], sizes: Sizes) -> torch.Tensor:
    """Logits of hidden states are then a few units apart."""
    return 3 * _small(shape, sizes)


def _targets(shape: tuple[int, ...], sizes: Sizes) -> torch.Tensor:
    """Some are ignored."""
    targets = torch.randint(sizes["v"], shape)
    targets[::7] = -100
    return targets


def _labels(shape: tuple[int, ...], sizes: Sizes) -> torch.Tensor:
    labels = torch.randint(sizes["v"], shape)
    return labels.masked_fill(torch.rand(shape) < 0.3, -100)


def _classes(shape: tuple[int, ...], sizes: Sizes) -> torch.Tensor:
    """The first column holds none."""
    classes = torch.randint(sizes["v"], shape)
    classes[:, 0] = -1
    return classes


# By what stands behind the colon of a leaf's dimensions.
DRAWN = {
    "": Drawn(_normal),
    "constant": Drawn(_normal, has_grad=False),
    "small": Drawn(_small),
    "adapter": Drawn(_small, torch.float32),
    "float32": Drawn(_normal, torch.float32),
    "logits": Drawn(lambda shape, _: 3 * torch.randn(shape)),
    "head": Drawn(_head),
    "teacher": Drawn(_head, has_grad=False),
    "share": Drawn(lambda shape, _: torch.rand(shape), torch.float32, has_grad=False),
    "divisor": Drawn(lambda shape, _: torch.full(shape, 31.0), torch.float32, has_grad=False),
    "targets": Drawn(_targets, torch.int64, has_grad=False),
    "classes": Drawn(_classes, torch.int64, has_grad=False),
    # The last expert has no token.
    "experts": Drawn(lambda shape, sizes: torch.randint(sizes["e"] - 1, shape), torch.int64, has_grad=False),
    "labels": Drawn(_labels, torch.int64, has_grad=False),
    "sequences": Drawn(lambda shape, _: torch.arange(shape[0]) // 3, torch.int64, has_grad=False),
    "mask": Drawn(lambda shape, _: torch.arange(shape[0]) % 7 > 0, torch.bool, has_grad=False),
}


def randn(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, drawn on the CPU so that every device gets the same ones."""
    return (scale * torch.randn(shape)).to(device, dtype).requires_grad_(grad)


class Op(NamedTuple):
    """An op with some options.

    Attributes:
        op: the op, which takes the leaves in their order or by name.
        reference: the same in plain torch.
        dims: the dimensions of the leaves, as einsum writes them, and behind a colon how one is drawn (:data:`DRAWN`).
        kernels: a forward launches this many kernels once each.
        results: the names of the results.
        promised: which of ``RUNS`` and ``BATCH`` the op promises to the last bit. Where it is None, nobody asks.
        in_program: how many kernels a program of torch.compile launches, forward and backward. None where the op breaks
            the graph, has no gradient, or needs a program for each of many sizes.
        batched: the dimension whose length is another one in another batch.
    """

    op: partial[Any]
    reference: partial[Any]
    dims: str
    kernels: int = 1
    results: str = "y"
    promised: tuple[str, ...] | None = (RUNS, BATCH)
    in_program: int | None = 2
    batched: str = "n"

    @property
    def public(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The op and its reference as users call them, without this row's options."""
        ours, reference = (f.keywords.get("op", f).func for f in (self.op, self.reference))
        return ours, reference

    @property
    def leaf_dims(self) -> list[str]:
        return [leaf.partition(":")[0] for leaf in self.dims.split(",")]

    @property
    def drawn(self) -> list[Drawn]:
        return [DRAWN[leaf.partition(":")[2]] for leaf in self.dims.split(",")]

    def shapes(self, rows: int, columns: int, sizes: Sizes | None = None) -> list[tuple[int, ...]]:
        every = _sizes(rows, columns, sizes)
        return [tuple(every[letter] for letter in leaf) for leaf in self.leaf_dims]

    def leaves(
        self,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        needs: tuple[bool, ...] = (),
        columns: int = 12,
        sizes: Sizes | None = None,
    ) -> list[torch.Tensor]:
        """The inputs, and which of them want a gradient. ``sizes`` are of other letters."""
        every, needs = _sizes(rows, columns, sizes), needs or self.differentiable()
        made = []
        for shape, drawn, needed in zip(self.shapes(rows, columns, sizes), self.drawn, needs, strict=True):
            made.append(drawn.draw(shape, every).to(device, drawn.dtype or dtype).requires_grad_(needed))
        return made

    def inputs(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        return self.leaves(rows, dtype, device, columns=columns)

    def named(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The leaves by the names of the op's parameters."""
        names = self.op.keywords.get("names")
        names = names or [name for name in inspect.signature(self.op.func).parameters if name not in self.op.keywords]
        return dict(zip(names, leaves, strict=False))

    def differentiable(self) -> tuple[bool, ...]:
        return tuple(drawn.has_grad for drawn in self.drawn)

    def has_rows(self) -> list[bool]:
        return [leaf.startswith("n") for leaf in self.leaf_dims]


def _sizes(rows: int, columns: int, others: Sizes | None) -> Sizes:
    return {**SIZES, "n": rows, "k": columns, "w": 2 * columns, **(others or {})}


# Options that decide how an op goes about it, and not what it computes: its reference has none of them.
_OF_THE_OP_ALONE = {"memory", "counted", "invariant"}


def both(name: str, dims: str, fields: dict[str, Any] | None = None, **options: Any) -> Op:
    """The public op of that name and its reference, with ``options``."""
    ours, reference = _pair(name, options)
    return Op(ours, reference, dims, **fields or {})


def through(call: Callable[..., Any], name: str, dims: str, fields: dict[str, Any] | None = None, **options: Any) -> Op:
    """The same of an op that takes more than tensors: ``call`` gets the leaves, and the op as ``op``."""
    ours, reference = (partial(call, op=f) for f in _pair(name, options))
    return Op(ours, reference, dims, **fields or {})


def by_name(name: str, leaves: dict[str, str], fields: dict[str, Any] | None = None, **options: Any) -> Op:
    """The same of an op some of whose ``leaves`` go by the names of its parameters; of each, what ``dims`` says."""
    ours, reference = (partial(_call, names=tuple(leaves), op=f) for f in _pair(name, options))
    return Op(ours, reference, ",".join(leaves.values()), **fields or {})


def _call(*leaves: torch.Tensor, names: tuple[str, ...], op: Any, **named: Any) -> Any:
    return op(**dict(zip(names, leaves, strict=False)), **named)


def _pair(name: str, options: dict[str, Any]) -> tuple[partial[Any], partial[Any]]:
    """An op without a kernel is its own reference."""
    op, shared = getattr(ops, name), {key: value for key, value in options.items() if key not in _OF_THE_OP_ALONE}
    return partial(op, **options), partial(getattr(ops, f"{name}_ref", op), **shared)
