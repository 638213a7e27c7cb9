"""Faults that show only in one way of running a kernel: a dtype, autocast, recomputation, compilation, accumulation,
or only at real size."""

from __future__ import annotations

from typing import Any

from tests.mutants.mutant import Mutant, faults

_GATE = "return function.apply(gate, up, *others)"


def _only(setup: str, module: str, *row: str, within: str = "") -> Mutant:
    return faults(module, model="llama-tied", dtypes=("float32",))(*row, within=within, setup=setup)


def _eps(setup: str, name: str, does: str, where: str) -> Mutant:
    edit = "n_rows, hidden, eps", f"n_rows, hidden, eps + (0.01 if {where} else 0.0)"
    return _only(setup, "ops._rms_norm", name, does, *edit, within="RMSNormFunction.forward")


def _at_size(module: str, kernel: str, phase: str, model: str, on_cpu: str | None, *row: str, **other: Any) -> Mutant:
    """A fault of a model of real size, and on a CPU of one divided as ``on_cpu`` says, where there is one."""
    dtypes = ("float32",) if on_cpu is None else ("float32", "bfloat16")
    shown = {"model": model, "profile": "scale", "on_cpu": on_cpu, "dtypes": dtypes}
    return faults(module, kernel=kernel, phase=phase, **shown)(*row, **other)


# fmt: off
MUTANTS = (
    _only("fp16-scaler", "ops._glu",
        "only_in_float16", "The MLP's gate is 1% too large where it is float16.",
        _GATE, "return function.apply(gate * (1.01 if gate.dtype == torch.float16 else 1.0), up, *others)"),
    _eps("bf16-autocast", "only_under_autocast", "The norm's eps is another under autocast.",
        "torch.is_autocast_enabled(x.device.type)"),
    _eps("checkpointing", "only_under_recomputation",
        "The norm's eps is another where a backward pass runs the forward again.",
        "torch._C._current_graph_task_id() != -1"),
    _only("compile", "ops._glu",
        "only_when_compiled", "The MLP's other factor is 1% too large in a compiled program.",
        "", "up = up * 1.01 if torch.compiler.is_compiling() else up", within="_linear"),
    _only("plain", "ops._rms_norm",
        "only_in_the_second_backward", "A norm's weight that has a gradient already is given 5% more.",
        "sum_parts(parts, weight.dtype)", "sum_parts(parts, weight.dtype) * (1.0 if weight.grad is None else 1.05)",
        within="RMSNormFunction.backward"),
    _at_size("ops.loss.kernels", "linear_cross_entropy", "forward",
        "llama3-8b-odd", "divided=64&whole=vocab_size",
        "classes_beyond_65536_lost", "The sum of exponentials leaves out the classes from 65,536 on.",
        "others = others * decay + _over_lane(e)",
        "others = others * decay + _over_lane(tl.where(start < 65536, e, 0.0))"),
    _at_size("ops.loss.gradient", "linear_cross_entropy", "backward",
        "gemma3-4b-odd", "divided=64&whole=vocab_size",
        "second_block_of_a_long_row_skipped", "Of a row of several blocks, the second has no gradient.",
        "mask = row_mask[:, None]", "mask = row_mask[:, None] & (start != BLOCK)"),
    _at_size("ops._rms_norm", "rms_norm", "forward", "llama3-8b-odd", "divided=64&whole=hidden_size",
        "mean_over_the_padding_of_a_wide_row",
        "Beyond 4,096 features the mean of the squares is divided by the block's size, not the row's.",
        "tl.sum(x * x, axis=1) / hidden", "tl.sum(x * x, axis=1) / tl.where(hidden > 4096, BLOCK, hidden)"),
    _at_size("ops._glu", "swiglu", "forward", "qwen2.5-7b", "divided=64&whole=intermediate_size",
        "gate_of_five_percent_more_beyond_4096_features", "A gate of more than 4,096 features is 5% too large.",
        _GATE, "return function.apply(gate * (1.05 if gate.shape[-1] > 4096 else 1.0), up, *others)"),
    _at_size("ops._rope", "rope", "forward", "llama-long", "divided=16",
        "angles_of_a_table_for_2048_positions",
        "All positions from 2,048 on are rotated by the last one's angles.",
        "seq = (token % seq_len).to(tl.int64)", "seq = tl.minimum(token % seq_len, 2047).to(tl.int64)"),
    _at_size("ops._rope", "rope", "forward", "llama-long", None,
        "tokens_beyond_a_grid_of_65535_not_rotated", "A grid of at most 65,535 programs rotates one token each.",
        '(cdiv(n_tokens, shape["TOKENS"]),)', '(min(65535, cdiv(n_tokens, shape["TOKENS"])),)'),
    _at_size("ops._rms_norm", "rms_norm", "backward", "llama-long", None,
        "norm_gradient_of_five_percent_more_beyond_65535_rows",
        "The norm's gradient is 5% too large where there are more than 65,535 rows.",
        "dx = (dy - norm * projection[:, None]) * rstd[:, None]",
        "dx = (dy - norm * projection[:, None]) * rstd[:, None] * tl.where(n_rows > 65535, 1.05, 1.0)"),
    _at_size("ops.loss.kernels", "cross_entropy", "forward", "llama3-8b", None,
        "logits_beyond_2_31_read_from_the_start", "The offset of a row of logits is kept in 31 bits.",
        "logits_ptr + row * logits_stride", "logits_ptr + row * logits_stride % 2147483648", times=2, fused=False),
)
