"""α of a tile's scores once its rows are known, and the gradient of the scores from that of α."""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.score import gate, gate_half
from qkv.engines.triton.tiles import LOG2E, NONE


@triton.jit
def chosen(s, j, least, position):
    """Whether a score is among the k largest; a NaN is not hidden."""
    beyond = least + s
    return (s > least) | ((s == least) & (j <= position)) | (beyond != beyond)


@triton.jit
def excess(s, threshold, alpha, POWER: tl.constexpr):
    """α = r^e and its lean r^(e − 1), where r = max(0, (alpha − 1) s − t), e = 1/(alpha − 1)."""
    r = s * (alpha - 1.0) - threshold
    r = tl.maximum(r, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if POWER == 2:
        return r * r, r
    on = r != 0  # or NaN
    if POWER == 1:
        return r, tl.where(on, 1.0 + 0.0 * r, 0.0)
    e = 1.0 / (alpha - 1.0)
    depth = tl.log2(tl.where(on, r, 1.0))
    return tl.where(on, tl.exp2(e * depth), 0.0), tl.where(on, tl.exp2((e - 1.0) * depth), 0.0)


@triton.jit
def weigh(s, j, live, top, share, row_a, row_b, alpha, F, MASKED: tl.constexpr):
    """α of a tile once its rows are known, and (of entmax) its lean.

    `share` is 1 / total, or 0 for an empty row. APART keeps it out of the exponent: `top` is then
    the largest score, and otherwise the logarithm of the sum, which at 1e8 has no digits left.
    """
    if F.EXPONENTIAL:
        if F.WEIGHTING == "topk":
            s = tl.where(chosen(s, j, row_a, row_b), s * LOG2E, NONE)
        if MASKED:
            s = tl.where(live, s, NONE)
        # Rounding may put a score above the top that another tile shape found.
        p = tl.exp2(tl.minimum(s - top, 0.0, propagate_nan=tl.PropagateNan.ALL))
        if F.APART:
            p = p * share
        lean = p
    else:
        if F.WEIGHTING == "average":
            p = share + 0.0 * j
        elif F.WEIGHTING == "sigmoid":
            # Not the fast one: a weight of 1/4096 would have no digit right.
            p = gate(gate_half(s, False), 0.0, 1.0, False)
        elif F.WEIGHTING == "normalized":
            p = s * share
        else:
            p = s
        lean = p
        if F.WEIGHTING == "entmax":
            p, lean = excess(s, row_a, alpha, F.POWER)
        if MASKED:
            p = tl.where(live, p, 0.0)
            lean = tl.where(live, lean, 0.0)
    return p, lean


@triton.jit
def slope(p, lean, along, centre, share, F):
    """The gradient of a tile's scores: `along` is ∂L/∂α."""
    if F.WEIGHTING == "softmax":
        return p * (along - centre)
    elif F.WEIGHTING == "topk":
        return tl.where(p == 0, 0.0, p * (along - centre))
    elif F.WEIGHTING == "entmax":
        return tl.where(lean == 0, 0.0, lean * (along - centre))
    elif F.WEIGHTING == "normalized":
        return (along - centre) * share
    elif F.WEIGHTING == "sigmoid":
        return p * (1.0 - p) * along
    return along
