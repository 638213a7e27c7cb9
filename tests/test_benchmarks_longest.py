"""``python -m benchmarks.longest`` without a GPU: the search, the table, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import longest
from benchmarks.longest import GIB, STEP, Steps, job_of


def steps(capacity: int, bytes_of: Any) -> Steps:
    """Whose steps take ``bytes_of`` tokens instead of running."""
    model = torch.nn.Linear(1, 1)
    found = Steps(model, job_of("lora", "ours", tiny=True))
    found.limited(capacity, lambda tried: None)

    def peak(tokens: int) -> int:
        taken = bytes_of(tokens)
        return found.known({"tokens": tokens, "bytes": taken if taken <= found.capacity else None, "s": 1.0})

    found.peak = peak
    return found


@pytest.mark.parametrize("slope", [100, 5000, 70000])
def test_a_line_is_found_with_few_steps(slope: int) -> None:
    """Steps near the limit take minutes on a GPU, and those that run out of memory tell no bytes."""
    capacity = 2**30
    one = steps(capacity, lambda tokens: 10**8 + slope * tokens)
    found = longest.longest(one.peak, capacity, STEP)
    expected = (capacity - 10**8) // slope // STEP * STEP
    assert found == min(expected, 65535 * STEP)
    assert len(one.tried) <= 10


@pytest.mark.parametrize("most", [None, 400 * STEP + 5])
def test_a_larger_limit_goes_on_from_a_smaller_one(most: int | None) -> None:
    """Each arm is loaded once, and what fitted into less memory is not tried again."""
    one, asked = steps(2**28, lambda tokens: 10**8 + 900 * tokens), []
    longest.longest(one.peak, 2**28, STEP)
    assert any(tried["bytes"] is None for tried in one.tried)
    known, peak = one.limited(2**30, lambda tried: None), one.peak
    assert known
    assert all(size == 10**8 + 900 * tokens for tokens, size in known.items())
    one.peak = lambda tokens: asked.append(tokens) or peak(tokens)
    found = longest.longest(one.peak, one.capacity, STEP, known, most)
    assert found == min((2**30 - 10**8) // 900, most or 2**30) // STEP * STEP
    assert len(asked) == (2 if most is None else 1)
    assert not set(asked) & set(known)
    assert max(asked) <= (most or 2**30)


def test_layer_inputs_on_the_host_end_a_search() -> None:
    """262,144 bytes a token in the Llama-3 8B shape, for arms that keep them there."""
    assert longest.most_on_host(job_of("qlora", "ours-offload"), 1) == 4096
    assert longest.most_on_host(job_of("qlora", "unsloth"), 2) == 8192
    assert longest.most_on_host(job_of("qlora", "ours-recompute"), 1) is None
    assert longest.most_on_host(job_of("qlora", "ours-offload"), None) is None


def test_a_length_of_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []

    def step(model: Any, inputs: dict[str, torch.Tensor], context: Any) -> None:
        given.append(tuple(inputs["input_ids"].shape))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(longest.models, "step", step)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    model = torch.nn.Linear(1, 1)
    model.config = longest.configuration(job_of("lora", "ours", tiny=True))
    for sequence in (None, 256):
        one = Steps(model, job_of("lora", "ours", tiny=True), sequence)
        one.limited(2**30, lambda tried: None)
        one.peak(2048)
    assert given == [(1, 2048), (8, 256)]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``searched(arm, limits, ...)``: what a search keeps, of an arm whose steps take 2**14 bytes a token beyond 2**20,
    and the shapes that it tried."""
    model = torch.nn.Linear(1, 1)
    model.config = longest.configuration(job_of("lora", "ours", tiny=True))
    shapes: list[tuple[int, ...]] = []
    room = [0]

    def limit(gib: float) -> int:
        room[0] = int(gib * GIB)
        return room[0]

    def step(model: Any, inputs: dict[str, torch.Tensor], context: Any) -> None:
        if not shapes or shapes[-1] != inputs["input_ids"].shape:
            shapes.append(tuple(inputs["input_ids"].shape))
        if taken() > room[0]:
            raise torch.OutOfMemoryError

    def taken() -> int:
        return 2**20 + 2**14 * shapes[-1][0] * shapes[-1][1]

    def search(name: str, limits: list[float], tokens: Any = None, near: Any = (), **options: Any) -> Any:
        shapes.clear()
        kept: list[Any] = []
        arm = replace(longest.ARMS[name], build=lambda job: model, needs=())
        monkeypatch.setitem(longest.ARMS, name, arm)
        plan = {"job": asdict(job_of("lora", name, tiny=True)), "limits": limits, "tokens": tokens, "near": dict(near)}
        longest.search({**plan, "sequence": None, "host": None, **options}, kept.append)
        return kept[-1], [*shapes]

    monkeypatch.setattr(longest.models, "step", step)
    monkeypatch.setattr(longest.models, "release", lambda: None)
    monkeypatch.setattr(longest, "limit", limit)
    monkeypatch.setattr(longest, "set_adapters", lambda *_: None)
    monkeypatch.setattr(longest, "fallbacks", lambda model: "")
    for name, found in {"get_device_name": "none", "memory_allocated": 0, "max_memory_allocated": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda found=found: taken() if found is None else found)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return search


