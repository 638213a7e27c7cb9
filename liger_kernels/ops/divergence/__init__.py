"""The divergence of two heads, a student's and a teacher's, over the whole vocabulary."""
