"""Every Triton kernel compiles for every supported GPU, on a machine that has none.

``launch`` compiles for each target what the calls of ``op_calls.py`` ask it to launch, the launch choices for real
sizes included, instead of launching it. A kernel (a ``@triton.jit`` function whose name ends in ``_kernel``; every
other one is a helper that kernels call) that no call launches fails :func:`test_every_kernel_is_compiled`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import Timeout
from torch.utils._python_dispatch import TorchDispatchMode

from convergence.files import make_once
from liger_kernels.ops.runtime.device import LOADED_AHEAD, SHARED_MEMORY, most_warps
from tests.op_calls import BF16, CASES, FP32, in_subprocess, new, op_modules, run

# name: (backend, architecture, warp size, shared memory that one program may have in bytes)
TARGETS = {
    "sm_90": ("cuda", 90, 32, 227 * 1024),  # for which every program is compiled
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}

SMALL = ("cuda", 86, 32, 99 * 1024)  # as are GPUs of capability 8.9


def kernels() -> set[str]:
    """The names of all kernels in ``liger_kernels.ops``."""
    from triton.runtime import KernelInterface
    from triton.runtime.interpreter import InterpretedFunction  # which Triton 3.4 does not count among the former

    found = {name: value for module in op_modules() for name, value in vars(module).items()}
    kinds = (KernelInterface, InterpretedFunction)
    return {name for name, value in found.items() if isinstance(value, kinds) and name.endswith("_kernel")}


def signature_of(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: str
) -> tuple[dict, dict, dict, dict]:
    """signature, constants, attributes and options of a launch, specialised as Triton's launcher would; a Python number
    is a ``number``."""
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
                torch.float64: "*fp64",
                torch.int64: "*i64",
                torch.int32: "*i32",
                torch.uint8: "*u8",
            }[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            kind = number
        else:
            assert isinstance(value, int), f"{kernel.__name__}: {parameter.name} is {value!r}"
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    assert not values, f"{kernel.__name__} has no parameters {sorted(values)}"
    return signature, constants, attributes, options


class WithoutProducts(TorchDispatchMode):
    """Matrix products, which take most of the time of a call and decide nothing of what is launched, return memory that
    nobody has written."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ not in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            return function(*args, **kwargs)
        if "out" in kwargs:
            return kwargs["out"]
        if function.overloadpacket.__name__ == "addmm_":
            return args[0]
        a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        dtype = next((x for x in args if isinstance(x, torch.dtype)), a.dtype)
        return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


@contextlib.contextmanager
def compiled_as_far_as(last: str) -> Iterator[None]:
    """Inside, Triton compiles for NVIDIA GPUs as far as to its own IR ("ttir"), or to where the shared memory of a
    program is known ("llir": LLVM's IR, which LLVM does not optimize then), or to machine code ("cubin")."""
    import triton
    from triton._C.libtriton import llvm

    backend = triton.backends.backends["nvidia"].compiler
    add_stages = backend.add_stages

    def only(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        for name in [*stages][[*stages].index(last) + 1 :]:
            stages[name] = lambda _, metadata: metadata.update({"shared": 0, **metadata, "name": ""}) or b""

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "add_stages", only))
        if last == "llir":
            for name in ("link_extern_libs", "optimize_module"):
                stack.enter_context(mock.patch.object(llvm, name, return_value=None))
        yield


