"""The benchmarks' driver on a CPU, with a stopwatch that shows made-up numbers: nothing is timed here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_kernels
from benchmarks import models
from benchmarks.__main__ import benchmark, main, parse
from benchmarks.case import BenchmarkCase, Site
from benchmarks.cases import add_norm, cases, glu, glu_linear, lora, norm, rope
from benchmarks.loss_cases import linear_loss, loss, packing
from benchmarks.peers import Arms, Table
from benchmarks.timing import FEWEST, Gpu, Measured
from liger_kernels import ops
from tools.roofline_picture import main as draw
from tools.roofline_picture import points

CPU = Site("cpu", torch.float32)
NORM = norm(CPU, 6, 8, "cast_then_scale")
SWIGLU = glu(CPU, "swiglu", 4, 8)


class Stopwatch:
    """What :class:`benchmarks.timing.Gpu` does, with numbers in place of times."""

    name = "some GPU"

    def __init__(self) -> None:
        self.measured: list[Callable[..., Any]] = []

    def measure(self, function: Callable[..., Any], given: tuple[torch.Tensor, ...], repeats: int) -> Measured:
        self.measured.append(function)
        return Measured(0.5 * len(self.measured), 0.01, 3.0, 0.25)

    def copy_gb_per_s(self, n_bytes: int = 1) -> float:
        return 1e-3

    def matmul_tflop_per_s(self, dtype: torch.dtype) -> float:
        return 1e-6

    def release(self) -> None:
        pass


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``bench(cases, peers, packages, *options)``: what --json wrote in a run that ends with exit code ``code``."""

    def go(
        known: list[BenchmarkCase], peers: str = "eager", packages: Any = None, *options: str, code: int = 0
    ) -> dict[str, Any]:
        file = tmp_path / "result.json"
        parsed = parse(["--dtype", "float32", "--peers", peers, "--json", str(file), *options])
        assert benchmark(parsed, known, Table(parsed.peers, packages or {}), Stopwatch()) == code
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return go


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ropes"], "unknown ops ['ropes']; there are ['add_rms_norm'"),
        (["--peers", "eager,lger"], "unknown peers ['lger']; there are ['eager', 'compile', 'liger'"),
        (["--dtype", "int8"], "unknown dtypes ['int8']; there are ['bfloat16', 'float16', 'float32']"),
        (["--repeats", "1"], "--repeats is 1; a median and its spread need at least 2"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_what_is_wrong_with_the_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "need a GPU" in capsys.readouterr().err


def test_table_and_json(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def liger() -> dict[str, Arms]:
        return {NORM.formula: {"liger": NORM.eager, "liger-wide": lambda x, w: NORM.eager(x.double(), w).float()}}

    found = bench([NORM, SWIGLU], "eager,liger", {"liger": liger})
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[0] == [
        *("op", "shape", "ours, ms", "of the ceiling (of a copy of its size)", "host, ms", "MiB", "error"),
        *("eager", "liger", "liger-wide"),
    ]
    ours = table[2]
    assert ours[:3] == ["rms_norm (cast_then_scale)", "6x8", "0.500 ± 0.010"]
    # 5 * 6 * 8 float32 in half a millisecond, of 1 MB/s; 12 * 6 * 8 operations, of 1 MFLOP/s
    assert ours[3] == "192% of copy (192%)"
    assert ours[4:6] == ["0.25", "3"]
    assert ours[7].startswith("1.000 (2.00), 3, ")
    assert [cell.partition(" ")[0] for cell in ours[8:]] == ["1.500", "2.000"]
    assert found["device"] == "some GPU"
    assert found["dtype"] == "float32"
    assert found["copy_gb_per_s"] == 1e-3
    row = found["rows"][0]
    assert (row["op"], row["shape"], row["ours_ms"], row["spread_ms"], row["ours_mib"]) == (*ours[:2], 0.5, 0.01, 3.0)
    assert 0 < row["error"] < 1e-6
    assert row["peers"]["liger"].items() >= {"ms": 1.5, "mib": 3.0, "host_ms": 0.25, "note": ""}.items()
    assert list(found["rows"][1]["peers"]) == ["eager"]


def test_a_peer_that_is_not_installed_is_named_once(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fla() -> dict[str, Arms]:
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    def cce() -> dict[str, Arms]:
        raise RuntimeError("no CUDA runtime")

    found = bench([NORM, SWIGLU], "eager,fla,cce", {"fla": fla, "cce": cce})
    expected = {
        "fla": "skipped: einops is not installed",
        "cce": "skipped: its import failed: RuntimeError: no CUDA runtime",
    }
    assert found["skipped"] == expected
    assert [list(row["peers"]) for row in found["rows"]] == [["eager"]] * 2
    before, _, table = capsys.readouterr().out.partition("| op ")
    assert before.count(expected["fla"]) == table.count(expected["fla"]) == 1


def test_a_peer_that_fails_or_is_wrong_gets_no_time_and_ends_nothing(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only on Hopper\nand a long trace")

    def liger() -> dict[str, Arms]:
        shifted = lambda x, weight: NORM.eager(x, weight + 1)  # noqa: E731
        return {NORM.formula: {"liger": raising, "liger-shifted": shifted, "liger-nan": lambda x, w: x * w * torch.nan}}

    found = bench([NORM, SWIGLU], "liger,eager", {"liger": liger})
    peers = found["rows"][0]["peers"]
    assert peers["liger"] == {"error": None, "note": "failed: NotImplementedError: only on Hopper"}
    for arm in ("liger-shifted", "liger-nan"):
        assert peers[arm]["note"].startswith("WRONG: its relative error is ")
        assert "ms" not in peers[arm]
    assert peers["liger-nan"]["error"] is None  # JSON has no NaN
    assert peers["eager"]["ms"] == 1.0
    assert len(found["rows"]) == 2
    assert "| failed | WRONG | WRONG |" in capsys.readouterr().out


def wrong_gradient(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The right output; the gradient of ``up`` is a tenth too large."""
    more = ops.swiglu_ref(gate.detach(), up)
    return ops.swiglu_ref(gate, up) + 0.1 * (more - more.detach())


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (lambda gate, up: ops.swiglu_ref(gate, up) * 1.01, "WRONG, not measured: swiglu output 0"),
        (wrong_gradient, "WRONG, not measured: swiglu gradient 1"),
        (lambda gate, up: gate.no_such_method(), "failed: AttributeError, not measured"),
    ],
)
def test_ours_that_is_wrong_gets_no_time_and_fails_the_run(
    ours: Callable[..., Any], said: str, bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench([dataclasses.replace(SWIGLU, ours=ours), NORM], code=1)
    assert [row["op"] for row in found["rows"]] == [NORM.op]
    assert said in capsys.readouterr().out


def test_what_was_measured_outlives_a_run_that_is_cut_off(bench: Any, tmp_path: Path) -> None:
    def cut_off(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench([NORM, dataclasses.replace(SWIGLU, ours=cut_off)])
    (written,) = tmp_path.glob("*.json")
    assert [row["op"] for row in json.loads(written.read_text())["rows"]] == [NORM.op]


def test_a_peer_gets_its_own_copy_of_the_inputs(bench: Any) -> None:
    """Kernels that write gradients over their inputs do not spoil what the next arm computes."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            y = ops.swiglu_ref(gate, up)
            gate.data.zero_()
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return dy, dy

    def liger() -> dict[str, Arms]:
        return {"swiglu": {"liger": InPlace.apply}}

    found = bench([SWIGLU], "liger,eager", {"liger": liger})
    assert found["rows"][0]["peers"]["liger"]["note"].startswith("WRONG")
    assert found["rows"][0]["peers"]["eager"]["error"] < 1e-6


def test_schedules_of_one_formula_share_their_peers(bench: Any) -> None:
    """And stand in rows of their own."""
    known = [linear_loss(CPU, 8, 16, 32, memory=memory) for memory in ("fast", "small")]
    found = bench(known)
    fast, small = found["rows"]
    assert (fast["op"], small["op"]) == ("linear_cross_entropy (fast)", "linear_cross_entropy (small)")
    assert fast["peers"] == small["peers"]
    assert small["flops"] / fast["flops"] == pytest.approx(8 / 6)
    large = [linear_loss(CPU, 8192, 4096, 128256, memory=memory).flops for memory in ("fast", "small")]
    assert large[1] / large[0] == pytest.approx((4 - 41984 / 128256) / 3)  # what the op keeps, in slabs of 1024 classes


def test_arms_of_one_peer_stand_side_by_side_and_a_note_stands_once(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such shape")

    head = "linear_cross_entropy"
    packages = {
        "liger": lambda: {"swiglu": {"liger": SWIGLU.eager}, head: {"liger": broken, "liger-fp32": broken}},
        "fla": lambda: {"swiglu": {"fla": SWIGLU.eager}, head: {"fla": broken}},
    }
    known = [SWIGLU, *(linear_loss(CPU, 8, 16, 32, memory=memory) for memory in ("fast", "small"))]
    bench(known, "liger,fla", packages)
    shown = capsys.readouterr().out
    assert "| error | liger | liger-fp32 | fla |" in shown
    assert shown.count("- linear_cross_entropy 8x16x32, liger-fp32: failed: RuntimeError: no such shape") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kind_of_case_is_right_on_a_cpu(dtype: torch.dtype, bench: Any) -> None:
    site = Site("cpu", dtype)
    found = bench(
        [
            norm(site, 8, 32, "offset_scale_then_cast"),
            add_norm(site, 8, 32),
            rope(site, 2, 8, 4, 2, 16),
            rope(site, 2, 8, 4, 1, 16, " (DeepSeek)", pairing="interleaved_to_half_repeat", keep_dtype=True),
            glu(site, "geglu", 4, 16),
            glu_linear(site, "swiglu", 4, 16, 8),
            lora(site, 8, 32, 24),
            lora(site, 8, 32, 24, torch.float32),
            loss(site, 16, 64),
            loss(site, 16, 64, weights=True),
            linear_loss(site, 16, 32, 64),
            linear_loss(site, 16, 32, 64, weights=True),
            packing(site, 256, 32),
        ],
        "eager",
        None,
        "--dtype",
        str(dtype).removeprefix("torch."),
    )
    assert len(found["rows"]) == 13
    assert all(row["peers"]["eager"]["note"] == "" for row in found["rows"])


def test_no_case_is_listed_twice_and_each_op_can_be_chosen(bench: Any) -> None:
    known = cases(CPU)
    rows = [(case.op, case.shape) for case in known]
    assert len(set(rows)) == len(rows)
    for name in {case.name for case in known}:
        assert parse([name]).ops == [name]
    found = bench([NORM, SWIGLU], "eager", None, "swiglu")
    assert [row["op"] for row in found["rows"]] == ["swiglu"]


def test_points_under_the_roofline(bench: Any) -> None:
    """Ours of every row, its peers once, each as a share of the ceiling that binds it."""
    known = [NORM, *(linear_loss(CPU, 8, 16, 32, memory=memory) for memory in ("small", "fast"))]
    found = bench(known)
    drawn = list(points(found))
    assert [(point.op, point.ours) for point in drawn] == [
        *(("rms_norm", True), ("rms_norm", False)),
        *(("linear_cross_entropy", True), ("linear_cross_entropy", False), ("linear_cross_entropy", True)),
    ]
    row = found["rows"][0]
    assert drawn[0].share == pytest.approx(max(row["of_copy"], row["of_matmul"]))
    assert drawn[0].share / drawn[1].share == pytest.approx(row["peers"]["eager"]["ms"] / row["ours_ms"])
    # the peer of the schedule that computes logits twice needs 6 operations for its 8
    ours, peer, _ = drawn[2:]
    times = found["rows"][1]["peers"]["eager"]["ms"] / found["rows"][1]["ours_ms"]
    assert ours.tflop_per_s / peer.tflop_per_s == pytest.approx(times * 8 / 6)


@pytest.mark.parametrize(("text", "message"), [("{}", "is not what python -m benchmarks"), ("{", "Expecting")])
def test_the_picture_needs_a_result(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(SystemExit):
        draw([str(tmp_path / "result.json"), str(tmp_path / "out.svg")])
    assert message in capsys.readouterr().err


class SlowHand(Gpu):
    """A GPU whose every call takes ``ms``."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        return call(), self.ms


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA whose clock and memory show the numbers of the namespace."""
    shown = SimpleNamespace(clock=0.0, held=1 << 20, peak=4 << 20)

    class Event:
        def __init__(self, **_: Any) -> None:
            pass

        def record(self) -> None:
            self.at = shown.clock

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    stands_in = {
        "Event": Event,
        "get_device_name": lambda: "some GPU",
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda: shown.held,
        "max_memory_allocated": lambda: shown.peak,
        **dict.fromkeys(("reset_peak_memory_stats", "synchronize", "empty_cache"), lambda: None),
    }
    for name, stand_in in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return shown


def test_every_measured_call_finds_the_inputs_as_they_were(cuda: SimpleNamespace) -> None:
    seen = []

    def overwriting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(float(x.detach().sum()))
        y = x * weight
        x.data.zero_()
        return y

    given = torch.ones(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    found = SlowHand(0.5).measure(overwriting, given, 7)
    assert set(seen) == {32.0}
    assert float(given[0].detach().sum()) == 32.0
    assert (found.ms, found.spread_ms, found.mib) == (1.0, 0.0, 3.0)  # forward and backward


@pytest.mark.parametrize(("ms", "calls"), [(0.5, 20), (300.0, FEWEST)])
def test_slow_arms_are_measured_less_often(ms: float, calls: int, cuda: SimpleNamespace) -> None:
    count = []
    SlowHand(ms).measure(lambda x: count.append(x) or x * 2, (torch.ones(3, requires_grad=True),), 20)
    assert len(count) == 3 + calls + 1 + 1 + calls  # warm-up, times, memory, upstream gradients, host


def test_arms_that_others_would_feel_run_by_themselves():
    groups = models.groups(list(reversed(models.ARMS)))
    turns = [["eager", "ours", "ours-small"], ["compile", "ours+compile"]]
    assert [group for group in groups if len(group) > 1] == turns
    taken = {arm for group in turns for arm in group}
    assert [group for group in groups if len(group) == 1] == [[arm] for arm in models.ARMS if arm not in taken]
    assert groups[-1] == ["liger"]
    assert models.groups(["compile"]) == [["compile"]]


def test_a_models_memory_is_its_own_and_its_steps_take_turns(monkeypatch, cuda):
    """Not that of the other arm's model, nor what the comparison holds; and no step counts that warms up."""
    arms = {"eager": torch.nn.Linear(255, 1024), "ours": torch.nn.Linear(511, 1024)}  # of 1 and 2 MiB
    steps = []
    cuda.held = 7 * 2**30 + 3 * 2**20

    def step(model, batch):
        steps.append(model)
        cuda.clock += 1.0
        cuda.peak = cuda.held + 2**29 * len(set(map(id, steps)))

    monkeypatch.setattr(models, "step", step)
    measured = models.measure(arms, {}, repeats=3)
    assert {arm: gib for arm, (_, gib) in measured.items()} == {"eager": 2**-10 + 0.5, "ours": 2**-9 + 1.0}
    assert {arm: times for arm, (times, _) in measured.items()} == dict.fromkeys(arms, [1.0] * 3)
    assert steps == [arms["eager"]] * 2 + [arms["ours"]] * 2 + [*arms.values()] * 3


SEES, TOKENS = "qwen2_5_vl", {"vision_start_token_id": 297, "video_token_id": 298, "image_token_id": 299}


@pytest.fixture
def model_class() -> Any:
    """Imported before anything says that there is a GPU: what transformers imports with it would look for one."""
    return models.architecture(SEES)


@pytest.fixture
def small_models(model_class: Any, monkeypatch: pytest.MonkeyPatch, cuda: SimpleNamespace) -> None:
    """The model that sees, with 2 layers of 32 and images of 8 tokens, on the CPU; a GPU's clock stands still."""
    name, shape = models.MODELS[SEES]
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    text = {**shape["text_config"], **sizes, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 300}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 1, 1]}
    vision = {**shape["vision_config"], **sizes, "num_heads": 2, "out_hidden_size": 32, "depth": 2}
    parts = {"text_config": text, "vision_config": vision}
    monkeypatch.setitem(models.MODELS, SEES, (name, {**shape, **parts, **TOKENS}))
    monkeypatch.setattr(models, "IMAGE", (1, 4, 8))
    monkeypatch.setattr(models, "DEVICE", "cpu")


def test_a_model_that_sees_gets_an_image_in_every_row(small_models: None) -> None:
    torch.manual_seed(0)
    batch = models.batch_of(SEES, (3, 20))
    ids, seen = batch["input_ids"], batch["input_ids"] == 299
    assert seen.sum(1).tolist() == [4 * 8 // 2**2] * 3
    assert (ids.roll(1, 1)[seen][::8] == 297).all()  # where get_rope_index looks for an image
    assert (ids >= 297).sum() == 3 * 9  # text is text
    assert batch["pixel_values"].shape == (3 * 4 * 8, 3 * 2 * 14**2)
    assert torch.equal(batch["image_grid_thw"], torch.tensor([[1, 4, 8]] * 3))
    if "mm_token_type_ids" in batch:
        assert torch.equal(batch["mm_token_type_ids"].bool(), seen)
    # the pixels reach the loss
    model = models.build(SEES, layers=1)
    other = {**batch, "pixel_values": -batch["pixel_values"]}
    losses = [float(models.step(model, b)) for b in (batch, other)]
    assert losses[0] != losses[1]
    assert model.model.visual.patch_embed.proj.weight.grad.abs().sum() > 0
    assert (len(model.model.visual.blocks), len(model.model.language_model.layers)) == (1, 1)


def test_arms_of_a_model_that_sees_and_one_that_fails(
    small_models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both towers run on kernels; a peer that has nothing for the model gets no row, and ends nothing."""

    def knows_nothing(model: Any) -> Any:
        raise NotImplementedError("it knows no such model\nand a long trace")

    def ours(model: Any) -> Any:
        replaced.update((r.kernel, r.path.split(".")[1]) for r in liger_kernels.patch(model).replaced if "." in r.path)
        return model

    replaced: set[tuple[str, str]] = set()
    monkeypatch.setitem(models.ARMS, "ours", ours)
    monkeypatch.setitem(models.ARMS, "ours-small", knows_nothing)
    file = tmp_path / "rows.json"
    options = "--arms eager,ours,ours-small --shapes 2x16,1x20 --repeats 2 --json"
    monkeypatch.setattr("sys.argv", ["models", SEES, *options.split(), str(file)])
    assert models.main() == 1
    said = f"{SEES} ours-small: failed, not measured: NotImplementedError: it knows no such model\n"
    assert said in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    expected = [(shape, arm) for shape in ("2x16", "1x20") for arm in ("eager", "ours")]
    assert [(row["shape"], row["arm"]) for row in rows] == expected
    assert {row["layers"] for row in rows} == {2}
    kernels, towers = ("rms_norm", "rope", "swiglu"), ("visual", "language_model")
    assert replaced >= {(kernel, tower) for kernel in kernels for tower in towers}


def test_a_row_too_short_for_its_image(
    small_models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["models", SEES, "--shapes", "2x9"])
    with pytest.raises(SystemExit):
        models.main()
    assert "has an image of 8 tokens in every row: rows of 9 are too short for it" in capsys.readouterr().err
