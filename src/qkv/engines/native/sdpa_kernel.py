"""One call of PyTorch's kernel: prepares the arrays and the mask, and adds second derivatives."""

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
from qkv.engines import dense
from qkv.engines.call import Call
from qkv.engines.native.backends import run_sdpa
from qkv.engines.native.softmax_dot import effective_scale
from qkv.engines.visible_keys import rule_signature
from qkv.errors import EngineError
from qkv.frameworks import load_framework
from qkv.frameworks.torch import MIN_DROPOUT_FOR_16_BITS, distinct_views, draw_survivors
from qkv.frameworks.torch_products import HAS_FAST_BFLOAT16, softmax_gradients
from qkv.scores import ScaledDot
from qkv.util.caches import create_table, insert_bounded
from qkv.util.types import Array, Arrays, Block, Gradients
from qkv.weightings import Softmax

MAX_SHORT_BACKWARD_PAIRS = 2**18
"""Pairs of all heads up to which a backward pass with whole matrices is faster in 16 bits."""

MIN_KEYS_SHOWING_NAN = 16
"""Number of keys below which the CPU kernel treats a row of NaN as an empty row."""

CPU_NODE_NAME = "ScaledDotProductFlashAttentionForCpuBackward0"
"""The name of the kernel's node in an autograd graph."""


# Returns the active saved-tensor hooks, such as those of an activation checkpoint.
_saved_tensor_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def run_kernel(
    call: Call,
    inputs: Sequence[Array],
    mask: Array | None,
    is_causal: bool,
    lse_out: list[Array] | None = None,
) -> Array:
    """Return SDPA of query, key and value (…, rows, width), with first and second derivatives.

    The log-sum-exp is appended to `lse_out` if the kernel returns one.
    """
    inputs, width = pad_to_one_width(inputs)
    query, key, value = inputs
    if key.shape[-3:-2] != value.shape[-3:-2]:
        key, value = (calls.repeat_shared_heads(call, x) for x in (key, value))
    inputs = [as_four_axes(x, call.lead) for x in (query, key, value)]
    if mask is not None and not mask.is_cpu:
        mask = expand_mask_rows(mask, key.shape[-2])
    if mask is not None and mask.ndim != 2 and (mask.ndim != 4 or len(call.lead) != 2):
        mask = as_four_axes(mask.expand(*call.lead, *mask.shape[-2:]), call.lead)
    scale, out = effective_scale(call), None
    if lse_out is not None and mask is not None and not call.dropout:
        out = _run_cpu_flash(inputs, mask, scale, lse_out)
    if out is None:
        out = run_fused(inputs, mask, is_causal, scale, call.dropout)
    if mask is not None and not mask.is_cpu:
        out = out.where(rows_with_keys(mask), 0.0)
    if width != out.shape[-1]:
        out = out[..., :width]
    return out if len(call.lead) == 2 else out.reshape(*call.lead, *out.shape[-2:])


def run_fused(
    inputs: Sequence[Array], mask: Array | None, is_causal: bool, scale: float, dropout: float = 0.0
) -> Array:
    """Return SDPA with first and second derivatives."""
    if load_framework("torch").is_traced(inputs[0]):
        return run_sdpa(inputs, mask, is_causal, scale, dropout)
    if not dropout and has_slow_backward(inputs):
        return run_with_short_backward(inputs, mask, is_causal, scale)
    if inputs[0].is_cpu and MIN_DROPOUT_FOR_16_BITS <= dropout <= 1 - MIN_DROPOUT_FOR_16_BITS:
        return _run_with_dropout(inputs, mask, is_causal, scale, dropout)
    return allow_second_derivative(
        run_sdpa(inputs, mask, is_causal, scale, dropout), inputs, mask, is_causal, scale
    )


