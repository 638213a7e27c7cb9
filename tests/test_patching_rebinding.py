"""Methods with other functions under the names of globals: the module's own are live, and Dynamo finds them all."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from liger_kernels.patching.recipes.rebinding import rebind

SOURCE = """
import torch

TABLE = {"factor": 2.0}

def turn(x):
    return -x

def forward(x):
    y = turn(x) * TABLE["factor"]
    torch._dynamo.graph_break()
    return turn(y.relu()) + TABLE["factor"]
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("modeling_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo imports it
    exec(SOURCE, module.__dict__)
    return module


def rebound(module: types.ModuleType) -> types.FunctionType:
    return rebind(module.forward, lambda name, function: (lambda x: 10 * x) if name == "turn" else None)


def test_only_the_copy_calls_another_function(module: types.ModuleType) -> None:
    before, x = dict(vars(module)), torch.tensor([1.0, -1.0])
    assert rebound(module)(x).tolist() == [202.0, 2.0]
    assert module.forward(x).tolist() == [2.0, 0.0]
    assert vars(module) == before


def test_functions_are_asked_for_in_the_order_of_the_code(module: types.ModuleType) -> None:
    """A report lists what was found in the same order in every process."""
    names, asked = [f"turn_{letter}" for letter in "hcfagbde"], []
    exec("\n".join(f"def {name}(x): return x" for name in names), module.__dict__)
    exec(f"def forward(x): return [{', '.join(f'{name}(x)' for name in names)}]", module.__dict__)
    rebind(module.forward, lambda name, function: asked.append(name))
    assert asked == names


def test_names_are_those_of_the_module_at_the_moment_of_the_call(module: types.ModuleType) -> None:
    forward, x, turn = rebound(module), torch.ones(1), module.turn
    vars(module).update(TABLE={"factor": 3.0})
    assert forward(x).tolist() == [303.0]
    vars(module).update(turn=lambda x: -2 * x)  # what the copy calls in its place stands for another function
    assert forward(x).tolist() == module.forward(x).tolist() == [3.0]
    vars(module).update(turn=turn)
    assert forward(x).tolist() == [303.0]
    scope = forward.__globals__
    vars(module)["later"] = 1
    assert (scope["later"], scope.get("later"), "later" in scope) == (1, 1, True)
    del vars(module)["TABLE"]
    assert "TABLE" not in scope
    assert scope.get("TABLE", 0) == 0
    with pytest.raises(NameError, match="TABLE"):
        forward(x)


def test_a_graph_break_inside_makes_the_copy_a_frame_of_its_own(module: types.ModuleType) -> None:
    """As a vision tower's attention has it, which reads the lengths of its windows."""
    forward, x = rebound(module), torch.tensor([1.0, -1.0], requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: 2 * forward(x + 1) + 1, backend="aot_eager")
    for _ in range(2):
        y = compiled(x)
        assert y.tolist() == (2 * forward(x + 1) + 1).tolist()
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [400.0, 0.0]
