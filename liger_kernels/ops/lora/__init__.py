"""Linear layers with low-rank adapters: one, several that share x, and a gated MLP of them."""
