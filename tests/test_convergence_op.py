"""``check_op`` and ``python -m convergence op``: what is broken fails by the check that is meant for it, and what is
honest passes all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import convergence
from convergence.__main__ import main
from convergence.op.check import LEFT_OUT, NOT_JUDGED, PASSED, judge_op
from convergence.op.checks import CHECKS
from tests.op_faults import (
    FAULTS,
    Both,
    Honest,
    ScaleInPlace,
    WritesANumberByAMask,
    add_to,
    both_plain,
    in_place,
    in_place_inputs,
    inputs,
    plain,
    residual_inputs,
    scale_in_place,
    store_sum,
)

# Small and few: an honest op is tried on many sizes below.
FEW: dict[str, Any] = {"examples": 2, "rows": (1, 9), "columns": (1, 33)}
# Dynamo takes seconds. It says itself what it cannot trace, and a fault below is found by it.
SLOW = {"compile"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_the_check_that_is_meant_for_it(name: str) -> None:
    fault = FAULTS[name]
    without = SLOW - {fault.check}
    report = judge_op(fault.op, fault.reference, fault.inputs, without=without, name=name, **FEW, **fault.options)
    assert report.failed() == [fault.check], str(report)


def test_every_check_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS.values()} == {*CHECKS}


@pytest.mark.parametrize("op", [Honest, WritesANumberByAMask])
def test_an_honest_op_passes_all_checks(op: type[Honest], device: torch.device) -> None:
    """Dynamo traces no class methods; what it traces passes that check in ``test_ops_every.py``. On a CPU, launches of
    Triton kernels alone are counted."""
    report = convergence.check_op(op.apply, plain, inputs, without=SLOW, name="honest")
    verdicts = {check: verdict for check, (verdict, _) in report.rows.items()}
    launches = PASSED if device.type == "cuda" else NOT_JUDGED
    expected = dict.fromkeys(CHECKS, PASSED) | {"launches": launches, "compile": LEFT_OUT}
    assert verdicts == expected, str(report)


def test_an_honest_op_of_two_results_passes_all_checks() -> None:
    report = judge_op(Both.apply, both_plain, inputs, without=SLOW, **FEW)
    assert report.failed() == [], str(report)
    assert "each result alone" in report.rows["frozen inputs"][1]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of one column, its gradient is rounding noise."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def norm_by_division(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide / torch.sqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + 1e-6)
    return (wide * weight.float()).to(torch.result_type(x, weight))


def test_rounding_in_another_order_is_no_failure() -> None:
    """Over many sizes, some of which make PyTorch's own error a single draw of the noise."""
    others = {*CHECKS} - {"accuracy"}
    assert convergence.check_op(norm_by_division, norm, without=others, examples=60, columns=(1, 8)).failed() == []


