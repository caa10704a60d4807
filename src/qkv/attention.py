"""Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ: `attend`, `weights`, `explain` and `warm`.

`attend_rows` and `weigh_rows` read stored rows; `attend_sharded` has its keys in several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np

from qkv import masks, scores
from qkv.engines import linear, native, plan_cache, sharded, streaming, user_code
from qkv.engines.call import (
    Call,
    check_best_scores_finite,
    pack_results,
)
from qkv.engines.choice import EngineChoice, EngineName, Explanation, WarmupReport, choose_engine
from qkv.engines.dropout import draw_seed
from qkv.engines.native import ProjectedAttention
from qkv.engines.out_of_core import candidates, certified, forward
from qkv.engines.out_of_core.key_terms import adapt_score
from qkv.engines.validation import build_call, require_one_framework, resolve_score_and_weighting
from qkv.errors import (
    CombinationError,
    DtypeError,
    FrameworkError,
    ShapeError,
    validate_keywords,
)
from qkv.frameworks import find_framework, get_framework, load_framework, to_numpy, tree
from qkv.frameworks.base import Framework
from qkv.frameworks.stored_rows import (
    Candidates,
    StoredRows,
    WeighedRows,
    to_framework_array,
)
from qkv.masks import MaskLike
from qkv.scores import Score, ScoreLike
from qkv.util.caches import insert_bounded
from qkv.util.keyword_hints import FOREIGN_KEYWORDS, forbid_torchscript
from qkv.util.types import A, Array, NestedLists, ShardPosition, Span
from qkv.weightings import Weighting, WeightingLike


class FormulaOptions(TypedDict, total=False):
    """The keyword arguments of `attend` that define the result."""

    score: ScoreLike
    weighting: WeightingLike
    mask: MaskLike | None
    dropout_p: float
    seed: Any
    tolerance: float | None


class AttendOptions(FormulaOptions, total=False):
    """The arguments of `FormulaOptions`, and the engine, which does not change the result."""

    engine: EngineName | None


class ReturnOptions(AttendOptions, total=False):
    """The arguments of `AttendOptions`, and the arguments that request more results."""

    return_lse: bool
    return_weights: bool | Literal["mean"]


@overload
def attend(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
    **options: Unpack[AttendOptions],
) -> A: ...
@overload
def attend(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    *,
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
    **options: Unpack[AttendOptions],
) -> tuple[A, A]: ...
@overload
def attend(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[True, "mean"],
    **options: Unpack[AttendOptions],
) -> tuple[A, A]: ...
@overload
def attend(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    *,
    return_lse: Literal[True],
    return_weights: Literal[True, "mean"],
    **options: Unpack[AttendOptions],
) -> tuple[A, A, A]: ...
@overload
def attend(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    **options: Unpack[ReturnOptions],
) -> A | tuple[A, ...]: ...
@forbid_torchscript
def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: ScoreLike = "scaled_dot",
    weighting: WeightingLike = "softmax",
    mask: MaskLike | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
    return_weights: bool | Literal["mean"] = False,
    tolerance: float | None = None,
    engine: EngineName | None = None,
    **others: Never,
) -> Any:
    """Return Σᵢ α(q, kᵢ) vᵢ for every query q: values, weighted by how well their keys match.

    Shapes: query (…, n, d_q), key (…, m, d_k), value (…, m, d_v) → (…, n, d_v). The result has the
    query's framework and dtype; under PyTorch's autocast it has the autocast dtype. Leading axes
    broadcast. Axis −3 is the heads; several query heads can share one head of key and value. The
    output is 0 for a query that may attend to no key. Nested torch tensors give a nested tensor:
    the queries of a sequence attend to its keys.

    - `score` compares a query and a key: a name or an object of `qkv.scores`, or a function
      (query, key) → (…, n, m). A function receives 16-bit arrays as float32.
    - `weighting` turns scores into weights: a name or an object of `qkv.weightings`.
    - `mask` excludes keys: a mask of `qkv.masks`, a boolean array (True: may attend), or a float
      array (added to the scores).
    - `dropout_p` is the probability of dropping a weight. The same `seed` (a number or a
      generator) drops the same weights on every engine.
    - `tolerance` allows an engine to be faster with scores that are wrong by at most this much.
    - `engine` selects an engine by name. `explain` shows which one would run.

    `return_lse` adds log Σ exp(score) (…, n) to the results. `return_weights` adds α (…, n, m);
    "mean" adds the mean of α over the heads and needs less memory.

    >>> import numpy as np
    >>> keys = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> values = np.array([[10.0], [20.0]])
    >>> attend(np.array([[9.0, 0.0]]), keys, values, weighting="hard")
    array([[10.]])
    >>> attend(np.array([[0.0, 0.0]]), keys, values)
    array([[15.]])
    """
    if others:
        validate_keywords(
            "attend()", others, ReturnOptions.__optional_keys__, elsewhere=FOREIGN_KEYWORDS
        )
    if dropout_p and seed is not None:
        seed = draw_seed(seed, query)
    flags: plan_cache.Signature = (dropout_p, seed is None, tolerance, engine)
    if not return_lse is return_weights is False:
        flags = _extend_flags(flags, return_lse, return_weights)
    signature, plan = plan_cache.find_plan(query, key, value, score, weighting, mask, flags)
    if plan is not None:
        if plan.run_arrays is not None:
            results = plan.run_arrays(query, key, value)
        else:
            results = plan.run(query, key, value, score, weighting, mask, seed)
        if results is not None:
            return results
    if getattr(query, "is_nested", False):
        options: Any = {"score": score, "weighting": weighting, "mask": mask, "engine": engine}
        options |= {"dropout_p": dropout_p, "seed": seed, "tolerance": tolerance}
        return _attend_nested(query, key, value, bool(return_lse or return_weights), options)
    if signature is None and (quiet := _leave_autocast(query, key, value)) is not None:
        # Cast as autocast does: no plan is cached for calls under autocast.
        cast = get_framework(query).apply_autocast
        query, key, value = map(cast, (query, key, value))
        score, weighting = tree.map_arrays(get_framework(query), cast, (score, weighting))
        formula: Any = {"score": score, "weighting": weighting, "mask": mask}
        formula |= {"dropout_p": dropout_p, "seed": seed, "tolerance": tolerance}
        returned: Any = {"return_lse": return_lse, "return_weights": return_weights}
        with quiet:
            return attend(query, key, value, **formula, **returned, engine=engine)
    call = build_call(
        query,
        key,
        _require_value(value),
        score,
        weighting,
        mask,
        dropout_p,
        seed,
        tolerance,
        lse=return_lse,
        weights=return_weights,
    )
    if signature is None and engine in (None, "triton"):
        evaluated = user_code.evaluate_functions(call)
        if evaluated is not None:
            formula = {"score": evaluated.score, "weighting": weighting, "mask": evaluated.rule}
            formula |= {"dropout_p": dropout_p, "seed": seed, "tolerance": tolerance}
            returned = {"return_lse": return_lse, "return_weights": return_weights}
            if evaluated.rows is not None:
                query, key = evaluated.rows
            return attend(query, key, value, **formula, **returned, engine=engine)
        if spans := user_code.split_queries(call):
            options = {"score": score, "weighting": weighting, "tolerance": tolerance}
            options |= {"return_lse": return_lse, "engine": engine}
            parts = [
                attend(call.fw.slice_span(call.query, x, -2), key, value, **options) for x in spans
            ]
            return _join_queries(call, parts)
    if signature is not None:
        call = user_code.simplify_score(call)
    arguments = (query, key, value, score, weighting, mask, seed)
    with call.fw.plan_quietly():
        choice = choose_engine(call, engine)
    return plan_cache.run_first_call(call, choice, None if plan else signature, arguments)


@forbid_torchscript
def weights(
    query: A | NestedLists,
    key: A | NestedLists,
    *,
    score: ScoreLike = "scaled_dot",
    weighting: WeightingLike = "softmax",
    mask: MaskLike | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    **others: Never,
) -> A:
    """Return α(q, k) for every query and key, (…, n, m): the weights that `attend` uses.

    >>> import numpy as np
    >>> weights(np.array([[0.0]]), np.array([[0.0], [3.0]]), score="gaussian").round(3)
    array([[0.989, 0.011]])
    """
    if others:
        validate_keywords(
            "weights()", others, weights.__kwdefaults__ or {}, elsewhere=FOREIGN_KEYWORDS
        )
    if dropout_p and seed is not None:
        seed = draw_seed(seed, query)
    flags = (dropout_p, seed is None)
    signature, plan = plan_cache.find_plan(query, key, None, score, weighting, mask, flags)
    arguments = (query, key, None, score, weighting, mask, seed)
    alpha: A | None = None if plan is None else plan.run(*arguments)
    if alpha is not None:
        return alpha
    call = build_call(query, key, None, score, weighting, mask, dropout_p, seed, weights=True)
    if signature is None:
        evaluated = user_code.evaluate_functions(call)
        if evaluated is not None:
            options: Any = {"score": evaluated.score, "weighting": weighting}
            options |= {"mask": evaluated.rule, "dropout_p": dropout_p, "seed": seed}
            if evaluated.rows is not None:
                query, key = evaluated.rows
            return weights(query, key, **options)
    else:
        call = user_code.simplify_score(call)
    first: A = plan_cache.run_first_call(
        call, choose_engine(call), None if plan else signature, arguments
    )
    return first


def explain(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    **options: Unpack[ReturnOptions],
) -> Explanation:
    """Return which engine `attend` would run with these arguments, and why not the others.

    Print the result to read it. It also says whether an earlier call cached the choice.

    >>> import numpy as np
    >>> x = np.zeros((2, 3))
    >>> print(explain(x, x, x))
    engine: dense (the whole matrix at once)
    call:   ScaledDot() → Softmax(temperature=1.0), scores (2, 2), float64 on numpy
    work:   about 80 FLOP forward, 192 B in and out
    not single_row: the weights depend on the query
    not weights: the call does not return weights
    not native: numpy has no fused attention kernel
    not linear: the weights of Softmax are not the scores, so the sum cannot be rearranged
    not near: it supports only the Gaussian score, not ScaledDot
    not triton: Triton's kernels take torch tensors, not numpy's arrays
    not lowered: the score is a dot product already
    not streaming: the scores need only 4 numbers, which fit one block: dense is as good
    """
    _, plan, call, choice = _plan_call("explain", query, key, value, options)
    detail = choice.engine.describe(call)
    is_cached = plan is not None and plan.choice.engine is choice.engine
    pending = (
        choice.engine.describe_pending_compilation(call)
        if hasattr(choice.engine, "describe_pending_compilation")
        else None
    )
    return Explanation(choice.engine.NAME, choice.refusals, call, detail, is_cached, pending)


def warm(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    **options: Unpack[ReturnOptions],
) -> WarmupReport:
    """Choose the engine and compile the kernels for `attend` with these arguments, ahead of time.

    Only shapes, dtypes, devices and strides matter, not values. On CUDA several threads compile the
    kernels and show a progress bar. If an array requires a gradient, they also compile the backward
    kernels. On other devices `warm` only caches the choice of an engine. Print the result to read
    what `warm` did.

    >>> import numpy as np
    >>> x = np.zeros((2, 3))
    >>> print(warm(x, x, x))
    engine: dense
    plan:   cached
    nothing to compile
    """
    started = perf_counter()
    signature, plan, call, choice = _plan_call("warm", query, key, value, options)
    if plan is None and signature is not None:
        plan = plan_cache.cache_plan(signature, call, choice)
    compiled = choice.engine.warm(call) if hasattr(choice.engine, "warm") else ()
    return WarmupReport(choice.engine.NAME, compiled, perf_counter() - started, plan is not None)


def projected_attention(name: str) -> ProjectedAttention:
    """Return the fused operator of the framework `name` for a whole self-attention layer.

    The operator computes [S⁽¹⁾ … S⁽ʰ⁾] W_O with S⁽ⁱ⁾ = softmax(QKᵀ/√d) V, where Q, K and V are
    projections of one x. It takes (x, heads, parameters, mask, padding, weights):

    - x (N, n, h·d) needs no gradient and is not traced.
    - `parameters` are the packed weight of Q, K and V, its bias, W_O and its bias.
    - `mask` (n, n), or (N, n) if `padding`, is True where a pair does *not* count.
    - `weights` is "heads", "mean" or None.

    The operator returns the output and α, or None if it does not support the call. After None,
    project x, call `attend`, and multiply by W_O.
    """
    return native.projected_attention(name)


def _plan_call(
    function_name: str, query: Array, key: Array, value: Array, options: ReturnOptions
) -> tuple[plan_cache.Signature | None, plan_cache.Plan | None, Call, EngineChoice]:
    """Return the signature, the cached plan, the call and the engine for `attend`'s arguments."""
    validate_keywords(
        f"{function_name}()", options, ReturnOptions.__optional_keys__, elsewhere=FOREIGN_KEYWORDS
    )
    filled = {**(attend.__kwdefaults__ or {}), **options}
    score, weighting, mask = map(filled.pop, ("score", "weighting", "mask"))
    p, seed, tolerance, engine = map(filled.pop, ("dropout_p", "seed", "tolerance", "engine"))
    lse, alpha = map(filled.pop, ("return_lse", "return_weights"))
    flags: plan_cache.Signature = (p, seed is None, tolerance, engine)
    if not lse is alpha is False:
        flags = _extend_flags(flags, lse, alpha)
    _require_value(value)
    signature, plan = plan_cache.find_plan(query, key, value, score, weighting, mask, flags)
    # Pass a fixed seed, so that `explain` does not advance the caller's generator.
    formula = (mask, p, None if seed is None else 0, tolerance)
    call = build_call(query, key, value, score, weighting, *formula, lse=lse, weights=alpha)
    if signature is None:
        call = user_code.with_placeholder(call)
    else:
        call = user_code.simplify_score(call)
    return signature, plan, call, choose_engine(call, engine)


