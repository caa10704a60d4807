"""The weights of every row that is read, beside the output: α (n, m), its entropy, its log-sum-exp.

The keys are read once. One number for each query and row is held, which is its score first and its
weight in the end; what lies between is the weighting's own pass over blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qkv.arrays import of
from qkv.arrays.ragged import Wide
from qkv.arrays.rows import Cut, Reader, Rows, Weighed
from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.call import Call
from qkv.engines.passes import Passes, finished
from qkv.engines.read import loops_of
from qkv.scores import Score, evaluate, is_open
from qkv.types import Array, Span
from qkv.weightings import State, TopK, Weighting
from qkv.weightings.base import pool

CACHED = 2**18
"""Scores of a block that its passes find in the cache."""

MOST = 2**18
"""Rows of values that a core takes at a time, however narrow."""

Sums = tuple[Any, ...]
"""Σᵢ αᵢ vᵢ (n, d_v), and of a mean Σᵢ αᵢ (n,) and the value that all rows with weight have."""


def weighed(
    rows: Rows, query: np.ndarray, score: Score, weighting: Weighting, part: bool = False
) -> Weighed:
    """What is known of all rows; in float64 where float32 does not hold the scores: a bandwidth or
    a temperature may be as narrow as a number can be."""
    query = query if calls.within((score, weighting)) else query.astype(float)
    found = run(rows, scored(rows, query, score), weighting, part)
    told = found.best if found.lse is None else found.best + found.lse
    if of(told).surely_finite(told) or np.isfinite(told).all():
        return found
    if not (rows.shape[0] if rows.allowed is None else rows.allowed.any()):
        return found
    if query.dtype != np.float64:
        found = run(rows, scored(rows, query.astype(float), score), weighting, part)
    if not part:
        calls.reached(score, weighting, query, found.best)
    return found


def nearest(rows: Rows, query: Array, score: Score, k: int) -> tuple[Array, Array]:
    """The scores (n, k) of the k best rows for each query, the best first, and where they stand;
    −∞ where there are fewer. By the state of `TopK` alone: no value is read."""
    best = TopK(k)
    call = Call(of(query).detach(query), rows.key, None, score, best).precise()

    def found(some: Span, keys: Any) -> State:
        return Passes(call, some, keys).fold(best.lift_best, best.merge_best, best.init_best)

    tiling = streaming.tiling_of(call, *streaming.block_size(call))
    most, at = loops_of(call).tiled(found, tiling)
    return most, at


def run(rows: Rows, scores: np.ndarray, weighting: Weighting, part: bool = False) -> Weighed:
    """The output of scores (n, m) and all that is known of them; they are overwritten. Of a `part`
    they are kept as well: the weights among all rows are to be found from them."""
    scaled = None
    if part:
        scaled = np.array(weighting.scale(scores))
        if rows.allowed is not None:
            scaled[:, ~rows.allowed] = -np.inf
    at = None if rows.allowed is None else np.flatnonzero(rows.allowed)
    seen = scores if at is None else np.take(scores, at, axis=1)
    best = np.maximum.reduce(seen, 1, initial=-np.inf)
    if at is None or not len(at):
        alpha, spread, lse = _weights(weighting.scale(scores), rows.allowed, weighting)
    else:
        some, spread, lse = _weights(weighting.scale(seen), None, weighting)
        alpha = scores
        for all_rows, found in zip(alpha, some, strict=True):
            all_rows.fill(0)
            all_rows[at] = found
    found = sums(rows, alpha, mean=weighting.convex)
    lse = None if lse is None else lse[:, 0]
    told = (averaged(found), alpha, spread, lse, best)
    return Weighed(*told, read=rows.shape[0], sums=found, scaled=scaled)


def _weights(
    s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting
) -> tuple[np.ndarray, np.ndarray | None, Array | None]:
    """The weights of scores, their entropy where it is found on the way, and the log-sum-exp if
    there is one."""
    if s.size <= CACHED:
        live = None if allowed is None else allowed[None]
        alpha, lse = weighting.weights_and_lse(s, live, of(s).positions(0, s.shape[1], s)[None])
        return alpha, None, lse
    part = Part(s, allowed, weighting)
    _, known, _ = finished(part, weighting)
    told = part.weigh(known)  # the weights are in place of the scores
    return s, entropy_of(*told), weighting.lse(known) if weighting.has_lse else None


def scored(rows: Rows, query: np.ndarray, score: Score) -> np.ndarray:
    """s(q, kᵢ) for every live row, (n, m), on all cores."""
    (n, _), (m, width) = query.shape, rows.shape
    out = np.empty((n, m), query.dtype)
    # Nothing but a caller's own code asks where a row lies.
    call = Call(query, rows.key, None, score, Weighting()) if is_open(score) else None
    kind = kept = aside = None
    if type(score).aside is not Score.aside:
        kind = type(score), query.dtype
        kept = rows.kept.get(kind)
        aside = np.full(m, np.nan, query.dtype) if kept is None else kept

    form = score.form(query, query[:1]) if score.linear else None
    moved = None if form is None else form.query * form.scale

    def fill(cut: Cut) -> None:
        block: Any = call and calls.place(call, None, cut)  # type: ignore[arg-type]
        wide, live = cut.stored.key, cut.stored.live
        if moved is not None and isinstance(wide, Wide):
            some = wide if live is None else wide[live]
            out[:, cut.start : cut.start + cut.size] = some.inner(moved)
            return
        key, scale = cut.stored.scaled() if score.linear else (cut.key(), None)
        key, at = key.astype(query.dtype, copy=False), slice(cut.start, cut.start + cut.size)
        if aside is not None and kept is None:
            found = score.aside(key)
            aside[at] = np.nan if found is None else found
        if aside is None or np.isnan(aside[at]).any():
            out[:, at] = evaluate(score, query, key, block)
        else:
            out[:, at] = score.beside(query, key, aside[at])
        if scale is not None:
            out[:, at] *= scale

    wide = max(width, score.footprint(width), n, 1)
    size = max(streaming.READ // wide, 512)
    cuts = rows.cuts(size, ahead=("key",))
    Reader(of(query)).reduce(fill, lambda one, two: None, None, cuts)
    if aside is not None:
        rows.kept[kind] = aside
    return out


class Part:
    """Scaled scores (n, c) of some rows, the first of them at the position `origin`, in passes.

    Others may hold the rest: what `fold` and `state` give is merged with theirs.
    """

    def __init__(
        self, s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting, origin: int = 0
    ):
        self.s, self.allowed, self.weighting, self.origin = s, allowed, weighting, origin
        self.fw, (n, m) = of(s), s.shape
        step = max(CACHED // max(n, 1), 1)
        self.spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]
        self.template = self.fw.full((n, 1), 0.0, s)

    def _block(self, span: Span) -> tuple[Array, Array | None, Array]:
        at = slice(span.start, span.start + span.size)
        live = None if self.allowed is None else self.allowed[None, at]
        return (
            self.s[:, at],
            live,
            self.fw.positions(self.origin + at.start, span.size, self.s)[None],
        )

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        """What `Weighting.search` asks of the scores."""
        start = init(self.template)
        found: State = self.fw.reduce(lambda x: lift(*self._block(x)), merge, start, self.spans)
        return found

    def state(self, found: State, width: int = 0) -> State:
        """The weighting's state, with values of 0."""
        nothing = np.zeros((self.s.shape[1], width), self.s.dtype)

        def lift(span: Span) -> State:
            x, live, k = self._block(span)
            return self.weighting.lift(x.copy(), live, k, found, nothing[: span.size], None)

        start = self.weighting.init(self.template, width)
        state: State = self.fw.reduce(lift, self.weighting.merge, start, self.spans)
        return state

    def weigh(self, known: State) -> np.ndarray:
        """Σ |α| and Σ |α| ln |α| of each row, (2, n); the weights take the scores' place."""

        def weight(span: Span) -> tuple[np.ndarray, np.ndarray]:
            x, live, k = self._block(span)
            x[:] = self.weighting.weight(x, live, k, known)
            return sums_of(x, self.weighting.sparse)

        start = np.zeros((2, self.s.shape[0]))
        return np.asarray(self.fw.reduce(weight, np.add, start, self.spans))


