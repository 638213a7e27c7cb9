"""The suite, run as users run it, passes an honest patch and fails each fault: exit code, tensor and statistic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convergence.records import load_folder
from tests.convergence_faults import SCALED, _rms_norm
from tests.suite import suite


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs ``pytest convergence`` in this process, so that truth and baseline are trained once for all tests."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", modeling_llama.LlamaRMSNorm.forward)

    def run(*options: str, dtypes: str = "float32") -> tuple[int, str]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        chosen = ("--device", device, "--models", "llama-untied", "--dtypes", dtypes, "--records", str(tmp_path))
        return suite(*chosen, *options), "".join(capfd.readouterr())

    return run


def fault(name: str) -> tuple[str, str]:
    return "--patch", f"tests.convergence_faults:{name}"


# Sorted by dtype, so that truth and baseline are trained once for each.
@pytest.mark.parametrize(
    ("dtype", "name", "shown"),
    [
        ("float32", "honest", None),
        ("float32", "does_nothing", "not patched"),
        ("float32", "nan_in_one_gradient", "finite"),
        ("float32", "one_gradient_scaled", "gain"),
        ("float32", "missing_gradient", "missing"),
        ("float32", "leaks", "patched too"),
        ("float32", "overwrites_the_logits", "overwritten"),
        ("float32", "crashes", "no kernel for this device"),
        ("bfloat16", "honest", None),
        ("bfloat16", "nan_in_one_gradient", "finite"),
        ("bfloat16", "one_gradient_scaled", "gain"),
        ("bfloat16", "one_norm_gradient_scaled", "gain"),
    ],
)
def test_the_suite_sees_faults_and_only_faults(run, dtype, name, shown):
    blamed = (dtype, name) == ("float32", "one_gradient_scaled")  # one will do: test_convergence_blame.py has the rest
    code, output = run(*fault(name), *(() if blamed else ("--no-blame",)), dtypes=dtype)
    if shown is None:
        assert code == 0, output
        assert f"llama-untied/{dtype}/{name}: equal" in output
        return
    assert code == 1, output
    assert shown in output
    assert ("who did it:" in output) == blamed
    if name in ("nan_in_one_gradient", "one_gradient_scaled", "missing_gradient"):
        assert f"gradient of {SCALED}" in output


def test_a_baseline_that_was_patched_fails(run, monkeypatch):
    from transformers.models.llama import modeling_llama

    from convergence.case import remember_upstream
    from convergence.models import MODELS

    remember_upstream(MODELS.values())
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", _rms_norm)
    code, output = run(*fault("honest"))
    assert code == 1, output
    assert "not pristine" in output
    assert "LlamaRMSNorm.forward" in output


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
        kinds = {"error ratio", "largest error ratio", "gain", "gain against the others"}
        assert {s.statistic for s in record.statistics} == kinds
        expected = {"python", "torch", "triton", "transformers", "liger-kernels", "cpu", "threads"}
        assert expected <= record.versions.keys()
        assert set(record.losses) == {"truth", "baseline", "candidate"}
        assert record.losses["truth"].keys() == record.losses["candidate"].keys()
        for arm in ("baseline", "candidate"):
            quantities = {name for group in record.digests[arm] for name in group["quantities"]}
            assert {"loss", "logits", "generated tokens", "gradient of lm_head.weight"} <= quantities
        assert record.digests["baseline"] != record.digests["candidate"]
