"""A call's mask as the kernels read it: a band, lengths, a layout of blocks, and one array."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from qkv.engines import call as calls
from qkv.engines.call import Call
from qkv.engines.triton.axes import batch_and_heads
from qkv.masks.band import Band
from qkv.masks.base import AndMask, ArrayMask, Mask
from qkv.masks.sequences import Blocks, Lengths
from qkv.util.types import Array
from qkv.weightings import Entmax, Hard, Sparsemax, TopK

SEARCHED_WEIGHTINGS = (Entmax, Sparsemax, TopK, Hard)
"""Weightings that must know something of the whole row first: their kernels list no blocks."""


class MaskBounds(NamedTuple):
    """Which pairs count: lower ≤ j − i ≤ upper, j < lengths, the layout's blocks, and what rules
    of other kinds leave, which are read as one array."""

    lower: int | None = None
    upper: int | None = None
    lengths: Array | None = None
    layout: Array | None = None
    layout_size: int = 0
    rules: tuple[Mask, ...] = ()


def split_mask(call: Call) -> MaskBounds:
    return MaskBounds() if call.rule is None else _split_rule(call, call.rule)


def _split_rule(call: Call, rule: Mask) -> MaskBounds:
    import torch

    device = call.query.device
    if isinstance(rule, AndMask):
        one, two = _split_rule(call, rule.one), _split_rule(call, rule.two)
        if one.layout is not None and two.layout is not None:
            two = MaskBounds(rules=(rule.two,))
        return _intersect_bounds(one, two)
    if isinstance(rule, Band) and rule.is_relative:
        shift, left, right = rule.offset, rule.left, rule.right
        if shift is None:
            shift = call.m - call.n if rule.align == "bottom_right" else 0
        return MaskBounds(
            None if left is None else shift - left, None if right is None else shift + right
        )
    if isinstance(rule, Lengths) and call.lead and len(rule.valid.shape) == 1:
        valid = torch.as_tensor(rule.valid, dtype=torch.int32, device=device)
        batch, _ = batch_and_heads(call)
        return MaskBounds(lengths=valid.repeat_interleave(batch // call.lead[0]))
    searched = type(call.weighting) in SEARCHED_WEIGHTINGS
    if isinstance(rule, Blocks) and rule.layout.ndim == 2 and not searched:
        size = rule.size[0]
        if size == rule.size[1]:
            layout: Any = call.fw.cached_constant(rule.layout, call.query, "bool")
            layout = layout[: -(-call.n // size), : -(-call.m // size)].contiguous()
            return MaskBounds(layout=layout, layout_size=size)
    return MaskBounds(rules=(rule,))


def build_mask_array(call: Call, bounds: MaskBounds) -> Array | None:
    """(B or 1, H or 1, n or 1, m or 1): what the rules add, −∞ where they rule out, or if they add
    nothing 0 there, as bytes."""
    import torch

    allowed, bias = None, None
    for rule in bounds.rules:
        if isinstance(rule, ArrayMask) and rule.is_bias:
            bias = rule.values if rule.values.dtype != torch.float64 else rule.values.float()
            continue
        some = rule.allowed_pairs(calls.make_block(call))
        if some is not None:
            some = torch.as_tensor(some, device=call.query.device)
            allowed = some if allowed is None else allowed & some
    if bias is None:
        return None if allowed is None else _as_shared_axes(call, allowed).view(torch.uint8)
    return _as_shared_axes(call, bias if allowed is None else bias.where(allowed, -math.inf))


def scale_mask_array(call: Call, pairs: Any, temperature: Any) -> Any:
    """pairs / temperature, in float32; −∞ stays, and has no part in the temperature's gradient."""
    pairs, temperature = pairs.float(), _as_shared_axes(call, temperature.float())
    counts = pairs != -math.inf
    return (pairs.where(counts, 0.0) / temperature).where(counts, -math.inf)


def drop_row_constants(query: Any, pairs: Any) -> tuple[Any, Any]:
    """What is added to whole rows moves no weight: 0 instead, or −∞ where it rules them out. Its
    gradient, 0, goes by the query: as a sum of what cancels it would be rounding alone."""
    out = pairs == -math.inf
    linked = 0 * pairs.masked_fill(out, 0.0)
    return query + linked.to(query.dtype), (pairs - pairs).masked_fill(out, -math.inf).detach()


def add_row_offsets(call: Call, pairs: Any, offset: Any) -> Any:
    """The array with what each query (…, n, 1) adds to its row. One that is not finite shows in its
    products: as −∞ or NaN it would rule them out."""
    if offset is None:
        return pairs
    offset = _as_shared_axes(call, offset.nan_to_num(0.0))
    if pairs is None or pairs.is_floating_point():
        return offset if pairs is None else pairs + offset
    return offset.where(pairs.bool(), -math.inf)


def _as_shared_axes(call: Call, x: Any) -> Any:
    """(…, n or 1, m or 1) on four axes; an axis that all share stays 1."""
    x = x[(None,) * (len(call.lead) + 2 - x.ndim)]
    if len(call.lead) < 2:
        return x[:, None] if call.lead else x[None, None]
    if math.prod(x.shape[:-3]) > 1 and len(call.lead) > 2:
        x = x.expand(*call.lead[:-1], *x.shape[-3:])
    return x.reshape(-1, *x.shape[-3:])


def _intersect_bounds(one: MaskBounds, two: MaskBounds) -> MaskBounds:
    lower = [x.lower for x in (one, two) if x.lower is not None]
    upper = [x.upper for x in (one, two) if x.upper is not None]
    lengths = [x.lengths for x in (one, two) if x.lengths is not None]
    return MaskBounds(
        max(lower, default=None),
        min(upper, default=None),
        lengths[0].minimum(lengths[-1]) if lengths else None,
        one.layout if two.layout is None else two.layout,
        one.layout_size or two.layout_size,
        one.rules + two.rules,
    )
