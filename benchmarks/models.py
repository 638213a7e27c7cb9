"""Time and peak memory of one training step (forward and backward) of whole models, patched and not, on one GPU.

``python -m benchmarks.models [model ...] [--arms eager,ours,...] [--shapes 1x512,...] [--layers N] [--json FILE]``

Random weights in bfloat16, random tokens, every position a target, sdpa attention, no optimizer. A model that sees gets
an image in every row: 32 x 32 random patches, which are 256 of its tokens. Each arm is a model of its own with the same
weights. Before anything is timed, an arm's loss and gradients are compared with eager's: that catches an arm that
computes something else, and proves nothing more (``pytest convergence`` does). Times are medians of whole steps by CUDA
events, so gaps that the host leaves are in them, and with them the fastest step. ``eager``, ``ours`` and ``ours-small``
take turns, step by step, so that a host that slows down for a while slows them all, and so do ``compile`` and
``ours+compile``; the other arms run one after the other. Memory is the peak of a step, weights and gradients included,
and nothing that the comparison or other arms hold. The first step of a shape is a number of its own: there kernels, and
compiled arms as a whole, are compiled, every shape as a program of its own; ``--layers`` makes a model shallow whose
arms would take minutes to. ``graph`` and ``ours+graph`` replay a whole step as a CUDA graph: then there is no host to
wait for, and little with ``compile-graphs`` and ``ours+compile-graphs``, in which torch.compile replays forward and
backward (``mode="reduce-overhead"``). An arm that fails ends nothing: its error is printed, and the others are
measured. A model whose forward waits for the GPU, as a vision tower does that reads the sizes of its images, cannot be
captured as one graph.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import inspect
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import liger_kernels
from benchmarks.timing import seconds, spread
from convergence import files, tables


def decoder(
    *, hidden: int, inner: int, layers: int, heads: int, keys: int, classes: int, **others: Any
) -> dict[str, Any]:
    """The configuration of a decoder; ``heads`` are those of queries, ``keys`` those of keys and values."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": classes,
        **others,
    }


_COMMON = {"attention_dropout": 0.0, "use_cache": False}
# Published shapes; Gemma 3's with 12 of its 26 layers, so that eager holds the logits of 16384 tokens, too, and
# Qwen3-MoE's with 8 of its 48; Qwen2.5-VL's 3B with 12 of its 36, and 16 of the 32 of its vision tower.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        decoder(hidden=2048, inner=8192, layers=16, heads=32, keys=8, classes=128256, tie_word_embeddings=True),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        decoder(
            hidden=1152, inner=6912, layers=12, heads=4, keys=1, head_dim=256, classes=262144, tie_word_embeddings=True
        ),
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        decoder(
            hidden=1024, inner=3072, layers=28, heads=16, keys=8, head_dim=128, classes=151936, tie_word_embeddings=True
        ),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **decoder(hidden=2048, inner=6144, layers=8, heads=32, keys=4, head_dim=128, classes=151936),
            **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **decoder(hidden=2048, inner=11008, layers=12, heads=16, keys=2, classes=151936),
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
                **_COMMON,
            },
            "vision_config": {
                "depth": 16,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 2048,
            },
            "tie_word_embeddings": True,
        },
    ),
}
DEVICE = "cuda"
IMAGE = (1, 32, 32)  # patches of an image in time, height and width


def _liger(model: Any) -> Any:
    from convergence.patches import liger_kernel_instance

    liger_kernel_instance(model)
    return model


def _ours(model: Any) -> Any:
    liger_kernels.patch(model)
    return model


# Arms that are named after what they do against long sequences, by what patch() gets.
OPTIONS: dict[str, dict[str, Any]] = {
    "ours-offload": {"offload": "layers"},
    "ours-recompute": {"recompute": "mlp"},
    "ours-offload-recompute": {"offload": "layers", "recompute": "mlp"},
}


