"""Faults that show only in one way of running a kernel: a dtype, autocast, recomputation, compilation, accumulation,
or only at real size."""

from __future__ import annotations

from typing import Any

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_NORM = "liger_kernels.ops.rms_norm"
_GLU = "liger_kernels.ops.glu"
_LOSS = "liger_kernels.ops._cross_entropy_kernels"
_ROPE = "liger_kernels.ops.rope"


def _only(name: str, does: str, edit: Edit, setup: str, **other: Any) -> Mutant:
    return Mutant(name, does, (edit,), setup=setup, model="llama-tied", dtypes=("float32",), **other)


def _eps(wrong: str) -> Edit:
    new = f"n_rows, hidden, eps + (0.01 if {wrong} else 0.0)"
    return Edit(_NORM, "n_rows, hidden, eps", new, "RMSNormFunction.forward")


def _at_size(
    name: str, does: str, module: str, old: str, new: str, model: str, on_cpu: str | None, times: int = 1, **other: Any
) -> Mutant:
    edits = (Edit(module, old, new, times=times),)
    dtype = ("float32",) if on_cpu is None else ("float32", "bfloat16")
    return Mutant(name, does, edits, model=model, profile="scale", on_cpu=on_cpu, dtypes=dtype, **other)


# fmt: off
MUTANTS = (
    _only("only_in_float16", "The MLP's gate is 1% too large where it is float16.",
        Edit(_GLU, "return function.apply(gate, up, *others)",
            "return function.apply(gate * (1.01 if gate.dtype == torch.float16 else 1.0), up, *others)"),
        "fp16-scaler"),
    _only("only_under_autocast", "The norm's eps is another under autocast.",
        _eps("torch.is_autocast_enabled(x.device.type)"), "bf16-autocast"),
    _only("only_under_recomputation", "The norm's eps is another where a backward pass runs the forward again.",
        _eps("torch._C._current_graph_task_id() != -1"), "checkpointing"),
    _only("only_when_compiled", "The MLP's other factor is 1% too large in a compiled program.",
        Edit(_GLU, "", "up = up * 1.01 if torch.compiler.is_compiling() else up", "_linear"), "compile"),
    _only("only_in_the_second_backward", "A norm's weight that has a gradient already is given 5% more.",
        Edit(_NORM, "sum_parts(parts, weight.dtype)",
            "sum_parts(parts, weight.dtype) * (1.0 if weight.grad is None else 1.05)", "RMSNormFunction.backward"),
        "plain"),
    _at_size("classes_beyond_65536_lost", "The sum of exponentials leaves out the classes from 65,536 on.",
        _LOSS, "others = others * decay + _over_lane(e)",
        "others = others * decay + _over_lane(tl.where(start < 65536, e, 0.0))",
        "llama3-8b-odd", "divided=64&whole=vocab_size", kernel="linear_cross_entropy", phase="forward"),
    _at_size("second_block_of_a_long_row_skipped", "Of a row of several blocks, the second has no gradient.",
        _LOSS, "mask = row_mask[:, None]", "mask = row_mask[:, None] & (start != BLOCK)",
        "gemma3-4b-odd", "divided=64&whole=vocab_size", kernel="linear_cross_entropy", phase="backward"),
    _at_size("mean_over_the_padding_of_a_wide_row",
        "Beyond 4,096 features the mean of the squares is divided by the block's size, not the row's.",
        _NORM, "tl.sum(x * x, axis=1) / hidden", "tl.sum(x * x, axis=1) / tl.where(hidden > 4096, BLOCK, hidden)",
        "llama3-8b-odd", "divided=64&whole=hidden_size", kernel="rms_norm", phase="forward"),
    _at_size("gate_of_five_percent_more_beyond_4096_features", "A gate of more than 4,096 features is 5% too large.",
        _GLU, "return function.apply(gate, up, *others)",
        "return function.apply(gate * (1.05 if gate.shape[-1] > 4096 else 1.0), up, *others)",
        "qwen2.5-7b", "divided=64&whole=intermediate_size", kernel="swiglu", phase="forward"),
    _at_size("angles_of_a_table_for_2048_positions",
        "All positions from 2,048 on are rotated by the last one's angles.",
        _ROPE, "seq = (token % seq_len).to(tl.int64)", "seq = tl.minimum(token % seq_len, 2047).to(tl.int64)",
        "llama-long", "divided=16", kernel="rope", phase="forward"),
    _at_size("tokens_beyond_a_grid_of_65535_not_rotated", "A grid of at most 65,535 programs rotates one token each.",
        _ROPE, '(cdiv(n_tokens, shape["TOKENS"]),)', '(min(65535, cdiv(n_tokens, shape["TOKENS"])),)',
        "llama-long", None, kernel="rope", phase="forward"),
    _at_size("norm_gradient_of_five_percent_more_beyond_65535_rows",
        "The norm's gradient is 5% too large where there are more than 65,535 rows.",
        _NORM, "dx = (dy - norm * projection[:, None]) * rstd[:, None]",
        "dx = (dy - norm * projection[:, None]) * rstd[:, None] * tl.where(n_rows > 65535, 1.05, 1.0)",
        "llama-long", None, kernel="rms_norm", phase="backward"),
    _at_size("logits_beyond_2_31_read_from_the_start", "The offset of a row of logits is kept in 31 bits.",
        _LOSS, "logits_ptr + row * logits_stride", "logits_ptr + row * logits_stride % 2147483648",
        "llama3-8b", None, times=2, kernel="cross_entropy", phase="forward", fused=False),
)
