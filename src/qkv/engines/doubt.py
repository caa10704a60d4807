"""Scores that are known to within δ, one by one: what their weights come to, which rows to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.arrays import of
from qkv.engines.scan import FAINT, Slack
from qkv.types import Span
from qkv.weightings.bound import Bound

CACHED = 2**18
"""Scores of a run of rows whose passes find them in the cache."""


class Doubt:
    """Scores (n, m), each off by at most δ: the slack of terms (3, m), as `scan.Terms` has them."""

    def __init__(self, scores: np.ndarray, slack: Slack):
        n, m = scores.shape
        self.scores, self.slack = scores, slack
        self.terms = np.zeros((3, m), np.float32)
        self.dead: np.ndarray | None = None
        self.top, self.least, self.total = np.zeros((3, n))
        self.profile: Callable[..., Any] | None = None
        self.offset: Any = 0.0
        self.rounded: Any = 0.0
        """What a score (n,) may be off by rounding beside the slack of its terms."""

    @property
    def unit(self) -> float:
        return float(np.finfo(self.scores.dtype).eps / 2)

    def among(self, allowed: np.ndarray | None) -> None:
        """Leave out the rows that are not allowed."""
        if allowed is not None:
            self.dead = np.flatnonzero(~allowed)
            self.scores[:, self.dead] = -np.inf
            self.terms[:, self.dead] = 0

    def exactly(self, scores: np.ndarray, slack: Slack) -> Doubt:
        """The same rows with scores that were made of their keys."""
        found = Doubt(scores, slack)
        found.terms[1:], found.dead, found.rounded = self.terms[1:], self.dead, self.rounded
        if self.dead is not None:
            found.scores[:, self.dead] = -np.inf
        return found

    # What the weights come to

    def weigh(self, profile: Callable[..., Any] | None = None, offset: Any = None) -> np.ndarray:
        """Fix the unit of the weights: e^(score − largest), or the `profile` of −score. Gives the
        largest scores (n,)."""
        self.profile, self.offset = profile, 0.0 if offset is None else np.abs(offset)
        return self._rise()

    def _rise(self) -> np.ndarray:
        lowest = np.full(len(self.scores), -np.inf)
        most = self._each(lambda at: self.scores[:, at].max(axis=1), np.maximum, lowest)
        most = np.where(np.isfinite(most), most, 0.0).astype(float)
        # Subtraction and exponential round too.
        self.least = self.unit * (4 * np.abs(most) + 16 + 8 * self.offset) + self.rounded
        if self.profile is None:
            self.top = most
        return np.asarray(most)

    def deltas(self, at: Any) -> np.ndarray:
        """δ (n, c) of some rows."""
        # Numbers that the dtype rounds to 0 are none.
        faint = np.finfo(self.scores.dtype).tiny * (self.slack.norm > 0)
        return np.asarray(self.slack.over(self.terms[:, at]) + (self.least + faint)[:, None])

    def _from(self, x: np.ndarray) -> np.ndarray:
        """The weights, not yet divided by their sum, of scores below the top."""
        if self.profile is None:
            return np.asarray(np.exp(x))
        return np.asarray(self.profile(np.maximum(-x, 0)))

    def _below(self, at: Any) -> np.ndarray:
        return np.asarray(self.scores[:, at] - self.top.astype(self.scores.dtype)[:, None])

    def _each(self, function: Callable[[slice], Any], merge: Any, start: Any) -> Any:
        n, m = self.scores.shape
        step = max(CACHED // max(n, 1), 1)
        spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]

        def lift(span: Span) -> Any:
            return function(slice(span.start, span.start + span.size))

        with np.errstate(all="ignore"):
            return of(self.scores).reduce(lift, merge, start, spans)

    def bound(self) -> Bound:
        """How far the weights may be off."""
        n, m = self.scores.shape
        found: Bound = self._each(self._bound, Bound.merge, Bound(self.top, *np.zeros((3, n))))
        self.total = found.total
        if self.profile is None:
            return found._replace(gain=found.gain + FAINT * m)
        # what the quotient and its numbers are rounded by
        return found._replace(gain=found.gain + 8 * self.unit * found.total)

    def _bound(self, at: slice) -> Bound:
        x = self._below(at).astype(float)
        w, delta = self._from(x), self.deltas(at)
        high, low = self._from(x + delta), self._from(x - delta)
        gain, loss = (high - w).sum(axis=1), (w - low).sum(axis=1)
        return Bound(self.top, w.sum(axis=1), gain, loss)

    def anchored(self) -> np.ndarray:
        """The same error with all scores measured from the largest, whose own is then 0: where one
        row has all weight, however high, that is known."""
        out = np.ones(len(self.scores))
        with np.errstate(all="ignore"):
            deltas = self.deltas(slice(None)).astype(float)
            for i, s in enumerate(self.scores.astype(float)):
                out[i] = from_largest(s, deltas[i])
        return np.minimum(out + 8 * self.unit, 1.0)  # the quotients are rounded too

    def weights(self, out: np.ndarray) -> np.ndarray:
        """Put α into `out` (n, m), and give its entropy (n,)."""
        total = np.where(self.total > 0, self.total, 1.0)

        def fill(run: slice) -> np.ndarray:
            x = self._below(run)
            w = self._from(x)
            if self.profile is None:  # −Σ w ln w, with 0 of −∞ left out
                along = np.einsum("ij,ij->i", w, np.maximum(x, -200))
            else:
                along = np.einsum("ij,ij->i", w, np.log(np.where(w > 0, w, 1)))
            w /= total.astype(w.dtype)[:, None]
            out[:, run] = w
            return np.asarray(along, float)

        along = self._each(fill, np.add, np.zeros(len(out)))
        return np.asarray(np.fmax(np.log(total) - along / total, 0.0))

    # Which rows to look at

    def largest(self, budget: float, most: int) -> np.ndarray:
        """Places, ascending, of the rows without which the bound is at most so much; of as many as
        may be read, the first. `bound` must have been asked before."""
        share = np.empty(self.scores.shape[1], np.float32)
        total = np.where(self.total > 0, self.total, 1e-30)[:, None]

        def fill(at: slice) -> None:
            x, delta = self._below(at), self.deltas(at)
            share[at] = ((self._from(x + delta) - self._from(x - delta)) / total).max(axis=0)

        self._each(fill, lambda one, two: None, None)
        return _heaviest(share, budget, most)

    def settle(self, at: np.ndarray, scores: np.ndarray) -> None:
        """Rows whose keys were read: their scores (n, c)."""
        self.scores[:, at] = np.where(np.isfinite(self.scores[:, at]), scores, -np.inf)
        self.terms[0, at] = 0
        self._rise()

    def rivals(self, k: int) -> np.ndarray:
        """Places, ascending, of all rows that may be among the k largest of a query."""
        n, m = self.scores.shape
        least = np.full((n, k), -np.inf)

        def best(at: slice) -> np.ndarray:
            low = self.scores[:, at] - self.deltas(at)
            low = np.where(np.isnan(low), -np.inf, low)
            return low if low.shape[1] <= k else -np.partition(-low, k - 1, axis=1)[:, :k]

        def join(one: np.ndarray, two: np.ndarray) -> np.ndarray:
            both = np.concatenate([one, two], axis=1)
            return -np.partition(-both, k - 1, axis=1)[:, :k]

        floor = self._each(best, join, least).min(axis=1)[:, None]
        found = np.empty(m, bool)

        def near(at: slice) -> None:
            found[at] = (~(self.scores[:, at] + self.deltas(at) < floor)).any(axis=0)

        self._each(near, lambda one, two: None, None)
        if self.dead is not None:
            found[self.dead] = False
        return np.flatnonzero(found)


def from_largest(s: np.ndarray, slack: np.ndarray) -> float:
    """How far softmax of scores (m,) may be off, measured from the largest."""
    t = int(s.argmax())
    x, delta = s - s[t], slack + slack[t]
    delta[t] = 0
    w, high, low = np.exp(x), np.exp(x + delta), np.exp(x - delta)
    sums = w.sum(), (high - w).sum(), (w - low).sum()
    return float(Bound(np.zeros(1), *map(np.atleast_1d, sums)).error[0])


def _heaviest(x: np.ndarray, budget: float, most: int) -> np.ndarray:
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
