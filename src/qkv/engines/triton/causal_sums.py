"""Causal sums of dot products in O(n): outᵢ = Σ_{j ≤ i} (aᵢ·bⱼ) cⱼ, by chunks, in two passes.

The rows of a lane (one batch and head) are divided into segments. `segment_kernel` computes the sum
Σ b cᵀ of each segment. `sum_kernel` adds those of the segments before its own, and goes through its
chunks: within a chunk the scores are computed as they are. Each array is read once or twice. The
three gradients are sums of the same form, two of them over later rows.

- *Normalized*: outᵢ is divided by totalᵢ = Σ_{j ≤ i} aᵢ·bⱼ. In its gradients, a score of query i is
  (x·y − δᵢ) / totalᵢ, with δᵢ = ∂L/∂outᵢ · outᵢ.
- *Decay*: a score is multiplied by exp(−rate·|i − j|).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv.engines.causal_sums import chunk_size, sum_any_causally
from qkv.engines.triton.backward.backward import compute_centre
from qkv.engines.triton.launching import launch
from qkv.engines.triton.launching.tile_choice import Tile, next_power_of_2
from qkv.engines.triton.tile_functions.tiles import LOG2E, is_finite, jit_kernel
from qkv.weightings.normalized import divisor_or_infinity

CHUNK = 64
COLUMNS_PER_PROGRAM = 64
"""Columns of the output per program, so that its sums fit into registers."""
PROGRAMS_PER_PROCESSOR = 8
MIN_CHUNKS_PER_SEGMENT = 4
OWN, OTHER = tl.constexpr(1), tl.constexpr(2)
"""Whether the queries, whose totals divide the scores, are a sum's own rows or the others."""


@triton.jit
def _load_chunk(base, step, row, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < n)[:, None] & (column < WIDTH)
    return tl.load(base + row[:, None] * tl.cast(step, tl.int64) + column, mask=inside, other=0.0)


@triton.jit
def _load_line(base, line, row, n):
    return tl.load(base + line * n + row, mask=row < n, other=0.0)


