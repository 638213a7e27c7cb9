"""The notes and the refusals of a release; ``tox run -e release`` builds."""

from __future__ import annotations

from pathlib import Path

import pytest

import liger_kernels
from tools import release

ROOT = Path(__file__).parents[1]
CHANGELOG = (
    "# Changelog\n\n## 1.1.0 (unreleased)\n\n- New.\n- More\n  of it.\n\n## 1.0.0 (2026-01-31)\n\n- Old.\n\n## 0.9.0\n"
)


def test_the_notes_are_the_section_of_the_version() -> None:
    assert release.notes(CHANGELOG, "1.1.0") == "- New.\n- More\n  of it.\n"
    assert release.notes(CHANGELOG, "1.0.0") == "- Old.\n"
    for version in ("0.9.0", "1.0", "2.0.0"):  # one without notes, and two that it does not have
        with pytest.raises(ValueError, match=rf"says nothing of {version}; it has 1\.1\.0, 1\.0\.0, 0\.9\.0"):
            release.notes(CHANGELOG, version)


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v1.0.1", "1.0.0", "allowed is v1.0.0"),
        ("1.0.0", "1.0.0", "allowed is v1.0.0"),
        ("v1.1.0", "1.1.0", "its date"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(tag: str, version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        release.check_tag(tag, version, CHANGELOG)
    release.check_tag("v1.0.0", "1.0.0", CHANGELOG)


def test_this_version_has_notes() -> None:
    found = release.version((ROOT / "liger_kernels" / "__init__.py").read_text(encoding="utf-8"))
    assert found == liger_kernels.__version__
    assert release.notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), found)
