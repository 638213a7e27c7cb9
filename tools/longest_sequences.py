"""Calculates the longest sequence that trains on a GPU: ``python -m tools.longest_sequences`` prints a Markdown table.

Nothing is measured. The model is patched, with ``memory="small"``, one sequence at a time, in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from convergence.tables import markdown

GIB = 2**30
BYTES = 2  # of a bfloat16 number
RESERVE = 2 * GIB  # the CUDA context, cuBLAS workspaces, what the allocator cannot use
CARDS = {"24 GiB": 24, "80 GiB": 80, "one H200 (140 GiB)": 140}


@dataclass(frozen=True)
class Decoder:
    """A decoder with a gated MLP: layers, hidden and inner size, query and key features, classes; the head untied."""

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    classes: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Input and output features of the linear layers of one decoder layer."""
        attention = [(self.hidden, self.queries), *[(self.hidden, self.keys)] * 2, (self.queries, self.hidden)]
        return [*attention, *[(self.hidden, self.inner)] * 2, (self.inner, self.hidden)]

    @property
    def parameters(self) -> int:
        layer = sum(rows * columns for rows, columns in self.linears) + 2 * self.hidden
        return self.layers * layer + self.hidden + 2 * self.classes * self.hidden

    def layer(self, lora: bool) -> int:
        """Bytes that one patched layer keeps for the backward, a token."""
        norms = 4 * self.hidden  # input and output of two norms
        attention = 2 * self.queries + 2 * self.keys  # q, k, v and the output
        gated = 2 * self.inner + lora * self.inner  # gate and up; an adapter on the last projection keeps the product
        statistics = 4 * (self.heads + 2)  # float32: the attention's log-sum-exp, the norms' rsqrt
        return BYTES * (norms + attention + gated) + statistics

    def loss(self) -> int:
        """Bytes of the loss beyond its inputs, a token, ``memory="small"``: 4 H + b max(S, H), where S = H."""
        return (4 + BYTES) * self.hidden

    def fixed(self, rank: int | None) -> int:
        """Bytes that do not depend on the sequence. Full: weights, gradients, two moments of AdamW, all bfloat16.
        LoRA of ``rank`` on every linear layer: frozen weights, and the same four for the adapters."""
        if rank is None:
            return 4 * BYTES * self.parameters
        adapters = self.layers * rank * sum(map(sum, self.linears))
        return BYTES * self.parameters + 4 * BYTES * adapters

    def per_token(self, lora: bool, checkpointing: bool) -> int:
        """Bytes a token at the peak. With checkpointing: the input of every layer, and the larger of the loss and of
        one layer computed again with as many bytes of gradients."""
        ends = 2 * BYTES * self.hidden  # input and output of the last norm
        if checkpointing:
            return ends + self.layers * BYTES * self.hidden + max(self.loss(), 2 * self.layer(lora))
        return ends + self.layers * self.layer(lora) + self.loss()


LLAMA_3_8B = Decoder(layers=32, hidden=4096, inner=14336, queries=4096, keys=1024, heads=32, classes=128256)
BENCHMARKED = Decoder(layers=16, hidden=2048, inner=8192, queries=2048, keys=512, heads=32, classes=128256)


def longest(shape: Decoder, gib: int, rank: int | None, checkpointing: bool) -> int:
    """Tokens, rounded down to 1024; 0 where not even the weights fit."""
    free = gib * GIB - RESERVE - shape.fixed(rank)
    return max(0, free // shape.per_token(rank is not None, checkpointing) // 1024 * 1024)


def table(shape: Decoder = LLAMA_3_8B, rank: int = 16) -> list[str]:
    """A row for each way of training, a column for each card."""
    rows = []
    for what, adapters in ((f"LoRA, rank {rank}", rank), ("full, AdamW", None)):
        for checkpointing in (False, True):
            cells = (longest(shape, gib, adapters, checkpointing) for gib in CARDS.values())
            how = "checkpointing" if checkpointing else "no checkpointing"
            rows.append((f"{what}, {how}", *(f"{cell:,}" if cell else "-" for cell in cells)))
    return markdown(("Llama-3 8B", *CARDS), rows)


if __name__ == "__main__":
    print("\n".join(table()))
