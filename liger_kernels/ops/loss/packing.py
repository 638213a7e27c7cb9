r"""Row weights that give a packed batch's loss the chosen reduction, independent of how samples are packed.

Row t predicts y_t. Sequence s has n_s targets: its rows with y_t != ignore_index, counted *after* the shift. With the
exponent p = 0 ("token"), 1/2 ("square") or 1 ("sample"):

    w_t = n_s(t)^-p            D = sum_t w_t = sum over non-empty s of n_s^(1-p)
    L = (1/D) sum_t w_t * nll_t

With class weights c, n_s is the sum of c[y_t] over s, and the loss multiplies w_t by c[y_t]. "token" is transformers'
mean. "sample" weights every sequence alike, as if each had been a separate batch. "square" is the compromise of
InternVL 2.5 (arXiv:2412.05271).

Over several micro-batches or ranks, D is the sum of all their ``denominator`` (times the number of ranks if gradients
are averaged). Everything is computed on the labels' device in a fixed number of scans. The host reads no value.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from liger_kernels.ops.runtime.arguments import checked, one_of, refuse_type

EXPONENTS = {"token": 0.0, "square": 0.5, "sample": 1.0}
LossReduction = Annotated[str, one_of(EXPONENTS)]


class PackedTargets(NamedTuple):
    """The arguments of a loss over packed rows.

    Attributes:
        shift_labels: int64, of the labels' shape: the target of each row; ``ignore_index`` at a sequence's last row.
        row_weight: [tokens], over the flattened rows: w_t, 0 where there is no target.
        denominator: 0-d: D, or this batch's part of D if there are several batches.
        counts: [tokens]: n_s of each row's sequence, 0 in padding.
    """

    shift_labels: Tensor
    row_weight: Tensor
    denominator: Tensor
    counts: Tensor


class _Sequences(NamedTuple):
    """The beginnings of sequences, over the flattened rows [tokens]; ``number`` counts sequences from 0."""

    start: Tensor
    padding: Tensor
    number: Tensor
    broken: Tensor  # 0-d: the source is invalid; the host reads that only on a CPU
    named: int = 0  # the least number of sequences, empty ones too, if the source says it


@checked
def packing_weights(
    labels: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Tensor | None = None,
    shift_labels: Tensor | None = None,
    loss_reduction: LossReduction = "token",
    is_packed: bool = False,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    seq_token_counts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedTargets:
    """Targets, row weights and denominator of packed ``labels``. The formulas are at the top of this file.

    The first given source says where sequences begin: ``seq_idx``, ``cu_seqlens``, then ``position_ids``. Without a
    source each row is one sequence. Labels are never a source: in a chat with several turns, the masked turns lie
    inside a sequence.

    Args:
        labels: int [batch, length] or [length], unshifted: row t predicts labels[t + 1] inside its sequence.
        cu_seqlens: int [sequences + 1], ascending from 0, over the flattened rows; rows past its end are padding.
        seq_idx: int, of the labels' shape: a change of value is a boundary; negative is padding.
        position_ids: int, of the labels' shape, or [1, length] for every row, or [4, batch, length] (the first plane is
            the text's). A boundary is wherever the value does not grow by one.
        shift_labels: the targets themselves, in place of ``labels``.
        loss_reduction: "token", "square" or "sample".
        is_packed: use "sample", and require a source.
        ignore_index: the label that is no target.
        class_weight: [vocab], the class_weight of the loss.
        seq_token_counts: [sequences], n_s of every sequence in order. It is needed if a sequence goes on in another row
            or on another rank, because not all of its targets are here then.
        dtype: the dtype of row_weight and denominator.

    Raises:
        TypeError, ValueError: for arguments of a wrong type, shape or device, an unknown mode, mrope's three planes
            (pass ``cu_seqlens``). On a CPU also for sources that disagree, ``cu_seqlens`` that descends or ends past
            the rows, and counts that are negative, less than the targets here, or not one for each sequence. On a GPU a
            check would stall the device, so such values make every row weight NaN.
    """
    if (labels is None) == (shift_labels is None):
        raise ValueError("packing_weights takes labels or shift_labels, one of the two")
    given = labels if labels is not None else shift_labels
    assert given is not None
    _check_integers("labels" if labels is not None else "shift_labels", given)
    if given.dim() not in (1, 2):
        raise ValueError(f"labels have shape {list(given.shape)}; they must be [batch, length] or [length]")
    if is_packed and loss_reduction == "token":
        loss_reduction = "sample"
    if not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype}; it must be floating point")
    if class_weight is not None:
        _check_class_weight(class_weight, given.device)
    sources = _sources(given, seq_idx, cu_seqlens, position_ids)
    if is_packed and not sources:
        raise ValueError("is_packed=True needs to know where sequences begin: give cu_seqlens, seq_idx or position_ids")
    if not sources:
        sources = [_rows_as_sequences(given)]
    targets, counts = _count(given, labels is None, sources[0], ignore_index, class_weight)
    broken = _broken(given, labels is None, sources, ignore_index)
    if seq_token_counts is not None:
        here = counts if class_weight is None else torch.zeros_like(counts)  # sums of weights are no numbers of targets
        counts, wrong = _given_counts(seq_token_counts, sources[0], here)
        broken = broken | wrong
    counted = (targets != ignore_index) & (counts > 0)
    counts = counts.double()
    weight = torch.where(counted, counts.clamp(min=1e-300) ** -EXPONENTS[loss_reduction], 0.0)
    weight = weight.masked_fill(broken, float("nan"))
    denominator = (weight * _share(targets, counted, class_weight)).sum()
    return PackedTargets(targets.view(given.shape), weight.to(dtype), denominator.to(dtype), counts.to(dtype))


def sequence_index(
    labels: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Tensor | None = None,
    shifted: bool = False,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The sequence of each row, for a loss that is computed later.

    Args:
        labels, cu_seqlens, seq_idx, position_ids, ignore_index: as in :func:`packing_weights`, with at least one
            source. :func:`packing_weights` accepts the result as ``seq_idx``.
        shifted: whether ``labels`` are the targets themselves.

    Returns:
        int64 of the labels' shape, a different number for each sequence and -1 in padding; and a 0-d bool, whether the
        sources are invalid. The host reads this bool, and raises, only on a CPU.
    """
    _check_integers("labels", labels)
    if labels.dim() not in (1, 2):
        raise ValueError(f"labels have shape {list(labels.shape)}; they must be [batch, length] or [length]")
    sources = _sources(labels, seq_idx, cu_seqlens, position_ids)
    broken = _broken(labels, shifted, sources, ignore_index)
    index = sources[0].start.cumsum(0).masked_fill(sources[0].padding, -1)
    return index.view(labels.shape), broken


