"""The interface of a framework adapter, with an implementation by the array API standard."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import DtypeError, FrameworkError
from qkv.frameworks.squares import NeedsExact
from qkv.util.types import (
    Array,
    ArrayFunction,
    Arrays,
    Gradients,
    LiveMask,
    MergeFunction,
    PartialStateFunction,
    PullBack,
    Shape,
    Span,
)

Tiling = list[tuple[Span, list[Span]]]
"""For each span of queries, the spans of keys in which the mask allows some pair."""

ForwardFunction = Callable[..., tuple[Arrays, Arrays]]
BackwardFunction = Callable[..., Gradients]
ReferenceFunction = Callable[..., Arrays]
"""The three parts of a function with a hand-written gradient: see `Framework.custom_gradient`."""


class GraphNode(NamedTuple):
    """A function of rows (…, m) whose steps depend on values: see `Framework.call_graph_node`."""

    run: Callable[..., Array]
    """x, live, number → (…, width)."""
    output_width: Callable[..., int]
    """x, number → the width of the result."""
    backward: Callable[..., Gradients] | None = None
    """x, number, the result and its gradient → the gradients of x and of the number; None: the
    function has no gradient. PyTorch traces it, so it uses only methods of arrays."""


class ProductScore(NamedTuple):
    """The scores of a function as those of dot products φ·ψ: see `Framework.find_product_score`."""

    phi: Array
    psi: Array
    scale: float | None
    """The scores are scale · φ·ψ; None: they are `score_mod` of φ·ψ."""
    score_mod: Callable[..., Array] | None


GRAPH_NODES: dict[str, GraphNode] = {}

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")

_DTYPE_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}


def is_dtype_of_kind(letter: str, kind: str) -> bool:
    """Return whether a data type with NumPy's kind letter is of a kind of the array standard.

    >>> is_dtype_of_kind("f", "numeric")
    True
    """
    return letter in _DTYPE_KINDS[kind]


class _TransformState(threading.local):
    """Whether this thread runs or traces a function to which no transform will be applied."""

    is_excluded = False


_TRANSFORMS = _TransformState()


@contextmanager
def exclude_transforms() -> Iterator[None]:
    """In this context, no gradient is taken of what runs or is traced, and it is not mapped."""
    before, _TRANSFORMS.is_excluded = _TRANSFORMS.is_excluded, True
    try:
        yield
    finally:
        _TRANSFORMS.is_excluded = before


class Framework:
    """An eager framework with the functions of the array standard, without gradients.

    Subclasses override only what their framework does differently.
    """

    name: str
    xp: Any
    has_gradients = False
    array_types: tuple[type, ...] = ()
    """Array classes to register when the adapter loads: a tracer cannot look them up."""
    needs_equal_spans = False
    """Whether all spans must have the same size, as in a compiled loop."""
    has_random_generator = False
    """Whether `draw_dropout_factors` can use the framework's own random generator."""
    needs_disjoint_spans = False
    """Whether the spans of keys of all queries come from one grid: two are equal or disjoint."""
    compiles_calls = False
    """Whether `compile_function` compiles the plans of calls."""
    signs_captures = False
    """Whether `function_signature` covers what a function captures, not only its code."""
    reruns_user_code = False
    """Whether a class of the caller runs in each call, so that it sees what its methods read."""
    has_fast_argmax = False
    """Whether `argmax` is faster than a comparison with the maximum, and finds the first one."""
    eager_block_numbers = 0
    """Numbers of a block on a CPU where an operation takes long to start; 0: blocks fit caches."""
    has_immutable_arrays = False
    """Whether nothing can write to an array."""
    supports_masked_gather = False
    """Whether `masked_gather` works: the shape of its result depends on values."""

    # Properties of arrays

    def dtype_name(self, x: Array) -> str:
        """Return the standard name of the array's data type."""
        return str(x.dtype).rpartition(".")[2]

    def supports_float64(self, x: Array) -> bool:
        """Return whether the device of x supports float64."""
        return True

    def static_shape(self, x: Array) -> Shape:
        return tuple(x.shape)  # None for a length that is unknown until the graph runs

    def has_unknown_length(self, x: Array) -> bool:
        """Return whether an axis has a length that is unknown until the graph runs."""
        return None in x.shape

    def axis_length(self, x: Array, axis: int) -> Any:
        """Return the length of an axis; an array if it is unknown until the graph runs."""
        return x.shape[axis]

    def dynamic_shape(self, x: Array) -> tuple[Any, ...]:
        """Return `axis_length` of every axis, for the shape of a new array.

        A Python condition needs `static_shape` instead.
        """
        return tuple(x.shape)

    def repeat_heads(self, x: Array, heads: Any) -> Array:
        """Return x (…, few, r, d) with each head repeated for the `heads` that share it."""
        sizes = self.dynamic_shape(x)
        shape = (*sizes[:-2], heads // sizes[-3], *sizes[-2:])
        x = self.xp.broadcast_to(x[..., :, None, :, :], shape)
        return self.xp.reshape(x, (*sizes[:-3], heads, *sizes[-2:]))

    def as_plain_array(self, x: Array, name: str = "x") -> Array:
        """Return x as a plain array; a variable is read. Errors about x call it `name`."""
        return x

    def to_device_of(self, x: Array, like: Array) -> Array:
        """Return x on the device of `like`."""
        return x

    def is_known_true(self, condition: Any) -> bool:
        """Return whether a condition on sizes holds; False if unknown until the graph runs."""
        return bool(condition)

    def has_empty_axis(self, sizes: Iterable[Any]) -> bool:
        """Return whether one of the sizes is known to be 0."""
        return 0 in tuple(sizes)

    def may_be_empty(self, size: Any) -> bool:
        """Return whether a size is unknown until the graph runs, and may then be 0."""
        return False

    def shares_device(self, x: Array, like: Array) -> bool:
        """Return whether the devices of x and `like` allow operations on both."""
        return True

    def place_of(self, x: Array) -> Any:
        """Return the device of x for a cache key; None for the default device."""
        return None

    def function_signature(self, function: Any) -> Any:
        """Return a key that is equal for functions that compute the same; None: there is none.

        Arrays that a function captures are compared by their kind, not by their values.
        """
        return None

    def split_nested(self, x: Array) -> list[Array] | None:
        """Return the sequences of a nested array; None for any other array."""
        return None

    def pack_nested(self, parts: list[Array], like: Array) -> Array:
        """Return the sequences as a nested array with the layout and lengths of `like`."""
        raise NotImplementedError

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def concrete_value(self, x: Array) -> np.ndarray[Any, Any] | None:
        """Return the elements as NumPy; None if that would wait for a device or x is traced."""
        return self.to_numpy(x)

    def is_traced(self, x: Array) -> bool:
        """Return whether x is traced: its values do not exist yet."""
        return False

    def is_abstract(self, x: Array) -> bool:
        """Return whether x has no value yet; False for a value that autodiff only wraps."""
        return self.is_traced(x)

    def is_in_fixed_graph(self, x: Array) -> bool:
        """Return whether x belongs to a graph that would contain every block, and fit any length.

        Such a graph is the caller's. A plan that is compiled keeps the blocks of its engine.
        """
        return self.is_traced(x) and not self.needs_equal_spans

    def allows_length_guards(self) -> bool:
        """Return whether a traced graph may be specialized by a comparison of its lengths."""
        return True

    def is_compiling(self, x: Array) -> bool:
        """Return whether x belongs to a graph that is compiled later, so that no plan may run."""
        return self.is_traced(x)

    def untraced_value(self, x: Array) -> Array | None:
        """Return the array that x stands for while gradients are traced; None if it has none."""
        return None if self.is_traced(x) else x

    def needs_gradient(self, arrays: Iterable[Array]) -> bool:
        return self.has_gradients

    def use_own_settings(self) -> AbstractContextManager[object]:
        """Return a context in which engines compute, whatever the caller has set.

        That is without autocast, with the usual promotion of types, and without warnings of
        floating-point errors: engines handle 0/0 of an empty row.
        """
        return nullcontext()

    def translate_errors(self, x: Array) -> AbstractContextManager[object]:
        """Return a context that turns the framework's errors for arrays like x into ours."""
        return nullcontext()

    def apply_autocast(self, x: Array) -> Array:
        """Return x in the data type of the framework's active autocast."""
        return x

    def plan_quietly(self) -> AbstractContextManager[object]:
        """Return a context for what only the first call of a kind computes, to choose an engine."""
        return nullcontext()

    def leave_autocast(self, x: Array) -> AbstractContextManager[object] | None:
        """Return a context without the active autocast on x's device; None: there is none."""
        return None

    def array_signature(self, query: Array, key: Array, value: Array | None) -> Any:
        """Return a cache key: the three shapes, then what else the choice of an engine depends
        on; None: do not cache."""
        return None

    def without_data(self, x: Array) -> Array:
        """Return a placeholder of x without data, for records that must not hold the data."""
        return x

    def register_record_classes(self) -> None:
        """Register new record classes as pytrees, if the framework has pytrees."""

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the compiled function; None if the framework has no compiler that saves time."""
        return None

    # Making arrays

    def astype(self, x: Array, dtype: str) -> Array:
        return x if self.dtype_name(x) == dtype else self.xp.astype(x, getattr(self.xp, dtype))

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        """Return host data as an array on the device of `like`."""
        host = np.asarray(data).tolist()
        return self.xp.asarray(host, dtype=getattr(self.xp, dtype), device=self.device_of(like))

    def cached_constant(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        """Return constant host data as an array on the device of `like`; cached for each device."""
        return self.array_from_host(data, like, dtype)

    def block_from_host(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        """Return host data as `array_from_host` does, for many blocks read one after another."""
        return self.array_from_host(data, like, dtype)

    def device_of(self, x: Array) -> Any:
        return getattr(x, "device", None)

    def full(self, shape: Shape, value: float, like: Array) -> Array:
        return self.xp.full(shape, value, dtype=like.dtype, device=self.device_of(like))

    def position_range(self, start: Any, size: int, like: Array) -> Array:
        """Return the int32 numbers start … start + size − 1."""
        steps = self.xp.arange(size, dtype=self.xp.int32, device=self.device_of(like))
        return steps if type(start) is int and start == 0 else steps + start

    def fill_unless(self, x: Array, live: LiveMask, other: float = 0.0) -> Array:
        """Return x where `live` is True, and `other` elsewhere. None: `live` is True everywhere."""
        if live is None:
            return x
        return self.xp.where(live, x, self.full((), other, x))

    def replace_nonfinite(self, x: Array, other: float = 0.0) -> Array:
        """Return x with NaN and ±∞ replaced by `other`."""
        return self.fill_unless(x, self.xp.isfinite(x), other)

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + e⁻ˣ), without overflow and exact for small results."""
        small = self.xp.exp(-self.xp.abs(x))
        return self.fill_unless(small, x < 0, 1.0) / (1.0 + small)

    def safe_divisor(self, x: Array) -> Array:
        """Return x with 0 replaced by 1, for use as a divisor."""
        return self.fill_unless(x, x != 0, 1.0)

    def checks_in_graph(self) -> bool:
        """Return whether a compiled function may choose a branch by values at little cost.

        A gradient or a map of a branch would compute the other branch too.
        """
        return self.compiles_calls and _TRANSFORMS.is_excluded

    def zero_rows_if_nonfinite(self, x: Array, zero_rows: ArrayFunction) -> Array:
        """Return `zero_rows(x)`, which sets some rows to 0; or x if it is finite.

        All users ignore these rows if they are finite, and give them the gradient 0.
        """
        return zero_rows(x)

    def checks_values(self, x: Array) -> bool:
        """Return whether `is_surely_finite` reads the values of arrays like x."""
        return not self.has_gradients

    def is_surely_finite(self, x: Array) -> bool:
        """Return whether all elements are known to be finite; False if a check would be slow."""
        return False

    def value_range(self, x: Array) -> tuple[float, float]:
        """Return the smallest and the largest element."""
        return float(self.xp.min(x)), float(self.xp.max(x))

    def row_max(self, x: Array) -> Array:
        """Return the maximum of the last axis, (…, 1)."""
        return self.xp.max(x, axis=-1, keepdims=True)

    def cumulative_sum(self, x: Array, axis: int) -> Array:
        return self.xp.cumulative_sum(x, axis=axis)

    def row_sum(self, x: Array) -> Array:
        return self.xp.sum(x, axis=-1, keepdims=True)

    def fused_softmax(self, x: Array, live: Array | None) -> Array | None:
        """Return softmax(x) along the last axis; None if there is no fused function, or if a row
        is empty or not finite."""
        return None

    def fused_softmax_and_lse(self, x: Array, live: Array | None) -> tuple[Array, Array] | None:
        """Return softmax(x) and the log-sum-exp (…, 1); None as for `fused_softmax`."""
        return None

    def sum_differences(self, query: Array, key: Array, power: int) -> Array | None:
        """Return Σ |q − k|ᵖ (…, n, m) without an array (…, n, m, d); None if that is not faster."""
        return None

    def has_sum_differences(self, query: Array) -> bool:
        """Return whether `sum_differences` supports arrays such as this one."""
        return False

    def expand_squares(
        self, query: Array, key: Array, width: float, needs_exact: NeedsExact
    ) -> Array | None:
        """Return ‖q − k‖² / width² from a product, or None; see `squares.expand_squares`."""
        return None

    def squared_norms(self, x: Array) -> Array:
        """Return ‖x‖² of the rows (…, r, d) as (…, r)."""
        return self.xp.sum(x * x, axis=-1)

    def tanh(self, x: Array, spend: bool = False) -> Array:
        """Return tanh x; with `spend`, x may be overwritten."""
        return self.xp.tanh(x)

    def exp_shifted(self, x: Array, top: Array, live: LiveMask, spend: bool = False) -> Array:
        """Return exp(x − top), 0 where not live; with `spend`, x may be overwritten."""
        return self.xp.exp(self.fill_unless(x - top, live, -float("inf")))

    def excess_over_threshold(self, x: Array, top: Array, tau: Array, live: LiveMask) -> Array:
        """Return max(0, x − top − tau), 0 where not live; NaN stays NaN."""
        x = x - top - tau
        over = self.xp.logical_not(x <= 0)
        return self.fill_unless(x, over if live is None else self.xp.logical_and(over, live))

    def as_numpy_view(self, x: Array) -> Array | None:
        """Return a NumPy view of x; None if x is not on the host or needs a gradient."""
        return None

    def from_numpy_view(self, x: Array) -> Array:
        """Return a NumPy array as an array of the framework, without a copy."""
        return x

    def masked_gather(self, x: Array, mask: Array, top: Array) -> tuple[Array, Any]:
        """Return x − top where the mask holds, packed to the left and padded with −∞, and the
        positions for `masked_scatter`."""
        raise NotImplementedError(f"{self.name} has no masked_gather")

    def masked_scatter(self, picked: Array, at: Any, into: Array | None = None) -> Array:
        """Return gathered elements at their positions among zeros; `into` may be overwritten."""
        raise NotImplementedError(f"{self.name} has no masked_scatter")

    def detach(self, x: Array) -> Array:
        """Return x as a constant, through which no gradient flows."""
        return x

    def take_positions(self, x: Array, at: Array) -> Array:
        """Return x[at] for a vector x and positions of any shape."""
        flat = self.xp.take(x, self.xp.reshape(at, (-1,)), axis=0)
        return self.xp.reshape(flat, self.dynamic_shape(at))

    def matmul(self, x: Array, y: Array) -> Array:
        """Return x y."""
        return x @ y

    def multiplies_16bit(self, x: Array) -> bool:
        """Return whether `multiply_16bit` supports arrays like x, and is fast."""
        return False

    def multiply_16bit(self, x: Array, y: Array) -> Array:
        """Return x y in the 16-bit dtype of y. x is rounded to it; sums are float32."""
        raise NotImplementedError(f"{self.name} has no fast products of 16 bits")

    def inner_products(self, query: Array, key: Array) -> Array:
        """Return QKᵀ."""
        return self.xp.matmul(query, self.xp.matrix_transpose(key))

    def dot_vector(self, x: Array, vector: Array) -> Array:
        """Return Σⱼ x…ⱼ vⱼ: (…, d), (d,) → (…)."""
        return self.inner_products(x, vector[None, :])[..., 0]

    def prevent_fusion(self, x: Array) -> Array:
        """Return x so that a compiler rounds it before it is used, instead of fusing."""
        return x

    # Random numbers

    def draw_seed(self, like: Array) -> Any:
        """Return a random seed."""
        return int(np.random.default_rng().integers(2**31 - 1))

    def seed_from_generator(self, generator: Any) -> Any:
        """Return a seed drawn from one of the framework's random generators."""
        raise DtypeError(
            f"seed must be an integer or a random generator of {self.name}, not "
            f"{type(generator).__name__}"
        )

    def draw_dropout_factors(self, like: Array, p: float) -> Array:
        """Return an array like `like`: 0 with probability p, else 1 / (1 − p).

        The framework's own generator draws the numbers.
        """
        raise FrameworkError(f"{self.name} has no random generator for dropout: pass a seed")

    # Blocks

    def slice_span(self, x: Array, span: Span, axis: int) -> Array:
        """Return the span of an axis (−1 or −2); an axis of length 1 broadcasts."""
        size = x.shape[axis]
        known = type(span.start) is type(span.size) is int  # not traced
        is_all = known and span.start == 0 and self.is_known_true(size == span.size)
        if is_all or self.is_known_true(size == 1):
            return x
        piece = slice(span.start, span.start + span.size)
        return x[..., piece] if axis == -1 else x[..., piece, :]

    def fold_spans(
        self, step: Callable[[Any, Span], Any], carry: Any, spans: Sequence[Span]
    ) -> Any:
        """Return the carry after carry ← step(carry, span) for every span."""
        for span in spans:
            carry = step(carry, span)
        return carry

    def reduce_spans(
        self, lift: PartialStateFunction, merge: MergeFunction, start: Any, spans: Sequence[Span]
    ) -> Any:
        """Return the merged states of the spans; `merge` is associative with identity `start`."""
        return self.fold_spans(lambda state, span: merge(state, lift(span)), start, spans)

    def map_tiles(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        """Return pool(span, spans of keys) of every span of queries, joined along axis −2."""
        parts = [pool(rows, cols) for rows, cols in tiling]
        if len(parts) == 1:
            return parts[0]
        return tuple(self.xp.concat(list(column), axis=-2) for column in zip(*parts, strict=True))

    def fold_tiles(self, step: Callable[[Any, Span, Any], Any], carry: Any, tiling: Tiling) -> Any:
        """Return the carry after carry ← step(carry, query span, key spans) over the tiling."""
        for rows, cols in tiling:
            carry = step(carry, rows, cols)
        return carry

    def new_accumulator(self, like: Array) -> Any:
        """Return a zero accumulator of like's shape for `add_to_span` and `accumulator_total`."""
        return self.full(self.static_shape(like), 0.0, like)

    def add_to_span(self, total: Any, piece: Array, rows: Span | None, cols: Span | None) -> Any:
        """Add `piece` to the rows and columns `rows`, `cols` of the accumulator, and return it.

        None means the whole axis: −2 for rows, −1 for columns.
        """
        at = [slice(None), slice(None)]
        for axis, span in ((-2, rows), (-1, cols)):
            if span is not None and total.shape[axis] != 1:
                at[axis] = slice(span.start, span.start + span.size)
        total[(..., *at)] += piece
        return total

    def accumulator_total(self, accumulator: Any) -> Array:
        return accumulator

    # Control flow

    def cond(self, condition: Array, yes: ArrayFunction, no: ArrayFunction, *args: Array) -> Array:
        """Return yes(*args) if the condition, one boolean, holds, else no(*args)."""
        return yes(*args) if bool(condition) else no(*args)

    def loop_until(
        self, done: ArrayFunction, step: PartialStateFunction, state: Any, limit: int
    ) -> Any:
        """Return the state after state ← step(state) until done(state), at most `limit` times."""
        for _ in range(limit):
            if bool(done(state)):
                break
            state = step(state)
        return state

    def call_graph_node(self, name: str, x: Array, live: LiveMask, number: Any) -> Array | None:
        """Return `GRAPH_NODES[name].run(x, live, number)` as one opaque node of a graph.

        None if no graph is traced, or if the graph cannot have opaque nodes. `number` may be an
        array with as many axes as x.
        """
        return None

    def untied_top_mask(self, x: Array, k: int) -> Array | None:
        """Return booleans, True for the k largest of each row; for a row with fewer than k numbers
        above −∞, all are True.

        None if a row has NaN or a tie for the last place, or if the framework has no fast way.
        """
        return None

    def stable_topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return the k largest of the last axis and their positions.

        Of equal elements, the one at the lowest position comes first.
        """
        order = self.xp.argsort(x, axis=-1, descending=True, stable=True)[..., :k]
        return self.take_along_last(x, order), order

    def take_rows(self, x: Array, at: Array) -> Array:
        """Return the rows (…, r, d) of x (…, m, d) at the positions `at` (…, r, 1)."""
        return self.xp.take_along_axis(x, at, axis=-2)

    def take_along_last(self, x: Array, at: Array) -> Array:
        """Return the elements of the last axis at these positions."""
        return self.xp.take_along_axis(x, at, axis=-1)

    # Gradients

    def with_zero_gradient(self, x: Array) -> Array:
        """Return x with a gradient of 0; frameworks may otherwise leave it missing or undefined."""
        return x

    def hoist_captures(
        self, function: ArrayFunction, *example: Array
    ) -> tuple[ArrayFunction, Arrays]:
        """Return the function with its captured arrays as further arguments, and the arrays."""
        return function, ()

    def may_capture_arrays(self, function: Callable[..., Any]) -> bool:
        """Return whether the function may capture arrays that `hoist_captures` cannot find."""
        return False

    def device_block_numbers(self, like: Array) -> int | None:
        """Return how many numbers a block may hold in an accelerator's memory; None: on the CPU."""
        return None

    def use_tensor_cores(self) -> AbstractContextManager[object]:
        """Return a context for float32 products of numbers that come from 16-bit arrays.

        They are exact on tensor cores, which are faster.
        """
        return nullcontext()

    def measure_pair_numbers(
        self, function: Any, code: Hashable, query: Array, key: Array
    ) -> int | None:
        """Return how many numbers `function(query, key)` needs in memory for each query and key.

        `code` is `tree.code_signature` of the function, under which the result is cached. None if
        the framework can measure it only by running the function on data.
        """
        return None

    def run_repeatable(self, compute: Callable[[], Array | None]) -> tuple[Array | None, bool]:
        """Return compute() for a cache, and whether it drew no random numbers."""
        return compute(), True

    def find_dot_scale(self, function: Any, query: Array, key: Array) -> float | None:
        """Return c if `function(query, key)` is c · q·k and that is known; else None."""
        return None

    def find_product_score(self, function: Any, query: Array, key: Array) -> ProductScore | None:
        """Return how `function(query, key)` computes scores from dot products; None: unknown.

        The caller must check that the score_mod is pointwise.
        """
        return None

    def vjp(self, function: ArrayFunction, *args: Array) -> tuple[Array, PullBack]:
        """Return function(*args) and the map from its gradient to the gradients of args."""
        raise FrameworkError(f"{self.name} has no gradients")

    def custom_gradient(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        """Return the outputs of `forward(*leaves) -> (outputs, saved)`, with a custom gradient.

        `backward(leaves, saved, gradients)` returns one gradient per leaf, None for zero.
        `reference(*leaves) -> outputs` computes the same with differentiable operations of the
        framework, for derivatives of higher order.
        """
        return forward(*leaves)[0]

    def run_differentiable(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        """Return `custom_gradient` if a gradient is needed, else the outputs of `forward`."""
        wanted = self.has_gradients and self.needs_gradient(leaves)
        return (
            self.custom_gradient(forward, backward, reference, leaves)
            if wanted
            else forward(*leaves)[0]
        )


MAX_SEARCHED_ENTRIES = 256
"""The most entries of a captured list or dictionary that are searched for arrays."""


def captures_arrays(function: Callable[..., Any], root: str) -> bool:
    """Return whether a function's closure, defaults, globals or owner hold arrays or models.

    `root` is the name of the framework's top package.
    """
    candidates: list[Any] = [getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        candidates += [*function.args, *function.keywords.values()]
        function = function.func
    if inspect.isfunction(function):
        closure = inspect.getclosurevars(function)
        candidates += [*closure.nonlocals.values(), *closure.globals.values()]
        candidates += list(function.__defaults__ or ()) + list(
            (function.__kwdefaults__ or {}).values()
        )
    elif not inspect.ismethod(function):
        candidates.append(function)
    for item in list(candidates):
        if type(item) in (tuple, list, dict):
            entries = item.values() if type(item) is dict else item
            candidates += itertools.islice(entries, MAX_SEARCHED_ENTRIES)
    for item in candidates:
        inside = list(vars(item).values()) if hasattr(item, "__dict__") else []
        if inspect.ismodule(item) or inspect.isclass(item):
            continue
        if any(_is_array_of(root, thing) for thing in (item, *inside)):
            return True
    return False


def _is_array_of(root: str, thing: Any) -> bool:
    modules = {base.__module__.partition(".")[0] for base in type(thing).__mro__}
    is_array = root in modules and hasattr(thing, "shape") and hasattr(thing, "dtype")
    return is_array or hasattr(thing, "trainable_variables") or hasattr(thing, "collect_params")
