"""Which step, kernel, module and pass a failed verdict comes from."""