def _broken(given: Tensor, shifted: bool, sources: list[_Sequences], ignore_index: int) -> Tensor:
    """Whether a source is invalid or disagrees with the first, 0-d. Raises if the host may read the values.

    Only differences that change the loss are disagreements, because sources define padding differently.
    """
    broken = sources[0].broken
    if len(sources) > 1:
        targets, counts = _count(given, shifted, sources[0], ignore_index, None)
    for other in sources[1:]:
        their_targets, their_counts = _count(given, shifted, other, ignore_index, None)
        counted = targets != ignore_index
        differ = (targets != their_targets).any() | ((counts != their_counts) & counted).any()
        broken = broken | other.broken | differ
        _refuse(
            differ,
            "two sources of where sequences begin disagree; "
            "give one of cu_seqlens (cu_seq_lens_q), seq_idx, position_ids",
        )
    return broken


def _check_integers(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        refuse_type(name, value, "a tensor of integers")
    if value.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name} is {value.dtype}; it must be a tensor of integers")


def _check_class_weight(weight: Tensor, device: torch.device) -> None:
    if not weight.is_floating_point() or weight.dim() != 1:
        raise ValueError(
            f"class_weight is {weight.dtype} of shape {list(weight.shape)}; it must be floating point of shape [vocab]"
        )
    if weight.device != device:
        raise ValueError(f"class_weight is on {weight.device}, the labels on {device}; move it there")


