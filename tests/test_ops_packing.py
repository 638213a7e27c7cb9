"""Packed sequences: every number of the specification, from reference, kernels and fused loss; edges and refusals."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from convergence.judge.tolerance import three_way
from liger_kernels.ops import (
    PackedTargets,
    cross_entropy,
    cross_entropy_ref,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    packing_weights,
)

VOCABULARY = 5
MODES = ("token", "sample", "square")
DIGITS = 5e-12  # half a unit in the twelfth significant digit of numbers between 1 and 10
CLASS_WEIGHT = torch.tensor([1, 0.5, 2, 1.5, 0.25], dtype=torch.float64)


every_function = pytest.mark.parametrize(
    ("function", "weight"),
    [(cross_entropy, []), (linear_cross_entropy, [torch.eye(VOCABULARY)])],
    ids=["cross_entropy", "linear_cross_entropy"],
)


def labels_of(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [1, rows] and cu_seqlens of documents written as ``1,0,- | 2,3``."""
    documents = [
        [-100 if part.strip() == "-" else int(part) for part in document.split(",")] for document in text.split("|")
    ]
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0)
    return torch.tensor([list(itertools.chain(*documents))]), ends


def logits_of(rows: int, first: int = 0) -> torch.Tensor:
    t, v = torch.arange(first, first + rows, dtype=torch.float64), torch.arange(VOCABULARY, dtype=torch.float64)
    return 2 * torch.sin(0.7 * (t[:, None] + 1) * (v[None, :] + 1))


CASES = {
    "A": "1,0,4,2,3,1,0 | 2,3",
    "B": "-,-,1,3,-,-,2,0,4 | -,2,1 | -,-,-,3",
    "C": "-,2,3 | -,-,-,- | 4 | -,1,0,2",
    "D without padding": "-,2,3,1 | -,4",
}
TRUTH = {
    "A": (2.472777376088, 2.197386682602, 2.359395101622),
    "K": (1.869630888861, 1.982053508320, 1.920670006941),
    "B": (2.186451314607, 2.635821877101, 2.374125242589),
    "C": (2.543563799430, 2.541508613711, 2.542546693304),
    "D": (3.437829975263, 3.764509911759, 3.589442661422),
    "E": (2.552924626987, 2.768252894161, 2.645936114968),
    "E, a mean of means": (2.660155616347, 2.784806771293, 2.716377424735),
}


def packed(case: str, mode: str, device: torch.device, **options):
    """The targets and weights of a case in float64."""
    if case == "D":
        labels, _ = labels_of("-,2,3,1,-,4,-,-,-")
        where = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0, 0]])}
    else:
        labels, ends = labels_of(CASES["A" if case == "K" else case])
        where = {"cu_seqlens": ends}
    given = {"shift_labels" if case == "K" else "labels": labels, **where, **options}
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    return packing_weights(loss_reduction=mode, dtype=torch.float64, **given)


def loss_of(found: PackedTargets, logits: torch.Tensor | None = None, **options) -> float:
    """The loss of the targets, of logits of their own if not of others."""
    targets = found.shift_labels.flatten()
    logits = logits_of(len(targets)).to(targets.device) if logits is None else logits
    weights = {"row_weight": found.row_weight, "denominator": found.denominator, **options}
    return float(cross_entropy_ref(logits, targets, **weights))


def the_specified(number: float | list[float]):
    return pytest.approx(number, abs=DIGITS)


@pytest.mark.parametrize("case", "AKBCD")
@pytest.mark.parametrize("mode", MODES)
def test_the_specified_numbers(case, mode, device):
    assert loss_of(packed(case, mode, device)) == the_specified(TRUTH[case][MODES.index(mode)])


