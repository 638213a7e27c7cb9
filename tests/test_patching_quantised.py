"""Adapters on quantised weights: the base runs as the module that it is, and the adapters run on the op."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from convergence.arms.setups import SETUPS
from convergence.arms.setups.quantised import SameBits
from convergence.judge.tolerance import SIGMAS, three_way
from liger_kernels import ops
from tests.patching_checks import DEVICE, batch, compare, fallbacks, gradients, tiny, train

KINDS = ("qlora", "qlora-8bit", "float8")
DTYPES = (torch.float32, torch.bfloat16)
BATCHES = 4
# Half of a format's widest step, as a share of the largest weight. NF4 has no value between 0.6962 and 1. Its scales
# are rounded to 8 bits, of which two neighbours are 0.9 / 64 apart. bitsandbytes casts to float16 before it takes 8
# bits. float8 has three bits after the first one.
ROUNDING = {"qlora": (1 - 0.6962 + 0.9 / 64) / 2, "qlora-8bit": 0.5 / 127 + 2**-11, "float8": 2**-4}


@pytest.fixture(params=KINDS)
def setup(request: pytest.FixtureRequest) -> Any:
    found = SETUPS[request.param]
    if why := found.absent(None, "float32", DEVICE.type):
        pytest.skip(why)
    if found.name == "qlora":
        request.getfixturevalue("right_four_bits")
    return found


of_bitsandbytes = pytest.mark.parametrize("setup", KINDS[:2], indirect=True)


def pair(setup: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A tiny model with adapters in float64, with the weights that the quantised ones stand for; and quantised."""
    template = setup.template(tiny("llama"))
    for parameter in template.parameters():
        parameter.data = parameter.data.to(dtype)
    truth = setup.truth().loaded(copy.deepcopy(template).double(), dtype)
    model = setup.loaded(template, dtype)
    setup.cast(model)
    return truth, model


