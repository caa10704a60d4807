"""Compaction: segments merged, dead rows dropped, older versions forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qkv.database.errors import StoreLockedError, StoreUnwritableError
from qkv.database.storage import catalog_queries, limits
from qkv.database.storage.blob_storage import BlobStorage
from qkv.database.storage.bundles import BUNDLE_GENERATION, BUNDLE_LAYOUT, merge_bundles
from qkv.database.storage.catalog import Catalog, VersionEntry
from qkv.database.storage.layout import Layout
from qkv.database.storage.lock import VersionPins
from qkv.database.storage.segments import Segment, SegmentEntry
from qkv.database.storage.staged_files import StagedFiles
from qkv.util.types import ProgressCallback


@dataclass(frozen=True)
class CompactReport:
    """What a compaction did: live rows, what it dropped, and the versions that readers still need.

    `held` are the older versions that somebody reads; a later compaction drops them. `unfinished`
    says what was not done after the rows were compacted, and why; the next compaction tries again.
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
            f"{self.dropped_rows:,} dead rows and {self.dropped_versions:,} older versions"
        )
        if self.held:
            versions = ", ".join(map(str, self.held))
            text += f"; kept version {versions} for its readers: compact again when they are done"
        if self.unfinished:
            text += f"; not finished: {self.unfinished}"
        return text


def compact_store(
    catalogue: Catalog,
    shelf: BlobStorage,
    pins: VersionPins,
    edition: VersionEntry,
    files: int,
    progress: ProgressCallback | None,
) -> tuple[CompactReport, list[str]]:
    """Compact, as the writer; give the report and the files that are to be removed."""
    editions = [VersionEntry.from_line(line) for line in catalogue.read_versions()]
    # A version that was seized cannot be opened until it is gone.
    dropped = [
        one for one in editions if one.number != edition.number and pins.claim_version(one.number)
    ]
    gone = {one.number for one in dropped}
    kept = [one for one in editions if one.number not in gone]
    generations = sorted({one.generation for one in kept})
    dead = _find_unneeded_rows(catalogue, kept)
    unwanted = dead[BUNDLE_GENERATION]
    before = catalog_queries.list_segments(catalogue)
    replaced = [e for e in before if e.generation not in (*generations, BUNDLE_GENERATION)]

    draft = StagedFiles(
        shelf, edition.generation, files, catalogue.read_settings_text(edition.settings)
    )
    work = {}
    for generation in generations:
        layout = catalog_queries.read_layout(catalogue, generation) or Layout()
        entries = [entry for entry in before if entry.generation == generation]
        rows = dead[generation]
        worn = {
            e.file for e in entries if _dead_mask(shelf.read_segment(e, layout).ids, rows).any()
        }
        work[generation] = (layout, _group_segments_to_merge(entries, worn))
    total = sum(entry.rows for _, runs in work.values() for run in runs for entry in run)
    done = 0
    for generation, (layout, runs) in work.items():
        draft.generation = generation
        for run in runs:

            def iterate_kept_rows(
                run: list[SegmentEntry], layout: Layout, generation: int
            ) -> Iterator[Segment]:
                nonlocal done
                for entry in run:
                    segment = read_verified_segment(shelf, entry, layout)
                    keep = ~_dead_mask(segment.ids, dead[generation])
                    yield segment if keep.all() else segment[keep]
                    done += entry.rows
                    if progress is not None:
                        progress(done, total)

            draft.write_segments(layout, iterate_kept_rows(run, layout, generation))
            replaced += run
    for entry in before:
        if entry.generation == BUNDLE_GENERATION:
            keep = np.isin(shelf.read_segment(entry, BUNDLE_LAYOUT).ids, unwanted, invert=True)
            if not keep.all():
                replaced.append(entry)
                if keep.any():
                    draft.write_bundle(
                        merge_bundles([read_verified_segment(shelf, entry, BUNDLE_LAYOUT)[keep]])
                    )
    draft.sync_files()

    marks = ",".join("?" * len(generations))
    arrays = catalogue.fetch_all(
        f"SELECT arrays FROM generations WHERE arrays IS NOT NULL AND number NOT IN ({marks})",
        *generations,
    )
    with catalogue.write_transaction():
        catalogue.execute_many(
            "DELETE FROM versions WHERE number = ?", [(number,) for number in gone]
        )
        catalogue.execute_many(
            "DELETE FROM rows WHERE id = ?", ((row,) for row in unwanted.tolist())
        )
        statement = f"DELETE FROM resting WHERE generation NOT IN ({marks}, {BUNDLE_GENERATION})"
        catalogue.execute(statement, *generations)
        catalogue.execute(f"DELETE FROM generations WHERE number NOT IN ({marks})", *generations)
        for generation, rows in dead.items():
            catalogue.execute_many(
                "DELETE FROM resting WHERE generation = ? AND id = ?",
                ((generation, row) for row in rows.tolist()),
            )
        catalogue.execute(
            "DELETE FROM settings WHERE number NOT IN (SELECT settings FROM versions)"
        )
        catalog_queries.discard_segments(catalogue, replaced)
        catalogue.execute_many("INSERT OR IGNORE INTO discarded VALUES (?)", arrays)
        draft.register_files(catalogue)

    after = catalog_queries.list_segments(catalogue)
    report = CompactReport(
        rows=edition.rows,
        dropped_rows=len(unwanted),
        dropped_versions=sum(one.number > 0 for one in dropped),
        held=tuple(one.number for one in kept[:-1]),
        files_before=len(before),
        files_after=len(after),
        bytes_before=sum(entry.size for entry in before),
        bytes_after=sum(entry.size for entry in after),
    )
    return report, [entry.file for entry in replaced] + [file for (file,) in arrays]