def _refuse(wrong: Tensor, why: str) -> None:
    """Raise if the host may read ``wrong``: on a CPU."""
    if wrong.device.type == "cpu" and not torch.compiler.is_compiling() and bool(wrong):
        raise ValueError(why)


def _sources(
    labels: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None, position_ids: Tensor | None
) -> list[_Sequences]:
    found = []
    for name, value in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens), ("position_ids", position_ids)):
        if value is None:
            continue
        _check_integers(name, value)
        if value.device != labels.device:
            raise ValueError(f"{name} is on {value.device}, the labels on {labels.device}; move it there")
        if name == "cu_seqlens":
            found.append(_from_cu_seqlens(labels, value))
        elif name == "seq_idx":
            rows = _like_labels(name, value, labels)
            found.append(_from_starts(labels, _changes(rows, rows.roll(1, -1)), rows < 0))
        else:
            rows = _like_labels(name, _text_plane(value), labels)
            start = _changes(rows, rows.roll(1, -1) + 1)
            found.append(_from_starts(labels, start, torch.zeros_like(start)))
    return found


def _like_labels(name: str, value: Tensor, labels: Tensor) -> Tensor:
    """``value`` as int64 [batch, length]. A single row stands for all rows."""
    batch, length = _two_dimensional(labels).shape
    rows = value.view(1, -1) if value.dim() == 1 else value
    if rows.dim() != 2 or rows.shape[1] != length or rows.shape[0] not in (1, batch):
        raise ValueError(f"{name} has shape {list(value.shape)}; it must be that of the labels, {list(labels.shape)}")
    return rows.long().expand(batch, length)


def _two_dimensional(labels: Tensor) -> Tensor:
    return labels if labels.dim() == 2 else labels.view(1, -1)


def _text_plane(position_ids: Tensor) -> Tensor:
    if position_ids.dim() != 3:
        return position_ids
    if len(position_ids) != 4:
        raise ValueError(
            f"position_ids have shape {list(position_ids.shape)}: {len(position_ids)} planes, as mrope has them, say "
            "nothing of where a text begins; give cu_seqlens (or four planes, the text's first)"
        )
    return position_ids[0]


def _changes(rows: Tensor, expected: Tensor) -> Tensor:
    """Whether each element differs from its expected value. The first of a row always counts as different."""
    start = rows != expected
    start[:, :1] = True
    return start


def _from_starts(labels: Tensor, start: Tensor, padding: Tensor) -> _Sequences:
    start, padding = start.flatten(), padding.flatten()
    index = (start & ~padding).cumsum(0) - 1
    return _Sequences(start, padding, index, torch.zeros((), dtype=torch.bool, device=labels.device))


def _rows_as_sequences(labels: Tensor) -> _Sequences:
    start = torch.zeros(_two_dimensional(labels).shape, dtype=torch.bool, device=labels.device)
    start[:, :1] = True
    return _from_starts(labels, start, torch.zeros_like(start))


