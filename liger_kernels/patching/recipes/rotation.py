"""Which rotation a rotary function is: its facts, and the probe that finds them.

The facts do not depend on each other (:class:`Rotation`): where the elements of a pair are, how the table of angles is
laid against the heads, how wide it is, the sign of the angle, the dtype that comes back. One probe finds all of them:
it tries each layout, and compares what comes back with every rotation of our op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from liger_kernels.ops import rope_ref
from liger_kernels.ops._rope import PAIRINGS
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import randn, signature_of


class Layout(NamedTuple):
    """How a table of angles is laid against the tensors that it rotates."""

    dims: int  # of a tensor: 4, or 3 where there is no batch
    table_dims: int  # 3 with a batch, 2 without
    heads: int  # the dimension of the heads: -3, before the tokens, or -2, after them


LAYOUTS = tuple(Layout(*facts) for facts in ((4, 3, -3), (4, 3, -2), (4, 2, -3), (4, 2, -2), (3, 2, -3), (3, 2, -2)))


@dataclass(frozen=True)
class Rotation:
    """What a module's global ``name`` computes.

    Attributes:
        name: as the methods know it.
        pairing: as :func:`liger_kernels.ops.rope` takes it.
        inverse: likewise.
        halved: the table has a column for each pair. Otherwise it has one for each element.
        partial: the table may be narrower than the head: the first elements are rotated, or the last.
        trailing: it is the last.
        casts_back: the result has the dtype of what is rotated, also where the table's is wider.
        layouts: those in which all of this was found.
        mixed: the result has that dtype whatever two dtypes the tensors and the table have. Otherwise they have one.
    """

    name: str
    pairing: str
    inverse: bool
    halved: bool
    partial: bool
    trailing: bool
    casts_back: bool
    layouts: tuple[Layout, ...]
    mixed: bool = True

    def __str__(self) -> str:
        facts = ("inverse" * self.inverse, self.pairing, "or partial" * self.partial, "(last)" * self.trailing)
        return " ".join(filter(None, facts))


class Roles(NamedTuple):
    """What the parameters of a rotary function are for, by their names."""

    tensors: list[str]  # one or two that are rotated
    tables: list[str]  # cos and sin, or complex numbers
    others: list[str]


SECTIONS = "mrope_section"
_OTHERS = {"position_ids", "unsqueeze_dim", SECTIONS}


def roles_of(function: Callable[..., Any]) -> Roles | None:
    """None for a function that takes no angles."""
    names = [parameter.name for parameter in signature_of(function)]
    tables = [name for name in names if name in ("cos", "sin")]
    if len(tables) != 2:
        tables = [name for name in names if name.startswith("freqs_ci")]
    if not tables:
        return None
    first = names.index(tables[0])
    return Roles(names[:first], sorted(tables), [name for name in names[first:] if name not in tables])


def recognise_rotation(name: str, function: Callable[..., Any]) -> Rotation | str:
    """Which rotation ``function`` is, or the reason why it is none of ours.

    It runs in float64 on random tensors and random, independent cos and sin: no identity between angles hides a
    difference.
    """
    roles = roles_of(function)
    if roles is None or len(roles.tensors) not in (1, 2):
        names = ", ".join(parameter.name for parameter in signature_of(function))
        return f"it takes ({names}), not one or two tensors and then cos and sin or complex numbers"
    unknown = set(roles.others) - _OTHERS
    if unknown:
        return f"its signature has {', '.join(sorted(unknown))}"
    complete, errors = False, []  # whether any layout could be computed, and why others could not
    with probe.probing():
        for layout, halved in itertools.product(LAYOUTS, (False, True)):
            try:
                trial = _Trial(function, roles, layout, halved)
                facts = trial.matching()
                complete = True
                if facts is not None:
                    return trial.rotation(name, facts)
            except Exception as error:  # whatever a stranger's function raises on the probe means that it is not ours
                errors.append(f"it cannot be probed ({probe.describe(error)})")
    return errors[0] if errors and not complete else "it is none of the rotations that we know"


Facts = tuple[str, bool]  # pairing and inverse
_FACTS: tuple[Facts, ...] = tuple(itertools.product(PAIRINGS, (False, True)))


class _Trial(NamedTuple):
    """A rotary function, and one way to lay its table against its tensors, tried on random numbers."""

    function: Callable[..., Any]
    roles: Roles
    layout: Layout
    halved: bool

    def rotation(self, name: str, facts: Facts) -> Rotation | str:
        """All that is to be known of the function, which is the rotation ``facts`` in this layout."""
        casts_back = self._result_dtype(torch.bfloat16, torch.float32) == torch.bfloat16
        if not casts_back and (dtype := self._result_dtype(torch.bfloat16, torch.bfloat16)) != torch.bfloat16:
            return f"it returns {dtype} for tensors and angles in torch.bfloat16"

        def is_it(layout: Layout, rotary_dim: int, trailing: bool = False) -> bool:
            """Not where the function raises: few take every layout, or split off a part themselves."""
            try:
                return self._replace(layout=layout).matching(rotary_dim, trailing, (facts,)) is not None
            except Exception:
                return False

        others = [other for other in LAYOUTS if is_it(other, 8)]
        first, last = (is_it(self.layout, 4, trailing) for trailing in (False, True))
        kinds = probe.PROBED if len(self.roles.tables) == 2 else (torch.float32,)  # complex numbers have no 16 bits
        mixed = all(
            self._result_dtype(dtype, table) == (dtype if casts_back else torch.promote_types(dtype, table))
            for dtype, table in itertools.product(probe.PROBED, kinds)
        )
        return Rotation(name, *facts, self.halved, first or last, last, casts_back, tuple(others), mixed)

    def _result_dtype(self, dtype: torch.dtype, table: torch.dtype) -> torch.dtype | None:
        """Of tensors of one dtype and angles of another; None where the function raises."""
        tensors, cos, sin = self.sample()
        try:
            results = self.call([x.detach().to(dtype) for x in tensors], cos.to(table), sin.to(table))
        except Exception:  # whatever a stranger's function raises
            return None
        found = {y.dtype for y in results}
        return found.pop() if len(found) == 1 else None

    def matching(self, rotary_dim: int = 8, trailing: bool = False, among: Sequence[Facts] = _FACTS) -> Facts | None:
        """The first rotation of our op ``among`` these that has the values and the gradients of the function."""
        tensors, cos, sin = self.sample(rotary_dim)
        got = self.call(tensors, cos, sin)
        if not isinstance(got, tuple) or not all(isinstance(y, torch.Tensor) for y in got) or len(got) != len(tensors):
            return None
        if SECTIONS in self.roles.others:
            cos, sin = (mixed(table, _sections(table)) for table in (cos, sin))
        upstream = [randn(*x.shape, dtype=torch.float64) for x in tensors]

        def gradients(results: Any) -> tuple[torch.Tensor, ...]:
            total = sum((y * g).sum() for y, g in zip(results, upstream, strict=True) if y.shape == g.shape)
            return torch.autograd.grad(total, tensors)

        def same(mine: Any, expected: Any) -> bool:
            pairs = zip(mine, expected, strict=True)
            return all(probe.relative_difference(g, e) < probe.SAME_FORMULA for g, e in pairs)

        mine = gradients(got)
        for pairing, inverse in among:
            if self.halved and not pairing.endswith("_repeat"):
                continue
            options = {"pairing": pairing, "inverse": inverse, "rotary_dim": rotary_dim, "trailing": trailing}
            expected = rotated(rope_ref, tensors, cos, sin, self.layout.heads, options)
            if same(got, expected) and same(mine, gradients(expected)):
                return pairing, inverse
        return None

    def sample(self, rotary_dim: int = 8) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Random tensors of 2 rows, 3 and 1 heads and 5 tokens of 8, and cos and sin, in float64."""
        tensors = []
        for _, heads in zip(self.roles.tensors, (3, 1), strict=False):
            inner = (heads, 5) if self.layout.heads == -3 else (5, heads)
            shape = (2, *inner, 8)[4 - self.layout.dims :]
            tensors.append(randn(*shape, dtype=torch.float64).requires_grad_())
        shape = (2, 5, rotary_dim // 2 if self.halved else rotary_dim)[3 - self.layout.table_dims :]
        if SECTIONS in self.roles.others:
            shape = (3, *shape)
        cos, sin = (randn(*shape, dtype=torch.float64) for _ in range(2))
        return tensors, cos, sin

    def call(self, tensors: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> Any:
        tables = self.roles.tables
        named: dict[str, Any] = {"cos": cos, "sin": sin} if len(tables) == 2 else {tables[0]: torch.complex(cos, sin)}
        if "unsqueeze_dim" in self.roles.others:
            named["unsqueeze_dim"] = self.layout.heads + self.layout.table_dims + 1
        if SECTIONS in self.roles.others:
            named[SECTIONS] = _sections(cos)
        got = self.function(*tensors, **named)
        return (got,) if len(tensors) == 1 else got


def _sections(table: torch.Tensor) -> list[int]:
    pairs = table.shape[-1] // 2
    return [pairs - pairs // 4 * 2, pairs // 4, pairs // 4]


def mixed(table: torch.Tensor, sections: list[int]) -> torch.Tensor:
    """A table of three kinds of positions (time, height, width), [3, ...], each of which has sections of columns."""
    parts = table.split(sections * 2, dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


def rotated(
    op: Callable[..., tuple[torch.Tensor, ...]],
    tensors: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    options: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """``op`` on tensors of any layout: the kernel takes strides, so views cost nothing."""
    dims = tensors[0].dim()
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    if dims == 3:
        tensors = [x[None] for x in tensors]
    if heads == -2:
        tensors = [x.transpose(1, 2) for x in tensors]
    results = op(tensors[0], tensors[1] if len(tensors) == 2 else None, cos, sin, **options)
    if heads == -2:
        results = tuple([y.transpose(1, 2) for y in results])
    return tuple([y[0] for y in results]) if dims == 3 else results
