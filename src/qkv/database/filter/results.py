"""The cached results of conditions: which rows of a store pass, one block of rows at a time.

A row never changes under its id, and deleted rows never return. So the live rows of a block are
known by their first id, their last id and their number, and the result of a condition for them
stays valid in every version. A new version evaluates only blocks that gained or lost rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from qkv.util import caches

MAX_RESULT_BYTES = 2**26
"""Bytes of the results of one store, one per row and condition."""


class FilterResults:
    """The results of conditions for blocks of rows of one store."""

    def __init__(self) -> None:
        self._results: dict[Hashable, np.ndarray] = {}
        self._size = 0

    def find_or_evaluate(
        self, condition: Hashable, ids: np.ndarray, evaluate: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return which of the rows with these ids pass; evaluate the condition if necessary.

        `condition` identifies the condition and all that it depends on besides the rows.
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
    """Return the results of a store, which is identified by an object that its versions share."""
    return _RESULTS_BY_STORE.setdefault(store, FilterResults())
