"""Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ: attend, its weights alone, why it ran as it did, and what it
would wait for, done ahead."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np

from qkv import scores
from qkv.engines import native, plan_cache, sharded, streaming
from qkv.engines.call import Call, check_best_scores_finite, pack_results
from qkv.engines.choice import EngineChoice, EngineName, Explanation, WarmupReport, choose_engine
from qkv.engines.dropout import draw_seed
from qkv.engines.native import ProjectedAttention
from qkv.engines.out_of_core import certified, forward
from qkv.engines.validation import build_call, require_one_framework, resolve_score_and_weighting
from qkv.errors import DtypeError, FrameworkError, validate_keywords
from qkv.frameworks import get_framework, load_framework, to_numpy, tree
from qkv.frameworks.stored_rows import StoredRows, WeighedRows, to_framework_array
from qkv.masks import MaskLike
from qkv.scores import ScoreLike
from qkv.util.keyword_hints import FOREIGN_KEYWORDS, forbid_torchscript
from qkv.util.types import A, Array, NestedLists, ShardPosition
from qkv.weightings import WeightingLike


class FormulaOptions(TypedDict, total=False):
    """The arguments of `attend` that say what is computed."""

    score: ScoreLike
    weighting: WeightingLike
    mask: MaskLike | None
    dropout_p: float
    seed: Any
    tolerance: float | None


class AttendOptions(FormulaOptions, total=False):
    """The arguments of `attend` that do not change what it returns."""

    engine: EngineName | None


class ReturnOptions(AttendOptions, total=False):
    """Those, and what `attend` returns beside its output."""

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
    """Σᵢ α(q, kᵢ) vᵢ for every query q: what the keys that match it have to say.

    query (…, n, d_q), key (…, m, d_k), value (…, m, d_v) → (…, n, d_v), in the query's framework
    and dtype, or in that of torch's autocast. Leading axes broadcast; axis −3 is heads, and a key
    or value with fewer heads is shared among the query's. A query that sees no key gives 0.

    `score` compares a query and a key: a name or an object of `qkv.scores`, or a function
    (query, key) → (…, n, m), which gets 16-bit numbers as float32. `weighting` turns scores into
    weights: a name or an object of `qkv.weightings`. `mask` rules keys out: of `qkv.masks`, or a
    boolean array (True: may attend), or a float array (added to the scores). `dropout_p` drops
    weights, the same ones for the same `seed` (a number or a generator) on every engine.
    `tolerance` is the absolute error in a score that an engine may trade for speed. `engine`
    insists on one; `explain` tells which would run.

    With `return_lse` also log Σ exp(score) (…, n), with `return_weights` also α (…, n, m), or with
    "mean" the mean of the heads' α, which are then never held together.

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
    arguments = (query, key, value, score, weighting, mask, seed)
    return plan_cache.run_first_call(
        call, choose_engine(call, engine), None if plan else signature, arguments
    )


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
    """α(q, k) for every query and key, (…, n, m): the weights that `attend` would use.

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
    """Which engine `attend` would run with these arguments, why not the others, and whether that
    was chosen before, for an earlier call of the same kind.

    >>> import numpy as np
    >>> x = np.zeros((2, 3))
    >>> print(explain(x, x, x))
    engine: dense (the whole matrix at once)
    call:   ScaledDot() → Softmax(temperature=1.0), scores (2, 2), float64 on numpy
    work:   about 80 FLOP forward, 192 B in and out
    not weights: no weights are asked for
    not native: numpy has no fused attention of its own
    not near: boxes bound the Gaussian score only, not ScaledDot
    not triton: Triton's kernels take torch tensors, not numpy's arrays
    not lowered: the score is a dot product as it stands
    not streaming: the call holds 4 numbers in all: one block, which dense does at once
    """
    _, plan, call, choice = _plan_call("explain", query, key, value, options)
    detail = choice.engine.describe(call)
    known = plan is not None and plan.choice.engine is choice.engine
    waits = (
        choice.engine.describe_pending_compilation(call)
        if hasattr(choice.engine, "describe_pending_compilation")
        else None
    )
    return Explanation(choice.engine.NAME, choice.refusals, call, detail, known, waits)


def warm(
    query: A | NestedLists,
    key: A | NestedLists,
    value: A | NestedLists,
    **options: Unpack[ReturnOptions],
) -> WarmupReport:
    """Do ahead what the first `attend` of this kind would wait for; numbers do not matter.

    On CUDA the kernels are compiled, in threads and with a progress bar, for arrays of these
    shapes, dtypes and strides; those of the gradient too where an array asks for one. Elsewhere
    nothing is compiled, and only the choice of an engine is kept. `print` it to read what was done.

    >>> import numpy as np
    >>> x = np.zeros((2, 3))
    >>> print(warm(x, x, x))
    engine: dense
    plan:   kept
    nothing was left to compile ahead
    """
    started = perf_counter()
    kind, plan, call, choice = _plan_call("warm", query, key, value, options)
    if plan is None and kind is not None:
        plan = plan_cache.cache_plan(kind, call, choice)
    compiled = choice.engine.warm(call) if hasattr(choice.engine, "warm") else ()
    return WarmupReport(choice.engine.NAME, compiled, perf_counter() - started, plan is not None)


def projected_attention(name: str) -> ProjectedAttention:
    """[S⁽¹⁾ … S⁽ʰ⁾] W_O, S⁽ⁱ⁾ = softmax(QKᵀ/√d) V, with Q, K and V projected from one x, all at
    once: a framework's function of (x, heads, parameters, mask, padding, weights).

    It gives the output and α, or None: project, `attend`, and project back. x (N, n, h·d) wants no
    gradient and is not traced; `parameters` are the packed weight of Q, K and V with its bias, then
    W_O with its own; `mask` (n, n), or (N, n) where it is a `padding`, is True where a pair does
    *not* count; `weights` are wanted of the "heads", of their "mean", or None.
    """
    return native.projected_attention(name)


def _plan_call(
    door: str, query: Array, key: Array, value: Array, options: ReturnOptions
) -> tuple[plan_cache.Signature | None, plan_cache.Plan | None, Call, EngineChoice]:
    """What `attend` would do with these arguments: their kind and plan, the call, the engine."""
    validate_keywords(
        f"{door}()", options, ReturnOptions.__optional_keys__, elsewhere=FOREIGN_KEYWORDS
    )
    filled = {**(attend.__kwdefaults__ or {}), **options}
    score, weighting, mask = map(filled.pop, ("score", "weighting", "mask"))
    p, seed, tolerance, engine = map(filled.pop, ("dropout_p", "seed", "tolerance", "engine"))
    lse, alpha = map(filled.pop, ("return_lse", "return_weights"))
    flags: plan_cache.Signature = (p, seed is None, tolerance, engine)
    if not lse is alpha is False:
        flags = _extend_flags(flags, lse, alpha)
    kind, plan = plan_cache.find_plan(
        query, key, _require_value(value), score, weighting, mask, flags
    )
    # Looking must not advance a caller's generator.
    how = (mask, p, None if seed is None else 0, tolerance)
    call = build_call(query, key, value, score, weighting, *how, lse=lse, weights=alpha)
    return kind, plan, call, choose_engine(call, engine)


def _require_value(value: A | None) -> A:
    if value is None:
        raise DtypeError("value must be an array, not NoneType: `weights` alone needs none")
    return value


def _extend_flags(flags: plan_cache.Signature, lse: Any, weights: Any) -> plan_cache.Signature:
    """The flags with what is to be returned: `return_lse=1` is refused, so it is not True here."""
    return *flags, lse, weights, type(lse), type(weights)


# TensorFlow's AutoGraph rewrites the Python that it meets unless it bears this mark; what runs in
# a graph here is written for one already.
for _function in (attend, weights, explain, warm):
    setattr(_function, "autograph_info__", None)  # noqa: B010


def attend_rows(
    rows: StoredRows,
    query: Array,
    *,
    score: ScoreLike,
    weighting: WeightingLike,
    tolerance: float | None = None,
    confidence: float | None = None,
) -> Array:
    """`attend` over rows that are read, not held: query (n, d) → (n, d_v), in its framework.

    Gradients reach the query and every array of the score and the weighting; the rows are read
    again on the way back. `tolerance` and `confidence` are as in `weigh_rows`, where nothing wants
    a gradient; with one, the answer is exact.

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
            "attend reads a stored database while it runs, so it cannot be traced: call it outside "
            "of jit, compile or tf.function"
        )
    score, weighting = resolve_score_and_weighting(score, weighting, None)
    require_one_framework({"query": query}, score=score, weighting=weighting)
    weighting = weighting.limit_to_keys(rows.key.shape[0])
    score.check_shapes(tuple(query.shape), rows.key.shape)
    with fw.compute_context():
        leaves = tree.array_leaves(fw, (score, weighting))
        if tolerance is not None and not fw.needs_gradient([query, *leaves]):
            given = np.ascontiguousarray(to_numpy(query))
            given = given.astype(np.result_type(given, np.float32), copy=False)
            found = certified.attend_rows(rows, given, score, weighting, tolerance, confidence)
            if not isinstance(found, str):
                return to_framework_array(fw, found, query)
        call = Call(query, rows.key, rows.value, score, weighting)
        if call.may_exceed_float64 and (
            rows.shape[0] if rows.allowed is None else rows.allowed.any()
        ):
            best, _ = forward.find_nearest(rows, query, score, 1)
            check_best_scores_finite(
                score, weighting, *map(to_numpy, (fw.detach(query), best[:, 0]))
            )
        out = streaming.run(call)[0]
        return fw.astype(out, fw.dtype_name(query))


