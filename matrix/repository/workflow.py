"""The cells as a workflow of GitHub Actions: one job says which cells there are, and each cell is a job."""

from __future__ import annotations

from pathlib import Path

from convergence.files import write
from matrix.repository import config

FILE = Path(".github") / "workflows" / "cells.yml"
_TEXT = """\
# Every cell of the version matrix. Written by python -m matrix ci --workflow --write.
name: cells

on:
  pull_request:
  push:
    branches: [main]

permissions:
  contents: read

env:
  UV_TORCH_BACKEND: cpu # else every job downloads gigabytes of CUDA

concurrency:
  group: cells-${{ github.ref }}
  cancel-in-progress: true

jobs:
  cells:
    runs-on: ubuntu-24.04
    outputs:
      matrix: ${{ steps.list.outputs.matrix }}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install "liger-kernels[matrix]"
      - id: list
        run: |
          matrix="$(python -m matrix ci)"
          echo "matrix=$matrix" >> "$GITHUB_OUTPUT"

  cell:
    needs: cells
    runs-on: ubuntu-24.04
    timeout-minutes: 45
    strategy:
      fail-fast: false
      matrix: ${{ fromJSON(needs.cells.outputs.matrix) }}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install "liger-kernels[matrix]"
      - run: python -m matrix run "$CELL"
        env:
          CELL: ${{ matrix.cell }}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: record-${{ matrix.cell }}
          path: RECORDS/*.json
          if-no-files-found: error
"""


def text() -> str:
    here = config.here()
    return _TEXT.replace("RECORDS", here.records.relative_to(here.root).as_posix())


def put() -> Path:
    """Write the workflow.

    Raises:
        ValueError: there is another file of that name.
    """
    file = config.here().root / FILE
    if file.exists() and not file.read_text(encoding="utf-8").startswith(_TEXT.partition("\n")[0]):
        raise ValueError(f"{file}: was not written by this command; move it away")
    write(text(), file)
    return file