@triton.jit
def _lead(x, lane, heads, step_b, step_h, first):
    """Return the pointer to column `first` of a lane's rows."""
    at = tl.cast(lane // heads, tl.int64) * step_b + tl.cast(lane % heads, tl.int64) * step_h
    return x + at + first


@triton.jit
def _add_chunk(state, y, c, inverse, delta, rate, after, F):
    """Return the sums with those of one chunk, whose rows are `after` rows before its end.

    Sums: Σ y cᵀ (W, D), the sums of c (D,) and of y (W,). They decay by the rows of the chunk.
    """
    total, ends, starts = state
    wide = c.to(tl.float32)
    if F.QUERIES == OTHER:
        wide = wide * inverse[:, None]
    if F.DECAYS:
        wide = wide * tl.exp2(-rate * after)[:, None]
        whole = tl.exp2(-rate * F.CHUNK)
        total = total * whole
        ends = ends * whole
        starts = starts * whole
    total = tl.dot(tl.trans(y), wide.to(y.dtype), total, input_precision=F.PRECISION)
    if F.TERM:
        if F.QUERIES == OTHER:
            wide = wide * -delta[:, None]
        ends += tl.sum(wide, 0)
    if F.TOTALS:
        far = y.to(tl.float32)
        if F.DECAYS:
            far = far * tl.exp2(-rate * after)[:, None]
        starts += tl.sum(far, 0)
    return total, ends, starts


@triton.jit
def _no_sums(F):
    return (
        tl.zeros((F.BLOCK_W, F.BLOCK_D), tl.float32),
        tl.zeros((F.BLOCK_D,), tl.float32),
        tl.zeros((F.BLOCK_W,), tl.float32),
    )


@triton.jit
def _locate(z_parts, F):
    """Return the lane, the segment, and the part of the columns of this program."""
    pid = tl.program_id(0)
    part = pid % F.PARTS
    segment = pid // F.PARTS % z_parts
    return pid // F.PARTS // z_parts, segment, part


@triton.jit
def _chunk_rows(chunk, chunks, F):
    """Return the rows of a chunk in the order of the sum, and how many come after each."""
    near = tl.arange(0, F.CHUNK)
    if F.REVERSED:
        return (chunks - 1 - chunk) * F.CHUNK + near, near.to(tl.float32)
    return chunk * F.CHUNK + near, (F.CHUNK - 1 - near).to(tl.float32)


@jit_kernel
def segment_kernel(
    y, c, inverse, delta, rates, totals, ends, starts, heads, y_b, y_h, y_n, c_b, c_h, c_n, n,
    rows_tiles, keys_tiles, splits, F: tl.constexpr,
):  # fmt: skip
    """Write the sums of one segment of `keys_tiles` chunks, of `rows_tiles` chunks in all."""
    lane, segment, part = _locate(splits, F)
    first = part * F.BLOCK_D
    own_y = _lead(y, lane, heads, y_b, y_h, 0)
    own_c = _lead(c, lane, heads, c_b, c_h, first)
    line = tl.cast(lane, tl.int64)
    rate = 0.0
    if F.DECAYS:
        rate = tl.load(rates + lane % heads) * LOG2E
    state = _no_sums(F)
    end = tl.minimum((segment + 1) * keys_tiles, rows_tiles)
    for chunk in tl.range(segment * keys_tiles, end):
        row, after = _chunk_rows(chunk, rows_tiles, F)
        rows_y = _load_chunk(own_y, y_n, row, n, F.W, F.BLOCK_W)
        rows_c = _load_chunk(own_c, c_n, row, n, F.D - first, F.BLOCK_D)
        one, two = after, after
        if F.QUERIES == OTHER:
            one = _load_line(inverse, line, row, n)
            if F.TERM:
                two = _load_line(delta, line, row, n)
        state = _add_chunk(state, rows_y, rows_c, one, two, rate, after, F)
    total, of_c, of_y = state
    at = (line * splits + segment) * F.PARTS + part
    i = tl.arange(0, F.BLOCK_W)
    j = tl.arange(0, F.BLOCK_D)
    tl.store(totals + at * (F.BLOCK_W * F.BLOCK_D) + i[:, None] * F.BLOCK_D + j[None, :], total)
    if F.TERM:
        tl.store(ends + at * F.BLOCK_D + j, of_c)
    if F.TOTALS:
        tl.store(starts + at * F.BLOCK_W + i, of_y)


@jit_kernel
def sum_kernel(
    x, y, c, inverse, delta, rates, totals, ends, starts, out, rest, sums, heads, x_b, x_h, x_n,
    y_b, y_h, y_n, c_b, c_h, c_n, n, rows_tiles, keys_tiles, splits, F: tl.constexpr,
):  # fmt: skip
    """Write the output rows of one segment. The arguments are those of `segment_kernel`."""
    lane, segment, part = _locate(splits, F)
    first = part * F.BLOCK_D
    own_x = _lead(x, lane, heads, x_b, x_h, 0)
    own_y = _lead(y, lane, heads, y_b, y_h, 0)
    own_c = _lead(c, lane, heads, c_b, c_h, first)
    line = tl.cast(lane, tl.int64)
    rate = 0.0
    if F.DECAYS:
        rate = tl.load(rates + lane % heads) * LOG2E
    i = tl.arange(0, F.BLOCK_W)
    j = tl.arange(0, F.BLOCK_D)
    total, of_c, of_y = _no_sums(F)
    for before in tl.range(0, segment):
        at = (line * splits + before) * F.PARTS + part
        fade = 1.0
        if F.DECAYS:
            fade = tl.exp2(-rate * ((segment - 1 - before) * keys_tiles * F.CHUNK).to(tl.float32))
        some = totals + at * (F.BLOCK_W * F.BLOCK_D) + i[:, None] * F.BLOCK_D + j[None, :]
        total += tl.load(some) * fade
        if F.TERM:
            of_c += tl.load(ends + at * F.BLOCK_D + j) * fade
        if F.TOTALS:
            of_y += tl.load(starts + at * F.BLOCK_W + i) * fade
    state = (total, of_c, of_y)
    near = tl.arange(0, F.CHUNK)
    far = (near[:, None] - near[None, :]).to(tl.float32)
    if F.REVERSED:
        far = -far
    end = tl.minimum((segment + 1) * keys_tiles, rows_tiles)
    for chunk in tl.range(segment * keys_tiles, end):
        row, after = _chunk_rows(chunk, rows_tiles, F)
        rows_x = _load_chunk(own_x, x_n, row, n, F.W, F.BLOCK_W)
        rows_y = _load_chunk(own_y, y_n, row, n, F.W, F.BLOCK_W)
        rows_c = _load_chunk(own_c, c_n, row, n, F.D - first, F.BLOCK_D)
        one, two = after, after
        if F.QUERIES > 0:
            one = _load_line(inverse, line, row, n)
            if F.TERM:
                two = _load_line(delta, line, row, n)
        total, of_c, of_y = state
        s = tl.dot(rows_x, tl.trans(rows_y), input_precision=F.PRECISION)
        if F.TERM:
            if F.QUERIES == OWN:
                s = s - two[:, None]
            else:
                s = s - two[None, :]
        if F.QUERIES == OTHER:
            s = s * one[None, :]
        fade = tl.full((F.CHUNK,), 1.0, tl.float32)
        if F.DECAYS:
            s = s * tl.exp2(-rate * far)
            fade = tl.exp2(-rate * (F.CHUNK - after))
        s = tl.where(far >= 0, s, 0.0)
        acc = tl.dot(rows_x, total.to(rows_x.dtype), input_precision=F.PRECISION)
        if F.TERM:
            if F.QUERIES == OWN:
                acc = acc - two[:, None] * of_c[None, :]
            else:
                acc = acc + of_c[None, :]
        acc = acc * fade[:, None]
        odd = tl.where(is_finite(rows_c), 0.0, 1.0)
        if tl.max(tl.max(odd, 1), 0) > 0:  # 0 · NaN of a row that does not count is NaN
            seen = tl.where(far >= 0, 1.0, 0.0).to(rows_c.dtype)
            spoiled = tl.dot(seen, odd.to(rows_c.dtype), input_precision=F.PRECISION)
            acc = tl.where(spoiled > 0, float("nan"), acc)
        finite = tl.where(odd > 0, 0.0, rows_c)
        acc = tl.dot(s.to(rows_c.dtype), finite.to(rows_c.dtype), acc, input_precision=F.PRECISION)
        if F.TOTALS:
            whole = tl.sum(rows_x.to(tl.float32) * of_y[None, :], 1) * fade + tl.sum(s, 1)
            acc = acc * tl.where(whole == 0, 0.0, 1.0 / tl.where(whole == 0, 1.0, whole))[:, None]
            if part == 0:
                tl.store(sums + line * n + row, whole, mask=row < n)
        if F.QUERIES == OWN:
            acc = acc * one[:, None]
        where = (line * n + row)[:, None] * F.D + (first + j)[None, :]
        inside = (row < n)[:, None] & (first + j < F.D)[None, :]
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + where, rounded, mask=inside)
        if rest is not None:
            acc = acc - rounded.to(tl.float32)
            tl.store(rest + where, acc.to(out.dtype.element_ty), mask=inside)
        state = _add_chunk(state, rows_y, rows_c, one, two, rate, after, F)


