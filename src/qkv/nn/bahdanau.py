"""The first paper's decoder: each step asks the encoder's states what to read next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qkv.errors import ShapeError, fraction, sizes
from qkv.nn import weightings
from qkv.nn.attention import attended, words
from qkv.nn.scores import LayerScore, LearnedScore, checked
from qkv.nn.tensors import called_as, check_tensors
from qkv.weightings import WeightingLike


class BahdanauDecoder(nn.Module):
    """cᵢ = Σⱼ α(sᵢ₋₁, hⱼ) hⱼ, sᵢ = GRU([yᵢ₋₁; cᵢ], sᵢ₋₁), logits = W[sᵢ; cᵢ; yᵢ₋₁].

    The query is the decoder's last state s, keys and values are the encoder's states h, compared
    by the additive score. tokens (B, n) are the right answers so far, memory (B, m, memory_dim) the
    encoder's states, mask (B, m) True for padding. s₀ = tanh(W h₁) where no state is given: the
    first state of an encoder that reads both ways has seen everything.

    >>> decoder = BahdanauDecoder(vocabulary=10, embed_dim=4, hidden=8, memory_dim=6)
    >>> logits, state, weights = decoder(torch.tensor([[1, 2, 3]]), torch.zeros(1, 5, 6))
    >>> logits.shape, state.shape, weights.shape
    (torch.Size([1, 3, 10]), torch.Size([1, 8]), torch.Size([1, 3, 5]))
    """

    def __init__(
        self,
        vocabulary: int,
        embed_dim: int,
        hidden: int,
        memory_dim: int,
        score: LayerScore = "additive",
        weighting: WeightingLike = "softmax",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes(vocabulary=vocabulary, embed_dim=embed_dim, hidden=hidden, memory_dim=memory_dim)
        self.embedding = nn.Embedding(vocabulary, embed_dim)
        self.score = checked(score, (hidden, memory_dim))
        self.weighting = weightings.checked(weighting)
        self.dropout = fraction("dropout", dropout)
        self.start = nn.Linear(memory_dim, hidden)
        self.cell = nn.GRUCell(embed_dim + memory_dim, hidden)
        self.head = nn.Linear(hidden + memory_dim + embed_dim, vocabulary)

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The logits (B, n, vocabulary), the last state (B, hidden), and α (B, n, m)."""
        check_tensors(tokens=tokens, memory=memory)
        if tokens.dim() != 2 or memory.dim() != 3 or tokens.shape[0] != memory.shape[0]:
            raise ShapeError(
                f"tokens must be (B, n) and memory (B, m, memory_dim), not {tuple(tokens.shape)} "
                f"and {tuple(memory.shape)}"
            )
        if mask is not None and tuple(mask.shape) != tuple(memory.shape[:2]):
            raise ShapeError(
                f"mask must be (B, m) = {tuple(memory.shape[:2])}, not {tuple(mask.shape)}"
            )
        live = None if mask is None else ~mask[:, None, :]
        state = torch.tanh(self.start(memory[:, 0])) if state is None else state
        key, score = memory, self.score
        if isinstance(score, LearnedScore):
            score, key = score.ahead(memory)
        found = []
        for word in self.embedding(tokens).unbind(1):
            logits, state, alpha = self._step(word, key, memory, score, live, state)
            found.append((logits, alpha))
        logits, alpha = (torch.stack(x, 1) for x in zip(*found, strict=True))
        return logits, state, alpha

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def _step(
        self,
        word: Tensor,
        key: Tensor,
        memory: Tensor,
        score: Any,
        live: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One word vector (B, embed_dim) further: logits, the next state, and α (B, m)."""
        dropout = self.dropout if self.training else 0.0
        context, alpha = attended(
            state[:, None], key, memory, score, self.weighting, live, dropout, "heads"
        )
        context = context[:, 0]
        state = self.cell(torch.cat((word, context), -1), state)
        return self.head(torch.cat((state, context, word), -1)), state, alpha[:, 0]  # type: ignore[index]

    def extra_repr(self) -> str:
        return words(self)