def ours_with(model: Any, **options: Any) -> Any:
    """``model``, patched with options of ``patch``."""
    liger_kernels.patch(model, **options)
    return model


def _with_compiled_layers(model: Any) -> Any:
    """What surrounds the decoder layers is not traced: transformers then leaves causal masks to the attention."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile()
    return model


ARMS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "graph": lambda model: model,
    "ours": _ours,
    "ours-small": lambda model: liger_kernels.patch(model, memory="small") and model,
    "ours+graph": _ours,
    "compile": torch.compile,
    "ours+compile": lambda model: torch.compile(_ours(model)),
    "compile-graphs": partial(torch.compile, mode="reduce-overhead"),
    "ours+compile-graphs": lambda model: torch.compile(_ours(model), mode="reduce-overhead"),
    "compile-layers": _with_compiled_layers,
    "ours+compile-layers": lambda model: _with_compiled_layers(_ours(model)),
    "liger": _liger,
}
GRAPHS = ("graph", "ours+graph")
TURNS = (("eager", "ours", "ours-small"), ("compile", "ours+compile"))


def groups(arms: list[str]) -> list[list[str]]:
    """Those of the arms that take turns, and each other one by itself: a graph keeps the memory of its step, compiled
    programs are forgotten all at once, and liger, which comes last, changes transformers for every model of the
    process."""
    found: dict[Any, list[str]] = {}
    for arm in sorted(arms, key=list(ARMS).index):
        found.setdefault(next((turns for turns in TURNS if arm in turns), arm), []).append(arm)
    return list(found.values())


Batch = dict[str, torch.Tensor]  # what a model's forward takes
Outcome = tuple[float, dict[str, torch.Tensor]]  # the loss, and the gradient of each parameter


@dataclass(frozen=True)
class ModelRow:
    """One line of the table: milliseconds, GiB, and the seconds of the first step."""

    model: str
    shape: str
    arm: str
    ms: float
    spread_ms: float
    fastest_ms: float
    gib: float
    first_s: float
    layers: int


def cut(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """A configuration with ``layers`` layers in each of its parts."""
    parts = {key: cut(value, layers) for key, value in shape.items() if isinstance(value, dict)}
    return {**shape, **dict.fromkeys({"num_hidden_layers", "depth"} & shape.keys(), layers), **parts}


def architecture(name: str) -> Any:
    import transformers

    return getattr(transformers, MODELS[name][0])


def build(name: str, layers: int | None = None, seed: int = 0) -> Any:
    """The model with random weights; with ``layers`` of its layers, where given."""
    model_class, shape = architecture(name), MODELS[name][1]
    shape = cut(shape, layers) if layers else shape
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = model_class(model_class.config_class(**shape, **_COMMON, attn_implementation="sdpa"))
    return model.to(torch.bfloat16).train()


def patched(name: str, arm: str, layers: int | None) -> Any:
    return ARMS[arm](build(name, layers))


def batch_of(name: str, shape: tuple[int, int]) -> Batch:
    """What the model's forward takes: rows x length tokens, all of them targets; where it sees, with an image each.

    Raises:
        ValueError: a row is too short for its image.
    """
    model_class, config = architecture(name), MODELS[name][1]
    vocabulary = config.get("text_config", config)["vocab_size"]
    if "vision_config" not in config:
        ids = torch.randint(vocabulary, shape, device=DEVICE)
        return {"input_ids": ids, "labels": ids}
    rows, length = shape
    full = model_class.config_class(**config)
    vision, patches = full.vision_config, math.prod(IMAGE)
    tokens = patches // vision.spatial_merge_size**2
    if length < tokens + 2:
        raise ValueError(f"{name} has an image of {tokens} tokens in every row: rows of {length} are too short for it")
    # the tokens above are those that stand for something else than text
    ids = torch.randint(min(full.image_token_id, full.video_token_id, full.vision_start_token_id), shape, device=DEVICE)
    ids[:, 1], ids[:, 2 : 2 + tokens] = full.vision_start_token_id, full.image_token_id
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    given = {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": torch.randn(rows * patches, values, device=DEVICE).to(torch.bfloat16),
        "image_grid_thw": torch.tensor([IMAGE] * rows, device=DEVICE),
    }
    if "mm_token_type_ids" in inspect.signature(model_class.forward).parameters:  # not in transformers 4
        given["mm_token_type_ids"] = (ids == full.image_token_id).long()
    return given


def step(model: Any, batch: Batch, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> torch.Tensor:
    """The loss of a forward, which runs in a ``context``, and of its backward. The gradients stay."""
    model.zero_grad(set_to_none=True)
    with context():
        loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def captured(model: Any, batch: Batch) -> Callable[[], torch.Tensor]:
    """A whole step of this batch as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(model, batch)
        model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, batch)

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def stepper(model: Any, batch: Batch, arm: str) -> Callable[[], torch.Tensor]:
    return captured(model, batch) if arm in GRAPHS else partial(step, model, batch)


