"""The fault of a key that no row has, with the keys that are near it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from qkv.database.table import cells
from qkv.errors import QkvError
from qkv.frameworks import is_array


class KeyNotFoundError(QkvError, KeyError):
    """No row has the key. Its text names the nearest keys, looked up when it is read."""

    def __init__(self, key: Any, nearest: Callable[[], Sequence[Any]]):
        super().__init__(key)
        self.key, self._find_nearest = key, nearest

    @property
    def nearest_keys(self) -> list[Any]:
        try:
            return list(self._find_nearest())
        except QkvError:
            return []

    def __reduce__(self) -> Any:
        return KeyNotFoundError, (self.key, partial(list, self.nearest_keys))

    def __str__(self) -> str:
        near, told = self.nearest_keys, f"no row has the key {cells.format_cell(self.key)}"
        if is_array(self.key) and any(np.array_equal(self.key, other) for other in near):
            return f"{told}: a row is kept with it, rounded: find it by the numbers that were added"
        hint = f": the nearest are {', '.join(map(cells.format_cell, near))}" if near else ""
        return f"{told}{hint}"