MAX_PAGE_RUNNERS = 64


def plan_pages(
    query: Any,
    key: Any,
    value: Any,
    read_tables: Callable[[], tuple[Any, Any]],
    *,
    dtype: Any,
    scales: Sequence[Any] = (),
    is_causal: bool = False,
    known: dict[Any, Any],
    **options: Any,
) -> Callable[[], Any] | str:
    """Return a function that attends over keys and values in pages; or why no kernel reads them.

    key and value are torch pools (pages, heads, rows, width), of `dtype` or codes of 8 bits with
    their `scales`. `read_tables` returns the pages (batch, P) and the lengths (batch,), int32: row
    j of sequence b is row j mod rows of page table[b, j // rows]. The n queries of a sequence are
    those of its last n rows. `options` are those of `attend`. `known` caches functions for this
    pool: an empty dictionary at first.
    """
    from qkv.engines.triton import paged

    if others := options.keys() - {"score", "weighting"}:
        return f"the kernels for pages have no option {min(others)}"
    if reason := paged.unsupported_device_reason(query):
        return reason
    if query.ndim != 4 or query.dtype != dtype:
        return "the queries are not (batch, heads, n, width) in the dtype of the cache"
    table, lengths = read_tables()
    needs_gradient = get_framework(query).needs_gradient([query])
    names = options.get("score", "scaled_dot"), options.get("weighting", "softmax")
    signature: Any = None
    if not needs_gradient and not tree.array_leaves(get_framework(query), names):
        try:
            signature = (*names, query.shape, query.stride(), table.shape, is_causal)
            hash(signature)
        except TypeError:
            signature = None
    runner = known.get(signature)
    if runner is None:
        count = table.shape[1] * key.shape[2]
        # They stand for the gathered rows: no number of them is read.
        stand_in_key, stand_in_value = (
            query.new_empty(x.shape[-1]).expand(table.shape[0], x.shape[1], count, -1)
            for x in (key, value)
        )
        rule: Any = masks.lengths(lengths)
        if is_causal:
            rule = rule & masks.causal(offset=lengths - query.shape[-2])
        call = build_call(query, stand_in_key, stand_in_value, mask=rule, **options)
        pool = paged.PagePool(key, value, table, *scales)
        if reason := paged.unsupported_reason(call, pool):
            return reason
        runner = paged.build_page_runner(call, pool)
        if signature is not None and runner.is_reusable:
            insert_bounded(known, signature, runner, MAX_PAGE_RUNNERS)
    return partial(runner.run, query, table, lengths)


