"""Packed rows in a patched model: where its sequences begin, what each row weighs, what a loss is divided by.

The loss function of a model sees labels and logits. Where sequences begin is said by other arguments of the same
forward (``cu_seq_lens_q``, ``seq_idx``, ``position_ids``), most of which never reach the loss. :func:`captured` takes
them where they all are, at the model's own forward, and the cross entropy of its deferred logits asks :class:`Packing`
for targets and weights when upstream's loss function calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from liger_kernels.ops.loss.packing import LossReduction, packing_weights, sequence_index
from liger_kernels.ops.runtime.arguments import checked, describe

# Upstream's name of each source, and packing_weights' name.
SOURCES = {"cu_seq_lens_q": "cu_seqlens", "seq_idx": "seq_idx", "position_ids": "position_ids"}

NO_SOURCE = (
    "loss_reduction={mode!r} needs to know where the sequences of a row begin, and none of cu_seq_lens_q, seq_idx, "
    "position_ids came with the labels. A collator makes them: transformers' DataCollatorWithFlattening("
    "return_position_ids=True), or return_flash_attn_kwargs=True, or return_seq_idx=True; trl's "
    "SFTConfig(packing=True) or SFTConfig(padding_free=True). For rows that hold one sequence each pass position_ids="
    "torch.arange(length).expand(batch, length)"
)


class Denominator(torch.Tensor):
    """``num_items_in_batch`` in the unit of a loss reduction: the class says of which, and survives ``.to(device)``.

    A plain number there is a count of tokens, as a plain ``Trainer`` makes it.
    """

    loss_reduction: ClassVar[str] = "token"


class SampleDenominator(Denominator):
    """The number of sequences that have targets."""

    loss_reduction = "sample"


class SquareDenominator(Denominator):
    """The sum of the square roots of the sequences' numbers of targets."""

    loss_reduction = "square"


_DENOMINATORS = {cls.loss_reduction: cls for cls in (Denominator, SampleDenominator, SquareDenominator)}


@checked
def packing_denominator(
    batches: Mapping[str, Any] | Iterable[Mapping[str, Any]], loss_reduction: LossReduction
) -> Denominator:
    """What the summed loss of all ``batches`` is divided by: pass it as ``num_items_in_batch`` to each of them.

    Args:
        batches: the micro-batches of one optimizer step, each a dict as the model's forward takes it: ``labels`` (or
            ``shift_labels``), and ``cu_seq_lens_q``, ``seq_idx`` or ``position_ids``.
        loss_reduction: as in :func:`liger_kernels.patch`.

    Returns:
        0-d float32 on the labels' device. Over several ranks, sum it; where gradients are averaged over ranks multiply
        the loss by their number.

    Raises:
        TypeError, ValueError: as the model's forward does for the same batch.
    """
    batches = [batches] if isinstance(batches, Mapping) else list(batches)
    if not batches:
        raise ValueError("packing_denominator got no batches; it takes the micro-batches of one optimizer step")
    parts = []
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"batches has {describe(batch)} in it; each must be a dict, as the model's forward takes it"
            )
        if batch.get("labels") is None and batch.get("shift_labels") is None:
            raise ValueError("batches has one without labels; each needs labels or shift_labels, as a tensor")
        targets = _targets(batch)
        sources = _sources(batch, loss_reduction)
        parts.append(packing_weights(**targets, **sources, loss_reduction=loss_reduction).denominator)
    device = parts[0].device
    total = torch.stack([part.to(device) for part in parts]).sum()
    return total.as_subclass(_DENOMINATORS[loss_reduction])


def _sources(arguments: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The boundary sources among a forward's arguments, as packing_weights names them."""
    found = {ours: arguments[theirs] for theirs, ours in SOURCES.items() if arguments.get(theirs) is not None}
    if not found and mode != "token":
        raise ValueError(NO_SOURCE.format(mode=mode))
    return found


def _targets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``labels``, or ``shift_labels`` where upstream's loss takes them as they are."""
    if arguments.get("shift_labels") is not None and _loss_takes_shifted():
        return {"shift_labels": arguments["shift_labels"]}
    return {"labels": arguments["labels"]}


def _loss_takes_shifted() -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return "shift_labels" in inspect.signature(ForCausalLMLoss).parameters


def plain_count(count: Any, mode: str) -> Any:
    """``num_items_in_batch`` as upstream's loss divides by it, once it is known to be in the unit of ``mode``.

    Raises:
        ValueError: it is a number of tokens, or in the unit of another mode.
    """
    if count is None:
        return None
    if not isinstance(count, Denominator) or count.loss_reduction != mode:
        came = (
            f"in the unit of {count.loss_reduction!r}"
            if isinstance(count, Denominator)
            else "a number of tokens, as a plain Trainer counts them"
        )
        raise ValueError(
            f"num_items_in_batch is {came}, and this model was patched with loss_reduction={mode!r}, whose loss it "
            "would scale wrongly. Use `class PackedTrainer(liger_kernels.PackingLossMixin, Trainer)` (or SFTTrainer); "
            f"in a loop of your own pass liger_kernels.packing_denominator(micro_batches, {mode!r})"
        )
    plain = count.as_subclass(torch.Tensor)
    return plain.masked_fill(plain == 0, 1.0)  # the sum over nothing is 0, and so is its loss


@dataclass
class Packing:
    """What one forward's arguments say about its rows.

    Attributes:
        loss_reduction: the mode.
        index: int64 [batch, length]: which sequence each row belongs to; -1 in padding.
        broken: 0-d bool: the sources make no sense, which the host did not see.
        shifted: whether upstream's loss gets targets that are not to be cut.
        applied: whether a loss has been weighted by this.
    """

    loss_reduction: str
    index: torch.Tensor
    broken: torch.Tensor
    shifted: bool
    applied: bool = False

    def weigh(
        self, hidden: torch.Tensor, rows: Callable[[Any], Any], targets: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """``targets`` [tokens] without those of other sequences; the weights go into the loss's ``options``.

        ``rows`` takes what has a number for each row of ``hidden`` [..., features] the way that the logits' rows went.
        """
        leading = hidden.shape[:-1]
        if self.index.numel() != leading.numel():
            raise ValueError(
                f"labels and the sources of where sequences begin have {self.index.numel()} rows, the hidden states "
                f"{list(leading)}: with loss_reduction={self.loss_reduction!r} no row may be left out (logits_to_keep) "
                "or added (virtual tokens)"
            )
        device, ignore_index = targets.device, options["ignore_index"]
        index = self.index.to(device)
        if not self.shifted:
            last = index.flatten() != index.flatten().roll(-1)
            last[-1:] = True
            targets = targets.masked_fill(rows(last.view(leading)), ignore_index)
        found = packing_weights(
            shift_labels=targets,
            seq_idx=rows(index.view(leading)),
            loss_reduction=self.loss_reduction,
            ignore_index=ignore_index,
            class_weight=options["class_weight"],
            dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32,
        )
        options["row_weight"] = found.row_weight.masked_fill(self.broken.to(device), float("nan"))
        options["denominator"] = found.denominator if options["reduction"] == "mean" else None
        self.applied = True
        return found.shift_labels


def captured(arguments: Mapping[str, Any], mode: str) -> Packing:
    """What the ``arguments`` of a forward with labels say about its rows.

    Raises:
        TypeError, ValueError: there is no source, or one that makes no sense.
    """
    sources = _sources(arguments, mode)
    targets = _targets(arguments)
    (labels,) = targets.values()
    shifted = "shift_labels" in targets
    index, broken = sequence_index(labels, **sources, shifted=shifted)
    return Packing(mode, index, broken, shifted)
