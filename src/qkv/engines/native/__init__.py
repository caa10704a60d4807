"""The framework's own fused attention: `torch.nn.functional.scaled_dot_product_attention` and
`jax.nn.dot_product_attention`, for softmax of dot products."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

from qkv.engines import streaming
from qkv.engines.call import Call, ThreeArrayRunner
from qkv.frameworks import is_array
from qkv.scores import Dot, ScaledDot
from qkv.util.caches import memoize
from qkv.util.types import Array
from qkv.weightings import Softmax

NAME = "native"

ProjectedAttention = Callable[..., tuple[Array, Array | None] | None]

MIN_MANY_KEYS = 2**14
"""Keys from which a few queries are a matter of reading them."""


def unsupported_reason(call: Call) -> str | None:
    if call.fw.name not in ("torch", "jax"):
        return f"{call.fw.name} has no fused attention of its own"
    reason = not_softmax_dot_reason(call)
    if reason:
        return reason
    if call.wants_lse or call.wants_weights:
        return "fused kernels return neither the weights nor their log-sum-exp"
    if call.dropout and call.seed is not None:
        return "fused kernels draw their own random numbers, so a seed would mean something else"
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "there is nothing to compute"
    return _select_backend(call).unsupported_reason(call)  # type: ignore[no-any-return]


def not_softmax_dot_reason(call: Call) -> str | None:
    """Why this is no softmax of dot products."""
    if type(call.score) not in (Dot, ScaledDot):
        return f"fused kernels know dot products only, not {type(call.score).__name__}"
    if getattr(call.score, "softcap", None) is not None:
        return "fused kernels have no softcap"
    if type(call.weighting) is not Softmax:
        return f"fused kernels know softmax only, not {type(call.weighting).__name__}"
    if is_array(getattr(call.score, "scale", None)) or is_array(call.weighting.temperature):
        return "a learned scale or temperature needs a gradient that the kernel does not give"
    if call.rule is not None and effective_scale(call) <= 0:
        return "a kernel scales what is masked out too, and −∞ times 0 or less is not −∞"
    return None


def slower_reason(call: Call) -> str | None:
    widths = [call.fw.static_shape(x)[-1] for x in (call.query, call.value)]
    if max(widths) > 2 * min(widths) and max(widths) > 128:
        return (
            f"the kernel takes one width, and {widths[0]} for queries against {widths[1]} for "
            "values would be mostly padding"
        )
    if _has_lookup_kernel(call) and call.m >= MIN_MANY_KEYS and streaming.has_few_queries(call):
        return "for a few queries among many keys it reads memory more slowly than ours"
    reason: str | None = _select_backend(call).slower_reason(call)
    return reason


def describe(call: Call) -> str:
    return str(_select_backend(call).describe(call))


def run(call: Call) -> tuple[Array, None, None]:
    return _select_backend(call).run(call), None, None


def build_runner(call: Call) -> Callable[[Call], tuple[Array, None, None] | None]:
    """`run` for calls of this kind whose numbers nobody has looked at yet; None: not with these."""
    kernels = _select_backend(call)

    def run_bound(call: Call) -> tuple[Array, None, None] | None:
        out = kernels.run_guarded(call)
        return None if out is None else (out, None, None)

    return run_bound


def build_direct_runner(call: Call) -> Callable[..., Array | None] | ThreeArrayRunner | None:
    """The same of the three arrays alone, for a kind that is nothing but them."""
    kernels = _select_backend(call)
    return kernels.build_direct_runner(call) if hasattr(kernels, "build_direct_runner") else None


def projected_attention(name: str) -> ProjectedAttention:
    """A layer of heads at once, its projections and all, where a framework has that."""
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
    """Whether there are fused kernels for 16-bit vectors where the call's arrays are."""
    if call.fw.dtype_name(call.query) not in ("float16", "bfloat16"):
        return False
    return call.fw.name in ("torch", "jax") and bool(_select_backend(call).is_on_device(call))


def _has_lookup_kernel(call: Call) -> bool:
    on_cuda = call.fw.name == "torch" and call.query.device.type == "cuda"
    return on_cuda and has_triton() and not call.fw.is_traced(call.query)


def has_triton() -> bool:
    """Whether Triton is there to run kernels of our own."""
    return triton_missing_reason() is None


def triton_missing_reason() -> str | None:
    """Why Triton is not to be imported, if so."""
    if "triton" in sys.modules:
        return None
    if "tensorflow" in sys.modules:
        return (
            "TensorFlow was imported before Triton, and the LLVM of the two would end the process: "
            "import triton first"
        )
    return None if _is_triton_installed() else "Triton is not installed: pip install triton"


@memoize("engines.is_triton_installed")
def _is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def effective_scale(call: Call) -> float:
    """The factor on qᵀk, with the softmax's temperature."""
    scale: Any = 1.0
    if isinstance(call.score, ScaledDot):
        width = int(call.fw.static_shape(call.query)[-1] or 1)  # torch.compile may not know it yet
        scale = 1 / math.sqrt(width) if call.score.scale is None else call.score.scale
    return float(scale / call.weighting.temperature)  # type: ignore[attr-defined]
