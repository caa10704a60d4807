"""Nadaraya–Watson regression with a bandwidth that is learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qkv import masks
from qkv.errors import ShapeError
from qkv.nn import weightings
from qkv.nn.attention import attended, words
from qkv.nn.scores import GaussianScore, LayerScore, checked
from qkv.nn.tensors import called_as, check_tensors
from qkv.weightings import WeightingLike


class KernelRegression(nn.Module):
    """f(q) = Σᵢ α(q, kᵢ) vᵢ with α the softmax of −‖(q − k)/σ‖²/2, and σ learned.

    key (m, d) and value (m,) or (m, d_v) are the examples, kept as buffers; query (n, d) gives
    (n,) or (n, d_v). `features=True` learns a bandwidth for each of the d features. `fit` lowers
    the squared error that each example has when the others alone predict it.

    >>> key = torch.linspace(0, 3, 40)[:, None]
    >>> model = KernelRegression(key, key[:, 0].sin())
    >>> losses = model.fit(50)
    >>> bool(losses[-1] < losses[0]), model(torch.tensor([[1.5]])).shape
    (True, torch.Size([1]))
    """

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
        check_tensors(key=key, value=value)
        if key.dim() != 2 or value.dim() not in (1, 2) or len(key) != len(value):
            raise ShapeError(
                f"key must be (m, d) and value (m,) or (m, d_v), not {tuple(key.shape)} and "
                f"{tuple(value.shape)}"
            )
        self.register_buffer("key", key)
        self.register_buffer("value", value)
        d, where = key.shape[1], {"device": key.device, "dtype": key.dtype}
        if score is None:
            score = GaussianScore(bandwidth, d if features else None, **where)
        self.score = checked(score, (d, d), **where)
        self.weighting = weightings.checked(weighting)
        self.dropout = 0.0

    def forward(self, query: Tensor) -> Tensor:
        check_tensors(query=query)
        return self._predicted(query, None)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def held_out(self) -> Tensor:
        """What the other examples predict for each of them."""
        return self._predicted(self.key, ~masks.window(0))

    def loss(self) -> Tensor:
        """The mean squared error of `held_out`."""
        return (self.held_out() - self.value).square().mean()

    def fit(
        self, steps: int = 100, lr: float = 0.1, told: Callable[[float], None] | None = None
    ) -> list[float]:
        """The losses of so many steps of Adam; `told` hears each one at once."""
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if told is not None:
                told(losses[-1])
        return losses

    def _predicted(self, query: Tensor, mask: Any) -> Tensor:
        value = self.value if self.value.dim() == 2 else self.value[:, None]
        out = attended(query, self.key, value, self.score, self.weighting, mask)[0]
        return out if self.value.dim() == 2 else out[..., 0]

    def extra_repr(self) -> str:
        return f"{len(self.key)} examples, {words(self)}"
