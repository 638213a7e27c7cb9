"""Compares one call of an op with its reference and with float64, forward and backward.

Every call is also judged by rules that hold for all checks. An op must not return its inputs, overwrite the caller's
tensors, or read memory that was not written. Its results must have the reference's shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from convergence.arms.float64 import InFloat64
from convergence.judge.tolerance import SIGMAS, THREE_WAY_FACTOR, gain_of_one_call, three_way
from convergence.op.memory import same, shared, zeroed

Op = Callable[..., Any]
MaybeTensors = list[torch.Tensor | None]

# Failures that any call may have. A wrong number is a failure of the check that made the call.
RESULTS, MEMORY, ALIASING, CLOBBERING = "results", "memory", "aliasing", "clobbering"
ACCURACY = "accuracy"


class OpFailure(AssertionError):
    """An op does not compute what its reference computes.

    Attributes:
        check: the name of the check that failed.
        message: the reason.
    """

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check, self.message = check, message


class NoTruth(ValueError):
    """The reference raised, or its float64 result is not finite, so the op cannot be judged."""


class How(NamedTuple):
    """The rules by which a call is judged.

    Attributes:
        check: the check that a wrong number belongs to.
        terms: the number of terms in the sum of one element of a result.
        views: whether a result may be a view of an input.
        overwrites: the names of the inputs that the op may overwrite. Where the reference overwrites one, its new value
            counts as a result.
        only: the number of the one result that gets a gradient; None for all.
        replicas: before a number counts as wrong, PyTorch's error is measured this often again. The inputs of each
            measurement are moved by units in the last place.
        inside: makes the context for calls of op and reference.
        see: applied to the incoming gradients, for example to change their strides.
    """

    check: str = ACCURACY
    terms: int = 1
    views: bool = False
    overwrites: Collection[str] = ()
    only: int | None = None
    replicas: int = 0
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    see: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach


class Ran(NamedTuple):
    """The results of a call, and the gradients of the inputs that require one."""

    results: MaybeTensors
    gradients: MaybeTensors


def results_of(found: Any) -> MaybeTensors:
    """The results of an op as a list.

    Raises:
        TypeError: ``found`` is neither a tensor nor a tuple or list of tensors and None.
    """
    results = list(found) if isinstance(found, (tuple, list)) else [found]
    for result in results:
        if not isinstance(result, torch.Tensor | None):
            raise TypeError(f"it returned a {type(result).__name__}; allowed are a tensor, or a tuple of tensors")
    return results


def gradients_of(
    results: MaybeTensors, leaves: Sequence[torch.Tensor], upstream: MaybeTensors | None = None, keep: bool = False
) -> MaybeTensors:
    """The gradients of the ``leaves`` that require one. Without ``upstream``, the incoming gradients are ones. ``keep``
    retains the graph for another pass."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    given = [None] * len(results) if upstream is None else upstream
    pairs = [
        (y, torch.ones_like(y) if g is None else g.to(y.dtype))
        for y, g in zip(results, given, strict=True)
        if y is not None and y.requires_grad
    ]
    if not (wanted and pairs):
        return [None] * len(wanted)
    outputs, incoming = [y for y, _ in pairs], [g for _, g in pairs]
    return list(torch.autograd.grad(outputs, wanted, incoming, retain_graph=keep, allow_unused=True))


