"""JAX's transforms, each as one check in the form of tests/transforms.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.transforms import Check, Function, Make, N


def _close(got: Any, want: Any, atol: float = 1e-9) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-7)


def _loss(function: Function, make: Make) -> tuple[Function, list[Any]]:
    """Σ output · along as a function of the arrays that have a derivative, and these."""
    inputs = make(N)
    floats = [x for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
    remaining = inputs[len(floats) :]
    shape = jax.eval_shape(function, *inputs)
    along = jnp.cos(jnp.arange(shape.size, dtype=shape.dtype)).reshape(shape.shape)
    return lambda *moved: (function(*moved, *remaining) * along).sum(), floats


def _slopes(loss: Function, inputs: list[Any]) -> list[Any]:
    """The gradients by central differences along each array's own direction."""
    step, result = 1e-5, []
    loss = jax.jit(loss)
    for i, x in enumerate(inputs):
        along = jnp.sin(3 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
        ends = [[*inputs[:i], x + sign * along, *inputs[i + 1 :]] for sign in (step, -step)]
        result.append((along, (loss(*ends[0]) - loss(*ends[1])) / (2 * step)))
    return result


def _jit(function: Function, make: Make) -> None:
    _close(jax.jit(function)(*make(N)), function(*make(N)))


def _jit_lengths(function: Function, make: Make) -> None:
    compiled = jax.jit(function)
    for n in (N, N + 1, N + 9):
        _close(compiled(*make(n)), function(*make(n)))


def _vmap(function: Function, make: Make) -> None:
    """Each array mapped over alone, by another axis, and all together."""
    inputs = make(N)
    many = [[x * (1 + i / 4) if "float" in str(x.dtype) else x for x in inputs] for i in range(3)]
    stacked = [jnp.stack(x) for x in zip(*many, strict=True)]
    plain = jax.jit(function)
    _close(jax.jit(jax.vmap(function))(*stacked), jnp.stack([plain(*x) for x in many]))
    for i in range(len(inputs)):
        axes = [None] * len(inputs)
        axes[i] = 1
        mixed = [*inputs[:i], jnp.moveaxis(stacked[i], 0, 1), *inputs[i + 1 :]]
        want = [plain(*inputs[:i], x[i], *inputs[i + 1 :]) for x in many]
        _close(jax.jit(jax.vmap(function, tuple(axes)))(*mixed), jnp.stack(want))


def _per_sample(function: Function, make: Make) -> None:
    loss, (first, *others) = _loss(function, make)
    samples = jnp.stack([first, first * 0.5, -first])
    slopes = jax.jit(jax.grad(loss, tuple(range(1, 1 + len(others)))))
    actual = jax.jit(jax.vmap(slopes, (0, *[None] * len(others))))(samples, *others)
    want = [slopes(sample, *others) for sample in samples]
    _close(actual, [jnp.stack(x) for x in zip(*want, strict=True)])


def _grad(function: Function, make: Make) -> None:
    loss, inputs = _loss(function, make)
    actual = jax.jit(jax.grad(loss, tuple(range(len(inputs)))))(*inputs)
    for slope, (along, want) in zip(actual, _slopes(loss, inputs), strict=True):
        _close((slope * along).sum(), want, 1e-6)


def _jvp(function: Function, make: Make) -> None:
    """Forwards what the gradients say, along all arrays and along one."""
    loss, inputs = _loss(function, make)
    value, slopes = jax.jit(jax.value_and_grad(loss, tuple(range(len(inputs)))))(*inputs)
    tangents = [jnp.cos(x) for x in inputs]
    result, along = jax.jit(lambda *x: jax.jvp(loss, x[: len(inputs)], x[len(inputs) :]))(
        *inputs, *tangents
    )
    _close(result, value)
    _close(along, sum((a * b).sum() for a, b in zip(slopes, tangents, strict=True)))
    push = jax.linearize(lambda x: loss(x, *inputs[1:]), inputs[0])[1]
    _close(push(tangents[0]), (slopes[0] * tangents[0]).sum())


def _jacobian(function: Function, make: Make) -> None:
    """Forwards as backwards."""
    actual, want = (jax.jit(turn(function))(*make(N)) for turn in (jax.jacfwd, jax.jacrev))
    _close(actual, want)


def _hessian(function: Function, make: Make) -> None:
    """Forwards over backwards, and the gradient of a gradient."""
    loss, inputs = _loss(function, make)
    first, *others = inputs
    along = jnp.cos(first)
    slope = jax.jit(jax.grad(loss))
    step = 1e-5
    want = (slope(first + step * along, *others) - slope(first - step * along, *others)) / 2 / step
    push = jax.jit(lambda x: jax.jvp(lambda x: slope(x, *others), (x,), (along,))[1])
    _close(push(first), want, 1e-5)
    pull = jax.jit(jax.grad(lambda x: (slope(x, *others) * along).sum()))
    _close(pull(first), want, 1e-5)


def _checkpoint(function: Function, make: Make) -> None:
    loss, inputs = _loss(function, make)
    every = tuple(range(len(inputs)))
    actual, want = (jax.jit(jax.grad(f, every))(*inputs) for f in (jax.checkpoint(loss), loss))
    _close(actual, want)


def _scan(function: Function, make: Make) -> None:
    """The query goes round three times; the gradient of all steps."""
    query, *others = make(N)

    def once(x: Any) -> Any:
        return function(x, *others)[..., : query.shape[-1]]

    def looped(query: Any) -> Any:
        return jax.lax.scan(lambda x, _: (once(x), None), query, length=3)[0].sum()

    def unrolled(query: Any) -> Any:
        for _ in range(3):
            query = once(query)
        return query.sum()

    actual, want = (jax.jit(jax.value_and_grad(f))(query) for f in (looped, unrolled))
    _close(actual, want)


def _export(function: Function, make: Make) -> None:
    program = jax.export.export(jax.jit(function))(*make(N))
    inputs = [x + 0.1 if "float" in str(x.dtype) else x for x in make(N)]
    again = jax.export.deserialize(program.serialize())
    _close(again.call(*inputs), function(*inputs))


def _strict(function: Function, make: Make) -> None:
    """Where the caller forbids himself to broadcast or to widen."""
    loss, inputs = _loss(function, make)
    want = jax.jit(jax.value_and_grad(loss))(*inputs)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        _close(jax.jit(jax.value_and_grad(loss))(*inputs), want)
        _close(function(*make(N)), jax.jit(function)(*make(N)))


def _debug_nans(function: Function, make: Make) -> None:
    loss, inputs = _loss(function, make)
    want = jax.jit(jax.value_and_grad(loss))(*inputs)
    with jax.debug_nans(True):
        _close(jax.jit(jax.value_and_grad(loss))(*inputs), want)
        _close(function(*make(N)), jax.jit(function)(*make(N)))


JAX: dict[str, Check] = {
    "jit": _jit,
    "jit, new lengths": _jit_lengths,
    "vmap": _vmap,
    "vmap of grad": _per_sample,
    "grad": _grad,
    "jvp": _jvp,
    "jacfwd": _jacobian,
    "hessian": _hessian,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "export": _export,
    "strict promotion": _strict,
    "debug_nans": _debug_nans,
}
