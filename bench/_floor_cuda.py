"""The calls of one table, each beside PyTorch's SDPA and FlexAttention of the same shape; and the
sides that need a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench._calls import (
    WEIGHTINGS,
    Call,
    Size,
    alibi_score,
    document_ids,
    relative_mod,
    table_score,
)
from bench._pairwise import Case
from bench._plain import Array, Arrays, Plain

BASE = Size(2, 8, 8, 4096, 4096, 64)
WIDE = Size(4, 16, 16, 4096, 4096, 64)
DECODE = Size(64, 32, 8, 1, 4096, 128)
DECODE_LONG = Size(1, 32, 8, 1, 131_072, 128)
CHUNK = Size(16, 16, 16, 4, 1024, 64)
BERT = Size(256, 12, 12, 128, 128, 64)

TABLE: tuple[tuple[str, str, str, Size], ...] = (
    ("scaled_dot", "softmax", "none", BASE),
    ("function", "softmax", "none", BASE),
    ("laplace", "softmax", "none", BASE),
    ("boxcar", "softmax", "none", BASE),
    ("epanechnikov", "softmax", "none", BASE),
    ("triangular", "softmax", "none", BASE),
    ("constant", "softmax", "none", BASE),
    ("relative", "softmax", "none", BASE),
    ("alibi", "softmax", "causal", WIDE),
    ("scaled_dot", "softmax", "documents & causal", BASE),
    ("scaled_dot", "softmax", "documents & causal", WIDE),
    ("scaled_dot", "softmax", "blocks", BASE),
    ("scaled_dot", "softmax", "strided", BASE),
    ("scaled_dot", "softmax", "global", BASE),
    ("scaled_dot", "softmax", "dilated", BASE),
    ("scaled_dot", "sparsemax", "none", BASE),
    ("scaled_dot", "entmax15", "none", BASE),
    ("scaled_dot", "topk(8)", "none", BASE),
    ("scaled_dot", "topk(256)", "none", BASE),
    ("scaled_dot", "hard", "none", BASE),
    ("scaled_dot", "entmax(1.3)", "none", BASE),
    ("scaled_dot", "entmax15", "float (n, m)", BASE),
    ("scaled_dot", "entmax15", "documents", BASE),
    ("relative", "entmax15", "none", BASE),
    ("gaussian", "softmax", "none", Size(4, 16, 16, 4096, 4096, 128)),
    *(
        (score, weighting, "none", size)
        for size in (DECODE, DECODE_LONG)
        for score, weighting in (
            ("scaled_dot", "softmax"),
            ("scaled_dot", "entmax15"),
            ("scaled_dot", "topk(64)"),
            ("gaussian", "softmax"),
        )
    ),
    ("scaled_dot", "softmax", "causal to end", CHUNK),
    ("scaled_dot", "softmax", "boolean (b, 1, 1, m)", BERT),
    ("scaled_dot", "softmax", "lengths", BERT),
)
"""Score, weighting, mask and size."""


def list_table_cases() -> Iterator[tuple[Case, Size]]:
    """Yield the calls of the table: forward, then forward and backward."""
    for score, weighting, mask, size in TABLE:
        for direction in ("forward", "both"):
            yield (
                {
                    "score": score,
                    "mask": mask,
                    "weighting": weighting,
                    "size": "",
                    "returns": "output",
                    "dropout": "none",
                    "dtype": "bf16",
                    "direction": direction,
                    "mode": "eager",
                },
                size,
            )


def bind_plain_sdpa(call: Call) -> Callable[[Arrays], Any]:
    """Return SDPA of the call's shape, without its mask."""
    import torch

    shared = call.size.h_key != call.size.h

    def run(arrays: Arrays) -> Array:
        given = [arrays[x] for x in ("query", "key", "value")]
        return torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=shared)

    return run


def bind_flex(call: Call, compiles: bool = True) -> Callable[[Arrays], Any] | None:
    """Return FlexAttention for a softmax of dot products, perhaps with a score_mod; or None."""
    temperature = WEIGHTINGS[call.case["weighting"]].temperature
    if temperature is None or call.p or call.case["returns"] not in ("output", "lse"):
        return None
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    size, o = call.size, call.o
    scale = (call.score.scale or (lambda d: d**-0.5))(size.d) / temperature
    wants_lse = call.case["returns"] == "lse"
    modified = call.case["score"] in ("relative", "alibi", "relative table")
    if call.score.scale is None and not (modified and temperature == 1):
        return None
    block_mask = None
    if "allowed" in call.arrays:
        mask_mod = _find_mask_mod(call)
        b = size.b if call.arrays["allowed"].ndim == 4 else None
        block_mask = create_block_mask(
            mask_mod, b, None, size.n, size.m, device=o.device, _compile=size.n * size.m > 2**24
        )
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, dynamic=False) if compiles else flex_attention

    def run(arrays: Arrays) -> Any:
        out = attend(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            score_mod=_find_score_mod(call, o, arrays, temperature),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=size.h_key != size.h,
            return_aux=AuxRequest(lse=True) if wants_lse else None,
        )
        return (out[0], out[1].lse) if wants_lse else out

    return run


def _find_score_mod(call: Call, o: Plain, arrays: Arrays, temperature: float) -> Any:
    mod: Any = None
    if call.case["score"] == "relative":
        mod = relative_mod(o)
    elif call.case["score"] == "alibi":
        mod = alibi_score(o, arrays).score_mod
    elif call.case["score"] == "relative table":
        mod = table_score(o, arrays).score_mod
    if call.mask.bias is None:
        return mod
    bias = arrays["mask.bias"] / temperature

    def biased(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        s = s if mod is None else mod(s, b, h, i, j)
        return s + (bias[i, j] if bias.ndim == 2 else bias[h, i, j])

    return biased


def _find_mask_mod(call: Call) -> Callable[..., Array]:
    """Return a mask_mod that computes what can be computed, and otherwise reads the booleans."""
    name, size, allowed = call.case["mask"], call.size, call.arrays["allowed"]
    if name == "causal":
        return lambda b, h, i, j: j <= i
    if name == "causal to end":
        return lambda b, h, i, j: j <= i + size.m - size.n
    if name.startswith("documents") and size.n == size.m:
        ids = call.o.array(document_ids(size).astype("int32"))
        if name == "documents":
            return lambda b, h, i, j: ids[i] == ids[j]
        return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)
    if allowed.ndim == 2:
        return lambda b, h, i, j: allowed[i, j]
    if allowed.shape[-2] == 1:
        return lambda b, h, i, j: allowed[b, 0, 0, j]
    return lambda b, h, i, j: allowed[b, 0, i, j]


def bind_compiled(call: Call) -> Callable[[Arrays], Any]:
    """Return the plain formula after torch.compile, for this one shape."""
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(call.formula, dynamic=False)
    return lambda arrays: compiled(arrays)
