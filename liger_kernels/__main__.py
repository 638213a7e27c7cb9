"""``python -m liger_kernels``: what a bug report needs. ``python -m liger_kernels fit MODEL``: what a step takes."""

from __future__ import annotations

import sys

from liger_kernels.environment import report


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "fit":
        from liger_kernels.fitting.command import main as fit

        return fit(sys.argv[2:])
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
