"""A verdict cannot be bought: what a patch's process writes runs no code of the judge's, decides no other case, and
belongs to the call that it answers."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_kernels
from convergence import border, kept
from convergence.arms import isolate
from convergence.arms.candidate import Candidate, PatchError
from convergence.arms.quantities import INITIAL, LOSS, Finding, Moment, Remark
from convergence.arms.train import train
from convergence.arms.trajectory import Trajectory
from convergence.case import Case, inputs, prove, references
from convergence.judge.arms import _check_own
from convergence.judge.bitwise import is_same
from convergence.models.models import DTYPES
from tests.border_patches import code
from tests.suite import suite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATCHES = "tests.border_patches"


def judged(patch: str, scope: str = "instance") -> Any:
    return prove(Case("llama-untied", "float32", f"{PATCHES}:{patch}", "plain", DEVICE, scope=scope), blames=False)


def bought() -> bool:
    """Whether code of a patch has run in this process."""
    return hasattr(torch, "bought")


def test_what_unpickles_to_code_does_not_cross() -> None:
    with pytest.raises(RuntimeError, match=r"a tests\.border_patches\.Code cannot leave its process"):
        isolate.call(code)
    assert not bought()


@pytest.mark.parametrize("patch", ["writes_code", "writes_its_result"])
def test_a_result_that_a_patch_writes_is_not_read(patch: str) -> None:
    record = judged(patch)
    assert record.verdict == "different"
    assert [row[:3] for row in record.failures] == [("candidate", "", "died")]
    assert "exit code 0" in record.reason
    assert not bought()


def test_a_result_of_another_call_is_refused() -> None:
    record = judged("sends_its_result")
    assert record.verdict == "different"
    assert "what its own process sent is no result: it belongs to no message that this call waits for" in record.reason


def test_a_replica_is_no_candidate() -> None:
    record = judged("replica", "class")
    assert record.verdict == "different"
    assert [row[2] for row in record.failures] == ["not its own"]
    assert "every bit is that of replica 1" in record.reason


@pytest.mark.parametrize(
    ("dtype", "setup", "launches", "refused"),
    [
        ("bfloat16", "plain", {"_cross_entropy_fwd_kernel": 3}, True),
        ("float32", "plain", {"_rms_norm_fwd_kernel": 3}, True),
        ("bfloat16", "plain", {"_rms_norm_fwd_kernel": 3}, False),  # rounding may hide another order of a sum
        ("float32", "bf16-autocast", {"_rms_norm_fwd_kernel": 3}, False),
        ("float32", "plain", {"_rope_kernel": 3, "_glu_fwd_kernel": 3}, False),  # has one way to be rounded
        ("float32", "plain", {}, False),
    ],
)
def test_who_launched_a_sum_has_not_every_bit_of_the_baseline(dtype, setup, launches, refused) -> None:
    """A patch that returns what an unpatched model computed, and launches kernels for the count."""
    generator = torch.Generator().manual_seed(0)
    arms = [Trajectory() for _ in range(4)]
    for arm in arms:
        arm.record(LOSS, Moment(INITIAL, "step"), torch.rand((), generator=generator))
    (truth, baseline), other = arms[:2], arms[2:]
    case = Case("llama-untied", dtype, "my:patch", "hard", "cpu", setup=setup)
    failures = list(_check_own(case, [(truth, baseline), tuple(other)], copy.deepcopy(baseline), launches))
    assert [failure.finding for failure in failures] == ["not its own"] * refused
    assert not refused or next(iter(launches)) in failures[0].value


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "cross_entropy"), ("float32", "rms_norm")])
def test_an_honest_sum_has_other_bits_than_the_baseline(dtype, kernel) -> None:
    """In one step of them all: in a single one, it depends on where PyTorch's memory lies."""
    given = inputs("llama-untied", dtype, "plain", 0)
    steps = frozenset(step.name for step in given.steps)

    def trained(patch: Any) -> Trajectory:
        result = train(given.run(DTYPES[dtype], torch.device(DEVICE), patch=patch, only=steps))
        result.model = None
        return result

    ours = trained(lambda model: liger_kernels.patch(model, kernels=[kernel]))
    assert not is_same(ours, trained(None))


def changing() -> Iterator[Any]:
    """Changes what it has given away."""
    yield (values := [torch.ones(3)])
    values[0].zero_()
    values.append(torch.zeros(3))
    yield len(values)


