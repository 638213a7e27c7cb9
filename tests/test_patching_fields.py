"""The output of a patched model as a container: what upstream's own does, result for result and error for error."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import liger_kernels
from tests.patching_checks import batch, tiny

pytestmark = pytest.mark.usefixtures("references_on_a_cpu")
ONE = torch.ones(1)


def set_field(name: str, value: Any) -> Any:
    return lambda out: setattr(out, name, value)


def set_item(name: str, value: Any) -> Any:
    return lambda out: out.__setitem__(name, value)


# What changes an output, and what looks at it. Each of the first is followed by each of the second.
CHANGES = {
    "nothing": lambda out: None,
    **{f"del out.{name}": lambda out, name=name: delattr(out, name) for name in ("logits", "loss", "nothing")},
    "del out.logits, twice": lambda out: (delattr(out, "logits"), delattr(out, "logits")),
    "del out.hidden_states": lambda out: delattr(out, "hidden_states"),
    "del out[...]": lambda out: out.__delitem__("logits"),
    "pop": lambda out: out.pop("logits"),
    "pop(default)": lambda out: out.pop("nothing", None),
    "popitem": lambda out: out.popitem(),
    "popitem(False)": lambda out: out.popitem(last=False),
    "popitem, of what is left": lambda out: (out.popitem(), out.popitem(), out.popitem()),
    "clear": lambda out: out.clear(),
    "move_to_end": lambda out: out.move_to_end("loss"),
    "out.logits = None": set_field("logits", None),
    "out.logits = tensor": set_field("logits", ONE),
    "out.logits = (...)": set_field("logits", (ONE, ONE)),
    "out.loss = None": set_field("loss", None),
    "out.new = tensor": set_field("new", ONE),
    "out[logits] = None": set_item("logits", None),
    "out[logits] = tensor": set_item("logits", ONE),
    "out[new] = tensor": set_item("new", ONE),
    "out.logits = out.logits": lambda out: setattr(out, "logits", out.logits),
    "None, and read": lambda out: (setattr(out, "logits", None), out["logits"]),
    "read": lambda out: out.logits,
    "read an item": lambda out: out["logits"],
    "vars": lambda out: out.__dict__.update(logits=None),
    "vars, del": lambda out: out.__dict__.pop("logits"),
    "setdefault": lambda out: out.setdefault("logits", ONE),
    "update": lambda out: out.update(logits=ONE),
    "|=": lambda out: out.__ior__({"logits": ONE}),
}
READS = {
    "attribute": lambda out: (out.loss, out.logits, out.past_key_values),
    "no attribute": lambda out: out.nothing,
    "item": lambda out: out["logits"],
    "no item": lambda out: out["nothing"],
    "positions": lambda out: (out[0], out[-1]),
    "position": lambda out: out[9],
    "slices": lambda out: (out[:2], out[1:], out[::-1], out[5:]),
    "odd index": lambda out: out[None],
    "get": lambda out: (out.get("logits"), out.get("nothing"), out.get("nothing", 1), out.get("hidden_states", 1)),
    "getattr": lambda out: (getattr(out, "logits", 1), getattr(out, "nothing", 1), getattr(out, "new", 1)),
    "hasattr": lambda out: [hasattr(out, name) for name in ("loss", "logits", "hidden_states", "nothing", "new")],
    "in": lambda out: [name in out for name in ("loss", "logits", "hidden_states", "nothing", "new")],
    "len, bool": lambda out: (len(out), bool(out)),
    "iteration": lambda out: (list(out), [*reversed(out)], list(out.keys())),
    "values": lambda out: (list(out.values()), list(out.items())),
    "to_tuple": lambda out: out.to_tuple(),
    "**": lambda out: dict(**out),
    "dict": dict,
    "|": lambda out: out | {"new": ONE},
    "out.copy()": lambda out: out.copy(),
    "vars": vars,
    "dir": dir,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda out: pickle.loads(pickle.dumps(out)),
    "replace": lambda out: dataclasses.replace(out, past_key_values=None),
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
    "fields": lambda out: [field.name for field in dataclasses.fields(out)],
    "leaves": pytree.tree_leaves,
    "tree_map": lambda out: pytree.tree_map(lambda x: 2 * x if isinstance(x, torch.Tensor) else x, out),
    "==": lambda out: (out == out, out != out, out == {}, out == copy.copy(out)),
    "names": lambda out: (type(out).__name__, type(out).__module__, type(out).__qualname__),
    "type(out)": lambda out: (type(out)(loss=out.loss, logits=out.logits), type(out)(out.loss), type(out)()),
    "setdefault": lambda out: out.setdefault("new", ONE),
}


def plain(value: Any) -> Any:
    """``value`` as what compares: numbers of tensors, lists, and the names of the classes of everything else."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.requires_grad, round(float(value.detach().double().sum()), 3)
    if isinstance(value, dict):
        return type(value).__name__, [(key, plain(item)) for key, item in value.items()], plain(list(vars_of(value)))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    return value if isinstance(value, (int, str, type(None))) else type(value).__name__


def vars_of(value: Any) -> Any:
    return vars(value).items() if hasattr(value, "__dict__") else ()


def outcome(function: Any, out: Any) -> Any:
    try:
        return plain(function(out))
    except Exception as error:
        return type(error)


@pytest.fixture(scope="module")
def models():
    own, patched = (tiny("llama", num_hidden_layers=0) for _ in range(2))
    liger_kernels.patch(patched)
    return own, patched


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_and_whatever_is_read_after_it(models, change):
    inputs = batch()
    for name, read in READS.items():
        found = []
        for model in models:
            out = model(**inputs)
            changed = outcome(CHANGES[change], out)
            found.append((changed, outcome(read, out), plain(out)))
        assert found[0] == found[1], f"{change}, then {name}"


def test_fields_that_are_deleted_are_not_computed(models):
    _, model = models
    out = model(**batch())
    del out.logits
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # computing them now would raise
    assert out.logits is None
    out = model(**batch())
    out.logits = None
    with torch.no_grad():
        model.lm_head.weight.sub_(1)
    assert out.logits is None


def test_the_field_that_has_no_default():
    """An output whose first field is required, and lazy."""
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):
        logits: Any
        loss: Any = None

    model = tiny("llama", num_hidden_layers=0)

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return Output(logits, self.loss_function(logits, labels, self.config.vocab_size))

    model.__class__ = type("Own", (type(model),), {"forward": forward})
    patched = copy.deepcopy(model)
    liger_kernels.patch(patched)
    for change in ("nothing", "del out.logits", "del out.logits, twice", "out.logits = None"):
        for name, read in READS.items():
            if name in ("attribute", "type(out)", "dir"):  # which name past_key_values, need logits, or see the class
                continue
            found = []
            for each in (model, patched):
                out = each(**batch())
                found.append((outcome(CHANGES[change], out), outcome(read, out)))
            assert found[0] == found[1], f"{change}, then {name}"
