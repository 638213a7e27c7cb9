"""Outputs with deferred logits: whoever walks over them neither computes the logits nor trips over them."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_kernels
from liger_kernels.ops import launches
from liger_kernels.patching.logits.lazy import LazyTensor
from liger_kernels.patching.swap import RAN
from matrix.checks.zoo import VOCABULARY
from tests.patching_checks import DEVICE, VOCAB, batch, check_same, fallbacks, gradients, tiny, with_loss
from tests.test_patching_zoo import compare, train


@pytest.fixture
def model():
    model = tiny("llama")
    liger_kernels.patch(model)
    return model


def logits_and_gradients(model):
    out = model(**batch())
    return {"logits": out.logits.detach().clone(), **gradients(model, out.loss)}


def test_the_output_is_of_the_models_own_class(model):
    out = model(**batch())
    assert type(out).__name__ == "CausalLMOutputWithPast"
    assert isinstance(out, CausalLMOutputWithPast)
    assert list(out.keys()) == ["loss", "logits", "past_key_values"]
    assert out["loss"] is out.loss is out[0]
    assert "logits" in out
    assert len(out) == 3
    assert fallbacks(model) == {}


def test_pytree_keeps_the_logits_deferred(model):
    out = model(**batch())
    mapped = pytree.tree_map(lambda x: x, out)
    assert fallbacks(model) == {}
    torch.testing.assert_close(mapped.logits, out.logits)
    assert pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out).logits.grad_fn is None


def test_accelerates_conversion_to_float32():
    from accelerate.utils import operations

    model = tiny("llama").to(torch.bfloat16)
    liger_kernels.patch(model)
    out = model(**batch())
    converted = operations.convert_to_fp32(out)
    assert fallbacks(model) == {}
    assert isinstance(converted, type(out))
    assert converted.logits.dtype == torch.float32
    assert torch.equal(converted.logits, out.logits.float())


LOGITS = {
    "copy.copy": lambda out: copy.copy(out).logits,
    "dataclasses.replace": lambda out: dataclasses.replace(out).logits,
    "pickle": lambda out: pickle.loads(pickle.dumps(out))["logits"],
    "a dict": lambda out: dict(out)["logits"],
    "items": lambda out: dict(out.items())["logits"],
    "keywords": lambda out: dict(**out)["logits"],
    "a tuple": lambda out: out.to_tuple()[1],
    "data parallel": lambda out: type(out)((key, out[key]) for key in out).logits,
}


@pytest.mark.parametrize("how", LOGITS)
def test_logits_of_a_copy_of_an_output(model, how):
    with torch.no_grad():
        expected = tiny("llama")(**batch()).logits
        logits = LOGITS[how](model(**batch()))
    torch.testing.assert_close(logits + 0, expected)
    assert how == "items" or type(logits) is torch.Tensor


def test_logits_of_weights_that_have_changed_are_refused(model):
    out = model(**batch())
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"changed in place since the forward pass.*Read `outputs.logits` before"):
        _ = out.logits
    with torch.no_grad():
        out = model(**batch())
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        pickle.dumps(out)


def test_items_hand_out_an_object_that_behaves_like_the_logits(model):
    out = model(**batch())
    logits = dict(out.items())["logits"]
    assert type(logits) is LazyTensor
    assert logits.shape == (2, 9, VOCAB)
    assert logits.device == out.loss.device
    assert logits.requires_grad
    assert fallbacks(model) == {}
    assert torch.equal(torch.softmax(logits, -1), torch.softmax(out.logits, -1))
    with torch.no_grad():  # methods that no dispatcher sees
        lazy, expected = dict(model(**batch()).items())["logits"], out.logits.cpu()
    torch.testing.assert_close(torch.tensor(lazy.tolist()), expected.detach())
    torch.testing.assert_close(torch.from_numpy(lazy.cpu().numpy()), expected.detach())
    assert lazy.data_ptr() != 0
    assert "LazyTensor" not in repr(lazy)


# What DeferredLogits writes down, and what makes it compute.


BIAS = torch.linspace(-1, 1, VOCAB)[None]  # as BART's final_logits_bias


def bias(z):
    return BIAS.to(z.device, z.dtype, copy=True)


SEEN = torch.tensor([[1] * 9, [0, 1, 1, 0, 0, 1, 1, 1, 1]]).bool()
RECORDED = {
    "scale": lambda z: z * 0.5,
    "scale from the left": lambda z: 0.5 * z,
    "division": lambda z: z / 3.0,
    "soft-cap": lambda z: 5.0 * torch.tanh(z / 5.0),
    "soft-cap by method": lambda z: (z / 5.0).tanh() * 5.0,
    "soft-cap after a scale": lambda z: torch.tanh(z * 0.25 / 5.0) * 5.0,
    "cast": lambda z: z.to(torch.float32).float(),
    "rows": lambda z: z[:, 2:, :],
    "ellipsis": lambda z: z[..., :-1, :].contiguous(),
    "first classes": lambda z: z[..., :50],
    "both": lambda z: z[1:, ..., :50] / 2,
    "bias": lambda z: z + bias(z),
    "bias before the other steps": lambda z: 5.0 * torch.tanh((z[:, 1:] + bias(z))[..., :50] * 0.5 / 5.0),
    "bias of the first classes": lambda z: z[..., :50] + bias(z)[0, :50],
    "mask of rows": lambda z: z[:, :-1][SEEN[:, 1:].to(z.device)].contiguous(),
    "slice of masked rows": lambda z: z[SEEN.to(z.device)][2:, :50],
}


def mask_in_place(z):
    z[..., 5:9] = -30.0
    return z


COMPUTED = {
    "in-place mask": mask_in_place,
    "addition": lambda z: z + 1.0,
    "bias on the left": lambda z: bias(z)[0] + z,
    "two biases": lambda z: z + bias(z) + bias(z),
    "bias after a scale": lambda z: z * 0.5 + bias(z),
    "bias of the rows": lambda z: z + bias(z)[0, :9, None],
    "bias that trains": lambda z: z + bias(z).requires_grad_(),
    "sum of logits": lambda z: z + z,
    "mask of logits": lambda z: z[SEEN[..., None].expand(z.shape).to(z.device)].view(-1, VOCAB),
    "in-place scale": lambda z: z.mul_(0.5),
    "augmented": lambda z: z.__itruediv__(2.0),
    "tensor scale": lambda z: z * torch.tensor(0.5, dtype=z.dtype, device=z.device),
    "negative after tanh": lambda z: torch.tanh(z) * -1.0,
    "two tanh": lambda z: torch.tanh(torch.tanh(z)),
    "last classes": lambda z: z[..., 10:],
    "every other class": lambda z: z[..., ::2],
    "one row": lambda z: z[:, -1],
    "permutation": lambda z: z.flip(1),
    "where": lambda z: torch.where(z > 0, z, 0.1 * z),
    "log softmax": lambda z: F.log_softmax(z, dim=-1),
}


def changed(model, change):
    """``model``, which does something to its logits before the loss."""

    def own(logits, labels):
        logits = change(logits)
        targets = labels.reshape(-1)[: logits.shape[:-1].numel()]
        targets = targets.masked_fill(targets >= logits.shape[-1], -100)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, ignore_index=-100), logits

    return with_loss(model, own)


def test_a_causal_lm_inside_of_another_one_leaves_its_logits_to_the_outer_ones_loss():
    """As in transformers before 4.50: Aria, GotOcr2."""
    from transformers import LlamaForCausalLM

    class Outer(LlamaForCausalLM):
        def __init__(self, inner):
            super().__init__(inner.config)
            del self.model, self.lm_head
            self.language_model = inner

        def get_output_embeddings(self):
            return self.language_model.get_output_embeddings()

        def forward(self, input_ids=None, labels=None, **kwargs):
            logits = self.language_model(input_ids=input_ids)[0]
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB, **kwargs)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    model = Outer(tiny("llama"))
    patched = copy.deepcopy(model)
    report = liger_kernels.patch(patched)
    before = launches()
    patched(**batch()).loss.backward()
    assert launches()["_cross_entropy_fwd_kernel"] > before.get("_cross_entropy_fwd_kernel", 0)
    assert report.fallbacks == {}
    inner = patched.language_model  # which is a model of its own, too
    assert torch.equal(inner(**batch()).loss, patched(**batch()).loss)
    check_same(model, logits_and_gradients)


@pytest.mark.parametrize("case", [*RECORDED, *COMPUTED])
def test_what_a_model_does_to_its_logits(case):
    model = changed(tiny("llama", num_hidden_layers=0), {**RECORDED, **COMPUTED}[case])

    def run(model):
        out = model(**batch())
        if liger_kernels.status(model):
            assert bool(fallbacks(model)) == (case in COMPUTED)
        return {"logits": out.logits.detach().clone(), **gradients(model, out.loss)}

    check_same(model, run)
    if case in RECORDED:  # and where the head computes its logits, as an adapter does
        check_same(model, run, ["cross_entropy"])


@pytest.mark.parametrize("kernels", [["linear_cross_entropy"], ["cross_entropy"]], ids=str)
def test_the_loss_has_the_dtype_of_its_logits(kernels):
    """Of models that do not cast them, and of those that do."""
    for change, dtype in ((lambda z: z * 1.0, torch.bfloat16), (lambda z: z.float(), torch.float32)):
        model = changed(tiny("llama").bfloat16(), change)
        assert model(**batch()).loss.dtype == dtype
        liger_kernels.patch(model, kernels)
        assert model(**batch()).loss.dtype == dtype


def test_a_bias_that_is_wider_than_the_logits_is_added_in_its_dtype():
    """Except under autocast, where a head's own bias is narrowed, too."""
    model = changed(tiny("llama").bfloat16(), lambda z: z + BIAS.to(z.device))
    liger_kernels.patch(model)
    out = model(**batch())
    assert out.loss.dtype == out.logits.dtype == torch.float32
    assert fallbacks(model) == {"Tensor.__add__": 1}
    model = changed(tiny("llama"), lambda z: z + BIAS.to(z.device))
    liger_kernels.patch(model)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        loss = model(**batch()).loss
    assert loss.dtype == torch.float32
    assert fallbacks(model) == {}


