"""The longest sequence whose step fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

STEP = 256  # tokens; the result is a multiple of this
FIRST = 16  # in steps, like all numbers in this file
MOST = 2**16


def longest(
    peak: Callable[[int], int],
    capacity: int,
    step: int = STEP,
    peaks: Mapping[int, int] | None = None,
    limit: int | None = None,
    near: int = 0,
) -> int:
    """The largest multiple of ``step`` whose ``peak`` is at most ``capacity``; 0 if not even the first fits.

    A peak grows with the tokens, mostly along a line. Then four or five calls find the result; a bend costs more. What
    does not fit may tell no bytes, and memory may end a little below ``capacity``: the search goes away from where a
    line ended in strides that double, and halves the range at most.

    Args:
        peak: bytes of a number of tokens.
        capacity: bytes that it may be.
        step: tokens.
        peaks: what is known of ``peak``, by tokens; multiples of ``step`` are not asked for again.
        limit: tokens that the result does not go beyond, whatever fits.
        near: what somebody has calculated the result to be. Where a line through two known points ends more than a
            sixteenth away from it, ``near`` is tried instead.
    """
    end = MOST if limit is None else min(MOST, max(0, limit) // step + 1)
    given = {tokens // step: size for tokens, size in (peaks or {}).items() if not tokens % step}
    known = {0: 0, **{n: size for n, size in given.items() if n < end}}  # by multiple of step

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = peak(n * step)
        return known[n] <= capacity

    def line() -> tuple[int, int]:
        """Two known points, the larger one at least twice the smaller where there are such: near ones tell no slope."""
        b = max(known)
        return max((n for n in known if n and 2 * n <= b), default=max((n for n in known if n < b), default=0)), b

    def reached(low: int, high: int | None) -> int:
        """Where a line through two known points reaches the capacity."""
        a, b = (low, high) if low and high else line()
        slope = (known[b] - known[a]) / (b - a) if a else 0
        return int(b + (capacity - known[b]) / slope if slope > 0 else 2 * low)

    low = max((n for n, size in known.items() if size <= capacity), default=0)
    high = min((n for n, size in known.items() if n > low and size > capacity), default=None)
    if not low:
        first = min(FIRST, (end if high is None else high) - 1)
        low, high = (first, high) if fits(first) else (0, first)
        if not low and first > 1 and fits(1):
            low = 1
        elif not low:
            return 0
    lines = 0  # that were followed: if the first two do not end at the result, each goes twice as far as the last
    while low + 1 < (top := end if high is None else high):
        n, away = reached(low, high), 1  # in steps: how far it is at least from what is known
        if len(known) > 2:
            hint, near = near // step, 0
            if low < hint < top and abs(n - hint) > hint / 16:
                n = hint
            else:
                away = 2 ** max(0, lines - 1)
                lines += 1
        away = min(away, (top - low) // 2)
        n = max(low + away, min(n, top - away))
        if fits(n):
            low = n
        else:
            high = n
    return low * step
