"""The store itself: commit, rewrite_tensors, compact, and snapshots of every version."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from qkv.database.errors import StoreClosedError, StoreUnwritableError, VersionNotFoundError, reason
from qkv.database.storage import (
    catalog_queries,
    commit_marker,
    compaction,
    fork_handlers,
    garbage,
    limits,
)
from qkv.database.storage.blob_storage import (
    BlobStorage,
    DiskBlobStorage,
    FileSystem,
    MemoryBlobStorage,
)
from qkv.database.storage.catalog import CATALOG_FILE, Catalog, VersionEntry
from qkv.database.storage.compaction import CompactReport
from qkv.database.storage.folder import check_path, prepare_folder
from qkv.database.storage.layout import Layout, Tensors
from qkv.database.storage.lock import VersionPins, WriteLock
from qkv.database.storage.records import RecordStore
from qkv.database.storage.segments import Segment, SegmentEntry, check_block_ids
from qkv.database.storage.snapshot import Snapshot
from qkv.database.storage.staged_files import StagedFiles
from qkv.database.storage.writer import (
    WriterState,
    check_unique_digests,
    collect_small_segments,
    fits_in_buffer,
    insert_rows,
    mark_deleted,
)
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.util.logging import warn_log
from qkv.util.types import Closable, ProgressCallback, interruptible_contextmanager

_NO_TENSORS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Commit:
    """What a commit made: the version, and the ids of its new rows."""

    version: int
    ids: range


@dataclass(frozen=True)
class Version:
    """One line of a store's history."""

    number: int
    time: str
    what: str
    added: int
    removed: int
    rows: int


