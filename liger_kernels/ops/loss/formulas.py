"""The formulas of cross entropy for elements and rows, as functions that its kernels inline.

An option that is off is None, so that a program is compiled without it. What belongs together goes through the
functions as a tuple: ``scaling`` is (logit_scale, softcap, inverse temperature), where without a softcap logit_scale
has the temperature in it and with one is a number; ``terms`` is (label_smoothing, z_loss); ``smoothing`` is
(label_smoothing, the sum of the class weights); ``entropy`` is (the upstream gradient of the entropy, entropy - log
total), both [rows]. PRECISE is for float32 logits.
"""

from __future__ import annotations

from liger_kernels.ops.runtime.dispatch import INTERPRET, libdevice, tl, triton

# A GPU has an instruction for 2^y. On the way from exp(x) to 2^(x * log2(e)) the product is rounded: x = -20 loses 20
# units of float32's roundoff. That is nothing beside the rounding of 16-bit logits, where putting it back would cost a
# sixth of the time.
_COMPILED = tl.constexpr(not INTERPRET)
_LOG2_E = tl.constexpr(1.44269502162933349609375)  # log2(e) in float32 ...
_LOG2_E_REST = tl.constexpr(1.92596299112661746e-8)  # ... and what that leaves
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    """exp(x) for x <= 0. PRECISE puts back, to first order, what rounding the exponent of 2 loses: 3 ulp."""
    if not _COMPILED:
        y = tl.exp(x)
    elif PRECISE:
        x = tl.where(x < -200.0, -200.0, x)  # 0 in float32; an infinite x would be infinity - infinity below
        power = x * _LOG2_E
        lost = tl.fma(x, _LOG2_E, -power) + x * _LOG2_E_REST
        y = libdevice.exp2(power)  # flushes to zero below 2^-126, which spares three instructions
        y = tl.fma(y, lost * _LN_2, y)
    else:
        y = libdevice.exp2(x * _LOG2_E)
    return y


@triton.jit
def as_float32(x):  # a number of the host, which Inductor passes as float64
    return tl.full((), x, tl.float32)


@triton.jit
def log1p(x):
    """log(1 + x) for 0 <= x <= 1 without cancellation (Kahan; Goldberg 1991, theorem 4)."""
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0.0, x, tl.log(u) * (x / tl.where(d == 0.0, 1.0, d)))


@triton.jit
def quotient(x, y, PRECISE: tl.constexpr):
    """x / y. PRECISE rounds it to nearest; Triton's own division of float32 may be off by 2 ulp."""
    if PRECISE:
        q = tl.div_rn(x, y)
    else:
        q = x / y
    return q


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh to 2 ulp (Cephes tanhf): near zero an odd polynomial, because there the exponential form cancels."""
    a = tl.abs(x)
    s = x * x
    p = tl.fma(s, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(p, s, -5.37397155531e-2)
    p = tl.fma(p, s, 1.33314422036e-1)
    p = tl.fma(p, s, -3.33332819422e-1)
    e = exp(-2.0 * a, PRECISE)
    far = quotient(1.0 - e, 1.0 + e, PRECISE)
    return tl.where(a < 0.625, tl.fma(p * s, x, x), tl.where(x < 0.0, -far, far))


@triton.jit
def scaled_logits(x, scaling, PRECISE: tl.constexpr):
    """z of the formula, from the raw logits in float32."""
    logit_scale, softcap, inverse_temperature = scaling
    if softcap is not None:
        softcap = as_float32(softcap)
        z = softcap * tanh(quotient(x * as_float32(logit_scale), softcap, PRECISE), PRECISE)
        if inverse_temperature is not None:
            z *= as_float32(inverse_temperature)
    elif logit_scale is not None:
        z = x * as_float32(logit_scale)
    else:
        z = x
    return z


@triton.jit
def softcap_slope(x, scaling, PRECISE: tl.constexpr):
    """dz/dx under a cap: logit_scale times 1 - tanh^2, in a form that does not cancel where the cap saturates."""
    logit_scale, softcap, inverse_temperature = scaling
    logit_scale = as_float32(logit_scale)
    e = exp(-2.0 * tl.abs(quotient(x * logit_scale, as_float32(softcap), PRECISE)), PRECISE)
    if inverse_temperature is not None:
        logit_scale *= as_float32(inverse_temperature)
    return logit_scale * 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def finished_grad(
    grad, e, below, x, weight, inverse, upstream, vocab, scaling, smoothing, entropy, PRECISE: tl.constexpr
):
    """``grad`` with what smoothing, the entropy and a cap make of it; ``below`` is z - max, ``e`` its exponential,
    ``weight`` the classes' weights."""
    label_smoothing, weight_sum = smoothing
    _, softcap, _ = scaling
    if label_smoothing is not None:
        grad += as_float32(label_smoothing) / vocab * (weight_sum * (e * inverse) - weight) * upstream
    if entropy is not None:
        upstream_of_entropy, shift = entropy
        grad -= upstream_of_entropy * (e * inverse) * tl.where(e > 0.0, below + shift, 0.0)
    if softcap is not None:
        grad *= softcap_slope(x, scaling, PRECISE)
    return grad


@triton.jit
def read_target(target, ignore_index, vocab, first, classes):
    """The rows' targets (-1 where there is none), whether a row counts, and whether its target is out of range; then
    the target's column and whether it is one of the ``vocab`` columns. They are all classes, or those from ``first`` on
    of ``classes``.

    The kernels load ``target`` themselves. From a function that was given the pointer, torch.compile would conclude
    that what is stored at the target's column is stored into the targets, and would have a copy of them overwritten.
    """
    target = target.to(tl.int64)
    ignored = target == ignore_index
    known = vocab
    if classes is not None:
        known = classes
    in_range = (target >= 0) & (target < known)
    counts = in_range & (ignored == 0)
    target = tl.where(counts, target, -1).to(tl.int32)
    column = target
    here = counts
    if first is not None:
        column = target - first
        here = counts & (column >= 0) & (column < vocab)
    return target, counts, (in_range == 0) & (ignored == 0), column, here
