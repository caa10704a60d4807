"""Scores with one error bound δ per row and query, and bounds on the weights computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.engines.out_of_core.scan import UNDERFLOW_WEIGHT, ErrorFactors
from qkv.frameworks import get_framework
from qkv.util.types import Span
from qkv.weightings.error_bound import ErrorBound

MAX_CACHED_SCORES = 2**18
"""Scores of a span of rows, so that the span fits the processor's cache."""


class ScoreIntervals:
    """Scores (n, m), each with an error of at most δ.

    δ is computed from error terms (3, m) and the factors of the queries, as `scan.ErrorTerms` and
    `scan.ErrorFactors` define them.
    """

    def __init__(self, scores: np.ndarray, factors: ErrorFactors):
        n, m = scores.shape
        self.scores, self.factors = scores, factors
        self.terms = np.zeros((3, m), np.float32)
        self.excluded_rows: np.ndarray | None = None
        self.top, self.rounding_slack, self.total = np.zeros((3, n))
        self.profile: Callable[..., Any] | None = None
        self.offset: Any = 0.0
        self.rounded: Any = 0.0
        """Rounding error (n,) of a score in addition to that of its terms."""

    @property
    def rounding_unit(self) -> float:
        return float(np.finfo(self.scores.dtype).eps / 2)

    def exclude_disallowed(self, allowed: np.ndarray | None) -> None:
        """Set the scores of rows that are not allowed to −∞."""
        if allowed is not None:
            self.excluded_rows = np.flatnonzero(~allowed)
            self.scores[:, self.excluded_rows] = -np.inf
            self.terms[:, self.excluded_rows] = 0

    def with_exact_scores(self, scores: np.ndarray, factors: ErrorFactors) -> ScoreIntervals:
        """Return an object for the same rows, with exact scores (n, m) that come from the keys."""
        intervals = ScoreIntervals(scores, factors)
        intervals.terms[1:], intervals.excluded_rows, intervals.rounded = (
            self.terms[1:],
            self.excluded_rows,
            self.rounded,
        )
        if self.excluded_rows is not None:
            intervals.scores[:, self.excluded_rows] = -np.inf
        return intervals

    # Weights and their bounds

    def set_weight_unit(
        self, profile: Callable[..., Any] | None = None, offset: Any = None
    ) -> np.ndarray:
        """Set how weights follow from scores: e^(score − largest), or the `profile` of −score.

        Return the largest scores (n,).
        """
        self.profile, self.offset = profile, 0.0 if offset is None else np.abs(offset)
        return self._update_top()

    def _update_top(self) -> np.ndarray:
        lower_bound = np.full(len(self.scores), -np.inf)
        largest = self._reduce_spans(
            lambda at: self.scores[:, at].max(axis=1), np.maximum, lower_bound
        )
        largest = np.where(np.isfinite(largest), largest, 0.0).astype(float)
        # Subtracting the largest score and the exponential also cause rounding errors.
        self.rounding_slack = (
            self.rounding_unit * (4 * np.abs(largest) + 16 + 8 * self.offset) + self.rounded
        )
        if self.profile is None:
            self.top = largest
        return np.asarray(largest)

    def score_errors(self, at: Any) -> np.ndarray:
        """Return δ (n, c) of the rows `at`."""
        # The dtype may have rounded small numbers to 0.
        underflow = np.finfo(self.scores.dtype).tiny * (self.factors.norm > 0)
        return np.asarray(
            self.factors.multiply_terms(self.terms[:, at])
            + (self.rounding_slack + underflow)[:, None]
        )

    def _weights_from(self, x: np.ndarray) -> np.ndarray:
        """Return the unnormalized weights of score differences x = score − top."""
        if self.profile is None:
            return np.asarray(np.exp(x))
        return np.asarray(self.profile(np.maximum(-x, 0)))

    def _scores_below_top(self, at: Any) -> np.ndarray:
        return np.asarray(self.scores[:, at] - self.top.astype(self.scores.dtype)[:, None])

    def _reduce_spans(self, function: Callable[[slice], Any], merge: Any, start: Any) -> Any:
        n, m = self.scores.shape
        step = max(MAX_CACHED_SCORES // max(n, 1), 1)
        spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]

        def apply_to_span(span: Span) -> Any:
            return function(slice(span.start, span.start + span.size))

        with np.errstate(all="ignore"):
            return get_framework(self.scores).reduce_spans(apply_to_span, merge, start, spans)

    def error_bound(self) -> ErrorBound:
        """Return bounds on the errors of all weights."""
        n, m = self.scores.shape
        bound: ErrorBound = self._reduce_spans(
            self._span_bound, ErrorBound.merge, ErrorBound(self.top, *np.zeros((3, n)))
        )
        self.total = bound.total
        if self.profile is None:
            return bound._replace(gain=bound.gain + UNDERFLOW_WEIGHT * m)
        # Numerator, denominator and quotient are rounded.
        return bound._replace(gain=bound.gain + 8 * self.rounding_unit * bound.total)

    def _span_bound(self, at: slice) -> ErrorBound:
        x = self._scores_below_top(at).astype(float)
        w, delta = self._weights_from(x), self.score_errors(at)
        high, low = self._weights_from(x + delta), self._weights_from(x - delta)
        gain, loss = (high - w).sum(axis=1), (w - low).sum(axis=1)
        return ErrorBound(self.top, w.sum(axis=1), gain, loss)

    def error_from_largest(self) -> np.ndarray:
        """Return the error (n,) that follows from the score differences to the largest score.

        This bound is small if one row has nearly all the weight, even if its score is uncertain.
        """
        out = np.ones(len(self.scores))
        with np.errstate(all="ignore"):
            deltas = self.score_errors(slice(None)).astype(float)
            for i, s in enumerate(self.scores.astype(float)):
                out[i] = softmax_error_from_largest(s, deltas[i])
        return np.minimum(out + 8 * self.rounding_unit, 1.0)  # allow for rounding of the quotients

    def fill_weights(self, out: np.ndarray) -> np.ndarray:
        """Write α to `out` (n, m) and return its entropy (n,)."""
        total = np.where(self.total > 0, self.total, 1.0)

        def fill_span(at: slice) -> np.ndarray:
            x = self._scores_below_top(at)
            w = self._weights_from(x)
            if self.profile is None:  # 0 · −∞ must count as 0
                entropy_sum = np.einsum("ij,ij->i", w, np.maximum(x, -200))
            else:
                entropy_sum = np.einsum("ij,ij->i", w, np.log(np.where(w > 0, w, 1)))
            w /= total.astype(w.dtype)[:, None]
            out[:, at] = w
            return np.asarray(entropy_sum, float)

        entropy_sum = self._reduce_spans(fill_span, np.add, np.zeros(len(out)))
        return np.asarray(np.fmax(np.log(total) - entropy_sum / total, 0.0))

    # Selection of rows

    def rows_to_read(self, budget: float, max_rows: int) -> np.ndarray:
        """Return the ascending positions of the rows to read so that the bound meets the budget.

        If these are more than `max_rows`, return about `max_rows` with the largest errors. Call
        `error_bound` first.
        """
        max_shares = np.empty(self.scores.shape[1], np.float32)
        total = np.where(self.total > 0, self.total, 1e-30)[:, None]

        def fill_span(at: slice) -> None:
            x, delta = self._scores_below_top(at), self.score_errors(at)
            max_shares[at] = (
                (self._weights_from(x + delta) - self._weights_from(x - delta)) / total
            ).max(axis=0)

        self._reduce_spans(fill_span, lambda one, two: None, None)
        return _largest_over_budget(max_shares, budget, max_rows)

    def set_exact_scores(self, at: np.ndarray, scores: np.ndarray) -> None:
        """Replace the scores of rows by exact ones (n, c)."""
        self.scores[:, at] = np.where(np.isfinite(self.scores[:, at]), scores, -np.inf)
        self.terms[0, at] = 0
        self._update_top()

    def top_k_candidates(self, k: int) -> np.ndarray:
        """Return the ascending positions of all rows whose score may be among a query's k best."""
        n, m = self.scores.shape
        lower_bounds = np.full((n, k), -np.inf)

        def best_of_span(at: slice) -> np.ndarray:
            low = self.scores[:, at] - self.score_errors(at)
            low = np.where(np.isnan(low), -np.inf, low)
            return low if low.shape[1] <= k else -np.partition(-low, k - 1, axis=1)[:, :k]

        def merge_best(one: np.ndarray, two: np.ndarray) -> np.ndarray:
            both = np.concatenate([one, two], axis=1)
            return -np.partition(-both, k - 1, axis=1)[:, :k]

        threshold = self._reduce_spans(best_of_span, merge_best, lower_bounds).min(axis=1)[:, None]
        is_candidate = np.empty(m, bool)

        def mark_candidates(at: slice) -> None:
            is_candidate[at] = (~(self.scores[:, at] + self.score_errors(at) < threshold)).any(
                axis=0
            )

        self._reduce_spans(mark_candidates, lambda one, two: None, None)
        if self.excluded_rows is not None:
            is_candidate[self.excluded_rows] = False
        return np.flatnonzero(is_candidate)


