"""PyTorch: the adapter, its autograd functions, and its operator for opaque graph nodes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat.torch
import numpy as np
import torch
from torch import compiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._python_dispatch import TorchDispatchMode

from qkv.errors import FrameworkError
from qkv.frameworks import pinned_memory
from qkv.frameworks.base import (
    GRAPH_NODES,
    BackwardFunction,
    ForwardFunction,
    Framework,
    ProductScore,
    ReferenceFunction,
)
from qkv.frameworks.squares import NeedsExact, SquareOperations, expand_squares
from qkv.frameworks.torch_captures import graph_leaves, hoist_captured_tensors
from qkv.frameworks.torch_dot_scale import find_dot_scale
from qkv.frameworks.torch_product_scores import (
    ProductKind,
    find_product,
    find_product_rows,
    make_score_mod,
)
from qkv.frameworks.torch_products import (
    HAS_FAST_BFLOAT16,
    Product16Bit,
    multiply_keys_16bit,
    use_tensor_cores,
)
from qkv.frameworks.torch_signatures import (
    FixedSignatureBuilder,
    NoSignatureError,
    SignatureBuilder,
)
from qkv.util.caches import create_table, get_or_compute
from qkv.util.types import (
    Array,
    ArrayFunction,
    Arrays,
    Gradients,
    LiveMask,
    PartialStateFunction,
    PullBack,
    Shape,
)

_NULL_CONTEXT = nullcontext()

MAX_DEVICE_BLOCK_NUMBERS = 2**27
"""The most numbers of a block on a GPU: 512 MiB of float32 scores, and as much for the weights."""

_PAIR_NUMBERS: dict[Hashable, int | None] = create_table("torch.pair_numbers")
MAX_PAIR_NUMBERS_ENTRIES = 256
_DOT_SCALES: dict[Hashable, float | None] = create_table("torch.dot_scales")
MAX_DOT_SCALES = 256
_PRODUCT_KINDS: dict[Hashable, ProductKind | None] = create_table("torch.product_kinds")

# Called in every `attend`, so bound to short names.
_is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
_has_functorch_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def _is_tracing() -> bool:
    return (
        _is_dynamo_compiling()
        or compiler._is_compiling_flag  # export
        or _has_functorch_transforms()
        or forward_ad._current_level >= 0
        or _dispatch_mode_count() > 0  # make_fx, fake tensors
        or _is_jit_tracing()  # jit.trace
    )


def _is_surely_true(condition: Any) -> bool:
    # Under torch.jit.trace sizes are tensors, which guard_or_false rejects.
    return bool(condition if isinstance(condition, torch.Tensor) else guard_or_false(condition))


_DEFAULT_DISPATCH = torch.Tensor.__torch_dispatch__


def _is_captured(x: torch.Tensor) -> bool:
    """Return whether a CUDA graph records operations, which then cannot read values."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_wrapper_subclass(x: Any) -> bool:
    """Return whether x is a wrapper subclass: it overrides dispatch and holds no data itself."""
    return getattr(type(x), "__torch_dispatch__", _DEFAULT_DISPATCH) is not _DEFAULT_DISPATCH


