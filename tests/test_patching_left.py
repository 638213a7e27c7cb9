"""What is left alone is listed with a reason that is right, what is replaced and never runs is said."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_kernels
from liger_kernels.patching.census import never_ran
from liger_kernels.patching.swap import RAN
from matrix.checks import zoo
from tests.patching_checks import DEVICE, batch, built, tiny, train, unlisted

# A sample of families and what of each is in no other table: (class, why it is left).
LEFT = {
    ("mixtral", "MixtralForCausalLM"): {},
    ("llama4", "Llama4ForCausalLM"): {"Llama4TextExperts": "packed experts: their forward is no sum of weight"},
    ("gpt_oss", "GptOssForCausalLM"): {},
    ("gpt2", "GPT2LMHeadModel"): {"GPT2MLP": "two projections"},
    ("opt", "OPTForCausalLM"): {"OPTDecoderLayer": "two projections"},
    ("cohere", "CohereForCausalLM"): {},
    ("olmo", "OlmoForCausalLM"): {},
    ("bamba", "BambaForCausalLM"): {},
    ("deepseek_v3", "DeepseekV3ForCausalLM"): {},
    ("gemma4", "Gemma4ForCausalLM"): {"Gemma4TextDecoderLayer": "two projections"},
    ("mamba", "MambaForCausalLM"): {},
}


@pytest.mark.parametrize(("module", "name"), list(LEFT))
def test_all_that_is_left_is_listed(module, name):
    model = built(module, name)
    report = liger_kernels.patch(model)
    expected = LEFT[module, name]
    assert {item.what for item in report.left} == expected.keys(), report
    for item in report.left:
        assert re.search(expected[item.what], item.reason), item
    assert unlisted(model, report) == []
    assert {(item.path, item.reason) for item in liger_kernels.patch(model).left} == {
        (item.path, item.reason) for item in report.left
    }
    listed = {item.path for found in (report.left, report.replaced) for item in found}
    for path, part in model.named_modules():
        if type(part).__name__.endswith(("MLP", "Mlp")):  # one of experts has them inside
            assert any(other == path or other.startswith(f"{path}.") for other in listed), path


class TwoLinears(nn.Module):
    def __init__(self, hidden=16, inner=40):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Its output projection leads back to the hidden size, as an MLP's does, and is none."""

    def __init__(self, hidden=16, heads=40):
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, heads), nn.Linear(heads, hidden)

    def forward(self, x, attention_mask=None):
        return self.out(self.qkv(x))


class ScalesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.scale


class Holds(nn.Module):
    """Parameters and modules, of which its forward makes no use."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return x


def zeros(*shape):
    return nn.Parameter(torch.zeros(shape))


def experts():
    return Holds(gate_up=zeros(4, 80, 16), down=zeros(4, 16, 40))


def channels_first():
    """The sizes of a convolution's kernels and of position embeddings are not those of experts."""
    return Holds(token=zeros(1, 1, 16), positions=zeros(1, 9, 16), conv=nn.Conv1d(16, 16, 3))


def test_what_is_neither_norm_nor_mlp_nor_expert_is_not_listed():
    harmless = (Attention(), ScalesItsInput(), channels_first(), nn.Conv1d(4, 4, 3, bias=False), nn.PReLU(16))
    others = (nn.Embedding(8, 16), nn.Dropout(0.05), nn.Linear(16, 16), nn.Softplus(), nn.Bilinear(4, 4, 4))
    model = nn.ModuleList([*harmless, *others])
    with pytest.warns(UserWarning, match="replaced nothing"):
        assert liger_kernels.patch(model).left == []


def test_norms_mlps_and_experts_of_any_structure_are_listed():
    parts = [
        nn.LayerNorm(16, eps=0.7),
        nn.GroupNorm(4, 16),
        nn.BatchNorm1d(16),
        TwoLinears(),
        TwoLinears(inner=16),
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        experts(),
    ]
    with pytest.warns(UserWarning, match="replaced nothing"):
        report = liger_kernels.patch(nn.ModuleList(parts))
    assert [item.path for item in report.left] == [str(n) for n in range(len(parts))]
    assert "its eps (about 0.7) is none of its attributes" in report.left[0].reason


