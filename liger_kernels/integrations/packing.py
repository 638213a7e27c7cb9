"""A Trainer whose ``num_items_in_batch`` is in the unit of the patched model's loss reduction.

``class PackedTrainer(PackingLossMixin, Trainer)``, and the same with trl's ``SFTTrainer``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_kernels.patching import status
from liger_kernels.patching.logits.packing import Denominator, packing_denominator


class PackingLossMixin:
    """Counts what "sample" and "square" divide by, over all micro-batches of a step and all ranks, instead of tokens.

    It stands before the trainer among the base classes. With a model that is not patched, or patched with "token", it
    changes nothing. Otherwise the loss of a step is the one that ``transformers.Trainer`` takes from the model's own
    forward: a ``compute_loss`` between, as SFTTrainer has it, does not run, and what it logs with the loss (entropy,
    token accuracy) is not logged.

    Raises:
        ValueError: at the first step, for what would leave the loss unweighted or scale it wrongly: a loss function or
            label smoothing of the trainer, a model whose forward takes no ``num_items_in_batch``, several ranks without
            ``average_tokens_across_devices``, ``nn.DataParallel``, sequences that are split over ranks.
    """

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *device: Any) -> Any:
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, *device)  # type: ignore[misc]
        if not isinstance(count, Denominator):  # this version has no _get_num_items_in_batch
            count = self._packing_denominator(samples, count)
        return samples, count

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        if loss_reduction_of(self.model) == "token":  # type: ignore[attr-defined]
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        return self._packing_denominator(batch_samples, None)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        if loss_reduction_of(self.model) == "token":  # type: ignore[attr-defined]
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **more)  # type: ignore[misc]
        from transformers import Trainer

        # With a cache, transformers does not look for packed sequences in position_ids, and they would see each other.
        inputs = {"use_cache": False, **inputs}
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch, **more)  # type: ignore[arg-type]

    def _packing_denominator(self: Any, batch_samples: Any, count: Any) -> Any:
        mode = loss_reduction_of(self.model)
        if mode == "token" or not batch_samples or "labels" not in batch_samples[0]:
            return count
        self._refuse_what_cannot_be_weighted(mode)
        denominator: Any = packing_denominator(batch_samples, mode).to(self.args.device)
        cls = type(denominator)
        if self.args.world_size > 1:
            # Tensor-parallel ranks hold the same batch.
            denominator = self.accelerator.gather(denominator).sum() / self._ranks_of_one_batch()
        return denominator.as_subclass(cls)

    def _ranks_of_one_batch(self: Any) -> int:
        if hasattr(self, "get_tp_size"):
            return int(self.get_tp_size())
        config = getattr(self.accelerator, "parallelism_config", None)
        return int(getattr(config, "tp_size", 1))

    def _refuse_what_cannot_be_weighted(self: Any, mode: str) -> None:
        args = self.args
        config = getattr(self.accelerator, "parallelism_config", None)
        refused = {
            "the trainer's compute_loss_func replaces the model's loss": self.compute_loss_func is not None,
            "label_smoothing_factor replaces the model's loss": self.label_smoother is not None,
            "the model's forward takes no num_items_in_batch": not self.model_accepts_loss_kwargs,
            "nn.DataParallel splits a batch after it was counted; launch one process per device (torchrun)": args.n_gpu
            > 1,
            "several ranks need average_tokens_across_devices=True": args.world_size > 1
            and not args.average_tokens_across_devices,
            "context and sequence parallelism split a sequence over ranks, whose pieces would count as sequences": any(
                getattr(config, name, 1) > 1 for name in ("cp_size", "sp_size")
            ),
        }
        for reason, applies in refused.items():
            if applies:
                raise ValueError(f"loss_reduction={mode!r} is not possible here: {reason}")


def loss_reduction_of(model: nn.Module) -> str:
    """The mode of the patched model that ``model`` is or has inside; "token" where nothing is patched."""
    report = status(model)
    return report.loss_reduction if report is not None else "token"
