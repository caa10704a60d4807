"""Weights of all rows from one reading of their codes, and how far they may be off.

A block of rows is scored, weighed and summed while it lies in the cache. What is held of it then
are its weights, measured from its own largest score, and a few sums for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from qkv.arrays import of
from qkv.arrays.rows import Cut, Reader
from qkv.weightings.bound import Bound

LINEAR = 0.5
"""δ up to which e^δ − 1 is bounded by a line through 0."""

CAREFUL = 1.001
"""What sums in float32 over a block may have lost, with room to spare."""

FAINT = 1e-30
"""More than the weight of a row that float32 rounds to 0, beside one of 1."""

LIGHT = 2.0**-14
"""The share of the weight from which on a row is remembered while its block is in the cache."""

DEEPER = 64
"""How much lighter rows are looked for than were asked for, so that asking for those reads no
weights again."""

RISE = 20.0
"""How far a score may lie above the largest that its block was known to have."""


class Terms(NamedTuple):
    """Of each row (c,), what δ is made of: the residual of its code; the length of its key, or (1,)
    the largest, and its bias, which meet what arithmetic loses. Residuals also count together:
    Σ (φ·r)² over all rows is at most `spread`² ‖φ‖²."""

    residual: np.ndarray | None
    norm: np.ndarray
    bias: np.ndarray | None
    spread: float
    known: tuple[float, ...] | None = None

    @property
    def most(self) -> tuple[float, ...]:
        """The largest of each kind, (3,)."""
        if self.known is not None:
            return self.known
        return tuple(0.0 if x is None else float(x.max(initial=0.0)) for x in self[:3])

    def stacked(self) -> np.ndarray:
        """(3, c)"""
        shape = max(0 if x is None else len(x) for x in self[:3])
        none = np.zeros(shape, np.float32)
        return np.stack([none if x is None else np.broadcast_to(x, shape) for x in self[:3]])


class Slack(NamedTuple):
    """For n queries (n,) what each of the terms is multiplied by, and what is added to them all."""

    residual: np.ndarray
    norm: np.ndarray
    bias: np.ndarray
    unit: float

    def over(self, terms: np.ndarray) -> np.ndarray:
        """δ (n, c) of terms (3, c), but for what `least` adds."""
        return np.asarray(np.stack(self[:3], axis=1) @ terms)

    def least(self, top: np.ndarray) -> np.ndarray:
        """Subtraction of the largest score and the exponential round too."""
        return np.asarray(self.unit * (4 * np.abs(top) + 16))


class Tally(NamedTuple):
    """Sums over `size` rows from `start` on, for n queries, of weights w = e^(score − top): Σ w,
    Σ w ln w, Σ w δ of the residuals alone, Σ w². `most` are the largest terms and the spread. Where
    the largest δ is `wide`, Σ w (e^δ − 1) stands for Σ w δ. At the places `seen` is every row whose
    weight is not below `least`, a logarithm."""

    start: int
    size: int
    wide: bool
    seen: np.ndarray
    top: np.ndarray
    total: np.ndarray
    along: np.ndarray
    alone: np.ndarray
    square: np.ndarray
    least: np.ndarray
    most: tuple[float, ...]


class Pruned(NamedTuple):
    """Rows at places (k,), ascending, their weights (n, k), not yet divided by their sum, and how
    far these may be off with all others at 0."""

    at: np.ndarray
    weights: np.ndarray
    bound: Bound


class Scan:
    """The weights (n, m) of all rows, not yet divided by their sum; each measured from the largest
    score of its block. `lift` gives the scores of a cut (n, c) and their terms."""

    def __init__(
        self,
        m: int,
        slack: Slack,
        lift: Callable[[Cut], tuple[np.ndarray, Terms]],
        cuts: Iterable[list[Cut]],
    ):
        self._lift, self.slack = lift, slack
        self._steepest = tuple(float(x.max(initial=0.0)) for x in slack[:3])
        self.weights = np.empty((len(slack.residual), m), np.float32)
        self._settled = np.zeros(m, bool)
        self._mass = np.full(len(self.weights), -np.inf)  # ln Σ w of blocks so far, or less
        found: list[Tally] = Reader(of(self.weights)).reduce(
            lambda cut: [self._block(cut)], lambda one, two: one + two, [], cuts
        )
        self.starts, self.sizes = (np.array([x[i] for x in found], np.int64) for i in (0, 1))
        self.wide = np.array([x.wide for x in found], bool)
        sums = (np.array([x[i] for x in found], float) for i in range(4, 9))
        self.top, self.total, self.along, self.alone, self.square = sums
        most = np.array([x.most for x in found])[:, :, None]
        rest = slack.norm * most[:, 1] + slack.bias * most[:, 2] + slack.least(_unit(self.top))
        self.most = slack.residual * most[:, 0] + rest  # the largest δ
        self.rest = np.where(self.wide[:, None], 0.0, rest)  # what else than residuals it has
        self.spread = slack.residual * most[:, 3] * CAREFUL
        self.peak = _unit(self.top.max(axis=0))
        self.factor = np.exp(self.top - self.peak)
        self._high = np.ones_like(self.total)  # no weight of a block is larger
        self._forget()
        seen = [x.seen for x in found]
        if sum(map(len, seen)) * 16 < m:
            least = np.max([x.least for x in found], axis=0)
            self._seen, self._least = np.concatenate(seen), np.exp(least - self.peak) * CAREFUL

    def _block(self, cut: Cut) -> Tally:
        s, terms = self._lift(cut)
        if cut.allowed is not None:
            s[:, ~cut.allowed] = -np.inf
        top = s.max(axis=1)
        unit = _unit(top)
        s -= unit[:, None]
        w = np.exp(s, out=self.weights[:, cut.start : cut.start + cut.size])
        if cut.allowed is not None:
            np.maximum(s, -200, out=s)  # 0 of −∞ is left out
        slack, most = self.slack, (*terms.most, terms.spread)
        total, along = np.add.reduce(w, 1), _dot(w, s)  # BLAS would add too coarsely
        above = sum(a * b for a, b in zip(self._steepest, most, strict=False))
        wide = not above + slack.least(np.abs(unit).max(initial=0.0)) <= LINEAR
        if wide:
            delta = slack.over(terms.stacked()) + slack.least(unit.astype(float))[:, None]
            alone, square = (np.exp(s + delta) - w).sum(axis=1), 0.0 * total
        elif terms.residual is None:
            alone = square = 0.0 * total
        else:
            alone, square = (w @ terms.residual) * slack.residual, _dot(w, w)
        if wide or terms.residual is None:
            most = (*most[:3], 0.0)
        alone, square = alone * CAREFUL, square * CAREFUL
        seen, least = self._light(cut.start, unit, w, total)
        return Tally(cut.start, cut.size, wide, seen, top, total, along, alone, square, least, most)

    def _light(
        self, start: int, unit: np.ndarray, w: np.ndarray, total: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Places of rows that may have a share worth remembering, and the logarithm (n,) of the
        weight that no other has: what is known so far of the sum is no more than it will be."""
        with np.errstate(divide="ignore", invalid="ignore"):
            # Another core may write at the same time: one of both sums is then left out.
            self._mass = np.logaddexp(self._mass, unit + np.log(total.astype(float)))
            least = self._mass + np.log(LIGHT)
            lowest = np.exp(np.minimum(least - unit, 80.0)).astype(np.float32)
        if (lowest > 1).all():
            return np.zeros(0, np.int64), least
        return start + _any(w >= lowest[:, None]), least

    def bound(self) -> Bound:
        """How far the weights may be off."""
        with np.errstate(all="ignore"):
            together = np.sqrt(np.maximum(self.square, 0)) * self.spread
            rest = np.where(self.wide[:, None], self.alone, np.fmin(self.alone, together))
            loss = (np.maximum(rest, 0) + self.rest * self.total) * self.factor * CAREFUL
            grown = np.where(self.wide[:, None], 1.0, np.expm1(self.most) / self.most)
        total, gain = (self.total * self.factor).sum(axis=0), (loss * grown).sum(axis=0)
        gain += FAINT * self.weights.shape[1]
        return Bound(self.peak, total, gain, loss.sum(axis=0))

    def _parts(self, function: Callable[[int], Any]) -> list[Any]:
        """function(number of a block) for all, on all cores, in their order."""
        spans: Any = list(range(len(self.starts)))

        def lift(i: Any) -> list[Any]:
            return [function(i)]

        found: list[Any] = of(self.weights).reduce(lift, lambda one, two: one + two, [], spans)
        return found

    def _at(self, i: int) -> np.ndarray:
        """The weights of a block, (n, c)."""
        return self.weights[:, self.starts[i] : self.starts[i] + self.sizes[i]]

    def _forget(self) -> None:
        """What `above` has found: rows, and the weight (n,) that no other has."""
        self._seen, self._least = np.zeros(0, np.int64), np.full(len(self.weights), np.inf)

    def above(self, least: np.ndarray) -> np.ndarray:
        """Places, ascending, of rows that have such a weight (n,) for one of the queries, with the
        largest score of all as the unit."""
        if (least < self._least).any():
            self._least = least / DEEPER
            self._seen = np.concatenate(self._parts(self._found))
        found = self.of(self._seen) >= least[:, None]
        return np.asarray(self._seen[found.any(axis=0)])

    def _found(self, i: int) -> np.ndarray:
        """Those of a block that are not lighter than the least."""
        with np.errstate(divide="ignore"):
            lowest = np.minimum(self._least / self.factor[i], 3e38).astype(np.float32)
        if (lowest > self._high[i]).all():
            return np.zeros(0, np.int64)
        return np.asarray(self.starts[i] + _any(self._at(i) >= lowest[:, None]))

    def heavy(self, share: float, tolerance: float) -> np.ndarray:
        """Places of rows not read yet that have at least this share of the weight of a query whose
        error is not within the tolerance."""
        bound = self.bound()
        least = np.where(bound.error > tolerance, bound.total * share, np.inf)
        at = self.above(least)
        return np.asarray(at[~self._settled[at]])

    def of(self, at: np.ndarray) -> np.ndarray:
        """The weights (n, k) of rows at places, with the largest score of all as the unit."""
        block = np.searchsorted(self.starts, at, side="right") - 1
        return np.asarray(self.weights[:, at] * self.factor[block].T)

    def settle(self, at: np.ndarray, scores: np.ndarray, terms: np.ndarray) -> None:
        """Rows whose keys were read: their scores (n, c), and the terms (3, c) that they had."""
        block = np.searchsorted(self.starts, at, side="right") - 1
        edges = np.flatnonzero(np.diff(block, prepend=-1))
        touched, wide = block[edges], self.wide[block]
        self._settled[at] = True
        seen = self.weights[:, at] > FAINT  # of others neither is known well enough to change it
        rise = np.maximum.reduceat(np.where(seen, scores - self.top[block].T, 0.0), edges, axis=1)
        for i in touched[(rise > RISE).any(axis=0)]:
            self._lower(i, np.maximum(rise[:, np.searchsorted(touched, i)], 0.0))
        with np.errstate(all="ignore"):
            old = np.where(seen, self.weights[:, at], 0.0)
            x = scores - self.top[block].T
            new, log = np.where(seen, np.exp(x), 0.0), np.log(np.where(seen, old, 1.0))
            part = old * np.outer(self.slack.residual, terms[0])
            if wide.any():
                least = self.slack.least(self.top[block].T)
                spent = np.where(seen, np.exp(log + self.slack.over(terms) + least), 0.0) - old
                # What arithmetic loses of the new ones has no other place.
                part = np.where(wide, spent - new * np.expm1(least), part)
            along = np.where(seen, new * x, 0.0) - old * log
        self.weights[:, at] = np.where(seen, new, self.weights[:, at])
        high = np.maximum.reduceat(new, edges, axis=1).T
        self._high[touched] = np.maximum(self._high[touched], high * CAREFUL)
        for sums, change in (
            (self.total, new - old),
            (self.along, along),
            (self.alone, -part),
            (self.square, -old * old),
        ):
            sums[touched] += np.add.reduceat(change, edges, axis=1).T

    def _lower(self, i: int, rise: np.ndarray) -> None:
        """Measure a block from scores (n,) that are so much higher."""
        part, less = self._at(i), np.exp(-rise)
        np.multiply(part, less.astype(np.float32)[:, None], out=part)
        self.along[i] = (self.along[i] - rise * self.total[i]) * less
        self.square[i] *= less * less
        self.total[i] *= less
        self.alone[i] *= less
        self.top[i] += rise
        self.peak = np.maximum(self.peak, self.top[i])
        self.factor = np.exp(self.top - self.peak)
        self._forget()  # the unit is another

    def prune(self, tolerance: float, most: int) -> Pruned | None:
        """Leave out rows as far as the tolerance allows; None where more than so many are left."""
        bound, grown = self.bound(), np.exp(self.most.max(axis=0))
        spare = (tolerance - bound.error) * 0.95 * bound.total / grown
        share, lost = np.full(len(spare), 1e-3), bound.total * 1e-5
        while (spare > lost).all() and (share > FAINT).all():
            at = self.above(bound.total * share)
            if len(at) > most:
                return None
            w = self.of(at)
            kept = w.sum(axis=1, dtype=float)
            # What is left is the rest of a sum that is known but for its rounding.
            left = np.maximum(bound.total + lost - kept, 0.0)
            if (left <= spare).all():
                return Pruned(at, w, bound._replace(total=kept, gain=bound.gain + left * grown))
            share[left > spare] /= 8
        return None

    def only(self, at: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """(n, m), in the place of the weights: these (n, k) of rows at places, and 0."""
        self._parts(lambda i: self._at(i).fill(0))
        out = self.weights.astype(weights.dtype, copy=False)
        out[:, at] = weights
        return out

    def share(self, total: np.ndarray) -> np.ndarray:
        """α (n, m), in the place of the weights, and its entropy (n,)."""
        over = (self.factor / np.where(total > 0, total, 1.0)).astype(np.float32)

        def scale(i: int) -> None:
            part = self._at(i)
            np.multiply(part, over[i][:, None], out=part)

        self._parts(scale)
        with np.errstate(all="ignore"):
            apart = np.where(self.total > 0, (self.top - self.peak) * self.total, 0.0)
        along = ((self.along + apart) * self.factor).sum(axis=0)
        some = np.where(total > 0, total, 1.0)
        return np.asarray(np.fmax(np.log(some) - along / some, 0.0))

    def drawn(self, i: int, count: int, rng: Any) -> tuple[np.ndarray, np.ndarray, float]:
        """Rows for one query, drawn by their largest part in its bound: places, which may repeat,
        the e^δ − 1 of each; and the sum of all parts."""
        part = np.expm1(self.most[:, i])
        each = self.factor[:, i] * self.total[:, i] * part * CAREFUL
        if not 0 < each.sum() < np.inf or (self.most[:, i] > 60).any():
            return np.zeros(0, np.int64), part[:0], 0.0
        times = rng.multinomial(count, each / each.sum())
        at = []
        for block in np.flatnonzero(times).tolist():
            along = np.cumsum(self._at(block)[i].astype(float))
            some = np.searchsorted(along, rng.random(times[block]) * along[-1], side="right")
            at.append(self.starts[block] + np.minimum(some, len(along) - 1))
        return np.concatenate(at), np.repeat(part, times), float(each.sum())


def _unit(top: np.ndarray) -> np.ndarray:
    """The largest scores, 0 where none is finite."""
    return np.where(np.isfinite(top), top, top.dtype.type(0))


def _any(found: np.ndarray) -> np.ndarray:
    """Which columns have something that is true, ascending."""
    return np.flatnonzero(found[0] if len(found) == 1 else found.any(axis=0))


def _dot(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Σ over each row, (n,): by BLAS, which goes through both once."""
    return np.asarray((one[:, None, :] @ two[:, :, None])[:, 0, 0])
