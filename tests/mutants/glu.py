"""Faults of the gated linear units."""

from __future__ import annotations

from typing import Any

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_FILE = "liger_kernels.ops.glu"


def _glu(name: str, does: str, kernel: str, phase: str, *edits: tuple[str, ...], **other: Any) -> Mutant:
    other.setdefault("model", "llama-untied" if kernel == "swiglu" else "gemma2")
    return Mutant(name, does, tuple(Edit(_FILE, *edit) for edit in edits), kernel=kernel, phase=phase, **other)


_RETURN = "    return dgate, dup\n"
_BACKWARD_ACTIVATION = "ACTIVATION=activation"
_PRODUCT = "y = y.to(gate_ptr.dtype.element_ty).to(tl.float32) * up"

# fmt: off
# fmt: off
MUTANTS = (
    _glu("silu_gradient_without_its_second_term", "The slope of silu is taken for the sigmoid.",
        "swiglu", "backward", ("slope = s + x * ds\n", "slope = s\n"), sample=True),
    _glu("silu_gradient_of_gelu", "The backward uses another activation than the forward.",
        "swiglu", "backward", (_BACKWARD_ACTIVATION, 'ACTIVATION="gelu_tanh"', "unit_gradients")),
    _glu("gate_and_up_gradients_swapped", "Each of the two gradients goes to the other projection.",
        "swiglu", "backward", (_RETURN, "    return dup, dgate\n")),
    _glu("gate_gradient_without_up", "The gate's gradient forgets the other factor.",
        "swiglu", "backward", ("dgate = dy * up * slope", "dgate = dy * slope")),
    _glu("up_gradient_of_the_slope", "The gradient of up multiplies by the slope, not by the activation.",
        "swiglu", "backward", ("dup = dy * act\n", "dup = dy * slope\n")),
    _glu("gate_gradient_of_one_percent_more", "The gate's gradient is 1% too large.",
        "swiglu", "backward", (_RETURN, "    return dgate * 1.01, dup\n")),
    _glu("swiglu_activates_up", "The activation is taken of the wrong factor, forward and backward.",
        "swiglu", "forward", ("GLULinearFunction, gate, up", "GLULinearFunction, up, gate")),
    _glu("swiglu_drops_the_tail", "The last element is not computed: a mask off by one.",
        "swiglu", "forward",
        ("    y, _ = _activate(gate, ACTIVATION)\n",
            "    y, _ = _activate(tl.where(col < n_cols - 1, gate, 0.0), ACTIVATION)\n")),
    _glu("swiglu_of_one_percent_more", "The output is 1% too large; its gradient is not.",
        "swiglu", "forward", (_PRODUCT, _PRODUCT + " * 1.01")),
    _glu("product_of_the_slope",
        "The product that the backward makes again, for the gradient of the weight behind it, has the slope in it.",
        "swiglu", "backward", ("act * up", "slope * up"), sample=True),
    _glu("product_not_made_again",
        "The gradient of the weight behind it is taken of the product's gradient instead of the product.",
        "geglu", "backward", ("PRODUCT=product", "PRODUCT=False")),
    _glu("linear_gradient_of_one_percent_more", "The gradient of the weight behind the product is 1% too large.",
        "swiglu", "backward",
        ("torch.mm(rows.t(), y.view(-1, y.shape[-1]))", "1.01 * torch.mm(rows.t(), y.view(-1, y.shape[-1]))")),
    _glu("gelu_of_the_other_form", "The exact gelu stands for its tanh form, forward and backward.",
        "geglu", "forward", ('"gelu_tanh" if approximate == "tanh" else "gelu"', '"gelu"'), dtypes=("float32",)),
    _glu("gelu_gradient_of_the_other_form", "The gradient is that of the exact gelu, the output that of its tanh form.",
        "geglu", "backward", (_BACKWARD_ACTIVATION, 'ACTIVATION="gelu"', "unit_gradients"), dtypes=("float32",)),
    _glu("gelu_gradient_without_the_cube", "The inner derivative forgets the factor 3 of the cube.",
        "geglu", "backward", ("(1.0 + 3.0 * cube)", "(1.0 + cube)")),
    _glu("gelu_gradient_of_silu", "The backward uses another activation than the forward.",
        "geglu", "backward", (_BACKWARD_ACTIVATION, 'ACTIVATION="silu"', "unit_gradients")),
    _glu("n18_swiglu_assumes_contiguous_halves", "The stride between rows of half a projection is taken for its width.",
        "swiglu", "forward",
        ("*gate_rows,\n        *up_rows,\n        y,",
            "gate_rows[0],\n        n_cols,\n        up_rows[0],\n        n_cols,\n        y,"), source="N18",
        model="phi3"),
)
