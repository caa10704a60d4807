"""The equation as a layer, and the one door from every layer to `attend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qkv import attention, weightings
from qkv.errors import fraction
from qkv.nn.scores import built, checked, told
from qkv.nn.tensors import check_tensors
from qkv.types import Array


def attended(
    query: Array,
    key: Array,
    value: Array,
    score: Any,
    weighting: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    weights: str | None = None,
) -> tuple[Array, Array | None]:
    """Σᵢ α(q, kᵢ) vᵢ, and α of every head (`weights="heads"`), of their mean ("mean"), or None.

    Under autocast the three come in its dtype and nothing else is cast: sums run in float32.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        with torch.autocast(device, enabled=False):
            return attended(query, key, value, score, weighting, mask, dropout_p, weights)
    found = attention.attend(
        query,
        key,
        value,
        score=built(score, query.dtype),
        weighting=weighting,
        mask=mask,
        dropout_p=dropout_p,
        return_weights="mean" if weights == "mean" else weights is not None,
    )
    return (found, None) if weights is None else found


class Attention(nn.Module):
    """Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, with any score and weighting, by name or as objects.

    query (…, n, d_q), key (…, m, d_k), value (…, m, d_v) → (…, n, d_v). A learned score
    (`AdditiveScore` and its like) brings its parameters along. `mask` is as for `qkv.attend`: of
    `qkv.masks`, or True where a pair may attend. Dropout acts on the weights while training.

    >>> layer = Attention("gaussian")
    >>> keys = torch.tensor([[1.0], [5.0]])
    >>> layer(torch.tensor([[1.0]]), keys, 10 * keys).round(decimals=2)
    tensor([[10.0100]])
    """

    def __init__(
        self, score: Any = "scaled_dot", weighting: Any = "softmax", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.score = checked(score)
        self.weighting = weightings.resolve(weighting)
        self.dropout = fraction("dropout", dropout)

    def forward(
        self, query: Array, key: Array, value: Array, mask: Any = None, need_weights: bool = False
    ) -> Any:
        """The output; with `need_weights` a pair with α (…, n, m) beside it."""
        check_tensors(query=query, key=key, value=value)
        out, alpha = attended(
            query,
            key,
            value,
            self.score,
            self.weighting,
            mask,
            self.dropout if self.training else 0.0,
            "heads" if need_weights else None,
        )
        return (out, alpha) if need_weights else out

    def extra_repr(self) -> str:
        return words(self)


def words(layer: Any) -> str:
    """The score and the weighting of a layer, for its repr."""
    text = f"score={told(layer.score)}, weighting={type(layer.weighting).__name__}"
    return text + (f", dropout={layer.dropout}" if layer.dropout else "")