def most(gib: float, step: int) -> int:
    return (int(gib * GIB) - 2**20) // 2**14 // step * step


def test_each_limit_has_a_row_and_goes_on_from_the_one_before(searched: Any) -> None:
    found, shapes = searched("ours", [2, 1, 4], sequence=768)
    assert {gib: one["most"] for gib, one in found.items()} == {f"{g}": most(g, 1536) for g in (1, 2, 4)}
    assert all(length == 768 for _, length in shapes)
    _, again = searched("ours", [4], sequence=768)
    assert len(shapes) <= len(again) + 2 * 3, "two or three lengths for each further limit"


def test_what_is_calculated_saves_steps_where_a_line_bends() -> None:
    """Bytes a token grow where gradients are no longer the most: a line through two short lengths ends far beyond."""

    def bytes_of(tokens: int) -> int:
        return 65 * 10**9 + 148_000 * tokens + 254_000 * max(0, tokens - 32_000)

    capacity = int(79.4 * GIB)
    tries = {}
    for near in (0, 66_000, 70_000, 76_000):
        one = steps(capacity, bytes_of)
        found = longest.longest(one.peak, capacity, STEP, near=near)
        assert bytes_of(found) <= capacity < bytes_of(found + STEP)
        tries[near] = len(one.tried)
    assert max(tries[66_000], tries[70_000]) <= 5, tries
    assert max(tries.values()) == tries[0] <= 14, tries


