"""The weights of every row that is read, beside the output: α (n, m), its entropy, its log-sum-exp.

The keys are read once. One number for each query and row is held, which is its score first and its
weight in the end; what lies between is the weighting's own pass over blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.block_passes import BlockPasses, compute_output
from qkv.engines.call import Call
from qkv.engines.out_of_core.backward import choose_loops
from qkv.frameworks import get_framework
from qkv.frameworks.ragged import DenseAndSparse
from qkv.frameworks.stored_rows import RowReader, RowSpan, StoredRows, WeighedRows
from qkv.scores import Score, evaluate_block, has_user_code
from qkv.util.types import Array, Span
from qkv.weightings import State, TopK, Weighting
from qkv.weightings.base import pool_by_weights

MAX_CACHED_SCORES = 2**18
"""Scores of a block that its passes find in the cache."""

MAX_VALUE_ROWS_PER_READ = 2**18
"""Rows of values that a core takes at a time, however narrow."""

PooledSums = tuple[Any, ...]
"""Σᵢ αᵢ vᵢ (n, d_v), and of a mean Σᵢ αᵢ (n,) and the value that all rows with weight have."""


def weigh_rows(
    rows: StoredRows, query: np.ndarray, score: Score, weighting: Weighting, part: bool = False
) -> WeighedRows:
    """What is known of all rows; in float64 where float32 does not hold the scores: a bandwidth or
    a temperature may be as narrow as a number can be."""
    query = query if calls.has_numbers_in_range((score, weighting)) else query.astype(float)
    found = weigh_scores(rows, score_rows(rows, query, score), weighting, part)
    told = found.best_score if found.lse is None else found.best_score + found.lse
    if get_framework(told).is_surely_finite(told) or np.isfinite(told).all():
        return found
    if not (rows.shape[0] if rows.allowed is None else rows.allowed.any()):
        return found
    if query.dtype != np.float64:
        found = weigh_scores(rows, score_rows(rows, query.astype(float), score), weighting, part)
    if not part:
        calls.check_best_scores_finite(score, weighting, query, found.best_score)
    return found


def find_nearest(rows: StoredRows, query: Array, score: Score, k: int) -> tuple[Array, Array]:
    """The scores (n, k) of the k best rows for each query, the best first, and where they stand;
    −∞ where there are fewer. By the state of `TopK` alone: no value is read."""
    best = TopK(k)
    call = Call(get_framework(query).detach(query), rows.key, None, score, best).upcast()

    def find_best_in_span(some: Span, keys: Any) -> State:
        return BlockPasses(call, some, keys).fold(
            best.partial_best, best.merge_best, best.init_best
        )

    tiling = streaming.build_tiling(call, *streaming.block_size(call))
    most, at = choose_loops(call).map_tiles(find_best_in_span, tiling)
    return most, at


def weigh_scores(
    rows: StoredRows, scores: np.ndarray, weighting: Weighting, part: bool = False
) -> WeighedRows:
    """The output of scores (n, m) and all that is known of them; they are overwritten. Of a `part`
    they are kept as well: the weights among all rows are to be found from them."""
    scaled = None
    if part:
        scaled = np.array(weighting.scale_scores(scores))
        if rows.allowed is not None:
            scaled[:, ~rows.allowed] = -np.inf
    at = None if rows.allowed is None else np.flatnonzero(rows.allowed)
    seen = scores if at is None else np.take(scores, at, axis=1)
    best = np.maximum.reduce(seen, 1, initial=-np.inf)
    if at is None or not len(at):
        alpha, spread, lse = _compute_weights(
            weighting.scale_scores(scores), rows.allowed, weighting
        )
    else:
        some, spread, lse = _compute_weights(weighting.scale_scores(seen), None, weighting)
        alpha = scores
        for all_rows, found in zip(alpha, some, strict=True):
            all_rows.fill(0)
            all_rows[at] = found
    found = pool_values(rows, alpha, mean=weighting.is_convex)
    lse = None if lse is None else lse[:, 0]
    told = (finish_sums(found), alpha, spread, lse, best)
    return WeighedRows(*told, rows_read=rows.shape[0], partial_sums=found, scaled_scores=scaled)


def _compute_weights(
    s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting
) -> tuple[np.ndarray, np.ndarray | None, Array | None]:
    """The weights of scores, their entropy where it is found on the way, and the log-sum-exp if
    there is one."""
    if s.size <= MAX_CACHED_SCORES:
        live = None if allowed is None else allowed[None]
        alpha, lse = weighting.weights_and_lse(
            s, live, get_framework(s).position_range(0, s.shape[1], s)[None]
        )
        return alpha, None, lse
    part = ScorePasses(s, allowed, weighting)
    _, known, _ = compute_output(part, weighting)
    told = part.replace_scores_with_weights(known)  # the weights are in place of the scores
    return (
        s,
        entropy_from_sums(*told),
        weighting.lse_from_state(known) if weighting.has_lse else None,
    )


def score_rows(rows: StoredRows, query: np.ndarray, score: Score) -> np.ndarray:
    """s(q, kᵢ) for every live row, (n, m), on all cores."""
    (n, _), (m, width) = query.shape, rows.shape
    out = np.empty((n, m), query.dtype)
    # Nothing but a caller's own code asks where a row lies.
    call = Call(query, rows.key, None, score, Weighting()) if has_user_code(score) else None
    kind = kept = aside = None
    if type(score).key_terms is not Score.key_terms:
        kind = type(score), query.dtype
        kept = rows.key_terms_cache.get(kind)
        aside = np.full(m, np.nan, query.dtype) if kept is None else kept

    form = score.dot_product_form(query, query[:1]) if score.is_linear else None
    moved = None if form is None else form.query * form.scale

    def fill_scores(cut: RowSpan) -> None:
        block: Any = call and calls.make_block(call, None, cut)  # type: ignore[arg-type]
        wide, live = cut.chunk.key, cut.chunk.live
        if moved is not None and isinstance(wide, DenseAndSparse):
            some = wide if live is None else wide[live]
            out[:, cut.start : cut.start + cut.size] = some.inner_products(moved)
            return
        key, scale = cut.chunk.live_keys_and_scale() if score.is_linear else (cut.read_keys(), None)
        key, at = key.astype(query.dtype, copy=False), slice(cut.start, cut.start + cut.size)
        if aside is not None and kept is None:
            found = score.key_terms(key)
            aside[at] = np.nan if found is None else found
        if aside is None or np.isnan(aside[at]).any():
            out[:, at] = evaluate_block(score, query, key, block)
        else:
            out[:, at] = score.score_with_key_terms(query, key, aside[at])
        if scale is not None:
            out[:, at] *= scale

    wide = max(width, score.numbers_per_pair(width), n, 1)
    size = max(streaming.MAX_KEY_NUMBERS_PER_READ // wide, 512)
    cuts = rows.iter_spans(size, ahead=("key",))
    RowReader(get_framework(query)).reduce_spans(fill_scores, lambda one, two: None, None, cuts)
    if aside is not None:
        rows.key_terms_cache[kind] = aside
    return out


class ScorePasses:
    """Scaled scores (n, c) of some rows, the first of them at the position `origin`, in passes.

    Others may hold the rest: what `fold` and `state` give is merged with theirs.
    """

    def __init__(
        self, s: np.ndarray, allowed: np.ndarray | None, weighting: Weighting, origin: int = 0
    ):
        self.scores, self.allowed, self.weighting, self.origin = s, allowed, weighting, origin
        self.fw, (n, m) = get_framework(s), s.shape
        step = max(MAX_CACHED_SCORES // max(n, 1), 1)
        self.spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]
        self.template = self.fw.full((n, 1), 0.0, s)

    def _slice_block(self, span: Span) -> tuple[Array, Array | None, Array]:
        at = slice(span.start, span.start + span.size)
        live = None if self.allowed is None else self.allowed[None, at]
        return (
            self.scores[:, at],
            live,
            self.fw.position_range(self.origin + at.start, span.size, self.scores)[None],
        )

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        """What `Weighting.search` asks of the scores."""
        start = init(self.template)
        found: State = self.fw.reduce_spans(
            lambda x: lift(*self._slice_block(x)), merge, start, self.spans
        )
        return found

    def state(self, found: State, width: int = 0) -> State:
        """The weighting's state, with values of 0."""
        nothing = np.zeros((self.scores.shape[1], width), self.scores.dtype)

        def lift_span(span: Span) -> State:
            x, live, k = self._slice_block(span)
            return self.weighting.partial_state(
                x.copy(), live, k, found, nothing[: span.size], None
            )

        start = self.weighting.init(self.template, width)
        state: State = self.fw.reduce_spans(lift_span, self.weighting.merge, start, self.spans)
        return state

    def replace_scores_with_weights(self, known: State) -> np.ndarray:
        """Σ |α| and Σ |α| ln |α| of each row, (2, n); the weights take the scores' place."""

        def weigh_span(span: Span) -> tuple[np.ndarray, np.ndarray]:
            x, live, k = self._slice_block(span)
            x[:] = self.weighting.block_weights(x, live, k, known)
            return weight_sums(x, self.weighting.is_sparse)

        start = np.zeros((2, self.scores.shape[0]))
        return np.asarray(self.fw.reduce_spans(weigh_span, np.add, start, self.spans))


