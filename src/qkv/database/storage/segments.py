"""Segments: immutable safetensors files of row ids and tensors, mapped into memory.

A file is 8 bytes of length, a JSON header, then the tensors without gaps. `ids` comes first and
wide types before narrow ones, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv.database.errors import StoreDamagedError
from qkv.database.storage import limits, safe_open
from qkv.database.storage.layout import (
    CODE_BY_DTYPE,
    DTYPE_BY_CODE,
    IDS_TENSOR,
    Layout,
    Tensor,
    Tensors,
)
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import Ragged

SEGMENT_SUFFIX = ".safetensors"
TEMPORARY_SUFFIX = ".tmp"
STARTS_SUFFIX = ".starts"
"""After the name of a ragged tensor: where each of its rows begins, and the last one ends."""
SCALE_TENSOR = "scale"
"""The tensor of which one number that is not finite would spoil every answer."""
CHUNK_BYTES = 32 << 20
"""Bytes that are summed and written together, without the interpreter's lock."""
_FILE_NAME_PATTERN = re.compile(
    rf"(?:segment|arrays|rows)-([0-9]{{8,16}}){re.escape(SEGMENT_SUFFIX)}"
)

FileColumn = tuple[str, np.dtype[Any], tuple[int, ...], list[np.ndarray]]
"""A tensor of a file: its name, type and shape, and its rows in pieces."""
FileMetadata = Mapping[str, str]
"""What a file says of itself, for a catalogue that has lost its line."""


class SegmentEntry(NamedTuple):
    """What the catalogue knows of a segment."""

    file: str
    generation: int
    first: int
    last: int
    rows: int
    size: int
    checksum: bytes

    def may_overlap(self, other: SegmentEntry) -> bool:
        """Whether they are of one generation, and may have rows in common."""
        same = self.generation == other.generation
        return same and self.first <= other.last and other.first <= self.last


class Segment:
    """Rows of a file or in memory: `ids` (m,), ascending, and `tensors`, each (m, …), read-only.

    `live` (m,) says which of them a version has; None is all.
    """

    def __init__(
        self,
        ids: np.ndarray,
        tensors: Tensors,
        memory: mmap.mmap | None = None,
        path: Path | None = None,
    ) -> None:
        self.ids, self.tensors = ids, tensors
        self.live: np.ndarray | None = None
        self._memory, self._path = memory, path

    def __getitem__(self, rows: slice | np.ndarray) -> Segment:
        """Some of the rows."""
        some = {name: tensor[rows] for name, tensor in self.tensors.items()}
        memory = self._memory if isinstance(rows, slice) else None
        return Segment(self.ids[rows], some, memory, self._path)

    @property
    def is_truncated(self) -> bool:
        """Whether the file was made shorter since it was mapped."""
        return self._memory is not None and self._memory.size() < len(self._memory)

    def check_not_truncated(self) -> None:
        """Refuse to be read where the file was cut: the system would end the process for it."""
        if self._memory is not None and self.is_truncated:
            raise self.damaged_error("it was cut while it was open")

    def damaged_error(self, what: str) -> StoreDamagedError:
        return damaged_file_error(self._path or Path("a store in memory"), what)

    def prefetch_tensors(self, names: Collection[str]) -> None:
        """Tell the system which tensors of these rows are read next."""
        self._advise_memory(
            "MADV_WILLNEED", [x for name, x in self.tensors.items() if name in names]
        )

    def release_pages(self) -> None:
        """Tell the system that these rows' pages are not needed; reading them maps them again."""
        self._advise_memory("MADV_DONTNEED", [self.ids, *self.tensors.values()])

    def _advise_memory(self, advice: str, tensors: Iterable[Tensor]) -> None:
        if self._memory is None or not hasattr(mmap, advice):
            return
        origin = np.frombuffer(self._memory, np.uint8).ctypes.data
        parts = [(x.trim_flat().flat, x.starts) if isinstance(x, Ragged) else (x,) for x in tensors]
        for array in (array for part in parts for array in part):
            begin = array.ctypes.data - origin
            first = begin - begin % mmap.PAGESIZE
            if array.nbytes:
                self._memory.madvise(getattr(mmap, advice), first, begin + array.nbytes - first)


