"""The layers `Attention` and `SelfAttention`, and the call of `attend` that all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Never, overload

from torch import Tensor, nn

from qkv import attention
from qkv.errors import validate_fraction, validate_sizes
from qkv.masks import MaskLike
from qkv.nn import weightings
from qkv.nn.scores import LayerScore, build_score, empty_parameter, resolve_score, score_name
from qkv.nn.tensors import (
    called_as,
    check_dtype,
    check_plain,
    check_tensors,
    check_width,
)
from qkv.util.keyword_hints import reject_call_keywords, reject_torchscript, suggest_keywords
from qkv.weightings import WeightingLike


def attend_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Any,
    weighting: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    weights: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return Σᵢ α(q, kᵢ) vᵢ and the weights α.

    `weights` is "heads" (α of every head), "mean" (the mean over the heads) or None (no α).
    """
    found = attention.attend(
        query,
        key,
        value,
        score=build_score(score, query.dtype),
        weighting=weightings.build_weighting(weighting, query.dtype),
        mask=mask,
        dropout_p=dropout_p,
        return_weights="mean" if weights == "mean" else weights is not None,
    )
    return (found, None) if weights is None else found


@suggest_keywords
class Attention(nn.Module):
    """Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ, with any score and weighting, by name or as objects.

    query (…, n, d_q), key (…, m, d_k), value (…, m, d_v) → (…, n, d_v). The layer owns the
    parameters of a learned score, such as `AdditiveScore`, and of a weighting that holds an
    `nn.Parameter`. `mask` is that of `qkv.attend`: a mask of `qkv.masks`, or a tensor that is True
    where a query may attend to a key. Dropout is applied to the weights during training.

    >>> import torch
    >>> layer = Attention("gaussian")
    >>> keys = torch.tensor([[1.0], [5.0]])
    >>> layer(torch.tensor([[1.0]]), keys, 10 * keys).round(decimals=2)
    tensor([[10.0100]])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        score: LayerScore = "scaled_dot",
        weighting: WeightingLike = "softmax",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.score = resolve_score(score)
        self.weighting = weightings.resolve_weighting(weighting)
        self.dropout = validate_fraction("dropout", dropout)

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskLike | None = None,
        need_weights: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskLike | None = None,
        *,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskLike | None = None,
        need_weights: bool = False,
        **wrong: Never,
    ) -> Any:
        """Return the output; with `need_weights` the pair (output, α), α of shape (…, n, m)."""
        if wrong:
            reject_call_keywords(self, wrong)
        check_tensors(query=query, key=key, value=value)
        return _attend_layer(self, query, key, value, mask, need_weights)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return describe_scoring(self)


@suggest_keywords
class SelfAttention(nn.Module):
    """S = softmax(QKᵀ/√d_qk) V, with Q = XW_Q, K = XW_K, V = XW_V.

    x (…, n, d) → (…, n, d_v); w_query and w_key (d, d_qk), w_value (d, d_v). `score` and
    `weighting` replace the scaled dot product and the softmax.

    >>> import torch
    >>> layer = SelfAttention(4, d_qk=3, d_v=2)
    >>> layer(torch.ones(5, 4)).shape
    torch.Size([5, 2])
    """

    __prepare_scriptable__ = reject_torchscript

    def __init__(
        self,
        d: int,
        d_qk: int | None = None,
        d_v: int | None = None,
        score: LayerScore = "scaled_dot",
        weighting: WeightingLike = "softmax",
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        d_qk, d_v = (d if width is None else width for width in (d_qk, d_v))
        validate_sizes(d=d, d_qk=d_qk, d_v=d_v)
        self.w_query = empty_parameter((d, d_qk), device, dtype)
        self.w_key = empty_parameter((d, d_qk), device, dtype)
        self.w_value = empty_parameter((d, d_v), device, dtype)
        self.score = resolve_score(score, (d_qk, d_qk), device=device, dtype=dtype)
        self.weighting = weightings.resolve_weighting(weighting)
        self.dropout = validate_fraction("dropout", dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for w in (self.w_query, self.w_key, self.w_value):
            nn.init.xavier_uniform_(w)

    @overload
    def forward(
        self, x: Tensor, mask: MaskLike | None = None, need_weights: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, mask: MaskLike | None = None, *, need_weights: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        x: Tensor,
        mask: MaskLike | None = None,
        need_weights: bool = False,
        **wrong: Never,
    ) -> Any:
        """Return the output; with `need_weights` the pair (output, α), α of shape (…, n, n)."""
        if wrong:
            reject_call_keywords(self, wrong)
        check_plain(x=x)
        check_dtype(self.w_query, x=x)
        check_width(self.w_query.shape[0], x)
        query, key, value = (x @ w for w in (self.w_query, self.w_key, self.w_value))
        return _attend_layer(self, query, key, value, mask, need_weights)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        (d, d_qk), d_v = self.w_query.shape, self.w_value.shape[1]
        return f"{d}, d_qk={d_qk}, d_v={d_v}, {describe_scoring(self)}"


def _attend_layer(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, need_weights: bool
) -> Any:
    """Return the output of a layer that has one score and one weighting."""
    dropout = layer.dropout if layer.training else 0.0
    weights = "heads" if need_weights else None
    output, alpha = attend_with_weights(
        query, key, value, layer.score, layer.weighting, mask, dropout, weights
    )
    return (output, alpha) if need_weights else output


def describe_scoring(layer: Any) -> str:
    """Return the score and the weighting of a layer as text, for its repr."""
    text = (
        f"score={score_name(layer.score)}, weighting={weightings.weighting_name(layer.weighting)}"
    )
    return text + (f", dropout={layer.dropout}" if layer.dropout else "")
