"""``python -m benchmarks.adapters.page FILE ...``: docs/evidence/adapters.md from what ``--json`` wrote."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.adapters import report
from benchmarks.process import ROOT
from convergence import files

PAGE = ROOT / "docs" / "evidence" / "adapters.md"
KINDS = ("steps", "check", "start")
_INTRO = """\
# Adapters, measured

`python -m benchmarks.adapters` trains LoRA and QLoRA adapters of rank 16 on every linear layer of the
Llama-3 8B shape, one sequence at a time, on one GPU. Each arm is a process of its own and has the
same random weights, adapters and tokens.

| arm | what runs |
|---|---|
| eager | PEFT's own forward |
| ours | `liger_kernels.patch(model)` after `get_peft_model` |
| ours-offload | `liger_kernels.patch(model, offload="layers")`: what checkpoints keep goes to the host |
| liger | liger-kernel, as a Trainer with `use_liger_kernel=True` applies it |
| axolotl | PEFT's model with axolotl's LoRA kernels |
| unsloth | the model of unsloth's loader, with its adapters and its checkpointing |

A step is forward and backward, without an optimizer. Times are medians of steps that the device has
finished; memory is the peak of a step, weights included. Checkpoints "on the GPU" are those of
transformers without reentry, and those of unsloth without its offload. NF4 is bitsandbytes' 4-bit
format, double quantised. An arm whose loss or norm of the gradient is not eager's is marked WRONG.
A package that is not installed is absent; `--path ARM=DIR` gives an arm a folder of packages of its
own, such as unsloth with the versions that it needs.

`--trained dora` has DoRA in place of LoRA. `--trained experts` has LoRA of attention and of packed
experts (`target_parameters`) on the Qwen3-MoE shape: 8 layers, 128 experts of 768 features.
`--trained full` trains every weight.

Not measured: optimizers, other models, and quantised DoRA.

Two commands write this page:

```console
$ python -m benchmarks.adapters --json steps.json
$ python -m benchmarks.adapters.page steps.json check.json start.json
```
"""
_SECTIONS = {
    "steps": """\
## Time and memory

A cell is the median of a step in seconds, then the peak in GiB.
""",
    "check": """\
## Errors of gradients

Relative to float64, all layers together. "model" is a step of the whole model, in which the roundings
of the base hide those of the adapters. The other rows are the adapters of one projection, with the
same random input and upstream gradient in all arms; those of gate, up and down are behind the
rounding of the product between them.
""",
    "start": """\
## From the start of a process

Seconds until the device has finished the step, imports, weights, tuning and compilation included.
"Filled" caches have the compiled kernels of an earlier process.
""",
}
_OPTIONS = {"steps": "", "check": " --check", "start": " --from-start"}


def page(results: Sequence[report.Result]) -> str:
    """The page; a section without a result names the command that measures it."""
    versions = report.shared_versions(results)
    lines = [_INTRO, *_wrapped(report.defaults(versions) if results else "")]
    for kind in KINDS:
        lines.append(_SECTIONS[kind])
        of_kind = [found for found in results if found["kind"] == kind]
        for found in of_kind:
            table = report.matrix_lines(found) if kind == "steps" else report.table(found).splitlines()
            lines += [*_wrapped(report.caption(found, versions)), *table, ""]
        if not of_kind:
            lines += [f"Not measured: `python -m benchmarks.adapters{_OPTIONS[kind]}`.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _wrapped(text: str) -> list[str]:
    """A paragraph, and the empty line behind it; nothing for nothing."""
    return [*textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False), ""] if text else []


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters.page", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of python -m benchmarks.adapters --json")
    parser.add_argument("--out", type=Path, default=PAGE, help="default: %(default)s")
    options = parser.parse_args(arguments)
    results = [files.read_json(path) for path in options.files]
    for path, found in zip(options.files, results, strict=True):
        if not isinstance(found, dict) or found.get("kind") not in KINDS:
            parser.error(f"{path} is not what python -m benchmarks.adapters --json writes")
    options.out.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
