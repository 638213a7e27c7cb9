"""Long runs: does the loss of a patched model stay among those of unpatched ones, over thousands of steps?

Losses of single steps say little late in a run: training is chaotic, and two runs whose weights began one unit in the
last place apart go different ways. So the baseline's replicas show how far honest runs part, and the candidate's loss,
averaged over a block of steps, is compared with theirs. An honest candidate is one more of these runs: in every block

    t = |candidate - mean| / (deviation * sqrt(1 + 1 / n)),    over the n losses of baseline and replicas

is Student's with n - 1 degrees of freedom. One of :data:`BLOCKS` is beyond the bound with a chance of at most
:data:`FALSE_ALARM`, whenever one looks and however blocks hang together: each has its share of that chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from convergence.arms.quantities import LOSS, Finding, Moment
from convergence.judge import tolerance
from convergence.judge.verdict import Evidence, judged

if TYPE_CHECKING:
    from convergence.models.data import Batch

PHASE, STATISTIC = "long run", Finding.DISTANCE_FROM_THE_BAND.value
LONG = 100  # from so many steps on, a checkpoint's run is a long one
BLOCKS = 20
FALSE_ALARM = 1e-3


def train(model: Any, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
    """The loss of every step: float64 [steps], on the CPU. Nobody waits for the GPU before the last one."""
    losses = []
    for batch in (batch.to(device) for batch in batches):
        model.zero_grad(set_to_none=True)
        loss = model(**batch.inputs(), labels=batch.labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def blocks(curve: torch.Tensor) -> dict[Moment, float]:
    """The mean loss of every block of steps. The last ones may have a step more than the first."""
    ends = [round(len(curve) * (i + 1) / BLOCKS) for i in range(BLOCKS)]
    return {
        Moment(PHASE, f"steps {start + 1} to {end}"): float(curve[start:end].mean())
        for start, end in zip([0, *ends], ends, strict=False)
        if end > start
    }


def curves(honest: Sequence[torch.Tensor], candidate: torch.Tensor) -> dict[str, dict[str, float]]:
    """For the record: of every block the loss of baseline and candidate, and the lowest and highest of all unpatched
    runs."""
    baseline, *_ = others = [blocks(curve) for curve in honest]
    band = {at: [other[at] for other in others] for at in baseline}
    return {
        "baseline": {str(at): loss for at, loss in baseline.items()},
        "candidate": {str(at): loss for at, loss in blocks(candidate).items()},
        "lowest": {str(at): min(losses) for at, losses in band.items()},
        "highest": {str(at): max(losses) for at, losses in band.items()},
    }


def judge(honest: Sequence[torch.Tensor], candidate: torch.Tensor) -> Iterator[Evidence]:
    """Judge the curve [steps] of the candidate by those of baseline and replicas."""
    bound = student_bound(len(honest) - 1, FALSE_ALARM / BLOCKS)
    others = [blocks(curve) for curve in honest]
    for at, own in blocks(candidate).items():
        losses = torch.tensor([other[at] for other in others], dtype=torch.float64)
        mean = float(losses.mean())
        # Where all of them agree to the last bit, one rounding is no fault.
        deviation = max(float(losses.std()), tolerance.unit_roundoff(torch.float32) * abs(mean))
        value = abs(own - mean) / (deviation * math.sqrt(1 + 1 / len(losses)))
        shown = f"{own:.6g}, where others have {float(losses.min()):.6g} to {float(losses.max()):.6g}"
        yield from judged(LOSS, at, STATISTIC, value, bound, shown=f"{value:.3g} ({shown})")


def student_bound(freedom: int, chance: float) -> float:
    """What Student's t with ``freedom`` degrees, an odd number, exceeds in size with this chance."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, freedom) > chance else (low, middle)
    return high


def _tail(t: float, freedom: int) -> float:
    """The chance that \\|T\\| > t: Abramowitz and Stegun, 26.7.3, for an odd number of degrees of freedom."""
    assert freedom % 2 == 1, "its closed form is another for an even number"
    angle = math.atan(t / math.sqrt(freedom))
    term, total = math.cos(angle), 0.0
    for k in range(1, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    return 1 - 2 / math.pi * (angle + math.sin(angle) * total)
