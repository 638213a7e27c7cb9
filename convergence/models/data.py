"""The inputs: real English text that ships with Python, as bytes, cut into batches that are hard on purpose.

A :class:`Step` is one optimizer step: one or several micro batches and how their loss is formed. :func:`steps` is the
table of all of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

IGNORE = -100
VOCABULARY = 263  # 256 bytes and seven tokens that the text never uses


@dataclass
class Batch:
    """One forward: ``input_ids``, ``labels`` (unshifted) and, when packed, ``position_ids``, when padded,
    ``attention_mask``, each [batch, length]. With images also their patches [patches, values], the number of patches in
    time, height and width [images, 3], and which tokens stand for them [batch, length]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None
    mm_token_type_ids: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items() if tensor is not None})

    def inputs(self) -> dict[str, Any]:
        """What a model takes, but for the labels."""
        given = {name: tensor for name, tensor in vars(self).items() if name != "labels" and tensor is not None}
        return {**given, "use_cache": False}


@dataclass
class Step:
    """One optimizer step.

    Args:
        name: what stands in the report.
        batches: the micro batches whose gradients are accumulated.
        num_items: whether the number of targets of the whole step is given to the model's loss.
        scale: a factor on the loss, as a loss scaler or an auxiliary objective applies it.
        label_smoothing: when set, the loss is the caller's own, computed from ``outputs.logits``.
        frozen: "head" or "body": the part that does not train in this step.
        reads_logits: whether the caller reads ``outputs.logits`` before the backward pass.
        trains: whether the optimizers take this step too, or only the observation at the initial weights does.
        whole: whether our fused head takes the rows as it would on its own, all at once, and not in several chunks.
        between: what goes through the model after the forward of each batch and before its backward, and is dropped.
        evaluates: whether the model is in evaluation mode, as where somebody wants gradients without training.
    """

    name: str
    batches: list[Batch] = field(default_factory=list)
    num_items: bool = False
    scale: float = 1.0
    label_smoothing: float | None = None
    frozen: str | None = None
    reads_logits: bool = False
    trains: bool = False
    whole: bool = False
    between: Batch | None = None
    evaluates: bool = False

    def to(self, device: torch.device) -> Step:
        between = self.between and self.between.to(device)
        return replace(self, batches=[batch.to(device) for batch in self.batches], between=between)

    def labelled(self, batch: Batch) -> dict[str, Any]:
        """What a model takes that computes the loss of ``batch`` itself."""
        given = {**batch.inputs(), "labels": batch.labels}
        if self.num_items:
            given["num_items_in_batch"] = sum(int((b.labels[:, 1:] != IGNORE).sum()) for b in self.batches)
        return given

    def loss(self, outputs: Any) -> torch.Tensor:
        """The part of the step's loss that the model's own loss of one batch is."""
        return outputs.loss if self.num_items else outputs.loss / len(self.batches)

    def smoothed_loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        assert self.label_smoothing is not None
        logits, labels = logits[:, :-1].float().flatten(0, 1), batch.labels[:, 1:].flatten()
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=self.label_smoothing)


def seed_generators(seed: int) -> None:
    """Seed torch's default generators. ``torch.manual_seed`` takes 2 ms where there is no accelerator: for each kind
    that could be, it keeps the caller's stack as text."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def default_text() -> str:
    """The Python language reference."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values())


@functools.cache
def text() -> torch.Tensor:
    """The default text as bytes: int64 [about 460,000]."""
    return torch.frombuffer(bytearray(default_text().encode()), dtype=torch.uint8).long()


