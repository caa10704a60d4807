"""Weights that are the scores divided by their sum, the scores themselves, or their sigmoids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.errors import ArgumentError, FrameworkError, unknown_name_error
from qkv.frameworks import get_framework
from qkv.scores import Score, has_user_code
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, DropoutMask, LiveMask
from qkv.weightings.average import Average
from qkv.weightings.base import INFINITY, Elementwise, State, Weighting, pool_by_weights
from qkv.weightings.hard import Hard


class NanWeights(Average):
    """α = NaN for every key that the mask allows"""

    def live_ones(self, scores: Array, live: LiveMask) -> Array:
        return get_framework(scores).fill_unless(
            super().live_ones(scores, None) * float("nan"), live
        )

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        return self.live_ones(scores, live)

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        return self.live_ones(scores, live)


EMPTY_ROW_WEIGHTINGS: dict[str, Weighting | None] = {
    "zero": None,
    "nan": NanWeights(),
    "uniform": Average(),
    "nearest": Hard(),
    "raise": NanWeights(),
}
"""The weighting of a row whose scores are all 0. Each gives 0 if the mask allows no key."""


@suggest_keywords
@dataclass(frozen=True)
class Normalized(Weighting):
    """αᵢ = sᵢ / Σⱼ sⱼ, for nonnegative scores

    `on_empty` defines the weights of a row whose scores are all 0:

    - "zero": all weights are 0.
    - "nan": all weights are NaN.
    - "uniform": all keys that the mask allows have the same weight.
    - "nearest": the nearest key has weight 1. The score must be a window.
    - "raise": an error.

    The scores of such a row receive no gradient. With "nearest", a negative score counts as 0 and
    ranks the keys outside of the window.

    >>> import numpy as np
    >>> Normalized()(np.array([[1.0, 3.0], [0.0, 0.0]]))
    array([[0.25, 0.75],
           [0.  , 0.  ]])
    >>> Normalized("nearest")(np.array([[1.0, -2.0], [-3.0, -2.0]]))
    array([[1., 0.],
           [0., 1.]])
    """

    on_empty: str = "zero"
    is_convex: ClassVar[bool] = True
    needs_nonnegative: ClassVar[bool] = True
    needs_centre = True
    is_sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.on_empty, str) or self.on_empty not in EMPTY_ROW_WEIGHTINGS:
            raise unknown_name_error("on_empty", self.on_empty, EMPTY_ROW_WEIGHTINGS)

    @property
    def raises_on_empty(self) -> bool:  # type: ignore[override]
        return self.on_empty == "raise"

    @property
    def empty_row_weighting(self) -> Weighting | None:
        return EMPTY_ROW_WEIGHTINGS[self.on_empty]

    def incompatible_reason(self, score: Score, biased: bool) -> str | None:
        name, own = type(self).__name__, type(score).__name__
        known = type(score).__module__.startswith("qkv.") and not has_user_code(score)
        if known and not score.is_nonnegative:
            return (
                f"{name} divides scores by their sum, but {own} can be negative: use "
                "weighting='softmax', or a score that is never negative (boxcar, triangular, "
                "epanechnikov, constant, exact)"
            )
        if biased:
            return (
                f"{name} divides scores by their sum, and a float mask can make them negative: "
                "pass a boolean mask"
            )
        if self.on_empty == "nearest" and score.ranking_score is None:
            return (
                "on_empty='nearest' needs a score with a distance (boxcar, triangular, "
                f"epanechnikov), not {own}"
            )
        return None

    def adapt_score(self, score: Score) -> Score:
        return (score.ranking_score or score) if self.on_empty == "nearest" else score

    def zero_outside(self, x: Array, live: LiveMask, scores: Array) -> Array:
        """Return x where the key is live and inside the window, else 0."""
        fw = get_framework(x)
        if self.on_empty == "nearest":
            x = fw.fill_unless(x, fw.xp.logical_not(scores <= 0))
        return fw.fill_unless(x, live)

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        fw, inside = get_framework(scores), self.zero_outside(scores, live, scores)
        total = fw.row_sum(inside)
        alpha = inside / divisor_or_infinity(total)
        if self.empty_row_weighting is None:
            return alpha
        other = self.empty_row_weighting.weights(scores, live, k)
        self.check_row_state((total, fw.row_sum(other)))
        return fw.xp.where(total == 0, other, alpha)

    def divisor_without(self, remaining: Array) -> Array:
        return remaining

    def value_gradient_weights(self, weight: Array) -> Array:
        return (
            get_framework(weight).fill_unless(weight, weight == weight)
            if self.on_empty == "nan"
            else weight
        )

    def pool_values(
        self, weight: Array, value: Array, live: LiveMask, dropout_mask: DropoutMask
    ) -> Array:
        out = super().pool_values(self.value_gradient_weights(weight), value, live, dropout_mask)
        if self.on_empty != "nan":
            return out
        fw = get_framework(out)
        known = fw.xp.all(weight == weight, axis=-1, keepdims=True)
        return fw.fill_unless(out, known, float("nan"))

    def check_row_state(self, row_facts: State) -> None:
        if not self.raises_on_empty:
            return
        fw = get_framework(row_facts[0])
        empty = fw.concrete_value(fw.xp.logical_and(row_facts[0] == 0, fw.xp.isnan(row_facts[1])))
        if empty is None:
            raise FrameworkError(
                "on_empty='raise' cannot read values while the call is traced: use 'nan'"
            )
        if empty.any():
            count = int(empty.sum())
            queries = "1 query has" if count == 1 else f"{count} queries have"
            raise ArgumentError(
                f"{queries} no key within the window: use a larger width, or "
                "Normalized(on_empty='nearest')"
            )

    def init(self, rows: Array, width: int) -> State:
        other = (
            () if self.empty_row_weighting is None else self.empty_row_weighting.init(rows, width)
        )
        return get_framework(rows).full(rows.shape, 0.0, rows), *super().init(rows, width), *other

    def partial_state(
        self,
        scores: Array,
        live: LiveMask,
        k: Array,
        row_facts: State,
        value: Array,
        dropout_mask: DropoutMask,
    ) -> State:
        inside = self.zero_outside(scores, live, scores)
        state = (
            get_framework(inside).row_sum(inside),
            pool_by_weights(inside, value, live, dropout_mask, sparse=True),
        )
        other = self.empty_row_weighting
        return (
            state
            if other is None
            else (*state, *other.partial_state(scores, live, k, (), value, dropout_mask))
        )

    def merge(self, one: State, two: State) -> State:
        state, other = super().merge(one[:2], two[:2]), self.empty_row_weighting
        return state if other is None else (*state, *other.merge(one[2:], two[2:]))

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        total, pooled = state[:2]
        out = pooled / divisor_or_infinity(total)
        if self.empty_row_weighting is None:
            return out, (total,), out
        other, known, _ = self.empty_row_weighting.finish(state[2:], ())
        return get_framework(total).xp.where(total == 0, other, out), (total, *known), out

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        total, *known = row_facts
        alpha = self.zero_outside(scores, live, scores) / divisor_or_infinity(total)
        if self.empty_row_weighting is None:
            return alpha
        other = self.empty_row_weighting.block_weights(scores, live, k, tuple(known))
        return get_framework(total).xp.where(total == 0, other, alpha)

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        return self.zero_outside(
            (weight_gradient - centre) / divisor_or_infinity(row_facts[0]), None, scores
        )


@suggest_keywords
@dataclass(frozen=True)
class Raw(Elementwise):
    """αᵢ = sᵢ: the output is the sum of score times value

    >>> import numpy as np
    >>> Raw()(np.array([[2.0, -1.0]]))
    array([[ 2., -1.]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("identity", "linear", "none", "sum")

    is_sparse: ClassVar[bool] = True

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        return get_framework(scores).fill_unless(scores, live)

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        return weight_gradient


@suggest_keywords
@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """αᵢ = 1 / (1 + exp(−sᵢ)): weights are independent and need not sum to one

    >>> import numpy as np
    >>> Sigmoid()(np.array([[0.0, 40.0]]))
    array([[0.5, 1. ]])
    """

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        fw = get_framework(scores)
        return fw.fill_unless(fw.sigmoid(scores), live)

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        return weight * (1.0 - weight) * weight_gradient


def divisor_or_infinity(total: Array) -> Array:
    """Return the total, or ∞ where it is 0: such a row has weights 0 and gradients 0."""
    return get_framework(total).fill_unless(total, total != 0, INFINITY)
