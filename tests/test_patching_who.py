"""Who replaced a forward is named by the code that runs, and nothing is called hidden that runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

import liger_kernels
from liger_kernels.patching.recipes.probe import any_user_hook, package_of
from liger_kernels.patching.swap import recipe_of
from tests.patching_checks import DEVICE, batch, tiny

# A package of somebody's that takes over forwards in each of these ways. ``inner`` is the one that was there.
SOURCE = """
import contextlib, functools, types, torch

def wraps(inner):
    @functools.wraps(inner)
    def forward(*args, **kwargs):
        return inner(*args, **kwargs)
    return forward

def a_lambda(inner):
    return functools.update_wrapper(lambda *args, **kwargs: inner(*args, **kwargs), inner)

def method(inner):
    function = inner.__func__
    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        return function(self, *args, **kwargs)
    return types.MethodType(forward, inner.__self__)

def partial(inner):
    return functools.partial(wraps(inner))

def wrapped_partial(inner):
    return functools.update_wrapper(functools.partial(wraps(inner)), inner)

class Wrapper:
    def __init__(self, inner):
        self.inner = inner
        functools.update_wrapper(self, inner)
    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)
    def run(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

def method_of_an_object(inner):
    return Wrapper(inner).run

def without_gradients(inner):
    return torch.enable_grad()(wraps(inner))

class Timer(contextlib.ContextDecorator):
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass

def in_a_context(inner):
    return Timer()(wraps(inner))

def by_the_class(inner):
    module = inner.__self__
    return lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)
"""
WAYS = (
    *("wraps", "a_lambda", "method", "partial", "wrapped_partial", "Wrapper", "method_of_an_object"),
    *("without_gradients", "in_a_context", "by_the_class"),
)
PACKAGE: dict[str, Any] = {"__name__": "their_package.forwards"}
exec(SOURCE, PACKAGE)


@pytest.fixture
def model():
    return tiny("llama", num_hidden_layers=1)


def reasons(report: Any) -> dict[str, str]:
    return {item.path: item.reason for item in report.left}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["", "model.norm", "model.layers.0.mlp", "model.layers.0.self_attn"])
def test_a_forward_on_the_instance(model, way, path):
    """Before patch() it is left and they are named; after it, too, until this package's is seen to run inside it."""
    before = copy.deepcopy(model)
    part = before.get_submodule(path)
    part.forward = PACKAGE[way](part.forward)
    found = reasons(liger_kernels.patch(before))
    assert found == {path: "their_package replaced its forward on the instance: patch the model before that"}

    liger_kernels.patch(model)
    part = model.get_submodule(path)
    part.forward = PACKAGE[way](part.forward)
    found = reasons(liger_kernels.status(model))
    assert found.keys() == {path}
    assert found[path].startswith("their_package replaced its forward on the instance after patch(), and this")
    model(**batch()).loss.backward()
    report = liger_kernels.status(model)
    assert report.left == []
    assert report.never_ran == []
    assert report.forwards == 1
    assert report.fallbacks == {}
    assert "hidden" not in str(report).replace("hidden states", "")
    part.forward = PACKAGE[way](lambda x, **_: x) if way not in ("method", "by_the_class") else lambda x: x
    assert reasons(liger_kernels.status(model)).keys() == {path}  # what is there now was not seen to run it


@pytest.mark.parametrize("path", ["", "lm_head", "model.norm", "model.layers.0.mlp", "model.layers.0.self_attn"])
def test_status_changes_nothing_on_the_model(model, path):
    """A method that somebody kept on the instance hides nothing: ``status`` leaves it there, ``patch`` removes it."""
    report = liger_kernels.patch(model)
    part = model.get_submodule(path)
    part.forward = part.forward
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert liger_kernels.status(model).left == report.left == []
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    model(**batch()).loss.backward()
    assert liger_kernels.status(model).left == liger_kernels.status(model).never_ran == []
    assert liger_kernels.patch(model).fallbacks == {}
    assert "forward" not in vars(part)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("method", "method_of_an_object", "by_the_class")])
