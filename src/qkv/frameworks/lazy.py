"""Arrays that are made when they are read, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from time import monotonic, sleep
from typing import Any, Generic

import numpy as np

from qkv.util.types import T

ITEMS_PER_BATCH = 8192
"""Things that are made together."""

MAX_WAIT_SECONDS = 1.0
"""Seconds that they wait at most: a fork may have left the threads behind that make arrays."""

_ACTIVE_BUILDERS: set[object] = set()
"""Who makes arrays: a thread that works in the interpreter meanwhile would let each of their many
short operations wait for its lock. No event of threading, whose lock Ctrl-C may leave taken."""

BuildRows = Callable[[int, int], Mapping[str, np.ndarray]]
"""(start, stop) → arrays by name, each with those rows."""


class LazyArray:
    """Rows of one of several arrays that are made together; NumPy reads it as an array."""

    def __init__(self, make: BuildRows, name: str, like: np.ndarray, start: int, stop: int) -> None:
        self.dtype, self.shape = like.dtype, (stop - start, *like.shape[1:])
        self._make, self._name, self._like = make, name, like
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, rows: slice) -> LazyArray:
        start, stop, _ = rows.indices(len(self))
        first = self._start
        return LazyArray(
            self._make, self._name, self._like, first + start, first + max(start, stop)
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        mark = object()
        try:
            _ACTIVE_BUILDERS.add(mark)
            array = self._make(self._start, self._stop)[self._name]
        finally:
            _ACTIVE_BUILDERS.discard(mark)
        return array if dtype is None else array.astype(dtype, copy=False)


class LazySequence(Collection[T], Generic[T]):
    """So many things that are made, some at a time, when somebody goes through them, and while no
    arrays are made.

    >>> squares = LazySequence(3, lambda start, stop: [i * i for i in range(start, stop)])
    >>> len(squares), list(squares), 4 in squares
    (3, [0, 1, 4], True)
    """

    def __init__(self, count: int, make: Callable[[int, int], Collection[T]]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        found: list[T] = []
        for start in range(0, self._count, ITEMS_PER_BATCH):
            until = monotonic() + MAX_WAIT_SECONDS
            while _ACTIVE_BUILDERS and monotonic() < until:
                sleep(0.001)
            found += self._make(start, min(start + ITEMS_PER_BATCH, self._count))
        return iter(found)

    def __contains__(self, thing: object) -> bool:
        return thing in list(self)


def lazy_arrays(make: BuildRows, rows: int) -> dict[str, LazyArray]:
    """The arrays of so many rows, each made when it is read; those of the rows that were read last
    are kept, so that they are made once for all names.

    >>> arrays = lazy_arrays(lambda i, j: {"x": np.arange(i, j), "y": np.ones((j - i, 2))}, 9)
    >>> arrays["y"].shape, np.asarray(arrays["x"][2:8][:3]).tolist()
    ((9, 2), [2, 3, 4])
    """
    once = lru_cache(maxsize=1)(make)
    return {name: LazyArray(once, name, like, 0, rows) for name, like in make(0, 1).items()}
