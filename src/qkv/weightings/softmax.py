"""Weights that are exponentials of scores: softmax and top-k softmax."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, ClassVar, Never

from qkv.errors import ArgumentError, ShapeError, validate_positive
from qkv.frameworks import divide_unless_one, get_framework
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.types import Array, DropoutMask, LiveMask, Shape
from qkv.weightings.base import (
    INFINITY,
    NO_POSITION,
    FoldFunction,
    State,
    Weighting,
    live_row_max,
    pool_by_weights,
)
from qkv.weightings.sink import SinkWeighting, validate_sink


def shifted_exponentials(scores: Array, live: LiveMask, top: Array, spend: bool = False) -> Array:
    """Return exp(s − top), and 0 for masked keys. With `spend`, the scores may be overwritten."""
    fw = get_framework(scores)
    return fw.exp_shifted(scores, fw.replace_nonfinite(top), live, spend)


def log_of_total(top: Array, total: Array) -> Array:
    """Return top + log(total), and −∞ where the total is 0."""
    fw = get_framework(total)
    return fw.fill_unless(
        fw.replace_nonfinite(top) + fw.xp.log(fw.safe_divisor(total)), total != 0, -INFINITY
    )


class ExponentialWeighting(Weighting):
    """Base of softmax and its truncations: α = exp(s − top) / total.

    The state holds `top` and `total` of the row separately. For scores near 1e8 their log-sum-exp
    would lose the total to rounding.
    """

    is_convex: ClassVar[bool] = True
    has_lse: ClassVar[bool] = True
    needs_centre = True

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: State
    ) -> Array:
        return weight * (weight_gradient - centre)

    def lse_from_state(self, row_facts: State) -> Array:
        return log_of_total(row_facts[0], row_facts[1])


@suggest_keywords
@dataclass(frozen=True)
class Softmax(ExponentialWeighting):
    """αᵢ = exp(sᵢ/T) / Σⱼ exp(sⱼ/T), with T = temperature

    `sink` is the score of one more key that has no value: αᵢ = exp(sᵢ/T) / (exp(sink/T) + Σⱼ
    exp(sⱼ/T)). The weights then sum to less than 1, and a query that matches no key gets a small
    output. sink = 0 is "softmax off by one". The sink may be learned: an array of one number, of
    one for each head (h,), or of any shape that broadcasts to one for each row (…, n, 1). The
    log-sum-exp includes the sink. A query that may attend to no key gets 0.

    >>> import numpy as np
    >>> Softmax()(np.log([[1.0, 2.0, 1.0]])).round(3)
    array([[0.25, 0.5 , 0.25]])
    >>> Softmax(sink=0.0)(np.log([[1.0, 2.0, 1.0]])).round(3)
    array([[0.2, 0.4, 0.2]])
    """

    temperature: float | Array = 1.0
    sink: float | Array | None = field(default=None, repr=False)

    def __new__(cls, temperature: Any = 1.0, sink: Any = None, **others: Never) -> Softmax:
        has_sink = cls is Softmax and sink is not None
        return super().__new__(SinkSoftmax if has_sink else cls)

    def __post_init__(self) -> None:
        validate_positive(self, "temperature")
        validate_sink(self)

    def check_shapes(self, lead: Shape, n: int) -> None:
        if isinstance(self.temperature, int | float):  # or a symbolic float of torch.compile
            return
        shape: Shape = tuple(getattr(self.temperature, "shape", ()))
        expected = (*lead, n, 1)
        pairs = zip(shape[-2::-1], expected[-2::-1], strict=False)
        differ = any(x not in (1, y) for x, y in pairs if y not in (1, None))
        if differ or shape[-1:] not in ((), (1,)):
            raise ShapeError(
                "Softmax: temperature must be one number, or broadcast to one for each row "
                f"{expected}, not an array of shape {shape}"
            )

    def scale_scores(self, scores: Array) -> Array:
        return divide_unless_one(scores, self.temperature)

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        fw = get_framework(scores)
        fused = fw.fused_softmax(scores, live)
        if fused is not None:
            return fused
        e = shifted_exponentials(scores, live, live_row_max(scores, live))
        return e / fw.safe_divisor(fw.row_sum(e))

    def compute_lse(self, scores: Array, live: LiveMask, k: Array) -> Array:
        top = live_row_max(scores, live)
        return log_of_total(
            top, get_framework(scores).row_sum(shifted_exponentials(scores, live, top))
        )

    def weights_and_lse(
        self, scores: Array, live: LiveMask, k: Array
    ) -> tuple[Array, Array | None]:
        is_softmax = (
            type(self).weights is Softmax.weights and type(self).compute_lse is Softmax.compute_lse
        )
        if not is_softmax:  # a subclass overrides the formula
            return super().weights_and_lse(scores, live, k)
        fw = get_framework(scores)
        fused = fw.fused_softmax_and_lse(scores, live)
        if fused is not None:
            return fused
        top = fw.replace_nonfinite(live_row_max(scores, live))
        e = fw.exp_shifted(scores, top, live)
        total = fw.row_sum(e)
        some = fw.safe_divisor(total)
        lse = top + fw.xp.log(some)
        return e / some, lse if some is total else fw.fill_unless(lse, total != 0, -INFINITY)

    def divisor_without(self, remaining: Array) -> Array:
        return remaining

    def init(self, rows: Array, width: int) -> State:
        fw = get_framework(rows)
        top = fw.full(rows.shape, -INFINITY, rows)
        return top, fw.full(rows.shape, 0.0, rows), *super().init(rows, width)

    def partial_state(
        self,
        scores: Array,
        live: LiveMask,
        k: Array,
        row_facts: State,
        value: Array,
        dropout_mask: DropoutMask,
    ) -> State:
        top = live_row_max(scores, live)
        e = shifted_exponentials(scores, live, top, spend=True)
        return top, get_framework(e).row_sum(e), pool_by_weights(e, value, live, dropout_mask)

    def merge(self, one: State, two: State) -> State:
        fw = get_framework(one[0])
        top = fw.xp.maximum(one[0], two[0])
        a, b = (fw.xp.exp(x[0] - fw.replace_nonfinite(top)) for x in (one, two))
        return top, one[1] * a + two[1] * b, one[2] * a + two[2] * b

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        top, total, pooled = state
        out = pooled / get_framework(total).safe_divisor(total)
        return out, (top, total), out

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        return shifted_exponentials(scores, live, row_facts[0]) / get_framework(
            scores
        ).safe_divisor(row_facts[1])


@dataclass(frozen=True)
class SinkSoftmax(SinkWeighting, Softmax):
    """`Softmax` with a sink."""

    is_convex: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"Softmax(temperature={self.temperature!r}, sink={self.sink!r})"

    def without_sink(self, scores: Array) -> Weighting:
        return Softmax(self.temperature)


SinkSoftmax.__name__ = Softmax.__name__  # messages name the class that the user created


@suggest_keywords
@dataclass(frozen=True)
class TopK(ExponentialWeighting):
    """Softmax over the k largest scores of each row, 0 elsewhere. The first of equal scores wins.

    >>> import numpy as np
    >>> TopK(2)(np.log([[1.0, 5.0, 3.0, 1.0]])).round(3)
    array([[0.   , 0.625, 0.375, 0.   ]])
    """

    aliases: ClassVar[tuple[str, ...]] = ("top_k", "knn")

    k: int
    is_sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, Integral) or self.k < 1:
            raise ArgumentError(f"TopK: k must be an integer of at least 1, not {self.k!r}")

    @property
    def max_support(self) -> int:
        return self.k

    def limit_to_keys(self, count: int) -> TopK:
        return self if self.k <= count else replace(self, k=max(count, 1))

    def weights(self, scores: Array, live: LiveMask, k: Array) -> Array:
        return Softmax().weights(scores, self.top_mask(scores, live, k), k)

    def compute_lse(self, scores: Array, live: LiveMask, k: Array) -> Array:
        return Softmax().compute_lse(scores, self.top_mask(scores, live, k), k)

    def weights_and_lse(
        self, scores: Array, live: LiveMask, k: Array
    ) -> tuple[Array, Array | None]:
        if (type(self).weights, type(self).compute_lse) != (TopK.weights, TopK.compute_lse):
            return super().weights_and_lse(scores, live, k)  # a subclass overrides the formula
        return Softmax().weights_and_lse(scores, self.top_mask(scores, live, k), k)

    def simplify_for_keys(self, count: int) -> Weighting:
        return Softmax() if type(self) is TopK and self.k >= count else self

    def top_mask(self, scores: Array, live: LiveMask, k: Array) -> LiveMask:
        """Return booleans (…, n, m), True for the k best pairs of each row; None: for all."""
        fw, limited = get_framework(scores), self
        if type(scores.shape[-1]) is int and self.k >= scores.shape[-1]:
            return live
        if not fw.has_unknown_length(scores) and (fw.needs_equal_spans or not fw.is_traced(scores)):
            limited = self.limit_to_keys(scores.shape[-1])
        chosen = fw.untied_top_mask(fw.detach(fw.fill_unless(scores, live, -INFINITY)), limited.k)
        if chosen is not None:
            return chosen if live is None else fw.xp.logical_and(chosen, live)
        row_facts = limited.find_threshold(
            lambda lift, merge, init: lift(fw.detach(scores), live, k)
        )
        return limited.chosen_mask(scores, live, k, row_facts)

    def find_threshold(self, fold: FoldFunction) -> State:
        """Return the largest score, the sum of exponentials, the k-th score and its position."""
        best, at = fold(self.partial_best, self.merge_best, self.init_best)
        top = live_row_max(best, None)
        total = get_framework(top).row_sum(shifted_exponentials(best, None, top))
        return top, total, best[..., -1:], at[..., -1:]

    def init_best(self, rows: Array) -> State:
        fw = get_framework(rows)
        shape = (*rows.shape[:-1], self.k)
        at = fw.astype(fw.full(shape, 0.0, rows), "int32") + NO_POSITION
        return fw.full(shape, -INFINITY, rows), at

    def partial_best(self, scores: Array, live: LiveMask, k: Array) -> State:
        fw = get_framework(scores)
        scores = fw.fill_unless(scores, live, -INFINITY)
        at = fw.xp.broadcast_to(k, fw.dynamic_shape(scores))
        # A block may have fewer than k keys, or none.
        return self.select_best(*self.concat_states((scores, at), self.init_best(scores[..., :1])))

    def concat_states(self, one: State, two: State) -> State:
        xp = get_framework(one[0]).xp
        return tuple(xp.concat(list(pair), axis=-1) for pair in zip(one, two, strict=True))

    def select_best(self, scores: Array, at: Array) -> State:
        fw = get_framework(scores)
        scores, order = fw.stable_topk(scores, self.k)
        return scores, fw.take_along_last(at, order)

    def merge_best(self, one: State, two: State) -> State:
        fw = get_framework(one[0])
        scores, at = self.concat_states(one, two)
        # Sorted by position first: the sort by score is stable, so the first of equal scores wins.
        order = fw.xp.argsort(at, axis=-1, stable=True)
        scores, at = (fw.take_along_last(x, order) for x in (scores, at))
        return self.select_best(scores, at)

    def chosen_mask(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        xp = get_framework(scores).xp
        _, _, least, at = row_facts
        # The position identifies the k-th key even if a compiler rounds its score differently.
        last = xp.logical_or(xp.logical_and(scores == least, k <= at), k == at)
        chosen = xp.logical_or(xp.logical_or(scores > least, last), xp.isnan(least + scores))
        return chosen if live is None else xp.logical_and(chosen, live)

    def block_weights(self, scores: Array, live: LiveMask, k: Array, row_facts: State) -> Array:
        e = shifted_exponentials(scores, self.chosen_mask(scores, live, k, row_facts), row_facts[0])
        return e / get_framework(e).safe_divisor(row_facts[1])

    def finish(self, state: State, row_facts: State) -> tuple[Array, State, Array | None]:
        return state[0], row_facts, state[0]