def run(
    op: Op, leaves: Sequence[torch.Tensor], upstream: MaybeTensors | None = None, inside: Any = contextlib.nullcontext
) -> Ran:
    """``op(*leaves)`` in the context ``inside()``, and its gradients. The backward runs outside the context, as
    autocast requires."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]  # an input that the op overwrites may require one later
    with inside():
        results = results_of(op(*leaves))
    return Ran(results, gradients_of(results, wanted, upstream))


def check_call(
    op: Op, reference: Op, leaves: Sequence[torch.Tensor], name: str = "op", terms: int = 1, how: How | None = None,
    names: Sequence[str] = (),
) -> Ran:  # fmt: skip
    """Assert that ``op`` is as near to the float64 truth as ``reference`` in the inputs' dtypes, forward and backward.

    Results and gradients must have the reference's shapes and dtypes. No result may be a view of an input, and no
    tensor of the caller may change. ``op`` and ``reference`` take the ``leaves`` and make views of them (halves,
    transposes) themselves. An element of a result is a sum of ``terms`` numbers. The terms of all results, divided by
    the leaf's number of elements, are the terms of a leaf's gradient.

    Args:
        name: the op's name in messages.
        how: the rules of the call, instead of ``terms`` alone.
        names: the names of the leaves in messages.

    Returns:
        The op's results and gradients.

    Raises:
        OpFailure: an AssertionError that says which check failed and by how much.
        NoTruth: the reference raised, or its float64 result is not finite.
        ValueError: the reference returns no tensor and overwrites no input that the op may overwrite.
    """
    names = names or [str(i) for i in range(len(leaves))]
    return _Comparison(op, reference, list(leaves), how or How(terms=terms), name, list(names)).judge()


@contextlib.contextmanager
def raising(check: str, what: str) -> Iterator[None]:
    """Inside, every exception, and the end of the process that an op asks for, becomes a failure of ``check``."""
    try:
        yield
    except (OpFailure, NoTruth):
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise OpFailure(check, f"{what} {type(error).__name__}: {text[:500]}") from error


@contextlib.contextmanager
def _reference_raised(name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise NoTruth(f"{name}: the reference raised {type(error).__name__}: {error}") from error


def fresh(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the inputs, with the same ``requires_grad``."""
    return [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]