def vacuum_catalog(catalogue: Catalog) -> StoreLockedError | StoreUnwritableError | None:
    """Give the catalogue's empty pages back to the system, where they are many. Returns why that
    could not be done: a reader is at work, or the disk fails or is full."""
    if 4 * catalogue.fetch_value("PRAGMA freelist_count") > catalogue.fetch_value(
        "PRAGMA page_count"
    ):
        try:
            catalogue.execute("VACUUM")
            catalogue.fetch_all("PRAGMA wal_checkpoint(TRUNCATE)")
        except (StoreLockedError, StoreUnwritableError) as error:
            return error
    return None


def read_verified_segment(shelf: BlobStorage, entry: SegmentEntry, layout: Layout) -> Segment:
    """A segment to be copied: read in full first, so that damage is not sealed as sound."""
    shelf.verify_file(entry.file, entry.size, entry.checksum)
    return shelf.read_segment(entry, layout)


def _find_unneeded_rows(catalogue: Catalog, kept: Sequence[VersionEntry]) -> dict[int, np.ndarray]:
    """The rows that no kept version of each generation has, ascending; of bundles, which are of all
    generations, that none at all has."""
    found = catalogue.fetch_all("SELECT id, died FROM rows WHERE died IS NOT NULL ORDER BY id")
    ids, died = np.array(found, np.int64).reshape(-1, 2).T
    dead: dict[int, np.ndarray] = {}
    for generation in {BUNDLE_GENERATION, *(one.generation for one in kept)}:
        wanted = np.zeros(len(ids), bool)
        for one in kept:
            if generation in (BUNDLE_GENERATION, one.generation):
                wanted |= (ids <= one.last) & (died > one.number)
        dead[generation] = ids[~wanted]
    return dead


def _dead_mask(ids: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Which of the ids are dead, (m,); both ascend."""
    begin, end = np.searchsorted(dead, (ids[0], ids[-1] + 1))
    return np.isin(ids, dead[begin:end], assume_unique=True)


def _group_segments_to_merge(
    entries: Sequence[SegmentEntry], worn: set[str]
) -> list[list[SegmentEntry]]:
    """Neighbours that are to be written anew: segments with dead rows, and small ones together."""
    runs: list[list[SegmentEntry]] = [[]]
    for entry in entries:
        if entry.file in worn or entry.size < limits.MAX_SEGMENT_BYTES // 2:
            runs[-1].append(entry)
        else:
            runs.append([])
    return [run for run in runs if len(run) > 1 or (run and run[0].file in worn)]
