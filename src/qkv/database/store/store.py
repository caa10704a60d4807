"""The store itself: commit, recode, compact, and snapshots of every version."""

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

from qkv.database.faults import Closed, UnknownVersion, Unwritable, reason
from qkv.database.store import compaction, fork, ledger, mark, sizes, sweep
from qkv.database.store.catalogue import FILE, Catalogue, Edition
from qkv.database.store.compaction import CompactReport
from qkv.database.store.desk import Desk, bear, bury, distinct, gather, rests
from qkv.database.store.draft import Draft
from qkv.database.store.folder import named, prepare
from qkv.database.store.layout import Layout, Tensors
from qkv.database.store.lines import Lines
from qkv.database.store.lock import Pins, WriteLock
from qkv.database.store.segments import Entry, Segment, follow
from qkv.database.store.shelf import Disk, Files, Memory, Shelf
from qkv.database.store.snapshot import Snapshot
from qkv.errors import ArgumentError, CombinationError, DtypeError
from qkv.log import warn_log
from qkv.types import Closing, Progress, releasing

_NONE: Mapping[str, Any] = MappingProxyType({})


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


class Store(Closing):
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
    >>> snapshot = store.at()
    >>> snapshot.records(snapshot.find(b"Li"))
    ['Li, Mu']
    >>> store.commit(remove=[0])
    Commit(version=2, ids=range(2, 2))
    >>> store.at().find(b"Li"), store.at(1).find(b"Li")
    ([], [0])
    """

    path: Path | None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        skip_damaged: bool = False,
        files: Files | None = None,
    ) -> None:
        self.path = None if path is None else named(path)
        self._pins = Pins(self.path)
        self.begin_anew()
        self._skip_damaged, self._closed = skip_damaged, False
        self._writer: Catalogue | None = None
        self._write_lock: WriteLock | None = None
        if self.path is None:
            self._shelf: Shelf = Memory()
            self._reader = self._writer = Catalogue(None)
            fork.survive(self)
        else:
            prepare(self.path, create)
            self._shelf = Disk(self.path, files)
            # What is marked is in the catalogue, so that one which is read later must have it.
            known = mark.of(self.path)
            self._reader = Catalogue(self.path / FILE, write=False)
            self._write_lock = WriteLock(self.path)
        self._lines = Lines(self._reader, self._shelf, skip_damaged)
        try:
            if self.path is not None:
                sweep.refuse_older(self._reader, known)
        except BaseException:
            self.close()
            raise

    def quiet(self) -> threading.RLock:
        return self._reader.lock

    def begin_anew(self) -> None:
        """With locks that are free, as a child that was forked needs them."""
        self._process = os.getpid()
        self._pins.begin_anew()
        self._writing_lock = threading.RLock()
        self._busy = ""
        self._desk: Desk | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        """One on disk is opened again where it arrives; one in memory goes whole."""
        with self._writing_lock, self.quiet():
            if self._closed:
                raise Closed("the store is closed: open it again")
            if self.path is not None:
                return self.path.absolute(), self._skip_damaged, None, None
            return None, self._skip_damaged, self._reader.content(), self._shelf

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        path, skip_damaged, content, shelf = state
        Store.__init__(self, path, create=False, skip_damaged=skip_damaged)
        if path is None:
            self._reader.fill(content)
            self._shelf = self._lines.shelf = shelf

    def __del__(self) -> None:
        try:
            # The connections of a forked child are its parent's.
            if os.getpid() == self._process:
                self.close()
        except Exception:  # it was never opened, or Python ends and `os` is gone
            pass

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        return f"<Store {where}{', closed' if self._closed else ''}>"

    @property
    def version(self) -> int:
        """The newest version, by this or any other process; 0 is the empty store."""
        return self._reader.newest().number

    def at(self, version: int | None = None) -> Snapshot:
        """One version, the newest by default, which stays as it is while the snapshot is held."""
        while True:
            with self._reader.lock:
                reader = self._reader
                edition = reader.newest() if version is None else reader.edition(version)
                if edition is not None:
                    snapshot = Snapshot(self, self._lines, self._pins, edition, self._skip_damaged)
                    there = "SELECT 1 FROM versions WHERE number = ?"
                    # A compaction may have dropped it before the hold.
                    if snapshot.pinned and reader.value(there, edition.number):
                        return snapshot
                    snapshot.close()
            if version is not None:
                raise self._unknown(version)
            time.sleep(0.001)

    def versions(self) -> list[Version]:
        """The versions that are kept, oldest first."""
        return [Version(*line[:6]) for line in self._reader.versions("WHERE number > 0")]

    def commit(
        self,
        *,
        records: Collection[str] = (),
        digests: Collection[bytes] = (),
        tensors: Tensors = _NONE,
        remove: Iterable[int] = (),
        settings: Mapping[str, Any] | None = None,
        arrays: Tensors | None = None,
        unique: bool = False,
        what: str = "add",
    ) -> Commit:
        """One new version: the rows `remove` die, new rows are born, the settings are replaced.

        `tensors[name]` is (len(records), …), of the same names, shapes and types in all commits
        until `recode`. `arrays` fixes a generation's arrays, once. `unique` refuses a digest that
        lives already or comes twice. A commit that changes nothing makes no version.
        """
        gone = sorted({_id(row) for row in remove})
        if len(records) != len(digests):
            raise ArgumentError(
                f"there must be one digest for each record: {len(records)} records, "
                f"{len(digests)} digests"
            )
        with self._writing("commit") as (catalogue, desk):
            edition, layout, fitted = desk.edition, desk.layout, {}
            if records:
                layout = layout or Layout.of(tensors)
                fitted = layout.fit(tensors, len(records))
            text = _text(settings)
            if text is not None and text == catalogue.settings(edition.settings):
                text = None
            ids = range(edition.last + 1, edition.last + 1 + len(records))
            if not (records or gone or arrays or text is not None):
                return Commit(edition.number, ids)
            if arrays and catalogue.value(
                "SELECT arrays FROM generations WHERE number = ?", edition.generation
            ):
                raise CombinationError("the arrays of a generation are fixed: use recode")

            draft = self._draft(catalogue, desk, text)
            resting = desk.resting + len(records)
            full = bool(records) and not rests(layout, resting)
            absorbed: list[Entry] = []
            rows: list[Segment] = []
            if full:
                assert layout is not None
                absorbed, rows = gather(catalogue, self._shelf, edition.generation, layout)
                rows.append(Segment(np.arange(ids.start, ids.stop, dtype=np.int64), fitted))
                resting = 0

            with draft.beside(layout, rows) as written, catalogue.transaction():
                records, digests = list(records), list(digests)
                lines = Lines(catalogue, self._shelf)
                bury(lines, gone, edition.number + 1)
                if unique:
                    distinct(lines, digests, look=bool(edition.rows))
                absorbed += bear(lines, draft, ids, digests, records)
                if layout is not None and desk.layout is None:
                    ledger.shape(catalogue, edition.generation, layout)
                if full:
                    catalogue.run("DELETE FROM resting WHERE generation = ?", edition.generation)
                elif records and layout is not None:
                    ledger.rest(catalogue, edition.generation, ids, layout.pack(fitted, len(ids)))
                ledger.discard(catalogue, absorbed)
                written()
                if arrays:
                    draft.fix(arrays)
                draft.settle()
                draft.enter(catalogue)
                newest = Edition(
                    number=edition.number + 1,
                    last=ids.stop - 1,
                    rows=edition.rows + len(ids) - len(gone),
                    generation=edition.generation,
                    settings=ledger.settle(catalogue, text, edition.settings),
                )
                catalogue.enter(newest, what, len(ids), len(gone))
            self._acknowledge(Desk(newest, layout, draft.files, resting))
            if absorbed:
                sweep.clear(catalogue, self._shelf, [entry.file for entry in absorbed])
            return Commit(newest.number, ids)

    def recode(
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
        with self._writing("recode") as (catalogue, desk):
            edition = desk.edition
            with self.at(edition.number) as snapshot:
                live = snapshot.ids()
            text = _text(settings)
            draft = self._draft(catalogue, desk, text)
            draft.generation += 1
            layout: Layout | None = None
            held: list[Segment] = []
            count = done = 0
            for block, tensors in blocks:
                ids = np.array(block, np.int64).reshape(-1)
                layout = layout or Layout.of(tensors)
                fitted = layout.fit(tensors, len(ids))
                follow(ids, live[done : done + len(ids)])
                done += len(ids)
                count += len(ids)
                # The caller may use the memory of a block again.
                held.append(Segment(ids, {name: tensor.copy() for name, tensor in fitted.items()}))
                if count * (layout.row_bytes + 8) >= sizes.SEGMENT_BYTES:
                    draft.segments(layout, held)
                    held, count = [], 0
            if done != len(live):
                raise ArgumentError(
                    f"recode: {len(live) - done:,} live rows got no tensors, the first is row "
                    f"{live[done]}"
                )
            if layout is not None and not rests(layout, count):
                draft.segments(layout, held)
                held, count = [], 0
            if arrays:
                draft.fix(arrays)
            draft.settle()

            with catalogue.transaction():
                catalogue.run("INSERT INTO generations (number) VALUES (?)", draft.generation)
                if layout is not None:
                    ledger.shape(catalogue, draft.generation, layout)
                    for part in held:
                        packed = layout.pack(part.tensors, len(part.ids))
                        ledger.rest(catalogue, draft.generation, part.ids.tolist(), packed)
                draft.enter(catalogue)
                newest = edition._replace(
                    number=edition.number + 1,
                    generation=draft.generation,
                    settings=ledger.settle(catalogue, text, edition.settings),
                )
                catalogue.enter(newest, what, 0, 0)
            self._acknowledge(Desk(newest, layout, draft.files, count))
            return Commit(newest.number, range(newest.last + 1, newest.last + 1))

    def compact(self, progress: Progress | None = None) -> CompactReport:
        """Merge segments, drop dead rows, forget older versions.

        A version that anybody reads is kept, and so are its rows. `progress(done, total)` counts
        rows that are copied. `Unwritable` where the disk fails: then nothing was changed. What
        fails after the rows are compacted is in the report and in the log.
        """
        with self._writing("compact") as (catalogue, desk):
            changes = catalogue.changes
            try:
                report, files = compaction.compact(
                    catalogue, self._shelf, self._pins, desk.edition, desk.files, progress
                )
            finally:
                self._pins.unseize()
            self._acknowledge(Desk.at(catalogue, self._shelf))
            changed = catalogue.changes != changes
            unfinished = [sweep.clear(catalogue, self._shelf, files)]
            fault = None if self.path is None else compaction.shrink(catalogue)
            if isinstance(fault, Unwritable):
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
            if self._writer is not None:
                self._writer.close()
            self._reader.close()
            self._pins.close()
            if self._write_lock is not None:
                self._write_lock.drop()

    def _unknown(self, version: int) -> UnknownVersion:
        newest = self._reader.newest().number
        if version > newest or version < 0:
            return UnknownVersion(f"version {version} does not exist: the newest is {newest}")
        oldest = self._reader.value("SELECT min(number) FROM versions")
        return UnknownVersion(
            f"version {version} was dropped by a compaction: the oldest kept is {oldest}"
        )

    def alone(self) -> threading.RLock:
        """Inside of this no other thread or process writes: what is read here is still true when
        it is committed.

        It is the lock itself: a generator would hold it after Ctrl-C for as long as somebody keeps
        the traceback, as Python's prompt does.
        """
        with self._writing_lock:
            if self._closed:
                raise Closed("the store is closed: open it again")
            if self._write_lock is not None:
                if not self._write_lock.held:
                    self._write_lock.take()
                    self._desk = None
                self._write_lock.valid(self._reader)
            return self._writing_lock

    @releasing
    def _writing(self, what: str) -> Iterator[tuple[Catalogue, Desk]]:
        """The lock for writing, the writer's connection, and the newest state."""
        with self._writing_lock, self.alone():  # else it might be closed between look and lock
            if self._busy:
                raise CombinationError(f"{what} cannot run inside {self._busy}: let it end first")
            if self._writer is None:
                assert self.path is not None
                self._writer = Catalogue(self.path / FILE)
            catalogue = self._writer
            self._busy = what
            try:
                if (desk := self._desk) is None:
                    sweep.refuse_older(catalogue, self._marked())
                    self._sweep(catalogue)
                    desk = Desk.at(catalogue, self._shelf)
                    self._acknowledge(desk)
                with self._write_lock.changing() if self._write_lock else contextlib.nullcontext():
                    yield catalogue, desk
            except BaseException:
                self._desk = None
                with contextlib.suppress(Exception):
                    self._sweep(catalogue)
                raise
            finally:
                self._busy = ""

    def _sweep(self, catalogue: Catalogue) -> None:
        """Remove what an unfinished commit or compaction left. Needs the lock for writing."""
        if self.path is not None:
            sweep.tidy(self.path.absolute().parent)
        found = sweep.leftovers(catalogue, self._shelf.files(), self._marked())
        sweep.clear(catalogue, self._shelf, list(found))

    def _marked(self) -> mark.Mark | None:
        return None if self._write_lock is None else self._write_lock.mark

    def _acknowledge(self, desk: Desk) -> None:
        """Remember what was committed, here and beside the catalogue."""
        self._desk = desk
        if self._write_lock is not None:
            self._write_lock.valid(self._reader)
            self._write_lock.acknowledge(desk.edition.number, desk.files)

    def _draft(self, catalogue: Catalogue, desk: Desk, text: str | None) -> Draft:
        settings = catalogue.settings(desk.edition.settings) if text is None else text
        return Draft(self._shelf, desk.edition.generation, desk.files, settings)


def _id(row: Any) -> int:
    if isinstance(row, bool) or not isinstance(row, int | np.integer):
        raise DtypeError(f"remove takes row ids, which are integers, not {row!r}")
    return int(row)


def _text(settings: Mapping[str, Any] | None) -> str | None:
    if settings is None:
        return None
    try:
        return json.dumps(dict(settings), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"settings must be JSON: {error}") from error