def has_slow_backward(inputs: Sequence[Array]) -> bool:
    """Return whether PyTorch's backward pass takes longer than the products of whole matrices.

    On a CPU with fast products of bfloat16, (16, 2, 64, 64) takes 6.6 ms both ways, and the plain
    formula 1.1 ms.
    """
    query, key, value = inputs
    if not (query.is_cpu and HAS_FAST_BFLOAT16 and query.dtype is torch.bfloat16):
        return False
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return False
    if key.shape[-3] != value.shape[-3] or not torch.backends.cuda.flash_sdp_enabled():
        return False
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return bool(0 < pairs <= MAX_SHORT_BACKWARD_PAIRS and query.shape[-1] == value.shape[-1])


def run_with_short_backward(
    inputs: Sequence[Array], mask: Array | None, is_causal: bool, scale: float
) -> Array:
    """Return the output of PyTorch's kernel, with a gradient from products of 16 bits.

    As in the kernel, scores and their gradients are float32, and weights are rounded to 16 bits.
    """
    fw, (query, key, value) = load_framework("torch"), inputs
    if key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    bias = mask
    if mask is not None and mask.dtype is torch.bool:
        bias = torch.where(mask, query.new_zeros(()), -math.inf)

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        return (run_sdpa(arrays, bias, is_causal, scale, 0.0),), ()

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        return softmax_gradients(arrays, bias, is_causal, scale, gradients[0])

    def reference(*arrays: Array) -> Arrays:
        rule, added = masks.resolve(masks.causal if is_causal else mask)
        query, key, value = arrays
        call = Call(query, key, value, ScaledDot(scale), Softmax(), rule, added)
        return (fw.astype(dense.run(call)[0], call.fw.dtype_name(query)),)

    return fw.custom_gradient(forward, backward, reference, (query, key, value))[0]


def _run_with_dropout(
    inputs: Sequence[Array], mask: Array | None, is_causal: bool, scale: float, dropout: float
) -> Array:
    """Return SDPA with dropout in separate steps, like PyTorch on a CPU.

    It draws fewer random numbers than PyTorch.
    """
    half = inputs[0].dtype in (torch.float16, torch.bfloat16)
    query, key, value = (x.float() if half else x for x in inputs)
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    s = query * scale @ key.mT
    if is_causal:
        mask = s.new_ones(s.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    alpha = load_framework("torch").fused_softmax(s, None)
    if alpha is None:  # a query may attend to no key, or a score is not finite
        alpha = torch._safe_softmax(s, -1)
    survivors, keep_probability = draw_survivors(alpha, dropout)
    return (torch.where(survivors, alpha, 0.0) @ (value / keep_probability)).to(inputs[0].dtype)


def _run_cpu_flash(
    inputs: Sequence[Array], mask: Array, scale: float, lse_out: list[Array]
) -> Array | None:
    """Return output and log-sum-exp of the CPU flash kernel; None if SDPA would not select it."""
    query, key, _ = inputs
    is_supported = query.dtype in (torch.float32, torch.float64) and mask.shape[-1] == key.shape[-2]
    if not (is_supported and query.is_cpu and query.shape[1] == key.shape[1]):
        return None
    if not torch.backends.cuda.flash_sdp_enabled():  # the switch applies to the CPU too
        return None
    float_mask = mask
    if mask.dtype == torch.bool:
        float_mask = torch.where(mask, query.new_zeros(()), -math.inf)
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*inputs, attn_mask=float_mask, scale=scale)
    lse_out.append(lse.detach())
    return allow_second_derivative(out, inputs, mask, False, scale)


def allow_second_derivative(
    out: Array, inputs: Sequence[Array], mask: Array | None, is_causal: bool, scale: float
) -> Array:
    """Return the kernel's output with a gradient that can be differentiated again.

    PyTorch's fused kernels have no second derivative. A hook on the kernel's autograd node adds the
    second derivative. A custom autograd function would double the time of a small call.
    """
    node = out.grad_fn
    name = type(node).__name__
    if name == CPU_NODE_NAME and HOOK_HOLDER is not None and _saved_tensor_hooks(True) is None:
        node._register_hook_dict(HOOK_HOLDER)
        return out
    if not name.startswith("ScaledDotProduct"):
        return out  # computed by operations that have all derivatives
    # PyTorch saves the three arrays for backward. The hook holds weak references, so that an
    # activation checkpoint can free the arrays. (A checkpoint returns each saved array only once.)
    references = [weakref.ref(x) for x in inputs]

    def recompute_in_hook(inner: Sequence[Array | None], outer: Sequence[Array]) -> Any:
        arrays: list[Any] = [x() for x in references]
        return _recompute_gradients(
            arrays, masks.causal if is_causal else mask, scale, inner, outer[0]
        )

    node.register_hook(recompute_in_hook)
    return out


