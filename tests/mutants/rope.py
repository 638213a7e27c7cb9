"""Faults of the rotary embedding."""

from __future__ import annotations

from typing import Any

from tests.mutants.edit import Edit
from tests.mutants.mutant import Mutant

_FILE = "liger_kernels.ops.rope"


def _rope(name: str, does: str, phase: str, *edits: tuple[str, ...], **other: Any) -> Mutant:
    return Mutant(name, does, tuple(Edit(_FILE, *edit) for edit in edits), kernel="rope", phase=phase, **other)


# fmt: off
# fmt: off
MUTANTS = (
    _rope("r1_angles_of_the_first_row", "Every row of the batch is rotated by the angles of the first one.",
        "forward", ("batch * cos_batch_stride", "0 * cos_batch_stride"),
        ("batch * sin_batch_stride", "0 * sin_batch_stride"), source="R1", sample=True),
    _rope("r5_rotates_in_place", "q and k are overwritten, though the caller still holds them.",
        "forward", ("q_out = torch.empty_like(q, dtype=torch.promote_types(q.dtype, angle_dtype))", "q_out = q"),
        ("k_out = torch.empty_like(k, dtype=torch.promote_types(k.dtype, angle_dtype))", "k_out = k"), source="R5",
        dies="overwritten"),
    _rope("n18_rope_assumes_contiguous_heads", "The strides of q are taken for those of a contiguous tensor.",
        "forward",
        ("strides = [(0, 0, 0) if x is None else _strides(x) for x in (q, q_out, k, k_out)]",
            "strides = [(0, 0, 0) if x is None else _strides(x) for x in (q, q_out, k, k_out)]\n"
            "if q is not None and not transposed:\n"
            "    head = q.shape[2] * q.shape[3]\n"
            "    strides[0] = (q.shape[3], head, (q.shape[1] - 1) * head)"), source="N18"),
    _rope("rope_gradient_turns_the_wrong_way", "The gradient is rotated forward instead of back.",
        "backward", ("transposed=True", "transposed=False")),
    _rope("rope_gradient_with_one_wrong_sign", "One of the four terms of the transposed map has the wrong sign.",
        "backward", ("turned_b = b * cos_b - a * sin_a", "turned_b = b * cos_b + a * sin_a")),
    _rope("rope_gradient_leaves_keys_alone", "The gradient of k is passed on as it came.",
        "backward", ("        return dq, dk, None, None, None", "        return dq, dk_out, None, None, None")),
    _rope("rope_gradient_of_one_percent_less", "The gradient of q is 1% too small.",
        "backward", ("        return dq, dk, None, None, None", "        return dq * 0.99, dk, None, None, None")),
    _rope("rope_of_half_the_pairs", "The second element of every pair is not rotated.",
        "forward", ("turned_b = b * cos_b + a * sin_b", "turned_b = b")),
    _rope("rope_of_the_other_pairing", "Neighbours are rotated where halves belong together, forward and backward.",
        "forward", ("PAIRING=pairing,", 'PAIRING="interleaved",')),
    _rope("rope_off_by_one_position",
        "Every token but the last is rotated by the next one's angles: wrong where a packed document begins.",
        "forward",
        ("cos_offset = batch * cos_batch_stride + seq * cos_seq_stride\n"
            "sin_offset = batch * sin_batch_stride + seq * sin_seq_stride\n",
            "later = tl.minimum(seq + 1, seq_len - 1)\n"
            "cos_offset = batch * cos_batch_stride + later * cos_seq_stride\n"
            "sin_offset = batch * sin_batch_stride + later * sin_seq_stride\n")),
    _rope("rope_ignores_packing", "Positions are counted from the start of the row, whatever position_ids say.",
        "forward",
        ("    _check(q, k, cos, sin)\n",
            "    _check(q, k, cos, sin)\n"
            "    if not torch.equal(cos[:, -1], cos.amin(1)) and q.shape[2] > 1 and cos.shape[0] > 1:\n"
            "        cos, sin = (x[:1].expand_as(x) for x in (cos, sin))\n")),
    _rope("rope_not_while_decoding", "A single token, as generation feeds them, is not rotated.",
        "forward",
        ("    _check(q, k, cos, sin)\n", "    _check(q, k, cos, sin)\n    if q.shape[2] == 1:\n        return q, k\n")),
    _rope("rope_angles_of_half_precision", "cos and sin are rounded to 8 bits of mantissa before use.",
        "forward",
        ("return a, b", "return a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)", "_load_angles"),
        dtypes=("float32",)),
)
