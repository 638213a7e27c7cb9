"""What is trained: mini models, models of real size, checkpoints, and the data."""
