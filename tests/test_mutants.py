"""The proof kills every mutant, in every dtype in which it is a fault, and afterwards everything is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.mutants import MUTANTS, restore
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parent.parent
NUMBERS = ("error ratio", "gain", "gain against the others", "finite", "zero", "non-zero")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every chosen mutant in its dtypes, those with one truth and baseline after one another on one xdist worker."""
    if "mutant" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--mutants")
    trained = [
        (mutant, dtype)
        for mutant in MUTANTS.values()
        if mutant.check is None and (chosen == "all" or mutant.sample)
        for dtype in mutant.dtypes
    ]
    metafunc.parametrize(
        ("mutant", "dtype"),
        [
            pytest.param(
                mutant, dtype, id=f"{mutant.name}-{dtype}", marks=pytest.mark.xdist_group(f"{mutant.model}/{dtype}")
            )
            for mutant, dtype in sorted(trained, key=lambda pair: (pair[0].model, pair[1]))
        ],
    )


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    restore()


def prove(patch: str, model: str, dtype: str, records: Path) -> int:
    """``pytest convergence`` as users run it, in this process: truth and baseline are trained once for all tests."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    isolated = ("-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist")
    options = ("--patch", patch, "--models", model, "--dtypes", dtype, "--device", device, "--records", str(records))
    return int(pytest.main(["convergence", *options, "-q", *isolated]))


def test_the_proof_kills(
    mutant: Mutant, dtype: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convergence.records import load_folder

    monkeypatch.chdir(ROOT)
    mutant.inject()  # a mutant whose place in the source is gone must not pass for one that was killed
    records = request.config.getoption("--records")
    folder = Path(records) if records else tmp_path
    code = prove(f"tests.mutants:{mutant.name}", mutant.model, dtype, folder)
    (record,) = [r for r in load_folder(folder) if r.patch.endswith(f":{mutant.name}") and r.dtype == dtype]
    worst = sorted(record.statistics, key=lambda s: s["value"] / s["bound"])[-3:]
    assert code == 1, f"{mutant.name} survives in {dtype}: {mutant.does} The highest statistics are {worst}"
    found = {" ".join(failure[2:4]) for failure in record.failures}
    expected = NUMBERS if mutant.dies == "statistics" else (mutant.dies,)
    assert any(finding.startswith(expected) for finding in found), found
