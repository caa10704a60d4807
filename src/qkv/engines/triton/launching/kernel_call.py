"""`KernelCall`: arrays, numbers and compile-time constants that all kernels of a call share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple, cast, get_type_hints

import torch
import triton
from torch import Tensor

from qkv.engines.triton.launching import launch, tile_choice, workspace
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.pair_functions.expressions import MAX_NUMBERS, MAX_SHORT_LENGTH
from qkv.engines.triton.pair_functions.functions import PairFunctions
from qkv.engines.triton.pair_functions.tile_lists import TileLists
from qkv.engines.triton.sparse import support_lists
from qkv.engines.triton.sparse.support_lists import ROWS_PER_LIST
from qkv.engines.triton.tile_functions.records import (
    ARRAY_COUNT,
    Arrays,
    PairSizes,
    Scales,
    Sizes,
    Strides,
    intern_constexprs,
)
from qkv.util.caches import memoize

LOG2E = 1.4426950408889634
WINDOWS = ("boxcar", "triangular", "epanechnikov")
FORMS = ("product", *WINDOWS, "laplace", "exact", "constant")
"""Kinds of scores: a dot product, or one of `tile_functions.distance`."""
FLAT_FORMS = ("boxcar", "exact", "constant")
"""The forms of scores that are piecewise constant."""
MAX_BOUNDED_SCORE = 8.0
"""The largest score in base 2 up to which weights of 2^(score − MAX_BOUNDED_SCORE) keep their
digits in 16 bits."""
PADDED_ROWS = 128
"""The terms per row of a distance are padded to a multiple of this."""


class Numbers(NamedTuple):
    """The arguments after `Arrays`; see `attend_operator`.

    `alpha` is also the k of top-k. `hashed` is the number of heads per batch in the hash of
    dropout. A call with a `cap` has no bias. Under a transform, there are no `functions`. `form` is
    one of FORMS. `adds_squares` adds square_scale · ‖ψ‖² to the products, without a gradient.
    `sink` is the score of entmax's sink; None: there is none.
    """

    scale: float
    weighting: str = "softmax"
    alpha: float = 0.0
    lower: int | None = None
    upper: int | None = None
    layout_size: int = 0
    whole: bool = False
    times: float = 1.0
    dropout: float = 0.0
    hashed: int = 1
    cap: float = 0.0
    functions: PairFunctions | None = None
    captured_numbers: tuple[int, ...] | None = None
    form: str = "product"
    square_scale: float = 1.0
    adds_squares: bool = False
    sink: float | None = None

    @property
    def is_hard(self) -> bool:
        return self.weighting == "topk" and self.alpha == 1

    @property
    def has_score_mod(self) -> bool:
        return self.functions is not None and self.functions.modify is not None

    @property
    def as_scales(self) -> Scales:
        """Return the scales as kernels take them: scores of softmax are in base 2."""
        base = LOG2E if self.weighting == "softmax" else 1.0
        inner = 1.0 if self.has_score_mod else base  # a score_mod gets the scores in base e
        share = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        factors = float(self.scale) * inner, float(self.alpha), self.times * base, share
        return Scales(*factors, self.square_scale, self.sink or 0.0)


_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", str: "str", bool: "bool",
    float | None: "float?",
    int: "SymInt", int | None: "SymInt?", PairFunctions | None: "str?",
    tuple[int, ...] | None: "SymInt[]?",
}  # fmt: skip
SCHEMA_ARGUMENTS = ", ".join(
    f"{_TYPES[kind]} {name}"
    for record in (Arrays, Numbers)
    for name, kind in get_type_hints(record).items()
)
"""The fields of both records in the syntax of PyTorch's operator schemas."""


class TileLoop(NamedTuple):
    """One loop of a pass: its tile, the lists of tiles or keys, and its compile-time constants."""

    tile: Tile
    lists: Tensor | None
    counts: Tensor | None
    list_columns: int
    constexprs: dict[str, Any]


