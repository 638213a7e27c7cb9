"""Faults of the gated linear units."""

from __future__ import annotations

from tests.mutants.mutant import both_phases, faults

_swiglu_forward, _swiglu_backward = both_phases("ops._glu", kernel="swiglu")
_geglu_forward, _geglu_backward = both_phases("ops._glu", kernel="geglu", model="gemma2")
_glu = faults("ops._glu", "test_ops_glu.py")
_OWNED = "test_gradients_lie_over_a_gate_and_an_up_that_are_owned"
_RETURN = "return dgate, dup"
_BACKWARD_ACTIVATION = "ACTIVATION=activation"

# fmt: off
MUTANTS = (
    _swiglu_backward("silu_gradient_without_its_second_term", "The slope of silu is taken for the sigmoid.",
        "slope = s + x * ds", "slope = s", sample=True),
    _swiglu_backward("silu_gradient_of_gelu", "The backward uses another activation than the forward.",
        _BACKWARD_ACTIVATION, 'ACTIVATION="gelu_tanh"', within="unit_gradients"),
    _swiglu_backward("gate_and_up_gradients_swapped", "Each of the two gradients goes to the other projection.",
        _RETURN, "return dup, dgate"),
    _swiglu_backward("gate_gradient_without_up", "The gate's gradient omits the other factor.",
        "dgate = dy * up * slope", "dgate = dy * slope"),
    _swiglu_backward("up_gradient_of_the_slope", "The gradient of up multiplies by the slope, not by the activation.",
        "dup = dy * act", "dup = dy * slope"),
    _swiglu_backward("gate_gradient_of_one_percent_more", "The gate's gradient is 1% too large.",
        _RETURN, "return dgate * 1.01, dup"),
    _swiglu_forward("swiglu_activates_up", "The activation is taken of the wrong factor, forward and backward.",
        "GLULinearFunction, gate, up", "GLULinearFunction, up, gate"),
    _swiglu_forward("swiglu_drops_the_tail", "The last element is not computed: a mask off by one.",
        "y, _ = _activate(gate, ACTIVATION)", "y, _ = _activate(tl.where(col < n_cols - 1, gate, 0.0), ACTIVATION)"),
    _swiglu_forward("swiglu_of_one_percent_more", "The output is 1% too large; its gradient is not.",
        "y = y.to(gate_ptr.dtype.element_ty).to(tl.float32) * up", "<old> * 1.01"),
    _swiglu_backward("product_of_the_slope",
        "The product that the backward makes again, for the gradient of the weight behind it, has the slope in it.",
        "act * up", "slope * up", sample=True),
    _geglu_backward("product_not_made_again",
        "The gradient of the weight behind it is taken of the product's gradient instead of the product.",
        "PRODUCT=product", "PRODUCT=False"),
    _swiglu_backward("linear_gradient_of_one_percent_more",
        "The gradient of the weight behind the product is 1% too large.",
        "torch.mm(rows.t(), y.view(-1, y.shape[-1]))", "1.01 * <old>"),
    _geglu_forward("gelu_of_the_other_form", "The exact gelu stands for its tanh form, forward and backward.",
        "", 'activation = activation.replace("gelu_tanh", "gelu")', within="_linear", dtypes=("float32",)),
    _geglu_backward("gelu_gradient_of_the_other_form",
        "The gradient is that of the exact gelu, the output that of its tanh form.",
        _BACKWARD_ACTIVATION, 'ACTIVATION="gelu"', within="unit_gradients", dtypes=("float32",)),
    _geglu_backward("gelu_gradient_without_the_cube", "The inner derivative omits the factor 3 of the cube.",
        "(1.0 + 3.0 * cube)", "(1.0 + cube)"),
    _geglu_backward("gelu_gradient_of_silu", "The backward uses another activation than the forward.",
        _BACKWARD_ACTIVATION, 'ACTIVATION="silu"', within="unit_gradients"),
    _swiglu_forward("n18_swiglu_assumes_contiguous_halves",
        "The stride between rows of half a projection is taken for its width.",
        "*gate_rows, *up_rows, y", "gate_rows[0], n_cols, up_rows[0], n_cols, y", source="N18", model="phi3"),
    _glu("unit_gradients_over_a_kept_graph", "Gradients are written over a gate and an up whose graph is kept.",
        "keeps_graph()", "False", f"{_OWNED}[set()-silu]"),
    _glu("unit_gradients_before_up_is_read", "The gradient of up is stored before up is read for the product.",
        "up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)",
        "tl.store(dup_ptr + row * n_cols + col, (dy * act).to(dup_ptr.dtype.element_ty), mask=mask)\n<old>",
        f"{_OWNED}[set()-silu]", within="_glu_bwd_kernel"),
    faults("patching.recipes.glu", "test_patching_glu.py")("unit_gradients_over_what_a_hook_has",
        "Gradients are written over a gate that a hook of its projection has seen.",
        "_plain_weights(getattr(mlp, name))", "True", "test_what_somebody_else_may_have_stays_as_it_is[watched]"),
)
