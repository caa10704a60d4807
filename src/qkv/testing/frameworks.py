"""The frameworks under test: how to create arrays and compute gradients as a user would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from qkv.frameworks import to_numpy


class NumPy:
    name = "numpy"
    dtypes: tuple[str, ...] = ("float16", "float32", "float64")
    has_gradients = False

    def make_array(self, x: Any, dtype: str = "float64") -> Any:
        x = np.asarray(x)
        return x.astype(dtype) if x.dtype.kind == "f" else x

    def compute_gradients(
        self, loss: Callable[..., Any], arrays: Sequence[Any]
    ) -> list[np.ndarray]:
        """Return the gradient of each array; 0 for arrays that are not floats."""
        at = [i for i, x in enumerate(arrays) if "float" in str(x.dtype)]

        def loss_of_floats(*float_arrays: Any) -> Any:
            full = dict(enumerate(arrays)) | dict(zip(at, float_arrays, strict=True))
            return loss(*full.values())

        gradients = dict(
            zip(at, self.gradients_of_floats(loss_of_floats, [arrays[i] for i in at]), strict=True)
        )
        return [_gradient_or_zeros(x, gradients.get(i)) for i, x in enumerate(arrays)]

    def gradients_of_floats(self, loss: Callable[..., Any], floats: Sequence[Any]) -> Sequence[Any]:
        """Return the gradient of each array, or None for an array without one."""
        raise NotImplementedError


class Strict(NumPy):
    name = "array_api_strict"
    dtypes = ("float32", "float64")

    def make_array(self, x: Any, dtype: str = "float64") -> Any:
        import array_api_strict as xp

        return xp.asarray(super().make_array(x, dtype))


class Torch(NumPy):
    name = "torch"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    has_gradients = True

    def make_array(self, x: Any, dtype: str = "float64") -> Any:
        import torch

        x = torch.as_tensor(np.array(x))
        return x.to(getattr(torch, dtype)) if x.is_floating_point() else x

    def gradients_of_floats(self, loss: Callable[..., Any], floats: Sequence[Any]) -> Sequence[Any]:
        import torch

        inputs = [x.clone().requires_grad_() for x in floats]
        return torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)  # type: ignore[no-any-return]


class Jax(NumPy):
    name = "jax"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    has_gradients = True

    def make_array(self, x: Any, dtype: str = "float64") -> Any:
        import jax
        import jax.numpy as jnp

        jax.config.update("jax_enable_x64", True)
        x = jnp.asarray(np.asarray(x))
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def gradients_of_floats(self, loss: Callable[..., Any], floats: Sequence[Any]) -> Sequence[Any]:
        import jax

        return jax.jit(jax.grad(loss, argnums=tuple(range(len(floats)))))(*floats)  # type: ignore[no-any-return]


class TensorFlow(NumPy):
    name = "tensorflow"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    has_gradients = True

    def make_array(self, x: Any, dtype: str = "float64") -> Any:
        import tensorflow as tf

        x = tf.constant(np.asarray(x))
        return tf.cast(x, dtype) if x.dtype.is_floating else x

    def gradients_of_floats(self, loss: Callable[..., Any], floats: Sequence[Any]) -> Sequence[Any]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(floats)
            value = loss(*floats)
        return tape.gradient(value, list(floats))  # type: ignore[no-any-return]


class MXNet(NumPy):
    name = "mxnet"
    has_gradients = True

    def make_array(self, x: Any, dtype: str = "float64") -> Any:
        import mxnet as mx

        mx.npx.set_np()
        x = np.asarray(x)
        return mx.np.array(x, dtype=dtype if x.dtype.kind == "f" else x.dtype)

    def gradients_of_floats(self, loss: Callable[..., Any], floats: Sequence[Any]) -> Sequence[Any]:
        from mxnet import autograd

        inputs = [x.copy() for x in floats]
        for x in inputs:
            x.attach_grad()
        with autograd.record():
            value = loss(*inputs)
        value.backward()
        return [x.grad for x in inputs]


def _gradient_or_zeros(x: Any, gradient: Any) -> np.ndarray:
    if gradient is None:
        return np.zeros(tuple(x.shape))
    return to_numpy(gradient).astype("float64")


FRAMEWORKS = {kind.name: kind() for kind in (NumPy, Strict, Torch, Jax, TensorFlow, MXNet)}


def installed_frameworks() -> list[str]:
    """Return the names of the frameworks that are installed."""
    return [name for name in FRAMEWORKS if find_spec(name)]
