"""Set-ups in which peft's adapters are trained, on plain weights and on quantised ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from convergence.arms.setup import Setup
from convergence.arms.setups.quantised import Format, Int8, Nf4, SameBits, Torchao, dequantise, quantise


class Lora(Setup):
    """Two adapters that differ in all that an adapter may have, float32 ones on a model of 16 bits, as peft makes
    them."""

    name = "lora"
    does = "two active adapters of peft's LoRA on every projection, with a bias and rslora; the rest is frozen"
    needs: tuple[str, ...] = ("peft",)
    orders: tuple[str, ...] = ("after",)
    targets: tuple[str, ...] = ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    kernels: tuple[str, ...] = ("lora_linear",)
    dropout = 0.0
    has_bias = True
    has_second = True

    def absent(self, model: nn.Module | None, dtype: str, device: str) -> str:
        named = [] if model is None else [name.rpartition(".")[2] for name, _ in model.named_modules()]
        missing = [target for target in self.targets if named and target not in named]
        return super().absent(model, dtype, device) or (
            f"the set-up {self.name} adapts {', '.join(missing)}, which this model does not have" if missing else ""
        )

    def options(self) -> dict[str, Any]:
        """What both adapters adapt, and how."""
        return {"target_modules": [*self.targets], "lora_dropout": self.dropout, "task_type": "CAUSAL_LM"}

    def template(self, model: Any) -> Any:
        import peft

        torch.manual_seed(1)
        adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **self.options()))
        if self.has_second:
            options = {**self.options(), "use_rslora": True}
            if self.has_bias and "lora_bias" in peft.LoraConfig.__dataclass_fields__:
                options["lora_bias"] = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an adapter with a bias cannot be merged with a layer without one
                adapted.add_adapter("second", peft.LoraConfig(r=6, lora_alpha=3, **options))
            adapted.base_model.set_adapter(["default", "second"])
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:  # zero at first, so that the adapter would not show
                    parameter.normal_(std=0.1)
        return adapted.train()

    def cast(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()


class _Checkpointed(Setup):
    def wrap(self, model: Any, device: torch.device) -> Any:
        wrapped = super().wrap(model, device)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return wrapped


def with_checkpointing(*setups: type[Setup]) -> Iterator[type[Setup]]:
    """Each of ``setups``, and the same where activations of the decoder layers are computed again in the backward."""
    for setup in setups:
        does = f"the same as {setup.name}, and activations of the decoder layers are computed again in the backward"
        members = {"name": f"{setup.name}-checkpointing", "does": does, "__doc__": does}
        yield setup
        yield type(f"{setup.__name__}Checkpointing", (_Checkpointed, setup), members)


class Mask(nn.Module):
    """A dropout whose mask follows from the index of each element, so that it is the same in every dtype and arm."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        index = torch.arange(x.numel(), device=x.device) + self.seed
        kept = (index * 2654435761 >> 7) % 8 > 0
        return x * kept.view(x.shape) * (8 / 7)


class LoraDropout(Lora):
    """Every projection and adapter has a mask of its own."""

    name = "lora-dropout"
    does = "the same as lora, and each adapter drops an eighth of what its projection gets"
    dropout = 0.125

    def template(self, model: Any) -> Any:
        adapted = super().template(model)
        dropouts = [(m, name) for m in adapted.modules() if hasattr(m, "lora_dropout") for name in m.lora_dropout]
        for seed, (module, name) in enumerate(dropouts):
            module.lora_dropout[name] = Mask(1000 * seed)
        return adapted


class LoraAutocast(Lora):
    name = "lora-autocast"
    does = "two active adapters of peft's LoRA on every projection, and torch.autocast in bfloat16"
    dtypes = ("float32",)

    def running(self, device: torch.device) -> Any:
        return torch.autocast(device.type, dtype=torch.bfloat16)


class LoraExperts(Lora):
    """peft adapts parameters without dropout and without a bias."""

    name = "lora-experts"
    does = "two active adapters of peft's LoRA on the packed weights of experts; the rest is frozen"
    targets = ("experts.gate_up_proj", "experts.down_proj")
    kernels = ("lora_experts",)
    has_bias = False

    def absent(self, model: Any, dtype: str, device: str) -> str:
        if (missing := Setup.absent(self, model, dtype, device)) or model is None:
            return missing
        import peft

        if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
            return f"the set-up {self.name} needs a newer peft, whose LoraConfig has target_parameters"
        names = [name for name, _ in model.named_parameters()]
        if all(any(name.endswith(target) for name in names) for target in self.targets):
            return ""
        return f"the set-up {self.name} adapts packed experts, which this model does not have"

    def options(self) -> dict[str, Any]:
        return {"target_parameters": [*self.targets]}


class LoraHead(Lora):
    """A head that is tied to its embedding has the adapters alone: the embedding stays as it is."""

    name = "lora-head"
    does = "two adapters of peft's LoRA on every projection and the LM head"
    targets = (*Lora.targets, "lm_head")


class LoraSingle(Lora):
    """Kernels of other packages take one adapter."""

    name = "lora-single"
    does = "one adapter of peft's LoRA on every projection; the rest is frozen"
    has_second = False


class Dora(Lora):
    """peft scales to magnitudes what one adapter makes."""

    name = "dora"
    does = "an adapter of peft's DoRA on every projection; the rest is frozen"
    kernels = ("dora_linear",)
    has_second = False

    def options(self) -> dict[str, Any]:
        return {**super().options(), "use_dora": True}


class Qlora(Lora):
    """The truth has the weights that the quantised ones stand for. They are frozen, and nothing of them is observed."""

    name = "qlora"
    does = "adapters as in lora, on weights of bitsandbytes in 4 bits (NF4), whose scales are quantised, too"
    needs = ("peft", "bitsandbytes")
    format: Format = Nf4()

    def truth(self) -> Setup:
        return _Dequantised(self)

    def loaded(self, model: Any, dtype: torch.dtype) -> Any:
        values = dict(model.named_parameters())
        adapted = self.template(quantise(model.unload(), self.targets, self.format))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = values[name].data
        return adapted

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in super().named(model, wrapped) if not name.endswith("base_layer.weight"))


class _Dequantised(Setup):
    """The truth of a set-up whose weights are quantised."""

    def __init__(self, setup: Qlora) -> None:
        self.setup = setup

    def loaded(self, model: Any, dtype: torch.dtype) -> Any:
        return dequantise(model, self.setup.targets, self.setup.format, dtype)

    def named(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.setup.named(model, wrapped)


class Qdora(Dora, Qlora):
    name = "qdora"
    does = "an adapter as in dora, on weights of bitsandbytes in 4 bits as in qlora"


class Qlora8Bit(Qlora):
    """On a GPU the product rounds what comes in to 8 bits, which the truth does not do: its verdict sees little of the
    base. So every result of a base must have the bits that the base's own class returns.
    """

    name = "qlora-8bit"
    does = "adapters as in lora, on weights of bitsandbytes in 8 bits; results of these layers are equal bit for bit"
    format = Int8()

    def wrap(self, model: Any, device: torch.device) -> Any:
        SameBits.watch(model, "base_layer")
        return super().wrap(model, device)

    def weights(self, model: nn.Module, wrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
        SameBits.check(model)
        return super().weights(model, wrapped)


class Float8(Qlora):
    name = "float8"
    does = "adapters as in lora, but for the bias, on weights of torchao: 8-bit integers in o_proj, float8 elsewhere"
    needs = ("peft", "torchao")
    format = Torchao()
    has_bias = False  # peft refuses it
