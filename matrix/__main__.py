"""``python -m matrix``: list, run and report cells, propose new ones, print them for a CI, decide on a release, and
count what of transformers runs on kernels."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from convergence.files import print_anything
from convergence.tables import visible
from matrix import cells, cluster, gate, incidents, new, report, runner, upstream
from matrix.repository import config, start, workflow


def _count(text: str) -> int:
    """A number of processes.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not runner.is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed is a number, 1 or more")
    return int(text)


@functools.cache  # a caller in the process may ask often, and making it takes longer than most commands
def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m matrix", description=__doc__.replace("``", ""))
    top.add_argument("--records", metavar="DIR", type=Path, help="default: what the configuration says")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, does: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=does, description=does)

    add("list", "the cells, and why each exists")
    run = add("run", "make environments with tox and run cells in them; exit 1 unless every one passes")
    run.add_argument("cells", nargs="*", metavar="cell", help="which; all by default")
    run.add_argument("-j", "--jobs", type=_count, metavar="N", help="cells at a time (1; with --ray, as many as fit)")
    run.add_argument("--ray", metavar="ADDRESS", help="on the nodes of the Ray cluster at HOST:PORT (or 'auto')")
    run.add_argument("--gpus", type=float, default=0, metavar="N", help="with --ray: GPUs per cell (0)")
    cell = add("cell", "run one cell's stages here, in the environment that runs this (tox calls it)")
    cell.add_argument("cells", nargs=1, metavar="cell")
    cell.add_argument("--python", metavar="PATH", default=sys.executable, help="in the environment of this Python")
    for package in ("transformers", "trl"):
        cell.add_argument(f"--{package}", metavar="PATH", help="for the cell main: a checkout or a wheel (main branch)")
    cell.add_argument("--torch", metavar="PATH", help="for the cell main: also a version, or 'nightly'")
    cell.add_argument(
        "--stages", metavar="A,B", help="only these: exit 1 unless they pass; the record stays incomplete"
    )
    for command in (run, cell):
        default = "CPUs / jobs; with --ray, 1" if command is run else "the environment's MATRIX_WORKERS, or CPUs"
        command.add_argument("-n", "--workers", type=_count, metavar="N", help=f"pytest workers per cell ({default})")
        command.add_argument("--fresh", action="store_true", help="repeat stages that passed for this code, too")
    report = add("report", "what the records say; exit 1 unless every cell passed")
    report.add_argument("--markdown", action="store_true", help="as Markdown")
    init = add("init", "write [tool.matrix] into the pyproject.toml here, and the first cells, of sets that existed")
    init.add_argument("--axes", metavar="A,B", help="packages whose versions cells differ in (of its dependencies)")
    init.add_argument("--patch", metavar="MODULE:FUNCTION", default="", help="what the proof judges in each cell")
    add("new", "write cell files for releases of transformers, trl and torch beyond the newest cells")
    add("moved", "in what the cell main differs from the accepted records, as Markdown; exit 1 where it does")
    census = add("census", "what of every model of the installed transformers runs on kernels, and why the rest not")
    census.add_argument(
        "--write", action="store_true", help="also into matrix/census.json and docs/evidence/census*.md"
    )
    incident = add(
        "incident", "releases with known faults, each of which the proof must find; without a name, the list"
    )
    incident.add_argument("incidents", nargs="*", metavar="NAME", help="which")
    incident.add_argument("--page", action="store_true", help="write docs/evidence/incidents.md from the outcomes")
    ci = add("ci", "the cells as a job matrix for GitHub Actions, JSON")
    ci.add_argument("--workflow", action="store_true", help="a whole workflow that runs them instead, YAML")
    ci.add_argument("--write", action="store_true", help="with --workflow: into .github/workflows/cells.yml")
    gate = add("gate", "decide on a release: everything that must pass, against the last release's records")
    gate.add_argument("--accept", metavar="REASON", help="make these records the baseline, and say why")
    gate.add_argument("--cells", metavar="A,B", type=lambda text: text.split(","), default=[], help="only these")
    gate.add_argument("--no-run", action="store_true", help="judge the records that are there")
    gate.add_argument("-j", "--jobs", type=_count, default=1, metavar="N", help="cells at a time (1)")
    gate.add_argument("--kernels", metavar="FILE", type=Path, help="what python -m benchmarks --json wrote on a GPU")
    gate.add_argument("--without-gpu", action="store_true", help="decide without kernel speed, and say so")
    gate.add_argument("--output", metavar="DIR", type=Path, help="for gate.json and gate.md (next to the records)")
    return top


