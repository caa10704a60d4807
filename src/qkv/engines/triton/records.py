"""What kernels are told, by name: records of strides and numbers, and one of all that they are
compiled for.

A kernel takes `Arrays`, `Scales` and `Strides` each as one tuple. Sizes are flat among its
parameters, since Triton compiles anew for members of a tuple that are 1 or multiples of 16; inside
they go on as `Sizes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from qkv.engines.triton.tiles import clamp

INTERPRETED = type(clamp).__name__ == "InterpretedFunction"


class Facts:
    """What a kernel is compiled for, its parameter `F`: in the kernel, F.NAME is a constexpr."""

    def __init__(self, names: Iterable[str], known: Iterable[Any]) -> None:
        named = dict(zip(names, known, strict=True))
        self.known = tuple(named.values())
        self.told = "_".join(f"{name}{x}" for name, x in named.items())
        for name, x in named.items():
            setattr(self, name, x if INTERPRETED else tl.constexpr(x))

    def __repr__(self) -> str:
        """All of it: Triton tells by this what it has compiled."""
        return self.told


_FACTS: dict[Any, Facts] = {}


def facts_of(named: dict[str, Any]) -> Facts:
    """The facts of these names: one object for equal ones."""
    key = (tuple(named), tuple(named.values()))
    found = _FACTS.get(key)
    if found is None:
        found = _FACTS[key] = Facts(*key)
    return found


class Arrays(NamedTuple):
    """The arrays of a call, as the operators take them; those that may be None are told of in
    `ops.attend`."""

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


ARRAYS = len(Arrays._fields)


class Scales(NamedTuple):
    """Of φ·ψ, entmax's alpha, of the mask's array, and of weights that a dropout keeps."""

    scale: float
    alpha: float
    times: float
    share: float


class Strides(NamedTuple):
    """Of query, key, value, bias, gate and mask by batch, head, row and key; of a result."""

    q_b: int
    q_h: int
    q_n: int
    k_b: int
    k_h: int
    k_m: int
    v_b: int
    v_h: int
    v_m: int
    bias_b: int
    bias_h: int
    gate_b: int
    gate_h: int
    p_b: int
    p_h: int
    p_n: int
    p_m: int
    o_b: int = 0
    o_h: int = 0
    o_n: int = 0
    o_m: int = 0


class Sizes(NamedTuple):
    """What is not compiled for. Rows are those of a lane, which is a batch and one of `heads`; the
    layout's blocks are of `size`, `columns` in a line; `hashed` heads make a batch of a dropout's;
    a loop is done in `splits` of `span` tiles."""

    n: Any
    m: Any
    heads: Any
    group: Any
    rows_n: Any
    lower: Any
    upper: Any
    size: Any = 0
    columns: Any = 0
    dropped: Any = 0
    hashed: Any = 1
    at_columns: Any = 0
    splits: Any = 1
    span: Any = 0


class Rows(NamedTuple):
    """A tile of queries: where they are, φ(q) (ROWS, w) or `tanh.Units`, and of each (ROWS, 1) its
    position, the gate's half, its thresholds, its place in the mask's array from `pairs`, and its
    hash."""

    query: Any
    offset: Any
    q: Any
    i: Any
    a: Any
    row_a: Any
    row_b: Any
    pairs: Any
    at: Any
    drawn: Any


class Spot(NamedTuple):
    """Where the tile lies: its batch, the head of each row, that of the keys, each row's line in an
    array of one number a row, its position, whether it exists, and the first and the last."""

    batch: Any
    head: Any
    shared: Any
    line: Any
    row: Any
    inside: Any
    first: Any
    last: Any


class Keys(NamedTuple):
    """The keys of a head and what belongs to them, with the step from key to key; those of them
    that count end at `end`, and `at` lists the tiles of a layout, or the keys that are weighed.
    `side` is `tanh.Side` of them."""

    key: Any
    k_m: Any
    value: Any
    v_m: Any
    bias: Any
    gate_key: Any
    layout: Any
    at: Any
    p_m: Any
    end: Any
    side: Any
