"""The Keras layers `Attention` and `AdditiveAttention`, and their base classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from qkv import masks, scores, weightings
from qkv.attention import attend, weights
from qkv.errors import ArgumentError, DtypeError, unknown_name_error, validate_fraction
from qkv.frameworks import load_framework, tree
from qkv.keras.axes import Axes, check_shapes, unpack_inputs
from qkv.keras.masks import merge_masks, row_mask
from qkv.keras.scores import (
    LEARNED_SCORES,
    ScoreConfig,
    WeightingConfig,
    constant_initializer,
    from_config,
    learned_initializer,
    learned_score_name,
    move_to_host,
    named_arrays,
    to_config,
)
from qkv.util.keyword_hints import init_keywords, reject_call_keywords, reject_init_keywords
from qkv.util.types import Array, Shape

Config = dict[str, Any]

KERAS_SCORE_MODES: dict[str, ScoreConfig] = {"dot": "dot", "concat": "additive"}
"""Names of Keras's score modes, and the scores that they mean."""


def init_keras_layer(layer: Any, init: Callable[..., None], kwargs: Config) -> None:
    """Call init(**kwargs) of Keras's layer; suggest a name in the error for an unknown keyword.

    Keras's other errors become `ArgumentError`s with the same text.
    """
    try:
        init(**kwargs)
    except ValueError as error:
        if unknown := [name for name in kwargs if f"'{name}'" in str(error)]:
            reject_init_keywords(layer, unknown, init_keywords(type(layer)))
        raise ArgumentError(str(error)) from error


