"""``liger_kernels.compat``: found under the name of liger-kernel on request only. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convergence.arms import isolate

ROOT = Path(__file__).parent.parent


def python(code: str, **environment: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_names_and_metadata_come_with_install_and_go_with_uninstall() -> None:
    """After trl it is too late. Losses that are not provided say so when they are constructed."""
    python("""
import importlib.metadata, importlib.util, sys, types
import liger_kernels.compat as compat
assert importlib.util.find_spec("liger_kernel") is None
sys.modules["trl"] = types.ModuleType("trl")
try: compat.install()
except RuntimeError as error: assert "before the first import of trl" in str(error)
else: raise AssertionError
del sys.modules["trl"]
assert importlib.util.find_spec("liger_kernel") is None
compat.install(); compat.install()
assert sum(type(finder).__module__ == "liger_kernels.compat" for finder in sys.meta_path) == 1
assert "transformers" not in sys.modules
import liger_kernel
for name in ("liger_kernel", "liger-kernel"):
    assert importlib.metadata.version(name) == liger_kernel.__version__
assert liger_kernel.__version__ == f"0.8.2+liger.kernels.{compat.__version__}"
assert "liger-kernel" in importlib.metadata.packages_distributions()["liger_kernel"]
assert importlib.metadata.version("torch")  # others are still found, and not by us
from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss, LigerFusedLinearKTOLoss
)
for loss in (LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss, LigerFusedLinearKTOLoss):
    try: loss(beta=0.1)
    except NotImplementedError as error: assert loss.__name__ in str(error), error
    else: raise AssertionError(loss)
from transformers.utils import is_liger_kernel_available
assert is_liger_kernel_available()
from liger_kernel.transformers import AutoLigerKernelForCausalLM, _apply_liger_kernel_to_instance
from liger_kernel.transformers import apply_liger_kernel_to_llama
compat.uninstall(); compat.uninstall()
assert not is_liger_kernel_available()
assert importlib.util.find_spec("liger_kernel") is None
assert not [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]
try: importlib.metadata.version("liger-kernel")
except importlib.metadata.PackageNotFoundError: pass
else: raise AssertionError
""")


def test_the_real_package_is_never_hidden(tmp_path: Path) -> None:
    """Neither a package of that name nor its metadata alone."""
    (tmp_path / "package" / "liger_kernel").mkdir(parents=True)
    (tmp_path / "package" / "liger_kernel" / "__init__.py").write_text("")
    folder = tmp_path / "metadata" / "liger_kernel-0.6.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: liger_kernel\nVersion: 0.6.0\n")
    python(f"""
import sys
from liger_kernels import compat
for folder in {[str(tmp_path / what) for what in ("package", "metadata")]}:
    sys.path.insert(0, folder)
    try: compat.install()
    except RuntimeError as error: assert "pip uninstall liger-kernel" in str(error)
    else: raise AssertionError(folder)
    del sys.path[0]
compat.install()  # the folders were what it refused
""")


def patched_by_the_flag(folder: str) -> None:
    """In a process that has imported transformers, and never this."""
    import inspect

    from transformers import Trainer, TrainingArguments
    from transformers.utils import is_liger_kernel_available

    import liger_kernels.compat
    from tests.patching_checks import batch, tiny

    has_configuration = "liger_kernel_config" in inspect.signature(TrainingArguments).parameters

    def reports(config: dict[str, bool] | None, model: Any) -> set[str]:
        arguments: dict[str, Any] = {"output_dir": folder, "use_cpu": True, "report_to": "none", "max_steps": 1}
        arguments.update(save_strategy="no", use_liger_kernel=True, disable_tqdm=True)
        if config and has_configuration:
            arguments["liger_kernel_config"] = config
        data: Any = [{key: value[0].cpu() for key, value in batch().items()}] * 8
        trainer = Trainer(model.cpu(), TrainingArguments(**arguments), train_dataset=data)
        trainer.train()
        return set(liger_kernels.status(trainer.model).kernels)

    assert not is_liger_kernel_available()
    liger_kernels.compat.install()
    assert is_liger_kernel_available()
    everything = set(liger_kernels.KERNELS)
    assert reports(None, tiny("llama")) == everything - {"cross_entropy"}
    patched = tiny("gemma")
    liger_kernels.patch(patched)
    assert reports(None, patched) == everything
    if has_configuration:
        config = {"rope": False, "fused_linear_cross_entropy": False}
        others = {"rms_norm", "layer_norm", "gated_rms_norm", "swiglu", "geglu", "experts"}
        others |= {"lora_linear", "dora_linear", "lora_experts"}
        assert reports(config, tiny("llama")) == others
        assert not {"rms_norm", "gated_rms_norm"} & reports({"rms_norm": False}, tiny("llama"))
        assert "layer_norm" not in reports({"layer_norm": False}, tiny("llama"))
    liger_kernels.compat.uninstall()
    assert not is_liger_kernel_available()


@pytest.mark.slow
def test_the_flag_of_transformers_patches_the_model(tmp_path: Path) -> None:
    """``use_liger_kernel=True``, with and without a configuration, and on a model that is patched already; transformers
    was imported before the package is installed, and loses it again."""
    isolate.call(patched_by_the_flag, str(tmp_path))
