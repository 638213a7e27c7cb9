"""What an installed proof adds to every pytest run: nothing, until the run names the proof.

``pytest --pyargs convergence``, or a path in this folder, loads ``convergence.plugin``, which adds the options, imports
torch and chooses the device. Another run gets none of this, not even the options: ``--device``, ``--profile`` or
``--report`` may be those of its own ``conftest.py``, and the names would clash.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)  # before any conftest.py: one may import Triton, for which the device must be chosen
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    known = early_config.known_args_namespace
    if _names_the_proof(known.file_or_dir, known.pyargs):
        early_config.pluginmanager.import_plugin("convergence.plugin")


def _names_the_proof(arguments: Iterable[str], pyargs: bool) -> bool:
    names = [argument.partition("::")[0] for argument in arguments]
    if pyargs and any(f"{name}.".startswith("convergence.") for name in names):
        return True
    return any(Path(name).resolve().is_relative_to(_HERE) for name in names)
