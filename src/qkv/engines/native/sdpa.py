"""Runs PyTorch's `scaled_dot_product_attention`: at once, by spans of queries or parts of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from qkv.engines import call as calls
from qkv.engines import dense, streaming
from qkv.engines.call import Call, ThreeArrayRunner
from qkv.engines.native import backends, query_spans
from qkv.engines.native.sdpa_kernel import (
    MIN_KEYS_SHOWING_NAN,
    allow_second_derivative,
    as_four_axes,
    can_cache_mask,
    fixed_mask,
    has_slow_backward,
    kernel_mask,
    run_kernel,
    run_with_short_backward,
)
from qkv.engines.native.softmax_dot import MIN_MANY_KEYS, effective_scale
from qkv.engines.triton_import import has_triton
from qkv.engines.visible_keys import find_visible_pairs, narrow_call
from qkv.frameworks import threads, tree
from qkv.frameworks.torch import HALF_DTYPES, is_dtensor, is_finite
from qkv.masks import Mask, is_plain_causal
from qkv.masks.base import ArrayMask, CompoundMask
from qkv.util.types import Array, Arrays, Gradients

QUERIES_PER_CORE = 32
"""Queries that PyTorch's CPU kernel assigns to one core."""

MAX_SHORT_CAUSAL_QUERIES = 512
"""Up to this many queries of a causal call, a second kernel launch takes longer than the work."""

MIN_TILED_BIAS_SCORES = 2**16
"""Scores per head from which our CUDA kernels are faster with a float mask and a gradient."""

MAX_ONE_PASS_ROWS = 64
"""Rows of a tile: the queries of all heads that share keys."""

MIN_ONE_PASS_NUMBERS = 2**24
"""Numbers of all keys from which our CUDA kernel for the gradients of few queries is faster."""

MIN_FLOAT32_NUMBERS = 2**20
"""The same for float32 keys that several heads share, which PyTorch copies for each head."""

MAX_FEW_OUTPUT_NUMBERS = 2**15
"""Up to this size, a check of the whole output for NaN is faster than slicing its last row."""


MIN_KEYS_PER_QUERY, MAX_SHARE_OF_FEW_QUERIES = 8, 0.5
"""With so many keys for each query, keys are left out if the queries see at most this share."""


def unsupported_reason(call: Call) -> str | None:
    if call.fw.in_functional_transform():  # type: ignore[attr-defined]
        return "the kernel does not support torch.func and forward-mode derivatives"
    if is_dtensor(call.query) and call.query.is_cpu:
        return "PyTorch's CPU kernel does not support DTensors"
    if call.bias is not None and call.fw.needs_gradient([call.bias]):
        return "the kernel gives no gradient for a float mask"
    if call.fw.is_traced(call.query) or _splits_keys(call):
        return None
    on_cpu = call.query.device.type == "cpu"
    if not on_cpu and (call.rule is None or _repairs_nan(call)):
        return None
    if (on_cpu or call.rule is not None) and not is_finite(call.query, call.key, call.value):
        return "an argument is not finite: the kernel may hide a NaN, or let a masked NaN through"
    return None


def slower_reason(call: Call) -> str | None:
    inputs = (call.query, call.key, call.value)
    if not is_on_device(call):
        return None
    known = call.fw.is_known_true
    is_short = known(call.n == call.m) and known(call.n <= MAX_SHORT_CAUSAL_QUERIES)
    is_short = is_short and known(math.prod(call.lead) * call.n <= 32 * MAX_SHORT_CAUSAL_QUERIES)
    has_row_bias = call.bias is not None and known(call.bias.shape[-1] == 1) and known(call.m > 1)
    if has_row_bias and call.fw.needs_gradient((call.bias,)):
        return "a bias per row does not change the weights; its gradient would be rounding error"
    if reason := tiled_reason(call):
        return reason
    if _is_faster_in_one_pass(call) and import_triton_engine().unsupported_reason(call) is None:
        return "triton reads each key once for all queries that share it"
    if not (is_short and is_plain_causal(call.rule) and call.query.dtype in HALF_DTYPES):
        return None
    if (
        call.fw.needs_gradient(inputs)
        or not _repairs_nan(call)
        or import_triton_engine().unsupported_reason(call)
    ):
        return None
    return (
        "for a short causal call triton needs one launch, and this kernel with its NaN repair two"
    )


def tiled_reason(call: Call) -> str | None:
    """Return the reason if our CUDA kernels are faster, given the mask and the size."""
    if not (is_on_device(call) and _is_faster_tiled(call)):
        return None
    if import_triton_engine().unsupported_reason(call) is not None:
        return None
    return "triton skips masked tiles and does not wait for the device"


