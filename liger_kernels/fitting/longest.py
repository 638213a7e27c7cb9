"""The longest sequence whose step fits."""

from __future__ import annotations

from collections.abc import Callable

STEP = 256  # tokens; the result is a multiple of this
FIRST = 16  # in steps, like all numbers in this file
MOST = 2**16


def longest(peak: Callable[[int], int], capacity: int, step: int = STEP) -> int:
    """The largest multiple of ``step`` whose ``peak`` is at most ``capacity``; 0 if not even the first fits.

    A peak grows with the tokens, mostly along a line. Then four or five calls find the result."""
    known = {0: 0}  # by multiple of step

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = peak(n * step)
        return known[n] <= capacity

    def guess(low: int, high: int | None) -> int:
        """The multiple between ``low`` and ``high`` where a line through two known points reaches the capacity."""
        most = (MOST if high is None else high) - 1
        if high is not None and len(known) > 6 and len(known) % 2:  # no line: halve the range every second time
            return (low + high) // 2
        measured = sorted(n for n in known if n)
        a, b = (low, high) if low and high else measured[-2:] if len(measured) > 1 else (0, 0)
        slope = (known[b] - known[a]) / (b - a) if b > a else 0
        reached = b + (capacity - known[b]) / slope if slope > 0 else 2 * low
        return min(max(int(reached), low + 1), most)

    low, high = (FIRST, None) if fits(FIRST) else (0, FIRST)
    if high is not None and fits(1):
        low = 1
    elif high is not None:
        return 0
    while high is None or high - low > 1:
        n = guess(low, high)
        if fits(n):
            low = n
            if n + 1 == MOST:
                break
            if (high is None or n + 1 < high) and len(known) > 3 and not fits(n + 1):
                high = n + 1
        else:
            high = n
            if n - 1 > low and fits(n - 1):
                low = n - 1
    return low * step
