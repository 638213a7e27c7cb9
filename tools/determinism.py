"""Is an op's result the same to the last bit, run after run and in whichever batch a row lies? Facts, and promises.

``python -m tools.determinism`` (on a CPU with ``TRITON_INTERPRET=1``) prints the facts of this machine as a Markdown
table; ``tests/test_ops_determinism.py`` holds them against what is promised.

- *Run to run*: the same inputs again, at other addresses, after other launches.
- *In any batch*: what an op computes for a row is the same whether the row is alone or in a batch, of whatever size and
  wherever in it. It is asked of results and gradients that have the rows; those that sum over the rows (a weight's
  gradient, a mean) are other numbers in another batch.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from convergence.arms.interpreter import prepare
from convergence.report.records import versions
from convergence.tables import markdown, markdown_row
from liger_kernels.ops.runtime.dispatch import INTERPRET
from tools.op_table import SAMPLED
from tools.op_table.row import BATCH, RUNS, Op

Tensors = dict[str, torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16)
REPEATS = 4


class Fact(NamedTuple):
    """Whether one tensor was the same to the last bit; ``batch`` is None for one that sums over the rows."""

    tensor: str
    runs: bool
    batch: bool | None


class Sizes(NamedTuple):
    """More rows than one program, or one chunk of the fused loss, takes; a row of logits is more than one block."""

    rows: int
    loss_rows: int
    hidden: int
    vocab: int
    heads: tuple[int, int, int]  # of queries, of keys, and how wide they are
    chunk_size: int | None


ON_CPU = Sizes(rows=300, loss_rows=40, hidden=200, vocab=9000, heads=(4, 2, 16), chunk_size=16)
ON_GPU = Sizes(rows=5003, loss_rows=5003, hidden=4096, vocab=32768, heads=(32, 8, 128), chunk_size=None)


class DeterminismCase(NamedTuple):
    """An op with some options.

    Attributes:
        inputs: makes the inputs that have the rows as their first dimension, and those that all rows share.
        compute: from these, by name: what has the rows as its first dimension, and what sums over them.
        promised: run to run, or in any batch; both where nothing else is said.
    """

    inputs: Callable[[Sizes, torch.dtype], tuple[Tensors, Tensors]]
    compute: Callable[..., tuple[Tensors, Tensors]]
    promised: Collection[str] = (RUNS, BATCH)


class _Row:
    """A row of the table as a case: the rows of a tensor become its first dimension, wherever they are.

    The upstream gradient of a result "y" is the input "upstream of y", and the gradient of an input "x" is "grad_x".
    """

    def __init__(self, name: str, op: Op) -> None:
        self._op = op
        self._has_chunks = name.startswith("linear_cross_entropy")
        self._where: dict[str, int] = {}  # which dimension of a tensor has the rows; the others have none
        self._wanted: list[str] = []

    def inputs(self, sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        rows = sizes.loss_rows if {"nv", "vk"} & {*self._op.leaf_dims} else sizes.rows
        letters = {**_letters(sizes), "n": 1, self._op.batched: rows}
        drawn = self._op.leaves(rows, dtype, torch.get_default_device(), columns=sizes.hidden, sizes=letters)
        inputs = self._op.named([t.detach() for t in drawn])
        self._wanted = [name for name, wanted in zip(inputs, self._op.differentiable(), strict=True) if wanted]
        for name, dims in zip(inputs, self._op.leaf_dims, strict=True):
            if self._op.batched in dims:
                self._where[name] = self._where[f"grad_{name}"] = dims.index(self._op.batched)
        self._options: dict[str, Any] = {"chunk_size": sizes.chunk_size} if self._has_chunks else {}
        results = self._results(inputs)
        for name, y in results.items():
            if rows in y.shape:
                self._where[name] = self._where[f"upstream of {name}"] = y.shape.index(rows)
        upstream = {f"upstream of {name}": torch.randn_like(y) for name, y in results.items() if y.is_floating_point()}
        return self._split(inputs | upstream)

    def compute(self, **given: torch.Tensor) -> tuple[Tensors, Tensors]:
        given = {name: t.movedim(0, self._where[name]) if name in self._where else t for name, t in given.items()}
        inputs = {name: t for name, t in given.items() if not name.startswith("upstream")}
        leaves = [inputs[name].requires_grad_() for name in self._wanted]
        results = self._results(inputs)
        differentiable = {name: y for name, y in results.items() if y.requires_grad}
        if not differentiable:
            return self._split(results)
        upstream = [given[f"upstream of {name}"] for name in differentiable]
        grads = torch.autograd.grad([*differentiable.values()], leaves, upstream)
        return self._split(results | {f"grad_{name}": g for name, g in zip(self._wanted, grads, strict=True)})

    def _results(self, inputs: Tensors) -> Tensors:
        results = self._op.op(**inputs, **self._options)
        if isinstance(results, torch.Tensor):
            results = (results,)
        names = getattr(results, "_fields", self._op.results.split())
        return {name: y for name, y in zip(names, results, strict=True) if y is not None}

    def _split(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Those that have the rows, and the others."""
        where = self._where
        by_row = {name: t.movedim(where[name], 0).contiguous() for name, t in tensors.items() if name in where}
        return by_row, {name: t for name, t in tensors.items() if name not in where}


