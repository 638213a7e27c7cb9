"""Long runs: the loss of a patched model among those of unpatched ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convergence.judge import long_run
from convergence.judge.verdict import Verdict
from convergence.report import html
from convergence.report.records import Record, load_folder
from convergence.trainers.material import save
from tests.suite import suite

STEPS = 200


def walk(generator: torch.Generator, arms: int) -> torch.Tensor:
    """Runs that part more and more: a common fall, and a random walk of each. [arms, steps]"""
    common = 2 + 3 * torch.exp(-torch.linspace(0, 4, STEPS, dtype=torch.float64))
    steps = 1e-3 * torch.randn(arms, STEPS, generator=generator, dtype=torch.float64)
    return common + steps.cumsum(1)


def judged(curves: torch.Tensor) -> Verdict:
    return Verdict.of(long_run.judge([*curves[:-1]], curves[-1]))


def test_a_false_alarm_is_as_rare_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(long_run, "FALSE_ALARM", 0.1)
    alarms = sum(not judged(walk(generator, 7)).passed for _ in range(400))
    assert 2 <= alarms <= 40 + 3 * 6, "at most a tenth, and some: a bound that nothing reaches says nothing"


def test_a_run_that_leaves_the_band_is_seen_where_it_does() -> None:
    curves = walk(torch.Generator().manual_seed(1), 7)
    assert judged(curves).passed
    curves[-1, STEPS // 2 :] += 0.5
    first = judged(curves).failures[0]
    assert first[:3] == ("loss", "long run: steps 101 to 110", "distance from the band")
    assert "where others have" in first[3]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_fails(broken: float) -> None:
    curves = walk(torch.Generator().manual_seed(1), 7)
    curves[-1, 150] = broken
    assert not judged(curves).passed


def test_runs_that_agree_to_the_last_bit_are_no_alarm() -> None:
    assert judged(torch.full((7, STEPS), 3.0, dtype=torch.float64)).passed


@pytest.mark.parametrize(("freedom", "chance", "bound"), [(1, 0.05, 12.706), (3, 0.05, 3.182), (5, 1e-4, 11.178)])
def test_the_bound_is_students(freedom: int, chance: float, bound: float) -> None:
    assert long_run.student_bound(freedom, chance) == pytest.approx(bound, abs=1e-3)


def test_every_step_is_in_one_block() -> None:
    at = [*long_run.blocks(torch.arange(107, dtype=torch.float64))]
    assert len(at) == long_run.BLOCKS
    assert (at[0].step, at[-1].step) == ("steps 1 to 5", "steps 103 to 107")


@pytest.mark.slow
def test_many_steps_of_a_checkpoint_are_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_run, "LONG", 20)
    save("llama", tmp_path / "llama")
    options = ("--device", "cpu", "--rows", "2", "--length", "16", "--steps", "20", "--layers", "1", "--no-blame")
    patch, records = "convergence.patches:fused_linear", tmp_path / "records"
    code = suite("--checkpoint", str(tmp_path / "llama"), "--patch", patch, *options, "--records", str(records))
    (record,) = load_folder(records)
    assert code == 0, record.failures
    steps = [f"long run: steps {i} to {i}" for i in range(1, 21)]
    assert [s.step for s in record.statistics if s.statistic == long_run.STATISTIC] == steps
    for arm in ("baseline", "candidate", "lowest", "highest"):
        assert [step for step in record.losses[arm] if step.startswith("long")] == steps
    assert not any(step.startswith("long") for step in record.losses["truth"])
    trained = [step for step in record.losses["truth"] if step.startswith("SGD: ")]
    assert trained[:4] == ["SGD: text 0", "SGD: packed 1", "SGD: text 2", "SGD: packed 3"]
    assert "SGD: text 4" not in trained


def test_the_report_shows_the_band() -> None:
    curves = walk(torch.Generator().manual_seed(1), 7)
    losses = {"truth": {"initial: a": 5.0}, **long_run.curves([*curves[:-1]], curves[-1])}
    (*_, chart) = html._charts(Record("m", "float32", "a:b", "text", "cpu", 0, losses=losses))
    assert chart.title == "Long run"
    assert [arm for arm, _ in chart.lines] == ["lowest", "highest", "baseline", "candidate"]
