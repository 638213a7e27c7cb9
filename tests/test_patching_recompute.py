"""patch(recompute="mlp"): the same numbers from the MLP's input alone, and nothing where tiles would be noticed."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import liger_kernels
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import Products
from tests.patching_checks import DEVICE, batch, check_same, fallbacks, gradients, tiny, train

KEPT = "recompute='mlp' kept what an MLP saves: {}"
ROUNDINGS = 10  # to bfloat16, of a gradient on its way through two layers, each of at most 2^-9
TILE = 7  # of 18 tokens: the last tile has four, of which one has a target behind it


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    with tiled(recomputed_mlp=lambda *_: TILE):
        yield


def patch(model: Any) -> Any:
    return liger_kernels.patch(model, recompute="mlp")


def with_adapters(model: Any, dropout: float = 0.0) -> Any:
    peft = pytest.importorskip("peft", reason="this version of transformers is tested without peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def checkpointed(model: Any, reentrant: bool) -> Any:
    if reentrant:
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


WAYS = {"plain": lambda model: model, "checkpointing": lambda model: checkpointed(model, False)}
WAYS["reentrant"] = lambda model: checkpointed(model, True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_the_same_numbers(family: str, way: str) -> None:
    """Phi-3 makes gate and up in one projection, whose module is called; behind Gemma-2's MLP there is a norm."""
    model = check_same(WAYS[way](tiny(family)), train, patch=patch)
    assert not fallbacks(model)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers_with_adapters(way: str) -> None:
    model = check_same(WAYS[way](with_adapters(tiny("llama"))), train, patch=patch)
    assert not fallbacks(model)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_an_mlp_saves_its_input_alone(family: str) -> None:
    model = tiny(family, num_hidden_layers=1)
    patch(model)
    mlp: Any = model.model.layers[0].mlp
    x = torch.randn(2, 9, mlp.down_proj.out_features, device=DEVICE, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        mlp(x)
    assert len(saved) == 1
    assert saved[0] is x


@pytest.mark.parametrize(("family", "products"), [("llama", (3, 8)), ("phi3", (2, 5))])
def test_checkpointing_costs_no_product_more(family: str, products: tuple[int, int]) -> None:
    """Gate and up are computed again in their tiles, and down is not. Phi-3 has one product for the two."""
    model = tiny(family, num_hidden_layers=1)
    patch(model)
    mlp: Any = model.model.layers[0].mlp
    x = torch.randn(2, 9, mlp.down_proj.out_features, device=DEVICE, requires_grad=True)
    with Products() as forward:
        y = torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)
    with Products() as backward:
        y.sum().backward()
    n = -(-18 // TILE)
    assert (forward.count, backward.count) == (n * products[0], n * products[1])


def test_dropout_draws_the_same_in_both_directions() -> None:
    """The reference goes by the same tiles, and autograd keeps all of them."""
    model = with_adapters(tiny("llama", num_hidden_layers=1), dropout=0.5)
    patch(model)
    mlp = model.base_model.model.model.layers[0].mlp
    x = torch.randn(2, 9, mlp.down_proj.out_features, device=DEVICE)
    found = []
    for again in (True, False):
        some = x.clone().requires_grad_()
        torch.manual_seed(1)
        if again:
            y = mlp(some)
        else:
            mlp._liger_kernels.recompute = None
            y = torch.cat([mlp(rows) for rows in some.view(1, 18, -1).split(TILE, dim=1)], dim=1).view(x.shape)
        after = torch.rand(1)
        torch.rand(7)  # somebody draws before the backward
        state = torch.get_rng_state()
        found.append({"y": y.detach(), "after": after, "x": some, **gradients(model, y.square().sum())})
        found[-1]["x"] = some.grad
        assert torch.equal(state, torch.get_rng_state())
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, msg=lambda text, name=name: f"{name}: {text}")


class DtypesOfProducts(TorchDispatchMode):
    """Of what matrix products multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("mm", "addmm"):
            self.found.add(args[-1].dtype)
        return function(*args, **(kwargs or {}))


def test_autocast_is_that_of_the_forward() -> None:
    for family in ("llama", "phi3"):
        model, plain = tiny(family), tiny(family)
        patch(model)
        liger_kernels.patch(plain)
        found, dtypes = [], []
        for one in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(**batch()).loss
            with DtypesOfProducts() as backward:
                found.append(gradients(one, loss))
            dtypes.append(backward.found)
        assert family == "llama" or dtypes[0] == dtypes[1]  # the op's own sums over tiles are in float32
        for name, value in found[1].items():
            assert found[0][name].dtype == value.dtype
            difference = (found[0][name] - value).norm() / value.norm()
            assert difference <= ROUNDINGS * 2**-9, f"{name}: {difference}"


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_parameter_gets_its_gradient_once(family: str) -> None:
    """DDP counts how often a parameter's gradient is ready."""
    model = tiny(family)
    patch(model)
    ready: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    model(**batch()).loss.backward()
    assert sorted(ready) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_hook_on_a_gradient_is_called_once(family: str) -> None:
    """Tiles of the op are its own. Where modules are called, the MLP keeps what it always keeps."""
    model, expected = tiny(family), train(tiny(family))
    patch(model)
    weight = model.model.layers[0].mlp.down_proj.weight
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda grad: seen.append(grad))
    train(model)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected["model.layers.0.mlp.down_proj.weight"])
    reason = KEPT.format("the gradient of a parameter has hooks")
    assert fallbacks(model) == ({} if family == "llama" else {reason: 1})


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_hook_on_a_projection_sees_all_tokens(family: str) -> None:
    model = tiny(family, num_hidden_layers=1)
    patch(model)
    seen: list[torch.Size] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    expected = train(tiny(family, num_hidden_layers=1))
    for name, value in train(model).items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    assert [tuple(shape[:2]) for shape in seen] == [(2, 9)]
    assert fallbacks(model) == {KEPT.format("a module of it has hooks, or a forward of its own"): 1}


