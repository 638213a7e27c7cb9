"""Is an op's result the same to the last bit, run after run and in whichever batch a row lies? Facts, and promises.

``python -m tools.determinism`` (on a CPU with ``TRITON_INTERPRET=1``) prints the facts of this machine as a Markdown
table; ``tests/test_ops_determinism.py`` holds them against :data:`PROMISED`.

- *Run to run*: the same inputs again, at other addresses, after other launches.
- *In any batch*: what an op computes for a row is the same whether the row is alone or in a batch, of whatever size and
  wherever in it. It is asked of results and gradients that have the rows; those that sum over the rows (a weight's
  gradient, a mean) are other numbers in another batch.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from convergence.interpreter import prepare
from convergence.records import versions
from convergence.tables import markdown, markdown_row
from liger_kernels import ops
from liger_kernels.ops._runtime import INTERPRET
from liger_kernels.ops.linear_log_probs import OUTPUTS

Tensors = dict[str, torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16)
RUNS, BATCH = "run to run", "in any batch"
REPEATS = 4

# What is promised of each case. For the GEMMs of a linear layer their library chooses an algorithm by the number of
# rows, and without reduction the fused loss has its upstream gradients in units of the batch's largest. Counts weighted
# by class are differences of running sums of float64, which begin with the batch and which no GPU adds up in a fixed
# order.
PROMISED = {
    "rms_norm, cast_then_scale": {RUNS, BATCH},
    "rms_norm, scale_then_cast": {RUNS, BATCH},
    "rms_norm, offset_scale_then_cast": {RUNS, BATCH},
    "rms_norm, no weight": {RUNS, BATCH},
    "add_rms_norm": {RUNS, BATCH},
    "layer_norm": {RUNS, BATCH},
    "layer_norm, no weight": {RUNS, BATCH},
    "gated_rms_norm": {RUNS, BATCH},
    "gated_rms_norm, gate first in groups": {RUNS, BATCH},
    "rope": {RUNS, BATCH},
    "swiglu": {RUNS, BATCH},
    "geglu": {RUNS, BATCH},
    "packed_glu": {RUNS, BATCH},
    "swiglu_linear": {RUNS},
    "geglu_linear": {RUNS},
    "cross_entropy, none": {RUNS, BATCH},
    "cross_entropy, mean": {RUNS, BATCH},
    "linear_cross_entropy, none": {RUNS},
    "linear_cross_entropy, mean": {RUNS},
    "linear_log_probs": {RUNS},
    "packing_weights": {RUNS, BATCH},
    "packing_weights, class_weight": set(),
}


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


class Case(NamedTuple):
    """An op with some options.

    Attributes:
        inputs: makes the inputs that have the rows as their first dimension, and those that all rows share.
        compute: from these, by name: what has the rows as its first dimension, and what sums over them.
    """

    inputs: Callable[[Sizes, torch.dtype], tuple[Tensors, Tensors]]
    compute: Callable[..., tuple[Tensors, Tensors]]


def _norm(formula: str, weighted: bool = True) -> Case:
    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        rows = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in ("x", "dy")}
        return rows, {"weight": torch.randn(sizes.hidden, dtype=dtype)} if weighted else {}

    def compute(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[Tensors, Tensors]:
        leaves = {"grad_x": x.requires_grad_()} | ({} if weight is None else {"grad_weight": weight.requires_grad_()})
        y = ops.rms_norm(x, weight, formula=formula)
        grads = _grads(y, leaves, dy)
        return {"y": y, "grad_x": grads.pop("grad_x")}, grads

    return Case(inputs, compute)


def _layer_norm(weighted: bool) -> Case:
    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        rows = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in ("x", "dy")}
        names = ("weight", "bias") if weighted else ()
        return rows, {name: torch.randn(sizes.hidden, dtype=dtype) for name in names}

    def compute(dy: torch.Tensor, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
        leaves = {f"grad_{name}": tensor.requires_grad_() for name, tensor in inputs.items()}
        vectors: dict[str, Any] = inputs
        y = ops.layer_norm(**vectors)
        grads = _grads(y, leaves, dy)
        return {"y": y, "grad_x": grads.pop("grad_x")}, grads

    return Case(inputs, compute)


def _gated_norm(**options: Any) -> Case:
    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        rows = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in ("x", "gate", "dy")}
        return rows, {"weight": torch.randn(sizes.hidden, dtype=dtype)}

    def compute(dy: torch.Tensor, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
        leaves = {f"grad_{name}": tensor.requires_grad_() for name, tensor in inputs.items()}
        tensors: dict[str, Any] = inputs
        y = ops.gated_rms_norm(**tensors, **options)
        grads = _grads(y, leaves, dy)
        return {"y": y, **{name: grads.pop(name) for name in ("grad_x", "grad_gate")}}, grads

    return Case(inputs, compute)


def _sum_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    names = ("x", "residual", "dy", "dtotal")
    rows = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in names}
    return rows, {"weight": torch.randn(sizes.hidden, dtype=dtype)}


def _sum(
    x: torch.Tensor, residual: torch.Tensor, dy: torch.Tensor, dtotal: torch.Tensor, weight: torch.Tensor
) -> tuple[Tensors, Tensors]:
    leaves = {
        "grad_x": x.requires_grad_(),
        "grad_residual": residual.requires_grad_(),
        "grad_weight": weight.requires_grad_(),
    }
    y, total = ops.add_rms_norm(x, residual, weight)
    grads = _grads((y, total), leaves, (dy, dtotal))
    return {"y": y, "total": total, "grad_x": grads.pop("grad_x"), "grad_residual": grads.pop("grad_residual")}, grads


def _rope_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    q_heads, k_heads, width = sizes.heads
    q, dq = (torch.randn(sizes.rows, q_heads, width, dtype=dtype) for _ in range(2))
    k, dk = (torch.randn(sizes.rows, k_heads, width, dtype=dtype) for _ in range(2))
    angle = torch.randn(sizes.rows, width)
    return {"q": q, "k": k, "dq": dq, "dk": dk, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}, {}


def _rope(
    q: torch.Tensor, k: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[Tensors, Tensors]:
    def sequence(x: torch.Tensor) -> torch.Tensor:  # a view of [1, heads, rows, width]
        return x.transpose(0, 1)[None]

    leaves = {"grad_q": q.requires_grad_(), "grad_k": k.requires_grad_()}
    turned = ops.rope(sequence(q), sequence(k), cos[None], sin[None])
    grads = _grads(turned, leaves, (sequence(dq), sequence(dk)))
    turned_q, turned_k = (x[0].transpose(0, 1) for x in turned)
    return {"q": turned_q, "k": turned_k, **grads}, {}


def _glu(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Case:
    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        return {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in ("gate", "up", "dy")}, {}

    def compute(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[Tensors, Tensors]:
        y = op(gate.requires_grad_(), up.requires_grad_())
        return {"y": y, **_grads(y, {"grad_gate": gate, "grad_up": up}, dy)}, {}

    return Case(inputs, compute)


def _packed_glu_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    width = 2 * sizes.hidden
    return {
        "x": torch.randn(sizes.rows, width, dtype=dtype),
        "dy": torch.randn(sizes.rows, width // 2, dtype=dtype),
    }, {}


def _packed_glu(x: torch.Tensor, dy: torch.Tensor) -> tuple[Tensors, Tensors]:
    y = ops.packed_glu(x.requires_grad_())
    return {"y": y, **_grads(y, {"grad_x": x}, dy)}, {}


def _glu_linear(op: Callable[..., torch.Tensor]) -> Case:
    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        rows = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in ("gate", "up", "grad_out")}
        return rows, {"weight": torch.randn(64, sizes.hidden, dtype=dtype), "bias": torch.randn(64, dtype=dtype)}

    def compute(**inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
        d_out = inputs.pop("grad_out")[:, :64]
        leaves = {f"grad_{name}": tensor.requires_grad_() for name, tensor in inputs.items()}
        out = op(**inputs)
        grads = _grads(out, leaves, d_out)
        return {"out": out, **{name: grads.pop(name) for name in ("grad_gate", "grad_up")}}, grads

    return Case(inputs, compute)


def _targets(sizes: Sizes) -> Tensors:
    targets = torch.randint(sizes.vocab, (sizes.loss_rows,))
    targets[::7] = -100
    return {"targets": targets, "grad_loss": torch.rand(sizes.loss_rows)}


def _logits(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    return {"logits": 3 * torch.randn(sizes.loss_rows, sizes.vocab, dtype=dtype), **_targets(sizes)}, {}


def _head(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    rows = {"hidden": torch.randn(sizes.loss_rows, sizes.hidden, dtype=dtype), **_targets(sizes)}
    weight = 3 * sizes.hidden**-0.5 * torch.randn(sizes.vocab, sizes.hidden)
    return rows, {"weight": weight.to(dtype), "bias": torch.randn(sizes.vocab, dtype=dtype)}


def _loss(op: Callable[..., Any], first: str, reduction: str) -> Case:
    """With "mean" the divisor is given: by default it is a sum over the rows."""

    def compute(targets: torch.Tensor, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
        d_loss = inputs.pop("grad_loss")
        leaves = {f"grad_{name}": tensor.requires_grad_() for name, tensor in inputs.items()}
        options: dict[str, Any] = {
            "reduction": reduction,
            "extras": ("log_probs", "entropy"),
            "denominator": d_loss.new_tensor(31.0),
        }
        if "weight" in inputs:
            options["chunk_size"] = _sizes(targets.device).chunk_size
        out = op(inputs.pop(first), targets=targets, **inputs, **options)
        grads = _grads(out.loss, leaves, d_loss if reduction == "none" else d_loss.new_tensor(0.7))
        rows: Tensors = {
            "log_probs": out.log_probs,
            "entropy": out.entropy,
            f"grad_{first}": grads.pop(f"grad_{first}"),
        }
        return ({"loss": out.loss} | rows, grads) if reduction == "none" else (rows, {"loss": out.loss} | grads)

    return Case(_logits if first == "logits" else _head, compute)


def _log_probs(targets: torch.Tensor, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
    d_log_probs = inputs.pop("grad_loss")
    leaves = {f"grad_{name}": tensor.requires_grad_() for name, tensor in inputs.items()}
    given: dict[str, Any] = {"targets": targets, **inputs, "temperature": 0.7, "outputs": OUTPUTS}
    rows: Tensors = ops.linear_log_probs(**given)._asdict()
    grads = _grads((rows["log_probs"], rows["entropy"]), leaves, (d_log_probs, d_log_probs.square()))
    return rows | {"grad_hidden": grads.pop("grad_hidden")}, grads


def _packed(sizes: Sizes, dtype: torch.dtype, class_weight: bool) -> tuple[Tensors, Tensors]:
    labels = torch.randint(sizes.vocab, (sizes.rows, 24))
    labels[torch.rand(labels.shape) < 0.3] = -100
    return {"labels": labels, "like": torch.zeros(sizes.rows, dtype=dtype)}, (
        {"class_weight": torch.rand(sizes.vocab)} if class_weight else {}
    )


def _packing(labels: torch.Tensor, like: torch.Tensor, **options: Any) -> tuple[Tensors, Tensors]:
    """Every row is a sequence."""
    out = ops.packing_weights(labels, loss_reduction="square", dtype=like.dtype, **options)
    rows = {"row_weight": out.row_weight.view(labels.shape), "counts": out.counts.view(labels.shape)}
    return rows, {"denominator": out.denominator}


def _grads(
    results: torch.Tensor | tuple[torch.Tensor, ...], leaves: Tensors, upstream: torch.Tensor | tuple[torch.Tensor, ...]
) -> Tensors:
    return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), upstream), strict=True))


CASES = {
    **{f"rms_norm, {f}": _norm(f) for f in ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast")},
    "rms_norm, no weight": _norm("cast_then_scale", weighted=False),
    "add_rms_norm": Case(_sum_inputs, _sum),
    "layer_norm": _layer_norm(weighted=True),
    "layer_norm, no weight": _layer_norm(weighted=False),
    "gated_rms_norm": _gated_norm(),
    "gated_rms_norm, gate first in groups": _gated_norm(gate_first=True, groups=8),
    "rope": Case(_rope_inputs, _rope),
    "swiglu": _glu(ops.swiglu),
    "geglu": _glu(ops.geglu),
    "packed_glu": Case(_packed_glu_inputs, _packed_glu),
    "swiglu_linear": _glu_linear(ops.swiglu_linear),
    "geglu_linear": _glu_linear(ops.geglu_linear),
    **{f"cross_entropy, {r}": _loss(ops.cross_entropy, "logits", r) for r in ("none", "mean")},
    **{f"linear_cross_entropy, {r}": _loss(ops.linear_cross_entropy, "hidden", r) for r in ("none", "mean")},
    "linear_log_probs": Case(_head, _log_probs),
    "packing_weights": Case(partial(_packed, class_weight=False), _packing),
    "packing_weights, class_weight": Case(partial(_packed, class_weight=True), _packing),
}


def facts(case: Case, dtype: torch.dtype, device: torch.device) -> list[Fact]:
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
    """What :data:`PROMISED` says of case ``name`` and ``found`` does not."""
    verdicts = [
        (fact.tensor, kind, value) for fact in found for kind, value in ((RUNS, fact.runs), (BATCH, fact.batch))
    ]
    return [f"{tensor}: {kind}" for tensor, kind, value in verdicts if kind in PROMISED[name] and value is False]


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
            cells.append(", ".join(kind for kind in (RUNS, BATCH) if kind in PROMISED[name]) or "nothing")
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
