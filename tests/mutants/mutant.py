"""What a mutant is, and how its fault gets into the candidate and out again.

Most faults change one expression or statement. An :class:`Edit` finds its place in a module's syntax tree, where it
must occur exactly once: a mutant whose place is gone fails instead of testing nothing. The changed tree is compiled.
While the mutant lives

- every Triton kernel of the module is a new one, made from the changed text, and so are those of modules that import
  its helpers (a kernel inlines its helpers when it is compiled, so a helper cannot be exchanged under it);
- every Python function keeps its identity and gets the changed code, so that whoever imported it runs it, too, and a
  ``torch.library`` op is not registered a second time.

:func:`restore` puts back the very objects that were there.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.mutants.edit import Edit

_serial = itertools.count()
_active = contextlib.ExitStack()


@dataclass(frozen=True)
class Mutant:
    """A fault, injected into the candidate only. Called with a model, it applies the fault, then our own patch.

    Attributes:
        name: what follows ``--patch tests.mutants:``.
        source: the rows of the fault corpus that it stands for; empty for a fault of the same kinds thought up here.
        does: one sentence.
        edits: changes of source text.
        after: what is done to the patched model.
        model: the mini model on which it is tried.
        setup: what the arms train in.
        profile: "scale" for a fault that only a model of real size shows, on a GPU.
        on_cpu: how that model may be divided so that a CPU shows it, as ``convergence.models.scale`` takes it; None
            where only a GPU does.
        dtypes: the dtypes in which it is a fault.
        kernel: the guilty kernel, or None where no kernel is.
        phase: "forward" or "backward": where the guilty kernel is wrong; None where no kernel is.
        dies: what the suite must say: "statistics" (any judged number), or the name of another finding.
        fused: whether the loss is computed from hidden states, or from logits that exist.
        memory: the schedule of the fused loss, as ``patch`` takes it.
        check: the test that must fail, for a fault that no training can show; the suite is not run then.
        sample: whether the default run tries it.
    """

    name: str
    does: str
    edits: tuple[Edit, ...] = ()
    source: str = ""
    after: Callable[[Any], Any] | None = None
    model: str = "llama-untied"
    setup: str = "plain"
    profile: str = "hard"
    on_cpu: str | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernel: str | None = None
    phase: str | None = None
    dies: str = "statistics"
    fused: bool = True
    memory: str | None = None
    check: str | None = None
    sample: bool = False

    def __call__(self, model: Any) -> Any:
        """Inject the fault, until :func:`restore`, and patch ``model``."""
        import liger_kernels

        self.inject()
        left_out = "cross_entropy" if self.fused else "linear_cross_entropy"
        kernels = [kernel for kernel in liger_kernels.KERNELS if kernel != left_out]
        report = liger_kernels.patch(model, kernels=kernels, memory=self.memory)
        if self.after is not None:
            self.after(model)
        return report

    def inject(self) -> None:
        """Change the source, after whatever another mutant changed has been put back."""
        restore()
        for module in dict.fromkeys(edit.module for edit in self.edits):
            _active.enter_context(_changed(module, self.text(module), self.name))
        if self.edits:
            _active.enter_context(_fresh_classes())

    def text(self, module: str) -> str:
        """The changed source of ``module``.

        Raises:
            StaleMutant: a place does not occur as often as it should.
        """
        return _edited(module, self.edits)


def faults(module: str, tests: str = "", **common: Any) -> Callable[..., Mutant]:
    """What makes a mutant of ``module``, a module of ``liger_kernels`` or of the proof, out of a row of a table.

    A row says the name, what the fault does, what is exchanged by what, where ``<old>`` stands for the former, and for
    a fault that no training can show the test that must fail: in the file ``tests``, unless it names another one.
    ``also`` is an edit in a second place.
    """

    def fault(
        name: str,
        does: str,
        old: str,
        new: str,
        test: str = "",
        *,
        module: str = module,
        within: str = "",
        times: int = 1,
        also: Edit | None = None,
        **other: Any,
    ) -> Mutant:
        where = module if module.startswith("convergence.") else f"liger_kernels.{module}"
        edits = (Edit(where, old, new.replace("<old>", old), within, times), *([also] if also else []))
        check = f"tests/{test if '::' in test else f'{tests}::{test}'}" if test else None
        return Mutant(name, does, edits, check=check, **common, **other)

    return fault


def both_phases(module: str, **common: Any) -> tuple[Callable[..., Mutant], Callable[..., Mutant]]:
    """:func:`faults` of the forward and of the backward of a kernel."""
    return faults(module, phase="forward", **common), faults(module, phase="backward", **common)


def restore() -> None:
    """Put back whatever a mutant changed."""
    _active.close()


def until_restored(undo: Callable[[], Any]) -> None:
    """Call ``undo`` when the mutant's time is over."""
    _active.callback(undo)