def compute_sums(
    x: Tensor, y: Tensor, c: Tensor, rates: Tensor | None = None, *, is_reversed: bool = False,
    totals: bool = False, inverse: Tensor | None = None, delta: Tensor | None = None,
    queries: int = 0, keeps_rest: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the sums (B, H, n, d) of rows (B, H, n, w), (B, H, n, w) and (B, H, n, d).

    `totals` divides them by the sums of the scores, which are the second result. `keeps_rest` adds
    what rounding took from the output. `inverse` and
    `delta` (B, H, n) are 1 / total and δ of each query, and `queries` says which rows these are:
    OWN or OTHER. rates (H,) are float32.
    """
    (b, h, n, w), d = x.shape, c.shape[-1]
    x, y, c = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y, c))
    out = c.new_empty((b, h, n, d))
    sums = x.new_empty((b, h, n), dtype=torch.float32) if totals else None
    rest = torch.empty_like(out) if keeps_rest else None
    if not out.numel():
        return out, sums, rest
    block_w, block_d = (
        max(next_power_of_2(w), 16),
        min(max(next_power_of_2(d), 16), COLUMNS_PER_PROGRAM),
    )
    parts, chunks, lanes = -(-d // block_d), -(-n // CHUNK), b * h
    wanted = -(-launch.count_processors(x.device) * PROGRAMS_PER_PROCESSOR // (lanes * parts))
    span = -(-chunks // max(min(wanted, chunks // MIN_CHUNKS_PER_SEGMENT), 1))
    splits = -(-chunks // span)
    facts: dict[str, Any] = {
        "W": w, "D": d, "BLOCK_W": block_w, "BLOCK_D": block_d, "CHUNK": CHUNK, "PARTS": parts,
        "REVERSED": is_reversed, "TOTALS": totals, "QUERIES": queries, "TERM": delta is not None,
        "DECAYS": rates is not None, "PRECISION": "ieee",
    }  # fmt: skip
    shape = lanes, splits, parts
    states = (
        x.new_empty((*shape, block_w, block_d), dtype=torch.float32),
        x.new_empty((*shape, block_d), dtype=torch.float32),
        x.new_empty((*shape, block_w), dtype=torch.float32),
    )
    steps, sizes = (*y.stride()[:3], *c.stride()[:3]), (n, chunks, span, splits)
    more, tile = (inverse, delta, rates, *states), Tile(CHUNK, CHUNK, CHUNK, 4, 2)
    with launch.use_device(x.device):
        if splits > 1:
            launch.launch_kernel(
                segment_kernel, lanes * splits * parts, (y, c, *more), (), (h, *steps, *sizes),
                facts, tile,
            )  # fmt: skip
        launch.launch_kernel(
            sum_kernel, lanes * splits * parts, (x, y, c, *more, out, rest, sums), (),
            (h, *x.stride()[:3], *steps, *sizes), facts, tile,
        )  # fmt: skip
    return out, sums, rest


class CausalSums(torch.autograd.Function):
    """`compute_sums` with its gradients; `reference` computes them differentiably."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rates: Tensor | None,
        normalized: bool, reference: Any,
    ) -> Tensor:  # fmt: skip
        keeps_rest = normalized and any(ctx.needs_input_grad[:2])
        out, sums, rest = compute_sums(
            query, key, value, rates, totals=normalized, keeps_rest=keeps_rest
        )
        ctx.save_for_backward(query, key, value, rates, out if normalized else None, rest, sums)
        ctx.reference = reference
        return out

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> Any:
        query, key, value, rates, out, rest, sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative
            again = ctx.reference(query, key, value)
            found = torch.autograd.grad(again, (query, key, value), along, create_graph=True)
            return (*found, None, None, None)
        along = along.contiguous()
        own: dict[str, Any] = {}
        other: dict[str, Any] = {}
        term: dict[str, Any] = {}
        if sums is not None:
            inverse = torch.where(sums == 0, 0.0, 1 / sums)
            own, other = ({"inverse": inverse, "queries": x.value} for x in (OWN, OTHER))
        needs = ctx.needs_input_grad
        if rest is not None:  # the gradients are differences, which the rounded output spoils
            delta = compute_centre(along, None, out) + compute_centre(along, None, rest)
            term = {"delta": delta}
        dquery = dkey = dvalue = None
        if needs[0]:
            dquery = compute_sums(along, value, key, rates, **own, **term)[0]
        if needs[1]:
            dkey = compute_sums(value, along, query, rates, is_reversed=True, **other, **term)[0]
        if needs[2]:
            dvalue = compute_sums(key, query, along, rates, is_reversed=True, **other)[0]
        return dquery, dkey, dvalue, None, None, None


