"""What a weighting is: scores to weights, whole or in one pass over blocks of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from qkv.errors import CombinationError, DtypeError
from qkv.frameworks import get_framework, tree
from qkv.frameworks.base import Framework
from qkv.scores import Score
from qkv.util.types import Array, DropoutMask, LiveMask, MergeFunction, Shape, Span

State = tuple[Array, ...]
"""What a weighting remembers of the keys it has seen: a few arrays (…, n, ·)."""

INFINITY = float("inf")
MAX_SCORES_PER_PIECE = 2**20
"""Numbers of a piece that its passes find in the cache."""
NO_POSITION = 2**31 - 1
"""The position of no key: behind every other."""


FoldFunction = Callable[[Callable[..., State], MergeFunction, Callable[[Array], State]], State]
"""fold(lift, merge, init): lift(s, live, k) of each block of the rows' scores, merged."""


class MissingMethodError(CombinationError, NotImplementedError):
    """A call needs a step that the weighting's class does not write."""


class Weighting(tree.Record):
    """α = weights(scores): (…, n, m) → (…, n, m), each row by itself.

    The same in blocks is a monoid. `partial_state` turns one block of scores and values into a
    state, `merge` joins two states, `init` is the state of no keys, and `finish` gives the output.
    A weighting that must know something of the whole row first finds it by `find_threshold`.

    `live` marks the keys a mask leaves (None: all); `keep` is the dropout's factor on each
    weight (None: no dropout); `k` (1, c) holds the keys' positions.
    """

    role: ClassVar[str] = "weighting"
    is_convex: ClassVar[bool] = False
    """Whether the weights of a row are nonnegative and sum to one."""
    needs_nonnegative: ClassVar[bool] = False
    """Whether the scores must not be negative."""
    is_sparse: ClassVar[bool] = False
    """Whether a weight may be 0 by design: that row's value then cannot reach the output."""
    has_lse: ClassVar[bool] = False
    """Whether the row has a log-sum-exp."""
    needs_centre: bool = False
    """Whether a weight falls when another of its row rises, so that `score_gradient` needs a
    centre."""
    is_differentiable: bool = True
    """Whether the weights move with the scores, so that gradients reach them."""
    has_learned_shape: bool = False
    """Whether an array of its own acts in `block_weights`, not in `scale_scores` alone."""
    raises_on_empty: bool = False
    """Whether a row may be refused once it is known: `check_row_state` looks at it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        owner: Any = next(x for x in cls.__mro__ if "score_gradient" in vars(x))
        if "weights" in vars(cls) and owner is not cls and owner.weights is not Weighting.weights:
            setattr(cls, "score_gradient", Weighting.score_gradient)  # noqa: B010  # the base's is of other weights
        if "weights" not in vars(cls) or not vars(cls).keys().isdisjoint(BLOCK_METHODS):
            return
        if cls.block_weights not in (Weighting.block_weights, Elementwise.block_weights):
            raise DtypeError(
                f"{cls.__name__} writes other weights than its base, whose blocks would go on as "
                "they are: say in `scale_scores` what is done to each score, or write "
                f"{', '.join(BLOCK_METHODS)} "
                "too, as far as they differ"
            )

    @property
    def needs_search(self) -> bool:
        """Whether something must be known of a whole row before its values are pooled."""
        return type(self).find_threshold is not Weighting.find_threshold

    @property
    def max_support(self) -> int | None:
        """The most keys of a row that count, in the output and in its gradient; None: all may."""
        return None

    def __call__(self, scores: Array, live: LiveMask = None) -> Array:
        """The weights of scores (…, n, m); `live` marks the keys that count."""
        fw = get_framework(scores)
        dtype = fw.dtype_name(scores)
        if len(scores.shape) < 2 or "float" not in dtype:
            told = f"{dtype} of shape {tuple(scores.shape)}"
            raise DtypeError(
                f"scores must be floats (…, n, m), not {told}; one row is scores[None]"
            )
        if dtype in ("float16", "bfloat16"):
            return fw.astype(self(fw.astype(scores, "float32"), live), dtype)
        lent = (
            fw.as_numpy_view(scores) if self.needs_search and not self.has_learned_shape else None
        )
        if lent is not None:
            return fw.from_numpy_view(self(lent, None if live is None else fw.as_numpy_view(live)))
        n, m = scores.shape[-2:]
        if (
            fw.needs_equal_spans
            or None in (n, m)
            or n * m <= MAX_SCORES_PER_PIECE
            or fw.needs_gradient([scores])
        ):
            tiling: list[tuple[Span, list[Span]]] = [(Span(0, fw.axis_length(scores, -2)), [])]
        else:  # in pieces that stay in the cache
            size = max(MAX_SCORES_PER_PIECE // m, 1)
            tiling = [(Span(i, min(size, n - i)), []) for i in range(0, n, size)]

        def weigh_tile(rows: Span, _: object) -> State:
            part = None if live is None else fw.slice_span(live, rows, -2)
            # What is dead may be NaN, which a learned temperature must not meet.
            how = weighting_for_rows(fw, self, rows, n)
            s = how.scale_scores(fw.fill_unless(fw.slice_span(scores, rows, -2), part))
            return (how.weights(s, part, fw.position_range(0, fw.axis_length(scores, -1), scores)),)

        with fw.compute_context():
            return fw.map_tiles(weigh_tile, tiling)[0]

    def incompatible_reason(self, score: Score, biased: bool) -> str | None:
        """Why weights of this score mean nothing, with a float mask added to it or without."""
        return None

    def adapt_score(self, score: Score) -> Score:
        """The score as this weighting needs it."""
        return score

    def check_shapes(self, lead: Shape, n: int) -> None:
        """Raise where its arrays do not fit weights of queries (*lead, n, d)."""

    def scale_scores(self, scores: Array) -> Array:
        """What is done to each score before anything else (a temperature)."""
        return scores

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        """α, literally."""
        raise NotImplementedError("a weighting says how scores become weights")

    def pool_whole_rows(
        self, scores: Array, live: LiveMask, k: Array, value: Array, keep: DropoutMask
    ) -> Array:
        """The output of rows with all their keys in one block.

        The scores are not scaled yet, and may be overwritten.
        """
        return self.pool_values(self.weights(self.scale_scores(scores), live, k), value, live, keep)

    def pool_values(self, weight: Array, value: Array, live: LiveMask, keep: DropoutMask) -> Array:
        """Σᵢ αᵢ vᵢ, once the weights are there."""
        if live is keep is None and not self.is_sparse:
            return get_framework(weight).matmul(weight, value)
        return pool_by_weights(weight, value, live, keep, self.is_sparse)

    def value_gradient_weights(self, weight: Array) -> Array:
        """The weights by which a gradient reaches the values."""
        return weight

    def divisor_without(self, rest: Array) -> Array | None:
        """What the weights of the other keys, which sum to `rest`, are divided by where a key is
        left out; None where they do not stay in proportion."""
        return None

    def missing_methods_reason(self, learning: bool) -> str | None:
        """Why its rows must be whole, with a gradient or without: a step that is not written."""
        kind, name = type(self), type(self).__name__
        if kind.block_weights is Weighting.block_weights and (
            learning or kind.partial_state is Weighting.partial_state
        ):
            return (
                f"{name} weighs whole rows only: write `block_weights`, and the other steps of "
                "`qkv.weightings.Weighting`, for rows that come in blocks or from several shards"
            )
        if learning and self.is_differentiable and kind.score_gradient is Weighting.score_gradient:
            return (
                f"{name} has no `score_gradient`, by which a gradient goes back through rows "
                "that come in "
                "blocks: write it, ∂L/∂score of ∂L/∂α, or `is_differentiable = False` where "
                "there is none"
            )
        return None

    def limit_to_keys(self, count: int) -> Weighting:
        """The weighting that gives the same where there are no more keys than this."""
        return self

    def find_threshold(self, fold: FoldFunction) -> State:
        """What must be known of a row before its values are pooled."""
        return ()

    def init(self, rows: Array, width: int) -> State:
        """The state of no keys, for rows shaped as `rows` (…, r, 1) and values of this width."""
        return (get_framework(rows).full((*rows.shape[:-1], width), 0.0, rows),)

    def partial_state(
        self, scores: Array, live: LiveMask, k: Array, found: State, value: Array, keep: DropoutMask
    ) -> State:
        """The state of one block, whose scores may be overwritten."""
        return (self.pool_values(self.block_weights(scores, live, k, found), value, live, keep),)

    def merge(self, one: State, two: State) -> State:
        """The state of both: here the sums of what each has."""
        return tuple(a + b for a, b in zip(one, two, strict=True))

    def finish(self, state: State, found: State) -> tuple[Array, State, Array | None]:
        """The output; what `block_weights` needs to know of the row; and the centre c of
        `score_gradient`."""
        return state[0], found, None

    def check_row_state(self, found: State) -> None:
        """Raise where a row that is known has no weights."""

    def block_weights(self, scores: Array, live: LiveMask, k: Array, found: State) -> Array:
        """The weights of one block, once the row is known."""
        raise MissingMethodError(self.missing_methods_reason(False))

    def score_gradient(
        self, scores: Array, weight: Array, along: Array, centre: Array, found: State
    ) -> Array:
        """The gradient of the block's scores: `along` is ∂L/∂α, `centre` (…, r, 1) is c·∂L/∂out."""
        raise MissingMethodError(self.missing_methods_reason(True))

    def compute_lse(self, scores: Array, live: LiveMask, k: Array) -> Array:
        """log Σ exp(score) (…, n, 1), literally."""
        raise NotImplementedError(f"{type(self).__name__} does not define this")

    def weights_and_lse(
        self, scores: Array, live: LiveMask, k: Array
    ) -> tuple[Array, Array | None]:
        """Both at once; None for a weighting that has no log-sum-exp."""
        lse = self.compute_lse(scores, live, k) if self.has_lse else None
        return self.weights(scores, live, k), lse

    def lse_from_state(self, found: State) -> Array:
        """The same, of a row that is known."""
        raise NotImplementedError(f"{type(self).__name__} does not define this")