def first(model: Any, batch: Batch, arm: str) -> torch.Tensor:
    return stepper(model, batch, arm)()


def outcome(model: Any, batch: Batch, arm: str) -> Outcome:
    loss = float(first(model, batch, arm))
    inner = getattr(model, "_orig_mod", model)
    return loss, {name: p.grad.clone() for name, p in inner.named_parameters() if p.grad is not None}


def differs(found: Outcome, expected: Outcome) -> str:
    """Why an arm is not the eager model; empty when it is. In bfloat16 a gradient's direction is known to a percent."""
    if not abs(found[0] - expected[0]) <= 2e-3 * abs(expected[0]):
        return f"its loss is {found[0]} instead of {expected[0]}"
    if found[1].keys() != expected[1].keys():
        return f"gradients of {sorted(found[1].keys() ^ expected[1].keys())[:3]} are missing on one side"
    for name, gradient in found[1].items():
        cosine = float(torch.cosine_similarity(gradient.float().flatten(), expected[1][name].float().flatten(), dim=0))
        if not cosine > 0.99:
            return f"the gradient of {name} points elsewhere: cosine {cosine:.4f}"
    return ""


def attempt(what: str, call: Callable[[], Any]) -> Any:
    """What ``call`` returns; None where it fails: whatever an arm does, the others are measured."""
    try:
        return call()
    except Exception as problem:
        first_line = (str(problem).splitlines() or [""])[0]
        print(f"{what}: failed, not measured: {type(problem).__name__}: {first_line}", flush=True)
    return None


def measure(models: dict[str, Any], batch: Batch, repeats: int) -> dict[str, tuple[list[float], float]]:
    """Of each arm the milliseconds of its steps, arms taking turns, and its peak of memory in GiB; that of a graph is
    taken while it is captured."""
    runs, gib = {}, {}
    for arm, model in models.items():
        release()
        others = torch.cuda.memory_allocated() - sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
        torch.cuda.reset_peak_memory_stats()
        runs[arm] = run = stepper(model, batch, arm)
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        gib[arm] = (torch.cuda.max_memory_allocated() - others) / 2**30
        if arm not in GRAPHS:  # whose replays write into theirs
            model.zero_grad(set_to_none=True)
    times: dict[str, list[float]] = {arm: [] for arm in models}
    for _ in range(repeats):
        for arm, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times[arm].append(start.elapsed_time(end))
    for model in models.values():
        model.zero_grad(set_to_none=True)
    return {arm: (times[arm], gib[arm]) for arm in models}


