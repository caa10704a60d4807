"""Scores that are known to within δ, one by one: what their weights come to, which rows to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.engines.out_of_core.scan import UNDERFLOW_WEIGHT, ErrorFactors
from qkv.frameworks import get_framework
from qkv.util.types import Span
from qkv.weightings.error_bound import ErrorBound

MAX_CACHED_SCORES = 2**18
"""Scores of a run of rows whose passes find them in the cache."""


class ScoreIntervals:
    """Scores (n, m), each off by at most δ: the slack of terms (3, m), as `scan.Terms` has them."""

    def __init__(self, scores: np.ndarray, slack: ErrorFactors):
        n, m = scores.shape
        self.scores, self.factors = scores, slack
        self.terms = np.zeros((3, m), np.float32)
        self.excluded_rows: np.ndarray | None = None
        self.top, self.rounding_slack, self.total = np.zeros((3, n))
        self.profile: Callable[..., Any] | None = None
        self.offset: Any = 0.0
        self.rounded: Any = 0.0
        """What a score (n,) may be off by rounding beside the slack of its terms."""

    @property
    def rounding_unit(self) -> float:
        return float(np.finfo(self.scores.dtype).eps / 2)

    def exclude_disallowed(self, allowed: np.ndarray | None) -> None:
        """Leave out the rows that are not allowed."""
        if allowed is not None:
            self.excluded_rows = np.flatnonzero(~allowed)
            self.scores[:, self.excluded_rows] = -np.inf
            self.terms[:, self.excluded_rows] = 0

    def with_exact_scores(self, scores: np.ndarray, slack: ErrorFactors) -> ScoreIntervals:
        """The same rows with scores that were made of their keys."""
        found = ScoreIntervals(scores, slack)
        found.terms[1:], found.excluded_rows, found.rounded = (
            self.terms[1:],
            self.excluded_rows,
            self.rounded,
        )
        if self.excluded_rows is not None:
            found.scores[:, self.excluded_rows] = -np.inf
        return found

    # What the weights come to

    def set_weight_unit(
        self, profile: Callable[..., Any] | None = None, offset: Any = None
    ) -> np.ndarray:
        """Fix the unit of the weights: e^(score − largest), or the `profile` of −score. Gives the
        largest scores (n,)."""
        self.profile, self.offset = profile, 0.0 if offset is None else np.abs(offset)
        return self._update_top()

    def _update_top(self) -> np.ndarray:
        lowest = np.full(len(self.scores), -np.inf)
        most = self._reduce_spans(lambda at: self.scores[:, at].max(axis=1), np.maximum, lowest)
        most = np.where(np.isfinite(most), most, 0.0).astype(float)
        # Subtraction and exponential round too.
        self.rounding_slack = (
            self.rounding_unit * (4 * np.abs(most) + 16 + 8 * self.offset) + self.rounded
        )
        if self.profile is None:
            self.top = most
        return np.asarray(most)

    def score_errors(self, at: Any) -> np.ndarray:
        """δ (n, c) of some rows."""
        # Numbers that the dtype rounds to 0 are none.
        faint = np.finfo(self.scores.dtype).tiny * (self.factors.norm > 0)
        return np.asarray(
            self.factors.multiply_terms(self.terms[:, at]) + (self.rounding_slack + faint)[:, None]
        )

    def _weights_from(self, x: np.ndarray) -> np.ndarray:
        """The weights, not yet divided by their sum, of scores below the top."""
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
        """How far the weights may be off."""
        n, m = self.scores.shape
        found: ErrorBound = self._reduce_spans(
            self._span_bound, ErrorBound.merge, ErrorBound(self.top, *np.zeros((3, n)))
        )
        self.total = found.total
        if self.profile is None:
            return found._replace(gain=found.gain + UNDERFLOW_WEIGHT * m)
        # what the quotient and its numbers are rounded by
        return found._replace(gain=found.gain + 8 * self.rounding_unit * found.total)

    def _span_bound(self, at: slice) -> ErrorBound:
        x = self._scores_below_top(at).astype(float)
        w, delta = self._weights_from(x), self.score_errors(at)
        high, low = self._weights_from(x + delta), self._weights_from(x - delta)
        gain, loss = (high - w).sum(axis=1), (w - low).sum(axis=1)
        return ErrorBound(self.top, w.sum(axis=1), gain, loss)

    def error_from_largest(self) -> np.ndarray:
        """The same error with all scores measured from the largest, whose own is then 0: where one
        row has all weight, however high, that is known."""
        out = np.ones(len(self.scores))
        with np.errstate(all="ignore"):
            deltas = self.score_errors(slice(None)).astype(float)
            for i, s in enumerate(self.scores.astype(float)):
                out[i] = softmax_error_from_largest(s, deltas[i])
        return np.minimum(out + 8 * self.rounding_unit, 1.0)  # the quotients are rounded too

    def fill_weights(self, out: np.ndarray) -> np.ndarray:
        """Put α into `out` (n, m), and give its entropy (n,)."""
        total = np.where(self.total > 0, self.total, 1.0)

        def fill_span(run: slice) -> np.ndarray:
            x = self._scores_below_top(run)
            w = self._weights_from(x)
            if self.profile is None:  # −Σ w ln w, with 0 of −∞ left out
                along = np.einsum("ij,ij->i", w, np.maximum(x, -200))
            else:
                along = np.einsum("ij,ij->i", w, np.log(np.where(w > 0, w, 1)))
            w /= total.astype(w.dtype)[:, None]
            out[:, run] = w
            return np.asarray(along, float)

        along = self._reduce_spans(fill_span, np.add, np.zeros(len(out)))
        return np.asarray(np.fmax(np.log(total) - along / total, 0.0))

    # Which rows to look at

    def rows_to_read(self, budget: float, most: int) -> np.ndarray:
        """Places, ascending, of the rows without which the bound is at most so much; of as many as
        may be read, the first. `error_bound` must have been asked before."""
        share = np.empty(self.scores.shape[1], np.float32)
        total = np.where(self.total > 0, self.total, 1e-30)[:, None]

        def fill_span(at: slice) -> None:
            x, delta = self._scores_below_top(at), self.score_errors(at)
            share[at] = (
                (self._weights_from(x + delta) - self._weights_from(x - delta)) / total
            ).max(axis=0)

        self._reduce_spans(fill_span, lambda one, two: None, None)
        return _largest_over_budget(share, budget, most)

    def set_exact_scores(self, at: np.ndarray, scores: np.ndarray) -> None:
        """Rows whose keys were read: their scores (n, c)."""
        self.scores[:, at] = np.where(np.isfinite(self.scores[:, at]), scores, -np.inf)
        self.terms[0, at] = 0
        self._update_top()

    def top_k_candidates(self, k: int) -> np.ndarray:
        """Places, ascending, of all rows that may be among the k largest of a query."""
        n, m = self.scores.shape
        least = np.full((n, k), -np.inf)

        def best_of_span(at: slice) -> np.ndarray:
            low = self.scores[:, at] - self.score_errors(at)
            low = np.where(np.isnan(low), -np.inf, low)
            return low if low.shape[1] <= k else -np.partition(-low, k - 1, axis=1)[:, :k]

        def merge_best(one: np.ndarray, two: np.ndarray) -> np.ndarray:
            both = np.concatenate([one, two], axis=1)
            return -np.partition(-both, k - 1, axis=1)[:, :k]

        floor = self._reduce_spans(best_of_span, merge_best, least).min(axis=1)[:, None]
        found = np.empty(m, bool)

        def mark_candidates(at: slice) -> None:
            found[at] = (~(self.scores[:, at] + self.score_errors(at) < floor)).any(axis=0)

        self._reduce_spans(mark_candidates, lambda one, two: None, None)
        if self.excluded_rows is not None:
            found[self.excluded_rows] = False
        return np.flatnonzero(found)


def softmax_error_from_largest(s: np.ndarray, slack: np.ndarray) -> float:
    """How far softmax of scores (m,) may be off, measured from the largest."""
    t = int(s.argmax())
    x, delta = s - s[t], slack + slack[t]
    delta[t] = 0
    w, high, low = np.exp(x), np.exp(x + delta), np.exp(x - delta)
    sums = w.sum(), (high - w).sum(), (w - low).sum()
    return float(ErrorBound(np.zeros(1), *map(np.atleast_1d, sums)).max_error[0])


def _largest_over_budget(x: np.ndarray, budget: float, most: int) -> np.ndarray:
    """Places, ascending, of the numbers without which the sum is at most so much; the largest of
    them where they are more than so many."""
    x = np.where(np.isnan(x), np.float32(np.inf), x).astype(np.float32, copy=False)
    at = np.flatnonzero(x > budget / (2 * len(x)))
    some = x[at]
    kind = some.view(np.int32) >> 20  # an eighth of an octave
    sums, counts = (np.bincount(kind, y, 2048) for y in (np.minimum(some, 1e30), None))
    low = int(np.searchsorted(np.cumsum(sums), budget / 2, side="right"))
    if counts[low:].sum() > most:
        low = 2048 - int(np.searchsorted(np.cumsum(counts[::-1]), most, side="right"))
    return np.asarray(at[kind >= low])
