"""``--changed``: what a change reaches runs, and nothing else."""

from __future__ import annotations

import pytest

from tests.reach import changed_since, reach_of

FILES = {
    "liger_kernels.ops": "from liger_kernels.ops._rope import rope\nfrom liger_kernels.ops._glu import (\n  swiglu,\n)",
    "liger_kernels.ops._rope": "from liger_kernels.ops.runtime import launch",
    "liger_kernels.ops._glu": "from liger_kernels.ops.runtime import launch",
    "liger_kernels.ops.runtime": "",
    "liger_kernels.patching": "from liger_kernels.ops import rope",
    "convergence.html": "PAGE = 'report.html.jinja'",
    "tests.checks": "from liger_kernels.patching import patch",
    "tests.test_rope": "from liger_kernels.ops import rope",
    "tests.test_glu": "def f():\n    from liger_kernels import ops\n    ops.swiglu()",
    "tests.test_every": "from liger_kernels import ops\ngetattr(ops, 'rope')",
    "tests.test_patching": "from tests import checks",
    "tests.test_html": "import convergence.html",
}
SOURCES = {
    module: (module if module == "liger_kernels.ops" else module.rpartition(".")[0], text)
    for module, text in FILES.items()
}


@pytest.mark.parametrize(
    ("changed", "within", "tests"),
    [
        ("liger_kernels/ops/_rope.py", 1, "rope"),
        ("liger_kernels/ops/_rope.py", 2, "rope every"),
        ("liger_kernels/ops/_rope.py", 3, "rope every patching"),
        ("liger_kernels/ops/_glu.py", 1, "glu"),
        ("liger_kernels/ops/runtime.py", 2, "rope glu"),
        ("liger_kernels/ops/__init__.py", 1, "every"),
        ("liger_kernels/patching/__init__.py", 2, "patching"),
        ("liger_kernels/patching.py", 1, ""),
        ("tests/test_rope.py", 1, "rope"),
        ("convergence/report.html.jinja", 1, "html"),
        ("README.md", 3, ""),
    ],
)
def test_files_that_reach_a_change_run(changed: str, within: int, tests: str) -> None:
    found = reach_of([changed], within, SOURCES)
    assert found.tests == {f"tests/test_{name}.py" for name in tests.split()}


def test_of_an_op_that_changed_its_own_cases_run() -> None:
    found = reach_of(["liger_kernels/ops/_rope.py"], 2, SOURCES)
    file = "tests/test_every.py"
    runs = {case: found.runs(file, f"{file}::test{case}") for case in ("", "[rope-sm_90]", "[swiglu-2]", "[a, b]")}
    assert runs == {"": True, "[rope-sm_90]": True, "[swiglu-2]": False, "[a, b]": True}
    found = reach_of(["liger_kernels/ops/_rope.py", file], 2, SOURCES)
    assert found.runs(file, f"{file}::test[swiglu-2]")
    found = reach_of(["liger_kernels/ops/runtime.py"], 3, SOURCES)
    assert found.runs(file, f"{file}::test[swiglu-2]")


def test_a_commit_that_git_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match=r"--changed no-such-commit: .*; allowed is a commit or a branch"):
        changed_since("no-such-commit")