def pool_weighed_values(weights: np.ndarray, value: np.ndarray, mean: bool) -> np.ndarray:
    """Return the output (1, d_v) for weights (1, c), none of them 0, and values (c, d_v).

    With `mean`, the weights are divided by their sum.
    """
    return candidates.pool_values(weights, value, mean)


def split_sequences(**arrays: Array) -> list[list[Array]]:
    """Return the sequences of each array. All must be nested, with the same number of sequences."""
    (first, *_), parts = arrays, {}
    for name, x in arrays.items():
        sequences = get_framework(x).split_nested(x)
        if sequences is None:
            raise FrameworkError(
                f"{first} is a nested tensor, but {name} is not: pass {name} as a nested tensor"
            )
        parts[name] = sequences
        if len(sequences) != len(parts[first]):
            raise ShapeError(
                f"{first} has {len(parts[first])} sequences, but {name} has {len(sequences)}"
            )
    return list(parts.values())


def _attend_nested(
    query: Array, key: Array, value: Array, wants_more: bool, options: dict[str, Any]
) -> Array:
    """Return the output of nested arrays as a nested array.

    On a GPU all sequences are one call with `masks.packed`, if it means the same. On a CPU a call
    for each sequence is faster.
    """
    fw = get_framework(query)
    if wants_more:
        raise CombinationError(
            "return_lse and return_weights cannot be used with nested tensors: call once for each "
            "sequence"
        )
    rule, bias = masks.resolve(options["mask"])
    if bias is not None or tree.array_leaves(fw, rule) or tree.has_foreign_arrays(fw, rule):
        raise CombinationError(
            "an array in mask cannot be used with nested tensors, because their sequences differ "
            "in length: call once for each sequence"
        )
    parts = split_sequences(query=query, key=key, value=value)
    lengths = [[fw.static_shape(x)[-2] for x in sequences] for sequences in parts[:2]]
    on_device = bool(parts[0]) and fw.device_block_numbers(parts[0][0]) is not None
    if not on_device or not _is_same_when_packed(fw, rule, lengths[0] == lengths[1], options):
        outputs = [attend(*sequence, **options) for sequence in zip(*parts, strict=True)]
        return fw.pack_nested(outputs, query)
    ends_q, ends_k = (np.cumsum([0, *x], dtype=np.int32) for x in lengths)
    options = {**options, "mask": masks.packed(ends_q, ends_k, causal=rule is not None)}
    out = attend(*(fw.xp.concat(sequences, axis=-2) for sequences in parts), **options)
    spans = [Span(int(ends_q[i]), size) for i, size in enumerate(lengths[0])]
    return fw.pack_nested([fw.slice_span(out, x, -2) for x in spans], query)


