"""Every Triton kernel compiles for every supported GPU, on a machine that has none.

The convention, for whoever adds an op: nothing is declared in the op's file. :data:`CASES` below holds calls of the
public ops on CPU tensors; a call that requires gradients is also run backward. They run in a subprocess without the
interpreter, in which ``launch`` compiles for each target what it was asked to launch, the launch choices for real sizes
included, instead of launching it. A kernel (a ``@triton.jit`` function whose name ends in ``_kernel``; every other one
is a helper that kernels call) that no case launches fails :func:`test_every_kernel_is_compiled`. So add calls for each
set of options that makes another program: dtypes, ``None`` arguments, constexpr switches, the largest tiles.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import Timeout

from convergence.files import make_once
from liger_kernels.ops._device import SHARED_MEMORY, most_warps

# name: (backend, architecture, warp size, shared memory that one program may have in bytes)
TARGETS = {
    "sm_90": ("cuda", 90, 32, 227 * 1024),  # for which every program is compiled
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}

SMALL = ("cuda", 86, 32, 99 * 1024)  # as are GPUs of capability 8.9

TRITON = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def new(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def rms_norm_cases() -> None:
    from liger_kernels.ops import add_rms_norm, rms_norm

    for formula in ("cast_then_scale", "scale_then_cast", "offset_scale_then_cast"):
        run(rms_norm, new(64, 4096), new(4096), formula=formula)
        run(add_rms_norm, new(64, 4096), new(64, 4096), new(4096), formula=formula)
    for hidden in (80, 8192, 65536):
        run(rms_norm, new(64, hidden, dtype=FP32), new(hidden, dtype=FP32))
        run(add_rms_norm, *(new(64, hidden, dtype=FP32) for _ in range(2)), new(hidden, dtype=FP32))
    run(rms_norm, new(64, 4096, dtype=FP16), new(4096, dtype=FP32))
    run(rms_norm, new(64, 4096))
    run(rms_norm, new(64, 4096), new(4096, grad=False))
    run(rms_norm, new(64, 4096, grad=False), new(4096))
    run(rms_norm, new(64, 4096, grad=False), new(4096, grad=False))
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
    for needs in itertools.product((False, True), repeat=3):
        run(layer_norm, *(new(*shape, 4096, grad=grad) for shape, grad in zip(((64,), (), ()), needs, strict=True)))


def gated_rms_norm_cases() -> None:
    from liger_kernels.ops import gated_rms_norm
    from liger_kernels.ops.gated_rms_norm import ACTIVATIONS, FORMULAS

    for (i, activation), (j, formula) in itertools.product(enumerate(ACTIVATIONS), enumerate(FORMULAS)):
        # Every pair of options: no program has a branch on all three.
        options: dict[str, Any] = {"activation": activation, "gate_first": (i + j) % 2 == 0, "formula": formula}
        run(gated_rms_norm, new(64, 128), new(64, 128), new(128), **options)
    for gate_first in (False, True):
        run(gated_rms_norm, new(64, 4096), new(64, 4096), new(4096, dtype=FP32), groups=8, gate_first=gate_first)
        hidden = 65536 if gate_first else 80  # the widest takes longest: once
        given = (new(64, hidden, dtype=FP32), new(64, hidden, dtype=FP32), new(hidden, dtype=FP32))
        run(gated_rms_norm, *given, gate_first=gate_first)
        for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
            leaves = [new(*shape, 8192, grad=grad) for shape, grad in zip(((64,), (64,), ()), needs, strict=True)]
            run(gated_rms_norm, *leaves, gate_first=gate_first)
    run(gated_rms_norm, new(64, 8192, dtype=FP16), new(64, 8192, dtype=FP32), new(8192))


def rope_cases() -> None:
    from liger_kernels.ops import rope
    from liger_kernels.ops.rope import PAIRINGS

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
    from liger_kernels.ops import geglu, geglu_linear, swiglu, swiglu_linear

    for dtype in (BF16, FP32):
        run(swiglu, new(64, 11008, dtype=dtype), new(64, 11008, dtype=dtype))
        run(geglu, new(64, 11008, dtype=dtype), new(64, 11008, dtype=dtype))
        run(geglu, new(64, 11008, dtype=dtype), new(64, 11008, dtype=dtype), approximate="none")
        for op in (swiglu_linear, geglu_linear):
            run(op, new(64, 11008, dtype=dtype), new(64, 11008, dtype=dtype), new(8, 11008, dtype=dtype))
    run(swiglu, *new(64, 2 * 11008, dtype=FP16).chunk(2, dim=-1))
    run(swiglu, *new(64, 2 * 40).chunk(2, dim=-1))
    run(swiglu, new(64, 11008), new(64, 11008, dtype=FP32, grad=False))
    run(swiglu, new(64, 11008, grad=False), new(64, 11008))


def packed_glu_cases() -> None:
    from liger_kernels.ops import Gate, packed_glu

    for dtype in (BF16, FP32):
        for inner in (768, 2880):
            run(packed_glu, new(64, 2 * inner, dtype=dtype))
    gates = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
    for gate in (Gate(limit=10.0), Gate(**gates, interleaved=True), Gate(**gates, gate_first=False), Gate("gelu_tanh")):
        run(packed_glu, new(64, 1536), gate=gate)
    run(packed_glu, new(64, 2 * 40, dtype=FP16), gate=Gate("gelu", interleaved=True, gate_first=False))


def experts_cases() -> None:
    from liger_kernels.ops import Gate, experts

    # Sorted by keys of eight bits, and of 32, which the kernels load as integers whatever the dtype is.
    for n_experts, dtype, hidden in ((4, BF16, 2048), (4, FP32, 2880), (4, FP16, 40), (300, BF16, 2048)):
        ids, weights = torch.zeros(8, 4, dtype=torch.int64), new(8, 4, dtype=dtype)
        shapes = (n_experts, 32, hidden), (n_experts, hidden, 16), (n_experts, 32), (n_experts, hidden)
        gate_up, down, *biases = (new(*shape, dtype=dtype) for shape in shapes)
        run(experts, new(8, hidden, dtype=dtype), ids, weights, gate_up, down)
        gate = Gate(alpha=1.702, limit=7.0, offset=1.0, interleaved=True)
        run(experts, new(8, hidden, dtype=dtype), ids, weights.float(), gate_up, down, gate, *biases)


def cross_entropy_cases() -> None:
    from liger_kernels.ops import cross_entropy
    from liger_kernels.ops.cross_entropy import EXTRAS

    targets = torch.zeros(64, dtype=torch.int64)
    for vocab in (384, 128256):
        run(cross_entropy, new(64, vocab), targets)
    for dtype in (FP16, FP32):
        run(cross_entropy, new(64, 32000, dtype=dtype), targets, reduction="none", z_loss=1e-4)
    weight = torch.ones(32000)
    options: dict[str, Any] = {"softcap": 30.0, "label_smoothing": 0.1, "extras": EXTRAS}
    run(cross_entropy, new(64, 32000), targets, class_weight=weight, **options)
    run(cross_entropy, new(64, 32000), targets, **options)
    run(cross_entropy, new(64, 32000, grad=False), targets, extras=EXTRAS)


def linear_cross_entropy_cases() -> None:
    from liger_kernels.ops import linear_cross_entropy, linear_log_probs
    from liger_kernels.ops._counted_rows import CountedRows
    from liger_kernels.ops.cross_entropy import EXTRAS
    from liger_kernels.ops.linear_log_probs import OUTPUTS

    targets = torch.zeros(64, dtype=torch.int64)
    for reduction in ("mean", "none"):
        run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, reduction=reduction, softcap=30.0)
        run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, new(32000), reduction=reduction, chunk_size=32)
        run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, reduction=reduction, memory="small")
    run(linear_cross_entropy, new(64, 16), new(32000, 16), targets, extras=EXTRAS, softcap=30.0, memory="small")
    CountedRows.first(targets, -100, 32000, 32)  # alone: nothing is launched, so the rows that it finds are none
    for memory in ("fast", "balanced", "small"):
        options: dict[str, Any] = {"outputs": OUTPUTS, "temperature": 0.7, "memory": memory}
        run(linear_log_probs, new(64, 16), new(32000, 16), targets, softcap=30.0, **options)


CASES: dict[str, Callable[[], None]] = {  # what takes longest first
    "cross_entropy": cross_entropy_cases,
    "rms_norm": rms_norm_cases,
    "layer_norm": layer_norm_cases,
    "gated_rms_norm": gated_rms_norm_cases,
    "linear_cross_entropy": linear_cross_entropy_cases,
    "glu": glu_cases,
    "packed_glu": packed_glu_cases,
    "experts": experts_cases,
    "rope": rope_cases,
}


def run(op: Callable[..., Any], *args: torch.Tensor, **options: Any) -> None:
    """Call ``op`` and go backward from the results that carry a gradient."""
    result = op(*args, **options)
    results = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None and y.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])


def op_modules() -> list[Any]:
    from liger_kernels import ops

    return [importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__)]


def kernels() -> set[str]:
    """The names of all kernels in ``liger_kernels.ops``."""
    from triton.runtime import KernelInterface
    from triton.runtime.interpreter import InterpretedFunction  # which Triton 3.4 does not count among the former

    found = {name: value for module in op_modules() for name, value in vars(module).items()}
    kinds = (KernelInterface, InterpretedFunction)
    return {name for name, value in found.items() if isinstance(value, kinds) and name.endswith("_kernel")}


def signature_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
    """signature, constants, attributes and options of a launch, specialised as Triton's launcher would."""
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    options = {name: values.pop(name) for name in list(values) if name not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name, parameter.default)
        kind = "constexpr"
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            kind = {
                torch.bfloat16: "*bf16",
                torch.float16: "*fp16",
                torch.float32: "*fp32",
                torch.int64: "*i64",
                torch.int32: "*i32",
                torch.uint8: "*u8",
            }[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            kind = "fp32"
        else:
            assert isinstance(value, int), f"{kernel.__name__}: {parameter.name} is {value!r}"
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    assert not values, f"{kernel.__name__} has no parameters {sorted(values)}"
    return signature, constants, attributes, options


def compile_all(names: list[str], targets: list[str]) -> dict[str, list[dict[str, Any]]]:
    """In the subprocess: compile what the cases of ``names`` launch; of each, one record per program and target. Every
    program is compiled for the first of ``targets``. For the others, of each kernel, the one that takes the most shared
    memory, and the one that does of those with each dtype of 16 bits: options and numbers of warps change no other
    target's arithmetic or limits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = triton.backends.backends["amd"].compiler
    if hasattr(amd, "path_to_rocm_lld"):  # Triton 3.4 links by a program of ROCm's, which is not in its wheel
        amd.make_hsaco = staticmethod(lambda assembly, *_: b"")
        amd.hash = lambda self: f"not linked {self.target}"
    programs: dict[str, tuple[Any, ...]] = {}
    launched: dict[str, None] = {}

    def keep(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **kwargs: Any) -> None:
        signature, constants, attributes, options = signature_of(kernel, args, kwargs)
        shown = {kernel.arg_names[i]: value for (i,), value in constants.items()}
        what = f"{kernel.__name__} {signature} {shown} {attributes} {options}"
        programs[what] = (kernel, signature, constants, attributes, options)
        launched[what] = None

    @functools.cache  # what several cases launch
    def compiled(what: str, target: str) -> dict[str, Any]:
        backend, architecture, warp_size, limit = TARGETS[target]
        kernel, signature, constants, attributes, options = programs[what]
        if options.get("num_warps", 0) > most_warps(warp_size):  # as a launch there does
            options = {**options, "num_warps": most_warps(warp_size)}
        record = {"target": target, "kernel": kernel.__name__, "what": what, "limit": limit, "error": None}
        source = ASTSource(kernel, signature, constants, attributes)
        try:
            program = triton.compile(source, target=GPUTarget(backend, architecture, warp_size), options=options)
        except Exception as error:
            return record | {"error": f"{type(error).__name__}: {error}"}
        ttir = program.asm["ttir"] if target == targets[0] else None
        return record | {"shared": program.metadata.shared, "ttir": ttir}

    def kinds(record: dict[str, Any]) -> list[tuple[str, str]]:
        _, signature, *_ = programs[record["what"]]
        # Targets differ in how they convert floats of 16 bits: every one loads and stores float32 and integers.
        return [(record["kernel"], dtype) for dtype in ("any", *sorted({"*bf16", "*fp16"} & set(signature.values())))]

    for module in op_modules():
        if hasattr(module, "launch"):
            module.launch = keep
        if hasattr(module, "use_triton"):
            module.use_triton = lambda x, **_: True
    found = {}
    largest: dict[tuple[str, str], dict[str, Any]] = {}  # of all names so far: two ops launch the same kernels
    for name in names:
        launched.clear()
        CASES[name]()
        records = [compiled(what, targets[0]) for what in launched]
        for record in records:
            for kind in kinds(record):
                known = largest.setdefault(kind, record)
                if record.get("shared", 0) > known.get("shared", 0):
                    largest[kind] = record
        chosen = dict.fromkeys(largest[kind]["what"] for record in records for kind in kinds(record))
        found[name] = records + [compiled(what, target) for target in targets[1:] for what in chosen]
    return found


def compile_for_little_shared_memory() -> dict[str, int]:
    """In the subprocess: what norms of wide rows take of a GPU that has 99 KiB, by kernel."""
    from liger_kernels.ops import _device, rms_norm

    TARGETS["small"] = SMALL
    _device._rooms["cpu", None] = SMALL[3] - 2048
    CASES["wide rows"] = lambda: [
        run(rms_norm, new(64, hidden, dtype=dtype), new(hidden, dtype=dtype))
        for hidden, dtype in ((8192, FP32), (4096, BF16), (128, FP32))
    ]
    found: dict[str, int] = {}
    for record in compile_all(["wide rows"], ["small"])["wide rows"]:
        assert record["error"] is None, record
        found[record["kernel"]] = max(found.get(record["kernel"], 0), record["shared"])
    return found


def traced_calls() -> list[tuple[str, Callable[..., Any], list[torch.Tensor]]]:
    """In the subprocess: names, functions for Dynamo, which may trace launches from now on, and their arguments."""
    import torch.utils._triton

    from liger_kernels.ops import (
        add_rms_norm,
        cross_entropy,
        gated_rms_norm,
        geglu,
        layer_norm,
        linear_cross_entropy,
        rms_norm,
        rope,
        swiglu,
        swiglu_linear,
    )
    from liger_kernels.ops.cross_entropy import EXTRAS

    for module in op_modules():
        if hasattr(module, "use_triton"):
            module.use_triton = lambda x, **_: True
    torch.utils._triton.has_triton = lambda **_: (
        True
    )  # what Dynamo asks a machine without a GPU before it traces a launch
    cos, sin = (torch.randn(1, 16, 128).to(BF16) for _ in range(2))
    targets, ones = torch.zeros(64, dtype=torch.int64), torch.ones(1000)

    def two_layers(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return rope(2 * q, 2 * k, cos, sin)

    smoothed = functools.partial(cross_entropy, class_weight=ones, label_smoothing=0.1, softcap=3.0, reduction="none")
    return [
        ("rms_norm", rms_norm, [new(64, 128), new(128)]),
        ("add_rms_norm", add_rms_norm, [new(64, 128), new(64, 128), new(128)]),
        ("layer_norm", layer_norm, [new(64, 128), new(128), new(128)]),
        ("gated_rms_norm", gated_rms_norm, [new(64, 128), new(64, 128), new(128)]),
        ("swiglu", swiglu, [new(64, 128), new(64, 128)]),
        ("swiglu, of few elements", swiglu, [new(64, 8), new(64, 8)]),
        ("geglu", lambda x: geglu(*x.chunk(2, dim=-1)), [new(64, 128)]),
        ("swiglu_linear", swiglu_linear, [new(64, 128), new(64, 128), new(32, 128)]),
        ("cross_entropy", cross_entropy, [new(64, 1000), targets]),
        ("cross_entropy, extras", lambda x, y: cross_entropy(x, y, extras=EXTRAS), [new(64, 1000), targets]),
        ("cross_entropy, of computed logits", lambda x, y: cross_entropy(2 * x, y), [new(64, 1000), targets]),
        ("cross_entropy, options", smoothed, [new(64, 1000), targets]),
        ("linear_cross_entropy", linear_cross_entropy, [new(64, 128), new(1000, 128), targets]),
        ("rope", lambda q, k: rope(q, k, cos, sin), [new(64, 8, 16, 128), new(64, 2, 16, 128)]),
        ("rope, in two layers", two_layers, [new(64, 16, 8, 128), new(64, 16, 2, 128)]),
    ]


def trace_all() -> dict[str, int]:
    """In the subprocess: let Dynamo trace the ops, the number of rows unknown; how many kernel launches it put into
    each graph, forward and backward."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    launched: dict[str, int] = {}

    def count(name: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nodes = [n for m in graph.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
        launched[name] = sum("triton_kernel_wrapper" in str(n.target) for n in nodes)
        given = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        if not any(isinstance(x, torch.Tensor) and free_symbols(x.shape) for x in given):
            launched[f"{name}: for this size alone"] = 1
        raise NotImplementedError  # the graph is all we want

    for name, op, args in traced_calls():
        for x in args:
            if len(x) == 64:
                torch._dynamo.mark_dynamic(x, 0)
        for how, dynamic in ((name, None), (f"{name}, dynamic", True)):
            torch.compiler.reset()
            with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
                torch.compile(op, backend=functools.partial(count, how), dynamic=dynamic, fullgraph=True)(*args)
    return launched


def overwritten_inputs() -> list[str]:
    """In the subprocess: every argument of a launch, the kernel's name of it, that torch.compile believes to be
    written, and of which Inductor will let it overwrite a copy: what came into the forward's or the backward's program,
    to which no kernel of ours writes, and what another launch writes to as well."""
    import triton
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from triton.backends.compiler import GPUTarget

    class Driver:  # what is asked of it while Triton parses a kernel
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    def memory(node: torch.fx.Node) -> torch.fx.Node:
        while node.op == "call_function" and getattr(node.target, "is_view", False):
            node = node.args[0]
        return node

    def look(name: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        launches = [n.kwargs for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert launches
        written = set()
        for launch in launches:
            tensors: Any = launch["kwargs"]
            for x in launch["tensors_to_clone"]:
                root = memory(tensors[x])
                if root.op == "placeholder" or root in written:
                    found.append(f"{name}: {x}")
                written.add(root)
        results = [n if n is None else n.meta["val"] for n in graph.graph.output_node().args[0]]
        return make_boxed_func(
            lambda *_: [t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in results]
        )

    calls = traced_calls()
    triton.runtime.driver.set_active(Driver())
    found: list[str] = []
    for name, op, args in calls:
        torch.compiler.reset()
        backend = aot_autograd(
            fw_compiler=functools.partial(look, name),
            bw_compiler=functools.partial(look, name),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        run(torch.compile(op, backend=backend, fullgraph=True), *args)
    return found


def in_subprocess(cache: Path, *calls: tuple[Any, ...]) -> list[Any]:
    """What functions of this module return, each named and followed by its arguments, one after the other in a process
    without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, json.dumps(calls)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """``compiled(name)``: the records of one name in :data:`CASES`, for sm_90 and for what the chosen tests ask for.
    They are made once in this run, in two halves: by two of the xdist workers, or one after the other."""
    mine = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    parameters = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    asked = {"sm_90"} | {chosen["target"] for chosen in parameters if "target" in chosen}
    targets = [target for target in TARGETS if target in asked]
    fixtures = [getattr(item, "fixturenames", ()) for item in mine]
    every = any("records" not in names and "compiled" in names for names in fixtures)
    names = [name for name in CASES if every or any(chosen.get("records") == name for chosen in parameters)]
    halves = [half for half in (names[::2], names[1::2]) if half]

    def file_of(half: list[str]) -> Path:
        return shared_folder / f"compiled-{half[0]}.json"

    def make(half: list[str], file: Path) -> None:
        (found,) = in_subprocess(tmp_path_factory.mktemp("triton"), ("compile_all", half, targets))
        file.write_text(json.dumps(found))

    @functools.cache
    def records_of(name: str) -> list[dict[str, Any]]:
        (half,) = (half for half in halves if name in half)
        todo = itertools.cycle((half, *halves))  # what another worker is at takes a minute: meanwhile make the other
        while not file_of(half).exists():
            one = next(todo)
            with contextlib.suppress(Timeout):
                make_once(file_of(one), functools.partial(make, one), timeout=1)
        return json.loads(file_of(half).read_text())[name]

    return records_of


@pytest.fixture(params=CASES)
def records(request: pytest.FixtureRequest, compiled: Callable[[str], Any]) -> list[dict[str, Any]]:
    return compiled(request.param)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(records: list[dict[str, Any]], target: str) -> None:
    mine = [record for record in records if record["target"] == target]
    assert mine
    failed = [f"{record['what']}: {record['error']}" for record in mine if record["error"]]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_suffices(records: list[dict[str, Any]], target: str) -> None:
    mine = [record for record in records if record["target"] == target and not record["error"]]
    over = [f"{r['what']}: {r['shared']} of {r['limit']} bytes" for r in mine if r["shared"] > r["limit"]]
    assert not over, "\n".join(over)
    norms = ("rms_norm", "layer_norm", "gated_rms_norm")
    ahead = {f"_{norm}_bwd_kernel" for norm in norms}  # which load as much as fits
    fixed = [record for record in mine if record["kernel"] not in ahead]
    assert all(record["shared"] <= SHARED_MEMORY for record in fixed if TARGETS[target][0] == "cuda")


def test_a_gpu_of_little_shared_memory_loads_less_ahead(tmp_path: Path) -> None:
    (shared,) = in_subprocess(tmp_path, ("compile_for_little_shared_memory",))
    assert {"_rms_norm_bwd_kernel"} < shared.keys()
    assert all(size <= SMALL[3] for size in shared.values()), shared
    assert shared["_rms_norm_bwd_kernel"] > SMALL[3] // 2  # else it would load nothing ahead


def test_offsets_are_64_bits_wide(records: list[dict[str, Any]]) -> None:
    """No row number is multiplied by a stride, or by the length of a row, in 32 bits, where it would wrap at 2^31."""
    for record in records:
        if record["ttir"]:
            assert not narrow_products(record["ttir"]), f"{record['what']}: {narrow_products(record['ttir'])}"


def narrow_products(ttir: str) -> list[str]:
    """The 32-bit multiplications of a kernel's strides and row lengths."""
    strides = set(re.findall(r"%(\w*stride|hidden|n_cols|vocab)\b: i32", ttir))
    products = []
    for result, operation, operands, kind in re.findall(r"%(\S+) = (\S+) (.*?) : (.*)", ttir):
        if set(re.findall(r"%(\w+)", operands)) & strides:
            if operation == "arith.muli" and re.search(r"\bi32|xi32", kind):
                products.append(f"{operation} {operands} : {kind}")
            elif operation == "tt.splat" or operation.startswith(("tt.broadcast", "tt.expand_dims")):
                strides.add(result)
    return products


def test_a_narrow_product_is_found() -> None:
    head = "tt.func public @kernel(%x_ptr: !tt.ptr<bf16>, %x_stride: i32 {tt.divisibility = 16 : i32}) {\n"
    narrow = "  %0 = tt.splat %x_stride : i32 -> tensor<4xi32>\n  %1 = arith.muli %row, %0 : tensor<4xi32> loc(#loc)\n"
    wide = "  %0 = arith.extsi %x_stride : i32 to i64\n  %1 = arith.muli %row, %0 : i64 loc(#loc)\n"
    assert narrow_products(head + narrow)
    assert not narrow_products(head + wide)


def test_every_kernel_is_compiled(compiled: Callable[[str], list[dict[str, Any]]]) -> None:
    assert kernels() == {record["kernel"] for name in CASES for record in compiled(name)}


traces_launches = pytest.mark.skipif(
    TRITON < (3, 6), reason="Triton before 3.6 asks for a GPU's driver while Dynamo traces a launch"
)


@pytest.fixture(scope="module")
def traced(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two functions find that make Dynamo trace the ops, in one process for this run."""
    file, cache = shared_folder / "traced.json", tmp_path_factory.mktemp("triton")
    calls = ("trace_all",), ("overwritten_inputs",)
    make_once(file, lambda path: path.write_text(json.dumps(in_subprocess(cache, *calls))))
    found: list[Any] = json.loads(file.read_text())
    return found


@traces_launches
def test_dynamo_traces_down_to_the_launches(traced: list[Any]) -> None:
    """Without a graph break, forward and backward, for any number of rows, also where every number is a symbol."""
    launched, _ = traced
    units = ("swiglu", "swiglu, of few elements", "geglu", "swiglu_linear", "rope")
    ways = ("", ", extras", ", options", ", of computed logits")  # the mean and its denominator are torch's
    losses = (*(f"cross_entropy{way}" for way in ways), "linear_cross_entropy")
    norms = {"rms_norm": 3, "add_rms_norm": 3, "layer_norm": 4, "gated_rms_norm": 3}
    expected = {**norms, "rope, in two layers": 4, **dict.fromkeys((*units, *losses), 2)}
    assert launched == expected | {f"{name}, dynamic": count for name, count in expected.items()}


@traces_launches
def test_a_compiled_program_sees_what_a_kernel_writes_to(traced: list[Any]) -> None:
    """It goes by the parsed kernel, whatever the address of a store was computed from, and by the program around it."""
    _, overwritten = traced
    assert overwritten == []


if __name__ == "__main__":
    FUNCTIONS = (compile_all, compile_for_little_shared_memory, trace_all, overwritten_inputs)
    asked = {function.__name__: function for function in FUNCTIONS}
    json.dump([asked[name](*arguments) for name, *arguments in json.loads(sys.argv[1])], sys.stdout)
