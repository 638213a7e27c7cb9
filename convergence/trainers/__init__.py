"""The proof with trainers: the arms of a case train through transformers' Trainer, trl's, or one of that form."""