def race(
    name: str, group: list[str], batches: list[Batch], expected: Outcome, layers: int | None, repeats: int
) -> list[ModelRow]:
    """The rows of arms that take turns, each of them printed: one for each batch and each arm that is right."""
    rows = []
    built = ((arm, attempt(f"{name} {arm}", partial(patched, name, arm, layers))) for arm in group)
    running = {arm: model for arm, model in built if model is not None}
    for i, batch in enumerate(batches):
        torch.compiler.reset()  # every shape is a program of its own
        shape, first_s = "x".join(map(str, batch["input_ids"].shape)), {}
        for arm, model in list(running.items()):
            # of the first shape, so that a compiled arm compiles no further one for the comparison
            call = partial(seconds, partial(first if i else outcome, model, batch, arm))
            found, first_s[arm] = attempt(f"{name} {shape} {arm}", call) or (None, 0.0)
            wrong = "" if i or found is None else differs(found, expected)
            if wrong:
                print(f"{name} {shape} {arm}: WRONG, not measured: {wrong}", flush=True)
            if wrong or found is None:
                del running[arm]
            del found
            model.zero_grad(set_to_none=True)
        for arm, (times, gib) in measure(running, batch, repeats).items():
            ms, deep = statistics.median(times), running[arm].config.get_text_config().num_hidden_layers
            rows.append(ModelRow(name, shape, arm, ms, spread(times), min(times), gib, first_s[arm], deep))
            shown = f"{ms:.2f} ms ({min(times):.2f}), {gib:.2f} GiB, first step {first_s[arm]:.1f} s"
            print(f"{name} {shape} {arm}: {shown}", flush=True)
    return rows


def release() -> None:
    """Gives back the GPU's memory that nothing uses any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--arms", default=",".join(ARMS), help="default: all; liger only where it is installed")
    parser.add_argument("--shapes", default="1x512,4x2048,2x8192", help="batch x length (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE, too")
    parser.add_argument("--repeats", type=int, default=10, help="measured steps per arm (default 10)")
    parser.add_argument("--layers", type=int, metavar="N", help="cut every model to its first N layers")
    arguments = parser.parse_args()
    arms, models = arguments.arms.split(","), arguments.models or list(MODELS)
    for kind, given, known in (("arms", arms, ARMS), ("models", models, MODELS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"unknown {kind} {unknown}; there are {list(known)}")
    if arguments.layers is not None and arguments.layers < 1:
        parser.error(f"--layers is {arguments.layers}; a model has at least 1")
    try:
        shapes = [(int(b), int(n)) for b, _, n in (shape.partition("x") for shape in arguments.shapes.split(","))]
    except ValueError:
        parser.error(f"--shapes is {arguments.shapes!r}; it must be like 1x512,4x2048")
    if not torch.cuda.is_available():
        parser.error("benchmarks need a GPU; torch.cuda.is_available() is False")
    if "liger" in arms and not files.versions(["liger-kernel"]):
        print("liger: skipped, liger_kernel is not installed")
        arms.remove("liger")
    try:
        batches = {name: [batch_of(name, shape) for shape in shapes] for name in models}
    except ValueError as error:
        parser.error(str(error))
    rows: list[ModelRow] = []
    for name in models:
        expected = outcome(build(name, arguments.layers), batches[name][0], "eager")
        for group in groups(arms):
            rows += race(name, group, batches[name], expected, arguments.layers, arguments.repeats)
            release()
        del expected
        release()
    print("\n" + table(rows))
    if arguments.json:
        rows_as_json = [asdict(row) for row in rows]
        files.write_json({"device": torch.cuda.get_device_name(), "rows": rows_as_json}, arguments.json)
    return int(not rows or len(rows) < len(models) * len(arms) * len(shapes))


def table(rows: list[ModelRow]) -> str:
    import transformers

    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"bfloat16, {datetime.date.today()}",
        "",
    ]
    columns = ("model", "layers", "tokens", "arm", "step, ms", "fastest", "peak, GiB", "first step, s")
    cells = [
        (
            *(r.model, r.layers, r.shape, r.arm, f"{r.ms:.1f} ± {r.spread_ms:.1f}"),
            *(f"{value:.1f}" for value in (r.fastest_ms, r.gib, r.first_s)),
        )
        for r in rows
    ]
    return "\n".join([*lines, *tables.markdown(columns, cells)])


if __name__ == "__main__":
    sys.exit(main())