def loaded_at_once(ttir: str) -> int:
    """The bytes of everything that a program loads, as often as a loop does so ahead."""
    loads = re.findall(r"= tt\.load .* : tensor<((?:\d+x)+)!tt\.ptr<[a-z]+(\d+)>", ttir)
    size = sum(math.prod(map(int, shape.split("x")[:-1])) * (int(bits) // 8 or 1) for shape, bits in loads)
    return size * max(map(int, re.findall(r"tt\.num_stages = (\d+)", ttir)), default=1)


def compile_all(
    names: list[str], targets: list[str], programs: str = "all", number: str = "fp32"
) -> dict[str, list[dict[str, Any]]]:
    """In the subprocess: compile what the cases of ``names`` launch; of each, one record per program and target.

    Every program is compiled for the first of ``targets`` as far as its shared memory is known, and the first of each
    kernel with each dtype of 16 bits to machine code. For the others, of each kernel, the one that takes the most
    shared memory, and the one that does of those with each dtype of 16 bits: options and numbers of warps change no
    other target's arithmetic or limits.

    ``programs="largest"`` is for another version of Triton, which reads every program, as far as to its own IR. It
    compiles, for every target, the program of each kernel that loads most at once, and of all with each dtype of 16
    bits: it may lower a kernel wrongly, or need more shared memory. ``programs="none"`` only reads them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from liger_kernels.ops.runtime.device import _rooms as rooms

    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # what was compiled as far as to its IR is no program
    amd = triton.backends.backends["amd"].compiler
    if hasattr(amd, "path_to_rocm_lld"):  # Triton 3.4 links by a program of ROCm's, which is not in its wheel
        amd.make_hsaco = staticmethod(lambda assembly, *_: b"")
        amd.hash = lambda self: f"not linked {self.target}"
    known: dict[str, tuple[Any, ...]] = {}
    launched: list[str] = []

    def keep(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **kwargs: Any) -> None:
        signature, constants, attributes, options = signature_of(kernel, args, kwargs, number)
        shown = {kernel.arg_names[i]: value for (i,), value in constants.items()}
        what = f"{kernel.__name__} {signature} {shown} {attributes} {options}"
        known[what] = (kernel, signature, constants, attributes, options)
        launched.append(what)

    @functools.cache  # what several cases launch
    def compiled(what: str, target: str, last: str = "cubin") -> dict[str, Any]:
        backend, architecture, warp_size, limit = TARGETS[target]
        kernel, signature, constants, attributes, options = known[what]
        if options.get("num_warps", 0) > most_warps(warp_size):  # as a launch there does
            options = {**options, "num_warps": most_warps(warp_size)}
        record = {"target": target, "kernel": kernel.__name__, "what": what, "limit": limit, "error": None}
        source = ASTSource(kernel, signature, constants, attributes)
        try:
            with compiled_as_far_as(last):
                program = triton.compile(source, target=GPUTarget(backend, architecture, warp_size), options=options)
        except Exception as error:
            return record | {"error": f"{type(error).__name__}: {error}"}
        ttir = program.asm["ttir"] if target == targets[0] else None
        return record | {"shared": program.metadata.shared, "ttir": ttir}

    def kinds(what: str) -> list[tuple[str, str]]:
        kernel, signature, *_ = known[what]
        # Targets differ in how they convert floats of 16 bits: every one loads and stores float32 and integers.
        dtypes = sorted({"*bf16", "*fp16"} & set(signature.values()))
        of = kernel.__name__ if programs == "all" else "any"
        return [(kernel.__name__, "any"), *((of, dtype) for dtype in dtypes)]

    def size(record: dict[str, Any]) -> int:
        if record["error"]:
            return 0
        return int(record["shared"]) if programs == "all" else loaded_at_once(record["ttir"])

    for module in op_modules():
        if hasattr(module, "launch"):
            module.launch = keep
        if hasattr(module, "use_triton"):
            module.use_triton = lambda x, **_: True
    choices = [getattr(f, "__wrapped__", None) for module in op_modules() for f in vars(module).values()]
    remembered = [choose for choose in choices if hasattr(choose, "cache_clear")]

    def launched_with(room: int, name: str) -> list[str]:
        """What the case launches on a GPU with that much room for loads."""
        rooms["cpu", None] = room
        for choose in remembered:
            choose.cache_clear()
        launched.clear()
        with WithoutProducts():
            CASES[name]()
        return [*launched]

    found = {}
    room_of = {target: min(LOADED_AHEAD, TARGETS[target][3] - 2048) for target in targets}
    there: dict[int, dict[str, str]] = {room: {} for room in room_of.values()}  # what is launched instead
    largest: dict[tuple[str, str], dict[str, Any]] = {}  # of all names so far: two ops launch the same kernels
    seen: set[tuple[str, str]] = set()
    for name in names:
        on = {room: launched_with(room, name) for room in there}
        here = on[room_of[targets[0]]]
        records = []
        for what in dict.fromkeys(here):
            is_new = not seen.issuperset(kinds(what))
            seen.update(kinds(what))
            last = "ttir" if programs != "all" else "cubin" if is_new else "llir"
            records.append(compiled(what, targets[0], last))
        for record in records:
            for kind in kinds(record["what"]):
                if size(record) > size(largest.setdefault(kind, record)):
                    largest[kind] = record
        chosen = dict.fromkeys(largest[kind]["what"] for record in records for kind in kinds(record["what"]))
        for room in there:
            there[room].update(zip(here, on[room], strict=True))
        others = {"all": targets[1:], "largest": targets, "none": []}[programs]
        found[name] = records + [compiled(there[room_of[target]][what], target) for target in others for what in chosen]
    return found


def compile_for_little_shared_memory() -> dict[str, int]:
    """In the subprocess: what norms of wide rows take of a GPU that has 99 KiB, by kernel."""
    from liger_kernels.ops import rms_norm

    TARGETS["small"] = SMALL
    CASES["wide rows"] = lambda: [
        run(rms_norm, new(64, hidden, dtype=dtype), new(hidden, dtype=dtype))
        for hidden, dtype in ((8192, FP32), (4096, BF16), (128, FP32))
    ]
    found: dict[str, int] = {}
    for record in compile_all(["wide rows"], ["small"])["wide rows"]:
        assert record["error"] is None, record
        found[record["kernel"]] = max(found.get(record["kernel"], 0), record["shared"])
    return found


def compile_with_wide_numbers() -> list[dict[str, Any]]:
    """In the subprocess: programs with every number of a launch typed as Inductor types it, compiled no further than
    to what is looked at."""
    names = ["rms_norm", "cross_entropy", "linear_cross_entropy"]
    found = compile_all(names, ["sm_90"], "none", number="fp64")  # the target whose operations are kept
    return [record for name in names for record in found[name] if record["ttir"]]


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
        call = ("compile_all", half, targets, request.config.getoption("--programs"))
        (found,) = in_subprocess(tmp_path_factory.mktemp("triton"), __name__, call)
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


@pytest.mark.compilers
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(records: list[dict[str, Any]], target: str) -> None:
    mine = [record for record in records if record["target"] == target]
    assert mine
    failed = [f"{record['what']}: {record['error']}" for record in mine if record["error"]]
    assert not failed, "\n".join(failed)


@pytest.mark.compilers
@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_suffices(records: list[dict[str, Any]], target: str) -> None:
    mine = [record for record in records if record["target"] == target and not record["error"]]
    over = [f"{r['what']}: {r['shared']} of {r['limit']} bytes" for r in mine if r["shared"] > r["limit"]]
    assert not over, "\n".join(over)
    norms = ("rms_norm", "layer_norm", "gated_rms_norm")
    ahead = {f"_{norm}_bwd_kernel" for norm in norms}  # which load as much as fits
    ahead |= {f"_lora_{op}_{name}_kernel" for op in ("linear", "experts") for name in ("rows", "add", "columns")}
    ahead |= {"_lora_glu_fwd_kernel", "_lora_glu_bwd_kernel", "_dora_linear_bwd_kernel"}
    fixed = [record for record in mine if record["kernel"] not in ahead]
    assert all(record["shared"] <= SHARED_MEMORY for record in fixed if TARGETS[target][0] == "cuda")


@pytest.fixture(scope="module")
def specials(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the two functions find that change how programs are compiled, in one process for this run."""
    calls = ("compile_for_little_shared_memory",), ("compile_with_wide_numbers",)
    return once("compiled-specials", lambda: in_subprocess(tmp_path_factory.mktemp("triton"), __name__, *calls))


@pytest.mark.compilers
def test_a_gpu_of_little_shared_memory_loads_less_ahead(specials: list[Any]) -> None:
    shared, _ = specials
    assert {"_rms_norm_bwd_kernel"} < shared.keys()
    assert all(size <= SMALL[3] for size in shared.values()), shared
    assert shared["_rms_norm_bwd_kernel"] > SMALL[3] // 2  # else it would load nothing ahead


@pytest.mark.compilers
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


def test_what_a_program_loads_at_once() -> None:
    loads = (
        "%x = tt.load %p, %m : tensor<2x64x!tt.ptr<bf16>> loc(#l)\n%r = tt.load %q : tensor<2x!tt.ptr<f32>> loc(#l)\n"
    )
    assert loaded_at_once(loads) == 2 * 64 * 2 + 2 * 4
    assert loaded_at_once(loads + "} {tt.num_stages = 3 : i32} loc(#l)") == 3 * (2 * 64 * 2 + 2 * 4)
    assert loaded_at_once("%one = tt.load %p : !tt.ptr<f32>") == 0


@pytest.mark.compilers
def test_every_kernel_is_compiled(compiled: Callable[[str], list[dict[str, Any]]]) -> None:
    assert kernels() == {record["kernel"] for name in CASES for record in compiled(name)}


def wide_operations(ttir: str) -> list[str]:
    """The operations in float64 but for those that round to float32."""
    lines = [line.split(" loc(")[0].strip() for line in ttir.splitlines()]
    return [x for x in lines if "f64" in x and "arith.truncf" not in x and not x.startswith(("tt.func", "#loc"))]


@pytest.mark.compilers
def test_numbers_are_rounded_before_anything_else(specials: list[Any]) -> None:
    """torch.compile hands Python numbers to a kernel as float64; a kernel that computes with them as they come runs at
    a fraction of its speed, with the right result."""
    _, records = specials
    assert any("f64" in record["ttir"] for record in records)
    for record in records:
        assert not wide_operations(record["ttir"]), f"{record['what']}: {wide_operations(record['ttir'])[:3]}"
