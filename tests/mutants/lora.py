"""Faults of LoRA layers: of the op, and of how PEFT's layers are recognised and read."""

from __future__ import annotations

from tests.mutants.mutant import faults

_op = faults("ops.lora.lora_linear", "test_ops_lora_linear.py")
_products = faults("ops.lora.products", "test_ops_lora_linear.py")
_adapter = faults("ops.lora.adapter", "test_ops_lora_linear.py")
_several = faults("ops.lora.projection", "test_ops_gated_mlp.py")
_mlp = faults("ops.lora.gated_mlp", "test_ops_gated_mlp.py")
_unit = faults("ops.lora.adapted_glu", "test_ops_gated_mlp.py")
_layer = faults("patching.lora.layer", "test_patching_lora.py")
_state = faults("patching.lora.adapters", "test_patching_lora.py")
_shared = faults("patching.lora.shared_input", "test_patching_shared_input.py")
_nf4 = faults("ops.lora.nf4", "test_ops_nf4.py")
_BITS_OF_NF4 = "test_the_bits_are_those_of_bitsandbytes[{}-torch.bfloat16-{}-{}]"
_EVERY_DTYPE = "test_adapters_of_every_dtype_on_a_base_of_every_dtype[{}]"
_SEVERAL = "test_several_adapters_some_of_which_drop[torch.float32-dropping0]"
_NUMBERS = "test_the_same_numbers[{}]"
_STATE = "test_state_that_changes_between_steps_is_read_at_each_call"
_ODD = "test_patching_lora_left.py::test_peft_computes_what_was_not_probed_and_the_report_counts_why[{}]"
_ADD = "add_product(dx, g, a, None, 1.0, x.shape, x.dtype)"
_DA = "columns_product(x, g, a[0].shape, dtype or a[0].dtype, 1.0, by_rank=True)"
_DB = "columns_product(dy, z, b[0].shape, dtype or b[0].dtype, scales[0])"

_PARTS = "test_sums_in_parts_and_tiles_below_one_another[torch.float32-ranks0]"
_MLP = "test_adapters_on_some_and_on_all[torch.float32-{'gate': (4,), 'up': (4,), 'down': (4,)}-False]"

_TOGETHER = "test_ops_lora_several.py::test_one_launch[torch.float32-torch.float32-4-3]"
_TOGETHER_IN_PARTS = "test_ops_lora_several.py::test_sums_in_parts_and_tiles_below_one_another[torch.float32-4]"

