"""``--profile scale`` with every size divided, so that a CPU runs the same code."""

from __future__ import annotations

from pathlib import Path

import pytest

from convergence.arms import float64, large
from convergence.models.rows import find
from convergence.models.scale import SHAPES, select
from convergence.report.records import load_folder
from tests.suite import suite


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match="'llama-tied'; allowed with --profile scale are all, llama3-8b, "):
        select("llama-tied")


@pytest.mark.parametrize("name", ["llama3-8b?divided=0", "llama3-8b?whole=vocab_size", "llama3-8b?divided=2&layers=3"])
def test_only_what_divides_goes_with_a_shape(name):
    with pytest.raises(ValueError, match="unknown model"):
        select(name)


def test_what_is_whole_is_not_divided():
    (row,) = select("llama3-8b-odd?divided=64&whole=vocab_size+length")
    assert (row.config().vocab_size, row.config().hidden_size, row._tokens) == (128_257, 64, 1023)
    assert find(row.name) == row


def test_the_table_reaches_what_it_is_there_for():
    classes = {name: row.config().vocab_size for name, row in SHAPES.items()}
    assert max(row.rows * row.length * classes[name] for name, row in SHAPES.items()) > 2**31
    assert {min(classes.values()) < 65536, max(classes.values()) >= 262_144} == {True}
    assert max(row.length for row in SHAPES.values()) >= 32_768
    assert max(row.rows * row.length for row in SHAPES.values()) > 65_536
    assert {row.config().head_dim for row in SHAPES.values()} == {64, 96, 128, 256}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [(name, row.dtypes[-1]) for name, row in SHAPES.items()])
def test_every_shape_runs_divided(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "LARGE", 2**14)
    monkeypatch.setattr(float64, "BLOCK", 2**14)
    options = ("--profile", "scale", "--models", f"{name}?divided=64", "--dtypes", dtype, "--device", "cpu")
    code = suite(*options, "--no-blame", "--patch", "convergence.patches:fused_linear", "--records", str(tmp_path))
    (record,) = load_folder(tmp_path)
    assert code == 0, record.failures
    assert record.truth == "float64"
    judged = {statistic.quantity for statistic in record.statistics}
    assert {"loss", "gradient of the logits", "relative gradient of the logits"} <= judged
    assert {statistic.step for statistic in record.statistics} == {"initial: scale"}
