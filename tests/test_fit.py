"""What ``fit`` calculates without memory, next to what an allocator gives to the same step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import liger_kernels
from liger_kernels.fitting import step
from liger_kernels.fitting.command import main
from liger_kernels.fitting.count import LiveBytes
from liger_kernels.fitting.longest import longest
from liger_kernels.fitting.stand_in import meta_as_gpu
from liger_kernels.fitting.training import Training
from liger_kernels.ops.runtime.dispatch import INTERPRET
from liger_kernels.patching import offload

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "experts": ("Qwen3MoeConfig", EXPERTS),
    "gemma": ("Gemma2Config", {}),
    "windows": ("Gemma3TextConfig", {"sliding_window": 64}),
}
TOKENS = 256
KEPT = Training(full="sgd", checkpointing=False)
CHECKPOINTING = Training(full="sgd")
ADAPTED = Training(full="sgd", rank=4)
SMALL = Training(full="sgd", memory="small")


def config(shape: str = "untied", **sizes: Any) -> Any:
    name, others = SHAPES[shape]
    found = getattr(transformers, name)(**{**SIZES, **others, **sizes})
    return found


def most_allocated(run: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator gave while ``run`` ran, next to those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    now = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += size
        most = max(most, now)
    return most


def allocated(config: Any, setup: Training, dtype: torch.dtype) -> int:
    """The same of a real step, and the weights."""
    model = step.prepare(step.build(config, "cpu", dtype), setup)
    step.backward(model, setup, TOKENS, "cpu")
    model.zero_grad()
    most = most_allocated(lambda: step.backward(model, setup, TOKENS, "cpu"))
    return most + sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))


class Doubled(torch.autograd.Function):
    """``held`` keeps the gradient that it returns, as a user may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[torch.Tensor] | None) -> torch.Tensor:
        ctx.held = held
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad * 2
        if ctx.held is not None:
            ctx.held.append(grad)
        return grad, None


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_summed_where_autograd_sums_them(keeps: bool) -> None:
    """Over one of the two, where nobody else holds it; else in new memory."""

    def run(device: str) -> None:
        held: list[torch.Tensor] | None = [] if keeps else None
        x = torch.ones(10_000, device=device, requires_grad=True)
        y = z = x * 1
        for _ in range(3):
            z = z + Doubled.apply(z, held)
        torch.autograd.backward([(Doubled.apply(y, held) + Doubled.apply(y, held) + z).sum()])

    with LiveBytes("all") as counter:
        run("meta")
    assert counter.peak == pytest.approx(most_allocated(lambda: run("cpu")), abs=100)


def compare(shape: str, setup: Training) -> None:
    dtype = torch.float32 if setup.rank is None and shape != "experts" else torch.bfloat16
    small = config(shape)
    if dtype == torch.bfloat16:  # the CPU's fused attention computes that in float32
        small._attn_implementation = "eager"
    calculated = step.MetaStep(small, setup, dtype, rounding=1).count(TOKENS)
    found = allocated(small, setup, dtype)
    # The CPU's attention makes a mask of its own; checkpointing keeps the states of random numbers, 5 KB a layer.
    assert calculated.peak == pytest.approx(found, rel=0.03 if shape == "windows" else 0, abs=20_000)


@pytest.mark.parametrize(
    ("shape", "setup"),
    [
        ("untied", KEPT),
        ("untied", CHECKPOINTING),
        ("untied", ADAPTED),
        ("tied", KEPT),
        ("tied", CHECKPOINTING),
        ("experts", KEPT),
        ("experts", ADAPTED),
        ("gemma", CHECKPOINTING),
        ("gemma", SMALL),
        ("windows", KEPT),
        ("windows", ADAPTED),
    ],
    ids=str,
)
@pytest.mark.skipif(not INTERPRET, reason="on a CPU kernels run in Triton's interpreter only")
def test_the_peak_is_what_an_allocator_gives(shape: str, setup: Training) -> None:
    compare(shape, setup)


@pytest.mark.parametrize("shape", ["tied", "experts", "gemma"])
def test_so_is_that_of_an_unpatched_model(shape: str) -> None:
    compare(shape, Training(full="sgd", checkpointing=False, patched=False))


def bytes_of(model: Any, trained: bool = False) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trained)


