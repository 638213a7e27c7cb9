"""Time, memory and errors of a LoRA or QLoRA step of an 8B shape, ours and its peers', each in a process of its own."""
