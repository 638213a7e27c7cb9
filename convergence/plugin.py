"""The pytest hooks of the proof: options, device choice, a line per case, the table at the end. Only hooks.

Loaded by the root ``conftest.py`` for every run, ``tests/`` too, so nothing heavy is imported at the top.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from convergence.case import Case

DEFAULT_PATCHES = ("convergence.patches:fused_linear", "convergence.patches:fused_cross_entropy")
_PROPERTY = "convergence"
_summaries = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("convergence", "the proof that a patch is the same mathematics")
    group.addoption("--patch", metavar="MODULE:FUNCTION", help="judge function(model) (default: liger_kernels' own)")
    group.addoption("--models", default="core", help="a comma-separated list, 'core' or 'all' (default: core)")
    group.addoption("--dtypes", default="float32,bfloat16", help="float32, bfloat16 or both (default: both)")
    group.addoption("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    group.addoption("--profile", default="hard", help="plain or hard inputs (default: hard)")
    group.addoption("--records", metavar="DIR", default=None, help="write one JSON record per case into DIR")


def _choose_device(device: str | None) -> str:
    """The device of this run. Without a GPU, kernels run in Triton's interpreter, as Triton decides at its import."""
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device


# At import, not in pytest_configure, because a conftest.py further down may import liger_kernels.ops before that.
_choose_device(None)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_summaries] = []
    config.addinivalue_line("markers", "xdist_group(name): runs on one worker with the rest of its group")
    device = config.getoption("--device")
    if device not in (None, "cpu", "cuda"):
        raise pytest.UsageError(f"--device {device!r} is unknown; allowed are cpu, cuda")
    config.option.device = device = _choose_device(device)
    if device == "cuda":
        _use_own_gpu(getattr(config, "workerinput", {}).get("workerid", "gw0"))
    _check_names("--profile", config.getoption("--profile"), ("plain", "hard"), single=True)
    _check_names("--dtypes", config.getoption("--dtypes"), ("float32", "bfloat16"))
    _check_models(config.getoption("--models"))
    if config.getoption("--patch"):
        _check_patch(config.getoption("--patch"))


def _use_own_gpu(worker: str) -> None:
    """Give every xdist worker a GPU of its own, as far as there are any."""
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: this machine has no CUDA device; allowed here is cpu")
    torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())


def _check_names(option: str, value: str, allowed: tuple[str, ...], single: bool = False) -> None:
    for name in [value] if single else value.split(","):
        if name.strip() not in allowed:
            raise pytest.UsageError(f"{option} {name.strip()!r} is unknown; allowed are {', '.join(allowed)}")


def _check_models(names: str) -> None:
    from convergence.models import select

    try:
        select(names)
    except ValueError as error:
        raise pytest.UsageError(f"--models: {error}") from None


def _check_patch(name: str) -> None:
    """Import the patch, after what is unpatched has been remembered: importing may patch already."""
    from convergence.case import PatchError, load_patch, remember_upstream
    from convergence.models import MODELS

    remember_upstream(MODELS.values())
    try:
        load_patch(name)
    except PatchError as error:
        raise pytest.UsageError(str(error)) from None


def cases(config: pytest.Config) -> list[Case]:
    """What the options ask for, ordered so that cases with the same truth and baseline follow one another."""
    from convergence.case import Case
    from convergence.models import select

    patch = config.getoption("--patch")
    dtypes = [name.strip() for name in config.getoption("--dtypes").split(",")]
    return [
        Case(model.name, dtype, which, config.getoption("--profile"), config.getoption("--device"))
        for model in select(config.getoption("--models"))
        for dtype in dtypes
        for which in ([patch] if patch else DEFAULT_PATCHES)
    ]


def pytest_report_header(config: pytest.Config) -> str:
    return f"convergence: device {config.getoption('--device')}, {config.getoption('--profile')} inputs"


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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        from convergence.report import progress

        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, dict):
                self.config.stash[_summaries].append(value)
                if terminal is not None:
                    terminal.ensure_newline()
                    terminal.write_line(progress(value))


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Reporter(session.config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    summaries = config.stash[_summaries]
    if summaries:
        from convergence.report import summary_table

        terminalreporter.section("convergence")
        for line in summary_table(summaries):
            terminalreporter.write_line(line)