def test_a_forward_of_the_class(model, way, monkeypatch):
    """A class that cannot be told to be a norm any more is left with their name; after patch(), ours is said to run."""
    cls = type(model.model.norm)
    liger_kernels.patch(model)

    def doubled(self, hidden_states):
        return 2 * upstream(self, hidden_states).square()

    upstream = cls.forward
    functools.update_wrapper(doubled, upstream)
    monkeypatch.setattr(cls, "forward", PACKAGE[way](doubled))
    found = set(reasons(liger_kernels.status(model)).values())
    assert len(found) == 1
    assert found.pop().startswith("their_package replaced the forward of its class after patch(), and that one runs")


def test_a_head_whose_forward_somebody_replaced(model):
    """Its logits are theirs, and the loss over them is ours: nothing of it is hidden."""
    for kernels in (None, ["cross_entropy"]):
        patched = copy.deepcopy(model)
        liger_kernels.patch(patched, kernels)
        patched.lm_head.forward = PACKAGE["wraps"](patched.lm_head.forward)
        torch.testing.assert_close(patched(**batch()).loss, model(**batch()).loss)
        report = liger_kernels.status(patched)
        who = "their_package replaced its forward on the instance after patch()"
        says = {"lm_head": f"{who}: it computes its logits, whose loss is fused"}
        assert reasons(report) == (says if kernels is None else {})
        counted = {"the head's forward was replaced on the instance by their_package": 1}
        assert report.fallbacks == (counted if kernels is None else {})


def test_of_a_compiled_forward_nothing_is_said(model):
    liger_kernels.patch(model)
    model.forward = torch.compile(model.forward, backend="eager")
    assert liger_kernels.status(model).left == []


def test_decorators_that_nobody_wrote_a_function_for(model):
    """torch's decorator around the forward that was there is all that can be named."""
    for path, decorate, who in (
        ("", torch.enable_grad(), "torch"),
        ("model.norm", functools.partial, "somebody"),
        ("model.layers.0.mlp", lambda inner: torch.no_grad()(functools.partial(inner)), "torch"),
    ):
        part = model.get_submodule(path)
        part.forward = decorate(part.forward)
        text = f"{who} replaced its forward on the instance: patch the model before that"
        assert reasons(liger_kernels.patch(copy.copy(part)))[""] == text
        del part.forward
        liger_kernels.patch(model)
        part.forward = decorate(part.forward)
        assert reasons(liger_kernels.status(model))[path].startswith(f"{who} replaced its forward")
        del part.forward
        liger_kernels.unpatch(model)


class Callable:
    def __call__(self, *args):
        return args


@pytest.mark.parametrize(
    ("function", "package"),
    [
        (len, "builtins"),
        (torch.relu, "torch"),
        (torch.nn.functional.relu, "torch"),
        (functools.lru_cache(PACKAGE["wraps"](len)), "their_package"),
        (functools.partial(functools.partial(PACKAGE["wraps"](nn.Linear.forward), None), None), "their_package"),
        (Callable(), "tests"),
        (Callable().__call__, "tests"),
        (Callable, "tests"),
        (nn.Linear(1, 1), "torch"),
        (torch.compile(PACKAGE["wraps"](nn.Linear.forward), backend="eager"), "their_package"),
        (torch.compiler.disable(PACKAGE["wraps"](nn.Linear.forward)), "their_package"),
        (contextlib.nullcontext, "contextlib"),
        (types.FunctionType((lambda: None).__code__, {}), ""),
        (object(), ""),
        (None, ""),
    ],
)
def test_whatever_can_be_called(function, package):
    assert package_of(function) == package


def test_a_hook_that_is_dressed_as_a_sharding_packages():
    """It wants what the module computes, whatever it copied its name from."""

    def hook(module, args, output):
        raise AssertionError

    hook.__module__ = "torch.distributed.fsdp"
    assert not any_user_hook([{0: hook}])
    dressed = functools.wraps(hook)(lambda module, args, output: None)
    assert any_user_hook([{0: dressed}])
    assert not any_user_hook([{0: torch.compiler.disable(functools.partial(hook))}])


def test_a_forward_that_ran_inside_theirs_is_patched_again_below_it(model):
    """They were there first, but what they call does what the class does."""
    with liger_kernels.patched(model):
        model.forward = PACKAGE["wraps"](model.forward)
        model(**batch())
    expected = model(**batch()).loss
    assert recipe_of(model) is None
    report = liger_kernels.patch(model, ["cross_entropy"])
    assert report.left == []
    torch.testing.assert_close(model(**batch()).loss, expected)
    assert report.forwards == 1
    assert expected.device.type == DEVICE.type
