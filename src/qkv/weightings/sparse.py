"""Weights of the α-entmax family: smooth like softmax, yet exactly 0 for poor matches."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Never

from qkv.arrays import is_array, of, tree
from qkv.errors import as_float, positive
from qkv.types import Array, Keep, Live, Shape
from qkv.weightings.base import INFINITY, Fold, State, Weighting, pool, row_max
from qkv.weightings.power import as_rows, check_rows, growth, logarithm, slopes

STEPS = 100
SOME = 128
EPSILON = {"float32": 1e-6, "float64": 1e-14}
"""The last step of Newton for τ in (−1, 0)."""
SHORT = 64
"""Keys up to which the steps take less than setting scores aside for them."""
NEAR = 1.05
"""Below it few digits of (alpha − 1) s are left of what its power asks: 7 of float32's at 1.5, 6
here, none at 1 + 1e-7."""
LEAST = 1e-30
"""A divisor where there is nothing to divide."""
MOST = 80.0
"""Above the logarithm of any number of keys; its exponential is one of float32's numbers."""


@dataclass(frozen=True)
class Entmax(Weighting):
    """α = argmax_p pᵀs + H(p) over the simplex, H Tsallis' entropy of order `alpha` > 0.

    The solution is αᵢ = max(0, (alpha − 1) sᵢ − τ)^e with e = 1/(alpha − 1), where the one
    threshold τ makes the row sum to one. At alpha = 2 it is sparsemax, at 1 softmax; above 1 some
    weights are exactly 0, the more the larger it is, and below 1 none is.

    `alpha` may be learned: an array of one number, of one for each head (h,), or of any shape that
    broadcasts to one for each row (…, n, 1).

    >>> import numpy as np
    >>> Entmax(1.5)(np.array([[1.0, 1.0, -2.0]]))
    array([[0.5, 0.5, 0. ]])
    >>> Entmax(np.array([1.0, 2.0]))(np.zeros((2, 1, 1)) + np.log([1.0, 3.0])).round(3)
    array([[[0.25, 0.75]],
    <BLANKLINE>
           [[0.  , 1.  ]]])
    """

    alpha: float | Array = 1.5
    convex: ClassVar[bool] = True
    centred = True
    sparse: ClassVar[bool] = True

    def __new__(cls, alpha: float | Array = 1.5, **others: Never) -> Entmax:
        quick = isinstance(alpha, Real) and NEAR <= as_float(alpha) <= 2
        return super().__new__(Tsallis if cls is Entmax and not quick else cls)

    def __post_init__(self) -> None:
        positive(self, "alpha")

    @property
    def exponent(self) -> float:
        return 1 / (self.alpha - 1)

    def scale(self, scores: Array) -> Array:
        return scores if self.alpha == 2 else scores * (self.alpha - 1)

    def picks(self, scores: Array) -> bool:
        """Whether the steps look at the few scores that may have a weight, set aside for them."""
        return of(scores).picks

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        fw = of(scores)
        if self.picks(scores):
            return self.picked(scores, live)
        lent = fw.lend(fw.detach(scores))
        if lent is None:
            found = fw.node("entmax", scores, live, self.alpha)
            return self.searched(scores, live, k) if found is None else found

        def forward(*_: Array) -> tuple[State, State]:
            # NumPy picks by a mask several times faster than others can.
            allowed = None if live is None else fw.lend(live)
            with of(lent).quiet():
                found = fw.take_back(self.weights(lent, allowed, k))
            return (found,), (found,)

        def backward(given: State, kept: State, along: State) -> State:
            return (slopes(kept[0], along[0], self.alpha),)

        def reference(scores: Array) -> State:
            return (self.searched(scores, live, k),)

        if not fw.needs_gradient([scores]):
            return forward()[0][0]
        return fw.custom(forward, backward, reference, [scores])[0]

    def searched(self, scores: Array, live: Live, k: Array) -> Array:
        """The weights by steps that a framework differentiates."""

        def fold(lift: Any, merge: Any, init: Any) -> Any:
            return lift(scores, live, k)

        fw = of(scores)
        top = fw.finite(row_max(scores, live))
        alpha = as_rows(self.alpha, scores) if is_array(self.alpha) else self.alpha
        tau = fw.node("threshold", scores - top, live, alpha)
        found = self.search(fold) if tau is None else self.polished(fold, top, tau)
        return self.weight(scores, live, k, found)

    def search(self, fold: Fold) -> State:
        """The row's largest score and, below it, the threshold τ.

        With r = max(0, s − top − τ), ‖r‖ₑ is convex and falls in τ, so Newton's steps on
        ‖r‖ₑ = 1 climb from τ = −1 to the root without passing it. What lies below τ at the start
        never counts again: where the rest may be set aside, the steps look at nothing else.
        """
        top, start = fold(self.look, _looked, _unseen)
        fw = of(top)
        top = fw.finite(top)
        if not self.picks(top):
            return self.polished(fold, top, self.solve(fold, top))
        start = fw.xp.maximum(fw.finite(start, -1.0), fw.full(top.shape, -1.0, top))

        def candidates(s: Array, live: Live, k: Array) -> State:
            s = fw.detach(s)
            return (fw.pick(s, self.chosen(s, live, top, start), top)[0],)

        (kept,) = fold(candidates, _beside, _nothing)
        return top, self.climb(kept, start)

    def look(self, scores: Array, live: Live, k: Array) -> State:
        """The largest score of a block, and from there a τ below its root, so below the row's."""
        fw = of(scores)
        if not self.picks(scores):
            top = row_max(scores, live)
            return top, fw.full(top.shape, -INFINITY, top)
        top, start = self.first_look(scores, live)
        return top, fw.keep(start, top > -INFINITY, -INFINITY)

    def first_look(self, scores: Array, live: Live, by: float = 1.0) -> State:
        """The row's largest score, and a τ below the root: the root of some of the scores.

        Those are the largest of every SOME-th, so that few are below the root.
        """
        fw = of(scores)
        xp, m = fw.xp, scores.shape[-1]
        if live is not None or m < 4 * SOME:
            top = row_max(scores, live)
            return top, fw.full(top.shape, -1.0, top)
        even = m // SOME * SOME
        some = xp.reshape(scores[..., :even], (*scores.shape[:-1], m // SOME, SOME))
        some = xp.max(some, axis=-2)
        top = row_max(some, None)
        if even < m:
            top = xp.maximum(top, row_max(scores[..., even:], None))
        some = xp.maximum(some[..., : SOME // 2], some[..., SOME // 2 :]) - fw.finite(top)
        tau = self.climb(some * by, fw.full(top.shape, -1.0, top))
        return top, fw.keep(tau, tau > -1, -1.0)

    def picked(self, scores: Array, live: Live, by: float = 1.0, spend: bool = False) -> Array:
        """The weights of scores · by, from the few that may have one; `spend`: in their place."""
        fw = of(scores)
        if live is None and 0 < scores.shape[-1] < SHORT:
            kept = (scores - fw.finite(row_max(scores, None))) * by
            tau = self.climb(kept, fw.full((*scores.shape[:-1], 1), -1.0, scores))
            return self.power(fw.xp.maximum(kept - tau, 0.0), self.exponent)
        top, start = self.first_look(scores, live, by)
        top = fw.finite(top)
        kept, at = fw.pick(scores, self.chosen(scores, live, top, start / by), top)
        kept *= by
        weight = self.weight(kept, None, kept, (0.0, self.climb(kept, start)))
        return fw.put(weight, at, scores if spend else None)

    def whole(self, scores: Array, live: Live, k: Array, value: Array, keep: Keep) -> Array:
        fw = of(scores)
        if not self.picks(scores):
            return super().whole(scores, live, k, value, keep)
        weight = self.picked(scores, live, self.alpha - 1, spend=True)
        if keep is None and bool(fw.xp.all(fw.xp.isfinite(value))):
            return fw.xp.matmul(weight, value)
        return pool(weight, value, live, keep, sparse=True)

    def chosen(self, scores: Array, live: Live, top: Array, start: Array) -> Array:
        """What lies above the τ of the start; a NaN is not hidden."""
        xp = of(scores).xp
        near = xp.logical_not(scores < top + start)
        return near if live is None else xp.logical_and(near, live)

    def climb(self, kept: Array, tau: Array) -> Array:
        """τ of the scores that were set aside, measured from their top, by Newton's steps.

        From below they only climb, so that the mass is at least 1, or 0 in a row without keys.
        """
        fw, e = of(kept), self.exponent
        near = EPSILON[fw.dtype(kept)]
        for _ in range(STEPS):
            r = fw.xp.maximum(kept - tau, 0.0)
            lean = self.power(r, e - 1)
            slope, mass = fw.row_sum(lean), fw.row_sum(lean * r)
            size = fw.xp.minimum(mass, 1.0) if e == 1 else mass ** (1 - 1 / e)
            step = (mass - size) / fw.xp.maximum(slope, LEAST)
            tau = tau + step
            if not (step > near).any():  # a row of NaN does not hold up the others
                break
        return tau

    def solve(self, fold: Fold, top: Array) -> Array:
        fw = of(top)
        near = EPSILON[fw.dtype(top)]

        def settle(state: State) -> State:
            tau = fw.detach(self.step(fold, top, state[0]))
            return tau, tau - state[0]

        def done(state: State) -> Array:
            return fw.xp.logical_not(fw.xp.any(fw.xp.abs(state[1]) > near))

        start, far = (fw.full(top.shape, x, top) for x in (-1.0, 1.0))
        return fw.until(done, settle, (start, far), STEPS)[0]

    def polished(self, fold: Fold, top: Array, tau: Array) -> State:
        return top, self.polish(fold, top, tau)

    def polish(self, fold: Fold, top: Array, tau: Array) -> Array:
        """Two more steps, which carry the exact first and second derivative of the root: each
        doubles the order to which τ, a constant where they start, is right."""
        return self.step(fold, top, self.step(fold, top, of(tau).detach(tau)))

    def step(self, fold: Fold, top: Array, tau: Array) -> Array:
        fw = of(top)

        def lift(s: Array, live: Live, k: Array) -> State:
            weight, lean = self.parts(s, live, (top, tau))
            return fw.row_sum(weight), fw.row_sum(lean)

        return tau + self.newton(*fold(lift, self.merge, _zeros))

    def power(self, r: Array, exponent: float) -> Array:
        """r^exponent where r > 0, else 0; its slope is finite everywhere."""
        fw = of(r)
        if exponent == 0:
            return fw.astype(r > 0, fw.dtype(r))
        if exponent == 1:
            return r
        if exponent == 2:
            return r * r
        return fw.keep(fw.xp.pow(fw.nonzero(r), exponent), r != 0)

    def parts(self, scores: Array, live: Live, found: State) -> State:
        """α of a block, and how it leans: its slope in the score, but for a constant factor."""
        r, e = of(scores).above(scores, found[0], found[1], live), self.exponent
        return self.power(r, e), self.power(r, e - 1)

    def newton(self, mass: Array, slope: Array) -> Array:
        """The step of τ that solves ‖r‖ₑ = 1 were it linear; 0 for an empty row."""
        fw = of(mass)
        size = 1.0 if self.alpha == 2 else fw.xp.pow(fw.nonzero(mass), 1 - 1 / self.exponent)
        return fw.keep((mass - size) / fw.nonzero(slope), mass != 0)

    def init(self, rows: Array, width: int) -> State:
        pooled = super().init(rows, width)
        return *pooled, *pooled, of(rows).full(rows.shape, 0.0, rows)

    def lift(
        self, scores: Array, live: Live, k: Array, found: State, value: Array, keep: Keep
    ) -> State:
        weight, lean = self.parts(scores, live, found)
        pooled = (pool(x, value, live, keep, sparse=True) for x in (weight, lean))
        return *pooled, of(lean).row_sum(lean)

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        out, leaning, slope = state
        return out, found, leaning / of(slope).nonzero(slope)

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        return self.power(of(scores).above(scores, found[0], found[1], live), self.exponent)

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        lean = self.power(weight, (self.exponent - 1) / self.exponent)
        return lean * (along - centre) * self.exponent


@dataclass(frozen=True)
class Tsallis(Entmax):
    """`Entmax` of an alpha that is learned, or lies outside of [NEAR, 2].

    With c = alpha − 1 and z = s − top it is αᵢ = e^−λ (1 + c vᵢ)^(1/c), vᵢ = zᵢ e^cλ, 0 where the
    bracket is not above 0. The one λ ≥ 0 that makes the row sum to one, the logarithm of 1 over
    the largest weight, is softmax's log-sum-exp at alpha = 1, where nothing else is special.
    """

    @property
    def bends(self) -> bool:  # type: ignore[override]
        return is_array(self.alpha)

    def __repr__(self) -> str:
        return f"Entmax(alpha={self.alpha!r})"

    def fits(self, lead: Shape, n: int) -> None:
        check_rows("Entmax: alpha", self.alpha, lead, n)

    def less(self, like: Array) -> Array:
        """alpha − 1, with as many axes as `like` has"""
        return as_rows(self.alpha, like) - 1

    def picks(self, scores: Array) -> bool:
        return False

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        return self.searched(scores, live, k)

    def scale(self, scores: Array) -> Array:
        return scores

    def polished(self, fold: Fold, top: Array, tau: Array) -> State:
        """The row's top, λ, and the log of the mass there: for a large alpha no λ gives just 1."""
        found = super().polished(fold, top, tau)
        fw = of(found[0])
        return *found, fw.xp.log(fw.nonzero(self.mass(fold, *found)[0]))

    def mass(self, fold: Fold, top: Array, at: Array) -> State:
        """Σ α, and how fast it falls in λ; constants."""
        fw = of(top)
        still = tree.map_arrays(fw, fw.detach, self)

        def lift(s: Array, live: Live, k: Array) -> State:
            return tuple(map(fw.row_sum, still.parts(fw.detach(s), live, (top, fw.detach(at)))))

        return fold(lift, self.merge, _zeros)

    def solve(self, fold: Fold, top: Array) -> Array:
        """λ by Newton's steps on (massᶜ − 1)/c, which is convex in e^−cλ up to alpha = 2.

        From 0, where the top alone has a mass of 1, they climb to the root. Beyond 2 the mass is
        concave in e^−λ but where a key joins: there the steps come from the other side, between
        bounds that are halved where one is passed. αᵢ e^λ falls in λ, so λ + log mass is a bound.
        """
        fw = of(top)
        xp, near = fw.xp, EPSILON[fw.dtype(top)]
        zero = top * 0.0  # a graph may not know its shape
        c = zero + fw.detach(self.less(top))
        sharp = c > 1

        def settle(state: State) -> State:
            at, low, far, _ = state
            mass, rate = self.mass(fold, top, at)
            log, over = xp.log(fw.nonzero(mass)), mass >= 1
            low = xp.maximum(low, at + xp.minimum(log, zero))
            high = xp.minimum(far, at + xp.maximum(log, zero))
            back = xp.where(over, high, at - xp.log((1 - mass) / fw.nonzero(rate) + 1))
            passed = xp.logical_or(back < low, xp.logical_and(over, high >= far))
            back = xp.where(passed, (low + high) / 2, back)
            step = logarithm(-mass * log * growth(-c * log) / fw.nonzero(rate), c, None)[0]
            new = xp.where(sharp, back, at - step)
            return new, low, high, xp.abs(new - at)

        def done(state: State) -> Array:
            return xp.logical_not(xp.any(state[3] > near * (1 + state[0])))

        return fw.until(done, settle, (zero, zero, zero + MOST, zero + INFINITY), STEPS)[0]

    def polish(self, fold: Fold, top: Array, tau: Array) -> Array:
        """The root as found, with the derivatives of two steps, which may lead away beyond 2."""
        moved = super().polish(fold, top, tau)
        return of(tau).detach(tau) + (moved - of(tau).detach(moved))

    def newton(self, mass: Array, slope: Array) -> Array:
        return (mass - 1) / of(slope).nonzero(slope)

    def parts(self, scores: Array, live: Live, found: State) -> State:
        return self.powers(scores, live, found, 1.0, 1 - self.less(scores))

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        return self.powers(scores, live, found, 1.0)[0]

    def powers(self, scores: Array, live: Live, found: State, *exponents: Any) -> State:
        """(αᵢ e^λ)^exponent e^−λ for each of the exponents."""
        fw, c = of(scores), self.less(scores)
        top, at, *rest = found
        grown = c * at
        grown = fw.keep(grown, grown < MOST, MOST)
        log, some = logarithm((scores - top) * fw.xp.exp(grown), c, live)
        return tuple(fw.keep(fw.xp.exp(x * log - sum(rest, at)), some) for x in exponents)

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        fw = of(weight)
        lean = fw.xp.exp((1 - self.less(weight)) * fw.xp.log(fw.nonzero(weight)))
        return fw.keep(lean, weight != 0) * (along - centre)


Tsallis.__name__ = Entmax.__name__  # what a person asked for, and reads in what is told of it


@dataclass(frozen=True)
class Sparsemax(Entmax):
    """α = the point of the simplex nearest to the scores: Entmax(2)

    >>> import numpy as np
    >>> Sparsemax()(np.array([[0.6, 0.2, -2.0]]))
    array([[0.7, 0.3, 0. ]])
    """

    alpha: float = field(default=2, init=False)


def _looked(one: State, two: State) -> State:
    """The larger top, and the larger τ from there; differences first, as 1e30 − 1 is 1e30."""
    fw = of(one[0])
    top = fw.xp.maximum(one[0], two[0])
    seen = ((x - fw.finite(top)) + start for x, start in (one, two))
    return top, fw.xp.maximum(*(fw.finite(x, -INFINITY) for x in seen))


def _unseen(rows: Array) -> State:
    return (of(rows).full(rows.shape, -INFINITY, rows),) * 2


def _beside(one: State, two: State) -> State:
    return (of(one[0]).xp.concat([one[0], two[0]], axis=-1),)


def _nothing(rows: Array) -> State:
    return (rows[..., :0],)


def _zeros(rows: Array) -> State:
    return (of(rows).full(rows.shape, 0.0, rows),) * 2
