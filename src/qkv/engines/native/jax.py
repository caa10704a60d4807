"""`jax.nn.dot_product_attention`: cuDNN's kernel where it fits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from qkv.arrays import tree
from qkv.engines import call as calls
from qkv.engines import native, streaming
from qkv.engines.call import Call
from qkv.masks import is_causal
from qkv.types import Array


def cannot(call: Call) -> str | None:
    if call.dropout:
        return "jax.nn has no dropout"
    if call.rule is not None and not is_causal(call.rule):
        return "jax.nn gives a row with nothing to attend to the average, and we give 0"
    if call.fw.dtype(call.query) == "float64":
        return "jax.nn sums in float32 whatever it is given"
    if len(call.lead) > 2:
        return "jax.nn takes one axis of batches and one of heads"
    return None


def declines(call: Call) -> str | None:
    if not on_device(call):
        return "on a CPU jax.nn makes the whole n × m matrix: it is no faster than ours"
    if not _fits(call):
        return "cuDNN takes 16-bit vectors of up to 128 numbers; without it jax.nn makes the matrix"
    return None


def describe(call: Call) -> str:
    return "jax.nn.dot_product_attention"


def on_device(call: Call) -> bool:
    return _platform(call) != "cpu"


def _platform(call: Call) -> str:
    if call.fw.tracing(call.query):
        return str(jax.default_backend())
    return str(next(iter(call.query.devices())).platform)


def _fits(call: Call) -> bool:
    widths = [call.fw.shape(x)[-1] for x in (call.query, call.value)]
    return call.fw.dtype(call.query) in ("float16", "bfloat16") and max(widths) <= 128


def run(call: Call) -> Array:
    def kernel(query: Array, key: Array, value: Array) -> Array:
        key, value = (calls.share_heads(call, x) for x in (key, value))
        lead = (1,) * (2 - len(call.lead)) + call.lead
        # It takes one width, and cuDNN a multiple of eight: zeros make up for it.
        width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        fused = _fits(call) and _platform(call) in ("gpu", "cuda")
        parts = []
        for x in (query, key, value):
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
            parts.append(jnp.swapaxes(jnp.broadcast_to(x, (*lead, *x.shape[-2:])), -3, -2))
        out = jax.nn.dot_product_attention(
            *parts,
            scale=native.scale_of(call),
            is_causal=call.rule is not None,
            implementation="cudnn" if fused else None,
        )
        out = jnp.swapaxes(out, -3, -2)[..., : value.shape[-1]]
        return jnp.reshape(out, (*call.lead, call.n, value.shape[-1]))

    def careful(query: Array, key: Array, value: Array) -> Array:
        fresh = tree.rebuild(call.fw, call, [query, key, value])
        return call.fw.astype(streaming.run(fresh)[0], call.fw.dtype(call.query))

    arrays = (call.query, call.key, call.value)
    if call.rule is None:
        return kernel(*arrays)
    # A NaN behind the mask would be multiplied by 0, and that is NaN.
    finite = jnp.isfinite(jnp.sum(call.key)) & jnp.isfinite(jnp.sum(call.value))
    pick: Callable[..., Array] = call.fw.when
    return pick(finite, kernel, careful, *arrays)


guarded = run
"""It looks at the numbers itself, on the device."""