def entropy_in(found: Weighed) -> np.ndarray:
    """The entropy (n,) of what was weighed."""
    return entropy(found.weights) if found.entropy is None else found.entropy


def entropy(alpha: np.ndarray) -> np.ndarray:
    """−Σ α ln α (n,) of weights (n, m)."""
    fw, m = of(alpha), alpha.shape[1]
    step = max(CACHED // max(len(alpha), 1), 1)
    spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]

    def sums(span: Span) -> np.ndarray:
        return np.asarray(sums_of(alpha[:, span.start : span.start + span.size]))

    with fw.quiet():
        return entropy_of(*fw.reduce(sums, np.add, np.zeros((2, len(alpha))), spans))


def sums_of(alpha: np.ndarray, sparse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Σ |α| and Σ |α| ln |α| of each row, (n,): sums, which blocks have as well as rows."""
    if sparse:
        alpha = alpha[:, alpha.any(axis=0)]
    size = np.abs(alpha)
    return np.add.reduce(size, 1), np.add.reduce(size * np.log(of(size).nonzero(size)), 1)


def entropy_of(total: np.ndarray, along: np.ndarray) -> np.ndarray:
    """−Σ p ln p of p = |α| / Σ |α|, 0 where no weight is or they are NaN."""
    some = of(total).nonzero(total)
    return np.asarray(np.fmax(np.log(some) - along / some, 0))


def sums_by(total: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Σ |α| and Σ |α| ln |α|, (2, n), of an entropy: `entropy_of` backwards."""
    return np.array([total, (np.log(of(total).nonzero(total)) - entropy) * total])


class Few(NamedTuple):
    """Weights (n, k) of the rows at some places (k,), ascending: all others have none."""

    at: np.ndarray
    weights: np.ndarray


def sums(rows: Rows, alpha: np.ndarray | Few, mean: bool) -> Sums:
    """Σᵢ αᵢ vᵢ (n, d_v), in the wider of the two precisions, and of a `mean` Σᵢ αᵢ and what all
    values have in common; `both` merges them. A row without weight is not read."""
    width, few = rows.width, alpha if isinstance(alpha, Few) else None
    alpha = alpha.weights if isinstance(alpha, Few) else alpha
    start = np.zeros((len(alpha), width), alpha.dtype)
    none = (start, np.zeros(len(alpha), alpha.dtype), None)[: 3 if mean else 1]
    if not start.size:
        return none

    def lift(cut: Cut) -> Sums:
        if few is not None:
            begin, end = np.searchsorted(few.at, (cut.start, cut.start + cut.size))
            value, some = cut.value(few.at[begin:end] - cut.start), alpha[:, begin:end]
        else:
            some = alpha[:, cut.start : cut.start + cut.size]
            used = None
            if np.count_nonzero(some) * 8 < some.size:
                used = np.flatnonzero(some.any(axis=0))
            if used is not None and len(used) * 4 < cut.size:
                value, some = cut.value(used), some[:, used]
            else:
                value = cut.value()
        some = some.astype(np.result_type(some, value), copy=False)
        total = pool(some, value, None, None, sparse=True)  # in which 0 times infinity is 0
        return (total, np.add.reduce(some, 1), _common(value, some)) if mean else (total,)

    size = max(min(streaming.READ // width, MOST), 512)
    cuts = rows.cuts(size, ahead=("value",) if few is None else ())
    found: Sums = Reader(of(alpha)).reduce(lift, both, none, cuts)
    return found


def both(one: Sums, two: Sums) -> Sums:
    added = [a + b for a, b in zip(one[:2], two[:2], strict=True)]
    return *added, *map(_both, one[2:], two[2:])


def averaged(sums: Sums) -> np.ndarray:
    """The output of sums over all rows. A mean is divided by the sum of its weights, which rounding
    keeps from 1; that of equal values is theirs."""
    out, *more = sums
    if more and more[1] is not None:
        (mass, common), out = more, np.array(out)
        some = np.flatnonzero(mass > 0)
        out[some] = np.where(np.isnan(common), out[some] / mass[some, None], common)
    return np.asarray(out)


def _common(value: np.ndarray, weight: np.ndarray) -> np.ndarray | None:
    """What all rows with weight have in a column of values, NaN where they differ; None without
    such a row."""
    used = np.logical_or.reduce(weight != 0, 0) if len(weight) > 1 else weight[0] != 0
    if not used.any():
        return None
    first, last = value[used.argmax()], value[len(used) - 1 - used[::-1].argmax()]
    found = np.where(first == last, first, np.nan)
    near = np.flatnonzero(first == last)
    if len(near):
        differ = ((value[:, near] != found[near]) & used[:, None]).any(axis=0)
        found[near[differ]] = np.nan
    return found


def _both(one: np.ndarray | None, two: np.ndarray | None) -> np.ndarray | None:
    if one is None or two is None:
        return two if one is None else one
    return np.where(one == two, one, np.nan)
