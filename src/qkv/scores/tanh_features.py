"""Evaluates the factor functions of `tanh_factors.HiddenUnits` on arrays of any framework.

The functions have hand-written gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkv.frameworks import get_framework
from qkv.scores.tanh_factors import HalfFactors, HiddenUnits, UnitGroup
from qkv.util.types import Array


def evaluate_features(units: HiddenUnits, side: int, x: Array, v: Array | None = None) -> Array:
    """Return fₕⱼ(xₕ), or vₕ fₕⱼ(xₕ), for all units h and products j: (…, r, h) → (…, r, w).

    >>> import numpy as np
    >>> from qkv.scores.tanh_factors import build_units
    >>> both = build_units([1.0], [1.0], 1e-9)
    >>> f, g = (evaluate_features(both, side, np.array([[0.3]])) for side in (0, 1))
    >>> np.allclose(f @ g.T, np.tanh(0.6))
    True
    """
    fw = get_framework(x)
    leaves = [x] if v is None else [x, v]

    def rows_last(made: Array) -> Array:
        return fw.xp.reshape(fw.xp.matrix_transpose(made), (*x.shape[:-1], -1))

    def concat_features(*arrays: Array) -> tuple[Array]:
        return (rows_last(fw.xp.concat(_features_by_group(units, side, *arrays), axis=0)),)

    def write_features(*arrays: Array) -> tuple[tuple[Array], tuple[()]]:
        return (rows_last(_write_features(units, side, *arrays)),), ()

    def backward(
        arrays: Sequence[Array], saved: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Array, ...]:
        return _feature_gradients(units, side, gradients[0], *arrays)

    if not _is_writable(x):
        return concat_features(*leaves)[0]
    if not fw.needs_gradient(leaves):
        return write_features(*leaves)[0][0]
    return fw.custom_gradient(write_features, backward, concat_features, leaves)[0]


def _is_writable(x: Array) -> bool:
    fw = get_framework(x)
    on_host = fw.name == "numpy" or (fw.name == "torch" and x.device.type == "cpu")
    return on_host and not fw.is_traced(x)


def _scale_units(units: HiddenUnits, side: int, x: Array) -> Array:
    """Return x / range as one row for each unit, (h, 1, r), in the order of the groups."""
    fw = get_framework(x)
    flat = fw.xp.matrix_transpose(fw.xp.reshape(x, (-1, x.shape[-1])))
    flat = flat * fw.array_from_host(1 / units.input_ranges[side][:, None], x, fw.dtype_name(x))
    return _in_group_order(units, flat)[:, None, :]


def _in_group_order(units: HiddenUnits, x: Array) -> Array:
    fw = get_framework(x)
    return fw.xp.take(x, fw.array_from_host(np.array(units.order), x, "int32"), axis=0)


def _half_weights(half: HalfFactors, like: Array, v: Array | None) -> Array:
    fw = get_framework(like)
    weights = fw.array_from_host(half.weights, like, fw.dtype_name(like))
    return weights if v is None else weights * v


def _features_by_group(
    units: HiddenUnits, side: int, x: Array, v: Array | None = None
) -> list[Array]:
    """Return the values (·, r) of the functions, for each half of each group."""
    xp, flat = get_framework(x).xp, _scale_units(units, side, x)
    basis = _chebyshev_basis(flat * flat * 2.0 - 1.0, _max_order_count(units.groups, side))
    by = None if v is None else _in_group_order(units, xp.reshape(v, (-1, 1, 1)))
    made = []
    for group in units.groups:
        mine = slice(group.start, group.end)
        for half in group.halves[side]:
            weights = _half_weights(half, flat, None if by is None else by[mine, ...])
            values = xp.matmul(weights, basis[mine, : half.weights.shape[-1], :])
            values = values * flat[mine, ...] if half.odd else values
            made.append(xp.reshape(values, (-1, flat.shape[-1])))
    return made


def _max_order_count(groups: Sequence[UnitGroup], side: int) -> int:
    """Return the largest number of Chebyshev polynomials that a function of the groups has."""
    return max((half.weights.shape[-1] for g in groups for half in g.halves[side]), default=1)


def _chebyshev_basis(y: Array, count: int) -> Array:
    """Return T₀(y), T₁(y), …, (h, 1, r) → (h, count, r), by Tₖ₊₁ = 2y Tₖ − Tₖ₋₁."""
    terms = [y * 0.0 + 1.0, y]
    twice = y + y
    while len(terms) < count:
        terms.append(twice * terms[-1] - terms[-2])
    return get_framework(y).xp.concat(terms[:count], axis=1)


# In-place evaluation, one group at a time


class _GroupBasis:
    """The Chebyshev polynomials of one group at x (u, 1, r). All groups share one buffer."""

    def __init__(self, flat: Array, groups: Sequence[UnitGroup], side: int) -> None:
        self.xp, self.flat, self.side = get_framework(flat).xp, flat, side
        units = max((group.end - group.start for group in groups), default=0)
        shape = (units, max(_max_order_count(groups, side), 2), flat.shape[-1])
        self.buffer = self.xp.empty(shape, dtype=flat.dtype)

    def load_group(self, group: UnitGroup) -> None:
        self.x = x = self.flat[group.start : group.end]
        self.basis = basis = self.buffer[: group.end - group.start]
        basis[:, :1] = 1.0
        basis[:, 1:2] = x * x * 2.0 - 1.0
        known, orders = 2, _max_order_count([group], self.side)
        while known < orders:  # Tₖ₊ₛ = 2 Tₛ Tₖ − Tₖ₋ₛ, for all known k at once
            s = known // 2
            end = min(known + s, orders)
            new, old = basis[:, known:end], basis[:, known - 2 * s : end - 2 * s]
            self.xp.multiply(basis[:, known - s : end - s], 2.0 * basis[:, s : s + 1], out=new)
            new -= old
            known = end

    def evaluate_half(self, half: HalfFactors, weights: Array, out: Array | None = None) -> Array:
        """Return the functions of one half, (u, J, r)."""
        made = self.xp.matmul(weights, self.basis[:, : weights.shape[-1]], out=out)
        if half.odd:
            made *= self.x
        return made


def _write_features(units: HiddenUnits, side: int, x: Array, v: Array | None = None) -> Array:
    """Return all functions (w, r)."""
    xp, flat = get_framework(x).xp, _scale_units(units, side, x)
    by = None if v is None else _in_group_order(units, xp.reshape(v, (-1, 1, 1)))
    pieces = _GroupBasis(flat, units.groups, side)
    out = xp.empty((units.width, flat.shape[-1]), dtype=flat.dtype)
    end = 0
    for group in units.groups:
        pieces.load_group(group)
        for half in group.halves[side]:
            weights = _half_weights(half, flat, None if by is None else by[group.start : group.end])
            start, end = end, end + weights.shape[0] * weights.shape[1]
            place = out[start:end].reshape(*weights.shape[:2], -1)
            pieces.evaluate_half(half, weights, place)
    return out


def _feature_gradients(
    units: HiddenUnits, side: int, gradient: Array, x: Array, v: Array | None = None
) -> tuple[Array, ...]:
    """Return the gradients of x (…, r, h) and, if given, of v (h,), from that of the output."""
    fw, flat = get_framework(x), _scale_units(units, side, x)
    xp = fw.xp
    along = xp.matrix_transpose(xp.reshape(gradient, (-1, units.width)))
    by = None if v is None else _in_group_order(units, xp.reshape(v, (-1, 1, 1)))
    pieces = _GroupBasis(flat, units.groups, side)
    to_x = fw.full((flat.shape[0], flat.shape[-1]), 0.0, flat)
    to_v = fw.full((flat.shape[0],), 0.0, flat)
    end = 0
    for group, slope in zip(units.groups, units.derivative_groups, strict=True):
        pieces.load_group(group)
        mine = slice(group.start, group.end)
        for half, steep in zip(group.halves[side], slope.halves[side], strict=True):
            weights = _half_weights(steep, flat, None if by is None else by[mine])
            start, end = end, end + weights.shape[0] * weights.shape[1]
            part = along[start:end].reshape(*weights.shape[:2], -1)
            to_x[mine] += xp.sum(pieces.evaluate_half(steep, weights) * part, axis=1)
            if by is not None:
                values = pieces.evaluate_half(half, _half_weights(half, flat, None))
                to_v[mine] += xp.sum(values * part, axis=(1, 2))
    back = fw.array_from_host(np.argsort(units.order), flat, "int32")
    to_x, to_v = (xp.take(y, back, axis=0) for y in (to_x, to_v))
    to_x = to_x * fw.array_from_host(
        1 / units.input_ranges[side][:, None], flat, fw.dtype_name(flat)
    )
    to_x = xp.reshape(xp.matrix_transpose(to_x), x.shape)
    return (to_x,) if v is None else (to_x, xp.reshape(to_v, v.shape))
