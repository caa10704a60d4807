"""JAX: forward-mode derivatives from a hand-written backward pass.

JAX differentiates in forward mode, ẏ = J ẋ, and transposes J for gradients, x̄ = Jᵀ ȳ. Our backward
pass computes Jᵀ ȳ in blocks. So J is a primitive: its transpose rule is the backward pass, and its
value is the transpose of the backward pass, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qkv.util.types import Array, Arrays

LinearFunction = Callable[[Any, Arrays], Arrays]
"""A function of (residuals, arrays) that is linear in the tuple of arrays."""


def jvp_from_vjp(pull: LinearFunction, held: Any, along: Arrays, outputs: Arrays) -> Arrays:
    """Return J · along, where pull(held, gradients of the outputs) is Jᵀ · gradients.

    >>> import jax.numpy as jnp
    >>> w, x = jnp.eye(2) * 3, jnp.ones(2)
    >>> [y.tolist() for y in jvp_from_vjp(lambda w, y: (w.T @ y[0],), w, (x,), (x,))]
    [[3.0, 3.0]]
    """
    flat, tree = jax.tree.flatten(held)
    like = tuple(jax.typeof(x) for x in outputs)

    def pull_back(held: Sequence[Array], gradients: Arrays) -> Arrays:
        return pull(jax.tree.unflatten(tree, held), gradients)

    def push_forward(held: Sequence[Array], along: Arrays) -> Arrays:
        turn = jax.linear_transpose(lambda *gradients: pull_back(held, gradients), *like)
        return tuple(turn(along))

    return tuple(_JACOBIAN.bind(*flat, *along, push=push_forward, pull=pull_back, count=len(flat)))


def _jacobian_impl(
    *arrays: Array, push: LinearFunction, pull: LinearFunction, count: int
) -> Arrays:
    return push(arrays[:count], arrays[count:])


def _jacobian_shapes(*arrays: Array, **parameters: Any) -> Any:
    def run(*arrays: Array) -> Arrays:
        return _jacobian_impl(*arrays, **parameters)

    return jax.make_jaxpr(run)(*arrays).out_avals


def _jacobian_jvp(
    arrays: Sequence[Array],
    slopes: Sequence[Any],
    *,
    push: LinearFunction,
    pull: LinearFunction,
    count: int,
) -> tuple[Arrays, Any]:
    """Differentiate: by JAX's rules in the residuals, by linearity in the other arrays."""
    parameters = {"push": push, "pull": pull, "count": count}
    out = _JACOBIAN.bind(*arrays, **parameters)
    held, along = arrays[:count], arrays[count:]
    total = None
    if any(type(x) is not ad.Zero for x in slopes[count:]):
        total = _JACOBIAN.bind(*held, *map(ad.instantiate_zeros, slopes[count:]), **parameters)
    moving = [i for i in range(count) if type(slopes[i]) is not ad.Zero]
    if moving:

        def push_at(*values: Array) -> Arrays:
            full = list(held)
            for i, x in zip(moving, values, strict=True):
                full[i] = x
            return push(full, tuple(along))

        new = jax.jvp(push_at, [held[i] for i in moving], [slopes[i] for i in moving])[1]
        total = new if total is None else [a + b for a, b in zip(total, new, strict=True)]
    return out, [ad.Zero.from_primal_value(x) for x in out] if total is None else total


def _jacobian_transpose(
    gradients: Sequence[Any], *arrays: Any, push: LinearFunction, pull: LinearFunction, count: int
) -> list[Any]:
    held, along = arrays[:count], arrays[count:]
    unknown = [i for i, x in enumerate(along) if ad.is_undefined_primal(x)]

    # The known entries of `along` are zero: J is linear in the undefined ones.
    def pull_undefined(held: Any, gradients: Arrays) -> Arrays:
        pulled = pull(held, gradients)
        return tuple(pulled[i] for i in unknown)

    def push_undefined(held: Any, values: Arrays) -> Arrays:
        kinds = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in along]
        full = [ad.instantiate_zeros(ad.Zero(kind)) for kind in kinds]
        for i, x in zip(unknown, values, strict=True):
            full[i] = x
        return push(held, tuple(full))

    gradients = [ad.instantiate_zeros(x) for x in gradients]
    pulled = iter(
        _JACOBIAN.bind(*held, *gradients, push=pull_undefined, pull=push_undefined, count=count)
    )
    return [None] * count + [next(pulled) if i in unknown else None for i in range(len(along))]


def _batch_jacobian_rule(
    arrays: Sequence[Array],
    axes: Sequence[Any],
    *,
    push: LinearFunction,
    pull: LinearFunction,
    count: int,
) -> tuple[Arrays, list[int]]:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)

    def batch_axis_first(x: Array, axis: int | None) -> Array:
        if axis is None:
            return jnp.broadcast_to(x[None], (size, *x.shape))
        return jnp.moveaxis(x, axis, 0)

    along = [batch_axis_first(*pair) for pair in zip(arrays[count:], axes[count:], strict=True)]
    each = (tuple(axes[:count]), 0)

    def vmap_linear(function: LinearFunction) -> LinearFunction:
        return lambda held, along: jax.vmap(function, each)(tuple(held), tuple(along))

    parameters = {"push": vmap_linear(push), "pull": vmap_linear(pull), "count": count}
    out = _JACOBIAN.bind(*arrays[:count], *along, **parameters)
    return out, [0] * len(out)


_JACOBIAN = Primitive("attention_jacobian")
_JACOBIAN.multiple_results = True
_JACOBIAN.def_impl(_jacobian_impl)
_JACOBIAN.def_abstract_eval(_jacobian_shapes)
ad.primitive_jvps[_JACOBIAN] = _jacobian_jvp
ad.primitive_transposes[_JACOBIAN] = _jacobian_transpose
batching.primitive_batchers[_JACOBIAN] = _batch_jacobian_rule
mlir.register_lowering(_JACOBIAN, mlir.lower_fun(_jacobian_impl, multiple_results=True))
