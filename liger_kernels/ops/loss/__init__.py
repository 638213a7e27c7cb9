"""The loss: over logits, and from hidden states by a head that never makes them all."""