def _before_backward(_: Array | None) -> None:
    """Add second derivatives to the current autograd node: the hook that runs before its backward.

    The hook reads the arrays that the node saved, so one hook serves all calls. That takes a third
    of the time of a new hook for each call.
    """
    if not torch.is_grad_enabled():
        return
    node: Any = torch._C._current_autograd_node()
    if type(node).__name__ != CPU_NODE_NAME:
        return
    try:
        arrays = [node._saved_query, node._saved_key, node._saved_value]
        mask = masks.causal if node._saved_is_causal else _boolean_mask(node._saved_attn_mask)
        scale = node._saved_scale
    except RuntimeError:  # an array was freed or overwritten: the node itself will raise an error
        return
    if scale is None:
        scale = 1 / math.sqrt(arrays[0].shape[-1])

    def recompute_in_hook(inner: Sequence[Array | None], outer: Sequence[Array]) -> Any:
        handle.remove()
        return _recompute_gradients(arrays, mask, scale, inner, outer[0])

    handle = node.register_hook(recompute_in_hook)


def _boolean_mask(mask: Array | None) -> Array | None:
    """Return the kernel's float mask as booleans, if it was created from booleans."""
    if mask is None:
        return None
    live = mask != -math.inf
    return live if bool((mask.where(live, 0.0) == 0).all()) else mask


def _recompute_gradients(
    arrays: Sequence[Any], mask: Any, scale: float, inner: Sequence[Array | None], outer: Array
) -> Any:
    """Return the node's gradients from the dense equation, which can be differentiated again."""
    if not torch.is_grad_enabled():
        return None
    if any(x is None for x in arrays):
        return tuple(x if x is None else _FirstDerivativeOnly.apply(x) for x in inner)
    rule, bias = masks.resolve(mask)
    query, key, value = arrays = distinct_views(arrays)
    call = Call(query, key, value, ScaledDot(scale), Softmax(), rule, bias)
    out = load_framework("torch").astype(dense.run(call)[0], call.fw.dtype_name(query))
    differentiable = [x for x, slope in zip(arrays, inner, strict=False) if slope is not None]
    gradients = iter(torch.autograd.grad(out, differentiable, outer, create_graph=True))
    replaced = [None if slope is None else next(gradients) for slope in inner[:3]]
    return (*replaced, *inner[3:])


def _make_hook_holder() -> Any:
    """Return a tensor with the hook `_before_backward`, or None. Nodes copy the hook from it.

    None if this version of PyTorch does not expose the arrays that a node saved.
    """
    try:
        _saved_tensor_hooks(True)
    except TypeError:
        return None
    mark: Any = torch.zeros((), requires_grad=True)
    mark._backward_hooks = OrderedDict({0: _before_backward})
    return mark


HOOK_HOLDER = _make_hook_holder()


