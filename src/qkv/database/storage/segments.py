"""Segments: immutable files of row ids and tensors in the safetensors format, mapped into memory.

A `Layout` says which tensors each row has. A file begins with 8 bytes, the length of the header.
The header in JSON follows, then the tensors without gaps. `ids` is the first tensor, and wide types
precede narrow types, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from qkv.database.errors import IndexDamagedError, StoreDamagedError
from qkv.database.storage import limits, safe_open
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.frameworks.lazy import LazyArray
from qkv.frameworks.ragged import Ragged

IDS_TENSOR = "ids"
DTYPE_BY_CODE = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind, sizes in (("F", (8, 4, 2)), ("I", (8, 4, 2, 1)), ("U", (8, 4, 2, 1)))
    for size in sizes
} | {"BOOL": np.dtype("?")}
"""NumPy types by their names in safetensors."""
CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}


RAGGED_DIMS = (-1,)
"""The shape of one row in a ragged tensor, whose rows have different lengths."""

Tensor = np.ndarray | Ragged
Tensors = Mapping[str, Any]
"""Arrays by name, with one entry per row. One of them may be ragged, and others may be lazy."""


@dataclass(frozen=True)
class Layout:
    """The names, types and shapes of the tensors of a row; the widest type comes first.

    One tensor may be ragged: its rows have different lengths.

    >>> layout = Layout.from_tensors({"key": np.zeros((5, 2), np.float32)})
    >>> layout.row_bytes, Layout.from_text(layout.to_text()) == layout
    (8, True)
    """

    fields: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...] = ()

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Layout:
        fields: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
        for name, tensor in tensors.items():
            check_tensor_name(name)
            if isinstance(tensor, Ragged):
                fields.append((name, storage_dtype(name, tensor.flat), RAGGED_DIMS))
            else:
                tensor = np.asarray(tensor[:1] if isinstance(tensor, LazyArray) else tensor)
                fields.append((name, storage_dtype(name, tensor), tuple(tensor.shape[1:])))
        if sum(dims == RAGGED_DIMS for _, _, dims in fields) > 1:
            raise ArgumentError("tensors: only one tensor may be ragged")
        return cls(tuple(sorted(fields, key=lambda field: (-field[1].itemsize, field[0]))))

    @classmethod
    def from_text(cls, text: str) -> Layout:
        return cls(
            tuple((name, DTYPE_BY_CODE[code], tuple(dims)) for name, code, dims in json.loads(text))
        )

    def to_text(self) -> str:
        return json.dumps([[name, CODE_BY_DTYPE[dtype], dims] for name, dtype, dims in self.fields])

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.fields)

    @cached_property
    def ragged_name(self) -> str | None:
        """The name of the ragged tensor, or None."""
        return next((name for name, _, dims in self.fields if dims == RAGGED_DIMS), None)

    @cached_property
    def row_bytes(self) -> int:
        """The size of a row in bytes, without its ragged tensor."""
        return sum(
            dtype.itemsize * prod(dims) for _, dtype, dims in self.fields if dims != RAGGED_DIMS
        )

    def is_row_size(self, packed: bytes) -> bool:
        """Return whether the length of a packed row fits the layout."""
        ragged_bytes, name = len(packed) - self.row_bytes, self.ragged_name
        itemsize = next((dtype.itemsize for other, dtype, _ in self.fields if other == name), 0)
        if not itemsize:
            return not ragged_bytes
        return ragged_bytes >= 0 and ragged_bytes % itemsize == 0

    def check_tensors(self, tensors: Tensors, rows: int) -> dict[str, Any]:
        """Return the tensors as arrays of the layout's types; raise for a tensor that differs.

        `rows` is the number of rows that each tensor must have.
        """
        if set(tensors) != set(self.tensor_names):
            raise ArgumentError(
                f"tensors must be {_format_names(self.tensor_names)}, as in earlier rows, not "
                f"{_format_names(tensors)}"
            )
        fitted: dict[str, Any] = {}
        for name, dtype, dims in self.fields:
            tensor = tensors[name]
            if isinstance(tensor, Ragged) and dims == RAGGED_DIMS and len(tensor) == rows:
                trimmed = tensor.trim_flat()
                tensor = Ragged(trimmed.flat.astype(dtype, copy=False), trimmed.starts)
                fitted[name] = tensor
                continue
            shape = (len(tensor), *RAGGED_DIMS) if isinstance(tensor, Ragged) else np.shape(tensor)
            if shape != (rows, *dims):
                raise ShapeError(
                    f"tensors[{name!r}] must have the shape {(rows, *dims)}, not {shape}"
                )
            if not isinstance(tensor, LazyArray):
                tensor = np.asarray(tensor)
            if tensor.dtype.newbyteorder("<") != dtype:
                raise DtypeError(
                    f"tensors[{name!r}] must be {dtype.name}, as in earlier rows, not "
                    f"{tensor.dtype}"
                )
            fitted[name] = tensor if tensor.dtype == dtype else np.asarray(tensor, dtype)
        return fitted

    def pack_rows(self, tensors: Tensors, rows: int) -> list[bytes]:
        """Return the tensors of each row as bytes."""
        if not self.fields:
            return [b""] * rows
        name, width = self.ragged_name, self.row_bytes
        flat = [_as_row_bytes(tensors[n], rows) for n in self.tensor_names if n != name]
        text = np.concatenate(flat, axis=1).tobytes() if flat else b""
        packed = [text[i * width : (i + 1) * width] for i in range(rows)]
        if name is None:
            return packed
        ragged_rows = tensors[name].split_rows()
        return [fixed + row.tobytes() for fixed, row in zip(packed, ragged_rows, strict=True)]

    def unpack_rows(self, rows: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the tensors of rows that `pack_rows` has packed."""
        width = self.row_bytes
        fixed = rows if self.ragged_name is None else [row[:width] for row in rows]
        packed = np.frombuffer(b"".join(fixed), np.uint8).reshape(len(rows), width)
        tensors: dict[str, Tensor] = {}
        begin = 0
        for name, dtype, dims in self.fields:
            if dims == RAGGED_DIMS:
                flat = np.frombuffer(b"".join(row[width:] for row in rows), dtype)
                sizes = [0, *((len(row) - width) // dtype.itemsize for row in rows)]
                tensors[name] = Ragged(flat, np.cumsum(sizes))
                continue
            end = begin + dtype.itemsize * int(np.prod(dims))
            column = np.ascontiguousarray(packed[:, begin:end]).reshape(-1).view(dtype)
            column.flags.writeable = False
            tensors[name] = column.reshape(len(rows), *dims)
            begin = end
        return tensors


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def check_tensor_name(name: str) -> None:
    """Raise `ArgumentError` for a name that the file format reserves."""
    if not isinstance(name, str) or name in (IDS_TENSOR, "__metadata__", ""):
        raise ArgumentError(f"a tensor cannot be named {name!r}: choose another name")


def storage_dtype(name: str, tensor: Any, min_dims: int = 1) -> np.dtype[Any]:
    """Return the little-endian type with which a tensor is stored; raise if it cannot be stored."""
    if not isinstance(tensor, np.ndarray) or tensor.ndim < min_dims:
        raise ShapeError(f"tensors[{name!r}] must be a NumPy array with one entry per row")
    dtype: np.dtype[Any] = tensor.dtype.newbyteorder("<")
    if dtype not in CODE_BY_DTYPE:
        raise DtypeError(
            f"tensors[{name!r}] is {tensor.dtype}, which cannot be stored: use one of "
            f"{', '.join(sorted(supported.name for supported in CODE_BY_DTYPE))}"
        )
    return dtype


def _as_row_bytes(array: np.ndarray, rows: int) -> np.ndarray:
    """Return the bytes of each row of an array (m, …) as an array (m, width) of uint8."""
    array = np.asarray(array)
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if not array.size:
        return np.zeros((rows, width), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(rows, width)


SEGMENT_SUFFIX = ".safetensors"
TEMPORARY_SUFFIX = ".tmp"
STARTS_SUFFIX = ".starts"
"""A ragged tensor `x` has a tensor `x.starts`: the start of each row, and the end of the last."""
SCALE_TENSOR = "scale"
"""The scales of 8-bit vectors. A scale that is not finite would make every answer NaN."""
CHUNK_BYTES = 32 << 20
"""The number of bytes that one call hashes and writes, without the interpreter lock."""
_FILE_NAME_PATTERN = re.compile(
    rf"(?:segment|arrays|rows)-([0-9]{{8,16}}){re.escape(SEGMENT_SUFFIX)}"
)

_INDEX_NAME_PATTERN = re.compile(rf"index-([0-9]{{8,16}}){re.escape(SEGMENT_SUFFIX)}")

MakeError = Callable[[Path, str], StoreDamagedError]
"""Returns the error for a damaged file, from its path and what is wrong."""
FileColumn = tuple[str, np.dtype[Any], tuple[int, ...], list[np.ndarray]]
"""A tensor of a file: its name, type and shape, and its rows in several arrays."""
FileMetadata = Mapping[str, str]
"""Metadata that a file contains, so that a lost catalog entry can be rebuilt."""


class SegmentEntry(NamedTuple):
    """A segment as the catalog lists it: its file, row ids, size in bytes and checksum."""

    file: str
    generation: int
    first: int
    last: int
    rows: int
    size: int
    checksum: bytes

    def may_overlap(self, other: SegmentEntry) -> bool:
        """Return whether both segments are of one generation and their ranges of ids overlap."""
        same_generation = self.generation == other.generation
        return same_generation and self.first <= other.last and other.first <= self.last


class Segment:
    """Rows of a file or in memory, read-only: `ids` (m,), ascending, and `tensors`, each (m, …).

    `live` (m,) is True for the rows that a version has; None means that it has all rows.
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
        self._memory, self.path = memory, path

    def __getitem__(self, rows: slice | np.ndarray) -> Segment:
        """Return a segment with only these rows."""
        tensors = {name: tensor[rows] for name, tensor in self.tensors.items()}
        memory = self._memory if isinstance(rows, slice) else None
        return Segment(self.ids[rows], tensors, memory, self.path)

    @property
    def is_mapped(self) -> bool:
        """Whether the tensors are in a file that is mapped into memory."""
        return self._memory is not None

    @property
    def is_truncated(self) -> bool:
        """Whether the file has become shorter since it was mapped."""
        return self._memory is not None and self._memory.size() < len(self._memory)

    def check_not_truncated(self, make_error: MakeError | None = None) -> None:
        """Raise `StoreDamagedError`, or another error, if the file was truncated.

        Reading the missing pages would kill the process.
        """
        memory = self._memory
        if memory is not None and memory.size() < len(memory):
            raise self.damaged_error("it was truncated while it was open", make_error)

    def damaged_error(self, what: str, make_error: MakeError | None = None) -> StoreDamagedError:
        make_error = make_error or damaged_file_error
        return make_error(self.path or Path("a store in memory"), what)

    def prefetch_tensors(self, names: Collection[str]) -> None:
        """Advise the operating system that these tensors will be read next."""
        self._advise_memory(
            "MADV_WILLNEED", [x for name, x in self.tensors.items() if name in names]
        )

    def release_pages(self) -> None:
        """Advise the operating system to free the memory of these rows.

        Reading them loads them again.
        """
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


class _MappedSegments:
    """The segments of this process that are mapped into memory.

    A read at a random position maps all pages of a block that the system has in memory, which may
    be 2 MiB. So reads of few rows would soon have mapped a whole store.
    """

    def __init__(self) -> None:
        self.segments: WeakSet[Segment] = WeakSet()
        self._reads, self._resident_bytes = 0, 0

    def count_random_reads(self, count: int) -> None:
        self._reads += count
        if self._reads < limits.READS_PER_CHECK or not self.segments:
            return
        resident = _read_resident_bytes()
        if resident is None:
            mapped = self._reads * limits.MAPPED_BYTES_PER_READ
        else:
            # Other memory may have been released since.
            self._resident_bytes = min(self._resident_bytes or resident, resident)
            self._reads, mapped = 0, resident - self._resident_bytes
        if mapped > limits.MAX_MAPPED_BYTES:
            for segment in list(self.segments):
                segment.release_pages()
            self._reads, self._resident_bytes = 0, _read_resident_bytes() or 0


def _read_resident_bytes() -> int | None:
    """Return the bytes of mapped files that are in the memory of this process. Linux only."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


_MAPPED_SEGMENTS = _MappedSegments()
count_random_reads = _MAPPED_SEGMENTS.count_random_reads
"""Count reads at random positions of segments. From time to time, their memory is released."""


def prefetch_segments(parts: Iterator[Segment], names: Collection[str]) -> Iterator[Segment]:
    """Yield the segments. Before each one, prefetch the tensors `names` of the next one."""
    previous = None
    for part in parts:
        if names:
            part.prefetch_tensors(names)
        if previous is not None:
            yield previous
        previous = part
    if previous is not None:
        yield previous


def split_segments(segments: Iterable[Segment], rows: int) -> Iterator[list[Segment]]:
    """Yield the segments in groups of `rows` rows; the last group may have fewer rows.

    >>> two = [Segment(np.arange(3), {}), Segment(np.arange(3, 5), {})]
    >>> [[part.ids.tolist() for part in group] for group in split_segments(two, 4)]
    [[[0, 1, 2], [3]], [[4]]]
    """
    group: list[Segment] = []
    free_rows = rows
    for segment in segments:
        start = 0
        while start < len(segment.ids):
            take = min(free_rows, len(segment.ids) - start)
            group.append(segment[start : start + take])
            start += take
            free_rows -= take
            if not free_rows:
                yield group
                group, free_rows = [], rows
    if group:
        yield group


def file_number(file: str) -> int | None:
    """Return the number in a file's name; None for names that a store does not write.

    >>> file_number("segment-00000012.safetensors"), file_number("mine.safetensors")
    (12, None)
    """
    match = _FILE_NAME_PATTERN.fullmatch(file)
    return int(match[1]) if match else None


def index_file(segment_file: str) -> str:
    """Return the name of the index of a segment.

    >>> index_file("segment-00000012.safetensors")
    'index-00000012.safetensors'
    """
    return f"index-{segment_file.rpartition('-')[2]}"


def is_index_file(file: str) -> bool:
    """Return whether this is the name of an index, or of one that is being written."""
    return _INDEX_NAME_PATTERN.fullmatch(file.removesuffix(TEMPORARY_SUFFIX)) is not None


def open_segment(path: Path, entry: SegmentEntry, layout: Layout) -> Segment:
    """Map a segment file into memory. Raise if its structure is not the one in the catalog."""
    memory = _map_file(path, entry.size, limits.MAX_UNMAPPED_BYTES)
    arrays = _tensor_views(path, memory)
    ids = arrays.pop(IDS_TENSOR, np.zeros(0))
    expected = {name: (dtype, (entry.rows, *dims)) for name, dtype, dims in layout.fields}
    ragged = layout.ragged_name
    if ragged is not None:
        starts = arrays.get(ragged + STARTS_SUFFIX, np.zeros(0, "<i8"))
        expected[ragged + STARTS_SUFFIX] = np.dtype("<i8"), (entry.rows + 1,)
        expected[ragged] = expected[ragged][0], arrays.get(ragged, starts).shape[:1]
    if (
        {name: (array.dtype, array.shape) for name, array in arrays.items()} != expected
        or ids.dtype != np.dtype("<i8")
        or ids.shape != (entry.rows,)
    ):
        raise damaged_file_error(path, "its header is not what was written")
    if (ids[0], ids[-1]) != (entry.first, entry.last) or not (ids[1:] > ids[:-1]).all():
        raise damaged_file_error(path, "its ids are not what was written")
    if not np.isfinite(arrays.get(SCALE_TENSOR, 0.0)).all():
        raise damaged_file_error(path, "a scale of its vectors is not finite")
    tensors: dict[str, Tensor] = {name: arrays[name] for name in layout.tensor_names}
    if ragged is not None:
        flat, lengths = arrays[ragged], np.diff(starts)
        if starts[0] or starts[-1] != len(flat) or (lengths < 0).any():
            raise damaged_file_error(path, "the row boundaries in it are invalid")
        tensors[ragged] = Ragged(flat, starts)
    return _build_segment(ids, tensors, memory, path)


def _build_segment(
    ids: np.ndarray, tensors: Tensors, memory: mmap.mmap | bytes, path: Path
) -> Segment:
    if not isinstance(memory, mmap.mmap):
        return Segment(ids, tensors, None, path)
    segment = Segment(ids, tensors, memory, path)
    _MAPPED_SEGMENTS.segments.add(segment)
    return segment


def read_index_file(path: Path, is_mapped: bool = False) -> tuple[Segment, dict[str, str]]:
    """Return the arrays of an index as the tensors of a segment without rows, and its metadata.

    They are read into memory, or mapped.
    """
    size = path.stat().st_size
    memory = _map_file(path, size, max_unmapped=0 if is_mapped else size)
    metadata = _read_header(path, memory)[0].get("__metadata__")
    if not isinstance(metadata, dict):
        raise damaged_file_error(path, "its header cannot be read")
    return _build_segment(
        np.zeros(0, np.int64), _tensor_views(path, memory), memory, path
    ), metadata


def open_arrays(path: Path, size: int) -> dict[str, np.ndarray]:
    """Read the arrays of an encoder into memory.

    They are small, and used as long as the encoder.
    """
    return _tensor_views(path, _map_file(path, size, max_unmapped=size))


def damaged_file_error(path: Path, what: str) -> StoreDamagedError:
    """Return the error for a file that is not as it was written; `what` says what is wrong."""
    return StoreDamagedError(
        f"{path} is damaged: {what}. Restore it from a backup, or open the store with "
        "skip_damaged=True to use the other rows; qkv check lists all damage"
    )


def damaged_index_error(path: Path, what: str) -> IndexDamagedError:
    """Return the error for an index that is not as it was written."""
    error = IndexDamagedError(
        f"{path} is damaged: {what}. The rows are intact: qkv check --repair removes the index, "
        "and D.index() builds it again"
    )
    error.index_file = path.name
    return error


def unreadable_file_error(path: Path, error: OSError) -> OSError:
    """Return the error for a file that cannot be read. The file may be intact."""
    if isinstance(error, StoreDamagedError):
        return error
    if isinstance(error, FileNotFoundError):
        return damaged_file_error(path, "it is missing")
    return safe_open.unreadable_error(path, error) or damaged_file_error(
        path, f"it cannot be read ({error.strerror})"
    )


def read_file_metadata(path: Path) -> tuple[dict[str, str], SegmentEntry]:
    """Return the metadata in a file, and the file's entry for the catalog.

    For a file of arrays, `rows` of the entry is −1.
    """
    memory = _map_file(path, path.stat().st_size, limits.MAX_UNMAPPED_BYTES)
    ids = _tensor_views(path, memory).get(IDS_TENSOR)
    metadata = dict(_read_header(path, memory)[0]["__metadata__"])
    generation = int(metadata["generation"])
    checksum = sha256(memory).digest()
    if ids is None or not len(ids):
        return metadata, SegmentEntry(path.name, generation, -1, -1, -1, len(memory), checksum)
    first, last = int(ids[0]), int(ids[-1])
    return metadata, SegmentEntry(
        path.name, generation, first, last, len(ids), len(memory), checksum
    )


def iterate_file_chunks(columns: Sequence[FileColumn], metadata: FileMetadata) -> Iterator[Any]:
    """Yield the content of a file in chunks of up to `CHUNK_BYTES`."""
    header: dict[str, Any] = {"__metadata__": {"format": "qkv", **metadata}}
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


def _map_file(path: Path, size: int, max_unmapped: int) -> mmap.mmap | bytes:
    """Return the content of a file. A file with more than `max_unmapped` bytes is mapped."""
    try:
        with open(path, "rb", opener=safe_open.open_regular_file) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise damaged_file_error(
                    path, f"it has {actual:,} bytes, but {size:,} were written"
                )
            if not size:
                raise damaged_file_error(path, "it is empty")
            if size > max_unmapped:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = file.read()
            if len(content) != size:
                raise damaged_file_error(path, "it was truncated while it was read")
            return content
    except OSError as error:
        raise unreadable_file_error(path, error) from error


def _read_header(path: Path, memory: mmap.mmap | bytes) -> tuple[dict[str, Any], int]:
    """Return the parsed header of a file, and the position of the data after it."""
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
    """Return read-only views of all tensors of a file."""
    header, origin = _read_header(path, memory)
    views, position = {}, 0
    try:
        fields = [(name, line) for name, line in header.items() if name != "__metadata__"]
        for name, line in sorted(fields, key=lambda field: field[1]["data_offsets"]):
            dtype, shape = DTYPE_BY_CODE[line["dtype"]], tuple(line["shape"])
            begin, end = line["data_offsets"]
            count = int(np.prod(shape))
            if begin != position or end - begin != count * dtype.itemsize:
                raise ValueError(name)
            views[name] = np.frombuffer(memory, dtype, count, origin + begin).reshape(shape)
            position = end
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_file_error(path, "its header cannot be read") from error
    if origin + position != len(memory):
        raise damaged_file_error(path, "its header does not cover its data")
    return views


def check_block_ids(ids: np.ndarray, live: np.ndarray) -> None:
    """Raise `ArgumentError` if a block of `rewrite_tensors` has other ids than the live rows."""
    if len(ids) != len(live) or not np.array_equal(ids, live):
        different = np.flatnonzero(ids[: len(live)] != live)
        position = int(different[0]) if len(different) else len(live)
        actual = f"row {ids[position]}" if position < len(ids) else "nothing"
        expected = f"row {live[position]}" if position < len(live) else "the end"
        raise ArgumentError(
            f"rewrite_tensors: blocks must contain all live rows in the order of their ids: "
            f"expected {expected}, not {actual}"
        )
