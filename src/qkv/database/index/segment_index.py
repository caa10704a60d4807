"""The index of one segment: lists of similar vectors, with a code of each vector.

FAISS clusters the vectors and searches the codes. A store contains only plain arrays, which are
checked before FAISS gets them: a store may come from somebody else, and FAISS trusts its files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from qkv.database.index.metric import METRICS, IndexMetric
from qkv.database.storage.segments import Segment, count_random_reads, damaged_index_error
from qkv.errors import require_extra
from qkv.util.deadline import check_deadline

FORMAT = "lists-2"
"""The layout of the arrays. A reader ignores an index of any other layout."""

MIN_ROWS = 2**13
"""A segment with fewer rows gets no index: reading it takes less time than a search."""

LISTS_PER_ROOT = 2.0
"""The number of lists of a segment is this factor times the square root of its rows."""

ROWS_PER_BLOCK = 2**15
"""The number of rows that are assigned to lists at a time."""

ROWS_PER_STEP = 2**12
COLUMNS_PER_STEP = 64
TRAINING_ROWS_PER_LIST = 64
CLUSTERING_ROUNDS = 10
CODE_LEVELS = 255

MAX_CODE_ERROR = 2e-3
"""If the squared error of 8-bit codes is a larger share of the spread within the lists, the codes
are float16. A few rows far from all others make the steps of 8-bit codes large.
"""

MAX_FLOAT16 = 6e4

BOUNDS_MARGIN = 0.25
"""The bounds of the codes extend those of the sampled rows on each side by this share."""

ReadVectors = Callable[[int, int], np.ndarray]
"""Returns the prepared vectors of the rows start … stop − 1, float32."""


def load_faiss() -> Any:
    """Import FAISS; raise `MissingExtraError` if it is not installed."""
    with require_extra("index", "an index needs faiss"):
        import faiss
    return faiss


class Centres(NamedTuple):
    """The lists of some segments: a row belongs to the nearest of the `directions` (L, d).

    `means` (L, d) are the means of the sampled rows of each list. For "cosine", the directions are
    the means with the length one. `bounds` (2, d) are low and range of each column of k − mean.
    """

    directions: np.ndarray
    means: np.ndarray
    bounds: np.ndarray


def train_centres(sample: np.ndarray, rows: int, metric: IndexMetric) -> Centres:
    """Return the lists for segments with so many rows in total, from sampled vectors (c, d)."""
    faiss = load_faiss()
    width, is_cosine = sample.shape[1], metric.name == "cosine"
    lists = max(1, min(count_lists(rows), len(sample)))
    clusters = faiss.Kmeans(
        width,
        lists,
        niter=CLUSTERING_ROUNDS,
        seed=1,
        spherical=is_cosine,
        min_points_per_centroid=1,
        max_points_per_centroid=TRAINING_ROWS_PER_LIST,
    )
    clusters.train(sample)
    nearest = _find_nearest(_index_directions(clusters.centroids, metric), sample)
    # A list without rows would have no mean.
    present, nearest, counts = np.unique(nearest, return_inverse=True, return_counts=True)
    order = np.argsort(nearest, kind="stable")
    first = np.cumsum(counts) - counts
    means = np.empty((len(counts), width), np.float32)
    for start in range(0, width, COLUMNS_PER_STEP):  # without a copy of the whole sample
        at = slice(start, start + COLUMNS_PER_STEP)
        total = np.add.reduceat(sample[order, at], first, axis=0, dtype=float)
        means[:, at] = total / counts[:, None]
    low, high = _new_bounds(width)
    for _, residual in _iterate_residuals(sample, nearest, means):
        _extend_bounds(low, high, residual)
    margin = BOUNDS_MARGIN * (high - low)
    bounds = _to_low_and_range(low - margin, high + margin)
    return Centres(clusters.centroids[present], means, bounds)


def count_lists(rows: int) -> int:
    """Return the number of lists of segments with so many rows in total."""
    return max(1, min(int(LISTS_PER_ROOT * math.sqrt(rows)), rows // 16))


def _index_directions(directions: np.ndarray, metric: IndexMetric) -> Any:
    faiss, width = load_faiss(), directions.shape[1]
    index = faiss.IndexFlatIP(width) if metric.name == "cosine" else faiss.IndexFlatL2(width)
    index.add(np.ascontiguousarray(directions))
    return index


def _find_nearest(index: Any, vectors: np.ndarray) -> np.ndarray:
    """Return the list of each vector. A degenerate clustering has none: any list will do."""
    return np.asarray(np.maximum(index.search(vectors, 1)[1][:, 0], 0))


def build_arrays(
    read_vectors: ReadVectors,
    rows: int,
    metric: IndexMetric,
    centres: Centres | None = None,
    report_rows: Callable[[int], None] = lambda rows: None,
) -> dict[str, np.ndarray] | None:
    """Return the arrays of the index of `rows` vectors; None if float32 cannot hold a vector.

    Without `centres`, they are trained with the vectors.

    - `mean` (L, d): the mean of each list, over the rows from which the centres were trained
    - `spread` (L,): the mean of ‖k − mean‖² / d over the list; 0 without rows
    - `start` (L + 1,): where each list begins in `row` and `code`
    - `row` (m,): the row in the segment, list by list
    - `code` (m, d): k − mean as float16, or in 8 bits, ⌊(k − mean − low) / range · 255⌋
    - `code_checksum` (L,): the CRC-32 of the codes of each list
    - `bounds` (2, d): low and range of each column of k − mean; those of the centres if all rows
      are within them, so that segments can be searched together
    """
    if centres is None:
        sample = read_sample(read_vectors, rows, count_lists(rows) * TRAINING_ROWS_PER_LIST)
        if not metric.fits_float32(sample):
            return None
        centres = train_centres(sample, rows, metric)
        del sample  # the codes take its memory
    directions, mean = _index_directions(centres.directions, metric), centres.means
    lists, width = mean.shape
    list_of_row, squares = np.empty(rows, np.int64), np.zeros(lists)
    low, high = _new_bounds(width)
    # Most rows are within the bounds of the sampled ones, so their codes need no second pass.
    bounds, code = centres.bounds, np.empty((rows, width), np.uint8)
    encode = _make_8_bit_encoder(bounds)
    for start in range(0, rows, ROWS_PER_BLOCK):
        check_deadline()
        block = read_vectors(start, min(start + ROWS_PER_BLOCK, rows))
        if not metric.fits_float32(block):
            return None
        nearest = _find_nearest(directions, block)
        list_of_row[start : start + len(block)] = nearest
        for at, residual in _iterate_residuals(block, nearest, mean):
            lengths = np.einsum("ij,ij->i", residual, residual)
            squares += np.bincount(nearest[at], lengths, minlength=lists)
            _extend_bounds(low, high, residual)
            code[start : start + len(block)][at] = encode(residual)
        report_rows(len(block))
    if not np.isfinite(low + high).all() or not np.isfinite(squares).all():
        return None
    is_within = (low >= bounds[0]).all() and (high <= bounds[0] + bounds[1]).all()
    bounds = bounds if is_within else _to_low_and_range(low, high)
    is_8_bit = _is_8_bit_precise(bounds[1], float(squares.sum()) / width / rows)
    is_8_bit |= max(np.abs(low).max(), np.abs(high).max()) > MAX_FLOAT16
    if not (is_8_bit and is_within):
        code = np.empty((rows, width), np.uint8 if is_8_bit else np.float16)
        encode = _make_8_bit_encoder(bounds) if is_8_bit else np.asarray
        for start in range(0, rows, ROWS_PER_BLOCK):
            check_deadline()
            stop = min(start + ROWS_PER_BLOCK, rows)
            block = read_vectors(start, stop)
            for at, residual in _iterate_residuals(block, list_of_row[start:stop], mean):
                code[start:stop][at] = encode(residual)
    row, counts = np.argsort(list_of_row, kind="stable"), np.bincount(list_of_row, minlength=lists)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    _reorder_rows(code, row)
    checksums = [crc32(code[begin:end].data) for begin, end in itertools.pairwise(starts.tolist())]
    return {
        "mean": mean,
        "spread": (squares / np.maximum(counts, 1) / width).astype(np.float32),
        "start": starts,
        "row": row.astype(np.uint32),
        "code": code,
        "code_checksum": np.array(checksums, np.uint32),
        "bounds": bounds,
    }


def _reorder_rows(x: np.ndarray, order: np.ndarray) -> None:
    """Replace x by x[order], some columns at a time: a copy of all would double the memory."""
    for start in range(0, x.shape[1], COLUMNS_PER_STEP):
        at = slice(start, start + COLUMNS_PER_STEP)
        x[:, at] = x[order, at]


def _iterate_residuals(
    block: np.ndarray, nearest: np.ndarray, mean: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield k − mean for some rows of a block at a time, so that they stay in the cache."""
    for start in range(0, len(block), ROWS_PER_STEP):
        at = slice(start, start + ROWS_PER_STEP)
        yield at, block[at] - mean[nearest[at]]


