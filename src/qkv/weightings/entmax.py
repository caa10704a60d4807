"""The α-entmax family: like softmax, but weights of poor matches are exactly 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Never

import numpy as np

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
    entmax_gradients,
    expm1_ratio,
    is_quick_by_head,
    scaled_log1p,
)
from qkv.weightings.sink import SinkWeighting, validate_sink

MAX_NEWTON_STEPS = 100
SAMPLE_COUNT = 128
NEWTON_TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
"""Newton's method stops when a step of τ is smaller than this. τ is in (−1, 0)."""
MAX_SHORT_ROW_KEYS = 64
"""In rows up to this length, Newton's method reads all scores: gathering some takes longer."""
MIN_QUICK_ALPHA = 1.05
"""Smallest alpha for `Entmax` itself. The power of (alpha − 1) s amplifies rounding: in float32,
7 digits remain at 1.5, 6 at this value, none at 1 + 1e-7."""
MIN_DIVISOR = 1e-30
"""Replaces a divisor of 0 where the numerator is 0 too."""
MAX_LOG_SUM = 80.0
"""Larger than the logarithm of any number of keys. float32 can represent its exponential."""


@suggest_keywords
@dataclass(frozen=True)
class Entmax(Weighting):
    """α = argmax_p pᵀs + H(p) over the simplex, with the Tsallis entropy H of order `alpha` > 0.

    The solution is αᵢ = max(0, (alpha − 1) sᵢ − τ)^e with e = 1/(alpha − 1). The threshold τ makes
    the row sum to one. alpha = 2 is sparsemax, alpha = 1 softmax. Above 1 some weights are exactly
    0, more of them for a larger alpha. Below 1 no weight is 0.

    `alpha` may be learned: an array of one number, of one for each head (h,), or of any shape that
    broadcasts to one for each row (…, n, 1).

    `sink` is the score of one more key that has no value, of the same shapes: the weights are those
    of the keys beside this one, and sum to at most 1.

    >>> import numpy as np
    >>> Entmax(1.5)(np.array([[1.0, 1.0, -2.0]]))
    array([[0.5, 0.5, 0. ]])
    >>> Entmax(np.array([1.0, 2.0]))(np.zeros((2, 1, 1)) + np.log([1.0, 3.0])).round(3)
    array([[[0.25, 0.75]],
    <BLANKLINE>
           [[0.  , 1.  ]]])
    >>> Entmax(2.0, sink=0.6)(np.array([[0.6, 0.2, -2.0]])).round(3)
    array([[0.467, 0.067, 0.   ]])
    """

    alpha: float | Array = 1.5
    sink: float | Array | None = field(default=None, repr=False)
    is_convex: ClassVar[bool] = True
    needs_centre = True
    is_sparse: ClassVar[bool] = True

    def __new__(cls, alpha: float | Array = 1.5, sink: Any = None, **others: Never) -> Entmax:
        quick = isinstance(alpha, Real) and MIN_QUICK_ALPHA <= as_float(alpha) <= 2
        kind = SinkEntmax if sink is not None else cls if quick else Tsallis
        return super().__new__(kind if cls is Entmax else cls)

    def __post_init__(self) -> None:
        validate_positive(self, "alpha")
        validate_sink(self)

    @property
    def exponent(self) -> float:
        return 1 / (self.alpha - 1)

    def scale_scores(self, scores: Array) -> Array:
        return scores if self.alpha == 2 else scores * (self.alpha - 1)

    def gathers_candidates(self, scores: Array) -> bool:
        """Return whether Newton's method runs on a gathered copy of the candidate scores."""
        return get_framework(scores).supports_masked_gather

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        fw = get_framework(scores)
        if self.gathers_candidates(scores):
            return self.weights_of_candidates(scores, live)
        view = fw.as_numpy_view(fw.detach(scores))
        if view is None:
            node = fw.call_graph_node("entmax", scores, live, self.alpha)
            return self.weights_by_search(scores, live, k) if node is None else node

        def forward(*_: Array) -> tuple[State, State]:
            # NumPy selects by a mask several times faster than other frameworks.
            live_view = None if live is None else fw.as_numpy_view(live)
            with get_framework(view).use_own_settings():
                alpha = fw.from_numpy_view(self.weights(view, live_view, k))
            return (alpha,), (alpha,)

        def backward(_: State, saved: State, gradients: State) -> State:
            return (entmax_gradient(saved[0], gradients[0], self.alpha),)

        def reference(scores: Array) -> State:
            return (self.weights_by_search(scores, live, k),)

        if not fw.needs_gradient([scores]):
            return forward()[0][0]
        return fw.custom_gradient(forward, backward, reference, [scores])[0]

    def weights_by_search(self, scores: Array, live: LiveMask, k: Array) -> Array:
        """Return the weights by a search that the framework can differentiate."""

        def fold_whole_row(lift: Any, merge: Any, init: Any) -> Any:
            return lift(scores, live, k)

        fw = get_framework(scores)
        top = fw.replace_nonfinite(live_row_max(scores, live))
        alpha = broadcast_to_rows(self.alpha, scores) if is_array(self.alpha) else self.alpha
        tau = fw.call_graph_node("threshold", scores - top, live, alpha)
        row_facts = (
            self.find_threshold(fold_whole_row)
            if tau is None
            else self.refined_state(fold_whole_row, top, tau)
        )
        return self.block_weights(scores, live, k, row_facts)

    def find_threshold(self, fold: FoldFunction) -> State:
        """Return the largest score of each row, and the threshold τ relative to it.

        With r = max(0, s − top − τ), ‖r‖ₑ is convex and decreasing in τ. Newton's method on
        ‖r‖ₑ = 1 therefore increases τ from −1 to the root and never passes the root. Scores below
        the initial τ have no weight. The other scores are the candidates: frameworks that can
        gather iterate over the candidates only.
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
        """Return the largest score of a block, and a τ relative to it that is below the root."""
        fw = get_framework(scores)
        if not self.gathers_candidates(scores):
            top = live_row_max(scores, live)
            return top, fw.full(top.shape, -INFINITY, top)
        top, start = self.initial_threshold(scores, live)
        return top, fw.fill_unless(start, top > -INFINITY, -INFINITY)

    def initial_threshold(self, scores: Array, live: LiveMask, by: float = 1.0) -> State:
        """Return the largest score of each row, and a τ below the root.

        τ is the root of a sample: the maxima of SAMPLE_COUNT strided subsets of the scores.
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
        """Return the weights of scores · by, computed from the candidates only.

        With `spend`, the weights overwrite the scores.
        """
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
        self, scores: Array, live: LiveMask, k: Array, value: Array, dropout_mask: DropoutMask
    ) -> Array:
        if not self.gathers_candidates(scores):
            return super().pool_whole_rows(scores, live, k, value, dropout_mask)
        weight = self.weights_of_candidates(scores, live, self.alpha - 1, spend=True)
        return pool_by_weights(weight, value, live, dropout_mask, sparse=True)

    def candidate_mask(self, scores: Array, live: LiveMask, top: Array, start: Array) -> Array:
        """Return which scores are not below the initial τ; NaN is included, so it propagates."""
        xp = get_framework(scores).xp
        is_candidate = xp.logical_not(scores < top + start)
        return is_candidate if live is None else xp.logical_and(is_candidate, live)

    def newton_ascent(self, candidates: Array, tau: Array) -> Array:
        """Return τ of the candidates (relative to the row's largest score) by Newton's method.

        τ starts below the root and only increases. So the mass is at least 1 in each step, or 0 in
        a row without keys.
        """
        fw, e = get_framework(candidates), self.exponent
        tolerance = NEWTON_TOLERANCE[fw.dtype_name(candidates)]
        for _ in range(MAX_NEWTON_STEPS):
            r = fw.xp.maximum(candidates - tau, 0.0)
            lean = self.positive_power(r, e - 1)
            slope, mass = fw.row_sum(lean), fw.row_sum(lean * r)
            size = fw.xp.minimum(mass, 1.0) if e == 1 else mass ** (1 - 1 / e)
            step = (mass - size) / fw.xp.maximum(slope, MIN_DIVISOR)
            tau = tau + step
            if not (
                step > tolerance
            ).any():  # False for NaN, so a row of NaN does not prolong the loop
                break
        return tau

    def solve_threshold(self, fold: FoldFunction, top: Array) -> Array:
        fw = get_framework(top)
        tolerance = NEWTON_TOLERANCE[fw.dtype_name(top)]

        def newton_iteration(state: State) -> State:
            tau = fw.detach(self.newton_update(fold, top, state[0]))
            return tau, tau - state[0]

        def is_converged(state: State) -> Array:
            return fw.xp.logical_not(fw.xp.any(fw.xp.abs(state[1]) > tolerance))

        start, far = (fw.full(top.shape, x, top) for x in (-1.0, 1.0))
        return fw.loop_until(is_converged, newton_iteration, (start, far), MAX_NEWTON_STEPS)[0]

    def refined_state(self, fold: FoldFunction, top: Array, tau: Array) -> State:
        return top, self.refine_threshold(fold, top, tau)

    def refine_threshold(self, fold: FoldFunction, top: Array, tau: Array) -> Array:
        """Return τ after two more Newton steps from a detached τ.

        Differentiating these steps gives the exact first and second derivative of the root.
        """
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
        """Return r^exponent for r > 0, else 0, with a finite derivative everywhere."""
        fw = get_framework(r)
        if exponent == 0:
            return fw.astype(r > 0, fw.dtype_name(r))
        if exponent == 1:
            return r
        if exponent == 2:
            return r * r
        return fw.fill_unless(fw.xp.pow(fw.safe_divisor(r), exponent), r != 0)

    def weight_and_slope(self, scores: Array, live: LiveMask, row_facts: State) -> State:
        """Return α of a block, and its derivative by the score up to a constant factor."""
        r, e = (
            get_framework(scores).excess_over_threshold(scores, row_facts[0], row_facts[1], live),
            self.exponent,
        )
        return self.positive_power(r, e), self.positive_power(r, e - 1)

    def newton_step(self, mass: Array, slope: Array) -> Array:
        """Return the Newton step of τ for ‖r‖ₑ = 1; 0 for an empty row."""
        fw = get_framework(mass)
        size = 1.0 if self.alpha == 2 else fw.xp.pow(fw.safe_divisor(mass), 1 - 1 / self.exponent)
        return fw.fill_unless((mass - size) / fw.safe_divisor(slope), mass != 0)

    def init(self, rows: Array, width: int) -> State:
        pooled = super().init(rows, width)
        return *pooled, *pooled, get_framework(rows).full(rows.shape, 0.0, rows)

    def partial_state(
        self,
        scores: Array,
        live: LiveMask,
        k: Array,
        row_facts: State,
        value: Array,
        dropout_mask: DropoutMask,
    ) -> State:
        weight, lean = self.weight_and_slope(scores, live, row_facts)
        pooled = (
            pool_by_weights(x, value, live, dropout_mask, sparse=True) for x in (weight, lean)
        )
        return *pooled, get_framework(lean).row_sum(lean)

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        out, leaning, slope = state
        return out, row_facts, leaning / get_framework(slope).safe_divisor(slope)

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        return self.positive_power(
            get_framework(scores).excess_over_threshold(scores, row_facts[0], row_facts[1], live),
            self.exponent,
        )

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        lean = self.positive_power(weight, (self.exponent - 1) / self.exponent)
        return lean * (weight_gradient - centre) * self.exponent


