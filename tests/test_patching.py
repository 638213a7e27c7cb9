"""patch, unpatch, patched, status: same mathematics, one instance at a time, and everything back afterwards."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from liger_kernels.ops import launches, reset_launches
from tests.patching_checks import CORE, DEVICE, VOCAB, batch, check_same, gradients, tiny, upstream_symbols

EVERYTHING = {
    "llama": {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1},
    "gemma": {"rms_norm": 5, "rope": 2, "geglu": 2, "linear_cross_entropy": 1},
    "gemma2": {"rms_norm": 9, "rope": 2, "geglu": 2, "linear_cross_entropy": 1},
    "gemma3": {"rms_norm": 13, "rope": 2, "geglu": 2, "linear_cross_entropy": 1},
}


@pytest.fixture(params=CORE)
def model(request):
    return tiny(request.param)


def step(**extra):
    """One training step on the usual batch: loss and gradients."""

    def run(model):
        return gradients(model, model(**batch(), **extra).loss)

    return run


@pytest.mark.parametrize("family", CORE)
def test_everything_is_replaced_and_nothing_is_left(family):
    report = liger_kernels.patch(tiny(family))
    assert report.counts() == EVERYTHING[family]
    assert report.left == []
    assert report.fuses_head


def test_loss_and_gradients_are_the_same(model):
    patched = check_same(model, step())
    assert dict(liger_kernels.status(patched).fallbacks) == {}


def test_plain_cross_entropy_over_the_heads_own_logits(model):
    kernels = [kernel for kernel in liger_kernels.KERNELS if kernel != "linear_cross_entropy"]
    reset_launches()
    patched = check_same(model, step(), kernels)
    assert not liger_kernels.status(patched).fuses_head
    assert dict(liger_kernels.status(patched).fallbacks) == {}
    assert any("cross_entropy" in kernel for kernel in launches())


@pytest.mark.parametrize("kernel", ["rms_norm", "rope", "swiglu", "cross_entropy", "linear_cross_entropy"])
def test_one_kernel_alone(kernel):
    patched = check_same(tiny("llama"), step(), [kernel])
    assert set(liger_kernels.status(patched).counts()) == {kernel}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_patched_model_in_its_dtype_runs_its_kernels(model, dtype):
    report = liger_kernels.patch(model.to(dtype))
    reset_launches()
    model(**batch()).loss.backward()
    kernels = set(launches())
    for part in ("rms_norm", "rope", "glu", "cross_entropy"):
        assert {"fwd", "bwd"} <= {word for k in kernels if part in k for word in k.split("_")} or part in (
            "rope",
            "cross_entropy",
        ), f"{part}: {kernels}"
        assert any(part in kernel for kernel in kernels), f"no {part} kernel ran: {kernels}"
    assert report.fallbacks == {}


# What trainers do with a model.


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", ["no labels", "logits_to_keep", "hidden states", "tuple", "tensor count", "int count"])
def test_every_way_to_call_the_model(model, mode, case):
    getattr(model, mode)()
    data = batch()
    ids = {"input_ids": data["input_ids"]}

    def run(model):
        if case == "no labels":
            return {"logits": model(**ids).logits.detach()}
        if case == "logits_to_keep":
            return {"logits": model(**ids, logits_to_keep=2).logits.detach()}
        if case == "hidden states":
            out = model(**data, output_hidden_states=True)
            return {"loss": out.loss.detach(), **{f"h{i}": h.detach() for i, h in enumerate(out.hidden_states)}}
        if case == "tuple":
            loss, logits, *_ = model(**data, return_dict=False)
            return {"logits": logits.detach(), **gradients(model, loss)}
        count = torch.tensor(11, device=DEVICE) if case == "tensor count" else 11
        return gradients(model, model(**data, num_items_in_batch=count).loss)

    check_same(model, run)


@pytest.mark.parametrize("family", CORE)
def test_shift_labels(family):
    data = batch()
    shifted = F.pad(data["labels"], (0, 1), value=-100)[:, 1:].roll(1, 0).contiguous()  # not what the shift would give
    check_same(tiny(family), step(shift_labels=shifted))


@pytest.mark.parametrize("training", [True, False])
def test_upstream_gets_what_the_caller_gave_and_nothing_else(training, monkeypatch):
    model, given = tiny("llama").train(training), {**batch(), "use_cache": False, "a_trainers_own": 3}
    forward, seen = type(model).forward, {}

    @functools.wraps(forward)
    def spied(self, *args, **kwargs):
        seen.update(kwargs)
        kwargs.pop("a_trainers_own")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", spied)
    liger_kernels.patch(model)
    assert model(**given).loss is not None
    assert dict(liger_kernels.status(model).fallbacks) == {}
    assert seen.keys() == given.keys()
    assert all(seen[name] is value for name, value in given.items())


def test_a_forward_that_upstream_gets_later_is_the_one_that_runs(monkeypatch):
    model = tiny("llama")
    liger_kernels.patch(model)
    forward, calls = type(model).__mro__[1].forward, []  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def later(self, *args, **kwargs):
        calls.append(kwargs)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model).__mro__[1], "forward", later)
    model(**batch())
    assert len(calls) == 1


@pytest.mark.parametrize("family", CORE)
def test_flash_attention_arguments_reach_no_kernel(family):
    lengths = torch.tensor([0, 9, 18], dtype=torch.int32, device=DEVICE)
    extra = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 9, "max_length_k": 9}
    patched = check_same(tiny(family), step(**extra))
    assert dict(liger_kernels.status(patched).fallbacks) == {}


def test_generate(model):
    model.eval()
    ids = batch()["input_ids"]
    expected = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    with liger_kernels.patched(model):
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False), expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_loss_of_the_users_own_on_the_logits(model, mode):
    getattr(model, mode)()

    def run(model):
        data = batch()
        logits = model(**data).logits
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB).float(), data["labels"][:, 1:].reshape(-1), label_smoothing=0.1
        )
        return gradients(model, loss + logits.float().square().mean())

    check_same(model, run)


def test_a_loss_function_of_the_users_own_stays_and_gets_real_logits():
    seen = []

    def own_loss(logits, labels, vocab_size, **kwargs):
        seen.append(type(logits))
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), ignore_index=-100)

    model = tiny("llama")
    model.loss_function = own_loss
    patched = check_same(model, step())
    assert patched.loss_function is own_loss
    assert set(seen) == {torch.Tensor}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_logits_read_after_the_loss_are_the_unpatched_ones(model, mode):
    getattr(model, mode)()

    def run(model):
        out = model(**batch())
        loss = out.loss + out["logits"].float().mean() + out[1].float().square().mean()
        assert out.logits is out["logits"] is out[1]
        return {"logits": out.logits.detach().clone(), **gradients(model, loss)}

    check_same(model, run)


def test_logits_that_a_caller_can_see_are_never_overwritten():
    for kernels in (None, ["cross_entropy"]):
        model = tiny("gemma2")
        liger_kernels.patch(model, kernels)
        out = model(**batch())
        logits = out.logits
        before = logits.detach().clone()
        out.loss.backward()
        assert torch.equal(logits, before)


def test_logits_read_after_the_weights_changed_raise():
    model = tiny("llama")
    liger_kernels.patch(model)
    out = model(**batch())
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"changed in place since the forward pass.*Read `outputs.logits` before"):
        _ = out.logits


def test_no_grad_in_training_mode(model):
    def run(model):
        with torch.no_grad():
            out = model(**batch())
        assert not out.loss.requires_grad
        assert not out.logits.requires_grad
        return {"loss": out.loss, "logits": out.logits}

    check_same(model, run)


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
    check_same(model, step(use_cache=False))


@pytest.mark.parametrize("family", CORE)
def test_autocast_with_float32_weights(family):
    """Under autocast the float32 arm is not the yardstick; eager under the same autocast is."""
    model = tiny(family)

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
    symbols = upstream_symbols(model)
    liger_kernels.patch(model)
    model(**batch()).loss.backward()
    model.zero_grad()
    liger_kernels.unpatch(model)
    assert [(type(module), sorted(vars(module))) for module in model.modules()] == before
    assert upstream_symbols(model) == symbols
    assert liger_kernels.status(model) is None
    out = model(**batch())
    for name, value in {"logits": out.logits.detach(), **gradients(model, out.loss)}.items():
        assert torch.equal(value, expected[name]), name
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


def test_patch_twice_is_once_and_other_kernels_are_refused():
    model = tiny("llama")
    report = liger_kernels.patch(model)
    assert liger_kernels.patch(model) is report
    assert report.counts() == EVERYTHING["llama"]
    with pytest.raises(ValueError, match=r"already patched with kernels=.*call unpatch\(model\) first"):
        liger_kernels.patch(model, ["rope"])
    liger_kernels.unpatch(model)
    assert liger_kernels.patch(model, ["rope"]).counts() == {"rope": 2}


def test_patched_is_a_context_manager_that_undoes_itself_even_after_an_error():
    model = tiny("llama")
    with pytest.raises(ZeroDivisionError), liger_kernels.patched(model):
        _ = len(liger_kernels.status(model).replaced) / 0
    assert liger_kernels.status(model) is None
    liger_kernels.patch(model)
    with liger_kernels.patched(model):
        pass
    assert liger_kernels.status(model) is not None  # it was patched before


def test_a_deep_copy_is_patched_and_runs_its_own_weights(model):
    liger_kernels.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert liger_kernels.status(twin) is not liger_kernels.status(model)
    reset_launches()
    loss = twin(**batch()).loss
    assert launches()
    liger_kernels.unpatch(twin)
    torch.testing.assert_close(loss, twin(**batch()).loss)
    assert liger_kernels.status(model) is not None


def _through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def _through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("through", [_through_pickle, _through_torch_save])
def test_pickling(model, through):
    liger_kernels.patch(model)
    twin = through(model)
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(twin(**batch()).loss, model(**batch()).loss)
    liger_kernels.unpatch(twin)
    assert liger_kernels.status(model) is not None


def test_save_pretrained_and_state_dict(model, tmp_path):
    expected = model.eval()(**batch()).logits
    liger_kernels.patch(model)
    model.save_pretrained(tmp_path)
    liger_kernels.unpatch(model)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    loaded = loaded.to(DEVICE).eval()
    assert loaded.config.architectures == [type(model).__name__]
    assert torch.equal(loaded(**batch()).logits, expected)


def test_weights_loaded_before_the_patch_are_kept_and_weights_loaded_after_it_are_used():
    model, other = tiny("gemma3"), tiny("gemma3", seed=1)
    liger_kernels.patch(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(**batch()).loss, other(**batch()).loss)


def test_meta_device():
    with torch.device("meta"):
        model = tiny("llama")
    assert liger_kernels.patch(model).counts() == EVERYTHING["llama"]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_head_that_is_tied_or_has_a_bias():
    tied = tiny("llama", tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    check_same(tied, step())
    biased = tiny("llama")
    biased.lm_head = nn.Linear(32, VOCAB, bias=True, device=DEVICE)
    patched = check_same(biased, step())
    assert liger_kernels.status(patched).fuses_head


@pytest.mark.parametrize("frozen", ["lm_head", "embed_tokens", "norm", "mlp"])
def test_frozen_parts(frozen):
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    check_same(model, step())


def test_a_forward_hook_on_the_head_gets_real_logits():
    model = tiny("llama")
    liger_kernels.patch(model)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    model(**batch()).loss.backward()
    assert seen == [torch.Tensor]
    assert dict(liger_kernels.status(model).fallbacks) == {"a forward hook on the head expects logits": 1}
    handle.remove()
    model(**batch()).loss.backward()
    assert sum(liger_kernels.status(model).fallbacks.values()) == 1


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


@pytest.mark.parametrize("watch", ["forward", "before", "backward", "every module"])
def test_hooks_on_the_projection_behind_the_product_fire(watch):
    model = tiny("llama")
    liger_kernels.patch(model)
    down, seen = model.model.layers[0].mlp.down_proj, []

    def hook(module, args, *rest):
        if module is down:
            seen.append(args[0].shape)

    handle = {
        "forward": down.register_forward_hook,
        "before": down.register_forward_pre_hook,
        "backward": down.register_full_backward_hook,
        "every module": torch.nn.modules.module.register_module_forward_hook,
    }[watch](hook)
    try:
        model(**batch()).loss.backward()
    finally:
        handle.remove()
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
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not str"):
        liger_kernels.patch("meta-llama/Llama-3.2-1B")
    with pytest.raises(ValueError, match=r"unknown kernels \['rmsnorm'\]; there are \['rms_norm', 'layer_norm'"):
        liger_kernels.patch(model, ["rmsnorm"])
    with pytest.raises(TypeError, match=r"not the string 'rope'"):
        liger_kernels.patch(model, "rope")
    assert liger_kernels.status(model) is None


def test_a_patch_that_replaces_nothing_says_so_loudly():
    with pytest.warns(UserWarning, match="replaced nothing in this Sequential"):
        report = liger_kernels.patch(nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)))
    assert "NOTHING WAS REPLACED" in str(report)


def test_the_report_prints_what_why_and_how_often():
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda *args: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = liger_kernels.patch(model)
    model(**batch())
    text = str(report)
    assert "LlamaRMSNorm" in text
    assert "cast_then_scale" in text
    assert "model.layers.0.input_layernorm" in text
    assert "1 x a forward hook on the head expects logits" in text
