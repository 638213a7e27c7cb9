"""Dispatch, launches and the interpreter's repairs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_kernels import ops
from liger_kernels.ops import launches, reset_launches
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.runtime import dispatch, launcher
from liger_kernels.ops.runtime.device import most_warps
from liger_kernels.ops.runtime.dispatch import INTERPRET, launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import next_power_of_2
from tests.op_calls import in_subprocess


@triton.jit
def _cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty), mask=i < n)


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, torch.float64, torch.int64, torch.complex64], ids=str)
def test_kernels_run_where_they_can(device, dtype) -> None:
    runs = dtype in KERNEL_DTYPES
    assert use_triton(torch.empty(1, dtype=dtype, device=device)) == runs
    assert not use_triton(torch.empty(1, dtype=dtype, device="meta"))
    assert use_triton(torch.empty(1, dtype=dtype)) == (runs and INTERPRET)


def test_kernels_that_run_in_eager_only_are_in_no_program(device) -> None:
    x = torch.zeros(1, device=device)

    def asked(x):
        return x + int(use_triton(x, opaque=True)), x + int(use_triton(x, opaque=True, eager_only=True))

    assert [int(y) for y in asked(x)] == [1, 1]
    assert [int(y) for y in torch.compile(asked, backend="eager", fullgraph=True)(x)] == [1, 0]


def test_without_triton_nothing_runs_it(device, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert not use_triton(torch.empty(1, device=device))


def _one_argument(value, CONSTANT: tl.constexpr):
    pass


def test_one_program_is_kept_for_what_triton_would_compile_once() -> None:
    """Arguments of one key are arguments of one program: by Triton's own binder, for NVIDIA's GPUs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    kernel = JITFunction(_one_argument)
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    numbers = [
        sign * (base + more) for sign in (1, -1) for base in (0, 16, 2**31, 2**40) for more in (-16, -1, 0, 1, 8)
    ]
    tensors = [torch.empty(32, dtype=dtype)[start:] for dtype in dtypes for start in range(9)]
    values = [*numbers, *tensors, None, True, False, 0.0, 1.0, 16.5]
    known: dict[object, object] = {}
    for value in values:
        key = launcher._program_key(kernel, 0, (value,), {"CONSTANT": 4})
        _, specialization, _ = binder(value, CONSTANT=4, debug=False)
        assert known.setdefault(key, specialization) == specialization, value
    assert len(known) > 2 * len(dtypes)
    other = launcher._program_key(kernel, 0, (None,), {"CONSTANT": 8})
    assert other not in known
    assert other != launcher._program_key(kernel, 1, (None,), {"CONSTANT": 8})


@pytest.mark.parametrize(
    ("version", "wanted", "state"),
    [
        ("3.4.0", "", "on"),
        ("3.9.0", "", "on"),
        ("3.10.0", "", "off, Triton 3.10.0 is not one of 3.4 to 3.9, in which it was tested"),
        ("3.3.1", "", "off, Triton 3.3.1 is not one of 3.4 to 3.9, in which it was tested"),
        ("3.10.0", "kept", "on"),
        ("3.9.0", "triton", "off, LIGER_KERNELS_LAUNCHER=triton"),
    ],
)
def test_programs_are_kept_where_that_was_tested(monkeypatch, version, wanted, state) -> None:
    monkeypatch.setattr(launcher.triton, "__version__", version)
    monkeypatch.setenv("LIGER_KERNELS_LAUNCHER", wanted)
    assert launcher.state(interpret=False) == state
    assert launcher.state(interpret=True).startswith("off, ")


def test_a_launcher_that_does_not_exist(monkeypatch) -> None:
    monkeypatch.setenv("LIGER_KERNELS_LAUNCHER", "fast")
    with pytest.raises(ValueError, match="LIGER_KERNELS_LAUNCHER is 'fast'; allowed are 'triton', 'kept'"):
        launcher.state(interpret=False)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(len(x), dtype=dtype, device=x.device)
    launch(_cast_kernel, (1,), x.device, x, y, len(x), BLOCK=next_power_of_2(len(x)))
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_store_rounds_to_nearest_even(device, dtype) -> None:
    """Carries into the exponent, ties, subnormals, infinities and NaN included."""
    one = 1.0 + torch.arange(64) / 2**13
    special = [0.0, -0.0, 1.9999, 3.9999, 1e-40, -1e-40, 1e-45, 3.4e38, -3.4e38, float("inf"), -float("inf")]
    x = torch.cat((torch.randn(1000), one, -one, torch.tensor(special), torch.randn(100) * 1e-5)).to(device)
    assert torch.equal(cast(x, dtype), x.to(dtype))
    assert torch.equal(cast(x.to(dtype), torch.float32), x.to(dtype).float())
    assert cast(torch.tensor([float("nan")], device=device), dtype).isnan().all()


def test_launches_are_counted(device) -> None:
    reset_launches()
    assert launches() == {}
    cast(torch.randn(3, device=device), torch.float32)
    cast(torch.randn(3, device=device), torch.float32)
    assert launches() == {"_cast_kernel": 2}
    launches()["_cast_kernel"] = 5  # a copy
    assert launches() == {"_cast_kernel": 2}
    reset_launches()
    assert launches() == {}


