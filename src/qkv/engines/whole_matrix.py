"""The equation of `dense` on a CPU, for calls whose scores fit one block.

It computes what `dense.run` computes, but leaves out the keys that no query sees, caches the pairs
of a mask, does not read arrays that the weights do not depend on, and returns only the requested
results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from qkv.engines import call as calls
from qkv.engines import dense, weights
from qkv.engines.call import Call
from qkv.engines.visible_keys import VisiblePairs, find_visible_pairs, narrow_call
from qkv.frameworks import tree
from qkv.frameworks.base import Framework
from qkv.frameworks.stored_rows import UnreadArray
from qkv.scores import (
    Additive,
    Constant,
    Cosine,
    Dot,
    Gated,
    Modified,
    Multiplicative,
    ScaledDot,
    Score,
)
from qkv.scores.functions import EvaluatedScore
from qkv.scores.user_score import UserScore
from qkv.scores.window import RankingWindow
from qkv.util.types import Array, Block, DropoutMask, LiveMask
from qkv.weightings import Average, Hard, Normalized, Weighting
from qkv.weightings.base import pool_by_weights

MIN_ROWS, MIN_VALUE_NUMBERS = 64, 2**18
"""Queries, or numbers of the values, from which products of 16 bits are faster than of float32.
They are faster for one query, too."""

PAIRWISE_SCORES = (Dot, ScaledDot, Cosine, Multiplicative, Additive, Gated)
"""The scores of one query and one key do not depend on other keys, as on their mean."""

Results = tuple[Array | None, Array | None, Array | None]


def build_whole_runner(call: Call, engine: ModuleType) -> Callable[[Call], Results] | None:
    """Return a function that runs calls with this signature as `engine` does, or None."""
    fw = call.fw
    if fw.name not in ("numpy", "torch") or engine not in (dense, weights):
        return None
    if fw.name == "torch" and not call.query.is_cpu:
        return None
    if fw.is_traced(call.query):  # also within functional transforms
        return None
    if call.at is not None or isinstance(call.key, UnreadArray):
        return None
    if isinstance(call.score, EvaluatedScore):
        return None
    run_engine: Callable[[Call], Results] = engine.run

    def run(call: Call) -> Results:
        pairs = find_visible_pairs(call)
        narrow = narrow_call(call, pairs)
        if engine is weights and not weights.fits_one_block(narrow):
            return run_engine(call)
        out, lse, alpha = run_whole(narrow, pairs)
        if alpha is not None and alpha.shape[-1] != call.m:
            alpha = _widen(call, alpha, pairs)
        return out, lse, alpha

    return run


def _widen(call: Call, alpha: Array, pairs: VisiblePairs) -> Array:
    """Return the weights of all keys, given those of the keys that some query sees."""
    fw, lead = call.fw, alpha.shape[:-1]
    before, after = (
        fw.full((*lead, size), 0.0, alpha) for size in (pairs.start, call.m - pairs.stop)
    )
    return fw.xp.concat([before, alpha, after], axis=-1)


def run_whole(call: Call, pairs: VisiblePairs) -> Results:
    """Return output, log-sum-exp and weights of a call without a rule, given its pairs."""
    if _ignores_vectors(call):
        return _run_constant(call, pairs)
    call = _upcast(call)
    live, block, value = pairs.live, calls.make_block(call), call.value
    if value is not None and live is not None and not pairs.is_total:
        value = calls.zero_masked_values(call, block, live)
    value = None if value is None else calls.repeat_shared_heads(call, value)
    if type(call.weighting) is Normalized and call.weighting.empty_row_weighting is not None:
        alpha = _normalize_rows(call, pairs, block)
        if alpha is not None:
            return _pool_weights(call, alpha, None, value, live, block)
    return _pool_scores(call, _compute_scores(call, pairs, block), value, live, block)


def _compute_scores(call: Call, pairs: VisiblePairs, block: Block) -> Array:
    """Return the scores, scaled if more than the output is requested."""
    if not (call.wants_lse or call.wants_weights):
        call = replace(call, weighting=Weighting())
    if pairs.live is None or pairs.is_total:
        return calls.compute_scores(call, call.query, call.key, call.bias, block)
    return _compute_masked_scores(call, block, pairs.live)


def _normalize_rows(call: Call, pairs: VisiblePairs, block: Block) -> Array | None:
    """Return the weights of `Normalized`, with those of the empty rows computed for these alone.

    None if many rows are empty. So few distances are computed to find the nearest keys.
    """
    fw, weighting, live = call.fw, call.weighting, pairs.live
    assert isinstance(weighting, Normalized)
    score = call.score.window if isinstance(call.score, RankingWindow) else call.score
    simple = replace(call, score=score, weighting=Normalized())
    alpha = Normalized().weights(_compute_scores(simple, pairs, block), pairs.live, block.k)
    # A row whose total is NaN counts as empty.
    is_empty = ~(fw.to_numpy(fw.row_sum(fw.detach(alpha))) > 0)[..., 0]
    rows = np.flatnonzero(is_empty.reshape(-1, call.n).any(axis=0))
    if not rows.size:
        return alpha
    if weighting.on_empty not in ("nearest", "uniform") or 2 * rows.size > call.n:
        return None
    if live is not None and live.shape[-2] != 1:
        live = live[..., rows, :]
    few = replace(call, query=fw.detach(call.query)[..., rows, :], bias=None)
    few_pairs = pairs._replace(live=live)
    scores = _compute_scores(few, few_pairs, calls.make_block(few))
    other = weighting.weights(fw.detach(scores), live, block.k)
    filled = fw.xp.zeros_like(fw.detach(alpha))
    filled[..., rows, :] = other * fw.array_from_host(
        is_empty[..., rows, None], alpha, fw.dtype_name(alpha)
    )
    return alpha + filled


def _compute_masked_scores(call: Call, block: Block, live: Array) -> Array:
    """Return the scores of a block, which NaN in a masked key or query does not reach."""
    fw, few = call.fw, 2 * block.rows.size <= call.key.shape[-1]
    if few and _is_pairwise(call.score) and not fw.needs_gradient(tree.array_leaves(fw, call)):
        scores = calls.compute_scores(call, call.query, call.key, call.bias, block)
        if not fw.needs_gradient([scores]):  # a function may capture an array with a gradient
            return fw.fill_unless(scores, live)
    return calls.compute_masked_scores(call, block, live)


def _is_pairwise(score: Score) -> bool:
    """Return whether each score depends on one query and one key only, also if others are NaN."""
    if isinstance(score, Modified):
        return _is_pairwise(score.score)
    return type(score) in PAIRWISE_SCORES or isinstance(score, UserScore)


def _pool_scores(
    call: Call, scores: Array, value: Array | None, live: LiveMask, block: Block
) -> Results:
    """Return the results from the scores, which are scaled if more than the output is requested."""
    fw, weighting = call.fw, call.weighting
    if not (call.wants_lse or call.wants_weights):
        if value is None or not _is_16bit(fw, value) or _takes_values(fw, weighting, scores, value):
            factors = calls.dropout_factors(call, block, scores)
            return weighting.pool_whole_rows(scores, live, block.k, value, factors), None, None
        scores = weighting.scale_scores(scores)
    lse = None
    if call.wants_lse:
        alpha, lse = weighting.weights_and_lse(scores, live, block.k)
    else:
        alpha = weighting.weights(scores, live, block.k)
    return _pool_weights(call, alpha, lse, value, live, block)


def _pool_weights(
    call: Call, alpha: Array, lse: Array | None, value: Array | None, live: LiveMask, block: Block
) -> Results:
    """Return the results from the weights before dropout."""
    factors = calls.dropout_factors(call, block, alpha)
    out = None if value is None else _pool_values(call, alpha, value, live, factors)
    if not call.wants_weights:
        return out, lse, None
    alpha = alpha if factors is None else alpha * factors
    return out, lse, call.fw.xp.mean(alpha, axis=-3) if call.wants_weights == "mean" else alpha


def _pool_values(
    call: Call, alpha: Array, value: Array, live: LiveMask, factors: DropoutMask
) -> Array:
    """Return the output for these weights. Values of 16 bits are multiplied as they are."""
    fw = call.fw
    if _is_16bit(fw, value):
        out = fw.multiply_16bit(alpha if factors is None else alpha * factors, value)
        if fw.is_surely_finite(out):
            return out
        value = fw.astype(value, fw.dtype_name(alpha))  # NaN may come from a masked value
    return call.weighting.pool_values(alpha, value, live, factors)


def _takes_values(fw: Framework, weighting: Weighting, scores: Array, value: Array) -> bool:
    """Return whether the weighting copies values instead of multiplying them."""
    if type(weighting) is not Hard or weighting.straight_through:
        return False
    return fw.has_fast_argmax and not fw.needs_gradient([scores, value])


def _upcast(call: Call) -> Call:
    """Return the call in the dtype of its sums, but keys and values that products read as they are.

    The products of 16-bit keys and values have float32 sums, too. The weights of a convex weighting
    are rounded to 16 bits for them, as in PyTorch's fused kernel.
    """
    fw = call.fw
    if not (_is_16bit(fw, call.query) and fw.multiplies_16bit(call.query)):
        return call.upcast()
    kept: dict[str, Any] = {}
    if type(call.score) in (Dot, ScaledDot) or (
        isinstance(call.score, Modified) and type(call.score.score) in (Dot, ScaledDot)
    ):
        kept["key"] = call.key
    if call.value is not None and _is_16bit(fw, call.value) and call.weighting.is_convex:
        numbers = math.prod(call.value.shape)
        if call.n == 1 or call.n >= MIN_ROWS or numbers >= MIN_VALUE_NUMBERS:
            kept["value"] = call.value
    empty = call.query[..., :0, :]
    return replace(replace(call, **dict.fromkeys(kept, empty)).upcast(), **kept)


def _is_16bit(fw: Framework, x: Array) -> bool:
    return fw.dtype_name(x) in ("float16", "bfloat16")


def _ignores_vectors(call: Call) -> bool:
    """Return whether neither query nor key decides the scores."""
    return call.weighting.ignores_scores or (type(call.score) is Constant and call.bias is None)


def _run_constant(call: Call, pairs: VisiblePairs) -> Results:
    """Return the results of a call whose scores are 1, without reading query and key."""
    fw, lead, live = call.fw, call.lead, pairs.live
    block = calls.make_block(call)
    dtype = call.summation_dtype
    value = call.value
    if type(call.weighting) is Average and not (call.dropout or call.wants_weights):
        assert value is not None
        return _average_values(call, value, pairs), None, None
    weighting = tree.map_arrays(fw, lambda x: fw.astype(x, dtype), call.weighting)
    call = replace(call, weighting=weighting)
    scores = fw.full((*lead, call.n, fw.static_shape(call.key)[-2]), 1.0, call.query)
    scores = fw.astype(scores, dtype)
    if call.wants_lse or call.wants_weights:
        scores = weighting.scale_scores(scores)
    if value is not None:
        value = calls.repeat_shared_heads(call, fw.astype(value, dtype))
        if live is not None and not pairs.is_total:
            value = calls.zero_masked_values(replace(call, value=value), block, live)
    return _pool_scores(call, scores, value, live, block)


def _average_values(call: Call, value: Array, pairs: VisiblePairs) -> Array:
    """Return the means of the values that the queries see."""
    fw, live, dtype = call.fw, pairs.live, call.summation_dtype
    m = fw.static_shape(call.key)[-2]
    ones = fw.full((1, m), 1.0, value) if live is None else fw.astype(live, fw.dtype_name(value))
    value = calls.repeat_shared_heads(call, value)
    count = fw.row_sum(fw.astype(ones, dtype))
    fast = _is_16bit(fw, value) and fw.multiplies_16bit(value)
    if not fast:
        ones, value = fw.astype(ones, dtype), fw.astype(value, dtype)
    if not pairs.is_total:
        value = calls.zero_masked_rows(call, value, live, is_value=True)
    if fast:
        out = fw.astype(fw.matmul(ones, value), dtype) / fw.safe_divisor(count)
    else:
        out = pool_by_weights(ones / fw.safe_divisor(count), value, live, None)
    if fast and not fw.is_surely_finite(out):
        value = fw.astype(value, dtype)
        ones = fw.astype(ones, dtype) / fw.safe_divisor(count)
        out = pool_by_weights(ones, value, live, None)
    sizes = (*call.lead, call.n, out.shape[-1])
    if fw.static_shape(out) != sizes:
        out = fw.xp.broadcast_to(out, sizes) + 0.0  # callers may write to it
    return out
