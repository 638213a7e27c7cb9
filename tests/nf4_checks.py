"""What bitsandbytes' 4 bits stand for, by their definition.

bitsandbytes 0.50.2 reads wrong scales on a CPU with AVX512 BF16, if rows are no whole number of blocks: the error is as
large as the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def by_definition(
    packed: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each code's value times the scale of its block: what ``torch.ops.bitsandbytes.dequantize_4bit`` computes."""
    from bitsandbytes.functional import get_4bit_type

    count, packed = math.prod(shape), packed.view(torch.uint8).flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[:count].long()
    dense = get_4bit_type(kind, packed.device)[codes] * scales.float().repeat_interleave(block)[:count]
    return dense.view(*shape).to(dtype)
