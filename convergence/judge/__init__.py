"""Whether two runs are the same mathematics."""
