"""The proof kills every mutant, in every dtype in which it is a fault, and afterwards everything is as it was."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from convergence.arms.pristine import remember_upstream
from convergence.models.models import MODELS
from convergence.report.records import STATISTICS, load_folder
from tests.mutants import ABSENT, MUTANTS, restore
from tests.mutants.__main__ import overview
from tests.mutants.edit import Edit, StaleMutant
from tests.mutants.mutant import Mutant
from tests.suite import ROOT, suite

NUMBERS = {*STATISTICS, "finite", "zero", "non-zero", "gap of the logits"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every chosen mutant in its dtypes, those with one truth and baseline after one another on one xdist worker."""
    every = metafunc.config.getoption("--mutants") == "all"
    chosen = [m for m in MUTANTS.values() if m.sample or every]
    if "checked" in metafunc.fixturenames:
        metafunc.parametrize("checked", [m for m in chosen if m.check], ids=lambda m: m.name)
    if "mutant" not in metafunc.fixturenames:
        return
    pairs = [(m, dtype) for m in chosen for dtype in m.dtypes if not m.check and (every or dtype == "float32")]
    pairs.sort(key=lambda pair: (pair[0].setup, pair[0].model, pair[1]))
    # Small groups, so that workers end together; each loads truth and baseline once.
    size = max(4, len(pairs) // (12 * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    parameters = []
    for group, members in itertools.groupby(pairs, key=lambda pair: f"{pair[0].setup}/{pair[0].model}/{pair[1]}"):
        for i, (mutant, dtype) in enumerate(members):
            marks = [pytest.mark.xdist_group(f"{group}/{i // size}")]
            if mutant.profile == "scale" and mutant.on_cpu is None and not torch.cuda.is_available():
                marks.append(pytest.mark.skip(reason="no CUDA device: the fault shows at real widths only"))
            parameters.append(pytest.param(mutant, dtype, id=f"{mutant.name}-{dtype}", marks=marks))
    metafunc.parametrize(("mutant", "dtype"), parameters)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    restore()


def prove(patch: str, model: str, dtype: str, *others: str) -> int:
    """``pytest convergence`` as users run it, in this process, which has truth and baseline already."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = ("--patch", patch, "--models", model, "--dtypes", dtype, "--device", device, "--no-blame")
    return suite(*chosen, *others)


@pytest.mark.power
def test_the_proof_kills(mutant: Mutant, dtype: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    records = request.config.getoption("--records")
    folder = Path(records) if records else tmp_path
    model = mutant.model
    if mutant.profile == "scale" and not torch.cuda.is_available():
        model = f"{model}?{mutant.on_cpu}"
    others = ("--setups", mutant.setup, "--profile", mutant.profile, "--records", str(folder))
    code = prove(f"tests.mutants:{mutant.name}", model, dtype, *others)
    (record,) = [r for r in load_folder(folder) if r.patch.endswith(f":{mutant.name}") and r.dtype == dtype]
    worst = sorted(record.statistics, key=lambda s: s.value / s.bound)[-3:]
    assert code == 1, f"{mutant.name} survives in {dtype}: {mutant.does} The highest statistics are {worst}"
    found = {failure[2] for failure in record.failures}
    expected = NUMBERS if mutant.dies == "statistics" else {mutant.dies}
    assert found & expected, record.failures


@pytest.mark.power
def test_its_own_check_kills(checked: Mutant, tmp_path: Path) -> None:
    """In a copy of the sources with the fault in it, the test that is there for it fails."""
    for folder in ("benchmarks", "liger_kernels", "convergence", "matrix", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    for module in {edit.module for edit in checked.edits}:
        path = tmp_path.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        path.write_text(checked.text(module))
    plugins = [part for name in ("cacheprovider", "xdist") for part in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", str(checked.check), "-x", "-q", *plugins]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, f"{checked.check} does not see it: {checked.does}\n{done.stdout[-3000:]}{done.stderr}"


def test_every_check_is_a_test(request: pytest.FixtureRequest) -> None:
    """A test of another name or case would kill nothing, and look as if. Cases are known of files that the run collects
    whole."""
    checks = {m.name: m.check for m in MUTANTS.values() if m.check}
    for name, check in checks.items():
        file, _, function = check.partition("[")[0].partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8"), f"{name}: {check}"
    if request.config.option.keyword or request.config.option.markexpr or "::" in " ".join(request.config.args):
        return
    names = {item.nodeid for item in request.session.items}
    names |= {name.partition("[")[0] for name in names}
    files = {name.partition("::")[0] for name in names}
    collected = {name: check for name, check in checks.items() if check.partition("::")[0] in files}
    assert {name: check for name, check in collected.items() if check not in names} == {}


def test_the_documentation_has_every_mutant_and_every_row() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "evidence").glob("mutants*.md"))
    lines = {line.split(" | ")[0].removeprefix("| ").strip("`"): line for line in text.splitlines() if " | " in line}
    for mutant in MUTANTS.values():
        assert mutant.does in lines[mutant.name], (
            f"write docs/evidence/mutants*.md anew: python -m tests.mutants DIR ({mutant.name})"
        )
        assert "survives" not in lines[mutant.name]
        assert not mutant.check or f"`{mutant.check}`" in lines[mutant.name]
    for row in (row for group in ABSENT.values() for row in group):
        assert row in lines
    page = (ROOT / "docs" / "evidence" / "mutants.md").read_text(encoding="utf-8")
    assert page == overview(), "write docs/evidence/mutants*.md anew: python -m tests.mutants DIR"


@pytest.mark.parametrize("old", ["f(a, b)", "no_such_name", "if a:\n    pass", "c=1", "a, c"])
def test_an_edit_without_its_place_is_refused(old: str) -> None:
    with pytest.raises(StaleMutant, match="0 times"):
        Mutant("gone", "", (Edit("liger_kernels.ops._glu", old, old),)).inject()


@pytest.mark.parametrize(
    ("source", "old", "new", "changed"),
    [
        ("x = a*b  # fast", "a * b", "a / b", "x = a / b"),
        ("f(\n    a,\n    b,\n)", "f(a, b)", "g(a)", "g(a)"),
        ("if a: x = 1", "a", "not a", "if not a:\n    x = 1"),
        ("if a:\n  x = 'q'", 'x = "q"', "x = 1\ny = 2", "if a:\n    x = 1\n    y = 2"),
        ("if a:\n    x = 1", "x = 1", "", "if a:\n    pass"),
        ("f(x, a, b, k=1)", "a, b", "b, a", "f(x, b, a, k=1)"),
        ("f(x, k=1, m=m)", "k=1", "k=2", "f(x, k=2, m=m)"),
        ("x = f(x, k=k)", "x = f(x, k=k)", "x = f(k)", "x = f(k)"),
    ],
)
def test_an_edit_finds_its_place_by_what_is_written_there(source: str, old: str, new: str, changed: str) -> None:
    assert Edit("m", old, new).apply(source) == changed


def test_an_edit_within_a_function() -> None:
    source = "class A:\n\n    def f(self):\n        return 1\n\ndef g():\n    return 1"
    assert Edit("m", "return 1", "return 2", "A.f").apply(source) == source.replace("1", "2", 1)
    assert Edit("m", "", "x = 0", "A.f").apply(source) == source.replace("return", "x = 0\n        return", 1)
    documented = source.replace("return", '"""One."""\n        return', 1)
    assert Edit("m", "", "x = 0", "A.f").apply(documented) == documented.replace("return", "x = 0\n        return", 1)
    for old, within, message in (("return 1", "", "2 times, not 1"), ("return 1", "A.h", "defines h 0 times")):
        with pytest.raises(StaleMutant, match=message):
            Edit("m", old, "return 2", within).apply(source)


Symbols = dict[tuple[object, str], tuple[object, object]]


def symbols(names: Collection[str] = ()) -> Symbols:
    """What every module and every class of the package has, each with its code; or of the modules ``names`` alone."""
    modules = [m for name, m in sys.modules.items() if (name in names if names else name.startswith("liger_kernels"))]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {
        (space, name): (value, getattr(getattr(value, "_init_fn", value), "__code__", None))
        for space in (*modules, *(cls for cls in values if cls.__module__.startswith(("liger_kernels", *names))))
        for name, value in vars(space).items()
        if name != "__warningregistry__"
    }


def changed(before: Symbols, names: Collection[str] = ()) -> list[tuple[object, str]]:
    now, nothing = symbols(names), (object(), None)
    return [
        key
        for key in before.keys() | now.keys()
        if any(a is not b for a, b in zip(before.get(key, nothing), now.get(key, nothing), strict=True))
    ]


@pytest.mark.power
def test_every_mutant_finds_its_place_and_everything_is_put_back() -> None:
    """A fault whose place is gone would test nothing; and after all of them, every object and every function's code is
    what it was."""
    # What a mutant is the first to import is no change of its.
    for module in {"liger_kernels.patching", *(edit.module for m in MUTANTS.values() for edit in m.edits)}:
        importlib.import_module(module)
    upstream = remember_upstream()
    before = symbols()
    of = {name: symbols([name]) for name in {edit.module for m in MUTANTS.values() for edit in m.edits}}
    for mutant in MUTANTS.values():
        assert mutant.edits or mutant.after, mutant.name
        if mutant.check:
            assert all(mutant.text(edit.module) for edit in mutant.edits)
        elif mutant.edits:
            mutant.inject()
            for module in {edit.module for edit in mutant.edits}:
                assert changed(of[module], [module]), f"{mutant.name}: {module}"
    restore()
    assert not changed(before)
    assert not upstream.changes()


def test_a_mutant_knows_every_name_that_it_writes(tmp_path: Path) -> None:
    """One that dies of a NameError shows nothing of its fault."""
    for mutant in MUTANTS.values():
        for module in dict.fromkeys(edit.module for edit in mutant.edits):
            (tmp_path / f"{mutant.name}-{module}.py").write_text(mutant.text(module), encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise", "."]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.power
def test_an_honest_case_after_a_mutant_in_the_same_process_is_equal(capfd: pytest.CaptureFixture[str]) -> None:
    for name in (
        "norm_weight_gradient_of_one_percent_more",
        "weight_gradient_of_the_last_chunk",
        "p4_patches_the_class",
    ):
        MUTANTS[name](MODELS["llama-untied"].build(0))
    restore()
    assert prove("convergence.patches:fused_linear", "llama-untied", "float32") == 0, capfd.readouterr().out