@dataclass(frozen=True)
class Tsallis(Entmax):
    """`Entmax` with an alpha that is learned or outside of [MIN_QUICK_ALPHA, 2].

    With c = alpha − 1 and z = s − top, αᵢ = e^−λ (1 + c vᵢ)^(1/c) with vᵢ = zᵢ e^cλ, and 0 where
    the bracket is not positive. λ ≥ 0 makes the row sum to one: e^−λ is the largest weight. At
    alpha = 1, λ is the log-sum-exp of the softmax, and the formula needs no special case.
    """

    @property
    def has_learned_shape(self) -> bool:  # type: ignore[override]
        return is_array(self.alpha)

    def __repr__(self) -> str:
        return f"Entmax(alpha={self.alpha!r})"

    def check_shapes(self, lead: Shape, n: int) -> None:
        check_row_shape("Entmax: alpha", self.alpha, lead, n)

    def alpha_minus_one(self, like: Array) -> Array:
        """Return alpha − 1, broadcast to the axes of `like`."""
        return broadcast_to_rows(self.alpha, like) - 1

    def gathers_candidates(self, scores: Array) -> bool:
        return False

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        quick = self.weights_by_head(scores, live)
        return self.weights_by_search(scores, live, k) if quick is None else quick

    def weights_by_head(self, scores: Array, live: LiveMask) -> Array | None:
        """Return the weights from a search for each head, with its alpha as a number; else None.

        The gradients of scores and alpha are closed formulas, from Correia, Niculae and Martins,
        "Adaptively Sparse Transformers" (2019).
        """
        fw = get_framework(scores)
        view = scores if fw.supports_masked_gather else fw.as_numpy_view(fw.detach(scores))
        if view is None or not is_array(self.alpha):
            return None
        alpha = broadcast_to_rows(self.alpha, scores)
        numbers = fw.concrete_value(fw.detach(alpha))
        if numbers is None or not is_quick_by_head(numbers, MIN_QUICK_ALPHA):
            return None

        def forward(*_: Array) -> tuple[State, State]:
            live_view = live if live is None or fw.supports_masked_gather else fw.to_numpy(live)
            with get_framework(view).use_own_settings():
                out = fw.from_numpy_view(_search_heads(view, live_view, numbers))
            return (out,), (out,)

        def backward(arrays: State, saved: State, gradients: State) -> State:
            return entmax_gradients(saved[0], gradients[0], arrays[1])

        def reference(scores: Array, alpha: Array) -> State:
            return (Tsallis(alpha).weights_by_search(scores, live, scores),)

        if not fw.needs_gradient([scores, alpha]):
            return forward()[0][0]
        return fw.custom_gradient(forward, backward, reference, [scores, alpha])[0]

    def scale_scores(self, scores: Array) -> Array:
        return scores

    def refined_state(self, fold: FoldFunction, top: Array, tau: Array) -> State:
        """Return the row's top, λ, and the log of the mass: a large alpha may not reach mass 1."""
        row_facts = super().refined_state(fold, top, tau)
        fw = get_framework(row_facts[0])
        return *row_facts, fw.xp.log(fw.safe_divisor(self.total_mass(fold, *row_facts)[0]))

    def total_mass(self, fold: FoldFunction, top: Array, at: Array) -> State:
        """Return Σ α and its decrease per λ, both detached."""
        fw = get_framework(top)
        detached = tree.map_arrays(fw, fw.detach, self)

        def block_sums(s: Array, live: LiveMask, k: Array) -> State:
            row_facts = (top, fw.detach(at))
            return tuple(map(fw.row_sum, detached.weight_and_slope(fw.detach(s), live, row_facts)))

        return fold(block_sums, self.merge, _zero_sums)

    def solve_threshold(self, fold: FoldFunction, top: Array) -> Array:
        """Return λ by Newton's method on (massᶜ − 1)/c, which is convex in e^−cλ up to alpha = 2.

        From λ = 0, where the largest key alone has mass 1, the steps increase to the root. Above
        alpha = 2 the mass is concave in e^−λ except where a key joins. There the steps approach
        from the other side, within bounds that are bisected when a step leaves them. αᵢ e^λ
        decreases in λ, so λ + log mass is a bound.
        """
        fw = get_framework(top)
        xp, tolerance = fw.xp, NEWTON_TOLERANCE[fw.dtype_name(top)]
        zero = top * 0.0  # also works in a graph that does not know the shape
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
            return xp.logical_not(xp.any(state[3] > tolerance * (1 + state[0])))

        return fw.loop_until(
            is_converged,
            newton_iteration,
            (zero, zero, zero + MAX_LOG_SUM, zero + INFINITY),
            MAX_NEWTON_STEPS,
        )[0]

    def refine_threshold(self, fold: FoldFunction, top: Array, tau: Array) -> Array:
        """Return τ itself, with the derivatives of τ after two Newton steps.

        The steps are not applied, because they may diverge for alpha > 2.
        """
        moved = super().refine_threshold(fold, top, tau)
        return get_framework(tau).detach(tau) + (moved - get_framework(tau).detach(moved))

    def newton_step(self, mass: Array, slope: Array) -> Array:
        return (mass - 1) / get_framework(slope).safe_divisor(slope)

    def weight_and_slope(self, scores: Array, live: LiveMask, row_facts: State) -> State:
        return self.scaled_powers(scores, live, row_facts, 1.0, 1 - self.alpha_minus_one(scores))

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        return self.scaled_powers(scores, live, row_facts, 1.0)[0]

    def scaled_powers(
        self, scores: Array, live: LiveMask, row_facts: State, *exponents: Any
    ) -> State:
        """Return (αᵢ e^λ)^exponent e^−λ for each exponent."""
        fw, c = get_framework(scores), self.alpha_minus_one(scores)
        top, at, *log_mass = row_facts
        grown = c * at
        grown = fw.fill_unless(grown, grown < MAX_LOG_SUM, MAX_LOG_SUM)
        log, some = scaled_log1p((scores - top) * fw.xp.exp(grown), c, live)
        divisor = sum(log_mass, at)
        return tuple(fw.fill_unless(fw.xp.exp(x * log - divisor), some) for x in exponents)

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        fw = get_framework(weight)
        lean = fw.xp.exp((1 - self.alpha_minus_one(weight)) * fw.xp.log(fw.safe_divisor(weight)))
        return fw.fill_unless(lean, weight != 0) * (weight_gradient - centre)


