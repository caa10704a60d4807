"""A draft: files that are written and not yet in the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Lock

import numpy as np

from qkv.arrays import threads
from qkv.database.store import sizes
from qkv.database.store.bundles import GENERATION, LAYOUT
from qkv.database.store.catalogue import SEGMENT, Catalogue
from qkv.database.store.layout import Layout, Tensors
from qkv.database.store.segments import SUFFIX, Entry, Segment, cut
from qkv.database.store.shelf import Shelf
from qkv.types import releasing

LARGE = 32 << 20
"""Bytes of rows from which a thread of its own pays for writing them."""


class Draft:
    """New files of a generation, numbered from `files` on.

    Each says of itself under which `settings` it was written, for the day that the catalogue is
    lost.
    """

    def __init__(self, shelf: Shelf, generation: int, files: int, settings: str) -> None:
        self.generation = generation
        self.files = files
        self._shelf = shelf
        self._settings = settings
        self._entries: list[Entry] = []
        self._arrays: tuple[str, int, bytes] | None = None
        self._given_up = False
        self._naming = Lock()

    def segments(self, layout: Layout, rows: Iterable[Segment]) -> None:
        """Write rows, cut into segments."""
        most = max(1, sizes.SEGMENT_BYTES // (layout.row_bytes + 8))
        for group in cut(rows, most):
            if self._given_up:
                return
            self._put("segment", self.generation, layout, group)

    def bundle(self, rows: Segment) -> None:
        """Write the digests and records of many rows."""
        self._put("rows", GENERATION, LAYOUT, [rows])

    def _put(self, kind: str, generation: int, layout: Layout, parts: list[Segment]) -> None:
        file = self._name(kind)
        size, checksum = self._shelf.put(file, layout, parts, self._notes(generation))
        first, last = int(parts[0].ids[0]), int(parts[-1].ids[-1])
        count = sum(len(part.ids) for part in parts)
        self._entries.append(Entry(file, generation, first, last, count, size, checksum))

    @releasing
    def beside(self, layout: Layout | None, rows: list[Segment]) -> Iterator[Callable[[], None]]:
        """Write rows as segments while the body of the `with` goes on; what it gives waits for
        them. Few are written before it begins."""
        if layout is None or sum(len(part.ids) for part in rows) * layout.row_bytes < LARGE:
            if layout is not None and rows:
                self.segments(layout, rows)
            yield lambda: None
            return
        written = threads.begin(self.segments, layout, rows)
        try:
            yield written
        except BaseException:
            self._given_up = True
            with suppress(Exception):  # of which the first is told
                written()
            raise

    def fix(self, arrays: Tensors) -> None:
        """Write the arrays of the generation."""
        file = self._name("arrays")
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._arrays = (file, *self._shelf.put_arrays(file, arrays, self._notes(self.generation)))

    def settle(self) -> None:
        """Make all of it durable: before this, the catalogue must not speak of it."""
        if self._entries or self._arrays:
            self._shelf.settle()

    def enter(self, catalogue: Catalogue) -> None:
        """Make the files part of the store, inside a transaction."""
        if self._entries or self._arrays:
            catalogue.run("UPDATE counters SET files = ?", self.files)
            marks = "?, ?, ?, ?, ?, ?, ?"
            catalogue.many(f"INSERT INTO segments ({SEGMENT}) VALUES ({marks})", self._entries)
        if self._arrays:
            catalogue.run(
                "UPDATE generations SET arrays = ?, bytes = ?, checksum = ? WHERE number = ?",
                *self._arrays,
                self.generation,
            )

    def _notes(self, generation: int) -> dict[str, str]:
        return {"generation": str(generation), "settings": self._settings}

    def _name(self, kind: str) -> str:
        with self._naming:
            self.files += 1
            return f"{kind}-{self.files - 1:08d}{SUFFIX}"
