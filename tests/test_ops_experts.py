"""experts against its reference."""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convergence.op.call import check_call, run
from liger_kernels.ops import GluFormula, _grouped, experts, experts_ref, launches, reset_launches
from liger_kernels.ops.runtime.dispatch import launch
from liger_kernels.ops.runtime.tiling import tiled
from tests.ops_checks import DTYPES, EXAMPLES, randn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER, EXPERTS = 24, 16, 6
GPT_OSS = GluFormula(alpha=1.702, limit=1.5, offset=1.0, interleaved=True)


def leaves(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    tokens: int = 9,
    choices: int = 2,
    n_experts: int = EXPERTS,
    transposed: bool = False,
    weights: torch.dtype | None = None,
    biases: bool = False,
) -> list[torch.Tensor]:
    """hidden, weights, gate_up and down, both the other way round where ``transposed``, and their biases."""
    shapes = [(n_experts, 2 * INNER, HIDDEN), (n_experts, HIDDEN, INNER)]
    shapes = [(e, b, a) for e, a, b in shapes] if transposed else shapes
    shapes += [(n_experts, 2 * INNER), (n_experts, HIDDEN)] if biases else []
    return [
        randn(tokens, HIDDEN, dtype=dtype, device=device),
        torch.rand(tokens, choices).to(device, weights or dtype).requires_grad_(),
        *(randn(*shape, dtype=dtype, device=device, scale=0.3) for shape in shapes),
    ]


def routed(tokens: int = 9, choices: int = 2, n_experts: int = EXPERTS) -> torch.Tensor:
    """No token has the last expert but one, one token has an expert twice, one has a choice that is no expert."""
    ids = torch.randint(n_experts, (tokens, choices))
    ids[ids == n_experts - 2] = 0
    ids[0] = n_experts - 1
    ids[-1, -1] = n_experts
    return ids.to(DEVICE)


def calls(ids: torch.Tensor, gate: GluFormula | None = None, transposed: bool = False) -> list[Any]:
    def call(op, hidden, weights, gate_up, down, *biases):
        views = (t.transpose(1, 2) if transposed else t for t in (gate_up, down))
        return op(hidden, ids, weights, *views, gate, *biases)

    return [partial(call, op) for op in (experts, experts_ref)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("gate", "transposed", "biases"),
    [(GluFormula(), True, False), (GluFormula(limit=1.5), True, True), (GPT_OSS, False, True)],
    ids=["silu", "clamped", "gpt-oss"],
)
def test_matches_reference(device, dtype, gate, transposed, biases) -> None:
    given = leaves(device, dtype, tokens=40, choices=3, transposed=transposed, biases=biases)
    check_call(*calls(routed(40, 3), gate, transposed), given, terms=HIDDEN)