def _is_faster_tiled(call: Call) -> bool:
    """Return whether our CUDA kernels are faster than PyTorch's, given the mask and the size.

    PyTorch's kernel needs the mask as an array, and a check of all values that waits for the
    device. On an H200 that took 0.31 ms for four queries per head, and our kernel 0.03 ms. With a
    gradient, PyTorch is faster for one query, for small float masks, and for wide float32 under an
    array.
    """
    if call.bias is None and (call.rule is None or is_plain_causal(call.rule)):
        return False
    if not call.fw.needs_gradient((call.query, call.key, call.value)):
        return True
    if _is_faster_in_one_pass(call):
        return True
    is_dense_mask = call.bias is not None or _holds_array(call.rule)
    if call.n == 1:
        return not is_dense_mask and call.rule is not None and call.rule.is_relative
    if call.bias is not None and call.n * call.m < MIN_TILED_BIAS_SCORES:
        return False
    is_wide_float32 = call.query.dtype not in HALF_DTYPES and call.query.shape[-1] > 64
    return not (is_dense_mask and is_wide_float32)


def _is_faster_in_one_pass(call: Call) -> bool:
    """Return whether our CUDA kernels are faster because one tile holds all queries of a key.

    On an H200, forward and backward of one query per head took 1.1 ms for 64 × 4,096 keys in
    bfloat16 with four heads for each, and PyTorch's kernels 3.7 ms; of 128 × 128 rows in 3,072
    heads .27 and .35 ms. Without shared keys, PyTorch is faster for fewer rows.
    """
    query, key, value = call.query, call.key, call.value
    if call.fw.is_traced(query) or call.dropout or {x.ndim for x in (query, key, value)} != {4}:  # type: ignore[union-attr]
        return False
    learns = call.fw.needs_gradient((query, key, value))
    size: int = key.numel()
    group = query.shape[1] // key.shape[1]
    if group > 1:
        if call.n * group > MAX_ONE_PASS_ROWS:
            return False
        if query.dtype == torch.float32:
            return size >= MIN_FLOAT32_NUMBERS
        return learns and size >= MIN_ONE_PASS_NUMBERS
    is_short = MAX_ONE_PASS_ROWS < call.n <= 2 * MAX_ONE_PASS_ROWS and call.m <= 256
    is_narrow = max(query.shape[-1], value.shape[-1]) <= 64 and query.dtype in HALF_DTYPES  # type: ignore[union-attr]
    return learns and is_short and is_narrow and size >= MIN_ONE_PASS_NUMBERS


def _holds_array(rule: Mask | None) -> bool:
    """Return whether an array of pairs is part of the rule."""
    if isinstance(rule, CompoundMask):
        return any(map(_holds_array, rule.operand_masks))
    return isinstance(rule, ArrayMask)


def describe(call: Call) -> str:
    name = "PyTorch's scaled_dot_product_attention"
    if call.rule is not None and not is_plain_causal(call.rule):
        by_rows = not call.fw.is_traced(call.query) and call.n > query_spans.QUERIES_PER_SPAN
        by_rows = (
            by_rows
            and not query_spans.can_trim_keys(call)
            and query_spans.spans_pay_off(call, query_spans.build_tiling(call))
        )
        return f"{name}, {query_spans.QUERIES_PER_SPAN} queries at a time" if by_rows else name
    if call.query.device.type != "cuda":
        return name
    inputs = [as_four_axes(x, call.lead) for x in (call.query, call.key, call.value)]
    return name + backends.describe_backend(inputs, call.rule is not None)


def is_on_device(call: Call) -> bool:
    return bool(call.query.device.type == "cuda")


def run(call: Call, lse_out: list[Array] | None = None) -> Array:
    """Return the output. `run_kernel` appends a log-sum-exp to `lse_out` if the kernel has one."""
    if _splits_keys(call):
        return _run_split_keys(call)
    is_causal = is_plain_causal(call.rule)
    if is_causal and call.query.device.type == "cuda" and _repairs_nan(call):
        return _run_with_repair(call)
    inputs, mask = (call.query, call.key, call.value), None
    if call.rule is not None and not is_causal:
        if query_spans.can_trim_keys(call):
            return run_kernel(call, *query_spans.trim_keys(call), is_causal, lse_out)
        by_rows = (
            call.n > query_spans.QUERIES_PER_SPAN
            and not call.dropout
            and not call.fw.is_traced(call.query)
        )
        tiling = query_spans.build_tiling(call) if by_rows else None
        if by_rows and query_spans.spans_pay_off(call, tiling):
            return query_spans.run_spans(call, tiling)
        if can_cache_mask(call):
            mask = fixed_mask(call.rule, call.query, call.key)
        else:
            mask = kernel_mask(call, calls.make_block(call))
    return run_kernel(call, inputs, mask, is_causal, lse_out)


