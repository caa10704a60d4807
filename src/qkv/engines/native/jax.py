"""`jax.nn.dot_product_attention`: cuDNN's kernel where it fits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from qkv.engines import call as calls
from qkv.engines import streaming
from qkv.engines.call import Call
from qkv.engines.native.softmax_dot import effective_scale
from qkv.frameworks import tree
from qkv.masks import is_plain_causal
from qkv.util.types import Array


def unsupported_reason(call: Call) -> str | None:
    if call.dropout:
        return "jax.nn has no dropout"
    if call.rule is not None and not is_plain_causal(call.rule):
        return "jax.nn returns the mean for a query that sees no key, where qkv returns 0"
    if call.fw.dtype_name(call.query) == "float64":
        return "jax.nn always sums in float32, and the arrays are float64"
    if len(call.lead) > 2:
        return "jax.nn supports only one batch axis and one head axis"
    return None


def slower_reason(call: Call) -> str | None:
    if not is_on_device(call):
        return "on a CPU jax.nn computes the whole n × m matrix and is not faster"
    if not _fits_cudnn(call):
        return "cuDNN needs 16-bit vectors of width ≤ 128; else jax.nn computes the whole matrix"
    return None


def describe(call: Call) -> str:
    return "jax.nn.dot_product_attention"


def is_on_device(call: Call) -> bool:
    return _get_platform(call) != "cpu"


def _get_platform(call: Call) -> str:
    if call.fw.is_traced(call.query):
        return str(jax.default_backend())
    return str(next(iter(call.query.devices())).platform)


def _fits_cudnn(call: Call) -> bool:
    widths = [call.fw.static_shape(x)[-1] for x in (call.query, call.value)]
    return call.fw.dtype_name(call.query) in ("float16", "bfloat16") and max(widths) <= 128


def run(call: Call) -> Array:
    def run_kernel(query: Array, key: Array, value: Array) -> Array:
        key, value = (calls.repeat_shared_heads(call, x) for x in (key, value))
        lead = (1,) * (2 - len(call.lead)) + call.lead
        # The kernel needs equal widths, and cuDNN multiples of eight: pad with zeros.
        width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        fused = _fits_cudnn(call) and _get_platform(call) in ("gpu", "cuda")
        parts = []
        for x in (query, key, value):
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
            parts.append(jnp.swapaxes(jnp.broadcast_to(x, (*lead, *x.shape[-2:])), -3, -2))
        out = jax.nn.dot_product_attention(
            *parts,
            scale=effective_scale(call),
            is_causal=call.rule is not None,
            implementation="cudnn" if fused else None,
        )
        out = jnp.swapaxes(out, -3, -2)[..., : value.shape[-1]]
        return jnp.reshape(out, (*call.lead, call.n, value.shape[-1]))

    def run_streaming(query: Array, key: Array, value: Array) -> Array:
        fresh = tree.replace_arrays(call.fw, call, [query, key, value])
        return call.fw.astype(streaming.run(fresh)[0], call.fw.dtype_name(call.query))

    arrays = (call.query, call.key, call.value)
    if call.rule is None:
        return run_kernel(*arrays)
    # The kernel multiplies a masked NaN by the weight 0, which gives NaN.
    finite = jnp.isfinite(jnp.sum(call.key)) & jnp.isfinite(jnp.sum(call.value))
    pick: Callable[..., Array] = call.fw.cond
    return pick(finite, run_kernel, run_streaming, *arrays)


run_guarded = run
"""`run` itself checks the array values, on the device."""
