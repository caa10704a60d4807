"""Weights of all rows from one reading of their codes, and how far they may be off.

A block of rows is scored, weighed and summed while it lies in the cache. What is held of it then
are its weights, measured from its own largest score, and a few sums for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from qkv.frameworks import get_framework
from qkv.frameworks.stored_rows import RowReader, RowSpan
from qkv.weightings.error_bound import ErrorBound

MAX_LINEAR_DELTA = 0.5
"""δ up to which e^δ − 1 is bounded by a line through 0."""

FLOAT32_SUM_MARGIN = 1.001
"""What sums in float32 over a block may have lost, with room to spare."""

UNDERFLOW_WEIGHT = 1e-30
"""More than the weight of a row that float32 rounds to 0, beside one of 1."""

MIN_REMEMBERED_SHARE = 2.0**-14
"""The share of the weight from which on a row is remembered while its block is in the cache."""

SEARCH_DEPTH_FACTOR = 64
"""How much lighter rows are looked for than were asked for, so that asking for those reads no
weights again."""

MAX_SCORE_RISE = 20.0
"""How far a score may lie above the largest that its block was known to have."""


class ErrorTerms(NamedTuple):
    """Of each row (c,), what δ is made of: the residual of its code; the length of its key, or (1,)
    the largest, and its bias, which meet what arithmetic loses. Residuals also count together:
    Σ (φ·r)² over all rows is at most `spread`² ‖φ‖²."""

    residual: np.ndarray | None
    norm: np.ndarray
    bias: np.ndarray | None
    spread: float
    known_maxima: tuple[float, ...] | None = None

    @property
    def maxima(self) -> tuple[float, ...]:
        """The largest of each kind, (3,)."""
        if self.known_maxima is not None:
            return self.known_maxima
        return tuple(0.0 if x is None else float(x.max(initial=0.0)) for x in self[:3])

    def stack_terms(self) -> np.ndarray:
        """(3, c)"""
        shape = max(0 if x is None else len(x) for x in self[:3])
        none = np.zeros(shape, np.float32)
        return np.stack([none if x is None else np.broadcast_to(x, shape) for x in self[:3]])


class ErrorFactors(NamedTuple):
    """For n queries (n,) what each of the terms is multiplied by, and what is added to them all."""

    residual: np.ndarray
    norm: np.ndarray
    bias: np.ndarray
    unit: float

    def multiply_terms(self, terms: np.ndarray) -> np.ndarray:
        """δ (n, c) of terms (3, c), but for what `least` adds."""
        return np.asarray(np.stack(self[:3], axis=1) @ terms)

    def rounding_error(self, top: np.ndarray) -> np.ndarray:
        """Subtraction of the largest score and the exponential round too."""
        return np.asarray(self.unit * (4 * np.abs(top) + 16))


class ScannedBlock(NamedTuple):
    """Sums over `size` rows from `start` on, for n queries, of weights w = e^(score − top): Σ w,
    Σ w ln w, Σ w δ of the residuals alone, Σ w². `most` are the largest terms and the spread. Where
    the largest δ is `has_wide_errors`, Σ w (e^δ − 1) stands for Σ w δ. At the places
    `remembered_rows` is every row whose weight is not below `least`, a logarithm."""

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
    """Rows at places (k,), ascending, their weights (n, k), not yet divided by their sum, and how
    far these may be off with all others at 0."""

    positions: np.ndarray
    weights: np.ndarray
    bound: ErrorBound


class WeightScan:
    """The weights (n, m) of all rows, not yet divided by their sum; each measured from the largest
    score of its block. `apply_to_block` gives the scores of a cut (n, c) and their terms."""

    def __init__(
        self,
        m: int,
        slack: ErrorFactors,
        lift: Callable[[RowSpan], tuple[np.ndarray, ErrorTerms]],
        cuts: Iterable[list[RowSpan]],
    ):
        self._score_cut, self.factors = lift, slack
        self._largest_factors = tuple(float(x.max(initial=0.0)) for x in slack[:3])
        self.weights = np.empty((len(slack.residual), m), np.float32)
        self._is_exact = np.zeros(m, bool)
        self._log_total = np.full(len(self.weights), -np.inf)  # ln Σ w of blocks so far, or less
        found: list[ScannedBlock] = RowReader(get_framework(self.weights)).reduce_spans(
            lambda cut: [self._scan_block(cut)], lambda one, two: one + two, [], cuts
        )
        self.starts, self.sizes = (np.array([x[i] for x in found], np.int64) for i in (0, 1))
        self.has_wide_errors = np.array([x.has_wide_errors for x in found], bool)
        sums = (np.array([x[i] for x in found], float) for i in range(4, 9))
        self.top, self.total, self.entropy_sums, self.residual_sums, self.squared_sums = sums
        most = np.array([x.maxima for x in found])[:, :, None]
        rest = (
            slack.norm * most[:, 1]
            + slack.bias * most[:, 2]
            + slack.rounding_error(_finite_top(self.top))
        )
        self.max_errors = slack.residual * most[:, 0] + rest  # the largest δ
        self.rounding_errors = np.where(
            self.has_wide_errors[:, None], 0.0, rest
        )  # what else than residuals it has
        self.spread = slack.residual * most[:, 3] * FLOAT32_SUM_MARGIN
        self.peak = _finite_top(self.top.max(axis=0))
        self.factor = np.exp(self.top - self.peak)
        self._max_weights = np.ones_like(self.total)  # no weight of a block is larger
        self._reset_remembered()
        seen = [x.remembered_rows for x in found]
        if sum(map(len, seen)) * 16 < m:
            least = np.max([x.log_threshold for x in found], axis=0)
            self._remembered_rows, self._remembered_above = (
                np.concatenate(seen),
                np.exp(least - self.peak) * FLOAT32_SUM_MARGIN,
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
            np.maximum(s, -200, out=s)  # 0 of −∞ is left out
        slack, most = self.factors, (*terms.maxima, terms.spread)
        total, along = np.add.reduce(w, 1), _row_dot(w, s)  # BLAS would add too coarsely
        above = sum(a * b for a, b in zip(self._largest_factors, most, strict=False))
        wide = not above + slack.rounding_error(np.abs(unit).max(initial=0.0)) <= MAX_LINEAR_DELTA
        if wide:
            delta = (
                slack.multiply_terms(terms.stack_terms())
                + slack.rounding_error(unit.astype(float))[:, None]
            )
            alone, square = (np.exp(s + delta) - w).sum(axis=1), 0.0 * total
        elif terms.residual is None:
            alone = square = 0.0 * total
        else:
            alone, square = (w @ terms.residual) * slack.residual, _row_dot(w, w)
        if wide or terms.residual is None:
            most = (*most[:3], 0.0)
        alone, square = alone * FLOAT32_SUM_MARGIN, square * FLOAT32_SUM_MARGIN
        seen, least = self._find_heavy_rows(cut.start, unit, w, total)
        return ScannedBlock(
            cut.start, cut.size, wide, seen, top, total, along, alone, square, least, most
        )

    def _find_heavy_rows(
        self, start: int, unit: np.ndarray, w: np.ndarray, total: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Places of rows that may have a share worth remembering, and the logarithm (n,) of the
        weight that no other has: what is known so far of the sum is no more than it will be."""
        with np.errstate(divide="ignore", invalid="ignore"):
            # Another core may write at the same time: one of both sums is then left out.
            self._log_total = np.logaddexp(self._log_total, unit + np.log(total.astype(float)))
            least = self._log_total + np.log(MIN_REMEMBERED_SHARE)
            lowest = np.exp(np.minimum(least - unit, 80.0)).astype(np.float32)
        if (lowest > 1).all():
            return np.zeros(0, np.int64), least
        return start + _nonzero_columns(w >= lowest[:, None]), least

    def error_bound(self) -> ErrorBound:
        """How far the weights may be off."""
        with np.errstate(all="ignore"):
            together = np.sqrt(np.maximum(self.squared_sums, 0)) * self.spread
            rest = np.where(
                self.has_wide_errors[:, None],
                self.residual_sums,
                np.fmin(self.residual_sums, together),
            )
            loss = (
                (np.maximum(rest, 0) + self.rounding_errors * self.total)
                * self.factor
                * FLOAT32_SUM_MARGIN
            )
            grown = np.where(
                self.has_wide_errors[:, None], 1.0, np.expm1(self.max_errors) / self.max_errors
            )
        total, gain = (self.total * self.factor).sum(axis=0), (loss * grown).sum(axis=0)
        gain += UNDERFLOW_WEIGHT * self.weights.shape[1]
        return ErrorBound(self.peak, total, gain, loss.sum(axis=0))

    def _map_blocks(self, function: Callable[[int], Any]) -> list[Any]:
        """function(number of a block) for all, on all cores, in their order."""
        spans: Any = list(range(len(self.starts)))

        def apply_to_block(i: Any) -> list[Any]:
            return [function(i)]

        found: list[Any] = get_framework(self.weights).reduce_spans(
            apply_to_block, lambda one, two: one + two, [], spans
        )
        return found

    def _block_weights(self, i: int) -> np.ndarray:
        """The weights of a block, (n, c)."""
        return self.weights[:, self.starts[i] : self.starts[i] + self.sizes[i]]

    def _reset_remembered(self) -> None:
        """What `rows_above` has found: rows, and the weight (n,) that no other has."""
        self._remembered_rows, self._remembered_above = (
            np.zeros(0, np.int64),
            np.full(len(self.weights), np.inf),
        )

    def rows_above(self, least: np.ndarray) -> np.ndarray:
        """Places, ascending, of rows that have such a weight (n,) for one of the queries, with the
        largest score of all as the unit."""
        if (least < self._remembered_above).any():
            self._remembered_above = least / SEARCH_DEPTH_FACTOR
            self._remembered_rows = np.concatenate(self._map_blocks(self._rows_above_in_block))
        found = self.weights_at(self._remembered_rows) >= least[:, None]
        return np.asarray(self._remembered_rows[found.any(axis=0)])

    def _rows_above_in_block(self, i: int) -> np.ndarray:
        """Those of a block that are not lighter than the least."""
        with np.errstate(divide="ignore"):
            lowest = np.minimum(self._remembered_above / self.factor[i], 3e38).astype(np.float32)
        if (lowest > self._max_weights[i]).all():
            return np.zeros(0, np.int64)
        return np.asarray(
            self.starts[i] + _nonzero_columns(self._block_weights(i) >= lowest[:, None])
        )

    def unread_heavy_rows(self, share: float, tolerance: float) -> np.ndarray:
        """Places of rows not read yet that have at least this share of the weight of a query whose
        error is not within the tolerance."""
        bound = self.error_bound()
        least = np.where(bound.max_error > tolerance, bound.total * share, np.inf)
        at = self.rows_above(least)
        return np.asarray(at[~self._is_exact[at]])

    def weights_at(self, at: np.ndarray) -> np.ndarray:
        """The weights (n, k) of rows at places, with the largest score of all as the unit."""
        block = np.searchsorted(self.starts, at, side="right") - 1
        return np.asarray(self.weights[:, at] * self.factor[block].T)

    def set_exact_scores(self, at: np.ndarray, scores: np.ndarray, terms: np.ndarray) -> None:
        """Rows whose keys were read: their scores (n, c), and the terms (3, c) that they had."""
        block = np.searchsorted(self.starts, at, side="right") - 1
        edges = np.flatnonzero(np.diff(block, prepend=-1))
        touched, wide = block[edges], self.has_wide_errors[block]
        self._is_exact[at] = True
        seen = (
            self.weights[:, at] > UNDERFLOW_WEIGHT
        )  # of others neither is known well enough to change it
        rise = np.maximum.reduceat(np.where(seen, scores - self.top[block].T, 0.0), edges, axis=1)
        for i in touched[(rise > MAX_SCORE_RISE).any(axis=0)]:
            self._rescale_block(i, np.maximum(rise[:, np.searchsorted(touched, i)], 0.0))
        with np.errstate(all="ignore"):
            old = np.where(seen, self.weights[:, at], 0.0)
            x = scores - self.top[block].T
            new, log = np.where(seen, np.exp(x), 0.0), np.log(np.where(seen, old, 1.0))
            part = old * np.outer(self.factors.residual, terms[0])
            if wide.any():
                least = self.factors.rounding_error(self.top[block].T)
                spent = (
                    np.where(seen, np.exp(log + self.factors.multiply_terms(terms) + least), 0.0)
                    - old
                )
                # What arithmetic loses of the new ones has no other place.
                part = np.where(wide, spent - new * np.expm1(least), part)
            along = np.where(seen, new * x, 0.0) - old * log
        self.weights[:, at] = np.where(seen, new, self.weights[:, at])
        high = np.maximum.reduceat(new, edges, axis=1).T
        self._max_weights[touched] = np.maximum(
            self._max_weights[touched], high * FLOAT32_SUM_MARGIN
        )
        for sums, change in (
            (self.total, new - old),
            (self.entropy_sums, along),
            (self.residual_sums, -part),
            (self.squared_sums, -old * old),
        ):
            sums[touched] += np.add.reduceat(change, edges, axis=1).T

    def _rescale_block(self, i: int, rise: np.ndarray) -> None:
        """Measure a block from scores (n,) that are so much higher."""
        part, less = self._block_weights(i), np.exp(-rise)
        np.multiply(part, less.astype(np.float32)[:, None], out=part)
        self.entropy_sums[i] = (self.entropy_sums[i] - rise * self.total[i]) * less
        self.squared_sums[i] *= less * less
        self.total[i] *= less
        self.residual_sums[i] *= less
        self.top[i] += rise
        self.peak = np.maximum(self.peak, self.top[i])
        self.factor = np.exp(self.top - self.peak)
        self._reset_remembered()  # the unit is another

    def prune_rows(self, tolerance: float, most: int) -> PrunedWeights | None:
        """Leave out rows as far as the tolerance allows; None where more than so many are left."""
        bound, grown = self.error_bound(), np.exp(self.max_errors.max(axis=0))
        spare = (tolerance - bound.max_error) * 0.95 * bound.total / grown
        share, lost = np.full(len(spare), 1e-3), bound.total * 1e-5
        while (spare > lost).all() and (share > UNDERFLOW_WEIGHT).all():
            at = self.rows_above(bound.total * share)
            if len(at) > most:
                return None
            w = self.weights_at(at)
            kept = w.sum(axis=1, dtype=float)
            # What is left is the rest of a sum that is known but for its rounding.
            left = np.maximum(bound.total + lost - kept, 0.0)
            if (left <= spare).all():
                return PrunedWeights(
                    at, w, bound._replace(total=kept, gain=bound.gain + left * grown)
                )
            share[left > spare] /= 8
        return None

    def keep_only(self, at: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """(n, m), in the place of the weights: these (n, k) of rows at places, and 0."""
        self._map_blocks(lambda i: self._block_weights(i).fill(0))
        out = self.weights.astype(weights.dtype, copy=False)
        out[:, at] = weights
        return out

    def normalize_weights(self, total: np.ndarray) -> np.ndarray:
        """α (n, m), in the place of the weights, and its entropy (n,)."""
        over = (self.factor / np.where(total > 0, total, 1.0)).astype(np.float32)

        def scale_block(i: int) -> None:
            part = self._block_weights(i)
            np.multiply(part, over[i][:, None], out=part)

        self._map_blocks(scale_block)
        with np.errstate(all="ignore"):
            apart = np.where(self.total > 0, (self.top - self.peak) * self.total, 0.0)
        along = ((self.entropy_sums + apart) * self.factor).sum(axis=0)
        some = np.where(total > 0, total, 1.0)
        return np.asarray(np.fmax(np.log(some) - along / some, 0.0))

    def sample_rows(self, i: int, count: int, rng: Any) -> tuple[np.ndarray, np.ndarray, float]:
        """Rows for one query, drawn by their largest part in its bound: places, which may repeat,
        the e^δ − 1 of each; and the sum of all parts."""
        part = np.expm1(self.max_errors[:, i])
        each = self.factor[:, i] * self.total[:, i] * part * FLOAT32_SUM_MARGIN
        if not 0 < each.sum() < np.inf or (self.max_errors[:, i] > 60).any():
            return np.zeros(0, np.int64), part[:0], 0.0
        times = rng.multinomial(count, each / each.sum())
        at = []
        for block in np.flatnonzero(times).tolist():
            along = np.cumsum(self._block_weights(block)[i].astype(float))
            some = np.searchsorted(along, rng.random(times[block]) * along[-1], side="right")
            at.append(self.starts[block] + np.minimum(some, len(along) - 1))
        return np.concatenate(at), np.repeat(part, times), float(each.sum())


def _finite_top(top: np.ndarray) -> np.ndarray:
    """The largest scores, 0 where none is finite."""
    return np.where(np.isfinite(top), top, top.dtype.type(0))


def _nonzero_columns(found: np.ndarray) -> np.ndarray:
    """Which columns have something that is true, ascending."""
    return np.flatnonzero(found[0] if len(found) == 1 else found.any(axis=0))


def _row_dot(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Σ over each row, (n,): by BLAS, which goes through both once."""
    return np.asarray((one[:, None, :] @ two[:, :, None])[:, 0, 0])
