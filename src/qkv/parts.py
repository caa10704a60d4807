"""Attention over rows that several hold: what each does with its own, and the whole of it.

A weighting's `search` and its state are all that is merged, and nothing is read twice by two: so
the holders may be threads, processes or machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qkv.arrays import framework, of, tree
from qkv.arrays.rows import Rows, Unread
from qkv.engines import passes, request, stored, streaming
from qkv.engines.call import Call
from qkv.engines.passes import Passes
from qkv.errors import CombinationError
from qkv.scores import Score, ScoreLike
from qkv.types import Array, Arrays, At, Slopes, Span
from qkv.weightings import State, Weighting, WeightingLike
from qkv.weightings.base import of_rows

Part = stored.Part
Sums = stored.Sums
resolved, finished, one_framework = request.resolved, passes.finished, request.one_framework
sums, both, averaged, sums_by = stored.sums, stored.both, stored.averaged, stored.sums_by
entropy, entropy_of, entropy_in = stored.entropy, stored.entropy_of, stored.entropy_in

TOGETHER = 1024
"""Queries that are asked together."""

ALIKE = 2**20
"""Scores of rows that were lost, up to which they are searched as if they were there."""

T = TypeVar("T")


def merged(parts: Sequence[T], merge: Callable[[T, T], T]) -> T:
    """All parts, neighbours first: one tree for one number of them, so that sums repeat to the bit.

    >>> merged("abcde", lambda one, two: f"({one}{two})")
    '(((ab)(cd))e)'
    """
    parts = list(parts)
    while len(parts) > 1:
        pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
        parts = [pair[0] if len(pair) == 1 else merge(*pair) for pair in pairs]
    return parts[0]


# What one holder does


def scored(
    rows: Rows,
    query: np.ndarray | None,
    *,
    score: Score,
    weighting: Weighting,
    origin: int,
    matches: np.ndarray | None = None,
) -> tuple[Part, np.ndarray]:
    """The scores of one holder's rows, the first of which is at the position `origin` of all; and
    the best of each query, (n,), before they are scaled."""
    with framework("numpy").quiet():
        if matches is None:
            assert query is not None
            score.check(tuple(query.shape), rows.key.shape)
            matches = stored.scored(rows, query, score)
        seen = matches if rows.allowed is None else matches[:, rows.allowed]
        best = seen.max(axis=1, initial=-np.inf)
        return Part(weighting.scale(matches), rows.allowed, weighting, origin), best


class Portion:
    """One holder's rows of a call, of which the first is at the position `origin` of `total`."""

    def __init__(
        self, rows: Rows, query: Array, score: Score, weighting: Weighting, origin: int, total: int
    ) -> None:
        at = At(0, origin, query.shape[0], total)
        self.call = call = Call(query, rows.key, rows.value, score, weighting, at=at).precise()
        self.tiling = streaming.tiling_of(call, call.n, streaming.block_size(call)[1])

    def passes(self) -> Passes:
        return Passes(self.call, *self.tiling[0])

    def slopes(self, kept: State, gradients: Arrays) -> list[Array | None]:
        """The gradients of the query and of every array in score and weighting, by these rows."""
        with self.call.fw.quiet():
            return list(streaming.backward_of(self.call, self.tiling, kept, gradients, None))


# The whole


def across(
    begin: Callable[[Array, Score, Weighting], Any],
    query: Array,
    shape: tuple[int, int, int],
    *,
    score: ScoreLike,
    weighting: WeightingLike,
) -> Array:
    """`attend` over m rows that others hold, with gradients: query (n, d) → (n, d_v).

    `shape` is (m, d_k, d_v); `begin` tells the holders what is asked, and gives what asks all of
    them and merges what they say: `fold` and `state`, as `Passes` has them, and
    `slopes(kept, gradients)`, those of the query and of every array in score and weighting.
    """
    fw, (m, d, width) = of(query), shape
    score, weighting = resolved(score, weighting, None)
    one_framework({"query": query}, score=score, weighting=weighting)
    weighting = weighting.among(m)
    score.check(tuple(query.shape), (m, d))
    key, value = (Unread(None, (m, size)) for size in (d, width))  # type: ignore[arg-type]
    call = Call(query, key, value, score, weighting).precise()
    if call.n > TOGETHER:
        starts = range(0, call.n, TOGETHER)
        each = [_rows_of(call, at) for at in starts]
        outs = [across(begin, q, shape, score=score, weighting=w) for q, w in each]
        return fw.xp.concat(outs, axis=0)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        fresh = tree.rebuild(fw, call, arrays)
        holders = begin(fresh.query, fresh.score, fresh.weighting)
        out, known, centre = finished(holders, fresh.weighting)
        return (out,), (*known, *(() if centre is None else (centre,)))

    def backward(arrays: Arrays, kept: Arrays, gradients: Arrays) -> Slopes:
        fresh = tree.rebuild(fw, call, arrays)
        holders = begin(fresh.query, fresh.score, fresh.weighting)
        return tuple(holders.slopes(kept, gradients))

    def reference(*_: Array) -> Arrays:
        raise CombinationError(
            "rows that others hold have first derivatives alone: for second ones, open the "
            "database in one process"
        )

    leaves = tree.leaves(fw, call)
    with fw.quiet():
        out = fw.differentiable(forward, backward, reference, leaves)[0]
        return fw.astype(out, fw.dtype(query))