def find_nearest_rows(
    rows: StoredRows, query: Array, k: int, *, score: ScoreLike
) -> tuple[Array, Array]:
    """The scores of the k rows that match a query best, (n, k), and where they stand among all, for
    queries (n, d) of any framework; −∞ where there are fewer. Ties go to the first row.

    >>> import numpy as np
    >>> from qkv.frameworks.stored_rows import RowChunk
    >>> rows = StoredRows(lambda: [RowChunk(np.array([[1.0], [3.0], [2.0]]))], (3, 1))
    >>> find_nearest_rows(rows, np.array([[2.0]]), 2, score="dot")
    (array([[6., 4.]]), array([[1, 2]], dtype=int32))
    """
    fw = get_framework(query)
    score = scores.resolve(score)
    score.check_shapes(tuple(query.shape), rows.key.shape)
    with fw.compute_context():
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
    """`attend` to the keys of all processes `across` which they are shared out; what is here lies
    `at` a place of the whole. Only queries, what is summed for them, and their gradients travel."""
    validate_keywords("attend()", meaning, FormulaOptions.__optional_keys__)
    call = build_call(query, key, value, **meaning, at=at, lse=return_lse)
    with call.fw.compute_context():
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
    """The same with the weight of every row beside, on NumPy; `matches` (n, m) are the scores where
    no vectors were compared. Rows that are a `part` of more may all be out of a query's reach.

    With a `tolerance` the weights are proven to lie that near to the exact ones (½ Σ |difference|),
    or with a `confidence` shown to do so by rows that were drawn; where codes beside the keys
    cannot prove it, they are exact.

    >>> import numpy as np
    >>> from qkv.frameworks.stored_rows import RowChunk
    >>> rows = StoredRows(lambda: [RowChunk(np.eye(2))], (2, 2))
    >>> weigh_rows(rows, np.eye(2)[:1], score="dot", weighting="hard").weights
    array([[1., 0.]])
    """
    score, weighting = resolve_score_and_weighting(score, weighting, None)
    weighting = weighting.limit_to_keys(rows.shape[0])
    with load_framework("numpy").compute_context():
        if matches is None:
            assert query is not None
            score.check_shapes(tuple(query.shape), rows.shape)
            if tolerance is not None:
                found = certified.weigh_rows(rows, query, score, weighting, tolerance, confidence)
                if isinstance(found, WeighedRows):
                    return found
                exact = forward.weigh_rows(rows, query, score, weighting, part)
                return exact._replace(refusal=found)
            return forward.weigh_rows(rows, query, score, weighting, part)
        return forward.weigh_scores(rows, matches, weighting, part)