class _Sampler:
    """Batches of ``tokens`` [n], by default the default text's bytes."""

    def __init__(self, seed: int, tokens: torch.Tensor | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = text() if tokens is None else tokens

    def batch(self, size: int, length: int) -> Batch:
        starts = torch.randint(0, len(self.tokens) - length, (size,), generator=self.generator)
        tokens = torch.stack([self.tokens[start : start + length] for start in starts.tolist()])
        return Batch(tokens, tokens.clone())

    def masked(self, size: int, length: int) -> Batch:
        """-100 in the middle, at the end, and on the whole last row."""
        batch = self.batch(size, length)
        batch.labels[0, length // 3 : length // 2] = IGNORE
        batch.labels[1, -length // 4 :] = IGNORE
        batch.labels[-1] = IGNORE
        return batch

    def packed(self, size: int, length: int) -> Batch:
        """Several documents in each row, cut at another place in each: ``position_ids`` restart and differ per row."""
        batch = self.batch(size, length)
        positions = torch.arange(length).repeat(size, 1)
        for row in range(size):
            cut = length // 3 + 2 * row
            positions[row, cut:] -= cut
            batch.labels[row, cut] = IGNORE
        batch.position_ids = positions
        return batch

    def spread(self, stride: int, size: int, length: int) -> Batch:
        """Positions ``stride`` apart: an angle that is rounded too early is far off between tokens that are far apart.
        (In float32 the angles of PyTorch's own are, too.) The mask says that a jump begins no document."""
        batch = self.batch(size, length)
        batch.position_ids = (stride * torch.arange(length)).repeat(size, 1)
        batch.attention_mask = torch.ones_like(batch.input_ids)
        return batch

    def padded(self, size: int, length: int) -> Batch:
        """Padding, at another place in each row and never at the beginning, so that every token sees some other."""
        batch = self.batch(size, length)
        batch.attention_mask = torch.ones_like(batch.input_ids)
        for row in range(size):
            batch.attention_mask[row, 3 * row + 2 : 3 * row + 6] = 0
        batch.labels[batch.attention_mask == 0] = IGNORE
        return batch


# Steps that bring nothing new but numbers, because in bfloat16 the gain of one parameter is known to parts per thousand
# only over many tokens. A large batch costs an interpreted kernel little more than a small one. Its number of targets
# is another in each step, so that a reciprocal that is rounded is rounded differently.
TEXTS = 8


def steps(profile: str, seed: int, dtype: torch.dtype) -> list[Step]:
    """The steps of ``profile`` for arms of ``dtype``, always the same for the same ``seed``."""
    sample = _Sampler(seed)
    if profile == "plain":
        return [Step(f"plain {i}", [sample.batch(4, 16)], trains=i < 3) for i in range(8)]
    return [
        Step("masked", [sample.masked(3, 21)], trains=True),
        Step("packed", [sample.packed(3, 21)], trains=True, whole=True),
        Step("accumulated", [sample.masked(3, 19), sample.batch(1, 13)], num_items=True, trains=True),
        Step("accumulated mean", [sample.batch(2, 17), sample.masked(2, 11)], evaluates=True),
        Step("scaled", [sample.batch(3, 21)], scale=0.25, trains=True, whole=True),
        Step("label smoothing", [sample.masked(3, 21)], label_smoothing=0.1),
        Step("logits read", [sample.masked(3, 21)], reads_logits=True, between=_Sampler(seed + 3).batch(3, 21)),
        Step("frozen head", [sample.packed(3, 21)], frozen="head"),
        Step("frozen body", [sample.masked(3, 21)], frozen="body"),
        *(
            Step(f"text {i}", [sample.spread(1 + 10 * i, 6, 35 + i)], whole=i % 2 == 1)
            for i in range(TEXTS if dtype is torch.bfloat16 else 0)
        ),
        Step("padded", [sample.padded(3, 21)], whole=True),
    ]


# Two images of different proportions; a token stands for 2 x 2 patches of 2 frames of 2 x 2 pixels in three colours.
IMAGES = torch.tensor([[1, 4, 6], [1, 6, 2]])
IMAGE, IMAGE_START = VOCABULARY - 1, VOCABULARY - 2


def illustrated(steps: list[Step], seed: int, token_types: bool) -> list[Step]:
    """``steps`` with an image in the first row and one in the last, except where a mask says which tokens are seen.

    Args:
        steps: of text.
        seed: of the images.
        token_types: whether the model is to be told which tokens are those of images.
    """
    generator = torch.Generator().manual_seed(seed)

    def illustrate(batch: Batch) -> Batch:
        if batch.attention_mask is not None:
            return batch
        ids, labels = batch.input_ids.clone(), batch.labels.clone()
        for row, (place, grid) in zip((0, -1), enumerate(IMAGES[: len(ids)], start=1), strict=False):
            end = place + 1 + int(grid.prod()) // 4
            ids[row, place], ids[row, place + 1 : end] = IMAGE_START, IMAGE
            labels[row, place:end] = IGNORE
        grids = IMAGES[: len(ids)]
        pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 2 * 2, generator=generator)
        types = (ids == IMAGE).long() if token_types else None
        return replace(
            batch, input_ids=ids, labels=labels, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types
        )

    return [replace(step, batches=[illustrate(batch) for batch in step.batches]) for step in steps]


def text_steps(tokens: torch.Tensor, size: int, length: int, count: int, seed: int) -> list[Step]:
    """``count`` steps of ``size`` rows of ``length`` of ``tokens``: as they are, packed, and with targets ignored, in
    turn. Where targets are ignored the last row has none, so it takes three rows."""
    sample = _Sampler(seed, tokens)
    kinds = {"text": sample.batch, "packed": sample.packed, **({"masked": sample.masked} if size > 2 else {})}
    names = list(kinds)
    return [
        Step(f"{name} {i}", [kinds[name](size, length)], trains=True, whole=True)
        for i, name in enumerate(names[i % len(names)] for i in range(count))
    ]


def text_batches(tokens: torch.Tensor, size: int, length: int, count: int, seed: int) -> list[Batch]:
    """``count`` batches of ``size`` rows of ``length`` of ``tokens``."""
    sample = _Sampler(seed, tokens)
    return [sample.batch(size, length) for _ in range(count)]


def prompted(seed: int, tokens: torch.Tensor | None = None, size: int = 4, length: int = 31) -> Batch:
    """The batch whose log-probabilities are compared: ``size`` rows of ``length``."""
    return _Sampler(seed + 2, tokens).batch(size, length)


SHORTEST = 16  # tokens in a row: of the batch that is evaluated, and one more


def evaluation_batch(seed: int, tokens: torch.Tensor | None = None) -> Batch:
    """The batch whose logits are compared, and whose beginnings are continued, after training."""
    return _Sampler(seed + 1, tokens).masked(3, SHORTEST - 1)