def softmax_error_from_largest(s: np.ndarray, errors: np.ndarray) -> float:
    """Return the error of the softmax of scores (m,), from their differences to the largest."""
    largest = int(s.argmax())
    x, delta = s - s[largest], errors + errors[largest]
    delta[largest] = 0
    w, high, low = np.exp(x), np.exp(x + delta), np.exp(x - delta)
    sums = w.sum(), (high - w).sum(), (w - low).sum()
    return float(ErrorBound(np.zeros(1), *map(np.atleast_1d, sums)).max_error[0])


def _largest_over_budget(x: np.ndarray, budget: float, max_count: int) -> np.ndarray:
    """Return the ascending positions of the largest numbers; the others sum to at most `budget`.

    Return at most about `max_count` positions. A bin holds the numbers of ⅛ octave, and bins are
    returned whole.
    """
    x = np.where(np.isnan(x), np.float32(np.inf), x).astype(np.float32, copy=False)
    at = np.flatnonzero(x > budget / (2 * len(x)))
    values = x[at]
    bins = values.view(np.int32) >> 20  # bins of an eighth of an octave
    sums, counts = (np.bincount(bins, y, 2048) for y in (np.minimum(values, 1e30), None))
    first_bin = int(np.searchsorted(np.cumsum(sums), budget / 2, side="right"))
    if counts[first_bin:].sum() > max_count:
        first_bin = 2048 - int(np.searchsorted(np.cumsum(counts[::-1]), max_count, side="right"))
    return np.asarray(at[bins >= first_bin])
