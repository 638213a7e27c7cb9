"""Peaks that ``liger_kernels.fit`` calculates, next to what the same steps take on a GPU.

``python -m benchmarks.fit [shape ...] [--json FILE]``

Each shape is a process of its own: a step is calculated, then the model is built with random weights, trained for two
steps of random tokens with its optimizer, and ``torch.cuda.max_memory_allocated`` of the second one is the measured
peak. QLoRA needs bitsandbytes. The exit code is 1 where a peak is more than 5% off, or a shape failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.process import run_module
from benchmarks.sharded import SHAPE as LLAMA_8B
from convergence import files, tables
from liger_kernels.fitting import step
from liger_kernels.fitting.training import Training

CLOSE = 0.05
GIB = 2**30
PHI = models.decoder(hidden=3072, inner=8192, layers=32, heads=32, keys=32, classes=32064)
GEMMA_2B = models.decoder(hidden=2304, inner=9216, layers=26, heads=8, keys=4, classes=256000, head_dim=256)


@dataclass(frozen=True)
class FitShape:
    """A configuration class with its sizes, how it is trained, and tokens of a row."""

    config: str
    sizes: dict[str, Any]
    setup: Training
    tokens: int

    def make(self) -> Any:
        import transformers

        config = getattr(transformers, self.config)(**self.sizes, pad_token_id=0, attention_dropout=0.0)
        config.max_position_embeddings = 131072
        return config


def _of(model: str) -> dict[str, Any]:
    return models.MODELS[model][1]


_TILES = Training(rank=16, offload="layers", recompute="mlp", batch=64)
SHAPES: dict[str, FitShape] = {
    "llama-1b": FitShape("LlamaConfig", _of("llama"), Training(), 16384),
    "llama-1b-kept": FitShape("LlamaConfig", _of("llama"), Training(checkpointing=False, batch=2), 4096),
    "llama-8b-lora": FitShape("LlamaConfig", LLAMA_8B, Training(rank=16), 16384),
    "llama-8b-qlora": FitShape("LlamaConfig", LLAMA_8B, Training(rank=16, quantised=True), 16384),
    "llama-8b-offload": FitShape("LlamaConfig", LLAMA_8B, Training(rank=16, offload="layers", batch=64), 1024),
    "llama-8b-tiles": FitShape("LlamaConfig", LLAMA_8B, _TILES, 1024),
    "llama-8b-sgd": FitShape("LlamaConfig", LLAMA_8B, Training(full="sgd"), 32768),
    "gemma3": FitShape("Gemma3TextConfig", _of("gemma3"), Training(), 8192),
    "gemma2-lora": FitShape("Gemma2Config", GEMMA_2B, Training(rank=16), 4096),
    "qwen3-small": FitShape("Qwen3Config", _of("qwen3"), Training(checkpointing=False, memory="small"), 8192),
    "experts": FitShape("Qwen3MoeConfig", _of("qwen3_moe"), Training(), 8192),
    "experts-kept": FitShape("Qwen3MoeConfig", _of("qwen3_moe"), Training(full="sgd", checkpointing=False), 16384),
    "phi3-lora": FitShape("Phi3Config", PHI, Training(rank=16), 16384),
}


@dataclass(frozen=True)
class FitRow:
    """A line of the table: bytes, or why there are none."""

    shape: str
    setup: str
    tokens: int
    calculated: int = 0
    measured: int = 0
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.calculated / self.measured if self.measured else 0.0

    @property
    def close(self) -> bool:
        return abs(self.ratio - 1) <= CLOSE


def quantise(model: Any) -> None:
    """Every linear layer but the head in NF4, twice quantised, as QLoRA has them."""
    import bitsandbytes as bnb

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, torch.nn.Linear) and linear is not head:
                four = bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=linear.bias is not None,
                    compute_dtype=linear.weight.dtype,
                    compress_statistics=True,
                    quant_type="nf4",
                    device="meta",
                )
                weight = linear.weight.detach().cpu()
                four.weight = bnb.nn.Params4bit(
                    weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=four
                )
                four.bias = linear.bias
                setattr(parent, name, four.to(linear.weight.device))
    model.is_loaded_in_4bit = model.is_quantized = True


def measure(shape: FitShape, device: str = "cuda") -> int:
    """The peak of the second of two steps."""
    torch.manual_seed(0)
    setup = shape.setup
    model = step.build(shape.make(), device)
    if setup.quantised:
        quantise(model)
    model = step.prepare(model, setup)
    optimizer = setup.optimizer(step.trained(model), fused=device == "cuda")
    for _ in range(2):
        models.release()
        torch.cuda.reset_peak_memory_stats()
        step.backward(model, setup, shape.tokens, device)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def one(name: str, shape: FitShape, measured: Callable[[FitShape], int] = measure) -> FitRow:
    calculated = step.MetaStep(shape.make(), shape.setup).count(shape.tokens).peak
    return FitRow(name, str(shape.setup), shape.setup.batch * shape.tokens, calculated, measured(shape))


def in_own_process(name: str) -> FitRow:
    done = run_module("benchmarks.fit", ["--one", name], environment={"TOKENIZERS_PARALLELISM": "false"}, timeout=300)
    if done.problem:
        print(f"{name}: {done.problem}", flush=True)
        shape = SHAPES[name]
        tokens = shape.setup.batch * shape.tokens
        return FitRow(name, str(shape.setup), tokens, note=f"failed: {done.problem.splitlines()[-1]}")
    return FitRow(**json.loads(done.output.splitlines()[-1]))


def table(rows: Sequence[FitRow]) -> list[str]:
    columns = ("shape", "trained", "tokens", "calculated, GiB", "measured, GiB", "ratio")
    cells = [
        (row.shape, row.setup, f"{row.tokens:,}", row.note, "", "")
        if row.note
        else (
            *(row.shape, row.setup, f"{row.tokens:,}", f"{row.calculated / GIB:.2f}", f"{row.measured / GIB:.2f}"),
            f"{row.ratio:.3f}",
        )
        for row in rows
    ]
    return tables.markdown(columns, cells)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="shape", help=f"of {', '.join(SHAPES)}; all by default")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE, too")
    parser.add_argument("--one", action="store_true", help="of one shape in this process, as a line of JSON")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.shapes) - set(SHAPES)):
        parser.error(f"unknown shapes {unknown}; there are {list(SHAPES)}")
    if options.one and len(options.shapes) != 1:
        parser.error("--one takes one shape")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    return options


def main(arguments: Sequence[str] | None = None, start: Callable[[str], FitRow] = in_own_process) -> int:
    import transformers

    options = parse(arguments)
    if not torch.cuda.is_available() and start is in_own_process:
        print("benchmarks need a GPU; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    if options.one:
        print(json.dumps(asdict(one(options.shapes[0], SHAPES[options.shapes[0]]))))
        return 0
    rows: list[FitRow] = []
    for name in options.shapes or SHAPES:
        rows.append(start(name))
        print(table(rows)[-1], flush=True)
        if options.json:
            files.write_json({"rows": [asdict(row) for row in rows]}, options.json)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"\n{gpu}, torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}\n")
    print("\n".join(table(rows)))
    return int(not all(row.close for row in rows))


if __name__ == "__main__":
    sys.exit(main())
