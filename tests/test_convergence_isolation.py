"""Somebody else's patch is judged in a process of its own: it may change that process, end it or hang it, and neither
the verdict on it nor on the next one suffers."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from convergence.arms import isolate
from convergence.arms.candidate import Candidate, load_patch, train_candidate
from convergence.arms.pristine import remember_upstream
from convergence.arms.quantities import END, LOSS, SGD, Moment
from convergence.arms.train import train
from convergence.arms.trajectory import Run, Trajectory, build
from convergence.case import Case, inputs, prove, references, train_case
from convergence.judge import bitwise, tolerance
from convergence.judge.arms import by_more
from convergence.judge.compare import compare
from convergence.judge.verdict import Verdict
from convergence.judge.verdict import judged as judged_number
from convergence.models.rows import find
from convergence.patches import BUILT_IN
from convergence.report import progress
from convergence.report.records import Record
from convergence.report.report import failure
from tests.isolation_patches import KEPT
from tests.suite import suite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def judged(patch: str, scope: str = "instance", timeout: float = isolate.TIMEOUT, blames: bool = False) -> Record:
    name = patch if ":" in patch else f"tests.isolation_patches:{patch}"
    case = Case("llama-untied", "float32", name, "plain", DEVICE, scope=scope)
    outcome = prove(case, timeout, blames)
    assert remember_upstream().changes() == []
    return Record.of(case, outcome)


def found(record: Record) -> set[tuple[str, str]]:
    return {(quantity, statistic) for quantity, _, statistic, *_ in record.failures}


PATCHED_TOO, NOT_PATCHED = {("other models", "patched too")}, {("candidate", "not patched")}


@pytest.mark.slow
def test_a_patch_of_one_model_that_changes_a_class_fails_and_spares_the_next_case():
    record = judged("class_forward")
    assert record.verdict == "different"
    assert found(record) == PATCHED_TOO
    assert "modeling_llama.LlamaRMSNorm.forward" in record.reason
    assert judged("tests.convergence_faults:honest").verdict == "equal"
    assert judged(BUILT_IN[0]).verdict == "equal"


@pytest.mark.parametrize(
    ("value", "near", "asked"), [(0.9, 1.25, False), (1.2, 1.25, True), (1.3, 1.25, False), (9.0, math.inf, True)]
)
def test_a_number_that_is_near_its_bound_is_judged_by_more_replicas(value: float, near: float, asked: bool) -> None:
    seen: list[list[int]] = []

    def compared(pairs: list[int]) -> Verdict:
        seen.append([*pairs])
        return Verdict.of(judged_number(LOSS, Moment(SGD, END), "gain", value, 1.0))

    assert by_more([1], lambda: [2, 3], compared, near).passed == (value < 1)
    assert seen == [[1], *([[1, 2, 3]] if asked else [])]


@pytest.mark.slow
def test_what_is_wrong_is_wrong_by_more_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "MANY_REPLICAS", tolerance.REPLICAS + 2)
    references.cache_clear()
    record = judged("tests.convergence_faults:one_gradient_scaled")
    assert (record.verdict, record.replicas) == ("different", tolerance.REPLICAS)
    monkeypatch.setattr(tolerance, "NEAR", math.inf)
    record = judged("tests.convergence_faults:one_gradient_scaled")
    assert (record.verdict, record.replicas) == ("different", tolerance.REPLICAS + 2)
    references.cache_clear()


@pytest.mark.slow
def test_a_model_that_the_patch_returns_takes_the_place_of_the_one_that_it_was_given() -> None:
    assert judged("makes_a_model").verdict == "equal"
    record = judged("makes_a_model_of_another_norm", blames=True)
    assert record.verdict == "different"
    assert not found(record) & (PATCHED_TOO | NOT_PATCHED)
    assert [row["note"] for row in record.blame] == ["the patch returned another model: no part of it can be left out"]


@pytest.mark.parametrize("patch", ["makes_a_copy", "patches_one_and_makes_a_copy"])
def test_a_returned_model_that_nobody_patched_is_not_patched(patch: str) -> None:
    record = judged(patch)
    assert record.verdict == "different"
    assert found(record) >= NOT_PATCHED


@pytest.mark.slow
@pytest.mark.parametrize("wakes", [False, True])
def test_where_an_import_starts_the_gpus_driver_no_process_is_forked(wakes: bool, tmp_path: Path) -> None:
    """The driver does not survive a fork. A package of this test stands for one that starts it."""
    source = f"""if True:
        import torch
        def init():
            if {wakes}:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        torch.cuda.init = init
    """
    (tmp_path / "package_that_wakes.py").write_text(source)
    program = """if True:
        import torch
        from convergence.arms import isolate
        torch.cuda.is_available = lambda: True
        isolate.preloaded = lambda: ["package_that_wakes"]
        print(isolate._context().get_start_method())
    """
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])},
        capture_output=True,
        text=True,
        check=True,
    )
    can_fork = not wakes and "forkserver" in multiprocessing.get_all_start_methods()
    assert found.stdout.split()[-1] == ("forkserver" if can_fork else "spawn")


def test_a_change_that_no_fingerprint_sees_shows_in_an_unpatched_model():
    record = judged("method_of_tensors")
    assert found(record) == PATCHED_TOO, failure(record)
    assert "what an unpatched model computes" in record.reason


@pytest.mark.parametrize(
    ("patch", "shown"),
    [
        ("switches_benchmarks_on", "torch.backends.cudnn.benchmark (False before, True now)"),
        ("makes_algorithms_deterministic", "whether algorithms are deterministic"),
        ("sets_precision", "the precision of float32 products (highest before, medium now)"),
        ("sets_a_variable", "the variable TOKENIZERS_PARALLELISM"),
        ("goes_elsewhere", "the working directory"),
        ("hooks_all_modules", "hooks of all modules"),
        ("seeds", "random numbers, which the patch drew or set"),
        ("draws", "random numbers, which the patch drew or set"),
        ("replaces_a_function", "torch.svd"),
        ("replaces_a_class", "transformers.LlamaForCausalLM"),
    ],
)
def test_what_a_patch_of_one_model_changes_for_the_whole_process_fails(patch: str, shown: str) -> None:
    """Though it computes what it should. Of a patch of classes it is noted."""
    record = judged(patch)
    assert found(record) >= PATCHED_TOO, failure(record)
    assert shown in " ".join(part for row in record.failures for part in row)
    if patch in ("switches_benchmarks_on", "seeds"):
        noted = " ".join(judged(f"tests.isolation_patches:{patch}", "class").notes)
        assert "changed for the whole process" in noted
        assert shown in noted


@pytest.mark.parametrize(
    ("patch", "shown"),
    [
        (
            "renames_a_key",
            ("before training: model.norm.weight is missing", "before training: model.norm.scale is new"),
        ),
        ("adds_a_buffer", ("before training: model.norm.cache is new",)),
        ("adds_a_buffer_later", ("after training: model.norm.cache is new",)),
        ("reorders_the_keys", ("before training: the keys are in another order",)),
        ("widens_a_weight", ("before training: model.norm.weight has (100,) torch.float64 instead of",)),
        ("splits_a_weight", ("lm_head.weight has memory of lm_head.weight instead of memory of model.embed_tokens",)),
        (
            "shares_a_weight",
            ("layernorm.weight has memory of model.layers.0.input_layernorm.weight instead of memory",),
        ),
    ],
)
def test_what_a_patch_changes_in_the_state_dict_is_named(patch: str, shown: tuple[str, ...]) -> None:
    layout = laid_out(load_patch(f"tests.isolation_patches:{patch}"))
    assert all(any(part in difference for difference in layout) for part in shown), layout
    assert laid_out(lambda model: None) == []


def laid_out(patch: Callable[[Any], Any]) -> list[str]:
    """What is said of the state_dict of a candidate that took one step."""
    given = inputs("llama-tied", "bfloat16", "plain", 0)
    run = given.run(torch.bfloat16, torch.device("cpu"), patch=patch, only=frozenset({"plain 0"}))
    return train_candidate(run, list).layout


def test_a_model_of_a_patched_class_has_the_state_dict_of_others() -> None:
    given = inputs("llama-untied", "float32", "plain", 0)
    for model, expected in (("llama-untied", []), ("llama-bias", ["before training: lm_head.bias is new"])):
        construct = functools.partial(find(model).build, 0)
        run = given.run(torch.float32, torch.device("cpu"), patch=lambda model: None, construct=construct)
        assert train_candidate(run, list, lambda run: built(run)).layout[:1] == expected


def built(run: Run) -> Trajectory:
    """What a training begins with. Weights of other names would end it there."""
    with contextlib.suppress(RuntimeError):
        return Trajectory(model=build(run))
    return Trajectory(model=run.template)


def test_another_state_dict_fails() -> None:
    """Though every number is right."""
    assert ("state_dict", "changed") in found(judged("adds_a_buffer"))


@pytest.mark.parametrize(
    ("patch", "shown"),
    [
        ("keeps_logits", "the logits stayed after the step"),
        ("keeps_hidden_states", "what entered model.norm stayed after the step"),
        ("keeps_outputs", "the outputs, the loss, the graph of the loss"),
        ("keeps_the_graph", "the graph of the loss stayed after the step"),
        ("keeps_a_cycle", "stayed until Python's collector ran"),
    ],
)
def test_what_a_patch_keeps_of_a_step_is_named(patch: str, shown: str) -> None:
    """Beyond a collection it fails. Until then it is noted, because memory comes back."""
    try:
        candidate, honest = one_step(load_patch(f"tests.isolation_patches:{patch}")), one_step(lambda model: None)
    finally:
        KEPT.clear()
    assert [shown in remark.what for remark in candidate.alive] == [True], candidate.alive
    assert honest.alive == []
    verdict = compare([(honest, honest)] * 3, candidate, torch.float32)
    if patch == "keeps_a_cycle":
        assert verdict.passed, verdict.failures
        assert any(shown in note for note in verdict.notes)
    else:
        assert {failure[2] for failure in verdict.failures} == {"kept alive"}


@pytest.mark.parametrize("patch", BUILT_IN)
def test_ours_keeps_nothing_of_a_step(patch: str) -> None:
    assert one_step(load_patch(patch)).alive == []


def one_step(patch: Callable[[Any], Any]) -> Trajectory:
    """What a candidate showed that took one step, without Python's collector."""
    given = inputs("llama-untied", "float32", "plain", 0)
    gc.disable()
    try:
        result = train(given.run(torch.float32, torch.device("cpu"), patch=patch, only=frozenset({"plain 0"})))
    finally:
        gc.enable()
    result.model = None
    return result


