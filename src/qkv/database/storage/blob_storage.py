"""Storage of the immutable files of a store, in a folder or in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from qkv.database.errors import unwritable_error
from qkv.database.storage import safe_open, segments
from qkv.database.storage.segments import (
    IDS_TENSOR,
    FileColumn,
    FileMetadata,
    Layout,
    Segment,
    SegmentEntry,
    Tensor,
    Tensors,
    check_tensor_name,
    index_file,
    storage_dtype,
)
from qkv.frameworks.ragged import concat_ragged
from qkv.util.logging import debug_logger

SegmentIndexData = tuple[Segment, dict[str, str]]
"""The arrays and the metadata of a segment's index."""


class FileSystem:
    """The system calls that write files durably.

    Tests replace this class to simulate a power loss.
    """

    def write(self, path: Path, chunks: Iterable[Any]) -> None:
        """Write the chunks to a new file, and sync the file to disk."""
        with open(path, "wb", opener=safe_open.open_regular_file) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            self.fsync(file.fileno(), path)

    def fsync(self, file: int, path: Path) -> None:
        os.fsync(file)

    def sync_file(self, path: Path) -> None:
        """Sync a file to disk that other code has written."""
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
        self.sync_file(folder)


class MemoryBlobStorage:
    """Keeps files in memory until the process ends."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        self._indexes: dict[str, SegmentIndexData] = {}

    def write_segment(
        self, file: str, layout: Layout, parts: Sequence[Segment], metadata: FileMetadata
    ) -> tuple[int, bytes]:
        """Store the parts as one segment; return its size in bytes and its checksum.

        The checksum is empty for a segment in memory.
        """
        ids = _join_read_only([part.ids for part in parts])
        tensors: dict[str, Tensor] = {
            n: (concat_ragged if n == layout.ragged_name else _join_read_only)(
                [part.tensors[n] for part in parts]
            )
            for n in layout.tensor_names
        }
        self._segments[file] = Segment(ids, tensors)
        return ids.nbytes + sum(tensor.nbytes for tensor in tensors.values()), b""

    def write_arrays(self, file: str, arrays: Tensors, metadata: FileMetadata) -> tuple[int, bytes]:
        """Store the arrays of an encoder; return their size in bytes and their checksum."""
        for name, array in arrays.items():
            check_tensor_name(name)
            storage_dtype(name, array, min_dims=0)
        self._arrays[file] = {name: _join_read_only([array]) for name, array in arrays.items()}
        return sum(array.nbytes for array in arrays.values()), b""

    def write_index(self, entry: SegmentEntry, arrays: Tensors, metadata: FileMetadata) -> None:
        """Store the index of a segment; it replaces an older one."""
        copies = {name: _join_read_only([array]) for name, array in arrays.items()}
        self._indexes[entry.file] = Segment(np.zeros(0, np.int64), copies), dict(metadata)

    def read_index(
        self, entry: SegmentEntry, is_mapped: bool = False, checks_codes: bool = True
    ) -> SegmentIndexData | None:
        """Return the arrays and the metadata of a segment's index, or None if it has none."""
        return self._indexes.get(entry.file)

    def discard_index(self, segment_file: str) -> OSError | None:
        """Remove the index of a segment, if it has one."""
        self._indexes.pop(segment_file, None)
        return None

    def list_index_files(self) -> list[str]:
        """Return the names of all indexes."""
        return list(map(index_file, self._indexes))

    def sync_storage(self) -> None:
        """Sync the folder, so that all files survive a power loss. In memory, this does nothing."""

    def read_segment(self, entry: SegmentEntry, layout: Layout) -> Segment:
        return self._segments[entry.file]

    def read_arrays(self, file: str, size: int) -> dict[str, np.ndarray]:
        return dict(self._arrays[file])

    def verify_file(self, file: str, size: int, checksum: bytes) -> None:
        """Raise `StoreDamagedError` if a file differs from what was written.

        In memory, this does nothing.
        """

    def discard_file(self, file: str) -> OSError | None:
        """Remove a file, and the index of a segment. If that fails, return the error."""
        self._segments.pop(file, None)
        self._arrays.pop(file, None)
        return self.discard_index(file)

    def list_files(self) -> list[str]:
        """Return the names of all segments, array files and temporary files."""
        return [*self._segments, *self._arrays]


