"""out = Σⱼ α(s)ᵢⱼ vⱼ  with  s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)): the door.

`attend` checks its arrays. Behind it stand the operators `qkv::attend` and `qkv::attend_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.engines.triton import forward, gradients
from qkv.engines.triton.arguments import GIVEN, Numbers
from qkv.engines.triton.kept import by_launches
from qkv.engines.triton.operators import operator, refuse
from qkv.engines.triton.records import ARRAYS, Arrays
from qkv.errors import ArgumentError, DtypeError, EngineError, ShapeError, unknown

WEIGHTINGS = ("softmax", "average", "normalized", "raw", "sigmoid", "entmax", "topk")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WIDEST_VALUE = 512

PAIRS, CAPS = map(Arrays._fields.index, ("pairs", "caps"))


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, **named: Any
) -> tuple[Tensor, Tensor]:
    """Σⱼ α(s)ᵢⱼ vⱼ and the log-sum-exp of each row of s. `named` are other fields of `Arrays` and
    of `Numbers`.

    query (B, H, n, w), key (B, Hₖ, m, w), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n). Query
    head h looks at key head h // (H // Hₖ). key_bias (B, Hₖ, m), gate_query (B, H, n) and
    gate_key (B, Hₖ, m) are float32 and may be expanded.

    The pair i, j counts if lower ≤ j − i ≤ upper, j < lengths[batch], and
    layout[i // layout_size, j // layout_size]; None sets no bound. A `cap` bends dot products to
    cap · tanh(scale · q·k / cap), before `pairs` are added; one of −1 to c · tanh(scale · q·k),
    with c (B, H, n) each query's of `caps`, float32. `pairs` (B or 1, H or 1, n or 1, m or 1) is
    either uint8, 0 where a pair does not count, or floats that are added to the scores,
    multiplied by `times`; −∞ rules a pair out. Weights are dropped by a hash of `seed`, an int32.
    `whole` has what each row's score gradients add up to at 0 to the last digit, as one that
    multiplies whole rows needs.

    `entmax` takes its threshold t from row_a (B, H, n), as in α = max(0, (alpha − 1)s − t)^e with
    e = 1/(alpha − 1). `topk` takes the smallest chosen score from row_a and its position from
    row_b (int32): ties count up to there. Neither gets a gradient: it is in that of the scores.

    A row with nothing to look at gives 0, its log-sum-exp −∞, and gradients 0. The second result
    is the total of the scores for `normalized`, the count for `average`, and else 0; gradients
    flow through it for `softmax` and `topk` alone.
    """
    query, key, value = cast(query, key, value)
    rest = {name: named.pop(name) for name in Arrays._fields if name in named}
    arrays, numbers = Arrays(query, key, value, **rest), Numbers(scale, **named)
    check("query", query, "key", key, value, WIDEST_VALUE)
    _check_rows(arrays, numbers)
    _check_masks(arrays, numbers)
    out, lse, _ = pooled(*arrays, *numbers._replace(hashed=query.shape[1]))
    return out, lse


def cast(*arrays: Tensor) -> tuple[Tensor, ...]:
    """The arrays as autocast wants them."""
    device = arrays[0].device.type
    if not torch.is_autocast_enabled(device):
        return arrays
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in arrays)


def check(one: str, query: Tensor, two: str, key: Tensor, value: Tensor, widest: int) -> None:
    """Whether a query, a key and a value go together, the first two by these names."""
    dtype, shapes = query.dtype, (query.shape, key.shape, value.shape)
    if dtype not in DTYPES or key.dtype != dtype or value.dtype != dtype:
        raise DtypeError(
            f"{one} is {dtype}, {two} is {key.dtype}, value is {value.dtype}: all three must be "
            "one of bfloat16, float16, float32"
        )
    if any(len(x) != 4 for x in shapes):
        told = ", ".join(str(tuple(x)) for x in shapes)
        raise ShapeError(f"{one}, {two} and value must be (batch, heads, rows, width), not {told}")
    (b, h, _, w), (bk, hk, m, wk), (bv, hv, mv, d) = shapes
    if not (b == bk == bv and hk == hv and m == mv and w == wk and hk and h % hk == 0):
        told = ", ".join(str(tuple(x)) for x in shapes)
        raise ShapeError(f"{one}, {two} and value do not go together: {told}")
    if d > widest:
        raise EngineError(f"values are {d} wide, and a tile holds {widest}")


def _check_rows(arrays: Arrays, numbers: Numbers) -> None:
    weighting, alpha = numbers.weighting, numbers.alpha
    if weighting not in WEIGHTINGS:
        raise unknown("weighting", weighting, WEIGHTINGS)
    if weighting == "entmax" and not 1 < alpha <= 2:
        raise ArgumentError(f"alpha must lie above 1 and up to 2, not {alpha}")
    query, key = arrays[:2]
    likes = {"key_bias": key, "gate_query": query, "gate_key": key, "row_a": query, "row_b": query}
    likes["caps"] = query
    for name, like in likes.items():
        x = getattr(arrays, name)
        if x is None:
            continue
        if x.shape != like.shape[:3]:
            raise ShapeError(f"{name} must be {tuple(like.shape[:3])}, not {tuple(x.shape)}")
        kind = torch.int32 if name == "row_b" else torch.float32
        if x.dtype != kind:
            raise DtypeError(f"{name} must be {kind}, not {x.dtype}")
    if (arrays.gate_query is None) != (arrays.gate_key is None):
        raise ArgumentError("a gate has two halves: give gate_query and gate_key, or neither")
    if weighting in ("entmax", "topk") and arrays.row_a is None:
        raise ArgumentError(f"weighting {weighting!r} needs row_a")
    if weighting == "topk" and arrays.row_b is None:
        raise ArgumentError(f"weighting {weighting!r} needs row_b")


def _check_masks(arrays: Arrays, numbers: Numbers) -> None:
    query, key, pairs = arrays.query, arrays.key, arrays.pairs
    layout, lengths = arrays.layout, arrays.lengths
    if pairs is not None:
        full = (*query.shape[:3], key.shape[2])
        fits = pairs.ndim == 4 and all(x in (1, y) for x, y in zip(pairs.shape, full, strict=True))
        if not fits:
            raise ShapeError(f"pairs must broadcast to {full}, on four axes: {tuple(pairs.shape)}")
        if pairs.dtype not in (torch.uint8, *DTYPES):
            raise DtypeError(f"pairs must be uint8, bfloat16, float16 or float32: {pairs.dtype}")
    if numbers.dropout and arrays.seed is None:
        raise ArgumentError("a dropout needs a seed: an int32 tensor of one number")
    size = numbers.layout_size
    if layout is not None:
        if size < 1:
            raise ArgumentError(f"layout_size must be at least 1, not {size}")
        need = tuple(-(-x.shape[2] // size) for x in (query, key))
        if tuple(layout.shape) != need:
            raise ShapeError(f"layout must be {need} blocks of {size}, not {layout.shape}")
    if lengths is not None and tuple(lengths.shape) != (query.shape[0],):
        raise ShapeError(f"lengths must be ({query.shape[0]},), not {tuple(lengths.shape)}")


_backward = operator(
    gradients.fake,
    refuse,
    schema=f"(Tensor along, Tensor? along_lse, Tensor out, Tensor kept, {GIVEN}, "
    "bool for_queries, bool for_keys, bool for_pairs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)(by_launches(gradients.attend_backward))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, kept = output
    ctx.save_for_backward(out, kept, *inputs[:ARRAYS])
    ctx.numbers = inputs[ARRAYS:]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, along: Tensor | None, along_lse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    out, kept, *inputs = ctx.saved_tensors
    needs, weighting = ctx.needs_input_grad, ctx.numbers[1]
    if weighting not in ("softmax", "topk"):
        along_lse = None
    if along is None and along_lse is None:
        return (None,) * len(needs)
    if along is None:
        along = torch.zeros_like(out)
    for_queries, for_keys = any(needs[i] for i in (0, 4, CAPS)), any(needs[i] for i in (1, 2, 3, 5))
    wishes = (for_queries, for_keys, needs[PAIRS])
    found = _backward(along, along_lse, out, kept, *inputs, *ctx.numbers, *wishes)
    grads: list[Tensor | None] = [None] * len(needs)
    for at, x in zip((*range(6), PAIRS, CAPS), found, strict=True):
        grads[at] = x if needs[at] else None
    return tuple(grads)


pooled = operator(
    forward.fake, _differentiate, _save, schema=f"({GIVEN}) -> (Tensor, Tensor, Tensor)"
)(forward.attend)
"""`attend` without its checks, by position: the output, the log-sum-exp, and what is kept."""