_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The data types that autocast casts."""
_is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

MAX_UNROLLED_STEPS = 48
"""Steps of a traced search, which cannot test whether it has converged. Newton's method took at
most 9 steps in experiments; bisection reaches float64 precision after 48."""

MIN_DROPOUT_FOR_16_BITS = 2**-8
"""Below this probability, 16 random bits per element are too few."""

HALF_DTYPES = (torch.float16, torch.bfloat16)

HAS_MKL: bool = torch.backends.mkl.is_available()
"""Whether PyTorch uses MKL. OpenBLAS multiplies short matrices with a transposed second factor
many times slower than with a copy of it."""

MIN_ROWS_TO_COPY, MAX_PRODUCT_SIZE_TO_COPY = 12, 2**15
"""Fewest rows of x, and most elements of x yᵀ, for which a copy of yᵀ makes the product faster."""


def is_finite(*arrays: Array) -> bool:
    """Return whether CPU arrays are finite, judged by their sums: False if a sum overflows."""
    records = _is_grad_enabled()
    _set_grad_enabled(False)  # a check needs no graph
    try:
        for x in arrays:
            if x.dtype is torch.float16 and x.numel():  # its sums overflow too easily
                if not all(math.isfinite(y.item()) for y in x.aminmax()):
                    return False
            # PyTorch adds 16-bit numbers in float32; asking for that dtype takes a slower kernel.
            elif not math.isfinite(x.sum().item()):  # faster than float(total)
                return False
        return True
    finally:
        _set_grad_enabled(records)


class DifferenceSums(torch.autograd.Function):
    """Σ |q − k|ᵖ of all pairs (…, n, m), without an array of differences (…, n, m, d)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Array,
        key: Array,
        power: int,
        width: float,
        needs_exact: NeedsExact | None,
    ) -> Array:
        ctx.power, ctx.scale = power, 1.0 / (width * width)
        total = _sum_powers(query, key, power, width, needs_exact)
        ctx.save_for_backward(query, key, *(() if power == 2 else (total,)))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Array) -> tuple[Array | None, ...]:
        query, key, *distance = ctx.saved_tensors
        if ctx.power == 2:
            gradient = gradient if ctx.scale == 1 else gradient * ctx.scale
            # Σ 2 (q − k) g, around the mean key, where the differences lose fewest digits.
            centre = key.detach().reshape(-1, key.shape[-1]).mean(0)
            q, k = query - centre, key - centre
            query_gradient = 2.0 * (q * gradient.sum(-1)[..., None] - gradient @ k)
            key_gradient = 2.0 * (k * gradient.sum(-2)[..., None] - gradient.mT @ q)
        elif torch.is_grad_enabled():  # for a second derivative
            sign = (query[..., :, None, :] - key[..., None, :, :]).sign()
            query_gradient = (sign * gradient[..., None]).sum(-2)
            key_gradient = -(sign * gradient[..., None]).sum(-3)
        else:
            lead = gradient.shape[:-2]
            q, k = (x.expand(*lead, *x.shape[-2:]).contiguous() for x in (query, key))
            query_gradient = _l1_gradient(q, k, gradient, *distance)
            key_gradient = _l1_gradient(k, q, gradient.mT, distance[0].mT)
        return (
            query_gradient.sum_to_size(query.shape),
            key_gradient.sum_to_size(key.shape),
            None,
            None,
            None,
        )


def _sum_powers(
    query: Array, key: Array, power: int, width: float, needs_exact: NeedsExact | None
) -> Array:
    """Return Σ (|q − k| / width)ᵖ; `needs_exact` None: not from the expanded square."""
    if needs_exact is not None:
        square = expand_squares(query, key, width, needs_exact, _SQUARE_OPERATIONS)
        if square is not None:
            return square
    if width != 1:
        query, key = query / width, key / width
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    parts = [x.expand(*lead, *x.shape[-2:]).contiguous() for x in (query, key)]
    distance: Array = torch.cdist(*parts, p=float(power), compute_mode=EXACT_DISTANCES)
    return distance if power == 1 else distance.square()


def _l1_gradient(x: Array, y: Array, gradient: Array, distance: Array) -> Array:
    parts = gradient.contiguous(), x, y, 1.0, distance.contiguous()
    out: Array = torch.ops.aten._cdist_backward(*parts)
    return out


def _find_true(x: Array) -> tuple[Array, ...]:
    at: tuple[Array, ...] = x.nonzero(as_tuple=True)
    return at


_SQUARE_OPERATIONS = SquareOperations(
    lambda x: torch.linalg.vector_norm(x, dim=-1).square_(),
    _find_true,
    torch.Tensor.expand,
    lambda x: x.clamp_(min=0),
)

EXACT_DISTANCES = "donot_use_mm_for_euclid_dist"
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class _SizeRecorder(TorchDispatchMode):
    """Records the number of elements of every result."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.sizes.append(result.numel())
        return result


def count_pair_numbers(function: Any, query: Array, key: Array, learns: bool) -> int | None:
    """Run a score without data and return the numbers that it holds per query and key.

    With gradients all results count, since autograd saves them; otherwise only the largest counts.
    """
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            arguments = [fake.from_tensor(x.detach()) for x in (query, key)]
            arguments = [x.float() if x.dtype in HALF_DTYPES else x for x in arguments]
            with _SizeRecorder() as recorder:
                function(*arguments)
    except Exception:  # the caller's function may need data
        return None
    if not pairs or not recorder.sizes:
        return None
    per_pair = [size for size in recorder.sizes if size >= pairs]  # the others are small
    numbers = sum(per_pair) if learns else max(recorder.sizes)
    return max(-(-numbers // pairs), 1)


def should_copy_transpose(x: Array, y: Array) -> bool:
    """Return whether x yᵀ is faster with a copy of yᵀ."""
    if (
        HAS_MKL
        or not x.is_cpu
        or x.dtype in HALF_DTYPES
        or _is_wrapper_subclass(x)
        or _is_wrapper_subclass(y)
    ):
        return False
    # A traced comparison of lengths would compile one graph for each outcome.
    return not _is_tracing() and MIN_ROWS_TO_COPY <= x.shape[-2] <= MAX_PRODUCT_SIZE_TO_COPY // max(
        y.shape[-2], 1
    )


def draw_survivors(like: Array, p: float) -> tuple[Array, float]:
    """Return a boolean array of the elements that survive dropout, and the exact probability of it.

    One draw of 64 bits decides on four elements; PyTorch would draw once per element.
    """
    least, size = round(p * 2**16), like.numel()
    draws = like.new_empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:size].view(like.shape) >= least - 2**15, 1 - least / 2**16


_DEVICE_COPIES = create_table("frameworks.device_copies")
"""Device copies of host arrays, by the host array's id; an entry is removed with the array."""


