"""softmax(scale · q·kᵀ + bias) v on Hopper, in Gluon, for 16-bit rows without a mask.

The kernel replaces `forward.pool_kernel` for such calls.

In Triton's loop the matrix units are idle while exponentials are computed. Here, as in
FlashAttention-3, one warp copies tiles into a ring buffer. Two groups of four warps have half of
the rows each. They start q·kᵀ of a tile and p·v of the previous one before the exponentials.
"""

# Triton has no `enumerate`.
# ruff: noqa: SIM113

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qkv.engines.triton.launching import launch, tile_choice
from qkv.engines.triton.launching.precompile import CompileNotifier
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions.tiles import (
    INFINITY,
    LN2,
    LOG2E,
    NEG_INFINITY,
    UNSPECIALIZED_NAMES,
)

# Triton 3.7 renamed these functions.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

TILES = {128: Tile(64, 128, 128, 4, 3, uses_descriptors=True, registers=168)}
"""Tiles by width, for widths at which this kernel is faster: rows of a group, keys of a stage,
stages. A thread of a group uses 240 registers, one of the copying warp 24."""


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers that complete after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def copy_tile(source, at, target, full, free, phase):
    """Copy a tile of `source` into `target` once that is free."""
    mbarrier.wait(free, phase)
    fence_async_shared()  # after threads have read the previous bias
    mbarrier.expect(full, source.block_type.nbytes)
    async_load(source, at, full, target)


