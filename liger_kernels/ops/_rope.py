"""Rotary position embedding of queries and keys (Su et al., arXiv:2104.09864), in one launch.

Pairs (a, b) of a head's first (or last) rotary_dim elements are rotated. The other elements pass through:

    a' = a * cos_a - b * sin_a        b' = b * cos_b + a * sin_b

    pairing                a, b in x          a', b' in the result   angle of a, b in cos and sin
    half                   i, i + d/2         i, i + d/2             i, i + d/2      x * cos + rotate_half(x) * sin
    interleaved            2 i, 2 i + 1       2 i, 2 i + 1           2 i, 2 i + 1    x * cos + rotate_every_two(x) * sin
    interleaved_to_half    2 i, 2 i + 1       i, i + d/2             i, i + d/2      half of x[0::2] and x[1::2]
    *_repeat               as the above       as the above           i, i            one angle a pair, in d/2 columns

with d = rotary_dim and i < d/2. The two angles of a pair may differ, so the gradient is the transposed map. For equal
angles it is the rotation by the negative angle:

    da = da' * cos_a + db' * sin_b    db = db' * cos_b - da' * sin_a
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, NamedTuple

import torch

from liger_kernels.ops.runtime.arguments import AT_LEAST_1, checked, checked_op, one_of
from liger_kernels.ops.runtime.dispatch import backward_once, launch, tl, triton, use_triton
from liger_kernels.ops.runtime.tiling import cdiv, choice, next_power_of_2, tile


class Pairing(NamedTuple):
    """Where the elements of a pair are: next to each other (interleaved), or half of rotary_dim apart."""

    interleaved: bool  # in q and k
    interleaved_out: bool  # in the results, and in cos and sin unless ``repeat``
    repeat: bool  # both elements have one angle, from the first half of the columns


_PAIRINGS = {
    f"{name}{'_repeat' * repeat}": Pairing(*places, repeat)
    for repeat in (False, True)
    for name, places in (
        ("half", (False, False)),
        ("interleaved", (True, True)),
        ("interleaved_to_half", (True, False)),
    )
}
PAIRINGS = tuple(_PAIRINGS)
PairingName = Annotated[str, one_of(PAIRINGS)]
RotaryDim = Annotated[int, AT_LEAST_1]


@checked
def rope_ref(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairing: PairingName = "half",
    rotary_dim: RotaryDim | None = None,
    inverse: bool = False,
    keep_dtype: bool = False,
    trailing: bool = False,
) -> tuple[torch.Tensor, ...]:
    """:func:`rope` in plain torch: the definition of correct, for any floating-point dtype."""
    places = _PAIRINGS[pairing]
    rotary_dim = _checked_rotary_dim(q, k, cos, sin, pairing, rotary_dim)
    cos, sin = cos.unsqueeze(1), (-sin if inverse else sin).unsqueeze(1)  # one for all heads

    def pair(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        return a, b

    if places.repeat:
        (cos_a, sin_a) = (cos_b, sin_b) = [angle[..., : rotary_dim // 2] for angle in (cos, sin)]
    else:
        (cos_a, cos_b), (sin_a, sin_b) = (pair(angle, places.interleaved_out) for angle in (cos, sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first = x.shape[-1] - rotary_dim if trailing else 0
        a, b = pair(x[..., first : first + rotary_dim], places.interleaved)
        turned = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        y = torch.stack(turned, dim=-1).flatten(-2) if places.interleaved_out else torch.cat(turned, dim=-1)
        if x.shape[-1] > rotary_dim:
            y = torch.cat((x[..., :first], y, x[..., first + rotary_dim :]), dim=-1)
        return y.to(x.dtype) if keep_dtype else y

    return (rotate(q),) if k is None else (rotate(q), rotate(k))


@triton.jit
def _load_pairs(ptr, offset, mask, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Both elements of ``PAIRS`` pairs, each [tokens, heads, BLOCK] in float32. The last dimension of ``offset`` and
    ``mask`` is 1."""
    col = tl.arange(0, BLOCK)
    if not INTERLEAVED:
        mask = mask & (col < PAIRS)
        a = tl.load(ptr + offset + col, mask=mask, other=0.0)
        b = tl.load(ptr + offset + PAIRS + col, mask=mask, other=0.0)
    else:
        # One contiguous load, split in registers: two loads with a stride of 2 would read every byte twice.
        col = tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + offset + col, mask=mask & (col < 2 * PAIRS), other=0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(ptr, offset, mask, a, b, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    dtype = ptr.dtype.element_ty
    if not INTERLEAVED:
        mask = mask & (col < PAIRS)
        tl.store(ptr + offset + col, a.to(dtype), mask=mask)
        tl.store(ptr + offset + PAIRS + col, b.to(dtype), mask=mask)
    else:
        col = tl.arange(0, 2 * BLOCK)
        both = tl.join(a.to(dtype), b.to(dtype))
        both = tl.reshape(both, (a.shape[0], a.shape[1], 2 * BLOCK))
        tl.store(ptr + offset + col, both, mask=mask & (col < 2 * PAIRS))


@triton.jit
def _load_angles(
    ptr,
    offset,
    col_stride,
    mask,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The factors of both elements of each pair, [tokens, 1, BLOCK]."""
    if REPEAT:
        col = tl.arange(0, BLOCK)
        a = tl.load(ptr + offset + col.to(tl.int64) * col_stride, mask=mask & (col < PAIRS), other=0.0).to(tl.float32)
        b = a
    else:
        a, b = _load_pairs(ptr, offset, mask, PAIRS, INTERLEAVED, BLOCK)
    return a, b


# fmt: off
@triton.jit
def _rotate_heads(
    x_ptr, x_strides, y_ptr, y_strides,      # [batch, heads, seq, head_dim]; strides as _strides returns them
    token, batch, in_range, n_heads,         # [tokens, 1, 1], and a number
    angles,                                  # cos_a, cos_b, sin_a, sin_b, each [tokens, 1, BLOCK]
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, TRAILING: tl.constexpr, TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):
    """Rotate every head of the tokens."""
    x_seq_stride, x_head_stride, x_batch_gap = x_strides
    y_seq_stride, y_head_stride, y_batch_gap = y_strides
    cos_a, cos_b, sin_a, sin_b = angles
    for start in range(0, n_heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
        mask = in_range & (head < n_heads)
        x_offset = token * x_seq_stride + head * x_head_stride + batch * x_batch_gap
        y_offset = token * y_seq_stride + head * y_head_stride + batch * y_batch_gap
        first, rest_first = 0, 2 * PAIRS
        if TRAILING:
            first, rest_first = HEAD_DIM - 2 * PAIRS, 0
        a, b = _load_pairs(x_ptr + first, x_offset, mask, PAIRS, INTERLEAVED, BLOCK)
        if TRANSPOSED:
            turned_a = a * cos_a + b * sin_b
            turned_b = b * cos_b - a * sin_a
        else:
            turned_a = a * cos_a - b * sin_a
            turned_b = b * cos_b + a * sin_b
        _store_pairs(y_ptr + first, y_offset, mask, turned_a, turned_b, PAIRS, INTERLEAVED_OUT, BLOCK)
        if REST > 0:
            col = rest_first + tl.arange(0, REST)
            rest_mask = mask & (col < rest_first + HEAD_DIM - 2 * PAIRS)
            rest = tl.load(x_ptr + x_offset + col, mask=rest_mask, other=0.0).to(tl.float32)
            tl.store(y_ptr + y_offset + col, rest.to(y_ptr.dtype.element_ty), mask=rest_mask)


@triton.jit
def _rope_kernel(
    q_ptr, q_seq_stride, q_head_stride, q_batch_gap,                    # [batch, heads, seq, head_dim] or None
    q_out_ptr, q_out_seq_stride, q_out_head_stride, q_out_batch_gap,    # as q
    k_ptr, k_seq_stride, k_head_stride, k_batch_gap,                    # [batch, kv_heads, seq, head_dim] or None
    k_out_ptr, k_out_seq_stride, k_out_head_stride, k_out_batch_gap,    # as k
    cos_ptr, cos_batch_stride, cos_seq_stride, cos_col_stride,          # [batch, seq, rotary_dim or half of it]
    sin_ptr, sin_batch_stride, sin_seq_stride, sin_col_stride,          # as cos
    n_tokens, seq_len, q_heads, k_heads, PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, REPEAT: tl.constexpr,
    INVERSE: tl.constexpr, TRAILING: tl.constexpr, TRANSPOSED: tl.constexpr,
    TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):
    """Rotate q and k, unless they are None. TRANSPOSED applies the transposed map."""
    # Angles lie as the pairs of the rotated vectors do: in the results, or where the transposed map reads.
    INTERLEAVED_ANGLES: tl.constexpr = INTERLEAVED if TRANSPOSED else INTERLEAVED_OUT
    # The division is in 32 bits: in 64 bits it would be slower than the loads that wait for it.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    in_range = token < n_tokens
    batch = (token // seq_len).to(tl.int64)
    seq = (token % seq_len).to(tl.int64)
    token = token.to(tl.int64)
    cos_offset = batch * cos_batch_stride + seq * cos_seq_stride
    sin_offset = batch * sin_batch_stride + seq * sin_seq_stride
    cos_a, cos_b = _load_angles(cos_ptr, cos_offset, cos_col_stride, in_range, PAIRS, INTERLEAVED_ANGLES, REPEAT, BLOCK)
    sin_a, sin_b = _load_angles(sin_ptr, sin_offset, sin_col_stride, in_range, PAIRS, INTERLEAVED_ANGLES, REPEAT, BLOCK)
    if INVERSE:
        sin_a, sin_b = -sin_a, -sin_b
    angles = (cos_a, cos_b, sin_a, sin_b)
    if q_ptr is not None:
        _rotate_heads(
            q_ptr, (q_seq_stride, q_head_stride, q_batch_gap),
            q_out_ptr, (q_out_seq_stride, q_out_head_stride, q_out_batch_gap),
            token, batch, in_range, q_heads, angles, PAIRS, HEAD_DIM,
            INTERLEAVED, INTERLEAVED_OUT, TRAILING, TRANSPOSED, Q_HEADS, BLOCK, REST,
        )
    if k_ptr is not None:
        _rotate_heads(
            k_ptr, (k_seq_stride, k_head_stride, k_batch_gap),
            k_out_ptr, (k_out_seq_stride, k_out_head_stride, k_out_batch_gap),
            token, batch, in_range, k_heads, angles, PAIRS, HEAD_DIM,
            INTERLEAVED, INTERLEAVED_OUT, TRAILING, TRANSPOSED, K_HEADS, BLOCK, REST,
        )
# fmt: on


Options = tuple[str, int, bool, bool, bool]  # pairing, rotary_dim, inverse, keep_dtype, trailing


@choice("rope")
def _launch_shape(n_tokens: int, q_heads: int, k_heads: int, rotary_dim: int, head_dim: int) -> dict[str, int]:
    """Launch choices. A program has one token, reads its angles once, and loops over blocks of 8 heads. With few heads
    it has more tokens. If columns are padded, it has two tokens and one warp. 16 heads of 80 (H200, bfloat16, 16384
    tokens):

        two tokens, one warp     0.066 ms
        one token, two warps     0.097
    """
    half = next_power_of_2(rotary_dim // 2)
    padded = half > rotary_dim // 2
    heads = max(1, min(8, 512 // half))
    q_block, k_block = min(next_power_of_2(q_heads), heads), min(next_power_of_2(k_heads), heads)
    few = max(q_heads, k_heads) <= 8
    tokens, _ = tile(n_tokens, max(q_block, k_block) * half, 4 if few else 2 if padded else 1, 0)
    return {
        "TOKENS": tokens,
        "Q_HEADS": q_block,
        "K_HEADS": k_block,
        "BLOCK": half,
        "REST": next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
        "num_warps": min(8, max(1 if padded else 2, tokens * max(q_block, k_block) * half // 1024)),
    }


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """The strides of tokens and heads, and the gap between the last token of a batch and the next batch.

    A compiled program for any number of tokens cannot have the stride of a batch as a number. As a symbol it would be
    wrong if Inductor pads a product with odd features, because the kernel is not told. The gap is 0 there."""
    batch, head, seq, _ = x.stride()
    return seq, head, batch - x.size(2) * seq  # not shape[2]: it makes a symbol of each size, and torch 2.11 loses one


def _rotate(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    k: torch.Tensor | None,
    k_out: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    options: Options,
    transposed: bool,
) -> None:
    """Write the rotated ``q`` into ``q_out`` and ``k`` into ``k_out``. Either pair may be None."""
    pairing, rotary_dim, inverse, _, trailing = options
    read, written, repeat = _PAIRINGS[pairing]
    if transposed:
        read, written = written, read
    some = q if q is not None else k
    assert some is not None
    batch, _, seq_len, head_dim = some.shape
    # Lists, here and below: Dynamo of torch 2.15 fails on a generator in an autograd.Function.
    q, k = [None if x is None else _unit_stride(x) for x in (q, k)]
    q_heads, k_heads = [0 if x is None else x.shape[1] for x in (q, k)]
    strides = [(0, 0, 0) if x is None else _strides(x) for x in (q, q_out, k, k_out)]
    # A batch of 1 is broadcast.
    cos_strides, sin_strides = [(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)) for x in (cos, sin)]
    n_tokens = batch * seq_len
    shape = _launch_shape(n_tokens, q_heads, k_heads, rotary_dim, head_dim)
    q_strides, q_out_strides, k_strides, k_out_strides = strides
    # fmt: off
    launch(
        _rope_kernel, (cdiv(n_tokens, shape["TOKENS"]),), cos.device,
        q, *q_strides, q_out, *q_out_strides, k, *k_strides, k_out, *k_out_strides,
        cos, *cos_strides, sin, *sin_strides,
        n_tokens, seq_len, q_heads, k_heads, PAIRS=rotary_dim // 2, HEAD_DIM=head_dim,
        INTERLEAVED=read, INTERLEAVED_OUT=written, REPEAT=repeat,
        INVERSE=inverse, TRAILING=trailing, TRANSPOSED=transposed, **shape,
    )
    # fmt: on


def _empty(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised, with these strides. A compiled program keeps only the order of tokens and heads."""
    if not torch.compiler.is_compiling():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # torch.compile merges all calls of empty_strided of one shape into one tensor, and copies it before every write.
    # It does not merge calls of empty.
    if strides[1] >= strides[2]:
        return torch.empty(shape, dtype=dtype, device=device)
    batch, heads, seq_len, head_dim = shape
    return torch.empty((batch, seq_len, heads, head_dim), dtype=dtype, device=device).transpose(1, 2)


class RopeFunction(torch.autograd.Function):
    """Saves only cos and sin. Results and gradients have the memory order of q and k."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, options: Options
    ) -> tuple[torch.Tensor, ...]:
        # Before the results get the memory order of q and k, because the kernel also writes unit strides.
        tensors = [None if x is None else _unit_stride(x) for x in (q, k)]
        if not _PAIRINGS[options[0]].repeat:
            cos, sin = _unit_stride(cos), _unit_stride(sin)
        keep_dtype, angle_dtype = options[3], torch.promote_types(cos.dtype, sin.dtype)
        outputs = [
            None
            if x is None
            else torch.empty_like(x, dtype=x.dtype if keep_dtype else torch.promote_types(x.dtype, angle_dtype))
            for x in tensors
        ]
        (q_in, k_in), (q_out, k_out) = tensors, outputs
        _rotate(q_in, q_out, k_in, k_out, cos, sin, options, transposed=False)
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        ctx.layouts = [
            None if x is None or y is None else (x.shape, y.stride(), x.dtype, x.device)
            for x, y in zip(tensors, outputs, strict=True)
        ]
        ctx.set_materialize_grads(False)
        return tuple(y for y in outputs if y is not None)

    @staticmethod
    @functools.partial(backward_once, is_linear=True)
    def backward(ctx: Any, *d_outs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq_out, dk_out = (*d_outs, None)[:2]
        grads = []
        for d_out, needed, layout in zip((dq_out, dk_out), ctx.needs_input_grad[:2], ctx.layouts, strict=True):
            wanted = needed and d_out is not None
            grads.append(_empty(*layout) if wanted else None)
        dq, dk = grads
        if dq is not None or dk is not None:
            dq_out, dk_out = (None if dq is None else dq_out), (None if dk is None else dk_out)
            _rotate(dq_out, dq, dk_out, dk, cos, sin, ctx.options, transposed=True)
        return dq, dk, None, None, None


@checked_op
def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairing: PairingName = "half",
    rotary_dim: RotaryDim | None = None,
    inverse: bool = False,
    keep_dtype: bool = False,
    trailing: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Rotary position embedding; the formulas stand at the top of this file.

    Args:
        q: [batch, heads, seq, head_dim], float16, bfloat16, float32, or float64 (which runs the reference). Any
            strides: a transposed view of [batch, seq, heads, head_dim] is read where it lies. Never overwritten.
        k: [batch, kv_heads, seq, head_dim], likewise; or None.
        cos, sin: [1 or batch, seq, columns]. If they require a gradient the reference runs; the kernel has none for
            them. A pairing with ``_repeat`` reads them at any strides: both halves of complex numbers, for example.
        pairing: one of ``PAIRINGS``: "half", "interleaved", "interleaved_to_half", or one of these with "_repeat".
        rotary_dim: how many elements of each head are rotated, the first ones: even, and at most head_dim. By default,
            and always but for ``_repeat``, as many as cos has columns; ``_repeat`` reads the first rotary_dim / 2.
        inverse: rotate by the negative angle: sin with the other sign.
        trailing: the last rotary_dim elements are rotated.
        keep_dtype: results have the dtype of q and of k, also where cos and sin are wider.

    Returns:
        The rotated q and k (or q alone, where k is None): new tensors in the same memory order, each in the dtype that
        it promotes to with cos and sin, unless ``keep_dtype``.

    Raises:
        TypeError, ValueError: for an argument of a wrong dtype, shape, device or name.
    """
    options: dict[str, Any] = {"inverse": inverse, "keep_dtype": keep_dtype, "trailing": trailing}
    if not use_triton(q):
        return rope_ref(q, k, cos, sin, pairing=pairing, rotary_dim=rotary_dim, **options)
    rotary_dim = _checked_rotary_dim(q, k, cos, sin, pairing, rotary_dim)
    if torch.compiler.is_compiling():
        # A program is for these numbers alone. torch 2.11 loses a symbol that becomes one inside of an
        # autograd.Function.
        rotary_dim = operator.index(rotary_dim)
        for x in (q, k):
            if x is not None:
                operator.index(x.shape[1]), operator.index(x.shape[3])
    if (
        q.shape[0] * q.shape[2] > 2**31 - 2**16  # the kernel counts tokens in 32 bits
        or torch.float64 in (q.dtype if k is None else k.dtype, cos.dtype, sin.dtype)
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    ):
        return rope_ref(q, k, cos, sin, pairing=pairing, rotary_dim=rotary_dim, **options)
    return RopeFunction.apply(q, k, cos, sin, (pairing, rotary_dim, inverse, keep_dtype, trailing))


def _checked_rotary_dim(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pairing: str,
    rotary_dim: int | None,
) -> int:
    """How many elements of a head are rotated, where all arguments fit."""
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if x is None:
            continue
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}; it must be floating point")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; move it there")
    if q.dim() != 4 or (k is not None and (k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]))):
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {None if k is None else tuple(k.shape)}; they must be "
            "[batch, heads, seq, head_dim] and [batch, kv_heads, seq, head_dim]"
        )
    batch, _, seq_len, head_dim = q.shape
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != seq_len:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; for q of shape {tuple(q.shape)} both must be "
            f"[1 or {batch}, {seq_len}, rotary_dim]"
        )
    columns = cos.shape[-1]
    rotary_dim = columns if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim is {rotary_dim}; it must be even and 2 to {head_dim} (head_dim)")
    fits = rotary_dim <= 2 * columns if _PAIRINGS[pairing].repeat else rotary_dim == columns
    if not fits:
        raise ValueError(
            f"cos and sin have {columns} columns, rotary_dim is {rotary_dim}; {pairing!r} needs "
            + (f"{rotary_dim // 2} columns or more" if _PAIRINGS[pairing].repeat else "as many columns")
        )
    return rotary_dim