@pytest.mark.parametrize("case", "BC")
@pytest.mark.parametrize(("mode", "reduction"), [("token", "sum"), ("sample", "mean"), ("square", "none")])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 5.0, "logit_scale": 0.5, "class_weight": CLASS_WEIGHT}],
    ids=["plain", "all options"],
)
def test_kernels_and_fused_loss(case, mode, reduction, options, device):
    """float32 kernels and the fused loss, in every schedule, against the float64 reference: values and gradients."""
    options = {name: value.to(device) if name == "class_weight" else value for name, value in options.items()}
    found = packed(case, mode, device, class_weight=options.get("class_weight"))
    targets, rows = found.shift_labels.flatten(), found.shift_labels.numel()
    # The logits are a product of hidden states and weight, exact in float64.
    hidden, weight = logits_of(rows).to(device), torch.eye(VOCABULARY, dtype=torch.float64, device=device)
    upstream = torch.linspace(-1.0, 2.0, rows, device=device) if reduction == "none" else torch.tensor(1.7).to(device)

    def run(function, dtype, *leaves, **more):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        weights = {"row_weight": found.row_weight.to(dtype), "denominator": found.denominator.to(dtype)}
        loss = function(*leaves, targets, reduction=reduction, **weights, **options, **more)
        loss.backward(upstream.to(loss.dtype))
        return [loss, *(leaf.grad for leaf in leaves)]

    for function, reference, leaves, more in (
        (cross_entropy, cross_entropy_ref, (hidden,), {}),
        (linear_cross_entropy, linear_cross_entropy_ref, (hidden, weight), {"chunk_size": 4}),
        (linear_cross_entropy, linear_cross_entropy_ref, (hidden, weight), {"memory": "fast"}),
    ):
        ours = run(function, torch.float32, *leaves, **more)
        own = run(reference, torch.float32, *leaves)
        truth = run(reference, torch.float64, *leaves)
        for name, *three in zip(("loss", "d logits or hidden", "d weight"), ours, own, truth, strict=False):
            three_way(*three, torch.float32, f"{function.__name__}: {name}", chain=9)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_divides_by_the_global_denominator(mode, device):
    """Case E: A, B, C and D one after another, each with the logits of its own rows."""
    parts = [packed(case, mode, device) for case in ("A", "B", "C", "D without padding")]
    denominator = sum(part.denominator for part in parts)
    total = sum(loss_of(part, denominator=denominator) for part in parts)
    assert total == the_specified(TRUTH["E"][MODES.index(mode)])
    # What a mean of the micro-batches' own means would give: the numbers tell the two apart.
    wrong = sum(map(loss_of, parts)) / len(parts)
    assert wrong == the_specified(TRUTH["E, a mean of means"][MODES.index(mode)])


def test_wrong_boundaries_give_the_specified_wrong_values(device):
    """No boundary at all, and boundaries at runs of ignored labels."""
    labels, _ = labels_of(CASES["A"])
    uncut = packing_weights(labels.to(device), dtype=torch.float64)
    assert loss_of(uncut) == the_specified(2.243350694226)
    labels, _ = labels_of(CASES["B"])
    ignored = labels == -100
    runs = (ignored & ~ignored.roll(1, -1)).cumsum(-1)
    by_runs = packing_weights(labels.to(device), seq_idx=runs.to(device), loss_reduction="sample", dtype=torch.float64)
    assert loss_of(by_runs) == the_specified(2.422437119861)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"label_smoothing": 0.1}, 2.608587494413),
        ({"z_loss": 1e-4}, 2.636451442358),
        ({"class_weight": CLASS_WEIGHT}, 2.624402947117),
    ],
    ids=str,
)
def test_options_under_sample_weights(options, expected, device):
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    found = packed("B", "sample", device, class_weight=options.get("class_weight"))
    assert loss_of(found, **options) == the_specified(expected)


def test_the_weights_of_case_a(device):
    found = packed("A", "sample", device)
    expected = torch.tensor([1 / 12] * 6 + [0, 0.5, 0], dtype=torch.float64, device=device)
    three_way(found.row_weight / found.denominator, expected, expected, torch.float64, "w / D")
    assert found.counts.tolist() == [6.0] * 7 + [1.0] * 2


