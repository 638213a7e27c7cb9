"""PEFT's adapters: how a layer of them is recognised, read at each call, and run within the ops."""
