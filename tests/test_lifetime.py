"""Nothing of a forward outlives its last user, and nothing of a patch the model: with Python's collector off, because a
reference cycle through a graph keeps its memory until the collector comes by."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import liger_kernels
from liger_kernels import ops
from tests.lifetime_checks import Made, left_by
from tests.packing_checks import packed, samples
from tests.patching_checks import DEVICE, UNFUSED, batch, built, tiny
from tools.op_table import OPS

Step = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# What a user does with a step.


def trained(model: Any, inputs: Any) -> None:
    out = model(**inputs)
    out.loss.backward()


def trained_by_its_loss(model: Any, inputs: Any) -> None:
    model(**inputs).loss.backward()


def not_trained(model: Any, inputs: Any) -> None:
    model(**inputs)


def evaluated(model: Any, inputs: Any) -> None:
    model.eval()
    with torch.no_grad():
        out = model(**inputs)
    assert out.logits.shape[:2] == inputs["input_ids"].shape
    model.train()


def without_labels(model: Any, inputs: Any) -> None:
    model(**{k: v for k, v in inputs.items() if k != "labels"}).logits.sum().backward()


def with_logits(model: Any, inputs: Any) -> None:
    out = model(**inputs)
    assert out.logits.shape[:2] == inputs["input_ids"].shape
    out.loss.backward()


def with_a_loss_of_logits(model: Any, inputs: Any) -> None:
    out = model(**inputs)
    (out.loss + out.logits.logsumexp(-1).mean()).backward()


def with_the_gradient_of_logits(model: Any, inputs: Any) -> None:
    out = model(**inputs)
    out.logits.retain_grad()
    out.loss.backward(retain_graph=True)
    torch.autograd.grad(out.loss, out.logits)


def with_hidden_states(model: Any, inputs: Any) -> None:
    out = model(**inputs, output_hidden_states=True)
    (out.loss + out.hidden_states[-1].square().mean()).backward()


def as_a_tuple(model: Any, inputs: Any) -> None:
    model(**inputs, return_dict=False)[0].backward()


def that_fails(model: Any, inputs: Any) -> None:
    """Behind the loss, which takes the graph with it."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        loss = model(**inputs).loss
        loss.register_hook(fail)
        loss.backward()


STEPS: list[Step] = [trained, trained_by_its_loss, not_trained, evaluated, without_labels, with_logits]
STEPS += [with_a_loss_of_logits, with_the_gradient_of_logits, with_hidden_states, as_a_tuple, that_fails]


# What it is a step of.


def patched(model: Any, **options: Any) -> Any:
    liger_kernels.patch(model, **options)
    return model


def shallow(family: str) -> Any:
    """A model of one layer, for options that concern no layer. The other set-ups have two layers."""
    return tiny(family, num_hidden_layers=1)


def checkpointed(reentrant: bool) -> Callable[[], Any]:
    def made() -> Any:
        model = patched(tiny("llama"))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    return made


def adapted(*targets: str) -> Callable[[], Any]:
    def made() -> Any:
        peft = pytest.importorskip("peft", reason="this version of transformers is tested without peft")
        model = peft.get_peft_model(shallow("llama"), peft.LoraConfig(r=2, target_modules=[*targets], lora_dropout=0.1))
        return patched(model)

    return made


def adapted_experts() -> Any:
    peft = pytest.importorskip("peft", reason="this version of transformers is tested without peft")
    if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip(f"peft {peft.__version__} has no LoraConfig(target_parameters=...)")
    config = peft.LoraConfig(r=2, target_parameters=["gate_up_proj", "down_proj"])
    return patched(peft.get_peft_model(built("qwen3_moe", "Qwen3MoeForCausalLM"), config))


