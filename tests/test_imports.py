"""What importing costs and needs, and which way imports go."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from tests.import_checks import ROOT, imports, sources

SHARED = {"convergence.arms.quantities", "convergence.checked", "convergence.files", "convergence.tables"}
_PACKAGE = {"liger_kernels", "liger_kernels.ops", "liger_kernels.patching", "liger_kernels.integrations"}
# What each part may import of this project, beside itself.
ALLOWED: dict[str, set[str]] = {
    "liger_kernels.ops": set(),
    "liger_kernels.patching": {"liger_kernels.ops"},
    "liger_kernels.integrations": {"liger_kernels.ops", "liger_kernels.patching"},
    "liger_kernels": {"liger_kernels.ops", "liger_kernels.patching", "liger_kernels.integrations"},
    "convergence": SHARED
    | {"liger_kernels", "liger_kernels.ops", "liger_kernels.patching", "liger_kernels.integrations"},
    # Of the standard library, for every part.
    **{part: {"convergence.files"} - {part} for part in SHARED},
    "matrix": SHARED | {"matrix.census"},
    "matrix.census": SHARED | {"matrix.checks"},
    # Runs inside of a cell, on what the cell has installed.
    "matrix.checks": SHARED | {"liger_kernels", "liger_kernels.ops"},
    "matrix.trainers": SHARED
    | {
        "convergence",
        "liger_kernels",
        "liger_kernels.ops",
        "liger_kernels.patching",
        "liger_kernels.integrations",
    },
    "benchmarks": SHARED | {"convergence", *_PACKAGE, "matrix.trainers", "tools.op_table"},
    "tools": SHARED | {"convergence", *_PACKAGE, "tools.op_table"},
    "tools.op_table": {"liger_kernels.ops"},
    "tests": set(),  # which nothing of these imports
}


def python(code: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_import_loads_little_and_a_cpu_without_the_interpreter_runs_the_reference() -> None:
    """The package loads nothing but itself, beyond torch and two standard modules. Its ops load neither Dynamo nor
    SymPy, each of which takes longer to load than all else here."""
    code = """
import sys, importlib, typing, torch
before = set(sys.modules)
import liger_kernels
print(*sorted(set(sys.modules) - before))
from liger_kernels.ops import launches, swiglu, swiglu_ref
print(*sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
x = torch.randn(3)
assert torch.equal(swiglu(x, x), swiglu_ref(x, x)) and not launches()
"""
    assert python(code).splitlines() == ["liger_kernels", ""]


def test_ops_work_without_triton_and_transformers() -> None:
    """Every op computes, forward and backward, by its reference."""
    python("""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import torch
from liger_kernels import ops
x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
q, angles = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 4, 8)
ids, parts = torch.tensor([[0, 1]] * 4), torch.randn(3, 8, 8, requires_grad=True)
head, targets = torch.randn(10, 8, requires_grad=True), torch.tensor([1, -100, 0, 9])
results = [
    (ops.rms_norm(x, weight), ops.rms_norm_ref(x, weight)),
    (ops.layer_norm(x, weight), ops.layer_norm_ref(x, weight)),
    (ops.add_rms_norm(x, x, weight)[0], ops.add_rms_norm_ref(x, x, weight)[0]),
    (ops.gated_rms_norm(x, x, weight), ops.gated_rms_norm_ref(x, x, weight)),
    (ops.rope(q, q, angles, angles)[0], ops.rope_ref(q, q, angles, angles)[0]),
    (ops.swiglu(x, x), ops.swiglu_ref(x, x)),
    (ops.experts(x, ids, x[:, :2], parts, parts[:, :, :4]), ops.experts_ref(x, ids, x[:, :2], parts, parts[:, :, :4])),
    (ops.packed_glu(x), ops.packed_glu_ref(x)),
    (ops.geglu(x, x), ops.geglu_ref(x, x)),
    (ops.cross_entropy(x @ head.t(), targets), ops.cross_entropy_ref(x @ head.t(), targets)),
    (ops.linear_cross_entropy(x, head, targets), ops.linear_cross_entropy_ref(x, head, targets)),
    (ops.linear_divergence(x, head, x, head, 0.5)[0], ops.linear_divergence_ref(x, head, x, head, 0.5)[0]),
]
for ours, reference in results:
    torch.testing.assert_close(ours, reference)
    ours.sum().backward()