class _FirstDerivativeOnly(torch.autograd.Function):  # type: ignore[misc]
    """The identity. Its backward raises an error that says how to get second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Array) -> Array:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Array) -> Any:
        raise EngineError(
            "PyTorch's fused kernel has no second derivative inside an activation checkpoint: pass "
            "engine='dense', or run the layer under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def pad_to_one_width(inputs: Sequence[Array]) -> tuple[Sequence[Array], int]:
    """Return the three arrays, zero-padded to the largest width, and the width of the value."""
    query, key, value = inputs
    width, query_width = value.shape[-1], query.shape[-1]
    if width < query_width:
        value = pad(value, (0, query_width - width))
    elif width > query_width:
        query, key = (pad(x, (0, width - query_width)) for x in (query, key))
    return (query, key, value), width


def as_four_axes(x: Array, lead: tuple[int, ...]) -> Array:
    """Return x (…, rows, width) as (batch, heads, rows, width), with a contiguous last axis."""
    if x.ndim != 4 or len(lead) != 2 or x.shape[0] != lead[0] or x.shape[1] == 1 != lead[1]:
        heads = x.shape[-3] if x.ndim > 2 else 1
        heads = lead[-1] if lead and heads == 1 else heads
        x = x.expand(*lead[:-1], heads, *x.shape[-2:])
        x = x.reshape(math.prod(lead[:-1]), *x.shape[-3:])
    return x if is_kernel_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def expand_mask_rows(mask: Array, m: int) -> Array:
    """Return a mask (…, 1 or m) as (…, m): cuDNN would read beyond a broadcast row."""
    return mask.expand(*mask.shape[:-1], m).contiguous() if mask.shape[-1] != m else mask


def rows_with_keys(mask: Array) -> Array:
    """Return a boolean array (…, n, 1) that is True for queries that may attend to some key.

    For other queries cuDNN returns the mean of the values, where qkv returns 0.
    """
    counts = mask if mask.dtype == torch.bool else mask != -math.inf
    return counts.any(-1, keepdim=True)


def is_kernel_aligned(x: Array) -> bool:
    """Return whether x is aligned to 16 bytes, as CUDA kernels need."""
    if x.stride(-1) != 1:
        return False
    return x.is_cpu or load_framework("torch").is_traced(x) or x.data_ptr() % 16 == 0


MAX_CACHED_MASK_PAIRS = 2**20
"""The most elements of a mask that is cached as booleans."""

MAX_CACHED_FLOAT_PAIRS = 2**18
"""The most elements of a mask that is cached as floats, which the CPU kernel need not convert."""

MAX_CACHED_MASKS = 16

_FIXED_MASKS: dict[tuple[Any, ...], tuple[Array, masks.Mask]] = create_table("engines.fixed_masks")
"""Masks of rules whose pairs follow from the signature, for the CPU, with one such rule."""


def can_cache_mask(call: Call) -> bool:
    """Return whether the whole mask of the call is one of `fixed_mask`."""
    if call.rule is None or call.bias is not None or call.at is not None:
        return False
    if not call.query.is_cpu or call.fw.is_traced(call.query):
        return False
    return (
        call.n * call.m <= MAX_CACHED_MASK_PAIRS and rule_signature(call.fw, call.rule) is not None
    )


def fixed_mask(rule: masks.Mask, query: Array, key: Array) -> Array:
    """Return the mask of a rule whose pairs follow from its signature.

    It has numbers to add to the scores, 0 or −∞; booleans if it is large.
    """
    fw = load_framework("torch")
    signature = (rule_signature(fw, rule), query.shape[:-1], key.shape[-2], query.dtype)
    known = _FIXED_MASKS.get(signature)
    if known is not None:
        return known[0]
    with torch.inference_mode(False):  # later calls may need gradients
        n, m = query.shape[-2], key.shape[-2]
        block = calls.make_block(Call(query, key, None, ScaledDot(), Softmax(), rule))
        mask, is_repeatable = fw.run_repeatable(lambda: rule.allowed_pairs(block))
        mask = torch.ones(n, m, dtype=torch.bool) if mask is None else mask
        mask = mask.expand(torch.broadcast_shapes(mask.shape, (n, m)))
        if mask.numel() <= MAX_CACHED_FLOAT_PAIRS:
            mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    if mask.numel() <= MAX_CACHED_MASK_PAIRS and is_repeatable:
        insert_bounded(_FIXED_MASKS, signature, (mask, rule), MAX_CACHED_MASKS)
    return mask


def kernel_mask(call: Call, block: Block) -> Array | None:
    """Return the mask of a block in the kernel's form: booleans, or floats to add to the scores."""
    live = calls.compute_live_pairs(call, block)
    if call.bias is None:
        return live
    mask = call.fw.slice_span(call.fw.slice_span(call.bias, block.rows, -2), block.cols, -1)
    mask = mask.to(call.query.dtype) / call.weighting.temperature  # type: ignore[attr-defined]
    return mask if live is None else torch.where(live, mask, -math.inf)
