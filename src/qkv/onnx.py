"""The ONNX operator `Attention` (opsets 23, 24 and 25), written as one call of `attend`.

    Y = softmax(cap(scale · Q Kᵀ) + bias) V        cap(s) = softcap · tanh(s / softcap)

`attention` is the operator as a function. `Attention` is the operator as a class for
`onnx.reference.ReferenceEvaluator(model, new_ops=[qkv.onnx.Attention])`; only it needs onnx.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv import frameworks, masks
from qkv.attention import attend, weights
from qkv.errors import FLOAT64_HINT, ArgumentError, DtypeError, ShapeError, require_extra
from qkv.scores import ScaledDot

if TYPE_CHECKING:
    from qkv.frameworks.base import Framework
    from qkv.util.types import Array

    Attention: Any

__all__ = ["Attention", "attention"]

ONNX_FLOAT_DTYPES = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
ONNX_DOUBLE = 11


def attention(
    Q: Array,
    K: Array,
    V: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int | None = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Return Y = softmax(cap(scale · Q Kᵀ) + bias) V and the other outputs of ONNX `Attention`.

    Q is (B, Hq, n, d), K (B, Hkv, m, d) and V (B, Hkv, m, dv). Or the heads are flattened,
    (B, n, Hq·d) and so on; then `q_num_heads` and `kv_num_heads` are required. `past_key` and
    `past_value` (B, Hkv, past, …) are prepended to K and V. `attn_mask`, boolean or additive,
    broadcasts to (B, Hq, n, past + m). If its last axis is shorter, the keys beyond it are masked
    out.

    Query i has the position p = i + offset. The offset is `past`, or `nonpad_kv_seqlen` − n for
    each batch, or 0. With `is_causal` it sees key j if j ≤ p. With window sizes it sees key j if
    p − `left_window_size` ≤ j ≤ p + `right_window_size`; −1 means no bound.

    Returns (Y, present_key, present_value, qk_matmul_output). `qk_matmul_output_mode` selects the
    last: 0: scale · Q Kᵀ; 1: after the cap; 2: after adding the bias; 3: after the softmax; None:
    None. `softmax_precision` can only raise the precision of `attend`, never lower it.

    >>> import numpy as np
    >>> Q, K, V = np.ones((1, 2, 3, 4)), np.ones((1, 1, 3, 4)), np.eye(3).reshape(1, 1, 3, 3)
    >>> Y, _, _, qk = attention(Q, K, V, is_causal=1, left_window_size=1)
    >>> Y[0, 0]
    array([[1. , 0. , 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0.5, 0.5]])
    >>> qk[0, 1, 0]
    array([2., 2., 2.])
    """
    arrays = {"Q": Q, "K": K, "V": V, "attn_mask": attn_mask, "past_key": past_key}
    arrays |= {"past_value": past_value, "nonpad_kv_seqlen": nonpad_kv_seqlen}
    for name, x in arrays.items():
        if not frameworks.is_array(x) and (x is not None or name in ("Q", "K", "V")):
            raise DtypeError(f"{name} must be an array, not {type(x).__name__}")
    fw = frameworks.common_framework(**{name: x for name, x in arrays.items() if x is not None})
    if softmax_precision == ONNX_DOUBLE and not fw.supports_float64(Q):
        raise ArgumentError(f"softmax_precision is 11 (float64), but {FLOAT64_HINT}")
    windows = {"left_window_size": left_window_size, "right_window_size": right_window_size}
    _check_attributes(qk_matmul_output_mode, windows, softmax_precision)
    if (past_key is None) != (past_value is None):
        names = ("past_key", "past_value") if past_value is None else ("past_value", "past_key")
        raise ArgumentError("{} was passed without {}: pass both or none".format(*names))
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise ArgumentError(
            "past_key and nonpad_kv_seqlen cannot be combined: past_key is a cache outside K and "
            "V, and nonpad_kv_seqlen says that K and V are the cache. Pass one of them"
        )

    query = _split_heads(fw, "Q", Q, "q_num_heads", q_num_heads)
    key = _split_heads(fw, "K", K, "kv_num_heads", kv_num_heads)
    value = _split_heads(fw, "V", V, "kv_num_heads", kv_num_heads)
    offset: Any = 0
    if past_key is not None:
        offset = fw.static_shape(past_key)[-2]
        key = fw.xp.concat([past_key, key], axis=-2)
        value = fw.xp.concat([past_value, value], axis=-2)
    elif nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - fw.static_shape(query)[-2]
    present = key, value
    m = fw.static_shape(key)[-2]
    dtypes = {fw.dtype_name(query), fw.dtype_name(value)}  # ONNX allows V a dtype of its own
    dtypes |= {"float64"} if softmax_precision == ONNX_DOUBLE else set()
    if len(dtypes) > 1:
        common = "float64" if "float64" in dtypes else "float32"
        query, key, value = (fw.astype(x, common) for x in (query, key, value))

    limits: list[Any] = []
    if is_causal:
        limits.append(masks.causal(offset=offset))
    if max(windows.values()) >= 0:
        left, right = (math.inf if size < 0 else size for size in windows.values())
        limits.append(masks.window(left, right, offset=offset))
    if nonpad_kv_seqlen is not None:
        limits.append(masks.lengths(nonpad_kv_seqlen))
    bias = None
    if attn_mask is not None:
        if fw.dtype_name(attn_mask) == "bool":
            limits.append(masks.array(_pad_mask(fw, attn_mask, m)))
        else:
            bias = _pad_mask(fw, fw.xp.astype(attn_mask, query.dtype), m)
    allowed = reduce(and_, limits) if limits else None
    mask = reduce(and_, [*limits, masks.array(bias)]) if bias is not None else allowed

    scale = None if scale is None else float(scale)
    score = ScaledDot(scale=scale, softcap=float(softcap) or None)
    mode = qk_matmul_output_mode
    out, qk = attend(query, key, value, score=score, mask=mask, return_weights=mode == 3), None
    if mode == 3:
        out, qk = out
    elif mode is not None:
        uncapped = ScaledDot(scale=scale)
        qk = weights(query, key, score=uncapped if mode == 0 else score, weighting="raw")
    if mode == 2 and bias is not None:
        qk = qk + bias
    if mode == 2 and allowed is not None:
        seen = weights(query, key, weighting="average", mask=allowed) > 0
        qk = fw.xp.where(seen, qk, fw.full(fw.static_shape(qk), float("-inf"), qk))

    out = fw.xp.astype(out, Q.dtype)
    if len(fw.static_shape(Q)) == 3:
        out = _join_heads(fw, out)
    return out, *present, None if qk is None else fw.xp.astype(qk, Q.dtype)


