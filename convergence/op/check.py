"""``check_op``: judges one op by all checks, and says what failed."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from convergence.op.call import ACCURACY, ALIASING, CLOBBERING, MEMORY, RESULTS, NoTruth, Op, OpFailure
from convergence.op.checks import CHECKS, SIZES, Judge, NotJudged, Options
from convergence.op.subject import DTYPES, Inputs, Subject, check_signatures, checked_dtypes, inputs_by_name
from convergence.tables import visible

PASSED, FAILED, NOT_JUDGED, LEFT_OUT = "passed", "failed", "not judged", "left out"
# torch takes seeds of 64 bits, and a drawn call adds up to 32 bits to the given one.
MOST_SEED = 2**63 - 1
# Where one of these failed, the checks that follow would fail for the same reason.
_FIRST = (ACCURACY, RESULTS, MEMORY, ALIASING, CLOBBERING)


@dataclass(frozen=True)
class OpReport:
    """What became of every check: its verdict, and what was tried, or why it failed or was not judged."""

    name: str
    rows: dict[str, tuple[str, str]]

    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check for check, (verdict, _) in self.rows.items() if verdict == FAILED]

    def __str__(self) -> str:
        rows = [row(check, verdict, what) for check, (verdict, what) in self.rows.items()]
        return "\n".join([*HEADER, *rows, *self.ending()])

    def ending(self) -> list[str]:
        """What failed, in full, and the verdict."""
        failed = self.failed()
        said = [f"{check}: {visible(self.rows[check][1])}" for check in failed]
        verdict = f"{self.name}: " + (f"different ({', '.join(failed)})" if failed else "equal")
        return [*([""] if said else []), *said, "", verdict]


def row(check: str, verdict: str, what: str) -> str:
    """A line of the table of all checks; of one that failed, more is said below the table."""
    shown = "see below" if verdict == FAILED else visible(" ".join(what.split()))
    return f"{check.ljust(_WIDEST)}  {verdict.ljust(len(NOT_JUDGED))}  {shown}".rstrip()


_WIDEST = max(map(len, CHECKS))
HEADER = (row("check", "verdict", "what"), row("-" * _WIDEST, "-" * len(NOT_JUDGED), "----"))


def check_op(
    op: Op,
    reference: Op,
    inputs: Inputs | None = None,
    *,
    dtypes: Iterable[str | torch.dtype] | str | torch.dtype = tuple(DTYPES),
    device: str | torch.device | None = None,
    rows: tuple[int, int] = (1, 40),
    columns: tuple[int, int] = (1, 300),
    sums: bool = False,
    views: bool = False,
    overwrites: Collection[str] = (),
    launches: int | None = None,
    without: Collection[str] = (),
    examples: int = 20,
    seed: int = 0,
    name: str = "",
) -> OpReport:
    """Assert that ``op`` is the same mathematics as ``reference``, and behaves as an op of torch does.

    The truth is ``reference`` in float64. What the op may be off is what ``reference`` is in the inputs' own dtype,
    twice, and some units of roundoff.

    Args:
        op: what is judged, a function of tensors that returns a tensor, or a tuple of tensors and None.
        reference: the same function in plain torch, which computes in any floating dtype.
        inputs: ``inputs(rows, columns, dtype, device)`` returns the arguments of a call: a tuple of them in place, or
            a dict by name, of tensors and plain values. Gradients of those tensors are judged that require one. Without
            it, every required parameter is a tensor [rows, columns]; one that is called weight, bias, gamma, beta or
            scale is [columns].
        dtypes: float32, bfloat16 and float16, or some of them.
        device: cuda where there is a GPU, else cpu, on which Triton's kernels run in its interpreter.
        rows: the least and the most rows that are drawn. Inputs without rows are tried, too.
        columns: the same of columns.
        sums: whether an element of a result is a sum over the columns, as in a matmul.
        views: whether a result may be a view of an input.
        overwrites: the names of the inputs that the op may overwrite. Where the reference overwrites one, its new value
            counts as a result.
        launches: how many kernels a forward launches. On a GPU torch's own count, too; on a CPU those of Triton do.
        without: names of checks to leave out.
        examples: how many sizes are drawn, in addition to a few fixed ones.
        seed: of the random numbers.
        name: what messages call the op.

    Returns:
        What became of every check.

    Raises:
        AssertionError: at least one check failed; the message is the report.
        TypeError, ValueError: an argument makes no sense, or the reference cannot be computed.
    """
    report = judge_op(
        op, reference, inputs, dtypes=dtypes, device=device, rows=rows, columns=columns, sums=sums, views=views,
        overwrites=overwrites, launches=launches, without=without, examples=examples, seed=seed, name=name,
    )  # fmt: skip
    if report.failed():
        raise AssertionError(f"\n{report}")
    return report


def judge_op(
    op: Op, reference: Op, inputs: Inputs | None = None, *,
    show: Callable[[str], object] = str, **options: Any,
) -> OpReport:  # fmt: skip
    """The report of :func:`check_op`, whatever it says. ``show`` gets the lines of its table as checks end."""
    judge, without = _checked(op, reference, inputs, **options)
    for line in HEADER:
        show(line)
    rows: dict[str, tuple[str, str]] = {}
    failures: dict[str, str] = {}
    devices = [judge.subject.device] if judge.subject.device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        for check, (_, run) in CHECKS.items():
            first = next((one for one in _FIRST if one in failures), "")
            if check in failures:  # found while another one was made
                verdict, what = FAILED, failures[check]
            elif check in without:
                verdict, what = LEFT_OUT, ""
            elif first:
                verdict, what = NOT_JUDGED, f"{first} failed"
            else:
                verdict, what = _outcome(check, run, judge, failures)
            rows[check] = verdict, what
            show(row(check, verdict, what))
    return OpReport(judge.subject.name, rows)


def _outcome(check: str, run: Callable[[Judge], str], judge: Judge, failures: dict[str, str]) -> tuple[str, str]:
    try:
        return PASSED, run(judge)
    except OpFailure as failure:
        failures.setdefault(failure.check, failure.message)
        return (FAILED, failure.message) if failure.check == check else (NOT_JUDGED, f"{failure.check} failed")
    except NotJudged as reason:
        return NOT_JUDGED, str(reason)
    except NoTruth as error:
        if check == ACCURACY:
            raise
        return NOT_JUDGED, str(error)


def _checked(
    op: Op, reference: Op, inputs: Inputs | None, *, dtypes: Any = tuple(DTYPES), device: Any = None,
    rows: Any = (1, 40), columns: Any = (1, 300), sums: bool = False, views: bool = False,
    overwrites: Collection[str] = (), launches: int | None = None, without: Collection[str] = (), examples: int = 20,
    seed: int = 0, name: str = "",
) -> tuple[Judge, set[str]]:  # fmt: skip
    """What is asked for, once it makes sense and the reference computes."""
    check_signatures(op, reference)
    if inputs is not None and not callable(inputs):
        raise TypeError(f"inputs is a {type(inputs).__name__}; it takes a function of rows, columns, dtype and device")
    left_out, overwritten = _texts("without", without), _texts("overwrites", overwrites)
    for one in left_out - {*CHECKS}:
        raise ValueError(f"without: {one!r} is unknown; the checks are {', '.join(CHECKS)}")
    for what, number in (("examples", examples), ("seed", seed), ("launches", launches or 0)):
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{what} is {number!r}; it takes a whole number from 0 on")
    if seed > MOST_SEED:
        raise ValueError(f"seed is {seed}; it takes a whole number from 0 to {MOST_SEED}")
    if importlib.util.find_spec("hypothesis") is None:
        raise ValueError('hypothesis draws the shapes, and is not installed here: pip install "liger-kernels[proof]"')
    where = checked_device(device)
    prepare(where)
    own = inputs is not None
    named = op.func if isinstance(op, functools.partial) else op
    label = name or getattr(named, "__name__", "") or type(named).__name__
    subject = Subject(op, reference, inputs or inputs_by_name(reference), own, where, label)
    options = Options(
        checked_dtypes(dtypes), _range("rows", rows), _range("columns", columns), sums, views,
        overwritten, launches, examples, seed,
    )  # fmt: skip
    judge = Judge(subject, options)
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        for dtype in options.dtypes:
            subject.check_reference(judge.size(*SIZES[-1], dtype))
        names = judge.example(judge.size(*SIZES[-1])).names
    for one in {*options.overwrites} - {*names}:
        raise ValueError(f"overwrites: there is no input {one!r}; the tensors are {', '.join(names)}")
    return judge, left_out


def _texts(what: str, given: Any) -> set[str]:
    many = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    if not all(isinstance(one, str) for one in many):
        raise TypeError(f"{what} is {given!r}; it takes a name, or a list of names")
    return {*many}


def _range(what: str, given: Any) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(pair) != 2 or not all(type(n) is int for n in pair) or not 1 <= pair[0] <= pair[1]:
        raise ValueError(f"{what} is {given!r}; it takes the least and the most, such as (1, 40)")
    return pair


def checked_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; without one, cuda where there is a GPU, else cpu.

    Raises:
        ValueError: it is another one, or not here.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else str(device)
    if kind.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device is {kind!r}; allowed are cpu and cuda")
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {kind!r}, and this machine has no CUDA device; allowed here is cpu")
    return torch.device(kind)


def prepare(device: torch.device) -> None:
    """Triton's interpreter rounds as every device does."""
    if device.type == "cpu" and importlib.util.find_spec("triton") is not None:
        from convergence.arms.interpreter import prepare

        prepare()
