"""`scaled_dot_product_attention` with PyTorch's signature, for every framework."""

from __future__ import annotations

from typing import Any

from qkv import masks, scores
from qkv.attention import attend, split_sequences
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from qkv.frameworks import find_framework, is_array
from qkv.masks import Mask
from qkv.util.keyword_hints import forbid_torchscript
from qkv.util.types import A, Array

TORCH_DTYPES = ("float32", "float64", "float16", "bfloat16")
"""The dtypes of calls with dropout that PyTorch's own function computes."""


class CausalMaskError(CombinationError, RuntimeError):
    """`is_causal` and `attn_mask` are both set, for which PyTorch raises a RuntimeError."""


@forbid_torchscript
def scaled_dot_product_attention(
    query: A,
    key: A,
    value: A,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: Any = None,
) -> A:
    """softmax(QKᵀ · scale + mask) V, with PyTorch's signature and meaning, on every framework.

    query (…, n, d), key (…, m, d), value (…, m, d_v) → (…, n, d_v). The rules are PyTorch's:

    - A boolean mask is True where a query may attend to a key.
    - `is_causal` is aligned to the top left, and cannot be combined with `attn_mask`.
    - Groups of query heads share a key head only with `enable_gqa`.
    - Nested torch tensors are computed sequence by sequence.

    `seed` is an addition to PyTorch: it makes dropout reproducible, and JAX requires it. Without
    it, dropout of torch tensors on a CPU drops the same weights as PyTorch, from its generator.

    >>> import numpy as np
    >>> x = np.eye(2)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    if is_array(is_causal):
        raise DtypeError(
            "is_causal must be True or False, not an array: pass the array as attn_mask"
        )
    if is_array(enable_gqa):
        raise DtypeError("enable_gqa must be True or False, not an array")
    if is_causal and hasattr(attn_mask, "variant"):
        raise CausalMaskError(
            "CausalBias should not be used with causal=True: the mask is causal itself"
        )
    if is_causal and attn_mask is not None:
        raise CausalMaskError(
            "Explicit attn_mask should not be set when is_causal=True: pass one of them, or "
            "combine both in qkv.attend(query, key, value, mask=masks.causal & attn_mask)"
        )
    fw = find_framework(query)
    rows = None if fw is None else fw.split_nested(query)
    if fw is not None and rows is not None:
        if attn_mask is not None:
            raise CombinationError(
                "attn_mask cannot be used with nested tensors, because their sequences differ in "
                "length: pass is_causal, or call once for each sequence"
            )
        sequences = zip(*split_sequences(query=query, key=key, value=value), strict=True)
        options = (dropout_p, is_causal, scale, enable_gqa)
        parts = [
            scaled_dot_product_attention(q, k, v, None, *options, seed=seed)
            for q, k, v in sequences
        ]
        packed: A = fw.pack_nested(parts, query)
        return packed
    if dropout_p and seed is None and _draws_as_torch(query, key, value, attn_mask, dropout_p):
        import torch

        run: Any = torch._C._nn.scaled_dot_product_attention  # F's name may stand for this function
        dropped: A = run(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return dropped
    heads = [x.shape[-3] for x in (query, key, value) if len(getattr(x, "shape", ())) > 2]
    if not enable_gqa and len({size for size in heads if size != 1}) > 1:
        raise ArgumentError(
            f"query, key and value have {', '.join(map(str, heads))} heads: pass enable_gqa=True "
            "to share keys and values among groups of heads"
        )
    mask = None if attn_mask is None else _mask_from_torch(attn_mask, query, key)
    if is_causal:
        mask = masks.causal
    score = scores.ScaledDot(scale)
    return attend(query, key, value, score=score, mask=mask, dropout_p=dropout_p, seed=seed)


def _draws_as_torch(query: Any, key: Any, value: Any, mask: Any, dropout_p: Any) -> bool:
    """Return whether PyTorch's own function computes this call with dropout, with equal meaning.

    On a CPU its rows without keys are 0, as here. It takes no shapes that need other rules.
    """
    fw, rows = find_framework(query), (query, key, value)
    if fw is None or fw.name != "torch" or type(dropout_p) is not float or not 0 < dropout_p < 1:
        return False
    others = rows[1:] if mask is None else (*rows[1:], mask)
    if any(find_framework(x) is not fw or x.device.type != "cpu" for x in (query, *others)):
        return False
    if fw.is_traced(query) or fw.in_functional_transform():  # type: ignore[attr-defined]
        return False
    if {x.dtype for x in rows} != {query.dtype} or fw.dtype_name(query) not in TORCH_DTYPES:
        return False
    if mask is not None and fw.dtype_name(mask) not in ("bool", fw.dtype_name(query)):
        return False
    leads = {x.shape[:-2] for x in rows}
    return query.ndim in (3, 4) and len(leads) == 1 and key.shape[-2] == value.shape[-2] > 0


def _mask_from_torch(mask: Any, query: Array, key: Array) -> Mask:
    """Return PyTorch's `attn_mask` as a `Mask`.

    It may be an array, or a `causal_upper_left` or `causal_lower_right` of PyTorch.
    """
    variant = getattr(mask, "variant", None)
    if variant is None:
        fw = find_framework(query)
        if fw is not None and find_framework(mask) is fw and not fw.shares_device(mask, query):
            raise ArgumentError(
                f"query is on {fw.device_of(query)} but attn_mask is on {fw.device_of(mask)}: "
                "pass attn_mask.to(query.device)"
            )
        return masks.array(mask)
    expected, lengths = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if expected != lengths:
        raise ShapeError(
            f"attn_mask is for {expected[0]} queries and {expected[1]} keys, but the call has "
            f"{lengths[0]} queries and {lengths[1]} keys"
        )
    return masks.causal if variant.name == "UPPER_LEFT" else masks.causal("bottom_right")


# Like `attend`: TensorFlow's AutoGraph must not convert it.
setattr(scaled_dot_product_attention, "autograph_info__", None)  # noqa: B010
