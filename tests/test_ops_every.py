"""What every op has in common, whatever its formula: it computes what its reference does, of any dtypes and strides, of
no rows and of very many, and what is frozen costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from convergence import check_op
from convergence.judge.tolerance import REPLICAS_OF_A_CALL
from convergence.op.call import How, check_call, run
from liger_kernels import ops
from liger_kernels.ops._norm_rows import MAX_HIDDEN
from tests.ops_checks import DTYPES, EXAMPLES, eps_for, randn
from tools.op_table import LAYOUTS, LINEAR, NORMS, OPS, ROPE, SUMS, UNITS
from tools.op_table.elementwise import GPT_OSS
from tools.op_table.row import Op

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", autouse=True)
def what_is_asked_once() -> None:
    """Where torch's clamp has a gradient is tried once in a process, on tensors that are not an op's."""
    ops.packed_glu(torch.zeros(1, 2, device=DEVICE), GPT_OSS)


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


def test_reference_gradient(op: Op) -> None:
    leaves = op.leaves(3, torch.float64, torch.device("cpu"), (True,) * len(op.has_rows()))
    assert torch.autograd.gradcheck(op.reference, leaves)


# Dynamo takes seconds for an op. The others are compiled for many sizes by test_ops_dynamic_shapes.py.
COMPILED = ("packed_glu, gpt-oss", "geglu_linear, tanh", "lora_linear", "adapted_linears")


@pytest.mark.parametrize("name", OPS)
def test_every_check(name: str, device: torch.device) -> None:
    """What a stranger's op is judged by: accuracy in rows shorter and longer than a block, strides, no rows, retained
    graphs, determinism, autocast, launches, and so on."""
    op = OPS[name]
    check_op(
        op.op, op.reference, op.inputs, name=name, sums=name in SUMS, examples=2,
        columns=(12, 12) if name in ROPE else (2, 1155), launches=op.kernels if device.type == "cpu" else None,
        without=() if name in COMPILED else ("compile",),
    )  # fmt: skip


@settings(EXAMPLES, max_examples=200)
@given(
    name=st.sampled_from([name for name in NORMS | UNITS | SUMS if not name.startswith(("gated", "packed"))]),
    shape=st.lists(st.integers(1, 9), max_size=3),
    columns=st.integers(1, 300),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 4),
    eps=st.sampled_from([0.0, 1e-12, 1e-5, 0.5]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    frozen=st.sets(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_dtypes(name, shape, columns, dtypes, eps, scale, frozen, seed) -> None:
    """Those with more options have a test like this one in their own files."""
    torch.manual_seed(seed)
    op = OPS[name]
    if name in NORMS:
        columns = max(columns, 2)  # of one number there is little to normalise
    else:
        scale = min(scale, 10.0)
    leaves = []
    for i, (dims, rows) in enumerate(zip(op.shapes(1, columns), op.has_rows(), strict=True)):
        like = {"dtype": dtypes[0 if name in SUMS else i], "device": DEVICE, "grad": i not in frozen}
        leaves.append(randn(*shape, *dims[1:], **like, scale=scale) if rows else randn(*dims, **like))
    options = {"eps": eps_for(columns, eps, scale)} if name in NORMS else {}
    # Of one number, PyTorch's own error is a single draw of the noise, hence the replicas.
    how = How(terms=columns if name in SUMS else 1, replicas=REPLICAS_OF_A_CALL)
    check_call(*(partial(f, **options) for f in (op.op, op.reference)), leaves, name, how=how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*LAYOUTS, "swiglu_linear", "lora_linear", "adapted_linears"])
def test_programs_walk_over_many_tiles(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """More rows than two tiles of every program, with a part of a tile at the end."""
    leaves = OPS[name].leaves(5001 if device.type == "cpu" else 50001, dtype, device, columns=40)
    check_call(OPS[name].op, OPS[name].reference, leaves, terms=40 if name in SUMS else 1)


VIEWS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "columns": (lambda n, k: (n, k + 7), lambda x: x[:, 3:-4]),
    "rows in two dimensions": (lambda n, k: (n, k + 7), lambda x: x[:, 3:-4].unflatten(0, (3, -1))),
    "every other row of blocks": (lambda n, k: (n, 3, 2, k), lambda x: x[:, :, 0]),
    "expanded": (lambda n, k: (n, 1, k), lambda x: x.expand(-1, 5, -1)),
    "transposed": (lambda n, k: (k, n), lambda x: x.t()),
    "every other column": (lambda n, k: (n, 2 * k), lambda x: x[:, ::2]),
}
# What is done with the results, so that the gradients that come in are the half of a tensor, have columns before rows,
# or are one number in every place. A sum near zero would be compared by its noise, hence the 100.
USES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "halves": lambda first, *others: (torch.cat((first, first.detach()), dim=-1), *others),
    "transposed": lambda *results: tuple(y.mT.contiguous() for y in results),
    "sums": lambda *results: tuple(y.sum() + 100.0 for y in results),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", [*LAYOUTS, "swiglu_linear", "lora_linear", "adapted_linears"])
def test_views_are_read_where_they_lie(name: str, view: str, device: torch.device) -> None:
    """Rows of any strides, of each input others, and every other element of a vector."""
    op = OPS[name]
    base, seen = VIEWS[view]
    shapes = [
        base(*s) if rows else (*s[:-1], 2 * s[-1]) for s, rows in zip(op.shapes(12, 20), op.has_rows(), strict=True)
    ]

    def call(f: Callable[..., Any], use: str, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        narrow = [t[..., : t.shape[-1] - i] for i, t in enumerate(leaves)]
        results = f(*(seen(t) if rows else t[..., ::2] for t, rows in zip(narrow, op.has_rows(), strict=True)))
        return USES[use](*(results if isinstance(results, tuple) else (results,)))

    for dtype, use in zip(DTYPES, USES, strict=True):
        leaves = [randn(*s[:-1], s[-1] + i, dtype=dtype, device=device) for i, s in enumerate(shapes)]
        terms = 20 if name in SUMS else 1
        check_call(partial(call, op.op, use), partial(call, op.reference, use), leaves, f"{name}, {use}", terms)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_beyond_2_to_the_31_elements(name: str, device: torch.device, untouched_memory: Any) -> None:
    """Three rows, 2^30 and 2^31 elements into a buffer of their own, of inputs and of gradients that come in."""
    op = OPS[name]

    def far(t: torch.Tensor) -> torch.Tensor:
        view = untouched_memory(2**31 + 2**20, torch.bfloat16).as_strided(t.shape, (2**30, 1))
        return view.copy_(t.detach()).requires_grad_(t.requires_grad)

    near = op.leaves(3, torch.bfloat16, device, columns=64)
    upstream = [torch.randn_like(y) for y in run(op.reference, near)[0]]
    away = [far(t) if rows else t for t, rows in zip(near, op.has_rows(), strict=True)]
    results, gradients = run(op.op, away, [far(t) for t in upstream])
    expected, their_gradients = run(op.op, near, upstream)
    assert all(map(torch.equal, results + gradients, expected + their_gradients))


@pytest.mark.parametrize("name", LAYOUTS[:4])
def test_very_wide_rows(name: str, device: torch.device) -> None:
    """One of a norm has at most 2^16 columns where the kernel runs."""
    op = OPS[name]
    widest = MAX_HIDDEN // op.shapes(1, 1)[0][1]
    ops.reset_launches()
    check_call(op.op, op.reference, op.leaves(3, torch.bfloat16, device, columns=widest))
    assert ops.launches()
    ops.reset_launches()
    op.op(*op.leaves(3, torch.bfloat16, device, columns=widest + 1))
    assert not ops.launches()


@pytest.mark.parametrize("name", NORMS)
def test_eps_decides_where_a_row_is_zero_or_tiny(name: str, device: torch.device) -> None:
    for dtype in DTYPES:
        scales = torch.tensor([0.0, 1e-4, 1e-2, 1.0], dtype=dtype, device=device)
        x, *others = NORMS[name].leaves(4, dtype, device, columns=64)
        x = (x.detach() * scales[:, None]).requires_grad_()
        check_call(*(partial(f, eps=1e-6) for f in NORMS[name][:2]), [x, *others])


@pytest.mark.parametrize("name", NORMS | ROPE | UNITS)
def test_autocast_changes_nothing(name: str, device: torch.device) -> None:
    """Of inputs of two dtypes, as it mixes them, either."""
    op = OPS[name]
    for narrow in (0, 1):
        leaves = op.leaves(7, torch.float32, device)
        leaves[narrow::2] = [t.detach().bfloat16().requires_grad_(t.requires_grad) for t in leaves[narrow::2]]
        results, _ = check_call(op.op, op.reference, leaves)
        upstream = [torch.randn_like(y) for y in results]
        without = run(op.op, leaves, upstream)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            under = run(op.op, leaves, upstream)
        assert all(map(torch.equal, under[0] + under[1], without[0] + without[1]))


def test_a_second_derivative_is_refused(op: Op, device: torch.device) -> None:
    """Zeros would be a wrong number. A first one with ``create_graph`` is the usual one."""
    leaves = op.leaves(4, torch.float32, device)
    results = op.op(*leaves)
    y = results[0] if isinstance(results, tuple) else results
    (usual,) = torch.autograd.grad(y, leaves[0], torch.ones_like(y), retain_graph=True)
    (first,) = torch.autograd.grad(y, leaves[0], torch.ones_like(y).requires_grad_(), create_graph=True)
    assert torch.equal(first, usual)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_float64_runs_the_reference(op: Op, device: torch.device) -> None:
    """All of it, or one tensor of those that may differ in dtype."""
    leaves = op.leaves(4, torch.float32, device)
    of_one_dtype = op in SUMS.values()
    for chosen in [range(len(leaves))] if of_one_dtype else [*((i,) for i in range(len(leaves))), range(len(leaves))]:
        mixed = [t.double() if i in chosen else t for i, t in enumerate(leaves)]
        ops.reset_launches()
        ours = op.op(*mixed)
        assert not ops.launches()
        torch.testing.assert_close(ours, op.reference(*mixed), rtol=0, atol=0)


def test_no_rows_launch_nothing(op: Op, device: torch.device) -> None:
    leaves = op.leaves(0, torch.bfloat16, device)
    ops.reset_launches()
    with torch.no_grad():
        op.op(*leaves)
    assert not ops.launches()


class Allocated(TorchDispatchMode):
    """Inside, the bytes of every tensor's memory that was made there, and is none of ``inputs``."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in inputs}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            if storage._cdata not in self.known:
                self.storages[storage._cdata] = storage  # held, so that no other gets its number
        return out

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def test_rows_within_wider_ones_are_not_copied(op: Op, device: torch.device) -> None:
    leaves = op.leaves(12, torch.bfloat16, device)
    within = [F.pad(t, (3, 4))[..., 3:-4] if rows else t for t, rows in zip(leaves, op.has_rows(), strict=True)]
    costs = []
    for tensors in (leaves, within):
        with torch.no_grad(), Allocated(*tensors) as made:
            op.op(*tensors)
        costs.append(made.bytes)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("name", UNITS | LINEAR)
