"""Records: a folder of them only grows, a killed writer leaves none by halves, and what is no record is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convergence.arms.quantities import Failure, Finding, Moment, Quantity
from convergence.arms.trajectory import Trajectory
from convergence.judge import bitwise
from convergence.report.records import (
    SCHEMA,
    Outcome,
    Record,
    Statistic,
    dumps,
    from_dict,
    load,
    load_all,
    load_folder,
    newest,
    write,
)

ROOT = Path(__file__).parent.parent


def record(**fields) -> Record:
    fields = {"model": "llama-tied", "dtype": "float32", "patch": "package.module:function", **fields}
    return Record(**{"profile": "hard", "device": "cpu", "seed": 0, "versions": {"torch": "2.13.0"}, **fields})


def test_what_is_written_is_read_back(tmp_path):
    written = record(
        verdict="different",
        reason="loss differs",
        failures=[Failure("loss", "SGD: masked", Finding.ERROR_RATIO, "nan", "2")],
        statistics=[Statistic("loss", "SGD: masked", "error ratio", math.inf, 2.0)],
        blame=[{"kernel": "rope", "module": "model", "pass": "forward", "step": "s", "tensor": "loss", "note": ""}],
        losses={"truth": {"SGD: masked": 1.5}, "candidate": {"SGD: masked": -math.inf}},
        digests={"candidate": [{"steps": ["a", "b"], "quantities": {"loss": "0f 1f"}}]},
        census={"rope": 2},
    )
    read = load(write(written, tmp_path))
    assert read == written
    assert read.failures[0].finding == "error ratio"


def test_a_number_that_json_does_not_have_is_text():
    written = record(losses={"truth": {"step": math.nan}})
    data = json.loads(dumps(written), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["losses"] == {"truth": {"step": "nan"}}
    assert math.isnan(from_dict(data).losses["truth"]["step"])


def test_a_later_run_leaves_the_earlier_record_and_the_newest_is_found(tmp_path):
    first = write(record(at="2026-01-02T00:00:00+00:00", seconds=1.0), tmp_path)
    content = first.read_text()
    # The same instant as the first in another time zone is earlier than what its digits say.
    write(record(at="2026-01-02T01:00:00+02:00", seconds=2.0), tmp_path)
    write(record(at="2026-01-02T00:00:00+00:00", model="gemma", seconds=3.0), tmp_path / "other machine")
    assert first.read_text() == content
    assert load_all([tmp_path])[0].seconds == 2.0
    assert len(load_all([tmp_path])) == 3
    assert {r.model: r.seconds for r in load_folder(tmp_path)} == {"llama-tied": 1.0, "gemma": 3.0}


def test_two_records_of_one_instant_are_two_files(tmp_path):
    same = record()
    assert write(same, tmp_path) != write(same, tmp_path)


def test_the_same_case_in_two_environments_is_two_results():
    other = record(versions={"torch": "2.11.0"})
    assert len(newest([record(), other, record()])) == 2


WRITER = """
import sys
from pathlib import Path
from convergence.report.records import Record, write
notes = [str(i) * 1000 for i in range(10_000)]
print("ready", flush=True)
write(Record("m", "float32", "p:f", "hard", "cpu", 0, notes=notes, versions={}), Path(sys.argv[1]))
"""


@pytest.mark.skipif(os.name != "posix", reason="kills a process by a signal of POSIX")
@pytest.mark.parametrize("seen", ["tmp", "json"])
def test_a_killed_writer_leaves_no_half_record(seen, tmp_path):
    """Killed as soon as there is a file of 40 MB under its first, or under its final name: what is named is whole."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not any(tmp_path.glob(f"*.{seen}")):
            assert process.poll() is None, f"it ended and left no .{seen}"
        process.send_signal(signal.SIGKILL)
    if seen == "tmp":
        assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
        path = write(record(), tmp_path)
        assert load_folder(tmp_path) == [load(path)]
    else:
        assert len(load_folder(tmp_path)[0].notes) == 10_000


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write(record(notes=[object()]), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"schema": SCHEMA + 1}, ["'schema'", str(SCHEMA + 1), "later release", f"allowed is {SCHEMA}"]),
        ({"schema": 1}, ["'schema'", "is 1", "earlier release", "run the case again"]),
        ({"schema": "2"}, ["'schema'", "'2' (str)"]),
        ({"seed": True}, ["'seed'", "True (bool)", "a whole number"]),
        ({"seconds": None}, ["'seconds'", "None", "a number"]),
        ({"verdict": "fine"}, ["'verdict'", "'fine'", "equal, different"]),
        ({"verdict": "different"}, ["'verdict'", "'different' with 0 failures"]),
        ({"failures": [["loss", "step", "gain", "1", "2"]]}, ["'verdict'", "'equal' with 1 failures"]),
        ({"failures": [["loss", "step"]]}, ["'failures'[0]", "5 items"]),
        ({"failures": [["loss", "step", "odd", "1", "2"]]}, ["'failures'[0][2]", "'odd'", "error ratio, "]),
        ({"notes": "none"}, ["'notes'", "'none' (str)", "a list"]),
        ({"census": []}, ["'census'", "[] (list)", "an object"]),
        ({"census": {"rope": 1.5}}, ["'census'['rope']", "1.5 (float)"]),
        ({"statistics": [{"quantity": "loss"}]}, ["'statistics'[0]", "quantity, step, statistic, value, bound"]),
        ({"blame": [{"kernel": "rope"}]}, ["'blame'[0]", "kernel, module, pass, step, tensor, note"]),
        ({"at": "yesterday"}, ["'at'", "'yesterday'", "ISO 8601"]),
        ({"at": "2026-01-02T00:00:00"}, ["'at'", "with its offset"]),
        ({"colour": "red"}, ["'colour'", "unknown", "model, dtype"]),
        (
            {"digests": {"candidate": [{"steps": ["a"], "quantities": {"loss": "1 2"}}]}},
            ["'digests'['candidate']", "2 words for 'loss'", "1"],
        ),
    ],
)
def test_what_is_no_record_is_refused_by_file_and_field(change, shown, tmp_path):
    path = write(record(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="field") as raised:
        load(path)
    for part in (str(path), *shown):
        assert part in str(raised.value)


def test_a_missing_field_is_named():
    whole = json.loads(dumps(record()))
    for name in whole:
        with pytest.raises(ValueError, match=f"here: field '{name}'"):
            from_dict({other: value for other, value in whole.items() if other != name}, "here")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe"])
def test_a_file_that_holds_no_object_is_refused(content, tmp_path):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json"):
        load_folder(tmp_path)


def test_no_record_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no record in there"):
        load_folder(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        load_folder(tmp_path / "missing")


def test_reading_needs_no_torch(tmp_path):
    """A summary is made where no GPU, and no torch, is."""
    write(record(), tmp_path)
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "from convergence.__main__ import main\n"
        f"sys.exit(main(['report', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "llama-tied/float32/function" in done.stdout


def trajectory(**values: torch.Tensor) -> Trajectory:
    result = Trajectory()
    for step in ("initial: a", "initial: b, batch 1", "initial: b, batch 2", "SGD: a"):
        for name in ("gradient", "loss"):
            result.record(Quantity(name), Moment.parse(step), values.get(f"{name} {step}", torch.ones(3)))
    result.record(Quantity("parameter"), Moment.parse("SGD: end"), values.get("parameter", torch.zeros(3)))
    return result


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([0.0, -0.0, 0.0]),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, 1),
        torch.tensor([0.0, 1e-45, 0.0]),
    ],
    ids=["sign of zero", "dtype", "integers", "shape", "one ulp"],
)
def test_a_digest_sees(other):
    assert bitwise.digest(trajectory(parameter=other)) != bitwise.digest(trajectory())


