"""What runs inside a cell's environment in addition to the proof and the trainers."""
