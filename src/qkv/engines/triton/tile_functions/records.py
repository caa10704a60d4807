"""Records of kernel arguments: arrays, scales, strides, sizes and compile-time constants.

A kernel takes `Arrays`, `Scales`, `Strides` and `Sizes` as one tuple each.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from qkv.engines.triton.pair_functions.expressions import MAX_NUMBERS
from qkv.engines.triton.tile_functions.tiles import clamp
from qkv.util.caches import create_table

IS_INTERPRETED = type(clamp).__name__ == "InterpretedFunction"


class Constexprs:
    """The compile-time constants of a kernel, its parameter `F`; F.NAME is a constexpr."""

    def __init__(self, names: Iterable[str], known: Iterable[Any]) -> None:
        named = dict(zip(names, known, strict=True))
        self.values = tuple(named.values())
        self.description = "_".join(f"{name}{x}" for name, x in named.items())
        for name, x in named.items():
            setattr(self, name, x if IS_INTERPRETED else tl.constexpr(x))

    def __repr__(self) -> str:
        """Return all names and values: Triton's cache keys contain this."""
        return self.description


_INTERNED_CONSTEXPRS: dict[Any, Constexprs] = create_table("triton.constexprs")


def intern_constexprs(named: dict[str, Any]) -> Constexprs:
    """Return one `Constexprs` object for equal names and values."""
    key = (tuple(named), tuple(named.values()))
    found = _INTERNED_CONSTEXPRS.get(key)
    if found is None:
        found = _INTERNED_CONSTEXPRS[key] = Constexprs(*key)
    return found


class Arrays(NamedTuple):
    """The array arguments of the operators; `attend_operator` describes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor | None = None
    gate_query: Tensor | None = None
    gate_key: Tensor | None = None
    row_a: Tensor | None = None
    row_b: Tensor | None = None
    lengths: Tensor | None = None
    layout: Tensor | None = None
    pairs: Tensor | None = None
    seed: Tensor | None = None
    lists: Tensor | None = None
    marks: Tensor | None = None
    width: Tensor | None = None
    caps: Tensor | None = None
    captured_floats: Tensor | None = None
    captured_integers: Tensor | None = None
    query_terms: Tensor | None = None
    key_terms: Tensor | None = None
    key_spans: Tensor | None = None
    query_spans: Tensor | None = None
    pages: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


ARRAY_COUNT = len(Arrays._fields)


class Scales(NamedTuple):
    """Factors: of φ·ψ, entmax's alpha, of the mask array, of weights that survive dropout, and of
    squared distances; and the score of entmax's sink."""

    scale: float
    alpha: float
    times: float
    share: float
    square_scale: float = 1.0
    sink: float = 0.0


Strides = namedtuple(
    "Strides",
    "q_b q_h q_n k_b k_h k_m v_b v_h v_m bias_b bias_h gate_b gate_h p_b p_h p_n p_m o_b o_h "
    "o_n o_m a_b a_h a_n",
    defaults=(0, 0, 0, 0, 0, 0, 0),
)
"""Strides by batch (b), head (h), query row (n) and key (m): of query, key, value, bias, gate, mask
array (p), result (o), and of the gradient of weights (a)."""

_untyped_namedtuple: Any = namedtuple  # mypy needs literal field names
Sizes = _untyped_namedtuple(
    "Sizes",
    "n m heads group rows_n lower upper size columns dropped hashed at_columns splits span",
    defaults=(0, 0, 0, 1, 0, 1, 0),
)
"""Sizes that kernels are not compiled for. A lane is one batch and one of `heads`; it has `rows_n`
rows. The layout has blocks of `size` and `columns` blocks per row. `hashed` is the number of heads
per batch in the hash of dropout. A loop has `splits` parts of `span` tiles."""

NarrowSizes = _untyped_namedtuple("NarrowSizes", Sizes._fields)
"""`Sizes` for kernels that are also compiled for n and rows_n. With 200 columns, ptxas then takes
3 s instead of 26 s."""

_pair_fields = (*Sizes._fields, "list_b", "list_h", *(f"c{i}" for i in range(MAX_NUMBERS)))
PairSizes = _untyped_namedtuple("PairSizes", _pair_fields)
"""The sizes of a call with pair functions or tile lists. The lists of a lane start at batch ·
list_b + head · list_h. c0 … are the numbers of `pair_functions.functions.CapturedArrays`."""

NarrowPairSizes = _untyped_namedtuple("NarrowPairSizes", _pair_fields)
"""The same, compiled for n and rows_n too."""

NARROW_SIZES = {Sizes: NarrowSizes, PairSizes: NarrowPairSizes}

SPECIALIZED_SIZES = {
    Sizes: (2, 3), NarrowSizes: (0, 2, 3, 4), PairSizes: (2, 3), NarrowPairSizes: (0, 2, 3, 4),
}  # fmt: skip
"""Indices of the sizes that kernels are compiled for: heads and group; also n and rows_n."""

RowScales = namedtuple("RowScales", "key value")
"""The factors of the rows of keys and values that are stored as codes of 8 bits."""

QueryTile = namedtuple(
    "QueryTile",
    "base offset held i a cap row_a row_b pairs at drawn width b h captured terms near top",
)
"""A tile of queries.

- base, offset: pointer (or descriptor) of the rows and the offset of each.
- held: φ(q) (ROWS, w), or a `tanh.UnitTile`. width: columns of φ.
- (ROWS, 1) each: i position, a gate half, cap, row_a and row_b thresholds, at offset in `pairs`,
  drawn dropout hash; with F.TOPPED the largest score in base 2 (top), which is 0 in an empty row.
- b, h, captured: batch, head and `CapturedPointers`, for pair functions.
- terms: of a window ‖φ‖² (ROWS, 1). For Laplace and exact match the pointer to the columns of the
  lane, and `near` is where those of each row begin (`distance.locate_columns`).
"""

CapturedPointers = namedtuple("CapturedPointers", "captured_floats captured_integers")
"""The arrays that pair functions read."""

TilePosition = namedtuple("TilePosition", "batch head shared line row inside first last")
"""The position of a tile: its batch, the head of each row, the head of the keys (shared), the index
of each row in an array with one number per row (line), the row's position, whether it exists
(inside), and the first and last position."""

KeyRange = namedtuple(
    "KeyRange",
    "base step value v_m bias gate_key layout spans at p_m end side terms source squares pages "
    "head scales",
)
"""The keys of a head, their values, bias and gate, with strides. Keys from `end` on do not count.
`at` lists the tiles of a layout, or the keys of a support list. `side` is a `tanh.UnitSide`.
`terms` is that of `QueryTile`, for all keys of the head. `source` is the pointer of the keys, and
`squares`, with F.LINED, a descriptor of the terms of a window. `spans` holds the first key
of each query, then the ends. `pages` are those of the batch, `head` is the head of the keys, and
`scales` are the pointers to the scales of keys and values."""