def _is_same_when_packed(
    fw: Framework, rule: Any, has_equal_lengths: bool, options: dict[str, Any]
) -> bool:
    """Return whether packed sequences give the same, though their positions are others."""
    score, weighting = resolve_score_and_weighting(options["score"], options["weighting"], None)
    if scores.has_user_code(score) or not (rule is None or masks.is_plain_causal(rule)):
        return False
    if any(len(x.shape) > 1 and x.shape[-2] != 1 for x in tree.array_leaves(fw, weighting)):
        return False  # an array for each query
    depends_on_distance = isinstance(score, scores.RelativeScore) or rule is not None
    return has_equal_lengths or not depends_on_distance


def _leave_autocast(*arrays: Any) -> AbstractContextManager[object] | None:
    """Return a context without the autocast that casts these arrays; None: there is none."""
    frameworks = {find_framework(x) for x in arrays}
    fw = frameworks.pop()
    return None if fw is None or frameworks else fw.leave_autocast(arrays[0])


def _join_queries(call: Call, parts: list[Any]) -> Any:
    """Return the results of all queries from those of spans of them."""
    xp = call.fw.xp
    if not call.wants_lse:
        return xp.concat(parts, axis=-2)
    return xp.concat([x[0] for x in parts], axis=-2), xp.concat([x[1] for x in parts], axis=-1)