def prefetch_segments(parts: Iterator[Segment], names: Collection[str]) -> Iterator[Segment]:
    """The parts again, each when the next of them is being read."""
    held = None
    for part in parts:
        if names:
            part.prefetch_tensors(names)
        if held is not None:
            yield held
        held = part
    if held is not None:
        yield held


def split_segments(segments: Iterable[Segment], rows: int) -> Iterator[list[Segment]]:
    """The segments again, in groups of `rows` rows; the last may have fewer.

    >>> two = [Segment(np.arange(3), {}), Segment(np.arange(3, 5), {})]
    >>> [[part.ids.tolist() for part in group] for group in split_segments(two, 4)]
    [[[0, 1, 2], [3]], [[4]]]
    """
    group: list[Segment] = []
    room = rows
    for segment in segments:
        start = 0
        while start < len(segment.ids):
            take = min(room, len(segment.ids) - start)
            group.append(segment[start : start + take])
            start += take
            room -= take
            if not room:
                yield group
                group, room = [], rows
    if group:
        yield group


def file_number(file: str) -> int | None:
    """The number in a file's name; None for a name that is not ours.

    >>> file_number("segment-00000012.safetensors"), file_number("mine.safetensors")
    (12, None)
    """
    found = _FILE_NAME_PATTERN.fullmatch(file)
    return int(found[1]) if found else None


def open_segment(path: Path, entry: SegmentEntry, layout: Layout) -> Segment:
    """Map a segment, if it has the structure that the catalogue says."""
    memory = _map_file(path, entry.size, limits.MAX_UNMAPPED_BYTES)
    found = _tensor_views(path, memory)
    ids = found.pop(IDS_TENSOR, np.zeros(0))
    same = {name: (dtype, (entry.rows, *dims)) for name, dtype, dims in layout.fields}
    ragged = layout.ragged_name
    if ragged is not None:
        starts = found.get(ragged + STARTS_SUFFIX, np.zeros(0, "<i8"))
        same[ragged + STARTS_SUFFIX] = np.dtype("<i8"), (entry.rows + 1,)
        same[ragged] = same[ragged][0], found.get(ragged, starts).shape[:1]
    if (
        {name: (array.dtype, array.shape) for name, array in found.items()} != same
        or ids.dtype != np.dtype("<i8")
        or ids.shape != (entry.rows,)
    ):
        raise damaged_file_error(path, "its header is not the one that was written")
    if (ids[0], ids[-1]) != (entry.first, entry.last) or not (ids[1:] > ids[:-1]).all():
        raise damaged_file_error(path, "its ids are not those that were written")
    if not np.isfinite(found.get(SCALE_TENSOR, 0.0)).all():
        raise damaged_file_error(path, "what its vectors are multiplied by is not finite")
    tensors: dict[str, Tensor] = {name: found[name] for name in layout.tensor_names}
    if ragged is not None:
        flat, steps = found[ragged], np.diff(starts)
        if starts[0] or starts[-1] != len(flat) or (steps < 0).any():
            raise damaged_file_error(path, "its rows do not begin where they were written")
        tensors[ragged] = Ragged(flat, starts)
    mapped = memory if isinstance(memory, mmap.mmap) else None
    return Segment(ids, tensors, mapped, path)


def open_arrays(path: Path, size: int) -> dict[str, np.ndarray]:
    """The arrays of a file, read whole: they are few, and used as long as their encoder is."""
    return _tensor_views(path, _map_file(path, size, read=size))


def damaged_file_error(path: Path, what: str) -> StoreDamagedError:
    """The error for a file that is not as it was written."""
    return StoreDamagedError(
        f"{path} is damaged: {what}. Restore it from a copy, or open the store with "
        "skip_damaged=True to use the other rows; qkv check lists all damage"
    )


def unreadable_file_error(path: Path, error: OSError) -> OSError:
    """The error for a file that the system does not read: it may be sound all the same."""
    if isinstance(error, StoreDamagedError):
        return error
    if isinstance(error, FileNotFoundError):
        return damaged_file_error(path, "it is missing")
    return safe_open.unreadable_error(path, error) or damaged_file_error(
        path, f"it cannot be read ({error.strerror})"
    )


