"""rope against its reference; what all ops have in common is in test_ops_every.py."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convergence.op.call import check_call, run
from liger_kernels.ops import launches, reset_launches, rope, rope_ref
from liger_kernels.ops._rope import PAIRINGS
from tests.ops_checks import DTYPES, EXAMPLES, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(q, k, cos, sin, pairing="half", view=lambda x: x, **options):
    def call(op, q, k, cos, sin):
        return op(view(q), view(k), cos, sin, pairing=pairing, **options)

    return check_call(partial(call, rope), partial(call, rope_ref), [q, k, cos, sin], pairing)


def angles(batch: int, seq: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Independent random factors: no identity between angles hides a mistake."""
    return [randn(batch, seq, rotary_dim, dtype=dtype, device=device, grad=False) for _ in range(2)]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(device, pairing, dtype) -> None:
    """Whole heads by angles for every row, and a part of each by angles of the row's own."""
    for rotary_dim, batch in ((64, 1), (6, 3)):
        q, k = (randn(3, heads, 5, 64, dtype=dtype, device=device) for heads in (6, 2))
        check(q, k, *angles(batch, 5, rotary_dim, dtype, device), pairing)


@pytest.mark.parametrize("pairing", PAIRINGS[:2])
def test_several_tiles_of_tokens_and_heads(device, pairing) -> None:
    """More heads than a tile holds, and more tokens than a program; the last tile of each is a part of one."""
    q, k = (randn(2, heads, 3, 512, dtype=torch.float32, device=device) for heads in (37, 17))
    check(q, k, *angles(2, 3, 512, torch.float32, device), pairing)
    q, k = (randn(2, heads, 2100, 16, dtype=torch.float32, device=device) for heads in (3, 1))
    check(q, k, *angles(2, 2100, 12, torch.float32, device), pairing)


