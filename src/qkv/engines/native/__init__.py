"""The framework's own fused attention: `torch.nn.functional.scaled_dot_product_attention` and
`jax.nn.dot_product_attention`, for softmax of dot products."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

from qkv.arrays import is_array
from qkv.engines import streaming
from qkv.engines.call import Bare, Call
from qkv.scores import Dot, ScaledDot
from qkv.types import Array
from qkv.weightings import Softmax

NAME = "native"

Projected = Callable[..., tuple[Array, Array | None] | None]

MANY = 2**14
"""Keys from which a few queries are a matter of reading them."""


def cannot(call: Call) -> str | None:
    if call.fw.name not in ("torch", "jax"):
        return f"{call.fw.name} has no fused attention of its own"
    reason = unlike(call)
    if reason:
        return reason
    if call.wants_lse or call.wants_weights:
        return "fused kernels return neither the weights nor their log-sum-exp"
    if call.dropout and call.seed is not None:
        return "fused kernels draw their own random numbers, so a seed would mean something else"
    if call.fw.has_empty_axis((*call.lead, call.n, call.m)):
        return "there is nothing to compute"
    return _kernels(call).cannot(call)  # type: ignore[no-any-return]


def unlike(call: Call) -> str | None:
    """Why this is no softmax of dot products."""
    if type(call.score) not in (Dot, ScaledDot):
        return f"fused kernels know dot products only, not {type(call.score).__name__}"
    if getattr(call.score, "softcap", None) is not None:
        return "fused kernels have no softcap"
    if type(call.weighting) is not Softmax:
        return f"fused kernels know softmax only, not {type(call.weighting).__name__}"
    if is_array(getattr(call.score, "scale", None)) or is_array(call.weighting.temperature):
        return "a learned scale or temperature needs a gradient that the kernel does not give"
    if call.rule is not None and scale_of(call) <= 0:
        return "a kernel scales what is masked out too, and −∞ times 0 or less is not −∞"
    return None


def declines(call: Call) -> str | None:
    widths = [call.fw.shape(x)[-1] for x in (call.query, call.value)]
    if max(widths) > 2 * min(widths) and max(widths) > 128:
        return (
            f"the kernel takes one width, and {widths[0]} for queries against {widths[1]} for "
            "values would be mostly padding"
        )
    if _has_look_up(call) and call.m >= MANY and streaming.is_few(call):
        return "for a few queries among many keys it reads memory more slowly than ours"
    reason: str | None = _kernels(call).declines(call)
    return reason


def describe(call: Call) -> str:
    return str(_kernels(call).describe(call))


def run(call: Call) -> tuple[Array, None, None]:
    return _kernels(call).run(call), None, None


def bind(call: Call) -> Callable[[Call], tuple[Array, None, None] | None]:
    """`run` for calls of this kind whose numbers nobody has looked at yet; None: not with these."""
    kernels = _kernels(call)

    def bound(call: Call) -> tuple[Array, None, None] | None:
        out = kernels.guarded(call)
        return None if out is None else (out, None, None)

    return bound


def direct(call: Call) -> Callable[..., Array | None] | Bare | None:
    """The same of the three arrays alone, for a kind that is nothing but them."""
    kernels = _kernels(call)
    return kernels.direct(call) if hasattr(kernels, "direct") else None


def projected(name: str) -> Projected:
    """A layer of heads at once, its projections and all, where a framework has that."""
    if name != "torch":
        return lambda *_: None
    from qkv.engines.native import layer

    return layer.run


def _kernels(call: Call) -> Any:
    if call.fw.name == "torch":
        from qkv.engines.native import sdpa

        return sdpa
    from qkv.engines.native import jax

    return jax


def has_kernels(call: Call) -> bool:
    """Whether there are fused kernels for 16-bit vectors where the call's arrays are."""
    if call.fw.dtype(call.query) not in ("float16", "bfloat16"):
        return False
    return call.fw.name in ("torch", "jax") and bool(_kernels(call).on_device(call))


def _has_look_up(call: Call) -> bool:
    on_cuda = call.fw.name == "torch" and call.query.device.type == "cuda"
    return on_cuda and has_triton() and not call.fw.tracing(call.query)


def has_triton() -> bool:
    """Whether Triton is there to run kernels of our own."""
    return no_triton() is None


def no_triton() -> str | None:
    """Why Triton is not to be imported, if so."""
    if "triton" in sys.modules:
        return None
    if "tensorflow" in sys.modules:
        return (
            "TensorFlow was imported before Triton, and the LLVM of the two would end the process: "
            "import triton first"
        )
    return None if _installed() else "Triton is not installed: pip install triton"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def scale_of(call: Call) -> float:
    """The factor on qᵀk, with the softmax's temperature."""
    scale: Any = 1.0
    if isinstance(call.score, ScaledDot):
        width = int(call.fw.shape(call.query)[-1] or 1)  # torch.compile may not know it yet
        scale = 1 / math.sqrt(width) if call.score.scale is None else call.score.scale
    return float(scale / call.weighting.temperature)  # type: ignore[attr-defined]