def test_a_sequence_split_over_two_ranks(device):
    """Each rank knows its own rows and, from the caller, the global counts; the parts add up to the whole."""
    targets = packed("A", "sample", device).shift_labels.flatten()
    logits = logits_of(len(targets)).to(device)
    pieces = slice(0, 5), slice(5, 9)
    parts = [
        packing_weights(
            shift_labels=targets[piece],
            cu_seqlens=torch.tensor(ends, device=device),
            seq_token_counts=torch.tensor(counts, device=device),
            loss_reduction="sample",
            dtype=torch.float64,
        )
        for piece, ends, counts in zip(pieces, ([0, 5], [0, 2, 4]), ([6], [6, 1]), strict=True)
    ]
    denominator = parts[0].denominator + parts[1].denominator
    assert float(denominator) == the_specified(2.0)
    losses = [loss_of(part, logits[piece], denominator=denominator) for piece, part in zip(pieces, parts, strict=True)]
    assert losses == the_specified([0.937285955889, 1.260100726713])


@pytest.mark.parametrize("mode", MODES)
def test_every_source_says_the_same(mode, device):
    labels, ends = (t.to(device) for t in labels_of(CASES["C"]))
    expected = packing_weights(labels, cu_seqlens=ends, loss_reduction=mode)
    lengths = ends.diff().tolist()
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    index = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].to(device)
    planes = positions.expand(4, 1, -1).clone()
    planes[1:] = 7
    for where in (
        {"position_ids": positions},
        {"position_ids": positions + 2},  # some models count from 2
        {"position_ids": planes},
        {"seq_idx": index},
        {"seq_idx": 7 - index},  # only a change counts
        {"seq_idx": index.to(torch.int32)[0], "cu_seqlens": ends.int(), "position_ids": positions},
    ):
        for ours, theirs in zip(packing_weights(labels, loss_reduction=mode, **where), expected, strict=True):
            assert torch.equal(ours, theirs), where
    unpacked = packing_weights(labels.expand(3, -1), loss_reduction=mode)
    assert unpacked.shift_labels.shape == (3, labels.shape[1])
    assert unpacked.shift_labels[:, -1].eq(-100).all()


def test_rows_are_sequences_without_a_source(device):
    """The same documents padded in rows of their own weigh as they do packed."""
    labels, ends = labels_of(CASES["B"])
    documents = [labels[0, a:b] for a, b in itertools.pairwise(ends)]
    rows = torch.full((3, 12), -100)
    for i, document in enumerate(documents):
        rows[i, : len(document)] = document
    for mode in MODES:
        alone = packing_weights(rows.to(device), loss_reduction=mode)
        together = packing_weights(labels.to(device), cu_seqlens=ends.to(device), loss_reduction=mode)
        assert torch.equal(alone.row_weight[alone.row_weight > 0], together.row_weight[together.row_weight > 0])
        assert float(alone.denominator) == pytest.approx(float(together.denominator), rel=1e-7)


@pytest.mark.parametrize("mode", MODES)
@every_function
def test_no_targets_at_all(function, weight, mode, device):
    """Loss 0, gradients exactly 0, and a connected graph."""
    labels = torch.full((1, 6), -100, device=device)
    found = packing_weights(labels, cu_seqlens=torch.tensor([0, 2, 6], device=device), loss_reduction=mode)
    assert float(found.denominator) == 0.0
    hidden = torch.randn(6, VOCABULARY, device=device, requires_grad=True)
    weights = {"row_weight": found.row_weight, "denominator": found.denominator}
    loss = function(hidden, *(w.to(device) for w in weight), found.shift_labels[0], **weights)
    loss.backward()
    assert float(loss) == 0.0
    assert not hidden.grad.any()


def test_without_a_denominator_a_mean_divides_by_the_row_weights(device):
    found = packed("C", "square", device)
    targets = found.shift_labels.flatten()
    logits = logits_of(len(targets)).to(device)
    for function, dtype in ((cross_entropy_ref, torch.float64), (cross_entropy, torch.float32)):
        weight = found.row_weight.to(dtype)
        given = function(logits.to(dtype), targets, row_weight=weight, denominator=found.denominator.to(dtype))
        own = function(logits.to(dtype), targets, row_weight=weight)
        assert float(own) == pytest.approx(float(given), rel=1e-6)