def _new_bounds(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest numbers of no vectors, (d,) each."""
    return np.full(width, np.inf, np.float32), np.full(width, -np.inf, np.float32)


def _extend_bounds(low: np.ndarray, high: np.ndarray, vectors: np.ndarray) -> None:
    np.minimum(low, vectors.min(axis=0), out=low)
    np.maximum(high, vectors.max(axis=0), out=high)


def _to_low_and_range(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.stack([low, np.where(high > low, high - low, 1)]).astype(np.float32)


def _make_8_bit_encoder(bounds: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that returns the codes of vectors (c, d)."""
    faiss = load_faiss()
    quantizer = faiss.ScalarQuantizer(bounds.shape[1], faiss.ScalarQuantizer.QT_8bit)
    faiss.copy_array_to_vector(bounds.reshape(-1), quantizer.trained)
    encode: Callable[[np.ndarray], np.ndarray] = quantizer.compute_codes
    return encode


def describe_arrays(metric: IndexMetric) -> dict[str, str]:
    """Return the metadata that is stored with the arrays."""
    return {"index": FORMAT, "metric": metric.name}


class SegmentIndex:
    """The index of a segment with `rows` rows. The constructor checks all arrays.

    It raises `ValueError` for arrays that `build_arrays` cannot have returned. If `file` maps them
    into memory, only `code` is read from there afterwards. `code` and `row_of_entry` are None after
    the codes were loaded for the search.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        metadata: Mapping[str, str],
        rows: int,
        width: int,
        file: Segment | None = None,
    ) -> None:
        metric = metadata.get("metric")
        if metadata.get("index") != FORMAT or metric not in METRICS:
            raise ValueError("it has another layout")
        _check_arrays(arrays, rows, width)
        self.metric: str = metric
        self.rows, self.width = rows, width
        # Copies: all arrays may lie in the memory of one file, which the codes fill.
        names = "mean", "spread", "start", "bounds"
        self.mean, self.spread, self.start, self.bounds = (arrays[name].copy() for name in names)
        self.counts = np.diff(self.start)
        self.file = file
        self._code_checksum = arrays["code_checksum"].copy()
        self._is_intact = np.zeros(len(self.mean), bool)
        """The lists whose codes were compared with their checksum."""
        row = arrays["row"]
        self.row_of_entry: np.ndarray | None = row if file is None else row.copy()
        number = np.uint16 if len(self.mean) <= 2**16 else np.uint32
        self._list_of_row = np.empty(rows, number)
        self._list_of_row[row] = np.arange(len(self.mean)).repeat(self.counts)
        self.code: np.ndarray | None = arrays["code"]
        self.is_8_bit = self.code.dtype == np.uint8

    @property
    def list_count(self) -> int:
        return len(self.mean)

    def read_codes(self, i: int) -> np.ndarray:
        """Return the codes of list i; raise `IndexDamagedError` if they are not what was written.

        The first call reads all of them.
        """
        assert self.code is not None and self.file is not None
        codes = self.code[self.start[i] : self.start[i + 1]]
        if not self._is_intact[i]:
            if crc32(codes.data) != self._code_checksum[i]:
                raise self.file.damaged_error(
                    "its content is not what was written", damaged_index_error
                )
            self._is_intact[i] = True
        return codes

    def has_same_means(self, other: SegmentIndex) -> bool:
        return np.array_equal(self.mean, other.mean)

    def has_same_codes(self, other: SegmentIndex) -> bool:
        """Return whether the codes of both have the same meaning."""
        return (
            self.is_8_bit == other.is_8_bit
            and self.has_same_means(other)
            and (not self.is_8_bit or np.array_equal(self.bounds, other.bounds))
        )

    def count_rows(self, is_counted: np.ndarray) -> np.ndarray:
        """Return the number of marked rows in each list, (L,), for marks (m,) of all rows."""
        return np.bincount(self._list_of_row[is_counted], minlength=self.list_count)

    def read_lists(self, is_read: np.ndarray) -> np.ndarray:
        """Return the lists (r,) of the marked rows, for marks (m,) of all rows."""
        return np.asarray(self._list_of_row[is_read], np.int64)

    def lists_of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the lists of some rows."""
        return np.asarray(self._list_of_row[rows], np.int64)


class MergedLists:
    """The lists of some segments with the same means and codes, which are searched together.

    The number of a row is its row in the segment, plus the segment's number in `first_numbers`,
    which is a multiple of 8. The codes of the segments are moved into the lists.
    """

    def __init__(self, segments: Sequence[SegmentIndex]) -> None:
        self.segments, first = segments, segments[0]
        sizes = [-(-x.rows // 8) * 8 for x in segments]
        self.first_numbers = np.cumsum([0, *sizes[:-1]])
        self.rows = sum(x.rows for x in segments)
        self.metric, self.list_count = first.metric, first.list_count
        self._faiss = load_faiss()
        self._lists = self._make_empty_lists(first)
        self._parameters: tuple[np.ndarray | None, int, Any] | None = None
        self._load_codes()

    def _make_empty_lists(self, first: SegmentIndex) -> Any:
        """Return the lists without rows as an index of FAISS."""
        faiss = self._faiss
        kind = faiss.METRIC_L2 if self.metric == "distance" else faiss.METRIC_INNER_PRODUCT
        lists = faiss.IndexIVFScalarQuantizer(
            faiss.IndexFlat(first.width, kind),
            first.width,
            first.list_count,
            faiss.ScalarQuantizer.QT_8bit if first.is_8_bit else faiss.ScalarQuantizer.QT_fp16,
            kind,
            True,
        )
        lists.quantizer.add(np.ascontiguousarray(first.mean))
        if first.is_8_bit:
            bounds = np.ascontiguousarray(first.bounds, np.float32)
            faiss.copy_array_to_vector(bounds.reshape(-1), lists.sq.trained)
        lists.is_trained = True
        return lists

    def _load_codes(self) -> None:
        """Move the codes into the lists, in which the id of an entry is its number."""
        faiss, lists, first = self._faiss, self._lists, self.segments[0]
        # Lists that grow with each segment would take up to twice the memory.
        filled = np.zeros(first.list_count, np.int64)
        counts = np.sum([segment.counts for segment in self.segments], axis=0)
        for i, count in enumerate(counts.tolist()):
            lists.invlists.resize(i, count)
        for segment, number in zip(self.segments, self.first_numbers.tolist(), strict=True):
            assert segment.code is not None and segment.row_of_entry is not None
            numbers = segment.row_of_entry.astype(np.int64) + number
            codes = np.ascontiguousarray(segment.code).view(np.uint8)
            ends, places = segment.start.tolist(), filled.tolist()
            for i, (begin, end) in enumerate(itertools.pairwise(ends)):
                if end > begin:
                    part, part_codes = numbers[begin:end], codes[begin:end]
                    lists.invlists.update_entries(
                        i, places[i], len(part), faiss.swig_ptr(part), faiss.swig_ptr(part_codes)
                    )
            filled += segment.counts
            segment.code = segment.row_of_entry = None
            del codes
        lists.ntotal = self.rows

    def search(
        self,
        queries: np.ndarray,
        lists: np.ndarray,
        list_similarity: np.ndarray,
        count: int,
        allowed: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the `count` nearest rows in some lists, and their similarities.

        Both are (n, count). `lists` (n, p) are the lists to read; −1 is none. `list_similarity`
        (n, p) are the similarities of the queries to the means of these lists. `allowed` are the
        bits of the rows that may be returned, or None. The number −1 fills up what was not found.
        """
        swig_ptr = self._faiss.swig_ptr
        queries = np.ascontiguousarray(queries, np.float32)
        lists = np.ascontiguousarray(lists, np.int64)
        similarity = np.empty((len(queries), count), np.float32)
        numbers = np.empty((len(queries), count), np.int64)
        nearness = np.ascontiguousarray(list_similarity, np.float32)
        # The wrapper of this method in Python takes no parameters.
        self._lists.search_preassigned_c(
            len(queries),
            swig_ptr(queries),
            count,
            swig_ptr(lists),
            swig_ptr(nearness),
            swig_ptr(similarity),
            swig_ptr(numbers),
            False,
            self._make_parameters(allowed, lists.shape[1]),
        )
        if self.metric == "distance":
            similarity *= np.float32(-0.5)
        return numbers, similarity

    def find_rows(self, queries: np.ndarray, lists: int, count: int) -> np.ndarray:
        """Return the numbers (n, count) of the nearest rows in the nearest lists; −1 fills up."""
        swig_ptr = self._faiss.swig_ptr
        queries = np.ascontiguousarray(queries, np.float32)
        similarity = np.empty((len(queries), count), np.float32)
        numbers = np.empty((len(queries), count), np.int64)
        # The wrapper of this method in Python takes longer.
        self._lists.search_c(
            len(queries),
            swig_ptr(queries),
            count,
            swig_ptr(similarity),
            swig_ptr(numbers),
            self._make_parameters(None, min(lists, self.list_count)),
        )
        return numbers

    def _make_parameters(self, allowed: np.ndarray | None, lists: int) -> Any:
        """Return the parameters of a search. Those of the last search are cached."""
        cached, faiss = self._parameters, self._faiss
        if cached is not None and cached[0] is allowed and cached[1] == lists:
            return cached[2]
        if allowed is None:
            parameters = faiss.SearchParametersIVF(nprobe=lists)
        else:
            selector = faiss.IDSelectorBitmap(len(allowed), faiss.swig_ptr(allowed))
            parameters = faiss.SearchParametersIVF(nprobe=lists, sel=selector)
        self._parameters = allowed, lists, parameters
        return parameters


class MappedLists(MergedLists):
    """The same lists, with codes that stay in files, which are mapped into memory.

    A search reads the codes of some lists.
    """

    def _load_codes(self) -> None:
        # FAISS cannot delete a scanner from Python, so threads borrow those that exist.
        self._free_scanners: list[Any] = []

    def search(
        self,
        queries: np.ndarray,
        lists: np.ndarray,
        list_similarity: np.ndarray,
        count: int,
        allowed: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        self._check_not_truncated()
        is_distance = self.metric == "distance"
        nearness = np.full((len(queries), count), np.inf if is_distance else -np.inf, np.float32)
        numbers = np.full((len(queries), count), -1)
        scanner = self._borrow_scanner()
        try:
            self._scan(scanner, queries, lists, list_similarity, allowed, nearness, numbers)
        finally:
            self._free_scanners.append(scanner)
        # FAISS leaves a heap.
        order = np.argsort(nearness if is_distance else -nearness, axis=1, kind="stable")
        numbers, nearness = (np.take_along_axis(x, order, axis=1) for x in (numbers, nearness))
        if is_distance:
            nearness *= np.float32(-0.5)
        return numbers, nearness

    def find_rows(self, queries: np.ndarray, lists: int, count: int) -> np.ndarray:
        queries = np.ascontiguousarray(queries, np.float32)
        similarity, nearest = self._lists.quantizer.search(queries, min(lists, self.list_count))
        return self.search(queries, nearest, similarity, count, None)[0]

    def _borrow_scanner(self) -> Any:
        try:
            return self._free_scanners.pop()
        except IndexError:
            # The parameters of the method of the derived class differ between versions of FAISS.
            return self._faiss.IndexIVF.get_InvertedListScanner(self._lists, False)

    def _scan(
        self,
        scanner: Any,
        queries: np.ndarray,
        lists: np.ndarray,
        list_similarity: np.ndarray,
        allowed: np.ndarray | None,
        nearness: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        """Write the nearest rows of each query, as a heap, into `nearness` and `numbers` (n, c)."""
        swig_ptr, (columns, count) = self._faiss.swig_ptr, (lists.shape[1], numbers.shape[1])
        queries = np.ascontiguousarray(queries, np.float32)
        # Each list is read once for all queries.
        flat, similarity = lists.reshape(-1), list_similarity.reshape(-1)
        order = flat.argsort(kind="stable")
        last, entries = -1, list[tuple[np.ndarray, np.ndarray]]()
        for place, i in zip(order.tolist(), flat[order].tolist(), strict=True):
            if i < 0:
                continue
            if i != last:
                check_deadline()
                last, entries = i, list(self._iterate_entries(i, allowed))
            query = place // columns
            scanner.set_query(swig_ptr(queries[query]))
            scanner.set_list(i, float(similarity[place]))
            best = swig_ptr(nearness[query]), swig_ptr(numbers[query])
            for part, codes in entries:
                scanner.scan_codes(len(part), swig_ptr(codes), swig_ptr(part), *best, count)

    def _check_not_truncated(self) -> None:
        for segment in self.segments:
            assert segment.file is not None
            segment.file.check_not_truncated(damaged_index_error)

    def _iterate_entries(
        self, i: int, allowed: np.ndarray | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the numbers of the allowed rows in a list and their codes, for each segment."""
        for segment, number in zip(self.segments, self.first_numbers.tolist(), strict=True):
            begin, end = segment.start[i : i + 2].tolist()
            if end > begin:
                assert segment.row_of_entry is not None
                codes = segment.read_codes(i)
                numbers = segment.row_of_entry[begin:end].astype(np.int64) + number
                if allowed is not None:
                    is_allowed = (allowed[numbers >> 3] >> (numbers & 7) & 1).astype(bool)
                    numbers, codes = numbers[is_allowed], codes[is_allowed]
                yield numbers, codes.view(np.uint8)
        count_random_reads(len(self.segments))


def read_sample(read_vectors: ReadVectors, rows: int, count: int) -> np.ndarray:
    """Return about `count` vectors, from blocks that are spread over all rows."""
    if rows <= count:
        return read_vectors(0, rows)
    blocks = 64
    starts = np.linspace(0, rows - count // blocks - 1, blocks).astype(int)
    return np.concatenate([read_vectors(at, at + count // blocks) for at in starts.tolist()])


def _is_8_bit_precise(size: np.ndarray, spread: float) -> bool:
    """Return whether 8-bit codes of columns with these ranges tell the rows of a list apart."""
    error = float(np.square(size.astype(float) / CODE_LEVELS).mean()) / 12
    return error <= MAX_CODE_ERROR * spread


def _is_float16(arrays: Mapping[str, np.ndarray]) -> bool:
    code = arrays.get("code")
    return code is not None and code.dtype == np.dtype("<f2")


def _check_arrays(arrays: Mapping[str, np.ndarray], rows: int, width: int) -> None:
    """Raise `ValueError` unless FAISS can use the arrays without reading outside of them."""
    lists = len(arrays.get("mean", ()))
    expected = {
        "mean": ((lists, width), np.dtype("<f4")),
        "spread": ((lists,), np.dtype("<f4")),
        "start": ((lists + 1,), np.dtype("<i8")),
        "row": ((rows,), np.dtype("<u4")),
        "code": ((rows, width), np.dtype("<f2" if _is_float16(arrays) else "u1")),
        "code_checksum": ((lists,), np.dtype("<u4")),
        "bounds": ((2, width), np.dtype("<f4")),
    }
    if not lists or {name: (x.shape, x.dtype) for name, x in arrays.items()} != expected:
        raise ValueError("its arrays have other shapes")
    start = arrays["start"]
    if start[0] or start[-1] != rows or (np.diff(start) < 0).any():
        raise ValueError("its lists are not what was written")
    row = arrays["row"]
    if row.max() >= rows or (np.bincount(row, minlength=rows) != 1).any():
        raise ValueError("its rows are not what was written")
    if not all(np.isfinite(arrays[name]).all() for name in ("mean", "spread", "bounds")):
        raise ValueError("a number in it is not finite")
