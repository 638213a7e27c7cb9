"""``python -m tools.peers DIR``: docs/evidence/peers.md from the records of ``python -m convergence peers DIR``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from convergence.arms.quantities import Finding
from convergence.peers import PEERS, Peer
from convergence.report.records import CANNOT_RUN, STATISTICS, Record, load_folder
from convergence.tables import markdown

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "peers.md"
REPRODUCERS = PAGE.parent / "reproducers"
_INTRO = """\
# Other packages, judged by the proof

What `pytest convergence` says of kernels that users could pick instead of these. Each package comes
unchanged from its registry, in its newest release, and is patched as its documentation says, in a
process of its own. `convergence/peers.py` has the patches. Written by two commands:

```console
$ python -m convergence peers DIR -n 12 --dist loadgroup
$ python -m tools.peers DIR
```

"Numbers" are losses, gradients, parameters and logits, within the same bounds that our own patch is
judged by. "Equal" also asks for what a caller can see: that no other model is patched, that nothing
returned is overwritten, and that no gradient is missing. Speed and memory are on
[Ops](benchmarks.md) and [Whole models](whole-models.md). liger-kernel on a GPU has
[a page of its own](liger-kernel.md), and so has [what their own tests accept](peer-tolerances.md).

axolotl's LoRA kernels (`pytest convergence --setups lora-single --models llama-tied --patch
convergence.peers:axolotl`; axolotl 0.19.0, H200, torch 2.11.0, 2026-11-28) have the right numbers in
float32 and bfloat16 (error ratios 1.1 / 2.4 and 1 / 2.7). They are "different", because
`LlamaAttention.forward` is replaced in all models.

Written by hand: unsloth's rows, from `pytest convergence --patch convergence.peers:unsloth --models
llama-tied`, 2026-11-28 and -29, and those of transformers' kernels.

Not measured: other set-ups, real widths, models that are not `core`, and unsloth with any other
model.
"""
_NUMBERS = {*STATISTICS, Finding.FINITE, Finding.ZERO, Finding.NON_ZERO, Finding.LOGITS_GAP}
_SHORT = 120


def verdict(record: Record) -> str:
    """In words, whether the numbers are right, and what else is not."""
    if record.verdict == CANNOT_RUN:
        return CANNOT_RUN
    if record.verdict == "equal":
        return "equal"
    wrong = {failure.finding for failure in record.failures}
    if wrong & _NUMBERS:
        return "numbers differ"
    return "raises" if wrong & {Finding.RAISED, Finding.DIED} else "numbers right; " + ", ".join(sorted(wrong))


def reasons(record: Record) -> str:
    """The first failure of each kind, in one line."""
    found: dict[str, str] = {}
    for quantity, step, finding, value, bound in record.failures:
        text = " ".join(part for part in (quantity, step, finding, value) if part) + (f" / {bound}" if bound else "")
        found.setdefault(finding, " ".join(text.split()))
    return "; ".join(text if len(text) <= _SHORT else text[: _SHORT - 3] + "..." for text in found.values())


def section(peer: Peer, records: Sequence[Record]) -> list[str]:
    lines = ["", f"## {peer.name}", "", f"Patched by {peer.how}.", ""]
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}  # dtypes by model
    for record in records:
        where = record.versions.get("device", record.device)
        numbers = [str(record.worst(name) or "-") for name in ("error ratio", "gain")]
        row = where, verdict(record), *numbers, _cell(reasons(record))
        alike.setdefault(row, {}).setdefault(record.model, []).append(record.dtype)
    rows: list[tuple[str, ...]] = []
    for row, by_model in alike.items():
        by_dtypes: dict[str, list[str]] = {}
        for model, dtypes in by_model.items():
            by_dtypes.setdefault(", ".join(dtypes), []).append(model)
        rows += [(", ".join(models), dtypes, *row) for dtypes, models in by_dtypes.items()]
    header = ("model", "dtype", "device", "verdict", "error ratio", "gain", "reason")
    return lines + markdown(header, rows)


def _cell(text: str) -> str:
    return re.sub(r"([|<>])", r"\\\1", text).replace("`", "'")


def summary(found: dict[str, list[Record]]) -> list[str]:
    """A row a package: how many of its cases came to which verdict."""
    rows = []
    for patch, records in found.items():
        peer = PEERS[patch]
        versions = sorted({record.versions.get(peer.distribution, "?") for record in records})
        counts = [0, 0, 0, 0]
        for record in records:
            said = verdict(record)
            kinds = ("equal", "numbers right", "numbers differ", "cannot run")
            counts[next((i for i, kind in enumerate(kinds) if said.startswith(kind)), 2)] += 1
        rows.append((peer.name, f"{peer.distribution} {', '.join(versions)}", *counts))
    header = ("what", "version", "equal", "only the numbers", "wrong or raises", "cannot run")
    return markdown(header, rows)


def measured(records: Iterable[Record]) -> list[str]:
    return sorted(
        {
            f"Measured on: {record.versions.get('device', record.device)}, torch {record.versions.get('torch')}, "
            f"triton {record.versions.get('triton')}, transformers {record.versions.get('transformers')}, "
            f"{record.at[:10]}."
            for record in records
        }
    )


def page(records: Sequence[Record]) -> str:
    """The page; a package without a record has no part in it."""
    found = {patch: [r for r in records if r.patch == patch] for patch in PEERS}
    found = {patch: rows for patch, rows in found.items() if rows}
    lines = [_INTRO, *summary(found), "", *measured(record for rows in found.values() for record in rows)]
    missing = [peer.name for patch, peer in PEERS.items() if patch not in found]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}. Most kernels need a GPU."]
    scripts = sorted(REPRODUCERS.glob("*.py")) if REPRODUCERS.is_dir() else []
    if scripts:
        lines += ["", "## Reproducers", "", "Each needs the package alone, and prints what it should not."]
        shown = [(f"[{path.name}](reproducers/{path.name})", _first_line(path)) for path in scripts]
        lines += ["", *markdown(("script", "what it shows"), shown)]
    for patch, of_peer in found.items():
        lines += section(PEERS[patch], of_peer)
    return "\n".join(lines) + "\n"


def _first_line(script: Path) -> str:
    return script.read_text(encoding="utf-8").split('"""')[1].strip().splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peers", description=__doc__)
    parser.add_argument("records", type=Path, help="a folder of records")
    PAGE.write_text(page(load_folder(parser.parse_args().records)), encoding="utf-8")


if __name__ == "__main__":
    main()
