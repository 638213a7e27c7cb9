"""``patch(recompute="mlp")``: a gated MLP saves only its input, and recomputes everything else in the backward.

``ops.gated_mlp`` does this for projections that are matrices, with or without adapters. This file does it for every
other MLP whose kernel runs on its modules. Here forward and backward call the modules for one tile of tokens after
another. Both ways save before they compute, so the recomputation of a checkpointed layer stops before the MLP.

Tokens of an MLP do not depend on each other. A module that draws random numbers draws the same ones in both directions.
The backward calls copies of the modules as they were in the forward: mode and adapters may be others by then.
A hook on a module or on a parameter's gradient would run once per tile. An MLP with such hooks saves what it always
saves, and the report counts the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from liger_kernels.ops.lora.gated_mlp import tokens_of_tile
from liger_kernels.ops.runtime.ahead import real_device
from liger_kernels.ops.runtime.anchor import Computed, anchor, saves_first
from liger_kernels.ops.runtime.arguments import one_of
from liger_kernels.ops.runtime.dispatch import autocast_dtype, backward_once, in_dtype
from liger_kernels.ops.runtime.kept import keep, kept
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.report import REPORT

Recompute = Annotated[str, one_of(("mlp",))]
Run = Callable[[nn.Module, Tensor, bool], Tensor]  # of an MLP, x, and whether to leave the last product out


def recomputes(mlp: Any) -> bool:
    """Whether ``mlp`` saves only its input now. In evaluation it saves nothing."""
    if torch.compiler.is_compiling():
        return False
    report = mlp.__dict__.get(REPORT)
    return report is not None and report.recompute is not None and mlp.training


def in_tiles(mlp: nn.Module, run: Run, x: Tensor) -> Tensor:
    """``run(mlp, x, False)``, one tile after another; only ``x`` is saved. If a hook would notice the tiles, everything
    runs at once."""
    parameters = list(mlp.parameters())
    reason = _obstacle(mlp, parameters)
    if reason is not None:
        fallbacks = mlp.__dict__[REPORT].fallbacks
        fallbacks[f"recompute='mlp' kept what an MLP saves: {reason}"] += 1
        return run(mlp, x, False)
    trained = [p for p in parameters if p.requires_grad]
    if not torch.is_grad_enabled():  # as in the forward of a reentrant checkpoint
        return _forward(run, mlp, x)
    state, first = _Surroundings(x.device), saves_first()
    y: Tensor = _TiledFunction.apply(run, mlp, x, state, first, *trained)
    return Computed.apply(partial(_forward, run, mlp, x), y) if first else y


def _obstacle(mlp: nn.Module, parameters: Sequence[Tensor]) -> str | None:
    """Why ``mlp`` cannot run in tiles; None if it can."""
    if probe.has_global_hooks():
        return "all modules have hooks"
    for module in mlp.modules():
        if module is not mlp and probe.has_hooks(module):
            return "a module of it has hooks, or a forward of its own"
        if any(isinstance(value, Tensor) and value.requires_grad for value in module.__dict__.values()):
            return "a weight of it is no parameter"
    if any(p._backward_hooks for p in parameters):
        return "the gradient of a parameter has hooks"
    return None


def _as_it_is(module: nn.Module) -> nn.Module:
    """Copies of ``module`` and of what is inside, with the same parameters and buffers."""
    clone: nn.Module = probe.shallow_copy(module)
    clone._modules.update({name: _as_it_is(child) for name, child in module._modules.items() if child is not None})
    return clone


class _Surroundings:
    """The current state of random numbers and autocast, which may affect a module's result in addition to its input."""

    def __init__(self, device: torch.device):
        self.device = device
        self.random = torch.get_rng_state()
        self.of_device: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self.random_of_device = None if self.of_device is None else self.of_device.get_rng_state(device)
        self.autocast = autocast_dtype(device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the saved state is set again."""
        devices = {} if self.of_device is None else {"devices": [self.device], "device_type": self.device.type}
        kind = real_device(self.device).type
        with (
            torch.random.fork_rng(**devices or {"devices": []}),
            torch.autocast(kind, self.autocast, enabled=self.autocast is not None),
        ):
            torch.set_rng_state(self.random)
            if self.of_device is not None:
                self.of_device.set_rng_state(self.random_of_device, self.device)
            yield


class _TiledFunction(torch.autograd.Function):
    """The node saves x. It sums the gradients of trained parameters over tiles in float32, and returns each sum
    once."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, mlp: nn.Module, x: Tensor, state: _Surroundings, first: bool, *trained: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        keep(ctx, trained)
        if any(ctx.needs_input_grad):
            ctx.run, ctx.state = partial(run, _as_it_is(mlp)), state
        if not first:
            return _forward(run, mlp, x)
        return anchor(x.shape, autocast_dtype(x.device) or x.dtype, x.device)

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        trained: Any = kept(ctx)
        # autograd adds no gradient to what has been frozen since the forward
        needed = [need and t.requires_grad for t, need in zip(trained, ctx.needs_input_grad[5:], strict=True)]
        wanted = [t for t, need in zip(trained, needed, strict=True) if need]
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if ctx.needs_input_grad[2] else None
        if dx is None and not wanted:
            return (None,) * len(ctx.needs_input_grad)
        sums: list[Tensor | None] = [None] * len(wanted)
        with torch.enable_grad(), ctx.state.restored():
            tiles = zip(_tiles(x), _tiles(dy), _tiles(x if dx is None else dx), strict=True)
            for of_x, of_dy, of_dx in tiles:
                some = of_x.detach().requires_grad_(dx is not None)
                y = ctx.run(some, True)
                inputs = wanted if dx is None else [some, *wanted]
                gradients = list(torch.autograd.grad(y, inputs, of_dy, allow_unused=True))
                if dx is not None and (own := gradients.pop(0)) is not None:
                    of_dx.copy_(own)
                for i, gradient in enumerate(gradients):
                    if gradient is not None:
                        total = sums[i]
                        sums[i] = gradient.float() if total is None else total.add_(gradient)
        found = iter([s if s is None else in_dtype(s, t.dtype) for s, t in zip(sums, wanted, strict=True)])
        return None, None, dx, None, None, *[next(found) if need else None for need in needed]


def _forward(run: Run, mlp: nn.Module, x: Tensor) -> Tensor:
    results = [run(mlp, of_x, False) for of_x in _tiles(x)]
    return results[0].view(x.shape) if len(results) == 1 else torch.cat(results, dim=-2).view(x.shape)


def _tiles(x: Tensor) -> list[Tensor]:
    """``x`` in tiles [1, tokens, features], with as many dimensions as ``x``."""
    rows = x.reshape(*[1] * (x.dim() - 2), -1, x.shape[-1])
    return list(rows.split(tokens_of_tile(rows.shape[-2]), dim=-2))
