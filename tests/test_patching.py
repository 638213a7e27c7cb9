"""patch, unpatch, patched, status: same mathematics, one instance at a time, and everything back afterwards."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from liger_kernels.ops import launches, reset_launches
from tests.patching_checks import (
    DEVICE,
    EVERYTHING,
    UNFUSED,
    VOCAB,
    batch,
    check_same,
    fallbacks,
    gradients,
    tiny,
    train,
    upstream_symbols,
)


@pytest.fixture(params=["llama", "gemma2"])
def model(request):
    """A head of its own and logits as they are; a tied head, with a soft-cap."""
    return tiny(request.param)


@pytest.mark.parametrize("family", EVERYTHING)
def test_everything_is_replaced_and_trains_the_same(family):
    report = liger_kernels.status(check_same(tiny(family), train))
    assert report.counts() == EVERYTHING[family]
    assert report.left == []
    assert report.fuses_head
    assert report.fallbacks == {}


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(("llama", [kernel]) for kernel in ("rms_norm", "rope", "swiglu", "cross_entropy", "linear_cross_entropy")),
        ("gemma2", UNFUSED),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0] if len(value) == 1 else "all but the fused head",
)
def test_some_kernels_alone(family, kernels):
    reset_launches()
    report = liger_kernels.status(check_same(tiny(family), train, kernels))
    assert set(report.counts()) == {*kernels} & {*EVERYTHING[family], "cross_entropy"}
    assert report.fallbacks == {}
    asked, ran = (any("cross_entropy" in name for name in names) for names in (kernels, launches()))
    assert asked == ran


def test_a_patched_model_in_16_bits_runs_its_kernels(model):
    report = liger_kernels.patch(model.to(torch.bfloat16))
    reset_launches()
    model(**batch()).loss.backward()
    kernels = " ".join(launches())
    for part in ("rms_norm_fwd", "rms_norm_bwd", "rope", "glu_fwd", "glu_bwd", "cross_entropy"):
        assert part in kernels
    assert report.fallbacks == {}


# What trainers do with a model.


def logits_only(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    return {"logits": model(batch()["input_ids"], **options).logits.detach()}


def hidden_states(model: Any) -> dict[str, torch.Tensor]:
    out = model(**batch(), output_hidden_states=True)
    return {"loss": out.loss.detach(), **{f"h{i}": h.detach() for i, h in enumerate(out.hidden_states)}}


def as_tuple(model: Any) -> dict[str, torch.Tensor]:
    loss, logits, *_ = model(**batch(), return_dict=False)
    return {"logits": logits.detach(), **gradients(model, loss)}


def without_gradients(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = model(**batch())
    assert not out.loss.requires_grad
    assert not out.logits.requires_grad
    return {"loss": out.loss, "logits": out.logits}


def shifted() -> torch.Tensor:
    """Labels that are not those that the shift would give."""
    return F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:].roll(1, 0).contiguous()


def flash_attention_arguments() -> dict[str, Any]:
    lengths = torch.tensor([0, 9, 18], dtype=torch.int32, device=DEVICE)
    return {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 9, "max_length_k": 9}


WAYS = {
    "no labels": logits_only,
    "logits_to_keep": lambda model: logits_only(model, logits_to_keep=2),
    "hidden states": hidden_states,
    "tuple": as_tuple,
    "no gradients": without_gradients,
    "count in a tensor": lambda model: train(model, num_items_in_batch=torch.tensor(11, device=DEVICE)),
    "count": lambda model: train(model, num_items_in_batch=11),
    "shifted labels": lambda model: train(model, shift_labels=shifted()),
    "arguments of flash attention": lambda model: train(model, **flash_attention_arguments()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_the_model(model, way):
    patched = check_same(model, WAYS[way])
    assert bool(fallbacks(patched)) == (way in ("tuple", "no gradients"))  # which read logits


def test_upstream_gets_what_the_caller_gave_and_nothing_else(monkeypatch):
    model, given = tiny("llama"), {**batch(), "use_cache": False, "a_trainers_own": 3}
    liger_kernels.patch(model)
    upstream: Any = type(model).__mro__[1]
    forward, seen = upstream.forward, {}

    @functools.wraps(forward)
    def later(self, *args, **kwargs):
        seen.update(kwargs)
        kwargs.pop("a_trainers_own")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(upstream, "forward", later)
    assert model(**given).loss is not None
    assert fallbacks(model) == {}
    assert seen.keys() == given.keys()
    assert all(seen[name] is value for name, value in given.items())


def test_generate(model):
    model.eval()
    ids = batch()["input_ids"]
    expected = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    with liger_kernels.patched(model):
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), expected)


def test_a_loss_function_of_the_users_own_stays_and_gets_real_logits():
    seen = []

    def own_loss(logits, labels, vocab_size, **kwargs):
        seen.append(type(logits))
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), ignore_index=-100)

    model = tiny("llama")
    model.loss_function = own_loss
    patched = check_same(model, train)
    assert patched.loss_function is own_loss
    assert set(seen) == {torch.Tensor}


def test_logits_that_a_caller_can_see_are_never_overwritten():
    for kernels in (None, ["cross_entropy"]):
        model = tiny("gemma2")
        liger_kernels.patch(model, kernels)
        out = model(**batch())
        logits = out.logits
        before = logits.detach().clone()
        out.loss.backward()
        assert torch.equal(logits, before)


def test_logits_first_read_under_no_grad_still_carry_their_gradient():
    def run(model):
        out = model(**batch())
        with torch.no_grad():
            out.logits.argmax(-1)
        return gradients(model, out.logits.float().square().mean())

    check_same(tiny("llama"), run)


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_gradient_checkpointing(model, checkpointing):
    model.gradient_checkpointing_enable(checkpointing)
    model.enable_input_require_grads()
    check_same(model, lambda m: train(m, use_cache=False))


def test_autocast_with_float32_weights(model):
    """Under autocast the float32 arm is not the yardstick; eager under the same autocast is."""

    def run(model):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=next(model.parameters()).dtype == torch.float32):
            loss = model(**batch()).loss
        return {"loss": loss.detach().double()}

    check_same(model, run)


# One instance at a time, and everything back.


def test_a_second_model_and_every_upstream_symbol_stay_untouched(model):
    other = copy.deepcopy(model)
    before = upstream_symbols(model)
    classes = [type(module) for module in other.modules()]
    expected = other(**batch()).loss
    liger_kernels.patch(model)
    assert upstream_symbols(model, other) == before
    assert [type(module) for module in other.modules()] == classes
    reset_launches()
    assert torch.equal(other(**batch()).loss, expected)
    assert launches() == {}
    assert liger_kernels.status(other) is None


def test_unpatch_restores_everything(model):
    out = model(**batch())
    expected = {"logits": out.logits.detach(), **gradients(model, out.loss)}
    before = [(type(module), sorted(vars(module))) for module in model.modules()]
    liger_kernels.patch(model)
    model(**batch()).loss.backward()
    model.zero_grad()
    liger_kernels.unpatch(model)
    assert [(type(module), sorted(vars(module))) for module in model.modules()] == before
    assert liger_kernels.status(model) is None
    out = model(**batch())
    torch.testing.assert_close({"logits": out.logits.detach(), **gradients(model, out.loss)}, expected, rtol=0, atol=0)
    liger_kernels.unpatch(model)  # twice is once


def test_parameters_keys_names_and_isinstance_stay(model):
    classes = [type(module) for module in model.modules()]
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    liger_kernels.patch(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for module, cls in zip(model.modules(), classes, strict=True):
        assert isinstance(module, cls)
        assert type(module).__name__ == cls.__name__
        assert type(module).__module__ == cls.__module__


def test_patched_is_a_context_manager_that_undoes_itself_even_after_an_error():
    model = tiny("llama")
    with pytest.raises(ZeroDivisionError), liger_kernels.patched(model):
        _ = len(liger_kernels.status(model).replaced) / 0
    assert liger_kernels.status(model) is None
    liger_kernels.patch(model)
    with liger_kernels.patched(model):
        pass
    assert liger_kernels.status(model) is not None  # it was patched before


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save]
)
def test_a_copy_is_patched_and_runs_its_own_weights(model, through):
    report = liger_kernels.patch(model, memory="small")
    expected = model(**batch()).loss
    twin = through(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert liger_kernels.status(twin) is not report
    assert liger_kernels.status(twin).memory == "small"
    reset_launches()
    assert torch.equal(twin(**batch()).loss, expected)
    assert launches()
    liger_kernels.unpatch(twin)
    torch.testing.assert_close(twin(**batch()).loss, expected)
    assert liger_kernels.status(model) is report


def test_save_pretrained_and_state_dict(model, tmp_path):
    expected = model.eval()(**batch()).logits
    liger_kernels.patch(model)
    model.save_pretrained(tmp_path)
    liger_kernels.unpatch(model)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    loaded = loaded.to(DEVICE).eval()
    assert loaded.config.architectures == [type(model).__name__]
    assert torch.equal(loaded(**batch()).logits, expected)


def test_meta_device():
    with torch.device("meta"):
        model = tiny("llama")
    assert liger_kernels.patch(model).counts() == EVERYTHING["llama"]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_head_with_a_bias():
    model = tiny("llama")
    model.lm_head = nn.Linear(32, VOCAB, bias=True, device=DEVICE)
    assert liger_kernels.status(check_same(model, train)).fuses_head


@pytest.mark.parametrize("frozen", ["lm_head", "embed_tokens", "norm", "mlp"])
def test_frozen_parts(frozen):
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    check_same(model, train)


def test_a_forward_hook_on_the_head_gets_real_logits_and_the_report_says_so():
    model = tiny("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = liger_kernels.patch(model)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    model(**batch()).loss.backward()
    assert seen == [torch.Tensor]
    handle.remove()
    model(**batch()).loss.backward()
    assert fallbacks(model) == {"a forward hook on the head expects logits": 1}
    for part in ("LlamaRMSNorm", "cast_then_scale", "model.layers.0.input_layernorm", "1 x a forward hook on the head"):
        assert part in str(report)


def test_hooks_before_the_head_fire_around_the_kernel():
    model = tiny("llama")
    liger_kernels.patch(model)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(**batch()).loss.backward()
    assert seen == [(2, 9, 32)]


# The product of a gated MLP, and whoever listens to the projection behind it.


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_the_product_of_an_mlp_is_not_kept(family):
    """Gate and up of two layers are; every other tensor of their size would be the product or the activation."""
    kept = []
    model = tiny(family)
    liger_kernels.patch(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model(**batch())
    assert kept.count(2 * 9 * 40) == 4


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_the_projection_behind_the_product_fire(kind):
    model, seen = tiny("llama"), []
    liger_kernels.patch(model)
    down = model.model.layers[0].mlp.down_proj
    getattr(down, f"register_{kind}_hook")(lambda module, args, *rest: seen.append(args[0].shape))
    model(**batch()).loss.backward()
    assert seen == [(2, 9, 40)]  # of the product, or of its gradient


@pytest.mark.parametrize("change", ["forward", "class", "weight"])
def test_another_projection_behind_the_product_runs_itself(change):
    """A forward replaced on the instance, a subclass, and a weight that is more than numbers."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Weight(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            return 2 * result if function is torch.nn.functional.linear else result

    def doubled(model):
        for layer in model.model.layers:
            down = layer.mlp.down_proj
            if change == "forward":
                down.forward = lambda x, call=down.forward: 2 * call(x)
            elif change == "class":
                down.__class__ = Doubled
            else:
                down.weight = Weight(down.weight.detach())
        return model

    model, expected = tiny("llama"), tiny("llama")
    liger_kernels.patch(model)
    with torch.no_grad():
        for layer in expected.model.layers:
            layer.mlp.down_proj.weight.mul_(2)
    torch.testing.assert_close(doubled(model)(**batch()).loss, expected(**batch()).loss)


# Bad input and loud failures.


def test_bad_input_is_refused_and_leaves_the_model_alone():
    model = tiny("llama")
    with pytest.raises(TypeError, match=r"model is a str .*; it must be a torch.nn.Module"):
        liger_kernels.patch("meta-llama/Llama-3.2-1B")
    with pytest.raises(ValueError, match=r"unknown kernels \['rmsnorm'\]; there are \['rms_norm', 'layer_norm'"):
        liger_kernels.patch(model, ["rmsnorm"])
    with pytest.raises(TypeError, match=r"kernels is a str \('rope'\); it must be a list of names"):
        liger_kernels.patch(model, "rope")
    assert liger_kernels.status(model) is None


def test_a_patch_that_replaces_nothing_says_so_loudly():
    with pytest.warns(UserWarning, match="replaced nothing in this Sequential"):
        report = liger_kernels.patch(nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)))
    assert "NOTHING WAS REPLACED" in str(report)
