"""Whether what was imported before this module has started the GPU's driver, which does not survive a fork.

The server from which processes are forked imports this module last.
"""

from __future__ import annotations

import sys

import torch

WOKEN = torch.cuda.is_initialized()


def report() -> None:
    """End this process with 1 if it was forked from a process that had started the driver."""
    sys.exit(int(WOKEN))