# Checks of values


def run_guarded(call: Call) -> Array | None:
    """Return the output, or None if a NaN or infinity may make the output or a gradient wrong.

    The kernel may hide a NaN, or multiply a masked one by 0, which gives NaN. On a CPU the output
    shows both, except in 16 bits and for fewer than MIN_KEYS_SHOWING_NAN keys. The output does not
    show 0 · ∞ in the gradient of a masked key, or of a query that sees no key. So with a gradient,
    key and query are checked too.
    """
    if call.query.device.type != "cpu" or _splits_keys(call):
        return None if unsupported_reason(call) else run(call)
    call = _leave_out_keys(call) or call
    hides_nan = call.m < MIN_KEYS_SHOWING_NAN or call.query.dtype in HALF_DTYPES
    if hides_nan and not is_finite(call.query, call.key, call.value):
        return None
    lse_out: list[Array] = []
    out = run(call, lse_out)
    if call.rule is None:
        return out
    by_rows = call.n > query_spans.QUERIES_PER_SPAN and not (
        is_plain_causal(call.rule) or query_spans.can_trim_keys(call)
    )
    # A span of queries may see so few keys that the kernel hides a NaN among them.
    checked = [call.key, call.query] if out.requires_grad or by_rows else []
    if is_plain_causal(call.rule) and call.n >= call.m:  # the last query sees every key
        checked.append(out[..., -1:, :])
    elif call.rule.is_shared_by_queries:
        # A masked value that is not finite shows in every row, a masked key in every column.
        if lse_out:  # the log-sum-exp of a query that is not finite is not finite
            checked = checked[:1]
        checked += [out[..., :1, :], *(lse_out or [out[..., :1]])]
    else:
        checked.append(out)
    return out if is_finite(*checked) else None


def _leave_out_keys(call: Call) -> Call | None:
    """Return the call without the keys that no query sees; None if that does not pay off."""
    if call.rule is None or call.at is not None or call.fw.is_traced(call.query):
        return None
    if call.n * MIN_KEYS_PER_QUERY > call.m:
        return None
    pairs = find_visible_pairs(call)
    if pairs.stop - pairs.start > MAX_SHARE_OF_FEW_QUERIES * call.m:
        return None
    rule = None if pairs.live is None else ArrayMask(pairs.live, is_bias=False)
    return replace(narrow_call(call, pairs), rule=rule, at=None)


def build_direct_runner(call: Call) -> Callable[..., Array | None] | ThreeArrayRunner | None:
    """Return SDPA as a function of `attend`'s arguments; None if the arrays need preparation."""
    causal, mask_array = is_plain_causal(call.rule), None
    is_cached = not causal and can_cache_mask(call)
    if is_cached:
        if _leave_out_keys(call) is not None:
            return None
        if call.n > query_spans.QUERIES_PER_SPAN and query_spans.spans_pay_off(
            call, query_spans.build_tiling(call)
        ):
            return None
    elif call.rule is not None and not causal:
        mask_array = next(iter(call.rule.list_arrays()), None)
        if (
            mask_array is None
            or mask_array.ndim not in (2, 4)
            or call.n >= query_spans.QUERIES_PER_SPAN
        ):
            return None
    arrays: list[Any] = [call.query, call.key, call.value]
    shapes = [x.shape for x in arrays]
    if any(len(x) != 4 or x[0] != shapes[0][0] or x[-1] != shapes[0][-1] for x in shapes):
        return None
    has_shared_heads = shapes[1][1] != shapes[0][1]
    if shapes[2][1] != shapes[1][1]:
        return None
    if call.dropout or not shapes[0][-1] or _splits_keys(call):
        return None
    if call.query.device.type == "cuda":
        return None if has_shared_heads else _build_device_runner(call)
    if call.query.device.type != "cpu":
        return None
    sdpa, scale = backends.SDPA, effective_scale(call)
    if scale != 1 / math.sqrt(shapes[0][-1]):  # SDPA is faster if the default is not passed
        sdpa = partial(sdpa, scale=scale)
    if has_shared_heads:
        sdpa = partial(sdpa, enable_gqa=True)
    needs_gradient, is_half = call.fw.needs_gradient(arrays), call.query.dtype in HALF_DTYPES
    hides_nan = is_half or call.m < MIN_KEYS_SHOWING_NAN
    if call.rule is None and not (needs_gradient or hides_nan):
        return ThreeArrayRunner(sdpa)
    is_unmasked, is_small = call.rule is None, call.query.numel() <= MAX_FEW_OUTPUT_NUMBERS
    # The last query sees every key, so its output shows every NaN.
    last = causal and call.m <= call.n and not is_small

    def run_checked(query: Array, key: Array, value: Array, mask: Any = None) -> Array | None:
        if hides_nan and not is_finite(query, key, *((value,) if is_half else ())):
            return None
        if has_slow_backward((query, key, value)):
            out = run_with_short_backward((query, key, value), mask, causal, scale)
        else:
            out = sdpa(query, key, value, mask, 0.0, causal)
        if needs_gradient:
            allow_second_derivative(out, (query, key, value), mask, causal, scale)
        if is_unmasked:
            return out
        if is_small and not (needs_gradient or is_half):
            return out if math.isfinite(out.sum().item()) else None
        visible = out.detach().select(2, -1) if last else out
        inputs = () if not needs_gradient else (key,) if causal else (key, query)
        return out if is_finite(visible, *inputs) else None

    if is_unmasked or causal:
        return ThreeArrayRunner(run_checked)
    if is_cached:
        rule: Any = call.rule
        return ThreeArrayRunner(
            lambda query, key, value: run_checked(query, key, value, fixed_mask(rule, query, key))
        )
    return lambda query, key, value, score, weighting, mask, seed: run_checked(
        query, key, value, mask
    )


