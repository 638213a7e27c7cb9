"""Runs of a model, patched and not, that are observed: in a process, in set-ups of several, in float64, at size."""
