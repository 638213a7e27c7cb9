"""One table of ops, which tests, tools and benchmarks filter: op, reference, inputs by rows, columns, dtype and device,
and what is promised of the op.

A new op needs a row in ``elementwise.py``, ``adapters.py`` or ``losses.py``. ``tests/test_ops_every.py`` judges the
rows of :data:`OPS`. The others have tests of their own.
"""

from __future__ import annotations

from tools.op_table.adapters import LORA, MORE
from tools.op_table.elementwise import LAYOUTS, LINEAR, NORMS, ROPE, UNITS
from tools.op_table.losses import CROSS_ENTROPY, DIVERGENCE, LINEAR_CROSS_ENTROPY, LOG_PROBS, PACKING

SUMS = LINEAR | LORA  # an element of whose results is a sum over the columns
OPS = NORMS | ROPE | UNITS | LINEAR | LORA
TABLE = OPS | MORE | CROSS_ENTROPY | LINEAR_CROSS_ENTROPY | LOG_PROBS | DIVERGENCE | PACKING


def op_of(name: str) -> str:
    """The name of the public op in the name of a row."""
    return name.partition(",")[0]


# One row of each op, by the name of the op.
FIRST = {op_of(name): op for name, op in reversed(TABLE.items())}
# What takes long is asked of those, and of rows that make other programs or promise something else.
SAMPLED = {
    name: op
    for name, op in TABLE.items()
    if op is FIRST[op_of(name)]
    or name in LAYOUTS
    or name in MORE
    or op_of(name) == "rms_norm"
    or (name in CROSS_ENTROPY and "weights" not in name)
    or (name in LINEAR_CROSS_ENTROPY and not name.endswith(("counted", ", mean", ", none")))
    or name in ("layer_norm, no weight", "linear_cross_entropy, mean", "linear_cross_entropy, none")
    or name in ("linear_log_probs, invariant", "packing_weights, class_weight")
}
# Dynamo takes seconds for a row: one of each op, and options and memory that a program could take for constants.
IN_PROGRAMS = {
    name: op
    for name, op in SAMPLED.items()
    if op.in_program is not None
    and (
        op is FIRST[op_of(name)]
        or name in LAYOUTS
        or name in ("cross_entropy, everything", "cross_entropy, scaled")
        or name in ("linear_cross_entropy, fast", "linear_cross_entropy, small, smoothed")
    )
}

__all__ = ["FIRST", "IN_PROGRAMS", "LAYOUTS", "LINEAR", "LORA", "NORMS", "OPS", "ROPE", "SAMPLED", "SUMS", "TABLE"]
__all__ += ["UNITS", "op_of"]