def is_dtensor(x: Any) -> bool:
    """Return whether x is a DTensor; by name, because its module is rarely imported."""
    return type(x).__name__ == "DTensor"


class DTensorErrors(AbstractContextManager[None]):
    """A context that replaces PyTorch's errors about DTensors by an error with a next step."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise FrameworkError(
                "PyTorch has no sharding rule for these DTensors: pass x.to_local() per process, "
                "use torch.distributed.tensor.experimental.local_map, or, if the keys are sharded, "
                "call qkv.cluster.torch.attend"
            ) from error


class InnerProductFunction(torch.autograd.Function):
    """x yᵀ with a copy of yᵀ; its gradients have no transposed second factor either."""

    @staticmethod
    def forward(ctx: Any, x: Array, y: Array) -> Array:
        ctx.save_for_backward(x, y)
        return x @ y.mT.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> Any:
        (x, y), (slope,) = ctx.saved_tensors, gradients
        wants_x, wants_y = ctx.needs_input_grad
        return slope @ y if wants_x else None, slope.mT @ x if wants_y else None


class CustomGradientFunction(torch.autograd.Function):
    """`forward(*leaves)` with the gradient `backward`; `reference` gives second derivatives."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, reference: Any, *leaves: Array) -> Any:
        outputs, kept = forward(*leaves)
        ctx.pull, ctx.reference, ctx.count = backward, reference, len(leaves)
        ctx.save_for_backward(*leaves, *kept)
        ctx.set_materialize_grads(False)
        ctx.likes = [(y.shape, y.dtype, y.device) for y in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> Any:
        saved = ctx.saved_tensors  # once: an activation checkpoint allows one access
        leaves, kept = saved[: ctx.count], saved[ctx.count :]
        wanted = ctx.needs_input_grad[3:]
        gradients = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.likes, strict=True)
        )
        if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated again
            found = iter(_reference_gradients(ctx.reference, leaves, wanted, gradients))
            return (None,) * 3 + tuple(next(found) if want else None for want in wanted)
        return (None,) * 3 + tuple(ctx.pull(leaves, kept, gradients))