@EXAMPLES
@given(
    tokens=st.integers(6, 20),  # of few, one sum that cancels decides
    choices=st.integers(1, 5),
    n_experts=st.integers(2, 9),
    dtype=st.sampled_from(DTYPES),
    ids_dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
    biases=st.booleans(),
    frozen=st.sets(st.integers(0, 5), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_option(tokens, choices, n_experts, dtype, ids_dtype, biases, frozen, seed) -> None:
    torch.manual_seed(seed)
    given = leaves(DEVICE, dtype, tokens, choices, n_experts, biases=biases)
    given = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(given)]
    check_call(*calls(routed(tokens, choices, n_experts).to(ids_dtype)), given, terms=HIDDEN)


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_weights_of_another_dtype(device, dtype, weights) -> None:
    check_call(*calls(routed(400, 4)), leaves(device, dtype, 400, 4, weights=weights), terms=HIDDEN)


def test_weights_are_not_rounded(device) -> None:
    """The weights of one expert, taken twice, cancel but for what bfloat16 does not hold of the first."""
    hidden, _, *parameters = leaves(device, torch.bfloat16, tokens=1)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    both, rest = (torch.tensor([pair], device=device) for pair in ((1 + 2**-10, -1.0), (2**-10, 0.0)))
    assert torch.equal(experts(hidden, ids, both, *parameters), experts(hidden, ids, rest, *parameters))


def test_no_tokens(device) -> None:
    hidden, *others = leaves(device, tokens=0, biases=True)
    y = calls(torch.empty(0, 2, dtype=torch.int64, device=device))[0](hidden, *others)
    assert y.shape == hidden.shape
    y.sum().backward()


@pytest.mark.parametrize("n_experts", [254, 255, 300])
def test_many_experts(device, n_experts) -> None:
    """Whose numbers do not fit into the keys of eight bits that fewer are sorted by."""
    ids = torch.tensor([[0, n_experts - 1], [n_experts, 1], [n_experts - 1, 0]], device=device)
    check_call(*calls(ids), leaves(device, tokens=3, n_experts=n_experts), terms=HIDDEN)


def test_unused_experts_have_a_gradient_of_zero(device) -> None:
    given = leaves(device, biases=True)
    _, (_, _, *gradients) = run(calls(routed())[0], given)
    for gradient in gradients:
        assert gradient[EXPERTS - 2].abs().max() == 0 < gradient[0].abs().min()


def test_a_token_is_summed_in_float32(device) -> None:
    """Of 256 and four ones, a sum in bfloat16 is 256. Both results are rounded once, by 2**-9 at most."""
    hidden, _, *parameters = leaves(device, torch.bfloat16)
    once = experts(
        hidden, torch.zeros(9, 1, dtype=torch.int64, device=device), torch.ones(9, 1, device=device), *parameters
    )
    weights = torch.tensor([[256.0, 1, 1, 1, 1]], dtype=torch.bfloat16, device=device).expand(9, -1)
    y = experts(hidden, torch.zeros(9, 5, dtype=torch.int64, device=device), weights, *parameters)
    torch.testing.assert_close(y.float(), 260 * once.float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("none", [EXPERTS, 255, 256, 2**31])
def test_a_choice_that_is_no_expert_counts_as_nothing(device, none) -> None:
    """Whatever is in the memory of its rows (``torch.empty`` is NaN in tests), and however large its number is."""
    hidden, weights, *parameters = leaves(device, tokens=3, biases=True)
    ids = torch.tensor([[none, none], [0, none], [1, 2]], device=device)
    (y,), (dhidden, dweights, *_) = run(calls(ids)[0], [hidden, weights, *parameters])
    assert y[0].abs().max() == dhidden[0].abs().max() == dweights[ids == none].abs().max() == 0
    alone = calls(ids[1:2, :1])[0](hidden[1:2], weights[1:2, :1], *parameters)
    torch.testing.assert_close(y[1:2], alone)


def grouped_with_gaps(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's grouped product: each row of the result begins at a multiple of 16 bytes."""
    bounds = [slice(*ends) for ends in itertools.pairwise([0, *offs.tolist()])]
    if b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in bounds])
    product = torch.cat([a[rows] @ matrix for rows, matrix in zip(bounds, b, strict=True)])
    product = torch.cat([product, product.new_full((len(a) - len(product), product.shape[1]), torch.nan)])
    return torch.nn.functional.pad(product, (0, -product.shape[1] % (16 // a.element_size())))[:, : product.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_whose_rows_have_gaps(dtype, device, monkeypatch) -> None:
    hidden, inner, ids = 18, 14, routed()
    monkeypatch.setattr(_grouped, "_grouped_mm", grouped_with_gaps)
    shapes = (
        (9, hidden),
        (EXPERTS, 2 * inner, hidden),
        (EXPERTS, hidden, inner),
        (EXPERTS, 2 * inner),
        (EXPERTS, hidden),
    )
    x, *parameters = (randn(*shape, dtype=dtype, device=device, scale=0.3) for shape in shapes)
    weights = torch.rand(9, 2).to(device, dtype).requires_grad_()
    both = [partial(op, ids=ids) for op in (experts, experts_ref)]
    names = "hidden", "weights", "gate_up", "down", "gate_up_bias", "down_bias"
    calls = [lambda *given, op=op: op(**dict(zip(names, given, strict=True))) for op in both]
    with tiled(grouped=lambda choose, a, b: True):
        check_call(*calls, [x, weights, *parameters], terms=hidden)


@pytest.mark.parametrize("transposed", [False, True])
def test_autograd_keeps_the_gradients_of_parameters_where_they_are(device, transposed, monkeypatch) -> None:
    """One that is laid out in another way than its parameter is copied, and experts are most of a model."""
    module, made = importlib.import_module("liger_kernels.ops._experts"), []
    products = module.grouped_outer_product
    monkeypatch.setattr(
        module, "grouped_outer_product", lambda *args: (made.append((y := products(*args)).data_ptr()), y)[1]
    )
    given = leaves(device, transposed=transposed)
    calls(routed(), transposed=transposed)[0](*given).sum().backward()
    assert [given[3].grad.data_ptr(), given[2].grad.data_ptr()] == made


def test_saves_the_first_product_and_nothing_else_of_all_rows(device) -> None:
    saved = []
    given = leaves(device, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        calls(routed())[0](*given)
    own = {t.data_ptr() for t in given}
    assert own <= {t.data_ptr() for t in saved}
    assert [t.shape for t in saved if t.data_ptr() not in own] == [(18, 2 * INNER)]


@pytest.mark.parametrize(
    ("frozen", "gathered", "summed", "written"),
    [(set(), 3, 2, [True]), ({0}, 3, 1, [True]), ({2}, 2, 2, [True]), ({3}, 3, 2, [False]), ({2, 3}, 2, 2, [False])],
    ids=str,
)
def test_frozen_parts_cost_nothing(device, monkeypatch, frozen, gathered, summed, written) -> None:
    products = []

    def record(kernel, grid, device, *args, **kwargs):
        products.extend([kwargs["PRODUCT"]] if "PRODUCT" in kwargs else [])
        launch(kernel, grid, device, *args, **kwargs)

    monkeypatch.setattr(importlib.import_module("liger_kernels.ops._packed_glu"), "launch", record)
    reset_launches()
    run(calls(routed())[0], [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(leaves(device))])
    found = launches()
    assert (found["_experts_gather_kernel"], found["_experts_sum_kernel"], products) == (gathered, summed, written)


@pytest.mark.parametrize("trained", range(6))
def test_the_gradient_of_one_alone(device, trained) -> None:
    """Of a bias, for example, where everything else is frozen."""
    given, op = leaves(device, biases=True), calls(routed())[0]
    _, of_all = run(op, given)
    _, (of_one,) = run(op, [t.detach().requires_grad_(i == trained) for i, t in enumerate(given)])
    assert torch.equal(of_one, of_all[trained])


def test_rows_of_other_strides(device) -> None:
    def call(op, hidden, weights, gate_up, down, gate_up_bias, down_bias):
        views = gate_up_bias[:, ::2], down_bias.t()
        return op(hidden[:, 1 : HIDDEN + 1], routed_ids.t(), weights.t(), gate_up, down, None, *views).t()

    routed_ids = routed().t().contiguous()
    _, _, *parameters = leaves(device)
    weights = torch.rand(2, 9, device=device).requires_grad_()
    shapes = (9, HIDDEN + 2), (EXPERTS, 4 * INNER), (HIDDEN, EXPERTS)
    hidden, *biases = (randn(*shape, dtype=torch.float32, device=device) for shape in shapes)
    check_call(*(partial(call, op) for op in (experts, experts_ref)), [hidden, weights, *parameters, *biases])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("n_experts", [EXPERTS, 254, 255, 300])
def test_a_number_below_0_is_no_expert(device, n_experts, dtype) -> None:
    """As one of ``experts`` or above is none: the same results and gradients as with a choice of weight 0, from op and
    reference. Sorting keys have 8 bits up to 254 experts."""
    limits = torch.iinfo(dtype)
    every = -1, -2, -255, -256, -257, limits.min, n_experts
    none = [number for number in every if limits.min <= number <= limits.max]
    ids = torch.arange(2 * len(none)).view(-1, 2).remainder(4).to(device, dtype)
    given = leaves(device, tokens=len(ids), n_experts=n_experts, biases=True)
    with_none, upstream = ids.clone(), [torch.randn(len(ids), HIDDEN, device=device)]
    with_none[:, 1] = torch.tensor(none, dtype=dtype)
    weightless = [t.detach().clone().requires_grad_() for t in given]
    weightless[1].data[:, 1] = 0
    expected, (*gradients,) = run(calls(ids)[1], weightless, upstream)
    gradients[1] = gradients[1].clone()
    gradients[1][:, 1] = 0
    for op in calls(with_none):
        found, theirs = run(op, given, upstream)
        torch.testing.assert_close([*found, *theirs], [*expected, *gradients])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda h, i, w, g, d: (h, i.float(), w, g, d), TypeError, "ids is torch.float32; it must be the numbers"),
        (
            lambda h, i, w, g, d: (h.half(), i, w, g, d),
            TypeError,
            "hidden is torch.float16, gate_up torch.float32, down",
        ),
        (lambda h, i, w, g, d: (h, i, w.int(), g, d), TypeError, "weights is torch.int32; it must be floating point"),
        (lambda h, i, w, g, d: (h[1:], i, w, g, d), ValueError, r"hidden has shape \(8, 24\), ids \(9, 2\)"),
        (lambda h, i, w, g, d: (h, i[:, :1], w, g, d), ValueError, r"ids \(9, 1\), weights \(9, 2\)"),
        (lambda h, i, w, g, d: (h, i, w, g[:, 1:], d), ValueError, r"gate_up has shape \(6, 31, 24\); it must be"),
        (lambda h, i, w, g, d: (h, i, w, g, d.transpose(1, 2)), ValueError, r"down has shape .*must be \(6, 24, 16\)"),
        (lambda h, i, w, g, d: (h, i, w, g, d.to("meta")), ValueError, "down is on meta, hidden on"),
    ],
)
def test_bad_input(device, change, error, message) -> None:
    hidden, weights, *parameters = (t.detach() for t in leaves(device))
    with pytest.raises(error, match=message):
        experts(*change(hidden, routed(), weights, *parameters))
