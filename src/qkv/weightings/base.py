"""What a weighting is: scores to weights, whole or in one pass over blocks of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from qkv.arrays import of, tree
from qkv.arrays.base import Framework
from qkv.errors import CombinationError, DtypeError
from qkv.scores import Score
from qkv.types import Array, Keep, Live, Merge, Shape, Span

State = tuple[Array, ...]
"""What a weighting remembers of the keys it has seen: a few arrays (…, n, ·)."""

INFINITY = float("inf")
CACHED = 2**20
"""Numbers of a piece that its passes find in the cache."""
NOWHERE = 2**31 - 1
"""The position of no key: behind every other."""


Fold = Callable[[Callable[..., State], Merge, Callable[[Array], State]], State]
"""fold(lift, merge, init): lift(s, live, k) of each block of the rows' scores, merged."""


class Unwritten(CombinationError, NotImplementedError):
    """A call needs a step that the weighting's class does not write."""


class Weighting(tree.Record):
    """α = weights(scores): (…, n, m) → (…, n, m), each row by itself.

    The same in blocks is a monoid. `lift` turns one block of scores and values into a state,
    `merge` joins two states, `init` is the state of no keys, and `finish` gives the output.
    A weighting that must know something of the whole row first finds it by `search`.

    `live` marks the keys a mask leaves (None: all); `keep` is the dropout's factor on each
    weight (None: no dropout); `k` (1, c) holds the keys' positions.
    """

    what: ClassVar[str] = "weighting"
    convex: ClassVar[bool] = False
    """Whether the weights of a row are nonnegative and sum to one."""
    needs_nonnegative: ClassVar[bool] = False
    """Whether the scores must not be negative."""
    sparse: ClassVar[bool] = False
    """Whether a weight may be 0 by design: that row's value then cannot reach the output."""
    has_lse: ClassVar[bool] = False
    """Whether the row has a log-sum-exp."""
    centred: bool = False
    """Whether a weight falls when another of its row rises, so that `slope` needs a centre."""
    smooth: bool = True
    """Whether the weights move with the scores, so that gradients reach them."""
    bends: bool = False
    """Whether an array of its own acts in `weight`, not in `scale` alone."""
    strict: bool = False
    """Whether a row may be refused once it is known: `check` looks at it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        owner: Any = next(x for x in cls.__mro__ if "slope" in vars(x))
        if "weights" in vars(cls) and owner is not cls and owner.weights is not Weighting.weights:
            setattr(cls, "slope", Weighting.slope)  # noqa: B010  # the base's is of other weights
        if "weights" not in vars(cls) or not vars(cls).keys().isdisjoint(STEPS):
            return
        if cls.weight not in (Weighting.weight, Alone.weight):
            raise DtypeError(
                f"{cls.__name__} writes other weights than its base, whose blocks would go on as "
                f"they are: say in `scale` what is done to each score, or write {', '.join(STEPS)} "
                "too, as far as they differ"
            )

    @property
    def searches(self) -> bool:
        """Whether something must be known of a whole row before its values are pooled."""
        return type(self).search is not Weighting.search

    @property
    def few(self) -> int | None:
        """The most keys of a row that count, in the output and in its gradient; None: all may."""
        return None

    def __call__(self, scores: Array, live: Live = None) -> Array:
        """The weights of scores (…, n, m); `live` marks the keys that count."""
        fw = of(scores)
        dtype = fw.dtype(scores)
        if len(scores.shape) < 2 or "float" not in dtype:
            told = f"{dtype} of shape {tuple(scores.shape)}"
            raise DtypeError(
                f"scores must be floats (…, n, m), not {told}; one row is scores[None]"
            )
        if dtype in ("float16", "bfloat16"):
            return fw.astype(self(fw.astype(scores, "float32"), live), dtype)
        lent = fw.lend(scores) if self.searches and not self.bends else None
        if lent is not None:
            return fw.take_back(self(lent, None if live is None else fw.lend(live)))
        n, m = scores.shape[-2:]
        if fw.equal_spans or None in (n, m) or n * m <= CACHED or fw.needs_gradient([scores]):
            tiling: list[tuple[Span, list[Span]]] = [(Span(0, fw.length(scores, -2)), [])]
        else:  # in pieces that stay in the cache
            size = max(CACHED // m, 1)
            tiling = [(Span(i, min(size, n - i)), []) for i in range(0, n, size)]

        def some(rows: Span, _: object) -> State:
            part = None if live is None else fw.cut(live, rows, -2)
            # What is dead may be NaN, which a learned temperature must not meet.
            how = of_rows(fw, self, rows, n)
            s = how.scale(fw.keep(fw.cut(scores, rows, -2), part))
            return (how.weights(s, part, fw.positions(0, fw.length(scores, -1), scores)),)

        with fw.quiet():
            return fw.tiled(some, tiling)[0]

    def refuses(self, score: Score, biased: bool) -> str | None:
        """Why weights of this score mean nothing, with a float mask added to it or without."""
        return None

    def reads(self, score: Score) -> Score:
        """The score as this weighting needs it."""
        return score

    def fits(self, lead: Shape, n: int) -> None:
        """Raise where its arrays do not fit weights of queries (*lead, n, d)."""

    def scale(self, scores: Array) -> Array:
        """What is done to each score before anything else (a temperature)."""
        return scores

    def weights(self, scores: Array, live: Live, k: Array) -> Array:
        """α, literally."""
        raise NotImplementedError("a weighting says how scores become weights")

    def whole(self, scores: Array, live: Live, k: Array, value: Array, keep: Keep) -> Array:
        """The output of rows with all their keys in one block.

        The scores are not scaled yet, and may be overwritten.
        """
        return self.pool(self.weights(self.scale(scores), live, k), value, live, keep)

    def pool(self, weight: Array, value: Array, live: Live, keep: Keep) -> Array:
        """Σᵢ αᵢ vᵢ, once the weights are there."""
        if live is keep is None and not self.sparse:
            return of(weight).product(weight, value)
        return pool(weight, value, live, keep, self.sparse)

    def moving(self, weight: Array) -> Array:
        """The weights by which a gradient reaches the values."""
        return weight

    def without(self, rest: Array) -> Array | None:
        """What the weights of the other keys, which sum to `rest`, are divided by where a key is
        left out; None where they do not stay in proportion."""
        return None

    def lacks(self, learning: bool) -> str | None:
        """Why its rows must be whole, with a gradient or without: a step that is not written."""
        kind, name = type(self), type(self).__name__
        if kind.weight is Weighting.weight and (learning or kind.lift is Weighting.lift):
            return (
                f"{name} weighs whole rows only: write `weight`, and the other steps of "
                "`qkv.weightings.Weighting`, for rows that come in blocks or from several shards"
            )
        if learning and self.smooth and kind.slope is Weighting.slope:
            return (
                f"{name} has no `slope`, by which a gradient goes back through rows that come in "
                "blocks: write it, ∂L/∂score of ∂L/∂α, or `smooth = False` where there is none"
            )
        return None

    def among(self, count: int) -> Weighting:
        """The weighting that gives the same where there are no more keys than this."""
        return self

    def search(self, fold: Fold) -> State:
        """What must be known of a row before its values are pooled."""
        return ()

    def init(self, rows: Array, width: int) -> State:
        """The state of no keys, for rows shaped as `rows` (…, r, 1) and values of this width."""
        return (of(rows).full((*rows.shape[:-1], width), 0.0, rows),)

    def lift(
        self, scores: Array, live: Live, k: Array, found: State, value: Array, keep: Keep
    ) -> State:
        """The state of one block, whose scores may be overwritten."""
        return (self.pool(self.weight(scores, live, k, found), value, live, keep),)

    def merge(self, one: State, two: State) -> State:
        """The state of both: here the sums of what each has."""
        return tuple(a + b for a, b in zip(one, two, strict=True))

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        """The output; what `weight` needs to know of the row; and the centre c of `slope`."""
        return state[0], found, None

    def check(self, found: State) -> None:
        """Raise where a row that is known has no weights."""

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        """The weights of one block, once the row is known."""
        raise Unwritten(self.lacks(False))

    def slope(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        """The gradient of the block's scores: `along` is ∂L/∂α, `centre` (…, r, 1) is c·∂L/∂out."""
        raise Unwritten(self.lacks(True))

    def lse_of(self, scores: Array, live: Live, k: Array) -> Array:
        """log Σ exp(score) (…, n, 1), literally."""
        raise NotImplementedError(f"{type(self).__name__} does not define this")

    def weights_and_lse(self, scores: Array, live: Live, k: Array) -> tuple[Array, Array | None]:
        """Both at once; None for a weighting that has no log-sum-exp."""
        lse = self.lse_of(scores, live, k) if self.has_lse else None
        return self.weights(scores, live, k), lse

    def lse(self, found: State) -> Array:
        """The same, of a row that is known."""
        raise NotImplementedError(f"{type(self).__name__} does not define this")