assert not ops.launches()
assert "triton" not in sys.modules and "transformers" not in sys.modules
""")


def part_of(module: str) -> str | None:
    """The longest part of the project that ``module`` lies in."""
    return next((p for p in sorted(ALLOWED, key=len, reverse=True) if module == p or module.startswith(p + ".")), None)


def imported(tree: ast.AST, package: str) -> set[str]:
    """The modules that ``tree`` imports, anywhere in it; ``from a import b`` is ``a`` and ``a.b``."""
    found = set(imports(ast.walk(tree), package))
    return {base for base, _ in found} | {f"{base}.{name}" for base, name in found if name}


def wrong_imports(source: str, module: str, package: str) -> set[str]:
    own = part_of(module)
    parts = {part_of(name) for name in imported(ast.parse(source), package)} - {None, own}
    if own != "liger_kernels" and "liger_kernels" in parts:
        parts.discard("liger_kernels")  # every `from liger_kernels.ops import` also names its package
    return {part for part in parts if part not in ALLOWED[own]}


def test_imports_go_one_way() -> None:
    files = sources()
    wrong = {module: wrong_imports(text, module, package) for module, (package, text) in files.items()}
    assert len(wrong) > 100
    assert not any(wrong.values()), {module: parts for module, parts in wrong.items() if parts}


def test_a_folder_of_the_product_has_at_most_16_files() -> None:
    folders = Counter(package for package, _ in sources().values())
    assert len(folders) > 10
    assert {folder: n for folder, n in folders.items() if n > 16} == {}


def in_two_packages(files: dict[str, tuple[str, str]]) -> dict[str, set[str]]:
    """The names of classes that several top-level packages have."""
    where: dict[str, set[str]] = defaultdict(set)
    for package, text in files.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(package.partition(".")[0])
    assert where
    return {name: tops for name, tops in where.items() if len(tops) > 1}


def test_no_class_name_is_in_two_packages() -> None:
    assert in_two_packages(sources()) == {}
    files = {"p.a": ("p", "class A: ..."), "p.b": ("p", "class A: ..."), "q.c": ("q", "def f():\n    class B: ...")}
    assert in_two_packages(files) == {}
    assert in_two_packages({**files, "q.d": ("q.r", "class A: ...")}) == {"A": {"p", "q"}}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("liger_kernels.ops.x", "from liger_kernels.patching import patch", {"liger_kernels.patching"}),
        ("liger_kernels.ops.x", "def f():\n    import convergence.judge.tolerance", {"convergence"}),
        ("liger_kernels.ops.x", "from ..patching import norms", {"liger_kernels.patching"}),
        ("liger_kernels.ops.x", "from .rope import rope", set()),
        ("liger_kernels.patching.x", "from liger_kernels import integrations", {"liger_kernels.integrations"}),
        ("liger_kernels.integrations.x", "from liger_kernels.patching import patch", set()),
        ("matrix.run", "import liger_kernels.ops, convergence", {"liger_kernels.ops", "convergence"}),
        ("convergence.case", "from liger_kernels.ops import launches", set()),
        ("tools.x", "def f():\n    from tests.mutants import MUTANTS", {"tests"}),
        ("matrix.checks.x", "from tests import zoo", {"tests"}),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, wrong: set[str]) -> None:
    assert wrong_imports(source, module, module.rpartition(".")[0]) == wrong


class Runtime(ast.NodeTransformer):
    """A tree without what only type checkers run."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        name = node.test.attr if isinstance(node.test, ast.Attribute) else getattr(node.test, "id", "")
        return node.orelse if name == "TYPE_CHECKING" else node


def files_imported(tree: ast.AST, package: str, modules: Iterable[str]) -> set[str]:
    """Those of ``modules`` whose files ``tree`` imports by name. ``from a import b`` is ``a.b`` where that is a module,
    and else ``a``; that Python also runs ``a`` on the way to ``a.b`` does not count."""
    found = {
        f"{base}.{name}" if f"{base}.{name}" in modules else base for base, name in imports(ast.walk(tree), package)
    }
    return found & set(modules)


def circles(files: dict[str, tuple[str, str]]) -> list[list[str]]:
    """The sets of files each of which imports, by way of others, itself and all others of its set."""
    edges = {
        module: files_imported(Runtime().visit(ast.parse(text)), package, files.keys()) - {module}
        for module, (package, text) in files.items()
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        open_ends = [start]
        while open_ends:
            new = edges[open_ends.pop()] - seen
            seen |= new
            open_ends += new
        return seen

    reach = {module: reached(module) for module in edges}
    on_one = {
        tuple(sorted(m for m in reach[module] if module in reach[m])) for module in reach if module in reach[module]
    }
    return [list(circle) for circle in sorted(on_one)]


def test_no_circle_between_any_two_files() -> None:
    files = sources()
    assert len(files) > 150
    assert circles(files) == []


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"p.a": "from p.b import x", "p.b": "def f():\n    import p.a"}, [["p.a", "p.b"]]),
        ({"p.a": "from p import b", "p.b": "from . import c", "p.c": "from .a import x"}, [["p.a", "p.b", "p.c"]]),
        ({"p": "from p.a import x", "p.a": "from p import b", "p.b": ""}, []),
        ({"p": "from p.a import x", "p.a": "from p import x"}, [["p", "p.a"]]),
        ({"p.a": "if TYPE_CHECKING:\n    import p.b", "p.b": "import p.a"}, []),
        ({"p.a": "if typing.TYPE_CHECKING:\n    pass\nelse:\n    import p.b", "p.b": "import p.a"}, [["p.a", "p.b"]]),
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": ""}, []),
    ],
)
def test_a_circle_is_found(texts: dict[str, str], found: list[list[str]]) -> None:
    assert circles({module: ("p", text) for module, text in {"p": "", **texts}.items()}) == found
