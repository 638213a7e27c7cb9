"""What one rank does for test_ops_vocab_parallel.py: the head with its classes split over the ranks, and the whole head
in float64 and in its own dtype."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.case import Site
from benchmarks.tensor_parallel import even, measure
from benchmarks.timing import Measured
from liger_kernels.ops import CountedTargets, linear_cross_entropy, linear_divergence, linear_log_probs
from liger_kernels.ops.loss.schedules.schedule import observe_logits_grad
from liger_kernels.ops.loss.schedules.slab_plan import SlabSizes
from liger_kernels.ops.loss.schedules.vocabulary_slabs import VocabularySlabs
from liger_kernels.ops.loss.vocab_parallel import VocabShard
from liger_kernels.ops.runtime.tiling import tiled
from tests import divergence_checks, linear_cross_entropy_checks
from tests.divergence_checks import BETAS, SCALING
from tests.linear_cross_entropy_checks import ALL, ALONE, HIDDEN, REDUCTIONS, TOKENS, VOCAB

CPU = torch.device("cpu")
WORLDS = (2, 4)
# Even, uneven, and a rank without a class.
SPLITS = {2: ((34, 33), (60, 7), (67, 0)), 4: ((17, 17, 17, 16), (0, 40, 20, 7), (1, 2, 3, 61))}
DTYPES = (torch.float32, torch.bfloat16)
MEMORY = ("fast", "small")
OPTIONS = {"plain": {}, "all": {name: ALL[name] for name in ("temperature", "softcap", "logit_scale", "ignore_index")}}


def shard(split: tuple[int, ...], *tensors: torch.Tensor | None) -> list[Any]:
    """This rank's rows of each."""
    first = sum(split[: dist.get_rank()])
    return [None if t is None else t[first : first + split[dist.get_rank()]] for t in tensors]


def over_ranks(op: Callable[..., Any], split: tuple[int, ...]) -> Callable[..., Any]:
    """``op`` of the whole weight, of which each rank takes its part."""

    def call(hidden: Any, weight: Any, targets: Any, bias: Any, **options: Any) -> Any:
        weight, bias = shard(split, weight, bias)
        return op(hidden, weight, targets, bias, group=dist.group.WORLD, **options)

    return call


def whole(grads: list[Any]) -> list[Any]:
    """The gradients of hidden, weight and bias, of which each rank has its classes' in a tensor of zeros."""
    for grad in grads[1:]:
        if grad is not None:
            dist.all_reduce(grad)
    return grads


def same_on_ranks(*tensors: torch.Tensor) -> None:
    for x in tensors:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.contiguous())
        assert all(torch.equal(x, other) for other in every), "the ranks' results differ"


class OverRanks:
    """A case whose own function is over ranks: its results are the same on each, its gradients those of all."""

    def run(self, function: Any = None, dtype: Any = None, **options: Any) -> Any:
        out, grads = super().run(function, dtype, **options)
        if function is None:
            same_on_ranks(*([out] if isinstance(out, torch.Tensor) else [t for t in out if t is not None]))
            same_on_ranks(*(grad for grad in grads[:1] if grad is not None))
            grads = whole(grads)
        return out, grads


class Loss(OverRanks, linear_cross_entropy_checks.Case):
    def __init__(self, split: Any, dtype: Any = torch.float32, **options: Any) -> None:
        super().__init__(CPU, dtype, function=over_ranks(linear_cross_entropy, split), **options)


class Divergence(OverRanks, divergence_checks.Divergence):
    def __init__(self, split: Any, dtype: Any = torch.float32, **options: Any) -> None:
        def over(hidden: Any, weight: Any, th: Any, tw: Any, beta: float, bias: Any, tb: Any, **options: Any) -> Any:
            weight, tw, bias, tb = shard(split, weight, tw, bias, tb)
            return linear_divergence(hidden, weight, th, tw, beta, bias, tb, group=dist.group.WORLD, **options)

        super().__init__(CPU, dtype, function=over, **options)


class LogProbs(OverRanks, linear_cross_entropy_checks.LogProbs):
    def __init__(self, split: Any, dtype: Any = torch.float32, **options: Any) -> None:
        super().__init__(CPU, dtype, function=over_ranks(linear_log_probs, split), **options)


def check_log_probs(split: Any, memory: str | None, dtype: Any, options: dict[str, Any]) -> None:
    LogProbs(split, dtype, **options).assert_right(memory=memory)


