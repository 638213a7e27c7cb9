"""The kernel of docs/how-to/add-an-op.md and write-a-recogniser.md does what the pages say."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import liger_kernels
from liger_kernels.patching import register
from liger_kernels.patching.modules import kernel_names
from tests.pages import write_modules


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the pages."""
    names = write_modules(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    wanted = ("relu_squared", "recogniser", "use")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in wanted})
    for name in names:
        sys.modules.pop(name, None)


class ReLUSquared(nn.Module):
    def forward(self, x):
        return torch.square(nn.functional.relu(x))


class Mlp(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 24), act, nn.Linear(24, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def run(model: nn.Module) -> list[torch.Tensor]:
    """Output and gradients, of the input, too, in float64."""
    torch.manual_seed(0)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    y = model.double()(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def test_the_pages_kernel_replaces_its_module_and_goes_again(page, monkeypatch):
    from transformers.activations import ReLUSquaredActivation

    before, calls = kernel_names(), []
    monkeypatch.setattr(page.recogniser, "relu_squared", lambda x: calls.append(1) or page.relu_squared.relu_squared(x))
    model = nn.Sequential(Mlp(ReLUSquaredActivation()), Mlp(ReLUSquared()), Mlp(nn.GELU()), nn.RMSNorm(8, eps=1e-6))
    outputs = []
    report = page.use.train_with_relu_squared(model, lambda patched: outputs.append(run(patched)))
    assert [r.path for r in report.replaced if r.kernel == "relu_squared"] == ["0.act", "1.act"]
    assert report.counts() == {"relu_squared": 2, "rms_norm": 1}
    assert calls == [1, 1]
    assert report.kernels == (*before[:-2], "relu_squared", *before[-2:])
    for got, expected in zip(outputs[0], run(model), strict=True):
        torch.testing.assert_close(got, expected)
    assert type(model[0].act) is ReLUSquaredActivation
    assert kernel_names() == before


def test_a_registered_kernel_is_chosen_by_name_copied_and_unpatched(page):
    unregister = register(page.recogniser.RELU_SQUARED)
    try:
        model = nn.Sequential(Mlp(ReLUSquared()), nn.RMSNorm(8, eps=1e-6))
        assert liger_kernels.patch(model, ["relu_squared"]).counts() == {"relu_squared": 1}
        with pytest.raises(ValueError, match="there are kernels named \\['relu_squared'\\] already"):
            register(page.recogniser.RELU_SQUARED)
    finally:
        unregister()
    for one, other in zip(run(copy.deepcopy(model)), run(model), strict=True):  # it stays patched
        assert torch.equal(one, other)
    liger_kernels.unpatch(model)
    assert type(model[0].act) is ReLUSquared
    with pytest.raises(ValueError, match="unknown kernels \\['relu_squared'\\]"):
        liger_kernels.patch(model, ["relu_squared"])


class NoGradient(ReLUSquared):
    def forward(self, x):
        return super().forward(x).detach()


class Leaky(ReLUSquared):
    def forward(self, x):
        return super().forward(x) + 1e-4 * x


@pytest.mark.parametrize("act", [Leaky(), NoGradient(), nn.ReLU(), nn.Identity()], ids=lambda act: type(act).__name__)
def test_the_pages_recogniser_leaves_other_functions(page, act):
    assert page.recogniser.candidate(act)
    assert page.recogniser.recognise(act) == ()


def test_what_is_registered_last_is_asked_first(page):
    """So that it may take what another recogniser would leave, or take."""
    from dataclasses import replace

    def recognise(module):
        return ("mine",) if isinstance(module, nn.RMSNorm) else ()

    unregister = register(replace(page.recogniser.RELU_SQUARED, candidate=lambda module: True, recognise=recognise))
    try:
        report = liger_kernels.patch(nn.Sequential(nn.RMSNorm(8, eps=1e-6)))
    finally:
        unregister()
    assert report.counts() == {"rms_norm": 1}
    assert [item.reason for item in report.left] == ["mine"]
