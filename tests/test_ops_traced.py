"""torch.compile traces every op down to its launches, and knows what a kernel writes to. No GPU is needed."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.op_calls import BF16, in_subprocess, new, op_modules, run
from tools.op_table import IN_PROGRAMS, SAMPLED

TRITON = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])


REFERENCES = [*(name for name, op in IN_PROGRAMS.items() if op.in_program == 0), "experts"]
Calls = list[tuple[str, Callable[..., Any], list[torch.Tensor]]]


def pretend_a_gpu() -> None:
    """In the subprocess: from now on ops run their kernels, and Dynamo may trace the launches."""
    import torch.utils._triton

    from liger_kernels.ops.runtime.compiling import traces_reference

    for module in op_modules():
        if hasattr(module, "use_triton"):
            module.use_triton = lambda x, eager_only=False, **_: not (eager_only and traces_reference())
    torch.utils._triton.has_triton = lambda **_: True  # what Dynamo asks before it traces a launch


def call_of(name: str) -> tuple[str, Callable[..., Any], list[torch.Tensor]]:
    """A row of the table, of 64 rows."""
    op, letters = SAMPLED[name], {"h": 8, "g": 2, "s": 16, "d": 128, "r": 128, "v": 1000}
    return name, op.op, op.leaves(64, BF16, torch.device("cpu"), columns=128, sizes=letters)


def traced_calls() -> Calls:
    """In the subprocess: names, functions for Dynamo, and their arguments: those of the table that launch kernels in a
    program, and what a program can make of the same ops."""
    from liger_kernels.ops import cross_entropy, rope, swiglu

    cos, sin = (torch.randn(1, 16, 128).to(BF16) for _ in range(2))
    targets, ones = torch.zeros(64, dtype=torch.int64), torch.ones(1000)

    def two_layers(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return rope(2 * q, 2 * k, cos, sin)

    smoothed = functools.partial(cross_entropy, class_weight=ones, label_smoothing=0.1, softcap=3.0, reduction="none")
    return [
        *(call_of(name) for name, op in IN_PROGRAMS.items() if op.in_program),
        ("swiglu, of few elements", swiglu, [new(64, 8), new(64, 8)]),
        ("cross_entropy, of computed logits", lambda x, y: cross_entropy(2 * x, y), [new(64, 1000), targets]),
        ("cross_entropy, class weights", smoothed, [new(64, 1000), targets]),
        ("rope, in two layers", two_layers, [new(64, 16, 8, 128), new(64, 16, 2, 128)]),
    ]


def launches_in(graph: torch.fx.GraphModule) -> int:
    nodes = [n for m in graph.modules() if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes]
    return sum("triton_kernel_wrapper" in str(n.target) for n in nodes)


def trace_references() -> dict[str, int]:
    """In the subprocess: how many launches Dynamo puts into the first graph of each op that runs its kernels in eager
    only. The reference of ``experts`` reads on the host which of them have tokens, which ends a graph."""
    launched: dict[str, int] = {}

    def count(name: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        launched[name] = launches_in(graph)
        raise NotImplementedError  # the graph is all we want

    pretend_a_gpu()
    for name in REFERENCES:
        _, op, args = call_of(name)
        torch.compiler.reset()
        with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(op, backend=functools.partial(count, name), fullgraph=name != "experts")(*args)
    return launched


def trace_all() -> dict[str, int]:
    """In the subprocess: let Dynamo trace the ops, the number of rows unknown; how many kernel launches it put into
    each graph, forward and backward."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    launched: dict[str, int] = {}

    def count(name: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        launched[name] = launches_in(graph)
        given = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        if not any(isinstance(x, torch.Tensor) and free_symbols(x.shape) for x in given):
            launched[f"{name}: for this size alone"] = 1
        raise NotImplementedError  # the graph is all we want

    pretend_a_gpu()
    for name, op, args in traced_calls():
        for x in args:
            if x.dim() and len(x) == 64:
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

    pretend_a_gpu()
    triton.runtime.driver.set_active(Driver())
    found: list[str] = []
    for name, op, args in traced_calls():
        torch.compiler.reset()
        backend = aot_autograd(
            fw_compiler=functools.partial(look, name),
            bw_compiler=functools.partial(look, name),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        run(torch.compile(op, backend=backend, fullgraph=True), *args)
    return found


traces_launches = pytest.mark.skipif(
    TRITON < (3, 6), reason="Triton before 3.6 asks for a GPU's driver while Dynamo traces a launch"
)


@pytest.fixture(scope="module")
def traced(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What three functions find that make Dynamo trace the ops, in one process for this run."""
    calls = ("trace_all",), ("overwritten_inputs",), ("trace_references",)
    return once("traced", lambda: in_subprocess(tmp_path_factory.mktemp("triton"), __name__, *calls))


@pytest.mark.compilers
@traces_launches
def test_dynamo_traces_down_to_the_launches(traced: list[Any]) -> None:
    """Without a graph break, forward and backward, for any number of rows, also where every number is a symbol."""
    launched, _, _ = traced
    more = ("swiglu, of few elements", "cross_entropy, of computed logits", "cross_entropy, class weights")
    expected = {name: op.in_program for name, op in IN_PROGRAMS.items() if op.in_program}  # a loss' mean is torch's
    expected |= {"rope, in two layers": 4, **dict.fromkeys(more, 2)}
    assert launched == expected | {f"{name}, dynamic": count for name, count in expected.items()}


@pytest.mark.compilers
@traces_launches
def test_a_compiled_program_sees_what_a_kernel_writes_to(traced: list[Any]) -> None:
    """It goes by the parsed kernel, whatever the address of a store was computed from, and by the program around it."""
    _, overwritten, _ = traced
    assert overwritten == []


@pytest.mark.compilers
@traces_launches
def test_kernels_that_run_in_eager_only_are_in_no_program(traced: list[Any]) -> None:
    """Nor are those of the loss' mean, which the test of launches counts."""
    *_, launched = traced
    assert launched == dict.fromkeys(REFERENCES, 0)