# fmt: off
MUTANTS = (
    _op("lora_input_gradient_without_the_mask", "What dropout dropped of x gets the adapter's gradient.",
        "(one.dropped, [one])", "(one.dropped.detach() + x - x.detach(), [one])",
        f"test_patching_lora.py::{_NUMBERS.format('dropout')}"),
    _state("lora_dropout_not_called", "No adapter drops anything in training.",
        "idle and not probe.has_hooks(dropout)", "True", _NUMBERS.format("dropout")),
    _state("lora_mask_shared", "Every projection draws the same mask.",
        "one.dropped(x if x.dtype == one.a.dtype else x.to(one.a.dtype))",
        "(torch.manual_seed(0), <old>)[1]", "test_dropout_draws_the_numbers_that_peft_draws"),
    _state("lora_first_adapter_alone", "Of several active adapters, the first is computed.",
        "name in known", "name == next(iter(known))", _NUMBERS.format("two active adapters of other ranks")),
    _state("lora_scaling_of_the_first_call", "An adapter keeps the scale that it had at the first call.",
        'state["scaling"].get(name)', 'state.setdefault("_scale", dict(state["scaling"])).get(name)', _STATE),
    _op("lora_bias_lost", "The bias of B is not added.",
        "[w], bias, scale", "[w], None, scale",
        _EVERY_DTYPE.format("torch.float32-torch.float32")),
    _products("lora_sum_without_the_last_part", "Of a sum in parts, one part of the columns is left out.",
        "tl.static_range(PARTS)", "tl.static_range(PARTS - 1)", _PARTS),
    _products("lora_counter_left_behind", "The next sum in parts begins to count where the last one ended.",
        "tl.store(done_ptr + tl.program_id(0), 0)", "pass", _PARTS),
    _products("lora_rows_between_two_programs", "Programs of several tiles begin a tile too late.",
        "(program // col_blocks).to(tl.int64) * rows_of_program", "<old> * 3 // 2", _PARTS),
    _products("lora_first_ranks_for_all", "More ranks than a program holds of w count as the first of them.",
        "first > 0", "first < 0", "test_sums_in_parts_and_tiles_below_one_another[torch.float32-ranks1]"),
    _unit("lora_down_with_other_columns", "The gradient of h meets the columns of down's A that lie next to its own.",
        "0, col, n_cols, down_ranks, PART", "0, col + 1, n_cols, down_ranks, PART",
        "test_tiles_below_one_another[torch.float32-4]"),
    _adapter("lora_bias_not_scaled", "Of several adapters, the biases are added as they are.",
        "total + factor * one.float()", "total + one.float()", _SEVERAL),
    _adapter("lora_bias_gradient_not_scaled", "The bias of B has a gradient without the scale.",
        "(scale * total).to(dtype)", "total.to(dtype)", _EVERY_DTYPE.format("torch.float32-torch.float32")),
    _adapter("lora_gradient_of_a_in_the_models_dtype", "The gradient of a float32 A is rounded to the dtype of x.",
        _DA, "<old>.to(x.dtype).to(a[0].dtype)",
        "test_float32_adapters_of_a_16_bit_model_lose_next_to_nothing"),
    _adapter("lora_gradient_of_b_in_the_models_dtype", "The gradient of a float32 B is rounded to the dtype of y.",
        _DB, "<old>.to(dy.dtype).to(b[0].dtype)",
        "test_float32_adapters_of_a_16_bit_model_lose_next_to_nothing"),
    _adapter("lora_scale_once_in_the_gradient_of_several", "Of several adapters, B has a gradient without the scale.",
        "(s * part).to(dtype or one.dtype)", "part.to(one.dtype)", _SEVERAL),
    _layer("lora_not_disabled", "An adapter is added inside of disable_adapter, in DPO's reference.",
        'state.get("_disable_adapters")', "False", "test_disable_adapter_as_dpo_uses_it"),
    _layer("lora_added_to_merged_weights", "An adapter is added to weights that have it already.",
        'state.get("merged_adapters")', "False", _NUMBERS.format("merged")),
    _op("lora_x_overwritten", "The gradient of x is written over x.",
        _ADD, "x.data.copy_(<old>)", _EVERY_DTYPE.format("torch.float32-torch.float32")),
    _products("lora_base_overwritten", "The result of the base becomes that of the layer.",
        "y0 if in_place else torch.empty(shape, dtype=dtype, device=z.device)",
        "y0 if y0 is not None else torch.empty(shape, dtype=dtype, device=z.device)",
        "test_the_base_is_called_once_and_its_result_stays"),
    _op("lora_anchor_of_another_call", "A backward reads the tensors of the first call's anchor.",
        "ctx.saved_tensors",
        '(vars(LoraFunction).get("first") or setattr(LoraFunction, "first", <old>) or LoraFunction.first)',
        "test_two_forwards_then_two_backwards_each_twice[dropping0]"),
    _op("lora_saved_by_the_add", "The second node saves z, and a recomputation must come to it.",
        "Computed.apply(partial(_added, zs, ordered, value.detach()), value, *anchors)",
        "<old> * torch.ones((), dtype=dtype, device=x.device, requires_grad=True)",
        "test_a_checkpoint_does_not_repeat_the_last_base[dropping0-False]"),
    _op("lora_saved_casts", "Saved are copies of the parameters, which a sharding package cannot free.",
        "ctx.save_for_backward(x, z, *a, *b)", "ctx.save_for_backward(x, z, *[p + 0 for p in (*a, *b)])",
        "test_what_is_saved"),
    _op("lora_base_gradient_lost", "x gets the adapters' gradient alone.",
        _ADD, _ADD.replace("dx, g", "None, g"), _EVERY_DTYPE.format("torch.float32-torch.float32")),
    faults("ops.lora.columns")("lora_last_rows_left_out", "Rows behind the last whole part count for no gradient.",
        "cdiv(cdiv(n_rows, parts), shape['ROWS']) * shape['ROWS']", "n_rows // parts",
        "test_ops_every.py::test_programs_walk_over_many_tiles[lora_linear-torch.float32]"),
    _state("lora_variant_taken", "A variant among the active adapters is computed as if it were none.",
        "is_variant(module, name)", "False", _ODD.format("variant"), within="known_adapters"),
    _state("lora_hooks_ignored", "An adapter is computed although somebody watches its layers.",
        "probe.has_hooks(first) or probe.has_hooks(second)", "False", _ODD.format("hooks")),
    _layer("lora_any_forward_recognised", "A layer is taken for LoRA by its class.",
        "same_in_float64(module, small_copy(module, names, masks), names, reference)", "True",
        "test_patching_lora_left.py::test_a_forward_that_computes_something_else_is_left[rounded]"),
    _layer("lora_gradients_not_compared", "A layer is taken for LoRA by its values.",
        "all(probe.relative_difference(ours, theirs) < probe.SAME_FORMULA for ours, theirs in pairs)", "True",
        "test_patching_lora_left.py::test_a_forward_that_computes_something_else_is_left[another gradient]"),
    _layer("lora_fallbacks_not_counted", "Where PEFT's own forward runs, nobody is told.",
        'report.fallbacks[f"PEFT computed an adapter: {reason}"] += 1', "pass", _ODD.format("hooks")),
    faults("patching.census")("lora_later_adapters_not_listed", "Adapters that came after patch() are in no list.",
        "{LORA: is_lora_layer, DORA: is_dora_layer, LORA_EXPERTS: adapts_experts}", "{LORA_EXPERTS: adapts_experts}",
        "test_patching_lora.py::test_an_adapter_that_comes_after_patch"),
    _unit("mlp_gates_adapter_for_up", "Up has the adapter of gate.",
        "_delta_arguments(up_z, parts[1])", "_delta_arguments(gate_z, parts[0])", _MLP, within="glu_of_adapted"),
    _unit("mlp_gates_adapter_for_up_in_the_backward", "The backward makes up with the adapter of gate.",
        "_delta_arguments(up_z, parts[1])", "_delta_arguments(gate_z, parts[0])", _MLP, within="glu_gradients"),
    _unit("mlp_gradient_through_downs_adapter_lost", "h has the gradient through down's weight alone.",
        "g is not None", "False", _MLP),
    _unit("mlp_product_not_made_again", "Down's A has a gradient by what is not h.",
        "PRODUCT=product", "PRODUCT=False", _MLP),
    _mlp("mlp_kept_graph_overwritten", "Gradients are written over products of a graph that is kept.",
        "keeps_graph()", "False", "test_a_graph_is_walked_as_often_as_it_is_kept[plain-]"),
    _several("several_gradient_of_one_input", "x has the gradient of the first projection alone.",
        "dx.addmm_(dy, w)", "dx", _MLP),
    _several("several_ranks_of_the_first", "Each projection reads the ranks of the first one.",
        "t.narrow(1, first, n)", "t.narrow(1, 0, n)", _MLP),
    _several("several_unused_result", "A result that nobody uses has whatever lay in memory for a gradient.",
        "columns.zero_()", "columns.fill_(1.0)", "test_results_that_nobody_uses"),
    _products("several_second_matrix_from_its_start", "The second of several matrices is read from another row.",
        "w1_ptr + (rank - end).to(tl.int64) * rank_stride", "w1_ptr + rank.to(tl.int64) * rank_stride * 0",
        f"test_ops_gated_mlp.py::{_MLP}"),
    _products("several_third_reads_the_first", "Of three layers, the third is computed from the first one's tensors.",
        "tl.where(which == 2, c, a)", "a", _TOGETHER),
    _products("several_ranks_of_the_first_layer", "In one launch, every layer's z lies in the first one's columns.",
        "z_ptr += which * n_ranks", "z_ptr += which * 0", _TOGETHER, within="_lora_linear_rows_kernel"),
    _products("several_layers_share_a_counter", "In one launch, the parts of all layers' sums count together.",
        "done_ptr += which * tl.num_programs(0)", "pass", _TOGETHER_IN_PARTS),
    faults("ops.lora.columns")("several_columns_of_the_first_z",
        "In one launch, the gradient of each B is of the first z.",
        "z_ptr += which * n_ranks", "z_ptr += which * 0", _TOGETHER),
    faults("ops.lora.columns")("columns_sum_without_the_last_part", "The last part of the rows counts for no gradient.",
        "tl.static_range(PARTS)", "tl.static_range(PARTS - 1)", _TOGETHER_IN_PARTS),
    faults("ops.lora.columns")("columns_counter_left_behind", "The next sum begins to count where the last one ended.",
        "tl.store(done_ptr + number, 0)", "pass", _TOGETHER_IN_PARTS),
    _several("several_scales_of_the_first", "Layers of other scales have the first one's scale.",
        "all(other == scale for _, other in stacked)", "True",
        "test_ops_lora_several.py::test_what_one_launch_does_not_accept"),
    _nf4("nf4_third_weight_from_the_second", "Of three weights, the third one is made of the second one's bytes.",
        "one_of(which, packed_ptr, packed1_ptr, packed2_ptr)", "one_of(which, packed_ptr, packed1_ptr, packed1_ptr)",
        "test_several_weights_in_one_launch[((256, 160), (32, 160), (17, 160))-nested]"),
    faults("ops.runtime.kept")("kept_parameter_not_compared", "A parameter may change before the backward.",
        "now != version", "False",
        "test_ops_gated_mlp.py::test_a_parameter_that_was_changed_before_the_backward_is_refused[1]"),
    faults("ops.runtime.kept")("kept_graph_asked_by_a_program", "A compiled backward asks whether its graph is kept.",
        "torch.compiler.is_compiling()", "False",
        "test_ops_gated_mlp.py::test_a_compiled_backward_does_not_ask_whether_the_graph_is_kept"),
    _shared("shared_result_of_another_input", "A sibling gets the result of another tensor.",
        "ready[0] is x", "True", "test_a_sibling_with_another_input_computes_its_own"),
    _shared("shared_result_of_a_changed_input", "A sibling gets the result of what was in x before.",
        "ready[1] == x._version", "True", "test_a_sibling_after_a_change_in_place_computes_its_own"),
    _shared("shared_name_that_is_assigned_to", "Calls with one name are taken for calls with one tensor.",
        "not isinstance(node.ctx, ast.Load)", "False", "test_which_calls_share_their_input"),
    _nf4("nf4_halves_swapped", "The two numbers of a byte change places.",
        "tl.join(first, second)", "tl.join(second, first)", _BITS_OF_NF4.format("(33, 96)", "scales", 32)),
    _nf4("nf4_offset_lost", "The scales of blocks lack their offset.",
        "tl.load(offset_ptr)", "0.0", _BITS_OF_NF4.format("(33, 96)", "nested", 32)),
    _nf4("nf4_scale_of_the_first_block", "Every block of scales has the first one's scale.",
        "block // nested_block", "block * 0", "test_more_blocks_of_scales_than_one[torch.float32]"),
    _nf4("nf4_multiplied_and_added_at_once", "A scale and its offset are rounded once instead of twice.",
        "tl.load(nested_code_ptr + scale.to(tl.int32)) * outer + tl.load(offset_ptr)",
        "(tl.load(nested_code_ptr + scale.to(tl.int32)).to(tl.float64) * outer.to(tl.float64)"
        " + tl.load(offset_ptr).to(tl.float64)).to(tl.float32)",
        "test_more_blocks_of_scales_than_one[torch.float32]"),
    faults("patching.lora.projection", "test_ops_nf4.py")("nf4_read_once_for_all",
        "A weight that is quantised again is made dense with its former scales.",
        "all(map(operator.is_, known.tensors, tensors))", "True",
        "test_a_weight_that_is_quantised_again_is_read_again"),
)
# fmt: on
