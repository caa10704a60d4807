"""MXNet 2: `mx.np` arrays, in the standard's names, with `mx.autograd`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
from mxnet import autograd, util
from mxnet import np as mnp

from qkv.arrays.base import Framework, captured_arrays
from qkv.types import Array, Shape


class _Namespace:
    """The names of the array standard that qkv uses, as MXNet spells them."""

    bool, int32, int64 = numpy.bool_, numpy.int32, numpy.int64
    float16, float32, float64 = numpy.float16, numpy.float32, numpy.float64
    exp, log, sqrt, abs, tanh, pow = mnp.exp, mnp.log, mnp.sqrt, mnp.abs, mnp.tanh, mnp.power
    maximum, minimum, where = mnp.maximum, mnp.minimum, mnp.where
    isnan, isfinite = mnp.isnan, mnp.isfinite
    matmul, reshape, broadcast_to = mnp.matmul, mnp.reshape, mnp.broadcast_to
    logical_and, logical_or, logical_not = mnp.logical_and, mnp.logical_or, mnp.logical_not
    bitwise_xor, bitwise_and = mnp.bitwise_xor, mnp.bitwise_and
    floor_divide, remainder = mnp.floor_divide, mnp.remainder
    max, min, expand_dims = mnp.max, mnp.min, mnp.expand_dims

    @staticmethod
    def sum(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        return mnp.sum(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def any(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        return mnp.any(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def all(x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        return mnp.all(x, axis=axis, keepdims=keepdims)

    @staticmethod
    def astype(x: Array, dtype: Any) -> Array:
        # The gradient of a cast from booleans would be booleans, and MXNet dies of that.
        return (x.detach() if x.dtype == numpy.bool_ else x).astype(dtype)

    @staticmethod
    def asarray(x: Any, dtype: Any = None, device: Any = None) -> Array:
        return mnp.array(x, dtype=dtype, ctx=device)

    @staticmethod
    def full(shape: Shape, value: Any, dtype: Any, device: Any = None) -> Array:
        return mnp.full(shape, value, dtype=dtype, ctx=device)

    @staticmethod
    def arange(size: int, dtype: Any, device: Any = None) -> Array:
        return mnp.arange(size, dtype=dtype, ctx=device)

    @staticmethod
    def matrix_transpose(x: Array) -> Array:
        return mnp.swapaxes(x, -1, -2)

    @staticmethod
    def concat(arrays: Sequence[Array], axis: int) -> Array:
        return mnp.concatenate(list(arrays), axis=axis)

    @staticmethod
    def take(x: Array, at: Array, axis: int) -> Array:
        if x.dtype == numpy.bool_:  # mx.np.take knows no booleans
            return mnp.take(x.astype("int32"), at, axis=axis) != 0
        return mnp.take(x, at, axis=axis)

    @staticmethod
    def take_along_axis(x: Array, indices: Array, axis: int) -> Array:
        # mx.np has no take_along_axis with a gradient: one flat gather does it.
        width = x.shape[-1]
        lines = mnp.arange(x.size // (width or 1), dtype="int64").reshape((*x.shape[:-1], 1))
        return mnp.take(x.reshape(-1), lines * width + indices.astype("int64"))

    @staticmethod
    def argsort(x: Array, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
        # MXNet's sort is not stable, and positions carry no gradient: NumPy finds them.
        host = x.asnumpy()
        order = numpy.argsort(-host if descending else host, axis=axis, kind="stable")
        return mnp.array(order, dtype="int64", ctx=x.ctx)


class MXNet(Framework):
    name = "mxnet"
    xp = _Namespace
    gradients = True

    def to_numpy(self, x: Array) -> numpy.ndarray[Any, Any]:
        return x.asnumpy()  # type: ignore[no-any-return]

    def needs_gradient(self, arrays: Iterable[Array]) -> bool:
        return bool(autograd.is_recording())

    def constant(self, data: Any, like: Array, dtype: str) -> Array:
        return mnp.array(numpy.asarray(data), dtype=dtype, ctx=like.ctx)

    def device(self, x: Array) -> Any:
        return x.ctx

    def fresh_seed(self, like: Array) -> Any:
        return int(mnp.random.randint(0, 2**31 - 1))  # mx.random.seed governs it

    @contextmanager
    def quiet(self) -> Any:
        # The NumPy semantics are a thread's own, and the backward pass runs on another thread.
        with ExitStack() as stack:
            stack.enter_context(util.np_shape(True))
            stack.enter_context(util.np_array(True))
            yield

    def detach(self, x: Array) -> Array:
        return x.detach()

    def captures_unseen(self, function: Callable[..., Any]) -> bool:
        return captured_arrays(function, "mxnet")

    def vjp(
        self, function: Callable[..., Array], *args: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array | None, ...]]]:
        args = tuple(x.detach() for x in args)
        for x in args:
            x.attach_grad()
        with autograd.record():
            out = function(*args)

        def pull(gradient: Array) -> tuple[Array | None, ...]:
            out.backward(gradient)
            return tuple(x.grad for x in args)

        return out.detach(), pull

    def custom(
        self,
        forward: Callable[..., tuple[tuple[Array, ...], tuple[Array, ...]]],
        backward: Callable[..., tuple[Array | None, ...]],
        reference: Callable[..., tuple[Array, ...]],
        leaves: Sequence[Array],
    ) -> tuple[Array, ...]:
        # mx.autograd.Function drops every gradient behind the first input that wants none, so
        # all floating inputs go in as one vector, and the others stay outside.
        floating = [i for i, x in enumerate(leaves) if self.dtype(x).startswith("float")]
        packed = mnp.concatenate([leaves[i].reshape(-1) for i in floating])
        return _function(self, forward, backward, leaves, floating)(packed)  # type: ignore[no-any-return]


def _function(
    fw: MXNet, forward: Any, backward: Any, leaves: Sequence[Array], floating: list[int]
) -> Any:
    ends = numpy.cumsum([leaves[i].size for i in floating]).tolist()

    def unpack(packed: Array) -> list[Array]:
        out = [x.detach() for x in leaves]
        for i, start, end in zip(floating, [0, *ends[:-1]], ends, strict=True):
            out[i] = packed[start:end].reshape(leaves[i].shape)
        return out

    class Function(autograd.Function):  # type: ignore[misc]
        def forward(self, packed: Array) -> Any:
            self.leaves = unpack(packed)
            outputs, self.kept = forward(*self.leaves)
            return outputs

        def backward(self, *gradients: Array) -> Any:
            with fw.quiet():
                found = backward(self.leaves, self.kept, gradients)
                parts = [
                    mnp.zeros(leaves[i].size, dtype=leaves[i].dtype, ctx=leaves[i].ctx)
                    if found[i] is None
                    else found[i].reshape(-1)
                    for i in floating
                ]
                return mnp.concatenate(parts)

    def call(packed: Array) -> tuple[Array, ...]:
        out = Function()(packed)
        return tuple(out) if isinstance(out, list | tuple) else (out,)

    return call


FRAMEWORK = MXNet()
