"""Set-ups of one process that change how a model runs: autocast, scaling, recomputation, compilation, devices."""

from __future__ import annotations

from typing import Any

import torch

from convergence.arms.setup import Setup


class Autocast(Setup):
    name = "bf16-autocast"
    does = "torch.autocast in bfloat16 around the forward"
    dtypes = ("float32",)
    computes_in = torch.bfloat16

    def running(self, device: torch.device) -> Any:
        return torch.autocast(device.type, dtype=self.computes_in)


class Fp16Scaler(Autocast):
    """Gradients are read after the scaler has taken its factor out of them."""

    name = "fp16-scaler"
    does = "torch.autocast in float16, and a GradScaler"
    computes_in = torch.float16
    scale = 1024.0

    def backward(self, wrapped: Any, loss: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler(loss.device.type, init_scale=self.scale)
        scaler.scale(loss).backward()
        # One parameter group is all that unscale_ asks for.
        trained = [parameter for parameter in wrapped.parameters() if parameter.grad is not None]
        kept = [parameter.grad for parameter in trained]
        scaler.unscale_(torch.optim.SGD(trained, lr=0.0))
        for parameter, grad in zip(trained, kept, strict=True):
            parameter.grad = grad


class Checkpointing(Setup):
    name = "checkpointing"
    orders = ("before", "after")
    does = "activations of the decoder layers are computed again in the backward"

    def wrap(self, model: Any, device: torch.device) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class ReentrantCheckpointing(Checkpointing):
    name = "checkpointing-reentrant"
    does = "the same as checkpointing, by the older kind, whose backward runs within another one"

    def wrap(self, model: Any, device: torch.device) -> Any:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model


class Compile(Setup):
    name = "compile"
    orders = ("before", "after")
    does = "torch.compile of every decoder layer (a CPU runs the graphs without Inductor)"

    def environment(self, folder: str) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}

    def wrap(self, model: Any, device: torch.device) -> Any:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager" if device.type == "cpu" else "inductor", dynamic=True)
        return model


class DeviceMap(Setup):
    """A head that is tied to its embedding lies with it, on the first device."""

    name = "device-map"
    does = "accelerate's dispatch_model over two GPUs (a CPU gets its hooks alone)"
    orders = ("after", "before")
    gpus = 2
    needs = ("accelerate",)

    def wrap(self, model: Any, device: torch.device) -> Any:
        from accelerate import dispatch_model

        first, last = ("cpu", "cpu") if device.type == "cpu" else (0, 1)
        half = len(model.model.layers) // 2
        where = {f"model.{name}": first for name, _ in model.model.named_children() if name != "layers"}
        where |= {f"model.layers.{i}": first if i < half else last for i in range(len(model.model.layers))}
        head = first if model.config.tie_word_embeddings else last
        return dispatch_model(model, {**where, "model.norm": last, "lm_head": head}, force_hooks=True)
