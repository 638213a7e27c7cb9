"""Models that are no causal language models, for ``--models-from``; patches of them; and wrong descriptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from convergence import Model
from tests.blame_faults import GradientTimes

_SMALL = {
    **{"hidden_size": 60, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 90},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-3, "num_labels": 3},
}


def encoder() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=97, max_position_embeddings=32, **_SMALL))


def sentences() -> list[Any]:
    """Sentences of several lengths: those with a mask."""
    long = {"input_ids": torch.randint(0, 97, (3, 17)), "labels": torch.tensor([0, 1, 2])}
    short = {**long, "attention_mask": (torch.arange(17) < torch.tensor([[17], [9], [4]])).long()}
    return [long, short]


def vision() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **_SMALL))


def images() -> list[Any]:
    return [{"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.randint(0, 3, (3,))} for _ in range(2)]


def labelled(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


class Mixer(nn.Module):
    """A model that is not of transformers, and whose loss is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 50)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(50), nn.Linear(50, 70), nn.GELU(), nn.Linear(70, 50)) for _ in range(2)
        )
        self.norm, self.scores = nn.LayerNorm(50), nn.Linear(50, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return {"scores": self.scores(self.norm(x)).mean(1)}


class Normalised(nn.Module):
    """Its statistics of batches are buffers, which every arm needs in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.over_batch = nn.Linear(12, 50), nn.BatchNorm1d(9)
        self.norm, self.scores = nn.LayerNorm(50), nn.Linear(50, 5)
        self.register_buffer("mixed", torch.eye(50).roll(1, 0) - 0.3 * torch.eye(50))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.over_batch(self.embed(x)) @ self.mixed
        return {"scores": self.scores(self.norm(x)).mean(1)}


def points() -> list[Any]:
    return [(torch.randn(4, 9, 12), torch.randint(0, 5, (4,))) for _ in range(3)]


def scored(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0])["scores"].float(), batch[1])


def models() -> list[Model]:
    return [
        Model("encoder", encoder, sentences, labelled),
        Model("vision", vision, images, labelled),
        Model("mixer", Mixer, points, scored),
        Model("normalised", Normalised, points, scored),
    ]


def equal(model: nn.Module, scaled: bool = False) -> None:
    """Another way to compute the same norms; ``scaled``: with gradients that are 2% too large."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = functools.partial(_normed, module, scaled)


def wrong(model: nn.Module) -> None:
    equal(model, scaled=True)


def wrong_in_evaluation(model: nn.Module) -> None:
    """2% too large, in evaluation only."""

    def scaled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if module.training else output * 1.02

    model.norm.register_forward_hook(scaled)


def _normed(module: nn.LayerNorm, scaled: bool, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.eps)
    result = (wide * module.weight.float() + module.bias.float()).to(x.dtype)
    return GradientTimes.apply(result, 1.02) if scaled else result


# What no proof can be made of.


def _one(**other: Callable[..., Any]) -> list[Model]:
    return [Model("mixer", **{"build": Mixer, "batches": points, "loss": scored, **other})]


def raises() -> list[Model]:
    raise OSError("no such disk")


def no_models() -> list[Any]:
    return []


def no_model() -> list[Any]:
    return [Mixer()]


def bad_name() -> list[Model]:
    return [Model("a/b", Mixer, points, scored)]


def twice() -> list[Model]:
    return _one() + _one()


def no_module() -> list[Model]:
    return _one(build=lambda: "mixer")


def build_raises() -> list[Model]:
    return _one(build=lambda: Mixer(7))


def in_bfloat16() -> list[Model]:
    return _one(build=lambda: Mixer().bfloat16())


def one_batch() -> list[Model]:
    return _one(batches=lambda: points()[:1])


def no_tensor() -> list[Model]:
    return _one(batches=lambda: [("x", 1), ("y", 2)])


def loss_raises() -> list[Model]:
    return _one(loss=lambda model, batch: model(batch)["loss"])


def no_loss() -> list[Model]:
    return _one(loss=lambda model, batch: model(batch[0]))


def many_losses() -> list[Model]:
    return _one(loss=lambda model, batch: model(batch[0])["scores"])


def without_gradient() -> list[Model]:
    return _one(loss=lambda model, batch: scored(model, batch).detach())


def drops() -> list[Model]:
    return _one(loss=lambda model, batch: F.dropout(scored(model, batch).expand(64)).mean())
