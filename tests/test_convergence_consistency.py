"""Trainer and rollout: a patch leaves their log-probabilities as near to each other, and to float64, as they were."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from convergence import check_consistency
from convergence.__main__ import main
from convergence.arms.quantities import DECODING, DIFFERENCES, LOG_PROBS, LOSS, PREFILL, TRAINING_FORWARD
from convergence.arms.trajectory import Trajectory
from convergence.case import prove
from convergence.consistency.judge import Figures, described, differences, judge
from convergence.consistency.paths import PATHS, at
from convergence.report import html, report
from convergence.report.records import Case, Record, load_folder
from convergence.trainers.material import save
from tests.suite import ISOLATED, assert_refused

OURS = "convergence.patches:fused_linear"
FAULTS = "tests.convergence_faults"
LARGEST, MEAN, KL, SHARE = DIFFERENCES


def named(comparison: str) -> str:
    """The quantity of that comparison in a record."""
    return f"log-probabilities of {comparison}"


def consistency(patch: str, model: str = "llama-tied", dtype: str = "float32") -> Record:
    return prove(Case(model, dtype, patch, "consistency", "cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_patch_is_equal_and_every_figure_is_judged(dtype):
    record = consistency(OURS, dtype=dtype)
    assert record.verdict == "equal", record.reason
    assert len(record.differences) == 5
    for name, arms in record.differences.items():
        for arm in ("unpatched", "patched"):
            assert list(arms[arm]) == list(DIFFERENCES)
        for statistic in DIFFERENCES:
            (judged,) = (s for s in record.statistics if (s.quantity, s.statistic) == (named(name), statistic))
            assert judged.value == arms["patched"][statistic] <= judged.bound
    assert record.differences["decoding against float64"]["patched"][LARGEST] > 0
    assert record.launches, "the patch ran"


def test_a_fault_in_decoding_alone_is_different_in_decoding_alone():
    record = consistency(f"{FAULTS}:rope_one_off_in_decoding")
    assert record.verdict == "different"
    failed = {failure.key for failure in record.failures}
    in_decoding = {named("decoding against float64"), named("training forward against decoding")}
    assert failed == {(quantity, statistic) for quantity in in_decoding for statistic in DIFFERENCES}
    assert record.blame == [], "no step is trained again that never was one"


def arms(change=lambda values: None, honest: float = 1e-3, outlier: float = 0.0, dtype: torch.dtype = torch.float32):
    """Truths and honest arms whose log-probabilities are off by noise, and one token by ``outlier``; and a candidate
    that is changed after that."""

    def noise(shape: torch.Size) -> torch.Tensor:
        found = honest * torch.randn(shape, dtype=torch.float64, generator=generator)
        found[0, 0] += outlier
        return found

    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(7):
        truth, arm = Trajectory(), Trajectory()
        exact = -4 * torch.rand(4, 50, dtype=torch.float64, generator=generator)
        for path in PATHS:
            truth.record(LOG_PROBS, at(path), exact)
            arm.record(LOG_PROBS, at(path), (exact + noise(exact.shape)).to(dtype))
        for trajectory in (truth, arm):
            trajectory.record(LOSS, at(TRAINING_FORWARD), torch.tensor(2.0))
        made.append((truth, arm))
    truth, candidate = made.pop()
    pairs = [(truth, made[0][1]), *made[1:]]
    for path in PATHS:  # the baseline is of the candidate's own truth
        own = truth.values[LOG_PROBS][at(path)]
        pairs[0][1].values[LOG_PROBS][at(path)] = (own + noise(own.shape)).to(dtype)
    change(candidate.values[LOG_PROBS])
    return pairs, candidate


def failed(change, **options) -> set[tuple[str, str]]:
    pairs, candidate = arms(change, **options)
    found = judge(pairs, candidate, torch.float32).failures
    return {(failure.quantity.removeprefix(named("")), failure.finding) for failure in found}


def test_noise_like_pytorchs_own_is_equal():
    assert failed(lambda values: None) == set()
    assert failed(lambda values: None, honest=0.0) == set()


def test_one_token_that_is_off_fails_by_the_largest_difference():
    def change(values):
        values[at(PREFILL)][2, 7] += 8e-3  # inside of 1 ± 0.01, and nothing in the mean

    assert (f"{PREFILL} against float64", LARGEST) in (found := failed(change))
    assert {statistic for _, statistic in found} == {LARGEST}


def test_tokens_that_are_all_a_little_off_fail_by_the_mean_and_the_kl():
    def change(values):
        values[at(TRAINING_FORWARD)] += 2.6e-3

    found = failed(change)
    assert (f"{TRAINING_FORWARD} against float64", MEAN) in found
    assert (f"{TRAINING_FORWARD} against float64", KL) in found
    assert not {LARGEST, SHARE} & {statistic for _, statistic in found}


def test_tokens_that_leave_the_interval_fail_by_their_share():
    def change(values):
        values[at(DECODING)][1, :10] += 0.012  # nearer than the one that is outside in every arm

    found = failed(change, outlier=0.03)
    assert found == {(f"{DECODING} against float64", SHARE), (f"{TRAINING_FORWARD} against {DECODING}", SHARE)}


def test_what_is_missing_or_no_number_or_of_another_shape_is_different():
    def drop(values):
        del values[at(DECODING)]

    def poison(values):
        values[at(DECODING)][0, 0] = float("nan")

    def cut(values):
        values[at(DECODING)] = values[at(DECODING)][:, 1:]

    for change, statistic in ((drop, "missing"), (poison, "finite"), (cut, "shape")):
        assert failed(change) == {("log-probabilities", statistic)}
    for change in (drop, cut):
        pairs, candidate = arms(change)
        found = described(pairs[0][0], {"unpatched": pairs[0][1], "patched": candidate})
        assert {arm for by_arm in found.values() for arm in by_arm} == {"unpatched"}


def test_the_figures_are_those_of_importance_ratios():
    d = torch.tensor([0.0, 0.02, -0.005, -0.03], dtype=torch.float64)
    ratio = d.exp()
    found = Figures.of(d)
    assert found.largest == pytest.approx(0.03)
    assert found.mean == pytest.approx(0.01375)
    assert found.kl == pytest.approx(float((ratio - 1 - d).mean()))
    assert found.share == 0.5


def test_a_trainer_is_compared_with_its_own_rollout():
    pairs, candidate = arms(honest=0.0, dtype=torch.float64)
    for values in candidate.values[LOG_PROBS].values():
        values -= 0.5
    found = differences(pairs[0][0], candidate)
    assert float((found["decoding against float64"] + 0.5).abs().max()) < 1e-12
    assert float(found["training forward against decoding"].abs().max()) == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    save("llama", folder)
    return folder


SMALL = ("--device", "cpu", "--dtypes", "float32", "--rows", "2", "--length", "20", "--layers", "1", *ISOLATED)


def test_the_command_judges_a_checkpoint_and_its_record_has_a_row_in_every_report(llama, tmp_path, capsys):
    given = ("--patch", f"{OURS},{FAULTS}:rope_one_off_in_decoding", f"--records={tmp_path}")
    assert main(["consistency", str(llama), *given, *SMALL]) == 1
    shown = capsys.readouterr().out
    assert "llama?layers=1" in shown
    assert "training forward against decoding  unpatched" in shown
    records = load_folder(tmp_path)
    assert {record.patch.rpartition(":")[2]: record.verdict for record in records} == {
        "fused_linear": "equal",
        "rope_one_off_in_decoding": "different",
    }
    markdown, page = report.markdown(records), html.page(records)
    assert f"| {' | '.join(DIFFERENCES)} |" in markdown
    assert "error ratio" not in markdown
    for text in (markdown, page, report.junit(records)):
        assert "decoding against float64" in text
        assert "consistency" in text
    assert page.count("<h3>Log-probabilities</h3>") == 2


def test_the_library_returns_the_record_or_raises_with_the_figures(llama):
    record = check_consistency(str(llama), device="cpu", layers=1, rows=2, length=20)
    assert (record.dtype, record.profile, record.verdict) == ("float32", "consistency", "equal")
    with pytest.raises(AssertionError, match=r"decoding against float64 +patched"):
        check_consistency("llama-tied", f"{FAULTS}:rope_one_off_in_decoding", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("lama",), {}, "model 'lama': there is no such file; allowed are a checkpoint and .*llama-tied"),
        ((3,), {}, "model is a int; it takes a mini model's name or a path"),
        (("llama-tied", len), {}, "patch is a builtin_function_or_method; it takes a name, module:function"),
        (("llama-tied", "nothing"), {}, "'nothing' is not of the form package.module:function"),
        (("llama-tied",), {"dtype": "float8"}, "dtype is 'float8'; allowed are float32, bfloat16, float16"),
        (("llama-tied",), {"device": "tpu"}, "device is 'tpu'; allowed are cpu and cuda"),
        (("llama-tied",), {"seed": -1}, "seed is -1; it takes a whole number from 0 on"),
        (("llama-tied",), {"timeout": 0}, "timeout is 0; it takes a number of seconds above 0"),
        (("llama-tied",), {"rows": 2}, "rows is for a checkpoint, and 'llama-tied' is a mini model"),
        (("llama-tied",), {"steps": 2}, "unknown argument 'steps'"),
        ((".",), {"rows": "2"}, "rows is '2'; it takes a whole number"),
        ((".",), {}, "has no config.json"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check_consistency(*arguments, **{"device": "cpu", **options})


def test_a_length_that_a_checkpoint_cannot_have_is_refused(llama):
    with pytest.raises(ValueError, match=r"--length 3: allowed for .* is 16 to"):
        check_consistency(str(llama), device="cpu", length=3)


def test_options_that_make_no_sense_are_refused(llama, capfd):
    assert_refused(capfd, ["--profile consistency trains in no set-up"], "--profile", "consistency", "--setups", "ddp")
    assert_refused(capfd, ["is a checkpoint; give it as --checkpoint PATH"], "--profile", "consistency", str(llama))


STAND_IN = '''
"""Scores a text as the engines do, on transformers."""
import os
import types

import torch
import transformers


def scored(path, rows, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, torch_dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, :-1].float().log_softmax(-1)
    return logits.gather(-1, torch.tensor(rows)[:, 1:, None]).squeeze(-1).tolist()


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, dtype, **_):
        self.model, self.dtype = model, dtype

    def generate(self, prompts, params):
        assert params.prompt_logprobs == 0
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        for row, found in zip(rows, scored(self.model, rows, self.dtype)):
            places = [{token: types.SimpleNamespace(logprob=number)} for token, number in zip(row[1:], found)]
            yield types.SimpleNamespace(prompt_logprobs=[None, *places])


class Engine:
    def __init__(self, model_path, dtype, **_):
        self.model, self.dtype = model_path, dtype

    def generate(self, input_ids, sampling_params, return_logprob, logprob_start_len):
        assert return_logprob and logprob_start_len == 0
        found = scored(self.model, input_ids, self.dtype)
        rows = [[(None, row[0], None), *((p, t, None) for t, p in zip(row[1:], f))] for row, f in zip(input_ids, found)]
        return [{"meta_info": {"input_token_logprobs": row}} for row in rows]

    def shutdown(self):
        pass


def too_short(path, ids, dtype):
    return torch.zeros(len(ids), 3)


def dies(path, ids, dtype):
    os._exit(3)
'''


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in place of vLLM and SGLang, which have the functions and classes that are called."""
    for name in ("vllm", "sglang", "stand_in"):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_is_a_path_of_its_own(engine, engines, llama):
    record = check_consistency(str(llama), device="cpu", rows=2, length=20, rollout=engine)
    off = record.differences[f"{engine} against float64"]
    assert off["unpatched"] == off["patched"]
    assert 0 < off["patched"][LARGEST] < 1e-4
    assert 0 < record.differences[f"training forward against {engine}"]["patched"][MEAN] < 1e-4
    assert len([s for s in record.statistics if engine in s.quantity]) == 2 * len(DIFFERENCES)


