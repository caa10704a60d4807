"""The equation as a Keras layer, and what every layer of attention shares."""

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
from qkv.keras.masks import merge_masks
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
"""Keras's names of scores, and ours."""


def init_keras_layer(layer: Any, init: Callable[..., None], kwargs: Config) -> None:
    """init(**kwargs) of Keras's own layer; what it does not know is told with where that goes."""
    try:
        init(**kwargs)
    except ValueError as error:
        if others := [name for name in kwargs if f"'{name}'" in str(error)]:
            reject_init_keywords(layer, others, init_keywords(type(layer)))
        raise


class KeywordCheckedLayer(keras.Layer):  # type: ignore[misc]
    """A layer that says of a keyword which it is not called with where that goes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            reject_call_keywords(self, kwargs)
            raise


class AttentionLayer(KeywordCheckedLayer):
    """What the layers share: a score and a weighting, their weights, and the call of `attend`."""

    def __init__(
        self,
        score: ScoreConfig = "scaled_dot",
        weighting: WeightingConfig = "softmax",
        **kwargs: Any,
    ) -> None:
        if isinstance(score, keras.Layer):
            raise DtypeError(
                f"score is a Keras layer, {type(score).__name__}, whose weights would not be "
                "trained: pass a score of qkv.scores, whose arrays are"
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
        """One weight for each array of the score and of the weighting."""
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
        """What stands in the score in this call."""
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
        """The output and, where asked for, the weights as they are before dropout."""

        def fill_arrays(record: Any, variables: Sequence[Any]) -> Any:
            now = (ops.cast(x, query.dtype) for x in variables)
            return tree.replace_arrays(load_framework("numpy"), record, now)

        how = {
            "score": fill_arrays(self._score, self._score_arrays()),
            "weighting": fill_arrays(self._weighting, self._weighting_weights),
            "mask": mask,
        }
        if not dropout:
            found = attend(query, key, value, return_weights=return_weights, **how)
            return found if return_weights else (found, None)
        # A number drawn here, for the seeds of Keras are pairs, and JAX may draw in no other way.
        seed = keras.random.randint((), 0, 2**31 - 1, "int32", seed=seeds)
        out = attend(query, key, value, dropout_p=dropout, seed=seed, **how)
        return out, weights(query, key, **how) if return_weights else None

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "score": to_config(self.score),
            "weighting": to_config(self.weighting),
        }


@keras.saving.register_keras_serializable("qkv")
class Attention(AttentionLayer):
    """Σᵢ α(q, kᵢ) vᵢ, called as keras.layers.Attention: on [query, value] or [query, value, key].

    query (…, n, d_q), value (…, m, d_v), key (…, m, d_k) → (…, n, d_v), and with
    `return_attention_scores` the weights (…, n, m). Without a key the value is the key.

    `attention_mask`, (batch, n, m) or fewer axes, is True where a query may attend, or a mask of
    `qkv.masks`, or its name ("causal"); the masks that come with Keras's tensors and
    `use_causal_mask` narrow it. A query that may attend to nothing gets 0.

    The score is `score`, "scaled_dot" unless given. `use_scale` and `score_mode` say it as Keras's
    own layer does, which does not divide by √d: "dot" is qᵀk, "concat" is w Σ tanh(q + k), both
    with a learned scale, scale qᵀk and w Σ tanh(scale (q + k)), where `use_scale` is True. Weights
    (`scale`, `concat_score_weight`) have its names and its order.

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
                f"score_mode={score_mode!r} each say how query and key are compared: give one"
            )
        if as_keras and score_mode not in (None, *KERAS_SCORE_MODES):
            raise unknown_name_error("score_mode", score_mode, KERAS_SCORE_MODES)
        if score is None:
            score = KERAS_SCORE_MODES[score_mode or "dot"] if as_keras else "scaled_dot"
        super().__init__(score=score, weighting=weighting, **kwargs)
        self.use_scale, self.score_mode, self._as_keras = use_scale, score_mode, as_keras
        self.dropout, self.seed = validate_fraction("dropout", dropout), seed
        self.seed_generator = keras.random.SeedGenerator(seed) if self.dropout else None

    # Where a layer that makes its own query, key and value differs.

    def _qvk_shapes(self, input_shape: Any) -> tuple[Shape, Shape, Shape]:
        """The shapes of query, value and key."""
        shapes = unpack_inputs(input_shape)
        check_shapes(*shapes)
        return shapes

    def _qvk_inputs(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Query, value and key, and the masks that came with them."""
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
        # Keras fills in `mask`, or `inputs_mask` where a second tensor is passed.
        given = self._qvk_inputs(inputs, inputs_mask if mask is None else mask)
        (query, value, key), (query_mask, value_mask, key_mask) = given
        rank = len(query.shape)
        rule = merge_masks(
            query,
            key,
            None,
            Axes((rank - 2,), rank),
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            causal=use_causal_mask,
        )
        dropout = self.dropout if training else 0.0
        found = self._run_attention(
            query, key, value, rule, dropout, self.seed_generator, return_attention_scores
        )
        return found if return_attention_scores else found[0]

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
    """Σᵢ α(q, kᵢ) vᵢ by the score Σ scale · tanh(q + k): keras.layers.AdditiveAttention, with its
    arguments and its weight, `scale` (d,), and with `weighting`.

    query and key have one width d. W₁ and W₂ of `scores.Additive` are layers before this one, or
    weights of `Attention(score="additive")`.

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
    """What a layer will give: the output and, if asked for, the weights."""
    shapes = (out, alpha) if both else (out,)
    specs = tuple(keras.KerasTensor(shape, dtype=layer.compute_dtype) for shape in shapes)
    return specs if both else specs[0]
