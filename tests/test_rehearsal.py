"""What a step launches is foreseen before it begins, so that threads compile it together."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import peft
import pytest
import torch

import liger_kernels
from liger_kernels.ops import launches, observe_logits_grad, reset_launches
from liger_kernels.ops.runtime import ahead, dispatch
from liger_kernels.ops.runtime.launcher import _program_key
from liger_kernels.patching.rehearsal import ForeseenStep, foreseen
from tests.patching_checks import DEVICE, batch, tiny

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def program(kernel: Any, args: Any, kwargs: Any) -> Any:
    """Which program of Triton's a launch needs, wherever its tensors lie."""
    like = [torch.empty(64, dtype=a.dtype, device=DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
    return kernel.__name__, _program_key(kernel, 0, tuple(like), kwargs)[1:]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The programs that run."""
    found: set[Any] = set()

    def noted(start: Any) -> Any:
        def noting(kernel: Any, grid: Any, device: Any, args: Any, kwargs: Any) -> Any:
            found.add(program(kernel, args, kwargs))
            return start(kernel, grid, device, args, kwargs)

        return noting

    for name in ("_start", "start_kept"):
        monkeypatch.setattr(dispatch, name, noted(getattr(dispatch, name)))
    return found


def foreseen_programs(model: Any, step: ForeseenStep) -> set[Any]:
    noted: dict[Any, Any] = {}
    with ahead.foreseeing(DEVICE, noted):
        for call in foreseen(model, step):
            call()
    return {program(kernel, args, kwargs) for kernel, many in noted.items() for _, args, kwargs in many}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_step_launches_what_was_foreseen(family: str, dtype: torch.dtype, launched: set[Any]) -> None:
    model = tiny(family).to(dtype)
    liger_kernels.patch(model)
    inputs = batch(rows=2, length=16)
    expected = foreseen_programs(model, ForeseenStep(2, 16, dtype, dtype))
    assert not launched, "who foresees launches nothing"
    model(**inputs, use_cache=False).loss.backward()
    missing = {name for name, _ in launched - expected}
    # Only Gemma 2's forward knows of its soft-cap, and of the gradients that eager attention transposes.
    unknown = {"_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel", "_rope_kernel"}
    of_attention = {"_rope_kernel"} if DEVICE.type == "cuda" else set()  # so does that of a GPU, in float32
    assert missing <= (unknown if family == "gemma2" else of_attention)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_what_adapters_launch_is_foreseen(dtype: torch.dtype, launched: set[Any]) -> None:
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", lora_bias=True)
    model = peft.get_peft_model(tiny("llama").to(dtype), adapter)
    liger_kernels.patch(model)
    expected = foreseen_programs(model.get_base_model(), ForeseenStep(2, 16, dtype, dtype))
    model(**batch(rows=2, length=16), use_cache=False).loss.backward()
    assert not {name for name, _ in launched - expected if "lora" in name}
    assert any("lora" in name for name, _ in launched)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_what_an_adapted_head_launches_is_foreseen(dtype: torch.dtype, launched: set[Any]) -> None:
    model = peft.get_peft_model(tiny("llama").to(dtype), peft.LoraConfig(r=4, target_modules=["lm_head"]))
    liger_kernels.patch(model)
    expected = foreseen_programs(model.get_base_model(), ForeseenStep(2, 16, dtype, dtype))
    model(**batch(rows=2, length=16), use_cache=False).loss.backward()
    assert not {name for name, _ in launched - expected if "lora" in name or "cross_entropy" in name}
    assert any("lora" in name for name, _ in launched)


def test_who_foresees_changes_nothing() -> None:
    """Neither counts of launches nor random numbers; no observer hears of it; and a tensor without memory runs the
    reference as before."""
    model = tiny("llama")
    liger_kernels.patch(model)
    reset_launches()
    before = torch.random.get_rng_state()
    heard: list[Any] = []
    with observe_logits_grad(lambda start, grad: heard.append(grad)):
        assert "_cross_entropy_bwd_kernel" in {
            name for name, _ in foreseen_programs(model, ForeseenStep(2, 16, FLOAT32, FLOAT32))
        }
    assert heard == []
    assert not launches()
    assert torch.equal(torch.random.get_rng_state(), before)
    x = torch.empty(3, 8, device="meta")
    assert liger_kernels.ops.rms_norm(x, None, 1e-6).device.type == "meta"


def test_a_module_that_lacks_what_a_recipe_reads_is_no_obstacle() -> None:
    model = tiny("llama")
    liger_kernels.patch(model)
    del model.config.num_key_value_heads
    assert {name for name, _ in foreseen_programs(model, ForeseenStep(2, 16, FLOAT32, FLOAT32))} > {
        "_rms_norm_fwd_kernel"
    }


@pytest.mark.skipif(DEVICE.type != "cuda", reason="programs are compiled for a GPU")
def test_on_a_gpu_the_first_step_is_the_one_that_others_are() -> None:
    first, other = tiny("llama"), tiny("llama")
    for model in (first, other):
        liger_kernels.patch(model)
    other(**batch()).loss.backward()
    other.zero_grad()
    losses = [model(**batch()).loss for model in (first, other)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_a_first_launch_waits_until_triton_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads would make its driver twice."""
    ready: Future[None] = Future()
    monkeypatch.setattr(ahead, "_waking", ready)
    launching = threading.Thread(target=ahead.wait_for, args=(object(),))
    launching.start()
    launching.join(0.2)
    assert launching.is_alive()
    ready.set_result(None)
    launching.join()


def test_who_foresees_reads_no_computed_weight() -> None:
    """A parametrisation computes at each read; a spectral norm changes its vectors, too."""
    model = tiny("llama")
    liger_kernels.patch(model)
    parts = [model.lm_head, model.model.norm, model.model.layers[0].mlp.down_proj]
    reads = []

    class Counts(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            reads.append(weight.shape)
            return weight

    for part in parts:
        torch.nn.utils.parametrize.register_parametrization(part, "weight", Counts())
    reads.clear()
    assert foreseen_programs(model, ForeseenStep(2, 16, FLOAT32, FLOAT32))
    assert reads == []
