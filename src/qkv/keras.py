"""Attention in Keras 3, on its TensorFlow, JAX and torch backends: layers that call `attend`.

    Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ

`Attention` is called as keras.layers.Attention is, and `MultiHeadAttention` is a drop-in for
keras.layers.MultiHeadAttention; `SelfAttention` and `FeedForward` are the other two parts of a
transformer. A `score` and a `weighting` are given by name or as objects, and are saved with the
layer. Arrays in them are where training starts: each becomes a weight of the layer. The scores
"additive", "multiplicative" and "gated" can be had by name too, since a layer knows its widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from numbers import Real
from operator import and_
from typing import Any

import numpy as np

from qkv import masks, scores, weightings
from qkv.arrays import framework, is_array, of, to_numpy, tree
from qkv.attention import ScoreLike, WeightingLike, attend, weights
from qkv.errors import ArgumentError, DtypeError, MissingExtra, ShapeError, unknown
from qkv.scores.modified import Function
from qkv.types import Array, Shape

try:
    import keras
    from keras import ops
except ImportError as error:
    raise MissingExtra('qkv.keras needs Keras 3: pip install "qkv[keras]"') from error

__all__ = ["Attention", "FeedForward", "MultiHeadAttention", "SelfAttention"]

Config = dict[str, Any]

LEARNED: dict[str, Callable[[int, int], scores.Score]] = {
    "additive": lambda q, k: scores.Additive(
        np.zeros((k, q)), np.zeros((k, k)), np.zeros(k), np.zeros(k)
    ),
    "multiplicative": lambda q, k: scores.Multiplicative(np.zeros((q, k))),
    "gated": lambda q, k: scores.Gated(np.zeros(q), np.zeros(k), np.zeros(())),
}
"""Scores that a layer makes itself, from the widths of query and key; it fills in the numbers."""


class _Layer(keras.Layer):  # type: ignore[misc]
    """What the layers share: a score and a weighting, their weights, and the call of `attend`."""

    def __init__(
        self,
        score: ScoreLike | Config = "scaled_dot",
        weighting: WeightingLike | Config = "softmax",
        **kwargs: Any,
    ) -> None:
        if isinstance(score, keras.Layer):
            raise DtypeError(
                f"score is a Keras layer, {type(score).__name__}, whose weights would not be "
                "trained: pass a score of qkv.scores, whose arrays are"
            )
        super().__init__(**kwargs)
        self.score = _read(scores, score)
        self.weighting = _read(weightings, weighting)
        if not (isinstance(score, str) and score in LEARNED):
            self._score = _on_host(scores.resolve(self.score))
        self._weighting = _on_host(weightings.resolve(self.weighting))
        self.supports_masking = True

    def _build_score(self, d_q: int, d_k: int) -> None:
        """One weight for each array of the score and of the weighting."""
        make = LEARNED.get(self.score) if isinstance(self.score, str) else None
        if make:
            self._score = make(d_q, d_k)
        self._score.check((d_q,), (d_k,))
        self._score_weights = [
            self.add_weight(
                name=f"score_{name}",
                shape=x.shape,
                initializer="glorot_uniform" if make and name != "bias" else _start(x),
            )
            for name, x in _arrays(self._score)
        ]
        self._weighting_weights = [
            self.add_weight(name=f"weighting_{name}", shape=x.shape, initializer=_start(x))
            for name, x in _arrays(self._weighting)
        ]

    def _attend(
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

        def filled(record: Any, variables: Sequence[Any]) -> Any:
            now = (ops.cast(x, query.dtype) for x in variables)
            return tree.rebuild(framework("numpy"), record, now)

        how = {
            "score": filled(self._score, self._score_weights),
            "weighting": filled(self._weighting, self._weighting_weights),
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
            "score": _written(self.score),
            "weighting": _written(self.weighting),
        }


@keras.saving.register_keras_serializable("qkv")
class Attention(_Layer):
    """Σᵢ α(q, kᵢ) vᵢ, called as keras.layers.Attention: on [query, value] or [query, value, key].

    query (…, n, d_q), value (…, m, d_v), key (…, m, d_k) → (…, n, d_v), and with
    `return_attention_scores` the weights (…, n, m). Without a key the value is the key.

    `attention_mask`, (batch, n, m) or fewer axes, is True where a query may attend; the masks that
    come with Keras's tensors and `use_causal_mask` narrow it. A query that may attend to nothing
    gets 0.

    >>> import numpy as np
    >>> keys, values = np.array([[[0.0], [3.0]]]), np.array([[[10.0], [20.0]]])
    >>> layer = Attention(score="gaussian")
    >>> out, alpha = layer([np.zeros((1, 1, 1)), values, keys], return_attention_scores=True)
    >>> to_numpy(alpha).round(3).tolist()
    [[[0.989..., 0.010...]]]
    """

    def __init__(
        self,
        score: ScoreLike | Config = "scaled_dot",
        weighting: WeightingLike | Config = "softmax",
        dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(score=score, weighting=weighting, **kwargs)
        self.dropout, self.seed = _fraction("dropout", dropout), seed
        self.seed_generator = keras.random.SeedGenerator(seed) if self.dropout else None

    def build(self, input_shape: Any) -> None:
        query, value, key = _three(input_shape)
        _check_shapes(query, value, key)
        self._build_score(query[-1], key[-1])

    def call(
        self,
        inputs: Any,
        mask: Any = None,
        inputs_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        query, value, key = _three(inputs)
        # Keras fills in `mask`, or `inputs_mask` where a second tensor is passed.
        mask = inputs_mask if mask is None else mask
        query_mask, value_mask, key_mask = _three([None] * 2 if mask is None else mask, "mask")
        rule = _mask(
            (*query.shape[:-1], key.shape[-2]),
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            causal=use_causal_mask,
        )
        dropout = self.dropout if training else 0.0
        found = self._attend(
            query, key, value, rule, dropout, self.seed_generator, return_attention_scores
        )
        return found if return_attention_scores else found[0]

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return previous_mask[0] if isinstance(previous_mask, list | tuple) else None

    def compute_output_shape(self, input_shape: Any) -> Shape:
        query, value, key = _three(input_shape)
        _check_shapes(query, value, key)
        return (*query[:-1], value[-1])

    def compute_output_spec(
        self, inputs: Any, *args: Any, return_attention_scores: bool = False, **kwargs: Any
    ) -> Any:
        query, value, key = (x.shape for x in _three(inputs))
        out = self.compute_output_shape([query, value, key])
        return _spec(self, out, (*query[:-1], key[-2]), return_attention_scores)

    def get_config(self) -> Config:
        return {**super().get_config(), "dropout": self.dropout, "seed": self.seed}


@keras.saving.register_keras_serializable("qkv")
class SelfAttention(Attention):
    """S = α(Q, K) V with Q = X W_Q, K = X W_K, V = X W_V: a sequence that asks itself.

    X (batch, n, d) → (batch, n, d_v); W_Q and W_K are (d, d_qk), W_V is (d, d_v). Both widths are
    d unless given. Masks are as in `Attention`.

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
        score: ScoreLike | Config = "scaled_dot",
        weighting: WeightingLike | Config = "softmax",
        dropout: float = 0.0,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        _count("d_qk", d_qk, optional=True)
        _count("d_v", d_v, optional=True)
        super().__init__(score=score, weighting=weighting, dropout=dropout, seed=seed, **kwargs)
        self.d_qk, self.d_v = d_qk, d_v
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)

    def build(self, input_shape: Any) -> None:
        d = _sequence("inputs", input_shape)[-1]
        d_qk, d_v = self.d_qk or d, self.d_v or d

        def matrix(name: str, width: int) -> Any:
            # A copy: one initializer gives the same numbers each time.
            fresh = keras.initializers.get(keras.initializers.serialize(self.kernel_initializer))
            regularizer = self.kernel_regularizer
            return self.add_weight(
                name=name, shape=(d, width), initializer=fresh, regularizer=regularizer
            )

        self.w_q, self.w_k = matrix("w_q", d_qk), matrix("w_k", d_qk)
        self.w_v = matrix("w_v", d_v)
        self._build_score(d_qk, d_qk)

    def call(
        self,
        inputs: Any,
        mask: Any = None,
        inputs_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        mask = inputs_mask if mask is None else mask
        return super().call(
            [ops.matmul(inputs, w) for w in (self.w_q, self.w_v, self.w_k)],
            mask=[mask, mask, None],
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
        )

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return previous_mask

    def compute_output_shape(self, input_shape: Any) -> Shape:
        shape = _sequence("inputs", input_shape)
        return (*shape[:-1], self.d_v or shape[-1])

    def compute_output_spec(
        self, inputs: Any, *args: Any, return_attention_scores: bool = False, **kwargs: Any
    ) -> Any:
        out = self.compute_output_shape(inputs.shape)
        return _spec(self, out, (*out[:-1], out[-2]), return_attention_scores)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "d_qk": self.d_qk,
            "d_v": self.d_v,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


@keras.saving.register_keras_serializable("qkv")
class MultiHeadAttention(_Layer, keras.layers.MultiHeadAttention):  # type: ignore[misc]
    """Σₕ S⁽ʰ⁾ W_O⁽ʰ⁾ + b, where S⁽ʰ⁾ = α(Q W_Q⁽ʰ⁾, K W_K⁽ʰ⁾) V W_V⁽ʰ⁾: many heads at once.

    query (batch, n, d), value and key (batch, m, ·) → (batch, n, d), and with
    `return_attention_scores` the weights (batch, heads, n, m).

    It is keras.layers.MultiHeadAttention, with its arguments and its weights, which move both ways,
    and with `score` and `weighting`, which all heads share. Two things differ: a query with nothing
    to attend to gets 0 before W_O, not an average, and `attention_axes` must be the one axis that
    a sequence has. `flash_attention` is not needed: `attend` takes the fastest engine that serves.

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
        score: ScoreLike | Config = "scaled_dot",
        weighting: WeightingLike | Config = "softmax",
        **kwargs: Any,
    ) -> None:
        _count("num_heads", num_heads)
        _count("key_dim", key_dim)
        _count("value_dim", value_dim, optional=True)
        _fraction("dropout", dropout)
        for size in output_shape if isinstance(output_shape, list | tuple) else (output_shape,):
            _count("output_shape", size, optional=True)
        axes = (attention_axes,) if isinstance(attention_axes, int) else attention_axes
        if axes is not None and tuple(axes) not in ((1,), (-2,)):
            raise ArgumentError(
                f"attention_axes must be None or 1, a sequence's one axis, not {attention_axes!r}: "
                "merge the others into the batch by keras.ops.reshape"
            )
        super().__init__(
            score=score,
            weighting=weighting,
            num_heads=num_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dropout=dropout,
            use_bias=use_bias,
            output_shape=output_shape,
            attention_axes=axes,
            **kwargs,
        )

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        query, value, key = _three([query_shape, value_shape, key_shape or value_shape])
        for name, shape in (("query", query), ("value", value), ("key", key)):
            _sequence(name, shape)
        _check_shapes(query, value, key)
        super().build(query, value, key)
        self._build_score(self.key_dim, self.key_dim)

    # The two places where keras.layers.MultiHeadAttention lets another attention in.

    def _compute_attention_mask(
        self,
        query: Array,
        value: Array,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> masks.Mask | None:
        return _mask(
            (query.shape[0], self.num_heads, query.shape[1], value.shape[1]),
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            causal=use_causal_mask,
            window=getattr(self, "_sliding_window", None),
        )

    def _compute_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        attention_mask: masks.Mask | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        **kwargs: Any,
    ) -> tuple[Array, Array | None]:
        query, key, value = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
        dropout = self.dropout if training else 0.0
        seeds = getattr(self._dropout_layer, "seed_generator", None)
        out, alpha = self._attend(
            query, key, value, attention_mask, dropout, seeds, return_attention_scores
        )
        return ops.transpose(out, (0, 2, 1, 3)), alpha

    def compute_output_spec(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        *args: Any,
        return_attention_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        shapes = [x.shape for x in (query, value, value if key is None else key)]
        out = self.compute_output_shape(*shapes)
        alpha = (shapes[0][0], self.num_heads, shapes[0][1], shapes[1][1])
        return _spec(self, out, alpha, return_attention_scores)


@keras.saving.register_keras_serializable("qkv")
class FeedForward(keras.Layer):  # type: ignore[misc]
    """y = f(x W₁ + b₁) W₂ + b₂, each row by itself: what follows attention in a transformer.

    x (…, d) → (…, d_out); W₁ (d, hidden), W₂ (hidden, d_out). d_out is d unless given. Dropout
    acts on the hidden numbers.

    >>> import numpy as np
    >>> layer = FeedForward(32, activation="gelu")
    >>> tuple(layer(np.ones((2, 5, 8))).shape)
    (2, 5, 8)
    """

    def __init__(
        self,
        hidden: int,
        d_out: int | None = None,
        activation: Any = "relu",
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        _count("hidden", hidden)
        _count("d_out", d_out, optional=True)
        _fraction("dropout", dropout)
        super().__init__(**kwargs)
        self.hidden, self.d_out, self.use_bias = hidden, d_out, use_bias
        self.dropout, self.seed = dropout, seed
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        d = _width("inputs", input_shape)

        def dense(name: str, units: int, activation: Any) -> Any:
            return keras.layers.Dense(
                units,
                activation=activation,
                use_bias=self.use_bias,
                name=name,
                dtype=self.dtype_policy,
                **self._settings(),
            )

        self.first = dense("first", self.hidden, self.activation)
        self.second = dense("second", self.d_out or d, None)
        self.drop = keras.layers.Dropout(self.dropout, seed=self.seed, dtype=self.dtype_policy)
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], self.hidden))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.second(self.drop(self.first(inputs), training=training))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        return (*input_shape[:-1], self.d_out or _width("inputs", input_shape))

    def _settings(self) -> Config:
        return {
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            **self._settings(),
            "hidden": self.hidden,
            "d_out": self.d_out,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "seed": self.seed,
        }


# Scores and weightings: their arrays, and how they are written into a layer's config.


def _arrays(record: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """Every array of the record with its name, in the order of `tree.leaves`."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if is_array(value):
            yield path + field.name, value
        elif dataclasses.is_dataclass(value):
            yield from _arrays(value, f"{path}{field.name}_")


def _on_host(record: Any) -> Any:
    """The same record with NumPy's arrays, whichever framework's they were."""
    for fw in {of(x) for _, x in _arrays(record)}:
        record = tree.map_arrays(fw, to_numpy, record)
    return record


def _start(x: Array) -> Callable[..., Array]:
    """An initializer that gives x."""
    return lambda shape, dtype=None: ops.convert_to_tensor(x, dtype=dtype)


def _written(thing: Any) -> Any:
    """A score or a weighting as JSON can hold it: its name and its numbers."""
    if thing is None or isinstance(thing, str | bool | int | float):
        return thing
    if isinstance(thing, Real):
        return float(thing)
    if is_array(thing):
        return {"dtype": str(to_numpy(thing).dtype), "values": to_numpy(thing).tolist()}
    if isinstance(thing, Function):
        return _written(thing.function)
    if dataclasses.is_dataclass(thing) and type(thing).__module__.startswith("qkv."):
        fields = [field.name for field in dataclasses.fields(thing) if field.init]
        numbers = {name: _written(getattr(thing, name)) for name in fields}
        return {"name": type(thing).__name__, "fields": numbers}
    return keras.saving.serialize_keras_object(thing)


def _read(room: Any, thing: Any) -> Any:
    """What `_written` wrote, as it was; anything else as it is. `room`: scores or weightings."""
    if not isinstance(thing, dict):
        return thing
    if "values" in thing:
        return np.asarray(thing["values"], thing["dtype"])
    if "name" not in thing:
        return keras.saving.deserialize_keras_object(thing)
    name, what = thing["name"], room.__name__.rpartition(".")[2].rstrip("s")
    known = {x: getattr(room, x) for x in room.__all__ if isinstance(getattr(room, x), type)}
    if name not in known:
        raise unknown(what, name, known)
    return known[name](**{field: _read(room, value) for field, value in thing["fields"].items()})


# Masks


def _mask(
    full: Shape,
    *,
    query_mask: Any,
    value_mask: Any,
    key_mask: Any,
    attention_mask: Any,
    causal: bool,
    window: int | None = None,
) -> masks.Mask | None:
    """Keras's masks as one, for scores of shape `full`, (batch, …, n, m)."""
    rules: list[masks.Mask] = [masks.causal] if causal else []
    if window is not None:
        rules.append(masks.window(window - 1))
    batch, *between, n, m = full
    ones = (1,) * len(between)
    for name, mask, due, shape in (
        ("query_mask", query_mask, (batch, n), (*ones, -1, 1)),
        ("value_mask", value_mask, (batch, m), (*ones, 1, -1)),
        ("key_mask", key_mask, (batch, m), (*ones, 1, -1)),
    ):
        if mask is not None:
            mask = _boolean(name, mask, due, exact=True)
            rules.append(masks.array(ops.reshape(mask, (ops.shape(mask)[0], *shape))))
    if attention_mask is not None:
        mask = _boolean("attention_mask", attention_mask, (batch, n, m), full)
        while 2 < len(mask.shape) < len(full):
            mask = ops.expand_dims(mask, -3)  # the heads
        rules.append(masks.array(mask))
    return reduce(and_, rules) if rules else None


def _boolean(name: str, mask: Any, *due: Shape, exact: bool = False) -> Array:
    """The mask as booleans, if its shape is due or broadcasts to what is."""
    mask = ops.convert_to_tensor(mask)
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if "float" in dtype:
        raise DtypeError(
            f"{name} is an array of {dtype}: pass booleans, True where a query may attend"
        )
    shape = tuple(mask.shape)
    if not any(_fits(shape, full, exact) for full in due):
        told = " or ".join(str(x) for x in dict.fromkeys(due))
        raise ShapeError(f"{name} must have the shape {told}, not {shape}")
    return ops.cast(mask, "bool")


def _fits(shape: Shape, full: Shape, exact: bool) -> bool:
    if len(shape) > len(full) or (exact and len(shape) < len(full)):
        return False
    sizes = zip(shape[::-1], full[::-1], strict=False)
    return all(a == b or a is None or b is None or (a == 1 and not exact) for a, b in sizes)


# What came, checked


def _three(given: Any, name: str = "inputs") -> tuple[Any, Any, Any]:
    """[query, value] or [query, value, key] as three."""
    listed = isinstance(given, list | tuple) and not any(isinstance(x, int) for x in given)
    if not listed or len(given) not in (2, 3):
        what = f"{len(given)} of them" if listed else type(given).__name__
        raise DtypeError(
            f"{name} must be a list, [query, value] or [query, value, key], not {what}"
        )
    query, value, *key = given
    return query, value, key[0] if key else value


def _check_shapes(query: Shape, value: Shape, key: Shape) -> None:
    for name, shape in (("query", query), ("value", value), ("key", key)):
        if len(shape) < 3:
            raise ShapeError(f"{name} must have the axes (batch, …, rows, width), not {shape}")
        _width(name, shape)
    if None not in (value[-2], key[-2]) and value[-2] != key[-2]:
        raise ShapeError(
            f"key and value must have one row each per pair, but key has {key[-2]} and value "
            f"{value[-2]}"
        )


def _sequence(name: str, shape: Shape) -> Shape:
    if len(shape) != 3:
        raise ShapeError(f"{name} must have the axes (batch, rows, width), not {tuple(shape)}")
    _width(name, shape)
    return tuple(shape)


def _width(name: str, shape: Shape) -> int:
    if shape[-1] is None:
        raise ShapeError(f"{name} must have a known width, its last axis, not {tuple(shape)}")
    return shape[-1]


def _count(name: str, value: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise DtypeError(f"{name} must be a whole number above 0, not {value!r}")
    if value < 1:
        raise ArgumentError(f"{name} must be a whole number above 0, not {value!r}")


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name} must be a number from 0 to 1, not {value!r}")
    if not 0 <= float(value) <= 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, not {value!r}")
    return float(value)


def _spec(layer: Any, out: Shape, alpha: Shape, both: bool) -> Any:
    """What a layer will give: the output and, if asked for, the weights."""
    shapes = (out, alpha) if both else (out,)
    specs = tuple(keras.KerasTensor(shape, dtype=layer.compute_dtype) for shape in shapes)
    return specs if both else specs[0]