def test_an_empty_grid_launches_nothing(device) -> None:
    reset_launches()
    launch(None, (0,), device)
    launch(None, (3, 0), device)
    assert launches() == {}


def compiled(heard: list[object]) -> Any:
    """A program as Triton makes one, but for the GPU: what it would be launched with goes to ``heard``."""
    from triton.compiler import CompiledKernel

    program = CompiledKernel.__new__(CompiledKernel)
    vars(program).update(module="module", function="function", packed_metadata="metadata", name="_kernel", src=None)
    vars(program).update(dict.fromkeys(("run", "_run"), lambda *args: heard.append(args)))  # Triton 3.4, and since
    return program


@pytest.fixture
def kernel(monkeypatch) -> Any:
    """A kernel whose programs are kept, on a machine with several devices, of which 0 is the current one. Its ``heard``
    is what happened."""

    class Kernel:
        __name__ = "_kernel"
        arg_names = ("x", "BLOCK")

        def __init__(self):
            self.heard = []

        def __getitem__(self, grid):
            return lambda *args, **kwargs: (self.heard.append(grid), compiled(self.heard))[1]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "current_stream", lambda index: 70 + index)
    monkeypatch.setattr(dispatch, "_KEEP_PROGRAMS", True)
    monkeypatch.setattr(launcher, "_programs", {})
    monkeypatch.setattr(launcher, "_calls", {})
    yield Kernel()
    reset_launches()


@pytest.mark.parametrize(("index", "guarded"), [(0, False), (1, True), (None, False)])
def test_launches_under_the_tensors_own_device(monkeypatch, kernel, index, guarded) -> None:
    """Triton launches on the current device: of another one's tensors that is an error, or a wrong result."""

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            kernel.heard.append(self.device)

        def __exit__(self, *_):
            kernel.heard.append("left")

    monkeypatch.setattr(torch.cuda, "device", Guard)
    device = torch.device("cuda", index)
    for keeps in (False, True):
        monkeypatch.setattr(dispatch, "_KEEP_PROGRAMS", keeps)
        again = (2, 1, 1, 70 + (index or 0), "function", "metadata", None, None, None, 5, 8)
        launched: list[object] = [(2,), again if keeps else (2,), (2,)]
        for x in (5, 5, 1):  # the same program again, and another one
            launch(kernel, (2,), device, x, BLOCK=8)
            here = [launched.pop(0)]
            assert kernel.heard == ([device, *here, "left"] if guarded else here)
            kernel.heard.clear()


@pytest.mark.parametrize(("lanes", "given"), [(32, [4, 16, 32]), (64, [4, 16, 16])])
def test_a_program_has_at_most_1024_threads(monkeypatch, lanes, given) -> None:
    """Also where a warp has 64 lanes, as on AMD's data center GPUs."""
    monkeypatch.setattr(dispatch, "_KEEP_PROGRAMS", False)
    monkeypatch.setattr(dispatch, "_MOST_WARPS", most_warps(lanes))
    asked: list[int] = []

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid):
            return lambda **options: asked.append(options["num_warps"])

    for warps in (4, 16, 32):
        launch(Kernel(), (2,), torch.device("cpu"), num_warps=warps)
    reset_launches()
    assert asked == given


@pytest.mark.parametrize("grid", [(2,), (2, 3), (2, 3, 4)])
def test_a_kept_program_is_launched_as_triton_launches_it(kernel, grid) -> None:
    """But for a description of the launch, and for whom nobody is."""
    for _ in range(2):
        launch(kernel, grid, torch.device("cuda", 0), 5, BLOCK=8)
    assert kernel.heard.pop(0) == grid
    compiled(kernel.heard)[(*grid, 1, 1)[:3]](5, 8, stream=70)
    ours, tritons = kernel.heard
    assert (ours[:6], ours[9:]) == (tritons[:6], tritons[9:])
    assert ours[6:9] == (None, None, None)
    assert not any(getattr(hook, "calls", hook) for hook in tritons[7:9])


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_who_wants_to_hear_of_launches_does(monkeypatch, kernel, name) -> None:
    def hook(metadata):
        pass

    launch(kernel, (2,), torch.device("cuda", 0), 5, BLOCK=8)
    hooks = triton.knobs.runtime
    chain = getattr(hooks, name)
    if chain is None:  # Triton 3.4 has room for one
        monkeypatch.setattr(hooks, name, hook)
    else:
        monkeypatch.setattr(chain, "calls", [hook])
    launch(kernel, (2,), torch.device("cuda", 0), 5, BLOCK=8)
    assert kernel.heard[-1][7:9] == (hooks.launch_enter_hook, hooks.launch_exit_hook)
    assert (kernel.heard[-1][6] is None) == (hooks.launch_enter_hook is None)  # what Triton makes for a hook


