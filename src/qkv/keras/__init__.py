"""Attention in Keras 3, on its TensorFlow, JAX and torch backends: layers that call `attend`.

    Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ

- `Attention` has the call signature of keras.layers.Attention.
- `MultiHeadAttention`, `GroupedQueryAttention` and `AdditiveAttention` are drop-ins for the layers
  of Keras.
- `SelfAttention` and `FeedForward` are the other two layers of a transformer.

A query that may attend to no key gives 0; Keras gives a mean of the values.

`score` and `weighting` are names or objects, and are saved with the layer. Each array in them
becomes a trainable weight of the layer, with the array as its initial value. The learned scores
"additive", "multiplicative" and "gated" can be given by name, because a layer knows its widths.
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