def train_on_some(model: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients of several batches, stacked. One batch knows PyTorch's largest error badly."""
    found = [gradients(model, model(**batch(seed)).loss) for seed in range(BATCHES)]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients(setup: Any, dtype: torch.dtype) -> None:
    truth, model = pair(setup, dtype)
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    own_product = setup.name == "qlora"  # of a weight that is made dense; others are called as modules
    if not own_product:
        SameBits.watch(patched, "base_layer")
    exact, own = train_on_some(truth), train_on_some(model)
    ops.reset_launches()
    ours = train_on_some(patched)
    if own_product:
        assert ops.launches()["_lora_glu_bwd_kernel"] == 2 * BATCHES
    else:
        assert ops.launches()["_lora_linear_add_kernel"] >= 14
        SameBits.check(patched)
    compared = [name for name in own if name == "loss" or "lora_" in name]
    assert len(compared) == 1 + sum(len(layer.lora_A) * 2 for layer in layers(model)) + 14 * setup.has_bias
    for name in compared:
        assert ours[name].dtype == own[name].dtype
        three_way(ours[name], own[name], exact[name], dtype, name, chain=4)


@pytest.mark.usefixtures("right_four_bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_doras_of_four_bits(dtype: torch.dtype) -> None:
    setup = SETUPS["qdora"]
    if why := setup.absent(None, "float32", DEVICE.type):
        pytest.skip(why)
    truth, model = pair(setup, dtype)
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    exact, own, ours = train(truth), train(model), train(patched)
    report = liger_kernels.status(patched)
    assert report.counts()["dora_linear"] == len(layers(patched))
    assert not report.fallbacks
    assert not report.never_ran
    for name in own:
        if name == "loss" or "lora_" in name:
            assert ours[name].dtype == own[name].dtype
            three_way(ours[name], own[name], exact[name], dtype, name, chain=4)


def test_status_says_what_runs(setup: Any) -> None:
    _, model = pair(setup)
    report = liger_kernels.patch(model)
    assert report.counts() == {"rms_norm": 5, "rope": 2, "swiglu": 2, "lora_linear": 14, "linear_cross_entropy": 1}
    train(model)
    report = liger_kernels.status(model)
    assert not report.never_ran
    assert not report.fallbacks
    assert not report.left


def test_the_weights_stay_what_they_were(setup: Any) -> None:
    """Names, classes and every byte, after a step with the patch."""
    _, model = pair(setup)
    before = copy.deepcopy(model.state_dict())
    kinds = [(type(layer.base_layer), type(layer.base_layer.weight)) for layer in layers(model)]
    liger_kernels.patch(model)
    train(model)
    after = model.state_dict()
    assert [*after] == [*before]
    assert [(type(layer.base_layer), type(layer.base_layer.weight)) for layer in layers(model)] == kinds
    for name, value in before.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(_plain(after[name]), _plain(value)), name


def _plain(tensor: Any) -> torch.Tensor:
    plain: torch.Tensor = tensor.dequantize() if hasattr(tensor, "tensor_data_names") else tensor
    return plain


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(setup: Any, reentrant: bool) -> None:
    _, model = pair(setup)
    model.enable_input_require_grads()
    liger_kernels.patch(model)
    expected = train(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = train(model)
    assert all(map(torch.equal, found.values(), expected.values()))
    assert not fallbacks(model)


@of_bitsandbytes
def test_a_model_that_peft_prepared(setup: Any) -> None:
    """Norms and embedding in float32 on a bfloat16 model, under autocast."""
    import peft

    truth, model = pair(setup, torch.bfloat16)
    peft.prepare_model_for_kbit_training(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    found = []
    for one in (model, patched):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = one(**batch()).loss
        found.append(gradients(one, loss))
    own, ours = found
    exact = train(truth)
    assert ours.keys() == own.keys()
    for name, value in own.items():
        assert ours[name].dtype == value.dtype
        three_way(ours[name], value, exact[name], torch.bfloat16, name, chain=4)
    assert liger_kernels.status(patched).counts()["lora_linear"] == 14
    assert not fallbacks(patched)


def test_peft_computes_an_adapter_that_somebody_watches(setup: Any) -> None:
    truth, model = pair(setup)
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    layers(patched)[3].lora_A["default"].register_forward_hook(lambda *_: None)
    exact, own, ours = (train(one) for one in (truth, model, patched))
    compare(model, ours, own, {name: exact[name] for name in own})
    assert fallbacks(patched) == {"PEFT computed an adapter: lora_A or lora_B has hooks, or a forward of its own": 1}


@of_bitsandbytes
def test_disabled_and_merged(setup: Any) -> None:
    """Adapters in a merged weight are rounded with it. What peft then computes is what runs."""
    _, own = pair(setup)
    own.delete_adapter("second")
    own.set_adapter("default")
    patched = copy.deepcopy(own)
    liger_kernels.patch(patched, ["lora_linear"])
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x.requires_grad_()  # without it, bitsandbytes keeps its weights in another layout on a CPU with AVX512 BF16
    for change in ("disable_adapter_layers", "enable_adapter_layers", "merge_adapter"):
        for model in (own, patched):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that merging rounds
                getattr(model.base_model, change)()
        theirs, ours = (layers(model)[0](x) for model in (own, patched))
        if change == "enable_adapter_layers":
            torch.testing.assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs)
    assert not fallbacks(patched)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_format_stands_for_its_weight(setup: Any, dtype: torch.dtype) -> None:
    """What the truth multiplies by is what the layer does, and within the format's rounding of what it was."""
    torch.manual_seed(0)
    for outputs in (64, 48):
        linear = nn.Linear(64, outputs).to(DEVICE, dtype).requires_grad_(False)
        weight = linear.weight.clone()
        layer = setup.format.quantised(linear).train()
        found = setup.format.dequantised(layer)
        rounding = ROUNDING[setup.name] + torch.finfo(dtype).eps / 2
        assert 0 < float((found - weight).abs().max()) <= rounding * float(weight.abs().max())
        x = torch.randn(3, 64, device=DEVICE, dtype=dtype)
        expected = F.linear(x.double(), found.double(), linear.bias.double())
        if setup.name != "qlora-8bit" or DEVICE.type == "cpu":
            three_way(layer(x), F.linear(x, found.to(dtype), linear.bias), expected, dtype, "result")
            continue
        # A GPU rounds x to 127 steps of its row's largest element, each evenly to half a step. It rounds the sum to
        # float16, then that and the sum with the bias to x's dtype.
        of_x = x.double().abs().amax(-1, keepdim=True) / 127 / 12**0.5 * found.double().norm(dim=1)
        size = expected.abs() + linear.bias.double().abs()
        rounded = (torch.finfo(torch.float16).eps / 2 + torch.finfo(dtype).eps) * size
        assert bool(((layer(x).double() - expected).abs() <= SIGMAS * of_x + rounded).all())


def test_other_bits_of_a_base_are_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    SameBits.watch(model, "0")
    with pytest.raises(RuntimeError, match="0 was never called as a module"):
        SameBits.check(model)
    model(torch.ones(4))
    SameBits.check(model)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    with pytest.raises(RuntimeError, match="0 returns other numbers than before it was patched"):
        model(torch.ones(4))
