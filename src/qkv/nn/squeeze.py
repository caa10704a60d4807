"""Squeeze-and-excitation, whose gate is attention over channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from qkv.attention import attend, weights
from qkv.errors import ShapeError, sizes
from qkv.nn.tensors import called_as, check_tensors


class SqueezeExcitation(nn.Module):
    """out_c = α_c x_c, α_c = σ(q·k_c + b_c), q = relu(W₁z + b₁), z = the mean of x over its places.

    Read as attention: squeezing is average pooling, the query q says what the picture shows, each
    channel c has a key k_c (row c of W₂) and the value x_c, and the weights are sigmoids, which
    need not sum to one: channels do not compete. x (B, channels, …).

    >>> import torch
    >>> SqueezeExcitation(8, reduction=2)(torch.ones(1, 8, 5, 5)).shape
    torch.Size([1, 8, 5, 5])
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        sizes(channels=channels, reduction=reduction)
        self.fc1 = nn.Linear(channels, max(channels // reduction, 1))
        self.fc2 = nn.Linear(max(channels // reduction, 1), channels)

    def gate(self, x: Tensor) -> Tensor:
        """α (B, channels)"""
        check_tensors(x=x)
        if x.dim() < 3 or x.shape[1] != self.fc1.in_features:
            raise ShapeError(
                f"x must be (B, {self.fc1.in_features}, …) with at least one axis of places, "
                f"not {tuple(x.shape)}"
            )
        places = x.flatten(2).transpose(1, 2)  # (B, places, channels)
        anything = places[:, :1]
        z = attend(anything, places, places, score="constant", weighting="average")
        query = self.fc1(z).relu()
        key, bias = self.fc2.weight.to(query.dtype), self.fc2.bias
        return weights(query, key, score="dot", weighting="sigmoid", mask=bias)[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).to(x.dtype)
        return x * gate.reshape(*gate.shape, *[1] * (x.dim() - 2))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return f"{self.fc1.in_features}, reduction={self.fc1.in_features // self.fc2.in_features}"
