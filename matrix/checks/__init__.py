"""What runs inside a cell's environment, beside the proof and the trainers."""