SETUPS: dict[str, Callable[[], Any]] = {
    "llama": lambda: patched(tiny("llama")),
    "gemma2": lambda: patched(tiny("gemma2")),
    "memory='small'": lambda: patched(shallow("llama"), memory="small"),
    "memory='fast'": lambda: patched(shallow("llama"), memory="fast"),
    "the loss of the head's logits": lambda: patched(shallow("gemma2"), kernels=UNFUSED),
    "no kernel of the loss": lambda: patched(shallow("llama"), kernels=["rms_norm", "rope", "swiglu"]),
    "weighted rows": lambda: patched(shallow("llama"), loss_reduction="sample"),
    "experts": lambda: patched(built("qwen3_moe", "Qwen3MoeForCausalLM")),
    "gated norms": lambda: patched(built("qwen3_next", "Qwen3NextForCausalLM")),
    "checkpointing": checkpointed(False),
    "reentrant checkpointing": checkpointed(True),
    "adapters": adapted("q_proj", "gate_proj", "down_proj"),
    "an adapter on the head": adapted("lm_head"),
    "adapters of experts": adapted_experts,
    "a copy of a patched model": lambda: copy.deepcopy(patched(shallow("llama"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_of_a_step_is_left(setup: str) -> None:
    model = SETUPS[setup]()
    inputs = batch() if setup != "weighted rows" else {**packed(samples(5, 3, 4)), "use_cache": False}
    known = [*model.parameters(), *model.buffers()]
    for step in STEPS:
        left = left_by(lambda step=step: step(model, inputs), *known, *(p.grad for p in known))
        assert not left, f"{step.__name__} leaves {left}"
        model.zero_grad()


def test_a_loss_keeps_no_hidden_states() -> None:
    """Where the output is gone, as in a trainer, and the schedule has no use for them: neither before the backward nor
    after it."""
    model = patched(tiny("llama"), memory="balanced")
    kept: list[StorageWeakRef] = []
    model.model.norm.register_forward_hook(lambda m, i, o: kept.append(StorageWeakRef(o.untyped_storage())))
    loss = model(**batch()).loss
    assert kept[-1].expired()
    loss.backward()
    model.zero_grad()
    loss = model(**batch()).loss
    with Made() as made:
        loss.backward()
    assert not made.alive(*(p.grad for p in model.parameters()))


def test_the_size_of_a_vocabulary_may_change_between_steps() -> None:
    model = patched(tiny("llama"))
    for size in (None, 99, 64):
        if size is not None:
            model.resize_token_embeddings(size)
        out = model(input_ids=batch()["input_ids"] % 60, labels=batch()["input_ids"] % 60)
        out.loss.backward()
        del out
        assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape
        model.zero_grad()


# Every op.


def called(op: Any, leaves: list[torch.Tensor], backward: bool) -> None:
    result = op(*leaves)
    results = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None and y.requires_grad]
    if backward:
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        for leaf in leaves:
            leaf.grad = None


def loss_calls() -> dict[str, tuple[Any, list[torch.Tensor]]]:
    """Of the ops that are not in the table of all others."""
    hidden, weight, bias, logits = (
        torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((12, 8), (37, 8), (37,), (12, 37))
    )
    targets = torch.arange(12, device=DEVICE)
    ids = targets.view(6, 2) % 4
    gate_up, down = (torch.randn(4, *shape, device=DEVICE).requires_grad_() for shape in ((10, 8), (8, 5)))
    routes = torch.rand(6, 2, device=DEVICE).requires_grad_()
    calls: dict[str, tuple[Any, list[torch.Tensor]]] = {
        f"linear_cross_entropy, {memory}, {reduction}": (
            lambda *leaves, m=memory, r=reduction: ops.linear_cross_entropy(
                leaves[0], leaves[1], targets, leaves[2], memory=m, reduction=r
            ),
            [hidden, weight, bias],
        )
        for memory in ("fast", "balanced", "small")
        for reduction in ("mean", "none")
    }
    calls["linear_log_probs"] = (
        lambda h, w, b: tuple(ops.linear_log_probs(h, w, targets, b, outputs=("log_probs", "entropy"))),
        [hidden, weight, bias],
    )
    calls["linear_divergence"] = (
        lambda h, w, b: ops.linear_divergence(h, w, hidden.detach(), weight.detach() / 2, 0.3, b).divergence,
        [hidden, weight, bias],
    )
    calls["cross_entropy"] = (lambda x: ops.cross_entropy(x, targets, z_loss=1e-4), [logits])
    calls["experts"] = (
        lambda h, r, g, d: ops.experts(h, ids, r, g, d),
        [hidden.detach()[:6].requires_grad_(), routes, gate_up, down],
    )
    return calls


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward"])
def test_nothing_of_an_op_is_left(backward: bool, checkpointed: bool) -> None:
    calls: dict[str, Any] = {name: (op.op, op.leaves(5, torch.float32, DEVICE)) for name, op in OPS.items()}
    for name, (op, leaves) in (calls | loss_calls()).items():
        run = functools.partial(checkpoint, op, use_reentrant=False) if checkpointed else op
        left = left_by(lambda op=run, leaves=leaves: called(op, leaves, backward))
        assert not left, f"{name} leaves {left}"


@pytest.mark.parametrize("name", ["swiglu_linear", "experts"])
def test_a_result_keeps_nothing_once_its_graph_is_freed(name: str) -> None:
    """Whether the op saved itself, or before its last product."""
    calls = {"swiglu_linear": (ops.swiglu_linear, OPS["swiglu_linear"].leaves(5, torch.float32, DEVICE))}
    op, leaves = (calls | loss_calls())[name]
    # No op rolls rows, so what is saved is known by this name.
    for hooks in (contextlib.nullcontext(), saved_tensors_hooks(lambda t: t.roll(0), lambda t: t)):
        with Made() as made, hooks:
            y = op(*leaves)
            kept = [what for what in made.alive(y) if "roll" in what]
            y.backward(torch.ones_like(y))
        for leaf in leaves:
            leaf.grad = None
        assert bool(kept) == (not isinstance(hooks, contextlib.nullcontext))
        assert not [what for what in made.alive(y) if what in kept]


# A patch.


def living() -> int:
    """How many tensors and functions there are."""
    gc.collect()
    return sum(isinstance(o, torch.Tensor) or type(o) is type(living) for o in gc.get_objects())


@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma2", "Gemma2ForCausalLM"), ("qwen3_next", "Qwen3NextForCausalLM"), ("gpt_oss", "GptOssForCausalLM")],
)
def test_patching_ten_times_leaves_as_much_as_once(family: str, name: str) -> None:
    """What a probe's graph saves is no part of that graph again: Python's collector does not see such a cycle."""
    model = built(family, name)
    counts = []
    for times in (1, 10):
        for _ in range(times):
            liger_kernels.patch(model)
            liger_kernels.unpatch(model)
        counts.append(living())
    assert counts[0] == counts[1]
