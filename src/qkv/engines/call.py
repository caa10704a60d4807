"""`Call`, the validated arguments of `attend`, and the steps that all engines share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from qkv import frameworks
from qkv.engines.dropout import hash_dropout_factors, seed_array
from qkv.errors import FLOAT64_HINT, ArgumentError, DtypeError, format_count
from qkv.frameworks.base import Framework
from qkv.frameworks.tree import array_leaves, field_names, format_record, map_arrays
from qkv.masks import Mask
from qkv.masks.base import CompoundMask, EvaluatedPairs
from qkv.scores import Constant, Gaussian, Score, evaluate_block, has_user_code
from qkv.util.types import Array, Block, LiveMask, Shape, ShardPosition, Span, lazy_property
from qkv.weightings import Weighting
from qkv.weightings.base import weighting_for_rows

RANGE_UNKNOWN = "the range of the arguments is unknown while they are traced"


class ThreeArrayRunner(NamedTuple):
    """An engine as a function of query, key and value, for calls without other arguments."""

    function: Callable[[Array, Array, Array], Any]

    def run(self, query: Array, key: Array, value: Array, *_: Any) -> Any:
        return self.function(query, key, value)


@dataclass(frozen=True)
class Call:
    """The validated arguments: query (*lead, n, d_q), key (…, m, d_k), value (…, m, d_v), options.

    - `lead` is the common leading shape. Its last axis is the heads; a key or value with fewer
      heads is shared.
    - `rule` decides which pairs of query and key count. `bias` is added to the scores. Both come
      from the argument `mask`.
    - `seed` None means that the framework's generator draws the dropout.
    - `wants_weights` is "heads", "mean" or None.
    - `at` is the position of a shard in the whole call; None: the call is not sharded.
    - `range_check` is the result of `Gaussian.error_in_range` for these values, in a call that a
      framework compiles: the error of the expanded square, or why it is not precise enough.
    """

    query: Array
    key: Array
    value: Array | None
    score: Score
    weighting: Weighting
    rule: Mask | None = None
    bias: Array | None = None
    dropout: float = 0.0
    seed: Array | None = None
    tolerance: float | None = None
    wants_lse: bool = False
    wants_weights: str | None = None
    at: ShardPosition | None = None
    range_check: str | float | None = None

    @classmethod
    def from_validated_fields(cls, fields: dict[str, Any]) -> Call:
        """Build a call from fields and lazy properties that are known to be valid.

        Plans build every later call with this method, because it takes only 2 µs. The generated
        constructor of a frozen dataclass uses `object.__setattr__` for each field and takes 8 µs.
        """
        call = object.__new__(cls)
        call.__dict__.update(fields)
        return call

    @lazy_property
    def fw(self) -> Framework:
        return frameworks.get_framework(self.query)

    @lazy_property
    def lead(self) -> Shape:
        return self.fw.static_shape(self.query)[:-2]

    @lazy_property
    def n(self) -> int:
        return self.fw.static_shape(self.query)[-2]

    @lazy_property
    def m(self) -> int:
        return self.fw.static_shape(self.key)[-2]

    @lazy_property
    def has_unknown_length(self) -> bool:
        """Whether a length is known only when a graph runs."""
        return any(self.fw.has_unknown_length(x) for x in (self.query, self.key))

    @lazy_property
    def lowering(self) -> tuple[Score, float] | str:
        """The score in dot product form and a bound on its error, or why there is no such form."""
        fw = self.fw
        if self.score.needs_range and fw.has_empty_axis((*self.lead, self.n, self.m)):
            return "an array is empty"
        if isinstance(self.range_check, str):
            return self.range_check
        if self.range_check is not None:
            assert isinstance(self.score, Gaussian)
            return self.score.expand(self.key), self.range_check
        # In a function that JAX compiles, detaching an array can give a traced one.
        arrays = (
            (self.query, self.key, *array_leaves(fw, self.score)) if self.score.needs_range else ()
        )
        if any(fw.is_traced(x) or fw.is_traced(fw.detach(x)) for x in arrays):
            return RANGE_UNKNOWN
        upcast = self.upcast() if self.score.needs_range else self
        dtype = self.fw.dtype_name(self.query)
        return upcast.score.find_lowering(upcast.query, upcast.key, self.tolerance, dtype)

    @lazy_property
    def summation_dtype(self) -> str:
        """The dtype of the sums: float32 for 16-bit arrays, and float64 for too large scores."""
        dtype = self.fw.dtype_name(self.query)
        if self.exceeds_float32:
            return "float64"
        return "float32" if dtype in ("float16", "bfloat16") else dtype

    def upcast(self) -> Call:
        """Return the call with 16-bit arrays cast to float32, so that sums run in float32.

        All arrays are cast to float64 if float32 cannot represent the scores.
        """
        fw = self.fw
        narrow = ("float16", "bfloat16", *(("float32",) if self.exceeds_float32 else ()))
        if fw.dtype_name(self.query) not in narrow:
            return self
        dtype = "float64" if self.exceeds_float32 else "float32"

        def upcast_array(x: Array) -> Array:
            return fw.astype(x, dtype) if fw.dtype_name(x) in narrow else x

        return map_arrays(fw, upcast_array, self)

    @lazy_property
    def exceeds_float32(self) -> bool:
        """Whether a bandwidth, a scale or a temperature may make scores overflow float32."""
        fw, parts = self.fw, (self.score, self.weighting)
        if fw.dtype_name(self.query) == "float64" or has_numbers_in_range(parts):
            return False
        if (doubles := fw.supports_float64(self.query)) or has_numbers_in_range(parts, 1e-18, 1e18):
            return doubles
        raise DtypeError(
            f"the scores of {format_record(self.score)} and {format_record(self.weighting)} may "
            f"overflow float32, but {FLOAT64_HINT}"
        )

    @lazy_property
    def may_exceed_float64(self) -> bool:
        """Whether a bandwidth or a temperature is so small that scores may overflow float64."""
        return not has_numbers_in_range((self.score, self.weighting), *FLOAT64_SAFE_RANGE)


FLOAT64_SAFE_RANGE = 1e-100, math.inf
"""If all numbers of a score and a weighting are in this range, scores fit float64."""


def has_numbers_in_range(record: Any, least: float = 1e-9, most: float = 1e9) -> bool:
    """Return whether each float x of a record is 0 or ±∞, or has `least` ≤ |x| ≤ `most`."""
    parts = [record]
    for x in parts:  # the body appends to `parts`
        if type(x) is float:
            size = abs(x)
            if not (least <= size <= most or size == 0 or size == math.inf):
                return False
        elif type(x) is tuple:
            parts += x
        elif x is not None:
            parts += [getattr(x, name) for name in field_names(x) or ()]
    return True


def make_block(call: Call, rows: Span | None = None, cols: Span | None = None) -> Block:
    """Return the Block of rows and columns, with its positions; None: the whole axis."""
    fw, lead, like = call.fw, call.lead, call.query
    rows = rows or Span(0, fw.axis_length(like, -2))
    cols = cols or Span(0, fw.axis_length(call.key, -2))
    row, col, n, m = call.at or (0, 0, fw.axis_length(like, -2), fw.axis_length(call.key, -2))
    rows = rows._replace(start=rows.start + row) if row else rows

    def make_positions(name: str) -> Array:
        if name == "q":
            return fw.position_range(rows.start, rows.size, like)[:, None]
        if name == "k":
            return fw.position_range(cols.start + col if col else cols.start, cols.size, like)[
                None, :
            ]
        # These lengths may be arrays that are known only when a graph runs.
        sizes = [fw.axis_length(like, axis) for axis in range(len(lead))]
        if name == "h":
            at = fw.position_range(0, sizes[-1] if lead else 1, like)
            return at[:, None, None] if lead else at[:, None]
        if len(lead) < 2:
            return fw.position_range(0, 1, like)[:, None]
        count = reduce(mul, sizes[:-1])
        return fw.xp.reshape(fw.position_range(0, count, like), (*sizes[:-1], 1, 1, 1))

    return Block(rows, cols, n, m, make_positions, len(lead))


def slice_weighting_rows(call: Call, rows: Span | None) -> Call:
    """Return the call with the weighting's arrays (…, n, 1) sliced to these rows; None: all."""
    if rows is None:
        return call
    weighting = weighting_for_rows(call.fw, call.weighting, rows, call.n)
    return call if weighting is call.weighting else replace(call, weighting=weighting)