def run(arguments: argparse.Namespace) -> int:
    chosen = cells.select(arguments.cells)
    cells.refuse_none(chosen)
    failures: dict[str, str] = {}
    if arguments.ray:
        failures = cluster.run(
            chosen,
            arguments.ray,
            arguments.records,
            jobs=arguments.jobs,
            workers=arguments.workers or 1,
            gpus=arguments.gpus,
            fresh=arguments.fresh,
        )
    else:
        jobs = arguments.jobs or 1
        runner.tox(chosen, jobs, _options(arguments, jobs), arguments.records)
    for name, why in failures.items():
        print(visible(f"{name}: {why}"))
    code = report.show(arguments.records, chosen)
    return int(bool(code or failures))


def cell(arguments: argparse.Namespace) -> int:
    sources = {package: getattr(arguments, package) for package in ("transformers", "trl", "torch")}
    if arguments.cells != [upstream.NAME]:
        if any(sources.values()):
            raise ValueError(f"--transformers, --trl and --torch are for the cell {upstream.NAME}")
        (chosen,) = cells.select(arguments.cells, here=True)
    elif os.environ.get("TOX_ENV_NAME") != upstream.NAME:  # tox calls this again, in the environment that it makes
        path = upstream.write_requirements(arguments.records, sources)
        options = [*_options(arguments, 1), *(["--stages", arguments.stages] if arguments.stages else [])]
        chosen = upstream.cell(arguments.records)
        code = runner.tox([chosen], 1, options, arguments.records, **{runner.REQUIREMENTS: str(path.absolute())})
        shown = report.show(arguments.records, [chosen])
        return int(code != 0) if arguments.stages else shown
    else:
        chosen = upstream.cell(arguments.records)
    stages = config.here().stages[chosen.kind]
    if arguments.stages:
        names = arguments.stages.split(",")
        allowed = [stage.name for stage in stages]
        if unknown := set(names) - set(allowed):
            raise ValueError(f"unknown stage {', '.join(sorted(unknown))}; allowed are {', '.join(allowed)}")
        stages = tuple(stage for stage in stages if stage.name in names)
    workers = arguments.workers or runner.workers()
    record = runner.run_stages(chosen, stages, arguments.records, workers, arguments.fresh, python=arguments.python)
    for deviation in record.deviations:
        print(visible(f"{chosen.name}: {deviation}"))
    return int(not record.passed_so_far)


def ci(arguments: argparse.Namespace) -> int:
    if arguments.write and not arguments.workflow:
        raise ValueError("--write is for --workflow")
    if arguments.workflow:
        print(f"wrote {workflow.put()}" if arguments.write else workflow.text(), end="\n" if arguments.write else "")
        return 0
    return report.print_jobs()


def report_all(arguments: argparse.Namespace) -> int:
    known = [*cells.load_all().values(), *cells.in_place().values()]
    return report.show(arguments.records, known, arguments.markdown)


def census(arguments: argparse.Namespace) -> int:
    try:
        from matrix.census import main
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matrix"):
            raise
        raise ValueError("census counts for the pages of liger-kernels: it runs in a checkout of it only") from None
    return main(arguments)


def _options(arguments: argparse.Namespace, jobs: int) -> list[str]:
    workers = arguments.workers or max(1, runner.cpus() // jobs)
    return ["--workers", str(workers), *(["--fresh"] if arguments.fresh else [])]


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": lambda arguments: report.list_cells(),
    "run": run,
    "cell": cell,
    "report": report_all,
    "init": start.main,
    "new": lambda arguments: new.main(),
    "moved": lambda arguments: upstream.moved(arguments.records),
    "census": census,
    "incident": lambda arguments: incidents.main(arguments.incidents, arguments.records, arguments.page),
    "ci": ci,
    "gate": gate.main,
}


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    print_anything()  # under tox and in a CI's log, progress shows when it happens
    try:
        if arguments.command != "init":
            arguments.records = arguments.records or runner.records_folder()
        return _COMMANDS[arguments.command](arguments)
    except (ValueError, OSError) as error:  # of a folder that cannot be written, too
        print(visible(f"python -m matrix: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m matrix: interrupted; a stage that passed is kept", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends what it has started, too
    sys.exit(main())
