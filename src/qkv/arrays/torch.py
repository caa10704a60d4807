"""PyTorch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import array_api_compat.torch
import numpy as np
import torch
from torch import compiler
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.symbolic_shapes import guard_or_false

from qkv.arrays import operator as _operator  # noqa: F401, it is found by name
from qkv.arrays import pinned
from qkv.arrays.base import NODES, Backward, Forward, Framework, Reference
from qkv.arrays.captured import graph_leaves, hoisted
from qkv.arrays.functions import Custom, Inner
from qkv.arrays.parted import Parted, is_parted
from qkv.errors import FrameworkError
from qkv.types import Arithmetic, Array, Arrays, Lift, Live, Pull, Shape, Slopes

_AS_IT_IS = nullcontext()

# Asked in every call, so under names that are found at once.
_compiles: Callable[[], bool] = torch.compiler.is_dynamo_compiling
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_traced: Callable[[], bool] = torch._C._is_tracing
_records: Callable[[], bool] = torch.is_grad_enabled
_record: Callable[[bool], None] = torch._C._set_grad_enabled


def _tracing() -> bool:
    return (
        _compiles()
        or compiler._is_compiling_flag  # export
        or _transforms()
        or forward_ad._current_level >= 0
        or _modes() > 0  # make_fx, fake tensors
        or _traced()  # jit.trace
    )


_PLAIN = torch.Tensor.__torch_dispatch__


def _wraps(x: Any) -> bool:
    """Whether x is of a class that does operations in its own way, and holds no numbers itself."""
    return getattr(type(x), "__torch_dispatch__", _PLAIN) is not _PLAIN


_NARROWED = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts."""
_autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled

UNROLLED = 48
"""Steps of a search that cannot look whether it is done. Newton's took nine at the most on any
scores tried; by halves, so many are float64."""

RARE = 2**-8
"""Dropout below which 16 bits of a random number are too few to tell it."""

HALF = (torch.float16, torch.bfloat16)

MKL: bool = torch.backends.mkl.is_available()
"""Whether MKL makes the products of matrices; where OpenBLAS does, one of short matrices of which
the second is transposed takes many times as long as with a copy of it."""

FEW, SHORT = 12, 2**15
"""Rows from which on, and numbers of a product up to which, that copy pays."""


def finite(*arrays: Array) -> bool:
    """Whether no number of a CPU's arrays is NaN or infinite: a sum tells, and at worst raises a
    false alarm."""
    records = _records()
    _record(False)  # no graph of what is only looked at
    try:
        for x in arrays:
            total = x.sum(dtype=torch.float32) if x.dtype in HALF else x.sum()
            if not math.isfinite(total.item()):  # sooner than by __float__
                return False
        return True
    finally:
        _record(records)


def copied(x: Array, y: Array) -> bool:
    """Whether x yᵀ is sooner made of a copy of yᵀ."""
    if MKL or not x.is_cpu or x.dtype in HALF or _wraps(x) or _wraps(y):
        return False
    # A graph that looked at lengths would be one for each side of them.
    return not _tracing() and FEW <= x.shape[-2] <= SHORT // max(y.shape[-2], 1)


def survivors(like: Array, p: float) -> tuple[Array, float]:
    """Which numbers of a CPU's array are not dropped, and their share: where torch itself draws for
    each number, here a draw of 64 bits decides on four."""
    least, size = round(p * 2**16), like.numel()
    draws = like.new_empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)
    return draws.view(torch.int16)[:size].view(like.shape) >= least - 2**15, 1 - least / 2**16


_DEVICE_COPIES: dict[tuple[int, torch.device, str], torch.Tensor] = {}
"""Host arrays on devices, by the host array's id; an entry goes with the array."""