def compute_live_pairs(call: Call, block: Block) -> Array | None:
    """Return a boolean mask of the live pairs, the pairs of the block that count; None: all count.

    A pair does not count if the mask excludes it, or if an overlapping block counts it.
    """
    out = None
    if call.rule is not None and not block.cols.is_unmasked:
        out = _compute_allowed_pairs(call, call.rule, block)
    for name, span in (("q", block.rows), ("k", block.cols)):
        if span.first_new is not None:
            fresh = getattr(block, name) >= span.first_new
            out = fresh if out is None else call.fw.xp.logical_and(out, fresh)
    return out


MAX_STATIC_PAIRS = 2**20
"""A compiled call has the mask of so many pairs as a constant."""


def _compute_allowed_pairs(call: Call, rule: Mask, block: Block) -> Array | None:
    """Return `rule.allowed_pairs(block)`; a rule on positions is a constant of a compiled call."""
    fw, rows, cols = call.fw, block.rows, block.cols
    is_split = call.at is not None or (rows.first_new, cols.first_new) != (None, None)
    if not fw.compiles_calls or is_split or not fw.is_traced(call.query):
        return rule.allowed_pairs(block)
    heads = call.lead[-1] if call.lead else 1
    numbers = (*rows[:2], *cols[:2], block.n, block.m, heads)
    if not all(type(x) is int for x in numbers) or block.n * block.m > MAX_STATIC_PAIRS:
        return rule.allowed_pairs(block)
    axes = {"q": (rows, (-1, 1)), "k": (cols, (1, -1)), "h": (Span(0, heads), (-1, 1, 1))}

    def make_positions(name: str) -> np.ndarray:
        span, shape = axes[name]
        return np.arange(span.start, span.start + span.size, dtype=np.int32).reshape(shape)

    host = Block(rows, cols, block.n, block.m, make_positions, block.lead_axes)

    def fold(rule: Mask) -> Mask:
        if rule.is_static and (allowed := rule.allowed_pairs(host)) is not None:
            return EvaluatedPairs(fw.array_from_host(allowed, call.query, "bool"))
        if isinstance(rule, CompoundMask):
            return type(rule)(*map(fold, rule.operand_masks))
        return rule

    if not rule.is_static:
        return fold(rule).allowed_pairs(block)
    block.static_pairs = allowed = rule.allowed_pairs(host)
    if allowed is None or allowed.all():
        return None
    return fw.array_from_host(allowed, call.query, "bool")