def test_a_patch_of_classes_is_judged_on_a_model_that_is_built_after_it():
    record = judged("class_replaced", "class")
    assert record.verdict == "equal", failure(record)
    assert record.census == {"OtherRMSNorm": 5}
    assert record.scope == "class"
    assert any("modeling_llama.LlamaRMSNorm" in note for note in record.notes)
    assert judged("class_forward", "class").verdict == "equal"
    assert "error ratio" in {statistic for _, statistic in found(judged("class_replaced_by_a_wrong_one", "class"))}


def test_logits_that_a_patch_of_classes_does_not_return_are_noted():
    name = "tests.isolation_patches:class_without_logits"
    case = Case("llama-untied", "float32", name, "hard", DEVICE, scope="class")
    record = Record.of(case, prove(case))
    assert record.verdict == "equal", failure(record)
    assert any("the caller reads outputs.logits and finds None" in note for note in record.notes)


@pytest.mark.parametrize(
    ("patch", "scope"),
    [
        ("tools.honest:unpatched", "instance"),
        ("tools.honest:unpatched", "class"),
        ("tests.isolation_patches:another_family", "class"),
        ("tests.convergence_faults:honest", "class"),  # of one model, which is not the one that is built after it
    ],
)
def test_a_patch_that_changes_nothing_of_the_model_fails(patch, scope):
    assert found(judged(patch, scope)) == NOT_PATCHED


