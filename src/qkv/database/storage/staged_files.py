"""A draft: files that are written and not yet in the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Lock

import numpy as np

from qkv.database.storage import limits
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.bundles import BUNDLE_GENERATION, BUNDLE_LAYOUT
from qkv.database.storage.catalog import SEGMENT_COLUMNS, Catalog
from qkv.database.storage.layout import Layout, Tensors
from qkv.database.storage.segments import SEGMENT_SUFFIX, Segment, SegmentEntry, split_segments
from qkv.frameworks import threads
from qkv.util.types import interruptible_contextmanager

MIN_THREAD_BYTES = 32 << 20
"""Bytes of rows from which a thread of its own pays for writing them."""


class StagedFiles:
    """New files of a generation, numbered from `next_file_number` on.

    Each says of itself under which `settings` it was written, for the day that the catalogue is
    lost.
    """

    def __init__(self, shelf: BlobStorage, generation: int, files: int, settings: str) -> None:
        self.generation = generation
        self.next_file_number = files
        self._blob_storage = shelf
        self._settings = settings
        self._entries: list[SegmentEntry] = []
        self._array_file: tuple[str, int, bytes] | None = None
        self._is_cancelled = False
        self._name_lock = Lock()

    def write_segments(self, layout: Layout, rows: Iterable[Segment]) -> None:
        """Write rows, cut into segments."""
        most = max(1, limits.MAX_SEGMENT_BYTES // (layout.row_bytes + 8))
        for group in split_segments(rows, most):
            if self._is_cancelled:
                return
            self._write_file("segment", self.generation, layout, group)

    def write_bundle(self, rows: Segment) -> None:
        """Write the digests and records of many rows."""
        self._write_file("rows", BUNDLE_GENERATION, BUNDLE_LAYOUT, [rows])

    def _write_file(self, kind: str, generation: int, layout: Layout, parts: list[Segment]) -> None:
        file = self._next_file_name(kind)
        size, checksum = self._blob_storage.write_segment(
            file, layout, parts, self._file_metadata(generation)
        )
        first, last = int(parts[0].ids[0]), int(parts[-1].ids[-1])
        count = sum(len(part.ids) for part in parts)
        self._entries.append(SegmentEntry(file, generation, first, last, count, size, checksum))

    @interruptible_contextmanager
    def write_in_background(
        self, layout: Layout | None, rows: list[Segment]
    ) -> Iterator[Callable[[], None]]:
        """Write rows as segments while the body of the `with` goes on; what it gives waits for
        them. Few are written before it begins."""
        if (
            layout is None
            or sum(len(part.ids) for part in rows) * layout.row_bytes < MIN_THREAD_BYTES
        ):
            if layout is not None and rows:
                self.write_segments(layout, rows)
            yield lambda: None
            return
        written = threads.submit_job(self.write_segments, layout, rows)
        try:
            yield written
        except BaseException:
            self._is_cancelled = True
            with suppress(Exception):  # of which the first is told
                written()
            raise

    def write_arrays(self, arrays: Tensors) -> None:
        """Write the arrays of the generation."""
        file = self._next_file_name("arrays")
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._array_file = (
            file,
            *self._blob_storage.write_arrays(file, arrays, self._file_metadata(self.generation)),
        )

    def sync_files(self) -> None:
        """Make all of it durable: before this, the catalogue must not speak of it."""
        if self._entries or self._array_file:
            self._blob_storage.sync_storage()

    def register_files(self, catalogue: Catalog) -> None:
        """Make the files part of the store, inside a transaction."""
        if self._entries or self._array_file:
            catalogue.execute("UPDATE counters SET files = ?", self.next_file_number)
            marks = "?, ?, ?, ?, ?, ?, ?"
            catalogue.execute_many(
                f"INSERT INTO segments ({SEGMENT_COLUMNS}) VALUES ({marks})", self._entries
            )
        if self._array_file:
            catalogue.execute(
                "UPDATE generations SET arrays = ?, bytes = ?, checksum = ? WHERE number = ?",
                *self._array_file,
                self.generation,
            )

    def _file_metadata(self, generation: int) -> dict[str, str]:
        return {"generation": str(generation), "settings": self._settings}

    def _next_file_name(self, kind: str) -> str:
        with self._name_lock:
            self.next_file_number += 1
            return f"{kind}-{self.next_file_number - 1:08d}{SEGMENT_SUFFIX}"
