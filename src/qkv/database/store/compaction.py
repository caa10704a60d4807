"""Compaction: segments merged, dead rows dropped, older versions forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qkv.database.faults import Locked, Unwritable
from qkv.database.store import ledger, sizes
from qkv.database.store.bundles import GENERATION, LAYOUT, merged
from qkv.database.store.catalogue import Catalogue, Edition
from qkv.database.store.draft import Draft
from qkv.database.store.layout import Layout
from qkv.database.store.lock import Pins
from qkv.database.store.segments import Entry, Segment
from qkv.database.store.shelf import Shelf
from qkv.types import Progress


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


def compact(
    catalogue: Catalogue,
    shelf: Shelf,
    pins: Pins,
    edition: Edition,
    files: int,
    progress: Progress | None,
) -> tuple[CompactReport, list[str]]:
    """Compact, as the writer; give the report and the files that are to be removed."""
    editions = [Edition.of(line) for line in catalogue.versions()]
    # A version that was seized cannot be opened until it is gone.
    dropped = [one for one in editions if one.number != edition.number and pins.seize(one.number)]
    gone = {one.number for one in dropped}
    kept = [one for one in editions if one.number not in gone]
    generations = sorted({one.generation for one in kept})
    dead = _unneeded(catalogue, kept)
    unwanted = dead[GENERATION]
    before = ledger.segments(catalogue)
    replaced = [e for e in before if e.generation not in (*generations, GENERATION)]

    draft = Draft(shelf, edition.generation, files, catalogue.settings(edition.settings))
    work = {}
    for generation in generations:
        layout = ledger.layout(catalogue, generation) or Layout()
        entries = [entry for entry in before if entry.generation == generation]
        rows = dead[generation]
        worn = {e.file for e in entries if _among(shelf.get(e, layout).ids, rows).any()}
        work[generation] = (layout, _runs(entries, worn))
    total = sum(entry.rows for _, runs in work.values() for run in runs for entry in run)
    done = 0
    for generation, (layout, runs) in work.items():
        draft.generation = generation
        for run in runs:

            def kept_rows(run: list[Entry], layout: Layout, generation: int) -> Iterator[Segment]:
                nonlocal done
                for entry in run:
                    segment = copied(shelf, entry, layout)
                    keep = ~_among(segment.ids, dead[generation])
                    yield segment if keep.all() else segment[keep]
                    done += entry.rows
                    if progress is not None:
                        progress(done, total)

            draft.segments(layout, kept_rows(run, layout, generation))
            replaced += run
    for entry in before:
        if entry.generation == GENERATION:
            keep = np.isin(shelf.get(entry, LAYOUT).ids, unwanted, invert=True)
            if not keep.all():
                replaced.append(entry)
                if keep.any():
                    draft.bundle(merged([copied(shelf, entry, LAYOUT)[keep]]))
    draft.settle()

    marks = ",".join("?" * len(generations))
    arrays = catalogue.all(
        f"SELECT arrays FROM generations WHERE arrays IS NOT NULL AND number NOT IN ({marks})",
        *generations,
    )
    with catalogue.transaction():
        catalogue.many("DELETE FROM versions WHERE number = ?", [(number,) for number in gone])
        catalogue.many("DELETE FROM rows WHERE id = ?", ((row,) for row in unwanted.tolist()))
        statement = f"DELETE FROM resting WHERE generation NOT IN ({marks}, {GENERATION})"
        catalogue.run(statement, *generations)
        catalogue.run(f"DELETE FROM generations WHERE number NOT IN ({marks})", *generations)
        for generation, rows in dead.items():
            catalogue.many(
                "DELETE FROM resting WHERE generation = ? AND id = ?",
                ((generation, row) for row in rows.tolist()),
            )
        catalogue.run("DELETE FROM settings WHERE number NOT IN (SELECT settings FROM versions)")
        ledger.discard(catalogue, replaced)
        catalogue.many("INSERT OR IGNORE INTO discarded VALUES (?)", arrays)
        draft.enter(catalogue)

    after = ledger.segments(catalogue)
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


def shrink(catalogue: Catalogue) -> Locked | Unwritable | None:
    """Give the catalogue's empty pages back to the system, where they are many. Returns why that
    could not be done: a reader is at work, or the disk fails or is full."""
    if 4 * catalogue.value("PRAGMA freelist_count") > catalogue.value("PRAGMA page_count"):
        try:
            catalogue.run("VACUUM")
            catalogue.all("PRAGMA wal_checkpoint(TRUNCATE)")
        except (Locked, Unwritable) as error:
            return error
    return None


def copied(shelf: Shelf, entry: Entry, layout: Layout) -> Segment:
    """A segment to be copied: read in full first, so that damage is not sealed as sound."""
    shelf.verify(entry.file, entry.size, entry.checksum)
    return shelf.get(entry, layout)


def _unneeded(catalogue: Catalogue, kept: Sequence[Edition]) -> dict[int, np.ndarray]:
    """The rows that no kept version of each generation has, ascending; of bundles, which are of all
    generations, that none at all has."""
    found = catalogue.all("SELECT id, died FROM rows WHERE died IS NOT NULL ORDER BY id")
    ids, died = np.array(found, np.int64).reshape(-1, 2).T
    dead: dict[int, np.ndarray] = {}
    for generation in {GENERATION, *(one.generation for one in kept)}:
        wanted = np.zeros(len(ids), bool)
        for one in kept:
            if generation in (GENERATION, one.generation):
                wanted |= (ids <= one.last) & (died > one.number)
        dead[generation] = ids[~wanted]
    return dead


def _among(ids: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Which of the ids are dead, (m,); both ascend."""
    begin, end = np.searchsorted(dead, (ids[0], ids[-1] + 1))
    return np.isin(ids, dead[begin:end], assume_unique=True)


def _runs(entries: Sequence[Entry], worn: set[str]) -> list[list[Entry]]:
    """Neighbours that are to be written anew: segments with dead rows, and small ones together."""
    runs: list[list[Entry]] = [[]]
    for entry in entries:
        if entry.file in worn or entry.size < sizes.SEGMENT_BYTES // 2:
            runs[-1].append(entry)
        else:
            runs.append([])
    return [run for run in runs if len(run) > 1 or (run and run[0].file in worn)]
