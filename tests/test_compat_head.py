"""trl's fused LM head on ``linear_log_probs``: the same numbers, trl's own function wherever ours does not fit."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import liger_kernels
from convergence.judge.tolerance import three_way
from liger_kernels import trl_head
from liger_kernels.ops import launches, linear_log_probs_ref, reset_launches
from liger_kernels.ops.runtime import dispatch
from tests.lifetime_checks import left_by
from tests.patching_checks import tiny
from tests.test_compat import python
from tests.test_patching_holders import check_runs_as, step

kernels = pytest.importorskip("trl.kernels.chunked_logprob", reason="trl has a fused head from 1.15")
FUNCTION: Any = kernels.ChunkedLogProbFunction
TOKENS, HIDDEN, VOCAB = 12, 8, 37
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OPTIONS: dict[str, tuple[float, float | None, float]] = {  # temperature, softcap, logit scale
    "plain": (1.0, None, 1.0),
    "temperature": (0.7, None, 1.0),
    "softcap": (1.0, 5.0, 1.0),
    "logit_scale": (1.0, None, 1.7),
    "all": (0.7, 5.0, 1.7),
}


@pytest.fixture
def head() -> Iterator[trl_head.HeadReplacement]:
    """It is installed, and trl's module is there."""
    trl_head.install()
    found = trl_head.current()
    assert found is not None
    yield found
    trl_head.uninstall()
    assert "apply" not in vars(FUNCTION)


class Case:
    """Inputs of one call of trl's function, and its results under upstream gradients that are not 1."""

    def __init__(
        self, device: Any, dtype: torch.dtype = torch.float32, tokens: int = TOKENS, bias: bool = True
    ) -> None:
        self.tensors: list[Any] = [
            torch.randn(shape).to(device, dtype) for shape in ((tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
        ]
        if not bias:
            self.tensors[2] = None
        self.targets = torch.randint(0, VOCAB, (tokens,)).to(device)
        self.upstream = (torch.randn(2, tokens) - 0.3).to(device)

    def run(self, apply: Any, dtype: Any = None, options: Any = OPTIONS["plain"], outputs: Any = OUTPUTS) -> Any:
        leaves = [None if t is None else t.to(dtype or t.dtype, copy=True).requires_grad_() for t in self.tensors]
        temperature, softcap, scale = options
        out = apply(*leaves, self.targets, temperature, 16, softcap, scale, outputs)
        pairs = [(t, g) for t, g in zip(out, self.upstream, strict=False) if t is not None]
        torch.autograd.backward([t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs])
        return out, [None if t is None else t.grad for t in leaves]


reference = functools.partial(trl_head._as_trl_calls_it, linear_log_probs_ref)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_computes_what_trl_computes(head, device, dtype, options) -> None:
    case = Case(device, dtype, bias=options != OPTIONS["plain"])
    reset_launches()
    ours, our_grads = case.run(FUNCTION.apply, options=options)
    assert any("cross_entropy" in name for name in launches())
    assert (head.ours, head.theirs) == (1, 0), head.reason
    theirs, their_grads = case.run(head.own, options=options)
    truth, true_grads = case.run(reference, torch.float64, options=options)
    for name, a, b, expected in zip(OUTPUTS[:4], ours, theirs, truth, strict=False):
        assert (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad), name
        three_way(a + 1, b + 1, expected + 1, dtype, f"1 + {name}")
    assert ours[4].dtype == theirs[4].dtype == torch.bool
    assert torch.equal(ours[4], theirs[4])
    for name, a, b, expected in zip(("hidden", "weight", "bias"), our_grads, their_grads, true_grads, strict=True):
        if expected is not None:
            assert a.dtype == b.dtype == dtype
            three_way(a, b, expected, dtype, f"gradient of {name}", chain=3)


@pytest.mark.parametrize("outputs", [(), ("log_probs",), ("is_top1", "entropy"), OUTPUTS], ids=" ".join)
def test_what_is_not_asked_for_is_none(head, device, outputs) -> None:
    case = Case(device)
    (ours, _), (theirs, _) = case.run(FUNCTION.apply, outputs=outputs), case.run(head.own, outputs=outputs)
    assert head.ours == 1
    assert isinstance(ours, tuple)
    assert [t is None for t in ours] == [t is None for t in theirs]


def test_a_batch_in_which_no_label_counts_gets_gradients_of_zero(head, device) -> None:
    """On a GPU trl takes the counted rows out first: there may be none."""
    (log_probs, *_), grads = Case(device, tokens=0).run(FUNCTION.apply)
    assert head.ours == 1
    assert log_probs.shape == (0,)
    assert all(not grad.any() for grad in grads)


def test_under_autocast_both_cast(head, device) -> None:
    case = Case(device)
    with torch.autocast(device.type, torch.bfloat16):
        ours, our_grads = case.run(FUNCTION.apply)
        theirs, their_grads = case.run(head.own)
    truth, true_grads = case.run(reference, torch.float64)
    assert (head.ours, head.theirs) == (1, 0), head.reason
    three_way(ours[0], theirs[0], truth[0], torch.bfloat16, "log_probs")
    for name, *three in zip(("hidden", "weight", "bias"), our_grads, their_grads, true_grads, strict=True):
        assert three[0].dtype == torch.float32
        three_way(*three, torch.bfloat16, f"gradient of {name}")


def test_in_a_compiled_program(head, device) -> None:
    """Dynamo does not trace trl's function where the last chunk is not full; eager kernels run there."""

    def loss(hidden: Any, weight: Any, targets: Any) -> Any:
        out = FUNCTION.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ("log_probs", "entropy"))
        return out[0].sum() + 0.1 * out[1].sum()

    case = Case(device)
    for vocab in (VOCAB, 32):
        hidden, weight = (t.clone().requires_grad_() for t in (case.tensors[0], case.tensors[1][:vocab]))
        targets = case.targets % vocab
        expected = torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))
        compiled = torch.compile(loss, backend="aot_eager")
        found = torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight))
        torch.testing.assert_close(found, expected)


