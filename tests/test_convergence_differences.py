"""``python -m convergence differences``: what differs between two commits, kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from convergence.__main__ import main
from convergence.elsewhere.alone import placed
from convergence.elsewhere.page import KernelRow, Page
from tests.elsewhere_patches import copy_package

NUMBERS = ("1 / 2", "**3 / 2**", "1e-08 / 1e-07", "-")


@pytest.mark.slow
def test_a_kernel_that_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    there, page = copy_package(tmp_path / "there", halves=True), tmp_path / "page.md"
    options = ("--profile", "plain", "--device", "cpu", "--kernels", "rms_norm,rope", "--markdown", str(page))
    assert main(["differences", ".", str(there), *options]) == 0
    rows = {cells[3]: cells for cells in map(split, page.read_text(encoding="utf-8").splitlines()) if len(cells) > 8}
    assert rows["rope"][4:6] == ["same", "-"]
    assert rows["rms_norm"][4] == "differ"
    assert "initial: plain 0" in rows["rms_norm"][5]
    assert all(" / " in cell and "**" not in cell for cells in (rows["rope"], rows["rms_norm"]) for cell in cells[6:10])
    assert rows["rope"][6] == rows["rope"][7]
    assert rows["rms_norm"][6:10] != [rows["rms_norm"][i] for i in (7, 6, 9, 8)]
    text = page.read_text(encoding="utf-8")
    assert "1 of 2 kernels differ in bits" in text
    without = text.partition("No model here has a place for: ")[2]
    assert "experts" in without
    assert "swiglu" not in without, "it was not asked for"


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def test_what_the_page_says() -> None:
    rows = [
        KernelRow("llama-tied", "float32", "rms_norm", "loss in initial: plain 0", 7, NUMBERS),
        KernelRow("llama-tied", "float32", "rope", "", 0, NUMBERS),
        KernelRow("llama-tied", "float32", "glu", "", 0, ("-",) * 4, "B: candidate cannot run ValueError: no | glu"),
    ]
    text = Page([{"torch": "2.9", "from": "."}, {"torch": "2.8"}], rows, ["experts"], "On cpu.").markdown()
    lines = text.splitlines()
    assert lines[0] == "## Differences op by op: 1 of 3 kernels differ in bits"
    assert "| torch | 2.9 | 2.8 |" in lines
    assert any(line.startswith("| from | .") and line.endswith("- |") for line in lines)
    assert "| llama-tied | float32 | rms_norm | differ | loss in initial: plain 0 and 7 more |" in text
    assert "| llama-tied | float32 | rope | same | - | 1 / 2 | **3 / 2** | 1e-08 / 1e-07 | - |" in lines
    assert "| glu | - | `B: candidate cannot run ValueError: no \\| glu` |" in text
    assert lines[-1] == "No model here has a place for: experts."


def test_where_kernels_have_a_place() -> None:
    found = placed("llama-tied", 0)
    assert (found["rms_norm"], found["rope"], found["experts"]) == (5, 2, 0)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("no/such", "."), "does not exist; allowed are a checkout"),
        ((".", ".", "--models", "lama"), "'lama'"),
        ((".", ".", "--dtypes", "float8"), "allowed are float32, bfloat16"),
        ((".", ".", "--kernels", "norm"), "--kernels 'norm' is unknown on both sides; allowed are"),
        ((".", ".", "--bits"), "unrecognized arguments: --bits"),
    ],
)
def test_a_usage_error(
    options: tuple[str, ...], shown: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as ended:
        main(["differences", "--device", "cpu", *options])
    assert ended.value.code == 4
    assert shown in capfd.readouterr().err
