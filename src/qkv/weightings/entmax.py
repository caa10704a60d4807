"""Weights of the α-entmax family: smooth like softmax, yet exactly 0 for poor matches."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Never

from qkv.errors import as_float, validate_positive
from qkv.frameworks import get_framework, is_array, tree
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, DropoutMask, LiveMask, Shape
from qkv.weightings.base import (
    INFINITY,
    FoldFunction,
    State,
    Weighting,
    live_row_max,
    pool_by_weights,
)
from qkv.weightings.power import (
    broadcast_to_rows,
    check_row_shape,
    entmax_gradient,
    expm1_ratio,
    scaled_log1p,
)

MAX_NEWTON_STEPS = 100
SAMPLE_COUNT = 128
NEWTON_TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
"""The last step of Newton for τ in (−1, 0)."""
MAX_SHORT_ROW_KEYS = 64
"""Keys up to which the steps take less than setting scores aside for them."""
MIN_QUICK_ALPHA = 1.05
"""Below it few digits of (alpha − 1) s are left of what its power asks: 7 of float32's at 1.5, 6
here, none at 1 + 1e-7."""
MIN_DIVISOR = 1e-30
"""A divisor where there is nothing to divide."""
MAX_LOG_SUM = 80.0
"""Above the logarithm of any number of keys; its exponential is one of float32's numbers."""


