"""Frozen weights that another package keeps in fewer bits: how a layer gets them, and what they stand for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from convergence.arms.float64 import as_asked


class Format:
    """One way to keep the weight of a linear layer.

    Attributes:
        mark: the attribute by which peft learns that a model's layers are in this format; empty where it looks at them.
    """

    mark = ""

    def quantised(self, linear: nn.Linear) -> Any:
        """A layer on ``linear``'s device whose weight is ``linear``'s in this format. ``linear`` may be changed."""
        raise NotImplementedError

    def dequantised(self, layer: Any) -> torch.Tensor:
        """The weight that ``layer``, made by :meth:`quantised`, stands for: [out, in], in the dtype that it had."""
        raise NotImplementedError


class Nf4(Format):
    """bitsandbytes' 4-bit NormalFloat, whose scales are quantised, too, as QLoRA has them (arXiv:2305.14314)."""

    mark = "is_loaded_in_4bit"

    def quantised(self, linear: nn.Linear) -> Any:
        from bitsandbytes.nn import Linear4bit, Params4bit

        dtype, shape = linear.weight.dtype, (linear.in_features, linear.out_features)
        layer = Linear4bit(*shape, bias=linear.bias is not None, compute_dtype=dtype, device=torch.device("meta"))
        layer.support_avx512bf16_for_cpu = False  # inference on such a CPU rounds the scales, and takes few shapes
        options: dict[str, Any] = {"requires_grad": False, "compress_statistics": True, "quant_type": "nf4"}
        return _on_its_device(layer, linear, Params4bit(linear.weight.detach(), **options))

    def dequantised(self, layer: Any) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        weight: torch.Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        return weight


class Int8(Format):
    """bitsandbytes' 8-bit integers. Its product rounds what comes in to 8 bits as well, and its gradient does not."""

    mark = "is_loaded_in_8bit"

    def quantised(self, linear: nn.Linear) -> Any:
        from bitsandbytes.nn import Int8Params, Linear8bitLt

        options: dict[str, Any] = {"has_fp16_weights": False, "threshold": 6.0, "device": torch.device("meta")}
        layer = Linear8bitLt(linear.in_features, linear.out_features, bias=linear.bias is not None, **options)
        # Only a weight that comes from the CPU is quantised on its way.
        weight = Int8Params(linear.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False)
        return _on_its_device(layer, linear, weight)

    def dequantised(self, layer: Any) -> torch.Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        weight: torch.Tensor = int8_vectorwise_dequant(layer.weight.CB, layer.weight.SCB)
        return weight


class Torchao(Format):
    """torchao's tensor subclasses, for weights alone: float8 where the layer is wider than long, else int8."""

    def quantised(self, linear: nn.Linear) -> Any:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        is_wide = linear.in_features != linear.out_features
        quantize_(linear, Float8WeightOnlyConfig() if is_wide else Int8WeightOnlyConfig(version=2))
        return linear.requires_grad_(False)

    def dequantised(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.weight.dequantize()
        return weight


def _on_its_device(layer: Any, linear: nn.Linear, weight: nn.Parameter) -> Any:
    """``layer`` with ``weight``, which bitsandbytes quantises when it moves to a device."""
    layer.weight, layer.bias = weight, linear.bias
    return layer.to(linear.weight.device)


def quantise(model: Any, targets: tuple[str, ...], format: Format) -> Any:
    """``model`` with its layers ``targets`` in ``format``."""
    for path, module in [*model.named_modules()]:
        parent, _, name = path.rpartition(".")
        if name in targets:
            setattr(model.get_submodule(parent), name, format.quantised(module))
    if format.mark:
        setattr(model, format.mark, True)
    return model


def dequantise(model: Any, targets: tuple[str, ...], format: Format, dtype: torch.dtype) -> Any:
    """``model`` whose layers ``targets``, adapted by peft, have what is left of their weights after ``format`` has
    kept them in ``dtype``."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            linear = module.base_layer
            with as_asked():
                kept = format.quantised(copy.deepcopy(linear).to(dtype))
                linear.weight.data = format.dequantised(kept).to(linear.weight.dtype)
    return model


class SameBits:
    """A hook on a layer, which calls a copy of it as it was, and compares the results."""

    def __init__(self, layer: nn.Module, path: str) -> None:
        self.own, self.path, self.calls = copy.deepcopy(layer), path, 0

    @classmethod
    def watch(cls, model: nn.Module, paths: str) -> None:
        """Watch every layer of ``model`` whose path ends with ``paths``."""
        for path, layer in [*model.named_modules()]:
            if path.endswith(paths):
                layer.register_forward_hook(cls(layer, path))

    def __call__(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.calls += 1
        with torch.no_grad():
            expected = self.own.train(layer.training)(*inputs)
        if not torch.equal(output, expected):
            off = (output.double() - expected.double()).abs().max()
            raise RuntimeError(f"{self.path} returns other numbers than before it was patched; they are off by {off}")

    @classmethod
    def check(cls, model: nn.Module) -> None:
        """Raise :class:`RuntimeError` for a layer that is watched and was never called as a module."""
        for path, layer in model.named_modules():
            if any(isinstance(hook, cls) and not hook.calls for hook in layer._forward_hooks.values()):
                raise RuntimeError(f"{path} was never called as a module")