class Elementwise(Weighting):
    """Each weight hangs on its own score alone, so that a block is weighed as a row is."""

    def block_weights(self, scores: Array, live: LiveMask, k: Array, found: State) -> Array:
        return self.weights(scores, live, k)

    def divisor_without(self, rest: Array) -> Array:
        return get_framework(rest).xp.ones_like(rest)


BLOCK_METHODS = ("find_threshold", "partial_state", "merge", "finish", "block_weights")
"""What makes the weights of a row from those of its blocks."""


def has_number_per_row(x: Array, n: int) -> bool:
    """Whether an array has a number for each of n rows, (…, n, 1)."""
    return n != 1 and tuple(x.shape[-2:]) == (n, 1)


def weighting_for_rows(fw: Framework, weighting: Weighting, rows: Span, n: int) -> Weighting:
    """The weighting of some of n rows: what it has for each is cut."""
    return tree.map_arrays(
        fw, lambda x: fw.slice_span(x, rows, -2) if has_number_per_row(x, n) else x, weighting
    )


def pool_by_weights(
    weight: Array, value: Array, live: LiveMask, keep: DropoutMask, sparse: bool = False
) -> Array:
    """Σⱼ weightᵢⱼ vⱼ, where a value that is ruled out cannot spoil the sum by being NaN or ∞."""
    fw = get_framework(weight)
    xp = fw.xp
    if live is None and not sparse:
        return xp.matmul(weight if keep is None else weight * keep, value)
    if sparse and keep is not None:
        live = weight != 0
    weight = weight if keep is None else weight * keep

    def pool_finite(weight: Array, value: Array, *_: Array) -> Array:
        return xp.matmul(weight, value)

    def pool_live(weight: Array, value: Array, *live: Array) -> Array:
        return pool_live_values(weight, value, live[0] if live else weight != 0)

    if fw.is_surely_finite(value):
        return pool_finite(weight, value)
    if weight.shape[:-2] == value.shape[:-2]:
        some = None if sparse and keep is None else live
        out = fw.call_graph_node("pooled", weight, some, value)
        if out is not None:
            return out
    given = () if sparse and keep is None else (live,)
    return fw.cond(xp.all(xp.isfinite(value)), pool_finite, pool_live, weight, value, *given)


