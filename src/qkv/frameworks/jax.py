"""JAX: loops are `lax.scan`, so that jit, grad and vmap work on them; records are pytrees.

Scores, weightings and masks are pytrees with their arrays as leaves. So `jax.jit`, `grad` and
`vmap` take one as an argument, and an optimizer updates it. Numbers, names, functions and arrays of
`static_fields` belong to the structure of the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from qkv.errors import ArgumentError, DtypeError
from qkv.frameworks import squares, tree
from qkv.frameworks.base import (
    BackwardFunction,
    ForwardFunction,
    Framework,
    ReferenceFunction,
    Tiling,
    exclude_transforms,
)
from qkv.frameworks.jax_jacobian import jvp_from_vjp
from qkv.frameworks.squares import NeedsExact
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array, ArrayFunction, Arrays, PartialStateFunction, PullBack, Shape, Span


class _SpanArrays(NamedTuple):
    """Spans of one size as arrays to scan over; entries that are not `valid` are skipped."""

    start: Array
    first_new: Array
    valid: Array
    size: int
    is_unmasked: bool
    is_full: bool
    has_overlap: bool


class Jax(Framework):
    name = "jax"
    xp = jnp
    has_gradients = True
    needs_equal_spans = needs_disjoint_spans = compiles_calls = has_immutable_arrays = True

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x.astype("float32") if self.dtype_name(x) == "bfloat16" else x)

    def concrete_value(self, x: Array) -> np.ndarray[Any, Any] | None:
        return None if self.is_traced(x) else np.asarray(x)

    def is_traced(self, x: Array) -> bool:
        return isinstance(x, jax.core.Tracer)

    def is_abstract(self, x: Array) -> bool:
        return self.is_traced(x) and x.to_concrete_value() is None

    def untraced_value(self, x: Array) -> Array | None:
        return x.to_concrete_value() if self.is_traced(x) else x

    def is_compiling(self, x: Array) -> bool:
        return _untraced_array(x) is None

    def has_unknown_length(self, x: Array) -> bool:
        return not all(isinstance(size, int) for size in x.shape)  # symbolic in jax.export

    def supports_float64(self, x: Array) -> bool:
        return bool(jax.config.jax_enable_x64)

    def use_own_settings(self) -> AbstractContextManager[object]:
        """Return a context that allows rank and dtype promotion, which callers may forbid."""
        ranks, dtypes = jax.numpy_rank_promotion, jax.numpy_dtype_promotion
        if ranks.value == "allow" and dtypes.value == "standard":
            return nullcontext()
        both = ExitStack()
        both.enter_context(ranks("allow"))
        both.enter_context(dtypes("standard"))
        return both

    def array_signature(self, query: Array, key: Array, value: Array | None) -> Any:
        arrays = (query, key) if value is None else (query, key, value)
        held: list[Any] = [_untraced_array(x) for x in arrays]
        if not all(isinstance(x, jax.Array) for x in held):
            return None
        shapes = query.shape, key.shape, None if value is None else value.shape
        return *shapes, *((x.dtype, type(x)) for x in arrays), held[0].sharding

    def without_data(self, x: Array) -> Array:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        def run_untransformed(*arrays: Array) -> Any:
            with exclude_transforms():
                return function(*arrays)

        general, untransformed = jax.jit(function), jax.jit(run_untransformed)

        def run(*arrays: Array) -> Any:
            is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
            return (general if is_traced else untransformed)(*arrays)

        return run

    def astype(self, x: Array, dtype: str) -> Array:
        return x if self.dtype_name(x) == dtype else jnp.asarray(x).astype(dtype)

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        return jnp.asarray(np.asarray(data), dtype=dtype)

    def device_of(self, x: Array) -> Any:
        return None

    def full(self, shape: Shape, value: float, like: Array) -> Array:
        # Inside shard_map the result varies along the axes of `like`, so that loops can carry it.
        return lax.full_like(like, value, like.dtype, shape)

    def detach(self, x: Array) -> Array:
        return lax.stop_gradient(x)

    def inner_products(self, query: Array, key: Array) -> Array:
        if query.shape[-1] == 1 == key.shape[-1]:
            # XLA would compute an element-wise product and fuse it with s − top into one
            # multiply-add, which is more precise than top.
            query, key = (jnp.concat([x, jnp.zeros_like(x)], axis=-1) for x in (query, key))
        return super().inner_products(query, key)

    def prevent_fusion(self, x: Array) -> Array:
        # XLA removes an optimization barrier before LLVM fuses the product with s − top.
        return jnp.where(jnp.isnan(x), x + x, x)

    def draw_seed(self, like: Array) -> Any:
        raise ArgumentError("dropout_p on JAX needs seed=, an integer or a jax.random key")

    def seed_from_generator(self, generator: Any) -> Any:
        if not isinstance(generator, jax.Array):
            return super().seed_from_generator(generator)
        typed = jnp.issubdtype(generator.dtype, jax.dtypes.prng_key)
        raw = generator.dtype == jnp.uint32 and generator.ndim > 0  # of jax.random.PRNGKey
        if generator.ndim > raw:
            shape = generator.shape[:-1] if raw else generator.shape
            raise DtypeError(
                f"seed must be one key or integer, not an array {shape}: map over it with jax.vmap"
            )
        if typed or raw:
            return lax.bitcast_convert_type(jax.random.bits(generator, dtype="uint32"), jnp.int32)
        return generator

    def register_record_classes(self) -> None:
        register_records()

    def sigmoid(self, x: Array) -> Array:
        return jax.nn.sigmoid(x)

    def sum_differences(self, query: Array, key: Array, power: int) -> Array | None:
        if power != 2 or not _has_expanded_squares(query, key):
            return None
        return _square_with_products(partial(_expand_squares, lambda *_: None), query, key)

    def has_sum_differences(self, query: Array) -> bool:
        return _has_expanded_squares(query, query)

    def expand_squares(
        self, query: Array, key: Array, width: float, needs_exact: NeedsExact
    ) -> Array | None:
        if not _has_expanded_squares(query, key):
            return None
        query, key = (x if width == 1 else x / width for x in (query, key))
        return _square_with_products(partial(_expand_squares, needs_exact), query, key)

    def slice_span(self, x: Array, span: Span, axis: int) -> Array:
        if x.shape[axis] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, span.start, span.size, axis=x.ndim + axis)

    def add_to_span(self, total: Any, piece: Array, rows: Span | None, cols: Span | None) -> Any:
        at = [jnp.int32(0)] * total.ndim
        for axis, span in ((-2, rows), (-1, cols)):
            if span is not None and total.shape[axis] != 1:
                at[axis] = jnp.int32(span.start)
        there = lax.dynamic_slice(total, at, piece.shape)
        return lax.dynamic_update_slice(total, there + piece, at)

    def fold_spans(self, step: Callable[[Any, Span], Any], carry: Any, spans: Any) -> Any:
        if not isinstance(spans, _SpanArrays):
            if len(spans) < 2:
                return super().fold_spans(step, carry, spans)
            spans = _stack_spans([spans])[0]

        def fold_step(carry: Any, item: tuple[Array, Array, Array]) -> tuple[Any, None]:
            start, first, valid = item
            span = Span(start, spans.size, first if spans.has_overlap else None, spans.is_unmasked)
            if spans.is_full:
                return step(carry, span), None
            return lax.cond(valid, lambda c: step(c, span), lambda c: c, carry), None

        return _checkpointed_scan(fold_step, carry, (spans.start, spans.first_new, spans.valid))

    def map_tiles(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        if len(tiling) == 1:
            return pool(*tiling[0])
        size, total = tiling[0][0].size, tiling[-1][0].start + tiling[0][0].size
        parts = lax.map(lambda item: pool(*_unpack_tile(item, tiling)), _tiling_arrays(tiling))
        return tuple(_join_tiles(part, size, total) for part in parts)

    def fold_tiles(self, step: Callable[[Any, Span, Any], Any], carry: Any, tiling: Tiling) -> Any:
        if len(tiling) == 1:
            return step(carry, *tiling[0])

        def tile_step(carry: Any, item: Any) -> tuple[Any, None]:
            return step(carry, *_unpack_tile(item, tiling)), None

        return _checkpointed_scan(tile_step, carry, _tiling_arrays(tiling))

    def cond(self, condition: Array, yes: ArrayFunction, no: ArrayFunction, *args: Array) -> Array:
        axes = _all_varying_axes([condition, *args])  # vmap fails if branches differ in them
        return lax.cond(condition, yes, no, *(_mark_varying(x, axes) for x in args))

    def loop_until(
        self, done: ArrayFunction, step: PartialStateFunction, state: Any, limit: int
    ) -> Any:
        def should_continue(pair: tuple[Any, Array]) -> Array:
            return jnp.logical_and(pair[1] < limit, jnp.logical_not(done(pair[0])))

        made = zip(*map(jax.tree.leaves, (state, jax.eval_shape(step, state))), strict=True)
        spread = [_mark_varying(x, _varying_axes(y)) for x, y in made]
        state = jax.tree.unflatten(jax.tree.structure(state), spread)
        return lax.while_loop(
            should_continue, lambda pair: (step(pair[0]), pair[1] + 1), (state, 0)
        )[0]

    def stable_topk(self, x: Array, k: int) -> tuple[Array, Array]:
        return tuple(lax.top_k(x, k))  # type: ignore[return-value]

    def hoist_captures(
        self, function: ArrayFunction, *example: Array
    ) -> tuple[ArrayFunction, Arrays]:
        # jax.closure_convert leaves integers captured, and vmap may have created them.
        traced = jax.make_jaxpr(function)(*example)

        def call_with_captured(*args: Array) -> Array:
            given, captured = args[: len(example)], args[len(example) :]
            return jax.core.eval_jaxpr(traced.jaxpr, captured, *given)[0]

        return call_with_captured, tuple(traced.consts)

    def measure_pair_numbers(
        self, function: Any, code: Hashable, query: Array, key: Array
    ) -> int | None:
        try:
            hash(code)
        except TypeError:  # an object without a hash
            code = repr(type(function))
        signature = code, query.shape, key.shape, str(query.dtype)
        numbers = _PAIR_NUMBERS.get(signature, 0)
        if numbers == 0:
            like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key)]
            try:
                traced = jax.make_jaxpr(function)(*like).jaxpr
            except Exception:  # the function reads values, or fails in its own way
                numbers = None
            else:
                pairs = math.prod(query.shape[:-1]) * key.shape[-2]
                numbers = -(-_largest_array(traced) // max(pairs, 1))
            insert_bounded(_PAIR_NUMBERS, signature, numbers, MAX_PAIR_NUMBERS_ENTRIES)
        return numbers

    def vjp(self, function: ArrayFunction, *args: Array) -> tuple[Array, PullBack]:
        return jax.vjp(function, *args)  # type: ignore[return-value]

    def custom_gradient(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        @jax.custom_jvp
        def run_forward(*leaves: Array) -> Arrays:
            with self.use_own_settings():
                return forward(*leaves)[0]

        def push_forward(leaves: Arrays, tangents: Sequence[Any]) -> tuple[Arrays, Arrays]:
            with self.use_own_settings():
                outputs, kept = forward(*leaves)
            moving = [i for i, x in enumerate(tangents) if not isinstance(x, SymbolicZero)]

            def pull_back(held: Any, gradients: Arrays) -> Arrays:
                with self.use_own_settings():
                    found = backward(*held, gradients)
                return tuple(
                    jnp.zeros_like(leaves[i]) if found[i] is None else found[i] for i in moving
                )

            along = tuple(tangents[i] for i in moving)
            return outputs, jvp_from_vjp(pull_back, (leaves, kept), along, outputs)

        run_forward.defjvp(push_forward, symbolic_zeros=True)
        # A query may vary over processes while the key is shared; the key's gradient is then a sum
        # over processes. Mark all leaves as varying, and JAX transposes that step itself.
        axes = _all_varying_axes(leaves)
        return run_forward(*(_mark_varying(x, axes) for x in leaves))


MAX_EXACT_PAIRS_PER_ROW = 16
"""The most pairs of a query whose square is computed once more, from the differences."""


def _has_expanded_squares(query: Array, key: Array) -> bool:
    """Return whether both are float32 or float64 arrays of the same, known widths and lengths."""
    if query.dtype != key.dtype or query.dtype not in (jnp.float32, jnp.float64):
        return False
    d = query.shape[-1]
    known = all(isinstance(n, int) and n for n in (*query.shape, *key.shape))
    return known and d == key.shape[-1] and d >= squares.MIN_EXPANDED_COLUMNS


def _square_differences(query: Array, key: Array) -> Array:
    difference = query[..., :, None, :] - key[..., None, :, :]
    return jnp.sum(difference * difference, axis=-1)


def _centre_rows(query: Array, key: Array) -> tuple[Array, Array]:
    """Return the rows around the mean key, where products of them lose fewest digits."""
    rows = jnp.reshape(lax.stop_gradient(key), (-1, key.shape[-1]))
    centre = jnp.mean(rows, axis=0)
    query, key = (x - jnp.reshape(centre, (1,) * (x.ndim - 1) + (-1,)) for x in (query, key))
    return query, key


def _square_with_products(square: ArrayFunction, query: Array, key: Array) -> Array:
    """Return square(query, key), which is ‖q − k‖², with derivatives from matrix products."""

    @jax.custom_jvp
    def run(query: Array, key: Array) -> Array:
        with FRAMEWORK.use_own_settings():
            return square(query, key)

    @run.defjvp
    def push_forward(arrays: Arrays, tangents: Arrays) -> tuple[Array, Array]:
        with FRAMEWORK.use_own_settings():
            (q, k), (dq, dk) = _centre_rows(*arrays), tangents
            along = jnp.sum(q * dq, axis=-1)[..., :, None] + jnp.sum(k * dk, axis=-1)[..., None, :]
            across = q @ jnp.matrix_transpose(dk) + dq @ jnp.matrix_transpose(k)
            return run(*arrays), 2.0 * (along - across)

    axes = _all_varying_axes((query, key))
    out: Array = run(_mark_varying(query, axes), _mark_varying(key, axes))
    return out


def _expand_squares(needs_exact: NeedsExact, query: Array, key: Array) -> Array:
    """Return ‖q − k‖² by the rule of `squares.expand_squares`, in a graph of fixed shapes."""
    q, k = _centre_rows(query, key)
    own = jnp.sum(q * q, axis=-1)[..., :, None], jnp.sum(k * k, axis=-1)[..., None, :]
    # A comparison with NaN is false.
    in_range = jnp.max(own[0]) + jnp.max(own[1]) <= squares.MAX_EXPANDED_SQUARE
    norms = own[0] + own[1]
    total = jnp.maximum(norms - 2.0 * (q @ jnp.matrix_transpose(k)), 0.0)
    unit = squares.UNIT_BY_BYTES[query.dtype.itemsize]
    exact = needs_exact(total, norms * ((query.shape[-1] + 8) * unit))
    if exact is None:
        return FRAMEWORK.cond(
            in_range,
            lambda total, *_: total,
            lambda _, query, key: _square_differences(query, key),
            *(total, query, key),
        )
    count = jnp.max(jnp.sum(exact, axis=-1))
    return FRAMEWORK.cond(
        jnp.logical_and(in_range, count <= MAX_EXACT_PAIRS_PER_ROW),
        _square_chosen_differences,
        lambda total, exact, query, key: _square_differences(query, key),
        *(total, exact, query, key),
    )


def _square_chosen_differences(total: Array, exact: Array, query: Array, key: Array) -> Array:
    """Return `total` with the exact squares of the pairs `exact`, one pair of a row at a time."""
    lead, m = total.shape[:-2], total.shape[-1]
    query, key = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (query, key))

    def replace_pair(state: Arrays) -> Arrays:
        total, exact = state
        at = jnp.argmax(exact, axis=-1)[..., None]
        difference = query - jnp.take_along_axis(key, at, axis=-2)
        chosen = jnp.logical_and(jnp.arange(m) == at, exact)
        square = jnp.sum(difference * difference, axis=-1, keepdims=True)
        return jnp.where(chosen, square, total), jnp.logical_and(exact, jnp.logical_not(chosen))

    found: Array = FRAMEWORK.loop_until(
        lambda state: jnp.logical_not(jnp.any(state[1])),
        replace_pair,
        (total, exact),
        MAX_EXACT_PAIRS_PER_ROW,
    )[0]
    return found


_PAIR_NUMBERS: dict[Any, int | None] = create_table("frameworks.jax_pair_numbers")
MAX_PAIR_NUMBERS_ENTRIES = 256


def _largest_array(traced: Any) -> int:
    """Return the numbers in the largest array that a jaxpr computes, or those inside it."""
    inner = [
        getattr(x, "jaxpr", x)
        for equation in traced.eqns
        for x in equation.params.values()
        if hasattr(getattr(x, "jaxpr", x), "eqns")
    ]
    own = [math.prod(x.aval.shape) for equation in traced.eqns for x in equation.outvars]
    return max((*own, *map(_largest_array, inner)), default=1)


def _untraced_array(x: Array) -> Array | None:
    """Return the array inside the tracers of grad, jvp and vmap; None inside jit, scan and others.

    A call on the former runs now, operation by operation. So it may run compiled functions.
    """
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "val" if type(x).__name__ == "BatchTracer" else "primal", None)
    return x


def _mark_varying(x: Array, axes: frozenset[str]) -> Array:
    """Return x marked as varying along these mesh axes of `jax.shard_map`."""
    new = tuple(axes - _varying_axes(jax.typeof(x)))
    return lax.pcast(x, new, to="varying") if new else x


def _all_varying_axes(arrays: Sequence[Array]) -> frozenset[str]:
    return frozenset().union(*(_varying_axes(jax.typeof(x)) for x in arrays))


def _varying_axes(kind: Any) -> frozenset[str]:
    """Return the mesh axes along which the type varies; `vma` before JAX 0.10."""
    varying = getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    return varying or getattr(kind, "vma", None) or frozenset()


def _checkpointed_scan(body: Callable[..., Any], carry: Any, items: Any) -> Any:
    """Return the final carry of a scan whose derivative recomputes each block."""
    return lax.scan(jax.checkpoint(body, prevent_cse=False), carry, items)[0]


def _stack_spans(columns: list[list[Span]]) -> list[_SpanArrays]:
    """Return lists of spans as arrays of one length, so that one compiled loop runs them all."""
    length = max(len(spans) for spans in columns)
    flat = [span for spans in columns for span in spans]
    facts: dict[str, Any] = {
        "size": flat[0].size,
        "is_unmasked": all(span.is_unmasked for span in flat),
        "is_full": all(len(spans) == length for spans in columns),
        "has_overlap": any(span.first_new is not None for span in flat),
    }
    out = []
    for spans in columns:
        idle = [0] * (length - len(spans))
        start = np.array([span.start for span in spans] + idle, np.int32)
        first = np.array([_first_new_row(span) for span in spans] + idle, np.int32)
        valid = np.array([True] * len(spans) + [False] * len(idle))
        out.append(_SpanArrays(start, first, valid, **facts))
    return out


def _first_new_row(span: Span) -> int:
    return int(span.start if span.first_new is None else span.first_new)


def _tiling_arrays(tiling: Tiling) -> tuple[Any, ...]:
    """Return the tiling as arrays to scan over, one row per span of queries."""
    lines = _stack_spans([cols for _, cols in tiling]) if any(cols for _, cols in tiling) else []
    return (
        np.array([rows.start for rows, _ in tiling], np.int32),
        np.array([_first_new_row(rows) for rows, _ in tiling], np.int32),
        *(np.stack(column) for column in zip(*(line[:3] for line in lines), strict=True)),
    )


def _unpack_tile(item: Any, tiling: Tiling) -> tuple[Span, Any]:
    """Return one row of `_tiling_arrays` as spans."""
    start, first, *cols = item
    overlap = any(rows.first_new is not None for rows, _ in tiling)
    rows = Span(start, tiling[0][0].size, first if overlap else None)
    if not cols:
        return rows, []
    spans = _SpanArrays(*cols, *_stack_spans([spans for _, spans in tiling])[0][3:])  # type: ignore[call-arg]
    if len(spans.valid.shape) and spans.valid.shape[0] == 1 and spans.is_full:
        first_key = spans.first_new[0] if spans.has_overlap else None
        return rows, [Span(spans.start[0], spans.size, first_key, spans.is_unmasked)]
    return rows, spans


def _join_tiles(part: Array, size: int, total: int) -> Array:
    """Return (blocks, …, size, d) as (…, total, d); the last block may overlap the one before."""
    count = part.shape[0]
    joined = jnp.moveaxis(part, 0, -3)
    joined = jnp.reshape(joined, (*joined.shape[:-3], count * size, joined.shape[-1]))
    fresh = total - (count - 1) * size
    if fresh == size:
        return joined
    return jnp.concat([joined[..., : (count - 1) * size, :], joined[..., -fresh:, :]], axis=-2)


Structure = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]
"""Names of the fields with leaves; the other fields with their values."""

LEAVES_ATTRIBUTE = "_leaves_in_trees"
"""Attribute with the leaf fields of a record whose leaves are not arrays (a tree of booleans)."""


def register_records() -> None:
    """Register new record classes as pytrees."""
    while tree.UNREGISTERED_RECORDS:
        with suppress(IndexError):  # another thread may have taken the last
            kind = tree.UNREGISTERED_RECORDS.pop()
            _register_class(kind)


def _register_class(kind: type) -> None:
    def unflatten_record(about: Structure, children: Sequence[Any]) -> Any:
        names, others = about
        # No __init__: it would validate placeholders that JAX puts in place of arrays.
        record: Any = object.__new__(kind)
        for name, value in (*zip(names, children, strict=True), *others):
            object.__setattr__(
                record, name, value.values if type(value) is tree.FixedArray else value
            )
        if _leaf_field_names(record) != names:
            object.__setattr__(record, LEAVES_ATTRIBUTE, names)
        return record

    register_pytree_with_keys(kind, _flatten_with_keys, unflatten_record, _flatten_record)


def _flatten_record(record: Any) -> tuple[tuple[Any, ...], Structure]:
    names = _leaf_field_names(record)
    others = {x: getattr(record, x) for x in tree.field_names(record) or () if x not in names}
    others.update({name: tree.FixedArray(others[name]) for name in record.static_fields})
    return tuple(getattr(record, name) for name in names), (names, tuple(others.items()))


def _flatten_with_keys(record: Any) -> tuple[tuple[tuple[GetAttrKey, Any], ...], Structure]:
    children, about = _flatten_record(record)
    return tuple(zip(map(GetAttrKey, about[0]), children, strict=True)), about


def _leaf_field_names(record: Any) -> tuple[str, ...]:
    kept: tuple[str, ...] | None = getattr(record, LEAVES_ATTRIBUTE, None)
    if kept is not None:
        return kept
    fields = tree.field_names(record) or ()
    return tuple(
        x for x in fields if x not in record.static_fields and _holds_arrays(getattr(record, x))
    )


def _holds_arrays(value: Any) -> bool:
    """Return whether the value holds arrays, or JAX's placeholders for them."""
    if isinstance(value, tuple | list):
        return any(map(_holds_arrays, value))
    if isinstance(value, tree.Record):
        return True
    return not (isinstance(value, _STATIC_TYPES) or callable(value))


_STATIC_TYPES = (int, float, complex, str, np.generic, type(None))


register_records()
FRAMEWORK = Jax()
