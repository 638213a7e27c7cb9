"""Faults of the loss: over logits (cross_entropy.py and its kernels), and from hidden states."""

from __future__ import annotations

from typing import Any

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_LOGITS = "liger_kernels.ops.cross_entropy"
_ROWS = "liger_kernels.ops._cross_entropy_rows"
_KERNELS = "liger_kernels.ops._cross_entropy_kernels"
_FORMULAS = "liger_kernels.ops._cross_entropy_formulas"
_MEAN = "liger_kernels.ops._mean"
_HIDDEN = "liger_kernels.ops.linear_cross_entropy"
_SHARED = "liger_kernels.ops._linear"
_TOKEN_CHUNKS = "liger_kernels.ops._linear_token_chunks"
_SLABS = "liger_kernels.ops._linear_vocabulary_slabs"
_COUNTED = "liger_kernels.ops._counted_rows"


def _logits(
    name: str,
    does: str,
    phase: str,
    *edits: tuple[str, ...],
    fused: bool = False,
    module: str = _KERNELS,
    **other: Any,
) -> Mutant:
    """Of the cross entropy over logits that exist unless ``fused``."""
    kernel = "linear_cross_entropy" if fused else "cross_entropy"
    changed = tuple(Edit(module, *edit) for edit in edits)
    return Mutant(name, does, changed, kernel=kernel, phase=phase, fused=fused, **other)


def _hidden(
    name: str, does: str, phase: str, *edits: tuple[str, ...], module: str = _TOKEN_CHUNKS, **other: Any
) -> Mutant:
    """Of the fused head."""
    changed = tuple(Edit(module, *edit) for edit in edits)
    return Mutant(name, does, changed, kernel="linear_cross_entropy", phase=phase, **other)


_AT_TARGET = "at_target = (z_loss_slope * p_target - others * inverse * true_weight) * upstream"
_STORED = "grad.to(grad_rows.dtype.element_ty)"
_SLOPE = "return logit_scale * 4.0 * e / ((1.0 + e) * (1.0 + e))"
_SCALE = "upstream.loss.to(torch.float32) / saved[0]"
_UPSTREAM = "            grad_loss,\n            grad,\n"
_COUNT = "counts = in_range & (target != ignore_index)\n"
_WEIGHT = "self.weight.rounded(scale, dtype, overwrite)"
_FINISHED = "finished(needs.hidden, self.hidden)"
_KEEP = "1.0 if start else 0.0"
_ADD = "sums.add(call, wanted, start, stop, logits)"

