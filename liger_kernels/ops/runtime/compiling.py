"""What runs in a program of ``torch.compile``: a kernel of ours, or torch's operations, which Inductor fuses.

Inductor fuses a norm with the residual around it, and a mean with what follows. A launch of one of our kernels takes
the host about 20 us longer than one of Inductor's there (H200 machine, torch 2.11), and a step whose tensors have
2**20 elements or less (512 tokens of 2048 features) waits for the host. docs/reference/compile.md lists what else
differs.

Recipes ask :func:`left_to_inductor`, and then run the model's own code. A public op asks nothing of its own: where its
kernels stay out of every program, it says ``eager_only`` to ``use_triton``, which asks :func:`traces_reference`.
"""

from __future__ import annotations

import math

import torch

# The number of elements up to which a recipe leaves each to Inductor.
INDUCTOR_UP_TO: dict[str, float] = {
    "rms_norm": math.inf,
    "layer_norm": math.inf,
    "gated_rms_norm": math.inf,
    "experts": math.inf,
    "lora_linear": math.inf,
    "rope": 2**20,
    "swiglu": 2**20,
    "geglu": 2**20,
}


def is_exporting() -> bool:
    """Whether torch.export runs. ``torch.compiler.is_exporting()`` says so in every traced program of torch 2.11."""
    return torch.compiler._is_exporting_flag


def traces_reference() -> bool:
    """Whether a program is traced, which holds the references of ops whose kernels run in eager only.

    Inductor fuses the references. Dynamo cannot trace the kernels of several adapted projections in one node."""
    return torch.compiler.is_compiling()


def left_to_inductor(kernel: str, x: torch.Tensor) -> bool:
    """Whether this is a compiled program in which ``kernel`` over ``x`` is faster as torch's own operations.

    Where the size of ``x`` is a symbol, it may be any, and the answer is no: a guard would be a program more. What
    torch.export makes is for others to run, who may have no kernel."""
    if not torch.compiler.is_compiling():
        return False
    if is_exporting():
        return True
    most = INDUCTOR_UP_TO[kernel]
    # By its full name: who compiles has imported it, and for everybody else that would take seconds.
    return most == math.inf or torch.fx.experimental.symbolic_shapes.statically_known_true(x.numel() <= most)
