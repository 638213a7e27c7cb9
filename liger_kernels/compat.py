"""Lets transformers and trl find this package under the name that their flags look for, when somebody asks for it.

``use_liger_kernel=True`` (transformers, trl), ``use_liger=True`` and ``use_liger_loss=True`` (older trl) import a
package ``liger_kernel`` and ask its distribution for a version. After :func:`install` both lead here::

    import liger_kernels.compat

    liger_kernels.compat.install()  # before trl is imported

Patches of a model do what they do everywhere in this package. What is not provided (the chunked preference losses) can
be imported, as trl does wherever it finds the package, and raises ``NotImplementedError`` when it is constructed.

trl 1.15 and later compute the loss by heads of their own. They run on this package's kernels, too: :mod:`trl_head`.
Trainers without one gather log-probabilities from logits, which a patched model then does not make:
:mod:`liger_kernels.patching.logits.gathered`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from liger_kernels import __version__, trl_head
from liger_kernels.patching.logits import gathered

__all__ = ["install", "uninstall"]

# The release of liger-kernel whose interface trl's newest flag asks for.
_INTERFACE = "0.8.2"
_VERSION = f"{_INTERFACE}+liger.kernels.{__version__}"
_PACKAGE = "liger_kernel"


def install() -> None:
    """Answer for ``liger_kernel`` in this process, and run trl's fused heads on our ops: log-probabilities on
    :func:`linear_log_probs`, the divergence of its distillation trainer on :func:`linear_divergence`.

    Installed already, it stays so. ``liger_kernels.report()`` says what became of trl's heads.

    Raises:
        RuntimeError: the real package is installed, or trl has been imported and has looked for it in vain.
    """
    if _finder in sys.meta_path:
        return
    if _real_package_exists():
        raise RuntimeError(
            "liger-kernel itself is installed here, and its name cannot mean two packages: pip uninstall liger-kernel, "
            "or do not call liger_kernels.compat.install() and patch models with liger_kernels.patch(model)"
        )
    if "trl" in sys.modules:
        raise RuntimeError(
            "trl has been imported already and has noted that there is no liger_kernel: call "
            "liger_kernels.compat.install() before the first import of trl"
        )
    sys.meta_path.append(_finder)
    trl_head.install()
    gathered.install()
    _transformers_asks_again(True)


def uninstall() -> None:
    """Undo :func:`install`: ``liger_kernel`` is not found any more, and trl's heads are its own.

    What was imported from ``liger_kernel`` goes on working.
    """
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    trl_head.uninstall()
    gathered.uninstall()
    for name in _MODULES:
        sys.modules.pop(name, None)
    _transformers_asks_again(False)


def _real_package_exists() -> bool:
    try:
        importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(_PACKAGE) is not None
    return True


def _transformers_asks_again(available: bool) -> None:
    """transformers remembers whether it found the package: 4.x in a global, 5.x in a cache."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None:
        return
    if hasattr(utils, "_liger_kernel_available"):
        utils._liger_kernel_available = available
    forget = getattr(utils.is_liger_kernel_available, "cache_clear", None)
    if forget is not None:
        forget()


def _missing_loss(name: str) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"liger_kernels has no {name}: train without the flag that asks for it (use_liger_loss, or in newer trl "
            "use_liger_kernel) and patch the model with liger_kernels.patch(model); its norms, rotary embeddings and "
            "MLPs are fused, and the trainer computes its own loss"
        )

    return type(name, (), {"__init__": init, "__doc__": "Not provided: raises when it is constructed."})


def _transformers_names() -> dict[str, Any]:
    from liger_kernels import integrations

    names = {name: getattr(integrations, name) for name in integrations.__all__}
    return {**names, "_apply_liger_kernel_to_instance": integrations.apply_liger_kernel_to_instance}


def _chunked_losses() -> dict[str, Any]:
    names = [f"LigerFusedLinear{kind}Loss" for kind in ("CPO", "DPO", "GRPO", "JSD", "KTO", "ORPO", "SimPO")]
    return {name: _missing_loss(name) for name in names}


_MODULES = {
    _PACKAGE: lambda: {"__version__": _VERSION},
    f"{_PACKAGE}.transformers": _transformers_names,
    f"{_PACKAGE}.chunked_loss": _chunked_losses,
}


class _Distribution(importlib.metadata.Distribution):
    """The metadata that transformers and trl read the version from."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {_VERSION}\n",
            "top_level.txt": f"{_PACKAGE}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds, makes and describes the modules of ``liger_kernel``."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=fullname == _PACKAGE)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_MODULES[module.__name__]())

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None or re.sub(r"[-_.]+", "_", name).lower() == _PACKAGE:
            yield _Distribution()


_finder = _Finder()
