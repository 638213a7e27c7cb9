"""The suite, run as users run it, passes an honest patch and fails each fault: exit code, tensor and statistic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.convergence_faults import SCALED, _rms_norm

ROOT = Path(__file__).parent.parent


@pytest.fixture
def suite(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs ``pytest convergence`` in this process, so that truth and baseline are trained once for all tests."""
    from transformers.models.llama import modeling_llama

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", modeling_llama.LlamaRMSNorm.forward)

    def run(*options: str, models: str = "llama-untied", dtypes: str = "float32") -> tuple[int, str]:
        isolated = ("-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        arguments = ("convergence", "--device", device, "--models", models, "--dtypes", dtypes, *options)
        code = pytest.main([*arguments, "--records", str(tmp_path), "-q", *isolated])
        captured = capfd.readouterr()
        return int(code), captured.out + captured.err

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
def test_the_suite_sees_faults_and_only_faults(suite, dtype, name, shown):
    code, output = suite(*fault(name), dtypes=dtype)
    if shown is None:
        assert code == 0, output
        assert f"llama-untied/{dtype}/{name}: equal" in output
        return
    assert code == 1, output
    assert shown in output
    if name in ("nan_in_one_gradient", "one_gradient_scaled", "missing_gradient"):
        assert f"gradient of {SCALED}" in output


def test_a_baseline_that_was_patched_fails(suite, monkeypatch):
    from transformers.models.llama import modeling_llama

    from convergence.case import remember_upstream
    from convergence.models import MODELS

    remember_upstream(MODELS.values())
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", _rms_norm)
    code, output = suite(*fault("honest"))
    assert code == 1, output
    assert "not pristine" in output
    assert "LlamaRMSNorm.forward" in output


def test_our_own_patch_passes_and_leaves_complete_records(suite, tmp_path):
    code, output = suite("--profile", "plain")
    assert code == 0, output
    records = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(records) == 2
    assert not list(tmp_path.glob("*.tmp"))
    for record in records.values():
        assert record["verdict"] == "equal"
        assert record["census"]["rms_norm"] == 5
        assert record["launches"]["_rms_norm_bwd_kernel"] > 0
        assert {"error ratio", "largest error ratio", "gain", "gain against the others"} == {
            s["statistic"] for s in record["statistics"]
        }
        assert {"torch", "triton", "transformers", "liger-kernels"} <= record["versions"].keys()
        assert set(record["losses"]) == {"truth", "baseline", "candidate"}
