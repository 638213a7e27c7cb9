"""The pytest hooks of the proof: options, device choice, a line per case, the table at the end. Only hooks.

``convergence.entry_point`` loads it where the proof is installed and named. This repository's ``conftest.py`` loads it
for every run, ``tests/`` too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pickle
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

# None of these imports Triton, nor this package's kernels: the device is to be chosen before.
from convergence import files, ours
from convergence.arms import isolate, setups
from convergence.arms.candidate import check_patch
from convergence.arms.quantities import CONSISTENCY
from convergence.consistency.rollout import check_engine
from convergence.elsewhere import options as elsewhere
from convergence.elsewhere.candidates import Keeping
from convergence.elsewhere.origin import HERE, NotHere, Origin
from convergence.judge import bitwise
from convergence.judge.tolerance import REPLICAS
from convergence.kept import digests, keep_in, kept_key
from convergence.models import models, own, scale
from convergence.models.checkpoint import PROFILE, Checkpoint
from convergence.models.checkpoint_check import check
from convergence.models.folder import CONFIG
from convergence.models.rows import find
from convergence.options import check_own, check_trainers, trainers, usage_error
from convergence.patches import BUILT_IN
from convergence.report import html, progress
from convergence.report.records import TRAINER, Case, Record, changed, dumps, environment, load, load_all, parsed
from convergence.report.report import progress as line_of
from convergence.report.report import summary_tables
from convergence.tables import visible
from convergence.trainers import rows as in_trainers

_PROPERTY = "convergence"
_FEW = 4  # cases, for which it pays to train truth and baseline
UNUSABLE = "convergence: a file that the user named cannot be used"
_summaries = pytest.StashKey[list[Any]]()
# What every record of this run shares, the folder that records go to ("" for none), and the cases' earlier records.
RUN, RECORDS = pytest.StashKey[str](), pytest.StashKey[str]()
EARLIER = pytest.StashKey[dict[Case, Record]]()
ORIGIN = pytest.StashKey[Origin]()  # where candidates are from
_KEPT = pytest.StashKey[dict[str, str]]()  # the digests of references that were there when the run began


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("convergence", "the proof that a patch is the same mathematics")
    group.addoption("--patch", metavar="MODULE:FUNCTION", help="judge function(model), or several of them")
    group.addoption("--scope", default="instance", help="what it may change: the instance, or any class (see docs)")
    group.addoption("--patch-timeout", type=float, default=1800, metavar="S", help="seconds per candidate (1800)")
    group.addoption("--models", default="core", help="a comma-separated list, 'core' or 'all' (default: core)")
    group.addoption(in_trainers.OPTION, metavar="NAMES", help="train in trainers: a comma-separated list, or 'all'")
    group.addoption(own.OPTION, metavar="MODULE:FUNCTION", help="prove the models that function() describes (see docs)")
    group.addoption("--checkpoint", metavar="PATH", help="prove this model: a folder of transformers, or a GGUF file")
    group.addoption("--text", metavar="FILE", default="", help="what a checkpoint trains on (default: Python's manual)")
    group.addoption("--layers", type=int, metavar="N", help="of a checkpoint, the first N layers only")
    group.addoption("--rows", type=int, default=4, metavar="N", help="of a checkpoint's batches (4)")
    group.addoption("--length", type=int, default=128, metavar="N", help="tokens in a checkpoint's row (128)")
    group.addoption(
        "--rollout", metavar="ENGINE", default="", help="of --profile consistency: vllm, sglang, or see docs"
    )
    group.addoption(
        "--steps", type=int, default=4, metavar="N", help="batches of a checkpoint (4); from 100 on, a long run"
    )
    group.addoption("--dtypes", default=None, help="float32, bfloat16, float16 (default: see docs)")
    group.addoption("--setups", default="plain", help="what arms train in: a comma-separated list, or 'all' (see docs)")
    group.addoption("--orders", default="first", choices=("first", "all"), help="patch before wrapping, or also after")
    group.addoption("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    group.addoption("--profile", default="hard", help="plain or hard inputs (default: hard), or see docs")
    group.addoption(
        "--blame",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="find the guilty kernel, module and pass of a failure by training parts of the patch again (default)",
    )
    group.addoption("--records", metavar="DIR", default=None, help="add one JSON record per case to DIR")
    group.addoption(
        "--references", metavar="DIR", default=None, help="keep truth, baseline and replicas in DIR for later runs"
    )
    group.addoption("--report", metavar="FILE", default=None, help="write this run as one HTML page (needs jinja2)")
    group.addoption(
        "--compare-to", metavar="RECORDS", default=None, help="every observed bit must be that of an earlier run"
    )
    elsewhere.add_options(group)


def _choose_device(device: str | None) -> str:
    """The device of this run. Without a GPU, kernels run in Triton's interpreter, as Triton decides at its import."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