def _require_value(value: A | None) -> A:
    if value is None:
        raise DtypeError("value must be an array, not NoneType: only `weights` needs no value")
    return value


def _extend_flags(flags: plan_cache.Signature, lse: Any, weights: Any) -> plan_cache.Signature:
    """Return the flags, extended by the values and types of `return_lse` and `return_weights`.

    The types matter because 1 == True: `return_lse=1` must not find the plan of `True`.
    """
    return *flags, lse, weights, type(lse), type(weights)


# TensorFlow's AutoGraph rewrites a function that lacks this attribute. These functions already work
# in a graph.
for _function in (attend, weights, explain, warm):
    setattr(_function, "autograph_info__", None)  # noqa: B010


MAX_STORED_WEIGHTS = 2**16
"""NumPy attends over stored rows with the weights of all rows if there are at most so many.

No gradient is needed, and reading the keys and then the values is faster than both in blocks.
"""


def attend_rows(
    rows: StoredRows,
    query: Array,
    *,
    score: ScoreLike,
    weighting: WeightingLike,
    tolerance: float | None = None,
    confidence: float | None = None,
) -> Array:
    """Return `attend` over stored rows: query (n, d) → (n, d_v), in the query's framework.

    The query and the arrays of score and weighting receive gradients; the backward pass reads the
    rows again. `tolerance` and `confidence` work as in `weigh_rows`. If a gradient is needed, both
    are ignored and the result is exact.

    >>> import numpy as np
    >>> from qkv.frameworks.stored_rows import RowChunk
    >>> stored = [RowChunk(np.eye(2), np.array([[10.0], [20.0]]))]
    >>> attend_rows(
    ...     StoredRows(lambda: stored, (2, 2), 1),
    ...     np.zeros((1, 2)),
    ...     score="dot",
    ...     weighting="softmax",
    ... )
    array([[15.]])
    """
    fw = get_framework(query)
    if fw.is_abstract(query):
        raise FrameworkError(
            "attention over stored rows reads files, so it cannot be traced: make this call "
            "outside jit, compile or tf.function"
        )
    score, weighting = resolve_score_and_weighting(score, weighting, None)
    require_one_framework({"query": query}, score=score, weighting=weighting)
    weighting = weighting.limit_to_keys(rows.key.shape[0])
    score.check_shapes(tuple(query.shape), rows.key.shape)
    with fw.use_own_settings():
        leaves = tree.array_leaves(fw, (score, weighting))
        if tolerance is not None and not fw.needs_gradient([query, *leaves]):
            host = np.ascontiguousarray(to_numpy(query))
            host = host.astype(np.result_type(host, np.float32), copy=False)
            approximate = certified.attend_rows(rows, host, score, weighting, tolerance, confidence)
            if not isinstance(approximate, str):
                return to_framework_array(fw, approximate, query)
        call = Call(query, rows.key, rows.value, score, weighting)
        if fw.name == "numpy":
            weights = call.n * rows.shape[0]
            if not rows.reads_chunks_separately and 0 < weights <= MAX_STORED_WEIGHTS:
                out = linear.run_stored(call)
                if out is None:
                    wide = query.astype(np.result_type(query, np.float32), copy=False)
                    out = forward.weigh_rows(rows, wide, score, weighting).output
                return fw.astype(out, fw.dtype_name(query))
            call = replace(call, score=adapt_score(rows, score, fw.dtype_name(query)))
        if call.may_exceed_float64 and (
            rows.shape[0] if rows.allowed is None else rows.allowed.any()
        ):
            best, _ = forward.find_nearest(rows, query, score, 1)
            check_best_scores_finite(
                score, weighting, *map(to_numpy, (fw.detach(query), best[:, 0]))
            )
        out = linear.run_stored(call)
        out = streaming.run(call)[0] if out is None else out
        return fw.astype(out, fw.dtype_name(query))


