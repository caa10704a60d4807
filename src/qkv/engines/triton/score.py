"""s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)) of a tile, and its slopes.

Scores are in base 2 for softmax and top-k, where log₂e is in `scale` and in the bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.engines.triton.tiles import LN2, LOG2E


@triton.jit
def gate_half(x, FAST: tl.constexpr):
    """A gate's half of the logit as `gate` wants it, so that the pair costs one addition."""
    if FAST:
        return x * 0.5
    return x * -LOG2E


TANH_PAIR = tl.constexpr("""
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
def gate(a, b, size, FAST: tl.constexpr):
    """size · σ of the sum of two halves; FAST takes two at a time, right to 11 bits."""
    if FAST:
        t = tl.inline_asm_elementwise(
            TANH_PAIR, "=f,=f,f,f", [a + b], dtype=tl.float32, is_pure=True, pack=2
        )
        half = size * 0.5
        return t * half + half
    return size / (1.0 + tl.exp2(a + b))


@triton.jit
def score(x, scale, bias, a, b, F):
    """s and, if gated, its slope in φ·ψ; with a bias that without the scale."""
    if F.GATE and not F.BIAS:
        steep = gate(a, b, scale, F.FAST)
        s = x * steep
    else:
        s = x * scale
        steep = s
        if F.BIAS:
            s = s + bias
        if F.GATE:
            steep = gate(a, b, 1.0, F.FAST)
            s = s * steep
    return s, steep


@triton.jit
def pull_gate(ds, s, steep, scale, F):
    """From a score's gradient that of the gate's logit, s σ(−logit), and of what is gated."""
    if F.BIAS:
        shut = 1.0 - steep
    else:
        shut = 1.0 - steep * (1.0 / tl.where(scale == 0, 1.0, scale))
    return ds * s * shut, ds * steep


@triton.jit
def left_over(scale, F):
    """The factor still missing from a gradient of φ·ψ: the scale, without its log₂e."""
    factor = scale
    if F.GATE and not F.BIAS:
        factor = 1.0
    if F.WEIGHTING == "softmax":
        factor = factor * LN2
    return factor
