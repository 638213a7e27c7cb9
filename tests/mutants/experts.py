"""Faults of the experts of a mixture: of their gate, and of how it is recognised."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_OP = "liger_kernels.ops.packed_glu"
_RECOGNISER = "liger_kernels.patching.experts"
_REFERENCE = "test_ops_packed_glu.py::test_matches_reference"
_LIMIT = "test_ops_packed_glu.py::test_a_number_on_the_limit_is_inside"
_OTHERS = "test_patching_experts.py::test_other_gates_are_left"


def _check(name: str, does: str, module: str, old: str, new: str, check: str, within: str = "") -> Mutant:
    return Mutant(name, does, (Edit(module, old, new, within),), check=f"tests/{check}", dies="test")


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
        _OP, "tl.where(tl.abs(up) > LIMIT, 0.0, 1.0)", "tl.where(tl.abs(up) > LIMIT, 1.0, 1.0)", _REFERENCE),
    _check("packed_gradient_ends_on_the_limit", "A number on the limit has no gradient.",
        _OP, "inside = gate > LIMIT", "inside = gate >= LIMIT", _LIMIT),
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
        "test_patching_experts.py::test_eager_experts_that_call_no_gate_are_left"),
    _check("expert_activation_past_its_hooks", "The gate is computed although somebody has hooks on the activation.",
        _RECOGNISER, "skips_watched(self, set())", "False",
        "test_patching_experts.py::test_a_watched_activation_runs"),
)