def sum_rows(
    query: Tensor, key: Tensor, value: Tensor, lead: tuple[int, ...], rates: Any, normalized: bool
) -> Tensor:
    """Return the causal sums (*lead, n, d) of rows whose leading axes broadcast to `lead`.

    `rates` is None, a number, or (h, 1, 1).
    """
    n = query.shape[-2]
    axes = (1, 1, *lead)[-max(len(lead), 2) :]
    rows = []
    for x in (query, key, value):
        x = x[..., :n, :]
        if x.shape[-2] < n:
            x = torch.nn.functional.pad(x, (0, 0, 0, n - x.shape[-2]))
        rows.append(x.expand(*axes, *x.shape[-2:]).reshape(-1, *axes[-1:], *x.shape[-2:]))
    each: Tensor | None = None
    if rates is not None:
        flat = torch.as_tensor(rates, dtype=torch.float32, device=query.device).reshape(-1)
        each = flat.detach().expand(axes[-1]).contiguous()

    def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _sum_differentiably(query, key, value, each, normalized)

    out: Tensor = CausalSums.apply(*rows, each, normalized, reference)
    return out.reshape(*lead, n, out.shape[-1])


def _sum_differentiably(
    query: Tensor, key: Tensor, value: Tensor, rates: Tensor | None, normalized: bool
) -> Tensor:
    """Return the sums by PyTorch's operations, which have all derivatives."""
    wide = [x.float() for x in (query, key, value)]
    if normalized:
        wide[2] = torch.cat([wide[2], torch.ones_like(wide[2][..., :1])], -1)
    size = chunk_size(wide[0].shape[-1], wide[2].shape[-1])
    rate = None if rates is None else rates[:, None, None]
    out: Any = sum_any_causally(wide[0], wide[1], wide[2], size, rate)
    if normalized:
        out = out[..., :-1] / divisor_or_infinity(out[..., -1:])
    summed: Tensor = out.to(value.dtype)
    return summed
