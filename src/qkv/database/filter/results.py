"""A cache of the results of conditions: which rows of a store pass, for each block of rows.

A row with a given id never changes, and a deleted row never returns. So the first id, the last id
and the number of live rows identify the live rows of a block. The result of a condition for them is
valid in every version of the store. In a new version, a condition is evaluated only for blocks in
which rows were added or deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from qkv.util import caches

MAX_RESULT_BYTES = 2**26
"""The size of the cache of one store, with one byte per row and condition."""


class FilterResults:
    """The cached results of conditions for blocks of rows of one store."""

    def __init__(self) -> None:
        self._results: dict[Hashable, np.ndarray] = {}
        self._size = 0

    def find_or_evaluate(
        self, condition: Hashable, ids: np.ndarray, evaluate: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return a mask of the rows with these ids that pass, from the cache or from `evaluate`.

        `condition` identifies the condition and everything else that its result depends on, except
        the rows.
        """
        if not len(ids):
            return evaluate()
        identity = condition, int(ids[0]), int(ids[-1]), len(ids)
        passes = self._results.get(identity)
        if passes is None:
            passes = evaluate()
            if self._size + passes.nbytes > MAX_RESULT_BYTES:
                self._results, self._size = {}, 0
            self._results[identity] = passes
            self._size += passes.nbytes
        return passes


_RESULTS_BY_STORE: WeakKeyDictionary[Any, FilterResults] = WeakKeyDictionary()
caches.register("database.filter_results", _RESULTS_BY_STORE)


def results_of_store(store: Any) -> FilterResults:
    """Return the cached results of a store.

    `store` is an object that all versions of the store share.
    """
    return _RESULTS_BY_STORE.setdefault(store, FilterResults())
