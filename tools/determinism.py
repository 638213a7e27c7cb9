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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from convergence.arms.interpreter import prepare
from convergence.report.records import versions
from convergence.tables import markdown, markdown_row
from liger_kernels import ops
from liger_kernels.ops.loss.linear_log_probs import OUTPUTS
from liger_kernels.ops.runtime.dispatch import INTERPRET

Tensors = dict[str, torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16)
RUNS, BATCH = "run to run", "in any batch"
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


def _differentiated(
    op: Callable[..., Any],
    outputs: Sequence[str] = ("y",),
    shared: Collection[str] = (),
    fixed: Collection[str] = (),
    **inputs: torch.Tensor,
) -> tuple[Tensors, Tensors]:
    """The ``outputs`` of ``op`` and the gradients of its inputs, but for those that are ``fixed``; apart from them the
    gradients of those that rows share. The upstream gradient of an output "y" is the input "dy"."""
    upstream = [inputs.pop(f"d{name}") for name in outputs]
    leaves = {f"grad_{name}": x.requires_grad_() for name, x in inputs.items() if name not in fixed}
    results = op(**inputs)
    results = results if isinstance(results, tuple) else (results,)
    grads = _grads(results, leaves, upstream)
    summed = {f"grad_{name}": grads.pop(f"grad_{name}") for name in shared}
    return {**dict(zip(outputs, results, strict=True)), **grads}, summed


def _grads(results: Any, leaves: Tensors, upstream: Any) -> Tensors:
    return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), upstream), strict=True))


def _case(
    op: Callable[..., Any], rows: Sequence[str], shared: Sequence[str] = (), outputs: Sequence[str] = ("y",)
) -> DeterminismCase:
    """``op`` of inputs [rows, hidden], and of vectors [hidden] that all rows share."""

    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        names = (*rows, *(f"d{name}" for name in outputs))
        by_row = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in names}
        return by_row, {name: torch.randn(sizes.hidden, dtype=dtype) for name in shared}

    return DeterminismCase(inputs, partial(_differentiated, op, outputs, shared))


def _rope_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    q_heads, k_heads, width = sizes.heads
    q, dq = (torch.randn(sizes.rows, q_heads, width, dtype=dtype) for _ in range(2))
    k, dk = (torch.randn(sizes.rows, k_heads, width, dtype=dtype) for _ in range(2))
    angle = torch.randn(sizes.rows, width)
    return {"q": q, "k": k, "dq": dq, "dk": dk, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}, {}


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of views of [1, heads, rows, width]."""
    q, k = (x.transpose(0, 1)[None] for x in (q, k))
    return tuple(x.squeeze(0).transpose(0, 1) for x in ops.rope(q, k, cos[None], sin[None]))


def _packed_glu_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    widths = {"x": 2 * sizes.hidden, "dy": sizes.hidden}
    return {name: torch.randn(sizes.rows, width, dtype=dtype) for name, width in widths.items()}, {}


def _experts_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    hidden, dy = (torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for _ in range(2))
    rows = {"hidden": hidden, "dy": dy, "ids": torch.randint(8, (sizes.rows, 2)), "weights": torch.rand(sizes.rows, 2)}
    gate_up, down = (torch.randn(8, *size, dtype=dtype) for size in ((64, sizes.hidden), (sizes.hidden, 32)))
    return rows, {"gate_up": gate_up, "down": down}


def _glu_linear(op: Callable[..., torch.Tensor]) -> DeterminismCase:
    def inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        rows = {name: torch.randn(sizes.rows, sizes.hidden, dtype=dtype) for name in ("gate", "up", "grad_out")}
        return rows, {"weight": torch.randn(64, sizes.hidden, dtype=dtype), "bias": torch.randn(64, dtype=dtype)}

    def compute(grad_out: torch.Tensor, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
        return _differentiated(op, ("out",), ("weight", "bias"), **inputs, dout=grad_out[:, :64])

    return DeterminismCase(inputs, compute, (RUNS,))


def _adapted(x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ops.lora_linear(x, lambda x: torch.nn.functional.linear(x, weight), [ops.LoraAdapter(a, b, 2.0)])


def _decomposed(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor
) -> torch.Tensor:
    adapter = ops.LoraAdapter(a, b, 2.0)
    norm = ops.dora_norm(weight, adapter)
    return ops.dora_linear(x, lambda x: torch.nn.functional.linear(x, weight), adapter, magnitude, norm)


def _dora_linear_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    rows, shared = _lora_linear_inputs(sizes, dtype)
    return rows, shared | {"magnitude": torch.rand(64)}


def _dora_norm_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Its rows are those of the weight and of B."""
    rows = {"weight": torch.randn(sizes.rows, sizes.hidden, dtype=dtype), "b": torch.randn(sizes.rows, 16)}
    return rows, {"a": torch.randn(16, sizes.hidden)}


