"""``python -m convergence op MODULE:FUNCTION``: the options, and what they mean."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from convergence.tables import visible

EXAMPLE = "python -m convergence op my_pkg:fused --reference my_pkg:plain [--inputs my_pkg:inputs]"
EQUAL, DIFFERENT, INTERRUPTED, USAGE = 0, 1, 2, 4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="MODULE:FUNCTION", help="what is judged, a function of tensors")
    parser.add_argument("--reference", required=True, metavar="MODULE:FUNCTION", help="the same in plain torch")
    parser.add_argument(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="called with rows, columns, dtype and device: the arguments of a call",
    )
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="(default: %(default)s)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--rows", default="1:40", metavar="LEAST:MOST", help="that are drawn (default: %(default)s)")
    parser.add_argument("--columns", default="1:300", metavar="LEAST:MOST", help="(default: %(default)s)")
    parser.add_argument("--sums", action="store_true", help="an element of a result is a sum over the columns")
    parser.add_argument("--views", action="store_true", help="a result may be a view of an input")
    parser.add_argument("--overwrites", default="", metavar="NAMES", help="inputs that the op may overwrite")
    parser.add_argument("--launches", type=int, metavar="N", help="how many kernels a forward launches")
    parser.add_argument("--without", default="", metavar="NAMES", help="checks to leave out")
    parser.add_argument("--examples", type=int, default=20, metavar="N", help="sizes that are drawn (20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (0)")


def error_of(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """An option makes no sense: exit code 4, as of every command that judges."""
    parser.print_usage(sys.stderr)
    parser.exit(USAGE, f"{parser.prog}: error: {visible(message)}\n")


def reported(run: Callable[[], int]) -> int:
    """What ``run()`` returns in a child of this process. An op can end the process that it runs in, with any exit code:
    it is different where the child did not say what it found. Windows has no such children."""
    if not hasattr(os, "fork"):
        return run()
    reads, writes = os.pipe()
    child, asked = 0, []

    def pass_on(number: int, frame: Any) -> None:
        asked.append(number)
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end(run, writes)
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    os.close(writes)
    os.set_blocking(reads, False)  # what the op started may hold the other end
    with open(reads, "rb", buffering=0) as channel:
        found = channel.read(1) or b""
    if found or asked:
        return found[0] if found else INTERRUPTED
    from convergence.arms.isolate import how

    print(f"different: the process of the op ended before it was judged, with {how(status)}", file=sys.stderr)
    return DIFFERENT


def _end(run: Callable[[], int], channel: int) -> NoReturn:
    """End this process as ``run`` says, and write its exit code to ``channel``."""
    code = DIFFERENT
    try:
        code = run()
    except SystemExit as end:  # of argparse
        code = end.code if isinstance(end.code, int) else DIFFERENT
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.write(channel, bytes([code & 255]))
    os._exit(code & 255)


def judge(options: argparse.Namespace) -> int:
    """Print a line for each check as it ends, and what failed; 0 where the op is equal, 1 where it is different.

    Raises:
        TypeError, ValueError: an option makes no sense.
    """
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] == "cpu":  # as Triton decides at its import
        os.environ["TRITON_INTERPRET"] = "1"
    from convergence.named import load
    from convergence.op.check import judge_op

    sizes = {name: _range(f"--{name}", getattr(options, name)) for name in ("rows", "columns")}
    called = "with tensors"
    op = load(options.op, "op", called)
    reference = load(options.reference, "--reference", called)
    inputs = load(options.inputs, "--inputs", "with rows, columns, dtype and device") if options.inputs else None
    several = {name: _names(getattr(options, name)) for name in ("overwrites", "without")}
    single = {name: getattr(options, name) for name in ("dtypes", "sums", "views", "launches", "examples", "seed")}
    show = functools.partial(print, flush=True)
    report = judge_op(
        op, reference, inputs, device=device, name=options.op.partition(":")[2], show=show,
        **sizes, **several, **single,
    )  # fmt: skip
    print("\n".join(report.ending()))
    return DIFFERENT if report.failed() else EQUAL


def _range(option: str, text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal()):
        raise ValueError(f"{option} is {text!r}; it takes LEAST:MOST, such as 1:40")
    return int(least), int(most)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
