"""What qkv asks of a framework beyond the array standard, in the plainest eager form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import DtypeError, FrameworkError
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
"""For each span of queries, the spans of keys that a mask leaves to look at."""

ForwardFunction = Callable[..., tuple[Arrays, Arrays]]
BackwardFunction = Callable[..., Gradients]
ReferenceFunction = Callable[..., Arrays]
"""The three parts of a function with a gradient of its own: see `Framework.custom_gradient`."""


class GraphNode(NamedTuple):
    """A function of rows (…, m) that looks at numbers: see `Framework.call_graph_node`."""

    run: Callable[..., Array]
    """x, live, number → (…, width)."""
    output_width: Callable[..., int]
    """x, number → the width."""
    backward: Callable[..., Gradients] | None = None
    """x, number, the result and its gradient → the gradients of x and of the number, by the arrays'
    own methods; None: it has none. While torch makes a graph of it, nothing may be looked up."""


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


class Framework:
    """An eager framework of the array standard, without gradients.

    The subclasses replace what their framework does differently, and nothing else.
    """

    name: str
    xp: Any
    has_gradients = False
    array_types: tuple[type, ...] = ()
    """Types that are known before an array of them is met: a tracer cannot look them up."""
    needs_equal_spans = False
    """Whether every span must have one size, as a compiled loop needs."""
    has_random_generator = False
    """Whether it draws random numbers of its own that gradients know of."""
    needs_disjoint_spans = False
    """Whether spans must not overlap from one row of blocks to the next."""
    supports_masked_gather = False
    """Whether `masked_gather` works here: a compiled shape must not hang on values."""

    # What an array is

    def dtype_name(self, x: Array) -> str:
        """The element type by its standard name."""
        return str(x.dtype).rpartition(".")[2]

    def supports_float64(self, x: Array) -> bool:
        """Whether there is float64 where x is."""
        return True

    def static_shape(self, x: Array) -> Shape:
        return tuple(x.shape)  # a length unknown until a graph runs is None

    def has_unknown_length(self, x: Array) -> bool:
        """Whether the length of some axis is unknown until a graph runs: no block can be cut."""
        return None in x.shape

    def axis_length(self, x: Array, axis: int) -> Any:
        """The length of an axis, as a number or, where only a run will tell, as an array."""
        return x.shape[axis]

    def dynamic_shape(self, x: Array) -> tuple[Any, ...]:
        """The length of every axis, likewise: what an array is made by, where `static_shape`
        decides."""
        return tuple(x.shape)

    def repeat_heads(self, x: Array, heads: Any) -> Array:
        """x (…, few, r, d) with each head repeated for those of so many `heads` that share it."""
        sizes = self.dynamic_shape(x)
        shape = (*sizes[:-2], heads // sizes[-3], *sizes[-2:])
        x = self.xp.broadcast_to(x[..., :, None, :, :], shape)
        return self.xp.reshape(x, (*sizes[:-3], heads, *sizes[-2:]))

    def as_plain_array(self, x: Array, name: str = "x") -> Array:
        """x as an array of operations (a variable is read); refused by its name."""
        return x

    def to_device_of(self, x: Array, like: Array) -> Array:
        """x on the device of `like`."""
        return x

    def surely(self, condition: Any) -> bool:
        """Whether a comparison of sizes holds; False where only a run of the graph will tell."""
        return bool(condition)

    def has_empty_axis(self, sizes: Iterable[Any]) -> bool:
        """Whether one of the sizes is surely 0."""
        return 0 in tuple(sizes)

    def shares_device(self, x: Array, like: Array) -> bool:
        """Whether operations take x together with `like`, as far as devices decide that."""
        return True

    def place_of(self, x: Array) -> Any:
        """The device of x, where calls with arrays on different devices must be told apart."""
        return None

    def split_nested(self, x: Array) -> list[Array] | None:
        """The sequences of different lengths that x holds; None of an array that is one block."""
        return None

    def pack_nested(self, parts: list[Array], like: Array) -> Array:
        """Sequences as `like` holds them, and as long as those."""
        raise NotImplementedError

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def concrete_value(self, x: Array) -> np.ndarray[Any, Any] | None:
        """The elements on the host where that costs no wait, else None."""
        return self.to_numpy(x)

    def is_traced(self, x: Array) -> bool:
        """Whether x stands for a value that is not there yet."""
        return False

    def is_abstract(self, x: Array) -> bool:
        """Whether no value of x is there while Python runs, not even beside its derivative."""
        return self.is_traced(x)

    def needs_gradient(self, arrays: Iterable[Array]) -> bool:
        return self.has_gradients

    def compute_context(self) -> AbstractContextManager[object]:
        """Silence for what is handled: 0/0 of an empty row, the exponential of −∞."""
        return nullcontext()

    def translate_errors(self, x: Array) -> AbstractContextManager[object]:
        """Where what the framework refuses of arrays like x is told in words of ours."""
        return nullcontext()

    def apply_autocast(self, x: Array) -> Array:
        """x in the dtype that the framework now has its own products run in."""
        return x

    def array_signature(self, query: Array, key: Array, value: Array | None) -> Any:
        """The three shapes, then what else of the arrays a choice hangs on; None: choose anew."""
        return None

    def without_data(self, x: Array) -> Array:
        """x without its numbers, to stand for it in a record that must not keep it."""
        return x

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """The function of arrays as one compiled step, where that is quicker than its steps."""
        return None

    # Making arrays

    def astype(self, x: Array, dtype: str) -> Array:
        return x if self.dtype_name(x) == dtype else self.xp.astype(x, getattr(self.xp, dtype))

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        """Host data as an array beside `like`."""
        host = np.asarray(data).tolist()
        return self.xp.asarray(host, dtype=getattr(self.xp, dtype), device=self.device_of(like))

    def cached_constant(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        """The same of host data that never changes, copied to each device once."""
        return self.array_from_host(data, like, dtype)

    def block_from_host(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        """The same of one block of many, which are read one after another."""
        return self.array_from_host(data, like, dtype)

    def device_of(self, x: Array) -> Any:
        return getattr(x, "device", None)

    def full(self, shape: Shape, value: float, like: Array) -> Array:
        return self.xp.full(shape, value, dtype=like.dtype, device=self.device_of(like))

    def position_range(self, start: Any, size: int, like: Array) -> Array:
        """The int32 numbers start … start + size."""
        steps = self.xp.arange(size, dtype=self.xp.int32, device=self.device_of(like))
        return steps if type(start) is int and start == 0 else steps + start

    def fill_unless(self, x: Array, live: LiveMask, other: float = 0.0) -> Array:
        """x where live, else the number; `live` None means everywhere."""
        if live is None:
            return x
        return self.xp.where(live, x, self.full((), other, x))

    def replace_nonfinite(self, x: Array, other: float = 0.0) -> Array:
        """x where it is finite, else the number."""
        return self.fill_unless(x, self.xp.isfinite(x), other)

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + e⁻ˣ): nothing overflows, and what is small keeps its digits."""
        small = self.xp.exp(-self.xp.abs(x))
        return self.fill_unless(small, x < 0, 1.0) / (1.0 + small)

    def safe_divisor(self, x: Array) -> Array:
        """x, or 1 where it is 0: a divisor."""
        return self.fill_unless(x, x != 0, 1.0)

    def is_surely_finite(self, x: Array) -> bool:
        """Whether no number is NaN or infinite, as far as one look at the host can tell."""
        return False

    def row_max(self, x: Array) -> Array:
        """The largest of the last axis, (…, 1)."""
        return self.xp.max(x, axis=-1, keepdims=True)

    def row_sum(self, x: Array) -> Array:
        return self.xp.sum(x, axis=-1, keepdims=True)

    def fused_softmax(self, x: Array, live: Array | None) -> Array | None:
        """exp(x) over its sum along the last axis, where that is one step here and no row is
        empty or holds what is not finite."""
        return None

    def fused_softmax_and_lse(self, x: Array, live: Array | None) -> tuple[Array, Array] | None:
        """The same with the logarithm of the sum (…, 1), on the same terms."""
        return None

    def tanh(self, x: Array, spend: bool = False) -> Array:
        """tanh x; `spend` says that x may be overwritten."""
        return self.xp.tanh(x)

    def exp_shifted(self, x: Array, top: Array, live: LiveMask, spend: bool = False) -> Array:
        """exp(x − top), 0 where not live; `spend` says that x may be overwritten."""
        return self.xp.exp(self.fill_unless(x - top, live, -float("inf")))

    def excess_over_threshold(self, x: Array, top: Array, tau: Array, live: LiveMask) -> Array:
        """max(0, x − top − tau), 0 where not live; a NaN is not hidden."""
        x = x - top - tau
        over = self.xp.logical_not(x <= 0)
        return self.fill_unless(x, over if live is None else self.xp.logical_and(over, live))

    def as_numpy_view(self, x: Array) -> Array | None:
        """x as NumPy's array over the same memory, where it is there and wants no gradient."""
        return None

    def from_numpy_view(self, x: Array) -> Array:
        """NumPy's array as the framework's own, over the same memory."""
        return x

    def masked_gather(self, x: Array, mask: Array, top: Array) -> tuple[Array, Any]:
        """x − top where the mask holds, each row's side by side, then −∞ up to the longest row.

        Beside it, where `masked_scatter` will find what was picked.
        """
        raise NotImplementedError(f"{self.name} does not pick")

    def masked_scatter(self, picked: Array, at: Any, into: Array | None = None) -> Array:
        """What was picked, where it stood, among zeros; an array given may be overwritten."""
        raise NotImplementedError(f"{self.name} does not pick")

    def detach(self, x: Array) -> Array:
        """x as a constant: no gradient flows through it."""
        return x

    def take_positions(self, x: Array, at: Array) -> Array:
        """x[at], for a vector x and positions of any shape."""
        flat = self.xp.take(x, self.xp.reshape(at, (-1,)), axis=0)
        return self.xp.reshape(flat, self.dynamic_shape(at))

    def matmul(self, x: Array, y: Array) -> Array:
        """x y, by the shortest way."""
        return x @ y

    def inner_products(self, query: Array, key: Array) -> Array:
        """QKᵀ"""
        return self.xp.matmul(query, self.xp.matrix_transpose(key))

    def dot_vector(self, x: Array, vector: Array) -> Array:
        """Σⱼ x…ⱼ vⱼ: (…, d), (d,) → (…)"""
        return self.inner_products(x, vector[None, :])[..., 0]

    def prevent_fusion(self, x: Array) -> Array:
        """x rounded as it stands: a compiler must not fuse it with what reads it."""
        return x

    # Chance

    def draw_seed(self, like: Array) -> Any:
        """A seed that nobody chose."""
        return int(np.random.default_rng().integers(2**31 - 1))

    def seed_from_generator(self, generator: Any) -> Any:
        """A seed drawn from a generator of the framework's own."""
        raise DtypeError(
            f"seed must be a whole number or a random generator of {self.name}'s, not "
            f"{type(generator).__name__}"
        )

    def dropout_mask(self, like: Array, p: float) -> Array:
        """0 with probability p, else 1 / (1 − p), drawn by the framework's own generator."""
        raise FrameworkError(f"{self.name} draws no numbers of its own")

    # Blocks

    def slice_span(self, x: Array, span: Span, axis: int) -> Array:
        """The span of an axis (−1 or −2); an axis of length one is shared by all."""
        size = x.shape[axis]
        known = type(span.start) is type(span.size) is int  # a graph may not tell
        if size == 1 or (known and span.start == 0 and size == span.size):
            return x
        piece = slice(span.start, span.start + span.size)
        return x[..., piece] if axis == -1 else x[..., piece, :]

    def fold_spans(
        self, step: Callable[[Any, Span], Any], carry: Any, spans: Sequence[Span]
    ) -> Any:
        """carry ← step(carry, span) over the spans."""
        for span in spans:
            carry = step(carry, span)
        return carry

    def reduce_spans(
        self, lift: PartialStateFunction, merge: MergeFunction, start: Any, spans: Sequence[Span]
    ) -> Any:
        """The merged states of the spans; `merge` is associative, and `start` is its identity."""
        return self.fold_spans(lambda state, span: merge(state, lift(span)), start, spans)

    def map_tiles(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        """pool(span, spans of keys) for each span of queries, joined along axis −2."""
        parts = [pool(rows, cols) for rows, cols in tiling]
        if len(parts) == 1:
            return parts[0]
        return tuple(self.xp.concat(list(column), axis=-2) for column in zip(*parts, strict=True))

    def fold_tiles(self, step: Callable[[Any, Span, Any], Any], carry: Any, tiling: Tiling) -> Any:
        """carry ← step(carry, span of queries, spans of keys) over the tiling."""
        for rows, cols in tiling:
            carry = step(carry, rows, cols)
        return carry

    def new_accumulator(self, like: Array) -> Any:
        """A zero of like's shape that `add_to_span` adds pieces to and `accumulator_total` turns
        into an array."""
        return self.full(self.static_shape(like), 0.0, like)

    def add_to_span(self, total: Any, piece: Array, rows: Span | None, cols: Span | None) -> Any:
        """Add a piece at a span of axis −2 and of axis −1 (None: the whole axis)."""
        at = [slice(None), slice(None)]
        for axis, span in ((-2, rows), (-1, cols)):
            if span is not None and total.shape[axis] != 1:
                at[axis] = slice(span.start, span.start + span.size)
        total[(..., *at)] += piece
        return total

    def accumulator_total(self, accumulator: Any) -> Array:
        return accumulator

    # Control

    def cond(self, condition: Array, yes: ArrayFunction, no: ArrayFunction, *args: Array) -> Array:
        """yes(*args) where the one boolean holds, else no(*args)."""
        return yes(*args) if bool(condition) else no(*args)

    def loop_until(
        self, done: ArrayFunction, step: PartialStateFunction, state: Any, limit: int
    ) -> Any:
        """state ← step(state) until done(state), at most `limit` times."""
        for _ in range(limit):
            if bool(done(state)):
                break
            state = step(state)
        return state

    def call_graph_node(self, name: str, x: Array, live: LiveMask, number: Any) -> Array | None:
        """`NODES[name].run(x, live, number)` as one step that a graph does not look into; None
        where there is no such graph. `number` may be an array of as many axes as x."""
        return None

    def stable_topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """The k largest of the last axis and their positions, ties by the lowest position."""
        order = self.xp.argsort(x, axis=-1, descending=True, stable=True)[..., :k]
        return self.take_along_last(x, order), order

    def take_along_last(self, x: Array, at: Array) -> Array:
        """The numbers of the last axis that stand at these positions."""
        return self.xp.take_along_axis(x, at, axis=-1)

    # Gradients

    def with_zero_gradient(self, x: Array) -> Array:
        """x, where no result depends on it, so that its gradient is 0."""
        return x

    def hoist_captures(
        self, function: ArrayFunction, *example: Array
    ) -> tuple[ArrayFunction, Arrays]:
        """function(*example, *captured): the arrays it held, made into further arguments."""
        return function, ()

    def may_capture_arrays(self, function: Callable[..., Any]) -> bool:
        """Whether the function may hold arrays whose gradient `hoist_captures` cannot find."""
        return False

    def vjp(self, function: ArrayFunction, *args: Array) -> tuple[Array, PullBack]:
        """function(*args), and the map from the gradient of that to the gradients of args."""
        raise FrameworkError(f"{self.name} has no gradients")

    def custom_gradient(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        """The outputs of `forward(*leaves) -> (outputs, kept)`, with a gradient of our own.

        `backward(leaves, kept, gradients)` gives one gradient per leaf, None for zero.
        `reference(*leaves) -> outputs` is the same function in operations that the framework
        differentiates itself, for derivatives of higher order.
        """
        return forward(*leaves)[0]

    def run_differentiable(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        """`custom_gradient` where a gradient is wanted, else what `forward` gives."""
        wanted = self.has_gradients and self.needs_gradient(leaves)
        return (
            self.custom_gradient(forward, backward, reference, leaves)
            if wanted
            else forward(*leaves)[0]
        )


def captures_arrays(function: Callable[..., Any], root: str) -> bool:
    """Whether a function's closure, defaults, globals or owner hold arrays of a framework."""
    held: list[Any] = [getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    if inspect.isfunction(function):
        seen = inspect.getclosurevars(function)
        held += [*seen.nonlocals.values(), *seen.globals.values()]
        held += list(function.__defaults__ or ()) + list((function.__kwdefaults__ or {}).values())
    elif not inspect.ismethod(function):
        held.append(function)
    for item in held:
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
