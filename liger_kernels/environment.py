"""What a bug report needs: versions, GPUs, and which kernels run here; ``python -m liger_kernels`` prints it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field

import torch

import liger_kernels
from liger_kernels.tested_torch import newer_torch

PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "peft", "deepspeed")


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        name: as its driver gives it.
        capability: "9.0" for NVIDIA's, "gfx942" for AMD's.
        memory: in bytes.
        shared_memory: that one program may have, in bytes; None where torch does not say.
        obstacle: why no kernel runs on it; empty where they do.
    """

    name: str
    capability: str
    memory: int
    shared_memory: int | None
    obstacle: str


@dataclass(frozen=True)
class EnvironmentReport:
    """What :func:`report` found. ``str`` of it is what a bug report needs.

    Attributes:
        versions: of the packages that are installed, by name, and of Python.
        platform: operating system and processor.
        gpus: that torch sees.
        kernels: by op, where its kernel runs: "cuda:0", "cpu (interpreter)"; empty: its reference runs everywhere.
        switches: by name, "on", or "off" and why.
    """

    versions: dict[str, str]
    platform: str
    gpus: tuple[GPU, ...]
    kernels: dict[str, tuple[str, ...]]
    switches: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [*self.versions.items(), ("platform", self.platform)]
        for index, gpu in enumerate(self.gpus):
            shared = "" if gpu.shared_memory is None else f", {gpu.shared_memory // 1024} KiB shared memory"
            memory = f"{gpu.memory / 2**30:.0f} GiB"
            rows.append((f"cuda:{index}", f"{gpu.name}, capability {gpu.capability}, {memory}{shared}"))
            if gpu.obstacle:
                rows.append(("", f"no kernels: {gpu.obstacle}"))
        if not self.gpus:
            rows.append(("GPU", "none"))
        for op, where in self.kernels.items():
            rows.append((op, f"kernel on {', '.join(where)}" if where else "reference in torch"))
        rows += self.switches.items()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def report() -> EnvironmentReport:
    """Versions, GPUs, which kernels run here, and what is switched off and why.

    Raises:
        ValueError: an environment variable of this package has a value that means nothing.
    """
    from liger_kernels.ops.runtime.device import obstacle, shared_memory
    from liger_kernels.ops.runtime.dispatch import HAS_TRITON, INTERPRET, launcher_state
    from liger_kernels.patching import KERNELS
    from liger_kernels.patching.logits import gathered
    from liger_kernels.trl_head import DIVERGENCE, state

    versions = {"liger-kernels": liger_kernels.__version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        gpus.append(
            GPU(
                properties.name,
                capability or f"{properties.major}.{properties.minor}",
                properties.total_memory,
                shared_memory(properties),
                obstacle(torch.device("cuda", index)),
            )
        )
    where = [f"cuda:{index}" for index, gpu in enumerate(gpus) if not gpu.obstacle] if HAS_TRITON else []
    if INTERPRET:
        where.append("cpu (interpreter)")
    switches = {
        "Triton": "on" if HAS_TRITON else "off, it is not installed: every op runs its reference",
        "interpreter": "on" if INTERPRET else "off, TRITON_INTERPRET is not 1",
        "kept programs": launcher_state(),
    }
    if "trl" in versions:
        switches["trl's LM head"] = state()
        switches["trl's divergence"] = state(DIVERGENCE)
        switches["gathered log-probabilities"] = gathered.state()
    if told := newer_torch():
        switches["torch"] = told
    kernels = dict.fromkeys(KERNELS, tuple(where))
    return EnvironmentReport(versions, platform.platform(), tuple(gpus), kernels, switches)