def compute_scores(
    call: Call,
    query: Array,
    key: Array,
    bias: Array | None,
    block: Block,
    key_terms: Array | None = None,
) -> Array:
    """Return the scores of a block, with the mask's bias and after `scale_scores`."""
    if call.weighting.ignores_scores:
        return Constant()(query, repeat_shared_heads(call, key))
    s = evaluate_block(call.score, query, repeat_shared_heads(call, key), block, key_terms)
    if bias is not None:
        is_finite = call.fw.is_surely_finite(bias)
        s = s + (bias if is_finite else call.fw.fill_unless(bias, bias != -float("inf")))
    return call.fw.prevent_fusion(call.weighting.scale_scores(s))


def compute_masked_scores(call: Call, block: Block, live: LiveMask) -> Array:
    """Return the scores of a block, which NaN in a masked key or query does not reach."""
    fw = call.fw
    if call.weighting.ignores_scores:
        live = None
    static = block.static_pairs
    query = zero_masked_queries(call, fw.slice_span(call.query, block.rows, -2), live, static)
    bias = None if call.bias is None else fw.slice_span(call.bias, block.rows, -2)
    if _fills_scores(call, block, live):
        return fw.fill_unless(compute_scores(call, query, call.key, bias, block), live)
    if _checks_scores(call, block, live):
        scores = compute_scores(call, query, call.key, bias, block)
        if fw.is_surely_finite(scores):
            return scores

    def compute_safely(query: Array, key: Array) -> Array:
        key = zero_masked_rows(call, key, live, static_pairs=static)
        return compute_scores(call, query, key, bias, block)

    if not _checks_scores_in_graph(call, block, live):
        return compute_safely(query, call.key)
    # A key that is not finite makes its scores nonfinite.
    scores = compute_scores(call, query, call.key, bias, block)
    is_finite = fw.xp.all(fw.xp.isfinite(scores))
    out: Array = fw.cond(
        is_finite,
        lambda scores, *_: scores,
        lambda _, query, key: compute_safely(query, key),
        *(scores, query, call.key),
    )
    return out


