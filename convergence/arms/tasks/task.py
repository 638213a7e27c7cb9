"""What every task has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import nn

from convergence.arms.lifetimes import Lifetimes
from convergence.arms.quantities import Moment
from convergence.arms.trajectory import Trajectory
from convergence.models.data import Step


class Task:
    """How an arm runs a model. ``batch`` is whatever the steps of the model's row hold.

    Attributes:
        casts_buffers: whether an arm has the model's buffers in its own dtype, too. transformers computes angles from
            buffers in float32, whatever the dtype of the model.
    """

    casts_buffers: ClassVar[bool] = False

    def train_batch(
        self, model: Any, step: Step, batch: Any, result: Trajectory, at: Moment, lifetimes: Lifetimes
    ) -> None:
        """Forward and backward of one micro batch. Nothing that it made may live on when this returns."""
        raise NotImplementedError

    def evaluate(self, model: Any, batch: Any, result: Trajectory, at: Moment, device: torch.device) -> None:
        """Record loss and outputs of ``batch`` without gradients. After an optimizer's steps, record the loss in
        training mode, too."""
        raise NotImplementedError

    def decode(self, model: Any, batch: Any, result: Trajectory, device: torch.device) -> None:
        """Record what the model computes one token at a time, if it can."""

    def generate(self, model: Any, batch: Any, result: Trajectory, device: torch.device) -> None:
        """Record what the model generates, if it can."""

    def computed(self, model: Any, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of ``batch``, and what else one forward computes."""
        raise NotImplementedError

    def head(self, model: Any) -> Collection[nn.Module]:
        """The modules whose outputs a kernel may overwrite."""
        return ()