@pytest.fixture
def without_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other set-ups would take is calculated as well, and nobody asks for it here."""
    monkeypatch.setattr(liger_kernels.fitting, "_others", lambda setup: [])


def test_the_parts_are_what_they_say(without_switches: None) -> None:
    """Of a short row, where the end of the backward is the peak; then of long ones."""
    model = step.build(config(), "meta")
    short = liger_kernels.fit(config(), full="adamw", tokens=8)
    buffers = 4096  # frequencies, and what rounding adds
    assert short.parts["weights"] == pytest.approx(bytes_of(model), abs=buffers)
    assert short.parts["optimizer states"] == pytest.approx(2 * bytes_of(model), abs=2 * buffers)
    assert bytes_of(model) * 0.5 < short.parts["gradients"] <= bytes_of(model) + buffers
    layers, kept = [2, 6], []
    for n in layers:
        long = liger_kernels.fit(config(num_hidden_layers=n), full="sgd", tokens=2048)
        assert sum(long.parts.values()) == long.peak
        kept.append(long.parts["kept for the backward"])
    assert kept[1] - kept[0] == 4 * 2048 * 64 * 2, "checkpointing keeps the input of a layer"


def test_the_states_of_adapters_are_those_of_the_optimizer(without_switches: None) -> None:
    adapted = step.prepare(step.build(config(), "meta"), Training(rank=4))
    found = liger_kernels.fit(config(), lora=4, tokens=64)
    number = len(step.trained(adapted))
    assert found.parts["optimizer states"] == pytest.approx(2 * bytes_of(adapted, trained=True), abs=2 * 512 * number)
    assert found.parts["weights"] == pytest.approx(bytes_of(adapted), abs=512 * number + 4096)


def test_adapters_of_any_rank_need_no_memory(without_switches: None) -> None:
    found = []
    rank = 20_000  # more than 100 MB of adapters
    assert most_allocated(lambda: found.append(liger_kernels.fit(config(), lora=rank, tokens=64))) < 2**20
    assert found[0].parts["weights"] > 100 * 2**20


def test_four_bits_take_a_quarter(without_switches: None) -> None:
    wide = config(hidden_size=512, intermediate_size=2048, head_dim=128)
    whole, quarter = (liger_kernels.fit(wide, **{how: 4}, tokens=64).parts["weights"] for how in ("lora", "qlora"))
    linears = sum(step.quantised_linears(step.build(wide, "meta")))
    assert whole - quarter == pytest.approx(linears * (2 - 0.5 - 1 / 64), rel=0.01)


def test_the_longest_fits_and_a_longer_one_does_not() -> None:
    gpu = 2.25
    found = liger_kernels.fit(config(), full="sgd", gpu=gpu)
    room = (gpu - 2) * 2**30
    assert found.longest
    assert found.tokens == found.longest
    assert found.peak <= room
    assert liger_kernels.fit(config(), full="sgd", tokens=found.longest + 256).peak > room
    assert liger_kernels.fit(config(), full="sgd", gpu=1).longest == 0


@pytest.mark.parametrize("kink", [0, 30_000])
@pytest.mark.parametrize("square", [0.0, 1e-4])
def test_a_search_ends_at_the_longest(kink: int, square: float) -> None:
    calls = []

    def peak(tokens: int) -> int:
        calls.append(tokens)
        return int(1000 + 3 * tokens + 6 * max(0, tokens - kink) + square * tokens**2)

    for capacity in (999, 5_000, 50_000, 300_000, 3_000_000):
        calls.clear()
        n = longest(peak, capacity)
        assert n == 0 or peak(n) <= capacity
        assert peak(n + 256) > capacity
        assert len(calls) < 40


@given(
    st.integers(0, 3000),
    st.integers(0, 800_000),
    st.one_of(st.none(), st.integers(0, 400_000)),
    st.sets(st.integers(1, 900)),
)
def test_a_search_ends_at_the_longest_whatever_is_known(
    most: int, near: int, limit: int | None, known: set[int]
) -> None:
    """And nothing is asked for that is known, or larger than what is known not to fit."""

    def peak(tokens: int) -> int:
        return 1000 + 3 * tokens + 2 * max(0, tokens - 30_000)

    def asked(tokens: int) -> int:
        assert tokens not in sizes
        assert tokens < 256 * min((n for n in known if n > most), default=2**16)
        return peak(tokens)

    sizes = {n * 256: peak(n * 256) for n in known}
    expected = most if limit is None else min(most, limit // 256)
    assert longest(asked, peak(most * 256), peaks=sizes, limit=limit, near=near) == 256 * expected


@pytest.mark.parametrize("early", [0, 1, 5, 40])
def test_a_search_asks_few_lengths_where_memory_ends_before_the_line_does(early: int) -> None:
    """A length that ran out of memory tells no bytes, as on a GPU: `early` steps below what the line says."""
    asked, capacity = [], 1000 + 3 * 256 * 500

    def peak(tokens: int) -> int:
        asked.append(tokens // 256)
        size = 1000 + 3 * tokens
        return size if size <= capacity - 3 * 256 * early else capacity + 1

    assert longest(peak, capacity) == 256 * (500 - early)
    assert len(asked) <= 4 + 2 * early.bit_length(), asked


def test_switches_are_those_that_help() -> None:
    found = liger_kernels.fit(config(), tokens=2048, checkpointing=False, full="sgd")
    peaks = {switch.name: switch.peak for switch in found.switches}
    assert "checkpointing" in peaks
    assert all(peak < found.peak for peak in peaks.values())
    assert not liger_kernels.fit(config(), tokens=2048, lora=4, memory="small").switches


def test_layer_inputs_on_the_host_are_two_layers_inputs_on_the_gpu() -> None:
    """Of 8192 tokens of 64 features, 1 MiB each: the newest stays, all others go to the host."""
    wide: dict[str, Any] = {"tokens": 8192, "full": "sgd"}
    found = {n: liger_kernels.fit(config(num_hidden_layers=n), **wide, offload="layers") for n in (3, 9)}
    assert {n: fit.host for n, fit in found.items()} == {3: 2 * 2**20, 9: 8 * 2**20}
    kept = [fit.parts["kept for the backward"] for fit in found.values()]
    assert kept[0] == kept[1]
    without = liger_kernels.fit(config(num_hidden_layers=9), **wide)
    assert without.host == 0
    (switch,) = [switch for switch in without.switches if switch.name == 'offload="layers"']
    assert (switch.peak, switch.host) == (found[9].peak, found[9].host)
    assert without.peak - switch.peak > 5 * 2**20
    assert "on the host, pinned" in str(found[9])
    assert "0.01 GiB on the host" in str(without)


def test_layer_inputs_on_the_host_leave_room_for_more(without_switches: None) -> None:
    found = [
        liger_kernels.fit(config(num_hidden_layers=9), full="sgd", gpu=2.25, offload=how) for how in (None, "layers")
    ]
    assert found[1].longest > found[0].longest


def test_sums_of_products_take_on_the_meta_device_what_they_take_on_a_cpu() -> None:
    """Their shapes are found here, not by torch: in a third of the time of a whole step."""
    found = {}
    for shapes in (((3, 5), (3, 4), (9, 5)), ((4, 5), (3, 4), (4, 5))):  # what does not fit raises as without
        with pytest.raises(RuntimeError), LiveBytes(""):
            torch.addmm(*(torch.ones(shape, device="meta") for shape in shapes))
    for device in ("meta", "cpu"):
        c, a, b = torch.ones(3, 5, device=device), torch.ones(3, 4, device=device), torch.ones(4, 5, device=device)
        counter = LiveBytes("")
        with counter:
            new, wider = torch.addmm(c, a, b), torch.addmm(torch.ones(5, device=device), a, b)
            assert torch.addmm(c, a, b, out=c) is c
            c.addmm_(a, b, beta=0.5)
        assert (new.shape, wider.shape, new.dtype) == ((3, 5), (3, 5), torch.float32)
        found[device] = counter.peak
    assert float(c[0, 0]) == 0.5 * 5 + 4
    assert found["meta"] == found["cpu"] > 2 * new.nbytes


def test_a_square_of_tokens_is_named(without_switches: None) -> None:
    assert any("tokens x tokens" in note for note in liger_kernels.fit(config("gemma"), tokens=512).notes)
    assert not any("tokens x tokens" in note for note in liger_kernels.fit(config(), tokens=512).notes)


def test_nothing_of_torch_stays_replaced() -> None:
    before = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast
    liger_kernels.fit(config(), tokens=64)
    with pytest.raises(ValueError, match="cannot be calculated on the meta device"):
        liger_kernels.fit(ReadsData(**SIZES), tokens=64)
    assert (torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast) == before
    q = torch.empty(1, 2, 8, 4, device="meta", requires_grad=True)
    grad_fn = torch.nn.functional.scaled_dot_product_attention(q, q, q).grad_fn
    assert "FusedAttention" not in type(grad_fn).__name__
    assert not liger_kernels.ops.runtime.ahead.foresees()


def test_attention_reads_its_result_in_the_backward() -> None:
    """Checkpointing gives up what a backward has asked for, but fused attention holds it until it ends. So q, k, v and
    the result exist with three gradients, and with the sum of q's in float32."""
    row = torch.empty(1, 4, 4096, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x * 2, x * 3, x * 4)

    with meta_as_gpu(), LiveBytes("all") as counter:
        y = torch.utils.checkpoint.checkpoint(attend, row, use_reentrant=False)
        torch.autograd.backward([y], [torch.empty_like(y)])
    log_sums = 4 * 4 * 4096
    assert counter.peak == (2 + 4 + 3 + 2) * row.nbytes + log_sums


