"""The LM head of a patched model: when it answers with deferred logits, and what its own call computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from liger_kernels.ops import LoraAdapter, linear_cross_entropy
from liger_kernels.patching.following import follows_class, who_replaced
from liger_kernels.patching.logits.deferred import DeferredLogits
from liger_kernels.patching.logits.held_head import HeldHead, held_head, is_held
from liger_kernels.patching.logits.product import Product, Request, count
from liger_kernels.patching.logits.running import running
from liger_kernels.patching.logits.split_head import SplitHead, has_plan, split_head
from liger_kernels.patching.lora.adapters import foreseen_adapters
from liger_kernels.patching.lora.layer import LoraRecipe, is_lora_layer
from liger_kernels.patching.recipes.linear import LinearRecipe, product
from liger_kernels.patching.recipes.probe import INFRASTRUCTURE, PLAIN, any_user_hook, package_of
from liger_kernels.patching.swap import (
    Calls,
    Recipe,
    mark_run,
    recipe_of,
    runs_inside_hook,
)

LOSSES = ("cross_entropy", "linear_cross_entropy")


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """An LM head that answers with deferred logits while the forward of its model runs with labels.

    With ``fused`` the product itself waits (a plain linear layer); without, the head computes its logits at once and
    only the cross entropy over them is ours (a weight of eight bits, or by the user's choice). ``memory`` is the
    schedule of the fused loss, as in :func:`liger_kernels.ops.linear_cross_entropy`.
    """

    live = None
    fused: bool
    memory: str | None = None
    invariant: bool = False

    @property
    def kernel(self) -> str:
        return "linear_cross_entropy" if self.fused else "cross_entropy"

    @property
    def detail(self) -> str:
        return "loss of hidden states and weight, no logits" if self.fused else "loss of the head's own logits"

    def foreseen(self, module: Any, step: Any) -> Calls:
        weight, bias = (step.like(module, name, step.linear) for name in ("weight", "bias"))
        hidden = step.tensor(step.tokens, weight.shape[1])
        targets = step.tensor(step.tokens, dtype=torch.int64, grad=False)
        return (
            functools.partial(
                linear_cross_entropy, hidden, weight, targets, bias, memory=self.memory, invariant=self.invariant
            ),
        )

    @staticmethod
    def why_logits(head: Any, outer: nn.Module, split: SplitHead | str | None, hidden: torch.Tensor) -> str | None:
        """Why ``head`` has to compute its logits right now."""
        return obstacle(head, outer, split)

    @staticmethod
    def weights_of(head: Any, hidden: torch.Tensor) -> HeldHead | None:
        """What ``head`` multiplies ``hidden`` by, inside its call; None where that is not one product."""
        weight, bias = head.weight, head.bias  # once: a parametrisation computes them at each read
        return HeldHead(weight, bias) if _is_product(hidden, weight, bias) else None

    def namespace(self, base: Any) -> dict[str, Any]:
        fused, memory, why_logits, weights_of = self.fused, self.memory, self.why_logits, self.weights_of
        invariant = self.invariant

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            state = running.forward
            if state is None or running.request is not None or len(args) != 1 or kwargs:
                return base.__call__(self, *args, **kwargs)
            if not any(head is self for head in state.heads):
                return base.__call__(self, *args)
            hidden = args[0]
            outer = _entrance(state.outer, self)
            deferred = Product(hidden, self, outer, state, memory, invariant)
            split = split_head(self, outer) if fused and has_plan(self) else None
            reason = why_logits(self, outer, split, hidden) if fused else None
            if reason is None and fused and outer is self and _is_lent_a_weight(self, state.outer):
                reason = "what is around the head gives it another weight for its call"
            if fused and reason is None:
                deferred.split = None if isinstance(split, str) else split
                if runs_inside_hook(self):  # a device map: accelerate brings the hidden states there
                    deferred.device = self.weight.device
                shape = (*hidden.shape[:-1], self.out_features)
                return DeferredLogits(deferred, shape, deferred.autocast or hidden.dtype)
            logits = base.__call__(self, hidden)
            if reason is not None:
                count(state.fallbacks, reason)
            if type(logits) is not torch.Tensor:
                return logits
            if not fused:
                mark_run(self)
            deferred.logits, deferred.device = logits, logits.device
            return DeferredLogits(deferred, tuple(logits.shape), logits.dtype)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            request: Request | None = running.request
            if request is None:
                logits = product(self, *args, **kwargs) if invariant else None
                return base.forward(self, *args, **kwargs) if logits is None else logits
            weights = weights_of(self, args[0])
            if weights is None:
                return base.forward(self, *args, **kwargs)
            mark_run(self)
            return request.answer(args[0], weights)

        return {"__call__": call, "forward": forward}


@dataclass(frozen=True)
class HeldHeadRecipe(HeadRecipe):
    """One whose weight is kept in four bits."""

    @property
    def detail(self) -> str:
        return "loss of hidden states and a weight of four bits, no logits"

    def foreseen(self, module: Any, step: Any) -> Calls:
        return self._foreseen(module, step, ())

    def _foreseen(self, module: Any, step: Any, adapters: Sequence[LoraAdapter]) -> Calls:
        hidden = step.tensor(step.tokens, module.in_features)
        weight = step.tensor(module.out_features, module.in_features, grad=False)
        targets = step.tensor(step.tokens, dtype=torch.int64, grad=False)
        how: dict[str, Any] = {"memory": self.memory, "adapters": tuple(adapters)}
        return (functools.partial(linear_cross_entropy, hidden, weight, targets, None, **how),)

    @staticmethod
    def why_logits(head: Any, outer: nn.Module, split: SplitHead | str | None, hidden: torch.Tensor) -> str | None:
        if split is not None:
            return "a tensor parallel plan splits a head that is no plain linear layer"
        if torch.compiler.is_compiling():
            return "a compiled program computes the logits of such a head"
        found = held_head(head, hidden)
        return found if isinstance(found, str) else obstacle(head, outer)

    @staticmethod
    def weights_of(head: Any, hidden: torch.Tensor) -> HeldHead | None:
        found = held_head(head, hidden)
        return None if isinstance(found, str) else found


@dataclass(frozen=True)
class AdaptedHeadRecipe(HeldHeadRecipe):
    """One with PEFT's adapters, around a linear layer whose weight is whole or kept in four bits."""

    live = LoraRecipe.live  # type: ignore[assignment]

    @property
    def detail(self) -> str:
        return "loss of hidden states, weight and adapters, no logits"

    def foreseen(self, module: Any, step: Any) -> Calls:
        return self._foreseen(module, step, foreseen_adapters(module, step))


def held_recipe(head: Any, memory: str | None) -> HeldHeadRecipe | None:
    """The recipe of a ``head`` that is no plain linear layer; None where its loss cannot be fused."""
    if not is_held(head):
        return None
    return AdaptedHeadRecipe(True, memory) if is_lora_layer(head) else HeldHeadRecipe(True, memory)


def _is_product(hidden: torch.Tensor, weight: Any, bias: Any) -> bool:
    """Whether ``F.linear`` takes these; where it raises, the head itself is to raise."""
    return (
        type(weight) in PLAIN
        and weight.dim() == 2
        and weight.shape[1] == hidden.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and (
            (weight.dtype == hidden.dtype and (bias is None or bias.dtype == hidden.dtype))
            or torch.is_autocast_enabled(hidden.device.type)
        )
    )


def _entrance(outer: nn.Module, head: Any) -> nn.Module:
    """What is called for the fused loss: the outermost of the modules around ``head`` that do nothing but gather its
    weights or choose it. One that changes the logits (LoRA) gets them from ``head`` itself."""
    if outer is head:
        return head
    path = next((name for name, module in outer.named_modules() if module is head), "")
    chain = [outer]
    for name in path.split(".")[:-1]:
        chain.append(chain[-1]._modules[name])  # type: ignore[arg-type]
    entrance = head
    for module in reversed(chain):
        package = type(module).__module__
        chooses = package.startswith("peft.") and linears_to_choose_from(module)
        if not (chooses or package.startswith(INFRASTRUCTURE) or isinstance(module, _CONTAINERS)):
            break
        if not isinstance(module, _CONTAINERS):
            entrance = module
    return entrance


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _is_lent_a_weight(head: Any, outer: nn.Module) -> bool:
    """Whether ``outer``, around ``head``, may have put a weight into it that is there for this call only, as PEFT does
    for ``target_parameters``: in a parametrisation, or a tensor that is no parameter."""
    return outer is not head and not isinstance(head._parameters.get("weight"), nn.Parameter)


def obstacle(head: Any, outer: nn.Module, split: SplitHead | str | None = None) -> str | None:
    """Why the head has to compute its logits itself right now; ``split`` is what :func:`split_head` says of it."""
    if isinstance(split, str):
        return split
    if runs_inside_hook(head):
        hooks = getattr(head._hf_hook, "hooks", (head._hf_hook,))
        if not all(type(hook).__name__ == "AlignDevicesHook" and not hook.offload for hook in hooks):
            return "accelerate loads the head's weight for its forward only (offload)"
    elif split is None and "forward" in head.__dict__ and not follows_class(head.forward, head):
        return f"the head's forward was replaced on the instance by {who_replaced(head)}"
    for module in (head,) if outer is head else outer.modules():
        if module._backward_hooks or module._backward_pre_hooks or any_user_hook([module._forward_hooks]):
            return "a forward hook on the head expects logits"
    if any_user_hook(_GLOBAL_HOOKS):
        return "a hook of all modules expects logits"
    base = getattr(type(head), "_liger_kernels_base", None)
    if base is not None and base.forward is not type(head)._liger_kernels_base_forward:
        return f"{package_of(base.forward)} replaced the forward of the head's class after patch()"
    if split is not None or isinstance(recipe_of(head), HeldHeadRecipe):
        return None
    weight = head._parameters.get("weight")
    if type(weight) in PLAIN and weight.dim() == 2 and weight.shape[0] != head.out_features:
        return "the head's weight has another size than its out_features"
    if weight is None or type(weight) in (nn.Parameter, torch.Tensor) or is_fsdp2(type(head)):
        return None
    return f"the head's weight is a {type(weight).__name__} in its own call"


# Those that see the logits or their gradient.
_GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def is_fsdp2(cls: type) -> bool:
    """Whether ``fully_shard`` made ``cls``: its weights are sharded outside of the module's call, and whole inside."""
    return any(c.__name__ == "FSDPModule" and c.__module__.startswith("torch.distributed.") for c in cls.__mro__)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether ``module`` is torch's own linear layer, sharded by ``fully_shard`` or not."""
    return type(module) is nn.Linear or (is_fsdp2(type(module)) and nn.Linear in type(module).__bases__)


def linears_to_choose_from(head: nn.Module) -> list[nn.Module]:
    """The head itself, or the full-size linear layers of a wrapper that has no other parameters (modules_to_save).

    A wrapper with parameters of its own (LoRA) changes the logits and is not opened.
    """
    if _is_linear(head):
        return [head]
    linears = [module for module in head.modules() if _is_linear(module)]
    own = {id(p) for p in head.parameters()} - {id(p) for linear in linears for p in linear.parameters()}
    sizes = {(linear.in_features, linear.out_features) for linear in linears}
    return linears if not own and len(sizes) == 1 else []


def _is_linear(module: nn.Module) -> bool:
    return is_plain_linear(module) or isinstance(recipe_of(module), (HeadRecipe, LinearRecipe))


def patched_heads(head: Any) -> list[Any]:
    """The patched linear layers in what a model calls its output embeddings: itself, or inside an adapter's wrapper."""
    if isinstance(recipe_of(head), HeadRecipe):
        return [head]
    modules: Iterator[nn.Module] = head.modules() if isinstance(head, nn.Module) else iter(())
    return [module for module in modules if isinstance(recipe_of(module), HeadRecipe)]
