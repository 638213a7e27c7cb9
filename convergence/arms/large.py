"""Tensors too large to keep, or to go through at once: what is observed of them, and how they are moved by one unit.

Of a matrix with more than :data:`LARGE` elements only projections are kept: every row's and every column's sum with
random signs, the same in every arm, each divided so that its mean square is the tensor's own. They are linear. So an
error's projections are the projections' error, its root mean square and its gain are estimated without bias, and a
row or a column that is wrong shows as one element that is. A single wrong element among correct ones hides better.
"""

from __future__ import annotations

import functools

import torch

# Above all that a mini model has. Two megabytes in float64.
LARGE = 2**18
SAMPLE = 2**16  # of the elements that are also kept as they are, where each counts by its own size
_CHUNK = 2**24  # elements that are worked on at a time: 128 MiB in float64


def is_large(value: torch.Tensor) -> bool:
    return value.ndim > 1 and value.numel() > LARGE


def project(value: torch.Tensor) -> torch.Tensor:
    """The projections of ``value`` [..., columns], on its device: float64 [rows + columns]. What is not finite in
    ``value`` is not in them."""
    matrix = value.detach().flatten(0, -2)
    rows, columns = matrix.shape
    left, right = _signs(rows, 0, value.device), _signs(columns, 1, value.device)
    of_rows, of_columns = [], torch.zeros_like(right)
    size = max(1, _CHUNK // columns)
    for chunk, signs in zip(matrix.split(size), left.split(size), strict=True):
        wide = chunk.double()
        of_rows.append(wide @ right)
        of_columns += signs @ wide
    return torch.cat([torch.cat(of_rows) / columns**0.5, of_columns / rows**0.5])


def sample(value: torch.Tensor) -> torch.Tensor:
    """:data:`SAMPLE` elements of ``value``, the same of every tensor of its size."""
    generator = torch.Generator().manual_seed(value.numel())
    where = torch.randint(value.numel(), (SAMPLE,), generator=generator)
    return value.detach().flatten()[where.to(value.device)]


@functools.lru_cache(maxsize=64)
def _signs(length: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * length + seed)
    return (torch.randint(0, 2, (length,), generator=generator) * 2 - 1).double().to(device)


def nudged(weight: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """``weight`` with every element moved by about one unit in the last place of ``dtype``, up or down. One that is
    large draws on its own device, because drawing billions of numbers takes a CPU minutes."""
    if not is_large(weight):
        return _nudged(weight, dtype, generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    own = torch.Generator(weight.device).manual_seed(seed)
    pieces = weight.flatten().split(_CHUNK)
    return torch.cat([_nudged(piece, dtype, own) for piece in pieces]).view(weight.shape)


def _nudged(weight: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    sign = torch.randint(0, 2, weight.shape, generator=generator, device=generator.device) * 2 - 1
    return (weight.double() * (1 + sign * torch.finfo(dtype).eps)).to(dtype)