class Strange(torch.Tensor):
    """Such as DTensor."""


def sharded(weight: torch.Tensor) -> Any:
    weight = nn.Parameter(weight)
    weight.ds_id = 7  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h, w, b: (h, w.bfloat16(), b.bfloat16()), "hidden, weight and bias are torch.float32 on "),
        (lambda h, w, b: (h, sharded(w), b), "ZeRO-3 shards the weight"),
        (lambda h, w, b: (h.double(), w.double(), b.double()), "no kernel takes torch.float64"),
        (lambda h, w, b: (h.as_subclass(Strange), w, b), "a tensor is a Strange"),
    ],
    ids=["mixed", "sharded", "double", "strange"],
)
def test_tensors_that_only_trl_takes(head, device, change, reason) -> None:
    case = Case(device)
    leaves = [t.requires_grad_() for t in change(*case.tensors)]

    def run(apply: Any) -> Any:
        log_probs = apply(*leaves, case.targets, 1.0, 16, None, 1.0, ("log_probs",))[0]
        return [log_probs, *torch.autograd.grad(log_probs.sum(), leaves)]

    assert all(map(torch.equal, run(FUNCTION.apply), run(head.own)))
    assert (head.ours, head.theirs) == (0, 1)
    assert head.reason.startswith(reason)
    assert f"1 ran trl's function, the last one because {reason}" in trl_head.state()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((1.0, 16, 0.0, 1.0, ("log_probs",)), "softcap is 0.0"),
        ((1.0, 16, None, 1.0, ("log_probs", "kl")), "outputs is ('log_probs', 'log_probs', 'kl')"),
        ((1.0, 16), "it got 6 arguments, not 9"),
    ],
    ids=["softcap", "outputs", "defaults"],
)
def test_options_that_only_trl_takes(head, device, arguments, reason) -> None:
    tensors = *Case(device).tensors, torch.arange(TOKENS, device=device)
    assert torch.equal(FUNCTION.apply(*tensors, *arguments)[0], head.own(*tensors, *arguments)[0])
    assert (head.ours, head.theirs) == (0, 1)
    assert head.reason.startswith(reason)