# At import, not in pytest_configure, because a conftest.py further down may import liger_kernels.ops before that.
_choose_device(None)


def pytest_configure(config: pytest.Config) -> None:
    here = str(config.invocation_params.dir)  # a patch may lie there: ``pytest`` finds it as ``python -m pytest`` does
    if here not in sys.path:
        sys.path.insert(0, here)
    config.stash[_summaries] = []
    config.addinivalue_line("markers", "xdist_group(name): runs on one worker with the rest of its group")
    worker = _worker(config)
    _share_the_cores(worker.get("workercount") or len(getattr(config.option, "tx", None) or ()))
    device = config.getoption("--device")
    if device is not None:
        _check_names("--device", [device], ("cpu", "cuda"))
    config.option.device = device = _choose_device(device)
    if device == "cuda":
        _use_own_gpu(worker.get("workerid", "gw0"))
    elif worker or not config.getoption("numprocesses", None):  # not who only hands out work
        from convergence.arms.interpreter import prepare

        prepare()
    profile = config.getoption("--profile")
    _check_names("--profile", [profile], ("plain", "hard", "scale", CONSISTENCY))
    small = ("float16",) if profile in ("scale", CONSISTENCY) else ()
    _check_names("--dtypes", _names(config, "--dtypes"), ("float32", "bfloat16", *small))
    check_own(config)
    check_trainers(config)
    with usage_error("--models: "):
        _rows(config)
    with usage_error("--setups: "):
        setups.select(config.getoption("--setups"))
    if profile == CONSISTENCY and config.getoption("--setups") != "plain":
        raise pytest.UsageError("--profile consistency trains in no set-up; leave --setups out")
    _check_names("--scope", [config.getoption("--scope")], ("instance", "class"))
    _check_checkpoint(config)
    if not 0 < config.getoption("--patch-timeout") < 1e9:
        raise pytest.UsageError("--patch-timeout takes a number of seconds above 0")
    # In one run, all patches share truth, baseline and replicas.
    patches = _names(config, "--patch")
    if config.getoption("--patch") is not None and not patches:
        raise pytest.UsageError("--patch names no patch; it takes package.module:function, or several with commas")
    if not patches and not ours.INSTALLED:
        raise pytest.UsageError("liger_kernels is not installed here: name the patch to judge, --patch module:function")
    # What is on the disk is read before a patch is imported, which may write there. A worker is told.
    told = worker.get(_PROPERTY) or {}
    config.stash[RUN], config.stash[RECORDS] = told.get("run") or _prepare_records(config)
    config.stash[_KEPT] = told.get("kept") or {}
    if config.getoption("--references"):
        _keep_references(config, Path(config.getoption("--references")).resolve())
    config.stash[ORIGIN] = pickle.loads(told["origin"]) if told else _origin(config)
    config.stash[EARLIER] = {}
    if config.getoption("--compare-to"):
        earlier = {record.case: record for record in map(parsed, told.get("earlier", ()))}
        config.stash[EARLIER] = earlier or _records_to_compare_with(config)
    if not worker:
        config.pluginmanager.register(_Reporter(config))
        for patch in patches:
            _check_patch(patch, config.getoption("--patch-timeout"), config.stash[ORIGIN])


def _worker(config: pytest.Config) -> dict[str, Any]:
    """What this xdist worker was told; nothing in the controller, and without xdist."""
    return getattr(config, "workerinput", {})