def test_a_digest_does_not_see_how_a_tensor_lies_in_memory():
    strided = torch.zeros(3, 2)[:, 0]
    assert bitwise.digest(trajectory(parameter=strided)) == bitwise.digest(trajectory())


def observed(baseline: Trajectory, candidate: Trajectory) -> Record:
    return record(digests={"baseline": bitwise.digest(baseline), "candidate": bitwise.digest(candidate)})


def compared(now: tuple[Trajectory, Trajectory], before: tuple[Trajectory, Trajectory]) -> Outcome:
    """The outcome of baseline and candidate ``now``, compared with the record of ``before``."""
    return bitwise.compared(observed(*now), observed(*before))


def test_the_first_difference_in_time_is_named_first():
    steps = [("gradient", "initial: b, batch 2"), ("loss", "SGD: a"), ("gradient", "SGD: a")]
    ulp = torch.tensor([1.0, 1.0, 1 + 2**-23])
    changed = trajectory(**{f"{name} {step}": ulp for name, step in steps}, parameter=ulp)
    now = compared((trajectory(), changed), (trajectory(), trajectory()))
    assert now.verdict == "different"
    assert [row[:2] for row in now.failures] == [*steps, ("parameter", "SGD: end")]
    assert {row[2] for row in now.failures} == {"bit for bit"}


def test_what_appeared_or_vanished_differs():
    more = trajectory()
    more.record(Quantity("new"), Moment.parse("SGD: a"), torch.ones(1))
    for now, before in ((more, trajectory()), (trajectory(), more)):
        assert [row[0] for row in compared((trajectory(), now), (trajectory(), before)).failures] == ["new"]


def test_another_baseline_is_not_blamed_on_the_candidate():
    changed = trajectory(parameter=torch.ones(3))
    now = compared((changed, changed), (trajectory(), trajectory()))
    assert now.verdict == "different"
    assert len(now.failures) == 1
    assert "the baseline differs" in now.failures[0][3]
    assert "nothing follows for the patch" in now.notes[-1]


def test_the_same_bits_pass():
    now = compared((trajectory(), trajectory()), (trajectory(), trajectory()))
    assert (now.verdict, now.failures) == ("equal", [])


def test_of_an_earlier_run_the_newest_that_can_be_compared_is_taken():
    """What cannot be compared is a usage error, in test_convergence_bitwise.py."""
    whole = observed(trajectory(), trajectory())
    assert bitwise.earlier([whole, record(versions={"torch": "2.11.0"})], whole.case, whole.environment) is whole