@functools.cache
def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


@functools.cache
def _tree(module: str) -> ast.Module:
    """Of the unchanged source; nobody changes it."""
    return ast.parse(_source(module))


@functools.cache
def _edited(module: str, edits: tuple[Edit, ...]) -> str:
    text = _source(module)
    for edit in edits:
        if edit.module == module:
            text = edit.apply(text)
    return text


@contextlib.contextmanager
def _changed(name: str, text: str, label: str) -> Iterator[None]:
    """Inside, the functions and kernels of module ``name`` are those of ``text``."""
    module = importlib.import_module(name)
    filename = f"<{label} {next(_serial)} of {name}>"
    # The interpreter, the compiler and tracebacks read a function's source through linecache.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    tree = ast.parse(text)
    codes = dict(_codes(compile(tree, filename, "exec", dont_inherit=True)))
    functions = [(f, codes[path]) for path, f in _functions(module) if path in codes]
    before = [(f, f.__code__) for f, _ in functions]
    with _kernels_of(module, tree, filename):
        try:
            for function, code in functions:
                function.__code__ = code
            yield
        finally:
            for function, code in before:
                function.__code__ = code


@contextlib.contextmanager
def _kernels_of(module: types.ModuleType, tree: ast.Module, filename: str) -> Iterator[None]:
    """Inside, the kernels of ``module`` are those of ``tree``, also where they are inlined in other modules."""
    kernels = _kernels(tree, filename, module)
    before = {name: vars(module)[name] for name in kernels}
    holders = {
        other: names
        for other in list(sys.modules.values())
        if other is not module
        and getattr(other, "__name__", "").startswith("liger_kernels.")
        and (names := [name for name in kernels if vars(other).get(name) is before[name]])
    }
    with contextlib.ExitStack() as stack:
        for space, names in {module: [*kernels], **holders}.items() if kernels else ():
            stack.enter_context(mock.patch.multiple(space, **{name: kernels[name] for name in names}))
        for other in holders:
            file = inspect.getsourcefile(other)
            assert file is not None
            stack.enter_context(_kernels_of(other, _tree(other.__name__), file))
        yield


def _codes(code: types.CodeType, path: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Every function of a compiled module or class body by its dotted name; nested functions belong to their outer."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield path + constant.co_name, constant
            yield from _codes(constant, f"{path}{constant.co_name}.")


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """The Python functions that ``module`` itself defines, methods included, by dotted name."""

    def unwrapped(value: Any) -> Any:
        value = getattr(value, "_init_fn", value)  # an operator
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        return inspect.unwrap(value) if callable(value) else value

    def walk(namespace: Any, path: str) -> Iterator[tuple[str, types.FunctionType]]:
        for name, value in list(vars(namespace).items()):
            function = unwrapped(value)
            if isinstance(function, types.FunctionType):
                if function.__code__.co_filename == module.__file__:
                    yield path + name, function
            elif isinstance(value, type) and value.__module__ == module.__name__:
                yield from walk(value, f"{path}{name}.")

    return walk(module, "")


def _kernels(tree: ast.Module, filename: str, module: types.ModuleType) -> dict[str, Any]:
    """New objects for everything that ``tree`` decorates with ``triton.jit``, with options or without."""

    def is_kernel(node: ast.stmt) -> bool:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        return "triton.jit" in (ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in decorators)

    kernels = [node for node in tree.body if is_kernel(node)]
    scope = dict(vars(module))
    exec(compile(ast.Module(kernels, []), filename, "exec", dont_inherit=True), scope)
    return {node.name: scope[node.name] for node in kernels if isinstance(node, ast.FunctionDef)}


def _fresh_classes() -> contextlib.AbstractContextManager[Any]:
    """Inside, patched classes are made anew: those that exist hold functions of the source before."""
    from liger_kernels.patching import swap

    return mock.patch.object(swap, "_patched_class", functools.cache(swap._patched_class.__wrapped__))