def _share_the_cores(workers: int) -> None:
    """Give every xdist worker, and the processes it starts, its share of torch's threads, unless the user has set how
    many: fifteen workers of sixteen threads each mostly wait for one another. The process that starts the workers takes
    no more, so that it finds earlier records of theirs."""
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        share = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(share)
        os.environ["OMP_NUM_THREADS"] = str(share)


def _use_own_gpu(worker: str) -> None:
    """Give every xdist worker a GPU of its own, as far as there are any."""
    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: this machine has no CUDA device; allowed here is cpu")
    torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())


def _models(config: pytest.Config) -> Sequence[models.Row]:
    """The models that ``--models`` selects of those that the profile has."""
    names = config.getoption("--models")
    if source := config.getoption(own.OPTION):
        return own.select(source, "all" if names == "core" else names)
    if config.getoption("--profile") != scale.PROFILE:
        return models.select(names)
    rows = scale.select(names)
    if config.getoption("--device") != "cuda" and any(row.divided == 1 for row in rows):
        raise pytest.UsageError("--profile scale needs a CUDA device, for models of real widths; here is none in use")
    return rows


def _rows(config: pytest.Config) -> tuple[Sequence[models.Row], str]:
    """What is trained, and the name of its inputs: the checkpoint on text, or models on those of the profile."""
    if config.getoption(in_trainers.OPTION):
        return [], TRAINER
    given, profile = checkpoint(config), config.getoption("--profile")
    if config.getoption(own.OPTION):
        return _models(config), own.PROFILE
    if given is None:
        return _models(config), profile
    return [given], profile if profile == CONSISTENCY else PROFILE


def _names(config: pytest.Config, option: str) -> list[str]:
    """What a comma-separated option names; nothing where it is not given."""
    given: str | None = config.getoption(option)
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def _check_names(option: str, names: Sequence[str], allowed: tuple[str, ...]) -> None:
    for name in names:
        if name not in allowed:
            raise pytest.UsageError(f"{option} {name!r} is unknown; allowed are {', '.join(allowed)}")


def _check_checkpoint(config: pytest.Config) -> None:
    """See before anything is loaded that the checkpoint can be trained here, and choose its dtype."""
    row = checkpoint(config)
    for argument in config.args:  # the proof would judge mini models in its place
        if (Path(argument) / CONFIG).is_file() or argument.endswith(".gguf"):
            raise pytest.UsageError(f"{argument}: is a checkpoint; give it as --checkpoint PATH, or first of all")
    if row is None:
        given = [f"--{name}" for name in ("text", "layers", "rollout") if config.getoption(f"--{name}")]
        if given:
            raise pytest.UsageError(f"{given[0]} is for a checkpoint of your own: give it with --checkpoint PATH")
        return
    if config.getoption("--setups") != "plain":
        raise pytest.UsageError("--checkpoint trains in no set-up yet; leave --setups out")
    if row.rollout:
        if config.getoption("--profile") != CONSISTENCY:
            raise pytest.UsageError("--rollout is for --profile consistency")
        with usage_error(""):
            check_engine(row.rollout)
    with usage_error("--checkpoint: "):
        check(row, _names(config, "--dtypes"), config.getoption("--device"))
        if not _names(config, "--dtypes"):
            config.option.dtypes = row.default_dtype()
            check(row, [config.option.dtypes], config.getoption("--device"))


def checkpoint(config: pytest.Config) -> Checkpoint | None:
    """The model that ``--checkpoint`` names; None without that option."""
    path = config.getoption("--checkpoint")
    if not path:
        return None
    given = {name: config.getoption(f"--{name}") for name in ("layers", "rows", "length", "steps")}
    text = config.getoption("--text")
    # Links stay: in the Hub's cache, what a link leads to has another name, and other files around it.
    text, rollout = os.path.abspath(text) if text else "", config.getoption("--rollout")
    return Checkpoint(os.path.abspath(path), **given, text=text, rollout=rollout)