def _dora_norm(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[Tensors, Tensors]:
    return {"norm": ops.dora_norm(weight, ops.LoraAdapter(a, b, 2.0))}, {}


def _mlp(x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A gated MLP whose projections are one and the same; the last one is its transpose."""
    one = ops.Projection(weight, None, [ops.LoraAdapter(a, b, 2.0)])
    return ops.gated_mlp(x, one, one, ops.Projection(weight.t(), None, [ops.LoraAdapter(b.t(), a.t(), 2.0)]))


def _several(x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    projections = [ops.Projection(weight, None, [ops.LoraAdapter(a, b, scale)]) for scale in (2.0, 0.5)]
    return torch.cat(ops.adapted_linears(x, projections), dim=-1)


def _lora_linear_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    rows = {"x": torch.randn(sizes.rows, sizes.hidden, dtype=dtype), "dy": torch.randn(sizes.rows, 64, dtype=dtype)}
    return rows, {"weight": torch.randn(64, sizes.hidden, dtype=dtype), "a": torch.randn(16, sizes.hidden)} | {
        "b": torch.randn(64, 16)
    }


def _mlp_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    rows, shared = _lora_linear_inputs(sizes, dtype)
    return rows | {"dy": torch.randn(sizes.rows, sizes.hidden, dtype=dtype)}, shared


def _several_inputs(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    rows, shared = _lora_linear_inputs(sizes, dtype)
    return rows | {"dy": torch.randn(sizes.rows, 2 * 64, dtype=dtype)}, shared


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


def _loss(op: Callable[..., Any], first: str, reduction: str) -> DeterminismCase:
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
        rows = {"log_probs": out.log_probs, "entropy": out.entropy, f"grad_{first}": grads.pop(f"grad_{first}")}
        return ({"loss": out.loss} | rows, grads) if reduction == "none" else (rows, {"loss": out.loss} | grads)

    return DeterminismCase(_logits, compute) if first == "logits" else DeterminismCase(_head, compute, (RUNS,))


def _log_probs(targets: torch.Tensor, invariant: bool = False, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
    d_log_probs = inputs.pop("grad_loss")
    leaves = {f"grad_{name}": tensor.requires_grad_() for name, tensor in inputs.items()}
    given: dict[str, Any] = {
        "targets": targets,
        **inputs,
        "temperature": 0.7,
        "outputs": OUTPUTS,
        "invariant": invariant,
    }
    ids = torch.stack([targets.clamp(min=-1), targets.clamp(min=0), targets.clamp(min=0) // 2], 1)
    rows: Tensors = ops.linear_log_probs(**given, ids=ids)._asdict()
    of_ids = torch.stack([d_log_probs, d_log_probs.square(), -d_log_probs], 1)
    results = rows["log_probs"], rows["entropy"], rows["id_log_probs"]
    grads = _grads(results, leaves, (d_log_probs, d_log_probs.square(), of_ids))
    return rows | {"grad_hidden": grads.pop("grad_hidden")}, grads


def _heads(sizes: Sizes, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    rows, shared = _head(sizes, dtype)
    rows["mask"] = rows.pop("targets") >= 0
    teacher = torch.randn(sizes.vocab, sizes.hidden, dtype=dtype)
    return rows | {"teacher_hidden": torch.randn_like(rows["hidden"])}, shared | {"teacher_weight": teacher}


def _divergence(grad_loss: torch.Tensor, mask: torch.Tensor, **inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
    leaves = {f"grad_{name}": inputs[name].requires_grad_() for name in ("hidden", "weight", "bias")}
    given: dict[str, Any] = {**inputs, "temperature": 0.7, "outputs": ops.DivergenceOutput._fields}
    rows: Tensors = ops.linear_divergence(beta=0.3, mask=mask, **given)._asdict()
    grads = _grads((rows["divergence"], rows["entropy"]), leaves, (grad_loss, grad_loss.square()))
    return rows | {"grad_hidden": grads.pop("grad_hidden")}, grads


def _packed(sizes: Sizes, dtype: torch.dtype, class_weight: bool) -> tuple[Tensors, Tensors]:
    labels = torch.randint(sizes.vocab, (sizes.rows, 24))
    labels[torch.rand(labels.shape) < 0.3] = -100
    rows = {"labels": labels, "like": torch.zeros(sizes.rows, dtype=dtype)}
    return rows, {"class_weight": torch.rand(sizes.vocab)} if class_weight else {}


def _packing(labels: torch.Tensor, like: torch.Tensor, **options: Any) -> tuple[Tensors, Tensors]:
    """Every row is a sequence."""
    out = ops.packing_weights(labels, loss_reduction="square", dtype=like.dtype, **options)
    rows = {"row_weight": out.row_weight.view(labels.shape), "counts": out.counts.view(labels.shape)}
    return rows, {"denominator": out.denominator}


# For the GEMMs of a linear layer their library chooses an algorithm by the number of rows, and without reduction the
# fused loss has its upstream gradients in units of the batch's largest. Counts weighted by class are differences of
# running sums of float64, which begin with the batch and which no GPU adds up in a fixed order.
CASES = {
    **{
        f"rms_norm, {formula}": _case(partial(ops.rms_norm, formula=formula), ["x"], ["weight"])
        for formula in ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast")
    },
    "rms_norm, no weight": _case(ops.rms_norm, ["x"]),
    "add_rms_norm": _case(ops.add_rms_norm, ["x", "residual"], ["weight"], outputs=["y", "total"]),
    "layer_norm": _case(ops.layer_norm, ["x"], ["weight", "bias"]),
    "layer_norm, no weight": _case(ops.layer_norm, ["x"]),
    "gated_rms_norm": _case(ops.gated_rms_norm, ["x", "gate"], ["weight"]),
    "gated_rms_norm, gate first in groups": _case(
        partial(ops.gated_rms_norm, gate_first=True, groups=8), ["x", "gate"], ["weight"]
    ),
    "rope": DeterminismCase(_rope_inputs, partial(_differentiated, _rope, ("q", "k"), fixed=("cos", "sin"))),
    "swiglu": _case(ops.swiglu, ["gate", "up"]),
    "geglu": _case(ops.geglu, ["gate", "up"]),
    "packed_glu": DeterminismCase(_packed_glu_inputs, partial(_differentiated, ops.packed_glu)),
    "experts": DeterminismCase(
        _experts_inputs, partial(_differentiated, ops.experts, shared=("gate_up", "down"), fixed=("ids",)), (RUNS,)
    ),
    "swiglu_linear": _glu_linear(ops.swiglu_linear),
    "geglu_linear": _glu_linear(ops.geglu_linear),
    "lora_linear": DeterminismCase(
        _lora_linear_inputs, partial(_differentiated, _adapted, shared=("weight", "a", "b")), (RUNS,)
    ),
    "adapted_linears": DeterminismCase(
        _several_inputs, partial(_differentiated, _several, shared=("weight", "a", "b")), (RUNS,)
    ),
    "dora_linear": DeterminismCase(
        _dora_linear_inputs, partial(_differentiated, _decomposed, shared=("weight", "a", "b", "magnitude")), (RUNS,)
    ),
    "dora_norm": DeterminismCase(_dora_norm_inputs, _dora_norm, (RUNS,)),
    "gated_mlp": DeterminismCase(_mlp_inputs, partial(_differentiated, _mlp, shared=("weight", "a", "b")), (RUNS,)),
    **{f"cross_entropy, {r}": _loss(ops.cross_entropy, "logits", r) for r in ("none", "mean")},
    **{f"linear_cross_entropy, {r}": _loss(ops.linear_cross_entropy, "hidden", r) for r in ("none", "mean")},
    "linear_log_probs": DeterminismCase(_head, _log_probs, (RUNS,)),
    "linear_log_probs, invariant": DeterminismCase(_head, partial(_log_probs, invariant=True)),
    "linear_divergence": DeterminismCase(_heads, _divergence, (RUNS,)),
    "packing_weights": DeterminismCase(partial(_packed, class_weight=False), _packing),
    "packing_weights, class_weight": DeterminismCase(partial(_packed, class_weight=True), _packing, ()),
}


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
