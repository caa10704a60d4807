"""Small models that use attention: a recurrent decoder, a channel gate and kernel regression."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn

from qkv import masks
from qkv.attention import attend
from qkv.errors import ShapeError, validate_fraction, validate_sizes
from qkv.nn import weightings
from qkv.nn.attention import attend_with_weights, describe_scoring
from qkv.nn.scores import GaussianScore, LayerScore, LearnedScore, has_hooks, resolve_score
from qkv.nn.tensors import called_as, check_plain, check_tensors
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import Sigmoid, WeightingLike


@suggest_keywords
class BahdanauDecoder(nn.Module):
    """cᵢ = Σⱼ α(sᵢ₋₁, hⱼ) hⱼ, sᵢ = GRU([yᵢ₋₁; cᵢ], sᵢ₋₁), logits = W[sᵢ; cᵢ; yᵢ₋₁].

    The decoder of Bahdanau et al. (2015). The query is the decoder's last state s; keys and values
    are the encoder's states h; the score is additive. tokens (B, n) are the target tokens before
    each step (teacher forcing), memory (B, m, memory_dim) the encoder's states, mask (B, m) True at
    padding. The default state is s₀ = tanh(W h₁): the first state of a bidirectional encoder has
    read the whole sequence.

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
        validate_sizes(
            vocabulary=vocabulary, embed_dim=embed_dim, hidden=hidden, memory_dim=memory_dim
        )
        self.embedding = nn.Embedding(vocabulary, embed_dim)
        self.score = resolve_score(score, (hidden, memory_dim))
        self.weighting = weightings.resolve_weighting(weighting)
        self.dropout = validate_fraction("dropout", dropout)
        self.start = nn.Linear(memory_dim, hidden)
        self.cell = nn.GRUCell(embed_dim + memory_dim, hidden)
        self.head = nn.Linear(hidden + memory_dim + embed_dim, vocabulary)

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        state: Tensor | None = None,
        **wrong: Never,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (B, n, vocabulary), the last state (B, hidden), and α (B, n, m)."""
        if wrong:
            reject_call_keywords(self, wrong)
        check_plain(tokens=tokens, memory=memory)
        if tokens.dim() != 2 or memory.dim() != 3 or tokens.shape[0] != memory.shape[0]:
            raise ShapeError(
                f"tokens must be (B, n) and memory (B, m, memory_dim), not {tuple(tokens.shape)} "
                f"and {tuple(memory.shape)}"
            )
        if mask is not None and tuple(mask.shape) != tuple(memory.shape[:2]):
            raise ShapeError(
                f"mask must be (B, m) = {tuple(memory.shape[:2])}, not {tuple(mask.shape)}"
            )
        attend_mask = None if mask is None else ~mask[:, None, :]
        state = torch.tanh(self.start(memory[:, 0])) if state is None else state
        key, score = memory, self.score
        if isinstance(score, LearnedScore) and not has_hooks(score):
            score, key = score.project_keys(memory)
        steps = []
        for word in self.embedding(tokens).unbind(1):
            logits, state, alpha = self._decode_step(word, key, memory, score, attend_mask, state)
            steps.append((logits, alpha))
        logits, alpha = (torch.stack(x, 1) for x in zip(*steps, strict=True))
        return logits, state, alpha

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def _decode_step(
        self,
        word: Tensor,
        key: Tensor,
        memory: Tensor,
        score: Any,
        attend_mask: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode one word vector (B, embed_dim): return logits, the next state and α (B, m)."""
        dropout = self.dropout if self.training else 0.0
        context, alpha = attend_with_weights(
            state[:, None], key, memory, score, self.weighting, attend_mask, dropout, "heads"
        )
        context = context[:, 0]
        state = self.cell(torch.cat((word, context), -1), state)
        return self.head(torch.cat((state, context, word), -1)), state, alpha[:, 0]  # type: ignore[index]

    def extra_repr(self) -> str:
        return describe_scoring(self)