@pytest.mark.parametrize("kernels", [["rms_norm"], ["rope"], ["swiglu"], ["experts"], ["linear_cross_entropy"]])
def test_nothing_is_listed_of_kernels_that_were_not_asked_for(kernels):
    model = nn.ModuleList([nn.GroupNorm(4, 16), TwoLinears(), experts()])
    with pytest.warns(UserWarning, match="replaced nothing"):
        left = liger_kernels.patch(model, kernels).left
    assert [item.path for item in left] == {"rms_norm": ["0"], "swiglu": ["1"], "experts": ["2"]}.get(kernels[0], [])


class OddChild(Holds):
    @property
    def in_features(self):
        raise RuntimeError("not now")


class OddSignature(Holds):
    def forward(self, x):
        return x

    forward.__signature__ = "nonsense"  # type: ignore[attr-defined]


def test_an_odd_module_is_left_and_no_obstacle():
    traced = torch.jit.trace(nn.LayerNorm(16), torch.randn(2, 16))
    scripted = torch.jit.script(nn.LayerNorm(16))
    parent, signature = Holds(odd=OddChild(), even=nn.Linear(16, 16)), OddSignature(weight=zeros(16), eps=1e-6)
    model = nn.ModuleList([traced, scripted, parent, signature, nn.RMSNorm(16, eps=1e-6)])
    report = liger_kernels.patch(model)
    assert [r.path for r in report.replaced] == ["4"]
    reasons = {item.path: item.reason for item in report.left}
    assert set(reasons) == {"0", "1", "2", "3"}
    assert "TorchScript" in reasons["0"]
    assert "TorchScript" in reasons["1"]
    assert "cannot be examined (RuntimeError: not now)" in reasons["2"]
    assert "signature" in reasons["3"]


# Forwards that others put on the instance, and what the report says to do.


@pytest.mark.parametrize(
    ("origin", "says", "before"),
    [
        ("transformers.distributed.tensor_parallel", "tp_plan", False),
        ("transformers.integrations.tensor_parallel", "tp_plan", False),
        ("kernels.layer", "use_kernels", False),
        ("unsloth.models.llama", "unsloth replaced its forward", True),
        ("__main__", "__main__ replaced its forward", True),
    ],
)
def test_who_replaced_a_forward_is_named(origin, says, before):
    model = tiny("llama")

    def forward(self, x):
        return type(self).forward(self, x)

    forward.__module__ = origin
    model.model.norm.forward = forward.__get__(model.model.norm)
    (item,) = liger_kernels.patch(model).left
    assert item.path == "model.norm"
    assert says in item.reason
    assert ("patch the model before" in item.reason) == before


def test_a_class_that_another_package_changed_is_left_and_the_package_named(monkeypatch):
    model = tiny("llama")

    def forward(self, hidden_states):
        raise RuntimeError("pointer argument cannot be accessed from Triton")

    forward.__module__ = "liger_kernel.ops"
    monkeypatch.setattr(type(model.model.norm), "forward", forward)
    reasons = {item.reason for item in liger_kernels.patch(model).left}
    assert len(reasons) == 1
    assert reasons.pop().startswith("its forward is liger_kernel's: it cannot be probed")


# What is replaced and never runs.


def paths(replacements):
    return {r.path for r in replacements if r.kernel in ("rms_norm", "rope", "swiglu", "geglu")}


def test_what_runs_is_marked_and_nothing_is_said_before_a_forward():
    model = tiny("llama")
    report = liger_kernels.patch(model)
    assert never_ran(model, report) == []
    train(model)
    assert liger_kernels.status(model).never_ran == []
    assert liger_kernels.status(model).forwards == 1
    liger_kernels.unpatch(model)
    assert not any(RAN in module.__dict__ for module in model.modules())


def test_what_never_ran_is_said():
    model = tiny("llama")
    model.spare = copy.deepcopy(model.model.norm)
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *args: None)
    report = liger_kernels.patch(model)
    model(**batch())
    assert liger_kernels.status(model) is report
    assert paths(report.never_ran) == {"spare", "model.layers.1.mlp"}
    assert "replaced, but never ran in 1 forward:" in str(report)


def test_attention_that_does_not_rotate_never_ran():
    model = built("smollm3", "SmolLM3ForCausalLM")
    model.model.layers[1].self_attn.use_rope = False
    report = liger_kernels.patch(model)
    model(**{name: value.to(DEVICE) for name, value in zoo.tiny_batch(model).items()})
    report.forwards = 1
    assert paths(never_ran(model, report)) == {"model.layers.1.self_attn"}