def find_nearest_rows(
    rows: StoredRows, query: Array, k: int, *, score: ScoreLike
) -> tuple[Array, Array]:
    """Return the k best scores of each query (n, d) and their row positions, both (n, k).

    Of rows with equal scores, the one at the lower position comes first. If there are fewer than k
    rows, the last scores are −∞.

    >>> import numpy as np
    >>> from qkv.frameworks.stored_rows import RowChunk
    >>> rows = StoredRows(lambda: [RowChunk(np.array([[1.0], [3.0], [2.0]]))], (3, 1))
    >>> find_nearest_rows(rows, np.array([[2.0]]), 2, score="dot")
    (array([[6., 4.]]), array([[1, 2]], dtype=int32))
    """
    fw = get_framework(query)
    score = scores.resolve(score)
    score.check_shapes(tuple(query.shape), rows.key.shape)
    with fw.use_own_settings():
        return forward.find_nearest(rows, query, score, k)


def attend_sharded(
    across: sharded.ProcessGroup,
    at: ShardPosition,
    query: Array,
    key: Array,
    value: Array,
    *,
    return_lse: bool = False,
    **meaning: Unpack[FormulaOptions],
) -> Any:
    """Return `attend` over keys that the processes of a group hold in shards.

    `across` is the group of processes. `at` is the position of this shard in the whole call. The
    processes exchange only queries, partial states and their gradients.
    """
    validate_keywords("attend()", meaning, FormulaOptions.__optional_keys__)
    call = build_call(query, key, value, **meaning, at=at, lse=return_lse)
    with call.fw.use_own_settings():
        return pack_results(call, (*sharded.run(call, across), None))