def _build_device_runner(call: Call) -> ThreeArrayRunner | None:
    """Return the direct runner on CUDA, or None. It reads no array values, so it never waits."""
    causal, scale = is_plain_causal(call.rule), effective_scale(call)
    sdpa = backends.SDPA
    needs_gradient = call.fw.needs_gradient((call.query, call.key, call.value))
    if call.rule is not None and (needs_gradient or not _repairs_nan(call)):
        return None
    repair, width = import_nan_repair().repair_in_place if causal else None, call.query.shape[-1]
    has_default_scale = not causal and scale == 1 / math.sqrt(width)  # PyTorch's default
    # A plan serves all lengths with the same number of binary digits: take the largest.
    max_products = math.prod(call.lead) * width << (call.n.bit_length() + call.m.bit_length())

    def run_arrays(query: Array, key: Array, value: Array) -> Array | None:
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            return None
        # is_contiguous is the fastest check; arrays of one column pass it with any stride.
        is_contiguous = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        has_contiguous_rows = (is_contiguous and width > 1) or query.stride(3) == key.stride(
            3
        ) == value.stride(3) == 1
        if not has_contiguous_rows:
            return None
        if causal and key.shape[2] > query.shape[2]:
            key, value = (x[:, :, : query.shape[2]] for x in (key, value))
        if max_products >= backends.MIN_PRODUCTS_TO_MEASURE:
            out = backends.run_sdpa((query, key, value), None, causal, scale)
        elif has_default_scale:
            out = sdpa(query, key, value)
        else:
            out = sdpa(query, key, value, None, 0.0, causal, scale=scale)
        if repair is not None:
            repair(out, query, key, value, scale)
        elif needs_gradient:
            allow_second_derivative(out, (query, key, value), None, False, scale)
        return out

    return ThreeArrayRunner(run_arrays)


# Few queries and many keys, on a CPU


def _splits_keys(call: Call) -> bool:
    """Return whether the kernel, which distributes only queries and heads, leaves cores idle."""
    if call.query.device.type != "cpu" or call.rule is not None or call.m < MIN_MANY_KEYS:
        return False
    if call.fw.is_traced(call.query) or call.fw.dtype_name(call.query) == "float64" or call.dropout:
        return False
    if math.prod(call.lead) * call.n > QUERIES_PER_CORE:
        return False
    return not call.fw.needs_gradient((call.query, call.key, call.value))


