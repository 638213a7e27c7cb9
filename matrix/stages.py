"""What runs in a cell: a few pytest processes, one after another, in the cell's own environment."""

from __future__ import annotations

from dataclasses import dataclass

# The proof's short form for cells on a CPU: one model of each family, the loss that ``patch`` chooses by itself. Both
# dtypes and every replica are there, so a verdict means what it means in the long form.
SHORT = ("--models", "llama-tied,gemma,gemma2,gemma3", "--patch", "convergence.patches:fused_linear")


@dataclass(frozen=True)
class Stage:
    """One process: ``python -m pytest`` with these arguments.

    Attributes:
        arguments: the paths, and options of pytest and of this project's plugins.
        on_gpu: what replaces them on a machine with a GPU; the same when empty.
        alone: whether one process takes all of a GPU: there are no workers then.
        leaves_records: whether it gets ``--records DIR``, and must leave at least one there.
    """

    name: str
    does: str
    arguments: tuple[str, ...]
    on_gpu: tuple[str, ...] = ()
    alone: bool = False
    leaves_records: bool = False


_CONVERGENCE = ("convergence", "--profile", "hard", "--dist", "loadgroup")
_PROOF = Stage(
    "convergence",
    "the proof on llama, gemma, gemma2 and gemma3 in float32 and bfloat16, hard profile",
    (*_CONVERGENCE, *SHORT),
    (*_CONVERGENCE, "--models", "core"),
    leaves_records=True,
)
_MODELS = Stage(
    "models",
    "every causal LM of that version, shrunk: census of the patch, signatures of what it replaced; every model at its "
    "own size: shares of what runs on kernels; private names",
    ("matrix/checks/test_census.py", "matrix/checks/test_models.py", "matrix/checks/test_private_names.py"),
    leaves_records=True,
)
_TRAINERS = Stage(
    "trainers",
    "the Trainer and trl's trainers, patched and unpatched; upstream's flags; what once went wrong",
    ("matrix/trainers",),
    leaves_records=True,
)
_SETUPS = ("convergence", "--dist", "loadgroup", "--models", "llama-tied", "--dtypes", "float32", "--setups")
STAGES = {
    "versions": (
        _MODELS,
        _PROOF,
        Stage(
            "setups",
            "the proof in DDP and FSDP2 on two ranks; on a GPU, under autocast and checkpointing",
            (*_SETUPS, "ddp,fsdp2"),
            (*_SETUPS, "bf16-autocast,checkpointing"),
            leaves_records=True,
        ),
        _TRAINERS,
        Stage(
            "packing",
            "the loss of packed samples, through this version's collators, Trainer and trl's SFT; trl's fused head",
            ("tests/test_packing.py", "tests/test_compat_head.py", "tests/test_compat_divergence.py"),
        ),
    ),
    "torch": (
        Stage(
            "compile",
            "this Triton reads every program; the largest of each kernel compiles for every target, and fits",
            ("tests/test_ops_compile.py", "--programs", "largest"),
        ),
        Stage(
            "ops",
            "every op against its reference; private names that the project touches",
            (
                "matrix/checks/test_private_names.py",
                "tests",
                "--ignore-glob",
                "tests/test_[!o]*",
                "--ignore",
                "tests/test_ops_compile.py",
            ),
        ),
        _PROOF,
    ),
    # What follows upstream's main branches, night by night.
    "main": (_MODELS, _PROOF, _TRAINERS),
    # These run in the environment that is there.
    "two-gpus": (
        Stage(
            "setups",
            "the proof in every set-up of several processes, over NCCL",
            (
                *("convergence", "--dist", "loadgroup", "--models", "llama-tied,llama-untied,gemma", "--setups"),
                "device-map,ddp,fsdp2,lora-fsdp2,fsdp1,zero3,tensor-parallel,sequence-parallel",
            ),
            leaves_records=True,
        ),
    ),
    "project": (
        Stage(
            "tests",
            "unit tests; on a GPU, the files of ops, patching and packing: most others judge the proof on a CPU",
            ("tests", "--ignore", "tests/test_mutants.py"),
            ("tests", "--ignore-glob", "tests/test_[!op]*"),
        ),
        Stage("convergence", "the proof on the core models, both losses", _CONVERGENCE, leaves_records=True),
        Stage(
            "setups",
            "the proof in every set-up",
            ("convergence", "--dist", "loadgroup", "--models", "llama-tied", "--setups", "all"),
            (
                *_SETUPS,
                "bf16-autocast,fp16-scaler,checkpointing,compile,lora,lora-dropout-checkpointing,lora-autocast,"
                "qlora,qlora-checkpointing,qlora-8bit,qlora-8bit-checkpointing,float8,float8-checkpointing",
            ),
            leaves_records=True,
        ),
        Stage(
            "scale",
            "the proof at real widths on a GPU; on a CPU, two shapes of which everything is divided",
            ("convergence", "--profile", "scale", "--models", "llama3-8b-odd?divided=64,gemma3-4b-odd?divided=64"),
            ("convergence", "--profile", "scale"),
            alone=True,
            leaves_records=True,
        ),
        Stage(
            "mutants",
            "a fixed sample of faults, each of which the proof must see",
            ("tests/test_mutants.py", "--dist", "loadgroup"),
        ),
        Stage(
            "packaging",
            "what is built installs and imports with nothing optional; private names",
            ("matrix/checks/test_package.py", "matrix/checks/test_private_names.py"),
        ),
    ),
}