def get_entropy(found: WeighedRows) -> np.ndarray:
    """The entropy (n,) of what was weighed."""
    return compute_entropy(found.weights) if found.entropy is None else found.entropy


def compute_entropy(alpha: np.ndarray) -> np.ndarray:
    """−Σ α ln α (n,) of weights (n, m)."""
    fw, m = get_framework(alpha), alpha.shape[1]
    step = max(MAX_CACHED_SCORES // max(len(alpha), 1), 1)
    spans = [Span(at, min(step, m - at)) for at in range(0, m, step)]

    def sum_span(span: Span) -> np.ndarray:
        return np.asarray(weight_sums(alpha[:, span.start : span.start + span.size]))

    with fw.compute_context():
        return entropy_from_sums(
            *fw.reduce_spans(sum_span, np.add, np.zeros((2, len(alpha))), spans)
        )


def weight_sums(alpha: np.ndarray, sparse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Σ |α| and Σ |α| ln |α| of each row, (n,): sums, which blocks have as well as rows."""
    if sparse:
        alpha = alpha[:, alpha.any(axis=0)]
    size = np.abs(alpha)
    return np.add.reduce(size, 1), np.add.reduce(
        size * np.log(get_framework(size).safe_divisor(size)), 1
    )


def entropy_from_sums(total: np.ndarray, along: np.ndarray) -> np.ndarray:
    """−Σ p ln p of p = |α| / Σ |α|, 0 where no weight is or they are NaN."""
    some = get_framework(total).safe_divisor(total)
    return np.asarray(np.fmax(np.log(some) - along / some, 0))


def sums_from_entropy(total: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Σ |α| and Σ |α| ln |α|, (2, n), of an entropy: `entropy_from_sums` backwards."""
    return np.array([total, (np.log(get_framework(total).safe_divisor(total)) - entropy) * total])


class SparseWeights(NamedTuple):
    """Weights (n, k) of the rows at some places (k,), ascending: all others have none."""

    positions: np.ndarray
    weights: np.ndarray


def pool_values(rows: StoredRows, alpha: np.ndarray | SparseWeights, mean: bool) -> PooledSums:
    """Σᵢ αᵢ vᵢ (n, d_v), in the wider of the two precisions, and of a `mean` Σᵢ αᵢ and what all
    values have in common; `merge_sums` merges them. A row without weight is not read."""
    width, few = rows.value_width, alpha if isinstance(alpha, SparseWeights) else None
    alpha = alpha.weights if isinstance(alpha, SparseWeights) else alpha
    start = np.zeros((len(alpha), width), alpha.dtype)
    none = (start, np.zeros(len(alpha), alpha.dtype), None)[: 3 if mean else 1]
    if not start.size:
        return none

    def pool_cut(cut: RowSpan) -> PooledSums:
        if few is not None:
            begin, end = np.searchsorted(few.positions, (cut.start, cut.start + cut.size))
            value, some = cut.read_values(few.positions[begin:end] - cut.start), alpha[:, begin:end]
        else:
            some = alpha[:, cut.start : cut.start + cut.size]
            used = None
            if np.count_nonzero(some) * 8 < some.size:
                used = np.flatnonzero(some.any(axis=0))
            if used is not None and len(used) * 4 < cut.size:
                value, some = cut.read_values(used), some[:, used]
            else:
                value = cut.read_values()
        some = some.astype(np.result_type(some, value), copy=False)
        total = pool_by_weights(
            some, value, None, None, sparse=True
        )  # in which 0 times infinity is 0
        return (total, np.add.reduce(some, 1), _common_value(value, some)) if mean else (total,)

    size = max(min(streaming.MAX_KEY_NUMBERS_PER_READ // width, MAX_VALUE_ROWS_PER_READ), 512)
    cuts = rows.iter_spans(size, ahead=("value",) if few is None else ())
    found: PooledSums = RowReader(get_framework(alpha)).reduce_spans(
        pool_cut, merge_sums, none, cuts
    )
    return found


def merge_sums(one: PooledSums, two: PooledSums) -> PooledSums:
    added = [a + b for a, b in zip(one[:2], two[:2], strict=True)]
    return *added, *map(_merge_common, one[2:], two[2:])


def finish_sums(sums: PooledSums) -> np.ndarray:
    """The output of sums over all rows. A mean is divided by the sum of its weights, which rounding
    keeps from 1; that of equal values is theirs."""
    out, *more = sums
    if more and more[1] is not None:
        (mass, common), out = more, np.array(out)
        some = np.flatnonzero(mass > 0)
        out[some] = np.where(np.isnan(common), out[some] / mass[some, None], common)
    return np.asarray(out)


def _common_value(value: np.ndarray, weight: np.ndarray) -> np.ndarray | None:
    """What all rows with weight have in a column of values, NaN where they differ; None without
    such a row."""
    used = np.logical_or.reduce(weight != 0, 0) if len(weight) > 1 else weight[0] != 0
    if not used.any():
        return None
    first, last = value[used.argmax()], value[len(used) - 1 - used[::-1].argmax()]
    found = np.where(first == last, first, np.nan)
    near = np.flatnonzero(first == last)
    if len(near):
        differ = ((value[:, near] != found[near]) & used[:, None]).any(axis=0)
        found[near[differ]] = np.nan
    return found


def _merge_common(one: np.ndarray | None, two: np.ndarray | None) -> np.ndarray | None:
    if one is None or two is None:
        return two if one is None else one
    return np.where(one == two, one, np.nan)
