"""What fits together, as uv's resolver finds it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path


def compiled(lines: Sequence[str], day: datetime | None = None, of_today: Sequence[str] = ()) -> dict[str, str]:
    """The versions that the requirements ``lines`` and what they ask for resolve to, without local labels.

    Args:
        day: nothing that was uploaded later counts; None: everything does.
        of_today: packages for which that does not hold.

    Raises:
        ValueError: nothing fits together, with what the resolver said.
    """
    options: list[str] = []
    if day is not None:
        tomorrow = datetime.now(day.tzinfo) + timedelta(days=1)
        options += ["--exclude-newer", day.isoformat()]
        for package in of_today:
            options += ["--exclude-newer-package", f"{package}={tomorrow.isoformat()}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "requirements.in"
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        done = subprocess.run([*command, *options, str(source)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{', '.join(lines)} does not resolve:\n{done.stderr.strip()}")
    pins = dict(line.split("==", 1) for line in done.stdout.splitlines() if "==" in line)
    return {package: version.partition("+")[0] for package, version in pins.items()}
