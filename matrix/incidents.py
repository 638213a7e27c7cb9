"""Incidents as they happened: ``python -m matrix incident NAME``.

Each is a release of the day with its fault, and one without it. tox makes both environments from the package index, the
proof runs in each, and the command fails unless the first one is "different" for the reason that users reported, and
the second one is not.
"""

from __future__ import annotations

import shlex
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence.files import Unusable, read_json, write_json
from convergence.tables import aligned, literal, markdown, visible
from matrix import cells, records, runner

ENVIRONMENT = "incident"
_WIDTH = 98  # characters of a line of prose; a line that goes on ends in a backslash
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "incidents.md"


@dataclass(frozen=True)
class Incident:
    """One row.

    Attributes:
        saw: what users saw.
        report: where they reported it.
        cell: the cell of the matrix with transformers and trl of that day.
        faulty, fixed: what is installed in addition to the cell, or instead of its pin.
        command: what runs: arguments of pytest.
        shows: what the first failure of the faulty release says.
        fix: what ended it.
        remains: parts of what the fixed release still fails for, which is another fault.
    """

    saw: str
    report: str
    cell: str
    faulty: str
    fixed: str
    command: str
    shows: str
    fix: str
    remains: tuple[str, ...] = ()


# Liger's loss has larger errors in some rows than PyTorch's. In which step it shows depends on the CPU.
_ROWS = ("accumulated", "packed row error ratio")

# What unsloth_zoo asks for instead of the cell's pins.
_OF_UNSLOTH = "torch==2.12.1 datasets==4.3.0 multiprocess==0.70.16 dill==0.4.0 fsspec==2025.9.0"


def _trainers(patch: str, case: str, scope: str = "class") -> str:
    return f"convergence --trainer {case} --models llama --patch matrix.released:{patch} --scope {scope}"


def _proof(patch: str, model: str = "llama-tied", scope: str = "class") -> str:
    return f"convergence --models {model} --dtypes float32 --patch matrix.released:{patch} --scope {scope} --no-blame"