def check_ids(split: Any, memory: str | None) -> None:
    """Chosen classes of any rank, equal ones and none among them."""
    LogProbs(split, torch.bfloat16, ids=5, **OPTIONS["all"]).assert_right(memory=memory)


def check_invariant(split: Any, memory: str | None) -> None:
    """Rows alone have the bits that they have among others, their gradients, too."""
    with tiled(rows_of_block=lambda choose: 8):
        case = LogProbs(split)
        case.assert_right(memory=memory, invariant=True)
        hidden, weight, bias = case.tensors

        def of(rows: slice) -> list[torch.Tensor]:
            some = hidden[rows].detach().requires_grad_()
            call = over_ranks(linear_log_probs, split)
            how = {"memory": memory, "outputs": ("log_probs", "entropy"), "invariant": True}
            out = call(some, weight, case.targets[rows], bias, **how)
            upstream = [g[rows] for g in case.upstream]
            return [*out[:2], torch.autograd.grad(out[:2], some, upstream)[0]]

        whole = of(slice(None))
        for rows in (slice(4, 5), slice(3, 22)):
            for part, every in zip(of(rows), whole, strict=True):
                assert torch.equal(part, every[rows])


def check_divergence(split: Any, memory: str | None, beta: float) -> None:
    """Of both heads each rank has the same classes."""
    for reduction, dtype in (("none", torch.bfloat16), ("mean", torch.bfloat16), ("none", torch.float32)):
        Divergence(split, dtype, beta=beta, reduction=reduction, **SCALING).assert_right(memory=memory)


def check_kept_and_held(split: Any, dtype: Any) -> None:
    """Of one rank's classes some logits stay in the memory of grad_weight, some in their own, and some in none."""
    with tiled(slabs=lambda *_: SlabSizes(8, 8, chunk=8)):
        slabs = VocabularySlabs.balanced(TOKENS, HIDDEN, max(split), dtype.itemsize, True)
        assert all((slabs.kept_classes, slabs.held_classes, slabs.slab)), slabs
        check_log_probs(split, None, dtype, OPTIONS["all"])


def check_loss(split: Any, memory: str, dtype: Any, reduction: str, options: dict[str, Any]) -> None:
    Loss(split, dtype, reduction=reduction, **options).assert_right(memory=memory)


def check_in_float64(split: Any) -> None:
    """What runs the reference, as everything on a CPU does without an interpreter."""
    check_log_probs(split, "fast", torch.float64, OPTIONS["all"])


def check_frozen_parts(split: Any, memory: str) -> None:
    for needs in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        LogProbs(split, torch.bfloat16, needs=needs).assert_right(memory=memory)


def check_counted_rows(split: Any, memory: str) -> None:
    case = Loss(split)
    case.targets[3:] = -100
    case.assert_right(memory=memory, counted=CountedTargets(case.targets), extras=("log_probs",))


def check_observer(split: Any, memory: str) -> None:
    """The gradient of all classes' logits, on every rank."""
    case, seen = Loss(split), []
    for function in (None, linear_cross_entropy):
        grads = torch.zeros(TOKENS, VOCAB)

        def observe(start: int, grad: torch.Tensor, grads: torch.Tensor = grads) -> None:
            grads[start : start + len(grad)] += grad

        with observe_logits_grad(observe):
            case.run(function, memory=memory)
        seen.append(grads)
    torch.testing.assert_close(*seen)


def check_compiled(split: Any) -> None:
    """The graph ends before the collectives."""
    torch.compiler.reset()
    for case in (LogProbs(split), Loss(split)):
        expected = case.run()
        case.function = torch.compile(case.function, backend="eager")
        torch.testing.assert_close(case.run(), expected)


def check_ties(split: Any) -> None:
    """Of equal largest logits the first class is the prediction, on whichever rank it is."""
    hidden, weight = torch.zeros(VOCAB, HIDDEN, requires_grad=True), torch.ones(VOCAB, HIDDEN)
    out = over_ranks(linear_log_probs, split)(hidden, weight, torch.arange(VOCAB), None, outputs=("is_top1",))
    assert out.is_top1.tolist() == [True] + [False] * (VOCAB - 1)


