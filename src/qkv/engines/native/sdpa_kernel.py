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
from qkv.engines import call as calls
from qkv.engines import dense, native
from qkv.engines.call import Call
from qkv.engines.native.backends import run_sdpa
from qkv.errors import EngineError
from qkv.frameworks import load_framework
from qkv.frameworks.torch import MIN_DROPOUT_FOR_16_BITS, distinct_views, draw_survivors
from qkv.scores import ScaledDot
from qkv.util.types import Array, Block
from qkv.weightings import Softmax

MIN_KEYS_SHOWING_NAN = 16
"""Keys below which the kernel on the CPU takes a row of NaN for an empty one."""

CPU_NODE_NAME = "ScaledDotProductFlashAttentionForCpuBackward0"
"""The kernel's node in a graph."""


# What packs the arrays that a node keeps, as an activation checkpoint does.
_saved_tensor_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def run_kernel(
    call: Call,
    parts: Sequence[Array],
    mask: Array | None,
    plain: bool,
    told: list[Array] | None = None,
) -> Array:
    """SDPA of query, key and value (…, rows, width), with derivatives of both orders. `told` gets
    the log-sum-exp, where it is to be had."""
    parts, width = pad_to_one_width(parts)
    query, key, value = parts
    if key.shape[-3:-2] != value.shape[-3:-2]:
        key, value = (calls.repeat_shared_heads(call, x) for x in (key, value))
    parts = [as_four_axes(x, call.lead) for x in (query, key, value)]
    if mask is not None and not mask.is_cpu:
        mask = expand_mask_rows(mask, key.shape[-2])
    if mask is not None and mask.ndim != 2 and (mask.ndim != 4 or len(call.lead) != 2):
        mask = as_four_axes(mask.expand(*call.lead, *mask.shape[-2:]), call.lead)
    scale, out = native.effective_scale(call), None
    if told is not None and mask is not None and not call.dropout:
        out = _run_cpu_flash(parts, mask, scale, told)
    if out is None:
        out = run_fused(parts, mask, plain, scale, call.dropout)
    if mask is not None and not mask.is_cpu:
        out = out.where(rows_with_keys(mask), 0.0)
    if width != out.shape[-1]:
        out = out[..., :width]
    return out if len(call.lead) == 2 else out.reshape(*call.lead, *out.shape[-2:])


def run_fused(
    parts: Sequence[Array], mask: Array | None, plain: bool, scale: float, dropout: float = 0.0
) -> Array:
    """SDPA with derivatives of both orders."""
    if load_framework("torch").is_traced(parts[0]):
        return run_sdpa(parts, mask, plain, scale, dropout)
    if parts[0].is_cpu and MIN_DROPOUT_FOR_16_BITS <= dropout <= 1 - MIN_DROPOUT_FOR_16_BITS:
        return _run_with_dropout(parts, mask, plain, scale, dropout)
    return allow_second_derivative(
        run_sdpa(parts, mask, plain, scale, dropout), parts, mask, plain, scale
    )


