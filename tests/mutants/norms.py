"""Faults of RMSNorm, with and without a gate, and of LayerNorm."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import both_phases, faults

_forward, _backward = both_phases("ops._rms_norm", kernel="rms_norm")
_layer_forward, _layer_backward = both_phases("ops._layer_norm", kernel="layer_norm", model="gpt_neox")
_gated_forward, _gated_backward = both_phases("ops._gated_rms_norm", kernel="gated_rms_norm", model="qwen3_next")
_sums = faults("ops._norm_rows", kernel="rms_norm", phase="backward")
_RSTD = "tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)"
_DX = "(dy - norm * projection[:, None]) * rstd[:, None]"
_SUM = "tl.sum(parts, axis=0)"
_ACCUMULATE = "dweight += dy * norm"
_CENTRED = "tl.where(in_row[None, :], x - mean[:, None], 0.0)"
_LAYER_DX = "(dy - shift[:, None] - norm * projection[:, None]) * rstd[:, None]"
# On a mini model one interpreted program takes every row; smaller tiles, honest by themselves, make several of them.
_SMALL_TILES = Edit(
    "liger_kernels.ops._norm_rows",
    "rows, _ = tile(n_rows, hidden, max(1, elements // block), block)",
    "rows = min(8, next_power_of_2(n_rows))",
    "launch_shape",
)

# fmt: off
MUTANTS = (
    _forward("n1a_norm_without_offset", "Gemma's norm multiplies by weight, not by 1 + weight.",
        'FORMULA == "offset_scale_then_cast"', "False", within="_rms_norm_fwd_kernel", source="N1", model="gemma2"),
    _backward("n1b_norm_gradient_without_offset",
        "The gradient of Gemma's norm multiplies by weight, not by 1 + weight.",
        'FORMULA == "offset_scale_then_cast"', "False", within="_rms_norm_bwd_kernel", source="N1", model="gemma2",
        sample=True),
    _backward("n3_norm_gradient_in_place",
        "The gradient is written over the one that came in, which the residual around Gemma 2's norms needs, too.",
        "torch.empty_like(x, memory_format=torch.contiguous_format)", "dy_rows.view(x.shape)",
        source="N3", model="gemma2"),
    _backward("n7_norm_gradient_measures_before_flattening",
        "The backward reads rows and columns off the first two of three dimensions.",
        "hidden = x.shape[-1]\nn_rows = x.numel() // hidden", "n_rows, hidden = x.shape[:2]",
        within="RMSNormFunction.backward", dies="raised", source="N7"),
    _forward("norm_ignores_eps", "Nothing is added to the mean of the squares.",
        _RSTD, "tl.rsqrt(tl.sum(x * x, axis=1) / hidden)"),
    _forward("norm_eps_outside_the_root", "eps is added to the root, not to the mean under it.",
        _RSTD, "1.0 / (tl.sqrt(tl.sum(x * x, axis=1) / hidden) + eps)"),
    _forward("norm_mean_over_the_padded_row", "The mean divides by the block, not by the columns.",
        _RSTD, "tl.rsqrt(tl.sum(x * x, axis=1) / BLOCK + eps)"),
    _forward("norm_drops_the_last_row", "The last row of the last tile is not read.",
        "mask = (row < n_rows)[:, None] & (col < hidden)[None, :]",
        "mask = (row < n_rows - 1)[:, None] & (col < hidden)[None, :]"),
    _forward("norm_drops_the_last_column", "The last column is not counted in the mean of the squares.",
        "tl.sum(x * x, axis=1)", "tl.sum(tl.where((col < hidden - 1)[None, :], x * x, 0.0), axis=1)"),
    _forward("norm_of_the_wrong_formula", "Gemma's norms compute Llama's formula, a weight of 0 and all.",
        "FORMULA=formula,", 'FORMULA="cast_then_scale",', model="gemma2"),
    _backward("norm_gradient_without_projection", "The part of the gradient along the row is not subtracted.",
        _DX, "dy * rstd[:, None]"),
    _backward("norm_gradient_projects_over_the_padded_row", "The projection divides by the block, not by the columns.",
        "tl.sum(dy * norm, axis=1) / hidden", "tl.sum(dy * norm, axis=1) / BLOCK"),
    _backward("norm_gradient_without_weight", "The input's gradient omits the weight.",
        "dy *= weight[None, :]", "dy *= 1.0"),
    _backward("norm_input_gradient_of_one_percent_more", "The input's gradient is 1% too large.", _DX, "<old> * 1.01"),
    _sums("norm_weight_gradient_of_one_percent_more", "The weight's gradient is 1% too large.",
        _SUM, "(<old> * 1.01)", within="_sum_parts_kernel", sample=True),
    _sums("norm_weight_gradient_of_one_program", "Only the first program's part of the weight's gradient arrives.",
        _SUM, "tl.sum(tl.where(part[:, None] == 0, parts, 0.0), axis=0)", within="_sum_parts_kernel",
        also=_SMALL_TILES),
    _backward("norm_weight_gradient_without_the_partial_tile",
        "Rows of the last, partial tile do not count in the weight's gradient.",
        _ACCUMULATE, "dweight += tl.where(start + ROWS <= n_rows, dy * norm, 0.0)", also=_SMALL_TILES),
    _backward("norm_weight_gradient_of_the_unnormalised_row",
        "The weight's gradient multiplies by x, not by the normalised x.",
        _ACCUMULATE, "dweight += dy * x"),
    _layer_forward("layer_norm_does_not_centre", "The mean is not subtracted.", _CENTRED, "x"),
    _layer_forward("layer_norm_centres_the_padding", "Columns beyond the row count in the variance.",
        _CENTRED, "x - mean[:, None]", dtypes=("float32",)),
    _layer_forward("layer_norm_without_bias", "The bias is not added.", "bias_ptr is not None", "False"),
    _layer_backward("layer_norm_gradient_not_centred", "The mean of the gradient is not subtracted.",
        _LAYER_DX, "(dy - norm * projection[:, None]) * rstd[:, None]", sample=True),
    _layer_backward("layer_norm_gradient_without_projection",
        "The part of the gradient along the row is not subtracted.",
        _LAYER_DX, "(dy - shift[:, None]) * rstd[:, None]"),
    _layer_backward("layer_norm_bias_gradient_of_the_scaled_gradient", "The bias's gradient multiplies by the weight.",
        "dbias += dy", "dbias += dy * weight[None, :]"),
    _layer_backward("layer_norm_weight_gradient_of_the_row_that_is_not_centred",
        "The weight's gradient multiplies by x / std, mean and all.",
        "dweight += dy * norm", "dweight += dy * x * rstd[:, None]"),
    _gated_forward("gated_norm_without_gate", "The norm is not multiplied by the activation.",
        "y *= factor", "y *= 1.0"),
    _gated_forward("gated_norm_of_another_activation", "The gate goes through a sigmoid, not through silu.",
        "ACTIVATION=activation", "ACTIVATION='sigmoid'", within="GatedRMSNormFunction.forward"),
    _gated_forward("gated_norm_gate_first", "x times the activation is normalised, instead of x.",
        "GATE_FIRST=gate_first", "GATE_FIRST=True", within="GatedRMSNormFunction.forward"),
    _gated_backward("gated_norm_gradient_without_gate", "The gradient of norm and weight omits the activation.",
        "dnorm = dy * factor", "dnorm = dy"),
    _gated_backward("gated_norm_gate_gradient_without_weight", "The gate's gradient omits the weight.",
        "dgate = dy * weight[None, :] * norm * slope", "dgate = dy * norm * slope"),
    _gated_backward("gated_norm_gate_gradient_of_the_activation", "The gate's gradient has act, not its derivative.",
        "dgate = dy * weight[None, :] * norm * slope", "dgate = dy * weight[None, :] * norm * factor"),
    _gated_backward("gated_norm_gradient_without_projection",
        "The part of the gradient along the row is not subtracted.",
        "d = (dnorm - norm * projection[:, None]) * rstd[:, None]", "d = dnorm * rstd[:, None]",
        within="_gated_rms_norm_bwd_kernel", times=2),
)
