"""Recognise the rotary function of a modeling module by what it computes, and let one model's attention call ours.

A rotary function is described by facts that do not depend on each other (:class:`Rotation`): where the elements of a
pair are, how the table of angles is laid against the heads, how wide it is, the sign of the angle, the dtype that comes
back. One probe finds all of them: it tries each layout, and compares what comes back with every rotation of our op.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_kernels.ops import rope, rope_ref
from liger_kernels.ops._rope import PAIRINGS
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.reads import Outside, reads_of
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.probe import PLAIN, PROBED, randn, signature_of
from liger_kernels.patching.recipes.rebinding import methods, rebind, replaced_by
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict
from liger_kernels.patching.swap import RAN, Recipe

# Where a patched class has what its methods were copied from.
_OUTSIDE = "_liger_kernels_outside"


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


@dataclass(frozen=True)
class RopeRecipe(Recipe):
    """An attention whose forward finds our rotation under the names of upstream's."""

    kernel = "rope"
    live = None
    rotations: tuple[Rotation, ...]
    left: tuple[str, ...] = ()  # why its other rotary functions are

    @property
    def detail(self) -> str:
        return ", ".join(map(str, self.rotations))

    def foreseen(self, module: Any, step: Any) -> Any:
        config = module.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        columns = getattr(config, "head_dim", None) or config.hidden_size // heads
        q, k = (step.tensor(step.batch, step.length, n, columns).transpose(1, 2) for n in (heads, groups))
        cos, sin = (step.tensor(1, step.length, columns, dtype=step.stream, grad=False) for _ in range(2))
        facts = self.rotations[0]
        how: dict[str, Any] = {"pairing": facts.pairing, "inverse": facts.inverse, "trailing": facts.trailing}
        return functools.partial(rope, q, k, cos, sin, rotary_dim=columns, keep_dtype=facts.casts_back, **how)

    def namespace(self, base: Any) -> dict[str, Any]:
        by_name = {rotation.name: rotation for rotation in self.rotations}
        runs = [0]  # of our kernel, in any attention of this class

        def replace(name: str, upstream: Callable[..., Any]) -> Callable[..., Any] | None:
            return rotary_function(upstream, by_name[name], runs) if name in by_name else None

        rebound = {
            attribute: new
            for attribute, function in methods(base)
            if (new := rebind(function, replace)) is not function
        }
        before = {attribute: getattr(base, attribute) for attribute in rebound}
        outside = [(base, attribute, function) for attribute, function in before.items()]
        original = base.forward
        inner = rebound.get("forward", original)

        def live(attribute: str, new: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(new)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                own = getattr(base, attribute)
                return (new if own is before[attribute] else own)(self, *args, **kwargs)

            return method

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if base.forward is not original:
                return base.forward(self, *args, **kwargs)
            if torch.compiler.is_compiling() or RAN in self.__dict__:
                return inner(self, *args, **kwargs)
            ran = runs[0]
            output = inner(self, *args, **kwargs)
            if runs[0] != ran:  # not every instance rotates
                self.__dict__[RAN] = True
            return output

        methods_of_both = {attribute: live(attribute, new) for attribute, new in rebound.items()}
        return {**methods_of_both, "forward": forward, _OUTSIDE: (*outside, *self._functions(base))}

    def _functions(self, base: Any) -> Outside:
        """The rotary functions as the methods of ``base`` find them, and what they use."""
        names = {rotation.name for rotation in self.rotations}
        found = reads_of([function for _, function in methods(base)], base).values
        return tuple(
            part for scope, name in found if name in names and type(scope) is dict for part in replaced_by(scope, name)
        )

    def made_of(self, base: Any) -> tuple[Any, ...]:
        functions = (*(function for _, function in methods(base)), *(value for *_, value in self._functions(base)))
        return tuple(function for function in functions if isinstance(function, types.FunctionType))

    def changed(self, module: nn.Module) -> str | None:
        for holder, name, value in getattr(type(module), _OUTSIDE):
            if (holder.get(name) if type(holder) is dict else getattr(holder, name)) is not value:
                where = holder["__name__"] if type(holder) is dict else "its class"
                return (
                    f"the {name} of {where} was replaced after patch(), and runs: call patch(model) to look at it anew"
                )
        return None


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


def rotary_names(cls: type) -> dict[str, Callable[..., Any]]:
    """Globals that the methods of ``cls`` call and that take angles, as cos and sin or as complex numbers."""
    found: dict[str, Callable[..., Any]] = {}

    def collect(name: str, function: Callable[..., Any]) -> None:
        if roles_of(function) is not None:
            found[name] = function

    for _, method in methods(cls):
        rebind(method, collect)
    return found


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


def rotary_function(
    upstream: Callable[..., Any], rotation: Rotation, runs: list[int] | None = None
) -> Callable[..., Any]:
    """``upstream`` with our kernel where its arguments are those that were probed, itself where they are not."""
    roles = roles_of(upstream)
    assert roles is not None
    parameters = inspect.signature(upstream).parameters
    # All that the function needs are globals of its own, not a closure or defaults: Dynamo looks for those on the
    # function of this name in upstream's module, which has none.
    scope = {
        **{f.__name__: f for f in (left_to_inductor, rope, rotated, mixed, parts, place, fits, are_plain)},
        "__builtins__": __builtins__,
        "torch": torch,
        "PLAIN": PLAIN,
        "PROBED": PROBED,
        "runs": [0] if runs is None else runs,
        "upstream": upstream,
        "names": tuple(parameters),
        "tensor_names": roles.tensors,
        "table_names": roles.tables,
        "sections_name": SECTIONS if SECTIONS in parameters else None,
        "default": parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else "fixed",
        "layouts": tuple(map(tuple, rotation.layouts)),
        "halved": rotation.halved,
        "partial": rotation.partial,
        "mixed_dtypes": rotation.mixed,
        "options": {
            "pairing": rotation.pairing,
            "inverse": rotation.inverse,
            "trailing": rotation.trailing,
            "keep_dtype": rotation.casts_back,
        },
    }
    return types.FunctionType(_apply_rotary.__code__, scope, upstream.__name__)


# Globals that each copy of the function below has of its own; here they are only declared.
upstream: Callable[..., Any] = rope_ref
names: tuple[str, ...] = ()
layouts: tuple[tuple[int, int, int], ...] = ()
default: Any = "fixed"
sections_name: Any = None
tensor_names: list[str] = []
table_names: list[str] = []
halved, partial, mixed_dtypes = False, False, False
options: dict[str, Any] = {}
runs = [0]


def _apply_rotary(*args: Any, **named: Any) -> Any:
    """The code of what :func:`rotary_function` makes. Upstream gets every call that is not of the form probed."""
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    given.update(named)
    tensors: list[Any] = [given.get(name) for name in tensor_names]
    tables: list[Any] = [given.get(name) for name in table_names]
    sections = given.get(sections_name)
    usual = (
        len(args) + len(named) == len(given) <= len(names)
        and given.get("position_ids") is None
        and type(sections) is (type(None) if sections_name is None else list)
        and are_plain(tensors + tables)
    )
    if not usual or left_to_inductor("rope", tensors[0]):
        return upstream(*args, **named)
    cos, sin = tables if len(tables) == 2 else parts(tables[0])
    if sections is not None:
        cos, sin = mixed(cos, sections), mixed(sin, sections)
    heads = place(tensors[0].dim(), cos.dim(), given.get("unsqueeze_dim", default), layouts)
    columns = cos.shape[-1] * 2 if halved else cos.shape[-1]
    if heads is None or not fits(tensors, cos, sin, heads, columns, partial, mixed_dtypes):
        return upstream(*args, **named)
    if not torch.compiler.is_compiling():
        runs[0] += 1
    results = rotated(rope, tensors, cos, sin, heads, {**options, "rotary_dim": columns})
    return results if len(tensors) == 2 else results[0]


# Loops instead of generators in what is called above: not every Dynamo traces those.


def are_plain(tensors: list[Any]) -> bool:
    for x in tensors:  # noqa: SIM110
        if type(x) not in PLAIN:
            return False
    return True


def parts(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The real and imaginary part of complex numbers, which are cos and sin; of others, what no layout takes."""
    if not numbers.is_complex():
        return numbers[None, None, None], numbers
    real = torch.view_as_real(numbers.resolve_conj())
    return real[..., 0], real[..., 1]


def place(dims: int, table_dims: int, unsqueeze_dim: Any, layouts: tuple[tuple[int, int, int], ...]) -> int | None:
    """Where the heads are in a call, -3 or -2; None where such a call was not probed."""
    heads = None
    if unsqueeze_dim != "fixed":
        if type(unsqueeze_dim) is not int:
            return None
        heads = unsqueeze_dim - table_dims - 1 if unsqueeze_dim >= 0 else unsqueeze_dim
    for probed_dims, probed_table_dims, probed_heads in layouts:
        if (dims, table_dims) == (probed_dims, probed_table_dims) and heads in (None, probed_heads):
            return probed_heads
    return None


def fits(
    tensors: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    columns: int,
    partial: bool,
    mixed_dtypes: bool,
) -> bool:
    """Whether our op takes tensors like these. Upstream may broadcast others, move them, or raise an error of its own.

    Also where the layout was probed: of the second tensor and of the sizes only this call knows.
    """
    first, tokens = tensors[0], -2 if heads == -3 else -3
    batch = first.shape[0] if first.dim() == 4 else 1
    for x in tensors:
        if x.dim() != first.dim() or x.shape[-1] != first.shape[-1] or x.shape[tokens] != cos.shape[-2]:
            return False
        if x.dim() == 4 and x.shape[0] != batch:
            return False
    for x in (*tensors, cos, sin):
        if x.device != first.device or x.dtype not in PROBED:
            return False
    if cos.dtype != sin.dtype or tensors[-1].dtype != first.dtype or not (mixed_dtypes or cos.dtype == first.dtype):
        return False
    return (
        (columns <= first.shape[-1] if partial else columns == first.shape[-1])
        and columns % 2 == 0
        and cos.shape == sin.shape
        and (cos.dim() == 2 or cos.shape[0] in (1, batch))
    )


def _verdict(module: nn.Module) -> Verdict:
    verdicts = {name: recognise_rotation(name, function) for name, function in rotary_names(type(module)).items()}
    rotations = tuple(verdict for verdict in verdicts.values() if isinstance(verdict, Rotation))
    reasons = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items() if isinstance(verdict, str))
    return RopeRecipe(rotations, reasons) if rotations else reasons


ROTATIONS = Recogniser(("rope",), lambda module: bool(module._modules), _verdict, key=type)
