"""The modules that a kernel can stand for: what is recognised, by what it computes, and what runs in its place."""