def test_a_unit_keeps_nothing_but_its_inputs(name: str, device: torch.device) -> None:
    leaves = OPS[name].leaves(5, torch.bfloat16, device)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        OPS[name].op(*leaves)
    assert kept == [t.data_ptr() for t in leaves[:3]]


def test_what_is_frozen_costs_nothing(op: Op, device: torch.device) -> None:
    """Whatever is frozen: the same result and the same other gradients, no launch more, and less memory by the
    gradient's own. The two terms of a sum share theirs."""
    # A GPU's program that computes less may multiply and add in another way.
    exact = {"rtol": 0, "atol": 0} if device.type == "cpu" else {}
    leaves = op.leaves(64, torch.float32, device)

    def step(needs: tuple[bool, ...]) -> tuple[list, list, dict[str, int], int]:
        mine = [t.detach().requires_grad_(needed) for t, needed in zip(leaves, needs, strict=True)]
        ops.reset_launches()
        with Allocated() as made:
            results, gradients = run(op.op, mine)
        return results, gradients, ops.launches(), made.bytes

    every = op.differentiable()
    results, gradients, most, cost = step(every)
    for wanted in itertools.product(*((False, True) if possible else (False,) for possible in every)):
        found, some, less, bytes_ = step(wanted)
        torch.testing.assert_close(found, results, **exact)
        torch.testing.assert_close(some, list(itertools.compress(gradients, wanted)), **exact)
        spared = [t.nbytes for t, had, has in zip(leaves, every, wanted, strict=True) if had and not has]
        if op.op.func is ops.add_rms_norm:
            terms = every[:2].count(True) - wanted[:2].count(True)
            spared = [*[leaves[0].nbytes] * (terms == 2), *[leaves[2].nbytes] * (not wanted[2])]
        assert bytes_ <= cost - sum(spared), wanted
        assert sum(less.values()) <= sum(most.values()), wanted
        if not any(wanted):
            assert list(less.values()) == [1] * op.kernels, "a backward ran, or more than one forward kernel"
            assert not any(y.requires_grad for y in found)
