"""cut-cross-entropy 25.1.1: the wheel lacks the module that its page tells users to import."""

import importlib.metadata

import cut_cross_entropy  # noqa: F401

print(importlib.metadata.version("cut-cross-entropy"))
from cut_cross_entropy.transformers import cce_patch  # noqa: E402, F401  (raises ModuleNotFoundError)