class _Comparison:
    """The comparison of one call."""

    def __init__(
        self, op: Op, reference: Op, leaves: list[torch.Tensor], how: How, name: str, names: list[str]
    ) -> None:
        self.leaves, self.how, self.name, self.names = leaves, how, name, names
        self.before = fresh(leaves) if how.overwrites else leaves  # the values that the op is given
        self.wanted = [one for one, leaf in zip(names, leaves, strict=True) if leaf.requires_grad]
        given = fresh(leaves)
        versions = [leaf._version for leaf in given]
        with torch.no_grad(), how.inside(), _reference_raised(name):
            shapes = results_of(reference(*given))
        # A kernel writes without a new version, and zeros times two are the same zeros.
        self.written = [
            i
            for i, (one, leaf, old) in enumerate(zip(given, leaves, versions, strict=True))
            if names[i] in how.overwrites and (one._version != old or not same(one, leaf))
        ]
        shapes += [given[i] for i in self.written]
        self.op, self.reference = self._with_written(op), self._with_written(reference)
        # Drawn on the CPU, so that every device gets the same numbers.
        drawn = [
            how.see(torch.randn(y.shape).to(y)) if y is not None and y.is_floating_point() else None for y in shapes
        ]
        self.upstream: MaybeTensors = drawn

    def _with_written(self, function: Op) -> Op:
        """``function``, which also returns the inputs that the reference overwrites. Where one result alone gets a
        gradient, the others have no graph."""

        def call(*leaves: torch.Tensor) -> MaybeTensors:
            results = results_of(function(*leaves))
            # What is written into a leaf has no graph.
            results += [leaves[i].detach() if leaves[i].is_leaf else leaves[i] for i in self.written]
            only = self.how.only
            return [y.detach() if y is not None and only not in (None, i) else y for i, y in enumerate(results)]

        return call

    def judge(self) -> Ran:
        truth = self._truth(self.before)
        if not all(bool(torch.isfinite(t).all()) for t in (*truth.results, *truth.gradients) if t is not None):
            raise NoTruth(f"{self.name}: the truth itself is not finite")
        torchs = self._torchs(self.before)
        ours = self._watched(torchs)
        if all(y is None for y in torchs.results):
            raise ValueError(
                f"{self.name}: the reference returns no tensor, and overwrites no input that the op may overwrite, so "
                "nothing can be compared. Return a tensor, or name the inputs: --overwrites x, or overwrites="
            )
        self._check_written(ours, truth)
        self._check_numbers(ours, torchs, truth)
        return ours

    def _fail(self, check: str, message: str) -> OpFailure:
        return OpFailure(check, f"{self.name}: {message}")

    def _truth(self, leaves: Sequence[torch.Tensor]) -> Ran:
        """The reference in float64, even where its code asks for float32."""
        doubles = [
            leaf.detach().double().requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else leaf
            for leaf in fresh(leaves)
        ]
        with InFloat64(), _reference_raised(self.name):
            return run(self.reference, doubles, [g if g is None else g.double() for g in self.upstream])

    def _torchs(self, leaves: Sequence[torch.Tensor]) -> Ran:
        with _reference_raised(self.name):
            return run(self.reference, fresh(leaves), self.upstream, self.how.inside)

    def _named(self, ran: Ran) -> Iterator[tuple[str, torch.Tensor | None, bool]]:
        """Every tensor of a call: its name in messages, the tensor, and whether it is a gradient."""
        yield from ((what, y, False) for what, y in zip(self._results(ran.results), ran.results, strict=True))
        yield from ((f"gradient {name}", g, True) for name, g in zip(self.wanted, ran.gradients, strict=True))

    def _results(self, results: MaybeTensors) -> list[str]:
        """The names of results in messages."""
        returned = len(results) - len(self.written)
        written = (f"the overwritten input {self.names[i]}" for i in self.written)
        return [*(f"result {i}" for i in range(returned)), *written]

    def _watched(self, torchs: Ran) -> Ran:
        """Run the op and return its results and gradients. They must match ``torchs`` in form, and the op must not
        overwrite the caller's tensors."""
        upstream = self.upstream
        inputs = [pair for pair in zip(self.names, self.leaves, strict=True) if pair[0] not in self.how.overwrites]
        held = [(f"the input {name}", leaf) for name, leaf in inputs]
        held += [(f"the gradient of result {i}", g) for i, g in enumerate(upstream) if g is not None]
        before = [t.detach().clone() for _, t in held]
        with raising(self.how.check, f"{self.name} raised"):
            wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
            with self.how.inside():
                results = results_of(self.op(*self.leaves))
            before += [y.detach().clone() for y in results if y is not None]
            names = self._results(results)
            held += [(f"{what}, by the backward,", y) for what, y in zip(names, results, strict=True) if y is not None]
            self._check_results(results, torchs.results, "result")
            gradients = gradients_of(results, wanted, upstream)
        self._check_results(gradients, torchs.gradients, "gradient")
        for (what, t), old in zip(held, before, strict=True):
            if not same(t, old):
                raise self._fail(CLOBBERING, f"{what} of shape {tuple(t.shape)} was overwritten")
        for i, result in enumerate(results[: len(results) - len(self.written)]):
            for name, leaf in zip(self.names, self.leaves, strict=True):
                if not self.how.views and result is not None and shared(result, leaf):
                    raise self._fail(ALIASING, f"result {i} is a view of the input {name}")
        return Ran(results, gradients)

    def _check_results(self, ours: MaybeTensors, torchs: MaybeTensors, kind: str) -> None:
        """Fail unless results have the reference's number, shapes and dtypes, and a graph if the reference's have
        one."""
        # A failure that only strides or missing rows cause belongs to that check.
        check = RESULTS if self.how.check == ACCURACY else self.how.check
        if len(ours) != len(torchs):
            counts = [len(many) - len(self.written) * (kind == "result") for many in (ours, torchs)]
            raise self._fail(check, f"{counts[0]} {kind}s instead of {counts[1]}")
        names = self._results(ours) if kind == "result" else [f"gradient {name}" for name in self.wanted]
        for name, our, its in zip(names, ours, torchs, strict=True):
            if our is None or its is None:
                # No gradient counts as a gradient of zeros.
                if our is not its and not (kind == "gradient" and _is_zero(our) and _is_zero(its)):
                    raise self._fail(check, f"{name} is {_kind(our)} instead of {_kind(its)}")
            elif our.dtype != its.dtype:
                raise self._fail(check, f"{name} is {our.dtype} instead of {its.dtype}")
            elif our.shape != its.shape:
                raise self._fail(check, f"{name} has shape {tuple(our.shape)} instead of {tuple(its.shape)}")
            elif its.requires_grad and not our.requires_grad:
                raise self._fail(check, f"{name} has no gradient, and the reference's has one")

    def _check_written(self, ours: Ran, truth: Ran) -> None:
        """Fail if an element is NaN or infinite only because uninitialised memory was. If the element is finite when
        memory begins as zeros, the op reads memory that it has not written."""
        for (what, our, _), (_, true, _) in zip(self._named(ours), self._named(truth), strict=True):
            if our is None or true is None or bool(torch.isfinite(our).all()):
                continue
            found: dict[str, torch.Tensor | None] = {}
            with zeroed(), contextlib.suppress(Exception):  # an error here shows nothing
                leaves = fresh(self.before) if self.how.overwrites else self.leaves  # with the same strides
                found = {name: t for name, t, _ in self._named(run(self.op, leaves, self.upstream))}
            if (t := found.get(what)) is not None and bool(torch.isfinite(t).all()):
                bad = ~torch.isfinite(our)
                message = f"{what} has {int(bad.sum())} of {bad.numel()} elements that come from memory which nobody "
                raise self._fail(MEMORY, f"{message}has written, the first at {bad.nonzero()[0].tolist()}")

    def _check_numbers(self, ours: Ran, torchs: Ran, truth: Ran) -> None:
        """The three-way comparison of every result and gradient. In 16 bits, the size of a whole tensor is compared,
        too."""
        how = self.how
        all_terms = sum(y.numel() for y in ours.results if y is not None) * how.terms
        lists = zip(self._named(ours), self._named(torchs), self._named(truth), strict=True)
        for i, ((what, our, is_grad), (_, its, _), (_, true, _)) in enumerate(lists):
            if our is None or its is None or true is None:
                continue
            if not our.is_floating_point():
                if not torch.equal(our, its):
                    raise self._fail(how.check, f"{what} differs in {int((our != its).sum())} of {our.numel()} places")
                continue
            # Accumulation is in float32, so a 16-bit result is rounded once, however long its sum is.
            chain = 1
            if our.dtype == torch.float32:
                chain = max(1, all_terms // max(1, our.numel())) if is_grad else how.terms
            wrong = functools.partial(_wrong, our, true, f"{self.name}: {what}", chain)
            if (message := wrong(its)) and not self._is_noise(i, true, wrong):
                raise OpFailure(how.check, message)

    def _is_noise(self, i: int, truth: torch.Tensor, wrong: Callable[..., str]) -> bool:
        """Whether PyTorch's error on replicas of the inputs is as large as the error of the i-th tensor. A tensor of a
        few elements has only a few draws of the noise, so the scatter of the replicas' errors counts."""
        squares = 0.0
        for error in self._replicas(i):
            if not wrong(truth + error):
                return True
            squares += float(error.square().mean()) / self.how.replicas
        many = SIGMAS / truth.numel() ** 0.5 / THREE_WAY_FACTOR
        return squares > 0 and many > 1 and not wrong(truth + many * squares**0.5, whole=False)

    def _replicas(self, i: int) -> Iterator[torch.Tensor]:
        """PyTorch's errors in the i-th tensor on slightly moved inputs, each relative to the truth for the same
        inputs."""
        upstream = self.upstream
        for _ in range(self.how.replicas):
            leaves = [_moved(leaf) for leaf in self.before]
            self.upstream = [g if g is None else _moved(g) for g in upstream]
            its, true = ([*self._named(ran)][i][1] for ran in (self._torchs(leaves), self._truth(leaves)))
            self.upstream = upstream
            if its is not None and true is not None:
                yield its.detach().double() - true.detach()


def _wrong(our: torch.Tensor, truth: torch.Tensor, what: str, chain: int, its: torch.Tensor, whole: bool = True) -> str:
    """A message on how far ``our`` is off relative to PyTorch's ``its``; empty if it is near enough. ``whole`` compares
    the tensor as a whole, too, which says nothing more about a few elements."""
    try:
        three_way(our, its, truth, our.dtype, what, chain)
        if whole and our.dtype != torch.float32:
            gain_of_one_call(our, its, truth, what)
    except AssertionError as error:
        return str(error)
    return ""


def _is_zero(t: torch.Tensor | None) -> bool:
    return t is None or not bool(t.count_nonzero())


def _kind(t: torch.Tensor | None) -> str:
    return "None" if t is None else f"a tensor of shape {tuple(t.shape)}"


def _moved(t: torch.Tensor) -> torch.Tensor:
    """Move every element up or down by up to three units in the last place."""
    if not t.is_floating_point():
        return t
    steps = torch.randint(-3, 4, t.shape).to(t.device, torch.float64)
    moved = (t.detach().double() * (1 + torch.finfo(t.dtype).eps * steps)).to(t.dtype)
    return moved.requires_grad_(t.requires_grad)
