"""One call of torch's kernel: arrays brought to its four axes, and masks to its form."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from qkv import masks
from qkv.arrays import framework
from qkv.arrays.functions import apart
from qkv.arrays.torch import RARE, survivors
from qkv.engines import call as calls
from qkv.engines import dense, native
from qkv.engines.call import Call
from qkv.engines.native.backends import sdpa
from qkv.errors import EngineError
from qkv.scores import ScaledDot
from qkv.types import Array, Block
from qkv.weightings import Softmax

HIDES = 16
"""Keys below which the kernel on the CPU takes a row of NaN for an empty one."""

ON_CPU = "ScaledDotProductFlashAttentionForCpuBackward0"
"""The kernel's node in a graph."""


# What packs the arrays that a node keeps, as an activation checkpoint does.
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def kernel(
    call: Call,
    parts: Sequence[Array],
    mask: Array | None,
    plain: bool,
    told: list[Array] | None = None,
) -> Array:
    """SDPA of query, key and value (…, rows, width), with derivatives of both orders. `told` gets
    the log-sum-exp, where it is to be had."""
    parts, width = one_width(parts)
    query, key, value = parts
    if key.shape[-3:-2] != value.shape[-3:-2]:
        key, value = (calls.share_heads(call, x) for x in (key, value))
    parts = [four_axes(x, call.lead) for x in (query, key, value)]
    if mask is not None and not mask.is_cpu:
        mask = whole_rows(mask, key.shape[-2])
    if mask is not None and mask.ndim != 2 and (mask.ndim != 4 or len(call.lead) != 2):
        mask = four_axes(mask.expand(*call.lead, *mask.shape[-2:]), call.lead)
    scale, out = native.scale_of(call), None
    if told is not None and mask is not None and not call.dropout:
        out = _flash(parts, mask, scale, told)
    if out is None:
        out = fused(parts, mask, plain, scale, call.dropout)
    if mask is not None and not mask.is_cpu:
        out = out.where(seeing(mask), 0.0)
    if width != out.shape[-1]:
        out = out[..., :width]
    return out if len(call.lead) == 2 else out.reshape(*call.lead, *out.shape[-2:])


def fused(
    parts: Sequence[Array], mask: Array | None, plain: bool, scale: float, dropout: float = 0.0
) -> Array:
    """SDPA with derivatives of both orders."""
    if framework("torch").tracing(parts[0]):
        return sdpa(parts, mask, plain, scale, dropout)
    if parts[0].is_cpu and RARE <= dropout <= 1 - RARE:
        return _dropped(parts, mask, plain, scale, dropout)
    return smooth(sdpa(parts, mask, plain, scale, dropout), parts, mask, plain, scale)


def _dropped(
    parts: Sequence[Array], mask: Array | None, plain: bool, scale: float, dropout: float
) -> Array:
    """The same step by step, as torch has it on a CPU, with fewer random numbers."""
    half = parts[0].dtype in (torch.float16, torch.bfloat16)
    query, key, value = (x.float() if half else x for x in parts)
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    s = query * scale @ key.mT
    if plain:
        mask = s.new_ones(s.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    alpha = framework("torch").softmax(s, None)
    if alpha is None:  # a row is empty, or not finite
        alpha = torch._safe_softmax(s, -1)
    live, share = survivors(alpha, dropout)
    return (torch.where(live, alpha, 0.0) @ (value / share)).to(parts[0].dtype)


def _flash(parts: Sequence[Array], mask: Array, scale: float, told: list[Array]) -> Array | None:
    """The kernel that SDPA would choose on a CPU, with its log-sum-exp; None where it would not."""
    query, key, _ = parts
    wide = query.dtype in (torch.float32, torch.float64) and mask.shape[-1] == key.shape[-2]
    if not (wide and query.is_cpu and query.shape[1] == key.shape[1]):
        return None
    if not torch.backends.cuda.flash_sdp_enabled():  # of a CPU's too
        return None
    added = mask
    if mask.dtype == torch.bool:
        added = torch.where(mask, query.new_zeros(()), -math.inf)
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*parts, attn_mask=added, scale=scale)
    told.append(lse.detach())
    return smooth(out, parts, mask, False, scale)


def smooth(
    out: Array, parts: Sequence[Array], mask: Array | None, plain: bool, scale: float
) -> Array:
    """The kernel's output, whose gradient can now be differentiated again, which torch's fused
    kernels do not offer.

    A hook on the kernel's node does it: a function of our own around the kernel would cost a
    small call as much as the kernel does.
    """
    node = out.grad_fn
    name = type(node).__name__
    if name == ON_CPU and MARK is not None and _hooks(True) is None:
        node._register_hook_dict(MARK)
        return out
    if not name.startswith("ScaledDotProduct"):
        return out  # made of operations that have all derivatives
    # Torch keeps the three for the way back. A hook that held them would keep them where an
    # activation checkpoint has let them go, and that may be asked for them once alone.
    held = [weakref.ref(x) for x in parts]

    def again(inner: Sequence[Array | None], outer: Sequence[Array]) -> Any:
        arrays: list[Any] = [x() for x in held]
        return _again(arrays, masks.causal if plain else mask, scale, inner, outer[0])

    node.register_hook(again)
    return out