@EXAMPLES
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40)),
    half=st.integers(1, 20),
    rest=st.integers(0, 20),
    per_row=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 4),
    pairing=st.sampled_from(PAIRINGS),
    columns=st.sampled_from([1, 1.5, 2]),
    inverse=st.booleans(),
    keep=st.booleans(),
    trailing=st.booleans(),
    frozen=st.sampled_from([None, 0, 1]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(
    sizes, half, rest, per_row, dtypes, pairing, columns, inverse, keep, trailing, frozen, transposed, seed
) -> None:
    """A table of a pairing with one angle for each pair may be half as wide as what it rotates, or wider."""
    torch.manual_seed(seed)
    batch, heads, kv_heads, seq = sizes
    leaves = []
    for i, n in enumerate((heads, kv_heads)):
        shape = (batch, seq, n, 2 * half + rest) if transposed else (batch, n, seq, 2 * half + rest)
        leaves.append(randn(*shape, dtype=dtypes[i], device=DEVICE, grad=frozen != i))
    width = int(columns * half) if pairing.endswith("repeat") else 2 * half
    shape = (batch if per_row else 1, seq, width)
    leaves += [randn(*shape, dtype=dtype, device=DEVICE, grad=False) for dtype in dtypes[2:]]
    options = {"rotary_dim": 2 * half, "inverse": inverse, "keep_dtype": keep, "trailing": trailing}
    check(*leaves, pairing, view=lambda x: x.transpose(1, 2) if transposed else x, **options)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(1, 2)[..., :32],
        lambda x: x[:, ::2].transpose(1, 2),
        lambda x: x[..., ::2].transpose(1, 2),
        lambda x: x[:1].expand(4, -1, -1, -1).transpose(1, 2),
        lambda x: x.permute(0, 2, 3, 1).contiguous().transpose(2, 3),
    ],
    ids=["transposed", "half_a_head", "every_other_token", "strided_head", "expanded", "tokens_innermost"],
)
@pytest.mark.parametrize("pairing", PAIRINGS[:2])
def test_views_are_read_where_they_lie(device, view, pairing) -> None:
    q, k = (randn(4, 6, heads, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    batch, _, seq, head_dim = view(q).shape
    check(q, k, *angles(batch, seq, head_dim, torch.bfloat16, device), pairing, view=view)


def test_strided_and_expanded_angles(device) -> None:
    q, k = (randn(2, 3, 5, 16, dtype=torch.float32, device=device) for _ in range(2))
    cos, sin = angles(5, 16, 4, torch.float32, device)
    check(q, k, cos.permute(2, 0, 1)[:2], sin.permute(2, 0, 1)[:2])
    check(q, k, cos[:, :, 0].expand(2, -1, -1), sin.permute(2, 0, 1)[:2])
    # The two lie differently, and nobody has to copy them.
    wide, _ = angles(2, 5, 20, torch.float32, device)
    check(q, k, cos[:, :, 0].contiguous().expand(2, -1, -1), wide[..., :16])


@pytest.mark.parametrize("pairing", PAIRINGS[:2])
def test_gradients_of_other_strides(device, pairing) -> None:
    """As those of keys that are transposed before they are multiplied."""

    def call(op, q, k, cos, sin):
        return tuple(y.transpose(2, 3).contiguous() for y in op(q, k, cos, sin, pairing=pairing))

    q, k = (randn(2, 3, 5, 16, dtype=torch.float32, device=device) for _ in range(2))
    check_call(partial(call, rope), partial(call, rope_ref), [q, k, *angles(2, 5, 16, torch.float32, device)])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_against_matrices(pairing) -> None:
    """The reference itself: every pair times a matrix of its own, put together from the table of the file's top."""
    q, (cos, sin) = randn(1, 1, 1, 6, dtype=torch.float64, device="cpu"), torch.randn(2, 1, 1, 6).double()
    name = pairing.removesuffix("_repeat")
    near, far = [(2 * i, 2 * i + 1) for i in range(3)], [(i, i + 3) for i in range(3)]
    read, written = far if name == "half" else near, near if name == "interleaved" else far
    truth = torch.zeros(6, dtype=torch.float64)
    for i, ((a, b), (to_a, to_b)) in enumerate(zip(read, written, strict=True)):
        at_a, at_b = (i, i) if pairing.endswith("_repeat") else (to_a, to_b)
        x, y = q[0, 0, 0, a], q[0, 0, 0, b]
        truth[to_a] = x * cos[0, 0, at_a] - y * sin[0, 0, at_a]
        truth[to_b] = y * cos[0, 0, at_b] + x * sin[0, 0, at_b]
    torch.testing.assert_close(rope_ref(q, None, cos, sin, pairing=pairing)[0].flatten(), truth)
    torch.testing.assert_close(rope_ref(q, None, cos, -sin, pairing=pairing, inverse=True)[0].flatten(), truth)


def test_the_last_elements_of_a_head(device) -> None:
    q = randn(2, 4, 5, 16, dtype=torch.float32, device=device)
    cos, sin = angles(2, 5, 6, torch.float32, device)
    (turned,) = rope(q, None, cos, sin, trailing=True)[:1]
    assert torch.equal(turned[..., :10], q[..., :10])
    torch.testing.assert_close(turned[..., 10:], rope_ref(q[..., 10:], None, cos, sin)[0])


def test_halves_of_complex_numbers_are_read_where_they_lie(device) -> None:
    q, k = (randn(2, heads, 5, 16, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    numbers = randn(2, 5, 6, 2, dtype=torch.float32, device=device, grad=False)
    check(q, k, *numbers.unbind(-1), "interleaved_repeat", rotary_dim=12)
    turned = rope(q, k, *numbers.unbind(-1), pairing="interleaved_repeat", rotary_dim=12)[0]
    pairs = torch.view_as_complex(q[..., :12].float().unflatten(-1, (6, 2)))
    truth = torch.view_as_real(pairs * torch.view_as_complex(numbers)[:, None]).flatten(-2)
    torch.testing.assert_close(turned[..., :12], truth)


def test_one_tensor(device) -> None:
    q = randn(2, 4, 5, 16, dtype=torch.bfloat16, device=device)
    cos, sin = angles(1, 5, 16, torch.float32, device)
    check_call(*(lambda q, op=op: op(q, None, cos, sin, inverse=True) for op in (rope, rope_ref)), [q])


def test_memory_order_is_kept(device) -> None:
    """Results, and gradients of leaves behind a transpose, lie as q and k did: upstream's views stay views."""
    q, k = (randn(2, 5, heads, 16, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    cos, sin = angles(1, 5, 16, torch.bfloat16, device)
    results = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    assert all(y.transpose(1, 2).is_contiguous() for y in results)
    gradients = torch.autograd.grad(results, (q, k), [torch.ones_like(y).contiguous() for y in results])
    assert all(g.is_contiguous() for g in gradients)


def test_a_view_is_not_copied(device, monkeypatch) -> None:
    launched = []
    module = importlib.import_module("liger_kernels.ops._rope")
    monkeypatch.setattr(module, "launch", lambda kernel, grid, device, *args, **kwargs: launched.extend(args))
    q, k = (randn(2, 5, 4, 16, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(2))
    rope(q, k, *angles(1, 5, 16, torch.bfloat16, device))
    assert {q.data_ptr(), k.data_ptr()} <= {x.data_ptr() for x in launched if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses(device, used) -> None:
    q, k = (randn(2, heads, 5, 16, dtype=torch.float32, device=device) for heads in (4, 2))
    cos, sin = angles(1, 5, 16, torch.float32, device)
    results = rope(q, k, cos, sin)
    upstream = torch.randn_like(results[used])
    gradients = torch.autograd.grad(results[used], (q, k), upstream, allow_unused=True)
    truth = torch.autograd.grad(rope_ref(q, k, cos, sin)[used], (q, k)[used], upstream)[0]
    torch.testing.assert_close(gradients[used], truth)
    assert gradients[1 - used] is None


def test_its_gradient_is_a_constant_of_q(device) -> None:
    """So whoever differentiates a sum of results again gets the right number. What comes in is another matter."""
    q, k = (randn(2, heads, 5, 16, dtype=torch.float32, device=device) for heads in (4, 2))
    a, b = rope(q, k, *angles(1, 5, 16, torch.float32, device))
    (first,) = torch.autograd.grad(a.sum() + b.sum(), q, create_graph=True)
    ((q**2).sum() + (first * q).sum()).backward()
    torch.testing.assert_close(q.grad, 2 * q.detach() + first.detach())


def test_angles_that_require_a_gradient_run_the_reference(device) -> None:
    q, k = (randn(2, heads, 5, 16, dtype=torch.float32, device=device) for heads in (4, 2))
    cos, sin = (x.requires_grad_() for x in angles(1, 5, 16, torch.float32, device))
    reset_launches()
    check(q, k, cos, sin)
    assert not launches()
    with torch.no_grad():
        rope(q, k, cos, sin)
    assert launches() == {"_rope_kernel": 1}


def test_no_tokens(device) -> None:
    q, k = (randn(2, 4, 0, 16, dtype=torch.bfloat16, device=device) for _ in range(2))
    results, gradients = run(rope, [q, k, *angles(1, 0, 16, torch.bfloat16, device)])
    assert all(t.shape == q.shape for t in (*results, *gradients))


def test_tokens_beyond_2_to_the_31_elements(device, untouched_memory) -> None:
    """The last of three tokens lies 2^31 elements into its buffer, the last of two batches 2^30 further."""
    far = untouched_memory(2**32 + 2**20, torch.bfloat16).as_strided((2, 2, 3, 16), (2**31, 16, 2**30, 1))
    far.copy_(randn(2, 2, 3, 16, dtype=torch.bfloat16, device=device, grad=False))
    k, angle = randn(2, 1, 3, 16, dtype=torch.bfloat16, device=device), angles(2, 3, 16, torch.bfloat16, device)
    found, expected = (run(rope, [q.detach().requires_grad_(), k, *angle], [q, k.detach()]) for q in (far, far.clone()))
    assert all(map(torch.equal, found[0] + found[1], expected[0] + expected[1]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"pairing": "neox"}, ValueError, "pairing is 'neox'; it must be one of 'half', 'interleaved', "),
        (lambda a: {"q": a["q"].int()}, TypeError, "q is torch.int32; it must be floating point"),
        (lambda a: {"sin": a["sin"].int()}, TypeError, "sin is torch.int32"),
        (lambda a: {"q": a["q"][0]}, ValueError, r"q has shape \(4, 5, 16\), .* \[batch, heads, seq, head_dim\]"),
        (lambda a: {"k": a["k"][..., :8]}, ValueError, r"k \(2, 2, 5, 8\); they must be"),
        (lambda a: {"cos": a["cos"][:, :4]}, ValueError, r"cos has shape \(1, 4, 16\).*\[1 or 2, 5, rotary_dim\]"),
        (lambda a: {n: a[n][0] for n in ("cos", "sin")}, ValueError, r"cos has shape \(5, 16\)"),
        (lambda a: {n: a[n].expand(3, -1, -1) for n in ("cos", "sin")}, ValueError, r"cos has shape \(3, 5, 16\)"),
        (lambda a: {n: a[n][..., :7] for n in ("cos", "sin")}, ValueError, "rotary_dim is 7; it must be even"),
        (lambda a: {n: a[n][..., :0] for n in ("cos", "sin")}, ValueError, "rotary_dim is 0; it must be .* 2 to 16"),
        (lambda a: {n: a[n].repeat(1, 1, 2) for n in ("cos", "sin")}, ValueError, "rotary_dim is 32; .* 2 to 16"),
        (lambda a: {"rotary_dim": 8}, ValueError, "have 16 columns, rotary_dim is 8; 'half' needs as many"),
        (
            lambda a: {**{n: a[n][..., :6] for n in ("cos", "sin")}, "rotary_dim": 16, "pairing": "half_repeat"},
            ValueError,
            "have 6 columns, rotary_dim is 16; 'half_repeat' needs 8 columns or more",
        ),
        (lambda a: {"cos": a["cos"].to("meta")}, ValueError, "cos is on meta, q on"),
    ],
)
def test_bad_input(device, change, error, message) -> None:
    q, k = (torch.randn(2, heads, 5, 16, device=device) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 5, 16, device=device)
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin}
    with pytest.raises(error, match=message):
        rope(**{**arguments, **change(arguments)})