def without_saved_tensor_hooks() -> AbstractContextManager[object]:
    """Return a context that hides saved tensors from the caller's saved-tensor hooks.

    Trial runs (to find what to compile, to time kernels) happen only in the first call with a
    signature. Activation checkpointing counts saved tensors with such hooks, and must count the
    same number in the first call and in its recomputation.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def distinct_views(arrays: Sequence[Array]) -> list[Array]:
    """Return a view of each array, so that each has its own gradient.

    A caller may pass one array as query and as key.
    """
    return [x.view_as(x) for x in arrays]


def _reference_gradients(reference: Any, leaves: Any, wanted: Any, gradients: Any) -> Any:
    leaves = distinct_views(leaves)
    outputs = reference(*leaves)
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    return torch.autograd.grad(
        [y for y, _ in pairs],
        [x for x, want in zip(leaves, wanted, strict=True) if want],
        [g for _, g in pairs],
        create_graph=True,
        allow_unused=True,
    )


@torch.library.custom_op("qkv::rows", mutates_args=())
def _graph_node_op(
    x: torch.Tensor,
    live: torch.Tensor | None,
    array: torch.Tensor | None,
    name: str,
    number: float,
) -> torch.Tensor:
    found: torch.Tensor = GRAPH_NODES[name].run(x, live, number if array is None else array)
    return found.contiguous()


@_graph_node_op.register_fake
def _(x: Array, live: LiveMask, array: Array | None, name: str, number: float) -> Array:
    return x.new_empty((*x.shape[:-1], GRAPH_NODES[name].output_width(x, array)))


@_graph_node_op.register_vmap
def _(info: Any, axes: Any, *arguments: Any) -> tuple[Array, int]:
    first = [
        a if a is None else a.expand(info.batch_size, *a.shape) if at is None else a.movedim(at, 0)
        for a, at in zip(arguments[:3], axes, strict=False)
    ]
    return torch.ops.qkv.rows(*first, *arguments[3:]), 0


def _save_for_backward(ctx: Any, inputs: Any, output: Array) -> None:
    x, _, array, ctx.name, ctx.number = inputs
    ctx.save_for_backward(x, output, array)


def _backward_op(ctx: Any, gradient: Array) -> Gradients:
    back, (x, output, array) = GRAPH_NODES[ctx.name].backward, ctx.saved_tensors
    assert back is not None
    with torch.autocast(x.device.type, enabled=False):  # the caller traced under its own autocast
        first, second = back(x, ctx.number if array is None else array, output, gradient)
    return first, None, second, None, None


_graph_node_op.register_autograd(_backward_op, setup_context=_save_for_backward)


class Torch(Framework):
    name = "torch"
    xp = array_api_compat.torch
    has_gradients = has_random_generator = has_fast_argmax = signs_captures = True
    array_types = (torch.Tensor, torch.nn.Parameter)

    def split_nested(self, x: Array) -> list[Array] | None:
        return list(x.unbind()) if x.is_nested else None

    def pack_nested(self, parts: list[Array], like: Array) -> Array:
        if like.layout == torch.strided:
            return torch.nested.as_nested_tensor(parts)
        ragged = next(axis for axis, size in enumerate(like.shape) if not isinstance(size, int))
        rows = [x.movedim(ragged - 1, 0) for x in parts]
        if like.lengths() is None:
            # With the same offsets tensor, PyTorch can add the result to `like`.
            out = torch.nested.nested_tensor_from_jagged(torch.cat(rows), like.offsets())
        else:
            out = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return out if ragged == 1 else out.transpose(1, ragged)

    def as_plain_array(self, x: Array, name: str = "x") -> Array:
        if x.is_nested:
            raise FrameworkError(
                f"{name} is a nested tensor, which only attend, scaled_dot_product_attention, "
                "nn.MultiHeadAttention and layers made of it accept: pass "
                f"{name}.to_padded_tensor(0) with masks.lengths"
            )
        if x.layout != torch.strided:
            raise FrameworkError(f"{name} has layout {x.layout}: pass {name}.to_dense()")
        return x

    def static_shape(self, x: Array) -> Shape:
        try:
            return tuple(x.shape)
        except RuntimeError:  # a nested tensor may have no shape
            return tuple(self.as_plain_array(x).shape)

    def to_device_of(self, x: Array, like: Array) -> Array:
        return x if x.device == like.device else x.to(like.device)

    def is_known_true(self, condition: Any) -> bool:
        # A graph cannot branch on a size that depends on data, such as that of nonzero.
        return _is_surely_true(condition) if _is_tracing() else bool(condition)

    def allows_length_guards(self) -> bool:
        # torch.export would reject such a guard, and torch.jit.trace would lose it.
        return _is_dynamo_compiling() and not torch.compiler.is_exporting()

    def has_empty_axis(self, sizes: Iterable[Any]) -> bool:
        sizes = tuple(sizes)
        if not _is_tracing():
            return 0 in sizes
        return any(_is_surely_true(size == 0) for size in sizes)

    def may_be_empty(self, size: Any) -> bool:
        return _is_tracing() and not _is_surely_true(size > 0)

    def shares_device(self, x: Array, like: Array) -> bool:
        # A host scalar combines with tensors on any device.
        return bool(x.device == like.device or (x.is_cpu and not x.ndim))

    def place_of(self, x: Array) -> Any:
        return None if x.is_cpu else x.device

    def function_signature(self, function: Any) -> Any:
        try:
            return SignatureBuilder().build(function)
        except NoSignatureError:
            return None

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)  # type: ignore[no-any-return]

    def concrete_value(self, x: Array) -> np.ndarray[Any, Any] | None:
        # Reading GPU memory would wait for its queue.
        return self.to_numpy(x) if x.device.type == "cpu" and not self.is_traced(x) else None

    def is_traced(self, x: Array) -> bool:
        if _is_tracing() or getattr(x, "is_meta", False):  # no data
            return True
        return _is_wrapper_subclass(x)

    def in_functional_transform(self) -> bool:
        """Return whether torch.func or forward-mode AD is active.

        Operations then need rules for vmap and for derivatives of both modes and any order. Fused
        kernels have none.
        """
        return _has_functorch_transforms() or forward_ad._current_level >= 0

    def supports_float64(self, x: Array) -> bool:
        return bool(x.device.type != "mps")

    def use_own_settings(self) -> AbstractContextManager[object]:
        # Sums run in the precision of the arguments, even under autocast.
        if not _is_autocast_enabled():
            return _NULL_CONTEXT
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                return torch.autocast(device, enabled=False)
        return _NULL_CONTEXT

    def translate_errors(self, x: Array) -> AbstractContextManager[object]:
        return DTensorErrors() if is_dtensor(x) else _NULL_CONTEXT

    def apply_autocast(self, x: Array) -> Array:
        if not _is_autocast_enabled() or x.dtype not in _AUTOCAST_DTYPES:
            return x
        device = x.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return x
        return x.to(torch.get_autocast_dtype(device))

    def plan_quietly(self) -> AbstractContextManager[object]:
        return _NULL_CONTEXT if _is_tracing() else without_saved_tensor_hooks()

    def leave_autocast(self, x: Array) -> AbstractContextManager[object] | None:
        if not _is_autocast_enabled() or _is_tracing() or x.is_meta:
            return None
        device = x.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else None

    def needs_gradient(self, arrays: Iterable[Array]) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)

    def array_signature(self, query: Array, key: Array, value: Array | None) -> Any:
        if (  # `_is_tracing`, inlined for speed
            _is_dynamo_compiling()
            or compiler._is_compiling_flag
            or _has_functorch_transforms()
            or forward_ad._current_level >= 0
            or _dispatch_mode_count()
            or _is_jit_tracing()
            or _is_autocast_enabled()
        ):
            return None
        last = key if value is None else value
        try:
            kind: Any = type(query)
            dtype, records = query.dtype, _is_grad_enabled()
            if not type(key) is kind is type(last):
                kind = (kind, type(key), type(last))
            if kind is not torch.Tensor and any(map(_is_wrapper_subclass, (query, key, last))):
                return None
            if not key.dtype is dtype is last.dtype:
                dtype = (dtype, key.dtype, last.dtype)
            learned = records and (query.requires_grad or key.requires_grad or last.requires_grad)
            place: Any = None
            if query.is_cpu:
                if not (key.is_cpu and last.is_cpu):
                    return None
            else:
                place = query.device
                if query.is_meta or not key.device == place == last.device:
                    return None
            shape = None if value is None else value.shape
            return query.shape, key.shape, shape, kind, dtype, place, records, learned
        except (AttributeError, RuntimeError):  # a nested tensor has no shape
            return None

    def without_data(self, x: Array) -> Array:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    def draw_dropout_factors(self, like: Array, p: float) -> Array:
        if p == 1:
            return torch.zeros_like(like)
        if torch.compiler.is_compiling():
            # rand_like fuses into the kernel that reads it, and works under vmap.
            return (torch.rand_like(like, dtype=torch.float32) >= p).to(like.dtype) / (1 - p)
        if (
            like.is_cpu
            and MIN_DROPOUT_FOR_16_BITS <= p <= 1 - MIN_DROPOUT_FOR_16_BITS
            and not self.is_traced(like)
        ):
            live, share = draw_survivors(like, p)
            return live.to(like.dtype).div_(share)
        return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)

    def array_from_host(self, data: Any, like: Array, dtype: str) -> Array:
        host, kind = np.asarray(data), getattr(torch, dtype)
        if host.size == 1 and like.is_cuda:  # a CUDA graph can capture a fill, not a copy
            return torch.full(host.shape, host.item(), dtype=kind, device=like.device)
        return torch.as_tensor(host, dtype=kind, device=like.device)

    def cached_constant(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        # A copy from the host waits for the device, and a CUDA graph cannot capture it.
        if not like.is_cuda or self.is_traced(like):
            return self.array_from_host(data, like, dtype)
        key = id(data), like.device, dtype
        if key not in _DEVICE_COPIES:
            _DEVICE_COPIES[key] = self.array_from_host(data, like, dtype)
            weakref.finalize(data, _DEVICE_COPIES.pop, key, None)
        return _DEVICE_COPIES[key]

    def block_from_host(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        # If no conversion is needed, the driver's own copy is as fast.
        if (
            not like.is_cuda
            or data.nbytes < pinned_memory.MIN_PINNED_BYTES
            or data.dtype.name == dtype
        ):
            return self.array_from_host(data, like, dtype)
        return pinned_memory.copy_to_device(np.ascontiguousarray(data), like.device).to(
            getattr(torch, dtype)
        )

    def detach(self, x: Array) -> Array:
        return x.detach()

    # Faster versions of the methods of the base class.

    def position_range(self, start: Any, size: int, like: Array) -> Array:
        steps = torch.arange(size, dtype=torch.int32, device=like.device)
        return steps if type(start) is int and start == 0 else steps + start

    def multiplies_16bit(self, x: Array) -> bool:
        return x.is_cpu and x.dtype is torch.bfloat16 and HAS_FAST_BFLOAT16

    def multiply_16bit(self, x: Array, y: Array) -> Array:
        if self.needs_gradient((x, y)) and x.shape[:-2] == y.shape[:-2]:
            return Product16Bit.apply(x, y)
        return x.to(y.dtype) @ y

    def inner_products(self, query: Array, key: Array) -> Array:
        if query.dtype is not key.dtype and key.dtype in HALF_DTYPES:
            return multiply_keys_16bit(query, key, self.needs_gradient((query, key)))
        if not should_copy_transpose(query, key):
            return query @ key.mT
        if not self.needs_gradient((query, key)):
            return query @ key.mT.contiguous()
        alike = query.shape[:-2] == key.shape[:-2]
        return InnerProductFunction.apply(query, key) if alike else query @ key.mT

    def dot_vector(self, x: Array, vector: Array) -> Array:
        return x @ vector

    def fill_unless(self, x: Array, live: LiveMask, other: float = 0.0) -> Array:
        if live is None:
            return x
        own = x.is_floating_point()
        return torch.where(live, x, other) if own else super().fill_unless(x, live, other)

    def replace_nonfinite(self, x: Array, other: float = 0.0) -> Array:
        return torch.nan_to_num(x, other, other, other)

    def sigmoid(self, x: Array) -> Array:
        return torch.sigmoid(x)

    def safe_divisor(self, x: Array) -> Array:
        return x.masked_fill(x == 0, 1.0)

    def checks_values(self, x: Array) -> bool:
        return x.is_cpu and not self.is_traced(x)

    def is_surely_finite(self, x: Array) -> bool:
        return self.checks_values(x) and is_finite(x)

    def row_max(self, x: Array) -> Array:
        return torch.amax(x, -1, keepdim=True)

    def cumulative_sum(self, x: Array, axis: int) -> Array:
        return torch.cumsum(x, axis)  # torch.compile warns about the cached lookup of the standard

    def row_sum(self, x: Array) -> Array:
        return torch.sum(x, -1, keepdim=True)

    def fused_softmax(self, x: Array, live: Array | None) -> Array | None:
        if not x.is_cpu or self.is_traced(x):
            return None
        out = torch.softmax(x if live is None else torch.where(live, x, -math.inf), -1)
        return out if is_finite(out) else None

    def stable_topk(self, x: Array, k: int) -> tuple[Array, Array]:
        if x.is_cpu and not self.is_traced(x) and k < x.shape[-1]:
            best, at = torch.topk(x, k, -1)
            least = best[..., -1:]
            if not ((x >= least).sum(-1) != k).any():  # no tie and no NaN at rank k
                if not (best[..., 1:] == best[..., :-1]).any():
                    return best, at
                at = at.sort(-1)[0]
                best = torch.gather(x, -1, at)
                best, order = torch.sort(best, dim=-1, descending=True, stable=True)
                return best, torch.gather(at, -1, order)
        best, at = torch.sort(x, dim=-1, descending=True, stable=True)
        return best[..., :k], at[..., :k]

    def untied_top_mask(self, x: Array, k: int) -> Array | None:
        if not x.is_cpu or self.is_traced(x) or x.shape[-1] == 0:
            return None
        best = torch.topk(x, min(k, x.shape[-1]), -1)[0]
        least = best[..., -1:]
        chosen = x >= least
        is_tied = ((chosen.sum(-1, keepdim=True) != k) & (least != -math.inf)).any()
        # NaN counts as the largest number.
        return None if is_tied or best[..., 0].isnan().any() else chosen

    def take_rows(self, x: Array, at: Array) -> Array:
        return torch.take_along_dim(x, at.long(), -2)

    def take_along_last(self, x: Array, at: Array) -> Array:
        return torch.gather(x, -1, at.long())  # take_along_axis compiles a graph per length

    # In place, unless autograd needs the inputs.

    def squared_norms(self, x: Array) -> Array:
        if self.is_traced(x) or self.needs_gradient([x]):
            return super().squared_norms(x)
        return torch.linalg.vector_norm(x, dim=-1).square_()  # without an array of squares

    def tanh(self, x: Array, spend: bool = False) -> Array:
        if not spend or self.is_traced(x) or self.needs_gradient([x]):
            return torch.tanh(x)
        return x.tanh_()

    def exp_shifted(self, x: Array, top: Array, live: LiveMask, spend: bool = False) -> Array:
        if self.is_traced(x) or self.needs_gradient((x, top)):
            return super().exp_shifted(x, top, live)
        x = (x.sub_(top) if spend else x - top).exp_()
        return x if live is None else x.masked_fill_(~live, 0)

    def excess_over_threshold(self, x: Array, top: Array, tau: Array, live: LiveMask) -> Array:
        if self.is_traced(x) or self.needs_gradient((x, top, tau)):
            return super().excess_over_threshold(x, top, tau, live)
        x = (x - top).sub_(tau).clamp_(min=0)
        return x if live is None else x.masked_fill_(~live, 0)

    def as_numpy_view(self, x: Array) -> Array | None:
        free = x.device.type == "cpu" and not self.is_traced(x) and not self.needs_gradient([x])
        return x.numpy(force=True) if free and x.dtype != torch.bfloat16 else None

    def from_numpy_view(self, x: Array) -> Array:
        return torch.from_numpy(x)

    def draw_seed(self, like: Array) -> Any:
        # Use the device's generator: kernels read the seed on the device, a captured CUDA graph
        # draws a new seed at each replay, and checkpointing restores the generator's state.
        return torch.randint(2**31 - 1, (), device=like.device)

    def seed_from_generator(self, generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        return (
            generator
            if isinstance(generator, torch.Tensor)
            else super().seed_from_generator(generator)
        )

    def cond(self, condition: Any, yes: ArrayFunction, no: ArrayFunction, *args: Array) -> Array:
        # `no` is the branch that is right in both cases, so a traced graph takes it.
        fixed = self.is_traced(condition) or _is_captured(condition)
        return no(*args) if fixed else super().cond(condition, yes, no, *args)

    def loop_until(
        self, done: ArrayFunction, step: PartialStateFunction, state: Any, limit: int
    ) -> Any:
        if not (self.is_traced(state[0]) or _is_captured(state[0])):
            return super().loop_until(done, step, state, limit)
        for _ in range(min(limit, MAX_UNROLLED_STEPS)):  # a graph cannot test `done`
            state = step(state)
        return state

    def call_graph_node(self, name: str, x: Array, live: LiveMask, number: Any) -> Array | None:
        if not torch.compiler.is_compiling():
            # An unrolled search for a learned number is too large for the fuser of jit.trace.
            search = isinstance(number, torch.Tensor) and GRAPH_NODES[name].backward is None
            if not (search and _is_jit_tracing() and not torch.onnx.is_in_onnx_export()):
                return None
        elif torch.compiler.is_exporting():  # an exported program must run without qkv
            return None
        if GRAPH_NODES[name].backward is None:
            x = x.detach()
            number = number.detach() if isinstance(number, torch.Tensor) else number
        elif self.in_functional_transform():  # the operator has no forward-mode derivative
            return None
        live = None if live is None else live.expand(x.shape)
        array = number if isinstance(number, torch.Tensor) else None
        alone = 0.0 if isinstance(number, torch.Tensor) else float(number)
        found: Array = torch.ops.qkv.rows(x, live, array, name, alone)
        return found

    def sum_differences(self, query: Array, key: Array, power: int) -> Array | None:
        if not self._has_plain_rows(query, key):
            return None
        return self._sum_powers(query, key, power, 1.0, None)

    def has_sum_differences(self, query: Array) -> bool:
        # Engines cast 16-bit rows to float32 before they compute a distance.
        return self._is_plain(query) and query.is_floating_point() and 0 not in query.shape

    def expand_squares(
        self, query: Array, key: Array, width: float, needs_exact: NeedsExact
    ) -> Array | None:
        if not self._has_plain_rows(query, key):
            return None
        return self._sum_powers(query, key, 2, width, needs_exact)

    def _sum_powers(
        self, query: Array, key: Array, power: int, width: float, needs_exact: NeedsExact | None
    ) -> Array:
        if not self.needs_gradient((query, key)):
            return _sum_powers(query, key, power, width, needs_exact)
        total: Array = DifferenceSums.apply(query, key, power, width, needs_exact)
        return total

    def _has_plain_rows(self, query: Array, key: Array) -> bool:
        """Return whether both are float32 or float64 tensors on a CPU, outside transforms.

        On a GPU, the gradient of `torch.cdist` accesses illegal memory for many pairs, and a
        selection of pairs would wait for the device.
        """
        if query.dtype not in (torch.float32, torch.float64) or type(key) not in PLAIN_TYPES:
            return False
        if query.dtype != key.dtype or query.device != key.device:
            return False
        if query.shape[-1] != key.shape[-1] or 0 in (*query.shape, *key.shape):
            return False
        return self._is_plain(query)

    def _is_plain(self, x: Array) -> bool:
        """Return whether x is a plain tensor on a CPU, outside transforms."""
        if type(x) not in PLAIN_TYPES or not x.is_cpu:
            return False
        return not (self.is_traced(x) or self.in_functional_transform())

    def hoist_captures(
        self, function: ArrayFunction, *example: Array
    ) -> tuple[ArrayFunction, Arrays]:
        if _has_functorch_transforms():  # they differentiate the function itself
            return function, ()
        return hoist_captured_tensors(function, *example)

    def device_block_numbers(self, like: Array) -> int | None:
        return MAX_DEVICE_BLOCK_NUMBERS if like.is_cuda else None

    def use_tensor_cores(self) -> AbstractContextManager[object]:
        return use_tensor_cores()

    def measure_pair_numbers(
        self, function: Any, code: Hashable, query: Array, key: Array
    ) -> int | None:
        if self.is_traced(query) or _is_wrapper_subclass(query) or _is_wrapper_subclass(key):
            return None
        learns = self.needs_gradient((query, key))
        signature = code, query.shape, key.shape, query.dtype, query.device, learns
        return get_or_compute(
            _PAIR_NUMBERS,
            signature,
            lambda: count_pair_numbers(function, query, key, learns),
            MAX_PAIR_NUMBERS_ENTRIES,
        )

    def run_repeatable(self, compute: Callable[[], Array | None]) -> tuple[Array | None, bool]:
        with torch.inference_mode(False):  # later calls may need gradients
            before = torch.random.get_rng_state()
            out = compute()
            out = None if out is None else out.detach()
            return out, torch.equal(before, torch.random.get_rng_state())

    def find_dot_scale(self, function: Any, query: Array, key: Array) -> float | None:
        try:
            signature = FixedSignatureBuilder().build(function), query.shape, key.shape
        except NoSignatureError:
            return None
        return get_or_compute(
            _DOT_SCALES, signature, lambda: find_dot_scale(function, query, key), MAX_DOT_SCALES
        )

    def find_product_score(self, function: Any, query: Array, key: Array) -> ProductScore | None:
        try:
            signature = FixedSignatureBuilder().build(function), query.shape, key.shape
        except NoSignatureError:
            return None
        # The score_mod itself, in a table, would keep captured tensors alive.
        kind = get_or_compute(
            _PRODUCT_KINDS, signature, lambda: find_product(function, query, key), MAX_DOT_SCALES
        )
        if kind is None:
            return None
        phi, psi = query, key
        if kind.has_own_rows:
            phi, psi = find_product_rows(function, query, key)
        score_mod = make_score_mod(function, query, key) if kind.scale is None else None
        return ProductScore(phi, psi, kind.scale, score_mod)

    def vjp(self, function: ArrayFunction, *args: Array) -> tuple[Array, PullBack]:
        with torch.enable_grad():
            # Detach, because autograd.grad would run the hooks of the original tensors.
            fresh = [x.detach().requires_grad_() for x in args]
            out = function(*fresh)
        # The function may also reach a leaf through its closure. Compare graph nodes, not tensors:
        # saved-tensor hooks (checkpointing) create new tensors. `_is_view` excludes views of a
        # leaf, for which `is_leaf` is True as well.
        own = [i for i, x in enumerate(args) if x.is_leaf and x.requires_grad and not x._is_view()]
        place = {get_gradient_edge(args[i]).node: i for i in reversed(own)}
        reached = graph_leaves(out, fresh) if own else ()
        inner = [x for x in reached if get_gradient_edge(x).node in place]

        def pull_back(gradient: Array) -> Gradients:
            if not out.requires_grad:
                return (None,) * len(args)
            at = fresh + inner  # retain_graph: every block uses the graph of a captured tensor
            found = torch.autograd.grad(out, at, gradient, allow_unused=True, retain_graph=True)
            slopes = list(found[: len(args)])
            for x, more in zip(inner, found[len(args) :], strict=True):
                i = place[get_gradient_edge(x).node]
                slopes[i] = more if slopes[i] is None else slopes[i] + more
            return tuple(slopes)

        return out.detach(), pull_back

    def custom_gradient(
        self,
        forward: ForwardFunction,
        backward: BackwardFunction,
        reference: ReferenceFunction,
        leaves: Sequence[Array],
    ) -> Arrays:
        if self.is_traced(leaves[0]):
            return reference(*leaves)
        return tuple(CustomGradientFunction.apply(forward, backward, reference, *leaves))


FRAMEWORK = Torch()