@gluon.jit
def produce_tiles(tiles, bars, sources, heads, group, rows, jobs, count, F: gl.constexpr):
    """Copy the inputs of both groups: each job's queries, then its tiles, the last first."""
    q, k, v, added = tiles
    q_full, q_free, k_full, k_free, v_full = bars
    query, key, value, bias = sources
    step = 0
    turn = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        b = job // rows // heads
        h = job // rows % heads
        for team in gl.static_range(2):
            at = (b, h, (job % rows * 2 + team) * F.ROWS, 0)
            copy_tile(
                query, at, q.index(team), q_full.index(team), q_free.index(team), turn & 1 ^ 1
            )
        for i in range(count):
            row = (b, h // group, (count - 1 - i) * F.COLS)
            stage = step % F.STAGES
            free = step // F.STAGES & 1 ^ 1
            copy_tile(bias, row, added.index(stage), k_full.index(stage), k_free.index(stage), free)
            at = (b, h // group, row[2], 0)
            copy_tile(key, at, k.index(stage), k_full.index(stage), k_free.index(stage), free)
            if step + 2 >= F.STAGES:  # values are free two steps after their keys
                seen = step + 2 - F.STAGES
                mbarrier.wait(k_free.index(seen % F.STAGES), seen // F.STAGES & 1)
            mbarrier.expect(v_full.index(stage), value.block_type.nbytes)
            async_load(value, at, v_full.index(stage), v.index(stage))
            step += 1
        turn += 1


@gluon.jit
def online_softmax(s, bias, top, total, scale):
    """Return 2^(s − top) of a tile, the factor for earlier sums, the new top and the total."""
    x = s * scale + bias[None, :]
    new = gl.maximum(top, gl.max(x, 1))
    base = gl.where(new == NEG_INFINITY, 0.0, new) * LOG2E
    p = gl.exp2(x * LOG2E - base[:, None])
    fade = gl.exp2(top * LOG2E - base)
    return p, fade, new, total * fade + gl.sum(p, 1)


@gluon.jit
def as_left_operand(p, dtype: gl.constexpr):
    """Return the weights as a left operand, without moving them between registers."""
    side: gl.constexpr = gl.DotOperandLayout(0, p.type.layout, 2)
    return gl.convert_layout(p.to(dtype), side, assert_trivial=True)


@gluon.jit
def stage_tile(x, stage, F: gl.constexpr):
    return x.index(stage).reshape([F.COLS, F.D])


@gluon.jit
def consume_tiles(
    tiles, bars, out, lse, kept, scale, heads, rows, jobs, count, n, m, team, F: gl.constexpr
):  # fmt: skip
    """Compute the outputs of this warp group's query rows, for each job of the program."""
    q, k, v, added = tiles
    q_full, q_free, k_full, k_free, v_full = bars
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.COLS, 16])
    deep: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F.D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, wide)
    by_key: gl.constexpr = gl.SliceLayout(0, wide)
    nothing = gl.zeros([F.ROWS, F.COLS], gl.float32, wide)
    own = q.index(team)
    queries = own.reshape([F.ROWS, F.D])
    step = 0
    turn = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        acc = gl.zeros([F.ROWS, F.D], gl.float32, deep)
        top = gl.full([F.ROWS], NEG_INFINITY, gl.float32, by_row)
        total = gl.zeros([F.ROWS], gl.float32, by_row)
        stage = step % F.STAGES
        mbarrier.wait(q_full.index(team), turn & 1)
        mbarrier.wait(k_full.index(stage), step // F.STAGES & 1)
        keys = stage_tile(k, stage, F).permute((1, 0))
        s = warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        bias = added.index(stage).reshape([F.COLS]).load(by_key)
        live = (count - 1) * F.COLS + gl.arange(0, F.COLS, by_key) < m
        mbarrier.arrive(k_free.index(stage))
        p, fade, top, total = online_softmax(
            s, gl.where(live, bias, NEG_INFINITY), top, total, scale
        )
        weights = as_left_operand(p, q.dtype)
        last = step + count - 1
        following = step + 1
        ready = k_full.index(following % F.STAGES)
        mbarrier.wait(ready, following // F.STAGES & 1, pred=step < last)
        while step < last:
            before = step % F.STAGES
            phase = step // F.STAGES & 1
            step += 1
            stage = step % F.STAGES
            keys = stage_tile(k, stage, F).permute((1, 0))
            s = warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase)
            acc = warpgroup_mma(weights, stage_tile(v, before, F), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            bias = added.index(stage).reshape([F.COLS]).load(by_key)
            mbarrier.arrive(k_free.index(stage))
            p, fade, top, total = online_softmax(s, bias, top, total, scale)
            # Wait here: without this branch ptxas waits for acc before the exponentials.
            following = step + 1
            ready = k_full.index(following % F.STAGES)
            mbarrier.wait(ready, following // F.STAGES & 1, pred=step < last)
            acc, p = warpgroup_mma_wait(0, [acc, p])
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, deep))[:, None]
            weights = as_left_operand(p, q.dtype)
        stage = step % F.STAGES
        mbarrier.wait(v_full.index(stage), step // F.STAGES & 1)
        acc = warpgroup_mma(weights, stage_tile(v, stage, F), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        some = total != 0
        share = gl.where(some, 1.0 / gl.where(some, total, 1.0), 0.0)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, deep))[:, None]
        queries.store(acc.to(q.dtype))
        fence_async_shared()
        first = (job % rows * 2 + team) * F.ROWS
        lane = job // rows
        async_store(out, [lane // heads, lane % heads, first, 0], own)
        i = first + gl.arange(0, F.ROWS, by_row)
        line = lane.to(gl.int64) * n + i
        lines = (jobs // rows).to(gl.int64) * n
        height = gl.where(some, top * LOG2E + gl.log2(gl.where(some, total, 1.0)), NEG_INFINITY)
        gl.store(lse + line, height * LN2, mask=i < n)
        gl.store(kept + line, gl.where(some, height, INFINITY), mask=i < n)
        gl.store(kept + lines + line, share, mask=i < n)
        tma.store_wait(0)
        mbarrier.arrive(q_free.index(team))
        step += 1
        turn += 1


@gluon.jit
def make_descriptor(base, b, h, rows, at_b, at_h, at_row, ROWS: gl.constexpr, F: gl.constexpr):
    """Return a TMA descriptor of an array (B, H, rows, D), in tiles of ROWS."""
    size: gl.constexpr = [1, 1, ROWS, F.D]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(size, base.dtype.element_ty)
    return tma.make_tensor_descriptor(
        base, [b, h, rows, F.D], [at_b, at_h, at_row, 1], size, layout
    )


class NotifyingGluonKernel(CompileNotifier, GluonJITFunction):
    """The kernel class of `gluon.jit`, with `CompileNotifier`."""


@partial(NotifyingGluonKernel, do_not_specialize=UNSPECIALIZED_NAMES)
def pool_hopper(
    given, at, counts, out, lse, kept, scales, steps, z, lanes, rows, count, F: gl.constexpr
):  # fmt: skip
    """Compute jobs of 2 · ROWS queries each; a processor runs its jobs one after another.

    The arrays are those of `forward.pool_kernel`, so both launches are replayed alike.
    """
    n, m, heads, group = z.n, z.m, z.heads, z.group
    few = heads // group
    b = lanes // heads
    query = make_descriptor(given.query, b, heads, n, steps.q_b, steps.q_h, steps.q_n, F.ROWS, F)
    key = make_descriptor(given.key, b, few, m, steps.k_b, steps.k_h, steps.k_m, F.COLS, F)
    value = make_descriptor(given.value, b, few, m, steps.v_b, steps.v_h, steps.v_m, F.COLS, F)
    target = make_descriptor(out, b, heads, n, steps.o_b, steps.o_h, steps.o_n, F.ROWS, F)
    size: gl.constexpr = [1, 1, F.COLS]
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for(size, gl.float32)
    bias = tma.make_tensor_descriptor(
        given.key_bias, [b, few, m], [steps.bias_b, steps.bias_h, 1], size, flat
    )
    S: gl.constexpr = F.STAGES
    tiles = (
        gl.allocate_shared_memory(query.dtype, [2, 1, 1, F.ROWS, F.D], query.layout),
        gl.allocate_shared_memory(key.dtype, [S, 1, 1, F.COLS, F.D], key.layout),
        gl.allocate_shared_memory(key.dtype, [S, 1, 1, F.COLS, F.D], value.layout),
        gl.allocate_shared_memory(gl.float32, [S, 1, 1, F.COLS], flat),
    )
    bars = (
        make_barriers(2, 1),
        make_barriers(2, 1),
        make_barriers(S, 2),
        make_barriers(S, 2),
        make_barriers(S, 1),
    )
    sources = (query, key, value, bias)
    jobs = lanes * rows
    scale = scales.scale * LN2  # the bias is in base e
    gl.warp_specialize(
        [
            (
                consume_tiles,
                (tiles, bars, target, lse, kept, scale, heads, rows, jobs, count, n, m, 0, F),
            ),
            (
                consume_tiles,
                (tiles, bars, target, lse, kept, scale, heads, rows, jobs, count, n, m, 1, F),
            ),
            (produce_tiles, (tiles, bars, sources, heads, group, rows, jobs, count, F)),
        ],
        [4, 1],
        [240, 24],
    )


def is_supported(call: Any) -> bool:
    """Return whether the kernel supports the call, and the call fills the device."""
    if call.weighting != "softmax" or call.is_masked or call.key_bias is None:
        return False
    if call.gate_key is not None or call.seed is not None or call.query.element_size() != 2:
        return False
    if call.w != call.d or call.d not in TILES:
        return False
    if call.n * call.group <= tile_choice.MAX_PACKED_ROWS:
        return False  # a tile here holds the rows of one head, and most of it would be empty
    rows, cols, *_ = TILES[call.d]
    jobs = call.b * call.h * -(-call.n // (2 * rows))
    full = jobs >= launch.count_processors(call.query.device) and call.m >= cols
    even = call.can_use_descriptors and 0 not in call.strides[:11]
    *_, at_b, at_h = call.strides[:11]
    return full and even and (at_b | at_h) % 4 == 0 and call.key_bias.data_ptr() % 16 == 0


def launch_pool(call: Any, out: Tensor, lse: Tensor, kept: Tensor) -> None:
    """Fill out, lse and kept, as `forward.pool_kernel` does."""
    tile = TILES[call.d]
    lanes, rows = call.b * call.h, -(-call.n // (2 * tile.rows))
    facts = {"D": call.d, "ROWS": tile.rows, "COLS": tile.cols, "STAGES": tile.stages}
    arrays = (call.inputs, None, None, out, lse, kept)
    count = -(-call.m // tile.cols)
    whole = (call.build_strides(out), call.build_sizes(), lanes, rows, count)
    with launch.use_device(out.device):
        programs = min(lanes * rows, launch.count_processors(out.device))
        launch.launch_kernel(pool_hopper, programs, arrays, call.scales, whole, facts, tile)
