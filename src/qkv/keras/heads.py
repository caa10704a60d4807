"""Keras layers: self-attention, multi-head attention and grouped-query attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from qkv import masks
from qkv.errors import (
    ArgumentError,
    CombinationError,
    ShapeError,
    validate_fraction,
    validate_optional_sizes,
    validate_sizes,
)
from qkv.keras.attention import Attention, AttentionLayer, Config, build_output_spec
from qkv.keras.axes import SEQUENCE_AXES, Axes, check_sequence, check_shapes, unpack_inputs
from qkv.keras.masks import merge_masks
from qkv.keras.scores import ScoreConfig, WeightingConfig
from qkv.util.types import Array, Shape


@keras.saving.register_keras_serializable("qkv")
class SelfAttention(Attention):
    """S = α(Q, K) V with Q = X W_Q, K = X W_K, V = X W_V: self-attention with one head.

    X (batch, n, d) → (batch, n, d_v); W_Q and W_K are (d, d_qk), W_V is (d, d_v). d_qk and d_v
    default to d. The masks are those of `Attention`.

    >>> import numpy as np
    >>> layer = SelfAttention(d_qk=4, d_v=2)
    >>> tuple(layer(np.ones((1, 5, 8)), use_causal_mask=True).shape)
    (1, 5, 2)
    >>> [tuple(w.shape) for w in layer.weights]
    [(8, 4), (8, 4), (8, 2)]
    """

    def __init__(
        self,
        d_qk: int | None = None,
        d_v: int | None = None,
        score: ScoreConfig = "scaled_dot",
        weighting: WeightingConfig = "softmax",
        dropout: float = 0.0,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        validate_optional_sizes(d_qk=d_qk, d_v=d_v)
        super().__init__(score=score, weighting=weighting, dropout=dropout, seed=seed, **kwargs)
        self.d_qk, self.d_v = d_qk, d_v
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)

    def _qvk_shapes(self, input_shape: Any) -> tuple[Shape, Shape, Shape]:
        *rows, d = check_sequence("inputs", input_shape)
        query, value = (*rows, self.d_qk or d), (*rows, self.d_v or d)
        return query, value, query

    def _qvk_inputs(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return [ops.matmul(inputs, w) for w in (self.w_q, self.w_v, self.w_k)], (mask, mask, None)

    def build(self, input_shape: Any) -> None:
        d = check_sequence("inputs", input_shape)[-1]

        def add_matrix(name: str, width: int) -> Any:
            # A copy, because the same initializer returns the same numbers for every matrix.
            fresh = keras.initializers.get(keras.initializers.serialize(self.kernel_initializer))
            regularizer = self.kernel_regularizer
            return self.add_weight(
                name=name, shape=(d, width), initializer=fresh, regularizer=regularizer
            )

        self.w_q, self.w_k = (add_matrix(name, self.d_qk or d) for name in ("w_q", "w_k"))
        self.w_v = add_matrix("w_v", self.d_v or d)
        super().build(input_shape)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "d_qk": self.d_qk,
            "d_v": self.d_v,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


class MultiHeadBase(AttentionLayer):
    """Overrides the two methods in which Keras's multi-head layers compute masks and attention.

    Subclasses set `_heads`, the number of query heads, `_axes`, the attended axes, and `_window`,
    the size of the sliding window or None.
    """

    _axes = SEQUENCE_AXES

    def _compute_attention_mask(
        self, query: Array, value: Array, use_causal_mask: bool = False, **keras_masks: Any
    ) -> masks.Mask | None:
        return merge_masks(
            query,
            value,
            self._heads,
            self._axes,
            causal=use_causal_mask,
            window=self._window,
            **keras_masks,
        )

    def _compute_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        attention_mask: masks.MaskLike | None = None,
        training: bool | None = None,
        return_attention_scores: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tuple[Array, Array | None]:
        """Return the output and the weights for projected arrays (batch, …, rows, heads, width).

        `call` passes all masks as one `qkv.masks.Mask`. A subclass may pass an array, and
        `use_causal_mask`.
        """
        if return_attention_scores is None:  # GroupQueryAttention stores it instead of passing it
            return_attention_scores = getattr(self, "_return_attention_scores", False)
        if return_attention_scores and self._flash_attention:
            raise CombinationError(
                "Returning attention scores is not supported when flash attention is enabled. "
                "Please disable flash attention to access attention scores: pass either "
                "return_attention_scores=True or flash_attention=True"
            )
        query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
        if use_causal_mask or not isinstance(attention_mask, masks.Mask | None):
            attention_mask = merge_masks(
                query,
                value,
                self._heads,
                self._axes,
                attention_mask=attention_mask,
                causal=use_causal_mask,
            )
        q, k, v = (self._axes.flatten_rows(x) for x in (query, key, value))
        dropout = self.dropout if training else 0.0
        seeds = getattr(self._dropout_layer, "seed_generator", None)
        out, alpha = self._run_attention(
            q, k, v, attention_mask, dropout, seeds, return_attention_scores
        )
        if alpha is not None and len(self._axes.attended) > 1:
            shape = self._axes.scores_shape(ops.shape(query)[:-1], ops.shape(key)[:-1], self._heads)
            alpha = ops.reshape(alpha, shape)
        return self._axes.restore_axes(out, query), alpha


@keras.saving.register_keras_serializable("qkv")
class MultiHeadAttention(MultiHeadBase, keras.layers.MultiHeadAttention):  # type: ignore[misc]
    """Σₕ S⁽ʰ⁾ W_O⁽ʰ⁾ + b, where S⁽ʰ⁾ = α(Q W_Q⁽ʰ⁾, K W_K⁽ʰ⁾) V W_V⁽ʰ⁾.

    query (batch, n, d), value and key (batch, m, ·) → (batch, n, d), and with
    `return_attention_scores` the weights (batch, heads, n, m).

    A subclass of keras.layers.MultiHeadAttention with the same arguments; weights load in both
    directions. `score` and `weighting` are shared by all heads. Attention runs over all axes
    between the batch and the width, or over `attention_axes`. One thing differs from Keras: a query
    that may attend to no key gives 0 before W_O, not an average. `attend` chooses the fastest
    engine that supports the call. `flash_attention=True` only raises Keras's errors: it excludes
    dropout and `return_attention_scores`.

    >>> import numpy as np
    >>> x = np.ones((2, 5, 16))
    >>> ours = MultiHeadAttention(num_heads=4, key_dim=8, weighting="entmax15")
    >>> out, alpha = ours(x, x, return_attention_scores=True)
    >>> tuple(out.shape), tuple(alpha.shape)
    ((2, 5, 16), (2, 4, 5, 5))
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | Sequence[int] | None = None,
        attention_axes: int | Sequence[int] | None = None,
        score: ScoreConfig = "scaled_dot",
        weighting: WeightingConfig = "softmax",
        **kwargs: Any,
    ) -> None:
        validate_fraction("dropout", dropout)
        super().__init__(
            score=score,
            weighting=weighting,
            num_heads=num_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dropout=dropout,
            use_bias=use_bias,
            output_shape=output_shape,
            attention_axes=attention_axes,
            **kwargs,
        )
        # Keras checks less: True is an int for it, and the sizes in output_shape are not checked.
        validate_sizes(num_heads=num_heads, key_dim=key_dim)
        validate_optional_sizes(value_dim=value_dim)
        for size in output_shape if isinstance(output_shape, list | tuple) else (output_shape,):
            validate_optional_sizes(output_shape=size)

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        query, value, key = unpack_inputs([query_shape, value_shape, key_shape or value_shape])
        check_shapes(query, value, key)
        attended, rank = self._attention_axes or (), len(query)
        if not all(0 < (axis + rank if axis < 0 else axis) < rank - 1 for axis in attended):
            raise ArgumentError(
                f"attention_axes must be from 1 to {rank - 2}, or from −2 to −{rank - 1} counted "
                f"from the end, for a query with {rank} axes: the first axis is the batch and the "
                f"last the width. Got {tuple(attended)}"
            )
        super().build(query, value, key)
        self._query_mask = None
        self._axes = Axes(tuple(self._attention_axes), rank)
        self._axes.check_shared_axes(query, value)
        self._heads, self._window = self.num_heads, self._sliding_window
        self._build_score(self.key_dim, self.key_dim)

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: masks.MaskLike | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        # Keras's call uses the mask attached to the query tensor and drops this argument.
        self._query_mask = query_mask
        try:
            return super().call(
                query,
                value,
                key,
                None,
                value_mask,
                key_mask,
                attention_mask,
                return_attention_scores,
                training,
                use_causal_mask,
            )
        finally:
            self._query_mask = None

    def _compute_attention_mask(self, *args: Any, **keras_masks: Any) -> masks.Mask | None:
        if self._query_mask is not None:
            keras_masks["query_mask"] = self._query_mask
        return super()._compute_attention_mask(*args, **keras_masks)

    def compute_output_spec(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        *args: Any,
        return_attention_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        query_shape, value_shape = tuple(query.shape), tuple(value.shape)
        key_shape = None if key is None else key.shape
        out = self.compute_output_shape(query_shape, value_shape, key_shape)
        alpha = self._axes.scores_shape(query_shape, value_shape, self.num_heads)
        return build_output_spec(self, out, alpha, return_attention_scores)


@keras.saving.register_keras_serializable("qkv")
class GroupedQueryAttention(MultiHeadBase, keras.layers.GroupQueryAttention):  # type: ignore[misc]
    """Multi-head attention with fewer key and value heads, each shared by a group of query heads.

    query (batch, n, d), value and key (batch, m, d) → (batch, n, d), and with
    `return_attention_scores` the weights (batch, query heads, n, m). A subclass of
    keras.layers.GroupQueryAttention with the same arguments and weights, and with `score` and
    `weighting`. Keys and values are not repeated in memory.

    >>> import numpy as np
    >>> x = np.ones((2, 5, 16))
    >>> layer = GroupedQueryAttention(head_dim=8, num_query_heads=4, num_key_value_heads=2)
    >>> out, alpha = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    >>> tuple(out.shape), tuple(alpha.shape)
    ((2, 5, 16), (2, 4, 5, 5))
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        score: ScoreConfig = "scaled_dot",
        weighting: WeightingConfig = "softmax",
        **kwargs: Any,
    ) -> None:
        validate_sizes(head_dim=head_dim)
        validate_sizes(num_query_heads=num_query_heads, num_key_value_heads=num_key_value_heads)
        if num_query_heads % num_key_value_heads:
            raise ArgumentError(
                f"num_query_heads must be a multiple of num_key_value_heads, not {num_query_heads} "
                f"and {num_key_value_heads}"
            )
        super().__init__(
            score=score,
            weighting=weighting,
            head_dim=head_dim,
            num_query_heads=num_query_heads,
            num_key_value_heads=num_key_value_heads,
            dropout=validate_fraction("dropout", dropout),
            use_bias=use_bias,
            **kwargs,
        )
        self.num_repeats = 1  # `attend` broadcasts the shared heads

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        query, value, key = unpack_inputs([query_shape, value_shape, key_shape or value_shape])
        for name, shape in (("query", query), ("value", value), ("key", key)):
            check_sequence(name, shape)
        check_shapes(query, value, key)
        super().build(query, value, key)
        self._heads, self._window = self.num_query_heads, self.sliding_window
        self._build_score(self.head_dim, self.head_dim)

    def compute_output_shape(
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> Shape:
        if query_shape[-1] != value_shape[-1]:
            raise ShapeError(
                "the widths of query and value must be equal, but query has "
                f"{query_shape[-1]} and value {value_shape[-1]}"
            )
        check_shapes(query_shape, value_shape, key_shape or value_shape)
        return tuple(query_shape)