@suggest_keywords
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
    is_convex: ClassVar[bool] = True
    needs_centre = True
    is_sparse: ClassVar[bool] = True

    def __new__(cls, alpha: float | Array = 1.5, **others: Never) -> Entmax:
        quick = isinstance(alpha, Real) and MIN_QUICK_ALPHA <= as_float(alpha) <= 2
        return super().__new__(Tsallis if cls is Entmax and not quick else cls)

    def __post_init__(self) -> None:
        validate_positive(self, "alpha")

    @property
    def exponent(self) -> float:
        return 1 / (self.alpha - 1)

    def scale_scores(self, scores: Array) -> Array:
        return scores if self.alpha == 2 else scores * (self.alpha - 1)

    def gathers_candidates(self, scores: Array) -> bool:
        """Whether the steps look at the few scores that may have a weight, set aside for them."""
        return get_framework(scores).supports_masked_gather

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        fw = get_framework(scores)
        if self.gathers_candidates(scores):
            return self.weights_of_candidates(scores, live)
        lent = fw.as_numpy_view(fw.detach(scores))
        if lent is None:
            found = fw.call_graph_node("entmax", scores, live, self.alpha)
            return self.weights_by_search(scores, live, k) if found is None else found

        def forward(*_: Array) -> tuple[State, State]:
            # NumPy picks by a mask several times faster than others can.
            allowed = None if live is None else fw.as_numpy_view(live)
            with get_framework(lent).compute_context():
                found = fw.from_numpy_view(self.weights(lent, allowed, k))
            return (found,), (found,)

        def backward(given: State, kept: State, along: State) -> State:
            return (entmax_gradient(kept[0], along[0], self.alpha),)

        def reference(scores: Array) -> State:
            return (self.weights_by_search(scores, live, k),)

        if not fw.needs_gradient([scores]):
            return forward()[0][0]
        return fw.custom_gradient(forward, backward, reference, [scores])[0]

    def weights_by_search(self, scores: Array, live: LiveMask, k: Array) -> Array:
        """The weights by steps that a framework differentiates."""

        def fold_whole_row(lift: Any, merge: Any, init: Any) -> Any:
            return lift(scores, live, k)

        fw = get_framework(scores)
        top = fw.replace_nonfinite(live_row_max(scores, live))
        alpha = broadcast_to_rows(self.alpha, scores) if is_array(self.alpha) else self.alpha
        tau = fw.call_graph_node("threshold", scores - top, live, alpha)
        found = (
            self.find_threshold(fold_whole_row)
            if tau is None
            else self.refined_state(fold_whole_row, top, tau)
        )
        return self.block_weights(scores, live, k, found)

    def find_threshold(self, fold: FoldFunction) -> State:
        """The row's largest score and, below it, the threshold τ.

        With r = max(0, s − top − τ), ‖r‖ₑ is convex and falls in τ, so Newton's steps on
        ‖r‖ₑ = 1 climb from τ = −1 to the root without passing it. What lies below τ at the start
        never counts again: where the rest may be set aside, the steps look at nothing else.
        """
        top, start = fold(self.block_start, _merge_starts, _empty_start)
        fw = get_framework(top)
        top = fw.replace_nonfinite(top)
        if not self.gathers_candidates(top):
            return self.refined_state(fold, top, self.solve_threshold(fold, top))
        start = fw.xp.maximum(fw.replace_nonfinite(start, -1.0), fw.full(top.shape, -1.0, top))

        def gather_candidates(s: Array, live: LiveMask, k: Array) -> State:
            s = fw.detach(s)
            return (fw.masked_gather(s, self.candidate_mask(s, live, top, start), top)[0],)

        (kept,) = fold(gather_candidates, _concat_candidates, _no_candidates)
        return top, self.newton_ascent(kept, start)

    def block_start(self, scores: Array, live: LiveMask, k: Array) -> State:
        """The largest score of a block, and from there a τ below its root, so below the row's."""
        fw = get_framework(scores)
        if not self.gathers_candidates(scores):
            top = live_row_max(scores, live)
            return top, fw.full(top.shape, -INFINITY, top)
        top, start = self.initial_threshold(scores, live)
        return top, fw.fill_unless(start, top > -INFINITY, -INFINITY)

    def initial_threshold(self, scores: Array, live: LiveMask, by: float = 1.0) -> State:
        """The row's largest score, and a τ below the root: the root of some of the scores.

        Those are the largest of every SOME-th, so that few are below the root.
        """
        fw = get_framework(scores)
        xp, m = fw.xp, scores.shape[-1]
        if live is not None or m < 4 * SAMPLE_COUNT:
            top = live_row_max(scores, live)
            return top, fw.full(top.shape, -1.0, top)
        even = m // SAMPLE_COUNT * SAMPLE_COUNT
        some = xp.reshape(scores[..., :even], (*scores.shape[:-1], m // SAMPLE_COUNT, SAMPLE_COUNT))
        some = xp.max(some, axis=-2)
        top = live_row_max(some, None)
        if even < m:
            top = xp.maximum(top, live_row_max(scores[..., even:], None))
        some = xp.maximum(
            some[..., : SAMPLE_COUNT // 2], some[..., SAMPLE_COUNT // 2 :]
        ) - fw.replace_nonfinite(top)
        tau = self.newton_ascent(some * by, fw.full(top.shape, -1.0, top))
        return top, fw.fill_unless(tau, tau > -1, -1.0)

    def weights_of_candidates(
        self, scores: Array, live: LiveMask, by: float = 1.0, spend: bool = False
    ) -> Array:
        """The weights of scores · by, from the few that may have one; `spend`: in their place."""
        fw = get_framework(scores)
        if live is None and 0 < scores.shape[-1] < MAX_SHORT_ROW_KEYS:
            kept = (scores - fw.replace_nonfinite(live_row_max(scores, None))) * by
            tau = self.newton_ascent(kept, fw.full((*scores.shape[:-1], 1), -1.0, scores))
            return self.positive_power(fw.xp.maximum(kept - tau, 0.0), self.exponent)
        top, start = self.initial_threshold(scores, live, by)
        top = fw.replace_nonfinite(top)
        kept, at = fw.masked_gather(scores, self.candidate_mask(scores, live, top, start / by), top)
        kept *= by
        weight = self.block_weights(kept, None, kept, (0.0, self.newton_ascent(kept, start)))
        return fw.masked_scatter(weight, at, scores if spend else None)

    def pool_whole_rows(
        self, scores: Array, live: LiveMask, k: Array, value: Array, keep: DropoutMask
    ) -> Array:
        fw = get_framework(scores)
        if not self.gathers_candidates(scores):
            return super().pool_whole_rows(scores, live, k, value, keep)
        weight = self.weights_of_candidates(scores, live, self.alpha - 1, spend=True)
        if keep is None and bool(fw.xp.all(fw.xp.isfinite(value))):
            return fw.xp.matmul(weight, value)
        return pool_by_weights(weight, value, live, keep, sparse=True)

    def candidate_mask(self, scores: Array, live: LiveMask, top: Array, start: Array) -> Array:
        """What lies above the τ of the start; a NaN is not hidden."""
        xp = get_framework(scores).xp
        near = xp.logical_not(scores < top + start)
        return near if live is None else xp.logical_and(near, live)

    def newton_ascent(self, kept: Array, tau: Array) -> Array:
        """τ of the scores that were set aside, measured from their top, by Newton's steps.

        From below they only climb, so that the mass is at least 1, or 0 in a row without keys.
        """
        fw, e = get_framework(kept), self.exponent
        near = NEWTON_TOLERANCE[fw.dtype_name(kept)]
        for _ in range(MAX_NEWTON_STEPS):
            r = fw.xp.maximum(kept - tau, 0.0)
            lean = self.positive_power(r, e - 1)
            slope, mass = fw.row_sum(lean), fw.row_sum(lean * r)
            size = fw.xp.minimum(mass, 1.0) if e == 1 else mass ** (1 - 1 / e)
            step = (mass - size) / fw.xp.maximum(slope, MIN_DIVISOR)
            tau = tau + step
            if not (step > near).any():  # a row of NaN does not hold up the others
                break
        return tau

    def solve_threshold(self, fold: FoldFunction, top: Array) -> Array:
        fw = get_framework(top)
        near = NEWTON_TOLERANCE[fw.dtype_name(top)]

        def newton_iteration(state: State) -> State:
            tau = fw.detach(self.newton_update(fold, top, state[0]))
            return tau, tau - state[0]

        def is_converged(state: State) -> Array:
            return fw.xp.logical_not(fw.xp.any(fw.xp.abs(state[1]) > near))

        start, far = (fw.full(top.shape, x, top) for x in (-1.0, 1.0))
        return fw.loop_until(is_converged, newton_iteration, (start, far), MAX_NEWTON_STEPS)[0]

    def refined_state(self, fold: FoldFunction, top: Array, tau: Array) -> State:
        return top, self.refine_threshold(fold, top, tau)

    def refine_threshold(self, fold: FoldFunction, top: Array, tau: Array) -> Array:
        """Two more steps, which carry the exact first and second derivative of the root: each
        doubles the order to which τ, a constant where they start, is right."""
        return self.newton_update(
            fold, top, self.newton_update(fold, top, get_framework(tau).detach(tau))
        )

    def newton_update(self, fold: FoldFunction, top: Array, tau: Array) -> Array:
        fw = get_framework(top)

        def block_sums(s: Array, live: LiveMask, k: Array) -> State:
            weight, lean = self.weight_and_slope(s, live, (top, tau))
            return fw.row_sum(weight), fw.row_sum(lean)

        return tau + self.newton_step(*fold(block_sums, self.merge, _zero_sums))

    def positive_power(self, r: Array, exponent: float) -> Array:
        """r^exponent where r > 0, else 0; its slope is finite everywhere."""
        fw = get_framework(r)
        if exponent == 0:
            return fw.astype(r > 0, fw.dtype_name(r))
        if exponent == 1:
            return r
        if exponent == 2:
            return r * r
        return fw.fill_unless(fw.xp.pow(fw.safe_divisor(r), exponent), r != 0)

    def weight_and_slope(self, scores: Array, live: LiveMask, found: State) -> State:
        """α of a block, and how it leans: its slope in the score, but for a constant factor."""
        r, e = (
            get_framework(scores).excess_over_threshold(scores, found[0], found[1], live),
            self.exponent,
        )
        return self.positive_power(r, e), self.positive_power(r, e - 1)

    def newton_step(self, mass: Array, slope: Array) -> Array:
        """The step of τ that solves ‖r‖ₑ = 1 were it linear; 0 for an empty row."""
        fw = get_framework(mass)
        size = 1.0 if self.alpha == 2 else fw.xp.pow(fw.safe_divisor(mass), 1 - 1 / self.exponent)
        return fw.fill_unless((mass - size) / fw.safe_divisor(slope), mass != 0)

    def init(self, rows: Array, width: int) -> State:
        pooled = super().init(rows, width)
        return *pooled, *pooled, get_framework(rows).full(rows.shape, 0.0, rows)

    def partial_state(
        self, scores: Array, live: LiveMask, k: Array, found: State, value: Array, keep: DropoutMask
    ) -> State:
        weight, lean = self.weight_and_slope(scores, live, found)
        pooled = (pool_by_weights(x, value, live, keep, sparse=True) for x in (weight, lean))
        return *pooled, get_framework(lean).row_sum(lean)

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        out, leaning, slope = state
        return out, found, leaning / get_framework(slope).safe_divisor(slope)

    def block_weights(self, scores: Array, live: LiveMask, k: Array, found: State) -> Array:
        return self.positive_power(
            get_framework(scores).excess_over_threshold(scores, found[0], found[1], live),
            self.exponent,
        )

    def score_gradient(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        lean = self.positive_power(weight, (self.exponent - 1) / self.exponent)
        return lean * (along - centre) * self.exponent


@dataclass(frozen=True)
class Tsallis(Entmax):
    """`Entmax` of an alpha that is learned, or lies outside of [NEAR, 2].

    With c = alpha − 1 and z = s − top it is αᵢ = e^−λ (1 + c vᵢ)^(1/c), vᵢ = zᵢ e^cλ, 0 where the
    bracket is not above 0. The one λ ≥ 0 that makes the row sum to one, the logarithm of 1 over
    the largest weight, is softmax's log-sum-exp at alpha = 1, where nothing else is special.
    """

    @property
    def has_learned_shape(self) -> bool:  # type: ignore[override]
        return is_array(self.alpha)

    def __repr__(self) -> str:
        return f"Entmax(alpha={self.alpha!r})"

    def check_shapes(self, lead: Shape, n: int) -> None:
        check_row_shape("Entmax: alpha", self.alpha, lead, n)

    def alpha_minus_one(self, like: Array) -> Array:
        """alpha − 1, with as many axes as `like` has"""
        return broadcast_to_rows(self.alpha, like) - 1

    def gathers_candidates(self, scores: Array) -> bool:
        return False

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        return self.weights_by_search(scores, live, k)

    def scale_scores(self, scores: Array) -> Array:
        return scores

    def refined_state(self, fold: FoldFunction, top: Array, tau: Array) -> State:
        """The row's top, λ, and the log of the mass there: for a large alpha no λ gives just 1."""
        found = super().refined_state(fold, top, tau)
        fw = get_framework(found[0])
        return *found, fw.xp.log(fw.safe_divisor(self.total_mass(fold, *found)[0]))

    def total_mass(self, fold: FoldFunction, top: Array, at: Array) -> State:
        """Σ α, and how fast it falls in λ; constants."""
        fw = get_framework(top)
        still = tree.map_arrays(fw, fw.detach, self)

        def block_sums(s: Array, live: LiveMask, k: Array) -> State:
            return tuple(
                map(fw.row_sum, still.weight_and_slope(fw.detach(s), live, (top, fw.detach(at))))
            )

        return fold(block_sums, self.merge, _zero_sums)

    def solve_threshold(self, fold: FoldFunction, top: Array) -> Array:
        """λ by Newton's steps on (massᶜ − 1)/c, which is convex in e^−cλ up to alpha = 2.

        From 0, where the top alone has a mass of 1, they climb to the root. Beyond 2 the mass is
        concave in e^−λ but where a key joins: there the steps come from the other side, between
        bounds that are halved where one is passed. αᵢ e^λ falls in λ, so λ + log mass is a bound.
        """
        fw = get_framework(top)
        xp, near = fw.xp, NEWTON_TOLERANCE[fw.dtype_name(top)]
        zero = top * 0.0  # a graph may not know its shape
        c = zero + fw.detach(self.alpha_minus_one(top))
        sharp = c > 1

        def newton_iteration(state: State) -> State:
            at, low, far, _ = state
            mass, rate = self.total_mass(fold, top, at)
            log, over = xp.log(fw.safe_divisor(mass)), mass >= 1
            low = xp.maximum(low, at + xp.minimum(log, zero))
            high = xp.minimum(far, at + xp.maximum(log, zero))
            back = xp.where(over, high, at - xp.log((1 - mass) / fw.safe_divisor(rate) + 1))
            passed = xp.logical_or(back < low, xp.logical_and(over, high >= far))
            back = xp.where(passed, (low + high) / 2, back)
            step = scaled_log1p(
                -mass * log * expm1_ratio(-c * log) / fw.safe_divisor(rate), c, None
            )[0]
            new = xp.where(sharp, back, at - step)
            return new, low, high, xp.abs(new - at)

        def is_converged(state: State) -> Array:
            return xp.logical_not(xp.any(state[3] > near * (1 + state[0])))

        return fw.loop_until(
            is_converged,
            newton_iteration,
            (zero, zero, zero + MAX_LOG_SUM, zero + INFINITY),
            MAX_NEWTON_STEPS,
        )[0]

    def refine_threshold(self, fold: FoldFunction, top: Array, tau: Array) -> Array:
        """The root as found, with the derivatives of two steps, which may lead away beyond 2."""
        moved = super().refine_threshold(fold, top, tau)
        return get_framework(tau).detach(tau) + (moved - get_framework(tau).detach(moved))

    def newton_step(self, mass: Array, slope: Array) -> Array:
        return (mass - 1) / get_framework(slope).safe_divisor(slope)

    def weight_and_slope(self, scores: Array, live: LiveMask, found: State) -> State:
        return self.scaled_powers(scores, live, found, 1.0, 1 - self.alpha_minus_one(scores))

    def block_weights(self, scores: Array, live: LiveMask, k: Array, found: State) -> Array:
        return self.scaled_powers(scores, live, found, 1.0)[0]

    def scaled_powers(self, scores: Array, live: LiveMask, found: State, *exponents: Any) -> State:
        """(αᵢ e^λ)^exponent e^−λ for each of the exponents."""
        fw, c = get_framework(scores), self.alpha_minus_one(scores)
        top, at, *rest = found
        grown = c * at
        grown = fw.fill_unless(grown, grown < MAX_LOG_SUM, MAX_LOG_SUM)
        log, some = scaled_log1p((scores - top) * fw.xp.exp(grown), c, live)
        return tuple(fw.fill_unless(fw.xp.exp(x * log - sum(rest, at)), some) for x in exponents)

    def score_gradient(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        fw = get_framework(weight)
        lean = fw.xp.exp((1 - self.alpha_minus_one(weight)) * fw.xp.log(fw.safe_divisor(weight)))
        return fw.fill_unless(lean, weight != 0) * (along - centre)


Tsallis.__name__ = Entmax.__name__  # what a person asked for, and reads in what is told of it


@suggest_keywords
@dataclass(frozen=True)
class Sparsemax(Entmax):
    """α = the point of the simplex nearest to the scores: Entmax(2)

    >>> import numpy as np
    >>> Sparsemax()(np.array([[0.6, 0.2, -2.0]]))
    array([[0.7, 0.3, 0. ]])
    """

    alpha: float = field(default=2, init=False)


def _merge_starts(one: State, two: State) -> State:
    """The larger top, and the larger τ from there; differences first, as 1e30 − 1 is 1e30."""
    fw = get_framework(one[0])
    top = fw.xp.maximum(one[0], two[0])
    seen = ((x - fw.replace_nonfinite(top)) + start for x, start in (one, two))
    return top, fw.xp.maximum(*(fw.replace_nonfinite(x, -INFINITY) for x in seen))


def _empty_start(rows: Array) -> State:
    return (get_framework(rows).full(rows.shape, -INFINITY, rows),) * 2


def _concat_candidates(one: State, two: State) -> State:
    return (get_framework(one[0]).xp.concat([one[0], two[0]], axis=-1),)


def _no_candidates(rows: Array) -> State:
    return (rows[..., :0],)


def _zero_sums(rows: Array) -> State:
    return (get_framework(rows).full(rows.shape, 0.0, rows),) * 2
