"""The frameworks under test: making arrays, and gradients as a user would take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from qkv.arrays import to_numpy


class NumPy:
    name = "numpy"
    dtypes: tuple[str, ...] = ("float16", "float32", "float64")
    gradients = False

    def make(self, x: Any, dtype: str = "float64") -> Any:
        x = np.asarray(x)
        return x.astype(dtype) if x.dtype.kind == "f" else x

    def grads(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        raise NotImplementedError


class Strict(NumPy):
    name = "strict"
    dtypes = ("float32", "float64")

    def make(self, x: Any, dtype: str = "float64") -> Any:
        import array_api_strict as xp

        return xp.asarray(super().make(x, dtype))


class Torch(NumPy):
    name = "torch"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    gradients = True

    def make(self, x: Any, dtype: str = "float64") -> Any:
        import torch

        x = torch.as_tensor(np.array(x))
        return x.to(getattr(torch, dtype)) if x.is_floating_point() else x

    def grads(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        import torch

        given = [x.clone().requires_grad_(x.is_floating_point()) for x in arrays]
        value = loss(*given)
        wanted = [x for x in given if x.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, allow_unused=True))
        out = [next(found) if x.requires_grad else None for x in given]
        return [_full(x, g) for x, g in zip(given, out, strict=True)]


class Jax(NumPy):
    name = "jax"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    gradients = True

    def make(self, x: Any, dtype: str = "float64") -> Any:
        import jax
        import jax.numpy as jnp

        jax.config.update("jax_enable_x64", True)
        x = jnp.asarray(np.asarray(x))
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def grads(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        import jax

        floating = [i for i, x in enumerate(arrays) if "float" in str(x.dtype)]

        def of_floats(*chosen: Any) -> Any:
            full = list(arrays)
            for i, x in zip(floating, chosen, strict=True):
                full[i] = x
            return loss(*full)

        found = jax.jit(jax.grad(of_floats, argnums=tuple(range(len(floating)))))(
            *(arrays[i] for i in floating)
        )
        out: list[Any] = [None] * len(arrays)
        for i, g in zip(floating, found, strict=True):
            out[i] = g
        return [_full(x, g) for x, g in zip(arrays, out, strict=True)]


class TensorFlow(NumPy):
    name = "tensorflow"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    gradients = True

    def make(self, x: Any, dtype: str = "float64") -> Any:
        import tensorflow as tf

        x = tf.constant(np.asarray(x))
        return tf.cast(x, dtype) if x.dtype.is_floating else x

    def grads(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch([x for x in arrays if x.dtype.is_floating])
            value = loss(*arrays)
        return [
            _full(x, g) for x, g in zip(arrays, tape.gradient(value, list(arrays)), strict=True)
        ]


class MXNet(NumPy):
    name = "mxnet"
    gradients = True

    def make(self, x: Any, dtype: str = "float64") -> Any:
        import mxnet as mx

        mx.npx.set_np()
        x = np.asarray(x)
        return mx.np.array(x, dtype=dtype if x.dtype.kind == "f" else x.dtype)

    def grads(self, loss: Callable[..., Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        from mxnet import autograd

        given = [x.copy() for x in arrays]
        for x in given:
            if x.dtype.kind == "f":
                x.attach_grad()
        with autograd.record():
            value = loss(*given)
        value.backward()
        return [_full(x, x.grad if x.dtype.kind == "f" else None) for x in given]


def _full(x: Any, gradient: Any) -> np.ndarray:
    if gradient is None:
        return np.zeros(tuple(x.shape))
    return to_numpy(gradient).astype("float64")


FRAMEWORKS = {kind.name: kind() for kind in (NumPy, Strict, Torch, Jax, TensorFlow, MXNet)}


def installed() -> list[str]:
    """The names of those that can be imported here."""
    module = {"strict": "array_api_strict"}
    return [name for name in FRAMEWORKS if find_spec(module.get(name, name))]
