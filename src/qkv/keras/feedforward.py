"""The feed-forward network of a transformer block."""

from __future__ import annotations

from typing import Any

import keras

from qkv.errors import validate_fraction, validate_optional_sizes, validate_sizes
from qkv.keras.attention import Config, KeywordCheckedLayer, init_keras_layer
from qkv.keras.axes import known_width
from qkv.util.types import Shape


@keras.saving.register_keras_serializable("qkv")
class FeedForward(KeywordCheckedLayer):
    """y = f(x W₁ + b₁) W₂ + b₂, applied to each row: the layer after attention in a transformer.

    x (…, d) → (…, d_out); W₁ (d, hidden), W₂ (hidden, d_out). d_out defaults to d. Dropout is
    applied to the hidden activations.

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
        validate_sizes(hidden=hidden)
        validate_optional_sizes(d_out=d_out)
        init_keras_layer(self, super().__init__, kwargs)
        self.hidden, self.d_out, self.use_bias = hidden, d_out, use_bias
        self.dropout, self.seed = validate_fraction("dropout", dropout), seed
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        d = known_width("inputs", input_shape)

        def make_dense(name: str, units: int, activation: Any) -> Any:
            return keras.layers.Dense(
                units,
                activation=activation,
                use_bias=self.use_bias,
                name=name,
                dtype=self.dtype_policy,
                **self._serialize_settings(),
            )

        self.first = make_dense("first", self.hidden, self.activation)
        self.second = make_dense("second", self.d_out or d, None)
        self.drop = keras.layers.Dropout(self.dropout, seed=self.seed, dtype=self.dtype_policy)
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], self.hidden))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.second(self.drop(self.first(inputs), training=training))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        return (*input_shape[:-1], self.d_out or known_width("inputs", input_shape))

    def _serialize_settings(self) -> Config:
        return {
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            **self._serialize_settings(),
            "hidden": self.hidden,
            "d_out": self.d_out,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "seed": self.seed,
        }
