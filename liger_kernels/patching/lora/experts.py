"""Recognise PEFT's LoRA of packed experts by what it computes, and run it within the op of the experts.

PEFT wraps a module once for each parameter that it adapts (``target_parameters``), and puts W + scale * B A in place of
that parameter during a forward: a tensor of the weight's size. Here the outermost wrapper gives the adapters of all of
them to the op that the experts inside run on. State is read at each call; where a call is anything else, PEFT's own
forward runs, and the report counts why.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernels.ops import ExpertsAdapter, experts
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.lora.adapters import CONTAINERS, active_names, is_variant
from liger_kernels.patching.lora.layer import (
    STATE,
    UNREAD,
    VARIANTS,
    adapts_experts,
    peft_computes,
)
from liger_kernels.patching.recipes import probe
from liger_kernels.patching.recipes.experts import ExpertsRecipe, _takes
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.recipes.recogniser import Recogniser, Verdict, fingerprint
from liger_kernels.patching.swap import Recipe, mark_run, recipe_of
from liger_kernels.patching.watch import unchanged


@dataclass(frozen=True)
class LoraExpertsRecipe(Recipe):
    """A module whose parameter W [experts, ., .] counts as W + the sum of scale * B A over its active adapters.

    Attributes:
        b_first: whether W's second dimension is that of B's rows, and its last that of A's columns; else the other way
            round.
    """

    b_first: bool

    kernel = "lora_experts"
    live = ("base_layer", *CONTAINERS, *STATE, *VARIANTS, *UNREAD)

    @property
    def detail(self) -> str:
        return "experts of W + sum of scale * B A"

    def namespace(self, base: Any) -> dict[str, Any]:
        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if type(x) not in PLAIN or x.dtype not in PROBED or left_to_inductor("experts", x):
                return base.forward(self, x, *args, **kwargs)
            wrappers, module = _unwrapped(self)
            if not any(map(_is_active, wrappers)):  # PEFT may have something to unmerge
                return base.forward(self, x, *args, **kwargs)
            call = _call(wrappers, module, x, args, kwargs)
            if isinstance(call, str):
                return peft_computes(base, self, call, x, *args, **kwargs)
            for part in (*wrappers, module):
                mark_run(part)
            return call()

        return {"forward": forward}


def _unwrapped(module: Any) -> tuple[list[Any], Any]:
    """The wrappers of patched experts, the outermost first, and what is inside of them."""
    wrappers = []
    while isinstance(recipe_of(module), LoraExpertsRecipe):
        wrappers.append(module)
        module = module._modules["base_layer"]
    return wrappers, module


def _is_active(wrapper: Any) -> bool:
    state = wrapper.__dict__
    return not (state.get("_disable_adapters") or state.get("merged_adapters")) and bool(active_names(wrapper))


def _call(
    wrappers: list[Any], module: Any, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> functools.partial[torch.Tensor] | str:
    """The call of the op; or why PEFT computes it."""
    recipe = recipe_of(module)
    if not isinstance(recipe, ExpertsRecipe) or recipe.whole is None:
        return "its experts do not run on the kernel of experts"
    if probe.has_global_hooks() or any(map(probe.has_hooks, (*wrappers[1:], module))):
        return "its experts have hooks, or a forward of their own"
    given = (x, *args)
    if kwargs:
        cls: Any = type(module)
        given += tuple([kwargs[name] for name in _names(cls)[len(given) :] if name in kwargs])
    if not len(given) == 1 + len(args) + len(kwargs) == 3:
        return "the call has other arguments than those of experts"
    parameters = recipe.whole.of(module)
    of_weights: dict[str, list[ExpertsAdapter]] = {recipe.whole.gate_up: [], recipe.whole.down: []}
    for wrapper in wrappers:
        state = wrapper.__dict__
        if not unchanged(wrapper):
            return "its wrapper is not what was recognised"
        if not _is_active(wrapper):
            if state["_disable_adapters"] and state["merged_adapters"]:
                return "disabled adapters are merged with a weight"
            continue
        name = state["parameter_name"]
        if name not in of_weights:
            return "it is one of a parameter that is no weight of gate and up, or down"
        weight = parameters["gate_up" if name == recipe.whole.gate_up else "down"]
        adapters = _adapters(wrapper, weight, recipe_of(wrapper).b_first != recipe.whole.transposed)  # type: ignore[union-attr]
        if isinstance(adapters, str):
            return adapters
        of_weights[name] += adapters
    if not _takes(module, recipe.mixed, *given, *parameters.values()):
        return "its experts do not run on the kernel of experts in this call"
    ups, downs = of_weights[recipe.whole.gate_up], of_weights[recipe.whole.down]
    return functools.partial(experts, *given, gate=recipe.gate, **parameters, gate_up_adapters=ups, down_adapters=downs)


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    """Of the parameters of the forward of patched experts."""
    return tuple(probe.parameter_names(cls._liger_kernels_base.forward))


def _adapters(wrapper: Any, weight: torch.Tensor, straight: bool) -> list[ExpertsAdapter] | str:
    """The active adapters of ``weight`` [experts, out, in]; or why PEFT computes them.

    ``straight``: whether A is the one that multiplies what comes in."""
    modules, scaling = wrapper._modules, wrapper.__dict__["scaling"]
    n_experts = len(weight)
    found = []
    for name in active_names(wrapper):
        if is_variant(wrapper, name):
            return "a variant of LoRA is active"
        linear = modules["lora_A"]._modules[name], modules["lora_B"]._modules.get(name)
        if any(type(module) is not nn.Linear for module in linear):
            return "lora_A or lora_B is no plain linear layer"
        a, b = (module._parameters.get("weight") for module in linear)
        if type(a) not in PLAIN or type(b) not in PLAIN:
            return "a weight of it is no plain tensor"
        if a.device != weight.device or b.device != weight.device:
            return "a weight of it is on another device than x"
        if a.dim() != 2 or b.dim() != 2 or not a.numel() or not b.numel():
            return "a weight of it is sharded"
        if a.dtype not in PROBED or b.dtype not in PROBED or type(scaling.get(name)) not in (float, int):
            return "a weight of it has another dtype, or the scaling is no number"
        ranks, inputs = a.shape
        outputs = len(b)
        shape = (n_experts, outputs, inputs) if straight else (n_experts, inputs, outputs)
        if ranks != b.shape[1] or ranks % n_experts or shape != weight.shape:
            return "a weight of it has another shape than its experts ask for"
        # [experts, rank, columns of A], [experts, rows of B, rank]: PEFT has the experts side by side in B.
        a, b = a.view(n_experts, -1, inputs), b.view(outputs, -1, n_experts).permute(2, 0, 1)
        pair = (a, b) if straight else (b.transpose(1, 2), a.transpose(1, 2))
        found.append(ExpertsAdapter(*pair, scaling[name]))
    return found


def recognise_lora_experts(module: Any) -> Verdict:
    """The recipe for ``module``, or why PEFT goes on computing its adapters."""
    error = None
    with probe.probing():
        for b_first in (True, False):
            try:
                if _same(module, b_first):
                    return LoraExpertsRecipe(b_first)
            except Exception as raised:  # whatever a stranger's forward raises on the probe
                error = raised
    why = "" if error is None else f" ({probe.describe(error)})"
    return (probe.with_origin(f"its adapters are not W + sum of scale * B A{why}", type(module)),)


_EXPERTS, _ROWS, _COLUMNS, _TOKENS = 3, 4, 6, 5
_SCALES = {"first": 0.5, "second": 3.0}


class _Weight(nn.Module):
    """What a probe wraps: it multiplies by a packed weight."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(probe.randn(_EXPERTS, _ROWS, _COLUMNS, dtype=torch.float64).to(dtype))
        self.__dict__["_compiled_call_impl"] = self.forward  # a call is that, without hooks of every module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eij,tj->tei", self.weight, x)


