"""Approximate weights of all rows from one pass over their 8-bit codes, with error bounds.

Each block of rows is scored, weighed and summed while it is in the processor's cache. Memory then
holds its weights, relative to the block's largest score, and a few sums for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from qkv.frameworks import get_framework
from qkv.frameworks.stored_rows import RowReader, RowSpan
from qkv.weightings.error_bound import ErrorBound

MAX_LINEAR_DELTA = 0.5
"""Largest score error δ for which e^δ − 1 is bounded by a multiple of δ."""

FLOAT32_SUM_MARGIN = 1.001
"""A factor above the relative rounding error of float32 sums over a block."""

UNDERFLOW_WEIGHT = 1e-30
"""A bound on the weights that float32 rounds to 0, relative to a largest weight of 1."""

MIN_REMEMBERED_SHARE = 2.0**-14
"""Smallest share of the total weight at which a scan remembers the position of a row."""

SEARCH_DEPTH_FACTOR = 64
"""`rows_above` searches for rows this many times lighter than requested, so that a later call with
a lower threshold does not read the weights again."""

MAX_SCORE_RISE = 20.0
"""If an exact score exceeds the largest score of its block by more, the block is rescaled."""


class ErrorTerms(NamedTuple):
    """The terms of the score error δ for c rows; `ErrorFactors` has their multipliers.

    `residual` (c,) is the quantization error of the key. `norm`, the length of the key, (c,) or
    (1,) for the largest, and `bias` (c,) bound the rounding errors. The residuals r of all rows
    together satisfy Σ (φ·r)² ≤ `spread`² ‖φ‖².
    """

    residual: np.ndarray | None
    norm: np.ndarray
    bias: np.ndarray | None
    spread: float
    known_maxima: tuple[float, ...] | None = None

    @property
    def maxima(self) -> tuple[float, ...]:
        """The largest residual, norm and bias."""
        if self.known_maxima is not None:
            return self.known_maxima
        return tuple(0.0 if x is None else float(x.max(initial=0.0)) for x in self[:3])

    def stack_terms(self) -> np.ndarray:
        """Return residuals, norms and biases as one array (3, c)."""
        shape = max(0 if x is None else len(x) for x in self[:3])
        none = np.zeros(shape, np.float32)
        return np.stack([none if x is None else np.broadcast_to(x, shape) for x in self[:3]])


class ErrorFactors(NamedTuple):
    """The multipliers (n,) of `ErrorTerms` for n queries, and the unit of rounding."""

    residual: np.ndarray
    norm: np.ndarray
    bias: np.ndarray
    unit: float

    def multiply_terms(self, terms: np.ndarray) -> np.ndarray:
        """Return δ (n, c) of terms (3, c), without `rounding_error`."""
        return np.asarray(np.stack(self[:3], axis=1) @ terms)

    def rounding_error(self, top: np.ndarray) -> np.ndarray:
        """Return a bound on the rounding of score − top and of its exponential."""
        return np.asarray(self.unit * (4 * np.abs(top) + 16))


class ScannedBlock(NamedTuple):
    """Sums over the rows `start … start + size` for n queries, with weights w = e^(score − top).

    The sums (n,) are Σ w (`total`), Σ w ln w (`entropy_sum`), Σ w δ with the δ of residuals only
    (`residual_sum`) and Σ w² (`squared_sum`). If the largest δ exceeds `MAX_LINEAR_DELTA`, the
    block `has_wide_errors` and `residual_sum` is Σ w (e^δ − 1). `remembered_rows` are the positions
    of all rows with ln w + top ≥ `log_threshold`. `maxima` are the largest terms and the spread.
    """

    start: int
    size: int
    has_wide_errors: bool
    remembered_rows: np.ndarray
    top: np.ndarray
    total: np.ndarray
    entropy_sum: np.ndarray
    residual_sum: np.ndarray
    squared_sum: np.ndarray
    log_threshold: np.ndarray
    maxima: tuple[float, ...]


class PrunedWeights(NamedTuple):
    """The k heaviest rows: positions (k,), ascending, and unnormalized weights (n, k).

    `bound` counts the weights of all other rows as errors.
    """

    positions: np.ndarray
    weights: np.ndarray
    bound: ErrorBound


class WeightScan:
    """The unnormalized weights (n, m) of all rows, relative to the largest score of their block.

    `score_cut` returns the scores (n, c) of a span of rows and their error terms.
    """

    def __init__(
        self,
        m: int,
        factors: ErrorFactors,
        score_cut: Callable[[RowSpan], tuple[np.ndarray, ErrorTerms]],
        cuts: Iterable[list[RowSpan]],
    ):
        self._score_cut, self.factors = score_cut, factors
        self._largest_factors = tuple(float(x.max(initial=0.0)) for x in factors[:3])
        self.weights = np.empty((len(factors.residual), m), np.float32)
        self._is_exact = np.zeros(m, bool)
        self._log_total = np.full(len(self.weights), -np.inf)  # a lower bound of ln Σ w
        blocks: list[ScannedBlock] = RowReader(get_framework(self.weights)).reduce_spans(
            lambda cut: [self._scan_block(cut)], lambda one, two: one + two, [], cuts
        )
        self.starts, self.sizes = (np.array([x[i] for x in blocks], np.int64) for i in (0, 1))
        self.has_wide_errors = np.array([x.has_wide_errors for x in blocks], bool)
        sums = (np.array([x[i] for x in blocks], float) for i in range(4, 9))
        self.top, self.total, self.entropy_sums, self.residual_sums, self.squared_sums = sums
        maxima = np.array([x.maxima for x in blocks])[:, :, None]
        rounding_errors = (
            factors.norm * maxima[:, 1]
            + factors.bias * maxima[:, 2]
            + factors.rounding_error(_finite_top(self.top))
        )
        self.max_errors = factors.residual * maxima[:, 0] + rounding_errors  # the largest δ
        self.rounding_errors = np.where(
            self.has_wide_errors[:, None], 0.0, rounding_errors
        )  # the part of δ that is not due to residuals
        self.spread = factors.residual * maxima[:, 3] * FLOAT32_SUM_MARGIN
        self.peak = _finite_top(self.top.max(axis=0))
        self.factor = np.exp(self.top - self.peak)
        self._max_weights = np.ones_like(self.total)  # no weight of a block is larger
        self._reset_remembered()
        remembered = [x.remembered_rows for x in blocks]
        if sum(map(len, remembered)) * 16 < m:
            log_threshold = np.max([x.log_threshold for x in blocks], axis=0)
            self._remembered_rows, self._remembered_above = (
                np.concatenate(remembered),
                np.exp(log_threshold - self.peak) * FLOAT32_SUM_MARGIN,
            )

    def _scan_block(self, cut: RowSpan) -> ScannedBlock:
        s, terms = self._score_cut(cut)
        if cut.allowed is not None:
            s[:, ~cut.allowed] = -np.inf
        top = s.max(axis=1)
        unit = _finite_top(top)
        s -= unit[:, None]
        w = np.exp(s, out=self.weights[:, cut.start : cut.start + cut.size])
        if cut.allowed is not None:
            np.maximum(s, -200, out=s)  # 0 · −∞ must count as 0
        factors, maxima = self.factors, (*terms.maxima, terms.spread)
        total, entropy_sum = np.add.reduce(w, 1), _row_dot(w, s)  # BLAS sums are too inaccurate
        largest_error = sum(a * b for a, b in zip(self._largest_factors, maxima, strict=False))
        has_wide_errors = (
            not largest_error + factors.rounding_error(np.abs(unit).max(initial=0.0))
            <= MAX_LINEAR_DELTA
        )
        if has_wide_errors:
            delta = (
                factors.multiply_terms(terms.stack_terms())
                + factors.rounding_error(unit.astype(float))[:, None]
            )
            residual_sum, squared_sum = (np.exp(s + delta) - w).sum(axis=1), 0.0 * total
        elif terms.residual is None:
            residual_sum = squared_sum = 0.0 * total
        else:
            residual_sum, squared_sum = (w @ terms.residual) * factors.residual, _row_dot(w, w)
        if has_wide_errors or terms.residual is None:
            maxima = (*maxima[:3], 0.0)
        residual_sum, squared_sum = (
            residual_sum * FLOAT32_SUM_MARGIN,
            squared_sum * FLOAT32_SUM_MARGIN,
        )
        remembered, log_threshold = self._find_heavy_rows(cut.start, unit, w, total)
        return ScannedBlock(
            cut.start,
            cut.size,
            has_wide_errors,
            remembered,
            top,
            total,
            entropy_sum,
            residual_sum,
            squared_sum,
            log_threshold,
            maxima,
        )

    def _find_heavy_rows(
        self, start: int, unit: np.ndarray, w: np.ndarray, total: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of heavy rows, and the logarithm (n,) that bounds all other weights.

        The sum over the blocks so far is a lower bound of the total, so no heavy row is missed.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            # Threads may race here. A lost update only lowers the bound, which stays valid.
            self._log_total = np.logaddexp(self._log_total, unit + np.log(total.astype(float)))
            log_threshold = self._log_total + np.log(MIN_REMEMBERED_SHARE)
            min_weight = np.exp(np.minimum(log_threshold - unit, 80.0)).astype(np.float32)
        if (min_weight > 1).all():
            return np.zeros(0, np.int64), log_threshold
        return start + _nonzero_columns(w >= min_weight[:, None]), log_threshold

    def error_bound(self) -> ErrorBound:
        """Return bounds on the errors of all weights."""
        with np.errstate(all="ignore"):
            joint_bound = np.sqrt(np.maximum(self.squared_sums, 0)) * self.spread
            residual_error = np.where(
                self.has_wide_errors[:, None],
                self.residual_sums,
                np.fmin(self.residual_sums, joint_bound),
            )
            loss = (
                (np.maximum(residual_error, 0) + self.rounding_errors * self.total)
                * self.factor
                * FLOAT32_SUM_MARGIN
            )
            growth = np.where(
                self.has_wide_errors[:, None], 1.0, np.expm1(self.max_errors) / self.max_errors
            )
        total, gain = (self.total * self.factor).sum(axis=0), (loss * growth).sum(axis=0)
        gain += UNDERFLOW_WEIGHT * self.weights.shape[1]
        return ErrorBound(self.peak, total, gain, loss.sum(axis=0))

    def _map_blocks(self, function: Callable[[int], Any]) -> list[Any]:
        """Return function(i) for every block i, computed on all cores, in order."""
        spans: Any = list(range(len(self.starts)))

        def apply_to_block(i: Any) -> list[Any]:
            return [function(i)]

        results: list[Any] = get_framework(self.weights).reduce_spans(
            apply_to_block, lambda one, two: one + two, [], spans
        )
        return results

    def _block_weights(self, i: int) -> np.ndarray:
        """Return a view of the weights of block i, (n, c)."""
        return self.weights[:, self.starts[i] : self.starts[i] + self.sizes[i]]

    def _reset_remembered(self) -> None:
        """Clear the cache of `rows_above`: its rows, and the weight (n,) that bounds all others."""
        self._remembered_rows, self._remembered_above = (
            np.zeros(0, np.int64),
            np.full(len(self.weights), np.inf),
        )

    def rows_above(self, min_weights: np.ndarray) -> np.ndarray:
        """Return the positions, ascending, of rows whose weight reaches the minimum for any query.

        Weights are relative to the largest score of all rows.
        """
        if (min_weights < self._remembered_above).any():
            self._remembered_above = min_weights / SEARCH_DEPTH_FACTOR
            self._remembered_rows = np.concatenate(self._map_blocks(self._rows_above_in_block))
        is_heavy = self.weights_at(self._remembered_rows) >= min_weights[:, None]
        return np.asarray(self._remembered_rows[is_heavy.any(axis=0)])

    def _rows_above_in_block(self, i: int) -> np.ndarray:
        """Return the positions of the rows of block i that `_remembered_above` does not exclude."""
        with np.errstate(divide="ignore"):
            min_weight = np.minimum(self._remembered_above / self.factor[i], 3e38).astype(
                np.float32
            )
        if (min_weight > self._max_weights[i]).all():
            return np.zeros(0, np.int64)
        return np.asarray(
            self.starts[i] + _nonzero_columns(self._block_weights(i) >= min_weight[:, None])
        )

    def unread_heavy_rows(self, share: float, tolerance: float) -> np.ndarray:
        """Return the positions of the heavy rows whose keys were not read yet.

        A row is heavy if it has at least this share of the weight of a query whose error exceeds
        the tolerance.
        """
        bound = self.error_bound()
        min_weights = np.where(bound.max_error > tolerance, bound.total * share, np.inf)
        at = self.rows_above(min_weights)
        return np.asarray(at[~self._is_exact[at]])

    def weights_at(self, at: np.ndarray) -> np.ndarray:
        """Return the weights (n, k) of rows, relative to the largest score of all rows."""
        block = np.searchsorted(self.starts, at, side="right") - 1
        return np.asarray(self.weights[:, at] * self.factor[block].T)

    def set_exact_scores(self, at: np.ndarray, scores: np.ndarray, terms: np.ndarray) -> None:
        """Replace the weights of rows by those of exact scores (n, c), and update all sums.

        `terms` (3, c) are the error terms of the previous scores.
        """

        block = np.searchsorted(self.starts, at, side="right") - 1
        edges = np.flatnonzero(np.diff(block, prepend=-1))
        touched, has_wide_errors = block[edges], self.has_wide_errors[block]
        self._is_exact[at] = True
        is_visible = (
            self.weights[:, at] > UNDERFLOW_WEIGHT
        )  # float32 does not resolve the other weights, so they stay unchanged
        rise = np.maximum.reduceat(
            np.where(is_visible, scores - self.top[block].T, 0.0), edges, axis=1
        )
        for i in touched[(rise > MAX_SCORE_RISE).any(axis=0)]:
            self._rescale_block(i, np.maximum(rise[:, np.searchsorted(touched, i)], 0.0))
        with np.errstate(all="ignore"):
            old = np.where(is_visible, self.weights[:, at], 0.0)
            x = scores - self.top[block].T
            new, log = np.where(is_visible, np.exp(x), 0.0), np.log(np.where(is_visible, old, 1.0))
            residual_part = old * np.outer(self.factors.residual, terms[0])
            if has_wide_errors.any():
                rounding_error = self.factors.rounding_error(self.top[block].T)
                old_part = (
                    np.where(
                        is_visible,
                        np.exp(log + self.factors.multiply_terms(terms) + rounding_error),
                        0.0,
                    )
                    - old
                )
                # `residual_sums` also holds the rounding errors of the new weights.
                residual_part = np.where(
                    has_wide_errors, old_part - new * np.expm1(rounding_error), residual_part
                )
            entropy_change = np.where(is_visible, new * x, 0.0) - old * log
        self.weights[:, at] = np.where(is_visible, new, self.weights[:, at])
        largest = np.maximum.reduceat(new, edges, axis=1).T
        self._max_weights[touched] = np.maximum(
            self._max_weights[touched], largest * FLOAT32_SUM_MARGIN
        )
        for sums, change in (
            (self.total, new - old),
            (self.entropy_sums, entropy_change),
            (self.residual_sums, -residual_part),
            (self.squared_sums, -old * old),
        ):
            sums[touched] += np.add.reduceat(change, edges, axis=1).T

    def _rescale_block(self, i: int, rise: np.ndarray) -> None:
        """Make the weights of block i relative to a score that is higher by `rise` (n,)."""
        weights, scale = self._block_weights(i), np.exp(-rise)
        np.multiply(weights, scale.astype(np.float32)[:, None], out=weights)
        self.entropy_sums[i] = (self.entropy_sums[i] - rise * self.total[i]) * scale
        self.squared_sums[i] *= scale * scale
        self.total[i] *= scale
        self.residual_sums[i] *= scale
        self.top[i] += rise
        self.peak = np.maximum(self.peak, self.top[i])
        self.factor = np.exp(self.top - self.peak)
        self._reset_remembered()  # the cached weights have the old unit

    def prune_rows(self, tolerance: float, max_rows: int) -> PrunedWeights | None:
        """Omit as many light rows as the tolerance allows; None if more than `max_rows` remain."""
        bound, growth = self.error_bound(), np.exp(self.max_errors.max(axis=0))
        spare = (tolerance - bound.max_error) * 0.95 * bound.total / growth
        share, rounding_error = np.full(len(spare), 1e-3), bound.total * 1e-5
        while (spare > rounding_error).all() and (share > UNDERFLOW_WEIGHT).all():
            at = self.rows_above(bound.total * share)
            if len(at) > max_rows:
                return None
            w = self.weights_at(at)
            total = w.sum(axis=1, dtype=float)
            # The sum over all rows is known up to rounding, and so is the omitted part.
            omitted = np.maximum(bound.total + rounding_error - total, 0.0)
            if (omitted <= spare).all():
                return PrunedWeights(
                    at, w, bound._replace(total=total, gain=bound.gain + omitted * growth)
                )
            share[omitted > spare] /= 8
        return None

    def keep_only(self, at: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Set the weights of the rows `at` to `weights` (n, k), all others to 0; return (n, m)."""
        self._map_blocks(lambda i: self._block_weights(i).fill(0))
        out = self.weights.astype(weights.dtype, copy=False)
        out[:, at] = weights
        return out

    def normalize_weights(self, total: np.ndarray) -> np.ndarray:
        """Normalize the weights in place to α (n, m); return the entropy (n,)."""
        scales = (self.factor / np.where(total > 0, total, 1.0)).astype(np.float32)

        def scale_block(i: int) -> None:
            weights = self._block_weights(i)
            np.multiply(weights, scales[i][:, None], out=weights)

        self._map_blocks(scale_block)
        with np.errstate(all="ignore"):
            shift_sums = np.where(self.total > 0, (self.top - self.peak) * self.total, 0.0)
        entropy_sum = ((self.entropy_sums + shift_sums) * self.factor).sum(axis=0)
        divisor = np.where(total > 0, total, 1.0)
        return np.asarray(np.fmax(np.log(divisor) - entropy_sum / divisor, 0.0))

    def sample_rows(self, i: int, count: int, rng: Any) -> tuple[np.ndarray, np.ndarray, float]:
        """Draw rows for query i with probabilities proportional to their share of the error bound.

        Return their positions, which may repeat, e^δ − 1 of each, and the sum of all shares.
        """
        max_changes = np.expm1(self.max_errors[:, i])
        masses = self.factor[:, i] * self.total[:, i] * max_changes * FLOAT32_SUM_MARGIN
        if not 0 < masses.sum() < np.inf or (self.max_errors[:, i] > 60).any():
            return np.zeros(0, np.int64), max_changes[:0], 0.0
        counts = rng.multinomial(count, masses / masses.sum())
        at = []
        for block in np.flatnonzero(counts).tolist():
            cumulative = np.cumsum(self._block_weights(block)[i].astype(float))
            positions = np.searchsorted(
                cumulative, rng.random(counts[block]) * cumulative[-1], side="right"
            )
            at.append(self.starts[block] + np.minimum(positions, len(cumulative) - 1))
        return np.concatenate(at), np.repeat(max_changes, counts), float(masses.sum())


def _finite_top(top: np.ndarray) -> np.ndarray:
    """Return the largest scores, with 0 in place of those that are not finite."""
    return np.where(np.isfinite(top), top, top.dtype.type(0))


def _nonzero_columns(marked: np.ndarray) -> np.ndarray:
    """Return the indices of the columns with any true element, ascending."""
    return np.flatnonzero(marked[0] if len(marked) == 1 else marked.any(axis=0))


def _row_dot(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return the dot products (n,) of corresponding rows, by BLAS in one pass."""
    return np.asarray((one[:, None, :] @ two[:, :, None])[:, 0, 0])