@pytest.mark.parametrize(("scope", "verdict"), [("instance", "different"), ("class", "equal")])
def test_importing_the_patch_may_patch(scope, verdict):
    record = judged("tests.isolation_at_import:patch", scope)
    assert record.verdict == verdict, failure(record)
    assert "tests.isolation_at_import" not in sys.modules
    if scope == "instance":
        assert found(record) == PATCHED_TOO


def test_a_patched_model_that_raises_is_different():
    record = judged("raises_in_training", blames=True)
    assert record.verdict == "different"
    assert "TypeError: unexpected keyword argument" in record.reason
    assert "isolation_patches.py" in failure(record)


@pytest.mark.parametrize(
    ("patch", "shown"),
    [("crashes_in_training", "signal SIGSEGV"), ("leaves", "exit code 0"), ("hangs", "ran for more than 1 s")],
)
def test_a_process_that_dies_or_hangs_is_a_verdict(patch, shown):
    record = judged(patch, timeout=1 if patch == "hangs" else isolate.TIMEOUT)
    assert record.verdict == "different"
    assert found(record) == {("candidate", "died")}
    assert shown in record.reason
    if patch == "crashes_in_training":
        assert "the last words" in failure(record)
        assert "isolation_patches.py" in failure(record)  # where it was, as faulthandler says