def _check_attributes(mode: int | None, windows: dict[str, int], precision: int | None) -> None:
    if mode not in (None, 0, 1, 2, 3):
        raise ArgumentError(f"qk_matmul_output_mode is {mode}; expected 0, 1, 2 or 3")
    for name, size in windows.items():
        if size < -1:
            raise ArgumentError(f"{name} is {size}; expected a number of keys, or -1 for no bound")
    if precision is not None and precision not in ONNX_FLOAT_DTYPES:
        known = ", ".join(f"{number} ({name})" for number, name in ONNX_FLOAT_DTYPES.items())
        raise ArgumentError(f"softmax_precision is {precision}; expected one of {known}")


def _split_heads(fw: Framework, name: str, x: Array, count: str, heads: int | None) -> Array:
    """Return (B, n, H·d) or (B, H, n, d) as (B, H, n, d)."""
    shape = fw.static_shape(x)
    if len(shape) == 4:
        if heads is not None and heads != shape[1]:
            raise ShapeError(f"{name} has shape {shape}, so {shape[1]} heads, but {count}={heads}")
        return x
    if len(shape) != 3:
        raise ShapeError(
            f"{name} has shape {shape}; expected (batch, heads, sequence, size) "
            "or (batch, sequence, heads · size)"
        )
    if heads is None:
        raise ArgumentError(f"{name} has shape {shape}, with flattened heads: pass {count}")
    if heads < 1 or shape[2] % heads:
        raise ShapeError(
            f"{name} has shape {shape}: its width {shape[2]} is not a multiple of {heads} heads"
        )
    columns = fw.xp.matrix_transpose(x)
    columns = fw.xp.reshape(columns, (shape[0], heads, shape[2] // heads, shape[1]))
    return fw.xp.matrix_transpose(columns)


def _join_heads(fw: Framework, x: Array) -> Array:
    """Return (B, H, n, d) as (B, n, H·d)."""
    batch, heads, n, width = fw.static_shape(x)
    columns = fw.xp.reshape(fw.xp.matrix_transpose(x), (batch, heads * width, n))
    return fw.xp.matrix_transpose(columns)


def _pad_mask(fw: Framework, attn_mask: Array, m: int) -> Array:
    """Extend the mask to m keys; keys beyond its last axis are masked out."""
    shape = fw.static_shape(attn_mask)
    if not 1 <= len(shape) <= 4 or shape[-1] > m:
        raise ShapeError(
            f"attn_mask has shape {shape}; expected one that broadcasts to "
            f"(batch, heads, queries, keys) with at most {m} keys"
        )
    if shape[-1] == m:
        return attn_mask
    masked_out = False if fw.dtype_name(attn_mask) == "bool" else float("-inf")
    padding = fw.full((*shape[:-1], m - shape[-1]), masked_out, attn_mask)
    return fw.xp.concat([attn_mask, padding], axis=-1)


def _build_operator_class() -> type:
    """Return the operator class. Its name is the operator's: onnx looks operators up by name."""
    with require_extra("onnx", "qkv.onnx.Attention needs onnx"):
        from onnx.reference.op_run import OpRun

    class Attention(OpRun):  # type: ignore[misc]
        """ONNX `Attention` computed by qkv, for `ReferenceEvaluator(model, new_ops=[Attention])`.

        onnx applies `new_ops` to subgraphs but not to a model's local functions: inline those
        first with `onnx.inliner.inline_local_functions(model)`.
        """

        op_domain = ""

        def run(self, *inputs: Any, **context: Any) -> tuple[Any, ...]:
            outputs = super().run(*inputs, **context)
            # The evaluator stores an unnamed output under "". Later nodes would receive it as
            # their missing inputs, so unnamed outputs are None.
            return tuple(x if name else None for name, x in zip(self.output, outputs, strict=False))

        def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
            wanted = [bool(name) for name in self.output]
            if not any(wanted[3:]):
                attributes["qk_matmul_output_mode"] = None
            if self.run_params["opsets"].get("", 25) == 23:
                inputs = _broadcast_mask(*inputs)
            outputs = attention(*inputs, **attributes)
            return tuple(x for x in outputs[: len(wanted)] if x is not None)

    Attention.__module__, Attention.__qualname__ = __name__, "Attention"
    return Attention


def _broadcast_mask(
    Q: Array, K: Array, V: Array, *others: Array | None
) -> tuple[Array | None, ...]:
    """Return the inputs, with a mask of length 1 on the key axis broadcast to all keys.

    Only opset 23 allows such a mask.
    """
    attn_mask, past_key, *_ = (*others, None, None)
    if attn_mask is None or attn_mask.shape[-1:] != (1,):
        return Q, K, V, *others
    m = K.shape[-2] + (0 if past_key is None else past_key.shape[-2])
    return Q, K, V, np.broadcast_to(attn_mask, (*attn_mask.shape[:-1], m)), *others[1:]


def __getattr__(name: str) -> Any:
    if name != "Attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _build_operator_class()
    return globals()[name]