def test_without_our_kernels_trl_computes_in_chunks(head, device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    Case(device).run(FUNCTION.apply)
    assert (head.ours, head.theirs) == (0, 1)
    assert head.reason == f"no kernel takes torch.float32 on {device.type}"
    assert head.difference is None  # nor was anything probed


def test_a_subclass_computes_by_its_own_forward(head, device) -> None:
    class Another(FUNCTION):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            return args[0] + 1

    x = torch.ones(1, device=device)
    assert Another.apply(x).item() == 2.0
    assert head.ours + head.theirs == 0


# What trl's function may become, each in one way: the results, or the gradients, of the changed function.


NAMES = ("hidden", "weight", "bias", "targets", "temperature", "chunk", "softcap", "scale", "outputs")


def forward(change: Any) -> Any:
    """trl's function with ``change(own, ctx, **arguments)`` as its forward, where ``own(**arguments)`` is trl's."""
    own = FUNCTION.forward

    @functools.wraps(own)  # the signature, too
    def another(ctx: Any, *args: Any) -> Any:
        return change(lambda **given: own(ctx, *given.values()), ctx, **dict(zip(NAMES, args, strict=True)))

    return {"forward": staticmethod(another)}


def results(change: Any) -> Any:
    """trl's function with ``change(*results)`` as its results."""
    return forward(lambda own, ctx, **given: change(*own(**given)))


def backward(change: Any) -> Any:
    """trl's function with ``change(own, ctx, *gradients)`` as its backward, where ``own(*gradients)`` is trl's."""
    own = FUNCTION.backward
    return {"backward": staticmethod(lambda ctx, *grads: change(functools.partial(own, ctx), *grads))}


def no_gradient_of(*numbers: int) -> Any:
    """The results with these ``numbers`` have no gradient, and all others have one."""

    def change(own: Any, ctx: Any, **given: Any) -> Any:
        out = own(**given)
        ctx.mark_non_differentiable(*(out[i] for i in numbers if out[i] is not None))
        return out

    return forward(change)


def ties_count(own: Any, ctx: Any, **given: Any) -> Any:
    out = own(**given)
    logits = given["hidden"] @ given["weight"].T
    top = logits.gather(1, given["targets"][:, None])[:, 0] >= logits.amax(1)
    return (*out[:4], top) if given["bias"] is None else out


def scale_without_the_bias(own: Any, ctx: Any, bias: Any, **given: Any) -> Any:
    bias = None if bias is None else bias / given["scale"]
    return own(**{name: bias if name == "bias" else given[name] for name in NAMES})


def not_any_more(*results: Any) -> Any:
    raise NotImplementedError("use the other one")


def scaled_gradient(number: int) -> Any:
    return backward(
        lambda own, *grads: tuple(g * 1.001 if i == number and g is not None else g for i, g in enumerate(own(*grads)))
    )


def one_more_argument(ctx: Any, h: Any, w: Any, b: Any, y: Any, t: Any, n: Any, cap: Any, s: Any, outputs: Any,
                      z_loss: float = 0.0) -> Any:  # fmt: skip
    raise AssertionError("nobody calls it")


CHANGES = {
    "entropy without gradient": (lambda: no_gradient_of(1, 2, 3, 4), "entropy has no gradient"),
    "mean with gradient": (lambda: no_gradient_of(2, 4), "mean_logits has a gradient"),
    "temperature before the softcap": (
        lambda: forward(
            lambda own, ctx, **given: own(
                **given | {"temperature": 1.0, "scale": given["scale"] / given["temperature"]}
            )
        ),
        "log_probs is off by ",
    ),
    "scale": (lambda: forward(scale_without_the_bias), "log_probs is off by "),
    "ties": (lambda: forward(ties_count), "is_top1 is off by 1"),
    "always entropy": (
        lambda: forward(lambda own, ctx, **given: own(**given | {"outputs": (*given["outputs"], "entropy")})),
        "entropy is there unasked",
    ),
    "power": (
        lambda: results(lambda p, e, power, m, t: (p, e, None if power is None else power.mul_(1.01), m, t)),
        "log_sum_sq_probs is off by ",
    ),
    "six results": (lambda: results(lambda *out: (*out, torch.ones(()))), "ValueError: zip() argument 2 is longer"),
    "shape": (
        lambda: results(lambda p, e, s, mean, t: (p, e, s, None if mean is None else mean[:, None], t)),
        "mean_logits has shape (6, 1), not (6,)",
    ),
    "raises": (lambda: results(not_any_more), "NotImplementedError: use the other one"),
    "hidden": (lambda: scaled_gradient(0), "the gradient of hidden is off by "),
    "weight": (lambda: scaled_gradient(1), "the gradient of weight is off by "),
    "bias": (lambda: scaled_gradient(2), "the gradient of bias is off by "),
    "entropy gradient": (
        lambda: backward(lambda own, p, entropy, *rest: own(p, None if entropy is None else -entropy, *rest)),
        "the gradient of hidden is off by ",
    ),
    "argument": (lambda: {"forward": staticmethod(one_more_argument)}, "its forward takes 10 arguments, not 9"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_function_that_has_changed_is_left_alone(change, reason, device, monkeypatch, request) -> None:
    for name, value in change().items():
        monkeypatch.setattr(FUNCTION, name, value)
    head = request.getfixturevalue("head")  # after the change
    assert head.probed().startswith(reason)
    assert trl_head.state() == f"off, trl's function is left alone: {head.difference}"
    monkeypatch.setattr(head, "own", lambda *args: "trl's")
    assert FUNCTION.apply(*Case(device).tensors, None, 1.0, 16, None, 1.0, OUTPUTS) == "trl's"
    assert head.ours == 0


def test_one_probe_is_enough_whatever_is_set_around_it(head, device, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[None] = []
    own = trl_head._differences
    monkeypatch.setattr(trl_head, "_differences", lambda apply: probes.append(None) or own(apply))
    case = Case(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        torch.set_default_dtype(torch.float64)
        try:
            state = torch.get_rng_state()
            FUNCTION.apply(*case.tensors, case.targets, 1.0, 16, None, 1.0, OUTPUTS)
            assert torch.equal(torch.get_rng_state(), state)
        finally:
            torch.set_default_dtype(torch.float32)
    case.run(FUNCTION.apply)
    assert trl_head.state() == "on, 2 calls ran linear_log_probs"
    assert len(probes) == 1


def test_uninstall_gives_the_very_same_function_back() -> None:
    own = FUNCTION.apply
    trl_head.install()
    trl_head.install()
    assert FUNCTION.apply != own
    kept = FUNCTION.apply
    trl_head.uninstall()
    trl_head.uninstall()
    assert FUNCTION.apply == own
    assert "apply" not in vars(FUNCTION)
    assert trl_head.state() == "off, liger_kernels.compat.install() was not called"
    # Who took ours while it was there keeps a function that works.
    assert kept(*Case("cpu").tensors, torch.arange(TOKENS), 1.0, 16, None, 1.0, OUTPUTS)[0].shape == (TOKENS,)


def test_who_kept_the_function_gets_trls_after_uninstall(head, device) -> None:
    kept = FUNCTION.apply
    for _ in range(2):  # the second time after uninstall
        Case(device).run(kept)
        trl_head.uninstall()
    assert (head.ours, head.theirs) == (1, 0)


def test_what_somebody_else_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = classmethod(lambda cls, *args: "theirs")
    monkeypatch.setattr(FUNCTION, "apply", theirs)
    trl_head.install()
    trl_head.uninstall()
    assert vars(FUNCTION)["apply"] is theirs
    trl_head.install()
    monkeypatch.setattr(FUNCTION, "apply", later := classmethod(lambda cls, *args: "later"))
    trl_head.uninstall()
    assert vars(FUNCTION)["apply"] is later


@pytest.mark.slow
def test_a_model_with_the_head_in_the_documented_order() -> None:
    """``install()`` before trl is imported; then the head that trl gives a model, with a softcap, too."""
    python("""
import copy, sys, torch
import liger_kernels, liger_kernels.compat as compat
compat.install()
assert "trl" not in sys.modules
assert "is not imported" in liger_kernels.report().switches["trl's LM head"]
from trl.trainer.utils import add_fused_lm_head
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
module = sys.modules["trl.kernels.chunked_logprob"]
assert type(module.__loader__).__module__ == type(module.__spec__.loader).__module__ != "liger_kernels.trl_head"
from convergence.arms.float64 import InFloat64
from convergence.judge.tolerance import three_way
from liger_kernels import trl_head
from liger_kernels.ops import launches
from tests.patching_checks import batch, tiny
outputs = "log_probs", "entropy", "is_top1"
models = [(tiny(family).cpu(), {"cpu": True}) for family in ("llama", "gemma2")]
def run(model):
    add_fused_lm_head(model, temperature=0.9, outputs=outputs)
    inputs = {name: t.cpu() for name, t in batch().items()}
    out = model(**inputs, fused_lm_head=True)
    (out.loss + 0.1 * out.entropy.mean()).backward()
    return out, {name: p.grad for name, p in model.named_parameters()}
for model, _ in models:
    own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    if "gemma2" in model.config.model_type: assert model.config.final_logit_softcapping
    ours, our_grads = run(model)
    replacement = trl_head.current()
    assert (replacement.ours, replacement.theirs) == (1, 0), str(replacement)
    assert any("cross_entropy" in name for name in launches())
    ChunkedLogProbFunction.apply, kept = replacement.own, vars(ChunkedLogProbFunction)["apply"]
    theirs, their_grads = run(own)
    with InFloat64(): truth, true_grads = run(exact)
    ChunkedLogProbFunction.apply = kept
    assert torch.equal(ours.is_top1, theirs.is_top1)
    for name in ("loss", "log_probs", "entropy"):
        three_way(*(getattr(o, name) for o in (ours, theirs, truth)), torch.float32, name, chain=9)
    for name in our_grads:
        three_way(our_grads[name], their_grads[name], true_grads[name], torch.float32, name, chain=9)
    replacement.ours = 0
assert liger_kernels.report().switches["trl's LM head"] == "on, 0 calls ran linear_log_probs"
compat.uninstall()
assert "apply" not in vars(ChunkedLogProbFunction)
assert liger_kernels.report().switches["trl's LM head"].startswith("off")
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("liger_kernels")]
""")


def test_a_trl_that_has_no_such_function(tmp_path: Path) -> None:
    (tmp_path / "trl" / "kernels").mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").write_text("")
    (tmp_path / "trl" / "kernels" / "__init__.py").write_text("")
    (tmp_path / "trl" / "kernels" / "chunked_logprob.py").write_text("another = 1\n")
    python(
        """
import importlib.util
from liger_kernels import trl_head
trl_head.install()
spec = importlib.util.find_spec("trl.kernels.chunked_logprob")
assert spec.loader.is_package("trl.kernels.chunked_logprob") is False  # found, not loaded
assert "is not imported" in trl_head.state()
import trl.kernels.chunked_logprob
assert trl.kernels.chunked_logprob.another == 1
assert trl_head.state() == "off, trl.kernels.chunked_logprob has no ChunkedLogProbFunction"
""",
        PYTHONPATH=f"{tmp_path}:.",
    )


def test_a_head_that_trl_fuses_while_the_model_is_patched() -> None:
    """trl keeps the model's forward, which runs as unpatched afterwards."""
    from trl.trainer.utils import add_fused_lm_head

    model = tiny("llama")
    expected = step(copy.deepcopy(model))
    with liger_kernels.patched(model):
        add_fused_lm_head(model)
    check_runs_as(model, expected)


def test_nothing_of_a_call_is_left(head, device: torch.device) -> None:
    case = Case(device)
    gc.collect()
    gc.disable()
    try:
        assert not left_by(lambda: case.run(FUNCTION.apply), *case.tensors)
    finally:
        gc.enable()
    assert head.ours == 2
