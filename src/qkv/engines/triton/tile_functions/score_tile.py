"""Device functions for scores, weights and their gradients of a tile.

    s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k))
    s = cap · tanh(scale · φ(q)·ψ(k) / cap)             with a cap
    s = cap(q) · tanh(scale · φ(q)·ψ(k))                with a cap per query

Scores of softmax and top-k are in base 2: log₂e is part of `scale` and of the bias.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from qkv.engines.triton.tile_functions.tiles import (
    INFINITY,
    LN2,
    LOG2E,
    NEG_INFINITY,
    fast_exp2,
    fast_log2,
    jit_kernel,
)

SavedRows = namedtuple("SavedRows", "along centre kept lines")
"""Inputs of the backward pass per row: ∂L/∂out, the centre, and the two rows of `kept`. With ALONG:
∂L/∂α itself, (n, m) per head, and the log-sum-exp."""


@triton.jit
def scale_gate_term(x, FAST: tl.constexpr):
    """Return one half of a gate's logit, scaled for `apply_gate`, so that a pair needs one add."""
    if FAST:
        return x * 0.5
    return x * -LOG2E


TANH_PAIR_PTX = tl.constexpr("""
{
    .reg .b32 pair;
    .reg .b16 low, high;
    cvt.rn.f16x2.f32 pair, $3, $2;
    tanh.approx.f16x2 pair, pair;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}
""")


@triton.jit
def apply_gate(a, b, size, FAST: tl.constexpr):
    """Return size · σ(sum of two halves); FAST computes two at a time, to 11 bits."""
    if FAST:
        t = tl.inline_asm_elementwise(
            TANH_PAIR_PTX, "=f,=f,f,f", [a + b], dtype=tl.float32, is_pure=True, pack=2
        )
        half = size * 0.5
        return t * half + half
    return size / (1.0 + tl.exp2(a + b))


@triton.jit
def fast_tanh(x, FAST: tl.constexpr):
    """Return tanh x; FAST is correct to 11 bits, also near 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    y = x * x
    near = ((0.01649562 * y - 0.05270273) * y + 0.13321219) * y - 0.33332969  # within 4e-8
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2 * LOG2E)))
    return tl.where(y < 0.3, x + x * y * near, far)


@triton.jit
def apply_score_form(x, scale, bias, a, b, cap, times, F):
    """Return s, its derivative in the gated value (steep), and that of the cap (bend).

    A gate without bias and cap has the scale in `steep`. The cap is multiplied by `times`; with
    F.CAP < 0 each query has its own cap.
    """
    bend = x
    if F.GATE and not F.BIAS and F.CAP == 0:
        steep = apply_gate(a, b, scale, F.FAST)
        s = x * steep
    else:
        s = x * scale
        steep = s
        if F.CAP > 0:
            t = fast_tanh(s * ((1.0 / F.CAP) / times), F.FAST)
            s = t * (F.CAP * times)
            bend = 1.0 - t * t
        elif F.CAP < 0:
            t = fast_tanh(s * (1.0 / times), F.FAST)
            s = t * (cap * times)
            bend = (1.0 - t * t) * cap
        if F.BIAS:
            s = s + bias
        if F.GATE:
            steep = apply_gate(a, b, 1.0, F.FAST)
            s = s * steep
    return s, steep, bend


@triton.jit
def modify_scores(s, b, h, i, j, given, times, z, F):
    """Return the scores of a tile after score_mod, which needs base e; then apply `times`."""
    if F.HAS_MOD:
        s = F.MOD(s, b, h, i, j, given, z, F) * times
    return s


@triton.jit
def modified_gradients(ds, s, b, h, i, j, given, times, z, F):
    """Return the gradients of the scores before score_mod from those after it."""
    if F.HAS_MOD:
        factor = times
        if F.WEIGHTING == "softmax":
            factor = factor * LN2
        ds = F.MOD_GRADIENT(ds * factor, s, b, h, i, j, given, z, F)
    return ds


@triton.jit
def gate_gradients(ds, s, steep, scale, F):
    """Return the gradients of the gate's logit and of the gated value from that of the score."""
    if F.BIAS or F.CAP != 0:
        shut = 1.0 - steep
    else:
        shut = 1.0 - steep * (1.0 / tl.where(scale == 0, 1.0, scale))
    return ds * s * shut, ds * steep


@triton.jit
def remaining_scale(scale, F):
    """Return the factor still missing from a gradient of φ·ψ: the scale without log₂e."""
    factor = scale
    if F.GATE and not F.BIAS and F.CAP == 0:
        factor = 1.0
    if F.WEIGHTING == "softmax" and not F.HAS_MOD:
        factor = factor * LN2
    return factor


@triton.jit
def is_in_top_k(s, j, least, position):
    """Return whether a score is among the k largest; NaN counts, so that it stays visible."""
    beyond = least + s
    return (s > least) | ((s == least) & (j <= position)) | (beyond != beyond)


@triton.jit
def keep_top_k(s, j, least, position, tied):
    """Return the scores that are among the k largest, −∞ for the others.

    `tied` is 0 if all positions are LAST_POSITION. Then one comparison does, which is true for NaN.
    """
    if tied > 0:
        s = tl.where(is_in_top_k(s, j, least, position), s, NEG_INFINITY)
    else:
        s = tl.where(s < least, NEG_INFINITY, s)
    return s


