"""Attention in Keras 3, on its TensorFlow, JAX and torch backends: layers that call `attend`.

    Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ

`Attention` is called as keras.layers.Attention is; `MultiHeadAttention`, `GroupedQueryAttention`
and `AdditiveAttention` are drop-ins for those layers of Keras; `SelfAttention` and `FeedForward`
are the other two parts of a transformer. Where a row of a mask is all False they give 0, and Keras
some mean of the values.

A `score` and a `weighting` are given by name or as objects, and are saved with the layer. Arrays in
them are where training starts: each becomes a weight of the layer. The scores "additive",
"multiplicative" and "gated" can be had by name too, since a layer knows its widths.
"""

from __future__ import annotations

from qkv.errors import require_extra

with require_extra("keras", "qkv.keras needs Keras 3"):
    import keras.ops  # noqa: F401

from qkv.keras.attention import AdditiveAttention, Attention
from qkv.keras.feedforward import FeedForward
from qkv.keras.heads import GroupedQueryAttention, MultiHeadAttention, SelfAttention

__all__ = [
    "AdditiveAttention",
    "Attention",
    "FeedForward",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "SelfAttention",
]
