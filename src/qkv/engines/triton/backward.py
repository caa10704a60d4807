"""What both halves of the way back share: `inner`, which each row needs first, what the way there
kept of rows, and how a gate pulls. `to_keys` and `to_queries` are the halves.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from qkv.engines.triton.score import pull_gate
from qkv.engines.triton.tiles import INFINITY, LOG2E, NONE, finite, launched

Back = namedtuple("Back", "along centre kept lines")
"""What the way back knows of each row: ∂L/∂out, the centre, and the two lines of `kept`. If ALONG,
∂L/∂α itself, (n, m) of each head, and the log-sum-exp."""


@launched
def inner(along, out, along_lse, centre, lines, F: tl.constexpr):
    """centre = Σ ∂L/∂out · out − ∂L/∂lse, each row by itself."""
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


@triton.jit
def kept_of(back, line, F):
    """What the way there kept of rows: top, share, and the centre."""
    zero = line.to(tl.float32) * 0.0
    top = zero
    share = zero
    middle = zero
    if F.ALONG:
        top = tl.load(back.kept + line) * LOG2E
        top = tl.where(top == NONE, INFINITY, top)
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
def sound(x):
    """Whether all of a sum (rows, columns) is finite."""
    return tl.max(tl.max((finite(x) == 0).to(tl.int32), 1), 0) == 0


@triton.jit
def pulled(ds, live, gated, steep, scale, F, RULED: tl.constexpr):
    """From the scores' gradient that of the gate's logit, and of what is gated."""
    if RULED:
        ds = tl.where(live, ds, 0.0)
    logit = ds
    if F.GATE:
        logit, ds = pull_gate(ds, gated, steep, scale, F)
        if RULED:
            logit = tl.where(live, logit, 0.0)
            ds = tl.where(live, ds, 0.0)
    return logit, ds
