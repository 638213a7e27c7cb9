"""What runs in the place of a recognised rotary function: our kernel, or upstream's function for any other call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from liger_kernels.ops import rope, rope_ref
from liger_kernels.ops.runtime.compiling import left_to_inductor
from liger_kernels.patching.recipes.probe import PLAIN, PROBED
from liger_kernels.patching.recipes.rotation import SECTIONS, Rotation, mixed, roles_of, rotated


def rotary_function(
    upstream: Callable[..., Any], rotation: Rotation, runs: list[int] | None = None
) -> Callable[..., Any]:
    """``upstream`` with our kernel where its arguments are those that were probed, itself where they are not."""
    roles = roles_of(upstream)
    assert roles is not None
    parameters = inspect.signature(upstream).parameters
    # All that the function needs are globals of its own, not a closure or defaults: Dynamo looks for those on the
    # function of this name in upstream's module, which has none.
    scope = {
        **{f.__name__: f for f in (left_to_inductor, rope, rotated, mixed, parts, place, fits, are_plain)},
        "__builtins__": __builtins__,
        "torch": torch,
        "PLAIN": PLAIN,
        "PROBED": PROBED,
        "runs": [0] if runs is None else runs,
        "upstream": upstream,
        "names": tuple(parameters),
        "tensor_names": roles.tensors,
        "table_names": roles.tables,
        "sections_name": SECTIONS if SECTIONS in parameters else None,
        "default": parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else "fixed",
        "layouts": tuple(map(tuple, rotation.layouts)),
        "halved": rotation.halved,
        "partial": rotation.partial,
        "mixed_dtypes": rotation.mixed,
        "options": {
            "pairing": rotation.pairing,
            "inverse": rotation.inverse,
            "trailing": rotation.trailing,
            "keep_dtype": rotation.casts_back,
        },
    }
    return types.FunctionType(_apply_rotary.__code__, scope, upstream.__name__)


# Globals that each copy of the function below has of its own; here they are only declared.
upstream: Callable[..., Any] = rope_ref
names: tuple[str, ...] = ()
layouts: tuple[tuple[int, int, int], ...] = ()
default: Any = "fixed"
sections_name: Any = None
tensor_names: list[str] = []
table_names: list[str] = []
halved, partial, mixed_dtypes = False, False, False
options: dict[str, Any] = {}
runs = [0]


def _apply_rotary(*args: Any, **named: Any) -> Any:
    """The code of what :func:`rotary_function` makes. Upstream gets every call that is not of the form probed."""
    # As many names as arguments: Dynamo of torch 2.8 takes every zip for a strict one.
    given: dict[str, Any] = dict(zip(names[: len(args)], args, strict=False))
    given.update(named)
    tensors: list[Any] = [given.get(name) for name in tensor_names]
    tables: list[Any] = [given.get(name) for name in table_names]
    sections = given.get(sections_name)
    usual = (
        len(args) + len(named) == len(given) <= len(names)
        and given.get("position_ids") is None
        and type(sections) is (type(None) if sections_name is None else list)
        and are_plain(tensors + tables)
    )
    if not usual or left_to_inductor("rope", tensors[0]):
        return upstream(*args, **named)
    cos, sin = tables if len(tables) == 2 else parts(tables[0])
    if sections is not None:
        cos, sin = mixed(cos, sections), mixed(sin, sections)
    heads = place(tensors[0].dim(), cos.dim(), given.get("unsqueeze_dim", default), layouts)
    columns = cos.shape[-1] * 2 if halved else cos.shape[-1]
    if heads is None or not fits(tensors, cos, sin, heads, columns, partial, mixed_dtypes):
        return upstream(*args, **named)
    if not torch.compiler.is_compiling():
        runs[0] += 1
    results = rotated(rope, tensors, cos, sin, heads, {**options, "rotary_dim": columns})
    return results if len(tensors) == 2 else results[0]


# Loops instead of generators in what is called above: not every Dynamo traces those.


def are_plain(tensors: list[Any]) -> bool:
    for x in tensors:  # noqa: SIM110
        if type(x) not in PLAIN:
            return False
    return True


def parts(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The real and imaginary part of complex numbers, which are cos and sin; of others, what no layout takes."""
    if not numbers.is_complex():
        return numbers[None, None, None], numbers
    real = torch.view_as_real(numbers.resolve_conj())
    return real[..., 0], real[..., 1]


def place(dims: int, table_dims: int, unsqueeze_dim: Any, layouts: tuple[tuple[int, int, int], ...]) -> int | None:
    """Where the heads are in a call, -3 or -2; None where such a call was not probed."""
    heads = None
    if unsqueeze_dim != "fixed":
        if type(unsqueeze_dim) is not int:
            return None
        heads = unsqueeze_dim - table_dims - 1 if unsqueeze_dim >= 0 else unsqueeze_dim
    for probed_dims, probed_table_dims, probed_heads in layouts:
        if (dims, table_dims) == (probed_dims, probed_table_dims) and heads in (None, probed_heads):
            return probed_heads
    return None


def fits(
    tensors: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    columns: int,
    partial: bool,
    mixed_dtypes: bool,
) -> bool:
    """Whether our op takes tensors like these. Upstream may broadcast others, move them, or raise an error of its own.

    Also where the layout was probed: of the second tensor and of the sizes only this call knows.
    """
    first, tokens = tensors[0], -2 if heads == -3 else -3
    batch = first.shape[0] if first.dim() == 4 else 1
    for x in tensors:
        if x.dim() != first.dim() or x.shape[-1] != first.shape[-1] or x.shape[tokens] != cos.shape[-2]:
            return False
        if x.dim() == 4 and x.shape[0] != batch:
            return False
    for x in (*tensors, cos, sin):
        if x.device != first.device or x.dtype not in PROBED:
            return False
    if cos.dtype != sin.dtype or tensors[-1].dtype != first.dtype or not (mixed_dtypes or cos.dtype == first.dtype):
        return False
    return (
        (columns <= first.shape[-1] if partial else columns == first.shape[-1])
        and columns % 2 == 0
        and cos.shape == sin.shape
        and (cos.dim() == 2 or cos.shape[0] in (1, batch))
    )
