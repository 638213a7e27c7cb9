"""What the tests of the divergence share: two heads, a call and its results in any dtype."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from convergence.judge.tolerance import three_way
from liger_kernels.ops import linear_divergence, linear_divergence_ref
from liger_kernels.ops.divergence.linear_divergence import OUTPUTS
from liger_kernels.ops.loss.linear_cross_entropy import MEMORY
from liger_kernels.ops.loss.schedules.slab_plan import SlabSizes
from liger_kernels.ops.runtime.tiling import tiled
from tests.linear_cross_entropy_checks import Case, chunks_of

TEACHER_HIDDEN = 20
BETAS = (0.0, 1.0, 0.3)
SCALING: dict[str, Any] = {
    "temperature": 0.7,
    "softcap": 5.0,
    "logit_scale": 1.7,
    "teacher_softcap": 4.0,
    "teacher_logit_scale": 0.8,
}


class Divergence(Case):
    """As :class:`Case`, with upstream gradients of the results that ``of`` names; of a divergence that is reduced, it
    alone has one. With ``masked``, the rows count whose targets do."""

    reference = staticmethod(linear_divergence_ref)
    everything = ("outputs", OUTPUTS)

    def __init__(self, device, dtype=torch.float32, *, beta=0.3, function=linear_divergence, of=OUTPUTS[:2],
                 masked=True, teacher_dtype=None, **options):  # fmt: skip
        super().__init__(device, dtype, function=function, **options)
        rng = torch.Generator().manual_seed(2)
        tokens, vocab, teacher_dtype = len(self.targets), len(self.tensors[1]), teacher_dtype or dtype
        draw = lambda *shape: torch.randn(shape, generator=rng).to(teacher_dtype).to(device)  # noqa: E731
        bias = None if self.tensors[2] is None else draw(vocab)
        self.teacher: Any = [draw(tokens, TEACHER_HIDDEN), draw(vocab, TEACHER_HIDDEN) / 2, bias]
        self.mask = self.targets != self.ignored if masked else None
        self.reduced = options.get("reduction", "none") != "none"
        self.beta, self.of = beta, OUTPUTS[:1] if self.reduced else of
        shape = (1,) if self.reduced else (len(of), tokens)
        upstream: Any = [*(torch.randn(shape, generator=rng) - 0.3).to(device)]
        self.upstream = upstream

    def call(self, leaves, function=None, *, outputs=OUTPUTS, **options):
        hidden, weight, bias = leaves
        exact = hidden.dtype == torch.float64
        th, tw, tb = (t if t is None or not exact else t.double() for t in self.teacher)
        given = {"mask": self.mask, **self.options, **options}
        return (function or self.function)(hidden, weight, th, tw, self.beta, bias, tb, outputs=outputs, **given)

    def differentiated(self, out):
        return [getattr(out, name) for name in self.of], self.upstream

    def check_results(self, ours, torchs, truth, dtype):
        for name, our, torch_s, true in zip(OUTPUTS, ours, torchs, truth, strict=True):
            if our is None:
                continue
            assert our.dtype == torch.float32
            assert our.requires_grad == (any(self.needs) and name in OUTPUTS[: 1 if self.reduced else 2])
            assert our.shape == (() if self.reduced and name == "divergence" else self.targets.shape)
            if self.mask is not None and our.dim():
                assert not our[~self.mask].any()
            # Differences of numbers of order 1 and more: 1 is what their roundoff is relative to.
            three_way(our + 1, torch_s + 1, true + 1, dtype, f"1 + {name}")


def in_token_chunks(*args, **options):
    """Five of them in float16, which never goes in slabs."""
    with chunks_of(5):
        return linear_divergence(*args, **options)


def in_held_slabs(*args, **options):
    """Logits of the first classes stay in the memory of grad_weight, of the last ones in memory of their own, and those
    between are computed again: for a mixture twice."""
    with tiled(slabs=lambda *_: SlabSizes(8, 8, chunk=4), schedule=lambda *_: ("balanced", 4)):
        return linear_divergence(*args, **options)


WAYS = {
    **{memory: functools.partial(linear_divergence, memory=memory) for memory in MEMORY},
    "held slabs": in_held_slabs,
    "token chunks": in_token_chunks,
}
every_memory = pytest.mark.parametrize("memory", MEMORY)
every_beta = pytest.mark.parametrize("beta", BETAS)
