"""Faults of DoRA layers: of the op, and of how PEFT's layers are recognised and read."""

from __future__ import annotations

from tests.mutants.mutant import both_phases, faults

_where = {"model": "llama-tied", "setup": "dora", "kernel": "dora_linear"}
_forward, _backward = both_phases("ops.lora.dora_linear", **_where)
_length, _ = both_phases("ops.lora.dora_norm", **_where)
_op = faults("ops.lora.dora_linear", "test_ops_dora_linear.py")
_layer = faults("patching.lora.dora", "test_patching_dora.py")
_EVERY = "test_every_dtype_with_and_without_a_bias[torch.float32-torch.float32]"
_NUMBERS = "test_the_same_numbers[{}]"
_ODD = "test_peft_computes_what_was_not_probed_and_the_report_counts_why[{}]"
_ELSE = "test_a_magnitude_that_computes_something_else_is_left[{}]"

# fmt: off
MUTANTS = (
    _length("dora_length_without_the_adapter", "A row is as long as the base's weight, without what B A adds.",
        "square + tl.sum(inner * b.to(tl.float64), axis=1)", "square", sample=True),
    _length("dora_length_without_the_scale", "The length is that of W + B A.",
        "float(scale)", "1.0"),
    _forward("dora_adapter_not_scaled_to_the_magnitude", "The magnitude scales the base alone.",
        "c[:, None] * b", "b.float()"),
    _forward("dora_base_not_scaled_to_the_magnitude", "The magnitude scales the adapter alone.",
        "add_product(y0, z, [scaled], rest, scale, y0.shape, y0.dtype, by_column=True, factor=c)",
        "add_product(y0, z, [scaled], rest, scale, y0.shape, y0.dtype, by_column=True)"),
    _backward("dora_magnitude_without_the_base", "The magnitude has its gradient through the adapter alone.",
        "total += slope * (y0.to(tl.float32) - bias)", "total += 0 * slope * (y0.to(tl.float32) - bias)"),
    _backward("dora_magnitude_of_the_first_rows", "Some rows count for no gradient of the magnitude.",
        "end = tl.minimum(first + rows_of_part, n_rows)", "end = tl.minimum(first + rows_of_part // 2, n_rows)",
        within="_dora_linear_bwd_kernel"),
    _backward("dora_base_gradient_not_scaled", "What goes back through the base has no magnitude.",
        "(c * slope).to(dy0_ptr.dtype.element_ty)", "slope.to(dy0_ptr.dtype.element_ty)"),
    _backward("dora_magnitude_without_the_adapter", "The magnitude has its gradient through the base alone.",
        "sums + tl.sum(w * b, axis=1)", "sums"),
    _backward("dora_gradient_of_b_not_scaled", "The gradient of B is that of c B.",
        "(w * c[:, None]).to(db_ptr.dtype.element_ty)", "w.to(db_ptr.dtype.element_ty)"),
    _op("dora_gradients_of_one_part", "Of the gradients in parts of the rows, the first part counts alone.",
        "range(0, n_parts)", "range(0, 1)", "test_gradients_in_parts"),
    faults("ops.lora.dora_norm", "test_ops_dora_linear.py")("dora_length_of_the_first_columns",
        "Of A A^T, the last columns of A are left out.",
        "mask=(rank[:, None] < n_ranks) & known[None, :]",
        "mask=(rank[:, None] < n_ranks) & (col[None, :] < n_cols // 2)",
        "test_the_length_of_a_row[torch.float32]"),
    faults("ops.lora.dora_norm", "test_ops_dora_linear.py")("dora_length_of_one_part",
        "Of A A^T in parts, the first part counts alone.",
        "mask=part < n_parts", "mask=part < 1",
        "test_the_length_of_a_row_in_parts"),
    faults("ops.lora.dora_norm", "test_ops_dora_linear.py")("dora_squares_of_the_first_columns",
        "Of the squares of W, the last columns are left out.",
        "(row < n_rows)[:, None] & (col < n_cols)", "(row < n_rows)[:, None] & (col < n_cols // 2)",
        "test_the_length_of_a_row_in_parts"),
    _op("dora_bias_scaled", "The magnitude scales the bias of the base, too.",
        "(1 - c) * bias", "0 * bias", _EVERY),
    _op("dora_bias_gradient_whole", "The bias gets the gradient of y through the end, too.",
        "(1 - c) * dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)",
        "dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)", _EVERY),
    _layer("dora_length_remembered", "A frozen weight keeps the length that it had at the first call.",
        "torch._C._current_graph_task_id() != -1", "True",
        "test_a_frozen_weight_that_changes_has_another_length"),
    _layer("dora_length_of_other_values", "A layer that changed before it runs again keeps its length.",
        "self.state == state", "True",
        "test_a_layer_that_changes_before_it_runs_again_has_another_length[other_weights]"),
    _layer("dora_length_of_other_tensors", "A layer with new adapters keeps its length where it runs again.",
        "all(ref() is t for ref, t in zip(self.tensors, tensors, strict=True))", "True",
        "test_a_layer_that_changes_before_it_runs_again_has_another_length[other_adapters]"),
    _layer("dora_not_disabled", "An adapter is computed inside of disable_adapter, in DPO's reference.",
        'state.get("_disable_adapters")', "False", _NUMBERS.format("disabled")),
    _layer("dora_added_to_merged_weights", "An adapter is added to weights that have it already.",
        'state.get("merged_adapters")', "False", _NUMBERS.format("merged")),
    _layer("dora_dropout_ignored", "A dropout that is active drops nothing.",
        "one.dropped is not None", "False", _ODD.format("dropout")),
    _layer("dora_first_adapter_alone", "Of several active adapters, the first is computed.",
        "len(names) > 1", "False", _ODD.format("two adapters")),
    _layer("dora_probed_without_a_bias", "How the bias is scaled is not looked at.",
        "(False, True)", "(False,)", _ELSE.format("bias scaled"), within="recognise_dora"),
    faults("patching.lora.layer", "test_patching_dora.py")("dora_probed_without_gradients",
        "A layer is recognised by its values.",
        "all(probe.relative_difference(ours, theirs) < probe.SAME_FORMULA for ours, theirs in pairs)", "True",
        _ELSE.format("norm with a gradient")),
)