def test_what_is_calculated_is_tried_where_it_is_not_on_the_line(searched: Any) -> None:
    for near, tried in ((most(4, 1) // 2, True), (most(4, 1) - STEP, False), (STEP, False), (10**9, False)):
        found, shapes = searched("ours", [4], near={"4": near})
        assert found["4"]["most"] == most(4, STEP)
        assert ((1, near // STEP * STEP) in shapes) == tried, (near, shapes)


def test_a_search_does_not_go_far_beyond_what_fits() -> None:
    """A step beyond it takes as long as one that fits, and may pin twice the host's memory."""

    def bytes_of(tokens: int) -> int:
        return 10**9 + 160_000 * tokens - 60_000 * max(0, tokens - 40 * STEP)

    one = steps(50 * 10**9, bytes_of)
    found = longest.longest(one.peak, one.capacity, STEP)
    assert bytes_of(found) <= one.capacity < bytes_of(found + STEP)
    assert max(tried["tokens"] for tried in one.tried) < 1.3 * found


def test_a_search_and_a_length_end_where_the_hosts_memory_does(searched: Any) -> None:
    """The tiny model's layer inputs take 256 bytes a token."""
    host = 256 * 40_000 / GIB
    found, shapes = searched("ours-offload", [1], host=host)
    assert found["1"]["most"] == 39 * STEP
    assert max(length for _, length in shapes) == 39 * STEP
    assert found["1"]["note"] == "the host's memory ends here"
    for tokens, tried in ((40 * STEP, []), (38 * STEP, [(1, 38 * STEP)])):
        found, shapes = searched("ours-offload", [1], tokens=tokens, host=host)
        assert shapes == tried
    found, _ = searched("ours-offload", [1], tokens=40 * STEP, host=host)
    assert "host" in longest.row(job_of("lora", "ours-offload", tiny=True), "lora", 1, found["1"], None)["note"]


def test_a_process_that_died_is_a_row_of_each_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(module: str, arguments: list[str], **options: Any) -> Any:
        assert options["shows"]
        Path(arguments[-1]).write_text(json.dumps({"24": {"tried": [], "note": ""}}))
        return SimpleNamespace(problem="exit code -9\nkilled")

    monkeypatch.setattr(longest, "run_module", run)
    options = SimpleNamespace(path={"ours": []}, timeout=1)
    found = longest.in_own_process(options, {"job": {"arm": "ours"}, "limits": [24, 80]})
    assert {gib: one["note"] for gib, one in found.items()} == {"24": "", "80": "failed: exit code -9"}


def test_what_is_calculated_grows_with_the_limit() -> None:
    found = longest.calculated(job_of("lora", "ours", tiny=True), [2.25, 2.5])
    assert 0 < found[2.25] < found[2.5]
    assert longest.calculated(job_of("lora", "liger", tiny=True), [4]) == {}


def test_a_gpu_that_others_use_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold would be taken from the limit, and a length would be found that is too short."""
    fraction: list[float] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (63 * GIB, 80 * GIB))
    assert longest.limit(24) == 23 * GIB
    assert fraction == [23 / 80]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, 80 * GIB))
    with pytest.raises(RuntimeError, match=r"14\.0 GiB of this GPU are held outside of PyTorch"):
        longest.limit(24)


def test_the_table_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def start(options: Any, plan: dict[str, Any]) -> dict[str, Any]:
        if plan["job"]["arm"] == "unsloth":
            return {f"{gib:g}": {"note": "absent: unsloth is not installed"} for gib in plan["limits"]}
        assert plan["job"]["trained"] == "full"
        assert [*plan["near"]] == [f"{gib:g}" for gib in plan["limits"]]
        tried = [{"tokens": 4096, "bytes": 3 * GIB, "s": 2.0}, {"tokens": 8192, "bytes": None, "s": None}]
        rest = {"most": 0, "note": "", "where": {"device": "none"}}
        return {f"{gib:g}": {"tried": tried if gib > 1 else tried[1:], **rest} for gib in plan["limits"]}

    result = tmp_path / "result.json"
    words = ["--method", "full", "--tiny", "--arms", "ours,unsloth", "--json", str(result)]
    assert longest.main([*words, "--gpu-memory", "4"], start) == 0
    shown = capsys.readouterr().out
    assert "| full | 4 | ours | 4,096 |" in shown
    assert "absent: unsloth is not installed" in shown
    assert [row["tokens"] for row in json.loads(result.read_text())["rows"]] == [4096, 0]
    assert longest.main([*words, "--gpu-memory", "1,4"], start) == 1
    assert "none of 8192 tokens trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "dora"],
        ["--arms", "theirs"],
        ["--arms", "truth"],
        ["--gpu-memory", "many"],
        ["--gpu-memory", "0"],
        ["--tokens", "0"],
        ["--sequence", "0"],
        ["--host-memory", "0"],
        ["--tokens", "5000", "--sequence", "1024"],
        ["--json", "no/such/folder/file"],
        ["--path", "ours=no/such/folder"],
    ],
)
def test_bad_options(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        longest.main(words)