INCIDENTS = {
    "dpo-without-labels": Incident(
        saw="DPOTrainer calls the model in training without labels, and the patched forward slices them.",
        report="linkedin/Liger-Kernel#113",
        cell="tf4.46-trl0.12",
        faulty="liger-kernel==0.1.1",
        fixed="liger-kernel==0.2.0",
        command=_trainers("head_and_norms", "dpo"),
        shows="TypeError: 'NoneType' object is not subscriptable",
        fix="The forward computes its own loss only where labels are given.",
    ),
    "token-accuracy": Incident(
        saw="trl 0.15 reads the logits of every training step for the token accuracy; the fused head returns None.",
        report="linkedin/Liger-Kernel#568",
        cell="tf4.48-trl0.14",
        faulty="liger-kernel==0.5.8 trl==0.15.2",
        fixed="liger-kernel==0.5.8",
        command=_trainers("head", "sft"),
        shows="TypeError: 'NoneType' object is not subscriptable",
        fix="None of liger-kernel's: trl does not read logits where its own flag says that the model is patched.",
    ),
    "cu-seq-lens": Incident(
        saw="A collator without padding passes cu_seq_lens_q, which the patched forward hands on to the kernel.",
        report="linkedin/Liger-Kernel#650",
        cell="tf4.48-trl0.14",
        faulty="liger-kernel==0.5.6",
        fixed="liger-kernel==0.5.7",
        command=_trainers("head", "sft-completion-collator-padding-free"),
        shows="got an unexpected keyword argument 'cu_seq_lens_q'",
        fix="linkedin/Liger-Kernel#651: the loss drops what its kernel does not take.",
    ),
    "logits-are-gradients": Incident(
        saw="A convergence test compared logits with gradients, which the loss writes over the logits.",
        report="linkedin/Liger-Kernel#543",
        cell="tf4.49-trl0.15",
        faulty="liger-kernel==0.5.4",
        fixed="liger-kernel==0.5.4 transformers==4.48.3",
        command=_proof("loss"),
        shows="logits that the caller reads",
        fix="Nothing of the kernel's: up to 4.48 transformers copies the logits first. Some rows differ.",
        remains=_ROWS,
    ),
    "gemma-norm": Incident(
        saw="The norm of a patched Gemma multiplies by the weight, where Gemma's multiplies by 1 + the weight.",
        report="linkedin/Liger-Kernel#74",
        cell="tf4.46-trl0.12",
        faulty="liger-kernel==0.1.1",
        fixed="liger-kernel==0.2.0",
        command=_proof("norms", "gemma"),
        shows="error ratio",
        fix="linkedin/Liger-Kernel#85: the kernel has an offset.",
        remains=("warning that the baseline does not give",),
    ),
    "accumulation": Incident(
        saw="Accumulated gradients are those of other losses: the patched forward does not take num_items_in_batch.",
        report="linkedin/Liger-Kernel#322",
        cell="tf4.46-trl0.12",
        faulty="liger-kernel==0.3.1",
        fixed="liger-kernel==0.4.2",
        command=_trainers("head", "sft"),
        shows="error ratio",
        fix="linkedin/Liger-Kernel#333 and linkedin/Liger-Kernel#339: the forward divides by the number it is given.",
    ),
    "one-model": Incident(
        saw="A patch of one model stays in its class, so that the models of later tests are patched, too.",
        report="linkedin/Liger-Kernel#772",
        cell="tf4.52-trl0.18",
        faulty="liger-kernel==0.5.10",
        fixed="liger-kernel==0.6.1",
        command=_proof("head_of_one_model", scope="instance"),
        shows="other models patched too",
        fix="The forward is bound to the model that was given. Some rows differ in both.",
        remains=_ROWS,
    ),
    "positions-of-rows": Incident(
        saw="The rotation uses the positions of the first row for all rows.",
        report="linkedin/Liger-Kernel#477",
        cell="tf4.49-trl0.15",
        faulty="liger-kernel==0.5.2",
        fixed="liger-kernel==0.5.4",
        command=_proof("rope"),
        shows="error ratio",
        fix="The kernel reads the angles of each row. It still writes over the projections that it is given.",
        remains=("overwritten",),
    ),
    "missing-attribute": Incident(
        saw="The norm of a model that is patched after it was made lacks an attribute that its new forward reads.",
        report="linkedin/Liger-Kernel#383",
        cell="tf4.46-trl0.12",
        faulty="liger-kernel==0.4.1",
        fixed="liger-kernel==0.5.0",
        command=_proof("norms_of_one_model", scope="instance"),
        shows="object has no attribute 'in_place'",
        fix="linkedin/Liger-Kernel#392, in 0.4.2, which needs CUDA: a norm gets it. The class stays patched.",
        remains=("other models patched too",),
    ),
    "packed-count": Incident(
        saw="The loss of packed rows is divided by too few targets: boundaries of samples are taken off twice.",
        report="unslothai/unsloth-zoo#1066",
        cell="tf4.56-trl0.23",
        faulty=f"unsloth_zoo==2026.8.12 {_OF_UNSLOTH}",
        fixed=f"unsloth_zoo==2026.8.13 {_OF_UNSLOTH}",
        command=_trainers("count_of_packed_rows", "sft-padding-free"),
        shows="error ratio",
        fix="Targets are counted by the samples' lengths. That is the Trainer's own number again, bit for bit.",
        remains=("not patched",),
    ),
}


