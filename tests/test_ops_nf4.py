"""A weight of bitsandbytes' NF4 as a dense matrix: bitsandbytes' own numbers, to the last bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from liger_kernels import ops
from liger_kernels.ops import Projection, adapted_linears
from liger_kernels.ops.lora.nf4 import NestedScales, PackedNf4, dense_nf4, dense_nf4_ref, same_nf4
from liger_kernels.ops.lora.projection import as_it_is
from liger_kernels.patching.lora import projection
from liger_kernels.patching.lora.projection import weights_of
from tests.patching_checks import DEVICE

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes 0.50 or newer, of the extra qlora")
pytestmark = pytest.mark.usefixtures("right_four_bits")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((33, 96), (3, 22), (1, 1042))  # the last two have a block that is not full


def quantised(size: tuple[int, int], dtype: torch.dtype, seed: int = 0, **options: Any) -> Any:
    """bitsandbytes' layer of a random weight of very different rows."""
    torch.manual_seed(seed)
    weight = (torch.randn(size) * torch.logspace(-3, 3, size[0])[:, None]).to(dtype)
    layer = bitsandbytes.nn.Linear4bit(size[1], size[0], bias=False)
    layer.weight = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, **{"quant_type": "nf4", "module": layer} | options
    )
    return layer.to(DEVICE)


def both(layer: Any, dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What makes the weight dense in a call, the matrix that it makes, and bitsandbytes'."""
    weights = weights_of(layer, torch.zeros(1, layer.in_features, dtype=dtype, device=DEVICE))
    assert weights is not None
    weight, _, dense, shape = weights
    assert tuple(shape) == (layer.out_features, layer.in_features)
    return dense, dense(weight), bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)


