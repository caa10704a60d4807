"""Weights that are exponentials of scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import ClassVar

from qkv.arrays import of, over
from qkv.errors import ArgumentError, ShapeError, positive
from qkv.types import Array, Keep, Live, Shape
from qkv.weightings.base import INFINITY, NOWHERE, Fold, State, Weighting, pool, row_max


def exponentials(scores: Array, live: Live, top: Array, spend: bool = False) -> Array:
    """exp(s − top), 0 where not live."""
    fw = of(scores)
    return fw.exp_below(scores, fw.finite(top), live, spend)


def logarithm(top: Array, total: Array) -> Array:
    """top + log(total), −∞ where the total is 0."""
    fw = of(total)
    return fw.keep(fw.finite(top) + fw.xp.log(fw.nonzero(total)), total != 0, -INFINITY)


class Exponential(Weighting):
    """What softmax and its truncations share: α = exp(s − top) / total.

    The row's `top` and `total` are kept apart: at 1e8 their log-sum-exp has no digits left for
    the total.
    """

    convex: ClassVar[bool] = True
    has_lse: ClassVar[bool] = True
    centred = True

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        return weight * (along - centre)

    def lse(self, found: State) -> Array:
        return logarithm(found[0], found[1])


@dataclass(frozen=True)
class Softmax(Exponential):
    """αᵢ = exp(sᵢ/T) / Σⱼ exp(sⱼ/T)

    >>> import numpy as np
    >>> Softmax()(np.log([[1.0, 2.0, 1.0]])).round(3)
    array([[0.25, 0.5 , 0.25]])
    """

    temperature: float | Array = 1.0

    def __post_init__(self) -> None:
        positive(self, "temperature")

    def fits(self, lead: Shape, n: int) -> None:
        if isinstance(self.temperature, int | float):  # torch.compile may leave it open
            return
        shape: Shape = tuple(getattr(self.temperature, "shape", ()))
        wanted = (*lead, n, 1)
        pairs = zip(shape[-2::-1], wanted[-2::-1], strict=False)
        differ = any(x not in (1, y) for x, y in pairs if y not in (1, None))
        if differ or shape[-1:] not in ((), (1,)):
            raise ShapeError(
                "Softmax: temperature must be one number, or broadcast to one for each row "
                f"{wanted}, not of shape {shape}"
            )

    def scale(self, scores: Array) -> Array:
        return over(scores, self.temperature)

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        fw = of(scores)
        quick = fw.softmax(scores, live)
        if quick is not None:
            return quick
        e = exponentials(scores, live, row_max(scores, live))
        return e / fw.nonzero(fw.row_sum(e))

    def lse_of(self, scores: Array, live: Live, k: Array) -> Array:
        top = row_max(scores, live)
        return logarithm(top, of(scores).row_sum(exponentials(scores, live, top)))

    def weights_and_lse(self, scores: Array, live: Live, k: Array) -> tuple[Array, Array | None]:
        own = type(self).weights is Softmax.weights and type(self).lse_of is Softmax.lse_of
        if not own:  # of one that has others, they are what counts
            return super().weights_and_lse(scores, live, k)
        fw = of(scores)
        quick = fw.softmax_and_lse(scores, live)
        if quick is not None:
            return quick
        top = fw.finite(row_max(scores, live))
        e = fw.exp_below(scores, top, live)
        total = fw.row_sum(e)
        some = fw.nonzero(total)
        lse = top + fw.xp.log(some)
        return e / some, lse if some is total else fw.keep(lse, total != 0, -INFINITY)

    def without(self, rest: Array) -> Array:
        return rest

    def init(self, rows: Array, width: int) -> State:
        fw = of(rows)
        top = fw.full(rows.shape, -INFINITY, rows)
        return top, fw.full(rows.shape, 0.0, rows), *super().init(rows, width)

    def lift(
        self, scores: Array, live: Live, k: Array, found: State, value: Array, keep: Keep
    ) -> State:
        top = row_max(scores, live)
        e = exponentials(scores, live, top, spend=True)
        return top, of(e).row_sum(e), pool(e, value, live, keep)

    def merge(self, one: State, two: State) -> State:
        fw = of(one[0])
        top = fw.xp.maximum(one[0], two[0])
        a, b = (fw.xp.exp(x[0] - fw.finite(top)) for x in (one, two))
        return top, one[1] * a + two[1] * b, one[2] * a + two[2] * b

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        top, total, pooled = state
        out = pooled / of(total).nonzero(total)
        return out, (top, total), out

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        return exponentials(scores, live, found[0]) / of(scores).nonzero(found[1])


@dataclass(frozen=True)
class TopK(Exponential):
    """Softmax over the k largest scores of each row, 0 elsewhere; ties by the lowest row.

    >>> import numpy as np
    >>> TopK(2)(np.log([[1.0, 5.0, 3.0, 1.0]])).round(3)
    array([[0.   , 0.625, 0.375, 0.   ]])
    """

    also: ClassVar[tuple[str, ...]] = ("top_k", "knn")

    k: int
    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, Integral) or self.k < 1:
            raise ArgumentError(f"TopK: k must be a whole number of at least 1, not {self.k!r}")

    @property
    def few(self) -> int:
        return self.k

    def among(self, count: int) -> TopK:
        return self if self.k <= count else replace(self, k=max(count, 1))

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        return Softmax().weights(scores, self.mask(scores, live, k), k)

    def lse_of(self, scores: Array, live: Live, k: Array) -> Array:
        return Softmax().lse_of(scores, self.mask(scores, live, k), k)

    def mask(self, scores: Array, live: Live, k: Array) -> Array:
        fw, how = of(scores), self
        if not fw.unsized(scores) and (fw.equal_spans or not fw.tracing(scores)):
            how = self.among(scores.shape[-1])  # there are no more to be held
        found = how.search(lambda lift, merge, init: lift(fw.detach(scores), live, k))
        return how.chosen(scores, live, k, found)

    def search(self, fold: Fold) -> State:
        """The largest score, the total of the k largest, the smallest of them, and its position."""
        best, at = fold(self.lift_best, self.merge_best, self.init_best)
        top = row_max(best, None)
        total = of(top).row_sum(exponentials(best, None, top))
        return top, total, best[..., -1:], at[..., -1:]

    def init_best(self, rows: Array) -> State:
        fw = of(rows)
        shape = (*rows.shape[:-1], self.k)
        at = fw.astype(fw.full(shape, 0.0, rows), "int32") + NOWHERE
        return fw.full(shape, -INFINITY, rows), at

    def lift_best(self, scores: Array, live: Live, k: Array) -> State:
        fw = of(scores)
        scores = fw.keep(scores, live, -INFINITY)
        at = fw.xp.broadcast_to(k, fw.sizes(scores))
        # A block may have fewer than k keys, or none.
        return self.best(*self.joined((scores, at), self.init_best(scores[..., :1])))

    def joined(self, one: State, two: State) -> State:
        xp = of(one[0]).xp
        return tuple(xp.concat(list(pair), axis=-1) for pair in zip(one, two, strict=True))

    def best(self, scores: Array, at: Array) -> State:
        fw = of(scores)
        scores, order = fw.stable_top(scores, self.k)
        return scores, fw.along(at, order)

    def merge_best(self, one: State, two: State) -> State:
        fw = of(one[0])
        scores, at = self.joined(one, two)
        # By position first: the sort by score is stable, so ties then go to the lowest row.
        order = fw.xp.argsort(at, axis=-1, stable=True)
        scores, at = (fw.along(x, order) for x in (scores, at))
        return self.best(scores, at)

    def chosen(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        xp = of(scores).xp
        _, _, least, at = found
        # A compiler may round a score anew, and the last of the chosen would not be found again.
        last = xp.logical_or(xp.logical_and(scores == least, k <= at), k == at)
        chosen = xp.logical_or(xp.logical_or(scores > least, last), xp.isnan(least + scores))
        return chosen if live is None else xp.logical_and(chosen, live)

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        e = exponentials(scores, self.chosen(scores, live, k, found), found[0])
        return e / of(e).nonzero(found[1])

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        return state[0], found, state[0]
