"""``python -m liger_kernels``: what a bug report needs."""

from liger_kernels.environment import report

print(report())
