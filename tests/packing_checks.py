"""What the tests of packed rows share: samples, how they are packed, and the loss of each sample by itself as truth."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.patching_checks import DEVICE, VOCAB, tiny

MODES = ("token", "square", "sample")
EXPONENT = {"token": 0.0, "square": 0.5, "sample": 1.0}
# Before 4.53, sdpa and eager attention ignore what position_ids say.
ISOLATES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 53)
isolated = pytest.mark.skipif(
    not ISOLATES, reason="transformers before 4.53 lets the samples of a packed row see each other"
)
Sample = tuple[torch.Tensor, torch.Tensor]  # token ids and labels, [length] each


def samples(*lengths: int, seed: int = 0, chat: bool = True) -> list[Sample]:
    """Samples of random tokens. With ``chat``, what is not an answer is masked, in the middle of a sample, too, and the
    third sample has no targets at all."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (length,), generator=generator).to(DEVICE)
        labels = ids.clone()
        if chat:
            labels[: length // 4] = -100
            labels[length // 2 : length // 2 + 2] = -100
            if i == 2:
                labels[:] = -100
        found.append((ids, labels))
    return found


def packed(documents: list[Sample], rows: int = 1, padding: int = 0) -> dict[str, torch.Tensor]:
    """The samples one after another in ``rows`` rows of one length (the last ones padded), with position_ids."""
    groups = [documents[i::rows] for i in range(rows)]
    length = max(sum(len(ids) for ids, _ in group) for group in groups) + padding
    batch = {"input_ids": [], "labels": [], "position_ids": []}
    for group in groups:
        rest = length - sum(len(ids) for ids, _ in group)
        pad = torch.zeros(rest, dtype=torch.int64, device=DEVICE)
        batch["input_ids"].append(torch.cat([*(ids for ids, _ in group), pad]))
        batch["labels"].append(torch.cat([*(labels for _, labels in group), pad - 100]))
        batch["position_ids"].append(torch.cat([*(torch.arange(len(ids), device=DEVICE) for ids, _ in group), pad]))
    return {name: torch.stack(parts) for name, parts in batch.items()}


def boundaries(documents: list[Sample]) -> dict[str, torch.Tensor]:
    """cu_seq_lens_q and seq_idx of the samples in one row, as upstream's collators make them."""
    lengths = torch.tensor([len(ids) for ids, _ in documents], device=DEVICE)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    index = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)[None].int()
    return {"cu_seq_lens_q": ends, "seq_idx": index}


def weighted(logits: Iterable[torch.Tensor], documents: list[Sample], mode: str) -> torch.Tensor:
    """The loss in float64 of the samples, of logits [length, vocab] of each."""
    total, denominator = torch.zeros((), dtype=torch.float64, device=DEVICE), 0.0
    for own, (_, labels) in zip(logits, documents, strict=True):
        targets = int((labels[1:] != -100).sum())
        if targets:
            nll = F.cross_entropy(own[:-1].double(), labels[1:], ignore_index=-100, reduction="sum")
            weight = targets ** -EXPONENT[mode]  # of each token
            total, denominator = total + weight * nll, denominator + weight * targets
    return total / denominator


def truth(model: Any, documents: list[Sample], mode: str) -> torch.Tensor:
    """The loss by the unpatched ``model``, one forward for each sample alone: nothing is packed here."""
    alone = (model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in documents)
    return weighted(alone, documents, mode)


def exact(family: str = "llama", **changes: Any) -> Any:
    """A tiny model in float64, whose loss is exact to many digits, packed or not: kernels leave float64 to torch."""
    return tiny(family, **changes).double()


def patched_copy(model: Any, mode: str, kernel: str = "linear_cross_entropy") -> Any:
    import liger_kernels

    twin = copy.deepcopy(model)
    liger_kernels.patch(twin, kernels=[kernel], loss_reduction=mode)
    return twin