def pool_live_values(weight: Array, value: Array, live: Array) -> Array:
    """Σⱼ weightᵢⱼ vⱼ over the live pairs, whatever the values of the others are.

    An infinite value with weight makes the sum infinite; NaN where both infinities meet, and where
    a live value is NaN, or infinite without weight.
    """
    fw = get_framework(weight)
    xp = fw.xp

    def any_pair(pairs: Array, values: Array) -> Array:
        """Whether such a pair has such a value."""
        return xp.matmul(fw.astype(pairs, dtype), fw.astype(values, dtype)) != 0

    dtype, out = fw.dtype_name(value), xp.matmul(weight, fw.fill_unless(value, xp.isfinite(value)))
    live = xp.logical_or(live, xp.isnan(weight))  # in the shape of the weights
    above, below = (xp.logical_and(live, x) for x in (weight > 0, weight < 0))
    none = xp.logical_and(live, xp.logical_not(xp.logical_or(above, below)))
    top, bottom, unknown = value == INFINITY, value == -INFINITY, xp.isnan(value)
    up = xp.logical_or(any_pair(above, top), any_pair(below, bottom))
    down = xp.logical_or(any_pair(above, bottom), any_pair(below, top))
    lost = xp.logical_or(any_pair(live, unknown), any_pair(none, xp.logical_or(top, bottom)))
    lost = xp.logical_or(lost, xp.logical_and(up, down))
    for where, end in ((up, INFINITY), (down, -INFINITY), (lost, float("nan"))):
        out = fw.fill_unless(out, xp.logical_not(where), end)
    return out


def live_row_max(scores: Array, live: LiveMask) -> Array:
    """The largest live score of each row (…, n, 1), −∞ where there is none; a constant."""
    fw = get_framework(scores)
    scores = fw.detach(fw.fill_unless(scores, live, -INFINITY))
    if scores.shape[-1] == 0:
        return fw.full((*scores.shape[:-1], 1), -INFINITY, scores)
    return fw.row_max(scores)