SEQ2SEQ = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    **{"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None},
}


def test_the_bias_of_a_sequence_to_sequence_model_is_fused():
    import transformers

    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQ2SEQ)).to(DEVICE).train()
    model.final_logits_bias = torch.linspace(-1, 1, VOCABULARY, device=DEVICE)[None]
    patched = copy.deepcopy(model)
    report = liger_kernels.patch(patched)
    ours = train(patched)
    assert RAN in patched.lm_head.__dict__
    assert report.fallbacks == {}
    compare(model, ours)
    torch.testing.assert_close(patched(**batch()).logits, model(**batch()).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"ignore_index": 7},
        {"weight": torch.linspace(0.5, 2, VOCAB)},
        {"reduction": "none"},
    ],
    ids=lambda options: next(iter(options)) + "=" + str(next(iter(options.values())))[:5],
)
def test_options_of_cross_entropy_reach_the_fused_loss(options):
    def own(logits, labels):
        cast = {k: v.to(logits.device, logits.dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        targets = labels.view(-1).masked_fill(labels.view(-1) < 0, options.get("ignore_index", -100))
        losses = F.cross_entropy(logits.view(-1, VOCAB), targets, **cast)
        loss = losses if losses.dim() == 0 else (losses * torch.linspace(0.1, 1, len(losses)).to(losses)).sum()
        return loss, logits

    patched = check_same(with_loss(tiny("llama"), own), lambda m: gradients(m, m(**batch()).loss))
    assert fallbacks(patched) == {}
