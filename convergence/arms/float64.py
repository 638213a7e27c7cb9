"""The truth's arithmetic: computes in float64 what upstream explicitly computes in float32.

At real size two of upstream's functions need more memory in float64 than a GPU has. Attention materializes its scores,
because no kernel avoids that in float64. The loss holds the logits four times. Both are computed in blocks, by the same
formulas. In a mini model both are smaller than :data:`BLOCK`, and run unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import graph
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

# Scores or logits with more elements are computed in blocks of about this many: 2 GiB in float64.
BLOCK = 2**28


class InFloat64(TorchFunctionMode):
    """Turns every explicit float32 into float64.

    Upstream's norms, rotary angles, softmax and loss cast to float32. A truth that is rounded there would be as noisy
    as the float32 baseline that it judges."""

    widens = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not InFloat64.widens:
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _is_long(args, kwargs):
            return attention(*args, **kwargs)
        if func is F.cross_entropy and _is_large(args, kwargs):
            return cross_entropy(*args, **kwargs)
        if func is torch.multinomial:  # in float64 a GPU draws other random numbers than the other arms
            return func(args[0].to(torch.float32), *args[1:], **kwargs)

        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})

    def _backward(
        self, loss: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        """Widen what a backward pass computes again (checkpointing), too.

        Torch disables a mode inside of its own handler, so the mode is entered again. ``torch.autograd.backward`` would
        call the handler once more, so the engine is called directly."""
        gradients = (torch.ones_like(loss) if gradient is None else gradient,)
        wanted = () if inputs is None else tuple(inputs)
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            graph._engine_run_backward(
                (loss,), gradients, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True
            )


@contextlib.contextmanager
def as_asked() -> Iterator[None]:
    """Inside, float32 stays float32, also in a truth."""
    before, InFloat64.widens = InFloat64.widens, False
    try:
        yield
    finally:
        InFloat64.widens = before


def _is_long(args: Any, options: dict[str, Any]) -> bool:
    """Whether the scores of this attention are more than a block. Upstream passes three tensors by position."""
    return len(args) == 3 and not options.get("dropout_p") and _scores(*args[:2]) > BLOCK


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    return query.shape[:-1].numel() * key.shape[-2]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``F.scaled_dot_product_attention`` without dropout, [..., heads, length, head_dim], in blocks of queries. The
    backward computes each block's scores again."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    length, outputs = query.shape[-2], []
    rows = max(1, BLOCK // 4 * length // _scores(query, key))
    for start in range(0, length, rows):
        end = min(start + rows, length)
        keys = end if is_causal else key.shape[-2]
        mask = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else attn_mask[..., start:end, :]
        if is_causal:
            mask = torch.ones(end - start, keys, dtype=torch.bool, device=query.device).tril(start)
        block = query[..., start:end, :], key[..., :keys, :], value[..., :keys, :], mask
        outputs.append(checkpoint(_attention, *block, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, -2)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    scores = query @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _is_large(args: Any, options: dict[str, Any]) -> bool:
    """Whether the logits [tokens, classes] of a causal model's loss are more than a block."""
    as_upstream = options.get("weight") is None and not options.get("label_smoothing")
    return (
        len(args) == 2 and args[0].ndim == 2 and args[1].ndim == 1 and args[0].numel() > BLOCK
        and as_upstream and options.get("reduction", "mean") in ("mean", "sum")
    )  # fmt: skip


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100, reduction: str = "mean", **others: Any
) -> torch.Tensor:
    """``F.cross_entropy`` of logits [tokens, classes]. Its only other tensor of this size is their gradient."""
    losses: torch.Tensor = _CrossEntropy.apply(logits, targets, ignore_index)
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of every token, in blocks of tokens; 0 if the target is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        rows = max(1, BLOCK // 4 // logits.shape[-1])
        log_sum = torch.cat([block.logsumexp(-1) for block in logits.split(rows)])
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.ignore_index, ctx.rows = ignore_index, rows
        at_target = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (log_sum - at_target).masked_fill(targets == ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        scale = grad_output.masked_fill(targets == ctx.ignore_index, 0.0).unsqueeze(-1)
        gradient = torch.empty_like(logits)
        for block, of in zip(gradient.split(ctx.rows), range(0, len(logits), ctx.rows), strict=True):
            here = slice(of, of + len(block))
            torch.sub(logits[here], log_sum[here].unsqueeze(-1), out=block)
            block.exp_().scatter_add_(-1, targets[here].clamp(min=0).unsqueeze(-1), -torch.ones_like(scale[here]))
            block.mul_(scale[here])
        return gradient, None, None
