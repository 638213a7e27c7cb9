"""Builds what a release uploads, checks it, and takes its notes from the changelog. It uploads nothing itself.

    python -m tools.release --dry-run           # any time: builds, checks, prints what would be published
    python -m tools.release --tag v0.1.0        # on a tag: the same, and refuses where tag, version, changelog differ

Sdist and wheel lie in ``dist/`` afterwards, the notes in ``dist/notes.md``. It needs ``build`` and ``twine``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def version(package: str) -> str:
    """``__version__`` in the text of ``liger_kernels/__init__.py``."""
    return re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)[0]


def notes(changelog: str, version: str) -> str:
    """What the changelog says of ``version``.

    Raises:
        ValueError: it has no section of it, or an empty one.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    found = {section.split(None, 1)[0]: section.partition("\n")[2].strip() for section in sections}
    if not found.get(version):
        raise ValueError(f"CHANGELOG.md says nothing of {version}; it has {', '.join(found)}. Add '## {version}'")
    return found[version] + "\n"


def check_tag(tag: str, version: str, changelog: str) -> None:
    """Raise ValueError where ``tag`` is not that of ``version``, or the changelog calls the version unreleased."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag} and liger_kernels.__version__ is {version}; allowed is v{version}")
    if re.search(rf"^## {re.escape(version)}\b.*unreleased", changelog, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md calls {version} unreleased; write its date there, '## {version} (2026-01-31)'")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build and check. 0 when everything can be published."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--dry-run", action="store_true", help="build, check and print; no tag is needed")
    how.add_argument("--tag", help="the tag that is released, vX.Y.Z")
    options = parser.parse_args(arguments)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    released = version((root / "liger_kernels" / "__init__.py").read_text(encoding="utf-8"))
    try:
        text = notes(changelog, released)
        if options.tag:
            check_tag(options.tag, released, changelog)
    except ValueError as error:
        parser.error(str(error))
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", dist, root], check=True, stdout=subprocess.DEVNULL)
    files = sorted(dist.iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    (dist / "notes.md").write_text(text, encoding="utf-8")
    print(f"liger-kernels {released}, {'a dry run: nothing is published' if options.dry_run else options.tag}")
    for file in files:
        print(f"  {file.name}  {file.stat().st_size / 1024:.0f} KiB")
    print(f"notes:\n{text}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
