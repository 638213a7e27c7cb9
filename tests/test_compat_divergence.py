"""The divergence of trl's distillation trainer on ``linear_divergence``: the same numbers, and trl's own function where
ours does not fit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from convergence.judge.tolerance import three_way
from liger_kernels import trl_divergence, trl_head
from liger_kernels.ops import launches, linear_divergence_ref, reset_launches
from liger_kernels.trl_function import FunctionReplacement
from tests.lifetime_checks import left_by
from tests.linear_cross_entropy_checks import chunks_of

kernels = pytest.importorskip("trl.kernels.chunked_divergence", reason="trl has a divergence of two heads from 1.16")
FUNCTION: Any = kernels.ChunkedDivergenceFunction
TOKENS, HIDDEN, TEACHER, VOCAB = 12, 8, 6, 37
# temperature; scale and softcap of the student, and of the teacher
PLAIN, ALL = (1.0, 1.0, None, 1.0, None), (0.7, 1.7, 5.0, 0.8, 4.0)


@pytest.fixture
def divergence() -> Iterator[FunctionReplacement]:
    """It is installed, and trl's module is there."""
    trl_head.install()
    found = trl_head.current(trl_head.DIVERGENCE)
    assert found is not None
    yield found
    trl_head.uninstall()
    assert "apply" not in vars(FUNCTION)


def heads(device: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    shapes = ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (TOKENS, TEACHER), (VOCAB, TEACHER), (VOCAB,))
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def run(apply: Any, tensors: list[Any], beta: float, options: Any) -> list[Any]:
    """Both results, and the gradients of the student's head."""
    leaves = [t.clone().requires_grad_(i < 3) for i, t in enumerate(tensors)]
    divergence, entropy = apply(*leaves, beta, *options)
    assert not entropy.requires_grad
    upstream = torch.arange(len(divergence), device=divergence.device) - 3.5
    return [divergence.detach(), entropy, *torch.autograd.grad(divergence, leaves[:3], upstream)]


def reference(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, beta, *options) -> Any:
    """As trl's function, by ours in plain torch, of any dtype."""
    names = ("temperature", "logit_scale", "softcap", "teacher_logit_scale", "teacher_softcap")
    head = hidden, weight, teacher_hidden, teacher_weight, beta, bias, teacher_bias
    found = linear_divergence_ref(*head, outputs=("divergence", "entropy"), **dict(zip(names, options, strict=True)))
    return found.divergence, found.entropy.detach()


def as_near_as_trl(ours: list[Any], trls: list[Any], truth: list[Any]) -> None:
    """Ours to float64, as trl's own. A gradient is a matrix product, the divergence and a matrix product."""
    for i, three in enumerate(zip(ours, trls, truth, strict=True)):
        three_way(*three, torch.float32, f"result {i}", chain=3)


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
def test_it_computes_what_trl_computes(divergence, device, beta, options) -> None:
    tensors = heads(device)
    reset_launches()
    ours = run(FUNCTION.apply, tensors, beta, options)
    assert any("divergence" in name for name in launches())
    assert (divergence.ours, divergence.theirs) == (1, 0), divergence.reason
    truth = run(reference, [t.double() for t in tensors], beta, options)
    as_near_as_trl(ours, run(divergence.own, tensors, beta, options), truth)
    assert trl_head.state(trl_head.DIVERGENCE) == "on, 1 calls ran linear_divergence"


def test_the_trainers_sum_has_its_gradients_in_the_forward(divergence, device) -> None:
    tensors = heads(device)
    leaves = [t.clone().requires_grad_(i < 3) for i, t in enumerate(tensors)]
    with chunks_of(5):
        reset_launches()
        loss = FUNCTION.apply(*leaves, 0.3, *ALL)[0].sum() / 7
        forward = launches()
        assert forward["_divergence_bwd_kernel"] == forward["_divergence_scan_kernel"] == 3
        loss.backward()
    assert launches()["_divergence_scan_kernel"] == launches()["_divergence_bwd_kernel"] == 3
    found = {}
    for dtype in (torch.float32, torch.float64):
        others = [t.to(dtype).requires_grad_(i < 3) for i, t in enumerate(tensors)]
        found[dtype] = torch.autograd.grad(reference(*others, 0.3, *ALL)[0].sum() / 7, others[:3])
    as_near_as_trl([leaf.grad for leaf in leaves[:3]], *found.values())


