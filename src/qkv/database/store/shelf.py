"""Shelves: where immutable files are kept, a folder or memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from qkv.arrays.ragged import joined
from qkv.database.faults import unwritable
from qkv.database.store import plain, segments
from qkv.database.store.layout import IDS, Layout, Tensor, Tensors, named, storable
from qkv.database.store.segments import Column, Entry, Notes, Segment
from qkv.log import listener


class Files:
    """The calls that make a file durable. Tests put a file system that forgets in their place."""

    def write(self, path: Path, chunks: Iterable[Any]) -> None:
        with open(path, "wb", opener=plain.opened) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            self.fsync(file.fileno(), path)

    def fsync(self, file: int, path: Path) -> None:
        os.fsync(file)

    def sync(self, path: Path) -> None:
        """Make a file durable that somebody else has written."""
        file = os.open(path, os.O_RDONLY)
        try:
            self.fsync(file, path)
        finally:
            os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def fsync_folder(self, folder: Path) -> None:
        self.sync(folder)


class Memory:
    """A shelf in memory: what was put there is never cut or changed, and goes with the process."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._arrays: dict[str, dict[str, np.ndarray]] = {}

    def put(
        self, file: str, layout: Layout, parts: Sequence[Segment], notes: Notes
    ) -> tuple[int, bytes]:
        """Keep the parts as one segment; give its size and checksum."""
        ids = _joined([part.ids for part in parts])
        tensors: dict[str, Tensor] = {
            n: (joined if n == layout.ragged else _joined)([part.tensors[n] for part in parts])
            for n in layout.names
        }
        self._segments[file] = Segment(ids, tensors)
        return ids.nbytes + sum(tensor.nbytes for tensor in tensors.values()), b""

    def put_arrays(self, file: str, arrays: Tensors, notes: Notes) -> tuple[int, bytes]:
        for name, array in arrays.items():
            named(name)
            storable(name, array, least=0)
        self._arrays[file] = {name: _joined([array]) for name, array in arrays.items()}
        return sum(array.nbytes for array in arrays.values()), b""

    def settle(self) -> None:
        """After this, what was put survives a loss of power, on a disk."""

    def get(self, entry: Entry, layout: Layout) -> Segment:
        return self._segments[entry.file]

    def get_arrays(self, file: str, size: int) -> dict[str, np.ndarray]:
        return dict(self._arrays[file])

    def verify(self, file: str, size: int, checksum: bytes) -> None:
        """Read all of a file and raise `Damaged` where it is not what was written."""

    def discard(self, file: str) -> OSError | None:
        """Remove a file; returns why that failed."""
        self._segments.pop(file, None)
        self._arrays.pop(file, None)
        return None

    def files(self) -> list[str]:
        """The names of all segments, arrays and temporary files that are there."""
        return [*self._segments, *self._arrays]


class Disk:
    """A shelf in a folder: written under another name, synced, renamed; read through a map."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._folder = folder
        self._files = files or Files()
        self._open: WeakValueDictionary[str, Segment] = WeakValueDictionary()

    def put(
        self, file: str, layout: Layout, parts: Sequence[Segment], notes: Notes
    ) -> tuple[int, bytes]:
        rows = sum(len(part.ids) for part in parts)
        columns: list[Column] = [(IDS, np.dtype("<i8"), (rows,), [part.ids for part in parts])]
        ragged = layout.ragged
        if ragged is not None:
            whole = joined([part.tensors[ragged] for part in parts])
            columns.append((ragged + segments.STARTS, np.dtype("<i8"), (rows + 1,), [whole.starts]))
        for name, dtype, dims in layout.fields:
            if name == ragged:
                columns.append((name, dtype, whole.flat.shape, [whole.flat]))
            else:
                some = [np.asarray(part.tensors[name]) for part in parts]
                columns.append((name, dtype, (rows, *dims), some))
        return self._put(file, columns, {**notes, "layout": layout.text()})

    def put_arrays(self, file: str, arrays: Tensors, notes: Notes) -> tuple[int, bytes]:
        columns: list[Column] = []
        for name, array in arrays.items():
            named(name)
            columns.append((name, storable(name, array, least=0), array.shape, [array]))
        columns.sort(key=lambda column: (-column[1].itemsize, column[0]))
        return self._put(file, columns, notes)

    def settle(self) -> None:
        try:
            self._files.fsync_folder(self._folder)
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def get(self, entry: Entry, layout: Layout) -> Segment:
        segment = self._open.get(entry.file)
        if segment is None or segment.cut:
            segment = segments.open_segment(self._path(entry.file), entry, layout)
            self._open[entry.file] = segment
            if log := listener():
                log.debug("read %s: %d rows", self._path(entry.file), entry.rows)
        return segment

    def get_arrays(self, file: str, size: int) -> dict[str, np.ndarray]:
        if log := listener():
            log.debug("read %s: arrays of the encoder", self._path(file))
        return segments.open_arrays(self._path(file), size)

    def verify(self, file: str, size: int, checksum: bytes) -> None:
        path = self._path(file)
        found = sha256()
        length = 0
        try:
            with open(path, "rb", opener=plain.opened) as source:
                while chunk := source.read(segments.CHUNK):
                    length += len(chunk)
                    found.update(chunk)
        except OSError as error:
            raise segments.unreadable(path, error) from error
        if length != size:
            raise segments.damaged(path, f"it has {length:,} bytes, and {size:,} were written")
        if found.digest() != checksum:
            raise segments.damaged(
                path, "its content is not what was written (the checksum differs)"
            )

    def discard(self, file: str) -> OSError | None:
        self._open.pop(file, None)
        # What cannot be removed now is removed by the next writer.
        try:
            self._files.unlink(self._path(file))
        except OSError as error:
            return error
        return None

    def files(self) -> list[str]:
        return sorted(
            name
            for name in plain.names(self._folder)
            if name.endswith((segments.SUFFIX, segments.SUFFIX + segments.TEMPORARY))
        )

    def _path(self, file: str) -> Path:
        # A catalogue from elsewhere must not name files outside of its folder.
        if segments.number(file.removesuffix(segments.TEMPORARY)) is None:
            raise segments.damaged(self._folder / "catalogue.sqlite", f"it names the file {file!r}")
        return self._folder / file

    def _put(self, file: str, columns: Sequence[Column], notes: Notes) -> tuple[int, bytes]:
        checksum = sha256()
        length = 0

        def summed() -> Iterator[Any]:
            nonlocal length
            for chunk in segments.chunks(columns, notes):
                checksum.update(chunk)
                length += len(chunk)
                yield chunk

        path = self._path(file)
        temporary = self._path(file + segments.TEMPORARY)
        try:
            self._files.write(temporary, summed())
            self._files.rename(temporary, path)
        except OSError as error:
            raise unwritable(path, error) from error
        return length, checksum.digest()


Shelf = Memory | Disk


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One array of one's own that nobody can change."""
    joined = np.array(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)
    joined.flags.writeable = False
    return joined