def _origin(config: pytest.Config) -> Origin:
    """Where candidates are from, seen before anything is trained."""
    given, kept = (config.getoption(option) for option in (elsewhere.FROM, elsewhere.KEEP))
    _check_folder(elsewhere.KEEP, kept or "")
    if config.getoption("--setups") != "plain" and (given or kept):
        raise pytest.UsageError(f"{elsewhere.FROM if given else elsewhere.KEEP} knows no set-up; leave --setups out")
    with usage_error(f"{elsewhere.FROM} "):
        origin = elsewhere.origin_at(given, cases(config)) if given else HERE
    return Keeping(origin, os.path.abspath(kept)) if kept else origin


def _check_patch(name: str, timeout: float, origin: Origin) -> None:
    """Import the patch in another process: importing may patch already, or crash."""
    if name in BUILT_IN:
        return
    try:
        with usage_error(""), contextlib.suppress(NotHere):
            origin.run(check_patch, name, timeout=timeout)
    except isolate.ProcessDied as error:
        raise pytest.UsageError(f"--patch {name!r}: {error}") from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    stash = node.config.stash
    earlier = [dumps(record) for record in stash[EARLIER].values()]
    node.workerinput[_PROPERTY] = {
        "run": (stash[RUN], stash[RECORDS]),
        "kept": stash[_KEPT],
        "earlier": earlier,
        "origin": pickle.dumps(stash[ORIGIN]),
    }


def _prepare_records(config: pytest.Config) -> tuple[str, str]:
    """Name the run and its folder, and see before anything is trained that a report can be written."""
    folder, report = config.getoption("--records") or "", config.getoption("--report")
    _check_folder("--records", folder)
    if report:
        if Path(report).is_dir():
            raise pytest.UsageError(f"--report {report!r} is a folder; it takes the file to write, such as report.html")
        if not html.available():
            raise pytest.UsageError("--report needs jinja2, which is not installed here: pip install jinja2")
        if not folder:
            folder = tempfile.mkdtemp(prefix="convergence-records-")
            config.add_cleanup(functools.partial(shutil.rmtree, folder))
    return uuid.uuid4().hex[:12], folder


def _check_folder(option: str, folder: str) -> None:
    if Path(folder).exists() and not Path(folder).is_dir():
        raise pytest.UsageError(f"{option} {folder!r} is a file; it takes a folder, made where there is none")


def _keep_references(config: pytest.Config, folder: Path) -> None:
    _check_folder("--references", str(folder))
    if not _worker(config):
        keys = {kept_key(c.model, c.dtype, c.profile, c.device, c.seed) for c in cases(config) if c.setup == "plain"}
        config.stash[_KEPT] = digests(folder, keys)
    inside = contextlib.ExitStack()
    inside.enter_context(keep_in(folder, config.stash[_KEPT]))
    config.add_cleanup(inside.close)


def _records_to_compare_with(config: pytest.Config) -> dict[Case, Record]:
    """What each case of this run was in the earlier one; nothing is compared unless every case can be."""
    where = config.getoption("--compare-to")
    with usage_error("--compare-to "):
        records = [record for record in load_all([Path(where)]) if record.run != config.stash[RUN]]
    found, refused, origin = {}, [], config.stash[ORIGIN]
    for case in cases(config):
        if find(case.model).is_available():
            try:
                found[case] = bitwise.earlier(records, case, environment(case.device, case.patch) | origin.says(case))
            except ValueError as error:
                refused.append(str(error))
    if refused:
        raise pytest.UsageError(
            visible(
                f"--compare-to {where}: {len(refused)} cases of this run have nothing to be compared with:\n  "
                + "\n  ".join(refused[:5])
                + "\nIt takes the records of a run of the same cases in the same environment, made with --records"
            )
        )
    return found


