"""What of every model of the installed transformers runs on kernels. The gate compares the shares with the accepted
ones. With ``--records DIR``, one record."""

from __future__ import annotations

from pathlib import Path

import pytest

from convergence.files import write_json
from matrix.checks import count


def test_census(request: pytest.FixtureRequest) -> None:
    taken = count.measure()
    folder = request.config.getoption("--records")
    if folder:
        write_json(count.finding(taken), Path(folder) / "census.json")
    shares = count.shares(taken)
    everywhere = ("classes", "norms", "rotary functions", "MLPs", "heads", "parameters", "FLOPs")
    assert [name for name in everywhere if not shares[name] > 0] == []
