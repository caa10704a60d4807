"""Scores of rows by their 8-bit codes, and what these lose; scores of few rows by their keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from qkv.arrays import of
from qkv.arrays.int8 import Queries
from qkv.arrays.lengths import lengths
from qkv.arrays.rows import Cut, Near, Reader, Rows
from qkv.engines import stored
from qkv.engines.doubt import Doubt
from qkv.engines.scan import CAREFUL, Scan, Slack, Terms
from qkv.scores import Score
from qkv.scores.base import Affine
from qkv.weightings import Weighting

AT_ONCE = 65536
"""Rows whose codes a core takes at a time for up to four queries. For more there are fewer, so that
what it makes of them stays near, but not so few that the steps between take as long."""

PICKED = 8192
"""Keys that are scored in float64 at a time."""

SHUT = 1e-290
"""More than a gate lets through where float64 has it shut, beside what it rounds by."""

LEAST = np.float32(1e-30)
"""Added to the size of a bias that is not 0: what float32 rounds to 0 is still none."""

UNBENT = 1e36
"""A softcap from which on it bends no score that a softmax tells from others, and float32 does
not hold what is divided by it."""

UNIT = 2.0**-24
"""What a float32 is rounded by."""


class Coded:
    """Rows and queries, and how a score is made of a key."""

    def __init__(self, rows: Rows, query: np.ndarray, score: Score, weighting: Weighting):
        self.rows, self.query, self.score, self.weighting = rows, query, score, weighting
        self.wide = query.astype(float)
        self.cooled = float(getattr(weighting, "temperature", 1.0))
        some = rows.first()
        assert some is not None and some.near is not None
        self.lost = some.lost
        self.read, self.most = 0, np.zeros(len(query))
        self._cuts: list[list[Cut]] | None = None
        self.size = max(int(2 * AT_ONCE / max(len(query), 4) ** 0.5), 1)
        self.profile: Callable[..., Any] | None = getattr(score, "profile", None)
        form = self.form(np.ones(1))
        self.phi, self.cap = np.asarray(form.query), form.cap
        # What all scores of a query have in common counts where they are weights; where it does
        # not, they are without it here.
        common = np.zeros(len(query)) if form.offset is None else np.asarray(form.offset)
        self.offset = None if self.profile is None or form.offset is None else common
        self.shift = common if self.offset is None else np.zeros(len(query))
        self.gate = form.gate
        self.plain = all(x is None for x in (form.factor, form.bias, self.offset, form.gate))
        self._columns: np.ndarray | None = None
        if self.plain and not rows.apart and some.near.residual is not None:
            room = np.empty((2, rows.shape[0]), np.float32)
            self._columns = rows.bounds.setdefault((0, 0), room)  # no cut has 0 rows
        self.length = lengths(self.phi) * CAREFUL
        # A gate moves by a quarter of what its logit does, times a score of at most ‖φ‖ ‖k‖.
        gate = self.phi[:0] if form.gate is None else np.asarray(form.gate[1], float)[None]
        self.bend = float(lengths(gate).sum()) / 4 * CAREFUL
        self.tilt = 1.0 if form.gate is None else 1 + np.asarray(form.gate[2]) / 4 * CAREFUL
        self.queries = Queries(np.concatenate([self.phi, gate]))

    def _window_rounding(self) -> tuple[float, float, np.ndarray | float]:
        """By how much the exact scan, which takes the differences of queries and keys in the
        query's dtype, may round r² near the edge of a window: what the length of a key is
        multiplied by, what ‖k‖² / width² is, and what is added for a query, (n,).

        With e = 2 u (‖q‖ + ‖k‖) / width, the length of a difference is off by at most e, and r² at
        r ≤ 1 by 2 e + e² beside what the sum of d squares loses. A row for which that decides is
        not proven to lie on either side of the edge: the exact scan may see it on the other.
        """
        if self.profile is None:
            return 0.0, 0.0, 0.0
        unit = float(np.finfo(self.query.dtype).eps) / 2
        width = float(self.score.width)  # type: ignore[attr-defined]
        own = lengths(self.wide) / width
        summed = 4 * (self.query.shape[1] + 8) * unit
        return 4 * unit / width, 8 * unit**2, 4 * unit * own + 8 * unit**2 * own**2 + summed

    def form(self, norm: np.ndarray) -> Affine:
        """φ, factor, bias and offset, cooled."""
        found = self.score.affine(self.wide, norm)
        assert found is not None
        over = self.cooled
        bias = None if found.bias is None else found.bias / over
        offset = None if found.offset is None else found.offset / over
        cap = None if found.cap is None else found.cap / over
        cap = cap if cap is None or cap < UNBENT else None
        return Affine(found.query / over, found.factor, bias, offset, cap, found.gate)

    def scores(self, cut: Cut) -> tuple[np.ndarray, Terms]:
        """Those of a cut (n, c), by its codes."""
        near, live = cut.stored.near, cut.stored.live
        assert near is not None
        s = self.queries.inner(near.code)
        if live is not None:
            s, near = s[:, live], near.some(live)
        if self.plain:
            scale, terms = self._plainly(cut, near)
            s *= scale
            return self._capped(s), terms
        factor, bias, terms = self.terms(near)
        s *= near.scale if factor is None else (near.scale * factor).astype(np.float32)
        if bias is not None:
            s += bias
        if self.gate is not None:
            s = self._gated(s[:-1], s[-1])
        return self._capped(s), terms

    def _gated(self, s: np.ndarray, logit: np.ndarray) -> np.ndarray:
        """Scores (n, c) behind a gate, by the keys' part (c,) of its logit."""
        assert self.gate is not None
        opened = np.asarray(self.gate[0], logit.dtype)[:, None] + logit
        return np.asarray(s / (1 + np.exp(-opened)))

    def _bent(self, logit: np.ndarray, norm: np.ndarray, lost: float) -> np.ndarray:
        """How much of what a score and a logit have lost is lost behind the gate (n, c): little
        where it is shut, and where it is open nothing of the logit's, for σ′ ≤ exp(−|x|), ¼."""
        assert self.gate is not None
        opened = np.asarray(self.gate[0])[:, None] + logit
        reach = CAREFUL * (np.asarray(self.gate[2])[:, None] + 4 * self.bend * norm)
        steep = np.minimum(np.exp(-np.maximum(np.abs(opened) - lost * reach, 0)), 0.25)
        wide = np.exp(np.minimum(opened + lost * reach, 0))
        return np.asarray((wide + steep * reach) * CAREFUL + SHUT)

    def _capped(self, s: np.ndarray) -> np.ndarray:
        """In place: what bends scores brings no two of them further apart."""
        if self.cap is not None:
            s /= self.cap
            np.tanh(s, out=s)
            s *= self.cap
        return s

    def _plainly(self, cut: Cut, near: Near) -> tuple[np.ndarray, Terms]:
        """The scales and terms where no row has a factor or a bias: what no query has a part in is
        kept, and columns of a table that memory can hold."""
        at, kept, columns = (cut.start, cut.size), self.rows.bounds, self._columns
        some = slice(cut.start, cut.start + cut.size)
        if at not in kept:
            terms = self.terms(near)[2]
            if columns is not None:
                columns[0, some], columns[1, some] = near.scale, terms.residual
            norm = terms.norm.max(keepdims=True)
            kept[at] = terms._replace(residual=None, norm=norm, known=terms.most)
        if columns is not None:
            scale, residual = columns[:, some]
        else:
            scale, residual = (
                None if x is None else np.ascontiguousarray(x) for x in (near.scale, near.residual)
            )
        return scale, kept[at]._replace(residual=residual)

    def terms(self, near: Near) -> tuple[np.ndarray | None, np.ndarray | None, Terms]:
        """The factors and biases of rows (c,), if there are such, and what is to be known of them;
        a bias (n, c) has the offset in it."""
        norm, residual = near.norm, near.residual
        if norm is None:
            norm = near.scale * np.float32(127 * self.query.shape[1] ** 0.5)
        norm = np.ascontiguousarray(norm)
        residual = None if residual is None else np.ascontiguousarray(residual)
        factor = bias = told = None
        if not self.plain:
            form = self.form(np.asarray(norm, float))
            if form.factor is not None:
                factor = np.asarray(form.factor)
                norm, residual = norm * factor, None if residual is None else residual * factor
            if form.bias is not None:
                bias = np.asarray(form.bias, np.float32)
                told = np.abs(bias) + LEAST * (np.asarray(form.bias) != 0)
            if self.offset is not None:
                offset = self.offset.astype(np.float32)[:, None]
                bias = offset if bias is None else bias + offset
        grown = factor
        if self.gate is not None:
            grown = 1 + self.bend * np.asarray(norm, float)
            norm, residual = norm * grown, None if residual is None else residual * grown
        return factor, bias, Terms(residual, norm, told, _spread(near, grown))

    def slack(self) -> Slack:
        """What the terms of codes are multiplied by."""
        length, unit = self.length, UNIT
        rest = self.queries.rest[: len(length)]
        if self.bend:  # what the gate's vector has lost, as if the queries had
            rest = np.maximum(rest, self.queries.rest[-1] / (4 * self.bend) * CAREFUL * length)
        lost = rest + unit * self.queries.lost * length
        none = np.zeros(len(length))
        rounded = 16 * unit * length * self.tilt
        by_length, by_square, _ = self._window_rounding()
        return Slack(length + lost, lost + rounded + by_length, none + 8 * unit + by_square, unit)

    def scanned(self) -> Scan:
        """The weights of all rows by their codes."""
        return Scan(self.rows.shape[0], self.slack(), self.scores, self.cuts(("near",)))

    def again(self) -> Scan:
        """The same by their keys, as the exact scan scores them."""
        m, width = self.rows.shape
        s = stored.scored(self.rows, self.query.astype(np.float32), self.score)
        s = self.weighting.scale(s)
        # Which has the offset in it, and has rounded beside it.
        s -= self.shift.astype(np.float32)[:, None]
        least = np.float32(np.abs(self.shift).max(initial=0.0))
        unit = 4 * (width + 8) * UNIT
        none = np.zeros(len(s))
        slack = Slack(none, unit * self.length * self.tilt, none + unit, UNIT)

        def lift(cut: Cut) -> tuple[np.ndarray, Terms]:
            near = cut.stored.near
            assert near is not None
            near = near if cut.stored.live is None else near.some(cut.stored.live)
            terms = self.terms(near)[2]
            bias = least + (np.zeros_like(terms.norm) if terms.bias is None else terms.bias)
            return s[:, cut.start : cut.start + cut.size], terms._replace(residual=None, bias=bias)

        self.read = m
        return Scan(m, slack, lift, self.cuts())

    def coded(self) -> Doubt:
        """The scores of all rows by their codes, one by one."""
        slack = self.slack()
        found = Doubt(np.empty((len(self.query), self.rows.shape[0]), np.float32), slack)
        found.rounded = self._window_rounding()[2]

        def fill(cut: Cut) -> None:
            at = slice(cut.start, cut.start + cut.size)
            found.scores[:, at], terms = self.scores(cut)
            found.terms[:, at] = terms.stacked()

        cuts = self.cuts(("near",))
        Reader(of(self.query)).reduce(fill, lambda one, two: None, None, cuts)
        found.among(self.rows.allowed)
        return found

    def cuts(self, ahead: Collection[str] = ()) -> Iterable[list[Cut]]:
        """All rows; where memory can hold them, as they were read first."""
        if self.rows.apart:
            return self.rows.cuts(self.size, codes=True, ahead=ahead)
        if self._cuts is None:
            self._cuts = list(self.rows.cuts(self.size, codes=True))
        return self._cuts

    def picked(self, at: np.ndarray) -> Iterator[tuple[slice, np.ndarray, Near]]:
        """Rows at places, some at a time: which they are, their keys, what bounds their codes."""
        begin = end = 0
        keys, nears = list[np.ndarray](), list[Near]()
        for cut in chain.from_iterable(self.cuts()):
            first, end = end, int(np.searchsorted(at, cut.start + cut.size))
            if end > first:
                keys.append(cut.vectors(at[first:end] - cut.start))
                nears.append(cut.near(at[first:end] - cut.start))
            if keys and (end - begin >= PICKED or end == len(at)):
                known = (
                    None if x[0] is None else np.concatenate(x) for x in zip(*nears, strict=True)
                )
                yield slice(begin, end), np.concatenate(keys).astype(float), Near(*known)  # type: ignore[arg-type]
                begin, keys, nears = end, [], []

    def exact(
        self, at: np.ndarray, steady: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The scores (n, c) of rows at places, by their keys in float64; the terms (3, c) of their
        codes; and how much the scores may be off. `steady` rounds equal keys alike, and knows
        that nothing is lost where nothing but zeros was multiplied."""
        n, width = self.phi.shape
        out, off, terms = np.empty((n, len(at))), np.empty((n, len(at))), np.empty((3, len(at)))
        for some, key, near in self.picked(at):
            form = self.form(norm := np.sqrt(np.einsum("ij,ij->i", key, key)))
            if steady:
                s = np.stack([np.add.reduce(key * one, 1) for one in self.phi])
            else:
                s = self.phi @ key.T
            if form.factor is not None:
                s, norm = s * form.factor, norm * form.factor
            lost = 4 * (width + 8) * 2.0**-53
            told = np.outer(self.length, norm)
            if self.gate is not None:
                logit = np.add.reduce(key * self.gate[1], 1)
                s, told = self._gated(s, logit), told * self._bent(logit, norm, lost)
            bias = 0.0 if form.bias is None else np.asarray(form.bias)
            s = s + bias
            s = s if self.offset is None else s + self.offset[:, None]
            out[:, some], terms[:, some] = self._capped(s), self.terms(near)[2].stacked()
            off[:, some] = lost * (told + np.abs(bias))
            if steady:
                off[:, some][(s == 0) & (np.abs(self.phi) @ np.abs(key).T == 0)] = 0
        self.read += len(at)
        return out, terms, off

    def whole(self) -> Doubt:
        """The scores of all rows by their keys in float64."""
        m, width = self.rows.shape
        unit = 4 * (width + 8) * 2.0**-53
        none = np.zeros(len(self.phi))
        s = self.exact(np.arange(m))[0]
        self.read = m
        by_length, by_square, _ = self._window_rounding()
        steady = unit * self.length * self.tilt + by_length
        slack = Slack(none, steady, none + unit + by_square, 2.0**-53)
        return self.coded().exactly(s, slack)


def _spread(near: Near, factor: np.ndarray | None) -> float:
    """How far the residuals of all rows reach together, as `scan.Terms` has it."""
    if near.spread is None or near.block is None or not len(near.block):
        return np.inf
    starts = np.append(0, np.flatnonzero(near.block[1:] != near.block[:-1]) + 1)
    if factor is None:
        wide = near.spread[starts]
    else:
        wide = np.maximum.reduceat(near.spread * factor, starts)
    return float(np.sqrt(np.square(wide, dtype=float).sum()))
