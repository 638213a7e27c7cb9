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

    A peak grows with the tokens, mostly along a line. Then four or five calls find the result; a bend costs more.

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
    missed = False  # whether the last line ended more than a step away from the result
    while low + 1 < (end if high is None else high):
        most = (end if high is None else high) - 1
        n, beside = reached(low, high), len(known) > 2
        hint, near = (near // step, 0) if beside else (0, near)
        if low < hint <= most and abs(n - hint) > hint / 16:
            n, beside = hint, False
        elif missed:  # what does not fit costs as much as what does: go a quarter further, or halve the range
            n, beside = max(n, low + low // 4) if high is None else (low + high) // 2, False
        n = min(max(n, low + 1), most)
        missed = beside
        if fits(n):
            low = n
            if beside and n < most and not fits(n + 1):
                high = n + 1
        else:
            high = n
            if beside and n - 1 > low and fits(n - 1):
                low = n - 1
    return low * step