@suggest_keywords
class SqueezeExcitation(nn.Module):
    """out_c = α_c x_c, α_c = σ(q·k_c + b_c), q = relu(W₁z + b₁), z = the spatial mean of x.

    x is (B, channels, …). Read as attention: z is average pooling over positions, the query q
    summarizes the image, and channel c has the key k_c (row c of W₂) and the value x_c. The weights
    are sigmoids and need not sum to 1, so channels do not compete.

    >>> import torch
    >>> SqueezeExcitation(8, reduction=2)(torch.ones(1, 8, 5, 5)).shape
    torch.Size([1, 8, 5, 5])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        validate_sizes(channels=channels, reduction=reduction)
        self.fc1 = nn.Linear(channels, max(channels // reduction, 1))
        self.fc2 = nn.Linear(max(channels // reduction, 1), channels)

    def gate(self, x: Tensor) -> Tensor:
        """Return α (B, channels)."""
        check_plain(x=x)
        if x.dim() < 3 or x.shape[1] != self.fc1.in_features:
            raise ShapeError(
                f"x must be (B, {self.fc1.in_features}, …) with at least one spatial axis, "
                f"not {tuple(x.shape)}"
            )
        positions = x.flatten(2).transpose(1, 2)  # (B, positions, channels)
        any_query = positions[:, :1]  # a constant score ignores it
        z = attend(any_query, positions, positions, score="constant", weighting="average")
        return Sigmoid()(self.fc2(self.fc1(z).relu()))[:, 0]  # fc2 scores the query with all keys

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).to(x.dtype)
        return x * gate.reshape(*gate.shape, *[1] * (x.dim() - 2))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return f"{self.fc1.in_features}, reduction={self.fc1.in_features // self.fc1.out_features}"


@suggest_keywords
class KernelRegression(nn.Module):
    """f(q) = Σᵢ α(q, kᵢ) vᵢ with α the softmax of −‖(q − k)/σ‖²/2, and σ learned.

    key (m, d) and value (m,) or (m, d_v) are the examples, stored as buffers; query (n, d) gives
    (n,) or (n, d_v). `features=True` learns a bandwidth for each of the d features. `fit` minimizes
    the squared leave-one-out error: each example is predicted from the others.

    >>> key = torch.linspace(0, 3, 40)[:, None]
    >>> model = KernelRegression(key, key[:, 0].sin())
    >>> losses = model.fit(50)
    >>> bool(losses[-1] < losses[0]), model(torch.tensor([[1.5]])).shape
    (True, torch.Size([1]))
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        bandwidth: float = 1.0,
        features: bool = False,
        score: LayerScore | None = None,
        weighting: WeightingLike = "softmax",
    ) -> None:
        super().__init__()
        check_plain(key=key, value=value)
        if key.dim() != 2 or value.dim() not in (1, 2) or len(key) != len(value):
            raise ShapeError(
                f"key must be (m, d) and value (m,) or (m, d_v), not {tuple(key.shape)} and "
                f"{tuple(value.shape)}"
            )
        self.register_buffer("key", key)
        self.register_buffer("value", value)
        d, placement = key.shape[1], {"device": key.device, "dtype": key.dtype}
        if score is None:
            score = GaussianScore(bandwidth, d if features else None, **placement)
        self.score = resolve_score(score, (d, d), **placement)
        self.weighting = weightings.resolve_weighting(weighting)
        self.dropout = 0.0

    def forward(self, query: Tensor, **wrong: Never) -> Tensor:
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(query=query)
        return self._predict_values(query, None)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def held_out(self) -> Tensor:
        """Return the leave-one-out predictions: each example predicted from the others."""
        return self._predict_values(self.key, ~masks.window(0))

    def loss(self) -> Tensor:
        """Return the mean squared error of `held_out`."""
        return (self.held_out() - self.value).square().mean()

    def fit(
        self, steps: int = 100, lr: float = 0.1, callback: Callable[[float], None] | None = None
    ) -> list[float]:
        """Run `steps` steps of Adam and return the losses; `callback` gets each loss."""
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if callback is not None:
                callback(losses[-1])
        return losses

    def _predict_values(self, query: Tensor, mask: Any) -> Tensor:
        value = self.value if self.value.dim() == 2 else self.value[:, None]
        out = attend_with_weights(query, self.key, value, self.score, self.weighting, mask)[0]
        return out if self.value.dim() == 2 else out[..., 0]

    def extra_repr(self) -> str:
        return f"{len(self.key)} examples, {describe_scoring(self)}"