def _small_copy(module: Any, b_first: bool, names: list[str], dtype: torch.dtype) -> Any:
    """A copy of ``module`` around a small weight, with small adapters of float64 or float32, all of them active."""
    inputs, outputs = (_COLUMNS, _ROWS) if b_first else (_ROWS, _COLUMNS)
    ranks = {name: _EXPERTS * (2 + i) for i, name in enumerate(names)}
    members: dict[str, Any] = {
        "lora_A": nn.ModuleDict({name: probe.random_linear(inputs, ranks[name]) for name in names}),
        "lora_B": nn.ModuleDict({name: probe.random_linear(ranks[name], outputs) for name in names}),
        "lora_dropout": nn.ModuleDict({name: nn.Identity() for name in names}),
    }
    if dtype != torch.float64:
        members["lora_A"].float(), members["lora_B"].float()
    clone: Any = probe.bare_copy(module, base_layer=_Weight(dtype), **members)
    clone.__dict__.update(
        parameter_name="weight",
        num_experts=_EXPERTS,
        in_features=inputs,
        out_features=outputs,
        scaling=dict(_SCALES),
        lora_variant={},
        _active_adapter=names,
        _disable_adapters=False,
        merged_adapters=[],
    )
    return clone


def _expected(clone: Any, b_first: bool, x: torch.Tensor) -> torch.Tensor:
    weight = clone.base_layer.weight
    for name in clone._active_adapter:
        a = clone.lora_A[name].weight.view(_EXPERTS, -1, clone.in_features)
        b = clone.lora_B[name].weight.view(clone.out_features, -1, _EXPERTS)
        delta = torch.einsum("ore,eri->eoi" if b_first else "ore,eri->eio", b, a)
        weight = weight + (_SCALES[name] * delta).to(weight.dtype)
    return torch.einsum("eij,tj->tei", weight, x)


def _same(module: Any, b_first: bool) -> bool:
    """Whether one adapter and two of them give the values, the gradients and the dtype of the formula."""
    for names in (["first"], [*_SCALES]):
        clone = _small_copy(module, b_first, names, torch.float64)
        x = probe.randn(_TOKENS, _COLUMNS, dtype=torch.float64).requires_grad_()
        leaves = [x, *clone.parameters()]
        upstream = probe.randn(_TOKENS, _EXPERTS, _ROWS, dtype=torch.float64)
        results = []
        for y in (type(module).forward(clone, x), _expected(clone, b_first, x)):
            results.append([y, *torch.autograd.grad(y, leaves, upstream)])
        if any(probe.relative_difference(*pair) >= probe.SAME_FORMULA for pair in zip(*results, strict=True)):
            return False
        clone = _small_copy(module, b_first, names, torch.bfloat16)
        with torch.no_grad():
            x = x.to(torch.bfloat16)
            y, expected = type(module).forward(clone, x), _expected(clone, b_first, x)
        if y.dtype != x.dtype or probe.relative_difference(y, expected) > 8 * torch.finfo(x.dtype).eps:
            return False
    return True


def _key(module: Any) -> Hashable:
    """What the verdict depends on: the class and its settings, whatever the weight and the adapters are."""
    sizes = ("parameter_name", "num_experts", "in_features", "out_features")
    counted = "base_layer", *sizes, *CONTAINERS, *STATE, *VARIANTS, *UNREAD
    return fingerprint(module, replaced=dict.fromkeys(counted, 0))


LORA_EXPERTS = Recogniser(("lora_experts",), adapts_experts, recognise_lora_experts, key=_key)
