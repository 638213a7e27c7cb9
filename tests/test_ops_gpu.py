"""What only a GPU shows: no op makes the host wait, and a patched model's step can be compiled by Inductor and captured
as a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import liger_kernels
from convergence.arms.float64 import InFloat64
from convergence.judge.tolerance import three_way
from convergence.models.models import MODELS
from liger_kernels.ops.runtime.compiling import INDUCTOR_UP_TO
from tools.sanitized import CALLS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BF16 = torch.bfloat16


@pytest.fixture
def waiting_raises() -> Iterator[Callable[[], None]]:
    """Call it: from then on whatever makes the host wait for the GPU raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_the_host_waits_for_nothing(name: str, waiting_raises: Callable[[], None]) -> None:
    call = CALLS[name]()

    def forward_backward() -> None:
        results = call()
        results = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
        results = [y for y in results if y.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])

    forward_backward()  # compiles
    torch.cuda.synchronize()
    waiting_raises()
    forward_backward()


def test_waiting_is_noticed(waiting_raises: Callable[[], None]) -> None:
    x = torch.ones(4, device="cuda")
    waiting_raises()
    with pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


def step(model: Any, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The loss and the gradients of all parameters."""
    loss = model(input_ids=ids, labels=ids, position_ids=position_ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def check_step(
    found: dict[str, torch.Tensor], own: Any, truth: Any, dtype: torch.dtype, *inputs: Any, chain: int | None = None
) -> None:
    """Assert that a patched model's step is as exact as PyTorch's ``own``. Each of a model's leaves rounds at least
    once."""
    with InFloat64():
        expected = step(truth, *inputs)
    torchs = step(own, *inputs)
    chain = chain or sum(1 for module in own.modules() if not module._modules)
    for (what, exact), result in zip(expected.items(), found.values(), strict=True):
        three_way(result, torchs[what], exact, dtype, what, chain)


@pytest.mark.parametrize("short", [0, 1 << 20])
@pytest.mark.parametrize(
    ("name", "vocab", "kernels"),
    [("llama-untied", 264, None), ("gemma", 263, None), ("llama-untied", 264, ["cross_entropy"])],
    ids=str,
)
def test_a_compiled_step(
    name: str, vocab: int, kernels: list[str] | None, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Inductor, which other tests leave out: as exact as PyTorch's own step. Of 264 classes, whose rows are aligned,
    it sees the loss' launches, of 263 an operator; those of the layers where nothing is short."""
    for kernel in ("rope", "swiglu", "geglu"):
        monkeypatch.setitem(INDUCTOR_UP_TO, kernel, short)
    torch.compiler.reset()
    own: Any = MODELS[name].build(0).to("cuda")
    if vocab != own.config.vocab_size:
        own.resize_token_embeddings(vocab)
    truth, ours = copy.deepcopy(own).double(), copy.deepcopy(own)
    liger_kernels.patch(ours, kernels=kernels)
    ids = torch.randint(3, vocab, (2, 32), device="cuda")
    check_step(step(torch.compile(ours), ids), own, truth, torch.float32, ids)


def test_compiled_layers_for_every_length_where_inductor_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pads a product it decides by timing it: in about every second process for these odd sizes. The kernels
    see the strides that their tensors then have, in each length."""
    monkeypatch.setattr(torch._inductor.config, "force_shape_pad", True)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    torch.compiler.reset()
    own: Any = MODELS["llama-untied"].build(0).to("cuda")
    truth, ours = copy.deepcopy(own).double(), copy.deepcopy(own)
    liger_kernels.patch(ours)
    for layer in ours.model.layers:
        layer.compile(dynamic=True)
    for length in (21, 19, 27):
        ids = torch.randint(3, own.config.vocab_size, (3, length), device="cuda")
        for position_ids in (None, torch.arange(length, device="cuda") + torch.tensor([[0], [1], [2]], device="cuda")):
            for model in (own, truth, ours):
                model.zero_grad()
            check_step(step(ours, ids, position_ids), own, truth, torch.float32, ids, position_ids, chain=30)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", ["llama-untied", "gemma"])
def test_a_cuda_graph_of_a_patched_step(name: str, dtype: torch.dtype) -> None:
    """Captured once and replayed on other tokens, it is as exact as PyTorch's own step, and the same bits again. Not
    the bits of an ordinary step: transformers makes another attention mask while a stream is captured."""
    own: Any = MODELS[name].build(0).to("cuda", dtype)
    truth, ours = copy.deepcopy(own).double(), copy.deepcopy(own)
    liger_kernels.patch(ours)
    vocab = own.config.vocab_size
    ids = torch.randint(3, vocab, (2, 32), device="cuda")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            ours.zero_grad(set_to_none=True)
            step(ours, ids)
    torch.cuda.current_stream().wait_stream(stream)
    ours.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(ours, ids)
    ids.copy_(torch.randint(3, vocab, (2, 32), device="cuda"))
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append({what: result.clone() for what, result in results.items()})
    assert all(torch.equal(first, replays[1][what]) for what, first in replays[0].items())
    check_step(replays[0], own, truth, dtype, ids)
