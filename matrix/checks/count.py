"""Counts what of every model of the installed transformers runs on kernels, and why the rest does not.

Every causal LM and every multimodal or sequence-to-sequence model is built on the meta device, at the size of its
class's default configuration, and patched. No model is named. What is counted:

* norms: modules without submodules that are called norms; rotary functions: functions that are called so, one for each
  module whose methods call it; experts: modules with weights [experts, ., .].
* parameters: those of the modules that a kernel replaces, and of what these contain.
* FLOPs: 2 for each element of every matrix, which is what a token costs in matrix products; of the experts only as
  many as a token is routed to. Attention scores are not counted.
"""

from __future__ import annotations

import datetime
import gc
import logging
import re
import time
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matrix.checks.classes import ModelClass

KINDS = {"norm": "norms", "rotary": "rotary functions", "experts": "experts", "MLP": "MLPs", "head": "heads"}
_WEIGHTLESS = ("rope", "cross_entropy")  # kernels that run no weight of the module whose class they change
_ROTARY = re.compile(r".*apply.*(rot|rope).*|.*(rot|rope).*apply.*")
_LISTED = re.compile(r"(.*experts)\.\d+(\.|$)")
_ROUTED = re.compile(r".*(experts_per_tok(en)?|top_?k.*|moe_k)")


def take(one: ModelClass) -> dict[str, Any]:
    """The census of one class; of one that cannot be built, why."""
    from matrix.checks import zoo

    try:
        model, full = zoo.build_full(one.load())
    except Exception as error:
        text = " ".join(str(error).split())
        return {"name": one.name, "absent": f"{type(error).__name__}: {text[:100]}"}
    return {"name": one.name, "family": type(model).__module__.split(".")[-2], "full": full, **examine(model)}


def examine(model: Any) -> dict[str, Any]:
    """Patch ``model``, and count."""
    import liger_kernels

    start = time.perf_counter()
    report = liger_kernels.patch(model)
    seconds = time.perf_counter() - start
    modules = dict(model.named_modules())
    kernels = {item.path: item.kernel for item in report.replaced}
    heavy = {path: kernel for path, kernel in kernels.items() if kernel not in _WEIGHTLESS}
    reasons: dict[str, list[str]] = defaultdict(list)
    for left in report.left:
        reasons[left.path].append(left.reason)

    def on(path: str) -> str | None:  # the kernel of the module, or of the nearest one that contains it
        while path not in heavy and path:
            path = path.rpartition(".")[0]
        return heavy.get(path)

    found = {kind: [0, 0, 0] for kind in KINDS}  # replaced, left with a reason, not in the report
    why: Counter[str] = Counter()

    def count(kind: str, replaced: bool, because: Sequence[str]) -> None:
        found[kind][0 if replaced else 1 if because else 2] += 1
        if not replaced:
            why[f"{kind}: {because[0] if because else 'not in the report'}"] += 1

    head = model.get_output_embeddings()
    rotary: dict[type, list[str]] = {}
    for path, module in modules.items():
        mine = reasons[path]
        if type(module) not in rotary:
            rotary[type(module)] = rotary_names(type(module))
        names = rotary[type(module)]
        of_rotary = [reason for reason in mine if reason.startswith(tuple(f"{name}:" for name in names))]
        for name in names:
            refused = [reason for reason in of_rotary if reason.startswith(f"{name}:")]
            count("rotary", kernels.get(path) == "rope" and not refused, refused)
        rest = [reason for reason in mine if reason not in of_rotary]
        if _is_norm(module, heavy.get(path, "")):
            count("norm", path in heavy, rest)
        elif _is_experts(path, module):
            count("experts", on(path) is not None, rest)
        elif module is head:
            count("head", path in heavy, rest or reasons[""])
        elif module is model:
            continue  # what is said of it is said of its head
        elif path in heavy or rest:
            count("MLP", path in heavy, rest)

    where: dict[int, str | None] = {}  # a tied weight runs where any of its modules does
    sizes: dict[int, int] = {}
    products: dict[str | None, float] = defaultdict(float)
    routed: dict[Any, int] = {}
    for path, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                sizes[id(parameter)] = parameter.numel()
                where[id(parameter)] = where.get(id(parameter)) or on(path)
                products[on(path)] += 2 * _multiplied(model, modules, path, module, parameter, routed)
    parameters: Counter[str | None] = Counter()
    for key, size in sizes.items():
        parameters[where[key]] += size
    shares = {
        kernel: [times, *(round(of[kernel] / sum(of.values()), 6) for of in (parameters, products))]
        for kernel, times in Counter(kernels.values()).items()
    }
    return {"found": found, "kernels": shares, "reasons": dict(why), "seconds": round(seconds, 2)}