class DiskBlobStorage:
    """Keeps files in a folder.

    A file is written under a temporary name, synced, and renamed. Large files are read through
    mmap.
    """

    def __init__(self, folder: Path, files: FileSystem | None = None) -> None:
        self._folder = folder
        self._file_system = files or FileSystem()
        self._open_segments: WeakValueDictionary[str, Segment] = WeakValueDictionary()

    def write_segment(
        self, file: str, layout: Layout, parts: Sequence[Segment], metadata: FileMetadata
    ) -> tuple[int, bytes]:
        rows = sum(len(part.ids) for part in parts)
        columns: list[FileColumn] = [
            (IDS_TENSOR, np.dtype("<i8"), (rows,), [part.ids for part in parts])
        ]
        ragged = layout.ragged_name
        if ragged is not None:
            joined = concat_ragged([part.tensors[ragged] for part in parts])
            columns.append(
                (ragged + segments.STARTS_SUFFIX, np.dtype("<i8"), (rows + 1,), [joined.starts])
            )
        for name, dtype, dims in layout.fields:
            if name == ragged:
                columns.append((name, dtype, joined.flat.shape, [joined.flat]))
            else:
                chunks = [np.asarray(part.tensors[name]) for part in parts]
                columns.append((name, dtype, (rows, *dims), chunks))
        return self._write_file(file, columns, {**metadata, "layout": layout.to_text()})

    def write_arrays(self, file: str, arrays: Tensors, metadata: FileMetadata) -> tuple[int, bytes]:
        columns: list[FileColumn] = []
        for name, array in arrays.items():
            check_tensor_name(name)
            columns.append((name, storage_dtype(name, array, min_dims=0), array.shape, [array]))
        columns.sort(key=lambda column: (-column[1].itemsize, column[0]))
        return self._write_file(file, columns, metadata)

    def sync_storage(self) -> None:
        try:
            self._file_system.fsync_folder(self._folder)
        except OSError as error:
            raise unwritable_error(self._folder, error) from error

    def read_segment(self, entry: SegmentEntry, layout: Layout) -> Segment:
        segment = self._open_segments.get(entry.file)
        if segment is None or segment.is_truncated:
            segment = segments.open_segment(self._file_path(entry.file), entry, layout)
            self._open_segments[entry.file] = segment
            if log := debug_logger():
                log.debug("read %s: %d rows", self._file_path(entry.file), entry.rows)
        return segment

    def read_arrays(self, file: str, size: int) -> dict[str, np.ndarray]:
        if log := debug_logger():
            log.debug("read %s: encoder arrays", self._file_path(file))
        return segments.open_arrays(self._file_path(file), size)

    def verify_file(self, file: str, size: int, checksum: bytes) -> None:
        """Read a whole file, and raise `StoreDamagedError` if its size or checksum is wrong."""
        path = self._file_path(file)
        actual = sha256()
        length = 0
        try:
            with open(path, "rb", opener=safe_open.open_regular_file) as source:
                while chunk := source.read(segments.CHUNK_BYTES):
                    length += len(chunk)
                    actual.update(chunk)
        except OSError as error:
            raise segments.unreadable_file_error(path, error) from error
        if length != size:
            raise segments.damaged_file_error(
                path, f"it has {length:,} bytes, but {size:,} were written"
            )
        if actual.digest() != checksum:
            raise segments.damaged_file_error(
                path, "its checksum differs: its content is not what was written"
            )

    def write_index(self, entry: SegmentEntry, arrays: Tensors, metadata: FileMetadata) -> None:
        columns: list[FileColumn] = [
            (name, storage_dtype(name, array), array.shape, [array])
            for name, array in arrays.items()
        ]
        columns.sort(key=lambda column: (-column[1].itemsize, column[0]))
        metadata = {
            **metadata,
            "segment": entry.file,
            "segment_checksum": entry.checksum.hex(),
            "checksum": _checksum_of_arrays(arrays),
            "checksum_without_codes": _checksum_of_arrays(_without_codes(arrays)),
        }
        self._write_file(index_file(entry.file), columns, metadata)

    def read_index(
        self, entry: SegmentEntry, is_mapped: bool = False, checks_codes: bool = True
    ) -> SegmentIndexData | None:
        """Return the arrays and the metadata of a segment's index, or None if it has none.

        The arrays are the tensors of a segment without rows, in memory or mapped. Raise
        `StoreDamagedError` if they are not what was written, or belong to another segment. Without
        `checks_codes`, the codes are not read: their lists have checksums of their own.
        """
        path = self._file_path(index_file(entry.file))
        try:
            arrays, metadata = segments.read_index_file(path, is_mapped)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise segments.unreadable_file_error(path, error) from error
        if (metadata.get("segment"), metadata.get("segment_checksum")) != (
            entry.file,
            entry.checksum.hex(),
        ):
            raise segments.damaged_index_error(path, "it belongs to another segment")
        name, checked = "checksum", arrays.tensors
        if not checks_codes:
            name, checked = "checksum_without_codes", _without_codes(arrays.tensors)
        if metadata.get(name) != _checksum_of_arrays(checked):
            raise segments.damaged_index_error(path, "its content is not what was written")
        if is_mapped and checks_codes:
            arrays.release_pages()  # the checksum has read all of them
        return arrays, metadata

    def discard_file(self, file: str) -> OSError | None:
        self._open_segments.pop(file, None)
        # If the removal fails, the next writer tries again.
        try:
            self._file_system.unlink(self._file_path(file))
        except OSError as error:
            return error
        is_segment = segments.file_number(file) is not None and file.startswith("segment-")
        return self.discard_index(file) if is_segment else None

    def discard_index(self, segment_file: str) -> OSError | None:
        try:
            self._file_system.unlink(self._file_path(index_file(segment_file)))
        except OSError as error:
            return error
        return None

    def list_files(self) -> list[str]:
        return sorted(
            name
            for name in safe_open.list_names(self._folder)
            if name.endswith(
                (segments.SEGMENT_SUFFIX, segments.SEGMENT_SUFFIX + segments.TEMPORARY_SUFFIX)
            )
            and not segments.is_index_file(name)
        )

    def list_index_files(self) -> list[str]:
        """Return the names of all indexes, and of those that are being written."""
        return sorted(filter(segments.is_index_file, safe_open.list_names(self._folder)))

    def _file_path(self, file: str) -> Path:
        """Return the path of a file; raise if the name is not one that a store writes."""
        # An untrusted catalog could name files outside of its folder.
        final_name = file.removesuffix(segments.TEMPORARY_SUFFIX)
        if segments.file_number(final_name) is None and not segments.is_index_file(final_name):
            raise segments.damaged_file_error(
                self._folder / "catalogue.sqlite", f"it names the file {file!r}"
            )
        return self._folder / file

    def _write_file(
        self, file: str, columns: Sequence[FileColumn], metadata: FileMetadata
    ) -> tuple[int, bytes]:
        """Write a file atomically; return its size in bytes and its checksum."""
        checksum = sha256()
        length = 0

        def checksummed_chunks() -> Iterator[Any]:
            nonlocal length
            for chunk in segments.iterate_file_chunks(columns, metadata):
                checksum.update(chunk)
                length += len(chunk)
                yield chunk

        path = self._file_path(file)
        temporary = self._file_path(file + segments.TEMPORARY_SUFFIX)
        try:
            self._file_system.write(temporary, checksummed_chunks())
            self._file_system.rename(temporary, path)
        except OSError as error:
            raise unwritable_error(path, error) from error
        return length, checksum.digest()


BlobStorage = MemoryBlobStorage | DiskBlobStorage


def _without_codes(arrays: Tensors) -> Tensors:
    """Return the arrays of an index without the codes, which are most of its bytes."""
    return {name: array for name, array in arrays.items() if name != "code"}


def _checksum_of_arrays(arrays: Tensors) -> str:
    """Return the SHA-256 of all arrays, by name."""
    checksum = sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        checksum.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        checksum.update(array.reshape(-1).view(np.uint8).data)
    return checksum.hexdigest()


def read_verified_segment(
    blob_storage: BlobStorage, entry: SegmentEntry, layout: Layout
) -> Segment:
    """Verify the checksum of a segment, then read it.

    Code that copies rows needs this: damaged rows must not get a new, valid checksum.
    """
    blob_storage.verify_file(entry.file, entry.size, entry.checksum)
    return blob_storage.read_segment(entry, layout)


def _join_read_only(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays to a new, read-only array."""
    joined = np.array(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)
    joined.flags.writeable = False
    return joined
