"""What the tests of the fused heads share: shapes, options, a call and its results in any dtype, and what it costs."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from convergence.judge.tolerance import three_way
from liger_kernels.ops import linear_log_probs, linear_log_probs_ref
from liger_kernels.ops.loss.cross_entropy import EXTRAS, CrossEntropyOutput
from liger_kernels.ops.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_ref
from liger_kernels.ops.loss.linear_log_probs import OUTPUTS, LogProbsOutput
from liger_kernels.ops.runtime.tiling import tiled
from tools.slabs import slabs_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = ("mean", "sum", "none")
TOKENS, HIDDEN, VOCAB, CHUNK = 23, 12, 67, 5  # five chunks, the last one partial
SLAB = 24  # three slabs of the vocabulary, the last one partial
# What "fast" takes in two slabs, of 48 and 19 classes, if it may: the first one's rows of d weight hold d hidden.
TWO: dict[str, Any] = {"hidden": 64}


def chunks_of(tokens):
    """Inside, the fused head goes in chunks of ``tokens`` where the call says nothing else."""
    return tiled(schedule=lambda choose, n, *_: ("fast" if n <= tokens else "balanced", tokens))


def in_two_slabs(*args, **options):
    """The fused head with all logits kept, those of the first classes in d weight."""
    with slabs_of(SLAB):
        return linear_cross_entropy(*args, **options, memory="fast")


def in_held_slabs(hidden, weight, *args, op=linear_cross_entropy, chunk=None, **options):
    """The fused head for results of each row, whose logits are kept of the first classes, computed twice of some after
    them, and kept of the last ones, in the memory of chunks of ``chunk`` tokens."""
    chunk = chunk or (4 if hidden.dtype != torch.float32 and weight.requires_grad else 12)
    with chunks_of(chunk), slabs_of(8, chunk):
        return op(hidden, weight, *args, **options)


CHUNKS, ONE_CHUNK = ({"function": functools.partial(linear_cross_entropy, chunk_size=size)} for size in (CHUNK, TOKENS))
SLABS = {"function": functools.partial(linear_cross_entropy, memory="small")}
TWO_SLABS = {"function": in_two_slabs, **TWO}
HELD_SLABS: dict[str, Any] = {"function": in_held_slabs, "reduction": "none"}
SCHEDULES = {"token chunks": CHUNKS, "one chunk": ONE_CHUNK, "vocabulary slabs": SLABS, "two kept slabs": TWO_SLABS}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
many_and_one = pytest.mark.parametrize("chunk_size", [CHUNK, TOKENS], ids=["token chunks", "one chunk"])

ALL: dict[str, Any] = {
    "label_smoothing": 0.2,
    "softcap": 5.0,
    "logit_scale": 1.7,
    "z_loss": 0.02,
    "temperature": 0.7,
    "class_weight": True,
    "row_weight": True,
    "ignore_index": 0,
}
# What goes in slabs of the vocabulary, too.
MOST = {name: value for name, value in ALL.items() if name != "label_smoothing"}
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    **{name: {name: value} for name, value in ALL.items()},
    "all": ALL,
    "all but smoothing": MOST,
}
GRADIENTS = ("log_probs", "entropy")


def assert_equal(ours, theirs):
    """The same bits, however deep the tensors lie in tuples and lists."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def drawn(options, tokens, vocab, rng, device):
    """The options, with numbers for the weights that are only asked for."""
    shapes = {"class_weight": vocab, "row_weight": tokens, "denominator": ()}
    return {
        name: (torch.rand(shapes[name], generator=rng) + 0.25).to(device) if value is True else value
        for name, value in options.items()
        if value is not False
    }


