"""Faults of the experts of a mixture: of their gate, and of how it is recognised."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_OP = "liger_kernels.ops.packed_glu"
_EXPERTS = "liger_kernels.ops.experts"
_RECOGNISER = "liger_kernels.patching.experts"
_REFERENCE = "test_ops_packed_glu.py::test_matches_reference"
_LIMIT = "test_ops_packed_glu.py::test_a_number_on_the_limit_is_as_torch_has_it"
_SUM = "test_ops_experts.py::test_matches_reference"
_NO_EXPERT = "test_ops_experts.py::test_a_choice_that_is_no_expert_counts_as_nothing"
_AROUND = "test_patching_experts.py::test_whatever_is_set_around_it_the_model_is_the_same"
_OTHERS = "test_patching_experts.py::test_other_gates_are_left"
_FORM = "test_patching_experts.py::test_a_call_of_another_form_runs_the_experts_themselves"


def _check(
    name: str,
    does: str,
    module: str,
    old: str,
    new: str,
    check: str,
    within: str = "",
    source: str = "",
    times: int = 1,
) -> Mutant:
    edit = Edit(module, old, new, within, times)
    return Mutant(name, does, (edit,), check=f"tests/{check}", dies="test", source=source)


def _trained(name: str, does: str, phase: str, old: str, new: str, within: str = "") -> Mutant:
    edit = Edit(_EXPERTS, old, new, within)
    return Mutant(name, does, (edit,), model="mixtral", kernel="experts", phase=phase)


# fmt: off
MUTANTS = (
    _check("packed_gate_not_clamped", "The gate is activated as it comes, whatever the limit.",
        _OP, "gate = tl.where(inside, LIMIT, gate)", "gate = gate", _REFERENCE),
    _check("packed_up_clamped_on_one_side", "Up has no lower limit.",
        _OP, "tl.where(up < -LIMIT, -LIMIT, up)", "up", _REFERENCE),
    _check("packed_gate_clamped_below", "The gate has a lower limit, as up has.",
        _OP, "tl.where(inside, LIMIT, gate)", "tl.where(inside, LIMIT, tl.where(gate < -LIMIT, -LIMIT, gate))",
        _REFERENCE),
    _check("packed_gradient_beyond_the_limit", "What lies beyond the limit has the gradient of what lies on it.",
        _OP, "tl.where(inside, 0.0, by_gate)", "by_gate", _REFERENCE),
    _check("packed_up_gradient_beyond_the_limit", "Up has a gradient where it is clamped.",
        _OP, "tl.where(tl.abs(up) > EDGE, 0.0, 1.0)", "tl.where(tl.abs(up) > EDGE, 1.0, 1.0)", _REFERENCE),
    _check("packed_gradient_ends_on_the_limit", "A number on the limit has no gradient.",
        _OP, "inside = gate > EDGE", "inside = gate >= EDGE", _LIMIT),
    _check("packed_slope_without_the_factor", "The factor of the sigmoid is left out of the activation.",
        _OP, "act = act / ALPHA", "act = act", _REFERENCE),
    _check("packed_up_without_its_offset", "Up is multiplied as it comes.",
        _OP, "up + OFFSET, by_gate", "up, by_gate", _REFERENCE),
    _check("packed_interleaved_taken_for_halves", "Even and odd columns are read and written as halves.",
        _OP, "gate.interleaved", "False", _REFERENCE, "_constants"),
    _check("packed_gradients_swapped", "The gradient of the gate lies where that of up belongs.",
        _OP, "first, second = gate, up", "first, second = up, gate", _REFERENCE),
    _check("packed_columns_joined_the_wrong_way", "Interleaved, the gradient of the gate lies in the odd columns.",
        _OP, "tl.join(first, second)", "tl.join(second, first)", _REFERENCE),
    _check("packed_number_of_a_row_not_multiplied", "The gradient of a row forgets the row's number.",
        _OP, "dy *= scale", "dy *= 1.0", "test_ops_packed_glu.py::test_rows_times_a_number_of_their_own"),
    _check("packed_gradient_of_a_number_twice", "The gradient of a row's number has the number in it.",
        _OP, "dscale += dy * y", "dscale += dy * y * tl.load(scale_ptr + row, mask=row < n_rows, other=0.0)",
        "test_ops_packed_glu.py::test_rows_times_a_number_of_their_own"),
    _check("packed_offset_of_32_bits", "The row number is multiplied by the stride in 32 bits.",
        _OP, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
        "test_ops_compile.py::test_offsets_are_64_bits_wide[packed_glu]", "_packed_glu_fwd_kernel"),
    _check("gate_probed_on_usual_numbers", "A gate is compared on usual numbers only, which no clamp changes.",
        _RECOGNISER, "(2.0, gate.limit or 1.0, 1e3)", "(0.5,)", _OTHERS),
    _check("gate_probed_without_gradients", "Only what a gate returns is compared.",
        _RECOGNISER, "probe.relative_difference(*slopes) < probe.SAME_FORMULA", "True", _OTHERS),
    _check("gate_of_a_training_module", "A gate is probed in the mode of the model, so that no dropout shows.",
        _RECOGNISER, 'clone.__dict__["training"] = True', 'clone.__dict__["training"] = False', _OTHERS,
        "find_gate"),
    _check("experts_without_a_call_replaced", "Experts are replaced whose forward never comes to the gate.",
        _RECOGNISER, "return bool(calls)", "return True",
        "test_patching_experts.py::test_experts_that_call_no_gate_are_left"),
    _check("expert_activation_past_its_hooks", "The gate is computed although somebody has hooks on the activation.",
        _RECOGNISER, "not skips_watched(module, set())", "True",
        "test_patching_experts.py::test_a_watched_activation_runs"),
    _trained("experts_of_another_token", "A row is gathered from the token of its place, not of its choice.",
        "forward", "token = source // n_choices", "token = row // n_choices"),
    _trained("router_weight_twice", "The router's weight multiplies a result twice, forward only.",
        "forward", "x *= weight.to(tl.float32)[:, None]", "x *= weight.to(tl.float32)[:, None] * weight[:, None]"),
    _trained("router_without_gradient", "The router's weights have a gradient of zero.",
        "backward", "dweights.to(weights.dtype)", "torch.zeros_like(weights)"),
    _trained("gate_up_gradient_of_other_rows", "The gradient of gate_up multiplies rows of dL/dy, not of the tokens.",
        "backward", "routing.gather(hidden)", "routing.gather(dy)"),
    _check("expert_sum_in_16_bits", "A token's sum is rounded after each of its rows.",
        _EXPERTS, "total += x", "total = (total + x).to(y_ptr.dtype.element_ty).to(tl.float32)",
        "test_ops_experts.py::test_a_token_is_summed_in_float32"),
    _check("down_gradient_without_the_weight", "The gradient of down forgets the router's weight.",
        _OP, "y *= scale", "y *= 1.0", _SUM),
    _check("router_gradient_without_the_bias", "The gradient of the router's weights forgets the bias of down.",
        _EXPERTS, "dweights += of_bias.gather(1, routing.ids.long().clamp(max=len(ends)))", "pass", _SUM),
    _check("bias_of_the_first_expert", "Every row has the first expert's bias.",
        _OP, "tl.minimum(group, n_groups - 1)", "tl.minimum(group, 0)", _SUM),
    _check("down_bias_without_the_weight", "The gradient of down's bias forgets the router's weight.",
        _EXPERTS, "_bias_gradient(rows, scale, ends)", "_bias_gradient(rows, None, ends)", _SUM),
    _check("expert_sum_of_full_tiles_only", "Tokens behind the last full tile are not summed.",
        _EXPERTS, 'cdiv(n_tokens, shape["ROWS"])', 'n_tokens // shape["ROWS"]', _SUM, source="G5"),
    _check("expert_offset_of_32_bits", "The number of a row is multiplied by the length of a row in 32 bits.",
        _EXPERTS, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
        "test_ops_compile.py::test_offsets_are_64_bits_wide[experts]", "_experts_gather_kernel", "G6"),
    _check("choice_of_no_expert_counts", "A row of no expert, which nobody wrote, is summed.",
        _EXPERTS, "(token < n_tokens) & (place < end)", "token < n_tokens", _NO_EXPERT),
    _check("choice_of_no_expert_has_a_gradient", "The weight of a choice of no expert has whatever gradient there was.",
        _EXPERTS, "dscale.masked_fill_(routing.expert >= len(ends), 0.0)", "pass", _NO_EXPERT),
    _check("expert_numbers_of_eight_bits", "More experts than eight bits can number are sorted by eight bits.",
        _EXPERTS, "n_experts < 255", "n_experts < 1000", "test_ops_experts.py::test_many_experts"),
    _check("expert_ends_before_its_rows", "The rows of an expert end where they begin.",
        _EXPERTS, "right=True", "right=False", _SUM),
    _check("expert_gradient_laid_out_anew", "The gradient of a transposed parameter is not laid out as it is.",
        _EXPERTS, "like.stride(1) < like.stride(2)", "False",
        "test_ops_experts.py::test_autograd_keeps_the_gradients_of_parameters_where_they_are"),
    _check("router_that_hangs_on_rounding", "The router of a mini model has random weights only.",
        "convergence.models", '"mlp.router.weight"', '"no.router"',
        "test_convergence_routing.py::test_rounding_chooses_no_expert"),
    _check("experts_probed_without_gradients", "Only what a forward of experts returns is compared.",
        _RECOGNISER, "[y, *torch.autograd.grad(y, leaves, upstream)]", "[y]",
        "test_patching_experts.py::test_of_what_is_another_sum_of_experts_only_the_gate_is_replaced"),
    _check("experts_gradient_of_a_bias_with_others_only",
        "The bias of gate_up has no gradient where nothing else below the second product trains.",
        _EXPERTS, "needs_hidden or needs_gate_up or needs_gate_up_bias", "needs_hidden or needs_gate_up",
        "test_ops_experts.py::test_the_gradient_of_one_alone"),
    _check("router_weight_rounded", "The router's float32 weights are rounded to the hidden states' dtype.",
        _EXPERTS, "weights = weights.contiguous()", "weights = weights.to(hidden.dtype).contiguous()",
        "test_ops_experts.py::test_weights_are_not_rounded", "ExpertsFunction.forward"),
    _check("expert_bias_assumed_contiguous", "A bias is read as if its rows had no gaps.",
        _EXPERTS, "None if gate_up_bias is None else gate_up_bias.contiguous()", "gate_up_bias",
        "test_ops_experts.py::test_rows_of_other_strides"),
    _check("expert_number_that_wraps", "A number that is no expert's, and does not fit into eight bits, becomes one's.",
        _EXPERTS, "ids.long().clamp(max=n_experts)", "ids", _NO_EXPERT),
    _check("packed_gradient_assumed_contiguous", "A gradient that comes in with gaps is read as if it had none.",
        _OP, "dy.contiguous()", "dy", "test_ops_packed_glu.py::test_any_shape_and_option"),
    _check("experts_probed_on_usual_numbers", "Experts are compared on usual numbers only, which no clamp changes.",
        _RECOGNISER, "(1.0, 1e3)", "(1.0,)",
        "test_patching_experts.py::test_experts_without_a_method_for_their_gate[clamp]", times=2),
    _check("experts_of_any_dtype", "Hidden states of another dtype than the experts' go to the kernels, which raise.",
        _RECOGNISER, "all(t.dtype == hidden.dtype for t in parameters)", "True", f"{_FORM}[another dtype]"),
    _check("experts_of_any_shape", "Hidden states in rows of tokens go to the kernels, which raise.",
        _RECOGNISER, "hidden.dim() == ids.dim() == 2", "True", f"{_FORM}[rows of tokens]"),
    _check("experts_weights_of_any_shape", "Weights that upstream expands go to the kernels, which raise.",
        _RECOGNISER, "ids.shape == weights.shape", "True", f"{_FORM}[a weight for each token]"),
    _check("experts_of_any_kind_of_tensor", "Tensors that are more than their numbers go to the kernels.",
        _RECOGNISER, "all(type(t) in PLAIN for t in tensors)", "True", f"{_FORM}[another kind of tensor]"),
    _check("experts_under_autocast", "Experts run on kernels under autocast, in another dtype than upstream's.",
        _RECOGNISER, "not torch.is_autocast_enabled(hidden.device.type)", "True", f"{_AROUND}[autocast]"),
    _check("experts_whatever_the_implementation", "Experts run on kernels whichever way to multiply was chosen.",
        _RECOGNISER, "_implementation(module) in _REPLACED", "True", f"{_AROUND}[another way to multiply]"),
)
