"""Arrays and sequences that are built in batches of rows when they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from time import monotonic, sleep
from typing import Any, Generic

import numpy as np

from qkv.util.types import T

ITEMS_PER_BATCH = 8192
"""The number of items that are built at a time."""

MAX_WAIT_SECONDS = 1.0
"""The longest wait for array builders. After a fork their threads no longer exist."""

_ACTIVE_BUILDERS: set[object] = set()
"""Tokens of running array builders. A `LazySequence` waits until no builder runs: it would delay
each of a builder's many short operations. A threading.Event is not used, because Ctrl-C may leave
its lock taken."""

BuildRows = Callable[[int, int], Mapping[str, np.ndarray]]
"""(start, stop) → arrays by name, each with the rows start … stop − 1."""


class LazyArray:
    """Rows of one of several arrays that are built together. `np.asarray` builds them."""

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
    """A collection of `count` items that are built while it is iterated.

    >>> squares = LazySequence(3, lambda start, stop: [i * i for i in range(start, stop)])
    >>> len(squares), list(squares), 4 in squares
    (3, [0, 1, 4], True)
    """

    def __init__(self, count: int, make: Callable[[int, int], Collection[T]]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        items: list[T] = []
        for start in range(0, self._count, ITEMS_PER_BATCH):
            until = monotonic() + MAX_WAIT_SECONDS
            while _ACTIVE_BUILDERS and monotonic() < until:
                sleep(0.001)
            items += self._make(start, min(start + ITEMS_PER_BATCH, self._count))
        return iter(items)

    def __contains__(self, thing: object) -> bool:
        return thing in list(self)


def lazy_arrays(make: BuildRows, rows: int) -> dict[str, LazyArray]:
    """Return arrays of `rows` rows that are built when they are read.

    The rows that were read last are cached, so that they are built once for all names.

    >>> arrays = lazy_arrays(lambda i, j: {"x": np.arange(i, j), "y": np.ones((j - i, 2))}, 9)
    >>> arrays["y"].shape, np.asarray(arrays["x"][2:8][:3]).tolist()
    ((9, 2), [2, 3, 4])
    """
    last: dict[tuple[int, int], Mapping[str, np.ndarray]] = {}

    def build_once(start: int, stop: int) -> Mapping[str, np.ndarray]:
        arrays = last.get((start, stop))
        if arrays is None:
            arrays = make(start, stop)
            last.clear()
            last[start, stop] = arrays
        return arrays

    return {name: LazyArray(build_once, name, like, 0, rows) for name, like in make(0, 1).items()}
