"""``python -m benchmarks.longest`` without a GPU: the search, the table, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import longest
from benchmarks.longest import GIB, STEP, Steps, job_of


def steps(capacity: int, bytes_of: Any) -> Steps:
    """Whose steps take ``bytes_of`` tokens instead of running."""
    model = torch.nn.Linear(1, 1)
    found = Steps(model, job_of("lora", "ours", tiny=True), lambda tried: None)
    found.limited(capacity)

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
    known, peak = one.limited(2**30), one.peak
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
        Steps(model, job_of("lora", "ours", tiny=True), lambda tried: None, sequence).peak(2048)
    assert given == [(1, 2048), (8, 256)]


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