def zero_masked_values(call: Call, block: Block, live: LiveMask) -> Array:
    """Return the values of a block, masked ones as 0 if `Weighting.pool_values` needs that."""
    pools_by_weights = type(call.weighting).pool_values is Weighting.pool_values
    is_short = live is not None and (call.fw.checks_values(call.value) or call.fw.checks_in_graph())
    is_short = is_short and not call.has_unknown_length
    is_short = is_short and block.rows.size <= call.m
    if pools_by_weights and (is_short or _fills_scores(call, block, live)):
        return call.value  # `pool_by_weights` checks the output
    return zero_masked_rows(call, call.value, live, True, block.static_pairs)


def _fills_scores(call: Call, block: Block, live: LiveMask) -> bool:
    """Return whether masked scores are cheaper to fill than masked keys are to find.

    Each score must depend on one key only, and no gradient may pass through it.
    """
    if live is None or call.fw.has_gradients or not call.score.is_linear:
        return False
    return bool(2 * block.rows.size <= call.key.shape[-1])


def _checks_scores(call: Call, block: Block, live: LiveMask) -> bool:
    """Return whether scores are fewer than the numbers of the keys, and show if a key is finite."""
    if live is None or not call.score.is_linear or not call.fw.checks_values(call.query):
        return False
    return bool(block.rows.size < call.key.shape[-1])


def _checks_scores_in_graph(call: Call, block: Block, live: LiveMask) -> bool:
    """Return whether a compiled graph checks the scores, and zeroes keys only if it must."""
    if live is None or not call.fw.checks_in_graph() or call.has_unknown_length:
        return False
    if not call.score.is_linear or array_leaves(call.fw, call.weighting):
        return False
    return bool(2 * block.rows.size <= call.fw.static_shape(call.key)[-1])


def check_scores_finite(call: Call, s: Array, visible: LiveMask) -> None:
    """Raise ArgumentError if scores (…, r, m) of a query overflow float64.

    Without the error, the query would get 0, like a query that may attend to no key. Traced scores
    are not checked.
    """
    fw = call.fw
    if fw.is_traced(s) or 0 in fw.static_shape(s):
        return
    query, key, scores = (fw.to_numpy(fw.detach(x)) for x in (call.query, call.key, s))
    is_visible = np.broadcast_to(True if visible is None else fw.to_numpy(visible), scores.shape)
    top = np.where(is_visible, scores, -np.inf).max(axis=-1)
    overflows = np.isnan(top) | (np.isinf(top) & is_visible.any(axis=-1) & call.weighting.is_convex)
    if overflows.any() and np.isfinite(query).all() and np.isfinite(key).all():
        raise overflow_error(call.score, call.weighting, int(overflows.sum()))


def overflow_error(score: Score, weighting: Weighting, queries: int) -> ArgumentError:
    """Return the error for scores that overflow float64."""
    return ArgumentError(
        f"the scores of {format_record(score)} and {format_record(weighting)} overflow float64 "
        f"in {format_count(queries)} of the queries: use a larger bandwidth or temperature. Even a "
        "much larger one gives the best key all the weight"
    )


def check_best_scores_finite(
    score: Score, weighting: Weighting, query: np.ndarray, best: np.ndarray
) -> None:
    """Raise ArgumentError if the best score of a query, in `best` (n,), overflows float64."""
    if (
        has_numbers_in_range((score, weighting), *FLOAT64_SAFE_RANGE)
        or not weighting.is_convex
        or not np.isfinite(query).all()
    ):
        return
    if overflows := int((~np.isfinite(weighting.scale_scores(best))).sum()):
        raise overflow_error(score, weighting, overflows)


def zero_masked_rows(
    call: Call,
    rows: Array,
    visible: LiveMask,
    is_value: bool = False,
    static_pairs: np.ndarray | None = None,
) -> Array:
    """Keep NaN in a masked key or value out of the output: return masked rows (…, c, d) as 0.

    A row is masked if no query of the block may attend to it. Its weight is 0, but 0 · NaN is NaN.
    `visible` (…, r, c) is True for the pairs that count; None: all count. Where gradients
    exist, a function of the caller receives masked keys as 0 even if they are finite.
    `static_pairs` is that of the block.
    """
    fw = call.fw
    if visible is None or (static_pairs is not None and static_pairs.any(axis=-2).all()):
        return rows
    is_checked = is_value or not fw.has_gradients or not has_user_code(call.score)
    if is_checked and fw.is_surely_finite(rows):
        return rows

    def fill_rows(rows: Array) -> Array:
        is_visible = fw.xp.any(visible, axis=-2)[..., None]  # (…, c, 1)
        lead = fw.static_shape(rows)[:-2]
        if len(is_visible.shape) > 2 and (lead != call.lead or lead[-1] is None):
            is_visible = fw.astype(is_visible, fw.dtype_name(rows))
            sizes = (*fw.dynamic_shape(call.query)[:-2], *fw.dynamic_shape(is_visible)[-2:])
            is_visible = fw.xp.broadcast_to(is_visible, sizes)
            is_visible = sum_shared_heads(call, is_visible, fw.dynamic_shape(rows)[:-2]) > 0
        return fw.fill_unless(rows, is_visible)

    return fw.zero_rows_if_nonfinite(rows, fill_rows) if is_checked else fill_rows(rows)