@triton.jit
def entmax_weights(s, threshold, alpha, POWER: tl.constexpr, FAST: tl.constexpr):
    """Return α = r^e and r^(e − 1); r = max(0, (alpha − 1) s − t), e = 1/(alpha − 1)."""
    r = s * (alpha - 1.0) - threshold
    r = tl.maximum(r, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if POWER == 2:
        return r * r, r
    if POWER == 1:
        return r, tl.where(r != 0, 1.0 + 0.0 * r, 0.0)  # or NaN
    lean = power_of(r, 1.0 / (alpha - 1.0) - 1.0, FAST)
    return lean * r, lean


@triton.jit
def sink_scores(rows, scales, F):
    """Return the score of entmax's sink for each row: one number, or one of each row (SINK = 2)."""
    score = tl.sum(rows.row_a, 1) * 0.0 + scales.sink
    if F.SINK == 2:
        score = tl.sum(rows.cap, 1)
    return score


@triton.jit
def sink_lean(rows, scales, F):
    """Return r^(e − 1) of entmax's sink for each row."""
    score = sink_scores(rows, scales, F)
    threshold = tl.sum(rows.row_a, 1)
    _, lean = entmax_weights(score, threshold, scales.alpha, F.POWER, F.FAST)
    return lean


@triton.jit
def power_of(r, exponent, FAST: tl.constexpr):
    """Return r^exponent for r ≥ 0 and an exponent above 0."""
    if FAST:  # 2^(−∞) = 0
        return fast_exp2(exponent * fast_log2(r, True), True)
    else:
        on = r != 0  # or NaN
        return tl.where(on, tl.exp2(exponent * tl.log2(tl.where(on, r, 1.0))), 0.0)


@triton.jit
def tile_weights(s, j, live, top, share, row_a, row_b, alpha, F, MASKED: tl.constexpr):
    """Return α of a tile from the statistics of its rows, and (for entmax) r^(e − 1).

    `share` is 1 / total, or 0 for an empty row. With APART, softmax is 2^(s − top) · share, where
    `top` is the largest score. Otherwise it is 2^(s − top), where `top` is the log-sum-exp, which
    is too imprecise for scores near 1e8.
    """
    if F.EXPONENTIAL:
        if F.WEIGHTING == "topk":
            s = tl.where(is_in_top_k(s, j, row_a, row_b), s * LOG2E, NEG_INFINITY)
        if MASKED:
            s = tl.where(live, s, NEG_INFINITY)
        below = s - top
        if not F.BOUNDED:  # by rounding, a score may exceed the top of another tile shape
            below = tl.minimum(below, 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = fast_exp2(below, F.FAST)
        if F.APART:
            p = p * share
        lean = p
    else:
        if F.WEIGHTING == "average":
            p = share + 0.0 * j
        elif F.WEIGHTING == "sigmoid":
            # Not FAST: a weight of 1/4096 would have no correct digit.
            p = apply_gate(scale_gate_term(s, False), 0.0, 1.0, False)
        elif F.WEIGHTING == "normalized":
            p = s * share
        else:
            p = s
        lean = p
        if F.WEIGHTING == "entmax":
            p, lean = entmax_weights(s, row_a, alpha, F.POWER, F.FAST)
        if MASKED:
            p = tl.where(live, p, 0.0)
            lean = tl.where(live, lean, 0.0)
    return p, lean


@triton.jit
def score_gradients(p, lean, along, centre, share, F):
    """Return the gradient of a tile's scores; `along` is ∂L/∂α."""
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


@triton.jit
def load_row_statistics(back, line, F):
    """Load the statistics of rows: top and share, which the forward pass saved, and the centre."""
    zero = line.to(tl.float32) * 0.0
    top = zero
    share = zero
    middle = zero
    if F.ALONG:
        top = tl.load(back.kept + line) * LOG2E
        top = tl.where(top == NEG_INFINITY, INFINITY, top)
        share = zero + 1.0
    elif F.EXPONENTIAL:
        top = tl.load(back.kept + line)
    if (
        F.WEIGHTING == "normalized"
        or F.WEIGHTING == "average"
        or (F.EXPONENTIAL and F.APART and not F.ALONG)
    ):
        share = tl.load(back.kept + back.lines + line)
    if F.CENTRED:
        middle = tl.load(back.centre + line)
    return top, share, middle


@triton.jit
def is_all_finite(x):
    """Return whether all elements (rows, columns) are finite, by 0 · x, which is NaN if not.

    This takes one operation per element. A comparison and a count take five, and longer to compile.
    """
    none = tl.sum(tl.sum(x * 0.0, 1), 0)
    return none == none


@triton.jit
def product_gradients(ds, live, gated, steep, bend, scale, F, RULED: tl.constexpr):
    """Return the gradients of the gate's logit, of log cap(q), and of scale · φ·ψ.

    They are computed from the gradient of the scores.
    """
    logit = ds
    own = ds
    if F.CAP < 0:
        own = ds * gated
    if F.GATE:
        logit, ds = gate_gradients(ds, gated, steep, scale, F)
    if F.CAP != 0 or F.WINDOW:
        ds = ds * bend
    if RULED:  # excluded pairs may not be finite
        logit = tl.where(live, logit, 0.0)
        own = tl.where(live, own, 0.0)
        ds = tl.where(live, ds, 0.0)
    return logit, own, ds


@jit_kernel
def centre_kernel(along, out, along_lse, centre, lines, F: tl.constexpr):
    """Write centre = Σ ∂L/∂out · out − ∂L/∂lse of each row."""
    line = tl.cast(tl.program_id(0), tl.int64) * F.ROWS + tl.arange(0, F.ROWS)
    column = tl.arange(0, F.BLOCK_D)[None, :]
    where = line[:, None] * F.D + column
    mask = (line < lines)[:, None] & (column < F.D)
    x = tl.load(along + where, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(out + where, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(x * y, 1)
    if along_lse is not None:
        total -= tl.load(along_lse + line, mask=line < lines, other=0.0)
    tl.store(centre + line, total, mask=line < lines)
