"""The proof over versions: cells of pinned packages, what runs in each, their records, and the gate before a release.

Nothing here imports ``liger_kernels`` or the proof, but for the files, tables and names of ``convergence``, which need
the standard library only: a cell's stages are processes of their own, in the cell's environment, and what they found is
read from JSON. Only ``matrix.checks`` and ``matrix.trainers`` run inside a cell.
"""