class Torch(Framework):
    name = "torch"
    xp = array_api_compat.torch
    gradients = chance = True
    kinds = (torch.Tensor, torch.nn.Parameter)

    def sequences(self, x: Array) -> list[Array] | None:
        return list(x.unbind()) if x.is_nested else None

    def packed(self, parts: list[Array], like: Array) -> Array:
        if like.layout == torch.strided:
            return torch.nested.as_nested_tensor(parts)
        ragged = next(axis for axis, size in enumerate(like.shape) if not isinstance(size, int))
        rows = [x.movedim(ragged - 1, 0) for x in parts]
        if like.lengths() is None:
            # Lengths that are the same tensor let torch add the result to `like`.
            out = torch.nested.nested_tensor_from_jagged(torch.cat(rows), like.offsets())
        else:
            out = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return out if ragged == 1 else out.transpose(1, ragged)

    def plain(self, x: Array, name: str = "x") -> Array:
        if x.is_nested:
            raise FrameworkError(
                f"{name} is nested, sequences of different lengths, which go to "
                "nn.MultiHeadAttention, to a block of it or to scaled_dot_product_attention; else "
                "pass its .to_padded_tensor(0) with masks.lengths"
            )
        if x.layout != torch.strided:
            raise FrameworkError(f"{name} is of layout {x.layout}: pass its .to_dense()")
        return x

    def shape(self, x: Array) -> Shape:
        try:
            return tuple(x.shape)
        except RuntimeError:  # a nested tensor may have none
            return tuple(self.plain(x).shape)

    def beside(self, x: Array, like: Array) -> Array:
        return x if x.device == like.device else x.to(like.device)

    def surely(self, condition: Any) -> bool:
        # Of a size that the data decide, such as that of a nonzero, no graph may ask.
        return bool(guard_or_false(condition) if _tracing() else condition)

    def has_empty_axis(self, sizes: Iterable[Any]) -> bool:
        sizes = tuple(sizes)
        if not _tracing():
            return 0 in sizes
        return any(guard_or_false(size == 0) for size in sizes)

    def shares_device(self, x: Array, like: Array) -> bool:
        # A number on the host goes with tensors on any device.
        return bool(x.device == like.device or (x.is_cpu and not x.ndim))

    def place_of(self, x: Array) -> Any:
        return None if x.is_cpu else x.device

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)  # type: ignore[no-any-return]

    def concrete(self, x: Array) -> np.ndarray[Any, Any] | None:
        # Reading a GPU's memory would stall its queue.
        return self.to_numpy(x) if x.device.type == "cpu" and not self.tracing(x) else None

    def tracing(self, x: Array) -> bool:
        if _tracing() or getattr(x, "is_meta", False):  # shapes alone
            return True
        return _wraps(x)

    def functional(self) -> bool:
        """Whether torch.func or forward mode is at work: what runs must have rules for mapping and
        for derivatives of both modes and any order, which fused kernels have not."""
        return _transforms() or forward_ad._current_level >= 0

    def doubles(self, x: Array) -> bool:
        return bool(x.device.type != "mps")

    def quiet(self) -> AbstractContextManager[object]:
        # Sums run in the precision of the arguments, whatever torch would make of them.
        if not _autocasts():
            return _AS_IT_IS
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                return torch.autocast(device, enabled=False)
        return _AS_IT_IS

    def guard(self, x: Array) -> AbstractContextManager[object]:
        return Parted() if is_parted(x) else _AS_IT_IS

    def ambient(self, x: Array) -> Array:
        if not _autocasts() or x.dtype not in _NARROWED:
            return x
        device = x.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return x
        return x.to(torch.get_autocast_dtype(device))

    def needs_gradient(self, arrays: Iterable[Array]) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)

    def signature(self, query: Array, key: Array, value: Array | None) -> Any:
        if (  # as `_tracing` asks, without a call of it
            _compiles()
            or compiler._is_compiling_flag
            or _transforms()
            or forward_ad._current_level >= 0
            or _modes()
            or _traced()
            or _autocasts()
        ):
            return None
        last = key if value is None else value
        try:
            kind: Any = type(query)
            dtype, records = query.dtype, _records()
            if not type(key) is kind is type(last):
                kind = (kind, type(key), type(last))
            if kind is not torch.Tensor and any(map(_wraps, (query, key, last))):
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

    def outline(self, x: Array) -> Array:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    def kept(self, like: Array, p: float) -> Array:
        if p == 1:
            return torch.zeros_like(like)
        if torch.compiler.is_compiling():
            # Drawn by the kernel that reads it; of torch's draws the one that vmap can map there.
            return (torch.rand_like(like, dtype=torch.float32) >= p).to(like.dtype) / (1 - p)
        if like.is_cpu and RARE <= p <= 1 - RARE and not self.tracing(like):
            live, share = survivors(like, p)
            return live.to(like.dtype).div_(share)
        return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)

    def constant(self, data: Any, like: Array, dtype: str) -> Array:
        host, kind = np.asarray(data), getattr(torch, dtype)
        if host.size == 1 and like.is_cuda:  # a fill, which a CUDA graph can capture; a copy cannot
            return torch.full(host.shape, host.item(), dtype=kind, device=like.device)
        return torch.as_tensor(host, dtype=kind, device=like.device)

    def cached_constant(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        # A copy from the host would wait for the device, and no CUDA graph can capture one.
        if not like.is_cuda or self.tracing(like):
            return self.constant(data, like, dtype)
        key = id(data), like.device, dtype
        if key not in _DEVICE_COPIES:
            _DEVICE_COPIES[key] = self.constant(data, like, dtype)
            weakref.finalize(data, _DEVICE_COPIES.pop, key, None)
        return _DEVICE_COPIES[key]

    def read(self, data: np.ndarray[Any, Any], like: Array, dtype: str) -> Array:
        # What is wide already the driver copies as fast as we could.
        if not like.is_cuda or data.nbytes < pinned.LEAST or data.dtype.name == dtype:
            return self.constant(data, like, dtype)
        return pinned.sent(np.ascontiguousarray(data), like.device).to(getattr(torch, dtype))

    def detach(self, x: Array) -> Array:
        return x.detach()

    # The same as in base, by the shortest way there.

    def positions(self, start: Any, size: int, like: Array) -> Array:
        steps = torch.arange(size, dtype=torch.int32, device=like.device)
        return steps if type(start) is int and start == 0 else steps + start

    def inner(self, query: Array, key: Array) -> Array:
        if not copied(query, key):
            return query @ key.mT
        if not self.needs_gradient((query, key)):
            return query @ key.mT.contiguous()
        alike = query.shape[:-2] == key.shape[:-2]
        return Inner.apply(query, key) if alike else query @ key.mT

    def dot(self, x: Array, vector: Array) -> Array:
        return x @ vector

    def keep(self, x: Array, live: Live, other: float = 0.0) -> Array:
        if live is None:
            return x
        own = x.is_floating_point()
        return torch.where(live, x, other) if own else super().keep(x, live, other)

    def finite(self, x: Array, other: float = 0.0) -> Array:
        return torch.nan_to_num(x, other, other, other)

    def sigmoid(self, x: Array) -> Array:
        return torch.sigmoid(x)

    def nonzero(self, x: Array) -> Array:
        return x.masked_fill(x == 0, 1.0)

    def surely_finite(self, x: Array) -> bool:
        return x.is_cpu and not self.tracing(x) and finite(x)

    def row_max(self, x: Array) -> Array:
        return torch.amax(x, -1, keepdim=True)

    def row_sum(self, x: Array) -> Array:
        return torch.sum(x, -1, keepdim=True)

    def softmax(self, x: Array, live: Array | None) -> Array | None:
        if not x.is_cpu or self.tracing(x):
            return None
        out = torch.softmax(x if live is None else torch.where(live, x, -math.inf), -1)
        return out if finite(out) else None

    def stable_top(self, x: Array, k: int) -> tuple[Array, Array]:
        if x.is_cpu and k < x.shape[-1] and not self.tracing(x):
            best, at = torch.topk(x, k, -1)
            least = best[..., -1:]
            if not ((x >= least).sum(-1) != k).any():  # no tie, and no NaN, at the last place
                at = at.sort(-1)[0]
                best = torch.gather(x, -1, at)
                best, order = torch.sort(best, dim=-1, descending=True, stable=True)
                return best, torch.gather(at, -1, order)
        best, at = torch.sort(x, dim=-1, descending=True, stable=True)
        return best[..., :k], at[..., :k]

    def along(self, x: Array, at: Array) -> Array:
        return torch.gather(x, -1, at)  # the standard's name makes a graph for each length

    # Without temporaries, where no graph holds them.

    def tanh(self, x: Array, spend: bool = False) -> Array:
        if not spend or self.tracing(x) or self.needs_gradient([x]):
            return torch.tanh(x)
        return x.tanh_()

    def exp_below(self, x: Array, top: Array, live: Live, spend: bool = False) -> Array:
        if self.tracing(x) or self.needs_gradient((x, top)):
            return super().exp_below(x, top, live)
        x = (x.sub_(top) if spend else x - top).exp_()
        return x if live is None else x.masked_fill_(~live, 0)

    def above(self, x: Array, top: Array, tau: Array, live: Live) -> Array:
        if self.tracing(x) or self.needs_gradient((x, top, tau)):
            return super().above(x, top, tau, live)
        x = (x - top).sub_(tau).clamp_(min=0)
        return x if live is None else x.masked_fill_(~live, 0)

    def lend(self, x: Array) -> Array | None:
        free = x.device.type == "cpu" and not self.tracing(x) and not self.needs_gradient([x])
        return x.numpy(force=True) if free and x.dtype != torch.bfloat16 else None

    def take_back(self, x: Array) -> Array:
        return torch.from_numpy(x)

    def fresh_seed(self, like: Array) -> Any:
        # From the device's own generator: kernels read the seed where it lies, a captured CUDA
        # graph draws a new one at each replay, and checkpointing restores its state.
        return torch.randint(2**31 - 1, (), device=like.device)

    def seed_from(self, generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        return generator if isinstance(generator, torch.Tensor) else super().seed_from(generator)

    def when(self, condition: Any, yes: Arithmetic, no: Arithmetic, *args: Array) -> Array:
        # `no` is the careful branch everywhere: right in both cases, so a traced graph takes it.
        return no(*args) if self.tracing(condition) else super().when(condition, yes, no, *args)

    def until(self, done: Arithmetic, step: Lift, state: Any, limit: int) -> Any:
        if not self.tracing(state[0]):
            return super().until(done, step, state, limit)
        for _ in range(min(limit, UNROLLED)):  # a graph cannot look whether it is done
            state = step(state)
        return state

    def node(self, name: str, x: Array, live: Live, number: Any) -> Array | None:
        if not torch.compiler.is_compiling():
            # The steps of a search for a learned number are more than a trace's fuser can do.
            search = isinstance(number, torch.Tensor) and NODES[name].back is None
            if not (search and _traced() and not torch.onnx.is_in_onnx_export()):
                return None
        elif torch.compiler.is_exporting():  # what is exported must run without us
            return None
        if NODES[name].back is None:
            x = x.detach()
            number = number.detach() if isinstance(number, torch.Tensor) else number
        elif self.functional():  # its gradient has none of its own, forwards
            return None
        live = None if live is None else live.expand(x.shape)
        array = number if isinstance(number, torch.Tensor) else None
        alone = 0.0 if isinstance(number, torch.Tensor) else float(number)
        found: Array = torch.ops.qkv.rows(x, live, array, name, alone)
        return found

    def hoist(self, function: Arithmetic, *example: Array) -> tuple[Arithmetic, Arrays]:
        if _transforms():  # which differentiate the function itself
            return function, ()
        return hoisted(function, *example)

    def vjp(self, function: Arithmetic, *args: Array) -> tuple[Array, Pull]:
        with torch.enable_grad():
            # Cut from their history, for asking a tensor for its gradient runs the hooks on it.
            fresh = [x.detach().requires_grad_() for x in args]
            out = function(*fresh)
        # A leaf may also be reached through a closure. It is known by its node: hooks on what is
        # saved, as of a checkpoint, make new tensors of it. A view says that it is one too.
        own = [i for i, x in enumerate(args) if x.is_leaf and x.requires_grad and not x._is_view()]
        place = {get_gradient_edge(args[i]).node: i for i in reversed(own)}
        reached = graph_leaves(out, fresh) if own else ()
        inner = [x for x in reached if get_gradient_edge(x).node in place]

        def pull(gradient: Array) -> Slopes:
            if not out.requires_grad:
                return (None,) * len(args)
            at = fresh + inner  # the graph behind a captured tensor serves every block
            found = torch.autograd.grad(out, at, gradient, allow_unused=True, retain_graph=True)
            slopes = list(found[: len(args)])
            for x, more in zip(inner, found[len(args) :], strict=True):
                i = place[get_gradient_edge(x).node]
                slopes[i] = more if slopes[i] is None else slopes[i] + more
            return tuple(slopes)

        return out.detach(), pull

    def custom(
        self, forward: Forward, backward: Backward, reference: Reference, leaves: Sequence[Array]
    ) -> Arrays:
        if self.tracing(leaves[0]):
            return reference(*leaves)
        return tuple(Custom.apply(forward, backward, reference, *leaves))


FRAMEWORK = Torch()