def test_what_has_left_a_process_is_not_changed_by_it() -> None:
    first, second = isolate.call(changing)
    assert second == 2
    assert len(first) == 1
    assert torch.equal(first[0], torch.ones(3))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to whose files the patch writes."""
    folder = tmp_path / "written-by-a-patch"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_references_that_a_patch_overwrites(written: Path) -> None:
    """The verdict is by what was read before, says what happened, and nobody reads the file again."""
    asked = ("llama-untied", "float32", "plain", DEVICE, 0)
    pairs = references(*asked).pairs
    assert isinstance(pairs, kept.Kept)
    shutil.copy(pairs.file, written)
    (file,) = written.iterdir()
    references.cache_clear()
    with kept.keep_in(written, kept.digests(written, [kept.kept_key(*asked)])):
        record = judged("writes_to_files")
        held = references(*asked).pairs
    assert record.verdict == "different"
    assert record.failures == [
        ("baseline", "", "changed where it is kept", f"while the patch ran: {file}", ""),
    ]
    assert not file.exists()
    for (_, before), (_, now) in zip(pairs, held, strict=True):
        assert torch.equal(before.values[LOSS][at := next(iter(before.values[LOSS]))], now.values[LOSS][at])
    references.cache_clear()


def test_a_record_that_a_later_patch_overwrites(written: Path, capfd: Any) -> None:
    chosen = ("--models", "llama-untied", "--dtypes", "float32", "--profile", "plain", "--device", DEVICE)
    patches = f"tests.convergence_faults:honest,{PATCHES}:writes_to_files"
    assert suite(*chosen, "--no-blame", "--patch", patches, "--records", str(written)) == pytest.ExitCode.TESTS_FAILED
    said = "".join(capfd.readouterr())
    assert said.count(": is not what this run wrote; run the case again") == 1
    assert "2 passed" in said


def plain_values() -> Any:
    at = Moment("initial", "packed", 2)
    values = {LOSS: {at: torch.tensor(1.5)}, LOSS._replace(name="x"): {at: torch.ones(2, 3, dtype=torch.bfloat16)}}
    trajectory = Trajectory(values, {(LOSS, at): (torch.Size([2]), torch.float16)}, notes=[Remark(at, "odd")])
    return [
        [None, True, 2**70, float("inf"), -0.0, "é\x00", (1, (2,)), {"a": {3: "b"}}, {1}, Counter("aab")],
        Candidate(trajectory, (Finding.RAISED, "why"), census={"Norm": 2}),
        [torch.empty(0, 3), torch.arange(6).view(2, 3).t(), torch.tensor(True), torch.float64],
        PatchError("no patch"),
    ]


def test_plain_data_arrives_as_it_was() -> None:
    sent = plain_values()
    first, candidate, tensors, error = border.loads(bytearray(border.dumps(sent)))
    assert first == sent[0]
    assert [type(item) for item in first] == [type(item) for item in sent[0]]
    assert str(first[4]) == "-0.0"
    trajectory, was = candidate.trajectory, sent[1].trajectory
    assert (candidate.failure, candidate.census) == ((Finding.RAISED, "why"), {"Norm": 2})
    assert (trajectory.forms, trajectory.notes) == (was.forms, was.notes)
    for quantity, by_step in was.values.items():
        for step, value in by_step.items():
            assert torch.equal(trajectory.values[quantity][step], value)
            assert trajectory.values[quantity][step].dtype is value.dtype
    for value, expected in zip(tensors[:3], sent[2][:3], strict=True):
        assert torch.equal(value, expected)
    assert tensors[3] is torch.float64
    assert type(error) is PatchError
    assert error.args == ("no patch",)


@pytest.mark.parametrize(
    "tree",
    [
        '["eval","1"]',
        '["SystemExit"]',
        '["error","SystemExit",1]',
        '["error","Candidate"]',
        '["PatchError",["x"]]',
        '["Candidate",[["census",["dict"]]]]',
        '["Moment",1,2,3]',
        '["Finding","no kind"]',
        '["tensor","1"]',
        '["dtype","Tensor"]',
        '{"a":1}',
        "[" * 100_000,
        "no json",
    ],
)
def test_what_is_no_plain_data_is_refused(tree: str) -> None:
    import safetensors.torch

    with pytest.raises(border.NotPlain):
        border.loads(bytearray(safetensors.torch.save({"0": torch.ones(2)}, {"tree": tree})))


def test_bytes_that_anybody_may_send_are_refused() -> None:
    whole = border.dumps([torch.ones(2, 3)])
    longer = whole.replace(b'"shape":[2,3]', b'"shape":[9,9]')
    assert longer != whole
    for data in (b"", b"\xff" * 100, whole[:-1], whole[:20], longer, pickle.dumps(1)):
        with pytest.raises(border.NotPlain):
            border.loads(bytearray(data))


def test_a_field_of_another_type_is_refused() -> None:
    failure: Any = ("died", 3)
    wrong = Candidate(failure=failure)
    with pytest.raises(border.NotPlain, match="field 'failure' of a Candidate has another type"):
        border.loads(bytearray(border.dumps(wrong)))