# fmt: off
MUTANTS = (
    _logits("c1_target_gradient_cancels", "The target's gradient is p - 1 with p rounded to the logits' dtype.",
        "backward",
        (_AT_TARGET, "at_target = (p_target.to(logits_rows.dtype.element_ty).to(tl.float32) - 1.0) * upstream"),
        source="C1", dtypes=("bfloat16",)),
    _logits("c1_fused_target_gradient_cancels",
        "The target's gradient is p - 1 with p rounded to the logits' dtype, in the fused head.",
        "backward",
        (_AT_TARGET, "at_target = (p_target.to(logits_rows.dtype.element_ty).to(tl.float32) - 1.0) * upstream"),
        source="C1", dtypes=("bfloat16",), fused=True, sample=True),
    _logits("c4_upstream_gradient_ignored", "The gradient that comes in is taken for 1.",
        "backward", (_UPSTREAM, _UPSTREAM.replace("grad_loss", "torch.ones_like(grad_loss)")), source="C4",
        module=_LOGITS),
    _hidden("c4_fused_upstream_gradient_ignored", "The gradient that comes in is taken for 1, in the fused head.",
        "backward", (_SCALE, "torch.ones_like(saved[0]) / saved[0]"), source="C4"),
    _logits("loss_gradient_of_an_upstream_of_one_stays",
        "The gradient that the forward wrote for an upstream gradient of 1 is taken whatever comes in.",
        "backward", ("tl.load(skip_if_one_ptr) == 1.0", "tl.load(skip_if_one_ptr) != 0.0")),
    _logits("c6_logits_become_their_gradient",
        "The backward writes the gradient over the logits, which the caller holds.",
        "backward",
        ("        skip_if_one = None if grad is None else grad_loss\n"
            "        grad = _empty_grad(logits) if grad is None else grad\n",
            "        skip_if_one, grad = None, logits\n"), source="C6", dies="overwritten", module=_LOGITS),
    _logits("c8_mean_over_all_tokens", "The mean divides by all rows, the ignored ones too.",
        "forward", (_COUNT, "counts = in_range\n"), source="C8", module=_MEAN),
    _logits("c8_fused_mean_over_all_tokens", "The mean divides by all rows, the ignored ones too, in the fused head.",
        "forward", (_COUNT, "counts = in_range\n"), source="C8", fused=True, sample=True, module=_MEAN),
    _logits("c16_small_probabilities_filtered", "Classes of a probability below 2^-12 get no gradient.",
        "backward",
        ("e * factor[:, None]", "tl.where(e * inverse[:, None] < 0.000244140625, 0.0, e * factor[:, None])"),
        source="C16", fused=True),
    _logits("c18_softcap_without_its_factor", "The cap is x * tanh(x / cap), not cap * tanh(x / cap).",
        "forward",
        ("softcap * tanh(x * as_float32(logit_scale) / softcap, PRECISE)",
            "x * tanh(x * as_float32(logit_scale) / softcap, PRECISE)"), source="C18", model="gemma2", fused=True,
        module=_FORMULAS),
    _logits("softcap_ignored", "Logits are not capped, forward and backward.",
        "forward", ("", "options = options._replace(softcap=None)", "forward_rows"), module=_ROWS, model="gemma2",
        fused=True),
    _logits("softcap_gradient_missing", "The gradient forgets the slope of the cap.",
        "backward", (_SLOPE, "return logit_scale + 0.0 * e"), model="gemma2", fused=True, module=_FORMULAS),
    _logits("softcap_gradient_missing_over_logits", "The gradient forgets the slope of the cap, where logits exist.",
        "backward", (_SLOPE, "return logit_scale + 0.0 * e"), model="gemma2", module=_FORMULAS),
    _logits("z_loss_unasked", "A z-loss of 1e-4 is added, as some trainers do.",
        "forward", ("", "options = options._replace(z_loss=1e-4)", "forward_rows"), module=_ROWS, fused=True),
    _logits("last_classes_dropped", "The classes beyond the last multiple of 8 are not summed.",
        "forward", ("in_row = cols < vocab", "in_row = cols < vocab // 8 * 8", "_scan_block"), fused=True),
    _logits("last_classes_without_gradient", "The classes beyond the last multiple of 8 get no gradient.",
        "backward", (_STORED, f"tl.where((cols < vocab // 8 * 8)[None, :], grad, 0.0){_STORED.removeprefix('grad')}"),
        fused=True),
    _logits("ignored_rows_count_as_class_0", "Rows whose label is -100 are learnt as class 0.",
        "forward",
        ("target, counts, invalid, column, here = read_target(target, ignore_index, vocab, first, classes)",
            "target = tl.where(row_mask & (target == ignore_index), 0, target)\n"
            "target, counts, invalid, column, here = read_target(target, ignore_index, vocab, first, classes)"),
        fused=True),
    _logits("logits_gradient_of_one_percent_less", "The gradient of the logits is 1% too small.",
        "backward", (_STORED, f"({_STORED.replace('grad.', 'grad * 0.99).', 1)}")),
    _logits("target_gradient_of_one_percent_less", "The target's gradient alone is 1% too small.",
        "backward", (_AT_TARGET, f"{_AT_TARGET} * 0.99"), fused=True),
    _logits("loss_of_half_a_percent_more", "The loss is 0.5% too large; its gradient is not.",
        "forward", ("loss = nll", "loss = 1.005 * nll"), fused=True),
    _hidden("c12_bias_gradient_guarded_by_the_hidden_states",
        "The bias gets a gradient only where the hidden states need one, too.",
        "backward",
        ("", "if wanted.bias and not wanted.hidden:\n    self.bias.zero_()\n    wanted = wanted._replace(bias=False)",
            "_GradientSums.add"), source="C12", model="llama-bias"),
    _hidden("bias_gradient_of_the_first_chunk", "Later chunks add nothing to the gradient of the head's bias.",
        "backward", ("self.bias.add_(d_logits.sum(0, dtype=torch.float32))", "pass"), model="llama-bias"),
    _hidden("bias_ignored", "The head's bias is not added to the logits.",
        "forward",
        ("return torch.addmm(bias, hidden, weight.t(), out=out)", "return torch.mm(hidden, weight.t(), out=out)"),
        module=_SHARED, model="llama-bias"),
    _hidden("c21_sum_of_chunk_means", "Every chunk's loss is divided by its own count, and these means are added up.",
        "forward", ("call.mean_denominator()", "call.mean_denominator() * self.chunk_size / max(tokens, 1)"),
        source="C21"),
    _hidden("n18_fused_head_assumes_unpadded_rows",
        "The kernel's rows are taken to follow one another without the padding between them.",
        "forward",
        ("logits, call.targets[start:stop]",
            "logits.as_strided(logits.shape, (len(call.weight), 1)), call.targets[start:stop]", "TokenChunks.forward"),
        source="N18"),
    _hidden("last_chunk_without_gradient", "The partial last chunk adds nothing to any gradient.",
        "backward", (_ADD, f"logits = logits if stop < tokens else logits.zero_()\n{_ADD}", "TokenChunks.forward")),
    _hidden("weight_gradient_of_the_last_chunk", "The head's gradient is overwritten by every chunk.",
        "backward", (_KEEP, "0.0"), sample=True),
    _hidden("weight_gradient_adds_to_garbage", "The first chunk adds to what the buffer held before.",
        "backward", (_KEEP, "1.0")),
    _hidden("hidden_gradient_of_the_first_chunk", "Every chunk's rows get the first chunk's gradient.",
        "backward",
        ("torch.mm(d_logits, call.weight, out=self.hidden[start:stop])",
            "torch.mm(d_logits, call.weight, out=self.hidden[start:stop])\n"
            "self.hidden[start:stop] = self.hidden[: stop - start]")),
    _hidden("weight_gradient_of_one_percent_more", "The head's gradient is 1% too large.",
        "backward", (_WEIGHT, _WEIGHT.replace("scale", "1.01 * scale"))),
    _hidden("hidden_gradient_of_one_percent_less", "The gradient of the hidden states is 1% too small.",
        "backward", (_FINISHED, f"{_FINISHED}.mul_(0.99)")),
    _hidden("weight_gradient_rounded_before_it_is_scaled",
        "The head's gradient is divided by the number of targets in bfloat16.",
        "backward", (_WEIGHT, "(self.weight.first.bfloat16() * scale.bfloat16()).to(dtype)"), dtypes=("float32",)),
    _hidden("frozen_body_takes_the_head_with_it",
        "The head gets a gradient only where the hidden states need one, too.",
        "backward",
        ("        grad and weight.requires_grad,", "        grad and weight.requires_grad and hidden.requires_grad,"),
        module=_HIDDEN, dies="missing"),
    _hidden("tied_head_gradient_twice", "The head's gradient is added twice to the embedding that it is tied to.",
        "backward", (_WEIGHT, _WEIGHT.replace("scale", "2.0 * scale")), model="llama-tied"),
    _hidden("tied_head_gradient_missing", "A head that is tied gives the embedding no gradient.",
        "backward", (_WEIGHT, _WEIGHT.replace("scale", "0.0 * scale")), model="llama-tied"),
    _hidden("one_chunk_upstream_gradient_ignored",
        "The gradient that comes in is taken for 1, where one chunk has all tokens.",
        "backward", ("stats, upstream.loss", "stats, torch.ones_like(upstream.loss)", "_overwritten"), module=_SLABS),
    _hidden("one_chunk_mean_over_all_tokens",
        "The gradient of a mean is divided by all rows, the ignored ones too, where one chunk has all tokens.",
        "backward",
        ("denominator=denominator", "denominator=torch.full_like(denominator, len(logits))", "_overwritten"),
        module=_SLABS),
    _hidden("one_chunk_weight_gradient_of_one_percent_more",
        "The head's gradient is 1% too large, where one chunk has all tokens.",
        "backward",
        ("torch.mm(d_logits.t(), hidden, out=grad_weight[first:stop])",
            "torch.mm(d_logits.t(), hidden, out=grad_weight[first:stop]).mul_(1.01)"), module=_SLABS),
    _hidden("fast_hidden_gradient_of_the_last_slab",
        "The hidden states' gradient of the second slab of kept logits replaces the first one's.",
        "backward", ("keep=1.0 if first else 0.0", "keep=0.0", "_gradients_of_kept"), module=_SLABS, memory="fast"),
    _hidden("fast_hidden_gradient_over_the_kept_logits",
        "The hidden states' gradient is summed where the first slab's logits lie in the memory of grad_weight.",
        "backward",
        ("grad_weight[: self.kept_classes].view(-1).view(torch.float32)[: hidden.numel()]",
            "grad_weight.view(-1).view(torch.float32)[-hidden.numel() :]"), module=_SLABS, memory="fast"),
    _hidden("fast_last_rows_over_the_kept_logits",
        "The second slab's rows of grad_weight are written where the first one's gradient still lies.",
        "backward",
        ("for first, stop, d_logits in every:\n    torch.mm(d_logits.t(), hidden, out=grad_weight[first:stop])",
            "for first, stop, d_logits in reversed(every):\n"
            "    torch.mm(d_logits.t(), hidden, out=grad_weight[first:stop])"), module=_SLABS, memory="fast"),
    _hidden("slabs_hidden_gradient_of_the_last_slab",
        "The hidden states' gradient is overwritten by every slab of the vocabulary.",
        "backward", ("keep = 1.0", "keep = 0.0", "_gradients_of_slabs"), module=_SLABS, memory="small"),
    _hidden("slabs_write_over_their_own_logits",
        "A wide slab keeps its logits where its own rows of grad_weight are written.",
        "backward", ("begin = padded(stop * hidden_size)", "begin = padded((stop - size) * hidden_size)"),
        module=_SLABS, memory="small"),
    _hidden("slabs_write_over_the_logits_that_are_kept",
        "The forward's later slabs lie where the first one's logits wait for the backward.",
        "backward", ("grad_weight.view(-1)[: kept * hidden_size]", "grad_weight.view(-1)[kept * hidden_size :]"),
        module=_SLABS, memory="small"),
    _hidden("counted_rows_with_anothers_target", "A row that is taken gets the target of the row before it.", "forward",
        ("target = tl.where((n_counted > n_kept) & (place == 0), out_of_range, target)",
            "target = tl.load(targets_ptr + tl.maximum(row - 1, 0), mask=row < n_rows, other=ignore_index)"),
        module=_COUNTED),
    _hidden("counted_rows_gradient_for_the_others", "The rows that are left out get the gradient of the first one.",
        "backward",
        ("grad.new_zeros((ctx.n_rows, *grad.shape[1:]))",
            "grad[:1].expand(ctx.n_rows, *grad.shape[1:]).contiguous()"),
        module=_COUNTED),
)
