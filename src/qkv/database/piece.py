"""Rows that lie together, and their columns as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.database import columns
from qkv.database.cells import loads
from qkv.database.columns import MISSING, OTHER, Column
from qkv.database.compare import Texts, texts_of
from qkv.database.store.segments import Segment
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.database.view import View

AT_ONCE = 8192
"""Records that are read together."""

TEXTS = 2**27
"""Bytes of columns of text that are kept, once a condition has read them."""


class Piece:
    """Rows that lie together, whose columns are looked at."""

    def __init__(
        self, view: View, part: Segment, census: Callable[[str], np.ndarray] | None = None
    ):
        self._view, self._part, self.census = view, part, census or view.census
        self.ids = part.ids if part.live is None else part.ids[part.live]

    def __len__(self) -> int:
        return len(self.ids)

    def cells(self, name: str, at: np.ndarray | slice) -> list[Any]:
        """The cells themselves of the rows at these places."""
        ids, found = self.ids[at], []
        for start in range(0, len(ids), AT_ONCE):
            texts = self._view.snapshot.records(ids[start : start + AT_ONCE])
            found += [loads(text).get(name) for text in texts]
        return found

    def column(self, name: str) -> Column:
        if name in self._view.schema.vectors:
            raise ArgumentError(
                f"where: column {name!r} holds vectors, and text, numbers and dates are compared: "
                "ask for the vectors nearest to yours"
            )
        return self._kept(name)

    def texts(self, name: str) -> Texts:
        """As `texts_of` has them, kept."""
        kept, mark = self._view.texts, (name, int(self.ids[0]) if len(self) else -1, len(self))
        found = kept.get(mark)
        if found is None:
            found = texts_of(self, name)
            if sum(some.size for some in (*kept.values(), found)) <= TEXTS:
                kept[mark] = found
        return found

    def kinds(self, name: str) -> np.ndarray:
        """What each cell is, of a column of vectors too: of the keys none is missing."""
        if self._view.schema.vectors.get(name) == "key":
            return np.full(len(self), OTHER, np.uint8)
        return self._kept(name).kinds

    def _kept(self, name: str) -> Column:
        found, live = columns.found(self._part.tensors, name), self._part.live
        return found if live is None else found.some(live)

    def present(self) -> np.ndarray:
        """Which rows have a value."""
        schema = self._view.schema
        missing = [self.kinds(name) == MISSING for name in schema.value]
        join = np.logical_or if schema.pools else np.logical_and
        return np.asarray(~join.reduce(missing))


def some_value(view: View) -> bool:
    """Whether any row has a value; the first that has one tells."""
    parts = view.snapshot.parts(window=AT_ONCE)
    return any(bool(Piece(view, part).present().any()) for part in parts)
