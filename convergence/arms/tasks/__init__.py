"""What a model is for: how an arm trains it, evaluates it, and what else is observed."""
