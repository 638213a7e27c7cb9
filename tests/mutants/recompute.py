"""Faults of a gated MLP that computes again in the backward, tile by tile."""

from __future__ import annotations

from tests.mutants.mutant import faults

_op = faults("ops.lora.gated_mlp", "test_ops_gated_mlp.py")
_sums = faults("ops.lora.projection", "test_ops_gated_mlp.py")
_modules = faults("patching.recompute", "test_patching_recompute.py")
_anchor = faults("ops.runtime.anchor", "test_patching_recompute.py")
_IN_TILES = "test_recomputed_in_tiles[torch.float32-{'gate': (4,), 'up': (4,), 'down': (4,)}-True]"
_NUMBERS = "test_the_same_numbers[phi3-plain]"
_HOOK = "test_a_hook_on_a_{}[phi3]"
_DROPOUT = "test_dropout_draws_the_same_in_both_directions"

# fmt: off
MUTANTS = (
    _modules("recompute_by_the_modules_of_now", "The backward goes by the mode and adapters that there are by then.",
        "partial(run, _as_it_is(mlp))", "partial(run, mlp)",
        "test_a_change_between_forward_and_backward_changes_no_gradient[phi3-rescales]"),
    _sums("recompute_gradients_of_the_last_tile", "Weights have the gradient of the last tile alone.",
        "add_to_sum(total, a, b, 1.0)", "add_to_sum(total, a, b, 0.0)", _IN_TILES),
    _op("recompute_last_tile_lost", "The last tile, which is shorter, adds nothing to the gradients of parameters.",
        "sums=sums", "sums=sums if start + tile < len(rows) else GradientSums(node.tensors)", _IN_TILES,
        within="RecomputedMLPFunction.backward"),
    _op("recompute_tile_at_the_wrong_place", "Within a tile, the gradients of x are in reversed order.",
        "dx[some] = own_dx", "dx[some] = own_dx.flip(0)", _IN_TILES),
    _op("recompute_saves_too_late", "Under checkpointing, the MLP is computed once more before its tiles are.",
        "RecomputedMLPFunction.apply(x, activation, node, first, *node.floating)",
        "RecomputedMLPFunction.apply(x, activation, node, False, *node.floating)",
        "test_recomputed_under_checkpointing_costs_no_product[1-False-5]"),
    _sums("recompute_sums_times_tiles", "The gradients of weights are multiplied by the number of tiles.",
        "in_dtype(total, t.dtype)", "in_dtype(3 * total, t.dtype)", _IN_TILES),
    _sums("recompute_sums_in_bfloat16", "The sum over tiles is rounded to bfloat16 after each.",
        "add_to_sum(total, a, b, 1.0)", "<old>; total.copy_(total.bfloat16())",
        "test_sums_over_many_tiles_are_rounded_once"),
    _modules("recompute_last_tile_of_modules_lost", "Of modules in tiles, the last one gets no gradient.",
        "torch.autograd.grad(y, inputs, of_dy, allow_unused=True)",
        "torch.autograd.grad(y, inputs, of_dy * (of_x.shape[-2] == tokens_of_tile(0)), allow_unused=True)", _NUMBERS),
    _modules("recompute_modules_sum_to_the_last_tile", "Parameters of modules have the gradient of the last tile.",
        "total.add_(gradient)", "gradient.float()", _NUMBERS),
    _modules("recompute_other_random_numbers", "A dropout in a tile drops other elements in the backward.",
        "torch.set_rng_state(self.random)", "torch.manual_seed(5)", _DROPOUT),
    _modules("recompute_draws_for_others", "Whoever draws after the backward gets other numbers.",
        "torch.random.fork_rng(**devices or {'devices': []})", "contextlib.nullcontext()", _DROPOUT),
    _modules("recompute_without_autocast", "The backward computes in another dtype than the forward.",
        "enabled=self.autocast is not None", "enabled=False", "test_autocast_is_that_of_the_forward"),
    _modules("recompute_hooks_once_per_tile", "A hook on a projection is called for each tile.",
        "module is not mlp and probe.has_hooks(module)", "False", _HOOK.format("projection_sees_all_tokens")),
    _modules("recompute_gradient_hooks_once_per_tile", "A hook on a parameter's gradient is called for each tile.",
        "any((p._backward_hooks for p in parameters))", "False", _HOOK.format("gradient_is_called_once")),
    _modules("recompute_weights_that_are_no_parameters", "A weight that is no parameter has no gradient.",
        "isinstance(value, Tensor) and value.requires_grad", "False",
        "test_a_weight_that_is_no_parameter_has_its_gradient"),
    _modules("recompute_in_evaluation", "Evaluation goes by tiles, too.",
        "report is not None and report.recompute is not None and mlp.training",
        "report is not None and report.recompute is not None", "test_evaluation_computes_as_it_always_does"),
    _anchor("recompute_computes_the_last_product", "A tile computes in the backward what nobody reads.",
        "anchor(like[0].shape, like[0].dtype, like[0].device) if _anchors.only else compute()", "compute()",
        "test_checkpointing_costs_no_product_more[phi3-products1]"),
)
# fmt: on
