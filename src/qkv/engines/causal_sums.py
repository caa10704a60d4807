"""Causal sums of the linear engine: Σ_{j ≤ i} (φ(qᵢ)·ψ(kⱼ)) vⱼ in O(n), exactly, by chunks.

Within a chunk of queries the scores are computed as they are. The chunks before it are one matrix
Σ ψ(k) vᵀ, a cumulative sum over the chunks.
"""

from __future__ import annotations

from qkv.frameworks import get_framework
from qkv.util.types import Array

MIN_CHUNK = 64


def chunk_size(width: int, value_width: int) -> int:
    """Return the queries of a chunk, so that the sums need no more memory than the vectors."""
    size = MIN_CHUNK
    while size < min(width, value_width):
        size *= 2
    return size


def sum_causally(query: Array, key: Array, value: Array, size: int) -> tuple[Array, Array]:
    """Return the sums of each query (…, n, d_v), and Σ ψ(k) vᵀ (…, w, d_v) over keys that count.

    Shapes: φ (…, n, w), ψ (…, m, w), value (…, m, d_v), whose leading axes broadcast. `size` is
    that of a chunk.

    >>> import numpy as np
    >>> ones = np.ones((5, 1))
    >>> sum_causally(ones, ones, ones, 2)[0][:, 0]
    array([1., 2., 3., 4., 5.])
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
    totals = fw.xp.cumulative_sum(
        fw.matmul(fw.xp.matrix_transpose(key), value), axis=len(key.shape) - 3
    )
    before = fw.xp.concat(
        [fw.full(totals[..., :1, :, :].shape, 0.0, totals), totals[..., :-1, :, :]], axis=-3
    )
    at = fw.position_range(0, size, query)
    scores = fw.matmul(query, fw.xp.matrix_transpose(key))
    scores = fw.fill_unless(scores, at[None, :] <= at[:, None])
    out = fw.matmul(scores, value) + fw.matmul(query, before)
    out = fw.xp.reshape(out, (*out.shape[:-3], count * size, out.shape[-1]))
    return out[..., :n, :], totals[..., -1, :, :]
