"""Real trainers on tiny models: ``python -m pytest matrix/trainers --records DIR`` in a cell's environment.

:mod:`material` makes models, tokenizer and data; :mod:`cases` is the table of trainers, each as the installed trl has
it; :mod:`observe` trains one arm of a case and writes down what it shows; ``test_trainers.py`` judges patched arms
with the statistics of the proof; ``test_flags.py`` does the same through upstream's own flags; ``test_incidents.py``
holds what once went wrong in the field.
"""
