"""`Store`, the entry point of the storage: commits, compaction, and snapshots of every version."""

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
    commit_marker,
    compaction,
    garbage,
    limits,
    lock,
)
from qkv.database.storage.blob_storage import (
    BlobStorage,
    DiskBlobStorage,
    FileSystem,
    MemoryBlobStorage,
)
from qkv.database.storage.catalog import CATALOG_FILE, Catalog, VersionEntry
from qkv.database.storage.compaction import CompactReport
from qkv.database.storage.folder import check_path, is_creatable, prepare_folder
from qkv.database.storage.lock import VersionPins, WriteLock
from qkv.database.storage.records import RecordStore
from qkv.database.storage.segments import (
    Layout,
    Segment,
    SegmentEntry,
    Tensors,
    check_block_ids,
    index_file,
)
from qkv.database.storage.snapshot import Snapshot
from qkv.database.storage.writer import (
    StagedFiles,
    WriterState,
    check_unique_digests,
    collect_small_segments,
    fits_in_buffer,
    insert_rows,
    mark_deleted,
)
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.util.logging import log_warning
from qkv.util.types import Closable, ProgressCallback, interruptible_contextmanager

_NO_TENSORS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Commit:
    """The result of a commit: the new version, and the ids of the new rows."""

    version: int
    ids: range


@dataclass(frozen=True)
class Version:
    """One version in the history of a store.

    `what` is its label, `added` and `removed` count the rows that the commit changed, and `rows`
    the live rows.
    """

    number: int
    time: str
    what: str
    added: int
    removed: int
    rows: int


