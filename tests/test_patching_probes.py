"""How a probe is made and kept: it leaves no trace, nothing reaches it, and what computes the same is probed once."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import liger_kernels
from liger_kernels.patching import modules
from liger_kernels.patching.recipes.glu import recognise_glu
from liger_kernels.patching.recipes.norms import NormRecipe, recognise_norm
from liger_kernels.patching.recipes.recogniser import fingerprint
from tests.patching_checks import DEVICE, EVERYTHING, tiny
from tests.test_patching_recognise import Mlp, Norm


def test_probing_leaves_no_trace():
    module = Mlp()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    before = dict(vars(module))
    recognise_glu(module)
    recognise_norm(Norm())
    assert vars(module) == before
    assert torch.equal(torch.rand(3), expected), "probing used the global random state"


# What is set around a probe does not reach it, and what watches modules does not see it.


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_is_set_around_the_patch_does_not_reach_the_probes(around):
    model = tiny("llama")
    with AROUND[around]():
        report = liger_kernels.patch(model)
    assert report.counts() == EVERYTHING["llama"]
    assert report.left == []


def test_a_model_that_is_loaded_in_16_bits_after_the_patch_of_its_class_has_every_kernel(tmp_path):
    import transformers

    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    liger_kernels.apply_liger_kernel_to_llama(fused_linear_cross_entropy=True)
    try:
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    finally:
        liger_kernels.revert_liger_kernel()
    assert model.dtype == torch.bfloat16
    assert liger_kernels.status(model).counts() == EVERYTHING["llama"]


def test_no_hook_sees_a_probe():
    module = torch.nn.modules.module
    model, seen = tiny("llama"), []

    def see(*args):
        seen.append(args)

    for part in model.modules():
        part.register_forward_hook(see)
        part.register_forward_pre_hook(see)
    handles = [
        module.register_module_forward_hook(see),
        module.register_module_forward_pre_hook(see),
        module.register_module_full_backward_hook(see),
        module.register_module_parameter_registration_hook(see),
        module.register_module_module_registration_hook(see),
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
            report = liger_kernels.patch(model)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == []
    assert report.counts() == EVERYTHING["llama"]


def test_a_probe_changes_no_running_statistics():
    class Counting(Norm):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x):
            self.rows += len(x)
            return super().forward(x)

    norm = Counting()
    assert isinstance(recognise_norm(norm), NormRecipe)
    assert norm.rows == 0


# Modules that compute the same are probed once; whatever may compute something else is probed for itself.


class Activation(nn.Module):
    """Something in an attribute, a buffer or a parameter, which decides."""

    def __init__(self, inside):
        super().__init__()
        if isinstance(inside, torch.Tensor) and not isinstance(inside, nn.Parameter):
            self.register_buffer("inside", inside)
        else:
            self.inside = inside

    def forward(self, x):
        return self.inside(x) if callable(self.inside) else F.silu(x) * self.inside


def tanh_gelu():
    return nn.GELU(approximate="tanh")


def partial_gelu(**settings):
    return Activation(functools.partial(F.gelu, **settings))


def scale_by(factor):
    return lambda x: F.silu(x) * factor


ALIKE = {
    "class": nn.SiLU,
    "settings": tanh_gelu,
    "nested": lambda: nn.Sequential(nn.SiLU(), nn.Identity()),
    "function": lambda: Activation(F.silu),
    "partial": lambda: partial_gelu(approximate="tanh"),
    "numbers": lambda: Activation([1, (2.0, None)]),
}
DIFFERENT = {
    "settings": (nn.GELU(), tanh_gelu()),
    "function or partial": (Activation(F.gelu), partial_gelu(approximate="tanh")),
    "partials": (partial_gelu(), partial_gelu(approximate="tanh")),
    "functions": (Activation(lambda x: F.silu(x)), Activation(lambda x: F.gelu(x))),
    "closures": (Activation(scale_by(1.0)), Activation(scale_by(2.0))),
    "buffer": (Activation(torch.tensor(1.0)), Activation(torch.tensor(2.0))),
    "parameter": (Activation(nn.Parameter(torch.tensor(1.0))), Activation(nn.Parameter(torch.tensor(2.0)))),
    "weights further inside": (Activation(nn.Linear(1, 1)), Activation(nn.Linear(1, 1))),
    **{
        f"{one!r} and {other!r}": (Activation(one), Activation(other))
        for one, other in ((1, 1.0), (1, True), (0.0, -0.0), (1, "1"), ((1,), [1]), (None, "None"))
    },
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_modules_that_compute_the_same_have_the_same_fingerprint(make):
    assert fingerprint(nn.Sequential(make())) == fingerprint(nn.Sequential(make()))


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_modules_that_may_compute_something_else_differ_in_their_fingerprints(one, other):
    assert fingerprint(nn.Sequential(one)) != fingerprint(nn.Sequential(other))


@pytest.fixture
def probed(monkeypatch):
    """How often modules of each class have been probed."""
    counts = Counter()

    def counting(recogniser):
        def recognise(module):
            counts[type(module).__name__] += 1
            return recogniser.recognise(module)

        return replace(recogniser, recognise=recognise)

    monkeypatch.setattr(modules, "_recognisers", [counting(recogniser) for recogniser in modules._recognisers])
    return counts


def test_lora_layers_of_all_paths_are_probed_once(probed):
    """PEFT keeps the path of each layer in its ``kwargs``, which the forward does not read."""
    peft = pytest.importorskip("peft", reason="some versions of transformers are tested without peft")

    def adapted():
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "1"]))

    assert liger_kernels.patch(adapted()).counts() == {"lora_linear": 2}
    assert probed["Linear"] == 1
    reading = adapted()
    for layer in reading.base_model.model:

        class Reads(type(layer)):
            def forward(self, x):
                return super().forward(x) if self.kwargs is not None else None

        Reads.__name__ = "Linear"
        layer.__class__ = Reads
    liger_kernels.patch(reading)
    assert probed["Linear"] == 3


def test_mlps_are_probed_once_for_each_activation(probed):
    report = liger_kernels.patch(nn.Sequential(*map(Mlp, (nn.SiLU(), tanh_gelu(), nn.SiLU(), tanh_gelu()))))
    assert [r.kernel for r in report.replaced] == ["swiglu", "geglu", "swiglu", "geglu"]
    assert probed["Mlp"] == 2


class Powers(Norm):
    """A norm with an attribute that is no plain setting."""

    def __init__(self, power):
        super().__init__()
        self.powers = [power]

    def statistic(self, x):
        return x.abs().pow(self.powers[0]).mean(-1, keepdim=True)


def test_norms_are_probed_by_what_they_hold_and_not_by_their_weights(probed):
    report = liger_kernels.patch(nn.Sequential(Powers(2), Powers(2), Powers(3), Norm(16), Norm(24), Norm(24)))
    assert [r.path for r in report.replaced] == ["0", "1", "3", "4", "5"]
    assert [item.path for item in report.left] == ["2"]
    assert (probed["Powers"], probed["Norm"]) == (2, 2)


def test_each_distinct_module_of_a_model_is_probed_once(probed):
    model = tiny("gemma3", num_hidden_layers=6)
    liger_kernels.patch(model)
    assert max(probed.values()) <= 2, probed  # the norms of heads have another size than those of layers
    assert [count for name, count in probed.items() if name.endswith("MLP")] == [1]


def test_a_second_patch_reads_what_was_replaced_since() -> None:
    """Code that was read for the first patch is read anew: another method may read another attribute."""

    class Scaled(LlamaRMSNorm):
        factor = 1.0

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(self.scaled(hidden_states))

    norm = Scaled(8).to(DEVICE)
    assert liger_kernels.patch(norm).counts() == {"rms_norm": 1}
    liger_kernels.unpatch(norm)
    Scaled.scaled = lambda self, x: x * self.factor
    assert liger_kernels.patch(norm).counts() == {"rms_norm": 1}
    norm.factor = -2.0
    x = torch.randn(3, 8, device=DEVICE)
    assert torch.equal(norm(x), Scaled.forward(norm, x))
    assert not liger_kernels.status(norm).replaced