@pytest.mark.parametrize("loss", ["cross_entropy", *MEMORY])
def test_a_second_derivative_of_a_loss_is_refused(device, loss) -> None:
    """Zeros would be a wrong number. A first one with ``create_graph`` is the usual one. test_ops_every.py has this of
    the other ops."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    weight, targets = torch.randn(6, 8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    if loss == "cross_entropy":
        y = ops.cross_entropy(x, targets)
    else:
        y = ops.linear_cross_entropy(x, weight, targets, memory=loss)
    (usual,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y).requires_grad_(), create_graph=True)
    assert torch.equal(first, usual)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_next_power_of_2() -> None:
    sizes = (0, 1, 2, 3, 4096, 4097, 2**33)
    assert [next_power_of_2(n) for n in sizes] == [1, 1, 2, 4, 4096, 8192, 2**33]


@triton.jit
def _halved(x):
    return x / 2


@triton.jit
def _halve_often_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    for _ in range(8):
        x = _halved(x)
    tl.store(y_ptr + i, x)


@pytest.mark.skipif(not INTERPRET, reason="a GPU runs compiled kernels, not the interpreter")
def test_the_interpreter_prepares_the_language_once(monkeypatch) -> None:
    """And puts it back after every launch, where this Triton does that."""
    from triton.runtime import interpreter

    prepared = []
    prepare = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: (prepared.append(1), prepare(*args)))
    puts_back = hasattr(interpreter, "_LangPatchScope")
    load = tl.load
    x, y = torch.full((4,), 256.0), torch.empty(4)
    for launched in (1, 2, 3):
        launch(_halve_often_kernel, (1,), x.device, x, y, BLOCK=4)
        assert y.tolist() == [1.0] * 4
        assert len(prepared) <= (1 if puts_back else launched)
        assert (tl.load is load and tl.core.is_builtin(load)) or not puts_back


@pytest.mark.skipif(not INTERPRET, reason="a GPU runs compiled kernels, not the interpreter")
def test_the_interpreter_describes_a_shape_once() -> None:
    """And never takes one type or shape for another."""
    types = [tl.block_type(dtype, list(shape)) for dtype in (tl.float32, tl.int64) for shape in ((4, 8), (8, 4), (32,))]
    for a in types:
        again = tl.block_type(a.element_ty, list(a.shape))
        assert (again.shape is a.shape, again == a, str(again)) == (True, True, str(a))
        assert [a == b for b in types].count(True) == 1
        value = tl.tensor(None, a)
        assert (value.dtype, [n.value for n in value.shape]) == (a.scalar, list(a.shape))
        assert value.shape is tl.tensor(None, again).shape
    narrow, wide = (tl.block_type(tl.pointer_type(dtype), [4]) for dtype in (tl.int8, tl.int64))
    assert (narrow.element_ty.element_ty, wide.element_ty.element_ty) == (tl.int8, tl.int64)


@pytest.mark.skipif(not INTERPRET, reason="a GPU runs compiled kernels, not the interpreter")
def test_products_of_bfloat16_read_nothing_behind_a_row() -> None:
    """oneDNN does, with AMX and one thread. A CPU without AMX shows only that the choice is made."""
    assert "ONEDNN_MAX_CPU_ISA" in os.environ
    room = torch.full((23, 40), float("nan"), dtype=torch.bfloat16)
    rows = room[:, :37].fill_(1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product = rows @ torch.ones(37, 12, dtype=torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    assert product.tolist() == [[37.0] * 12] * 23


def runs_mathematical_functions() -> float:
    """In the subprocess: how far ``libdevice``'s functions in the interpreter are from torch's."""
    os.environ["TRITON_INTERPRET"] = "1"
    from convergence.arms.interpreter import define_libdevice

    define_libdevice()  # `prepare` leaves a process alone that imported Triton before it was told to interpret
    import triton

    global pow, rsqrt, tanh  # the interpreter sees no names of a function
    from triton.language.extra.libdevice import pow, rsqrt, tanh

    @triton.jit
    def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i)
        tl.store(y_ptr + i, tanh(x) + rsqrt(x) + pow(x, 2.0))

    x = torch.linspace(0.1, 3, 16)
    y = torch.empty_like(x)
    kernel[(1,)](x, y, BLOCK=16)
    return float((y - (x.tanh() + x.rsqrt() + x**2)).abs().max())


@pytest.mark.skipif(not INTERPRET, reason="a GPU has these functions")
def test_the_interpreter_has_mathematical_functions(tmp_path: Path) -> None:
    (off,) = in_subprocess(tmp_path, __name__, ("runs_mathematical_functions",))
    assert off <= 4e-6


def prepares_where_kernels_are_compiled() -> bool:
    """In the subprocess: whether the proof's preparations reach the compiler, which shares functions with the
    interpreter, when the CPU is chosen after Triton was imported for a GPU."""
    from convergence.arms.interpreter import prepare

    os.environ["TRITON_INTERPRET"] = "1"
    before = tl.core.tensor.__init__
    prepare()
    return tl.core.tensor.__init__ is not before


def test_the_interpreter_is_prepared_only_where_it_runs(tmp_path: Path) -> None:
    assert in_subprocess(tmp_path, __name__, ("prepares_where_kernels_are_compiled",)) == [False]
