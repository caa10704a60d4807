"""What kernels are told, by name: records of strides and numbers, and one of all that they are
compiled for.

A kernel takes `Arrays`, `Scales`, `Strides` and `Sizes` each as one tuple.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from qkv.engines.triton.tiles import clamp

IS_INTERPRETED = type(clamp).__name__ == "InterpretedFunction"


class Constexprs:
    """What a kernel is compiled for, its parameter `F`: in the kernel, F.NAME is a constexpr."""

    def __init__(self, names: Iterable[str], known: Iterable[Any]) -> None:
        named = dict(zip(names, known, strict=True))
        self.values = tuple(named.values())
        self.description = "_".join(f"{name}{x}" for name, x in named.items())
        for name, x in named.items():
            setattr(self, name, x if IS_INTERPRETED else tl.constexpr(x))

    def __repr__(self) -> str:
        """All of it: Triton tells by this what it has compiled."""
        return self.description


_INTERNED_CONSTEXPRS: dict[Any, Constexprs] = {}


def intern_constexprs(named: dict[str, Any]) -> Constexprs:
    """The facts of these names: one object for equal ones."""
    key = (tuple(named), tuple(named.values()))
    found = _INTERNED_CONSTEXPRS.get(key)
    if found is None:
        found = _INTERNED_CONSTEXPRS[key] = Constexprs(*key)
    return found


class Arrays(NamedTuple):
    """The arrays of a call, as the operators take them; those that may be None are told of in
    `attend_operator`."""

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


ARRAY_COUNT = len(Arrays._fields)


class Scales(NamedTuple):
    """Of φ·ψ, entmax's alpha, of the mask's array, and of weights that a dropout keeps."""

    scale: float
    alpha: float
    times: float
    share: float


Strides = namedtuple(
    "Strides",
    "q_b q_h q_n k_b k_h k_m v_b v_h v_m bias_b bias_h gate_b gate_h p_b p_h p_n p_m o_b o_h "
    "o_n o_m a_b a_h a_n",
    defaults=(0, 0, 0, 0, 0, 0, 0),
)
"""Of query, key, value, bias, gate and mask by batch, head, row and key; of a result, and of what
the gradient of weights reads."""

_untyped_namedtuple: Any = namedtuple  # mypy knows fields that are spelled alone
Sizes = _untyped_namedtuple(
    "Sizes",
    "n m heads group rows_n lower upper size columns dropped hashed at_columns splits span",
    defaults=(0, 0, 0, 1, 0, 1, 0),
)
"""What is not compiled for. Rows are those of a lane, which is a batch and one of `heads`; the
layout's blocks are of `size`, `columns` in a line; `hashed` heads make a batch of a dropout's; a
loop is done in `splits` of `span` tiles."""

NarrowSizes = _untyped_namedtuple("NarrowSizes", Sizes._fields)
"""The same where even rows are compiled for: else 200 columns take ptxas 26 s and not 3."""

SPECIALIZED_SIZES = {Sizes: (2, 3), NarrowSizes: (0, 2, 3, 4)}
"""Which of them are compiled for nevertheless: heads and group, and n and rows_n."""

QueryTile = namedtuple("QueryTile", "base offset held i a cap row_a row_b pairs at drawn width")
"""A tile of queries: where they are, φ(q) (ROWS, w) or `tanh.UnitTile`, and of each (ROWS, 1) its
position, the gate's half, its cap, its thresholds, its place in the mask's array from `pairs`, and
its hash; φ has `width` columns."""

TilePosition = namedtuple("TilePosition", "batch head shared line row inside first last")
"""Where the tile lies: its batch, the head of each row, that of the keys, each row's line in an
array of one number a row, its position, whether it exists, and the first and the last."""

KeyRange = namedtuple("KeyRange", "base step value v_m bias gate_key layout at p_m end side")
"""The keys of a head and what belongs to them, with the step from key to key; those of them that
count end at `end`, and `at` lists the tiles of a layout, or the keys that are weighed. `side` is
`tanh.UnitSide` of them."""