def integers(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return torch.randint(columns, (rows,), device=device), torch.randn(columns, 3).to(device, dtype).requires_grad_()


def test_indices_plain_values_and_frozen_inputs() -> None:
    """What is no number has no gradient, and what is no tensor stays."""

    def with_scale(*size: Any) -> tuple[Any, ...]:
        return (*integers(*size), 2.0, None)

    def select(ids: torch.Tensor, table: torch.Tensor, scale: float, bias: Any) -> tuple[torch.Tensor, Any]:
        return table[ids] * scale, bias

    report = judge_op(select, select, with_scale, without=SLOW, **FEW)
    assert report.failed() == []
    assert report.rows["rows of zeros"] == (NOT_JUDGED, "no tensor of numbers has the rows")


def test_what_is_said_is_allowed() -> None:
    few = {**FEW, "without": {*CHECKS} - {"accuracy"}}
    assert judge_op(FAULTS["handed on"].op, FAULTS["handed on"].reference, inputs, views=True, **few).failed() == []
    assert judge_op(FAULTS["OverInput"].op, plain, inputs, overwrites="x", **few).failed() == []


@pytest.mark.parametrize(
    ("op", "reference", "made", "named"),
    [
        (in_place(ScaleInPlace), scale_in_place, in_place_inputs, "x"),
        (add_to, add_to, residual_inputs, "residual"),
        (store_sum, store_sum, residual_inputs, "residual"),
    ],
    ids=["x", "residual", "no graph"],
)
def test_an_op_that_overwrites_as_the_reference_does_is_equal(op: Any, reference: Any, made: Any, named: str) -> None:
    report = judge_op(op, reference, made, overwrites=named, without=SLOW, **FEW)
    assert report.failed() == [], str(report)
    assert report.rows["strides"][0] == PASSED, str(report)


def test_a_call_in_which_nothing_is_compared_is_an_error() -> None:
    def nothing(x: torch.Tensor, weight: torch.Tensor) -> None:
        pass

    for overwrites in ((), "x"):
        with pytest.raises(ValueError, match=r"the reference returns no tensor.*nothing can be compared.*overwrites="):
            judge_op(nothing, nothing, in_place_inputs, overwrites=overwrites, without={"accuracy"}, **FEW)


def other(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return plain(x, weight)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def rounds_to_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape).copy_(plain(x, weight).detach())


ONE = torch.ones(2)


def giving(value: Any) -> Any:
    return lambda *size: value


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((plain, other), {}, r"called with \(x, weight\) and the reference with \(weight, x\)"),
        ((plain, 3), {}, "the reference is a int; it takes a function of tensors"),
        ((plain, torch.nn.functional.silu, None), {}, "both have to take the same required parameters"),
        ((Honest.apply, Honest.apply), {}, "names no required parameter.*--inputs my_pkg:inputs"),
        ((plain, plain, 3), {}, "inputs is a int"),
        ((plain, plain, giving((1, 2.0))), {}, "returned no tensor"),
        ((plain, plain, giving(torch.ones(2))), {}, "returned a Tensor; allowed are a tuple or list .* or a dict"),
        ((plain, plain, giving("text")), {}, "returned a str; allowed are a tuple or list"),
        ((plain, plain, giving({1: torch.ones(2)})), {}, "a dict with the key 1"),
        ((plain, plain, giving(([torch.ones(2)], 1))), {}, "returned a list for x; allowed are tensors and plain"),
        ((plain, plain, giving((torch.ones(2), torch.ones(2)))), {"dtypes": "bfloat16"}, "at least one has to be of"),
        ((plain, plain, giving((ONE, ONE))), {}, "returned the same tensor for x and weight; .* such as a clone"),
        ((plain, plain, lambda rows: 1), {}, r"raised TypeError.*it is called as inputs\(rows, columns, dtype"),
        ((plain, plain, giving((torch.ones(2),))), {}, "the reference, called with .* raised TypeError"),
        (
            (product, product),
            {},
            r"\(x: \[2, 300\], y: \[2, 300\]\) in torch.float32, raised.* by the names of its parameters",
        ),
        ((plain, rounds_to_float32), {}, "returned torch.float32; the truth needs a result in float64"),
        ((plain, plain), {"dtypes": ("float32", "float8")}, "dtypes: 'float8' is unknown; allowed are float32, bfl"),
        ((plain, plain), {"dtypes": torch.float64}, "dtypes: 'float64' is unknown"),
        ((plain, plain), {"dtypes": ()}, "dtypes names none"),
        ((plain, plain), {"without": "speed"}, "without: 'speed' is unknown; the checks are accuracy, strides"),
        ((plain, plain), {"overwrites": "y"}, "there is no input 'y'; the tensors are x, weight"),
        ((plain, plain), {"rows": (3, 2)}, r"rows is \(3, 2\); it takes the least and the most"),
        ((plain, plain), {"columns": 4}, "columns is 4"),
        ((plain, plain), {"examples": -1}, "examples is -1"),
        ((plain, plain), {"seed": 2**64 - 1}, "seed is 18446744073709551615; it takes a whole number from 0 to 92233"),
        ((plain, plain), {"seed": 2**64}, "seed is 18446744073709551616; it takes a whole number from 0 to 92233"),
        ((plain, plain), {"without": 5}, "without is 5; it takes a name, or a list of names"),
        ((plain, plain), {"without": [5]}, r"without is \[5\]; it takes a name, or a list of names"),
        ((plain, plain), {"overwrites": 5}, "overwrites is 5; it takes a name, or a list of names"),
        ((plain, plain), {"dtypes": None}, "dtypes is None; allowed are float32, bfloat16, float16, or a list"),
        ((plain, plain), {"device": "tpu"}, "device is 'tpu'; allowed are cpu and cuda"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_what_cannot_be_judged_is_an_error(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        convergence.check_op(*arguments, **options)


PACKAGE = """
import os
import torch

def plain(x, weight):
    return x * torch.sigmoid(x) * weight

def fused(x, weight):
    return plain(x, weight) * 1.01

def ends(x, weight):
    raise SystemExit(0)

def ends_at_once(x, weight):
    os._exit(0)

def inputs(rows, columns, dtype, device):
    return [torch.randn(rows, columns).to(device, dtype), torch.randn(columns).to(device, dtype)]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_pkg.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_pkg", None)


FAST = ("--reference", "my_pkg:plain", "--without", "compile", "--examples", "1", "--rows", "1:5", "--columns", "1:9")


@pytest.mark.parametrize(
    ("options", "status", "shown"),
    [
        (("my_pkg:plain", *FAST), 0, "plain: equal"),
        (("my_pkg:plain", *FAST, "--inputs", "my_pkg:inputs"), 0, "frozen inputs         not judged  no input req"),
        (("my_pkg:fused", *FAST), 1, "fused: different (accuracy)"),
        (("my_pkg:ends", *FAST), 1, "raised SystemExit: 0"),
        (("my_pkg:plain", *FAST[2:], "--reference", "my_pkg:ends"), 4, "raised SystemExit: 0; its arguments"),
        (("my_pkg:absent", *FAST), 4, "op 'my_pkg:absent' cannot be imported: module 'my_pkg' has no attribute"),
        (("my_pkg", *FAST), 4, "op 'my_pkg' is not of the form package.module:function"),
        (("my_pkg:plain", *FAST, "--dtypes", "int8"), 4, "dtypes: 'int8' is unknown; allowed are float32, bfloat16"),
        (("my_pkg:plain", *FAST, "--rows", "5"), 4, "--rows is '5'; it takes LEAST:MOST, such as 1:40"),
        (("my_pkg:plain", *FAST, "--fast"), 4, "unrecognized arguments: --fast"),
        (("my_pkg:plain",), 4, "the following arguments are required: --reference"),
    ],
    ids=str,
)
def test_the_command(
    options: tuple[str, ...], status: int, shown: str, package: None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", ""))  # which the command sets
    try:
        found = main(["op", *options])
    except SystemExit as error:
        found = error.code
    said = capsys.readouterr()
    assert (found, shown in said.out + said.err) == (status, True), said


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_cpu_runs_the_interpreter(device: str, package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "")
    with pytest.raises(SystemExit, match="4"):
        main(["op", "my_pkg:absent", *FAST, "--device", device])
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "status", "shown"),
    [
        ("ends_at_once", 1, "the process of the op ended before it was judged, with exit code 0"),
        ("plain", 0, "plain: equal"),
    ],
)
def test_an_op_that_ends_its_process_is_different(op: str, status: int, shown: str, package: None) -> None:
    command = [sys.executable, "-m", "convergence", "op", f"my_pkg:{op}", *FAST]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True
    )
    assert (done.returncode, shown in done.stdout + done.stderr) == (status, True), done


def test_asking_for_the_package_costs_nothing() -> None:
    """Every run of pytest imports it where the proof is installed."""
    code = "import convergence, sys; assert 'torch' not in sys.modules; convergence.check_op; convergence.absent"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("AttributeError: module 'convergence' has no attribute 'absent'")
