"""Candidates of another commit or environment: judged by the same statistics, blamed in their own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from convergence import border, ours
from convergence.arms.trajectory import CannotApply
from convergence.case import Case, inputs, prove
from convergence.elsewhere.options import origin_at
from convergence.elsewhere.other_python import OtherPython
from convergence.elsewhere.portable import Portable, inputs_digest
from convergence.files import Unusable
from convergence.models.models import MODELS
from convergence.report.records import Digests, Outcome, load_folder
from convergence.report.report import failure
from convergence.trainers.material import save
from liger_kernels.patching.report import PatchReport
from tests.elsewhere_patches import PATCH, copy_package, write_no_models, write_patch
from tests.suite import assert_refused, suite

CASE = Case("llama-tied", "float32", PATCH, "plain", "cpu")
OPTIONS = ("--models", "llama-tied", "--dtypes", "float32", "--profile", "plain", "--device", "cpu", "--patch", PATCH)
OURS = "convergence.patches:fused_linear"
SMALL = ("--device", "cpu", "--rows", "3", "--length", "24", "--steps", "3", "--layers", "1", "--patch", OURS)


def judged(folder: Path, case: Case = CASE, blames: bool = False) -> Outcome:
    return prove(case, blames=blames, origin=origin_at(str(folder), [case]))


def candidate_words(outcome: Outcome) -> list[Digests]:
    return outcome.digests["candidate"]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose patch tests write: one process serves them all, and imports the patch anew for each call."""
    return tmp_path_factory.mktemp("there")


@pytest.mark.slow
def test_another_order_of_a_sum_is_equal_though_not_bit_for_bit(there: Path) -> None:
    one, two = (judged(write_patch(there, halves=halves)) for halves in (False, True))
    assert (one.verdict, two.verdict) == ("equal", "equal"), (failure, one.reason, two.reason)
    assert one.digests["baseline"] == two.digests["baseline"]
    assert candidate_words(one) != candidate_words(two)


def test_a_wrong_factor_is_different_and_blamed_in_its_own_process(there: Path) -> None:
    outcome = judged(write_patch(there, scale=1.01), blames=True)
    assert outcome.verdict == "different"
    (row,) = outcome.blame
    assert (row["kernel"], row["pass"], row["step"]) == ("LlamaRMSNorm", "forward", "initial: plain 0")
    assert "patch_of_two_commits" not in sys.modules


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save("llama", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True], ids=["another order", "wrong"])
def test_this_package_at_another_commit(wrong: bool, model: Path, tmp_path: Path) -> None:
    """The whole command, on a checkpoint of one layer. The record says where the candidate is from."""
    there = copy_package(tmp_path / "there", halves=True, wrong=wrong)
    subprocess.run(["git", "init", "-q", str(there)], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["add", "liger_kernels/__init__.py"], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(there), *command], check=True)
    options = ("--checkpoint", str(model), *SMALL, "--records", str(tmp_path / "records"))
    assert suite(*options, "--candidate-from", str(there)) == wrong
    (record,) = load_folder(tmp_path / "records")
    assert record.verdict == ("different" if wrong else "equal"), failure(record)
    assert record.census["rms_norm"] == 3
    assert [row["kernel"] for row in record.blame] == ["rms_norm"] * wrong
    assert record.versions["candidate from"] == str(there)
    assert len(record.versions["candidate commit"]) == 12
    assert "candidate torch" not in record.versions, "it is the same here"
    assert record.environment["candidate commit"] == record.versions["candidate commit"]


