"""Build the index of a database: one file per segment, then the measurement."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from qkv.database.index import segment_index
from qkv.database.index.calibration import IndexReport, measure_index
from qkv.database.index.metric import IndexMetric, find_metric
from qkv.database.index.row_index import forget_indexes, read_part_vectors
from qkv.database.index.segment_index import Centres
from qkv.database.query.arguments import parse_queries
from qkv.database.storage import Store
from qkv.database.storage.snapshot import SegmentPart, Snapshot
from qkv.database.table.view import TableView
from qkv.errors import ArgumentError, CombinationError, validate_fraction
from qkv.frameworks import is_array, to_numpy
from qkv.scores import ScoreLike
from qkv.util.progress import progress_bar
from qkv.util.types import ProgressCallback

KINDS = ("auto", "lists")
load_faiss = segment_index.load_faiss


def check_arguments(kind: Any, recall: Any) -> None:
    """Raise `ArgumentError` unless the kind of index exists and the recall is a share."""
    if kind not in KINDS:
        raise ArgumentError(f"kind must be {' or '.join(map(repr, KINDS))}, not {kind!r}")
    if not 0 < validate_fraction("index: recall", recall) < 1:
        raise ArgumentError(f"index: recall must be between 0 and 1, not {recall!r}")


def choose_metric(view: TableView, score: ScoreLike | None) -> IndexMetric:
    """Return the metric of an index for this score; raise if there can be none."""
    if view.has_sparse_vectors:
        raise CombinationError(
            "index: the keys have sparse vectors of words, which an index does not cover: choose "
            "an encoder without them, such as 'characters' or 'sentences'"
        )
    metric = find_metric(view.resolve_score(score), view._vector_widths[0])
    if isinstance(metric, str):
        raise CombinationError(f"index: {metric}: pass a score such as 'cosine' or 'gaussian'")
    return metric


def encode_held_out(view: TableView, queries: Any) -> np.ndarray | None:
    """Return the vectors of the caller's queries (n, d), or None."""
    if queries is None:
        return None
    parsed, is_single = parse_queries(view, queries)
    if is_single:
        raise ArgumentError("index: queries must be a list of queries, not a single one")
    if is_array(parsed) and view.schema.key_kind != "vector":
        return to_numpy(parsed)
    return np.asarray(view.encode_queries(parsed).code)


def build_segments(
    store: Store, view: TableView, metric: IndexMetric, progress: ProgressCallback | None
) -> None:
    """Build the index of each large segment that has none. Finished ones stay after Ctrl-C."""
    parts = [part for part in view.snapshot.list_parts() if _needs_index(view, part, metric)]
    total, done = sum(len(part.segment.ids) for part in parts), 0
    with progress_bar("rows in the index", total) as show_progress:

        def report_rows(rows: int) -> None:
            nonlocal done
            done += rows
            (progress or show_progress)(done, total)

        centres = _train_centres(parts, metric)
        if centres is not None:
            for part in parts:
                _build_segment(store, part, metric, centres, report_rows)
    if parts:
        forget_indexes(view.snapshot)
        view.index_cache.clear()


def _needs_index(view: TableView, part: SegmentPart, metric: IndexMetric) -> bool:
    """Return whether a segment is large, wholly visible, and has no index for this metric."""
    entry = part.entry
    if entry is None or entry.rows < segment_index.MIN_ROWS or len(part.segment.ids) != entry.rows:
        return False
    return read_metric_name(view.snapshot, part) != metric.name


def read_metric_name(snapshot: Snapshot, part: SegmentPart) -> str | None:
    """Return the metric of the intact index of a segment, or None."""
    from qkv.database.errors import StoreDamagedError

    assert part.entry is not None
    try:
        stored = snapshot.read_index(part.entry, is_mapped=True)
    except StoreDamagedError:
        return None
    if stored is None or stored[1].get("index") != segment_index.FORMAT:
        return None
    return stored[1].get("metric")


def _train_centres(parts: list[SegmentPart], metric: IndexMetric) -> Centres | None:
    """Return the lists that all these segments share, so that a search compares few means.

    Return None if float32 cannot hold the vectors of any segment.
    """
    total = sum(len(part.segment.ids) for part in parts)
    share = segment_index.count_lists(total) * segment_index.TRAINING_ROWS_PER_LIST / max(total, 1)
    samples, rows = [], 0
    for part in parts:
        part.segment.check_not_truncated()
        count = len(part.segment.ids)
        sample = segment_index.read_sample(
            partial(read_part_vectors, part, metric), count, math.ceil(share * count)
        )
        if metric.fits_float32(sample):
            samples.append(sample)
            rows += count
    if not samples:
        return None
    joined = samples[0] if len(samples) == 1 else np.concatenate(samples)
    samples.clear()  # their memory is free during the training
    return segment_index.train_centres(joined, rows, metric)


def _build_segment(
    store: Store,
    part: SegmentPart,
    metric: IndexMetric,
    centres: Centres,
    report_rows: Callable[[int], None],
) -> None:
    assert part.entry is not None
    part.segment.check_not_truncated()
    arrays = segment_index.build_arrays(
        partial(read_part_vectors, part, metric),
        len(part.segment.ids),
        metric,
        centres,
        report_rows,
    )
    if arrays is not None:
        store.write_index(part.entry, arrays, segment_index.describe_arrays(metric))


def measure_view(
    view: TableView,
    metric: IndexMetric,
    recall: float,
    queries: np.ndarray | None,
    progress: ProgressCallback | None,
) -> IndexReport:
    """Measure the index on held-out queries, with a progress bar."""
    done = 0
    with progress_bar("queries measured") as show_progress:

        def report_queries(count: int) -> None:
            nonlocal done
            done += count
            (progress or show_progress)(done, None)

        return measure_index(view, metric, recall, queries, report_queries)
