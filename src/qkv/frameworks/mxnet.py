"""MXNet 2: `mx.np` arrays with `mx.autograd`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
from mxnet import autograd, gluon, npx, util
from mxnet import np as mnp
from mxnet._deferred_compute import is_deferred_compute
from mxnet.base import MXNetError

from qkv.errors import FrameworkError
from qkv.frameworks import mxnet_namespace
from qkv.frameworks.base import (
    BackwardFunction,
    ForwardFunction,
    Framework,
    ReferenceFunction,
    captures_arrays,
)
from qkv.util.types import Array, ArrayFunction, Arrays, Gradients, PullBack


class MXNet(Framework):
    name = "mxnet"
    xp = mxnet_namespace
    has_gradients = True

    def sigmoid(self, x: Array) -> Array:
        return npx.sigmoid(x)

    def as_plain_array(self, x: Array, name: str = "x") -> Array:
        if isinstance(x, gluon.Parameter):
            return x.data()
        if not isinstance(x, mnp.ndarray):
            raise FrameworkError(f"{name} is an mx.nd array: pass {name}.as_np_ndarray()")
        if is_deferred_compute():
            raise FrameworkError(
                f"{name} is a placeholder of a hybridized block, and MXNet cannot trace qkv: call "
                "block.hybridize(False)"
            )
        return x

    def to_numpy(self, x: Array) -> numpy.ndarray[Any, Any]:
        return x.asnumpy()  # type: ignore[no-any-return]

    def needs_gradient(self, arrays: Iterable[Array]) -> bool:
        return bool(autograd.is_recording()) and any(_is_recorded(x) for x in arrays)

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        return mnp.array(numpy.asarray(data), dtype=dtype, device=like.device)

    def draw_seed(self, like: Array) -> Any:
        return int(mnp.random.randint(0, 2**31 - 1))  # follows mx.random.seed

    @contextmanager
    def use_own_settings(self) -> Any:
        # NumPy semantics are set per thread, and the backward pass runs on another thread.
        with util.np_shape(True), util.np_array(True):
            yield

    def detach(self, x: Array) -> Array:
        return x.detach()

    def with_zero_gradient(self, x: Array) -> Array:
        # The gradient through an operation with an empty result is uninitialized in MXNet.
        if not (_is_floating(x) and self.needs_gradient([x])):
            return x
        return self.custom_gradient(lambda x: ((x,), ()), lambda *_: (None,), lambda x: (x,), [x])[
            0
        ]

    def may_capture_arrays(self, function: Callable[..., Any]) -> bool:
        return captures_arrays(function, "mxnet")

    def vjp(self, function: ArrayFunction, *args: Array) -> tuple[Array, PullBack]:
        args = tuple(x.detach() for x in args)
        for x in args:
            if _is_floating(x):
                x.attach_grad()
        with autograd.record():
            out = function(*args)

        def pull_back(gradient: Array) -> Gradients:
            if not _is_recorded(out):
                return (None,) * len(args)
            out.backward(gradient)  # autograd.grad would return arrays of another class
            return tuple(x.grad if _is_floating(x) else None for x in args)

        return out.detach(), pull_back

    def custom_gradient(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        # mx.autograd.Function drops all gradients after the first input without one. So all
        # floating inputs are packed into one vector, and the others are captured.
        floating = [i for i, x in enumerate(leaves) if _is_floating(x)]
        packed = _pack_vector([leaves[i] for i in floating])
        out = _build_function(self, forward, backward, leaves, floating)(packed)
        return tuple(out) if isinstance(out, list | tuple) else (out,)


def _is_floating(x: Array) -> bool:
    return bool(numpy.issubdtype(x.dtype, numpy.floating))


def _is_recorded(x: Array) -> bool:
    """Return whether x is, or was computed from, an array that needs a gradient."""
    try:
        autograd.get_symbol(x)
    except MXNetError:
        return False
    return True


def _pack_vector(arrays: Sequence[Array]) -> Array:
    """Return all elements as one vector, with a final 0 so that it is not empty."""
    widest = max((x.dtype for x in arrays), key=lambda dtype: dtype.itemsize)
    parts = [x.reshape(-1).astype(widest, copy=False) for x in arrays]
    return mnp.concatenate([*parts, mnp.zeros(1, dtype=widest, device=arrays[0].device)])


def _build_function(
    fw: MXNet, forward: Any, backward: Any, leaves: Sequence[Array], floating: list[int]
) -> Any:
    ends = numpy.cumsum([leaves[i].size for i in floating]).tolist()

    def unpack_vector(packed: Array) -> list[Array]:
        out = [x.detach() for x in leaves]
        for i, start, end in zip(floating, [0, *ends[:-1]], ends, strict=True):
            part = packed[start:end].reshape(leaves[i].shape)
            out[i] = part.astype(leaves[i].dtype, copy=False)
        return out

    class Function(autograd.Function):  # type: ignore[misc]
        def forward(self, packed: Array) -> Any:
            self.leaves = unpack_vector(packed)
            outputs, self.saved = forward(*self.leaves)
            return outputs

        def backward(self, *gradients: Array) -> Any:
            with fw.use_own_settings():
                slopes = backward(self.leaves, self.saved, gradients)
                pairs = [(leaves[i], slopes[i]) for i in floating]
                return _pack_vector([mnp.zeros_like(x) if g is None else g for x, g in pairs])

    return Function()


FRAMEWORK = MXNet()