def read_file_metadata(path: Path) -> tuple[dict[str, str], SegmentEntry]:
    """What a file says of itself, and its line for the catalogue; arrays have −1 rows."""
    memory = _map_file(path, path.stat().st_size, limits.MAX_UNMAPPED_BYTES)
    ids = _tensor_views(path, memory).get(IDS_TENSOR)
    notes = dict(_read_header(path, memory)[0]["__metadata__"])
    generation = int(notes["generation"])
    checksum = sha256(memory).digest()
    if ids is None or not len(ids):
        return notes, SegmentEntry(path.name, generation, -1, -1, -1, len(memory), checksum)
    first, last = int(ids[0]), int(ids[-1])
    return notes, SegmentEntry(path.name, generation, first, last, len(ids), len(memory), checksum)


def iterate_file_chunks(columns: Sequence[FileColumn], notes: FileMetadata) -> Iterator[Any]:
    """The bytes of a file, some megabytes at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "qkv", **notes}}
    begin = 0
    for name, dtype, shape, _ in columns:
        end = begin + dtype.itemsize * int(np.prod(shape))
        header[name] = {
            "dtype": CODE_BY_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    yield len(text).to_bytes(8, "little") + text
    for _, dtype, _, arrays in columns:
        for array in arrays:
            if not array.size:
                continue
            if not array.ndim:
                array = array.reshape(1)
            step = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
            for start in range(0, len(array), step):
                rows = np.ascontiguousarray(array[start : start + step], dtype)
                yield rows.reshape(-1).view(np.uint8).data


def _map_file(path: Path, size: int, read: int) -> mmap.mmap | bytes:
    """The content of a file, mapped where it has more than so many bytes."""
    try:
        with open(path, "rb", opener=safe_open.open_regular_file) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise damaged_file_error(path, f"it has {found:,} bytes, and {size:,} were written")
            if not size:
                raise damaged_file_error(path, "it is empty")
            if size > read:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = file.read()
            if len(content) != size:
                raise damaged_file_error(path, "it was cut while it was read")
            return content
    except OSError as error:
        raise unreadable_file_error(path, error) from error


def _read_header(path: Path, memory: mmap.mmap | bytes) -> tuple[dict[str, Any], int]:
    """The header and where the data begins."""
    length = int.from_bytes(memory[:8], "little")
    if not 2 <= length <= len(memory) - 8:
        raise damaged_file_error(path, "it has no header")
    try:
        header = json.loads(memory[8 : 8 + length])
    except ValueError as error:
        raise damaged_file_error(path, "its header cannot be read") from error
    if not isinstance(header, dict):
        raise damaged_file_error(path, "its header cannot be read")
    return header, 8 + length


def _tensor_views(path: Path, memory: mmap.mmap | bytes) -> dict[str, np.ndarray]:
    """Every tensor of a file, read-only, where its bytes lie."""
    header, origin = _read_header(path, memory)
    views, reached = {}, 0
    try:
        fields = [(name, line) for name, line in header.items() if name != "__metadata__"]
        for name, line in sorted(fields, key=lambda field: field[1]["data_offsets"]):
            dtype, shape = DTYPE_BY_CODE[line["dtype"]], tuple(line["shape"])
            begin, end = line["data_offsets"]
            count = int(np.prod(shape))
            if begin != reached or end - begin != count * dtype.itemsize:
                raise ValueError(name)
            views[name] = np.frombuffer(memory, dtype, count, origin + begin).reshape(shape)
            reached = end
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_file_error(path, "its header cannot be read") from error
    if origin + reached != len(memory):
        raise damaged_file_error(path, "its header does not cover its data")
    return views


def check_block_ids(ids: np.ndarray, live: np.ndarray) -> None:
    """Refuse ids of rewrite_tensors that are not those of the rows that live."""
    if len(ids) != len(live) or not np.array_equal(ids, live):
        different = np.flatnonzero(ids[: len(live)] != live)
        at = int(different[0]) if len(different) else len(live)
        row = ids[at] if at < len(ids) else "nothing"
        expected = f"row {live[at]}" if at < len(live) else "the end"
        raise ArgumentError(
            f"rewrite_tensors: blocks must give all live rows by ascending id: expected "
            f"{expected}, not row {row}"
        )
