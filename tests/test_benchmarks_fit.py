"""``python -m benchmarks.fit`` without a GPU: each shape can be calculated, and the table says what is off."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import fit
from benchmarks.fit import GIB, SHAPES, FitRow


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_can_be_calculated(name: str) -> None:
    shape = SHAPES[name]
    small = dataclasses.replace(shape, sizes={**shape.sizes, "num_hidden_layers": 2}, tokens=512)
    row = fit.one(name, small, lambda given: GIB)
    assert (row.shape, row.tokens, row.measured) == (name, 512 * shape.setup.batch, GIB)
    assert row.calculated > GIB // 8


@pytest.mark.parametrize(("measured", "code"), [(96, 0), (104, 0), (94, 1), (106, 1), (0, 1)])
def test_the_exit_code_says_whether_all_are_close(
    measured: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(name: str) -> FitRow:
        return FitRow(name, "LoRA", 8, 100 * GIB, measured * GIB, "" if measured else "failed: no memory")

    result = tmp_path / "result.json"
    assert fit.main(["gemma3", "experts", "--json", str(result)], start) == code
    shown = capsys.readouterr().out
    assert (f"| {100 / measured:.3f} |" if measured else "failed: no memory") in shown
    assert [row["shape"] for row in json.loads(result.read_text())["rows"]] == ["gemma3", "experts"]


@pytest.mark.parametrize("words", [["llama-9b"], ["--one"], ["gemma3", "--json", "no/such/folder/file"]])
def test_bad_options(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        fit.main(words)
