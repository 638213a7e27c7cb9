"""The suite, run as users run it, passes an honest patch and fails each fault: exit code, tensor and statistic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

from convergence.arms.pristine import remember_upstream
from convergence.report.records import STATISTICS, load_folder
from tests.convergence_faults import SCALED, rms_norm
from tests.suite import suite


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs ``pytest convergence`` in this process, so that truth and baseline are trained once for all tests."""

    def run(*options: str) -> tuple[int, str]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        chosen = ("--device", device, "--models", "llama-untied", "--dtypes", "float32", "--records", str(tmp_path))
        return suite(*chosen, *options), "".join(capfd.readouterr())

    return run


HONEST = ("--patch", "tests.convergence_faults:honest")


def test_an_honest_patch_passes(run):
    code, output = run(*HONEST)
    assert code == 0, output
    assert "llama-untied/float32/honest: equal" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("nan_in_one_gradient", ("finite", f"gradient of {SCALED}")),
        ("one_gradient_scaled", ("gain", f"gradient of {SCALED}", "who did it:")),
        ("missing_gradient", ("missing", f"gradient of {SCALED}")),
        ("overwrites_the_logits", ("overwritten",)),
        ("same_memory_in_evaluation", ("overwritten", "the logits that the caller holds changed in a later forward")),
    ],
)
def test_a_fault_is_seen(run, name, shown):
    blames = "--blame" if "who did it:" in shown else "--no-blame"  # test_convergence_blame.py has the rest of it
    code, output = run("--patch", f"tests.convergence_faults:{name}", blames)
    assert code == 1, output
    for part in shown:
        assert part in output


def test_a_baseline_that_was_patched_fails(run, monkeypatch):
    remember_upstream()
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", rms_norm)
    code, output = run(*HONEST)
    assert code == 1, output
    assert "not pristine" in output
    assert "LlamaRMSNorm.forward" in output


@pytest.mark.slow
def test_our_own_patch_passes_and_leaves_records_with_all_that_a_report_shows(run, tmp_path):
    code, output = run("--profile", "plain")
    assert code == 0, output
    records = load_folder(tmp_path)
    assert len(records) == 2
    assert not list(tmp_path.glob("*.tmp"))
    for record in records:
        assert record.verdict == "equal", record.reason
        assert record.census["rms_norm"] == 5
        assert record.launches["_rms_norm_bwd_kernel"] > 0
        assert record.launches["_rope_kernel"] > 0
        assert {s.statistic for s in record.statistics} == set(STATISTICS)
        expected = {"python", "torch", "triton", "transformers", "liger-kernels", "cpu", "threads"}
        assert expected <= record.versions.keys()
        assert set(record.losses) == {"truth", "baseline", "candidate"}
        assert record.losses["truth"].keys() == record.losses["candidate"].keys()
        for arm in ("baseline", "candidate"):
            quantities = {name for group in record.digests[arm] for name in group["quantities"]}
            assert {"loss", "logits", "generated tokens", "gradient of lm_head.weight"} <= quantities
        assert record.digests["baseline"] != record.digests["candidate"]
