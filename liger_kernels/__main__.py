"""``python -m liger_kernels``: what a bug report needs. ``python -m liger_kernels fit MODEL``: what a step takes."""

from __future__ import annotations

import sys

from liger_kernels.environment import report


def main() -> int:
    command, *rest = sys.argv[1:] or [""]
    if command == "fit":
        from liger_kernels.fitting.command import main as fit

        return fit(rest)
    if command:
        print(f"unknown command {command!r}; there is fit, and without a command the report", file=sys.stderr)
        return 2
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