class Store(Closable):
    """Rows with ids that only grow, kept as versions.

    A row is a record (text), a digest to find it by, and named tensors. `path=None` keeps all in
    memory. Any number of processes may read; the first commit takes the lock for writing and keeps
    it until `close`. One store may be used by many threads.

    >>> store = Store()
    >>> added = store.commit(
    ...     records=["Li, Mu", "Zhang, Aston"],
    ...     digests=[b"Li", b"Zhang"],
    ...     tensors={"key": np.eye(2, dtype=np.float32)},
    ... )
    >>> added
    Commit(version=1, ids=range(0, 2))
    >>> snapshot = store.open_snapshot()
    >>> snapshot.read_records(snapshot.find_ids(b"Li"))
    ['Li, Mu']
    >>> store.commit(remove=[0])
    Commit(version=2, ids=range(2, 2))
    >>> store.open_snapshot().find_ids(b"Li"), store.open_snapshot(1).find_ids(b"Li")
    ([], [0])
    """

    path: Path | None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        skip_damaged: bool = False,
        files: FileSystem | None = None,
    ) -> None:
        self.path = None if path is None else check_path(path)
        self._pins = VersionPins(self.path)
        self.reset_after_fork()
        self._skip_damaged, self._closed = skip_damaged, False
        self._writer_catalog: Catalog | None = None
        self._write_lock: WriteLock | None = None
        if self.path is None:
            self._blob_storage: BlobStorage = MemoryBlobStorage()
            self._reader_catalog = self._writer_catalog = Catalog(None)
            fork_handlers.register_fork_handler(self)
        else:
            prepare_folder(self.path, create)
            self._blob_storage = DiskBlobStorage(self.path, files)
            # What is marked is in the catalogue, so that one which is read later must have it.
            known = commit_marker.read_marker(self.path)
            self._reader_catalog = Catalog(self.path / CATALOG_FILE, write=False)
            self._write_lock = WriteLock(self.path)
        self._record_store = RecordStore(self._reader_catalog, self._blob_storage, skip_damaged)
        try:
            if self.path is not None:
                garbage.check_not_older(self._reader_catalog, known)
        except BaseException:
            self.close()
            raise

    def fork_lock(self) -> threading.RLock:
        return self._reader_catalog.lock

    def reset_after_fork(self) -> None:
        """With locks that are free, as a child that was forked needs them."""
        self._process_id = os.getpid()
        self._pins.reset_after_fork()
        self._writing_lock = threading.RLock()
        self._running_operation = ""
        self._writer_state: WriterState | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        """One on disk is opened again where it arrives; one in memory goes whole."""
        with self._writing_lock, self.fork_lock():
            if self._closed:
                raise StoreClosedError("the store is closed: open it again")
            if self.path is not None:
                return self.path.absolute(), self._skip_damaged, None, None
            return None, self._skip_damaged, self._reader_catalog.dump_content(), self._blob_storage

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        path, skip_damaged, content, shelf = state
        Store.__init__(self, path, create=False, skip_damaged=skip_damaged)
        if path is None:
            self._reader_catalog.load_content(content)
            self._blob_storage = self._record_store.blob_storage = shelf

    def __del__(self) -> None:
        try:
            # The connections of a forked child are its parent's.
            if os.getpid() == self._process_id:
                self.close()
        except Exception:  # it was never opened, or Python ends and `os` is gone
            pass

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        return f"<Store {where}{', closed' if self._closed else ''}>"

    @property
    def version(self) -> int:
        """The newest version, by this or any other process; 0 is the empty store."""
        return self._reader_catalog.newest_version().number

    def open_snapshot(self, version: int | None = None) -> Snapshot:
        """One version, the newest by default, which stays as it is while the snapshot is held."""
        while True:
            with self._reader_catalog.lock:
                reader = self._reader_catalog
                edition = (
                    reader.newest_version() if version is None else reader.find_version(version)
                )
                if edition is not None:
                    snapshot = Snapshot(
                        self, self._record_store, self._pins, edition, self._skip_damaged
                    )
                    there = "SELECT 1 FROM versions WHERE number = ?"
                    # A compaction may have dropped it before the hold.
                    if snapshot.is_pinned and reader.fetch_value(there, edition.number):
                        return snapshot
                    snapshot.close()
            if version is not None:
                raise self._unknown_version_error(version)
            time.sleep(0.001)

    def versions(self) -> list[Version]:
        """The versions that are kept, oldest first."""
        return [
            Version(*line[:6]) for line in self._reader_catalog.read_versions("WHERE number > 0")
        ]

    def commit(
        self,
        *,
        records: Collection[str] = (),
        digests: Collection[bytes] = (),
        tensors: Tensors = _NO_TENSORS,
        remove: Iterable[int] = (),
        settings: Mapping[str, Any] | None = None,
        arrays: Tensors | None = None,
        unique: bool = False,
        what: str = "add",
    ) -> Commit:
        """One new version: the rows `remove` die, new rows are born, the settings are replaced.

        `tensors[name]` is (len(records), …), of the same names, shapes and types in all commits
        until `rewrite_tensors`. `arrays` fixes a generation's arrays, once. `unique` refuses a
        digest that lives already or comes twice. A commit that changes nothing makes no version.
        """
        gone = sorted({_check_row_id(row) for row in remove})
        if len(records) != len(digests):
            raise ArgumentError(
                f"there must be one digest for each record: {len(records)} records, "
                f"{len(digests)} digests"
            )
        with self._write_session("commit") as (catalogue, desk):
            edition, layout, fitted = desk.newest_version, desk.layout, {}
            if records:
                layout = layout or Layout.from_tensors(tensors)
                fitted = layout.check_tensors(tensors, len(records))
            text = _settings_to_json(settings)
            if text is not None and text == catalogue.read_settings_text(edition.settings):
                text = None
            ids = range(edition.last + 1, edition.last + 1 + len(records))
            if not (records or gone or arrays or text is not None):
                return Commit(edition.number, ids)
            if arrays and catalogue.fetch_value(
                "SELECT arrays FROM generations WHERE number = ?", edition.generation
            ):
                raise CombinationError("the arrays of a generation are fixed: use rewrite_tensors")

            draft = self._new_staged_files(catalogue, desk, text)
            resting = desk.buffered_rows + len(records)
            full = bool(records) and not fits_in_buffer(layout, resting)
            absorbed: list[SegmentEntry] = []
            rows: list[Segment] = []
            if full:
                assert layout is not None
                absorbed, rows = collect_small_segments(
                    catalogue, self._blob_storage, edition.generation, layout
                )
                rows.append(Segment(np.arange(ids.start, ids.stop, dtype=np.int64), fitted))
                resting = 0

            with draft.write_in_background(layout, rows) as written, catalogue.write_transaction():
                records, digests = list(records), list(digests)
                lines = RecordStore(catalogue, self._blob_storage)
                mark_deleted(lines, gone, edition.number + 1)
                if unique:
                    check_unique_digests(lines, digests, look=bool(edition.rows))
                absorbed += insert_rows(lines, draft, ids, digests, records)
                if layout is not None and desk.layout is None:
                    catalog_queries.set_layout(catalogue, edition.generation, layout)
                if full:
                    catalogue.execute(
                        "DELETE FROM resting WHERE generation = ?", edition.generation
                    )
                elif records and layout is not None:
                    catalog_queries.buffer_rows(
                        catalogue, edition.generation, ids, layout.pack_rows(fitted, len(ids))
                    )
                catalog_queries.discard_segments(catalogue, absorbed)
                written()
                if arrays:
                    draft.write_arrays(arrays)
                draft.sync_files()
                draft.register_files(catalogue)
                newest = VersionEntry(
                    number=edition.number + 1,
                    last=ids.stop - 1,
                    rows=edition.rows + len(ids) - len(gone),
                    generation=edition.generation,
                    settings=catalog_queries.insert_settings(catalogue, text, edition.settings),
                )
                catalogue.insert_version(newest, what, len(ids), len(gone))
            self._acknowledge_commit(WriterState(newest, layout, draft.next_file_number, resting))
            if absorbed:
                garbage.remove_files(
                    catalogue, self._blob_storage, [entry.file for entry in absorbed]
                )
            return Commit(newest.number, ids)

    def rewrite_tensors(
        self,
        blocks: Iterable[tuple[Sequence[int] | np.ndarray, Tensors]],
        *,
        settings: Mapping[str, Any] | None = None,
        arrays: Tensors | None = None,
        what: str = "learn",
    ) -> Commit:
        """One new version in which every live row has other tensors: a new generation.

        `blocks` are (ids, tensors), together all live rows by ascending id. Older versions keep
        theirs. Memory is needed for one segment.
        """
        with self._write_session("rewrite_tensors") as (catalogue, desk):
            edition = desk.newest_version
            with self.open_snapshot(edition.number) as snapshot:
                live = snapshot.live_ids()
            text = _settings_to_json(settings)
            draft = self._new_staged_files(catalogue, desk, text)
            draft.generation += 1
            layout: Layout | None = None
            held: list[Segment] = []
            count = done = 0
            for block, tensors in blocks:
                ids = np.array(block, np.int64).reshape(-1)
                layout = layout or Layout.from_tensors(tensors)
                fitted = layout.check_tensors(tensors, len(ids))
                check_block_ids(ids, live[done : done + len(ids)])
                done += len(ids)
                count += len(ids)
                # The caller may use the memory of a block again.
                held.append(Segment(ids, {name: tensor.copy() for name, tensor in fitted.items()}))
                if count * (layout.row_bytes + 8) >= limits.MAX_SEGMENT_BYTES:
                    draft.write_segments(layout, held)
                    held, count = [], 0
            if done != len(live):
                raise ArgumentError(
                    f"rewrite_tensors: {len(live) - done:,} live rows got no tensors, the first is "
                    f"row {live[done]}"
                )
            if layout is not None and not fits_in_buffer(layout, count):
                draft.write_segments(layout, held)
                held, count = [], 0
            if arrays:
                draft.write_arrays(arrays)
            draft.sync_files()

            with catalogue.write_transaction():
                catalogue.execute("INSERT INTO generations (number) VALUES (?)", draft.generation)
                if layout is not None:
                    catalog_queries.set_layout(catalogue, draft.generation, layout)
                    for part in held:
                        packed = layout.pack_rows(part.tensors, len(part.ids))
                        catalog_queries.buffer_rows(
                            catalogue, draft.generation, part.ids.tolist(), packed
                        )
                draft.register_files(catalogue)
                newest = edition._replace(
                    number=edition.number + 1,
                    generation=draft.generation,
                    settings=catalog_queries.insert_settings(catalogue, text, edition.settings),
                )
                catalogue.insert_version(newest, what, 0, 0)
            self._acknowledge_commit(WriterState(newest, layout, draft.next_file_number, count))
            return Commit(newest.number, range(newest.last + 1, newest.last + 1))

    def compact(self, progress: ProgressCallback | None = None) -> CompactReport:
        """Merge segments, drop dead rows, forget older versions.

        A version that anybody reads is kept, and so are its rows. `progress(done, total)` counts
        rows that are copied. `StoreUnwritableError` where the disk fails: then nothing was
        changed. What fails after the rows are compacted is in the report and in the log.
        """
        with self._write_session("compact") as (catalogue, desk):
            changes = catalogue.changes
            try:
                report, files = compaction.compact_store(
                    catalogue,
                    self._blob_storage,
                    self._pins,
                    desk.newest_version,
                    desk.next_file_number,
                    progress,
                )
            finally:
                self._pins.release_claims()
            self._acknowledge_commit(WriterState.read_from_catalog(catalogue, self._blob_storage))
            changed = catalogue.changes != changes
            unfinished = [garbage.remove_files(catalogue, self._blob_storage, files)]
            fault = None if self.path is None else compaction.vacuum_catalog(catalogue)
            if isinstance(fault, StoreUnwritableError):
                if not changed:
                    raise fault
                told = f"the catalogue could not be shrunk ({reason(fault)}): make room on the disk"
                warn_log("%s, and compact %s again", told, self.path)
                unfinished.append(f"{told}, and compact again")
            return replace(report, unfinished="; ".join(filter(None, unfinished)))

    def close(self) -> None:
        """Give the lock back and close the files. Snapshots cannot be read any more."""
        with self._writing_lock:
            self._closed = True
            if self._writer_catalog is not None:
                self._writer_catalog.close()
            self._reader_catalog.close()
            self._pins.close()
            if self._write_lock is not None:
                self._write_lock.release()

    def _unknown_version_error(self, version: int) -> VersionNotFoundError:
        newest = self._reader_catalog.newest_version().number
        if version > newest or version < 0:
            return VersionNotFoundError(f"version {version} does not exist: the newest is {newest}")
        oldest = self._reader_catalog.fetch_value("SELECT min(number) FROM versions")
        return VersionNotFoundError(
            f"version {version} was dropped by a compaction: the oldest kept is {oldest}"
        )

    def exclusive_lock(self) -> threading.RLock:
        """Inside of this no other thread or process writes: what is read here is still true when
        it is committed.

        It is the lock itself: a generator would hold it after Ctrl-C for as long as somebody keeps
        the traceback, as Python's prompt does.
        """
        with self._writing_lock:
            if self._closed:
                raise StoreClosedError("the store is closed: open it again")
            if self._write_lock is not None:
                if not self._write_lock.is_held:
                    self._write_lock.acquire()
                    self._writer_state = None
                self._write_lock.check_folder(self._reader_catalog)
            return self._writing_lock

    @interruptible_contextmanager
    def _write_session(self, what: str) -> Iterator[tuple[Catalog, WriterState]]:
        """The lock for writing, the writer's connection, and the newest state."""
        with (
            self._writing_lock,
            self.exclusive_lock(),
        ):  # else it might be closed between look and lock
            if self._running_operation:
                raise CombinationError(
                    f"{what} cannot run inside {self._running_operation}: let it end first"
                )
            if self._writer_catalog is None:
                assert self.path is not None
                self._writer_catalog = Catalog(self.path / CATALOG_FILE)
            catalogue = self._writer_catalog
            self._running_operation = what
            try:
                if (desk := self._writer_state) is None:
                    garbage.check_not_older(catalogue, self._last_marker())
                    self._remove_leftovers(catalogue)
                    desk = WriterState.read_from_catalog(catalogue, self._blob_storage)
                    self._acknowledge_commit(desk)
                with (
                    self._write_lock.mark_changing()
                    if self._write_lock
                    else contextlib.nullcontext()
                ):
                    yield catalogue, desk
            except BaseException:
                self._writer_state = None
                with contextlib.suppress(Exception):
                    self._remove_leftovers(catalogue)
                raise
            finally:
                self._running_operation = ""

    def _remove_leftovers(self, catalogue: Catalog) -> None:
        """Remove what an unfinished commit or compaction left. Needs the lock for writing."""
        if self.path is not None:
            garbage.remove_abandoned_folders(self.path.absolute().parent)
        found = garbage.find_leftovers(
            catalogue, self._blob_storage.list_files(), self._last_marker()
        )
        garbage.remove_files(catalogue, self._blob_storage, list(found))

    def _last_marker(self) -> commit_marker.CommitMarker | None:
        return None if self._write_lock is None else self._write_lock.marker

    def _acknowledge_commit(self, desk: WriterState) -> None:
        """Remember what was committed, here and beside the catalogue."""
        self._writer_state = desk
        if self._write_lock is not None:
            self._write_lock.check_folder(self._reader_catalog)
            self._write_lock.acknowledge_commit(desk.newest_version.number, desk.next_file_number)

    def _new_staged_files(
        self, catalogue: Catalog, desk: WriterState, text: str | None
    ) -> StagedFiles:
        settings = (
            catalogue.read_settings_text(desk.newest_version.settings) if text is None else text
        )
        return StagedFiles(
            self._blob_storage, desk.newest_version.generation, desk.next_file_number, settings
        )


def _check_row_id(row: Any) -> int:
    if isinstance(row, bool) or not isinstance(row, int | np.integer):
        raise DtypeError(f"remove takes row ids, which are integers, not {row!r}")
    return int(row)


def _settings_to_json(settings: Mapping[str, Any] | None) -> str | None:
    if settings is None:
        return None
    try:
        return json.dumps(dict(settings), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"settings must be JSON: {error}") from error
