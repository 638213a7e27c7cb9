"""Chooses the device before anything imports Triton: without a GPU, kernels run in Triton's interpreter."""

from __future__ import annotations

pytest_plugins = ["convergence.plugin"]
