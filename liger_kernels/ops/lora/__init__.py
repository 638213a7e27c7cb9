"""Linear layers with low-rank adapters: one, several that share x, a gated MLP of them, and experts."""
