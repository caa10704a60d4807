"""The words that every floor shares: arrays, spans of rows, blocks of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Array: TypeAlias = Any
"""An array of any framework. No common base class exists, so this is a name for the reader."""

Shape: TypeAlias = tuple[int, ...]

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with how much is done, and of how much where that is known."""


class Span(NamedTuple):
    """Rows `start … start + size` of one axis.

    Where a framework needs spans of one size, the last overlaps its neighbour, and `first` is the
    first row that was not counted there. `open` says that no mask needs to be looked at.
    """

    start: Any
    size: int
    first: Any = None
    open: bool = False


@dataclass(frozen=True)
class Block:
    """Where a block of scores lies inside the n × m of a call.

    `q` (r, 1) and `k` (1, c) are the positions of its queries and keys, `b` and `h` those of
    its batch and head, shaped to broadcast against (…, r, c), which has `axes` leading axes.
    """

    rows: Span
    cols: Span
    n: int
    m: int
    q: Array
    k: Array
    b: Array
    h: Array
    axes: int = 0