def test_a_weight_that_is_no_parameter_has_its_gradient() -> None:
    """As FSDP1 keeps it, a view of what is trained."""
    model = tiny("phi3", num_hidden_layers=1)
    patch(model)
    linear = model.model.layers[0].mlp.gate_up_proj
    flat = nn.Parameter(linear.weight.detach().clone())
    del linear.weight
    linear.weight = flat * 1.0
    model(**batch()).loss.backward()
    assert flat.grad is not None
    assert flat.grad.any()
    assert fallbacks(model) == {KEPT.format("a weight of it is no parameter"): 1}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_weight_that_was_changed_before_the_backward_is_refused(family: str) -> None:
    """As torch refuses it."""
    model = tiny(family, num_hidden_layers=1)
    patch(model)
    loss = model(**batch()).loss
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_weights_and_a_frozen_input() -> None:
    for family in ("llama", "phi3"):
        model = tiny(family, num_hidden_layers=1).requires_grad_(False)
        patch(model)
        mlp: Any = model.model.layers[0].mlp
        x = torch.randn(2, 9, mlp.down_proj.out_features, device=DEVICE)
        assert not mlp(x).requires_grad
        mlp.down_proj.weight.requires_grad_()
        mlp(x).sum().backward()
        assert mlp.down_proj.weight.grad is not None
        assert mlp.down_proj.weight.grad.any()
        x.requires_grad_()
        mlp.down_proj.weight.requires_grad_(False)
        (of_x,) = torch.autograd.grad(mlp(x).sum(), [x])
        assert of_x.any()


def test_evaluation_computes_as_it_always_does() -> None:
    model, plain = tiny("llama").eval(), tiny("llama").eval()
    patch(model)
    liger_kernels.patch(plain)
    with torch.no_grad(), Products() as ours:
        loss = model(**batch()).loss
    with torch.no_grad(), Products() as theirs:
        assert torch.equal(loss, plain(**batch()).loss)
    assert ours.count == theirs.count


def test_copies_pickles_and_unpatch() -> None:
    model = tiny("phi3")
    patch(model)
    expected = train(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        report = liger_kernels.status(other)
        assert report.recompute == "mlp"
        assert "recompute='mlp'" in str(report)
        assert all(torch.equal(value, expected[name]) for name, value in train(other).items())
    liger_kernels.unpatch(model)
    assert liger_kernels.status(model) is None


def test_options_that_make_no_sense() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="recompute is 'attention'; it must be one of 'mlp'"):
        liger_kernels.patch(model, recompute="attention")
    assert liger_kernels.status(model) is None
    liger_kernels.patch(model)
    with pytest.raises(ValueError, match="already patched with recompute=None, not 'mlp'"):
        patch(model)
    with pytest.warns(UserWarning, match="recompute='mlp' has no effect in this LlamaForCausalLM"):
        liger_kernels.patch(tiny("llama"), ["rms_norm"], recompute="mlp")


def test_with_layer_inputs_on_the_host() -> None:
    model = checkpointed(tiny("llama"), False)
    plain = check_same(model, train, patch=patch)
    liger_kernels.patch(model, recompute="mlp", offload="layers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = train(model)
    assert all(torch.equal(value, both[name]) for name, value in train(plain).items())


def test_a_result_of_zero_tokens() -> None:
    model = tiny("phi3", num_hidden_layers=1)
    patch(model)
    mlp: Any = model.model.layers[0].mlp
    x = torch.randn(2, 0, mlp.down_proj.out_features, device=DEVICE, requires_grad=True)
    y = mlp(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


def evaluates(model: Any) -> None:
    model.eval()


def disables(model: Any) -> None:
    model.base_model.disable_adapter_layers()
    model.requires_grad_(True)


def rescales(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


def deletes(model: Any) -> None:
    model.delete_adapter("default")


def freezes(model: Any) -> None:
    model.requires_grad_(False)


@pytest.mark.parametrize("change", [evaluates, disables, rescales, deletes, freezes])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_change_between_forward_and_backward_changes_no_gradient(family: str, change: Any) -> None:
    """As where autograd keeps everything: the backward is that of the forward."""
    found = []
    with tiled(recomputed_mlp=lambda *_: 18):  # all tokens: dropout draws the same masks as without
        for recompute in ("mlp", None):
            model = with_adapters(tiny(family, num_hidden_layers=1), dropout=0.5)
            liger_kernels.patch(model, recompute=recompute)
            parameters = [p for p in model.parameters() if p.requires_grad]
            torch.manual_seed(1)
            loss = model(**batch()).loss
            change(model)
            loss.backward()
            found.append([p.grad for p in parameters])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
