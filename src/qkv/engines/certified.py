"""Weights that are proven to lie near the exact ones, from 8-bit codes of the keys.

The codes are read whole, a quarter of the bytes of the keys. Each score is then known to within
δ = ‖φ‖ · residual, and the weights to within Σ α (e^δ − 1). Where that is too much, the keys of the
rows that take the largest part in it are read in full, and in the end all of them. Of flat weights
no row has a large part: for those rows of one block stand together, whose residuals point
everywhere (`Near.spread`), so that Σ α |e| ≤ ‖α‖ · spread · ‖φ‖.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qkv.arrays import is_array, of
from qkv.arrays.int8 import Queries
from qkv.arrays.rows import Cut, Near, Reader, Rows, Weighed
from qkv.engines import stored
from qkv.engines.doubt import DRAWN, Doubt
from qkv.errors import CombinationError
from qkv.scores import Score
from qkv.scores.base import Affine
from qkv.weightings import Weighting
from qkv.weightings.bound import Bound
from qkv.weightings.hard import Hard
from qkv.weightings.normalized import Normalized
from qkv.weightings.softmax import Softmax, TopK

AT_ONCE = 8192
"""Rows whose codes a core takes at a time: two blocks that were rounded together."""

MANY = 8
"""A share of 1/MANY of the rows is read in full before it is quicker to read all."""

POOLED = 0.5
"""The part of the tolerance that goes to rows whose values are not read."""


def run(
    rows: Rows,
    query: np.ndarray,
    score: Score,
    weighting: Weighting,
    tolerance: float,
    confidence: float | None = None,
) -> Weighed | str:
    """The weights to within the tolerance, or why they are not certified: then they are exact."""
    refused = _refusal(rows, score, weighting)
    if refused is not None:
        return refused
    asked = _Asked(rows, query, score, weighting)
    if weighting.few is not None:
        return _best(asked, weighting.few, tolerance)
    return _soft(asked, tolerance, confidence)


def _refusal(rows: Rows, score: Score, weighting: Weighting) -> str | None:
    first = next(iter(rows.read()), None)
    near = None if first is None else first.near
    if near is None or not rows.shape[0]:
        return "the rows have no codes beside their vectors"
    how = type(weighting)
    if how not in (Softmax, TopK, Hard, Normalized) or getattr(
        weighting, "straight_through", False
    ):
        return f"{how.__name__} has no bound"
    if how is Softmax and is_array(weighting.temperature):  # type: ignore[attr-defined]
        return "a temperature that is an array has no bound"
    form = score.affine(np.zeros((1, rows.shape[1])), np.ones(1))
    if form is None:
        return f"{type(score).__name__} is no product with a key"
    if (how is Normalized) != hasattr(score, "profile"):
        return f"{type(score).__name__} under {how.__name__} has no bound"
    if near.norm is None and not form.factor is form.bias is None:
        return "the lengths of the keys are not known"
    return None


class _Asked:
    """Rows and queries, and how a score is made of a key."""

    def __init__(self, rows: Rows, query: np.ndarray, score: Score, weighting: Weighting):
        self.rows, self.query, self.score, self.weighting = rows, query, score, weighting
        self.wide = query.astype(float)
        self.cooled = float(getattr(weighting, "temperature", 1.0))
        self.lost = any(  # what a code has lost is nowhere
            part.scale is not None and part.near is not None and part.near.residual is not None
            for part in [next(iter(rows.read()))]
        )
        self.read, self.most = 0, np.zeros(len(query))
        self.profile: Callable[..., Any] | None = getattr(score, "profile", None)

    def form(self, norm: np.ndarray) -> Affine:
        """φ, factor and bias, cooled; the offset counts where scores are weights."""
        found = self.score.affine(self.wide, norm)
        assert found is not None
        over = self.cooled
        bias = None if found.bias is None else found.bias / over
        offset = None if found.offset is None or self.profile is None else found.offset / over
        return Affine(found.query / over, found.factor, bias, offset)

    def coded(self) -> Doubt:
        """The scores of all rows by their codes."""
        m, form = self.rows.shape[0], self.form(np.ones(1))
        queries = Queries(np.asarray(form.query))
        found = Doubt.of(form.query, queries.rest, m, np.float32)

        def fill(cut: Cut) -> None:
            near, live = cut.stored.near, cut.stored.live
            assert near is not None
            at = slice(cut.start, cut.start + cut.size)
            s = queries.inner(near.code)
            if live is not None:
                s, near = s[:, live], near.some(live)
            self._place(found, at, s, near)

        cuts = self.rows.cuts(AT_ONCE, codes=True)
        Reader(of(self.query)).reduce(fill, lambda one, two: None, None, cuts)
        found.among(self.rows.allowed)
        return found

    def _place(self, found: Doubt, at: slice, s: np.ndarray, near: Near) -> None:
        scale = np.asarray(near.scale, np.float32)
        zero = np.zeros(len(scale), np.float32)
        residual = zero if near.residual is None else near.residual
        if near.norm is None:
            norm = scale * (127 * self.query.shape[1] ** 0.5)
        else:
            norm = near.norm
        form = self.form(np.asarray(norm, float))
        factor = 1.0 if form.factor is None else np.asarray(form.factor)
        s *= (scale * factor).astype(np.float32)
        if form.bias is not None:
            s += np.asarray(form.bias, np.float32)
        if form.offset is not None:
            s += np.asarray(form.offset, np.float32)[:, None]
        found.scores[:, at] = s
        bias = zero if form.bias is None else np.abs(form.bias)
        terms = (residual * factor, (norm + residual) * factor, norm * factor, bias)
        found.put(at, terms, None if near.spread is None else near.spread * factor, near.block)

    def exact(self, at: np.ndarray, steady: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The scores (n, c) of rows at places, by their keys in float64; and the keys' lengths
        and biases (c, 2). `steady` rounds equal keys alike, and tells beside how large the products
        of each query were, (c, 2 + n)."""
        n = len(self.query)
        out, terms, done = np.empty((n, len(at))), np.empty((len(at), 2 + n * steady)), 0
        for group in self.rows.cuts(AT_ONCE, codes=True):
            for cut in group:
                end = int(np.searchsorted(at, cut.start + cut.size))
                if end == done:
                    continue
                key = cut.vectors(at[done:end] - cut.start).astype(float)
                form = self.form(norm := np.sqrt(np.einsum("ij,ij->i", key, key)))
                phi = np.asarray(form.query)
                if steady:
                    s = np.stack([np.add.reduce(key * one, 1) for one in phi])
                    terms[done:end, 2:] = np.abs(key) @ np.abs(phi).T
                else:
                    s = phi @ key.T
                s = s if form.factor is None else s * form.factor
                s = s if form.bias is None else s + form.bias
                s = s if form.offset is None else s + np.asarray(form.offset)[:, None]
                out[:, done:end] = s
                bias = 0.0 if form.bias is None else np.abs(form.bias)
                terms[done:end, 0] = norm * (1.0 if form.factor is None else form.factor)
                terms[done:end, 1] = bias
                done = end
        self.read += len(at)
        return out, terms

    def whole(self, doubt: Doubt, narrow: bool) -> Doubt:
        """The scores of all rows by their keys: as the exact scan has them, or in float64."""
        m, width = self.rows.shape
        if narrow:
            s = stored.scored(self.rows, self.query.astype(np.float32), self.score)
            s = self.weighting.scale(s)
        else:
            s = self.exact(np.arange(m))[0]
        self.read = m
        return doubt.exactly(s, width)