def test_small_weights_do_not_underflow_in_float16(device):
    """A sample of 4096 tokens has weights of 2e-4: folded into float16 gradients they would flush them to zero."""
    hidden = torch.randn(64, 16, device=device).half()
    weight = (torch.randn(300, 16, device=device) / 4).half().requires_grad_()
    targets = torch.randint(0, 300, (64,), device=device)
    full, small = (torch.full((64,), w, device=device) for w in (1.0, 2.0**-18))
    grads = []
    for row_weight in (full, small):
        loss = linear_cross_entropy(hidden, weight, targets, row_weight=row_weight, denominator=row_weight.sum())
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("arguments", "error", "shown"),
    [
        ({"labels": torch.zeros(1, 4)}, TypeError, "float32"),
        ({"labels": [1, 2]}, TypeError, "list"),
        ({"labels": torch.zeros(1, 2, 3, dtype=torch.int64)}, ValueError, "[1, 2, 3]"),
        ({}, ValueError, "labels or shift_labels"),
        ({"loss_reduction": "mean"}, ValueError, "'token', 'square', 'sample'"),
        ({"is_packed": True}, ValueError, "cu_seqlens, seq_idx or position_ids"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, ValueError, "ascend"),
        ({"cu_seqlens": torch.tensor([0, 5, 9])}, ValueError, "at most 8"),
        ({"cu_seqlens": torch.tensor([1, 5, 8])}, ValueError, "from 0"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, ValueError, "[sequences + 1]"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, TypeError, "cu_seqlens"),
        ({"position_ids": torch.zeros(1, 7, dtype=torch.int64)}, ValueError, "[1, 7]"),
        ({"position_ids": torch.zeros(3, 1, 8, dtype=torch.int64)}, ValueError, "3 planes"),
        ({"position_ids": torch.zeros(1, 8)}, TypeError, "position_ids"),
        (
            {"cu_seqlens": torch.tensor([0, 4, 8]), "position_ids": torch.arange(8)[None]},
            ValueError,
            "disagree",
        ),
        ({"seq_token_counts": torch.tensor([-1])}, ValueError, "negative"),
        ({"seq_token_counts": torch.tensor([7.0])}, TypeError, "seq_token_counts"),
        ({"cu_seqlens": torch.tensor([0, 4, 8]), "seq_token_counts": torch.tensor([3])}, ValueError, "1 numbers"),
        ({"seq_token_counts": torch.tensor([7, 7])}, ValueError, "2 numbers; there are fewer sequences"),
        ({"seq_token_counts": torch.tensor([6])}, ValueError, "less than there are targets here"),
        ({"dtype": torch.int64}, TypeError, "dtype is torch.int64"),
        ({"class_weight": torch.ones(VOCABULARY, dtype=torch.int64)}, ValueError, "class_weight is torch.int64"),
    ],
)
def test_bad_input(arguments, error, shown):
    given = {"labels": torch.arange(8)[None] % VOCABULARY, **arguments} if arguments else {}
    with pytest.raises(error, match=re.escape(shown)):
        packing_weights(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU, what makes no sense raises")
def test_what_makes_no_sense_is_nan_on_a_gpu(device):
    labels = torch.arange(8, device=device)[None] % VOCABULARY
    for where in (
        {"cu_seqlens": torch.tensor([0, 5, 3, 8])},
        {"cu_seqlens": torch.tensor([0, 9])},
        {"cu_seqlens": torch.tensor([0, 4, 8]), "position_ids": torch.arange(8)[None]},
        {"seq_token_counts": torch.tensor([-1])},
    ):
        arguments = {name: value.to(device) for name, value in where.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = packing_weights(labels, **arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert math.isnan(float(found.denominator))
        assert found.row_weight.isnan().all()


@every_function
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("row_weight", torch.ones(5), ValueError),
        ("row_weight", torch.ones(6, dtype=torch.int64), TypeError),
        ("row_weight", 1.0, TypeError),
        ("row_weight", torch.ones(6, requires_grad=True), ValueError),
        ("denominator", torch.ones(1), ValueError),
        ("denominator", 3, TypeError),
        ("denominator", torch.tensor(-1.0), ValueError),
        ("denominator", torch.tensor(math.nan), ValueError),
    ],
)
def test_weights_that_do_not_fit(function, weight, name, value, error):
    with pytest.raises(error, match=name):
        function(torch.randn(6, VOCABULARY), *weight, torch.arange(6) % VOCABULARY, **{name: value})
