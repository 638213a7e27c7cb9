"""Faults of the rotary embedding."""

from __future__ import annotations

from tests.mutants.edit import Edit
from tests.mutants.mutant import both_phases, faults

_forward, _backward = both_phases("ops._rope", kernel="rope")
_rope = faults("ops._rope", "test_ops_rope.py")
_call = faults("patching.recipes.rotary_call", "test_patching_rotary.py")
_rotation = faults("patching.recipes.rotation", "test_patching_rotary.py")
_LAYOUTS = "test_every_recognised_layout_runs_the_kernel_and_computes_what_upstream_does"
_CALLS = "test_every_call_of_a_rotary_function_gives_upstreams_result"
_FAULT = "test_a_fault_is_seen"

# fmt: off
MUTANTS = (
    _forward("r1_angles_of_the_first_row", "Every row of the batch is rotated by the angles of the first one.",
        "batch * cos_batch_stride", "0 * cos_batch_stride",
        also=Edit("liger_kernels.ops._rope", "batch * sin_batch_stride", "0 * sin_batch_stride"),
        source="R1", sample=True),
    _forward("r5_rotates_in_place", "q and k are overwritten, though the caller still holds them.",
        "torch.empty_like(x, dtype=x.dtype if keep_dtype else torch.promote_types(x.dtype, angle_dtype))", "x",
        source="R5", dies="overwritten"),
    _forward("n18_rope_assumes_contiguous_heads", "The strides of q are taken for those of a contiguous tensor.",
        "strides = [(0, 0, 0) if x is None else _strides(x) for x in (q, q_out, k, k_out)]",
        "<old>\nif q is not None and not transposed:\n    head = q.shape[2] * q.shape[3]\n"
            "    strides[0] = (q.shape[3], head, (q.shape[1] - 1) * head)", source="N18"),
    _backward("rope_gradient_turns_the_wrong_way", "The gradient is rotated forward instead of back.",
        "transposed=True", "transposed=False"),
    _backward("rope_gradient_with_one_wrong_sign", "One of the four terms of the transposed map has the wrong sign.",
        "turned_b = b * cos_b - a * sin_a", "turned_b = b * cos_b + a * sin_a"),
    _backward("rope_gradient_leaves_keys_alone", "The gradient of k is passed on as it came.",
        "return dq, dk, None, None, None", "return dq, dk_out, None, None, None"),
    _backward("rope_gradient_of_one_percent_less", "The gradient of q is 1% too small.",
        "return dq, dk, None, None, None", "return dq * 0.99, dk, None, None, None"),
    _forward("rope_of_half_the_pairs", "The second element of every pair is not rotated.",
        "turned_b = b * cos_b + a * sin_b", "turned_b = b"),
    _forward("rope_of_the_other_pairing", "Neighbours are rotated where halves belong together, forward and backward.",
        "read, written, repeat = _PAIRINGS[pairing]", "read, written, repeat = _PAIRINGS['interleaved']"),
    _forward("rope_off_by_one_position",
        "Every token but the last is rotated by the next one's angles: wrong where a packed document begins.",
        "cos_offset = batch * cos_batch_stride + seq * cos_seq_stride\n"
            "sin_offset = batch * sin_batch_stride + seq * sin_seq_stride", "later = tl.minimum(seq + 1, seq_len - 1)\n"
            "cos_offset = batch * cos_batch_stride + later * cos_seq_stride\n"
            "sin_offset = batch * sin_batch_stride + later * sin_seq_stride"),
    _forward("rope_ignores_packing", "Positions are counted from the start of the row, whatever position_ids say.",
        "rotary_dim = _checked_rotary_dim(q, k, cos, sin, pairing, rotary_dim)",
        "<old>\nif not torch.equal(cos[:, -1], cos.amin(1)) and q.shape[2] > 1 and cos.shape[0] > 1:\n"
            "    cos, sin = (x[:1].expand_as(x) for x in (cos, sin))", within="rope"),
    _forward("rope_not_while_decoding", "A single token, as generation feeds them, is not rotated.",
        "rotary_dim = _checked_rotary_dim(q, k, cos, sin, pairing, rotary_dim)",
        "<old>\nif q.shape[2] == 1:\n    return q, k", within="rope"),
    _forward("rope_angles_of_half_precision", "cos and sin are rounded to 8 bits of mantissa before use.",
        "return a, b", "return a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)",
        within="_load_angles", dtypes=("float32",)),
    _backward("rope_gradient_reads_where_the_results_were_not",
        "Where pairs change places, their gradient is read from where the pairs were.",
        "read, written = written, read", "pass", model="deepseek_v3"),
    _rope("rope_inverse_forward_only", "The gradient of the inverse rotation is that of the rotation.",
        "INVERSE=inverse", "<old> and not transposed", "test_one_tensor"),
    _rope("rope_reads_tables_side_by_side", "A table whose columns are not adjacent is read as if they were.",
        "col.to(tl.int64) * col_stride", "col", "test_halves_of_complex_numbers_are_read_where_they_lie"),
    _call("rope_of_the_whole_table_width", "A table with one column a pair is taken for one of half the head.",
        "cos.shape[-1] * 2 if halved else cos.shape[-1]", "cos.shape[-1]",
        f"{_LAYOUTS}[torch.float32-gpt_oss]"),
    _call("rope_of_the_first_elements", "A function that turns the last elements is replaced by one of the first.",
        "rotation.trailing", "False", f"{_LAYOUTS}[torch.float32-deepseek_v4]"),
    _call("rope_always_forward", "A function that turns the other way is replaced by one that does not.",
        "rotation.inverse", "False", f"{_LAYOUTS}[torch.float32-nanochat]"),
    _call("rope_in_the_wider_dtype", "The result has the dtype of the angles where upstream casts it back.",
        "rotation.casts_back", "False", f"{_LAYOUTS}[torch.bfloat16-qwen2_vl]"),
    _call("rope_of_any_layout", "Where the heads are is taken from the first layout of as many dimensions.",
        "heads in (None, probed_heads)", "True", f"{_CALLS}[as many heads as tokens]", source="R3"),
    _call("rope_sections_ignored", "Of three kinds of positions the first is used for every section.",
        "mixed(cos, sections), mixed(sin, sections)", "cos[0], sin[0]", f"{_LAYOUTS}[torch.float32-with_sections]",
        source="R2"),
    _call("rope_of_any_sizes", "Calls whose sizes our op does not take are not left to upstream.",
        "heads is None or not fits(tensors, cos, sin, heads, columns, partial, mixed_dtypes)", "heads is None",
        f"{_CALLS}[one angle for every token]"),
    _rope("rope_sines_where_cosines_lie", "The strides of cos are taken for those of sin.",
        "[(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)) for x in (cos, sin)]",
        "[(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)) for x in (cos, cos)]",
        "test_strided_and_expanded_angles", source="N18"),
    _rope("rope_gradients_assumed_adjacent", "Gradients whose last dimension has gaps are read as if it had none.",
        "[None if x is None else _unit_stride(x) for x in (q, k)]", "[q, k]", "test_gradients_of_other_strides",
        within="_rotate", source="N18"),
    _call("rope_of_odd_heads", "A head of odd size goes to our op, which raises.",
        "columns % 2 == 0", "True", f"{_CALLS}[a head of odd size]"),
    _call("rope_of_unasked_positions", "A position_ids that was not probed is ignored.",
        'given.get("position_ids") is None', "True",
        "test_positions_that_a_function_is_given_are_used_by_upstream[some]"),
    _rotation("probe_of_tied_angles",
        "The probe's tables have equal halves, so that it does not show which half is read.",
        "cos, sin = (randn(*shape, dtype=torch.float64) for _ in range(2))",
        "cos, sin = (randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64).repeat(*[1] * (len(shape) - 1), 2)"
            " for _ in range(2))", f"{_LAYOUTS}[torch.float32-deepseek_v3]"),
    _rotation("probe_of_rotated_values_only", "The gradients of a rotary function are not compared.",
        "same(got, expected) and same(mine, gradients(expected))", "same(got, expected)",
        f"{_FAULT}[half-no gradient of the keys]"),
    _rotation("probe_of_one_result_dtype", "A rotary function that widens bfloat16 is replaced by one that does not.",
        "self._result_dtype(torch.bfloat16, torch.bfloat16)", "torch.bfloat16", f"{_FAULT}[half-float32 of bfloat16]"),
)