def test_the_trainers_loss(divergence, device) -> None:
    """What the distillation trainer calls, of a batch of which not all positions count."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    hidden, weight, _, teacher_hidden, teacher_weight, _ = heads(device)
    mask = torch.arange(TOKENS, device=device).view(3, 4) % 3
    found = []
    for own in (False, True):
        if own:
            divergence.undo()
        leaves = [hidden.view(3, 4, -1).clone().requires_grad_(), weight.clone().requires_grad_()]
        given = leaves[0], teacher_hidden.view(3, 4, -1), leaves[1], teacher_weight, mask
        loss, entropy, counted = _chunked_divergence_loss(*given, beta=0.5, num_items_in_batch=5)
        found.append([loss.detach(), entropy, counted, *torch.autograd.grad(loss, leaves)])
    assert divergence.ours == 1
    counts = mask.reshape(-1) != 0
    exact = [t.double() for t in (hidden, weight, teacher_hidden, teacher_weight)]
    rows, weight, of_teacher, teacher_weight = exact[0].requires_grad_(), exact[1].requires_grad_(), *exact[2:]
    of_rows, entropy = reference(rows[counts], weight, None, of_teacher[counts], teacher_weight, None, 0.5, *PLAIN)
    grads = torch.autograd.grad(of_rows.sum() / 5, [rows, weight])
    truth = [of_rows.detach().sum() / 5, entropy.sum(), counts.sum(), grads[0].view(3, 4, -1), grads[1]]
    as_near_as_trl(*found, truth)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: [x.double() for x in t], "no kernel takes torch.float64"),
        (lambda t: [*t[:3], t[3].double(), *t[4:]], "no kernel takes torch.float64"),
        (lambda t: [*t[:4], t[4].bfloat16(), t[5].bfloat16()], "teacher_hidden, teacher_weight and teacher_bias are"),
    ],
    ids=["double", "double teacher", "mixed"],
)
def test_tensors_that_only_trl_takes(divergence, device, change, reason) -> None:
    tensors = change(heads(device))
    assert all(map(torch.equal, run(FUNCTION.apply, tensors, 0.3, PLAIN), run(divergence.own, tensors, 0.3, PLAIN)))
    assert (divergence.ours, divergence.theirs) == (0, 1)
    assert divergence.reason.startswith(reason)


NAMES = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias", "beta", "temperature", "scale",
         "softcap", "teacher_scale", "teacher_softcap")  # fmt: skip


def forward(change: Any) -> Any:
    """trl's function, whose forward gets the arguments that ``change(arguments)`` returns."""
    own = FUNCTION.forward

    @functools.wraps(own)  # the signature, too
    def another(ctx: Any, *args: Any) -> Any:
        return own(ctx, *change(dict(zip(NAMES, args, strict=True))).values())

    return {"forward": staticmethod(another)}


def scaled_gradient(number: int) -> Any:
    own = FUNCTION.backward
    return {
        "backward": staticmethod(
            lambda ctx, *grads: tuple(
                g * 1.001 if i == number and g is not None else g for i, g in enumerate(own(ctx, *grads))
            )
        )
    }


CHANGES = {
    "beta": (lambda: forward(lambda given: given | {"beta": 1.0 - given["beta"]}), "divergence is off by "),
    "teacher's scale": (lambda: forward(lambda given: given | {"teacher_scale": 1.0}), "divergence is off by "),
    "teacher's cap": (lambda: forward(lambda given: given | {"teacher_softcap": None}), "divergence is off by "),
    "temperature": (lambda: forward(lambda given: given | {"temperature": 1.0}), "divergence is off by "),
    "hidden": (lambda: scaled_gradient(0), "the gradient of hidden is off by "),
    "weight": (lambda: scaled_gradient(1), "the gradient of weight is off by "),
    "bias": (lambda: scaled_gradient(2), "the gradient of bias is off by "),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_function_that_has_changed_is_left_alone(change, reason, device, monkeypatch, request) -> None:
    for name, value in change().items():
        monkeypatch.setattr(FUNCTION, name, value)
    divergence = request.getfixturevalue("divergence")  # after the change
    assert divergence.probed().startswith(reason)
    monkeypatch.setattr(divergence, "own", lambda *args: "trl's")
    assert FUNCTION.apply(*heads(device), 0.3, *PLAIN) == "trl's"
    assert divergence.ours == 0


def test_its_probe_leaves_nothing(divergence, device) -> None:
    assert not left_by(lambda: divergence.probed())
    assert trl_divergence.DivergenceReplacement.runs == "linear_divergence"