Tsallis.__name__ = Entmax.__name__  # messages name the class that the user created


@dataclass(frozen=True)
class SinkEntmax(SinkWeighting, Tsallis):
    """`Entmax` with a sink, for every alpha."""

    is_convex: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"Entmax(alpha={self.alpha!r}, sink={self.sink!r})"

    def without_sink(self, scores: Array) -> Weighting:
        # An array: a graph would build another class, which scales the scores, from a number.
        return Tsallis(broadcast_to_rows(self.alpha, scores))

    def find_threshold(self, fold: FoldFunction) -> State:
        return super().find_threshold(self.fold_with_sink(fold))


SinkEntmax.__name__ = Entmax.__name__


@suggest_keywords
@dataclass(frozen=True)
class Sparsemax(Entmax):
    """α = the Euclidean projection of the scores onto the simplex; the same as Entmax(2)

    >>> import numpy as np
    >>> Sparsemax()(np.array([[0.6, 0.2, -2.0]]))
    array([[0.7, 0.3, 0. ]])
    """

    alpha: float = field(default=2, init=False)
    sink: None = field(default=None, init=False, repr=False)


def _search_heads(scores: Any, live: Any, numbers: Any) -> Any:
    """Return the weights of NumPy scores (…, h, n, m), with one alpha for all or for each head."""

    def search(scores: Any, live: Any, alpha: float) -> Any:
        return Entmax(alpha).weights_of_candidates(scores, live, alpha - 1)

    values = numbers.reshape(-1).tolist()
    if len(values) == 1:
        return search(scores, live, values[0])
    out = np.empty(scores.shape, scores.dtype)
    full = None if live is None else np.broadcast_to(live, scores.shape)
    for head, alpha in enumerate(values):
        part = None if full is None else full[..., head, :, :]
        out[..., head, :, :] = search(scores[..., head, :, :], part, alpha)
    return out


def _merge_starts(one: State, two: State) -> State:
    """Return the larger top and the larger τ, relative to that top."""
    fw = get_framework(one[0])
    top = fw.xp.maximum(one[0], two[0])
    # Tops are subtracted first: 1e30 − 1 would round to 1e30.
    starts = ((x - fw.replace_nonfinite(top)) + start for x, start in (one, two))
    return top, fw.xp.maximum(*(fw.replace_nonfinite(x, -INFINITY) for x in starts))


def _empty_start(rows: Array) -> State:
    return (get_framework(rows).full(rows.shape, -INFINITY, rows),) * 2


def _concat_candidates(one: State, two: State) -> State:
    return (get_framework(one[0]).xp.concat([one[0], two[0]], axis=-1),)


def _no_candidates(rows: Array) -> State:
    return (rows[..., :0],)


def _zero_sums(rows: Array) -> State:
    return (get_framework(rows).full(rows.shape, 0.0, rows),) * 2
