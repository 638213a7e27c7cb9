"""The tox file of a repository that has none of its own for its cells.

An environment has what the cell's file pins, and the repository's package. ``matrix`` itself runs outside of it, in the
Python that asks, so a cell need not have it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from convergence.files import write
from matrix.repository import config

FILE = "tox.ini"
_TEXT = """\
# Written by python -m matrix, for each run.
[tox]
min_version = 4.20
requires = tox-uv>=1.20
env_list = {names}

[testenv]
{package}
deps = -r {cells}/{{env_name}}.txt
set_env =
    UV_FIND_LINKS = {{env:UV_FIND_LINKS:{{env:PIP_FIND_LINKS:}}}}
    OMP_NUM_THREADS = 1
    TOKENIZERS_PARALLELISM = false
pass_env =
    CI
    CUDA_*
    HF_*
    MATRIX_*
    PIP_*
    SSL_*
    UV_*
allowlist_externals = *
commands = {python} -m matrix cell {{env_name}} --python {{env_python}} {{posargs}}
"""
_OTHER = """
[testenv:{name}]
deps = -r {requirements}
recreate = true
"""


def options(names: Iterable[str], folder: Path, requirements: dict[str, Path]) -> list[str]:
    """What tox is called with; where the configuration names no tox file, one is written to ``folder``.

    Args:
        names: of the cells.
        folder: of the records.
        requirements: of the cells that are made anew each time: what they install.
    """
    here = config.here()
    if here.tox:
        return [] if here.tox == FILE else ["-c", str(here.root / here.tox)]
    is_package = {"project", "build-system"} & config.read(here.root / config.FILE).keys()
    text = _TEXT.format(
        names=", ".join(names),
        package="package = editable" if is_package else "skip_install = true",
        cells=here.cells.as_posix(),
        python=shlex.quote(sys.executable),
    )
    for name, path in requirements.items():
        text += _OTHER.format(name=name, requirements=path.absolute().as_posix())
    file = folder.absolute() / "environments" / FILE
    write(text, file)
    return ["-c", str(file), "--root", str(here.root), "--workdir", str(file.parent)]