def _run_split_keys(call: Call) -> Array:
    """Run the kernel with parts of the keys as heads, and merge them by their log-sum-exps."""
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    query = call.query
    key, value = (calls.repeat_shared_heads(call, x) for x in (call.key, call.value))
    width = max(query.shape[-1], value.shape[-1])
    padded = [
        torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        for x in (query, key, value)
    ]
    query, key, value = (x.expand(*call.lead, *x.shape[-2:]).flatten(0, -3)[:, None]
                         if call.lead else x[None, None] for x in padded)  # fmt: skip
    batch, count = query.shape[0], 4 * threads.CORE_COUNT
    size = call.m // count

    def run_part(start: int, heads: int, size: int) -> tuple[Array, Array]:
        end = start + heads * size
        k, v = (x[:, :, start:end].reshape(batch, heads, size, width) for x in (key, value))
        return flash(query.expand(-1, heads, -1, -1), k, v, scale=effective_scale(call))  # type: ignore[no-any-return]

    results = [run_part(0, count, size)]
    if call.m % count:
        results.append(run_part(count * size, 1, call.m % count))
    out, lse = (torch.cat(x, 1) for x in zip(*results, strict=True))
    if not (torch.isfinite(lse).all() and torch.isfinite(out).all()):
        return streaming.run(call)[0].to(call.query.dtype)  # the kernel may have hidden a NaN
    share = torch.softmax(lse.float(), 1)[..., None].to(out.dtype)
    merged = (share * out).sum(1)[..., : call.value.shape[-1]]  # type: ignore[union-attr]
    return merged.reshape(*call.lead, call.n, -1)


# Masked NaN under the causal mask, on CUDA


def import_nan_repair() -> Any:
    """Return the module with the repair kernel; importing it imports Triton."""
    from qkv.engines.triton import nan_repair

    return nan_repair


def import_triton_engine() -> Any:
    from qkv.engines import triton

    return triton


def _repairs_nan(call: Call) -> bool:
    """Return whether our CUDA kernel can repair rows that a masked NaN reached."""
    is_supported = (
        is_plain_causal(call.rule)
        and call.fw.dtype_name(call.query) != "float64"
        and not call.dropout
    )
    is_supported = (
        is_supported and max(call.fw.static_shape(x)[-1] for x in (call.query, call.value)) <= 256
    )
    return is_supported and not call.fw.is_traced(call.query) and has_triton()


def _run_with_repair(call: Call) -> Array:
    fw = call.fw
    inputs = (call.query, call.key, call.value)
    if not fw.needs_gradient(inputs):
        return _repair_output(call, run_kernel(call, inputs, None, True))[0]
    graph: list[Any] = []

    def forward(*arrays: Array) -> tuple[Arrays, Arrays]:
        inner = [x.detach().requires_grad_() for x in arrays[:3]]
        with torch.enable_grad():  # backward needs the kernel's autograd graph
            out = run_kernel(call, inner, None, True)
        graph[:] = [out, inner]
        repaired, repair_state = _repair_output(_rebuild_call(call, arrays), out.data)
        return (repaired,), (repair_state, repaired)

    def backward(arrays: Arrays, saved: Arrays, gradients: Arrays) -> Gradients:
        main = torch.autograd.grad(graph[0], graph[1], gradients[0], retain_graph=True)
        _repair_query_gradient(_rebuild_call(call, arrays), main[0], gradients[0], saved)
        return (*main, *[None] * (len(arrays) - 3))

    return fw.custom_gradient(
        forward, backward, dense.build_reference(call), tree.array_leaves(fw, call)
    )[0]


def _rebuild_call(call: Call, arrays: Sequence[Array]) -> Call:
    return tree.replace_arrays(call.fw, call, [x.detach() for x in arrays])


def _visible_arrays(call: Call) -> list[Any]:
    """Return query, key and value with four axes, without the keys that no query sees."""
    key, value = call.key, call.value
    if key.shape[-3:-2] != value.shape[-3:-2]:  # type: ignore[union-attr]
        key, value = (calls.repeat_shared_heads(call, x) for x in (key, value))
    query, key, value = (as_four_axes(x, call.lead) for x in (call.query, key, value))
    return [query, key[..., : call.n, :], value[..., : call.n, :]]


def _repair_output(call: Call, out: Array) -> tuple[Array, Array]:
    """Return the output with repaired rows, and what the backward pass needs."""
    out = out.contiguous()
    query, key, value = _visible_arrays(call)
    repair_state = import_nan_repair().repair_output(
        as_four_axes(out, call.lead), query, key, value, effective_scale(call)
    )
    return out, repair_state


def _repair_query_gradient(
    call: Call, query_gradient: Array, gradient: Array, saved: Sequence[Array]
) -> None:
    """Repair the gradient of the query in place; the gradients of key and value need no repair."""
    dquery, gradient, out = (
        as_four_axes(x, call.lead) for x in (query_gradient, gradient.contiguous(), saved[1])
    )
    query, key, value = _visible_arrays(call)
    scale = effective_scale(call)
    import_nan_repair().repair_query_gradient(
        dquery, gradient, out, saved[0], query, key, value, scale
    )