def _soft(asked: _Asked, tolerance: float, confidence: float | None) -> Weighed:
    rows, doubt = asked.rows, asked.coded()
    codes, pools = doubt, rows.width > 0
    keep = tolerance * (1 - POOLED * pools)
    asked.most = doubt.weigh(asked.profile, asked.form(np.ones(1)).offset)
    statistical = None
    bound, kept = doubt.bound(), None
    if pools:
        kept = doubt.prune(tolerance * POOLED)
        doubt = doubt.some(kept)
        bound = doubt.bound()
    for _ in range(3):
        if (bound.error <= tolerance).all() or asked.lost:
            break
        at = doubt.largest(keep * 0.8, rows.shape[0] // MANY)
        places = at if kept is None else kept[at]
        if confidence is not None and asked.profile is None and len(at) > DRAWN:
            statistical = _sampled(asked, doubt, kept, bound, tolerance, confidence)
            if (statistical <= tolerance).all():
                break
        if not len(at):
            break
        doubt.settle(at, asked.exact(places)[0])
        bound = doubt.bound()
    error, drawn = bound.error, False
    if statistical is not None and (error > tolerance).any():
        error, drawn = statistical, bool((statistical <= tolerance).all())
    for narrow in (True, False):
        if (error <= tolerance).all() or asked.lost:
            break
        if narrow and asked.profile is not None:
            continue
        doubt, kept = asked.whole(codes, narrow), None
        doubt.weigh(asked.profile, asked.form(np.ones(1)).offset)
        bound = doubt.bound()
        error, drawn = bound.error, False
        if not narrow and asked.profile is None:
            error = np.minimum(error, doubt.anchored())
    if asked.lost and asked.profile is None and (error > tolerance).any():
        error = np.minimum(error, doubt.anchored())
    _reached(error, tolerance, asked.lost)
    return _finished(asked, doubt, kept, bound, error)._replace(statistical=drawn)


def _sampled(
    asked: _Asked,
    doubt: Doubt,
    kept: np.ndarray | None,
    bound: Bound,
    tolerance: float,
    confidence: float,
) -> np.ndarray:
    """The error (n,) that is not exceeded with this confidence, for each query by itself.

    Rows are drawn by their part g in the bound and read in full: |e^error − 1| / (e^δ − 1) lies
    between 0 and 1, and its mean, times Σ g, is what the bound is the largest of.
    """
    out = bound.error.copy()
    rng = np.random.default_rng(0)
    for i in np.flatnonzero(out > tolerance):
        at, share, counts, total = doubt.drawn(int(i), rng)
        if not len(at):
            continue
        true = asked.exact(at if kept is None else kept[at])[0][i]
        found = np.abs(np.expm1(true - doubt.scores[i, at])) / share
        found = np.repeat(np.minimum(found, 1.0), counts)
        level, size = np.log(2 / (1 - confidence)), len(found)
        # Empirical Bernstein (Maurer and Pontil 2009).
        most = found.mean() + np.sqrt(2 * found.var(ddof=1) * level / size)
        most += 7 * level / (3 * (size - 1))
        out[i] = min(out[i], doubt.pruned[i] / bound.total[i] + total * most)
    return out


def _best(asked: _Asked, k: int, tolerance: float) -> Weighed | str:
    """Softmax over the k rows that are proven to have the largest scores; for one row, 1."""
    rows, doubt = asked.rows, asked.coded()
    (n, m), fixed = doubt.scores.shape, asked.lost
    k = min(k, m if rows.allowed is None else int(np.count_nonzero(rows.allowed)))
    at = doubt.rivals(k)
    if fixed:
        s, terms = doubt.scores[:, at].astype(float), None
        slack = doubt.deltas(at)
    else:
        s, terms = asked.exact(at, steady=True)
        slack = doubt.fine(terms, rows.shape[1])
        slack[(s == 0) & (terms[:, 2:].T == 0)] = 0  # nothing was multiplied but zeros
    if np.isnan(s).any():
        return "a key is not a number"
    alpha = np.zeros((n, m), asked.query.dtype)
    error, tops, sums = np.zeros(n), np.full(n, -np.inf), np.zeros(n)
    for i in range(n):
        order = np.argsort(-s[i], kind="stable")
        chosen, others = order[:k], order[k:]
        if not len(chosen):
            continue
        w = np.exp(s[i, chosen] - s[i, chosen[0]])
        tops[i], sums[i] = s[i, chosen[0]], w.sum()
        alpha[i, at[chosen]] = w / w.sum()
        if k > 1:
            error[i] = _among(s[i, chosen], slack[i, chosen]) + 4 * np.finfo(alpha.dtype).eps
        high, low = s[i] + slack[i], s[i] - slack[i]
        near = others[high[others] >= low[chosen].min()]
        if len(near):
            edge = chosen[low[chosen] <= high[near].max()]
            both = np.append(edge, near)  # a tie is one where neither was rounded, or keys repeat
            if slack[i, both].any() and (fixed or not _alike(asked, at[both])):
                error[i] += alpha[i, at[edge]].sum()
    error = np.minimum(error, 1.0)
    _reached(error, tolerance, fixed)
    bound = Bound(tops, sums, sums * error, sums * error)
    lse = tops + np.log(np.where(sums > 0, sums, 1.0)) if asked.weighting.has_lse else None
    return _told(asked, alpha, stored.entropy(alpha), lse, error, bound)


def _among(s: np.ndarray, slack: np.ndarray) -> float:
    """How far softmax of these scores may be off, measured from the first, the largest."""
    x, delta = s - s[0], slack + slack[0]
    delta[0] = 0
    w, high, low = np.exp(x), np.exp(x + delta), np.exp(x - delta)
    sums = (np.atleast_1d(y) for y in (w.sum(), (high - w).sum(), (w - low).sum()))
    return float(Bound(np.zeros(1), *sums).error[0])


def _alike(asked: _Asked, at: np.ndarray) -> bool:
    """Whether these rows have the same key, so that the lowest of them come first."""
    at = np.sort(at)
    keys = [
        cut.vectors(at[(at >= cut.start) & (at < cut.start + cut.size)] - cut.start)
        for group in asked.rows.cuts(AT_ONCE, codes=True)
        for cut in group
        if ((at >= cut.start) & (at < cut.start + cut.size)).any()
    ]
    key = np.concatenate(keys)
    return bool((key == key[0]).all())


def _reached(error: np.ndarray, tolerance: float, lost: bool) -> None:
    """Refuse what a store that keeps nothing but codes cannot prove."""
    most = float(error.max(initial=0.0))
    if lost and most > tolerance:
        raise CombinationError(
            f"tolerance: {tolerance:g} cannot be proven, but {most:.3g} can: the vectors are kept "
            "in 8 bits, and what they have lost is not there to be read. Allow more, or keep them "
            "as float32"
        )


def _finished(
    asked: _Asked, doubt: Doubt, kept: np.ndarray | None, bound: Bound, error: np.ndarray
) -> Weighed:
    if not (bound.total > 0).all():  # nothing lies within the window: the weighting says what then
        s = stored.scored(asked.rows, asked.query, asked.score)
        found = stored.run(asked.rows, s, asked.weighting)
        return found._replace(read=asked.rows.shape[0], error=np.zeros(len(s)))
    # Scores in float64 were needed for digits that float32 would lose again.
    dtype = np.result_type(asked.query, doubt.scores)
    if kept is None:
        alpha = doubt.scores if doubt.scores.dtype == dtype else doubt.scores.astype(dtype)
        entropy = doubt.weights(alpha)
    else:
        alpha = np.zeros((len(error), asked.rows.shape[0]), dtype)
        entropy = doubt.weights(alpha, kept)
    lse = bound.top + np.log(bound.total) if asked.weighting.has_lse else None
    return _told(asked, alpha, entropy, lse, error, bound)


def _told(
    asked: _Asked,
    alpha: np.ndarray,
    entropy: np.ndarray,
    lse: np.ndarray | None,
    error: np.ndarray,
    bound: Bound,
) -> Weighed:
    form = asked.score.affine(asked.wide, np.ones(1))
    shift = 0.0 if form is None or form.offset is None else np.asarray(form.offset)
    best = bound.top * asked.cooled
    best = best + shift if asked.profile is None else asked.profile(np.maximum(-asked.most, 0))
    lse = None if lse is None else lse + shift / asked.cooled
    out, read = stored.pooled(asked.rows, alpha, mean=True), min(asked.read, alpha.shape[1])
    return Weighed(out, alpha, entropy, lse, best, error, read, bound)