def rotary_names(cls: type) -> list[str]:
    """The rotary functions that the methods of ``cls`` call."""
    found: set[str] = set()
    todo = [value for c in cls.__mro__ if not c.__module__.startswith("torch.") for value in vars(c).values()]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        codes: list[Any] = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            found |= {n for n in code.co_names if _ROTARY.match(n) and callable(function.__globals__.get(n))}
        todo += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return sorted(found)


def _is_norm(module: Any, kernel: str) -> bool:
    cls = type(module)  # torch's own reparametrisation of a weight is called a norm, too
    called = "norm" in cls.__name__.lower() and not module._modules and "torch.nn.utils" not in cls.__module__
    return kernel.endswith("norm") or called


def _is_experts(path: str, module: Any) -> bool:
    cubes = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    return bool(cubes) and "expert" in f"{path} {type(module).__name__}".lower()


def _multiplied(
    model: Any, modules: dict[str, Any], path: str, module: Any, parameter: Any, routed: dict[Any, int]
) -> float:
    """How many elements of ``parameter`` a token is multiplied by. ``routed`` keeps, between calls, to how many of a
    block's experts a token goes; those of one class are alike."""
    if parameter.dim() < 2 or "Embedding" in type(module).__name__:
        return 0
    size = float(parameter.numel())
    listed = _LISTED.match(path)
    if listed is not None:
        experts, block = len(modules[listed[1]]._modules), listed[1].rpartition(".")[0]
    elif _is_experts(path, module) and "shared" not in path:
        experts, block = parameter.shape[0], path.rpartition(".")[0]
    else:
        return size
    key = block, type(module), experts
    if key not in routed:
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        routed[key] = _routed(experts, [module, modules[block], *modules[block]._modules.values(), config])
    return size * routed[key] / experts


def _routed(experts: int, places: Sequence[Any]) -> int:
    """How many of ``experts`` a token is routed to, as the first of ``places`` says that knows; else all."""
    for place in places:
        for name, value in vars(place).items() if place is not None else ():
            if _ROUTED.fullmatch(name) and isinstance(value, int) and 1 <= value < experts:
                return value
    return experts


def measure() -> dict[str, Any]:
    """The census of the installed transformers."""
    import torch
    import transformers

    from matrix.checks.classes import populations

    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    classes: dict[str, list[dict[str, Any]]] = {}
    collects = gc.isenabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # While a model of ten thousand modules is built there is no garbage, but looking for it takes as long as
        # building. What is alive between two models, mostly modules of Python, is not looked at again.
        gc.disable()
        try:
            for group, found in populations().items():
                classes[group] = []
                for one in found:
                    classes[group].append(take(one))
                    gc.collect()
                    gc.freeze()
        finally:
            if collects:
                gc.enable()
    version = torch.__version__.partition("+")[0]
    at = datetime.date.today().isoformat()
    return {"transformers": transformers.__version__, "torch": version, "at": at, "classes": classes}


def shares(census: dict[str, Any], group: str | None = None) -> dict[str, float]:
    """What is replaced: of norms, rotary functions, and the like; the mean share of parameters and FLOPs of a class."""
    entries = list(built(census, group))
    found = {"classes": float(len(entries))}
    for kind, plural in KINDS.items():
        replaced, *rest = (sum(entry["found"][kind][i] for entry in entries) for i in range(3))
        found[plural] = round(replaced / max(1, replaced + sum(rest)), 4)
    with_experts = [entry["found"]["experts"] for entry in entries if any(entry["found"]["experts"])]
    found["classes with experts"] = float(len(with_experts))
    found["experts replaced"] = float(sum(not left and not unlisted for _, left, unlisted in with_experts))
    for i, what in ((1, "parameters"), (2, "FLOPs")):
        of_kernels = [sum(entry_share[i] for entry_share in entry["kernels"].values()) for entry in entries]
        found[what] = round(sum(of_kernels) / max(1, len(entries)), 4)
    return found


def built(census: dict[str, Any], group: str | None = None) -> Iterator[dict[str, Any]]:
    for name, entries in census["classes"].items():
        if group in (None, name):
            yield from (entry for entry in entries if "absent" not in entry)


def finding(census: dict[str, Any]) -> dict[str, Any]:
    """The record of a cell's stage, which the gate compares with the accepted one."""
    counts: Counter[str] = Counter()
    for entry in built(census):
        counts.update({kernel: share[0] for kernel, share in entry["kernels"].items()})
    return {"name": "census", "verdict": "patched", "census": dict(counts), "shares": shares(census)}
