"""Where a candidate is from: this process's code, another commit, another environment, or a run that kept it."""
