"""Causal sums of the linear engine: Σ_{j ≤ i} (φ(qᵢ)·ψ(kⱼ)) vⱼ in O(n), exactly, by chunks.

Within a chunk of queries the scores are computed as they are. The chunks before it are one matrix
Σ ψ(k) vᵀ, a cumulative sum over the chunks. Weights may decay with the distance.
"""

from __future__ import annotations

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
    fw = get_framework(query)
    n = query.shape[-2]
    count = -(-n // size)

    def split_rows(x: Array) -> Array:
        x = x[..., :n, :]
        missing = count * size - x.shape[-2]
        if missing:
            zeros = fw.full((*x.shape[:-2], missing, x.shape[-1]), 0.0, x)
            x = fw.xp.concat([x, zeros], axis=-2)
        return fw.xp.reshape(x, (*x.shape[:-2], count, size, x.shape[-1]))

    query, key, value = map(split_rows, (query, key, value))
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
        totals = fw.xp.cumulative_sum(totals, axis=len(totals.shape) - 3)
    else:
        step = 1
        while step < count:  # doubles the chunks that each sum contains
            factor = decay(fw.full((1, 1), float(step * size), query))
            totals = totals + factor * shift_chunks(totals, step)
            step *= 2
    out = fw.matmul(scores, value) + fw.matmul(query, shift_chunks(totals, 1))
    out = fw.xp.reshape(out, (*out.shape[:-3], count * size, out.shape[-1]))
    return out[..., :n, :], totals[..., -1, :, :]


def shift_chunks(sums: Array, step: int) -> Array:
    """Return the sums (…, chunks, w, d_v) of the chunk `step` before each chunk; 0 if none is."""
    fw = get_framework(sums)
    start = fw.full((*sums.shape[:-3], step, *sums.shape[-2:]), 0.0, sums)
    return fw.xp.concat([start, sums[..., :-step, :, :]], axis=-3)