def zero_masked_queries(
    call: Call, query: Array, visible: LiveMask, static_pairs: np.ndarray | None = None
) -> Array:
    """Keep NaN in a masked query out of the gradients: return masked queries (…, r, d) as 0.

    A query is masked if it may attend to no key of the block. `visible` and `static_pairs` are
    those of `zero_masked_rows`.
    """
    if visible is None or (static_pairs is not None and static_pairs.any(axis=-1).all()):
        return query
    is_checked = not call.fw.has_gradients or not has_user_code(call.score)
    if is_checked and call.fw.is_surely_finite(query):
        return query
    return call.fw.fill_unless(query, call.fw.xp.any(visible, axis=-1)[..., None])


def repeat_shared_heads(call: Call, x: Array) -> Array:
    """Return a key or value with as many heads as the query, by repeating shared heads."""
    shape = call.fw.static_shape(x)
    has_all_heads = shape[-3:-2] == call.lead[-1:] and None not in call.lead[-1:]
    if len(shape) < 3 or not call.lead or shape[-3] == 1 or has_all_heads:
        return x
    return call.fw.repeat_heads(x, call.fw.axis_length(call.query, -3))


def sum_shared_heads(call: Call, x: Array, lead: Shape) -> Array:
    """Return x (*call.lead, ·, ·) summed to (*lead, ·, ·), as in the gradient of shared heads."""
    xp = call.fw.xp
    while len(x.shape) - 2 > len(lead):
        x = xp.sum(x, axis=0)
    for axis, size in enumerate(lead):
        have = x.shape[axis]
        unknown = have is None or frameworks.is_array(size)
        if axis < len(lead) - 1 if unknown else have == size:
            continue
        if not unknown and size == 1:
            x = xp.sum(x, axis=axis, keepdims=True)
        else:
            sizes = call.fw.dynamic_shape(x)
            x = xp.reshape(x, (*sizes[:axis], size, sizes[axis] // size, *sizes[axis + 1 :]))
            x = xp.sum(x, axis=axis + 1)
    return x


def dropout_factors(call: Call, block: Block, like: Array | None = None) -> Array | None:
    """Return the dropout factor of each weight of the block, 0 or 1 / (1 − p); None: no dropout.

    The seed and the positions in the block determine the factors. Without a seed, every call of
    this function draws new factors of the shape of `like`: the engine must visit a block only once.
    """
    if not call.dropout:
        return None
    if call.seed is None:
        return call.fw.draw_dropout_factors(like, call.dropout)
    return hash_dropout_factors(call.query, call.dropout, call.seed, block)


def ensure_seed(call: Call) -> Call:
    """Return the call with a seed, for an engine that computes a block more than once."""
    if not call.dropout or call.seed is not None:
        return call
    return replace(call, seed=seed_array(call.fw, None, call.query))


def pack_results(call: Call, results: tuple[Array | None, Array | None, Array | None]) -> Any:
    """Return what `attend` returns, from an engine's output, log-sum-exp and weights.

    The log-sum-exp is at least float32, because 16 bits are too inaccurate to merge results.
    """
    fw, dtype = call.fw, call.fw.dtype_name(call.query)
    out, lse, alpha = results
    if lse is None and alpha is None:
        return fw.astype(out, dtype)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    requested = (
        None if out is None else fw.astype(out, dtype),
        fw.astype(lse[..., 0], lse_dtype) if call.wants_lse and lse is not None else None,
        fw.astype(alpha, dtype) if call.wants_weights and alpha is not None else None,
    )
    packed = tuple(x for x in requested if x is not None)
    return packed[0] if len(packed) == 1 else packed