def test_a_trainer_that_a_patch_moves_away_from_its_engine_is_different(engines, llama):
    options = {"device": "cpu", "rows": 2, "length": 20, "rollout": "vllm"}
    with pytest.raises(AssertionError, match=r"training forward against vllm +initial: vllm +mean difference"):
        check_consistency(str(llama), "tests.convergence_faults:head_too_large_in_training", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": "vlm"}, "--rollout 'vlm' is unknown; allowed are vllm, sglang and the name of an adapter"),
        ({"rollout": "vllm", "layers": 1}, "--rollout vllm: runs the whole checkpoint; leave --layers out"),
        ({"rollout": "stand_in:too_short"}, r"it returned \[2, 3\]; allowed is a tensor \[2, 19\]"),
        ({"rollout": "stand_in:dies"}, "--rollout stand_in:dies: gives no log-probabilities .*exit code 3"),
        ({"rollout": "stand_in:absent"}, "'stand_in:absent' cannot be imported"),
    ],
)
def test_an_engine_that_gives_none_is_refused(options, message, engines, llama):
    with pytest.raises(ValueError, match=message):
        check_consistency(str(llama), device="cpu", **{"rows": 2, "length": 20, **options})


def test_an_engine_that_is_not_installed_is_refused(llama, capfd):
    if importlib.util.find_spec("vllm") is None:
        given = ("--profile", "consistency", "--checkpoint", str(llama), "--rollout", "vllm", "--device", "cpu")
        assert_refused(capfd, ["--rollout vllm: the package is not installed here"], *given)
    assert_refused(capfd, ["--rollout is for"], "--checkpoint", str(llama), "--rollout", "vllm", "--device", "cpu")