def _letters(sizes: Sizes) -> dict[str, int]:
    """The lengths of the table's dimensions."""
    h, g, d = sizes.heads
    return {"h": h, "g": g, "d": d, "r": d, "o": 64, "a": 16, "e": 8, "m": 32, "t": 64, "v": sizes.vocab}


def _case(name: str, op: Op) -> DeterminismCase:
    row = _Row(name, op)
    return DeterminismCase(row.inputs, row.compute, op.promised or ())


CASES = {name: _case(name, op) for name, op in SAMPLED.items() if op.promised is not None}


def facts(case: DeterminismCase, dtype: torch.dtype, device: torch.device) -> list[Fact]:
    """Compute all rows, then some alone and in smaller batches, then all again, at other addresses each time."""
    torch.manual_seed(0)
    with device:
        by_row, shared = case.inputs(_sizes(device), dtype)
    n = len(next(iter(by_row.values())))
    kept: list[Any] = []  # freed memory would be given to the next call, which then ran at the same addresses

    def compute(start: int, stop: int) -> tuple[Tensors, Tensors]:
        kept.append(torch.empty(1000 * len(kept) + 1, device=device))
        rows = {name: tensor[start:stop].clone() for name, tensor in by_row.items()}
        kept.extend(rows.values())
        return case.compute(**rows, **{name: tensor.clone() for name, tensor in shared.items()})

    rowwise, summed = compute(0, n)
    batches = [(start, stop, compute(start, stop)[0]) for start, stop in ((7, 8), (5, 10), (2, 39), (3, n - n // 4))]
    again = [compute(0, n) for _ in range(REPEATS)]
    found = []
    for name, value in rowwise.items():
        runs = all(same_bits(value, rows[name]) for rows, _ in again)
        found.append(Fact(name, runs, all(same_bits(value[i:j], rows[name]) for i, j, rows in batches)))
    return found + [Fact(k, all(same_bits(v, sums[k]) for _, sums in again), None) for k, v in summed.items()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike ``torch.equal``, 0 is not -0 and a NaN is itself."""
    raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def broken(name: str, found: list[Fact]) -> list[str]:
    """What is promised of case ``name``, and ``found`` does not have."""
    verdicts = [
        (fact.tensor, kind, value) for fact in found for kind, value in ((RUNS, fact.runs), (BATCH, fact.batch))
    ]
    return [f"{tensor}: {kind}" for tensor, kind, value in verdicts if kind in CASES[name].promised and value is False]


def _sizes(device: torch.device) -> Sizes:
    return ON_CPU if device.type == "cpu" else ON_GPU


def table(device: torch.device) -> Iterator[str]:
    """The lines of a Markdown table of all facts."""
    yield from markdown(("op", "dtype", f"bitwise {RUNS}", f"bitwise {BATCH}", "promised"), ())
    for name, case in CASES.items():
        for dtype in DTYPES:
            found = facts(case, dtype, device)
            cells = [name, str(dtype).removeprefix("torch.")]
            for verdicts in ({f.tensor: f.runs for f in found}, {f.tensor: f.batch for f in found}):
                same, other = ([t for t, value in verdicts.items() if value is wanted] for wanted in (True, False))
                cells.append("; ".join([", ".join(same)] * bool(same) + ["**not** " + ", ".join(other)] * bool(other)))
            cells.append(", ".join(kind for kind in (RUNS, BATCH) if kind in CASES[name].promised) or "nothing")
            yield markdown_row(cells)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not INTERPRET:
        raise SystemExit("there is no GPU, so no kernel would run: set TRITON_INTERPRET=1")
    here = {"date": datetime.date.today().isoformat(), **versions(device.type)}
    if device.type == "cuda":
        here["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset")
    for known in (here, _sizes(device)._asdict()):
        print(", ".join(f"{name} {value}" for name, value in known.items()))
    print()
    for line in table(device):
        print(line, flush=True)


if __name__ == "__main__":
    prepare()
    main()