class Store(Closable):
    """Versioned rows with ids that only grow.

    A row is a record (text), a digest with which it is looked up, and named tensors. With
    `path=None`, the store is in memory. A missing folder is created by the first commit; with
    `create=True` it is created at once, and with `create=False` it is an error. Any number of
    processes may read a store. The first commit takes the write lock and holds it until `close`.
    Threads may share one store.

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
        create: bool | None = None,
        skip_damaged: bool = False,
        files: FileSystem | None = None,
    ) -> None:
        self.path = None if path is None else check_path(path)
        self._skip_damaged, self._closed, self._files = skip_damaged, False, files
        self._is_planned = self.path is not None and create is None and is_creatable(self.path)
        self._pins = VersionPins(None if self._is_planned else self.path)
        self.reset_after_fork()
        self._writer_catalog: Catalog | None = None
        self._write_lock: WriteLock | None = None
        if self.path is not None and not self._is_planned:
            self._open_folder(create is not False)
            return
        self._blob_storage: BlobStorage = MemoryBlobStorage()
        self._reader_catalog = Catalog(None)
        self._record_store = RecordStore(self._reader_catalog, self._blob_storage, skip_damaged)
        if self.path is None:
            self._writer_catalog = self._reader_catalog
            lock.register_fork_handler(self)

    def _open_folder(self, create: bool) -> None:
        """Open the files of the store; with `create`, create them if the folder has none."""
        assert self.path is not None
        prepare_folder(self.path, create)
        self._blob_storage = DiskBlobStorage(self.path, self._files)
        # Read the marker first: a catalog that is opened later must contain its commit.
        marker = commit_marker.read_marker(self.path)
        self._reader_catalog = Catalog(self.path / CATALOG_FILE, write=False)
        self._write_lock = WriteLock(self.path)
        self._record_store = RecordStore(
            self._reader_catalog, self._blob_storage, self._skip_damaged
        )
        try:
            garbage.check_not_older(self._reader_catalog, marker)
        except BaseException:
            self.close()
            raise

    def _replace_plan(self, create: bool) -> None:
        """Open the folder of a store that was empty in memory, because there was no folder.

        Without `create`, do so only if another process has created it meanwhile.
        """
        if not self._is_planned:
            return
        assert self.path is not None
        with self._writing_lock:
            if self._is_planned and (create or (self.path / CATALOG_FILE).exists()):
                planned, pins = self._reader_catalog, VersionPins(self.path)
                self._open_folder(create=True)
                self._pins, self._is_planned = pins, False
                planned.close()

    def fork_lock(self) -> threading.RLock:
        """Return the lock that must be held when the process forks."""
        return self._reader_catalog.lock

    def reset_after_fork(self) -> None:
        """Replace all locks by new ones, in a forked child."""
        self._process_id = os.getpid()
        self._pins.reset_after_fork()
        self._writing_lock = threading.RLock()
        self._running_operation = ""
        self._writer_state: WriterState | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        """Return what a pickle contains: the path, or for a store in memory its content."""
        with self._writing_lock, self.fork_lock():
            if self._closed:
                raise StoreClosedError("the store is closed: open it again")
            if self.path is not None:
                create = None if self._is_planned else False
                return self.path.absolute(), self._skip_damaged, None, None, create
            content = self._reader_catalog.dump_content()
            return None, self._skip_damaged, content, self._blob_storage, False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        path, skip_damaged, content, blob_storage, create = state
        Store.__init__(self, path, create=create, skip_damaged=skip_damaged)
        if path is None:
            self._reader_catalog.load_content(content)
            self._blob_storage = self._record_store.blob_storage = blob_storage

    def __del__(self) -> None:
        try:
            # A forked child must not close the connections of its parent.
            if os.getpid() == self._process_id:
                self.close()
        except Exception:  # opening failed, or the interpreter is shutting down
            pass

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        return f"<Store {where}{', closed' if self._closed else ''}>"

    @property
    def version(self) -> int:
        """The newest version, by any process; 0 for an empty store."""
        self._replace_plan(create=False)
        return self._reader_catalog.newest_version().number

    def open_snapshot(self, version: int | None = None) -> Snapshot:
        """Return a snapshot of a version, by default the newest.

        It stays pinned until it is closed.
        """
        self._replace_plan(create=False)
        while True:
            with self._reader_catalog.lock:
                reader = self._reader_catalog
                version_entry = (
                    reader.newest_version() if version is None else reader.find_version(version)
                )
                if version_entry is not None:
                    snapshot = Snapshot(
                        self, self._record_store, self._pins, version_entry, self._skip_damaged
                    )
                    query = "SELECT 1 FROM versions WHERE number = ?"
                    # A compaction may have dropped the version before it was pinned.
                    if snapshot.is_pinned and reader.fetch_value(query, version_entry.number):
                        return snapshot
                    snapshot.close()
            if version is not None:
                raise self._unknown_version_error(version)
            time.sleep(0.001)

    def versions(self) -> list[Version]:
        """Return all versions that no compaction has dropped, oldest first."""
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
        """Write a new version: delete the rows `remove`, add rows, replace the settings.

        `tensors[name]` has the shape (len(records), …). Their names, shapes and types must be the
        same in all commits until `rewrite_tensors`. `arrays` are the arrays of the encoder, which
        can be set once per generation. With `unique`, a digest must not be repeated, and no live
        row may have it. `what` is the label of the version. A commit that changes nothing writes
        no version.
        """
        deleted = sorted({_check_row_id(row) for row in remove})
        if len(records) != len(digests):
            raise ArgumentError(
                f"records and digests must have the same length: {len(records)} records, "
                f"{len(digests)} digests"
            )
        with self._write_session("commit") as (catalog, writer_state):
            previous, layout, fitted = writer_state.newest_version, writer_state.layout, {}
            if records:
                layout = layout or Layout.from_tensors(tensors)
                fitted = layout.check_tensors(tensors, len(records))
            text = _settings_to_json(settings)
            if text is not None and text == catalog.read_settings_text(previous.settings):
                text = None
            ids = range(previous.last + 1, previous.last + 1 + len(records))
            if not (records or deleted or arrays or text is not None):
                return Commit(previous.number, ids)
            if arrays and catalog.fetch_value(
                "SELECT arrays FROM generations WHERE number = ?", previous.generation
            ):
                raise CombinationError("arrays can be set once per generation: use rewrite_tensors")

            staged = self._new_staged_files(catalog, writer_state, text)
            buffered = writer_state.buffered_rows + len(records)
            is_full = bool(records) and not fits_in_buffer(layout, buffered)
            merged: list[SegmentEntry] = []
            rows: list[Segment] = []
            if is_full:
                assert layout is not None
                merged, rows = collect_small_segments(
                    catalog, self._blob_storage, previous.generation, layout
                )
                rows.append(Segment(np.arange(ids.start, ids.stop, dtype=np.int64), fitted))
                buffered = 0

            with (
                staged.write_in_background(layout, rows) as wait_for_segments,
                catalog.write_transaction(),
            ):
                records, digests = list(records), list(digests)
                record_store = RecordStore(catalog, self._blob_storage)
                mark_deleted(record_store, deleted, previous.number + 1)
                if unique:
                    check_unique_digests(record_store, digests, check_existing=bool(previous.rows))
                merged += insert_rows(record_store, staged, ids, digests, records)
                if layout is not None and writer_state.layout is None:
                    catalog.set_layout(previous.generation, layout)
                if is_full:
                    catalog.execute("DELETE FROM resting WHERE generation = ?", previous.generation)
                elif records and layout is not None:
                    catalog.buffer_rows(
                        previous.generation, ids, layout.pack_rows(fitted, len(ids))
                    )
                catalog.discard_segments(merged)
                wait_for_segments()
                if arrays:
                    staged.write_arrays(arrays)
                staged.sync_files()
                staged.register_files(catalog)
                newest = VersionEntry(
                    number=previous.number + 1,
                    last=ids.stop - 1,
                    rows=previous.rows + len(ids) - len(deleted),
                    generation=previous.generation,
                    settings=catalog.insert_settings(text, previous.settings),
                )
                catalog.insert_version(newest, what, len(ids), len(deleted))
            self._acknowledge_commit(WriterState(newest, layout, staged.next_file_number, buffered))
            if merged:
                garbage.remove_files(catalog, self._blob_storage, [entry.file for entry in merged])
            return Commit(newest.number, ids)

    def rewrite_tensors(
        self,
        blocks: Iterable[tuple[Sequence[int] | np.ndarray, Tensors]],
        *,
        settings: Mapping[str, Any] | None = None,
        arrays: Tensors | None = None,
        what: str = "learn",
    ) -> Commit:
        """Write a new version with new tensors for every live row: a new generation.

        `blocks` yields (ids, tensors). All blocks together contain every live row, by ascending id.
        Older versions keep their tensors. At most one segment is in memory at a time.
        """
        with self._write_session("rewrite_tensors") as (catalog, writer_state):
            previous = writer_state.newest_version
            with self.open_snapshot(previous.number) as snapshot:
                live = snapshot.live_ids()
            text = _settings_to_json(settings)
            staged = self._new_staged_files(catalog, writer_state, text)
            staged.generation += 1
            layout: Layout | None = None
            pending: list[Segment] = []
            count = done = 0
            for block, tensors in blocks:
                ids = np.array(block, np.int64).reshape(-1)
                layout = layout or Layout.from_tensors(tensors)
                fitted = layout.check_tensors(tensors, len(ids))
                check_block_ids(ids, live[done : done + len(ids)])
                done += len(ids)
                count += len(ids)
                # Copy the tensors, because the caller may reuse the memory of a block.
                pending.append(
                    Segment(ids, {name: tensor.copy() for name, tensor in fitted.items()})
                )
                if count * (layout.row_bytes + 8) >= limits.MAX_SEGMENT_BYTES:
                    staged.write_segments(layout, pending)
                    pending, count = [], 0
            if done != len(live):
                raise ArgumentError(
                    f"rewrite_tensors: {len(live) - done:,} live rows have no new tensors; the "
                    f"first is row {live[done]}"
                )
            if layout is not None and not fits_in_buffer(layout, count):
                staged.write_segments(layout, pending)
                pending, count = [], 0
            if arrays:
                staged.write_arrays(arrays)
            staged.sync_files()

            with catalog.write_transaction():
                catalog.execute("INSERT INTO generations (number) VALUES (?)", staged.generation)
                if layout is not None:
                    catalog.set_layout(staged.generation, layout)
                    for part in pending:
                        packed = layout.pack_rows(part.tensors, len(part.ids))
                        catalog.buffer_rows(staged.generation, part.ids.tolist(), packed)
                staged.register_files(catalog)
                newest = previous._replace(
                    number=previous.number + 1,
                    generation=staged.generation,
                    settings=catalog.insert_settings(text, previous.settings),
                )
                catalog.insert_version(newest, what, 0, 0)
            self._acknowledge_commit(WriterState(newest, layout, staged.next_file_number, count))
            return Commit(newest.number, range(newest.last + 1, newest.last + 1))

    def compact(self, progress: ProgressCallback | None = None) -> CompactReport:
        """Merge segments, drop deleted rows and old versions.

        Versions that readers use are kept, with their rows. `progress(done, total)` is called with
        numbers of copied rows. If the disk fails, `StoreUnwritableError` is raised and nothing is
        changed. If a cleanup fails after the rows were compacted, the report and the log say so.
        """
        with self._write_session("compact") as (catalog, writer_state):
            changes = catalog.changes
            try:
                report, files = compaction.compact_store(
                    catalog,
                    self._blob_storage,
                    self._pins,
                    writer_state.newest_version,
                    writer_state.next_file_number,
                    progress,
                )
            finally:
                self._pins.release_claims()
            self._acknowledge_commit(WriterState.read_from_catalog(catalog, self._blob_storage))
            changed = catalog.changes != changes
            unfinished = [garbage.remove_files(catalog, self._blob_storage, files)]
            error = None if self.path is None else compaction.vacuum_catalog(catalog)
            if isinstance(error, StoreUnwritableError):
                if not changed:
                    raise error
                message = f"the catalog could not be shrunk ({reason(error)}): free disk space"
                log_warning("%s, and compact %s again", message, self.path)
                unfinished.append(f"{message}, and compact again")
            return replace(report, unfinished="; ".join(filter(None, unfinished)))

    def write_index(
        self, entry: SegmentEntry, arrays: Tensors, metadata: Mapping[str, str]
    ) -> bool:
        """Store the index of a segment beside it.

        Return False if no version has the segment any more. An index belongs to a segment, not to a
        version: writing it is not a commit.
        """
        with self._write_session("write_index") as (catalog, _):
            if entry not in catalog.list_segments(entry.generation):
                return False
            self._blob_storage.write_index(entry, arrays, metadata)
            self._blob_storage.sync_storage()
            return True

    def discard_indexes(self) -> int:
        """Remove all indexes; return how many there were."""
        with self._write_session("discard_indexes") as (catalog, _):
            files = set(self._blob_storage.list_index_files())
            for entry in catalog.list_segments():
                if index_file(entry.file) in files:
                    self._blob_storage.discard_index(entry.file)
            return len(files)

    def close(self) -> None:
        """Release the write lock and close all files.

        Snapshots of this store cannot be read afterwards.
        """
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
            f"version {version} was dropped by a compaction: the oldest is {oldest}"
        )

    def exclusive_lock(self) -> threading.RLock:
        """Return a lock that prevents other threads and processes from writing.

        While the caller holds this lock, what it has read is still true when it commits. The lock
        itself is returned, not a generator-based context manager. After Ctrl-C, a traceback would
        keep such a generator alive, and so the lock would stay held.
        """
        with self._writing_lock:
            if self._closed:
                raise StoreClosedError("the store is closed: open it again")
            self._replace_plan(create=True)
            if self._write_lock is not None:
                if not self._write_lock.is_held:
                    self._write_lock.acquire()
                    self._writer_state = None
                self._write_lock.check_folder(self._reader_catalog)
            return self._writing_lock

    @interruptible_contextmanager
    def _write_session(self, what: str) -> Iterator[tuple[Catalog, WriterState]]:
        """Take the write lock, and yield the writer's catalog and state.

        `what` names the operation.
        """
        # Take both locks, so that no other thread closes the store in between.
        with self._writing_lock, self.exclusive_lock():
            if self._running_operation:
                raise CombinationError(
                    f"{what} cannot run inside {self._running_operation}: call it after "
                    f"{self._running_operation} has returned"
                )
            if self._writer_catalog is None:
                assert self.path is not None
                self._writer_catalog = Catalog(self.path / CATALOG_FILE)
            catalog = self._writer_catalog
            self._running_operation = what
            try:
                if (writer_state := self._writer_state) is None:
                    garbage.check_not_older(catalog, self._last_marker())
                    self._remove_leftovers(catalog)
                    writer_state = WriterState.read_from_catalog(catalog, self._blob_storage)
                    self._acknowledge_commit(writer_state)
                with (
                    self._write_lock.mark_changing()
                    if self._write_lock
                    else contextlib.nullcontext()
                ):
                    yield catalog, writer_state
            except BaseException:
                self._writer_state = None
                with contextlib.suppress(Exception):
                    self._remove_leftovers(catalog)
                raise
            finally:
                self._running_operation = ""

    def _remove_leftovers(self, catalog: Catalog) -> None:
        """Remove the files of an unfinished commit or compaction, while holding the write lock."""
        if self.path is not None:
            garbage.remove_abandoned_folders(self.path.absolute().parent)
        leftovers = garbage.find_leftovers(
            catalog,
            [*self._blob_storage.list_files(), *self._blob_storage.list_index_files()],
            self._last_marker(),
        )
        garbage.remove_files(catalog, self._blob_storage, list(leftovers))

    def _last_marker(self) -> commit_marker.CommitMarker | None:
        """Return the marker of the last commit; None for a store in memory."""
        return None if self._write_lock is None else self._write_lock.marker

    def _acknowledge_commit(self, writer_state: WriterState) -> None:
        """Write the commit marker, and cache the writer's state for the next commit."""
        self._writer_state = writer_state
        if self._write_lock is not None:
            self._write_lock.check_folder(self._reader_catalog)
            self._write_lock.acknowledge_commit(
                writer_state.newest_version.number, writer_state.next_file_number
            )

    def _new_staged_files(
        self, catalog: Catalog, writer_state: WriterState, text: str | None
    ) -> StagedFiles:
        """Return an empty collection of new files.

        `text` are the new settings as JSON text; None if they stay the same.
        """
        settings = (
            catalog.read_settings_text(writer_state.newest_version.settings)
            if text is None
            else text
        )
        return StagedFiles(
            self._blob_storage,
            writer_state.newest_version.generation,
            writer_state.next_file_number,
            settings,
        )


def _check_row_id(row: Any) -> int:
    """Return a row id as an int; raise `DtypeError` for anything else."""
    if isinstance(row, bool) or not isinstance(row, int | np.integer):
        raise DtypeError(f"remove takes row ids, which are integers, not {row!r}")
    return int(row)


def _settings_to_json(settings: Mapping[str, Any] | None) -> str | None:
    """Return settings as JSON text; None if there are none."""
    if settings is None:
        return None
    try:
        return json.dumps(dict(settings), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"settings must consist of JSON values: {error}") from error
