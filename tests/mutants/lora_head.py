"""Faults of LM heads with adapters or a weight of four bits: of the op, and of how such a head is read."""

from __future__ import annotations

from tests.mutants.mutant import both_phases, faults

_where = {"model": "llama-tied", "setup": "lora-head", "kernel": "linear_cross_entropy"}
_forward, _backward = both_phases("ops.lora.low_rank", **_where)
_op = faults("ops.lora.low_rank", "test_ops_adapted_head.py")
_head = faults("ops.loss.linear_cross_entropy", "test_ops_adapted_head.py")
_held = faults("patching.logits.held_head", "test_patching_adapted_head.py")
_DX = "plus_product(dx, dz, [a], None, ctx.scale, x.shape, x.dtype, invariant=ctx.invariant)"
_DA = "columns_product(x, dz, a.shape, a.dtype, ctx.scale, by_rank=True)"
_EXACT = "test_gradients_of_float32_adapters_are_sums_of_all_digits[{}]"
_EVERY = "test_every_schedule_and_dtype[(torch.float32, torch.float32)-{}]"
_NUMBERS = "test_the_same_numbers_without_logits[{}]"
_ODD = "test_a_head_that_is_something_else_computes_its_logits[{}]"

# fmt: off
MUTANTS = (
    _forward("head_adapter_without_its_scale", "What a head's adapter adds to the logits has no scale.",
        "one.scale, True", "1.0, True", sample=True),
    _forward("head_first_adapter_alone", "Of several active adapters of a head, the first is computed.",
        "len(zs) == 1", "True"),
    _forward("head_bias_not_scaled", "The bias of a head's adapter is added as it is.",
        "torch.full((len(hidden), 1), one.scale, dtype=torch.float32, device=hidden.device)",
        "torch.ones((len(hidden), 1), dtype=torch.float32, device=hidden.device)"),
    _backward("head_gradient_of_a_without_scale", "A of a head's adapter has a gradient without the scale.",
        _DA, _DA.replace("ctx.scale", "1.0")),
    _backward("head_gradient_of_a_from_other_tokens", "A of a head's adapter has a gradient by the next tokens.",
        _DA, _DA.replace("x, dz", "x.roll(1, 0), dz")),
    _backward("head_gradient_of_b_from_other_tokens", "B of a head's adapter has a gradient by the next tokens.",
        "self._z[rows]", "self._z[rows].roll(1, 0)"),
    _backward("head_input_gradient_without_the_adapter", "Hidden states get no gradient through a head's adapter.",
        _DX, "dx"),
    _backward("head_input_gradient_of_the_adapter_alone", "Hidden states get their gradient through adapters alone.",
        _DX, _DX.replace("dx, dz", "None, dz")),
    _op("head_ranks_of_the_first_chunk", "Each chunk's logits get what the first tokens' ranks add.",
        "self._z_added[rows]", "self._z_added[:len(self._z_added[rows])]", _EVERY.format("token chunks")),
    _op("head_b_of_the_first_slab", "Each slab's logits get what the first classes of B add.",
        "self._b_added[classes]", "self._b_added[:len(self._b_added[classes])]", _EVERY.format("vocabulary slabs")),
    _op("head_gradient_by_b_of_the_first_slab", "The gradient of the ranks multiplies the first classes of B.",
        "self._b[classes]", "self._b[:d_logits.shape[1]]", _EVERY.format("vocabulary slabs")),
    _op("head_gradient_by_ranks_of_the_first_chunk", "The gradient of B multiplies the first tokens' ranks.",
        "self._z[rows]", "self._z[:len(d_logits)]", _EVERY.format("token chunks")),
    _op("head_adapter_rounded", "A float32 adapter meets the logits' gradient in 16 bits.",
        "range(_EXACT)", "range(1)", _EXACT.format("1.0-torch.bfloat16")),
    _op("head_adapter_below_the_range", "A float16 gradient meets small numbers where float16 has no digits.",
        "rest / unit", "rest", _EXACT.format("1e-06-torch.float16")),
    _head("head_gradient_of_b_in_the_heads_dtype", "The gradient of a float32 B is rounded to the head's dtype.",
        "b.to(ctx.b_dtype)", "b.to(call.hidden.dtype if call.hidden is not None else torch.bfloat16).to(ctx.b_dtype)",
        "test_gradients_of_float32_adapters_keep_their_digits"),
    faults("ops.loss.schedules.schedule", "test_ops_adapted_head.py")("head_of_four_bits_kept_as_a_matrix",
        "The matrix that a weight of four bits stands for lies in memory until the backward.",
        "self.weight if self.packed is None else self.packed.weight", "self.weight",
        "test_a_weight_that_is_no_matrix_is_made_one_in_each_direction_and_not_kept[False-one chunk]", times=1),
    _held("head_not_disabled", "A head's adapter is added inside of disable_adapter, in DPO's reference.",
        'state.get("_disable_adapters")', "False", _NUMBERS.format("disabled")),
    _held("head_added_to_merged_weights", "A head's adapter is added to a weight that has it already.",
        'state.get("merged_adapters")', "[]", _NUMBERS.format("merged")),
    _held("head_dropout_not_called", "A head's adapter drops nothing in training.",
        "any(one.dropped is not None for one in found)", "False", _ODD.format("dropout")),
)
# fmt: on
