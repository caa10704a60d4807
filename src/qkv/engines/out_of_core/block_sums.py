"""The output of flat weights from sums over blocks of rows: neither a key is read nor its code.

The rows of a block have scores x = a + δ around a = φ·μ, that of their mean key: E δ = 0,
E δ² ≤ σ² = ‖φ‖² λ and |δ| ≤ M = ‖φ‖ r. All of them are given the weight e^a. In units of that,

    too much:    E (1 − e^δ)₊ ≤ E (−δ)₊ = ½ E |δ| ≤ σ / 2,               for e^δ ≥ 1 + δ;
    too little:  what is too much, and E e^δ − 1 = E (e^δ − 1 − δ) ≤ V = ½ σ² e^M,
                 which is Taylor's remainder: σ / 2 + V.

These are loss and gain of a `ErrorBound`, summed over the blocks as those of codes are.
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
"""Rows that are summed together."""

PAYBACK_DIVISOR = 12
"""Sums take as long to make as codes take to answer width / PAID queries: they are made when that
many have come that they may answer."""

ROUND_UP_FACTOR = 1 + 1e-6
"""More than the last of a few roundings to float32 takes."""


class PendingBlockMeans(NamedTuple):
    """Sums that are not made yet: √λ that no block will have less than, as far as can be seen, and
    how many queries have come for which that is narrow enough."""

    min_spread: float
    query_count: int = 0


class BlockMeans(NamedTuple):
    """Of each block how many rows it has (b,), their mean key (b, d), √λ and r (b,), both rounded
    up, and Σ v (b, d_v); of all rows the least and the largest value (d_v,)."""

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
        """The output (n, d_v) for φ (n, d), and how far its weights may be off, (n,)."""
        length = row_norms(phi)[:, None]
        with np.errstate(all="ignore"):
            a = phi @ self.mean.T
            top = a.max(axis=1)
            w = np.exp(a - top[:, None])
            # The sums in float64 of the means, of their scores, and the exponential.
            unit = (4 * (phi.shape[1] + 8) + 2 * self.size) * 2.0**-53
            lost = np.expm1(unit * (length * (row_norms(self.mean) + self.radius) + 4))
            sigma, most = length * self.spread, length * self.radius
            loss = (1 + lost) * sigma / 2 + lost
            gain = loss + (1 + lost) ** 2 * sigma**2 / 2 * np.exp(most)
            mass = w * self.size
            total = mass.sum(axis=1)
            sums = ((mass * x).sum(axis=1) for x in (gain, loss))
            out = np.clip(w @ self.value_sum / total[:, None], self.low, self.high)
        error = ErrorBound(top, total, *sums).max_error
        return out, np.where(np.isfinite(out).all(axis=1), error, 1.0)


def attend_by_blocks(
    rows: StoredRows, query: np.ndarray, score: Score, weighting: Weighting, tolerance: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """The output (n, d_v) and which queries it is proven for, (n,); None where it is for none.

    The score must be one that codes bound, of rows that have them.
    """
    form = score.affine_form(query.astype(float), np.ones(1))
    assert form is not None
    others = form.key_factor, form.bias, form.softcap, form.gate, rows.allowed
    if type(weighting) is not Softmax or any(x is not None for x in others):
        return None
    name = "flat", rows.value_width
    found: BlockMeans | PendingBlockMeans = rows.bounds_cache.get(name) or PendingBlockMeans(
        _estimate_min_spread(rows)
    )
    with np.errstate(all="ignore"):
        phi = np.asarray(form.query) / float(weighting.temperature)
        sigma = np.linalg.norm(phi, axis=1) * found.min_spread
    hopeful = int(np.count_nonzero(sigma <= 2 * tolerance))
    if isinstance(found, PendingBlockMeans):
        found = rows.bounds_cache[name] = found._replace(query_count=found.query_count + hopeful)
        if not hopeful or PAYBACK_DIVISOR * found.query_count < rows.shape[1]:
            return None
        found = rows.bounds_cache[name] = sum_blocks(rows)
    elif not hopeful:
        return None
    out, error = found.pool_queries(phi)
    proven = error <= tolerance
    return (out, proven) if proven.any() else None


def sum_blocks(rows: StoredRows) -> BlockMeans:
    """The blocks of all rows, whose keys and values are read once."""
    cuts = rows.iter_spans(ROWS_PER_BLOCK, ahead=("key", "value") if rows.value_width else ("key",))
    found: list[tuple[np.ndarray, ...]] = RowReader(get_framework(np.zeros(0))).reduce_spans(
        lambda cut: [_summarize_block(cut, rows.value_width)], lambda one, two: one + two, [], cuts
    )
    each = BlockMeans(*map(np.array, zip(*found, strict=True)))
    return each._replace(low=each.low.min(axis=0), high=each.high.max(axis=0))


def _estimate_min_spread(rows: StoredRows) -> float:
    """√λ of keys as long as the first of the rows that point everywhere: others have more. Infinite
    where what 8 bits have lost of them is not in their sums."""
    first = rows.first_chunk()
    assert first is not None and first.quantized is not None
    if first.scale is not None or first.quantized.norm is None:
        return math.inf
    return float(first.quantized.norm[:ROWS_PER_BLOCK].max(initial=0.0)) / math.sqrt(rows.shape[1])


def _summarize_block(cut: RowSpan, width: int) -> tuple[np.ndarray, ...]:
    with np.errstate(all="ignore"):
        key = cut.read_keys().astype(float)
        mean = key.mean(axis=0)
        key -= mean
        left = key.astype(np.float32)
        long = row_norms(left)
        reach = float(long.max()) * ROUND_UP_FACTOR
        lost = np.finfo(np.float32).eps * np.sqrt((long * long).sum())
        wide = (residual_spread(left, reach) * ROUND_UP_FACTOR + lost) / np.sqrt(cut.size)
        value = cut.read_values().astype(float) if width else np.zeros((cut.size, 0))
        known = (cut.size, mean, min(wide, reach), reach, value.sum(axis=0))
        return *map(np.asarray, known), value.min(axis=0), value.max(axis=0)
