"""Outputs of nearly uniform weights from sums over blocks of rows, without reading keys or codes.

The rows of a block have scores x = a + δ, where a = φ·μ is the score of their mean key: E δ = 0,
E δ² ≤ σ² = ‖φ‖² λ and |δ| ≤ M = ‖φ‖ r. Every row of the block gets the weight e^a. In units of e^a,

    loss:  E (1 − e^δ)₊ ≤ E (−δ)₊ = ½ E |δ| ≤ σ / 2,      since e^δ ≥ 1 + δ;
    gain:  E (e^δ − 1)₊ = E (1 − e^δ)₊ + E e^δ − 1 ≤ σ / 2 + V,
           with E e^δ − 1 = E (e^δ − 1 − δ) ≤ V = ½ σ² e^M by Taylor's theorem.

Summed over the blocks, they are the `loss` and the `gain` of an `ErrorBound`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from qkv.frameworks import get_framework
from qkv.frameworks.norms import residual_spread, row_norms
from qkv.frameworks.stored_rows import RowReader, RowSpan, StoredRows
from qkv.scores import Score
from qkv.weightings import Weighting
from qkv.weightings.error_bound import ErrorBound
from qkv.weightings.softmax import Softmax

ROWS_PER_BLOCK = 4096
"""Rows per block."""

PAYBACK_DIVISOR = 12
"""Computing the sums takes as long as answering width / PAYBACK_DIVISOR queries by codes. So they
are computed after that many queries that the sums could have answered."""

ROUND_UP_FACTOR = 1 + 1e-6
"""A factor above the relative error of a few roundings to float32."""


class PendingBlockMeans(NamedTuple):
    """Block means that have not been computed yet.

    `min_spread` estimates the smallest √λ of a block. `query_count` counts the queries so far that
    the block means could have answered, judged by this estimate.
    """

    min_spread: float
    query_count: int = 0


class BlockMeans(NamedTuple):
    """Summaries of b blocks of rows.

    For each block: the number of rows (b,), the mean key (b, d), `spread` √λ and `radius` r (b,),
    both rounded up, and Σ v (b, d_v). `low` and `high` (d_v,) are the extremes of all values.
    """

    size: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    radius: np.ndarray
    value_sum: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def min_spread(self) -> float:
        return float(self.spread.min())

    def pool_queries(self, phi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the output (n, d_v) for φ (n, d) and a bound (n,) on the error of its weights."""
        length = row_norms(phi)[:, None]
        with np.errstate(all="ignore"):
            a = phi @ self.mean.T
            top = a.max(axis=1)
            w = np.exp(a - top[:, None])
            # Rounding of the means, of their scores and of the exponential, all in float64.
            unit = (4 * (phi.shape[1] + 8) + 2 * self.size) * 2.0**-53
            rounding_error = np.expm1(unit * (length * (row_norms(self.mean) + self.radius) + 4))
            sigma, max_delta = length * self.spread, length * self.radius
            loss = (1 + rounding_error) * sigma / 2 + rounding_error
            gain = loss + (1 + rounding_error) ** 2 * sigma**2 / 2 * np.exp(max_delta)
            mass = w * self.size
            total = mass.sum(axis=1)
            sums = ((mass * x).sum(axis=1) for x in (gain, loss))
            out = np.clip(w @ self.value_sum / total[:, None], self.low, self.high)
        error = ErrorBound(top, total, *sums).max_error
        return out, np.where(np.isfinite(out).all(axis=1), error, 1.0)


def attend_by_blocks(
    rows: StoredRows, query: np.ndarray, score: Score, weighting: Weighting, tolerance: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the output (n, d_v) and a boolean (n,): does its error bound meet the tolerance?

    Return None if the bound meets it for no query. The rows must have 8-bit codes, and the codes
    must give a bound on the score.
    """
    form = score.affine_form(query.astype(float), np.ones(1))
    assert form is not None
    unsupported = form.key_factor, form.bias, form.softcap, form.gate, rows.allowed
    if type(weighting) is not Softmax or any(x is not None for x in unsupported):
        return None
    cache_key = "flat", rows.value_width
    blocks: BlockMeans | PendingBlockMeans = rows.bounds_cache.get(cache_key) or PendingBlockMeans(
        _estimate_min_spread(rows)
    )
    with np.errstate(all="ignore"):
        phi = np.asarray(form.query) / float(weighting.temperature)
        sigma = np.linalg.norm(phi, axis=1) * blocks.min_spread
    candidate_count = int(np.count_nonzero(sigma <= 2 * tolerance))
    if isinstance(blocks, PendingBlockMeans):
        blocks = rows.bounds_cache[cache_key] = blocks._replace(
            query_count=blocks.query_count + candidate_count
        )
        if not candidate_count or PAYBACK_DIVISOR * blocks.query_count < rows.shape[1]:
            return None
        blocks = rows.bounds_cache[cache_key] = sum_blocks(rows)
    elif not candidate_count:
        return None
    out, error = blocks.pool_queries(phi)
    proven = error <= tolerance
    return (out, proven) if proven.any() else None


def sum_blocks(rows: StoredRows) -> BlockMeans:
    """Summarize all rows in blocks. Keys and values are read once."""
    spans = rows.iter_spans(
        ROWS_PER_BLOCK, prefetch_fields=("key", "value") if rows.value_width else ("key",)
    )
    summaries: list[tuple[np.ndarray, ...]] = RowReader(get_framework(np.zeros(0))).reduce_spans(
        lambda cut: [_summarize_block(cut, rows.value_width)], lambda one, two: one + two, [], spans
    )
    blocks = BlockMeans(*map(np.array, zip(*summaries, strict=True)))
    return blocks._replace(low=blocks.low.min(axis=0), high=blocks.high.max(axis=0))


def _estimate_min_spread(rows: StoredRows) -> float:
    """Return a lower estimate of √λ: that of isotropic keys which are as long as the first rows.

    Return ∞ if the keys are stored in 8 bits only, since the sums would miss quantization errors.
    """
    first = rows.first_chunk()
    assert first is not None and first.quantized is not None
    if first.scale is not None or first.quantized.norm is None:
        return math.inf
    return float(first.quantized.norm[:ROWS_PER_BLOCK].max(initial=0.0)) / math.sqrt(rows.shape[1])


def _summarize_block(span: RowSpan, value_width: int) -> tuple[np.ndarray, ...]:
    with np.errstate(all="ignore"):
        key = span.read_keys().astype(float)
        mean = key.mean(axis=0)
        key -= mean
        deviations = key.astype(np.float32)
        norms = row_norms(deviations)
        radius = float(norms.max()) * ROUND_UP_FACTOR
        rounding_error = np.finfo(np.float32).eps * np.sqrt((norms * norms).sum())
        spread = (residual_spread(deviations, radius) * ROUND_UP_FACTOR + rounding_error) / np.sqrt(
            span.size
        )
        value = span.read_values().astype(float) if value_width else np.zeros((span.size, 0))
        summary = (span.size, mean, min(spread, radius), radius, value.sum(axis=0))
        return *map(np.asarray, summary), value.min(axis=0), value.max(axis=0)
