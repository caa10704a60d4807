"""Functions of the caller that run once, on the whole matrix, before the engine.

*On a framework that compiles calls* (JAX and TensorFlow, when eager) a function is no cache key:
what it captures may change between two calls. If it were compiled, every call would compile again.
So it runs as it is. Its scores and booleans are arguments of a compiled plan.

*On a GPU* (PyTorch) the kernels read the scores like a float mask, so every weighting, mask and
dropout works with them. In 16 bits with gradients the function also runs on one row, to find what
it captures, and again in the backward pass.

On PyTorch, a function that only computes a scaled dot product is replaced by that score. On
a GPU, a pointwise function of one is replaced by a score_mod, without an array of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.frameworks import tree
from qkv.frameworks.base import Framework
from qkv.frameworks.stored_rows import UnreadArray
from qkv.masks import Mask
from qkv.masks.base import ArrayMask, CompoundMask
from qkv.scores import Constant, FeatureMap, Modified, ScaledDot, Score, evaluate_block
from qkv.scores.functions import EvaluatedScore
from qkv.scores.user_score import UserScore
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array, Arrays, Block, Gradients, Span
from qkv.weightings import Softmax

MAX_EVALUATED_NUMBERS = 2**26
"""The most numbers that a function may hold at once. More are computed in compiled blocks."""

MAX_DEVICE_NUMBERS = 2**28
"""The same on a GPU: 1 GiB in float32."""
MAX_LEARNING_NUMBERS = 2**30
"""The same on a GPU with gradients: autograd saves all results of the function."""

MAX_NUMBERS_PER_COLUMN = 8
"""Few calls hold more numbers than this per pair and column, so short calls are not measured."""

MAX_CACHED_FUNCTIONS = 64

_PREPARATIONS: dict[Hashable, Callable[..., Any]] = create_table("engines.user_code_preparations")


def evaluates_functions(call: Call) -> bool:
    """Return whether `evaluate_functions` runs the functions of this call."""
    fw = call.fw
    if not fw.compiles_calls or call.at is not None or isinstance(call.key, UnreadArray):
        return False
    if call.has_unknown_length or fw.has_empty_axis((*call.lead, call.n, call.m)):
        return False
    has_scores = isinstance(
        call.score, EvaluatedScore | FeatureMap
    )  # φ runs on rows, in any engine
    in_score = not (has_scores or _has_signature(fw, call.score))
    if not in_score and (call.rule is None or _has_signature(fw, call.rule)):
        return False
    if any(fw.is_compiling(x) for x in tree.array_leaves(fw, call)):
        return False
    if call.exceeds_float32 or call.may_exceed_float64:
        return False
    pairs = math.prod(call.lead) * call.n * call.m
    return pairs * (_numbers_per_pair(call) if in_score else 1) <= MAX_EVALUATED_NUMBERS


def evaluates_on_device(call: Call) -> bool:
    """Return whether the scores of a function or a class of the caller are computed on a GPU."""
    if not _may_evaluate_on_device(call):
        return False
    limit = MAX_LEARNING_NUMBERS if _learns(call) else MAX_DEVICE_NUMBERS
    pairs = math.prod(call.lead) * call.n * call.m
    if not 0 < pairs <= limit:
        return False
    few = pairs * MAX_NUMBERS_PER_COLUMN * call.fw.static_shape(call.key)[-1] <= limit
    return few or pairs * _numbers_per_pair(call) <= limit


def recognize_product(call: Call) -> Call | None:
    """Return the call with the dot product that a function on a GPU computes; None: it does not.

    It may have a score_mod, and other rows. So it runs in the kernels, without an array of scores.
    """
    if not (isinstance(call.score, UserScore) and _may_evaluate_on_device(call)):
        return None
    product = _find_product(call)
    return _find_product_score(call) if product is None else replace(call, score=product)


def _find_product_score(call: Call) -> Call | None:
    """Return the call with dot products and a score_mod in place of the function, if possible."""
    from qkv.engines.triton.unsupported import unsupported_reason

    fw, key = call.fw, _repeat_keys(call)
    assert isinstance(call.score, UserScore)
    if call.wants_weights:
        return None
    found = fw.find_product_score(call.score.function, call.query, key)
    if found is None:
        return None
    changed = found.phi is not call.query or found.psi is not key
    # A gradient of rows goes through the function, where 0 · NaN of a masked row is NaN.
    if changed and (call.key is not key or call.rule is not None):
        return None
    score: Score = ScaledDot(1.0 if found.scale is None else found.scale)
    if found.score_mod is not None:
        score = Modified(score, found.score_mod)
    other = replace(call, score=score)
    if changed:
        other = replace(other, query=found.phi, key=found.psi)
    # Without a reason, the score_mod has a translation, so it is pointwise.
    return other if unsupported_reason(other) is None else None


def simplify_score(call: Call) -> Call:
    """Return the call with the simplest score that gives the same result.

    A weighting may ignore the scores, and a function may compute a scaled dot product. This is for
    calls on a CPU that have a plan: the plan is for one function, so it need not look at it again.
    """
    fw = call.fw
    if fw.compiles_calls or fw.device_block_numbers(call.query) is not None:
        return call
    if call.at is not None or isinstance(call.key, UnreadArray) or fw.is_traced(call.query):
        return call
    if call.weighting.ignores_scores and not isinstance(call.score, EvaluatedScore):
        return call if type(call.score) is Constant else replace(call, score=Constant())
    if (
        not isinstance(call.score, UserScore)
        or call.exceeds_float32
        or fw.dtype_name(call.query) == "float64"
    ):
        return call
    if fw.has_empty_axis((*call.lead, call.n, call.m)):
        return call
    product = _find_product(call)
    return call if product is None else replace(call, score=product)


def _find_product(call: Call) -> Score | None:
    """Return the scaled dot product that the function of the score computes, or None."""
    assert isinstance(call.score, UserScore)
    scale = call.fw.find_dot_scale(call.score.function, call.query, _repeat_keys(call))
    return None if scale is None else ScaledDot(scale)


def _repeat_keys(call: Call) -> Any:
    key: Any = call.key
    return key if key.shape[:-2] == call.lead else calls.repeat_shared_heads(call, key)


def split_queries(call: Call) -> list[Span]:
    """Return the spans of queries whose scores fit on a GPU, if not all do; else an empty list.

    Each span is then a call of its own. Calls with a gradient run in the blocks of `streaming`,
    which keep no scores.
    """
    if not _may_evaluate_on_device(call) or _learns(call) or evaluates_on_device(call):
        return []
    whole = call.rule is not None or call.dropout or call.wants_weights
    whole = whole or call.score.needs_positions
    if whole or tree.array_leaves(call.fw, call.weighting):
        return []
    each = math.prod(call.lead) * call.m * _numbers_per_pair(call)
    size = MAX_DEVICE_NUMBERS // each if each else 0
    return [Span(at, min(size, call.n - at)) for at in range(0, call.n, size)] if size else []


def _may_evaluate_on_device(call: Call) -> bool:
    fw = call.fw
    if not _is_own_score(call.score) or fw.device_block_numbers(call.query) is None:
        return False
    if call.at is not None or fw.is_traced(call.query) or isinstance(call.key, UnreadArray):
        return False
    return not call.exceeds_float32 and fw.dtype_name(call.query) != "float64"


def _learns(call: Call) -> bool:
    return call.fw.needs_gradient(tree.array_leaves(call.fw, call))


def _is_own_score(score: Score) -> bool:
    """Return whether a score, or the one inside of it, is a function or a class of the caller."""
    inner = getattr(score, "score", None)
    if inner is not None:
        return _is_own_score(inner)
    return isinstance(score, UserScore) or not type(score).__module__.startswith("qkv.")


def with_placeholder(call: Call) -> Call:
    """Return the call with scores of the right shape and any values, if they would be computed.

    They have a gradient if the query or the key has one, so that `warm` compiles it too.
    """
    product = recognize_product(call)
    if product is not None:
        return product
    if not evaluates_on_device(call):
        return call
    fresh = call.upcast()
    columns = call.fw.xp.matrix_transpose(calls.repeat_shared_heads(fresh, fresh.key)[..., :1])
    return replace(call, score=EvaluatedScore(fresh.query[..., :1] * columns))


def evaluates_scores(call: Call) -> bool:
    """Return whether `evaluate_functions` computes the scores of this call."""
    has_function = call.fw.compiles_calls and not _has_signature(call.fw, call.score)
    return has_function and evaluates_functions(call)


class EvaluatedFunctions(NamedTuple):
    """What a call has in place of functions of the caller; `rows`: another query and key."""

    score: Score
    rule: Mask | None
    rows: tuple[Array, Array] | None = None


def evaluate_functions(call: Call) -> EvaluatedFunctions | None:
    """Return the call with arrays in place of the results of the caller's functions.

    None if the call has no function, or if it must run in blocks.
    """
    product = recognize_product(call)
    if product is not None:
        is_same = product.query is call.query and product.key is call.key
        rows = None if is_same else (product.query, product.key)
        return EvaluatedFunctions(product.score, call.rule, rows)
    if evaluates_on_device(call):
        return EvaluatedFunctions(EvaluatedScore(_evaluate_on_device(call)), call.rule)
    if not evaluates_functions(call):
        return None
    fw, score, rule = call.fw, call.score, call.rule
    with fw.use_own_settings():
        if rule is not None:
            rule = rule.with_arrays_like(call.query)
        if rule is not None and not _has_signature(fw, rule):
            rule = _evaluate_rule(fw, rule, _prepare(replace(call, rule=None)).block)
        if not _has_signature(fw, score):
            score = EvaluatedScore(_evaluate_score(replace(call, rule=rule)))
    return EvaluatedFunctions(score, rule)


def _evaluate_on_device(call: Call) -> Array:
    """Return the scores in float32. Masked keys and queries are 0."""
    fw, fresh = call.fw, call.upcast()
    block = calls.make_block(fresh)
    live = calls.compute_live_pairs(fresh, block)
    query = calls.zero_masked_queries(fresh, fresh.query, live)
    key = calls.repeat_shared_heads(fresh, calls.zero_masked_rows(fresh, fresh.key, live))
    is_16bit, score = fresh is not call, fresh.score

    def compute(query: Array, key: Array) -> Array:
        if isinstance(score, UserScore):
            return score.compute_scores(query, key)
        return evaluate_block(score, query, key, block)

    with fw.use_own_settings():
        if not is_16bit:
            return fw.astype(compute(query, key), "float32")
        if fw.needs_gradient(tree.array_leaves(fw, fresh)):
            return fw.astype(_evaluate_with_gradient(fw, compute, query, key), "float32")
        with fw.use_tensor_cores():
            return fw.astype(compute(query, key), "float32")


def _evaluate_with_gradient(fw: Framework, compute: Any, query: Array, key: Array) -> Array:
    """Return compute(query, key) with a gradient whose products run on tensor cores too.

    The backward pass computes the scores again.
    """
    try:
        function, captured = fw.hoist_captures(compute, query[..., :1, :], key[..., :1, :])
    except Exception:  # a function may need all rows
        return compute(query, key)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        with fw.use_tensor_cores():
            return (function(*arrays),), ()

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        with fw.use_tensor_cores():
            return fw.vjp(function, *arrays)[1](gradients[0])

    def reference(*arrays: Array) -> Arrays:
        return (function(*arrays),)

    return fw.run_differentiable(forward, backward, reference, (query, key, *captured))[0]


@dataclass
class _Prepared:
    """What the functions of a call receive; `inner` are the scores that a `score_mod` changes."""

    query: Array
    key: Array
    block: Block
    inner: Array | None


def _evaluate_score(call: Call) -> Array:
    fw, score = call.fw, call.score
    inner = score.score if isinstance(score, Modified) else None
    has_inner = inner is not None and _has_signature(fw, inner)
    if inner is None and call.rule is None:  # the function needs no positions, and nothing is 0
        fresh = call.upcast()
        s = score(fresh.query, calls.repeat_shared_heads(fresh, fresh.key))
        return fw.astype(s, fw.dtype_name(fresh.query))
    ready = _prepare(call, inner if has_inner else None)
    if isinstance(score, Modified) and ready.inner is not None:
        s = score.modify(ready.inner, ready.query, ready.key, ready.block)
    else:
        s = evaluate_block(score, ready.query, ready.key, ready.block)
    return fw.astype(s, fw.dtype_name(ready.query))


def _evaluate_rule(fw: Framework, rule: Mask, block: Block) -> Mask:
    """Return the rule with an array in place of each part that has no signature."""
    if _has_signature(fw, rule):
        return rule
    if isinstance(rule, CompoundMask):
        return type(rule)(*(_evaluate_rule(fw, part, block) for part in rule.operand_masks))
    allowed = rule.allowed_pairs(block)
    if allowed is None:
        allowed = block.q == block.q
    return ArrayMask(allowed, is_bias=False)


def _prepare(call: Call, inner: Score | None = None) -> _Prepared:
    """Return the arguments of the caller's functions, from one compiled function.

    Masked keys and queries are 0. Heads are repeated. 16-bit arrays are float32.
    """
    fw = call.fw
    plain = Call(call.query, call.key, None, inner or Constant(), Softmax(), call.rule)

    def compute(*leaves: Array) -> tuple[Any, ...]:
        with fw.use_own_settings():
            fresh = tree.replace_arrays(fw, template, leaves).upcast()
            block = calls.make_block(fresh)
            live = calls.compute_live_pairs(fresh, block)
            query = calls.zero_masked_queries(fresh, fresh.query, live)
            key = calls.repeat_shared_heads(fresh, calls.zero_masked_rows(fresh, fresh.key, live))
            s = None if inner is None else evaluate_block(fresh.score, query, key, block)
            return query, key, (block.b, block.h, block.q, block.k), s

    leaves = tree.array_leaves(fw, plain)
    if plain.rule is not None and tree.has_foreign_arrays(fw, plain.rule):
        template = plain
        query, key, at, s = compute(*leaves)
    else:
        signature = tree.record_signature(fw, (plain.query, plain.key, plain.score, plain.rule))
        function = _PREPARATIONS.get(signature)
        if function is None:
            template = tree.map_arrays(fw, fw.without_data, plain)
            function = fw.compile_function(compute)
            assert function is not None
            insert_bounded(_PREPARATIONS, signature, function, MAX_CACHED_FUNCTIONS)
        query, key, at, s = function(*leaves)
    positions = dict(zip("bhqk", at, strict=True))
    block = Block(
        Span(0, call.n), Span(0, call.m), call.n, call.m, positions.__getitem__, len(call.lead)
    )
    return _Prepared(query, key, block, s)


def _has_signature(fw: Framework, record: Any) -> bool:
    """Return whether plans can be cached for a score or a rule."""
    try:
        tree.record_signature(fw, record)
    except tree.UncacheableError:
        return False
    return True


def _numbers_per_pair(call: Call) -> int:
    """Return how many numbers the score holds at once for each query and key."""
    width = call.fw.static_shape(call.key)[-1]
    score, call = call.score, call.upcast()
    if not isinstance(score, UserScore):
        return score.numbers_per_pair(width)
    key = calls.repeat_shared_heads(call, call.key)
    # A function that cannot be measured reads values, and cannot run in compiled blocks either.
    return tree.measure_pair_numbers(call.fw, score.function, call.query, key) or 1
