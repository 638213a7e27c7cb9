"""Cells, tox and the documentation name the same set; a cell's file says why, and pins everything."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path

import pytest

from matrix import __main__ as command
from matrix import cells, new
from matrix.cells import ROOT
from matrix.stages import STAGES


def in_tox() -> list[str]:
    tox = configparser.RawConfigParser()
    tox.read(ROOT / "tox.ini")
    (names,) = (s for s in tox.sections() if tox.get(s, "deps", fallback="").endswith("matrix/cells/{env_name}.txt"))
    return names.removeprefix("testenv:{").removesuffix("}").split(", ")


def in_docs() -> list[str]:
    text = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text.partition("## Cells")[2].partition("\n## ")[0], flags=re.MULTILINE)


def test_cells_tox_and_docs_name_the_same_set() -> None:
    assert in_tox() == in_docs() == list(cells.load_all())


def test_a_cell_is_called_what_it_pins() -> None:
    for cell in cells.load_all().values():
        if cell.name.startswith("tf"):
            assert new.cell_name(cell.pins) == cell.name
        elif cell.name.startswith("triton"):
            assert cell.pins["triton"].startswith(cell.name.removeprefix("triton") + ".")


def test_every_cell_pins_torch_and_triton() -> None:
    for cell in cells.load_all().values():
        assert {"torch", "triton", "pytest"} <= cell.pins.keys(), cell.name


def test_versions_sort_as_numbers() -> None:
    names = ["triton3.3", "tf5.13-trl1.9", "latest", "tf5.2-trl0.29", "tf4.57-trl0.26"]
    expected = ["tf4.57-trl0.26", "tf5.2-trl0.29", "tf5.13-trl1.9", "latest", "triton3.3"]
    assert sorted(names, key=cells.order) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tf9.9-trl9.9", "torch==2.13.0\n", "no comment says why"),
        ("tf9.9-trl9.9", "# why\ntorch==2.13.0\ntrl\n", "trl has no exact version"),
        ("other", "# why\ntorch==2.13.0\n", "a cell is called"),
    ],
)
def test_a_bad_cell_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        cells.load(path)


def test_an_unknown_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "tf1.0-trl0.1"]) == 2
    assert "unknown cell tf1.0-trl0.1; allowed are tf4.46-trl0.12" in capsys.readouterr().err


def test_the_job_matrix_has_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ci"]) == 0
    assert [job["cell"] for job in json.loads(capsys.readouterr().out)["include"]] == list(cells.load_all())


def test_what_a_stage_runs_exists() -> None:
    for stages in STAGES.values():
        for stage in stages:
            assert (ROOT / stage.arguments[0]).exists()


def test_releases_beyond_the_newest_cell() -> None:
    known = cells.load_all()
    newest = new.newest_cell(known)
    transformers, trl = (known[newest.name].pins[package] for package in new.WATCHED)
    found = {"transformers": ["99.1.0", "99.0.0", transformers, "4.46.3"], "trl": [trl, "0.12.2"]}
    assert new.beyond(newest, found) == {"transformers": ["99.1.0", "99.0.0"], "trl": []}


def test_a_proposed_cell_is_one(tmp_path: Path) -> None:
    path = new.write({"transformers": "99.1.0", "trl": "9.8.7", "torch": "2.13.0"}, tmp_path)
    assert path.name == "tf99.1-trl9.8.txt"
    assert cells.load(path).pins["transformers"] == "99.1.0"
