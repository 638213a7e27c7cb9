"""What the tests of :func:`linear_log_probs` share: options, and a call with its results in any dtype."""

from __future__ import annotations

import torch

from convergence.tolerance import three_way
from liger_kernels.ops import linear_log_probs, linear_log_probs_ref
from liger_kernels.ops.linear_log_probs import OUTPUTS
from tests.linear_cross_entropy_checks import HIDDEN, TOKENS, VOCAB

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": 1.7},
    "all": {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.7, "ignore_index": 3},
}
MEMORY = ("fast", "balanced", "small")
GRADIENTS = ("log_probs", "entropy")


class Case:
    """Inputs of one call, and its results under upstream gradients that are not 1."""

    def __init__(self, device, dtype, *, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, bias=True, seed=0, needs=(1, 1, 1),
                 of=GRADIENTS, **options):  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=rng).to(dtype).to(device)  # noqa: E731
        self.tensors = [draw(tokens, hidden), draw(vocab, hidden), draw(vocab) if bias else None]
        targets = torch.randint(0, vocab, (tokens,), generator=rng)
        targets[tokens // 3 : tokens // 3 + 1] = options.get("ignore_index", -100)
        self.targets, self.needs, self.of, self.options = targets.to(device), needs, of, options
        self.upstream = (torch.randn((2, tokens), generator=rng) - 0.3).to(device)

    def run(self, function, dtype=None, **how):
        leaves = [
            None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(bool(needed))
            for t, needed in zip(self.tensors, self.needs, strict=True)
        ]
        hidden, weight, bias = leaves
        out = function(hidden, weight, self.targets, bias, outputs=OUTPUTS, **self.options, **how)
        results = [getattr(out, name) for name in self.of]
        if any(leaf is not None and leaf.requires_grad for leaf in leaves):
            torch.autograd.backward(results, [g.to(r.dtype) for g, r in zip(self.upstream, results, strict=False)])
        return out, [None if leaf is None else leaf.grad for leaf in leaves]

    def assert_right(self, function=linear_log_probs, **how):
        ours, grads = self.run(function, **how)
        torchs, torch_grads = self.run(linear_log_probs_ref)
        truth, true_grads = self.run(linear_log_probs_ref, torch.float64)
        dtype = self.tensors[0].dtype
        three_way(ours.log_probs, torchs.log_probs, truth.log_probs, dtype, "log_probs")
        # Differences of numbers of order 1 and more: 1 is what their roundoff is relative to.
        for name in ("entropy", "log_sum_sq_probs", "mean_logits", "max_logits"):
            three_way(*(getattr(o, name) + 1 for o in (ours, torchs, truth)), dtype, f"1 + {name}")
        assert ours.is_top1.dtype == torchs.is_top1.dtype == torch.bool
        assert torch.equal(ours.is_top1, torchs.is_top1)
        ignored = self.targets == self.options.get("ignore_index", -100)
        assert all(not bool(getattr(ours, name)[ignored].any()) for name in OUTPUTS)
        for name, *three in zip(("hidden", "weight", "bias"), grads, torch_grads, true_grads, strict=True):
            if three[2] is None:
                assert three[0] is None, f"a gradient of {name} that nobody asked for"
                continue
            assert three[0].dtype == dtype
            three_way(*three, dtype, f"gradient of {name}", chain=3)
