"""Speed and memory of the ops, measured on a GPU: ``python -m benchmarks``."""
