"""Real trainers on tiny models: ``python -m pytest matrix/trainers --records DIR`` in a cell's environment.

:mod:`material` makes models, tokenizer and data; :mod:`cases` is the table of trainers, each as the installed trl has
it. The proof trains and judges the arms (:mod:`convergence.trainers`). ``test_trainers.py`` patches models,
``test_flags.py`` lets upstream's own flags patch them, and ``test_incidents.py`` holds what once went wrong in the
field.
"""
