"""What ``python -m tools.sanitized`` launches by itself, on the device of the other tests: it runs on a GPU only, and
whoever changes what it calls may not have one."""

from __future__ import annotations

import pytest
import torch

from tools import sanitized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_sanitized_runs(dtype: torch.dtype, device: torch.device) -> None:
    sanitized.slabs(dtype, device.type, rows=4, vocab=20, columns=8)
    sanitized.unit_over_its_gradient(dtype, device.type, rows=4, columns=20)
    sanitized.whole_rows(dtype, 20, device.type)
    sanitized.round_in_place(dtype, device.type)