def train_on_one_step(case: Case) -> Candidate:
    """In every phase; all that is observed is there."""
    given = inputs(case.model, case.dtype, case.profile, case.seed)
    return train_case(case, replace(given, steps=given.steps[:1]))


@pytest.mark.slow
def test_what_comes_back_is_bit_for_bit_what_is_trained_here():
    case = Case("llama-untied", "bfloat16", BUILT_IN[0], "plain", DEVICE)
    here, there = train_on_one_step(case), isolate.call(train_on_one_step, case)
    assert bitwise.digest(here.trajectory) == bitwise.digest(there.trajectory)
    assert here.launches == there.launches
    assert here.report == there.report
    assert here.report.replaced


def numerics() -> tuple[object, ...]:
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def leave_behind() -> tuple[int, bool]:
    """This process, and whether an earlier call can be seen in it."""
    seen = hasattr(torch, "left_behind")
    torch.left_behind = True  # type: ignore[attr-defined]
    return os.getpid(), seen


def test_a_call_runs_elsewhere_with_the_same_numerics_and_leaves_nothing():
    (first, _), (second, seen) = isolate.call(leave_behind), isolate.call(leave_behind)
    assert len({first, second, os.getpid()}) == 3
    assert not seen
    assert not hasattr(torch, "left_behind")
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(threads + 1)
    try:
        assert isolate.call(numerics) == numerics()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def test_a_call_does_not_run_the_script_again_that_makes_it(tmp_path, monkeypatch):
    script = ModuleType("__main__")
    script.__file__, script.__spec__ = str(tmp_path / "script.py"), None
    (tmp_path / "script.py").write_text("raise AssertionError('it is run again')\n")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert isolate.call(os.getpid) != os.getpid()
    assert sys.modules["__main__"] is script


def say(*messages: tuple[Any, ...]) -> int:
    for message in messages:
        progress._listener.get()(message)
    return len(messages)


def test_what_a_process_is_at_is_heard_here_and_does_nothing_on_a_terminal() -> None:
    heard: list[tuple[Any, ...]] = []
    given = [("expect", 3), ("begin", "candidate\x1b[2J\n" + "x" * 500), ("reach", "initial, a", 1, 4)]
    with progress.told_to(heard.append):
        assert isolate.call(say, *given) == 3
    assert [heard[0], heard[2]] == [given[0], given[2]]
    assert heard[1] == ("begin", ("candidate\\x1b[2J " + "x" * 500)[: progress.LONGEST])


@pytest.mark.parametrize(
    "message", [("begin", 1), ("reach", "a", 5, 4), ("reach", "a", 0, 0), ("expect", 0), ("end",), "begin"], ids=str
)
def test_what_no_arm_says_ends_the_call(message: Any) -> None:
    with progress.told_to(lambda message: None), pytest.raises(isolate.ProcessDied, match="it says what no arm says"):
        isolate.call(say, message)


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def raise_unpicklable() -> None:
    raise Unpicklable("can", "not")


def test_what_a_call_raises_arrives_with_its_traceback():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        isolate.call(int, "x")
    assert "in _run" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="Unpicklable: cannot"):
        isolate.call(raise_unpicklable)


@pytest.mark.parametrize("scope", ["instance", "class"])
def test_the_suite_says_that_a_patch_cannot_run_and_fails(scope, capfd):
    chosen = ("--models", "llama-untied", "--dtypes", "float32", "--profile", "plain", "--device", DEVICE)
    patch = ("--patch", "tests.isolation_patches:has_no_kernel", "--scope", scope)
    assert suite(*chosen, *patch) == pytest.ExitCode.TESTS_FAILED
    output = "".join(capfd.readouterr())
    for part in (
        "llama-untied/float32/has_no_kernel: cannot run",
        "the patch cannot run here",
        "NotImplementedError: no kernel for this device",
        "in has_no_kernel",
    ):
        assert part in output


def _imported():
    return [
        name
        for name in ("llama", "gemma", "qwen3_next")
        if f"transformers.models.{name}.modeling_{name}" in sys.modules
    ]


def test_what_may_wake_the_driver_is_not_imported_before_the_fork():
    """fla does so when it is imported, which Qwen3-Next's module does where it is installed: no process that is forked
    after that can use a GPU."""
    assert isolate.call(_imported) == ["llama", "gemma"]
