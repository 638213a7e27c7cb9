"""Logits that a patched forward does not make until somebody reads them, and the losses that never do."""
