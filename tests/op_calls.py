"""Calls of every op on CPU tensors, for tests that compile or trace kernels without a GPU.

:data:`CASES` holds calls by op, for each set of options that makes another program: dtypes, ``None`` arguments,
constexpr switches, the largest tiles. An op without a case is called as the table of ops says. A call that requires
gradients is also run backward. All run in a process without the interpreter, in which ``launch`` is replaced.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.op_table import FIRST

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def new(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def table_cases() -> None:
    """Rows as wide as those of a model."""
    for op in (op for name, op in FIRST.items() if name not in CASES):
        for dtype in (BF16, FP32):
            run(op.op, *op.leaves(64, dtype, torch.device("cpu"), columns=4096, sizes={"a": 16, "v": 1000}))


def rms_norm_cases() -> None:
    from liger_kernels.ops import add_rms_norm, rms_norm

    for formula in ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast"):
        run(rms_norm, new(64, 4096), new(4096), formula=formula)
    for hidden in (80, 8192):
        run(rms_norm, new(64, hidden, dtype=FP32), new(hidden, dtype=FP32))
    run(rms_norm, new(64, 4096, dtype=FP16), new(4096, dtype=FP32))
    run(rms_norm, new(64, 4096))
    run(rms_norm, new(64, 4096), new(4096, grad=False))
    run(rms_norm, new(64, 4096, grad=False), new(4096))
    run(rms_norm, new(64, 4096, grad=False), new(4096, grad=False))
    run(add_rms_norm, *(new(64, 65536, dtype=FP32) for _ in range(2)), new(65536, dtype=FP32))  # the widest: once
    run(add_rms_norm, new(64, 4096), new(64, 4096), new(4096), formula="offset_scale_then_cast")
    run(add_rms_norm, new(64, 4096), new(64, 4096, dtype=FP32), new(4096))
    run(add_rms_norm, new(64, 4096, dtype=FP16), new(64, 4096), new(4096, dtype=FP32, grad=False))
    run(add_rms_norm, new(64, 4096, grad=False), new(64, 4096))
    run(add_rms_norm, new(64, 4096, grad=False), new(64, 4096, grad=False), new(4096))
    run(add_rms_norm, new(64, 4096, grad=False), new(64, 4096, grad=False), new(4096, grad=False))


def layer_norm_cases() -> None:
    from liger_kernels.ops import layer_norm

    run(layer_norm, new(64, 4096), new(4096), new(4096))
    run(layer_norm, new(64, 4096), new(4096), zero_centered=True)
    run(layer_norm, new(64, 4096, dtype=FP16), None, new(4096, dtype=FP32))
    run(layer_norm, new(64, 4096))
    run(layer_norm, new(64, 4096), new(4096, dtype=FP32), new(4096, dtype=FP32), dtype=FP32)
    for hidden in (80, 8192, 65536):
        run(layer_norm, new(64, hidden, dtype=FP32), *(new(hidden, dtype=FP32) for _ in range(2)))
    for one in range(4):  # the gradient of one alone, or none
        shapes = enumerate(((64, 4096), (4096,), (4096,)))
        run(layer_norm, *(new(*shape, grad=i == one) for i, shape in shapes))


def gated_rms_norm_cases() -> None:
    from liger_kernels.ops import gated_rms_norm
    from liger_kernels.ops._gated_rms_norm import ACTIVATIONS, FORMULAS

    for (i, activation), (j, formula) in itertools.product(enumerate(ACTIVATIONS), enumerate(FORMULAS)):
        # Every pair of options: no program has a branch on all three.
        options: dict[str, Any] = {"activation": activation, "gate_first": (i + j) % 2 == 0, "formula": formula}
        run(gated_rms_norm, new(64, 128), new(64, 128), new(128), **options)
    for gate_first in (False, True):
        run(gated_rms_norm, new(64, 4096), new(64, 4096), new(4096, dtype=FP32), groups=8, gate_first=gate_first)
        hidden = 65536 if gate_first else 80  # the widest takes longest: once
        given = (new(64, hidden, dtype=FP32), new(64, hidden, dtype=FP32), new(hidden, dtype=FP32))
        run(gated_rms_norm, *given, gate_first=gate_first)
    for one in range(4):  # the gradient of one alone, or none
        leaves = [new(*shape, grad=i == one) for i, shape in enumerate(((64, 8192), (64, 8192), (8192,)))]
        run(gated_rms_norm, *leaves, gate_first=one % 2 == 0)
    run(gated_rms_norm, new(64, 8192, dtype=FP16), new(64, 8192, dtype=FP32), new(8192))


def rope_cases() -> None:
    from liger_kernels.ops import rope
    from liger_kernels.ops._rope import PAIRINGS

    def angles(batch: int, rotary_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [new(batch, 16, rotary_dim, dtype=dtype, grad=False) for _ in range(2)]

    for pairing in PAIRINGS:
        run(rope, new(2, 32, 16, 128), new(2, 8, 16, 128), *angles(1, 128, BF16), pairing=pairing)
    complex_halves = new(1, 16, 64, 2, dtype=FP32, grad=False).unbind(-1)
    run(rope, new(2, 40, 16, 128), None, *complex_halves, pairing="interleaved_repeat", rotary_dim=128, inverse=True)
    run(rope, new(2, 40, 16, 192, dtype=FP16), new(2, 1, 16, 192), *angles(2, 96, FP32), pairing="interleaved")
    run(rope, new(2, 128, 16, 256, dtype=FP32), new(2, 128, 16, 256, dtype=FP32), *angles(2, 256, FP32))
    run(rope, new(2, 32, 16, 128), new(2, 8, 16, 128, grad=False), *angles(1, 128, BF16))
    run(rope, new(2, 32, 16, 128, grad=False), new(2, 8, 16, 128), *angles(1, 128, BF16))


def glu_cases() -> None:
    from liger_kernels.ops import geglu, swiglu, swiglu_linear

    for dtype in (BF16, FP32):
        run(geglu, new(64, 11008, dtype=dtype), new(64, 11008, dtype=dtype))
        run(swiglu_linear, new(64, 11008, dtype=dtype), new(64, 11008, dtype=dtype), new(8, 11008, dtype=dtype))
    run(geglu, new(64, 11008), new(64, 11008), approximate="none")
    run(swiglu, *new(64, 2 * 11008, dtype=FP16).chunk(2, dim=-1))
    run(swiglu, *new(64, 2 * 40).chunk(2, dim=-1))
    run(swiglu, new(64, 11008), new(64, 11008, dtype=FP32, grad=False))
    run(swiglu, new(64, 11008, grad=False), new(64, 11008))


def packed_glu_cases() -> None:
    from liger_kernels.ops import GluFormula, packed_glu

    for dtype in (BF16, FP32):
        for inner in (768, 2880):
            run(packed_glu, new(64, 2 * inner, dtype=dtype))
    gates = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
    for gate in (
        GluFormula(limit=10.0),
        GluFormula(**gates, interleaved=True),
        GluFormula(**gates, gate_first=False),
        GluFormula("gelu_tanh"),
    ):
        run(packed_glu, new(64, 1536), gate=gate)
    run(packed_glu, new(64, 2 * 40, dtype=FP16), gate=GluFormula("gelu", interleaved=True, gate_first=False))


def experts_cases() -> None:
    from liger_kernels.ops import GluFormula, experts

    # Sorted by keys of eight bits, and of 32, which the kernels load as integers whatever the dtype is.
    for n_experts, dtype, hidden in ((4, BF16, 2048), (4, FP32, 2880), (4, FP16, 40), (300, BF16, 2048)):
        ids, weights = torch.zeros(8, 4, dtype=torch.int64), new(8, 4, dtype=dtype)
        shapes = (n_experts, 32, hidden), (n_experts, hidden, 16), (n_experts, 32), (n_experts, hidden)
        gate_up, down, *biases = (new(*shape, dtype=dtype) for shape in shapes)
        if n_experts == 4:
            run(experts, new(8, hidden, dtype=dtype), ids, weights, gate_up, down)
        gate = GluFormula(alpha=1.702, limit=7.0, offset=1.0, interleaved=True)
        run(experts, new(8, hidden, dtype=dtype), ids, weights.float(), gate_up, down, gate, *biases)


def experts_adapters_cases() -> None:
    from liger_kernels.ops import ExpertsAdapter, experts

    def call(*given: Any, up: list[torch.Tensor], lower: list[torch.Tensor]) -> torch.Tensor:
        of_both = [[ExpertsAdapter(*pair, 2.0)] for pair in (up, lower)]
        return experts(*given, gate_up_adapters=of_both[0], down_adapters=of_both[1])

    ids = torch.zeros(8, 4, dtype=torch.int64)
    kinds = ((4, BF16, FP32, 16), (300, BF16, BF16, 4), (4, FP32, FP32, 256))
    for n_experts, dtype, of_adapter, ranks in kinds:
        gate_up, down = (new(n_experts, *shape, dtype=dtype, grad=False) for shape in ((128, 256), (256, 64)))
        up, lower = (
            [new(n_experts, ranks, inputs, dtype=of_adapter), new(n_experts, outputs, ranks, dtype=of_adapter)]
            for outputs, inputs in ((128, 256), (256, 64))
        )
        given = new(8, 256, dtype=dtype), ids, new(8, 4, dtype=dtype), gate_up, down
        run(call, *given, up=up, lower=lower)


def lora_linear_cases() -> None:
    import torch.nn.functional as F

    from liger_kernels.ops import LoraAdapter, Projection, adapted_linears, lora_linear

    def adapter(ranks: int, inputs: int, outputs: int) -> LoraAdapter:
        return LoraAdapter(new(ranks, inputs, dtype=FP32), new(outputs, ranks, dtype=FP32), 2.0)

    def call(x: torch.Tensor, weight: torch.Tensor, *adapters: LoraAdapter) -> torch.Tensor:
        return lora_linear(x, lambda x: F.linear(x, weight), adapters)

    for dtype, of_adapter, ranks in ((BF16, FP32, 16), (BF16, BF16, 4), (FP16, FP32, 64), (FP32, FP32, 16)):
        a, b = new(ranks, 1024, dtype=of_adapter), new(2048, ranks, dtype=of_adapter)
        run(call, new(64, 1024, dtype=dtype), new(2048, 1024, dtype=dtype), LoraAdapter(a, b, 2.0))
    a, b, bias = new(256, 64, dtype=FP32), new(32, 256, dtype=FP32), new(32, dtype=FP32)
    run(call, new(4096, 64), new(32, 64), LoraAdapter(a, b, 2.0, bias, dropped=new(4096, 64, dtype=FP32)))
    run(call, new(16384, 64), new(32, 64), LoraAdapter(new(64, 64), new(32, 64)))
    shared = [Projection(new(n, 1024, grad=False), None, [adapter(16, 1024, n)]) for n in (2048, 512, 512)]
    run(adapted_linears, new(64, 1024), shared)


def gated_mlp_cases() -> None:
    from liger_kernels.ops import LoraAdapter, Projection, gated_mlp

    sizes = {"gate": (1408, 1024), "up": (1408, 1024), "down": (1024, 1408)}
    for dtype, of_adapter, ranks in ((BF16, FP32, 16), (BF16, BF16, 4), (FP16, FP32, 64), (FP32, FP32, 16)):
        projections = []
        for shape in sizes.values():
            a, b = new(ranks, shape[1], dtype=of_adapter), new(shape[0], ranks, dtype=of_adapter)
            projections.append(Projection(new(*shape, dtype=dtype, grad=False), None, [LoraAdapter(a, b, 2.0)]))
        run(gated_mlp, new(64, 1024, dtype=dtype), *projections)
    plain = [Projection(new(*shape), new(shape[0])) for shape in sizes.values()]
    run(gated_mlp, new(64, 1024), *plain, activation="gelu_tanh")


def dora_linear_cases() -> None:
    import torch.nn.functional as F

    from liger_kernels.ops import LoraAdapter
    from liger_kernels.ops.lora.dora_linear import dora_linear
    from liger_kernels.ops.lora.dora_norm import dora_norm

    def call(x: torch.Tensor, weight: torch.Tensor, adapter: LoraAdapter, m: torch.Tensor, bias: Any) -> torch.Tensor:
        return dora_linear(x, lambda x: F.linear(x, weight, bias), adapter, m, dora_norm(weight, adapter), bias)

    for dtype, of_adapter, ranks, bias in (
        *((BF16, FP32, 16, None), (FP16, FP16, 64, new(2048, dtype=FP16)), (FP32, FP32, 16, None)),
    ):
        adapter = LoraAdapter(new(ranks, 1024, dtype=of_adapter), new(2048, ranks, dtype=of_adapter), 2.0)
        x, weight = new(64, 1024, dtype=dtype), new(2048, 1024, dtype=dtype)
        run(call, x, weight, adapter, new(2048, dtype=of_adapter), bias)


def nf4_cases() -> None:
    from liger_kernels.ops.lora.nf4 import NestedScales, PackedNf4, dense_nf4

    bits: Any = {"dtype": torch.uint8}
    packed, code, offset = torch.zeros((2**13, 1), **bits), torch.zeros(16), torch.zeros(())
    nested = NestedScales(torch.zeros(256), torch.zeros(1), 256, offset)
    for dtype in (BF16, FP16, FP32):
        state = PackedNf4(code, torch.zeros(256, **bits), 64, (64, 256), dtype, nested)
        for several in (1, 2, 3):
            dense_nf4([packed] * several, [state] * several)
    dense_nf4([packed], [PackedNf4(code, torch.zeros(4), 4096, (64, 256), BF16, None)])


def cross_entropy_cases() -> None:
    from liger_kernels.ops import cross_entropy
    from liger_kernels.ops.loss.cross_entropy import EXTRAS

    targets = torch.zeros(64, dtype=torch.int64)
    for vocab in (384, 128256):
        run(cross_entropy, new(64, vocab), targets)
    run(cross_entropy, new(64, 32000, dtype=FP16), targets, reduction="none", z_loss=1e-4)
    run(cross_entropy, new(64, 32000, dtype=FP32), targets, reduction="none", label_smoothing=0.1)
    weight = torch.ones(32000)
    options: dict[str, Any] = {"softcap": 30.0, "label_smoothing": 0.1, "extras": EXTRAS}
    run(cross_entropy, new(64, 32000), targets, class_weight=weight, **options)
    run(cross_entropy, new(64, 32000, grad=False), targets, extras=EXTRAS)


def linear_cross_entropy_cases() -> None:
    from liger_kernels.ops import linear_cross_entropy, linear_log_probs
    from liger_kernels.ops.loss.counted_rows import CountedRows
    from liger_kernels.ops.loss.linear_log_probs import OUTPUTS

    targets = torch.zeros(64, dtype=torch.int64)
    for reduction in ("mean", "none"):
        run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, reduction=reduction, softcap=30.0)
        run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, new(32000), reduction=reduction, chunk_size=32)
    run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, memory="small")
    CountedRows.first(targets, -100, 32000, 32)  # alone: nothing is launched, so the rows that it finds are none
    for memory in ("fast", "small"):
        options: dict[str, Any] = {"outputs": OUTPUTS, "temperature": 0.7, "memory": memory}
        run(linear_log_probs, new(64, 16), new(32000, 16), targets, softcap=30.0, **options)
    for n_ids in (3, 64):  # of all classes in one slab, with the entropy's gradient
        ids = torch.zeros((64, n_ids), dtype=torch.int64)
        run(linear_log_probs, new(64, 16), new(32000, 16), targets, outputs=("entropy",), ids=ids)
    run(linear_log_probs, new(64, 16), new(32000, 16), targets, softcap=30.0, ids=ids, memory="small")


def linear_divergence_cases() -> None:
    from liger_kernels.ops import linear_divergence

    mask = torch.ones(64, dtype=torch.bool)
    outputs = ("divergence", "entropy", "max_abs_difference")
    for beta in (0.0, 1.0, 0.3):
        heads = new(64, 16), new(128256, 16), new(64, 32, grad=False), new(128256, 32, grad=False)
        run(linear_divergence, *heads, beta, mask=mask)
        run(linear_divergence, *heads, beta, outputs=outputs, softcap=30.0, teacher_softcap=30.0, temperature=0.7)
    heads = new(64, 16), new(1000, 16), new(64, 32, dtype=FP16, grad=False), new(1000, 32, dtype=FP16, grad=False)
    run(linear_divergence, *heads, 0.3, memory="small", logit_scale=1.5)
    for beta in (0.3, 1.0):
        run(linear_divergence, *(new(*t.shape, dtype=FP32, grad=t.requires_grad) for t in heads), beta, outputs=outputs)
    run(linear_divergence, *(new(*t.shape, dtype=FP16, grad=t.requires_grad) for t in heads), 0.0)


CASES: dict[str, Callable[[], None]] = {  # what takes longest first, and what shares kernels an even number apart
    "cross_entropy": cross_entropy_cases,
    "rms_norm": rms_norm_cases,
    "linear_cross_entropy": linear_cross_entropy_cases,
    "gated_rms_norm": gated_rms_norm_cases,
    "layer_norm": layer_norm_cases,
    "packed_glu": packed_glu_cases,
    "rope": rope_cases,
    "experts": experts_cases,
    "glu": glu_cases,
    "lora_linear": lora_linear_cases,
    "experts with adapters": experts_adapters_cases,
    "gated_mlp": gated_mlp_cases,
    "linear_divergence": linear_divergence_cases,
    "dora_linear": dora_linear_cases,
    "nf4": nf4_cases,
    "ops without a case": table_cases,
}


def run(op: Callable[..., Any], *args: torch.Tensor, **options: Any) -> None:
    """Call ``op`` and go backward from the results that carry a gradient."""
    result = op(*args, **options)
    results = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None and y.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])


def op_modules() -> list[Any]:
    from liger_kernels import ops

    return [importlib.import_module(m.name) for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]


def in_subprocess(cache: Path, module: str, *calls: tuple[Any, ...]) -> list[Any]:
    """What functions of ``module`` return, each named and followed by its arguments, one after the other in a process
    without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "tests.op_calls", module, json.dumps(calls)]
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    found: list[Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    functions = vars(importlib.import_module(sys.argv[1]))
    json.dump([functions[name](*arguments) for name, *arguments in json.loads(sys.argv[2])], sys.stdout)