def _run_with_dropout(
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
    alpha = load_framework("torch").fused_softmax(s, None)
    if alpha is None:  # a row is empty, or not finite
        alpha = torch._safe_softmax(s, -1)
    live, share = draw_survivors(alpha, dropout)
    return (torch.where(live, alpha, 0.0) @ (value / share)).to(parts[0].dtype)


def _run_cpu_flash(
    parts: Sequence[Array], mask: Array, scale: float, told: list[Array]
) -> Array | None:
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
    return allow_second_derivative(out, parts, mask, False, scale)


def allow_second_derivative(
    out: Array, parts: Sequence[Array], mask: Array | None, plain: bool, scale: float
) -> Array:
    """The kernel's output, whose gradient can now be differentiated again, which torch's fused
    kernels do not offer.

    A hook on the kernel's node does it: a function of our own around the kernel would cost a
    small call as much as the kernel does.
    """
    node = out.grad_fn
    name = type(node).__name__
    if name == CPU_NODE_NAME and HOOK_HOLDER is not None and _saved_tensor_hooks(True) is None:
        node._register_hook_dict(HOOK_HOLDER)
        return out
    if not name.startswith("ScaledDotProduct"):
        return out  # made of operations that have all derivatives
    # Torch keeps the three for the way back. A hook that held them would keep them where an
    # activation checkpoint has let them go, and that may be asked for them once alone.
    held = [weakref.ref(x) for x in parts]

    def recompute_in_hook(inner: Sequence[Array | None], outer: Sequence[Array]) -> Any:
        arrays: list[Any] = [x() for x in held]
        return _recompute_gradients(arrays, masks.causal if plain else mask, scale, inner, outer[0])

    node.register_hook(recompute_in_hook)
    return out


def _before_backward(_: Array | None) -> None:
    """Ahead of the node's own backward: what it has kept is read here, so that the one hook serves
    all calls, which takes a third of the time that a hook for each would."""
    if not torch.is_grad_enabled():
        return
    node: Any = torch._C._current_autograd_node()
    if type(node).__name__ != CPU_NODE_NAME:
        return
    try:
        arrays = [node._saved_query, node._saved_key, node._saved_value]
        mask = masks.causal if node._saved_is_causal else _boolean_mask(node._saved_attn_mask)
        scale = node._saved_scale
    except RuntimeError:  # it was let go, or written over: the node says so if it runs at all
        return
    if scale is None:
        scale = 1 / math.sqrt(arrays[0].shape[-1])

    def recompute_in_hook(inner: Sequence[Array | None], outer: Sequence[Array]) -> Any:
        handle.remove()
        return _recompute_gradients(arrays, mask, scale, inner, outer[0])

    handle = node.register_hook(recompute_in_hook)


def _boolean_mask(mask: Array | None) -> Array | None:
    """The kernel's mask, numbers to add, as booleans where it was made of such."""
    if mask is None:
        return None
    live = mask != -math.inf
    return live if bool((mask.where(live, 0.0) == 0).all()) else mask


def _recompute_gradients(
    arrays: Sequence[Any], mask: Any, scale: float, inner: Sequence[Array | None], outer: Array
) -> Any:
    """The node's gradients made by the equation, where they will be differentiated."""
    if not torch.is_grad_enabled():
        return None
    if any(x is None for x in arrays):
        return tuple(x if x is None else _FirstDerivativeOnly.apply(x) for x in inner)
    rule, bias = masks.resolve(mask)
    query, key, value = arrays = distinct_views(arrays)
    call = Call(query, key, value, ScaledDot(scale), Softmax(), rule, bias)
    made = load_framework("torch").astype(dense.run(call)[0], call.fw.dtype_name(query))
    wanted = [x for x, slope in zip(arrays, inner, strict=False) if slope is not None]
    found = iter(torch.autograd.grad(made, wanted, outer, create_graph=True))
    fresh = [None if slope is None else next(found) for slope in inner[:3]]
    return (*fresh, *inner[3:])


def _make_hook_holder() -> Any:
    """A tensor whose hook is `_before_backward`, for nodes to take it from; None where torch does
    not tell who holds what a node has kept."""
    try:
        _saved_tensor_hooks(True)
    except TypeError:
        return None
    mark: Any = torch.zeros((), requires_grad=True)
    mark._backward_hooks = OrderedDict({0: _before_backward})
    return mark


HOOK_HOLDER = _make_hook_holder()


class _FirstDerivativeOnly(torch.autograd.Function):  # type: ignore[misc]
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


def pad_to_one_width(parts: Sequence[Array]) -> tuple[Sequence[Array], int]:
    """The three with zeros up to the widest, and the width of the value."""
    query, key, value = parts
    width, wide = value.shape[-1], query.shape[-1]
    if width < wide:
        value = pad(value, (0, wide - width))
    elif width > wide:
        query, key = (pad(x, (0, width - wide)) for x in (query, key))
    return (query, key, value), width


def as_four_axes(x: Array, lead: tuple[int, ...]) -> Array:
    """(…, rows, width) as (batch, heads, rows, width), the last axis contiguous."""
    if x.ndim != 4 or len(lead) != 2 or x.shape[0] != lead[0] or x.shape[1] == 1 != lead[1]:
        heads = x.shape[-3] if x.ndim > 2 else 1
        heads = lead[-1] if lead and heads == 1 else heads
        x = x.expand(*lead[:-1], heads, *x.shape[-2:])
        x = x.reshape(math.prod(lead[:-1]), *x.shape[-3:])
    return x if is_kernel_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def expand_mask_rows(mask: Array, m: int) -> Array:
    """(…, 1 or m) as (…, m): of a row that all keys share cuDNN would read what lies behind it."""
    return mask.expand(*mask.shape[:-1], m).contiguous() if mask.shape[-1] != m else mask


def rows_with_keys(mask: Array) -> Array:
    """Which rows (…, n, 1) have a key that counts: to those that have none cuDNN gives a mean."""
    counts = mask if mask.dtype == torch.bool else mask != -math.inf
    return counts.any(-1, keepdim=True)


def is_kernel_aligned(x: Array) -> bool:
    """Whether x lies as the kernels on a device read it: 16 bytes at a time."""
    if x.stride(-1) != 1:
        return False
    return x.is_cpu or load_framework("torch").is_traced(x) or x.data_ptr() % 16 == 0


def kernel_mask(call: Call, block: Block) -> Array | None:
    """The mask of a block in the kernel's form: True where a pair counts, or numbers to add."""
    live = calls.compute_live_pairs(call, block)
    if call.bias is None:
        return live
    mask = call.fw.slice_span(call.fw.slice_span(call.bias, block.rows, -2), block.cols, -1)
    mask = mask.to(call.query.dtype) / call.weighting.temperature  # type: ignore[attr-defined]
    return mask if live is None else torch.where(live, mask, -math.inf)
