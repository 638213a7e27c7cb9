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
) -> int:
    """The largest multiple of ``step`` whose ``peak`` is at most ``capacity``; 0 if not even the first fits.

    A peak grows with the tokens, mostly along a line. Then four or five calls find the result.

    Args:
        peak: bytes of a number of tokens.
        capacity: bytes that it may be.
        step: tokens.
        peaks: what is known of ``peak``, by tokens; multiples of ``step`` are not asked for again.
        limit: tokens that the result does not go beyond, whatever fits.
    """
    end = MOST if limit is None else min(MOST, max(0, limit) // step + 1)
    given = {tokens // step: size for tokens, size in (peaks or {}).items() if not tokens % step}
    known = {0: 0, **{n: size for n, size in given.items() if n < end}}  # by multiple of step
    guesses = 0

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = peak(n * step)
        return known[n] <= capacity

    def line() -> tuple[int, int]:
        """Two known points, the larger one at least twice the smaller where there are such: near ones tell no slope."""
        b = max(known)
        return max((n for n in known if n and 2 * n <= b), default=max((n for n in known if n < b), default=0)), b

    def guess(low: int, high: int | None) -> int:
        """The multiple between ``low`` and ``high`` where a line through two known points reaches the capacity."""
        most = (end if high is None else high) - 1
        if guesses > 4 and guesses % 2:  # no line: halve the range, or double what fits, every second time
            return min(2 * low, most) if high is None else (low + high) // 2
        a, b = (low, high) if low and high else line()
        slope = (known[b] - known[a]) / (b - a) if a else 0
        reached = b + (capacity - known[b]) / slope if slope > 0 else 2 * low
        return min(max(int(reached), low + 1), most)

    low = max((n for n, size in known.items() if size <= capacity), default=0)
    high: int | None = None
    if not low:
        first = min(FIRST, end - 1)
        low, high = (first, None) if fits(first) else (0, first)
        if high is not None and high > 1 and fits(1):
            low = 1
        elif high is not None:
            return 0
    while low + 1 < (end if high is None else high):
        n = guess(low, high)
        guesses += 1
        if fits(n):
            low = n
            if (high is None or n + 1 < high) and len(known) > 3 and n + 1 < end and not fits(n + 1):
                high = n + 1
        else:
            high = n
            if n - 1 > low and fits(n - 1):
                low = n - 1
    return low * step