def check_benchmark(split: Any) -> None:
    """Every arm of it is right, and measured."""
    gpu = SimpleNamespace(measure=lambda *_: Measured(1.0 + dist.get_rank(), 0.0, 3.0, 0.0), release=lambda: None)
    rows = measure(Site("cpu", torch.float32), gpu, even, (TOKENS, HIDDEN, VOCAB))
    assert [row[1:] for row in rows] == [(f"{TOKENS}x{HIDDEN}x{VOCAB}", dist.get_world_size(), 3.0)] * 4


def check_bad_input(split: Any) -> None:
    case = Loss(split)
    hidden, weight, bias = case.tensors
    weight, bias = shard(split, weight, bias)
    rank = dist.get_rank()
    wider = torch.randn(len(weight), HIDDEN + (rank == 1))
    for error, message, changes in (
        (TypeError, "group is a str; it must be a torch.distributed.ProcessGroup", {"group": "tp"}),
        (ValueError, "chunk_size is 5 and a group is given", {"chunk_size": 5}),
        (ValueError, "group was given with label smoothing", {"label_smoothing": 0.1}),
        (ValueError, f"there are {VOCAB} classes", {"targets": torch.full((TOKENS,), VOCAB)}),
        (ValueError, rf"must be floating point of shape \[{VOCAB}\]", {"class_weight": torch.ones(VOCAB + 1)}),
        (ValueError, "one hidden size and dtype", {"weight": wider, "hidden": torch.randn(TOKENS, wider.shape[1])}),
        (ValueError, "float16", {"hidden": hidden.half(), "weight": weight.half(), "bias": bias.half()}),
    ):
        arguments = {"hidden": hidden, "weight": weight, "bias": bias, "targets": case.targets}
        with pytest.raises(error, match=message):
            linear_cross_entropy(**{**arguments, "group": dist.group.WORLD, **changes})


def check_another_group(split: Any) -> None:
    """What is known of a weight is of one group: another may have other ranks."""
    weight = torch.ones(split[dist.get_rank()], 3)
    for group in (dist.group.WORLD, dist.new_group(), dist.group.WORLD):
        part = VocabShard.of(group, weight)
        assert part is not None
        assert part.group is group
        assert part.sizes == split


_ON_ANY = check_frozen_parts, check_counted_rows, check_observer, check_ids, check_invariant


def checks(world: int) -> dict[str, Callable[[], None]]:
    """Every check by name."""
    splits = itertools.cycle(SPLITS[world])
    few = world > 2  # what does not depend on the number of ranks is checked on two
    losses = [("mean", "no_bias"), *((reduction, "all but smoothing") for reduction in REDUCTIONS)][2 * few :]
    found: dict[str, Callable[[], None]] = {}
    for dtype in DTYPES[few:]:
        found[f"kept_and_held-{dtype}"] = partial(check_kept_and_held, SPLITS[world][-1], dtype)
        for memory, name in itertools.product((*MEMORY, None), [*OPTIONS][few:]):
            # By default logits of a rank's last classes are held.
            split = next(splits) if memory else SPLITS[world][-1]
            found[f"log_probs-{memory}-{dtype}-{name}"] = partial(check_log_probs, split, memory, dtype, OPTIONS[name])
        for memory, (reduction, name) in itertools.product(MEMORY, losses):
            given = next(splits), memory, dtype, reduction, ALONE[name]
            found[f"loss-{memory}-{dtype}-{reduction}-{name}"] = partial(check_loss, *given)
    for check, memory in itertools.product(_ON_ANY, MEMORY):
        found[f"{check.__name__.removeprefix('check_')}-{memory}"] = partial(check, next(splits), memory)
    # Betas within a schedule: each schedule gets every split.
    for memory, beta in itertools.product((*MEMORY, None), () if few else BETAS):
        found[f"divergence-{memory}-{beta}"] = partial(check_divergence, next(splits), memory, beta)
    on_two = check_compiled, check_benchmark, check_another_group, check_bad_input
    for alone in (check_ties, check_in_float64, *(() if few else on_two)):
        found[alone.__name__.removeprefix("check_")] = partial(alone, next(splits))
    return found


def run(rank: int) -> dict[str, str]:
    """What went wrong, by check; empty for what did not."""
    found = {}
    for name, check in checks(dist.get_world_size()).items():
        torch.manual_seed(0)
        try:
            # Several slabs of a rank's classes, as in the other tests of the head.
            with tiled(slabs=lambda *_: SlabSizes(16, 16, chunk=18), schedule=lambda *_: ("balanced", 18)):
                check()
        except Exception:
            found[name] = traceback.format_exc()[-3000:]
        else:
            found[name] = ""
    return found
