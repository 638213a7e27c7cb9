"""``python -m convergence report RECORDS``: HTML, Markdown and JUnit XML from records of any machines and workers.
``python -m convergence setups RECORDS``: which set-ups are fused and equal.
``python -m convergence prove PATH``: is a patch the same mathematics on a checkpoint of your own?
``python -m convergence consistency [PATH]``: do trainer and rollout compute the same log-probabilities under a patch?
``python -m convergence peers DIR``: are the kernels of other packages, as far as they are installed?
``python -m convergence differences A B``: which kernels differ between two commits or environments, and by how much?
``python -m convergence op MODULE:FUNCTION --reference MODULE:FUNCTION``: is a single op that of its reference?"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from convergence import files
from convergence.arms.quantities import CONSISTENCY
from convergence.elsewhere import differences
from convergence.op import command as op
from convergence.peers import PEERS
from convergence.report import html, report
from convergence.report.records import load_all, newest
from convergence.tables import visible


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is asked for; without a file, the Markdown goes to the standard output. 0 when it was written. Of
    ``prove``, ``consistency`` and ``peers``, the exit code of pytest: 0 equal, 1 different, 2 interrupted, 4 an error
    before anything was trained; ``op`` has the same."""
    parser, own = _parsers()
    options, others = parser.parse_known_args(arguments)
    files.print_anything()
    if options.command == "prove":
        return _pytest("--checkpoint", options.path, *others)
    if options.command == "consistency":  # argparse would take the value of an option of pytest's for PATH
        given = ["--checkpoint", others.pop(0)] if others and not others[0].startswith("-") else []
        return _pytest("--profile", CONSISTENCY, *given, *others)
    if options.command == "peers":
        return _pytest("--patch", ",".join(PEERS), "--no-blame", f"--records={options.records}", *others)
    if options.command in own:
        command, judge = own[options.command], op.judge if options.command == "op" else differences.write
        try:
            return judge(options) if not others else command.error(f"unrecognized arguments: {' '.join(others)}")
        except (TypeError, ValueError) as error:
            command.error(str(error))
        except KeyboardInterrupt:
            return op.INTERRUPTED
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        _summarise(options)
    except (ValueError, OSError) as error:
        parser.error(visible(str(error)))
    return 0


@functools.cache  # as matrix does: a caller in the process may ask often
def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands, and those of the commands that name their errors themselves."""
    parser = argparse.ArgumentParser(prog="python -m convergence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("report", help="summarise the newest record of every case")
    command.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page (needs jinja2)")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="a summary for a CI's page")
    command.add_argument("--junit", type=Path, metavar="FILE", help="a test case per record")
    command.add_argument(
        "--trend",
        action="store_true",
        help="the page (report.html without --html) also shows each case's older records",
    )
    commands.add_parser("setups", help="a Markdown table: set-up, order, fused, equal")
    for command in commands.choices.values():
        command.add_argument(
            "records", nargs="+", type=Path, metavar="RECORDS", help="record files, or folders of them"
        )
    prove = commands.add_parser(
        "prove",
        help="train a checkpoint with and without a patch, and compare",
        usage="python -m convergence prove PATH [options of pytest convergence, such as --patch module:function]",
    )
    prove.add_argument("path", metavar="PATH", help="a folder with config.json and safetensors, or a GGUF file")
    commands.add_parser(
        "consistency",
        help="compare the log-probabilities of trainer and rollout, with and without a patch",
        usage="python -m convergence consistency [PATH] [options of pytest convergence, such as --models qwen3]",
        epilog="PATH comes first: a folder with config.json and safetensors, or a GGUF file. Without it, mini models.",
    )
    peers = commands.add_parser(
        "peers",
        help="judge the kernels of other packages; python -m tools.peers makes a page of the records",
        usage="python -m convergence peers DIR [options of pytest convergence, such as --models llama]",
    )
    peers.add_argument("records", type=Path, metavar="DIR", help="where a record of every case is added")
    sides = commands.add_parser("differences", help="compare two commits or environments, op by op")
    differences.add_options(sides)
    single = commands.add_parser("op", help="judge a single op against its reference", description=op.EXAMPLE)
    op.add_options(single)
    for command in (single, sides, prove, peers):
        command.error = functools.partial(op.error_of, command)  # type: ignore[method-assign]
    return parser, {"op": single, "differences": sides}


def _summarise(options: argparse.Namespace) -> None:
    """``report`` and ``setups``: write or print what records say.

    Raises:
        ValueError, OSError: a record cannot be read, or a file not written.
    """
    everything = load_all(options.records)
    records, history = newest(everything), []
    if options.command == "setups":
        print("\n".join(report.setups(records)))
        return
    if options.trend:  # one entry a case; its other environments are in its trend
        records, history = [*{record.case: record for record in everything}.values()], everything
        options.html = options.html or Path("report.html")
    made: dict[Path, str] = {}
    if options.html is not None:
        made[options.html] = html.page(records, history)
    if options.markdown is not None:
        made[options.markdown] = report.markdown(records)
    if options.junit is not None:
        made[options.junit] = report.junit(records)
    for path, text in made.items():
        files.write(text, path)
    if not made:
        print(report.markdown(records), end="")


def _pytest(*options: str) -> int:
    import pytest

    return int(pytest.main([str(Path(__file__).parent), "-p", "no:cacheprovider", *options]))


if __name__ == "__main__":
    sys.exit(op.reported(main) if sys.argv[1:2] == ["op"] else main())
