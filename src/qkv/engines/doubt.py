"""Scores that are known to within δ: what their weights come to, and which rows to look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from qkv.arrays import of
from qkv.weightings.bound import Bound

CACHED = 2**18
"""Scores of a run of rows whose passes find them in the cache."""

LINEAR = 0.5
"""δ up to which e^δ − 1 is bounded by a line through 0."""

CAREFUL = 1.001
"""What sums in float32 over a run of rows may have lost, with room to spare."""

FAINT = 1e-30
"""More than the weight of a row that float32 rounds to 0, beside one of 1."""

DRAWN = 4096
"""Rows that are drawn where a bound is statistical."""

RESIDUAL, REACH, LENGTH, BIAS = range(4)
"""Of each row, what δ is made of: the residual of its code; the length of its code, which meets
what the query has lost; the length of its key, and its bias, which meet what arithmetic loses."""


class Doubt:
    """Scores (n, m), each off by at most δ = parts (n, 4) · terms (m, 4) + least (n,).

    Residuals of one block also count together: `spread` (m,), `block` (m,).
    """

    def __init__(self, scores: np.ndarray, length: np.ndarray, parts: np.ndarray):
        n, m = scores.shape
        self.scores, self.length, self.parts = scores, length, parts
        self.terms = np.zeros((m, 4), np.float32)
        self.spread = np.full(m, np.inf, np.float32)
        self.block = np.zeros(m, np.uint32)
        self.dead: np.ndarray | None = None
        self.top, self.least, self.pruned, self.total = np.zeros((4, n))
        self.profile: Callable[..., Any] | None = None
        self.offset: Any = 0.0

    @classmethod
    def of(cls, phi: Any, rest: np.ndarray, m: int, dtype: Any) -> Doubt:
        """For queries φ (n, d), of which so much is lost, and m rows."""
        length = np.sqrt(np.einsum("ij,ij->i", phi, phi)) * CAREFUL
        unit = np.finfo(dtype).eps / 2
        parts = np.stack([length, rest, 8 * unit * length, np.full(len(phi), 8 * unit)], axis=1)
        return cls(np.empty((len(phi), m), dtype), length, parts * CAREFUL)

    @property
    def unit(self) -> float:
        return float(np.finfo(self.scores.dtype).eps / 2)

    def put(self, at: slice, terms: Any, spread: Any, block: np.ndarray | None) -> None:
        """What is known of some of the rows."""
        for i, term in enumerate(terms):
            self.terms[at, i] = term
        if spread is not None and block is not None:
            self.spread[at], self.block[at] = spread, block

    def among(self, allowed: np.ndarray | None) -> None:
        """Leave out the rows that are not allowed."""
        if allowed is not None:
            self.dead = np.flatnonzero(~allowed)
            self.scores[:, self.dead] = -np.inf
            self.terms[self.dead] = 0
            self.spread[self.dead] = 0

    def exactly(self, scores: np.ndarray, width: int) -> Doubt:
        """The same rows with scores that were made of keys of this width."""
        found = Doubt(scores, self.length, np.zeros_like(self.parts))
        found.terms[:, LENGTH:] = self.terms[:, LENGTH:]
        lost = 4 * (width + 8) * found.unit
        found.parts[:, LENGTH], found.parts[:, BIAS] = lost * self.length, lost
        found.dead = self.dead
        if self.dead is not None:
            found.scores[:, self.dead] = -np.inf
        return found

    # What the weights come to

    def weigh(self, profile: Callable[..., Any] | None, offset: Any = None) -> np.ndarray:
        """Fix the unit of the weights: e^(score − largest), or the `profile` of −score. Gives the
        largest scores (n,)."""
        self.profile, self.offset = profile, 0.0 if offset is None else np.abs(offset)
        return self._rise()

    def _rise(self) -> np.ndarray:
        lowest = np.full(len(self.scores), -np.inf)
        most = self._each(lambda at: self.scores[:, at].max(axis=1), np.maximum, lowest)
        most = np.where(np.isfinite(most), most, 0.0).astype(float)
        # Subtraction and exponential round too.
        self.least = self.unit * (4 * np.abs(most) + 16 + 8 * self.offset)
        if self.profile is None:
            with np.errstate(over="ignore"):
                self.pruned *= np.exp(self.top - most)
            self.top = most
        return np.asarray(most)

    def deltas(self, at: Any) -> np.ndarray:
        """δ (n, c) of some rows."""
        dtype = self.scores.dtype
        found = self.parts.astype(dtype) @ self.terms[at].T.astype(dtype, copy=False)
        found += self.least.astype(dtype)[:, None]
        return np.asarray(found)

    def fine(self, terms: np.ndarray, width: int) -> np.ndarray:
        """δ (n, c) of scores that were made of keys in float64, by their lengths and biases."""
        lost = 4 * (width + 8) * 2.0**-53
        return np.asarray(lost * (self.length[:, None] * terms[:, 0] + terms[:, 1]))

    def _from(self, x: np.ndarray) -> np.ndarray:
        """The weights, not yet divided by their sum, of scores below the top."""
        if self.profile is None:
            return np.asarray(np.exp(x))
        return np.asarray(self.profile(np.maximum(-x, 0)))

    def _below(self, at: Any) -> np.ndarray:
        return np.asarray(self.scores[:, at] - self.top.astype(self.scores.dtype)[:, None])

    @cached_property
    def _runs(self) -> list[slice]:
        """Runs of rows, which end where blocks do if they can."""
        n, m = self.scores.shape
        step = max(CACHED // max(n, 1), 1)
        ends = np.append(np.flatnonzero(np.diff(self.block)) + 1, m)
        found, at = [], 0
        while at < m:
            near = int(np.searchsorted(ends, at + step, side="right"))
            end = int(ends[near - 1]) if near and ends[near - 1] > at else min(at + step, m)
            found.append(slice(at, end))
            at = end
        return found

    def _each(self, function: Callable[[slice], Any], merge: Any, start: Any) -> Any:
        spans: list[Any] = self._runs
        with np.errstate(all="ignore"):
            return of(self.scores).reduce(function, merge, start, spans)  # type: ignore[arg-type]

    def _most(self, at: slice) -> np.ndarray:
        """No δ of these rows is larger, (n,)."""
        # Column by column, which NumPy does many times as fast as along so short an axis.
        terms = [float(column.max(initial=0.0)) for column in self.terms[at].T]
        return np.asarray(self.parts @ np.array(terms) + self.least)

    def bound(self) -> Bound:
        """How far the weights may be off."""
        n = len(self.scores)
        none = Bound(self.top, *np.zeros((3, n)))
        found: Bound = self._each(self._bound, _added, none)
        if self.profile is None:
            more = self.pruned + FAINT * self.scores.shape[1]
        else:  # what the quotient and its numbers are rounded by
            more = self.pruned + 8 * self.unit * found.total
        self.total = found.total
        return found._replace(gain=found.gain + more)

    def _bound(self, at: slice) -> Bound:
        x, terms = self._below(at), self.terms[at]
        most = self._most(at)
        if self.profile is not None or not (most <= LINEAR).all():
            x = x.astype(float)
            w, delta = self._from(x), self.deltas(at)
            high, low = self._from(x + delta), self._from(x - delta)
            gain, loss = (high - w).sum(axis=1), (w - low).sum(axis=1)
            return Bound(self.top, w.sum(axis=1), gain, loss)
        w = np.exp(x, out=x)
        total = w.sum(axis=1).astype(float)
        rest = ((w @ terms[:, REACH:]) * self.parts[:, REACH:]).sum(axis=1) + self.least * total
        starts = np.flatnonzero(np.diff(self.block[at], prepend=self.block[at][:1] + 1))
        alone = np.add.reduceat(w * terms[:, RESIDUAL], starts, axis=1)
        if np.isfinite(self.spread[at.start]):
            w *= self.spread[at]
            together = np.sqrt(np.add.reduceat(np.square(w, out=w), starts, axis=1))
            alone = np.fmin(alone, together)
        rest += self.parts[:, RESIDUAL] * alone.sum(axis=1)
        loss = rest * CAREFUL
        return Bound(self.top, total, loss * np.expm1(most) / most, loss)

    def anchored(self) -> np.ndarray:
        """The same error with all scores measured from the largest, whose own is then 0: where one
        row has all weight, however high, that is known."""
        out = np.ones(len(self.scores))
        with np.errstate(all="ignore"):
            for i, s in enumerate(self.scores.astype(float)):
                t, delta = int(s.argmax()), self._one(i).deltas(slice(None))[0].astype(float)
                more = self.pruned[i] * np.exp(self.top[i] - s[t] + delta[t])
                x, delta = s - s[t], delta + delta[t]
                delta[t] = 0
                w, high, low = np.exp(x), np.exp(x + delta), np.exp(x - delta)
                sums = w.sum(), (high - w).sum() + more, (w - low).sum()
                out[i] = Bound(np.zeros(1), *map(np.atleast_1d, sums)).error[0]
        return out

    def weights(self, out: np.ndarray, at: Any = slice(None)) -> np.ndarray:
        """Put α into `out` (n, m) at these places, and give its entropy (n,)."""
        n, total = len(out), np.where(self.total > 0, self.total, 1.0)
        straight = isinstance(at, slice)

        def fill(run: slice) -> np.ndarray:
            x = self._below(run)
            w = self._from(x)
            if self.profile is None:  # −Σ w ln w, with 0 of −∞ left out
                along = np.einsum("ij,ij->i", w, np.maximum(x, -200))
            else:
                along = np.einsum("ij,ij->i", w, np.log(np.where(w > 0, w, 1)))
            w /= total.astype(w.dtype)[:, None]
            out[:, run if straight else at[run]] = w
            return np.asarray(along, float)

        along = self._each(fill, np.add, np.zeros(n))
        return np.asarray(np.fmax(np.log(total) - along / total, 0.0))

    # Which rows to look at

    def prune(self, budget: float) -> np.ndarray:
        """Leave out, of each query, rows that cannot have more than so much weight in all; places,
        ascending, of the rows that some query keeps. `bound` must have been asked before."""
        keep = np.zeros(self.scores.shape[1], bool)
        dtype = self.scores.dtype
        for i, total in enumerate(self.total):
            one = self._one(i)
            most = float(one._most(slice(None))[0])
            if self.profile is not None or not most <= LINEAR or not total > 0:
                keep[:] = True  # there is no cheap bound on what is left out
                continue
            grown = np.exp(most)
            s, spare = self.scores[i], budget * total / grown
            least = dtype.type(self.top[i] + np.log(spare / (4 * len(s))))
            at = np.flatnonzero(s > least)
            w = np.exp(s[at] - dtype.type(self.top[i]))
            near = _heaviest(w, spare / 2, len(at))
            at, w = at[near], w[near]
            # What is not kept is the rest of a sum that is known but for its rounding.
            left = max(total * (1 + 1e-5) - float(w.sum(dtype=float)), 0.0)
            if left * grown > budget * total:
                keep[:] = True
                continue
            self.pruned[i] += left * grown
            row = np.full(len(s), -np.inf, dtype)
            row[at] = s[at]
            self.scores[i] = row
            keep[at] = True
        return np.flatnonzero(keep)

    def some(self, at: np.ndarray) -> Doubt:
        """The same for some of the rows."""
        found = Doubt(self.scores[:, at], self.length, self.parts)
        found.terms, found.spread, found.block = self.terms[at], self.spread[at], self.block[at]
        found.top, found.least, found.pruned = self.top, self.least, self.pruned
        found.profile, found.offset = self.profile, self.offset
        return found

    def _one(self, i: int) -> Doubt:
        """The same for one query."""
        some = slice(i, i + 1)
        one = Doubt(self.scores[some], self.length[some], self.parts[some])
        one.terms, one.spread, one.block = self.terms, self.spread, self.block
        one.top, one.least, one.profile = self.top[some], self.least[some], self.profile
        one.pruned, one.total, one.offset = self.pruned[some], self.total[some], self.offset
        return one

    def _gathered(self, part: Callable[[slice], np.ndarray]) -> np.ndarray:
        """The largest over the queries of what `part` gives for a run of rows, (m,) float32."""
        out = np.empty(self.scores.shape[1], np.float32)

        def fill(at: slice) -> None:
            found = part(at)
            out[at] = found[0] if len(found) == 1 else found.max(axis=0)

        self._each(fill, lambda one, two: None, None)
        return out

    def _shares(self, at: Any) -> np.ndarray:
        """The part of each row in the bound, over the sum of the weights."""
        x, delta, total = self._below(at), self.deltas(at), self.total
        if self.profile is None:
            found = np.exp(x) * np.expm1(np.minimum(delta, 60))
        else:
            found = self._from(x + delta) - self._from(x - delta)
        return np.asarray(found / np.where(total > 0, total, 1e-30)[:, None])

    def largest(self, budget: float, most: int) -> np.ndarray:
        """Places, ascending, of the rows without which the bound is at most so much; of as many as
        may be read, the first. `bound` must have been asked before."""
        delta = self._most(slice(None))
        if self.profile is not None or not (delta <= LINEAR).all() or not (self.total > 0).all():
            share = self._gathered(self._shares)
            return _heaviest(share, budget, most)
        # The rest cannot have a part that counts, and are not looked at one by one.
        spare = budget * self.total / (4 * self.scores.shape[1] * np.expm1(delta))
        least = (self.top + np.log(spare)).astype(self.scores.dtype)
        some = self._gathered(lambda at: self.scores[:, at] - least[:, None]) > 0
        at = np.flatnonzero(some)
        share = self._shares(at).max(axis=0)
        return np.asarray(at[_heaviest(share, budget / 2, most)])

    def settle(self, at: np.ndarray, scores: np.ndarray) -> None:
        """Rows whose keys were read: their scores (n, c)."""
        alive = np.isfinite(self.scores[:, at])
        self.scores[:, at] = np.where(alive, scores, -np.inf)  # what was pruned stays so
        self.terms[at, RESIDUAL] = self.terms[at, REACH] = self.spread[at] = 0
        self._rise()

    def drawn(self, i: int, rng: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Rows for one query, drawn by their part in its bound: their places, their e^δ − 1, how
        often each came; and the sum of all parts."""
        one = self._one(i)
        share = np.concatenate([one._shares(at)[0] for at in one._runs]).astype(float)
        along = np.cumsum(share)
        if not 0 < along[-1] < np.inf:
            return np.zeros(0, np.int64), share[:0], share[:0], 0.0
        found = np.searchsorted(along, rng.random(DRAWN) * along[-1], side="right")
        at, counts = np.unique(np.minimum(found, len(share) - 1), return_counts=True)
        part = np.expm1(np.minimum(one.deltas(at)[0], 60))
        return at, part, counts, float(along[-1]) * CAREFUL

    def rivals(self, k: int) -> np.ndarray:
        """Places, ascending, of all rows that may be among the k largest of a query."""
        n = len(self.scores)
        least = np.full((n, k), -np.inf)

        def best(at: slice) -> np.ndarray:
            low = self.scores[:, at] - self.deltas(at)
            low = np.where(np.isnan(low), -np.inf, low)
            return low if low.shape[1] <= k else -np.partition(-low, k - 1, axis=1)[:, :k]

        def join(one: np.ndarray, two: np.ndarray) -> np.ndarray:
            both = np.concatenate([one, two], axis=1)
            return -np.partition(-both, k - 1, axis=1)[:, :k]

        floor = self._each(best, join, least).min(axis=1)[:, None]

        def near(at: slice) -> np.ndarray:
            high = self.scores[:, at] + self.deltas(at)
            return np.asarray(~(high < floor), np.float32)

        found = self._gathered(near) > 0
        if self.dead is not None:
            found[self.dead] = False
        return np.flatnonzero(found)


def _added(one: Bound, two: Bound) -> Bound:
    """Two bounds in one unit."""
    return Bound(one.top, *(a + b for a, b in zip(one[1:], two[1:], strict=True)))


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