def test_of_compiled_parts_nothing_is_said():
    model = tiny("llama")
    report = liger_kernels.patch(model)
    report.forwards = 1
    everything = paths(never_ran(model, report))
    model.model.layers[0].compile(backend="eager")
    inner = {path for path in everything if path.startswith("model.layers.0.")}
    assert inner
    assert paths(never_ran(model, report)) == everything - inner
    assert never_ran(torch.compile(model, backend="eager"), report) == []


# Hooks that only an unpatched forward calls.


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_the_activation_are_called_as_unpatched(kind):
    model, seen = tiny("llama"), []
    act = model.model.layers[0].mlp.act_fn
    getattr(act, f"register_{kind}_hook")(lambda *args: seen.append(1))
    liger_kernels.patch(model)
    assert seen == []
    train(model)
    assert seen == [1]


# Sharded weights: what gathers them does so around the module's own call.


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    dist = torch.distributed
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


MODULES = ["rms_norm", "rope", "swiglu"]
EVERYTHING = {"rms_norm": 5, "rope": 2, "swiglu": 2}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="one rank of gloo")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_that_fsdp1_has_sharded_again_is_recognised(use_orig_params, one_rank):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = tiny("llama")
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    options = {"use_orig_params": use_orig_params, "auto_wrap_policy": policy, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(model, **options)
    expected = model(**batch()).loss.detach()
    report = liger_kernels.patch(model, MODULES)
    assert report.counts() == EVERYTHING
    assert report.left == []
    loss = model(**batch()).loss
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    report.forwards = 1
    assert never_ran(model, report) == []


@pytest.mark.skipif(DEVICE.type != "cpu", reason="deepspeed's CPU accelerator")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_3_models_are_recognised(dtype, one_rank):
    pytest.importorskip("deepspeed")
    import deepspeed
    import transformers

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    llama = tiny("llama", pad_token_id=None).config
    with deepspeed.zero.Init(config_dict_or_path=config):
        inside = transformers.LlamaForCausalLM(llama)
        report = liger_kernels.patch(inside, MODULES)  # as apply_liger_kernel_to_llama does
        after = transformers.LlamaForCausalLM(llama)
    assert inside.model.norm.weight.numel() == 0
    assert report.counts() == EVERYTHING
    assert report.left == []
    report = liger_kernels.patch(after, MODULES)
    assert report.counts() == EVERYTHING
    assert report.left == []


class NeedsItsSize(nn.RMSNorm):
    """A norm that runs on rows of one size, which nothing outside its weight tells."""

    def __init__(self):
        super().__init__(16, eps=1e-6)
        del self.normalized_shape

    def forward(self, x):
        return F.rms_norm(x, (16,), self.weight, self.eps)


def test_a_norm_that_zero_3_has_sharded_is_probed_at_its_own_size():
    norm = NeedsItsSize()
    norm.weight = nn.Parameter(torch.empty(0))
    norm.weight.ds_shape = torch.Size([16])  # type: ignore[attr-defined]  # as deepspeed leaves it
    report = liger_kernels.patch(nn.Sequential(norm))
    assert report.counts() == {"rms_norm": 1}


def test_a_sharded_weight_of_unknown_size_is_left_with_the_advice():
    norm = NeedsItsSize()
    norm.weight = nn.Parameter(torch.empty(0))
    with pytest.warns(UserWarning, match="replaced nothing"):
        (item,) = liger_kernels.patch(nn.Sequential(norm)).left
    assert item.reason == "its weight is sharded: call patch() before sharding the model"


def test_projections_that_answer_with_dtensors_are_left_to_upstream(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = tiny("llama").cpu()
    cpu = {name: value.cpu() for name, value in batch().items()}
    expected = model(**cpu).loss
    plan = {
        "*.mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "*.mlp.up_proj": ColwiseParallel(use_local_output=False),
        "*.mlp.down_proj": RowwiseParallel(),
    }
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {f"model.layers.{n}{name[1:]}": how for name, how in plan.items() for n in (0, 1)})
    assert liger_kernels.patch(model, MODULES).counts() == EVERYTHING
    torch.testing.assert_close(model(**cpu).loss, expected)


def test_a_weight_that_nobody_gathered_is_left_to_upstream():
    model = tiny("llama")
    liger_kernels.patch(model, ["rms_norm"])
    model.model.norm.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):  # upstream's own words
        model(**batch())


def test_compiling_calls_no_marks():
    model = tiny("llama", num_hidden_layers=1)
    report = liger_kernels.patch(model, MODULES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(model.model, backend="eager")(batch()["input_ids"])
    assert len(report.replaced) == 5
    assert not any(RAN in module.__dict__ for module in model.modules())