@pytest.mark.slow
def test_an_environment_trains_what_this_one_trains(tmp_path: Path) -> None:
    """Another Python: a script that runs this one. What it lacks comes from here, and every bit is the same."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    case = Case("llama-tied", "float32", "tests.convergence_faults:honest", "plain", "cpu")
    here, there = prove(case, blames=False), judged(tmp_path, case)
    assert there.verdict == "equal", there.reason
    assert candidate_words(here) == candidate_words(there)


def test_an_environment_without_torch_is_a_usage_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    shown = (str(tmp_path), "cannot run the proof", "No module named 'torch'", "install them there")
    assert_refused(capfd, shown, *OPTIONS, "--candidate-from", str(tmp_path))


@pytest.mark.parametrize(
    ("made", "options", "shown"),
    [
        ("", (), ["does not exist", "allowed are a checkout (a folder with liger_kernels/ or patch_of_two_commits/)"]),
        ("folder/", (), ["is none of what is allowed", "bin/python"]),
        ("file", (), ["is no program that may run"]),
        ("folder/", ("--setups", "ddp"), ["knows no set-up; leave --setups out"]),
    ],
)
def test_what_is_no_origin_is_a_usage_error(
    made: str, options: tuple[str, ...], shown: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "there"
    if made:
        path.mkdir() if made.endswith("/") else path.write_text("no program")
    assert_refused(capfd, ("--candidate-from", *shown), *OPTIONS, "--candidate-from", str(path), *options)


def test_a_program_that_is_no_python_is_a_usage_error(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("no script")
    program.chmod(0o755)
    with pytest.raises(Unusable, match="cannot be started"):
        origin_at(str(program), [CASE])
    program.write_text("#!/bin/sh\necho it is another program\nexit 3\n")
    with pytest.raises(Unusable, match="cannot run the proof: it is another program"):
        origin_at(str(program), [CASE])


@pytest.mark.slow
def test_a_package_that_the_proof_cannot_observe_is_a_usage_error(tmp_path: Path) -> None:
    there = write_no_models(copy_package(tmp_path))
    (there / "liger_kernels" / "patching" / "report.py").unlink()
    with pytest.raises(Unusable, match="report"):
        origin_at(str(there), [CASE])


def test_the_package_has_all_that_the_proof_takes_from_it() -> None:
    assert ours.lacks() == []


def test_a_model_that_is_absent_there_is_absent() -> None:
    found = {"absent": {"llama-tied float32": "this transformers has no LlamaForCausalLM"}}
    there = OtherPython(found=found)
    assert there.absent(CASE) == "where the candidate is from, this transformers has no LlamaForCausalLM"
    assert there.absent(Case("gemma", "float32", PATCH)) == ""


def test_the_report_of_another_commit_may_have_other_fields() -> None:
    """Only that of our own patch may: every other class crosses with the fields that are declared."""
    report = PatchReport(("rms_norm",), memory="small")
    data = border.dumps(report)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tree = json.loads(header["__metadata__"]["tree"])
    tree[1] = [[name, value] for name, value in tree[1] if name != "invariant"] + [["of_later", True]]
    header["__metadata__"]["tree"] = json.dumps(tree)
    text = json.dumps(header).encode()
    assert border.loads(bytearray(len(text).to_bytes(8, "little") + text + data[start:])) == report


def test_a_model_with_other_parameters_cannot_be_built() -> None:
    template = MODELS["llama-untied"].build(0)
    build, arguments = Portable(template, Case("llama-untied", "float32", PATCH)).__reduce__()
    assert inputs_digest_of(build(*arguments)) == inputs_digest_of(template)
    with pytest.raises(CannotApply, match="with other parameters"):
        build("llama-bias", *arguments[1:])


def inputs_digest_of(template: object) -> str:
    given = inputs("llama-untied", "float32", "plain", 0)
    given.template = template
    return inputs_digest(given)


def test_the_digest_of_inputs_sees_a_seed_and_a_label() -> None:
    given = inputs("llama-tied", "float32", "plain", 0)
    before = inputs_digest(given)
    assert inputs_digest(inputs("llama-tied", "float32", "plain", 0)) == before
    assert inputs_digest(inputs("llama-tied", "float32", "plain", 1)) != before
    given.steps[0].batches[0].labels[0, 3] += 1
    assert inputs_digest(given) != before