def round_query(given: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments with a float32 query rounded to the dtype of 16-bit keys.

    The gradient of the query stays float32. Keys of one byte are codes, as float8 is too.
    """
    query, key = given[:2]
    return (
        given
        if query.dtype == key.dtype or key.element_size() == 1
        else (query.to(key.dtype), *given[1:])
    )


class KernelCall:
    """Arrays, numbers and compile-time constants that all kernels of a call share."""

    def __init__(self, *given: Any) -> None:
        arrays, numbers = Arrays(*given[:ARRAY_COUNT]), Numbers(*given[ARRAY_COUNT:])
        scale, self.weighting, alpha, lower, upper, layout_size, self.needs_exact_row_sums, *_ = (
            numbers
        )
        self.is_hard = numbers.is_hard
        self.query, self.key, self.value = (as_row_major(x) for x in arrays[:3])
        self.key_bias, self.gate_key = (
            x if x is None or x.stride(2) == 1 else x.contiguous()
            for x in (arrays.key_bias, arrays.gate_key)
        )
        self.gate_query, row_a, row_b, self.lengths, layout, self.caps = (
            None if x is None else x.contiguous()
            for x in (arrays.gate_query, *arrays[6:10], arrays.caps)
        )
        if layout is not None and layout.dtype != torch.bool:
            layout = layout != 0
        self.layout = None if layout is None else layout.view(torch.uint8)
        self.has_tops = self.weighting == "topk" and row_a is not None and row_a.dim() == 4
        self.pairs, self.seed, self.width = arrays.pairs, arrays.seed, arrays.width
        self.support_lists, self.support_bits = cast(Any, arrays[12:14])
        self.inputs = Arrays(
            self.query, self.key, self.value, self.key_bias, self.gate_query, self.gate_key,
            row_a, row_b, self.lengths, self.layout, self.pairs, self.seed, width=self.width,
            caps=self.caps, captured_floats=arrays.captured_floats,
            captured_integers=arrays.captured_integers,
            query_terms=arrays.query_terms, key_terms=arrays.key_terms,
            key_spans=arrays.key_spans, query_spans=arrays.query_spans, pages=arrays.pages,
            key_scales=arrays.key_scales, value_scales=arrays.value_scales,
        )  # fmt: skip
        self.functions = numbers.functions
        has_rule = self.functions is not None and self.functions.rule is not None
        self.b, self.h, self.n, self.w = self.query.shape
        _, self.hk, self.m, self.d = self.value.shape
        self.page_rows = 0 if arrays.pages is None else self.m
        if arrays.pages is not None:
            self.m *= arrays.pages.shape[1]
        self.group, reach = self.h // self.hk, self.n + self.m
        self.band = tuple(x if x is None else max(min(x, reach), -reach) for x in (lower, upper))
        self.scales = numbers.as_scales
        self.base_sizes = Sizes(
            self.n, self.m, self.h, self.group, self.n, self.band[0] or 0, self.band[1] or 0,
            layout_size, 0 if layout is None else layout.shape[1],
            min(int(numbers.dropout * 2**31), 2**31 - 1), numbers.hashed,
        )  # fmt: skip
        self.tile_lists = TileLists(self, numbers.hashed)
        if self.functions is not None or self.tile_lists.is_possible:
            known_numbers = numbers.captured_numbers or (0,) * MAX_NUMBERS
            self.base_sizes = PairSizes(*self.base_sizes, *self.tile_lists.strides, *known_numbers)
        kind = 0 if self.pairs is None else 1 + self.pairs.is_floating_point()  # `F.PAIRS`
        self.is_masked = has_rule or any(
            x is not None
            for x in (lower, upper, self.lengths, layout, self.pairs, arrays.key_spans)
        )
        there = (lower, upper, self.key_bias, self.gate_key, layout, self.seed)
        self.strides = (
            *self.query.stride()[:3], *self._row_strides(self.key), *self._row_strides(self.value),
            *((0, 0) if self.key_bias is None else self.key_bias.stride()[:2]),
            *((0, 0) if self.gate_key is None else self.gate_key.stride()[:2]),
            *shared_strides(self.pairs),
        )  # fmt: skip
        self.gradient_strides: tuple[int, ...] = (0, 0, 0)
        self.form = numbers.form
        self.has_product = self.form == "product" or self.form in WINDOWS
        even, unit = self._row_alignment(), 16 // self.query.element_size()
        plain = self.form == "product"
        self.can_use_descriptors = (
            self.has_product and launch.has_tma(self.query.device) and even > 0
        )
        quick = plain and not (numbers.cap or self.functions or self.tile_lists.is_possible)
        quick = quick and not numbers.adds_squares
        self.float_mask_bytes = self._measure_float_mask(numbers.times) if quick else 0
        known = [x is not None for x in there]
        facts = _base_constexprs(
            self.w, self.d, self.query.dtype, self.weighting, alpha, kind, *known
        )
        own = {"EVEN": unit if even and even % 16 else 1, "QUICK": self.float_mask_bytes > 0}
        own |= {"CAP": numbers.cap, "SQUARES": numbers.adds_squares}
        own |= {"SPANS": arrays.key_spans is not None, "PAGE": self.page_rows}
        per_row = numbers.cap >= 0 and arrays.caps is not None
        own |= {"SINK": 0 if numbers.sink is None else 1 + per_row}
        own |= {"CODES": arrays.key_scales is not None}
        own["ROW_PAIRS"] = self._shares_mask_row()
        own["BOUNDED"] = self._has_bounded_scores(numbers)
        self.constexprs = facts | own | _form_constexprs(self.form, self.w)
        if self.constexprs["BY_COLUMN"]:
            self.constexprs["BLOCK_D"] = max(self.constexprs["BLOCK_D"], MIN_VALUE_COLUMNS)
        if self.functions is not None:
            self.constexprs |= _function_constexprs(self.functions)
            self.constexprs["SHORT"] = max(self.n, self.m) <= MAX_SHORT_LENGTH
        has_mod = numbers.has_score_mod
        if has_mod:
            self.constexprs["BASE"] = 1.0
        plain = plain and self.key_bias is None and self.gate_key is None and not numbers.cap
        self.is_plain_product = plain and not has_mod and not numbers.adds_squares
        plain = self.is_plain_product and (kind < 2 or self.float_mask_bytes > 0)
        self.folds_scale = self.weighting == "softmax" and plain and scale > 0

    def _row_strides(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides of keys or values by batch, head and row; of a pool only by row."""
        return (0, 0, x.stride(2)) if self.page_rows else x.stride()[:3]

    def _has_bounded_scores(self, numbers: Numbers) -> bool:
        """Return whether softmax needs no largest score: 0 … scale holds all, and is short."""
        if numbers.weighting != "softmax" or numbers.form not in WINDOWS:
            return False
        others = (self.caps, self.pairs, self.functions)
        return all(x is None for x in others) and 0 <= self.scales.scale <= MAX_BOUNDED_SCORE

    @property
    def column_factor(self) -> float:
        """The factor still missing from sums of score gradients by column: the scale."""
        base = LOG2E if self.weighting == "softmax" else 1.0
        return self.scales.scale / base

    def _measure_float_mask(self, times: float) -> int:
        """Return the bytes of a mask element if the fast path applies (`F.QUICK`), else 0.

        It applies to softmax and entmax of 16-bit rows with a float mask that descriptors can read,
        and without bias, gate, lengths or dropout.
        """
        others = (self.key_bias, self.gate_key, self.lengths, self.seed)
        if self.weighting not in ("softmax", "entmax") or any(x is not None for x in others):
            return 0
        fits = (
            self.query.element_size() == 2
            and max(self.w, self.d) <= tile_choice.MAX_BACKWARD_TILE_WIDTH
        )
        fits = fits and self.n % 8 == 0 and 0 not in self.strides[:9] and 1e-3 < times < 1e3
        if self.pairs is None or not (fits and self.pairs.is_floating_point()):
            return 0
        if not (self.can_use_descriptors and is_tma_readable(self.pairs)):
            return 0
        return int(self.pairs.element_size())

    def _shares_mask_row(self) -> bool:
        """Return whether all queries of the heads that share keys have one row of the mask."""
        if self.pairs is None or self.pairs.shape[2] != 1:
            return False
        return bool(self.pairs.shape[1] == 1 or self.group == 1)

    def _row_alignment(self) -> int:
        """Return the bitwise OR of all row strides: a power of two divides it if it divides all.

        0: a row does not start at a multiple of 16 bytes, the unit of TMA.
        """
        unit = 16 // self.query.element_size()
        steps = self.d
        for step in self.strides[:9]:
            steps |= step
        at = self.query.data_ptr() | self.key.data_ptr() | self.value.data_ptr()
        return steps if steps % unit == 0 and at % 16 == 0 else 0

    def build_strides(self, out: Tensor | None = None) -> Strides:
        """Return the strides of the arrays and of a result; 0 for strides that are not needed."""
        of_out = (0, 0, 0, 0) if out is None else out.stride()[-4:]
        return Strides(*self.strides, *of_out, *self.gradient_strides)

    def allocate_buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return workspace.allocate_buffer(self.query, shape, dtype)

    def choose_tile(self, name: str, rows: int) -> Tile:
        tile = self._choose_tile(name, rows)
        # A tile of keys lies in one page.
        return tile._replace(cols=gcd(tile.cols, self.page_rows)) if self.page_rows else tile

    def _choose_tile(self, name: str, rows: int) -> Tile:
        size, banded = (
            self.query.element_size(),
            any(self.constexprs[name] for name in ("LOWER", "UPPER", "SPANS")),
        )
        if self.constexprs["BY_COLUMN"]:
            return tile_choice.TILE_OVERRIDES.get(name) or tile_choice.choose_column_tile(
                name, rows, self.d, size
            )
        window = self.constexprs["WINDOW"]
        if window and name == "pool" and size == 2 and max(self.w, self.d) <= 64:
            return tile_choice.TILE_OVERRIDES.get(name) or tile_choice.WINDOW_POOL_TILE
        entmax = self.float_mask_bytes and self.weighting == "entmax"
        if entmax and name == "to_queries" and max(self.w, self.d) <= 64:
            # The two sums of the fused pass fill the registers of a taller tile.
            return tile_choice.TILE_OVERRIDES.get(name) or tile_choice.FLOAT_MASK_TILE
        tile = tile_choice.TILE_OVERRIDES.get(name) or tile_choice.choose_tile(
            name, self.w, self.d, size, rows, self.is_plain_product, banded, self.pairs is not None,
            self.gate_key is not None or window or self.constexprs["HAS_MOD"],
            self.float_mask_bytes,
        )  # fmt: skip
        if name == "pool" and self.has_tops and size == 2 and max(self.w, self.d) <= 64:
            tile = tile_choice.TILE_OVERRIDES.get(name) or tile_choice.TOPPED_POOL_TILE
        if self._has_small_blocks(name, tile):
            # Tiles of the size of the blocks are full or empty.
            return Tile(64, 64, 64, 4, 3 if name == "pool" else 2)
        if name == "pool" and self._is_short_batch():
            # Few registers, so that more programs read at once.
            return Tile(64, 64, 64, 4, 2 if self.pairs is None else 3, registers=128)
        # The second sum of a window takes registers: more threads need fewer each.
        return tile._replace(warps=8) if window and tile[:2] == (128, 64) else tile

    def _is_short_batch(self) -> bool:
        """Return whether masked narrow 16-bit rows are so short that a program starts and ends."""
        short = 64 < self.n <= 128 and self.m <= 256 and self.is_masked
        if not short or "pool" in tile_choice.TILE_OVERRIDES or self.weighting != "softmax":
            return False
        narrow = max(self.w, self.d) <= 64 and self.query.element_size() == 2
        return bool(narrow and self.is_plain_product and self.float_mask_bytes == 0)

    def _has_small_blocks(self, name: str, tile: Tile) -> bool:
        """Return whether a tile of a pass over narrow 16-bit rows covers several mask blocks."""
        if self.layout is None or not self.tile_lists.is_possible:
            return False
        if name not in ("pool", "to_keys", "to_queries") or name in tile_choice.TILE_OVERRIDES:
            return False
        narrow = max(self.w, self.d) <= 64 and self.query.element_size() == 2
        return bool(narrow and tile.rows > self.base_sizes.size)

    def run_with_fitting_tile(self, name: str, tile: Tile, run: Callable[[Tile], None]) -> None:
        """Run with this tile, or with the largest smaller one that the device supports."""
        about = (name, tile, self.query.device, self.query.dtype, *self.constexprs.values())
        tile = tile_choice.SHRUNK_TILES.get(about, tile) if tile_choice.SHRUNK_TILES else tile
        with launch.use_device(self.query.device):
            while True:
                try:
                    return run(tile)
                except triton.runtime.errors.OutOfResources:
                    tile = tile_choice.SHRUNK_TILES[about] = tile_choice.shrink_tile(tile)

    def product_block_width(self, tile: Tile, wide: bool) -> int:
        return tile.chunk if wide else tile_choice.block_width(self.w, self.query.dtype)

    def pass_constexprs(self, tile: Tile, wide: bool, splits: int) -> dict[str, Any]:
        """Return the compile-time constants of a pass with this tile."""
        return self.constexprs | {
            "BLOCK_W": self.product_block_width(tile, wide),
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "WIDE": wide,
            "SPLIT": splits > 1,
            "CUT": self.lengths is not None or self.m % tile.cols != 0 or self.constexprs["EDGES"],
            "TMA": tile.uses_descriptors and self.can_use_descriptors,
            "LAID": tile.uses_descriptors
            and self.can_use_descriptors
            and is_tma_readable(self.pairs),
        }

    def exact_tile_constexprs(self, facts: dict[str, Any], side: str) -> dict[str, Any]:
        """Return `F.FEW`, the constants of the loop that computes Σ (q − k)² of a window.

        Its tile has fewer rows of the `side` that the loop runs over. It is None where all tiles
        are compared.
        """
        if not facts["WINDOW"] or facts["WIDE"] or facts["WEIGHTING"] == "average":
            return {"TMA": facts["TMA"] and not facts["WINDOW"]}
        if facts["TILED"] or facts["EDGES"] or facts["LISTED"]:
            return {}
        few = {side: tile_choice.EXACT_TILE_COLUMNS, "TMA": False}
        if side == "COLS":
            facts = facts | {"LINED": facts["TMA"]}
            few["LINED"] = False
        return {"LINED": facts["LINED"], "FEW": intern_constexprs(facts | few)}

    def split_loop(self, programs: int, rows: int, block: int, waves: int) -> tuple[int, int]:
        return launch.split_loop(self.query.device, programs, rows, block, waves)

    def launch_kernel(
        self, kernel: Any, programs: int | tuple[int, ...], arrays: tuple[Any, ...],
        out: Tensor | None, sizes: tuple[Any, ...], facts: dict[str, Any], tile: Tile,
    ) -> None:  # fmt: skip
        """Launch a kernel; the call's arrays, scales and strides come before these arguments.

        The strides include those of `out`.
        """
        whole, given = (self.build_strides(out), *sizes), (self.inputs, *arrays)
        launch.launch_kernel(kernel, programs, given, self.scales, whole, facts, tile)

    def build_sizes(self, **own: int) -> Any:
        """Return the sizes of a pass: lengths, band, layout and dropout of the call, and `own`."""
        return self.base_sizes._replace(**own)

    def tile_loops(self, tile: Tile, splits: int, by_key: bool = False) -> list[TileLoop]:
        """Return the loops of a pass: one, or one over all keys and one over `support_lists`."""
        size = tile.cols if by_key else tile.rows
        plain = splits == 1 and size in (ROWS_PER_LIST, 2 * ROWS_PER_LIST)
        if (
            self.support_lists is None
            or not plain
            or max(self.w, self.d) > tile_choice.MAX_BACKWARD_TILE_WIDTH
        ):
            return [self.listed_loop(tile, by_key)]
        at, few = self.support_lists, Tile(ROWS_PER_LIST, ROWS_PER_LIST // 2, ROWS_PER_LIST, 4, 3)
        if by_key:
            few = few._replace(rows=few.cols, cols=few.rows)
            at = support_lists.allocate_lists(self.query, self.n, self.support_bits.shape[2])
            support_lists.fill_lists(self.support_bits, at, self.n, self.band)
        many = size // ROWS_PER_LIST
        return [
            TileLoop(
                some, at, None, at.shape[-1], {"LISTED": kind, "MANY": many, "EDGES": kind == 2}
            )
            for kind, some in ((1, tile), (2, few))
        ]

    def listed_loop(self, tile: Tile, by_key: bool = False, in_order: bool = False) -> TileLoop:
        """Return the loop over the tiles that the mask does not exclude.

        With `in_order`, they keep their order, and all are compared.

        Without lists, all tiles are visited and compared, if the mask is more than a band.
        """
        lists = self.tile_lists
        if not lists.is_possible:
            return TileLoop(tile, None, None, 0, {"MANY": 0, "EDGES": lists.has_rules})
        at, counts = lists.fill_lists(tile.rows, tile.cols, by_key, in_order)
        own = {"MANY": 0, "TILED": True, "SKIPS_PAIRS": self.constexprs["PAIRS"] == 1}
        return TileLoop(tile, at, counts, at.shape[-1], own)


def is_tma_readable(pairs: Tensor | None) -> bool:
    """Return whether TMA can read the mask array: its rows start at multiples of 16 bytes."""
    if pairs is None:
        return False
    b, h, n, m = shared_strides(pairs)
    even = (b | h | n) * pairs.element_size() % 16 == 0 and pairs.data_ptr() % 16 == 0
    return even and n > 0 and m == 1


def shared_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a mask array; 0 for an axis of length 1."""
    if x is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else x.stride(axis) for axis, size in enumerate(x.shape))


@memoize("triton.function_constexprs", 1024)
def _function_constexprs(functions: PairFunctions) -> dict[str, Any]:
    return {
        "HAS_RULE": functions.rule is not None,
        "HAS_MOD": functions.modify is not None,
        "RULE": functions.function(functions.rule),
        "MOD": functions.function(functions.modify),
        "MOD_GRADIENT": functions.function(functions.gradient),
    }


MIN_VALUE_COLUMNS = 32
"""Columns of a tile of values, if eight warps compute a tile. With float32 tiles of 16 columns,
Triton 3.6 addresses shared memory out of range (H200)."""


@memoize("triton.form_constexprs")
def _form_constexprs(form: str, w: int) -> dict[str, Any]:
    """Return the compile-time constants of a kind of score; TERMS is the number of row terms."""
    by_column, window = form in ("laplace", "exact"), form in WINDOWS
    facts: dict[str, Any] = {"FORM": form, "WINDOW": window, "BY_COLUMN": by_column}
    facts |= {"TERMS": w if by_column else int(window), "SLOPED": form not in FLAT_FORMS}
    return facts | ({"BLOCK": PADDED_ROWS} if facts["TERMS"] else {})


@memoize("triton.base_constexprs")
def _base_constexprs(
    w: int, d: int, dtype: torch.dtype, weighting: str, alpha: float, pairs: int, *known: bool
) -> dict[str, Any]:
    """Return the compile-time constants of every kernel of a call.

    On NVIDIA GPUs a float32 product is three products of the matrix units (tf32x3): as precise, in
    a fraction of the time and code. The scores of top-k are summed term by term instead, because
    loops of any shape must compute identical scores.
    """
    whole = dtype != torch.float32 or launch.is_interpreted() or torch.version.hip is not None
    precision = "ieee" if whole else "tf32x3"
    return {
        "W": w,
        "D": d,
        "BLOCK_D": tile_choice.block_width(d, dtype),
        "WEIGHTING": weighting,
        "POWER": _power_class(alpha) if weighting == "entmax" else 0,
        "APART": dtype == torch.float32,
        "FAST": dtype != torch.float32 and not launch.is_interpreted(),
        "PRECISION": precision,
        "SCORES": "ieee" if weighting == "topk" else precision,
        "PAIRS": pairs,
        **dict.fromkeys(("TANH", "LISTED"), 0),
        **dict(zip(("LOWER", "UPPER", "BIAS", "GATE", "LAYOUT", "DROP"), known, strict=True)),
        **dict.fromkeys(("ALONG", "EDGES", "ENDED", "LAID", "LINED"), False),
        "FEW": None,
        # Where no weight is, no score has a gradient.
        "VANISHES": weighting not in ("normalized", "raw"),
        **dict.fromkeys(("HAS_RULE", "HAS_MOD", "SHORT", "TILED", "SKIPS_PAIRS", "TOPPED"), False),
        **dict.fromkeys(("RULE", "MOD", "MOD_GRADIENT", "CAPTURED_GRADIENT"), None),
        "CAPTURED_SUMS": 0,
        "EXPONENTIAL": weighting in ("softmax", "topk"),
        "SPARSE": weighting in ("normalized", "raw", "entmax", "topk"),
        "BASE": LOG2E if weighting == "softmax" else 1.0,
    }


def _power_class(alpha: float) -> int:
    """Return which formula raises to e = 1/(alpha − 1): 1 for e = 1, 2 for 2, 3 above, else 0."""
    return {2.0: 1, 1.5: 2}.get(alpha, 3 if alpha < 1.5 else 0)


def as_row_major(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
