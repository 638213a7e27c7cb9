"""Another Python runs this file as a script to answer one call. It imports the proof of the process that calls it.

The proof is always the caller's: truth, baseline and candidate must be trained by the same steps, and be observed by
the same hooks. What the proof judges comes from the paths of the other side.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import socket
import sys
from typing import Any


def main(file: str) -> None:
    """Answer the call in ``file``, a pickle of this run's judge: the proof's folder, the paths to import from, whether
    they come after this Python's own, the socket, and the arguments of ``isolate.serve`` around it."""
    with open(file, "rb") as opened:
        proof, paths, behind, channel, call, rest = pickle.load(opened)
    own = sys.path[1:] if behind else []  # the first entry is this script's folder
    sys.path[:] = [*own, *(path for path in paths if path not in own)]
    _load_proof(proof)
    isolate: Any = importlib.import_module("convergence.arms.isolate")
    for name in isolate.preloaded():
        importlib.import_module(name)
    isolate.serve(call, socket.socket(fileno=channel), *rest)


def _load_proof(folder: str) -> None:
    """Let ``convergence`` be the package in ``folder``, whatever lies on the path."""
    name = "convergence"
    spec: Any = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main(sys.argv[1])