class KeywordCheckedLayer(keras.Layer):  # type: ignore[misc]
    """A layer whose call suggests a name in the error for an unknown keyword."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            reject_call_keywords(self, kwargs)
            raise


class AttentionLayer(KeywordCheckedLayer):
    """The base of all attention layers: score, weighting, their weights, and `attend`."""

    def __init__(
        self,
        score: ScoreConfig = "scaled_dot",
        weighting: WeightingConfig = "softmax",
        **kwargs: Any,
    ) -> None:
        if isinstance(score, keras.Layer):
            raise DtypeError(
                f"score is a Keras layer, {type(score).__name__}; its weights would not train: "
                "pass a score of qkv.scores, whose arrays become weights of this layer"
            )
        init_keras_layer(self, super().__init__, kwargs)
        self.score = learned_score_name(from_config(scores, score))
        self.weighting = from_config(weightings, weighting)
        if not self._creates_score:
            self._score = move_to_host(scores.resolve(self.score))
        self._weighting = move_to_host(weightings.resolve(self.weighting))
        self.supports_masking = True

    @property
    def _creates_score(self) -> bool:
        return isinstance(self.score, str) and self.score in LEARNED_SCORES

    def _build_score(self, d_q: int, d_k: int) -> None:
        """Add one weight for each array of the score and of the weighting."""
        if self._creates_score:
            self._score = LEARNED_SCORES[self.score](d_q, d_k)
        self._score.check_shapes((d_q,), (d_k,))
        self._score_weights = [
            self.add_weight(
                name=f"score_{name}",
                shape=x.shape,
                initializer=learned_initializer(name, x)
                if self._creates_score
                else constant_initializer(x),
            )
            for name, x in named_arrays(self._score)
        ]
        self._build_weighting()

    def _score_arrays(self) -> Sequence[Any]:
        """Return the arrays to put into the score for this call."""
        return self._score_weights

    def _build_weighting(self) -> None:
        self._weighting_weights = [
            self.add_weight(
                name=f"weighting_{name}", shape=x.shape, initializer=constant_initializer(x)
            )
            for name, x in named_arrays(self._weighting)
        ]

    def _run_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: masks.Mask | None,
        dropout: float,
        seeds: Any,
        return_weights: bool,
    ) -> tuple[Array, Array | None]:
        """Return the output and, if requested, the weights before dropout."""

        def fill_arrays(record: Any, variables: Sequence[Any]) -> Any:
            arrays = (ops.cast(x, query.dtype) for x in variables)
            return tree.replace_arrays(load_framework("numpy"), record, arrays)

        options = {
            "score": fill_arrays(self._score, self._score_arrays()),
            "weighting": fill_arrays(self._weighting, self._weighting_weights),
            "mask": mask,
        }
        if not dropout:
            result = attend(query, key, value, return_weights=return_weights, **options)
            return result if return_weights else (result, None)
        # Keras's own seeds are pairs of numbers, and under JAX only keras.random may draw one.
        seed = keras.random.randint((), 0, 2**31 - 1, "int32", seed=seeds)
        out = attend(query, key, value, dropout_p=dropout, seed=seed, **options)
        return out, weights(query, key, **options) if return_weights else None

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "score": to_config(self.score),
            "weighting": to_config(self.weighting),
        }


@keras.saving.register_keras_serializable("qkv")
class Attention(AttentionLayer):
    """Σᵢ α(q, kᵢ) vᵢ, called like keras.layers.Attention: on [query, value] or [query, value, key].

    query (…, n, d_q), value (…, m, d_v), key (…, m, d_k) → (…, n, d_v), and with
    `return_attention_scores` the weights (…, n, m). Without a key, the value is also the key.

    `attention_mask` is a mask of `qkv.masks`, its name ("causal"), or an array (batch, n, m), or
    with fewer axes, that is True where a query may attend. It is combined with `use_causal_mask`
    and with the masks attached to Keras tensors. A query that may attend to no key gives 0.
    As in Keras, a masked query gives 0 and keeps its weights, and with dropout the weights returned
    are those applied.

    `score` defaults to "scaled_dot". Instead of `score`, pass `use_scale` and `score_mode` for the
    scores of Keras's own layer, which do not divide by √d:

    - "dot" is qᵀk, with `use_scale` scale · qᵀk.
    - "concat" is w Σ tanh(q + k), with `use_scale` w Σ tanh(scale (q + k)).

    The weights `scale` and `concat_score_weight` have Keras's names and order.

    >>> import numpy as np
    >>> from qkv.frameworks import to_numpy
    >>> keys, values = np.array([[[0.0], [3.0]]]), np.array([[[10.0], [20.0]]])
    >>> layer = Attention(score="gaussian")
    >>> out, alpha = layer([np.zeros((1, 1, 1)), values, keys], return_attention_scores=True)
    >>> to_numpy(alpha).round(3).tolist()
    [[[0.989..., 0.010...]]]
    """

    def __init__(
        self,
        score: ScoreConfig | None = None,
        weighting: WeightingConfig = "softmax",
        dropout: float = 0.0,
        seed: int | None = None,
        use_scale: bool | None = None,
        score_mode: Literal["dot", "concat"] | None = None,
        **kwargs: Any,
    ) -> None:
        as_keras = use_scale is not None or score_mode is not None
        if as_keras and score is not None:
            raise ArgumentError(
                f"score={score!r} and Keras's own use_scale={use_scale!r}, "
                f"score_mode={score_mode!r} both set the score: pass one of them"
            )
        if as_keras and score_mode not in (None, *KERAS_SCORE_MODES):
            raise unknown_name_error("score_mode", score_mode, KERAS_SCORE_MODES)
        if score is None:
            score = KERAS_SCORE_MODES[score_mode or "dot"] if as_keras else "scaled_dot"
        super().__init__(score=score, weighting=weighting, **kwargs)
        self.use_scale, self.score_mode, self._as_keras = use_scale, score_mode, as_keras
        self.dropout, self.seed = validate_fraction("dropout", dropout), seed
        self.seed_generator = keras.random.SeedGenerator(seed) if self.dropout else None

    # A layer that computes its own query, key and value overrides these two methods.

    def _qvk_shapes(self, input_shape: Any) -> tuple[Shape, Shape, Shape]:
        """Return the shapes of query, value and key."""
        shapes = unpack_inputs(input_shape)
        check_shapes(*shapes)
        return shapes

    def _qvk_inputs(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return query, value and key, and the masks attached to them."""
        return unpack_inputs(inputs), unpack_inputs([None] * 2 if mask is None else mask, "mask")

    def build(self, input_shape: Any) -> None:
        query, _, key = self._qvk_shapes(input_shape)
        self._build_score(query[-1], key[-1])

    def _build_score(self, d_q: int, d_k: int) -> None:
        if not self._as_keras:
            return super()._build_score(d_q, d_k)
        self.scale = self.concat_score_weight = None
        if self.use_scale:
            self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
        if self.score_mode == "concat":
            self.concat_score_weight = self.add_weight(
                name="concat_score_weight", shape=(), initializer="ones"
            )
            of_keys = np.eye(d_q) if self.use_scale else None
            self._score = scores.Additive(np.eye(d_q), of_keys, np.ones(d_q))
        elif self.use_scale:
            self._score = scores.ScaledDot(np.ones(()))
        self._score.check_shapes((d_q,), (d_k,))
        self._build_weighting()

    def _score_arrays(self) -> Sequence[Any]:
        if not self._as_keras:
            return super()._score_arrays()
        if self.score_mode != "concat":
            return () if self.scale is None else (self.scale,)
        *eyes, one = (x for _, x in named_arrays(self._score))
        if self.scale is not None:
            eyes = [ops.multiply(self.scale, x) for x in eyes]
        return *eyes, ops.multiply(self.concat_score_weight, one)

    def call(
        self,
        inputs: Any,
        mask: Any = None,
        inputs_mask: Any = None,
        attention_mask: masks.MaskLike | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        # Keras passes `mask`, or `inputs_mask` if the call has a second tensor argument.
        (query, value, key), (query_mask, value_mask, key_mask) = self._qvk_inputs(
            inputs, inputs_mask if mask is None else mask
        )
        rank = len(query.shape)
        axes = Axes((rank - 2,), rank)
        if query_mask is not None:
            query_mask = row_mask("query_mask", query_mask, query, axes)
        rule = merge_masks(
            query,
            key,
            None,
            axes,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            causal=use_causal_mask,
        )
        dropout, seeds = self.dropout if training else 0.0, self.seed_generator
        if dropout and return_attention_scores:  # the weights that are applied, as in Keras
            _, alpha = self._run_attention(query, key, value, rule, 0.0, seeds, True)
            alpha = keras.random.dropout(alpha, dropout, seed=seeds)
            out = ops.matmul(alpha, value)
        else:
            out, alpha = self._run_attention(
                query, key, value, rule, dropout, seeds, return_attention_scores
            )
        if query_mask is not None:  # as in Keras, the output is masked and the weights are not
            out = ops.where(ops.expand_dims(query_mask, -1), out, ops.zeros((), out.dtype))
        return (out, alpha) if return_attention_scores else out

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return mask[0] if isinstance(mask, list | tuple) else mask

    def compute_output_shape(self, input_shape: Any) -> Shape:
        query, value, _ = self._qvk_shapes(input_shape)
        return (*query[:-1], value[-1])

    def compute_output_spec(
        self, inputs: Any, *args: Any, return_attention_scores: bool = False, **kwargs: Any
    ) -> Any:
        several = isinstance(inputs, list | tuple)
        query, value, key = self._qvk_shapes([x.shape for x in inputs] if several else inputs.shape)
        shapes = (*query[:-1], value[-1]), (*query[:-1], key[-2])
        return build_output_spec(self, *shapes, return_attention_scores)

    def get_config(self) -> Config:
        own = {name: getattr(self, name) for name in ("dropout", "seed", "use_scale", "score_mode")}
        return {**super().get_config(), **own, **({"score": None} if self._as_keras else {})}


@keras.saving.register_keras_serializable("qkv")
class AdditiveAttention(Attention):
    """Σᵢ α(q, kᵢ) vᵢ with the score Σ scale · tanh(q + k).

    It has the arguments and the weight `scale` (d,) of keras.layers.AdditiveAttention, and
    `weighting`. query and key have the same width d. It does not have the matrices W₁ and W₂ of
    `scores.Additive`: put dense layers before it, or use `Attention(score="additive")`.

    >>> import numpy as np
    >>> layer = AdditiveAttention(use_scale=False)
    >>> tuple(layer([np.ones((1, 2, 3)), np.ones((1, 5, 3))]).shape)
    (1, 2, 3)
    """

    def __init__(
        self,
        use_scale: bool = True,
        dropout: float = 0.0,
        weighting: WeightingConfig = "softmax",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__("additive", weighting, dropout, seed, **kwargs)
        self.use_scale = use_scale

    def _build_score(self, d_q: int, d_k: int) -> None:
        one = np.ones(d_q)
        self._score = scores.Additive(np.eye(d_q), None, one)
        self._score.check_shapes((d_q,), (d_k,))
        self.scale = None
        if self.use_scale:
            self.scale = self.add_weight(
                name="scale", shape=(d_q,), initializer="glorot_uniform", dtype=self.dtype
            )
        self._score_weights = [np.eye(d_q), one if self.scale is None else self.scale]
        self._build_weighting()

    def get_config(self) -> Config:
        config = super().get_config()
        del config["score"], config["score_mode"]
        return config


def build_output_spec(layer: Any, out: Shape, alpha: Shape, both: bool) -> Any:
    """Return the Keras specs of the output and, if `both`, of the weights."""
    shapes = (out, alpha) if both else (out,)
    specs = tuple(keras.KerasTensor(shape, dtype=layer.compute_dtype) for shape in shapes)
    return specs if both else specs[0]
