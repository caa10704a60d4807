"""out = Σⱼ α(s)ᵢⱼ vⱼ  with  s = (scale · φ(q)·ψ(k) + bias(k)) · σ(a(q) + b(k)), as torch operators.

This file knows arrays; `kernels.py` knows pointers. `attend` is the door. Behind it stand the
operators `qkv::attend` and `qkv::attend_backward`, which torch.compile, export and fake tensors
see as one node each, and a table of tile shapes. `heal` repairs what another kernel got wrong.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qkv.engines.triton import kernels
from qkv.errors import ArgumentError, DtypeError, EngineError, ShapeError, unknown

WEIGHTINGS = ("softmax", "average", "normalized", "raw", "sigmoid", "entmax", "topk")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_VALUE = 512
LOG2E = 1.4426950408889634
NARROWEST = 64
HELD = 256
"""The widest φ that a forward tile holds whole; a wider one is read in chunks."""
HELD_BACK = 128
"""The same on the way back, where the tile holds the gradients as well."""
FEW = 64
"""Rows of queries, with those of the other heads that share the keys, that are stacked."""
SCRATCH = 64 * 2**20
"""Bytes of score gradients held at once where φ is too wide to be summed on chip."""
LEAST = 512
"""Rows of a part, where a loop is split: fewer are not worth a second kernel to join them."""


class Tile(NamedTuple):
    """Queries × keys of a tile, columns of φ at a time, warps, stages, programs per processor.

    `described` has its rows copied by descriptors, on devices that can.
    """

    rows: int
    cols: int
    chunk: int
    warps: int
    stages: int
    waves: int = 4
    described: bool = False


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    gate_query: Tensor | None = None,
    gate_key: Tensor | None = None,
    weighting: str = "softmax",
    alpha: float = 0.0,
    row_a: Tensor | None = None,
    row_b: Tensor | None = None,
    lower: int | None = None,
    upper: int | None = None,
    lengths: Tensor | None = None,
    layout: Tensor | None = None,
    layout_size: int = 0,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Σⱼ α(s)ᵢⱼ vⱼ and the log-sum-exp of each row of s.

    query (B, H, n, w), key (B, Hₖ, m, w), value (B, Hₖ, m, d) → (B, H, n, d), (B, H, n). Query
    head h looks at key head h // (H // Hₖ). key_bias (B, Hₖ, m), gate_query (B, H, n) and
    gate_key (B, Hₖ, m) are float32 and may be expanded.

    The pair i, j counts if lower ≤ j − i ≤ upper, j < lengths[batch], and
    layout[i // layout_size, j // layout_size]; None sets no bound.

    `entmax` takes its threshold t from row_a (B, H, n), as in α = max(0, (alpha − 1)s − t)^e with
    e = 1/(alpha − 1). `topk` takes the smallest chosen score from row_a and its position from
    row_b (int32): ties count up to there. Neither gets a gradient: it is in that of the scores.

    A row with nothing to look at gives 0, its log-sum-exp −∞, and gradients 0. The second result
    is the total of the scores for `normalized`, the count for `average`, and else 0; gradients
    flow through it for `softmax` and `topk` alone.
    """
    if torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(low) for x in (query, key, value))
    _check(query, key, value, weighting, alpha)
    _check_rows(query, key, key_bias, gate_query, gate_key, weighting, row_a, row_b)
    if layout is not None:
        if layout_size < 1:
            raise ArgumentError(f"layout_size must be at least 1, not {layout_size}")
        need = tuple(-(-x.shape[2] // layout_size) for x in (query, key))
        if tuple(layout.shape) != need:
            raise ShapeError(f"layout must be {need} blocks of {layout_size}, not {layout.shape}")
    if lengths is not None and tuple(lengths.shape) != (query.shape[0],):
        raise ShapeError(f"lengths must be ({query.shape[0]},), not {tuple(lengths.shape)}")
    out, lse, _ = _attend(
        query, key, value, key_bias, gate_query, gate_key, row_a, row_b, lengths, layout,
        scale, weighting, alpha, lower, upper, layout_size, tf32,
    )  # fmt: skip
    return out, lse


def _check(query: Tensor, key: Tensor, value: Tensor, weighting: str, alpha: float) -> None:
    if weighting not in WEIGHTINGS:
        raise unknown("weighting", weighting, WEIGHTINGS)
    if weighting == "entmax" and not 1 < alpha <= 2:
        raise ArgumentError(f"alpha must lie above 1 and up to 2, not {alpha}")
    dtype = query.dtype
    if dtype not in DTYPES or key.dtype != dtype or value.dtype != dtype:
        raise DtypeError(
            f"query is {dtype}, key is {key.dtype}, value is {value.dtype}: all three must be one "
            "of bfloat16, float16, float32"
        )
    shapes = query.shape, key.shape, value.shape
    if not len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 4:
        told = ", ".join(str(tuple(x)) for x in shapes)
        raise ShapeError(f"query, key and value must be (batch, heads, rows, width), not {told}")
    (b, h, _, w), (bk, hk, m, wk), (bv, hv, mv, d) = shapes
    if not (b == bk == bv and hk == hv and m == mv and w == wk and hk and h % hk == 0):
        told = " and ".join(str(tuple(x)) for x in shapes)
        raise ShapeError(f"query, key and value do not go together: {told}")
    if d > WIDEST_VALUE:
        raise EngineError(f"values are {d} wide, and a tile holds {WIDEST_VALUE}")


def _check_rows(
    query: Tensor,
    key: Tensor,
    key_bias: Tensor | None,
    gate_query: Tensor | None,
    gate_key: Tensor | None,
    weighting: str,
    row_a: Tensor | None,
    row_b: Tensor | None,
) -> None:
    given = (
        ("key_bias", key_bias, key),
        ("gate_query", gate_query, query),
        ("gate_key", gate_key, key),
        ("row_a", row_a, query),
        ("row_b", row_b, query),
    )
    for name, x, like in given:
        if x is None:
            continue
        if x.shape != like.shape[:3]:
            raise ShapeError(f"{name} must be {tuple(like.shape[:3])}, not {tuple(x.shape)}")
        kind = torch.int32 if name == "row_b" else torch.float32
        if x.dtype != kind:
            raise DtypeError(f"{name} must be {kind}, not {x.dtype}")
    if (gate_query is None) != (gate_key is None):
        raise ArgumentError("a gate has two halves: give gate_query and gate_key, or neither")
    if weighting in ("entmax", "topk") and row_a is None:
        raise ArgumentError(f"weighting {weighting!r} needs row_a")
    if weighting == "topk" and row_b is None:
        raise ArgumentError(f"weighting {weighting!r} needs row_b")


# Tiles


OVERRIDE: dict[str, Tile] = {}
"""Tiles by hand, of "pool", "split", "to_keys", "to_queries", "mend", for tuning and tests."""

_SMALLER: dict[tuple[Any, ...], Tile] = {}


@cache
def tile_of(name: str, w: int, d: int, size: int, rows: int, plain: bool, banded: bool) -> Tile:
    """The tile of a pass, for φ and values this wide, of this many bytes a number.

    The fastest of those tried on an H200, by the widths tried: 64, 128, and 768 for what is read
    in chunks. `plain` has neither bias nor gate.
    """
    wide = max(w, d)
    if name == "mend":
        # Small: most of its programs only look, and a large one takes longer to start.
        if wide * size > 256:
            return Tile(16, 16, 32, 4, 1)
        return Tile(64 if size == 2 else 32, 32, 32, 4, 1)
    if name == "split":
        block = max(16, _power_of_2(min(rows, FEW)))
        if w > HELD or size == 4:
            return Tile(block, 64, 32, 4, 2)
        if wide > 128:
            return Tile(block, 32, 64, 4, 3)
        return Tile(16, 256, 64, 8, 2, 1, True) if block == 16 else Tile(block, 64, 64, 4, 3)
    if size == 4:
        if name == "pool":
            return Tile(64, 64 if wide <= 128 else 32, 32, 4, 2)
        return Tile(64, 32, 32, 4, 2) if wide <= 64 or w > HELD_BACK else Tile(32, 32, 32, 4, 1)
    if name == "pool":
        if w > HELD:
            return Tile(128, 256 if d <= 64 else 128, 64, 8, 3, 1, described=d <= 128)
        if d > 256:
            return Tile(64, 32, 64, 8, 2)
        if wide > 128:
            return Tile(128, 64, 64, 8, 2)
        return Tile(64, 64, 64, 4, 3, described=plain) if wide > 64 else Tile(128, 64, 64, 4, 3)
    if w > HELD_BACK or d > HELD_BACK:
        return Tile(64, 64, 64, 8, 2) if d > 128 else Tile(128, 64, 64, 4, 3)
    if name == "to_queries":
        return Tile(128, 64, 64, 8, 3) if wide > 64 else Tile(64, 64, 64, 4, 3)
    if wide > 64:
        if not plain:
            return Tile(32, 64, 64, 4, 4, described=True)
        tile = Tile(64, 128, 64, 8, 3) if banded else Tile(64, 64, 64, 4, 2)
        return tile._replace(described=True)
    return Tile(64, 64, 64, 4, 3) if banded else Tile(128, 64, 64, 4, 2, described=True)


def _shrunk(tile: Tile) -> Tile:
    """The next smaller tile, for a device whose fast memory is too small for this one."""
    if tile.stages > 2:
        return tile._replace(stages=tile.stages - 1)
    if tile.cols > 32 and tile.cols >= tile.rows:
        return tile._replace(cols=tile.cols // 2)
    if tile.rows > 32:
        return tile._replace(rows=tile.rows // 2, warps=4)
    if tile.stages > 1:
        return tile._replace(stages=1)
    raise EngineError("no tile fits this device's fast memory: name engine='streaming'")


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _copy_engine(device: torch.device) -> bool:
    """Whether the device copies tiles by descriptors (Hopper and later)."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device)[0] >= 9)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


@cache
def _interpreted() -> bool:
    return type(kernels.pool).__name__ == "InterpretedFunction"


def _power_of_2(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _block(width: int, dtype: torch.dtype) -> int:
    """The columns of a tile that holds rows this wide.

    One column of 16-bit values in a tile of 16 came out wrong on an H200 (Triton 3.6), in one of
    64 right.
    """
    return max(_power_of_2(width), 16 if dtype == torch.float32 else NARROWEST)


# One call


class _Call:
    """What the kernels of one call share: checked arrays, numbers, and compile-time facts."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None,
        gate_query: Tensor | None,
        gate_key: Tensor | None,
        row_a: Tensor | None,
        row_b: Tensor | None,
        lengths: Tensor | None,
        layout: Tensor | None,
        scale: float,
        weighting: str,
        alpha: float,
        lower: int | None,
        upper: int | None,
        layout_size: int,
        tf32: bool,
    ) -> None:
        self.query, self.key, self.value = _row_major(query), _row_major(key), _row_major(value)
        self.key_bias, self.gate_key = _contiguous_rows(key_bias), _contiguous_rows(gate_key)
        self.gate_query = None if gate_query is None else gate_query.contiguous()
        self.row_a = None if row_a is None else row_a.contiguous()
        self.row_b = None if row_b is None else row_b.contiguous()
        self.lengths = None if lengths is None else lengths.to(torch.int32).contiguous()
        self.layout = None if layout is None else (layout != 0).contiguous().view(torch.uint8)
        self.b, self.h, self.n, self.w = query.shape
        _, self.hk, self.m, self.d = value.shape
        self.group = self.h // self.hk
        reach = self.n + self.m
        self.lower = 0 if lower is None else max(min(lower, reach), -reach)
        self.upper = 0 if upper is None else max(min(upper, reach), -reach)
        self.weighting, self.alpha = weighting, alpha
        self.scale = scale * LOG2E if weighting == "softmax" else scale
        self.layout_size = layout_size
        self.layout_columns = 0 if layout is None else layout.shape[1]
        self.fold = weighting == "softmax" and key_bias is None and gate_key is None and scale > 0
        self.masked = not (lower is None and upper is None and lengths is None and layout is None)
        self.facts = _facts(
            self.w, self.d, query.dtype, weighting, alpha, lower is None, upper is None, tf32
        )
        self.inputs = (
            self.query, self.key, self.value, self.key_bias, self.gate_query, self.gate_key,
            self.row_a, self.row_b, self.lengths, self.layout,
        )  # fmt: skip
        self.strides = (
            *self.query.stride()[:3],
            *self.key.stride()[:3],
            *self.value.stride()[:3],
            *((0, 0) if self.key_bias is None else self.key_bias.stride()[:2]),
            *((0, 0) if self.gate_key is None else self.gate_key.stride()[:2]),
        )
        self.described = _copy_engine(query.device) and self._fits_descriptors()

    def _fits_descriptors(self) -> bool:
        """Whether every row begins at a multiple of 16 bytes, as the copy engine wants it."""
        unit = 16 // self.query.element_size()
        steps = self.d
        for step in self.strides[:9]:
            steps |= step
        at = self.query.data_ptr() | self.key.data_ptr() | self.value.data_ptr()
        return bool(steps % unit == 0 and at % 16 == 0)

    def cut(self, cols: int) -> bool:
        return self.lengths is not None or self.m % cols != 0

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.query.new_empty(shape, dtype=dtype)

    def tile(self, name: str, rows: int) -> Tile:
        size, plain = self.query.element_size(), self.key_bias is None and self.gate_key is None
        banded = self.facts["LOWER"] or self.facts["UPPER"]
        return OVERRIDE.get(name) or tile_of(name, self.w, self.d, size, rows, plain, banded)

    def block_w(self, tile: Tile, wide: bool) -> int:
        return tile.chunk if wide else _block(self.w, self.query.dtype)

    def lists(self, tile: Tile, by_key: bool = False) -> tuple[Tensor | None, Tensor | None, int]:
        """For each tile of queries (or keys), the tiles of the others: full, partial, empty."""
        if self.layout is None:
            return None, None, 0
        kinds = _kinds(self, tile)
        kinds = kinds.T if by_key else kinds
        at = torch.argsort(kinds, dim=1, descending=True, stable=True).to(torch.int32)
        counts = torch.stack([(kinds == 2).sum(1), (kinds == 1).sum(1)], 1).to(torch.int32)
        return at.contiguous(), counts.contiguous(), at.shape[1]


@cache
def _facts(
    w: int,
    d: int,
    dtype: torch.dtype,
    weighting: str,
    alpha: float,
    from_start: bool,
    to_end: bool,
    tf32: bool,
) -> dict[str, Any]:
    """What every kernel of a call is compiled for."""
    return {
        "W": w,
        "D": d,
        "BLOCK_D": _block(d, dtype),
        "WEIGHTING": weighting,
        "POWER": {2.0: 1, 1.5: 2}.get(alpha, 0) if weighting == "entmax" else 0,
        "LOWER": not from_start,
        "UPPER": not to_end,
        "APART": dtype == torch.float32,
        "FAST": dtype != torch.float32 and not _interpreted(),
        "PRECISION": "tf32" if tf32 and dtype == torch.float32 else "ieee",
    }


def _row_major(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _contiguous_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(2) == 1 else x.contiguous()


def _kinds(call: _Call, tile: Tile) -> Tensor:
    """(tiles of queries, tiles of keys): 2 where every pair counts, 1 where some do, 0 where none.

    A tile that ends beyond the arrays is at most partial, and so is one on the band's edge.
    """
    layout, size = call.layout, call.layout_size
    assert layout is not None
    sums = torch.nn.functional.pad(layout.to(torch.int32).cumsum(0).cumsum(1), (1, 0, 1, 0))
    edges = []
    for length, block in ((call.n, tile.rows), (call.m, tile.cols)):
        first = torch.arange(0, length, block, device=layout.device)
        last = torch.clamp(first + block, max=length) - 1
        edges.append((first, last, first // size, last // size + 1))
    (i0, i1, top, bottom), (j0, j1, left, right) = edges
    strips = sums[bottom] - sums[top]
    count = strips[:, right] - strips[:, left]
    full = count == (bottom - top)[:, None] * (right - left)[None, :]
    full &= (i0 + tile.rows <= call.n)[:, None] & (j0 + tile.cols <= call.m)[None, :]
    some = count > 0
    near = j0[None, :] - i1[:, None]  # the smallest and the largest j − i of the tile
    far = j1[None, :] - i0[:, None]
    if call.facts["LOWER"]:
        some &= far >= call.lower
        full &= near >= call.lower
    if call.facts["UPPER"]:
        some &= near <= call.upper
        full &= far <= call.upper
    return some.to(torch.int32) + (some & full).to(torch.int32)


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Kernels by all that they are specialised on, and by more: Triton's own look-up takes longer."""


def _launch(
    kernel: Any,
    programs: int | tuple[int, int],
    arrays: tuple[Tensor | None, ...],
    floats: tuple[float, ...],
    whole: tuple[int, ...],
    facts: dict[str, Any],
    tile: Tile,
) -> None:
    """Start a kernel whose parameters come in this order: arrays, floats, whole numbers, facts."""
    grid = (*programs, 1) if isinstance(programs, tuple) else (programs, 1, 1)
    how = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    args = (*arrays, *floats, *whole)
    if _interpreted():
        kernel[grid](*args, **facts, **how)
        return
    if facts.get("TMA"):
        triton.set_allocator(_scratch)  # for the descriptors; a thread has its own
    about = (
        kernel.__name__,
        tile,
        *whole,
        *facts.values(),
        *[x if x is None else (x.dtype, x.device, x.data_ptr() % 16) for x in arrays],
    )
    ready = _COMPILED.get(about)
    if ready is not None:
        # What is known at compile time is passed over, but counted.
        ready[grid](*args, *facts.values())
        return
    if len(_COMPILED) > 4096:
        _COMPILED.clear()
    _COMPILED[about] = kernel[grid](*args, **facts, **how)


def _fitting(call: _Call, name: str, rows: int, run: Any) -> None:
    """Run with the pass's tile, or with the largest smaller one that the device can hold."""
    tile = call.tile(name, rows)
    device = call.query.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _fitting(call, name, rows, run)
    about = (name, tile, call.query.dtype, device, *call.facts.values())
    tile = _SMALLER.get(about, tile) if _SMALLER else tile
    while True:
        try:
            run(tile)
            return None
        except triton.runtime.errors.OutOfResources:
            tile = _SMALLER[about] = _shrunk(tile)


def _parts(call: _Call, programs: int, rows: int, block: int, waves: int) -> tuple[int, int]:
    """Into how many parts a loop over so many rows is split, and the tiles of each.

    Where each program has a processor to itself and three of four are busy, nothing is: joining
    the parts would take what is won.
    """
    room, tiles, least = _processors(call.query.device), -(-rows // block), max(LEAST // block, 1)
    if programs >= (room if waves > 1 else 3 * room // 4) or tiles < 2 * least:
        return 1, tiles
    span = max(-(-tiles * programs // (room * waves)), least)
    return -(-tiles // span), span


# Forward


def _attend_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    gate_query: Tensor | None,
    gate_key: Tensor | None,
    row_a: Tensor | None,
    row_b: Tensor | None,
    lengths: Tensor | None,
    layout: Tensor | None,
    scale: float,
    weighting: str,
    alpha: float,
    lower: int | None,
    upper: int | None,
    layout_size: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, and of each row its top (in base 2) and 1 / total."""
    call = _Call(
        query, key, value, key_bias, gate_query, gate_key, row_a, row_b, lengths, layout,
        scale, weighting, alpha, lower, upper, layout_size, tf32,
    )  # fmt: skip
    out = call.new(call.b, call.h, call.n, call.d, dtype=value.dtype)
    lse = call.new(call.b, call.h, call.n)
    kept = call.new(2, call.b, call.h, call.n)
    if out.numel() == 0 or call.m == 0:
        exponential = weighting in ("softmax", "topk")
        return out.zero_(), lse.fill_(-math.inf if exponential else 0.0), kept.zero_()
    _pool(call, out, lse, kept)
    return out, lse, kept


def _pool(call: _Call, out: Tensor, lse: Tensor, kept: Tensor) -> None:
    """Fill out, lse and kept."""
    packed = call.n * call.group <= FEW and call.group > 1 and call.layout is None
    rows = call.n * call.group if packed else call.n
    lanes = call.b * (call.hk if packed else call.h)

    def run(tile: Tile) -> None:
        programs = lanes * -(-rows // tile.rows)
        splits, span = _parts(call, programs, call.m, tile.cols, tile.waves)
        wide = call.w > HELD
        at, counts, at_columns = call.lists(tile)
        targets = (out, lse, kept)
        if splits > 1:
            shape = (splits, lanes * rows)
            targets = (call.new(*shape, call.d), call.new(*shape), call.new(*shape))
        facts = call.facts | {
            "BLOCK_W": call.block_w(tile, wide),
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "WIDE": wide,
            "SPLIT": splits > 1,
            "PACKED": packed,
            "FOLD": call.fold,
            "CUT": call.cut(tile.cols),
            "TMA": tile.described and call.described and not (wide and packed),
        }
        arrays = (*call.inputs, at, counts, *targets)
        whole = (
            *call.strides, *out.stride()[:3],
            call.n, call.m, call.hk if packed else call.h, call.group, rows,
            call.lower, call.upper, call.layout_size, call.layout_columns, at_columns, splits, span,
        )  # fmt: skip
        floats = (call.scale, call.alpha)
        _launch(kernels.pool, programs * splits, arrays, floats, whole, facts, tile)
        if splits > 1:
            joined = {name: facts[name] for name in ("D", "BLOCK_D", "WEIGHTING", "APART")}
            joined["BLOCK_S"] = max(16, min(64, 8192 // joined["BLOCK_D"]))
            parts = (*targets, out, lse, kept)
            _launch(
                kernels.merge, lanes * rows, parts, (), (lanes * rows, splits), joined,
                Tile(1, 1, 1, 4, 2),
            )  # fmt: skip

    few = lanes < _processors(out.device) and rows <= FEW
    _fitting(call, "split" if few else "pool", rows, run)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    b, h, n, _ = query.shape
    rows = query.new_empty((b, h, n), dtype=torch.float32)
    kept = query.new_empty((2, b, h, n), dtype=torch.float32)
    return query.new_empty((b, h, n, value.shape[3]), dtype=value.dtype), rows, kept


# Backward


def _attend_backward(
    along: Tensor,
    along_lse: Tensor | None,
    out: Tensor,
    kept: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor | None,
    gate_query: Tensor | None,
    gate_key: Tensor | None,
    row_a: Tensor | None,
    row_b: Tensor | None,
    lengths: Tensor | None,
    layout: Tensor | None,
    scale: float,
    weighting: str,
    alpha: float,
    lower: int | None,
    upper: int | None,
    layout_size: int,
    tf32: bool,
    for_queries: bool,
    for_keys: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, key_bias, gate_query, gate_key.

    Where there is no such argument, or nobody wants the gradient, the array is empty.
    """
    call = _Call(
        query, key, value, key_bias, gate_query, gate_key, row_a, row_b, lengths, layout,
        scale, weighting, alpha, lower, upper, layout_size, tf32,
    )  # fmt: skip
    given = (query, key, value, key_bias, gate_query, gate_key)
    grads = _places(given, for_queries, for_keys)
    if out.numel() == 0 or call.m == 0:
        for x in grads:
            x.zero_()
        return grads
    along = along.contiguous()
    centred = weighting in ("softmax", "topk", "normalized", "entmax")
    call.facts = call.facts | {"CENTRED": centred}
    wide = call.w > HELD_BACK or call.d > HELD_BACK
    centre = _centre(call, along, along_lse, out, kept, wide)
    if weighting == "average":
        for x in (grads.query, grads.key, grads.key_bias, grads.gate_query, grads.gate_key):
            x.zero_()
        if for_keys:
            _to_keys(call, along, centre, kept, grads, False)
    elif wide:
        _through_scratch(call, along, centre, kept, grads, for_queries, for_keys)
        if for_queries and gate_query is not None:
            _to_queries(call, along, centre, kept, grads, True)
    else:
        if for_keys:
            _to_keys(call, along, centre, kept, grads, False)
        if for_queries:
            _to_queries(call, along, centre, kept, grads, False)
    return grads


class _Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor
    gate_query: Tensor
    gate_key: Tensor


def _places(given: tuple[Tensor | None, ...], for_queries: bool, for_keys: bool) -> _Gradients:
    """Room for the gradients of these; none where there is no argument or no wish."""
    wishes = (for_queries, for_keys, for_keys, for_keys, for_queries, for_keys)
    query = given[0]
    assert query is not None
    return _Gradients(
        *(
            query.new_empty((0,)) if x is None or not wish else x.new_empty(x.shape)
            for x, wish in zip(given, wishes, strict=True)
        )
    )


def _attend_backward_fake(
    along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, *rest: Any
) -> _Gradients:
    return _places(rest[:6], *rest[-2:])


def _centre(
    call: _Call, along: Tensor, along_lse: Tensor | None, out: Tensor, kept: Tensor, wide: bool
) -> Tensor | None:
    """c of ∂L/∂s = … (∂L/∂α − c), each row's own; None where the weighting has none."""
    if not call.facts["CENTRED"]:
        return None
    lines = call.b * call.h * call.n
    if call.weighting == "entmax":
        up, down = _to_queries(call, along, None, kept, None, wide)
        return up / torch.where(down == 0, 1.0, down)
    centre = call.new(lines)
    if call.weighting == "normalized":
        along_lse = None
    facts = {"D": call.d, "BLOCK_D": call.facts["BLOCK_D"], "ROWS": 64}
    arrays = (along, out, None if along_lse is None else along_lse.contiguous(), centre)
    _launch(kernels.inner, -(-lines // 64), arrays, (), (lines,), facts, Tile(64, 1, 1, 4, 1))
    return centre


def _to_queries(
    call: _Call,
    along: Tensor,
    centre: Tensor | None,
    kept: Tensor,
    grads: _Gradients | None,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Fill the gradients of query and gate_query; with no place for them, the centre's sums."""
    lines = call.b * call.h * call.n
    one = two = kept

    def run(tile: Tile) -> None:
        nonlocal one, two
        programs = call.b * call.h * -(-call.n // tile.rows)
        splits, span = _parts(call, programs, call.m, tile.cols, tile.waves)
        one, two = call.new(splits, lines), call.new(splits, lines)
        dquery: Tensor | None = None
        if grads is not None and not wide:
            dquery = grads.query
            if splits > 1:
                dquery = call.new(splits * call.b, call.h, call.n, call.w)
        at, counts, at_columns = call.lists(tile)
        facts = call.facts | {
            "BLOCK_W": call.block_w(tile, wide),
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "WIDE": wide,
            "SPLIT": splits > 1,
            "CENTRE": grads is None,
            "CENTRED": call.facts["CENTRED"] and grads is not None,
            "CUT": call.cut(tile.cols),
            "TMA": tile.described and call.described and not wide,
        }
        arrays = (*call.inputs, at, counts, along, centre, kept, dquery, one, two)
        whole = (
            *call.strides, *((0, 0, 0) if dquery is None else dquery.stride()[:3]),
            call.n, call.m, call.h, call.group, lines,
            call.lower, call.upper, call.layout_size, call.layout_columns, at_columns, splits, span,
        )  # fmt: skip
        floats = (call.scale, call.alpha)
        _launch(kernels.to_queries, programs * splits, arrays, floats, whole, facts, tile)
        if dquery is not None and grads is not None and splits > 1:
            grads.query.copy_(dquery.view(splits, *grads.query.shape).sum(0))

    _fitting(call, "to_queries", call.n, run)
    if grads is not None:
        if call.gate_query is not None:
            grads.gate_query.copy_(one.sum(0).view(grads.gate_query.shape))
        return one, two
    return one.sum(0), two.sum(0)


def _to_keys(
    call: _Call,
    along: Tensor,
    centre: Tensor | None,
    kept: Tensor,
    grads: _Gradients,
    wide: bool,
    pairs: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
    ds: Tensor | None = None,
) -> None:
    """Fill the gradients on the side of the keys; with `wide`, `ds` instead of the key's own.

    `pairs` and `keys` say which: the first, and how many.
    """
    first_pair, count = pairs or (0, call.b * call.hk)
    first_key, keys_n = keys or (0, call.m)
    lines = call.b * call.hk * call.m

    def run(tile: Tile) -> None:
        programs = count * -(-keys_n // tile.cols)
        splits, span = _parts(call, programs, call.n, tile.rows, tile.waves)
        at, counts, at_columns = call.lists(tile, by_key=True)
        targets = [grads.key, grads.value, grads.key_bias, grads.gate_key]
        if splits > 1:
            scored = call.weighting != "average"
            widths = (call.w, call.d, 1, 1)
            given = (not wide, True, call.key_bias is not None, call.gate_key is not None)
            given = (scored and given[0], True, scored and given[2], scored and given[3])
            targets = [
                call.new(splits, lines, width) if there else x
                for x, width, there in zip(targets, widths, given, strict=True)
            ]
        facts = call.facts | {
            "BLOCK_W": call.block_w(tile, wide),
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "WIDE": wide,
            "SPLIT": splits > 1,
            "CUT": call.cut(tile.cols),
            "TMA": tile.described and call.described and not wide,
            "UNEVEN": call.n % tile.rows != 0,
        }
        arrays = (*call.inputs, at, counts, along, centre, kept, *targets, ds)
        whole = (
            *call.strides, call.n, call.m, call.hk, call.group, call.b * call.h * call.n,
            call.lower, call.upper, call.layout_size, call.layout_columns, at_columns, splits, span,
            first_pair, first_key, keys_n, lines,
        )  # fmt: skip
        floats = (call.scale, call.alpha)
        _launch(kernels.to_keys, programs * splits, arrays, floats, whole, facts, tile)
        if splits == 1:
            return
        places = (grads.key, grads.value, grads.key_bias, grads.gate_key)
        for place, part in zip(places, targets, strict=True):
            if part is place:
                continue
            part = part.view(splits, call.b * call.hk, call.m, -1)
            window = (slice(first_pair, first_pair + count), slice(first_key, first_key + keys_n))
            flat = place.view(call.b * call.hk, call.m, -1)
            flat[window] = part[:, *window].sum(0).to(place.dtype)

    _fitting(call, "to_keys", call.m, run)


def _through_scratch(
    call: _Call,
    along: Tensor,
    centre: Tensor | None,
    kept: Tensor,
    grads: _Gradients,
    for_queries: bool,
    for_keys: bool,
) -> None:
    """∂L/∂φ = dS·ψ and ∂L/∂ψ = dSᵀ·φ by matrix products, of as many scores as SCRATCH holds."""
    pairs, wide_n = call.b * call.hk, call.group * call.n
    dtype, device = call.query.dtype, call.query.device
    room = SCRATCH // call.query.element_size()
    keys_n = call.m
    if wide_n * call.m > room:
        keys_n = max(room // wide_n // 256, 1) * 256
    count = max(min(room // (wide_n * min(keys_n, call.m)), pairs), 1)
    phi = call.query.reshape(pairs, wide_n, call.w)
    psi = call.key.reshape(pairs, call.m, call.w)
    whole = keys_n >= call.m
    given = (call.query, call.key, call.value, call.key_bias, call.gate_query, call.gate_key)
    target = grads if for_keys else _places(given, False, True)
    total: Tensor | None = None
    for pair in range(0, pairs, count):
        some = slice(pair, min(pair + count, pairs))
        size = some.stop - some.start
        if for_queries and not whole:
            total = torch.zeros((size, wide_n, call.w), dtype=torch.float32, device=device)
        for first in range(0, call.m, keys_n):
            span = slice(first, min(first + keys_n, call.m))
            width = span.stop - first
            make = torch.zeros if call.masked else torch.empty
            ds = make((size, width, wide_n), dtype=dtype, device=device)
            _to_keys(call, along, centre, kept, target, True, (pair, size), (first, width), ds)
            if for_keys:
                place = grads.key.view(pairs, call.m, call.w)[some, span]
                if whole:
                    torch.matmul(ds, _clean(call, phi[some]), out=place)
                else:
                    place.copy_(torch.matmul(ds, _clean(call, phi[some])))
            if for_queries:
                back, there = ds.transpose(1, 2), _clean(call, psi[some, span])
                place = grads.query.view(pairs, wide_n, call.w)[some]
                if total is None:
                    torch.matmul(back, there, out=place)
                else:
                    total += torch.matmul(back, there)
                del back
            del ds  # before the next is made
        if total is not None:
            grads.query.view(pairs, wide_n, call.w)[some] = total.to(dtype)


def _clean(call: _Call, x: Tensor) -> Tensor:
    """x with 0 for what is not finite, since 0 · NaN would bring back what the mask ruled out."""
    return torch.where(torch.isfinite(x), x, 0.0) if call.masked else x


# Repair


def heal(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, upper: int = 0
) -> Tensor:
    """Repair in place the output of a kernel that multiplies what a causal mask rules out by 0.

    out (B, H, n, d), arguments as in `attend`, with softmax and j − i ≤ upper. A value that is
    not finite makes NaN of rows that must not see it. The last row sees every key, so a head is
    spoiled only if its last row is not finite; the other heads are not touched. Without a
    synchronisation: every program looks at its head's last row. That row sees the value by right
    and does not become finite, so a program that comes late finds what an early one found.

    Returns what `heal_backward` needs of the rows of spoiled heads; the rest of it means nothing.
    """
    if key.shape[2] > query.shape[2] + upper:
        raise ArgumentError(
            f"the last of {query.shape[2]} queries must see all keys: pass the first "
            f"{query.shape[2] + upper} of {key.shape[2]}"
        )
    _check(query, key, value, "softmax", 0.0)
    kept: Tensor = _heal(out, query, key, value, scale, upper)
    return kept


def heal_backward(
    dquery: Tensor,
    along: Tensor,
    out: Tensor,
    kept: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    upper: int = 0,
) -> None:
    """Repair in place the gradient of the query that such a kernel gives.

    `along` is ∂L/∂out, `out` the healed output and `kept` what `heal` returned. Those of key and
    value are as they should be: the last row sees every key, and its own gradient is not finite.
    Nothing is copied: `along` and `out` may have any strides, but for the last of `out`, 1.
    """
    _heal_backward(dquery, along, out, kept, query, key, value, scale, upper)


def _healing(query: Tensor, key: Tensor, value: Tensor, scale: float, upper: int) -> _Call:
    none = (None,) * 7
    return _Call(query, key, value, *none, scale, "softmax", 0.0, None, upper, 0, False)


def _heal_forward(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, upper: int
) -> Tensor:
    call = _healing(query, key, value, scale, upper)
    kept = call.new(2, call.b, call.h, call.n)
    if out.numel() and call.m:
        arrays = (call.query, call.key, call.value, out, kept)
        wide = call.w > HELD
        _mend(call, kernels.mend, arrays, out.stride()[:3], wide, {"WIDE": wide})
    return kept


def _mend(
    call: _Call,
    kernel: Any,
    arrays: tuple[Tensor, ...],
    strides: tuple[int, ...],
    wide: bool,
    facts: dict[str, Any],
) -> None:
    """One launch, of a program for each head, or of several where processors are left over."""
    lanes = call.b * call.h

    def run(tile: Tile) -> None:
        tiles = -(-call.n // tile.rows)
        parts = max(min(_processors(call.query.device) // lanes, tiles), 1)
        known = {name: call.facts[name] for name in ("W", "D", "BLOCK_D", "APART")} | {
            "BLOCK_W": call.block_w(tile, wide),
            "ROWS": tile.rows,
            "COLS": tile.cols,
        }
        whole = (
            *call.strides[:9], *strides, call.n, call.m, call.h, call.group, call.upper, parts,
        )  # fmt: skip
        _launch(kernel, lanes * parts, arrays, (call.scale,), whole, known | facts, tile)

    _fitting(call, "mend", call.n, run)


def _heal_fake(out: Tensor, query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


def _heal_queries(
    dquery: Tensor,
    along: Tensor,
    out: Tensor,
    kept: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    upper: int,
) -> None:
    call = _healing(query, key, value, scale, upper)
    if not (out.numel() and call.m):
        return
    arrays = (call.query, call.key, call.value, out, along, kept, dquery)
    strides = (*out.stride()[:3], *along.stride(), *dquery.stride()[:3])
    _mend(call, kernels.mend_queries, arrays, strides, False, {})


def nothing(*rest: Any, **named: Any) -> None:
    pass


# Operators

LIBRARY = torch.library.Library("qkv", "FRAGMENT")


def operator(name: str, function: Any, fake: Any, mutates: tuple[str, ...] = ()) -> Any:
    """`torch.ops.qkv.name`; torch.library.custom_op would add as much again to each call."""
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    LIBRARY.define(name + schema)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"qkv::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.qkv, name).default


_attend = operator("attend", _attend_forward, _attend_fake)
_backward = operator("attend_backward", _attend_backward, _attend_backward_fake)
_heal = operator("heal", _heal_forward, _heal_fake, ("out",))
_heal_backward = operator("heal_backward", _heal_queries, nothing, ("dquery",))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, kept = output
    ctx.save_for_backward(out, kept, *inputs[:10])
    ctx.numbers = inputs[10:]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, along: Tensor | None, along_lse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    out, kept, *inputs = ctx.saved_tensors
    needs = ctx.needs_input_grad
    for_queries = needs[0] or needs[4]
    for_keys = needs[1] or needs[2] or needs[3] or needs[5]
    weighting = ctx.numbers[1]
    if weighting not in ("softmax", "topk"):
        along_lse = None
    if along is None and along_lse is None:
        return (None,) * 17
    if along is None:
        along = torch.zeros_like(out)
    found = _backward(along, along_lse, out, kept, *inputs, *ctx.numbers, for_queries, for_keys)
    wanted = (x if need else None for x, need in zip(found, needs, strict=False))
    return (*wanted, *(None,) * 11)


def refuse(ctx: Any, *along: Tensor | None) -> None:
    raise EngineError("the Triton kernels have first derivatives only: name engine='dense'")


torch.library.register_autograd("qkv::attend", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("qkv::attend_backward", refuse, setup_context=nothing, lib=LIBRARY)