def _before(_: Array | None) -> None:
    """Ahead of the node's own backward: what it has kept is read here, so that the one hook serves
    all calls, which takes a third of the time that a hook for each would."""
    if not torch.is_grad_enabled():
        return
    node: Any = torch._C._current_autograd_node()
    if type(node).__name__ != ON_CPU:
        return
    try:
        arrays = [node._saved_query, node._saved_key, node._saved_value]
        mask = masks.causal if node._saved_is_causal else _given(node._saved_attn_mask)
        scale = node._saved_scale
    except RuntimeError:  # it was let go, or written over: the node says so if it runs at all
        return
    if scale is None:
        scale = 1 / math.sqrt(arrays[0].shape[-1])

    def again(inner: Sequence[Array | None], outer: Sequence[Array]) -> Any:
        handle.remove()
        return _again(arrays, mask, scale, inner, outer[0])

    handle = node.register_hook(again)


def _given(mask: Array | None) -> Array | None:
    """The kernel's mask, numbers to add, as booleans where it was made of such."""
    if mask is None:
        return None
    live = mask != -math.inf
    return live if bool((mask.where(live, 0.0) == 0).all()) else mask


def _again(
    arrays: Sequence[Any], mask: Any, scale: float, inner: Sequence[Array | None], outer: Array
) -> Any:
    """The node's gradients made by the equation, where they will be differentiated."""
    if not torch.is_grad_enabled():
        return None
    if any(x is None for x in arrays):
        return tuple(x if x is None else _Once.apply(x) for x in inner)
    rule, bias = masks.resolve(mask)
    query, key, value = arrays = apart(arrays)
    call = Call(query, key, value, ScaledDot(scale), Softmax(), rule, bias)
    made = framework("torch").astype(dense.run(call)[0], call.fw.dtype(query))
    wanted = [x for x, slope in zip(arrays, inner, strict=False) if slope is not None]
    found = iter(torch.autograd.grad(made, wanted, outer, create_graph=True))
    fresh = [None if slope is None else next(found) for slope in inner[:3]]
    return (*fresh, *inner[3:])


def _marked() -> Any:
    """A tensor whose hook is `_before`, for nodes to take it from; None where torch does not tell
    who holds what a node has kept."""
    try:
        _hooks(True)
    except TypeError:
        return None
    mark: Any = torch.zeros((), requires_grad=True)
    mark._backward_hooks = OrderedDict({0: _before})
    return mark


MARK = _marked()


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """A gradient whose own gradient is refused in our words."""

    @staticmethod
    def forward(ctx: Any, x: Array) -> Array:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Array) -> Any:
        raise EngineError(
            "torch's fused kernel has no second derivative inside an activation checkpoint: pass "
            "engine='dense', or run the layer under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def one_width(parts: Sequence[Array]) -> tuple[Sequence[Array], int]:
    """The three with zeros up to the widest, and the width of the value."""
    query, key, value = parts
    width, wide = value.shape[-1], query.shape[-1]
    if width < wide:
        value = pad(value, (0, wide - width))
    elif width > wide:
        query, key = (pad(x, (0, width - wide)) for x in (query, key))
    return (query, key, value), width


def four_axes(x: Array, lead: tuple[int, ...]) -> Array:
    """(…, rows, width) as (batch, heads, rows, width), the last axis contiguous."""
    if x.ndim != 4 or len(lead) != 2 or x.shape[0] != lead[0] or x.shape[1] == 1 != lead[1]:
        heads = x.shape[-3] if x.ndim > 2 else 1
        heads = lead[-1] if lead and heads == 1 else heads
        x = x.expand(*lead[:-1], heads, *x.shape[-2:])
        x = x.reshape(math.prod(lead[:-1]), *x.shape[-3:])
    return x if fits(x) else x.clone(memory_format=torch.contiguous_format)


def whole_rows(mask: Array, m: int) -> Array:
    """(…, 1 or m) as (…, m): of a row that all keys share cuDNN would read what lies behind it."""
    return mask.expand(*mask.shape[:-1], m).contiguous() if mask.shape[-1] != m else mask


def seeing(mask: Array) -> Array:
    """Which rows (…, n, 1) have a key that counts: to those that have none cuDNN gives a mean."""
    counts = mask if mask.dtype == torch.bool else mask != -math.inf
    return counts.any(-1, keepdim=True)


def fits(x: Array) -> bool:
    """Whether x lies as the kernels on a device read it: 16 bytes at a time."""
    if x.stride(-1) != 1:
        return False
    return x.is_cpu or framework("torch").tracing(x) or x.data_ptr() % 16 == 0


def as_mask(call: Call, block: Block) -> Array | None:
    """The mask of a block in the kernel's form: True where a pair counts, or numbers to add."""
    live = calls.live(call, block)
    if call.bias is None:
        return live
    mask = call.fw.cut(call.fw.cut(call.bias, block.rows, -2), block.cols, -1)
    mask = mask.to(call.query.dtype) / call.weighting.temperature  # type: ignore[attr-defined]
    return mask if live is None else torch.where(live, mask, -math.inf)