class Case:
    """Inputs of one call, and its results in any dtype under an upstream gradient that is not 1. ``function`` is what
    :meth:`run` takes by itself, as one of :data:`SCHEDULES` has it."""

    reference = staticmethod(linear_cross_entropy_ref)
    everything = ("extras", EXTRAS)  # the option that asks for results, and all of them

    def __init__(self, device, dtype=torch.float32, *, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, bias=True, seed=0,
                 needs=(True, True, True), function=linear_cross_entropy, **options):  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=rng).to(dtype).to(device)  # noqa: E731
        self.tensors = [draw(tokens, hidden), draw(vocab, hidden), draw(vocab) if bias else None]
        self.needs, self.function = needs, function
        targets = torch.randint(0, vocab, (tokens,), generator=rng)
        self.ignored = options.get("ignore_index", -100)
        targets[tokens // 3 : tokens // 3 + 1] = targets[tokens - 1 :] = self.ignored
        self.targets = targets.to(device)
        self.options = drawn(options, tokens, vocab, rng, device)
        rows = (tokens,) if options.get("reduction") == "none" else ()
        self.upstream = (torch.randn(rows, generator=rng) - 0.3).to(device)

    def leaves(self, dtype=None):
        return [
            None if t is None else t.detach().clone().to(dtype or t.dtype).requires_grad_(bool(needed))
            for t, needed in zip(self.tensors, self.needs, strict=True)
        ]

    def call(self, leaves, function=None, **options):
        """The loss, or the named tuple."""
        hidden, weight, bias = leaves
        return (function or self.function)(hidden, weight, self.targets, bias, **self.options, **options)

    def differentiated(self, out):
        """The results that have an upstream gradient, and these."""
        return [out.loss if isinstance(out, CrossEntropyOutput) else out], [self.upstream]

    def run(self, function=None, dtype=None, **options):
        """The loss or named tuple, and the gradients of hidden, weight and bias."""
        leaves = self.leaves(dtype)
        out = self.call(leaves, function, **options)
        if any(leaf is not None and leaf.requires_grad for leaf in leaves):
            results, upstream = self.differentiated(out)
            torch.autograd.backward(results, [g.to(result.dtype) for g, result in zip(upstream, results, strict=True)])
        return out, [None if leaf is None else leaf.grad for leaf in leaves]

    def assert_right(self, function=None, **options):
        """Results and gradients are as near to float64 as those of the reference in the inputs' dtype."""
        name, every = self.everything
        asked = {name: options.pop(name, every)}
        ours, grads = self.run(function, **asked, **options)
        torchs, torch_grads = self.run(self.reference, **asked)
        truth, true_grads = self.run(self.reference, torch.float64, **asked)
        dtype = self.tensors[0].dtype
        self.check_results(ours, torchs, truth, dtype)
        for name, *three in zip(("hidden", "weight", "bias"), grads, torch_grads, true_grads, strict=True):
            if three[2] is None:
                assert three[0] is None, f"a gradient of {name} that nobody asked for"
                continue
            assert three[0].dtype == dtype
            three_way(*three, dtype, f"gradient of {name}", chain=3)  # a matrix product, the loss, a matrix product

    def check_results(self, ours, torchs, truth, dtype):
        assert ours.loss.dtype == torch.float32
        # The logits are rounded to the dtype in both, so that is where the loss's digits end.
        three_way(ours.loss, torchs.loss, truth.loss, dtype, "loss")
        three_way(ours.log_probs, torchs.log_probs, truth.log_probs, dtype, "log_probs")
        if ours.entropy is not None:
            # A difference of numbers of order 1 (lse and a mean logit), so 1 is what its roundoff is relative to.
            three_way(ours.entropy + 1, torchs.entropy + 1, truth.entropy + 1, dtype, "1 + entropy")


class LogProbs(Case):
    """The same for :func:`linear_log_probs`, with upstream gradients of the results that ``of`` names. With ``ids``
    chosen classes of each row, some of them equal, the target, or none."""

    reference = staticmethod(linear_log_probs_ref)
    everything = ("outputs", OUTPUTS)

    def __init__(self, *args, function=linear_log_probs, of=GRADIENTS, ids=0, **options):
        super().__init__(*args, function=function, **options)
        self.of, self.ids = (*of, *(["id_log_probs"] if ids else [])), None
        device, rng = self.targets.device, torch.Generator().manual_seed(1)
        upstream = [*(torch.randn((len(of), len(self.targets)), generator=rng) - 0.3).to(device)]
        if ids:
            chosen = torch.randint(-1, len(self.tensors[1]), (len(self.targets), ids), generator=rng).to(device)
            chosen[::3, -1] = chosen[::3, 0]
            chosen[::2, ids // 2] = self.targets[::2].clamp(min=-1)
            self.ids = chosen
            upstream.append((torch.randn(chosen.shape, generator=rng) - 0.3).to(device))
        self.upstream: Any = upstream

    def call(self, leaves, function=None, *, outputs=OUTPUTS, **options):
        given = {} if self.ids is None else {"ids": self.ids}
        return super().call(leaves, function, outputs=outputs, **given, **options)

    def differentiated(self, out):
        return [getattr(out, name) for name in self.of], self.upstream

    def check_results(self, ours, torchs, truth, dtype):
        for name, our, torch_s, true in zip(LogProbsOutput._fields, ours, torchs, truth, strict=True):
            if our is None:
                continue
            assert not our[self.targets == self.ignored].any()
            if name in ("log_probs", "id_log_probs"):
                three_way(our, torch_s, true, dtype, name)
            elif name == "is_top1":
                assert our.dtype == torch.bool
                assert torch.equal(our, torch_s)
            else:  # differences of numbers of order 1 and more: 1 is what their roundoff is relative to
                three_way(our + 1, torch_s + 1, true + 1, dtype, f"1 + {name}")


class Spy:
    """What torch's functions are called for by the op: operations of GEMMs, in pairs of a multiplication and an
    addition, and the bytes and the shape and dtype of each allocation."""

    def __init__(self, monkeypatch):
        self.reset()
        for name in ("mm", "addmm"):
            monkeypatch.setattr(torch, name, self._counting(getattr(torch, name)))
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, self._recording(getattr(torch, name)))

    def reset(self):
        self.operations, self.bytes, self.allocated = 0, 0, []

    def _counting(self, function):
        def counted(*args, **kwargs):
            out = function(*args, **kwargs)
            self.operations += math.prod(out.shape) * args[-1].shape[0]
            return out

        return counted

    def _recording(self, function):
        def recorded(*args, **kwargs):
            out = function(*args, **kwargs)
            self.bytes += out.nbytes
            self.allocated.append((tuple(out.shape), out.dtype))
            return out

        return recorded