@pytest.mark.parametrize("blocks", [32, 256])
@pytest.mark.parametrize("nested", [False, True], ids=["scales", "nested"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_bits_are_those_of_bitsandbytes(
    size: tuple[int, int], dtype: torch.dtype, nested: bool, blocks: int
) -> None:
    layer = quantised(size, dtype, compress_statistics=nested, blocksize=blocks)
    ops.reset_launches()
    dense, ours, theirs = both(layer, dtype)
    assert ops.launches() == {"_nf4_kernel": 1}
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    assert torch.equal(dense_nf4_ref(layer.weight.data, dense), theirs)


@pytest.mark.parametrize("nested", [False, True], ids=["scales", "nested"])
@pytest.mark.parametrize("sizes", [((64, 96), (33, 96)), ((256, 160), (32, 160), (17, 160))], ids=str)
def test_several_weights_in_one_launch(sizes: tuple[tuple[int, int], ...], nested: bool) -> None:
    layers = [quantised(size, torch.bfloat16, seed, compress_statistics=nested) for seed, size in enumerate(sizes)]
    dense, _, theirs = zip(*[both(layer, torch.bfloat16) for layer in layers], strict=True)
    assert same_nf4(dense)
    ops.reset_launches()
    ours = dense_nf4([layer.weight for layer in layers], dense)
    assert ops.launches() == {"_nf4_kernel": 1}
    assert all(map(torch.equal, ours, theirs))


def test_weights_of_other_blocks_are_apart() -> None:
    sizes = (64, 128)
    kinds = [{"blocksize": 64}, {"blocksize": 128}, {"compress_statistics": False}]
    (one, other, plain) = (both(quantised(sizes, torch.bfloat16, **kind), torch.bfloat16)[0] for kind in kinds)
    half = both(quantised(sizes, torch.float16), torch.float16)[0]
    assert same_nf4([one, one])
    for several in ([one], [one, other], [one, plain], [one, half], [one] * 4, [one, as_it_is]):
        assert not same_nf4(several)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_more_blocks_of_scales_than_one(dtype: torch.dtype) -> None:
    _, ours, theirs = both(quantised((256, 160), dtype), dtype)
    assert torch.equal(ours, theirs)


ODD = {
    "fp4": lambda: quantised((64, 64), torch.bfloat16, quant_type="fp4"),
    "kept as another dtype": lambda: quantised((64, 64), torch.bfloat16, quant_storage=torch.bfloat16),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_kept_in_another_way_is_left_to_bitsandbytes(kind: str) -> None:
    ops.reset_launches()
    dense, ours, theirs = both(ODD[kind](), torch.bfloat16)
    assert dense.func is bitsandbytes.functional.dequantize_4bit
    assert not ops.launches()
    assert torch.equal(ours, theirs)


def test_a_weight_that_is_quantised_again_is_read_again() -> None:
    layer = quantised((64, 64), torch.bfloat16)
    both(layer, torch.bfloat16)
    state = layer.weight.quant_state
    state.absmax = state.absmax.flip(0)
    _, ours, theirs = both(layer, torch.bfloat16)
    assert torch.equal(ours, theirs)


def test_a_weight_in_another_place_is_read_again() -> None:
    layer, other = (quantised((64, 64), torch.bfloat16, seed) for seed in range(2))
    both(layer, torch.bfloat16)
    layer.weight.data = other.weight.data
    _, ours, theirs = both(layer, torch.bfloat16)
    assert torch.equal(ours, theirs)


def product_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weights = weights_of(layer, x)
    assert weights is not None
    (y,) = adapted_linears(x, [Projection(weights[0], None, [], weights[2])])
    return y


def test_a_weight_that_moves_before_the_backward_is_read_where_it_is() -> None:
    """As packages do that swap blocks of a model through two buffers. No version counter tells of it."""
    layer, other = (quantised((64, 64), torch.bfloat16, seed) for seed in range(2))
    x = torch.randn(4, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(product_of(layer, x).sum(), x)
    buffers = layer.weight.data.clone(), layer.weight.data.clone()
    layer.weight.data = buffers[0]
    y = product_of(layer, x)
    buffers[0].copy_(other.weight.data)
    layer.weight.data = buffers[1]
    assert torch.equal(*torch.autograd.grad(y.sum(), x), *expected)


def test_what_was_read_does_not_hold_the_bytes() -> None:
    layer = quantised((64, 64), torch.bfloat16)
    array = layer.weight.data.cpu().numpy().copy()
    layer.weight.data, held = torch.from_numpy(array), weakref.ref(array)
    del array
    assert held() is not None
    weights_of(layer, torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE))
    layer.weight.data = torch.empty(0, dtype=torch.uint8)
    gc.collect()
    assert held() is None


def test_weights_of_several_codes() -> None:
    """Each weight of a launch is made of its own code, scales and length."""
    packed, states, expected = [], [], []
    for i, rows in enumerate((2, 5, 3)):
        code, scales = torch.arange(16.0, device=DEVICE) + i, torch.arange(1.0, rows + 1, device=DEVICE) * (i + 1)
        bytes_ = torch.arange(16 * rows, dtype=torch.uint8, device=DEVICE).reshape(-1, 1) + i
        packed.append(bytes_)
        states.append(PackedNf4(code, scales, 32, (rows, 32), torch.float32, None))
        numbers = torch.stack([bytes_ >> 4, bytes_ & 15], 1).reshape(rows, 32).long()
        expected.append(code[numbers] * scales[:, None])
    assert same_nf4(states)
    assert all(map(torch.equal, dense_nf4(packed, states), expected))


def test_where_no_kernel_runs_bitsandbytes_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "use_triton", lambda _: False)
    dense, ours, theirs = both(quantised((64, 64), torch.bfloat16), torch.bfloat16)
    assert dense.func is bitsandbytes.functional.dequantize_4bit
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["nf4", *ODD])
def test_what_was_read_dies_with_the_layer(kind: str) -> None:
    layer = quantised((64, 64), torch.bfloat16) if kind == "nf4" else ODD[kind]()
    both(layer, torch.bfloat16)
    state, absmax = weakref.ref(layer.weight.quant_state), weakref.ref(layer.weight.quant_state.absmax)
    del layer
    gc.collect()
    assert state() is absmax() is None


def test_scales_without_nesting_of_a_strangers_code() -> None:
    """The code is read, and none is assumed."""
    code, scales = torch.arange(16.0, device=DEVICE), torch.tensor([1.0, 10.0], device=DEVICE)
    packed = torch.arange(32, dtype=torch.uint8, device=DEVICE).reshape(-1, 1)
    found = PackedNf4(code, scales, 32, (2, 32), torch.float32, None)(packed)
    numbers = [digit for byte in range(32) for digit in divmod(byte, 16)]
    expected = torch.tensor(numbers, dtype=torch.float32, device=DEVICE).reshape(2, 32) * scales[:, None]
    assert torch.equal(found, expected)
    nested = NestedScales(torch.arange(256.0, device=DEVICE), scales[1:], 256, torch.tensor(0.5, device=DEVICE))
    eight = torch.tensor([3, 200], dtype=torch.uint8, device=DEVICE)
    found = PackedNf4(code, eight, 32, (2, 32), torch.float32, nested)(packed)
    assert torch.equal(found, expected / scales[:, None] * torch.tensor([[30.5], [2000.5]], device=DEVICE))
