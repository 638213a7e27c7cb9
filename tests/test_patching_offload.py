"""patch(offload="layers"): the same numbers, two layers' inputs on the GPU at a time, nothing where it cannot be."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import liger_kernels
from liger_kernels.patching import offload
from liger_kernels.patching.offload import INPUTS, OTHERS, UNUSED, Input, LayerInputs
from tests.patching_checks import DEVICE, batch, fallbacks, gradients, tiny

LAYERS = 4


class DelayedCopyStream:
    """Copies nothing before somebody waits for it, as the stream of a GPU may."""

    def __init__(self) -> None:
        self.todo: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = self.waited = self.made = 0

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> int:
        self.todo.append((to, source))
        return self.done + len(self.todo)

    def wait(self, event: int) -> None:
        self.waited += 1
        while self.done < event:
            to, source = self.todo.pop(0)
            to.copy_(source)
            self.done += 1

    def finish(self) -> None:
        self.wait(self.done + len(self.todo))
        self.waited -= 1

    def memory(self, size: int) -> Any:
        self.made += 1
        return type("Memory", (), {"bytes": torch.full((size,), 255, dtype=torch.uint8)})()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayedCopyStream]:
    """A CPU as if it were a GPU, and inputs of any size worth moving."""
    stream = DelayedCopyStream()
    monkeypatch.setattr(offload, "copy_stream_of", lambda device: stream)
    monkeypatch.setattr(offload, "SMALLEST", 1)
    return stream


def model_of(reentrant: bool = False, **options: Any) -> Any:
    model = tiny("llama", num_hidden_layers=LAYERS)
    if reentrant:
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    liger_kernels.patch(model, **options)
    return model


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_numbers_and_every_copy_is_waited_for(reentrant: bool, stream: DelayedCopyStream) -> None:
    plain, model = model_of(reentrant), model_of(reentrant, offload="layers")
    for seed, length in enumerate((9, 14, 5, 9)):
        inputs = batch(seed, length=length)
        expected = gradients(plain, plain(**inputs).loss)
        before = stream.done, stream.waited
        loss = model(**inputs).loss
        assert stream.done - before[0] == stream.waited - before[1] == LAYERS - 1
        assert not stream.todo
        assert equal(gradients(model, loss), expected)
        assert not stream.todo
    assert not fallbacks(model)


def test_at_most_two_inputs_stay(monkeypatch: pytest.MonkeyPatch, stream: DelayedCopyStream) -> None:
    most, alive = [0], []

    class Watched(Input):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.append(self)

        def __getattribute__(self, name: str) -> Any:
            if name in ("start_offload", "prefetch"):
                most[0] = max(most[0], sum(object.__getattribute__(one, "tensor") is not None for one in alive))
            return super().__getattribute__(name)

    monkeypatch.setattr(offload, "Input", Watched)
    model = model_of(offload="layers")
    loss = model(**batch()).loss
    assert sum(one.tensor is not None for one in alive) == 1
    assert alive[-1].tensor is not None
    assert alive[-1].host is None
    loss.backward()
    assert most[0] == 2


def test_memory_of_the_host_is_used_again(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    for lengths, made in (((9, 9, 9), LAYERS - 1), ((5, 9, 7), LAYERS - 1), ((14, 14, 9), 2 * (LAYERS - 1))):
        for length in lengths:
            gradients(model, model(**batch(length=length)).loss)
        assert stream.made == made
        (pool,) = vars(model)[INPUTS]._pools.values()
        assert len(pool.free) == LAYERS - 1


def test_two_forwards_and_then_two_backwards(stream: DelayedCopyStream) -> None:
    plain, model = model_of(), model_of(offload="layers")
    found = []
    for one in (plain, model):
        losses = [one(**batch(seed)).loss for seed in (1, 2)]
        found.append(gradients(one, losses[0] + 2 * losses[1]))
    assert equal(*found)


def test_a_graph_that_is_kept_is_read_twice(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    loss = model(**batch()).loss
    first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [*model.parameters()])
    assert all(map(torch.equal, first, again))


def test_a_graph_that_is_dropped_gives_its_memory_back(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    for _ in range(3):
        model(**batch())
    assert stream.made == LAYERS - 1


class Layers(torch.nn.Module):
    """Checkpointed layers within hooks of ``inputs``."""

    def __init__(self, inputs: LayerInputs) -> None:
        super().__init__()
        self.inputs, self.weights = inputs, torch.nn.ParameterList([torch.randn(6, 6) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, between: Any = lambda x: x) -> torch.Tensor:
        with self.inputs.offloaded(Counter()):
            for weight in self.weights:
                x = checkpoint(lambda x, weight=weight: torch.tanh(x @ weight), between(x), use_reentrant=False)
        return x


def test_strides_come_back(stream: DelayedCopyStream) -> None:
    """Dense inputs as they were; an expanded one stays where it is."""
    layers, seen = Layers(LayerInputs()), []
    x = torch.randn(2, 6, 6, requires_grad=True)

    def turned(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        seen.append(x.stride())
        return x

    expected = torch.autograd.grad(Layers.forward(_unhooked(layers), x, turned).sum(), x)
    seen.clear()
    found = torch.autograd.grad(layers(x, turned).sum(), x)
    assert torch.equal(*found, *expected)
    assert seen[0] == (6, 12, 1)
    assert stream.done
    done = stream.done
    layers(torch.randn(1, 1, 6, requires_grad=True), lambda x: x.expand(2, 6, 6)).sum().backward()
    assert stream.done == done + 2 * (LAYERS - 2)  # there and back


def _unhooked(layers: Layers) -> Layers:
    other = copy.deepcopy(layers)
    other.inputs = type("None", (), {"offloaded": lambda self, _: warnings.catch_warnings()})()
    return other


def test_an_input_that_is_changed_in_place_is_an_error_as_it_is_without(stream: DelayedCopyStream) -> None:
    for changed in (0, 2, LAYERS - 1):
        kept: list[torch.Tensor] = []

        def between(x: torch.Tensor, kept: list[torch.Tensor] = kept, changed: int = changed) -> torch.Tensor:
            if len(kept) == changed + 1:
                kept[-1].detach().mul_(2)
            kept.append(x)
            return x

        def step(kept: list[torch.Tensor] = kept, between: Any = between, changed: int = changed) -> None:
            y = Layers(LayerInputs())(torch.randn(2, 6, 6, requires_grad=True), between)
            kept[changed].detach().mul_(2)
            y.sum().backward()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step()


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_changed_in_place_is_an_error_as_it_is_without(
    name: str, checkpointing: bool, stream: DelayedCopyStream
) -> None:
    model = model_of(offload="layers")
    if not checkpointing:
        model.gradient_checkpointing_disable()
    loss = model(**batch()).loss
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_step_between_two_backwards_is_an_error_as_it_is_without(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    losses = [model(**batch(seed)).loss for seed in (1, 2)]
    losses[0].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_small_input_that_is_changed_in_place_is_an_error_as_it_is_without(
    reentrant: bool, stream: DelayedCopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 10**6)
    weight = torch.randn(6, 6)
    x = torch.randn(2, 6, 6, requires_grad=True) * 1
    with LayerInputs().offloaded(Counter()):
        y = checkpoint(lambda x: torch.tanh(x @ weight), x, use_reentrant=reentrant)
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert not stream.made


def test_small_inputs_and_parameters_stay(stream: DelayedCopyStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 10**6)
    model = model_of(offload="layers")
    gradients(model, model(**batch()).loss)
    assert not stream.made
    assert not fallbacks(model)
    monkeypatch.setattr(offload, "SMALLEST", 1)
    layers = Layers(LayerInputs())
    layers(torch.nn.Parameter(torch.randn(2, 6, 6))).sum().backward()
    assert stream.made == LAYERS - 2


def test_what_all_layers_are_given_stays(stream: DelayedCopyStream) -> None:
    """A mask has no gradient, and is the same for every layer."""

    class Masked(Layers):
        def forward(self, x: torch.Tensor, between: Any = lambda x: x) -> torch.Tensor:
            mask = torch.ones(2, 6, 6)
            with self.inputs.offloaded(Counter()):
                for weight in self.weights:
                    x = checkpoint(lambda x, mask, weight=weight: (x @ weight) * mask, x, mask, use_reentrant=False)
            return x

    Masked(LayerInputs())(torch.randn(2, 6, 6, requires_grad=True)).sum().backward()
    assert stream.made == LAYERS - 1


def test_without_checkpointing_it_is_counted_and_said_once(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    model.gradient_checkpointing_disable()
    with pytest.warns(UserWarning, match="trains without it"):
        expected = gradients(model, model(**batch()).loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert equal(gradients(model, model(**batch()).loss), expected)
    assert fallbacks(model) == {UNUSED: 2}
    assert not stream.made


def test_hooks_of_others_stay_alone(stream: DelayedCopyStream) -> None:
    model, seen = model_of(offload="layers"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        model(**batch()).loss.backward()
    assert fallbacks(model) == {OTHERS: 1}
    assert not stream.made
    assert seen


def test_nothing_happens_where_nothing_is_trained(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    with torch.no_grad():
        model(**batch())
    model.eval()(**batch()).loss.backward()
    assert not stream.made
    assert not fallbacks(model)


def test_copies_pickles_and_unpatch(stream: DelayedCopyStream) -> None:
    model = model_of(offload="layers")
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()  # hooks of transformers that no pickle takes
    expected = gradients(model, model(**batch()).loss)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        report = liger_kernels.status(other)
        assert report.offload == "layers"
        assert not vars(other)[INPUTS]._pools
        assert "offload='layers'" in str(report)
        assert equal(gradients(other, other(**batch()).loss), expected)
    made = stream.made
    liger_kernels.unpatch(model)
    assert INPUTS not in vars(model)
    gradients(model, model(**batch()).loss)
    assert stream.made == made


def test_options_that_make_no_sense() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="offload is 'disk'; it must be one of 'layers'"):
        liger_kernels.patch(model, offload="disk")
    assert liger_kernels.status(model) is None
    liger_kernels.patch(model)
    with pytest.raises(ValueError, match="already patched with offload=None, not 'layers'"):
        liger_kernels.patch(model, offload="layers")
    with pytest.warns(UserWarning, match="offload='layers' has no effect in this LlamaModel"):
        liger_kernels.patch(tiny("llama").model, offload="layers")


def test_no_memory_that_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = type("Runtime", (), {"cudaHostRegister": lambda *_: 2, "cudaHostUnregister": lambda *_: 0})()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(RuntimeError, match="offload='layers' needs 4096 bytes more"):
        offload.PinnedMemory(4096)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: copies to a CPU do not overlap")
def test_a_hundred_steps_with_late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit those without: whoever reads or gives up memory waits for the copies."""

    class Late(offload.CopyStream):
        def copy(self, to: torch.Tensor, source: torch.Tensor) -> Any:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(2_000_000)  # clocks: about a millisecond
            return super().copy(to, source)

    monkeypatch.setattr(offload, "copy_stream_of", Late)
    monkeypatch.setattr(offload, "SMALLEST", 1)
    found = []
    for options in ({}, {"offload": "layers"}):
        model = model_of(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for seed in range(100):
            model(**batch(seed, length=64)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert equal(*found)
