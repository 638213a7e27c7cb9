"""Every name of ``private_names.py`` is touched, in every cell; a private name in the source that it lacks fails."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from matrix.checks.private_names import NAMES, Private

ROOT = Path(__file__).parent.parent.parent
LIST = Path(__file__).with_name("private_names.py")
SOURCES = ("liger_kernels", "convergence", "matrix", "benchmarks")
# Private names that need no row.
OTHERS = {
    *("_asdict", "_replace", "_fields", "_exit"),  # Python's own
    *("_global", "_hooks", "_optin", "_ref", "_linear_ref", "_repeat", "_MAPPING_NAMES"),  # parts of names
    *("_input_ids", "_attention_mask"),  # the same
    *("_files", "_internal"),  # parts of names in a checkpoint, and of a module of Python
    # Names in the checks that are written from annotations.
    *("_Mapping", "_Module", "_Tensor", "_as_values", "_default_", "_dtype", "_function", "_is_traced", "_refuse_type"),
    "_unsloth_get_batch_samples",  # of two exact releases, which an incident installs
    *("_LangPatchScope", "_MISSING"),  # only newer Tritons have these, which put back what a launch replaced
}


def resolve(where: str) -> Any:
    module, _, path = where.partition(":")
    found = importlib.import_module(module)
    return functools.reduce(getattr, path.split("."), found) if path else found


@pytest.mark.parametrize("private", NAMES, ids=str)
def test_it_is_there_and_means_what_it_meant(private: Private) -> None:
    if private.needs == "cuda":
        if torch.version.cuda is None:
            pytest.skip("this torch is built without CUDA")
    elif private.needs:
        pytest.importorskip(private.needs, reason=f"this cell has no {private.needs}")
    if private.where is not None:
        owner = resolve(private.where)
        if ":" not in private.where:
            assert all(hasattr(owner, name) for name in private.names)
    assert private.holds is None or private.holds(), private.goes_wrong


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with a leading underscore that are looked up on something, or are looked for as a string or an import."""

    def is_private(name: str) -> bool:
        return name.isidentifier() and name[:1] == "_" != name[1:2] and len(name) > 2

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=str(name)) | ast.Constant(value=str(name)) if is_private(name):
                yield name
            case ast.ImportFrom(module=str(module)):
                if any(map(is_private, module.split("."))):
                    yield module
                yield from (alias.name for alias in node.names if is_private(alias.name))


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def test_the_list_has_every_private_name_of_the_source() -> None:
    files = [path for top in SOURCES for path in (ROOT / top).rglob("*.py") if path != LIST]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    own = {name for tree in trees for name in defined(tree)} | {path.stem for path in files} | OTHERS
    found = {name for tree in trees for name in private_names(tree)} - own
    ours = ("_liger_kernels", "liger_kernels.", "convergence.", "matrix.")
    foreign = {name for name in found if not name.startswith(ours)}
    listed = {name for private in NAMES for name in private.names}
    missing = {name for name in foreign if name not in listed and name.rpartition(".")[2] not in listed}
    assert not missing, f"{sorted(missing)}: add them to NAMES, with what happens when they change"
    assert listed <= foreign | own, f"{sorted(listed - foreign - own)} are no longer used"