class Alone(Weighting):
    """Each weight hangs on its own score alone, so that a block is weighed as a row is."""

    def weight(self, scores: Array, live: Live, k: Array, found: State) -> Array:
        return self.weights(scores, live, k)

    def without(self, rest: Array) -> Array:
        return of(rest).xp.ones_like(rest)


STEPS = ("search", "lift", "merge", "finish", "weight")
"""What makes the weights of a row from those of its blocks."""


def by_row(x: Array, n: int) -> bool:
    """Whether an array has a number for each of n rows, (…, n, 1)."""
    return n != 1 and tuple(x.shape[-2:]) == (n, 1)


def of_rows(fw: Framework, weighting: Weighting, rows: Span, n: int) -> Weighting:
    """The weighting of some of n rows: what it has for each is cut."""
    return tree.map_arrays(fw, lambda x: fw.cut(x, rows, -2) if by_row(x, n) else x, weighting)


def pool(weight: Array, value: Array, live: Live, keep: Keep, sparse: bool = False) -> Array:
    """Σⱼ weightᵢⱼ vⱼ, where a value that is ruled out cannot spoil the sum by being NaN or ∞."""
    fw = of(weight)
    xp = fw.xp
    if live is None and not sparse:
        return xp.matmul(weight if keep is None else weight * keep, value)
    if sparse and keep is not None:
        live = weight != 0
    weight = weight if keep is None else weight * keep

    def plain(weight: Array, value: Array, *_: Array) -> Array:
        return xp.matmul(weight, value)

    def careful(weight: Array, value: Array, *live: Array) -> Array:
        return spared(weight, value, live[0] if live else weight != 0)

    if fw.surely_finite(value):
        return plain(weight, value)
    if weight.shape[:-2] == value.shape[:-2]:
        some = None if sparse and keep is None else live
        out = fw.node("pooled", weight, some, value)
        if out is not None:
            return out
    given = () if sparse and keep is None else (live,)
    return fw.when(xp.all(xp.isfinite(value)), plain, careful, weight, value, *given)


