"""The base class of weightings: scores to weights, over whole rows or block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from qkv.errors import CombinationError, DtypeError
from qkv.frameworks import get_framework, tree
from qkv.frameworks.base import Framework
from qkv.scores import Score
from qkv.util.types import Array, DropoutMask, LiveMask, MergeFunction, Shape, Span

State = tuple[Array, ...]
"""A partial result over some of the keys: a few arrays (…, n, ·)."""

INFINITY = float("inf")
MAX_SCORES_PER_PIECE = 2**20
"""Scores that are processed at once, so that they fit the processor's cache."""
NO_POSITION = 2**31 - 1
"""The position that means "no key"; larger than every position."""


FoldFunction = Callable[[Callable[..., State], MergeFunction, Callable[[Array], State]], State]
"""fold(lift, merge, init): apply lift(s, live, k) to each block of scores, and merge the results.

`init(rows)` is the state of no keys.
"""


class MissingMethodError(CombinationError, NotImplementedError):
    """A call needs a method that the weighting's class does not define."""


class Weighting(tree.Record):
    """α = weights(scores): (…, n, m) → (…, n, m), row by row.

    Over blocks of keys a weighting is a monoid. `partial_state` turns one block of scores and
    values into a state. `merge` joins two states. `init` is the state of no keys. `finish` returns
    the output. If a weighting must first know something about the whole row, such as a threshold,
    `find_threshold` computes it.

    Arguments of the methods:

    - `live` marks the keys that the mask allows (None: all).
    - `dropout_mask` is the dropout factor of each weight (None: no dropout).
    - `k` (1, c) holds the positions of the keys.
    - `row_facts` are the result of `find_threshold`, and after `finish` its second result.
    """

    role: ClassVar[str] = "weighting"
    is_convex: ClassVar[bool] = False
    """Whether the weights of a row are nonnegative and sum to one."""
    needs_nonnegative: ClassVar[bool] = False
    """Whether the scores must not be negative."""
    is_sparse: ClassVar[bool] = False
    """Whether weights may be exactly 0. Then the value of a key with weight 0 may even be NaN."""
    has_lse: ClassVar[bool] = False
    """Whether the weighting has a log-sum-exp."""
    ignores_scores: ClassVar[bool] = False
    """Whether the weights depend only on which keys the mask allows."""
    needs_centre: bool = False
    """Whether a weight depends on the other scores of its row, so that `score_gradient` needs the
    centre."""
    is_differentiable: bool = True
    """Whether scores receive gradients."""
    has_learned_shape: bool = False
    """Whether an array field acts in `block_weights` and not only in `scale_scores`."""
    raises_on_empty: bool = False
    """Whether `check_row_state` may raise an error for a row."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise if a class overrides `weights` but inherits methods that compute other weights.

        `BLOCK_METHODS` compute the weights block by block, `score_gradient` computes the gradient.
        """
        super().__init_subclass__(**options)
        if "weights" not in vars(cls):
            return
        name = cls.__name__
        has_block_methods = not vars(cls).keys().isdisjoint(BLOCK_METHODS)
        generic = (Weighting.block_weights, Elementwise.block_weights)
        if not has_block_methods and cls.block_weights not in generic:
            raise DtypeError(
                f"{name} overrides `weights` but inherits methods that compute other weights block "
                "by block: override `scale_scores` instead if you only transform each score. "
                f"Otherwise also override those of {', '.join(BLOCK_METHODS)} that must change"
            )
        owner: Any = next(x for x in cls.__mro__ if "score_gradient" in vars(x))
        if owner is not cls and owner.weights is not Weighting.weights:
            raise DtypeError(
                f"{name} overrides `weights` but inherits `score_gradient` of {owner.__name__}: "
                "define `score_gradient` too, or set `score_gradient = Weighting.score_gradient` "
                "for a weighting without gradients in blocks"
            )

    @property
    def needs_search(self) -> bool:
        """Whether `find_threshold` must see the whole row before values are pooled."""
        return type(self).find_threshold is not Weighting.find_threshold

    @property
    def max_support(self) -> int | None:
        """The largest number of keys in a row with nonzero weight or gradient; None: no limit."""
        return None

    def __call__(self, scores: Array, live: LiveMask = None) -> Array:
        """Return the weights of scores (…, n, m); `live` marks the keys that count."""
        fw = get_framework(scores)
        dtype = fw.dtype_name(scores)
        if len(scores.shape) < 2 or "float" not in dtype:
            raise DtypeError(
                f"scores must be a float array (…, n, m), not {dtype} of shape "
                f"{tuple(scores.shape)}; for one row pass scores[None]"
            )
        if dtype in ("float16", "bfloat16"):
            return fw.astype(self(fw.astype(scores, "float32"), live), dtype)
        view = (
            fw.as_numpy_view(scores) if self.needs_search and not self.has_learned_shape else None
        )
        if view is not None:
            return fw.from_numpy_view(self(view, None if live is None else fw.as_numpy_view(live)))
        n, m = scores.shape[-2:]
        if (
            fw.needs_equal_spans
            or None in (n, m)
            or n * m <= MAX_SCORES_PER_PIECE
            or fw.needs_gradient([scores])
        ):
            tiling: list[tuple[Span, list[Span]]] = [(Span(0, fw.axis_length(scores, -2)), [])]
        else:
            size = max(MAX_SCORES_PER_PIECE // m, 1)
            tiling = [(Span(i, min(size, n - i)), []) for i in range(0, n, size)]

        def weigh_tile(rows: Span, _: object) -> State:
            part = None if live is None else fw.slice_span(live, rows, -2)
            # Masked scores may be NaN, which would reach the gradient of a learned temperature.
            weighting = weighting_for_rows(fw, self, rows, n)
            s = weighting.scale_scores(fw.fill_unless(fw.slice_span(scores, rows, -2), part))
            k = fw.position_range(0, fw.axis_length(scores, -1), scores)
            return (weighting.weights(s, part, k),)

        with fw.use_own_settings():
            return fw.map_tiles(weigh_tile, tiling)[0]

    def incompatible_reason(self, score: Score, biased: bool) -> str | None:
        """Return why this score cannot be used, or None. `biased`: a float mask is added to it."""
        return None

    def adapt_score(self, score: Score) -> Score:
        """Return the score in the form that this weighting needs."""
        return score

    def check_shapes(self, lead: Shape, n: int) -> None:
        """Raise ShapeError if an array field does not fit queries (*lead, n, d)."""

    def scale_scores(self, scores: Array) -> Array:
        """Return the scores after an elementwise transformation, such as a temperature."""
        return scores

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        """Return α (…, n, m) of whole rows, as in the formula."""
        raise NotImplementedError(f"{type(self).__name__} does not define weights(scores, live, k)")

    def pool_whole_rows(
        self, scores: Array, live: LiveMask, k: Array, value: Array, dropout_mask: DropoutMask
    ) -> Array:
        """Return the output of rows whose keys are all in one block.

        The scores are not scaled yet. The method may overwrite them.
        """
        return self.pool_values(
            self.weights(self.scale_scores(scores), live, k), value, live, dropout_mask
        )

    def pool_values(
        self, weight: Array, value: Array, live: LiveMask, dropout_mask: DropoutMask
    ) -> Array:
        """Return Σᵢ αᵢ vᵢ (…, r, d_v) for these weights (…, r, c) and values (…, c, d_v)."""
        if live is dropout_mask is None and not self.is_sparse:
            return get_framework(weight).matmul(weight, value)
        return pool_by_weights(weight, value, live, dropout_mask, self.is_sparse)

    def value_gradient_weights(self, weight: Array) -> Array:
        """Return the w (…, r, c) in ∂L/∂vⱼ = Σᵢ wᵢⱼ ∂L/∂outputᵢ, by default the weights."""
        return weight

    def divisor_without(self, remaining: Array) -> Array | None:
        """Return the number that the other weights are divided by if one key is left out.

        `remaining` is the sum of the other weights. Return None if leaving out a key changes the
        ratios of the other weights.
        """
        return None

    def missing_methods_reason(self, learning: bool) -> str | None:
        """Return which method is missing to process rows in blocks, or None.

        `learning` says that a gradient is needed.
        """
        kind, name = type(self), type(self).__name__
        if kind.block_weights is Weighting.block_weights and (
            learning or kind.partial_state is Weighting.partial_state
        ):
            return (
                f"{name} can process whole rows only: define `block_weights` and the other methods "
                "of `qkv.weightings.Weighting` for rows in blocks or in several shards"
            )
        if learning and self.is_differentiable and kind.score_gradient is Weighting.score_gradient:
            return (
                f"{name} has no `score_gradient`, which gradients of rows in blocks need: define "
                "it (∂L/∂score from ∂L/∂α), or set `is_differentiable = False`"
            )
        return None

    def limit_to_keys(self, count: int) -> Weighting:
        """Return an equivalent weighting for at most `count` keys, such as a smaller TopK."""
        return self

    def simplify_for_keys(self, count: int) -> Weighting:
        """Return a simpler weighting with the same weights for `count` keys that one call has."""
        return self

    def find_threshold(self, fold: FoldFunction) -> State:
        """Return the facts about whole rows that `partial_state` needs, such as a threshold.

        The default needs no facts and returns (). `fold` reduces the scores of all blocks to one
        state.
        """
        return ()

    def init(self, rows: Array, width: int) -> State:
        """Return the state of no keys, for rows like `rows` (…, r, 1) and values of this width."""
        return (get_framework(rows).full((*rows.shape[:-1], width), 0.0, rows),)

    def partial_state(
        self,
        scores: Array,
        live: LiveMask,
        k: Array,
        row_facts: State,
        value: Array,
        dropout_mask: DropoutMask,
    ) -> State:
        """Return the state of one block. The method may overwrite the scores."""
        return (
            self.pool_values(
                self.block_weights(scores, live, k, row_facts), value, live, dropout_mask
            ),
        )

    def merge(self, one: State, two: State) -> State:
        """Return the state of two disjoint sets of keys; by default the sum of both states."""
        return tuple(a + b for a, b in zip(one, two, strict=True))

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        """Return the output, the row facts for `block_weights`, and the centre c.

        `score_gradient` needs the centre (…, r, d_v) of the whole row. None: it needs no centre.
        """
        return state[0], row_facts, None

    def check_row_state(self, row_facts: State) -> None:
        """Raise an error if a row has no weights and the options forbid that."""

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        """Return the weights of one block, given the row facts of `finish`."""
        raise MissingMethodError(self.missing_methods_reason(False))

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        """Return ∂L/∂score of a block.

        `weight_gradient` is ∂L/∂α, `centre` (…, r, 1) is c·∂L/∂output.
        """
        raise MissingMethodError(self.missing_methods_reason(True))

    def compute_lse(self, scores: Array, live: LiveMask, k: Array) -> Array:
        """Return log Σ exp(score) (…, n, 1) of whole rows."""
        raise NotImplementedError(f"{type(self).__name__} has no log-sum-exp")

    def weights_and_lse(
        self, scores: Array, live: LiveMask, k: Array
    ) -> tuple[Array, Array | None]:
        """Return the weights and the log-sum-exp, or the weights and None if there is none."""
        lse = self.compute_lse(scores, live, k) if self.has_lse else None
        return self.weights(scores, live, k), lse

    def lse_from_state(self, row_facts: State) -> Array:
        """Return the log-sum-exp (…, n, 1) from the row facts of `finish`."""
        raise NotImplementedError(f"{type(self).__name__} has no log-sum-exp")


class Elementwise(Weighting):
    """Base of weightings whose weight i depends only on score i: αᵢ = f(sᵢ).

    A subclass is a frozen dataclass. It defines `weights`, which gives 0 where `live` is False, and
    `score_gradient`, ∂L/∂s = f′(s) ∂L/∂α.

    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> @dataclass(frozen=True)
    ... class Square(Elementwise):
    ...     def weights(self, scores, live, k):
    ...         return get_framework(scores).fill_unless(scores**2, live)
    ...
    ...     def score_gradient(self, scores, weight, weight_gradient, centre, row_facts):
    ...         return 2 * scores * weight_gradient
    >>> Square()(np.array([[2.0, -1.0]]))
    array([[4., 1.]])
    """

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        return self.weights(scores, live, k)

    def divisor_without(self, remaining: Array) -> Array:
        return get_framework(remaining).xp.ones_like(remaining)


BLOCK_METHODS = ("find_threshold", "partial_state", "merge", "finish", "block_weights")
"""The methods that compute the weights of a row from its blocks."""


def has_number_per_row(x: Array, n: int) -> bool:
    """Return whether an array has one number for each of n rows, (…, n, 1)."""
    return n != 1 and tuple(x.shape[-2:]) == (n, 1)


def weighting_for_rows(fw: Framework, weighting: Weighting, rows: Span, n: int) -> Weighting:
    """Return the weighting for some of n rows, with its arrays (…, n, 1) sliced to these rows."""
    return tree.map_arrays(
        fw, lambda x: fw.slice_span(x, rows, -2) if has_number_per_row(x, n) else x, weighting
    )


def pool_by_weights(
    weight: Array, value: Array, live: LiveMask, dropout_mask: DropoutMask, sparse: bool = False
) -> Array:
    """Return Σⱼ weightᵢⱼ vⱼ; masked values that are NaN or infinite do not reach the sum."""
    fw = get_framework(weight)
    xp = fw.xp
    if live is None and not sparse:
        return xp.matmul(weight if dropout_mask is None else weight * dropout_mask, value)
    if sparse and dropout_mask is not None:
        live = weight != 0
    weight = weight if dropout_mask is None else weight * dropout_mask

    def pool_finite(weight: Array, value: Array, *_: Array) -> Array:
        return xp.matmul(weight, value)

    def pool_live(weight: Array, value: Array, *live: Array) -> Array:
        return pool_live_values(weight, value, live[0] if live else weight != 0)

    if fw.checks_values(weight) and weight.shape[-2] <= weight.shape[-1]:
        # The sums are fewer than the values, and not finite if a value is not, even with weight 0.
        out = pool_finite(weight, value)
        if fw.is_surely_finite(out):
            return out
    if fw.is_surely_finite(value):
        return pool_finite(weight, value)
    if weight.shape[:-2] == value.shape[:-2]:
        out = fw.call_graph_node(
            "pooled", weight, None if sparse and dropout_mask is None else live, value
        )
        if out is not None:
            return out
    masks = () if sparse and dropout_mask is None else (live,)
    sizes = fw.static_shape(weight)[-2:]
    if fw.checks_in_graph() and None not in sizes and sizes[0] <= sizes[1]:
        out = pool_finite(weight, value)
        return fw.cond(
            xp.all(xp.isfinite(out)),
            lambda out, *_: out,
            lambda _, *arrays: pool_live(*arrays),
            *(out, weight, value, *masks),
        )
    return fw.cond(xp.all(xp.isfinite(value)), pool_finite, pool_live, weight, value, *masks)


def pool_live_values(weight: Array, value: Array, live: Array) -> Array:
    """Return Σⱼ weightᵢⱼ vⱼ over the live pairs; other values may be NaN or infinite.

    An infinite live value makes the sum infinite. The sum is NaN if both infinities occur, if a
    live value is NaN, or if an infinite live value has weight 0.
    """
    fw = get_framework(weight)
    xp = fw.xp

    def any_pair(pairs: Array, values: Array) -> Array:
        """Return whether one of the pairs has one of the values, (…, n, d_v)."""
        return xp.matmul(fw.astype(pairs, dtype), fw.astype(values, dtype)) != 0

    dtype, out = fw.dtype_name(value), xp.matmul(weight, fw.fill_unless(value, xp.isfinite(value)))
    live = xp.logical_or(live, xp.isnan(weight))  # also broadcasts `live` to the weights' shape
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
    """Return the largest live score of each row (…, n, 1), detached; −∞ if no pair is live."""
    fw = get_framework(scores)
    scores = fw.detach(fw.fill_unless(scores, live, -INFINITY))
    if fw.has_empty_axis(scores.shape[-1:]):
        return fw.full((*scores.shape[:-1], 1), -INFINITY, scores)
    if fw.may_be_empty(scores.shape[-1]):
        lowest = fw.full((*scores.shape[:-1], 1), -INFINITY, scores)
        scores = fw.xp.concat([scores, lowest], axis=-1)
    return fw.row_max(scores)