def weigh_rows(
    rows: StoredRows,
    query: Array | None,
    *,
    score: ScoreLike,
    weighting: WeightingLike,
    tolerance: float | None = None,
    confidence: float | None = None,
    matches: Array | None = None,
    part: bool = False,
) -> WeighedRows:
    """Return the output over stored rows and the weight of every row, in NumPy.

    Shapes: query (n, d) → output (n, d_v) and weights (n, m). `matches` (n, m) replaces the query:
    these are the scores. `part` means that other shards hold more rows. Then a query is not an
    error if none of these rows lies within the window of its score.

    `tolerance` is an upper limit for the error ½ Σ |weight − exact weight| of each query. The limit
    is proven; with a `confidence` it is estimated from sampled rows and holds with that
    probability. If 8-bit codes of the keys cannot prove the limit, the weights are exact.

    >>> import numpy as np
    >>> from qkv.frameworks.stored_rows import RowChunk
    >>> rows = StoredRows(lambda: [RowChunk(np.eye(2))], (2, 2))
    >>> weigh_rows(rows, np.eye(2)[:1], score="dot", weighting="hard").weights
    array([[1., 0.]])
    """
    score, weighting = resolve_score_and_weighting(score, weighting, None)
    weighting = weighting.limit_to_keys(rows.shape[0])
    with load_framework("numpy").use_own_settings():
        if matches is None:
            assert query is not None
            score.check_shapes(tuple(query.shape), rows.shape)
            if tolerance is not None:
                approximate = certified.weigh_rows(
                    rows, query, score, weighting, tolerance, confidence
                )
                if isinstance(approximate, WeighedRows):
                    return approximate
                exact = forward.weigh_rows(rows, query, score, weighting, part)
                return exact._replace(refusal=approximate)
            return forward.weigh_rows(rows, query, score, weighting, part)
        return forward.weigh_scores(rows, matches, weighting, part)


def weigh_candidates(
    rows: Candidates, query: np.ndarray, score: Score, weighting: Weighting
) -> list[tuple[np.ndarray, WeighedRows | None]]:
    """Return for each query (n, d) the ascending positions (c,) of its rows, and their weights.

    The weights are None if scores may overflow the dtype of the query; `weigh_rows` computes them.
    """
    with load_framework("numpy").use_own_settings():
        return candidates.weigh_candidates(rows, query, score, weighting)