def test_other_devices_copy_as_always_meanwhile() -> None:
    """Another thread may train on a GPU, whose layer inputs must be copied."""
    before = offload.copy_stream_of
    with meta_as_gpu() as stream:
        assert offload.copy_stream_of(torch.device("meta")) is stream
        assert offload.copy_stream_of(torch.device("cpu")) is None
    assert offload.copy_stream_of is before


class ReadsData(transformers.LlamaConfig):
    model_type = "reads_data"


class ReadsDataModel(transformers.LlamaForCausalLM):
    config_class = ReadsData

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        input_ids.max().item()
        return super().forward(input_ids=input_ids, **kwargs)


transformers.AutoModelForCausalLM.register(ReadsData, ReadsDataModel)


def test_a_folder_a_file_and_a_class_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config().save_pretrained(tmp_path)
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    ways = [[str(tmp_path)], [str(tmp_path / "config.json")], ["LlamaConfig", *sizes, "tie_word_embeddings=false"]]
    printed = []
    for way in ways:
        assert main([*way, "--tokens", "64", "--full", "sgd"]) == 0
        printed.append(capsys.readouterr().out)
    assert len({*printed}) == 1
    assert "Llama, full, sgd, checkpointing" in printed[0]
    assert main([str(tmp_path), "vocab_size=1000000", "--tokens", "64", "--full", "sgd"]) == 0
    assert capsys.readouterr().out != printed[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "meta-llama/Llama-3-8B"}, ValueError, "nothing is downloaded"),
        ({"model": "LlamaForCausalLM"}, ValueError, "no configuration class"),
        ({"model": 3}, TypeError, "model is"),
        ({"model": "x" * 5000}, ValueError, "nothing is downloaded"),
        ({"sizes": {"layers": 3}}, ValueError, r"has no \['layers'\]"),
        ({"sizes": {3: 4}}, TypeError, r"sizes has the name an int \(3\); names must be strings"),
        ({"sizes": {"hidden_size": "abc"}}, ValueError, "does not take these sizes|cannot make a causal language"),
        ({"model": "ViTConfig"}, ValueError, "cannot make a causal language model of this ViTConfig"),
        ({"model": "CTRLConfig"}, ValueError, "checkpointing is True, and CTRLLMHeadModel does not support it"),
        ({"lora": 4, "full": "sgd"}, ValueError, "lora and full are given"),
        ({"lora": 0}, ValueError, "lora is 0; it must be at least 1"),
        ({"lora": 10**17}, ValueError, "LlamaForCausalLM cannot be trained as LoRA of rank 100000000000000000, check"),
        ({"lora": 10**30}, ValueError, "LlamaForCausalLM cannot be trained as LoRA of rank"),
        ({"qlora": -1}, ValueError, "qlora is -1; it must be at least 1"),
        ({"full": "muon"}, ValueError, "full is 'muon'; the optimizer must be one of"),
        ({"batch": 0}, ValueError, "batch is 0; it must be at least 1"),
        ({"tokens": 0}, ValueError, "tokens is 0; it must be more than 0"),
        ({"gpu": -1.0}, ValueError, "gpu is -1.0; it must be more than 0"),
        ({"gpu": float("nan")}, ValueError, "gpu is nan; it must be more than 0"),
        ({"gpu": float("inf")}, ValueError, "gpu is inf; it must be more than 0"),
        ({"gpu": 10**400}, ValueError, "it is in GiB and must be less than"),
        ({"gpu": 1e306}, ValueError, "it is in GiB and must be less than"),
        ({"tokens": 10**12}, ValueError, "a step of LlamaForCausalLM failed on rows of 1000000000000 tokens: "),
        ({"tokens": 10**30}, ValueError, "a step of LlamaForCausalLM failed on rows of"),
        ({"model": "BertConfig"}, ValueError, "a step of BertLMHeadModel failed on rows of 4096 tokens: RuntimeError"),
        ({"memory": "tiny"}, ValueError, "memory is 'tiny'"),
        ({"offload": "disk"}, ValueError, "offload is 'disk'; it must be one of 'layers'"),
        ({"offload": "layers", "checkpointing": False}, ValueError, "there are layer inputs with checkpointing only"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        liger_kernels.fit(**{"model": config(), **arguments})


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        liger_kernels.fit(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no configuration that transformers can read"):
        liger_kernels.fit(str(tmp_path))
    assert main([str(tmp_path)]) == 2
    assert "no configuration that transformers can read" in capsys.readouterr().err
    config().save_pretrained(tmp_path)
    assert main([str(tmp_path), "hidden_size=abc"]) == 2
    for words in (["LlamaConfig", "hidden_size"], ["LlamaConfig", "--lora", "4", "--full", "sgd"], []):
        with pytest.raises(SystemExit):
            main(words)