def main(names: list[str], folder: Path, write_page: bool) -> int:
    """Run the incidents called ``names``; none: list them. 1 unless each shows its fault, and none where it is fixed.

    Raises:
        ValueError: there is no incident of that name.
        Unusable: a run left no record.
    """
    if unknown := [name for name in names if name not in INCIDENTS]:
        raise ValueError(f"unknown incident {', '.join(unknown)}; allowed are {', '.join(INCIDENTS)}")
    if not names and not write_page:
        rows = [(name, incident.faulty, incident.saw) for name, incident in INCIDENTS.items()]
        print("\n".join(aligned(("incident", "release", "what users saw"), rows)))
        return 0
    outcomes = [run(name, folder) for name in names]
    for outcome in outcomes:
        for arm in ("faulty", "fixed"):
            print(visible(f"{outcome['incident']}, {outcome[arm]['installed']}: {outcome[arm]['verdict']}"))
        print(f"{outcome['incident']}: {'as expected' if outcome['as expected'] else 'NOT as expected'}")
    if write_page:
        PAGE.write_text("\n".join(page(folder)), encoding="utf-8")
    return int(not all(outcome["as expected"] for outcome in outcomes))


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run both releases of one incident; what came of it is returned, and is in ``folder``, too."""
    incident = INCIDENTS[name]
    outcome: dict[str, Any] = {"incident": name, "date": runner.now(), "machine": runner.machine()}
    command = incident.command
    for arm, installed in (("faulty", incident.faulty), ("fixed", incident.fixed)):
        place = folder / "incidents" / f"{name}-{arm}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        requirements = place / "requirements.txt"
        requirements.write_text("\n".join(requirements_of(incident.cell, installed)) + "\n", encoding="utf-8")
        environment = cells.Cell(ENVIRONMENT, incident.saw, {}, ENVIRONMENT, "")
        options = [*shlex.split(command), "--records", str(place.absolute() / "records")]
        runner.tox([environment], 1, options, folder, MATRIX_REQUIREMENTS=str(requirements.absolute()))
        verdict, reasons = _verdict(place / "records")
        outcome[arm] = {"installed": installed, "command": f"pytest {command}", "verdict": verdict, "reasons": reasons}
    shown = any(incident.shows in reason for reason in outcome["faulty"]["reasons"])
    others = [r for r in outcome["fixed"]["reasons"] if not any(known in r for known in incident.remains)]
    outcome["as expected"] = shown and not others
    write_json(outcome, folder / "incidents" / f"{name}.json")
    return outcome


def requirements_of(cell: str, installed: str) -> list[str]:
    """The pins of a cell with those that ``installed`` names, separated by spaces, instead of them or in addition."""
    pins = cells.load_all()[cell].pins
    pins |= {
        records.canonical(package): version for package, _, version in (x.partition("==") for x in installed.split())
    }
    return [f"{package}=={version}" for package, version in pins.items()]


def _verdict(folder: Path) -> tuple[str, list[str]]:
    """What the records in ``folder`` say together, and the failures of those that did not pass."""
    found = [data for path in sorted(folder.glob("*.json")) if "verdict" in (data := read_json(path))]
    if not found:
        raise Unusable(f"{folder}: no record: the environment could not be made, or nothing ran in it")
    failed = [data for data in found if data["verdict"] != "equal"]
    reasons = [" ".join(str(part) for part in failure if part) for data in failed for failure in data["failures"]]
    return ", ".join(sorted({data["verdict"] for data in failed or found})), reasons


def page(folder: Path) -> list[str]:
    """The page of evidence, of all outcomes in ``folder``."""
    command = f"$ python -m matrix incident {' '.join(INCIDENTS)} --page"
    lines = [
        "# Incidents, as they happened",
        "",
        "Releases whose faults users reported, installed from the package index and judged by the proof on a",
        "CPU, next to a release or an environment without the fault. Written by:",
        "",
        "```console",
        " \\\n      ".join(textwrap.wrap(command, _WIDTH - 8, break_on_hyphens=False)),
        "```",
        "",
        "Not measured: speed, and what these releases do on a GPU.",
    ]
    for name, incident in INCIDENTS.items():
        path = folder / "incidents" / f"{name}.json"
        if not path.exists():
            continue
        outcome = read_json(path)
        told = f"{incident.saw} Reported as {literal(incident.report)}. {incident.fix}"
        lines += ["", f"## {name}", "", *textwrap.wrap(told, _WIDTH, break_on_hyphens=False), ""]
        rows = []
        for arm in (outcome["faulty"], outcome["fixed"]):
            reason = next((r for r in arm["reasons"] if incident.shows in r), (*arm["reasons"], "-")[0])
            rows.append((literal(arm["installed"]), arm["verdict"], literal(reason[:200])))
        lines += markdown(("in addition to the cell, or instead of its pin", "what the proof says", "why"), rows)
        lines += [
            "",
            f"`{outcome['faulty']['command']}`",
            "",
            f"Cell {literal(incident.cell)}, a CPU, {outcome['date'][:10]}.",
        ]
    return [*lines, ""]