def cases(config: pytest.Config) -> list[Case]:
    """What the options ask for, ordered so that cases with the same truth and baseline follow one another, and the long
    ones in bfloat16 come first: workers then finish together."""
    patches, dtypes = _names(config, "--patch"), _names(config, "--dtypes")
    device, scope = config.getoption("--device"), config.getoption("--scope")
    if in_trainer := trainers(config):
        given = patches or BUILT_IN[:1]
        return [in_trainers.case_of(trainer, family, patch, scope) for family, trainer in in_trainer for patch in given]
    rows, profile = _rows(config)
    return [
        Case(model.name, dtype, which, profile, device, scope=scope, setup=setup.name, order=order)
        for setup in setups.select(config.getoption("--setups"))
        for order in (setup.orders if config.getoption("--orders") == "all" else setup.orders[:1])
        for dtype in sorted({dtype for row in rows for dtype in dtypes or row.dtypes})
        for model in rows
        if dtype in (dtypes or model.dtypes)
        for which in (patches or (BUILT_IN if setup.name == "plain" else BUILT_IN[:1]))
    ]


def groups(config: pytest.Config, given: Sequence[Case]) -> list[str]:
    """The names of the groups of ``given``; with xdist's ``--dist loadgroup``, a group runs on one worker.

    Cases that share truth and baseline are one group. Many of them are several groups, where workers would have nothing
    to do. Each group trains truth and baseline anew, which takes as long as a few cases. No group is split at a real
    size, or where truth and baseline are kept in a folder."""
    names = [f"{case.model}/{case.setup}/{case.order}/{case.dtype}" for case in given]
    sizes, seen = Counter(names), Counter[str]()
    workers = 1 if config.getoption("--references") else int(_worker(config).get("workercount", 1))
    found = []
    for case, name in zip(given, names, strict=True):
        parts = min(workers // len(sizes), sizes[name] // _FEW)
        if parts < 2 or case.setup != "plain" or case.profile == TRAINER or find(case.model).is_long:
            found.append(name)
        else:
            found.append(f"{name}/{seen[name] * parts // sizes[name]}")
        seen[name] += 1
    return found


def pytest_report_header(config: pytest.Config) -> list[str]:
    device, (rows, profile) = config.getoption("--device"), _rows(config)
    long = [row for row in rows if row.is_long]
    return [
        f"convergence: device {device}, {profile} inputs",
        *dict.fromkeys(
            visible(f"{n}: {v}") for case in cases(config) for n, v in config.stash[ORIGIN].says(case).items()
        ),
        *(visible(row.describe(dtype, device)) for row in long for dtype in _names(config, "--dtypes") or row.dtypes),
    ]


@contextlib.contextmanager
def shown(config: pytest.Config, case: Case) -> Iterator[None]:
    """Inside, what trains is shown on the terminal, where ``case`` takes long."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if case.profile == TRAINER or not find(case.model).is_long or capture is None or _worker(config):
        yield
        return
    with capture.global_and_fixture_disabled(), progress.bar(2 * (1 + REPLICAS) + 1):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """A case has a line of its own instead of a letter."""
    if report.when == "call" and any(name == _PROPERTY for name, _ in report.user_properties):
        return report.outcome, "", report.outcome.upper()
    return None


class _Reporter:
    """Collects the summaries on the process that talks to the terminal: from itself, or from its xdist workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_usage_error = False  # found out when the file was needed
        self.changed: list[str] = []  # records that are no longer what was written

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        for name, value in report.user_properties:
            if name == UNUSABLE:
                self.is_usage_error = True
            if name == _PROPERTY and isinstance(value, dict):
                self.config.stash[_summaries].append(value)
                if terminal is not None:
                    terminal.ensure_newline()
                    terminal.write_line(line_of(value))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.changed = [s["file"] for s in self.config.stash[_summaries] if changed(s["file"], s["digest"])]
        if self.changed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.is_usage_error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for file in self.changed:
            terminalreporter.write_line(visible(f"{file}: is not what this run wrote; run the case again"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--report")
    summaries = session.config.stash[_summaries]
    if path and summaries:  # a worker has none
        files.write(html.page([load(Path(summary["file"])) for summary in summaries]), Path(path))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    summaries = config.stash[_summaries]
    if summaries:
        terminalreporter.section("convergence")
        for line in summary_tables(summaries):
            terminalreporter.write_line(line)
    if config.getoption("--report"):
        made = f"report: {config.getoption('--report')}" if summaries else "no case ran, so there is no report"
        terminalreporter.write_line(made)