def spared(weight: Array, value: Array, live: Array) -> Array:
    """Σⱼ weightᵢⱼ vⱼ over the live pairs, whatever the values of the others are.

    An infinite value with weight makes the sum infinite; NaN where both infinities meet, and where
    a live value is NaN, or infinite without weight.
    """
    fw = of(weight)
    xp = fw.xp

    def meet(pairs: Array, values: Array) -> Array:
        """Whether such a pair has such a value."""
        return xp.matmul(fw.astype(pairs, dtype), fw.astype(values, dtype)) != 0

    dtype, out = fw.dtype(value), xp.matmul(weight, fw.keep(value, xp.isfinite(value)))
    live = xp.logical_or(live, xp.isnan(weight))  # in the shape of the weights
    above, below = (xp.logical_and(live, x) for x in (weight > 0, weight < 0))
    none = xp.logical_and(live, xp.logical_not(xp.logical_or(above, below)))
    top, bottom, unknown = value == INFINITY, value == -INFINITY, xp.isnan(value)
    up = xp.logical_or(meet(above, top), meet(below, bottom))
    down = xp.logical_or(meet(above, bottom), meet(below, top))
    lost = xp.logical_or(meet(live, unknown), meet(none, xp.logical_or(top, bottom)))
    lost = xp.logical_or(lost, xp.logical_and(up, down))
    for where, end in ((up, INFINITY), (down, -INFINITY), (lost, float("nan"))):
        out = fw.keep(out, xp.logical_not(where), end)
    return out


def row_max(scores: Array, live: Live) -> Array:
    """The largest live score of each row (…, n, 1), −∞ where there is none; a constant."""
    fw = of(scores)
    scores = fw.detach(fw.keep(scores, live, -INFINITY))
    if scores.shape[-1] == 0:
        return fw.full((*scores.shape[:-1], 1), -INFINITY, scores)
    return fw.row_max(scores)