def _rows_of(call: Call, start: int) -> tuple[Array, Weighting]:
    span = Span(start, min(TOGETHER, call.n - start))
    return call.query[start : start + span.size], of_rows(call.fw, call.weighting, span, call.n)


# Rows that were lost


class Lost(NamedTuple):
    """Holders beside which some `rows` are lost, none of which scores above `most` (n, 1)."""

    holders: Any
    weighting: Weighting
    rows: int
    most: np.ndarray

    def _alike(self, one: State, merge: Callable[[State, State], State]) -> State:
        """The state of so many equal rows, by doubling."""
        found, rest = None, self.rows
        while rest:
            if rest & 1:
                found = one if found is None else merge(found, one)
            rest >>= 1
            one = merge(one, one) if rest else one
        assert found is not None
        return found

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        lost = self._alike(lift(self.most.copy(), None, _FIRST), merge)
        return merge(self.holders.fold(lift, merge, init), lost)  # type: ignore[no-any-return]

    def state(self, found: State) -> State:
        one = np.ones((1, 1), self.most.dtype)
        lost = self.weighting.lift(self.most.copy(), None, _FIRST, found, one, None)
        merge = self.weighting.merge
        return merge(self.holders.state(found, width=1), self._alike(lost, merge))


_FIRST = np.full((1, 1), -1, np.int32)
"""The position of a row that wins every tie."""


def share(holders: Any, weighting: Weighting, count: int, most: np.ndarray) -> np.ndarray:
    """The largest weight that `count` lost rows can have together, (n,): the total variation by
    which weights without them are wrong at most.

    For weights that sum to one and fall when another row's score rises. It is the output where the
    lost rows have the value 1, the largest score that they can have, and all others the value 0.
    """
    whole = np.ones(len(most))
    if not weighting.convex or weighting.strict:
        return whole
    if weighting.searches and count * len(most) > ALIKE:
        return whole
    with framework("numpy").quiet():
        top = weighting.scale(most[:, None])
        sure = np.isfinite(top)
        top = np.where(sure, top, 0)
        lost = Lost(holders, weighting, count, top)
        out, *_ = finished(lost, weighting)
        # Sums of so many terms are rounded; the bound must not be.
        bound = np.minimum(out[:, 0] * (1 + 1e-5) + 1e-7, 1.0)
    bound[bound <= 1e-7] = 0 if weighting.sparse else 1e-7
    # One that is NaN, of scores that their dtype does not hold, proves nothing.
    return np.where(sure[:, 0] & (bound <= 1), bound, 1.0)


class Ball(NamedTuple):
    """Keys that lie within a radius of a centre; none lay farther than `moved` from where it lies
    before it was kept in 8 bits."""

    centre: np.ndarray
    radius: float
    rows: int
    moved: float = 0.0

    @classmethod
    def around(cls, rows: Rows) -> Ball:
        """One that holds all keys; they are read twice."""
        size, total = max(streaming.READ // max(rows.shape[1], 1), 512), np.zeros(rows.shape[1])
        for group in rows.cuts(size):
            for cut in group:
                total += cut.key().sum(axis=0, dtype=float)
        centre, far, moved = total / max(rows.shape[0], 1), 0.0, 0.0
        for group in rows.cuts(size):
            for cut in group:
                far = max(far, float(np.square(cut.key() - centre).sum(axis=1).max(initial=0)))
                off = cut.stored.near.residual if cut.stored.near else None
                if cut.stored.lost and off is not None:
                    moved = max(moved, float(off.max(initial=0)))
        return cls(centre, float(np.sqrt(far)), rows.shape[0], moved)

    def before(self) -> Ball:
        """One that held the keys before they were kept in 8 bits."""
        return self._replace(radius=self.radius + self.moved)

    def most(self, query: np.ndarray, score: Score) -> np.ndarray:
        """The largest score that any of the keys can have with each query, (n,); ∞ where it is not
        known."""
        query, slack = query.astype(float), 1e-5
        if score.linear:
            form = score.form(query, self.centre[None])
            moved = form.query * form.scale
            size = np.linalg.norm(moved, axis=1)
            reach = size * (self.radius + slack * np.linalg.norm(self.centre))
            return np.asarray(moved @ self.centre + reach * (1 + slack))
        if score.radial:
            away = query - self.centre
            far = np.linalg.norm(away, axis=1, keepdims=True)
            nearest = away * (np.minimum(self.radius * (1 + slack) / np.maximum(far, 1e-300), 1))
            nearest += self.centre
            found = [score(q[None], k[None])[0, 0] for q, k in zip(query, nearest, strict=True)]
            rough = 8 * np.finfo(np.float32).eps * np.abs(found)  # as scores beside them may be
            return np.asarray(found) + slack + rough
        return np.full(len(query), np.inf)