def _from_cu_seqlens(labels: Tensor, cu_seqlens: Tensor) -> _Sequences:
    tokens, device = labels.numel(), labels.device
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [sequences + 1]")
    ends = cu_seqlens.long()
    broken = (ends[0] != 0) | (ends.diff() < 0).any() | (ends[-1] > tokens)
    _refuse(
        broken,
        f"cu_seqlens must ascend from 0 to at most {tokens}, the number of rows; it is "
        f"{ends.tolist() if device.type == 'cpu' else '...'}",
    )
    # One more place than rows, for empty sequences at the end.
    starts = torch.zeros(tokens + 1, dtype=torch.int64, device=device)
    starts.scatter_add_(0, ends[:-1].clamp(0, tokens), torch.ones_like(ends[:-1]))
    starts = starts[:tokens]
    rows = torch.arange(tokens, device=device)
    padding = rows >= ends[-1]
    first_of_row = rows % _two_dimensional(labels).shape[1] == 0
    start = (starts > 0) | first_of_row | (rows == ends[-1])
    return _Sequences(start, padding, starts.cumsum(0) - 1, broken, named=len(ends) - 1)


def _count(
    labels: Tensor, shifted: bool, sequences: _Sequences, ignore_index: int, class_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The target of each row, int64 [tokens], and n_s of the row's sequence [tokens], in the dtype of ``_share``."""
    flat = labels.flatten().long()
    ignored = torch.full_like(flat, ignore_index)
    flat = torch.where(sequences.padding, ignored, flat)
    if shifted:
        targets = flat
    else:
        goes_on = ~sequences.start.roll(-1)
        goes_on[-1:] = False
        targets = torch.where(goes_on, flat.roll(-1), ignored)
    counted = targets != ignore_index
    # A sequence's sum is the running sum before the next sequence, minus the running sum before this one. Cumulative
    # sums and writes to separate places are fast on any device. Atomics to one address and running maxima are not.
    share = _share(targets, counted, class_weight)
    running = share.cumsum(0)
    number = sequences.start.cumsum(0)  # from 1, including runs of padding
    total = running[-1:] if len(flat) else share.new_zeros(1)
    before = total.expand(len(flat) + 2).clone()  # [number]: rows that do not start a sequence write to 0
    before.scatter_(0, torch.where(sequences.start, number, 0), running - share)
    counts = before[number + 1] - before[number]
    return targets, counts.masked_fill(sequences.padding, 0)


def _share(targets: Tensor, counted: Tensor, class_weight: Tensor | None) -> Tensor:
    """The share of each row [tokens]: 1 in int64, whose sums are exact in any order, or the weight of the target's
    class."""
    if class_weight is None:
        return counted.long()
    usable = counted & (targets >= 0) & (targets < len(class_weight))
    return torch.where(usable, class_weight.double()[torch.where(usable, targets, 0)], 0.0)


def _given_counts(counts: Tensor, sequences: _Sequences, here: Tensor) -> tuple[Tensor, Tensor]:
    """n_s of each row's sequence, from one number per sequence, and whether these numbers are wrong. They are wrong if
    there are too few or too many, or if one is less than its sequence has ``here`` [tokens]."""
    _check_integers("seq_token_counts", counts)
    device = sequences.start.device
    if counts.dim() != 1 or counts.device != device:
        raise ValueError(
            f"seq_token_counts has shape {list(counts.shape)} on {counts.device}; it must be [sequences] on {device}"
        )
    negative = (counts < 0).any()
    _refuse(negative, "seq_token_counts must not be negative: it has the number of targets of every sequence")
    index = sequences.number.masked_fill(sequences.padding, 0)
    missing = (index >= len(counts)).any() if len(index) else negative
    _refuse(missing, f"seq_token_counts has {len(counts)} numbers; there are more sequences than that")
    if not len(counts):
        return torch.zeros_like(index, dtype=torch.float64), missing | negative
    unused = (index.amax() + 1).clamp(min=sequences.named) < len(counts) if len(index) else negative
    _refuse(unused, f"seq_token_counts has {len(counts)} numbers; there are fewer sequences than that")
    own = counts.double()[index.clamp(0, len(counts) - 1)].masked_fill(sequences.padding, 0.0)
    less = (own < here).any()
    _refuse(less, "seq_token_counts has less than there are targets here; it has all targets of every sequence")
    return own, missing | negative | unused | less
