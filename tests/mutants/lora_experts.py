"""Faults of LoRA on packed experts: of the products, of the op around them, and of how PEFT's wrappers are read."""

from __future__ import annotations

from tests.mutants.mutant import both_phases, faults

_where = {"model": "qwen3_moe", "setup": "lora-experts"}
_products, _gradients = both_phases("ops.lora.grouped", kernel="lora_experts", **_where)
_, _stacked = both_phases("ops.lora.experts", kernel="lora_experts", **_where)
_, _op = both_phases("ops._experts", kernel="lora_experts", **_where)
_read = faults("patching.lora.experts", **_where)
_checked = faults("patching.lora.experts", "test_patching_lora_experts.py")
_NUMBERS = "test_the_same_numbers[{}]"
_ODD = "test_peft_computes_what_was_not_probed_and_the_report_counts_why[{}]"
_OF_GROUP = "w_ptr + tl.cast(group, tl.int64) * w_stride"
_DB = "columns_product(dy, z, torch.empty_like(self.b[0]), groups, self.scales[0])"

# fmt: off
MUTANTS = (
    _read("lora_experts_wrong_columns_of_b", "An expert's columns of B are taken to lie side by side.",
        "b.view(outputs, -1, n_experts).permute(2, 0, 1)", "b.view(outputs, n_experts, -1).permute(1, 0, 2)",
        sample=True),
    _products("lora_experts_of_the_first_expert", "What is added to a row is made of the first expert's B.",
        _OF_GROUP, "w_ptr", within="_lora_experts_add_kernel"),
    _products("lora_experts_last_delta_dropped", "The last expert has no delta.",
        "tl.load(group_ptr + last).to(tl.int32) + 1, n_groups",
        "tl.load(group_ptr + last).to(tl.int32) + 1, n_groups - 1"),
    _products("lora_experts_row_of_two_experts", "The last row of an expert gets the delta of the next one, too.",
        "row >= start", "row >= start - 1", within="_lora_experts_add_kernel"),
    _products("lora_experts_token_of_two_experts", "The last row of an expert is multiplied by the A of two experts.",
        "row >= start", "row >= start - 1", within="_lora_experts_rows_kernel"),
    _gradients("lora_experts_gradient_of_other_tokens", "The gradient of A multiplies tokens in another order.",
        "tl.load(order_ptr + row, mask=row < end, other=0) // n_choices", "row // n_choices"),
    _gradients("lora_experts_gradient_without_the_last_row", "The last row of an expert counts for no gradient.",
        "row < end", "row < end - 1", within="_lora_experts_columns_kernel", times=3),
    _stacked("lora_experts_gradient_of_b_not_scaled", "Of several adapters, B has a gradient without the scale.",
        "s * part", "part"),
    _op("lora_experts_tokens_without_their_gradient", "Tokens get no gradient through the adapters of gate and up.",
        "up_adapters.add_input_gradient_(rows, g, groups)", "pass"),
    _op("lora_experts_unit_without_its_gradient", "The unit gets no gradient through the adapters of down.",
        "down_adapters.add_input_gradient_(unit, g, groups)", "pass"),
    _read("lora_experts_first_adapter_alone", "Of several active adapters, the first is computed.",
        "active_names(wrapper)", "active_names(wrapper)[:1]", within="_adapters"),
    _read("lora_experts_outermost_wrapper_alone", "The adapters of one weight are computed.",
        "of_weights[name] += adapters", "of_weights[name] += adapters if wrapper is wrappers[0] else []"),
    faults("ops.lora.experts", "test_ops_experts_adapters.py")("lora_experts_gradient_in_the_models_dtype",
        "The gradient of a float32 B is rounded to the dtype of the rows.",
        _DB, "<old>.to(dy.dtype).to(self.b[0].dtype)", "test_gradients_of_16_bit_rows_are_sums_in_float32"),
    faults("ops.lora.experts", "test_ops_experts_adapters.py")("lora_experts_stacked_without_scales",
        "Of several adapters, what B makes has no scale.",
        "scale * b.float()", "b.float()", "test_any_number_of_adapters"),
    _checked("lora_experts_layout_assumed", "A is taken for what multiplies the tokens, however the weight is stored.",
        "recipe_of(wrapper).b_first != recipe.whole.transposed", "True",
        _NUMBERS.format("transposed, and PEFT does not know")),
    _checked("lora_experts_not_disabled", "An adapter is added inside of disable_adapter, in DPO's reference.",
        'state.get("_disable_adapters")', "False", "test_disable_adapter_as_dpo_uses_it"),
    _checked("lora_experts_added_to_merged_weights", "An adapter is added to weights that have it already.",
        'state.get("merged_adapters")', "False", _NUMBERS.format("one of two wrappers merged")),
    _checked("lora_experts_merged_and_disabled", "What is merged and disabled stays in the weight.",
        'state["_disable_adapters"] and state["merged_adapters"]', "False",
        _ODD.format("disabled adapters are merged")),
    _checked("lora_experts_hooks_ignored", "Experts are computed although somebody watches their module.",
        "any(map(probe.has_hooks, (*wrappers[1:], module)))", "False", _ODD.format("hooks")),
    _checked("lora_experts_variant_taken", "A variant among the active adapters is computed as if it were none.",
        "is_variant(wrapper, name)", "False", _ODD.format("a variant")),
    _checked("lora_experts_any_wrapper_recognised", "A wrapper is recognised by its class.",
        "_same(module, b_first)", "True", "test_a_wrapper_that_computes_something_else_is_left[another scale]"),
    _checked("lora_experts_probed_with_one_adapter", "How two adapters are computed is not looked at.",
        '(["first"], [*_SCALES])', '(["first"],)',
        "test_a_wrapper_that_computes_something_else_is_left[other experts of two adapters]"),
    _checked("lora_experts_probed_without_gradients", "A wrapper is recognised by its values.",
        "[y, *torch.autograd.grad(y, leaves, upstream)]", "[y]",
        "test_a_wrapper_that_computes_something_else_is_left[another gradient]"),
    faults("patching.census", "test_patching_lora_experts.py")("lora_experts_later_adapters_not_listed",
        "Adapters of experts that came after patch() are in no list.",
        "{LORA: is_lora_layer, DORA: is_dora_layer, LORA_EXPERTS: adapts_experts}", "{LORA: is_lora_layer}",
        "test_an_adapter_that_comes_after_patch"),
    faults("ops._packed_glu", "test_ops_packed_glu.py")("packed_limit_tried_under_a_checkpoint",
        "The first call with a limit saves a tensor that its recomputation does not save.",
        "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)", "torch.enable_grad()",
        "test_the_first_call_with_a_limit_is_in_a_checkpoint"),
)
# fmt: on
