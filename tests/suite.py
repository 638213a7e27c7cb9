"""``pytest convergence`` as users run it, but in this process, which has truth and baseline already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
ISOLATED = [part for name in ("cacheprovider", "faulthandler", "xdist") for part in ("-p", f"no:{name}")]
# Plugins of others, which take a second of each start of pytest as a command.
QUICK = [part for name in ("hypothesispytest", "anyio") for part in ("-p", f"no:{name}")]


def suite(*options: str) -> int:
    # The proof sets TRITON_INTERPRET for a CPU, and a later test of this process may compile for a GPU.
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return int(pytest.main(["convergence", "-q", *options, *ISOLATED]))


def collect(*options: str) -> int:
    return suite("--collect-only", *options)


def assert_refused(capfd: pytest.CaptureFixture[str], shown: Iterable[str], *options: str) -> None:
    """These options are a usage error, before anything is trained, and what pytest says has every part of ``shown``."""
    assert collect(*options) == pytest.ExitCode.USAGE_ERROR
    output = "".join(capfd.readouterr())
    for part in shown:
        assert part in output
