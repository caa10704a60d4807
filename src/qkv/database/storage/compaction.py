"""Compaction: merge segments, drop deleted rows and old versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qkv.database.errors import StoreLockedError, StoreUnwritableError
from qkv.database.storage import limits
from qkv.database.storage.blob_storage import BlobStorage, read_verified_segment
from qkv.database.storage.catalog import Catalog, VersionEntry
from qkv.database.storage.lock import VersionPins
from qkv.database.storage.records import BUNDLE_GENERATION, BUNDLE_LAYOUT, merge_bundles
from qkv.database.storage.segments import Layout, Segment, SegmentEntry
from qkv.database.storage.writer import StagedFiles
from qkv.util.types import ProgressCallback


@dataclass(frozen=True)
class CompactReport:
    """The result of a compaction: numbers of rows, versions, files and bytes.

    `held` are the older versions that were kept because readers use them. `unfinished` says which
    cleanup failed after the rows were compacted. The next compaction tries again.
    """

    rows: int
    dropped_rows: int
    dropped_versions: int
    held: tuple[int, ...]
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    unfinished: str = ""

    def __repr__(self) -> str:
        text = (
            f"{self.rows:,} rows in {self.files_after} files, {self.bytes_after:,} bytes "
            f"(before: {self.files_before} files, {self.bytes_before:,} bytes); dropped "
            f"{self.dropped_rows:,} deleted rows and {self.dropped_versions:,} older versions"
        )
        if self.held:
            versions = ", ".join(map(str, self.held))
            text += (
                f"; kept version {versions}, which readers still use: compact again when they have "
                "finished"
            )
        if self.unfinished:
            text += f"; not finished: {self.unfinished}"
        return text


def compact_store(
    catalog: Catalog,
    blob_storage: BlobStorage,
    pins: VersionPins,
    version_entry: VersionEntry,
    next_file_number: int,
    progress: ProgressCallback | None,
) -> tuple[CompactReport, list[str]]:
    """Compact a store; return the report and the names of the files to remove.

    The caller holds the write lock.
    """
    version_entries = [VersionEntry.from_line(line) for line in catalog.read_versions()]
    # Readers cannot open a version that a compaction has claimed.
    dropped_versions = [
        entry
        for entry in version_entries
        if entry.number != version_entry.number and pins.claim_version(entry.number)
    ]
    dropped_numbers = {entry.number for entry in dropped_versions}
    kept_versions = [entry for entry in version_entries if entry.number not in dropped_numbers]
    generations = sorted({entry.generation for entry in kept_versions})
    deleted = _find_unneeded_rows(catalog, kept_versions)
    deleted_everywhere = deleted[BUNDLE_GENERATION]
    before = catalog.list_segments()
    replaced = [e for e in before if e.generation not in (*generations, BUNDLE_GENERATION)]

    staged = StagedFiles(
        blob_storage,
        version_entry.generation,
        next_file_number,
        catalog.read_settings_text(version_entry.settings),
    )
    work = {}
    for generation in generations:
        layout = catalog.read_layout(generation) or Layout()
        entries = [entry for entry in before if entry.generation == generation]
        rows = deleted[generation]
        partly_deleted = {
            e.file
            for e in entries
            if _deleted_mask(blob_storage.read_segment(e, layout).ids, rows).any()
        }
        work[generation] = (layout, _group_segments_to_merge(entries, partly_deleted))
    total = sum(entry.rows for _, runs in work.values() for run in runs for entry in run)
    done = 0
    for generation, (layout, runs) in work.items():
        staged.generation = generation
        for run in runs:

            def iterate_needed_rows(
                run: list[SegmentEntry], layout: Layout, generation: int
            ) -> Iterator[Segment]:
                nonlocal done
                for entry in run:
                    segment = read_verified_segment(blob_storage, entry, layout)
                    is_needed = ~_deleted_mask(segment.ids, deleted[generation])
                    yield segment if is_needed.all() else segment[is_needed]
                    done += entry.rows
                    if progress is not None:
                        progress(done, total)

            staged.write_segments(layout, iterate_needed_rows(run, layout, generation))
            replaced += run
    for entry in before:
        if entry.generation == BUNDLE_GENERATION:
            is_needed = np.isin(
                blob_storage.read_segment(entry, BUNDLE_LAYOUT).ids, deleted_everywhere, invert=True
            )
            if not is_needed.all():
                replaced.append(entry)
                if is_needed.any():
                    staged.write_bundle(
                        merge_bundles(
                            [read_verified_segment(blob_storage, entry, BUNDLE_LAYOUT)[is_needed]]
                        )
                    )
    staged.sync_files()

    placeholders = ",".join("?" * len(generations))
    arrays = catalog.fetch_all(
        "SELECT arrays FROM generations "
        f"WHERE arrays IS NOT NULL AND number NOT IN ({placeholders})",
        *generations,
    )
    with catalog.write_transaction():
        catalog.execute_many(
            "DELETE FROM versions WHERE number = ?", [(number,) for number in dropped_numbers]
        )
        catalog.execute_many(
            "DELETE FROM rows WHERE id = ?", ((row,) for row in deleted_everywhere.tolist())
        )
        statement = (
            f"DELETE FROM resting WHERE generation NOT IN ({placeholders}, {BUNDLE_GENERATION})"
        )
        catalog.execute(statement, *generations)
        catalog.execute(
            f"DELETE FROM generations WHERE number NOT IN ({placeholders})", *generations
        )
        for generation, rows in deleted.items():
            catalog.execute_many(
                "DELETE FROM resting WHERE generation = ? AND id = ?",
                ((generation, row) for row in rows.tolist()),
            )
        catalog.execute("DELETE FROM settings WHERE number NOT IN (SELECT settings FROM versions)")
        catalog.discard_segments(replaced)
        catalog.execute_many("INSERT OR IGNORE INTO discarded VALUES (?)", arrays)
        staged.register_files(catalog)

    after = catalog.list_segments()
    report = CompactReport(
        rows=version_entry.rows,
        dropped_rows=len(deleted_everywhere),
        dropped_versions=sum(entry.number > 0 for entry in dropped_versions),
        held=tuple(entry.number for entry in kept_versions[:-1]),
        files_before=len(before),
        files_after=len(after),
        bytes_before=sum(entry.size for entry in before),
        bytes_after=sum(entry.size for entry in after),
    )
    return report, [entry.file for entry in replaced] + [file for (file,) in arrays]


def vacuum_catalog(catalog: Catalog) -> StoreLockedError | StoreUnwritableError | None:
    """Shrink the catalog file if more than a quarter of its pages are free.

    If that fails, return the error: a reader is active, or the disk is full or fails.
    """
    if 4 * catalog.fetch_value("PRAGMA freelist_count") > catalog.fetch_value("PRAGMA page_count"):
        try:
            catalog.execute("VACUUM")
            catalog.fetch_all("PRAGMA wal_checkpoint(TRUNCATE)")
        except (StoreLockedError, StoreUnwritableError) as error:
            return error
    return None


def _find_unneeded_rows(
    catalog: Catalog, kept_versions: Sequence[VersionEntry]
) -> dict[int, np.ndarray]:
    """Return for each generation the ids of deleted rows that no kept version needs, ascending.

    The entry for `BUNDLE_GENERATION` has the ids that no kept version of any generation needs.
    """
    lines = catalog.fetch_all("SELECT id, died FROM rows WHERE died IS NOT NULL ORDER BY id")
    ids, died = np.array(lines, np.int64).reshape(-1, 2).T
    deleted: dict[int, np.ndarray] = {}
    for generation in {BUNDLE_GENERATION, *(version.generation for version in kept_versions)}:
        needed = np.zeros(len(ids), bool)
        for version in kept_versions:
            if generation in (BUNDLE_GENERATION, version.generation):
                needed |= (ids <= version.last) & (died > version.number)
        deleted[generation] = ids[~needed]
    return deleted


def _deleted_mask(ids: np.ndarray, deleted: np.ndarray) -> np.ndarray:
    """Return a mask (m,) of the ids that are deleted. Both arrays are ascending."""
    begin, end = np.searchsorted(deleted, (ids[0], ids[-1] + 1))
    return np.isin(ids, deleted[begin:end], assume_unique=True)


def _group_segments_to_merge(
    entries: Sequence[SegmentEntry], partly_deleted: set[str]
) -> list[list[SegmentEntry]]:
    """Return groups of neighbouring segments to rewrite together.

    They have deleted rows, or less than half of the maximum size.
    """
    runs: list[list[SegmentEntry]] = [[]]
    for entry in entries:
        if entry.file in partly_deleted or entry.size < limits.MAX_SEGMENT_BYTES // 2:
            runs[-1].append(entry)
        else:
            runs.append([])
    return [run for run in runs if len(run) > 1 or (run and run[0].file in partly_deleted)]
