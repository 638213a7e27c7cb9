"""The checks of an op. Each check is a function that raises if the op fails, and returns what it tried."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from convergence.judge.tolerance import REPLICAS_OF_A_CALL
from convergence.models.data import seed_generators
from convergence.op import launched
from convergence.op.call import (
    ACCURACY,
    ALIASING,
    CLOBBERING,
    MEMORY,
    RESULTS,
    How,
    MaybeTensors,
    NoTruth,
    Op,
    OpFailure,
    Ran,
    check_call,
    fresh,
    gradients_of,
    raising,
    results_of,
    run,
)
from convergence.op.memory import LAYOUTS, deterministic, placed, poisoned, same
from convergence.op.subject import Example, Size, Subject

# Rows and columns that are always tried, within the allowed ranges: one, odd numbers, a power of two, one less, and
# rows longer than a block.
SIZES = ((1, 1), (1, 2), (3, 7), (16, 64), (15, 127), (2, 1155))


class NotJudged(Exception):
    """A check that cannot judge this op, or cannot run on this machine. The message gives the reason."""


class Options(NamedTuple):
    """The options of :func:`convergence.check_op`, which explains them."""

    dtypes: tuple[torch.dtype, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]
    sums: bool
    views: bool
    overwrites: Collection[str]
    launches: int | None
    examples: int
    seed: int


@dataclass
class Judge:
    """Compares calls of one op, and counts them."""

    subject: Subject
    options: Options
    calls: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of checks that do not depend on the dtype: the first, usually the most exact."""
        return self.options.dtypes[0]

    def size(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> Size:
        """The nearest allowed size."""
        (least, most), (shortest, longest) = self.options.rows, self.options.columns
        return Size(
            min(max(rows, least), most) if rows else 0, min(max(columns, shortest), longest), dtype or self.dtype
        )

    def example(self, size: Size, seed: int | None = None) -> Example:
        return self.subject.example(size, self.options.seed if seed is None else seed)

    def compare(
        self, example: Example, size: Size, check: str, what: str = "", op: Op | None = None,
        under: Callable[[], contextlib.AbstractContextManager[None]] = poisoned, **how: Any,
    ) -> Ran:  # fmt: skip
        """Compare one call in the context ``under()``; uninitialised memory is NaN. See :func:`check_call`."""
        self.calls += 1
        options = self.options
        asked = How(
            check=check, terms=size.columns if options.sums else 1, views=options.views, overwrites=options.overwrites,
            replicas=REPLICAS_OF_A_CALL, **how,
        )  # fmt: skip
        name = f"{self.subject.name}({size}{', ' if what else ''}{what})"
        functions = example.bind(op or self.subject.op), example.bind(self.subject.reference)
        with under():
            return check_call(*functions, example.leaves, name, how=asked, names=example.names)

    def rows_of(self, size: Size) -> list[int | None]:
        """For each tensor, the dimension that grows with the rows."""
        small, large = (self.example(size._replace(rows=rows)).leaves for rows in (size.rows, size.rows + 1))
        found: list[int | None] = []
        for one, other in zip(small, large, strict=True):
            grown = [i for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
            found.append(grown[0] if grown else None)
        return found


class Check(NamedTuple):
    """Attributes:
    does: one line for the documentation.
    run: raises if the op fails, and returns what it tried.
    """

    does: str
    run: Callable[[Judge], str]


def accuracy(judge: Judge) -> str:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    options, before = judge.options, judge.calls
    for dtype in options.dtypes:
        for rows, columns in dict.fromkeys(judge.size(*size)[:2] for size in SIZES):
            size = Size(rows, columns, dtype)
            judge.compare(judge.example(size), size, ACCURACY)
        # Memory is poisoned under deterministic algorithms only, and most users run without them.
        size, free = judge.size(6, 20, dtype), functools.partial(deterministic, False)
        example = judge.example(size)
        judge.compare(example, size, ACCURACY, "without deterministic algorithms", under=free)
    # In the last dtype, usually one of 16 bits: a cached copy in float32 of a float32 tensor is the tensor itself.
    judge.compare(_changed(judge, example, size), size, ACCURACY, "the inputs of an earlier call, changed in place")

    # The examples are the same every time. A failing example is not shrunk, because that takes minutes in the
    # interpreter.
    @settings(
        derandomize=True, deadline=None, max_examples=options.examples, phases=[Phase.generate], database=None,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(
        rows=st.integers(*options.rows),
        columns=st.integers(*options.columns),
        dtype=st.sampled_from(options.dtypes),
        seed=st.integers(0, 2**32 - 1),
    )
    def drawn(rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
        size = Size(rows, columns, dtype)
        judge.compare(judge.example(size, seed + options.seed), size, ACCURACY, f"seed={seed + options.seed}")

    if options.examples:
        drawn()
    return f"{judge.calls - before} calls: {', '.join(str(d).removeprefix('torch.') for d in options.dtypes)}"


def _changed(judge: Judge, example: Example, size: Size) -> Example:
    """The tensors of ``example`` with other values, as after an optimizer's step. A tensor that cannot be changed in
    place is another one."""
    other = judge.example(size, judge.options.seed + 1)
    if [t.shape for t in other.leaves] != [t.shape for t in example.leaves]:
        return other
    leaves = []
    with torch.no_grad():
        for name, old, new in zip(example.names, example.leaves, other.leaves, strict=True):
            if name in judge.options.overwrites or 0 in old.stride():
                leaves.append(new)
            else:
                leaves.append(old.copy_(new))
    return other._replace(leaves=leaves)


def strides(judge: Judge) -> str:
    """All tensors in one layout, and each tensor alone in it while the others are dense."""
    size = judge.size(6, 20)
    for number, layout in enumerate(LAYOUTS):
        size = size._replace(dtype=judge.options.dtypes[number % len(judge.options.dtypes)])
        count = len(judge.example(size).leaves)
        alone = [{i} for i in range(count)] if count > 1 and layout in ("rows apart", "transposed") else []
        for chosen in ({*range(count)}, *alone):
            example = judge.example(size)
            if layout == "expanded":  # nobody can write to rows that share their memory
                chosen = {i for i in chosen if example.names[i] not in judge.options.overwrites}
            where = {i: placed(t, layout, i) for i, t in enumerate(example.leaves) if i in chosen}
            before = {i: place.buffer.clone() for i, place in where.items()}
            leaves = [where[i].view if i in where else t for i, t in enumerate(example.leaves)]
            which = ", ".join(example.names[i] for i in sorted(chosen)) if chosen else ""
            judge.compare(
                example._replace(leaves=leaves), size, "strides", f"{which} {layout}",
                see=lambda g, layout=layout: placed(g, layout).view,
            )  # fmt: skip
            for i, place in where.items():
                if example.names[i] not in judge.options.overwrites and not same(place.buffer.detach(), before[i]):
                    raise OpFailure(
                        CLOBBERING, f"{judge.subject.name} ({layout}): it wrote next to the input {example.names[i]}"
                    )
    return ", ".join(LAYOUTS)


def no_rows(judge: Judge) -> str:
    for dtype in judge.options.dtypes:
        size = judge.size(0, 20, dtype)
        try:
            example = judge.example(size)
        except (TypeError, ValueError) as error:
            raise NotJudged(str(error)) from error
        if all(t.numel() for t in example.leaves):
            raise NotJudged("inputs(rows=0, ...) has no tensor without elements")
        judge.compare(example, size, "no rows")
    return "gradients are zeros of the right shape"


def rows_of_zeros(judge: Judge) -> str:
    for dtype in judge.options.dtypes:
        size = judge.size(5, 20, dtype)
        example = judge.example(size)
        found = list(zip(example.leaves, judge.rows_of(size), strict=True))
        if not any(dim is not None and t.is_floating_point() for t, dim in found):
            raise NotJudged("no tensor of numbers has the rows")
        leaves = [t if dim is None or not t.is_floating_point() else _zero_ends(t, dim) for t, dim in found]
        judge.compare(example._replace(leaves=leaves), size, "rows of zeros")
    return "the first and the last row"


def _zero_ends(t: torch.Tensor, dim: int) -> torch.Tensor:
    changed = t.detach().clone()
    for end in (0, -1):
        changed.select(dim, end).zero_()
    return changed.requires_grad_(t.requires_grad)


def frozen_inputs(judge: Judge) -> str:
    size = judge.size(6, 20)
    needing = [i for i, t in enumerate(judge.example(size).leaves) if t.requires_grad]
    example = judge.example(size)
    frozen = example._replace(leaves=[t.detach() for t in example.leaves])
    judge.compare(frozen, size, "frozen inputs", "torch.no_grad", inside=torch.no_grad)
    if not needing:
        raise NotJudged("no input requires a gradient")
    for chosen in (*([i] for i in needing if len(needing) > 1), []):
        example = judge.example(size)
        leaves = [t.detach().requires_grad_(i in chosen) for i, t in enumerate(example.leaves)]
        what = f"only {example.names[chosen[0]]} requires a gradient" if chosen else "nothing requires a gradient"
        found = judge.compare(example._replace(leaves=leaves), size, "frozen inputs", what)
        if not chosen and any(y is not None and y.requires_grad for y in found.results):
            raise OpFailure("frozen inputs", f"{judge.subject.name}: a result has a graph, and no input needs one")
    results = found.results
    if len(results) > 1:  # these had no graph
        results = judge.compare(judge.example(size), size, "frozen inputs").results
    differentiable = [i for i, y in enumerate(results) if y is not None and y.requires_grad]
    several = len(differentiable) > 1
    for only in differentiable if several else ():
        what = f"only result {only} has a gradient"
        judge.compare(judge.example(size), size, "frozen inputs", what, only=only)
    return f"each input alone, none, {'each result alone, ' if several else ''}and torch.no_grad"


def retained_graph(judge: Judge) -> str:
    """Two backward passes of one graph, and a backward after other calls."""
    for dtype in judge.options.dtypes:
        size = judge.size(7, 20, dtype)
        example = judge.example(size)
        if not any(t.requires_grad for t in example.leaves):
            raise NotJudged("no input requires a gradient")
        with poisoned(), raising("retained graph", f"{judge.subject.name}({size}) raised"):
            op, other = example.bind(judge.subject.op), judge.example(size, judge.options.seed + 1)
            results = results_of(op(*example.leaves))
            upstream = _drawn(results)
            first = gradients_of(results, example.leaves, upstream, keep=True)
            first = [g if g is None else g.clone() for g in first]
            second = gradients_of(results, example.leaves, upstream, keep=True)
            run(other.bind(judge.subject.op), other.leaves)
            after = gradients_of(results, example.leaves, upstream)
        for which, found in (("the second backward pass", second), ("a backward pass after another call", after)):
            _check_same(Ran([], found), Ran([], first), example, "retained graph", judge.subject.name, which)
    return "three backward passes, another call between them"


def _drawn(results: MaybeTensors) -> MaybeTensors:
    return [None if y is None or not y.is_floating_point() else torch.randn(y.shape).to(y) for y in results]


def _check_same(found: Ran, expected: Ran, example: Example, check: str, name: str, which: str) -> None:
    wanted = [n for n, t in zip(example.names, example.leaves, strict=True) if t.requires_grad]
    names = [*(f"result {i}" for i in range(len(found.results))), *(f"gradient {name}" for name in wanted)]
    ours, first = found.results + found.gradients, expected.results + expected.gradients
    for what, one, other in zip(names, ours, first, strict=True):
        if not same(one, other):
            count = ""
            if one is not None and other is not None:
                count = f" in {int(torch.ne(one, other).sum())} of {one.numel()} places"
            raise OpFailure(check, f"{name}: {what} of {which} differs from the first's{count}")


def determinism(judge: Judge) -> str:
    """The same bits in every run, while torch may choose nondeterministic algorithms, as for users. Earlier results
    stay in memory, so the next run has other addresses."""
    repeats, sizes = 3, [(7, 20)]
    if judge.subject.device.type == "cuda":  # only a GPU ends the programs of a large call in any order
        sizes.append((judge.options.rows[1], judge.options.columns[1]))
    for dtype in judge.options.dtypes:
        for rows, columns in sizes:
            size = judge.size(rows, columns, dtype)
            with deterministic(False), raising("determinism", f"{judge.subject.name}({size}) raised"):
                runs, examples = [], [judge.example(size) for _ in range(repeats)]
                for example in examples:
                    op = example.bind(judge.subject.op)
                    results = results_of(op(*example.leaves))
                    seed_generators(judge.options.seed)
                    runs.append(Ran(results, gradients_of(results, example.leaves, _drawn(results))))
            for again in runs[1:]:
                _check_same(again, runs[0], examples[0], "determinism", f"{judge.subject.name}({size})", "another run")
    return f"the same bits in {repeats} runs"


def autocast(judge: Judge) -> str:
    """With float32 inputs, then with bfloat16 for the inputs that have rows, as an earlier layer would return them."""
    if torch.float32 not in judge.options.dtypes or torch.bfloat16 not in judge.options.dtypes:
        raise NotJudged("needs float32 and bfloat16 among the dtypes")
    size, device = judge.size(6, 20, torch.float32), judge.subject.device
    inside = functools.partial(torch.autocast, device.type, dtype=torch.bfloat16)
    judge.compare(judge.example(size), size, "autocast", "autocast to bfloat16", inside=inside)
    example = judge.example(size)
    mixed = [
        t if dim is None or t.dtype != torch.float32 else t.detach().bfloat16().requires_grad_(t.requires_grad)
        for t, dim in zip(example.leaves, judge.rows_of(size), strict=True)
    ]
    # A reference that cannot mix dtypes cannot judge this call.
    with contextlib.suppress(NoTruth):
        what = "autocast, rows in bfloat16"
        judge.compare(example._replace(leaves=mixed), size, "autocast", what, inside=inside)
    return "to bfloat16"


def compiled(judge: Judge) -> str:
    """One graph for two numbers of rows, captured by Dynamo alone and then by AOTAutograd."""
    sizes = [judge.size(rows, 20) for rows in (6, 11)]
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        op = torch.compile(judge.subject.op, backend=backend, fullgraph=True)
        for size in dict.fromkeys(sizes):
            judge.compare(judge.example(size), size, "compile", f"backend {backend}", op=op)
    torch.compiler.reset()
    return "fullgraph: eager, aot_eager"


def launches(judge: Judge) -> str:
    """A second call must launch the same kernels as the first. A forward without gradients must launch no more than one
    with gradients. The number of kernels must be the requested one."""
    size, device = judge.size(16, 64), judge.subject.device
    counts: dict[str, list[dict[str, int]]] = {"forward": [], "without gradients": [], "backward": []}
    with deterministic(False), raising("launches", f"{judge.subject.name}({size}) raised"):
        run(*_bound(judge, size))  # compiles, and tunes
        calls = [_bound(judge, size) for _ in range(2)]
        results = []
        for op, leaves in calls:  # one after the other, because a call may differ from the previous call
            with launched.counted(device) as found:
                results.append(results_of(op(*leaves)))
            counts["forward"].append(dict(found))
        for of_one, (_, leaves) in zip(results, calls, strict=True):
            with launched.counted(device) as found:
                gradients_of(of_one, leaves)
            counts["backward"].append(dict(found))
        for op, leaves in calls:
            with launched.counted(device) as found, torch.no_grad():
                op(*fresh(leaves))
            counts["without gradients"].append(dict(found))
    totals = {name: [sum(found.values()) for found in of] for name, of in counts.items()}
    for name, (first, second) in counts.items():
        if first != second:
            raise OpFailure("launches", f"{judge.subject.name}: {name}: {first}, and in a second call {second}")
    if totals["without gradients"][0] > totals["forward"][0]:
        raise OpFailure(
            "launches",
            f"{judge.subject.name}: a forward without gradients launches {counts['without gradients'][0]}, and one "
            f"with gradients {counts['forward'][0]}",
        )
    wanted = judge.options.launches
    if wanted is not None and totals["forward"][0] != wanted:
        raise OpFailure(
            "launches", f"{judge.subject.name}: a forward launches {counts['forward'][0] or 'nothing'}, not {wanted}"
        )
    if not any(map(any, totals.values())):
        raise NotJudged("no Triton kernel ran; a CPU needs TRITON_INTERPRET=1 before Triton is imported")
    return f"{totals['forward'][0]} forward, {totals['backward'][0]} backward"


def _bound(judge: Judge, size: Size) -> tuple[Op, list[torch.Tensor]]:
    example = judge.example(size)
    return example.bind(judge.subject.op), example.leaves


def host_synchronisation(judge: Judge) -> str:
    size, device = judge.size(16, 64), judge.subject.device
    with deterministic(False), raising("host synchronisation", f"{judge.subject.name}({size}) raised"):
        run(*_bound(judge, size))  # compiles
        op, leaves = _bound(judge, size)
        with launched.waits(device) as found:
            run(op, leaves)
    if found:
        names = ", ".join(dict.fromkeys(found))
        raise OpFailure("host synchronisation", f"{judge.subject.name}: on a GPU the host would wait for {names}")
    return "none" if device.type == "cuda" else "none of torch's functions that wait; a GPU shows all"


def _every_call(judge: Judge) -> str:
    return f"in all of {judge.calls} calls"


# In the order of their run. The last four were checked in every call of the others.
CHECKS: dict[str, Check] = {
    ACCURACY: Check("as near to float64 as the reference in the same dtype, forward and backward; odd sizes", accuracy),
    "strides": Check("inputs and incoming gradients of any strides, in gaps of NaN", strides),
    "no rows": Check("inputs without rows", no_rows),
    "rows of zeros": Check("rows that are all zero", rows_of_zeros),
    "frozen inputs": Check(
        "only one input, or none, requires a gradient; only one result has one; torch.no_grad", frozen_inputs
    ),
    "autocast": Check("the reference's dtypes and accuracy under torch.autocast", autocast),
    "compile": Check("torch.compile captures it in one graph, which computes the same", compiled),
    "retained graph": Check("a second backward pass, and one after another call, gives the same bits", retained_graph),
    "determinism": Check("the same inputs give the same bits", determinism),
    "launches": Check("the same kernels each time, no more without gradients, and as many as --launches", launches),
    "host synchronisation": Check("the host waits for nothing", host_synchronisation),
    RESULTS: Check("the reference's number, shapes and dtypes of results and gradients", _every_call),
    MEMORY: Check("no element comes from memory that nobody has written", _every_call),
    ALIASING: Check("no result is a view of an input, unless --views", _every_call),
    CLOBBERING: Check("inputs, incoming gradients and results keep their values, unless --overwrites", _every_call),
}
