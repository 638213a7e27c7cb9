"""The proof on models of the user's own: an encoder, a vision model, and one that is not of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from convergence.arms.quantities import OUTPUT, OUTPUT_GRADIENT, STATISTICS, Quantity
from convergence.models import own
from convergence.models.own import Model
from convergence.models.rows import find
from convergence.report.records import Record, load_folder
from tests.suite import assert_refused, suite

HERE = "tests.own_models"
MODELS = ("--models-from", f"{HERE}:models", "--device", "cpu")


def prove(folder: Path, *options: str) -> dict[str, Record]:
    suite(*MODELS, "--records", str(folder), *options)
    return {str(record.case): record for record in load_folder(folder)}


@pytest.mark.slow
def test_patches_of_any_model_are_judged(tmp_path: Path) -> None:
    """A fault in a backward pass is seen in numbers on each of them, and another order of sums is none."""
    options = ("--dtypes", "float32", "--patch", f"{HERE}:equal,{HERE}:wrong", "--no-blame")
    records = prove(tmp_path, *options)
    names = [model.name for model in own.load(f"{HERE}:models", "", "")()]
    assert {*records} == {f"{name}/float32/{patch}" for name in names for patch in ("equal", "wrong")}
    for name in names:
        equal, wrong = (records[f"{name}/float32/{patch}"] for patch in ("equal", "wrong"))
        assert equal.verdict == "equal", equal.reason
        assert wrong.verdict == "different"
        assert {failure.finding for failure in wrong.failures} <= {*STATISTICS}
        assert any(failure.quantity.startswith("gradient of") for failure in wrong.failures)
        steps = {*equal.losses["truth"]}
        assert {"initial: batch 1", "initial: accumulated, batch 2", "SGD: evaluation", "AdamW: batch 2"} <= steps
    seen = {statistic.quantity for statistic in records["mixer/float32/equal"].statistics}
    assert {"output scores", "gradient of the output scores", "gradient of blocks.1.3.weight"} <= seen
    assert "gradient of the hidden states entering blocks.1" in seen


@pytest.mark.slow
def test_our_patch_runs_its_kernels_there_and_faults_are_seen(tmp_path: Path) -> None:
    patches = ("convergence.patches:fused_linear", f"{HERE}:wrong", f"{HERE}:wrong_in_evaluation")
    records = prove(tmp_path, "--models", "mixer", "--dtypes", "bfloat16", "--patch", ",".join(patches))
    ours, wrong = records["mixer/bfloat16/fused_linear"], records["mixer/bfloat16/wrong"]
    assert ours.verdict == "equal", ours.reason
    assert ours.census["layer_norm"] == 3
    assert any("layer_norm" in kernel for kernel in ours.launches)
    (blame,) = {(row["kernel"], row["pass"]) for row in wrong.blame}
    assert blame == ("LayerNorm", "backward")
    failures = records["mixer/bfloat16/wrong_in_evaluation"].failures
    assert {failure.finding for failure in failures} <= {*STATISTICS}
    assert "output scores" in {failure.quantity for failure in failures}


def test_names_lead_back_to_models() -> None:
    for row in own.rows(f"{HERE}:models"):
        assert find(row.name) is row
        assert row.model_class() is type(row.build(0))
    for kind in (OUTPUT, OUTPUT_GRADIENT):
        quantity = Quantity(kind, "scores")
        assert Quantity.parse(str(quantity)) == quantity


def test_the_same_weights_and_inputs_every_time() -> None:
    (row,) = own.select(f"{HERE}:models", "mixer")
    first, second = (dict(row.build(3).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    (one, *_), evaluation = row.data(own.PROFILE, 3, torch.bfloat16)
    (other, *_), _ = row.data(own.PROFILE, 3, torch.bfloat16)
    batches: list[Any] = [*one.batches, *other.batches]
    (x, labels), (again, _) = (batch.values for batch in batches)
    assert torch.equal(x, again)
    assert torch.equal(x, evaluation.values[0])
    assert (x.dtype, labels.dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("raises", "raised OSError: no such disk"),
        ("no_models", "returned a list of nothing; it returns a list of convergence.Model"),
        ("no_model", "returned a list of Mixer; it returns a list of convergence.Model"),
        ("bad_name", "a model is called 'a/b'; allowed are letters, digits"),
        ("twice", "2 models are called 'mixer'; each needs a name of its own"),
        ("no_module", "returned a str; it makes a torch.nn.Module"),
        ("build_raises", "raised TypeError"),
        ("in_bfloat16", "embed.weight is in torch.bfloat16 on cpu; every parameter is float32 on the CPU"),
        ("one_batch", "returned a list of 1; it makes a list of at least two"),
        ("no_tensor", "batch 1 of"),
        ("loss_raises", "raised TypeError"),
        ("no_loss", "returned a dict; it returns a tensor of one element with a gradient"),
        ("many_losses", "returned a tensor of shape (4, 5) with a gradient"),
        ("without_gradient", "returned a tensor of shape () without a gradient"),
        ("drops", "differs between two calls; set dropout to 0"),
        ("nothing_here", "cannot be imported"),
    ],
)
def test_what_no_proof_can_be_made_of(source: str, shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(capfd, [shown, f"{HERE}:{source}"], "--models-from", f"{HERE}:{source}")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((7, str, str, str), "the name of a Model is a int, 7; it takes text"),
        (("mixer", 7, str, str), "build of the Model 'mixer' is a int; it takes a function"),
        (("mixer", str, None, str), "batches of the Model 'mixer' is a NoneType; it takes a function"),
    ],
    ids=["name", "build", "batches"],
)
def test_what_no_model_is_made_of(arguments: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=shown):
        Model(*arguments)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--models", "mixer,decoder"), "unknown model 'decoder'; allowed are all, encoder, vision, mixer"),
        (("--setups", "ddp"), "--models-from and --setups do not go together; leave --setups out"),
        (("--profile", "consistency"), "--models-from and --profile do not go together; leave --profile out"),
        (
            ("--candidate-from", "x"),
            "--models-from and --candidate-from do not go together",
        ),
        (("--checkpoint", "x"), "--models-from and --checkpoint do not go together; leave --checkpoint out"),
    ],
)
def test_what_does_not_go_together(options: tuple[str, ...], shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused(capfd, [shown], *MODELS, *options)
