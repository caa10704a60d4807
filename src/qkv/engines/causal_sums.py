"""Causal sums of the linear engine: Σ_{j ≤ i} (φ(qᵢ)·ψ(kⱼ)) vⱼ in O(n), exactly, by chunks.

Within a chunk of queries the scores are computed as they are. The chunks before it are one matrix
Σ ψ(k) vᵀ, a cumulative sum over the chunks. Weights may decay with the distance.
"""

from __future__ import annotations

import math
from typing import Any

from qkv.frameworks import get_framework, is_array
from qkv.util.types import Array

MIN_CHUNK = 64


def chunk_size(width: int, value_width: int) -> int:
    """Return the queries of a chunk, so that the sums need no more memory than the vectors."""
    size = MIN_CHUNK
    while size < min(width, value_width):
        size *= 2
    return size


def sum_causally(
    query: Array, key: Array, value: Array, size: int, rate: Any = None
) -> tuple[Array, Array]:
    """Return the sums of each query (…, n, d_v), and Σ ψ(k) vᵀ (…, w, d_v) over keys that count.

    Shapes: φ (…, n, w), ψ (…, m, w), value (…, m, d_v), whose leading axes broadcast. `size` is
    that of a chunk. With a rate, a number or (h, 1, 1), weights are times exp(−rate·(i − j)).

    >>> import numpy as np
    >>> ones = np.ones((5, 1))
    >>> sum_causally(ones, ones, ones, 2)[0][:, 0]
    array([1., 2., 3., 4., 5.])
    >>> sum_causally(ones, ones, ones, 2, np.log(2.0))[0][:, 0]
    array([1.    , 1.5   , 1.75  , 1.875 , 1.9375])
    """
    out, totals = _sum_chunks(query, key, value, size, rate)
    return out, totals[..., -1, :, :]


def sum_any_causally(query: Array, key: Array, value: Array, size: int, rate: Any = None) -> Array:
    """Return the sums of `sum_causally`, also if key or value may hold NaN or infinity.

    These reach the queries from their own row on, and no query before it. The lengths may be
    symbols of a traced graph.

    >>> import numpy as np
    >>> ones, value = np.ones((5, 1)), np.array([[1.0], [1.0], [1.0], [np.inf], [1.0]])
    >>> sum_any_causally(ones, ones, value, 8)[:, 0]
    array([ 1.,  2.,  3., nan, nan])
    """
    fw = get_framework(query)
    # 0 · ∞ is NaN: values of later rows must not be in the product with the scores of a chunk.
    is_finite = fw.xp.isfinite(value)
    missing = fw.fill_unless(fw.full((1,), 0.0, value), is_finite, math.nan)
    return _sum_chunks(query, key, value, size, rate, fw.fill_unless(value, is_finite), missing)[0]


def _sum_chunks(
    query: Array,
    key: Array,
    value: Array,
    size: int,
    rate: Any,
    finite_value: Array | None = None,
    missing: Array | None = None,
) -> tuple[Array, Array]:
    """Return the sums of each query, and Σ ψ(k) vᵀ of each chunk and those before it.

    `missing` (…, m, d_v) is NaN where the value is not finite, and 0 elsewhere.
    """
    fw = get_framework(query)
    n = query.shape[-2]
    count = -(-n // size)
    query, key, value = (_split_rows(x, n, count, size) for x in (query, key, value))
    at = fw.position_range(0, size, query)
    scores = fw.matmul(query, fw.xp.matrix_transpose(key))
    scores = fw.fill_unless(scores, at[None, :] <= at[:, None])
    if rate is not None:
        rate = rate[..., None] if is_array(rate) and len(rate.shape) else rate  # (h, 1, 1, 1)

        def decay(distance: Array) -> Array:
            return fw.xp.exp(-rate * fw.astype(distance, fw.dtype_name(query)))

        scores = scores * decay(fw.xp.abs(at[:, None] - at[None, :]))
        query = query * decay((at + 1)[:, None])
        key = key * decay((size - 1 - at)[:, None])
    totals = fw.matmul(fw.xp.matrix_transpose(key), value)
    if rate is None:
        totals = fw.cumulative_sum(totals, axis=len(totals.shape) - 3)
    else:
        step = 1
        while step < count:  # doubles the chunks that each sum contains
            factor = decay(fw.full((1, 1), float(step * size), query))
            totals = totals + factor * shift_chunks(totals, step)
            step *= 2
    if finite_value is not None:
        value = _split_rows(finite_value, n, count, size)
    out = fw.matmul(scores, value) + fw.matmul(query, shift_chunks(totals, 1))
    if missing is not None:
        missing = _split_rows(missing, n, count, size)
        out = out + fw.cumulative_sum(missing, axis=len(missing.shape) - 2)
    out = fw.xp.reshape(out, (*out.shape[:-3], -1, out.shape[-1]))
    return out[..., :n, :], totals


def _split_rows(x: Array, n: Any, count: Any, size: int) -> Array:
    """Return the first n rows (…, m, w) as chunks (…, count, size, w), padded with 0."""
    fw = get_framework(x)
    x = x if fw.is_known_true(n == x.shape[-2]) else x[..., :n, :]
    missing = count * size - x.shape[-2]
    if not isinstance(missing, int) or missing:
        zeros = fw.full((*x.shape[:-2], missing, x.shape[-1]), 0.0, x)
        x = fw.xp.concat([x, zeros], axis=-2)
    return fw.xp.reshape(x, (*x.shape[:-2], -1, size, x.shape[-1]))


def shift_chunks(sums: Array, step: int) -> Array:
    """Return the sums (…, chunks, w, d_v) of the chunk `step` before each chunk; 0 if none is."""
    fw = get_framework(sums)
    start = fw.full((*sums.shape[:-3], step, *sums.shape[-2:]), 0.0, sums)
    return fw.xp.concat([start, sums[..., :-step, :, :]], axis=-3)
