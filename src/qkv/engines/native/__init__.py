"""The native engine: a framework's fused kernel, for softmax of dot products.

PyTorch: `torch.nn.functional.scaled_dot_product_attention`. JAX: `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.engines import streaming
from qkv.engines.call import Call, ThreeArrayRunner
from qkv.engines.native.softmax_dot import MIN_MANY_KEYS, not_softmax_dot_reason
from qkv.engines.triton_import import has_triton
from qkv.util.types import Array

NAME = "native"

ProjectedAttention = Callable[..., tuple[Array, Array | None] | None]


def shape_based_reason(call: Call) -> str | None:
    """Return why another engine is faster, if no array value decides: reading one waits."""
    if call.fw.name != "torch" or _unsupported_kind_reason(call):
        return None
    reason: str | None = _select_backend(call).tiled_reason(call)
    return reason


def unsupported_reason(call: Call) -> str | None:
    return _unsupported_kind_reason(call) or _select_backend(call).unsupported_reason(call)


def _unsupported_kind_reason(call: Call) -> str | None:
    """Return why the fused kernels do not support this kind of call; no array value decides."""
    if call.fw.name not in ("torch", "jax"):
        return f"{call.fw.name} has no fused attention kernel"
    reason = not_softmax_dot_reason(call)
    if reason:
        return reason
    if call.wants_lse or call.wants_weights:
        return "fused kernels return neither the weights nor their log-sum-exp"
    if call.dropout and call.seed is not None:
        return "fused kernels draw their own random numbers and ignore a seed"
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "an array is empty"
    if call.fw.may_be_empty(call.n) or call.fw.may_be_empty(call.m):
        return "a length depends on data and may be 0: rule that out with torch._check"
    return None


def slower_reason(call: Call) -> str | None:
    widths = [call.fw.static_shape(x)[-1] for x in (call.query, call.value)]
    if max(widths) > 2 * min(widths) and max(widths) > 128:
        return (
            f"the kernel needs equal widths, and padding queries of width {widths[0]} and values "
            f"of width {widths[1]} would waste most of the work"
        )
    if _has_lookup_kernel(call) and call.m >= MIN_MANY_KEYS and streaming.has_few_queries(call):
        return "triton reads memory faster for few queries and many keys"
    reason: str | None = _select_backend(call).slower_reason(call)
    return reason


def describe(call: Call) -> str:
    return str(_select_backend(call).describe(call))


def run(call: Call) -> tuple[Array, None, None]:
    return _select_backend(call).run(call), None, None


def build_runner(call: Call) -> Callable[[Call], tuple[Array, None, None] | None]:
    """Return a function that runs later calls with this signature.

    The function checks the array values. It returns None if the kernel does not support them.
    """
    kernels = _select_backend(call)

    def run_guarded(call: Call) -> tuple[Array, None, None] | None:
        out = kernels.run_guarded(call)
        return None if out is None else (out, None, None)

    return run_guarded


def build_direct_runner(call: Call) -> Callable[..., Array | None] | ThreeArrayRunner | None:
    """Return a runner that takes query, key and value only; None if there is no such runner."""
    kernels = _select_backend(call)
    return kernels.build_direct_runner(call) if hasattr(kernels, "build_direct_runner") else None


def projected_attention(name: str) -> ProjectedAttention:
    """Return the fused operator for a whole layer; see `qkv.attention.projected_attention`."""
    if name != "torch":
        return lambda *_: None
    from qkv.engines.native import multi_head_layer

    return multi_head_layer.run


def _select_backend(call: Call) -> Any:
    if call.fw.name == "torch":
        from qkv.engines.native import sdpa

        return sdpa
    from qkv.engines.native import jax

    return jax


def has_fused_kernels(call: Call) -> bool:
    """Return whether the call's device has fused kernels for 16-bit arrays."""
    if call.fw.dtype_name(call.query) not in ("float16", "bfloat16"):
        return False
    return call.fw.name in ("torch", "jax") and bool(_select_backend(call).is_on_device(call))


def _has_lookup_kernel(call: Call) -> bool:
    on_cuda = call.fw.name == "torch" and call.query.device.type == "cuda"
    return on_cuda and has_triton() and not call.fw.is_traced(call.query)
