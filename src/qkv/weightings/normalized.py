"""Weights that are the scores themselves: over their sum, as they are, or through a sigmoid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qkv.arrays import of
from qkv.errors import ArgumentError, FrameworkError, unknown
from qkv.scores import Score, is_open
from qkv.types import Array, Keep, Live
from qkv.weightings.average import Average
from qkv.weightings.base import INFINITY, Alone, State, Weighting, pool
from qkv.weightings.hard import Hard


class Unknown(Average):
    """α = NaN for every live row"""

    def ones(self, scores: Array, live: Live) -> Array:
        return of(scores).keep(super().ones(scores, None) * float("nan"), live)

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        return self.ones(scores, live)

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        return self.ones(scores, live)


INSTEAD: dict[str, Weighting | None] = {
    "zero": None,
    "nan": Unknown(),
    "uniform": Average(),
    "nearest": Hard(),
    "raise": Unknown(),
}
"""The weighting of a row whose scores are all 0; of a row without a live key each makes 0."""


@dataclass(frozen=True)
class Normalized(Weighting):
    """αᵢ = sᵢ / Σⱼ sⱼ, for scores that are never negative

    Where every score of a row is 0 the weights are `on_empty`: "zero", "nan", "uniform" (the
    average of the live rows), "nearest" (the nearest key alone, for window scores), "raise". No
    gradient reaches the scores of such a row. For "nearest" a score below 0 says how far outside of
    the window its key lies, and counts as 0.

    >>> import numpy as np
    >>> Normalized()(np.array([[1.0, 3.0], [0.0, 0.0]]))
    array([[0.25, 0.75],
           [0.  , 0.  ]])
    >>> Normalized("nearest")(np.array([[1.0, -2.0], [-3.0, -2.0]]))
    array([[1., 0.],
           [0., 1.]])
    """

    on_empty: str = "zero"
    convex: ClassVar[bool] = True
    needs_nonnegative: ClassVar[bool] = True
    centred = True
    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.on_empty, str) or self.on_empty not in INSTEAD:
            raise unknown("on_empty", self.on_empty, INSTEAD)

    @property
    def strict(self) -> bool:  # type: ignore[override]
        return self.on_empty == "raise"

    @property
    def instead(self) -> Weighting | None:
        return INSTEAD[self.on_empty]

    def refuses(self, score: Score, biased: bool) -> str | None:
        name, own = type(self).__name__, type(score).__name__
        known = type(score).__module__.startswith("qkv.") and not is_open(score)
        if known and not score.nonnegative:
            return (
                f"{name} divides scores by their sum, but {own} can be negative: use "
                "weighting='softmax', or a score that cannot (boxcar, triangular, epanechnikov, "
                "constant, exact)"
            )
        if biased:
            return (
                f"{name} divides scores by their sum, and a float mask added to them can make them "
                "negative: pass a boolean mask"
            )
        if self.on_empty == "nearest" and score.closeness is None:
            return (
                "on_empty='nearest' needs a score with a distance (boxcar, triangular, "
                f"epanechnikov), not {own}"
            )
        return None

    def reads(self, score: Score) -> Score:
        return (score.closeness or score) if self.on_empty == "nearest" else score

    def inside(self, x: Array, live: Live, scores: Array) -> Array:
        """x where the scores count, else 0."""
        fw = of(x)
        if self.on_empty == "nearest":
            x = fw.keep(x, fw.xp.logical_not(scores <= 0))
        return fw.keep(x, live)

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        fw, inside = of(scores), self.inside(scores, live, scores)
        total = fw.row_sum(inside)
        alpha = inside / divisor(total)
        if self.instead is None:
            return alpha
        other = self.instead.weights(scores, live, k)
        self.check((total, fw.row_sum(other)))
        return fw.xp.where(total == 0, other, alpha)

    def without(self, rest: Array) -> Array:
        return rest

    def moving(self, weight: Array) -> Array:
        return of(weight).keep(weight, weight == weight) if self.on_empty == "nan" else weight

    def pool(self, weight: Array, value: Array, live: Live, keep: Keep) -> Array:
        out = super().pool(self.moving(weight), value, live, keep)
        if self.on_empty != "nan":
            return out
        fw = of(out)
        known = fw.xp.all(weight == weight, axis=-1, keepdims=True)
        return fw.keep(out, known, float("nan"))

    def check(self, found: State) -> None:
        if not self.strict:
            return
        fw = of(found[0])
        empty = fw.concrete(fw.xp.logical_and(found[0] == 0, fw.xp.isnan(found[1])))
        if empty is None:
            raise FrameworkError(
                "on_empty='raise' cannot look at values while they are traced: use 'nan'"
            )
        if empty.any():
            raise ArgumentError(
                f"no key lies within the window of {empty.sum()} queries: widen the score, or pass "
                "Normalized(on_empty='nearest')"
            )

    def init(self, rows: Array, width: int) -> State:
        other = () if self.instead is None else self.instead.init(rows, width)
        return of(rows).full(rows.shape, 0.0, rows), *super().init(rows, width), *other

    def lift(
        self, scores: Array, live: Live, k: Array, found: State, value: Array, keep: Keep
    ) -> State:
        inside = self.inside(scores, live, scores)
        state = of(inside).row_sum(inside), pool(inside, value, live, keep, sparse=True)
        other = self.instead
        return state if other is None else (*state, *other.lift(scores, live, k, (), value, keep))

    def merge(self, one: State, two: State) -> State:
        state, other = super().merge(one[:2], two[:2]), self.instead
        return state if other is None else (*state, *other.merge(one[2:], two[2:]))

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        total, pooled = state[:2]
        out = pooled / divisor(total)
        if self.instead is None:
            return out, (total,), out
        other, known, _ = self.instead.finish(state[2:], ())
        return of(total).xp.where(total == 0, other, out), (total, *known), out

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        total, *known = found
        alpha = self.inside(scores, live, scores) / divisor(total)
        if self.instead is None:
            return alpha
        other = self.instead.weight(scores, live, k, tuple(known))
        return of(total).xp.where(total == 0, other, alpha)

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        return self.inside((along - centre) / divisor(found[0]), None, scores)


@dataclass(frozen=True)
class Raw(Alone):
    """αᵢ = sᵢ: the sum of similarity times value, as it stands

    >>> import numpy as np
    >>> Raw()(np.array([[2.0, -1.0]]))
    array([[ 2., -1.]])
    """

    also: ClassVar[tuple[str, ...]] = ("identity", "linear", "none", "sum")

    sparse: ClassVar[bool] = True

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        return of(scores).keep(scores, live)

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        return along


@dataclass(frozen=True)
class Sigmoid(Alone):
    """αᵢ = 1 / (1 + exp(−sᵢ)): each row by itself, the weights need not sum to one

    >>> import numpy as np
    >>> Sigmoid()(np.array([[0.0, 40.0]]))
    array([[0.5, 1. ]])
    """

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        fw = of(scores)
        return fw.keep(fw.sigmoid(scores), live)

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        return weight * (1.0 - weight) * along


def divisor(total: Array) -> Array:
    """The total, or ∞ where it is 0: such a row has no weights, and no slope."""
    return of(total).keep(total, total != 0, INFINITY)
