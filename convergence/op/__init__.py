"""The proof of a single op: is it the same mathematics as its reference, and does it behave as an op of torch does?"""
