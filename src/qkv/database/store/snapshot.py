"""A snapshot: one version of a store, which no later commit or compaction changes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv.arrays.ragged import Ragged, joined
from qkv.database.faults import Damaged, SkippedRows, UnknownRow
from qkv.database.store import ledger, sizes
from qkv.database.store.catalogue import Catalogue, Edition
from qkv.database.store.layout import ANY, Layout
from qkv.database.store.lines import Lines
from qkv.database.store.lock import Pins
from qkv.database.store.segments import Entry, Segment, in_advance
from qkv.errors import ArgumentError, warn
from qkv.types import Closing


class _Listing(NamedTuple):
    """Where the tensors of a version are, and which of its ids are dead."""

    entries: list[Entry]
    resting: Segment
    dead: np.ndarray
    damaged: int
    """Resting rows that are live and were left out, and told of."""


class _Moved(Exception):
    """A compaction put another segment in this one's place."""


class Snapshot(Closing):
    """The rows of one version; get one from `Store.at`. Its version is kept until `close`.

    >>> from qkv.database.store import Store
    >>> store = Store()
    >>> ids = store.commit(records=["one"], digests=[b"1"], tensors={"key": np.ones((1, 2))}).ids
    >>> with store.at() as snapshot:
    ...     _ = store.commit(remove=ids)
    ...     snapshot.records(snapshot.find(b"1")), len(snapshot), len(store.at())
    (['one'], 1, 0)
    """

    def __init__(
        self,
        owner: object,
        lines: Lines,
        pins: Pins,
        edition: Edition,
        skip_damaged: bool,
    ) -> None:
        self._owner = owner  # a store that nobody holds closes itself
        self._lines, self._catalogue, self._shelf = lines, lines.catalogue, lines.shelf
        self._edition = edition
        self._first = 0
        self._skip_damaged = skip_damaged
        self._open: dict[str, Segment] = {}
        self._found: _Listing | None = None
        self._ids: np.ndarray | None = None
        self._layout_found: Layout | None = None
        self._settings: dict[str, Any] | None = None
        # Before the hold, so that nothing is held which nobody lets go of.
        pin = edition.number, object()
        self._finalizer = weakref.finalize(self, pins.release, *pin)
        # At the end of the process its locks go by themselves.
        self._finalizer.atexit = False
        self.pinned = pins.hold(*pin)

    def between(self, start: int, stop: int) -> Snapshot:
        """The live rows from the one numbered `start` to that before `stop`, and no others."""
        ids, some = self.ids()[start:stop], copy.copy(self)
        some._owner, some._found, some._ids = self, None, ids
        first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
        some._first, some._edition = first, self._edition._replace(last=last, rows=len(ids))
        return some

    @property
    def _live(self) -> tuple[int, int, int]:
        return self._first, self._edition.last, self._edition.number

    @property
    def version(self) -> int:
        return self._edition.number

    @property
    def last(self) -> int:
        """The id of the youngest row that was ever born, −1 before the first."""
        return self._edition.last

    @property
    def settings(self) -> dict[str, Any]:
        if self._settings is None:
            self._settings = self._catalogue.read_settings(self._edition.settings)
        return copy.deepcopy(self._settings)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return self._layout().names

    def kind(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """The type of a tensor, and its shape in one row; None where there is none."""
        return next((field[1:] for field in self._layout().fields if field[0] == name), None)

    def __len__(self) -> int:
        return self._edition.rows

    def close(self) -> None:
        """Let a compaction drop this version; what was read stays valid."""
        self._finalizer()

    def find(self, digest: bytes) -> list[int]:
        """The ids of the live rows with this digest, oldest first."""
        return self._lines.find(digest, self._live)

    def newest(self, digest: bytes) -> tuple[int, str] | None:
        """The id and the record of the last live row with this digest; None where there is none."""
        found = self._lines.newest(digest, self._live)
        return None if found is None else self._lines.checked(found)

    def latest(self, digest: bytes) -> tuple[int, str] | None:
        """The same in the newest version of the store, whichever this one is."""
        return self._lines.latest(digest)

    def records(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The records of live rows, in the order of the ids."""
        return [record for _, record in self._read(ids)]

    def digests(self, ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """What they are found by, likewise."""
        return [digest for digest, _ in self._read(ids)]

    def _read(self, ids: Sequence[int] | np.ndarray) -> list[tuple[bytes, str]]:
        lines = self._lines.of(ids, self._live)
        found = {row: (line[1], self._lines.checked(line)[1]) for row, line in lines.items()}
        try:
            return [found[int(row)] for row in ids]
        except KeyError as error:
            raise self._unknown(error.args[0]) from None

    def rows(self, ids: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """The live rows, or those of these ids, by id, (id, record), some at a time."""
        ids = self.ids() if ids is None else ids
        for start in range(0, len(ids), sizes.PAGE):
            page = self._lines.of(ids[start : start + sizes.PAGE], self._live)
            for row in sorted(page):
                try:
                    yield self._lines.checked(page[row])
                except Damaged as fault:
                    if not self._skip_damaged:
                        raise
                    warn(f"1 row was left out: {fault}", SkippedRows)

    def ids(self) -> np.ndarray:
        """The ids of the live rows (m,), ascending."""
        if self._ids is None:
            self._ids = self._ids_of_segments()
            if self._ids is None:
                self._ids = self._lines.ids(self._live)
            self._ids.flags.writeable = False
        return self._ids

    def parts(
        self,
        window: int | None = None,
        resident: int = sizes.RESIDENT,
        ahead: Collection[str] = (),
    ) -> Iterator[Segment]:
        """All rows by id, a segment at a time, or `window` rows at a time.

        Where the tensors take more than `resident` bytes, the windows are small, and when the
        next one is asked for, the system may take back the memory of the last; the tensors that
        are named are read `ahead` of that.
        """
        scarce = self.scarce(resident)
        if window is None and scarce:
            window = max(1, sizes.WINDOW // max(1, self._sizes()[1]))
        for segment, after, dead in self._segments():
            windows = self._windows(segment, dead, after, window)
            for part in in_advance(windows, ahead if scarce else ()):
                part.check()
                yield part
                if scarce:
                    part.release()

    def scarce(self, resident: int = sizes.RESIDENT) -> bool:
        """Whether the tensors take more than so many bytes."""
        return self._sizes()[0] > resident

    def tensor(self, name: str, ids: Sequence[int] | np.ndarray) -> Any:
        """The rows of one tensor for these ids, in their order: (len(ids), …), or ragged."""
        wanted = np.asarray(ids, np.int64).reshape(-1)
        fields = {field[0]: field for field in self._layout().fields}
        if name not in fields:
            raise ArgumentError(f"no tensor {name!r}: there are {', '.join(fields) or 'none'}")
        _, dtype, dims = fields[name]
        ragged = dims == ANY
        result = np.empty((len(wanted), *(() if ragged else dims)), np.int64 if ragged else dtype)
        held, count = [Ragged(np.empty(0, dtype), np.zeros(1, np.int64))], 0
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        live = alive(ascending, self._listing().dead)
        if live is not None:
            raise self._unknown(int(ascending[live.argmin()]))
        done = np.zeros(len(wanted), bool)

        def asked(entry: Entry) -> bool:
            begin, end = np.searchsorted(ascending, (entry.first, entry.last + 1))
            return bool(begin < end and not done[begin:end].all())

        for segment, _, _ in self._segments(asked, strict=True):
            if not len(segment.ids):
                continue
            begin, end = np.searchsorted(ascending, (segment.ids[0], segment.ids[-1] + 1))
            some = ascending[begin:end]
            at = np.searchsorted(segment.ids, some)
            there = segment.ids[at] == some
            rows = segment.tensors[name][at[there]]
            if ragged:  # its places among those that are held
                held.append(rows)
                rows = count + np.arange(len(rows))
                count += len(rows)
            result[order[begin:end][there]] = rows
            done[begin:end] |= there
        done &= ascending <= self._edition.last
        if not done.all():
            row = int(ascending[done.argmin()])
            raise self._lost(row) if self._lines.of([row], self._live) else self._unknown(row)
        return joined(held)[result] if ragged else result

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that were fixed with this version's generation, read-only."""
        found = ledger.arrays(self._catalogue, self._edition.generation)
        return self._shelf.get_arrays(*found[0][:2]) if found else {}

    def whole(self, ids: np.ndarray) -> np.ndarray:
        """The rows whose tensors are there again, if they are all; else an error, or a warning."""
        lost = len(self) - len(ids)
        if lost > 0 and not self._skip_damaged:
            live = self._lines.ids(self._live)
            raise self._lost(int(np.setdiff1d(live, ids, assume_unique=True)[0]), lost)
        # What is in a file that was skipped is told of already, and what rests.
        lost -= self._listing().damaged if lost > 0 else 0
        if lost > 0 and all(entry.file in self._open for entry in self._listing().entries):
            told = f"rows without their vectors, which are lost, were left out: {lost:,}"
            warn(told, SkippedRows)
        return ids

    def _lost(self, row: int, rows: int = 1) -> Damaged:
        return Damaged(
            f"{self._catalogue.path} is damaged: the vectors of row {row}"
            f"{f' and {rows - 1:,} more' if rows > 1 else ''} are lost. Restore it from a copy, "
            "encode the keys again where they are no vectors, D.encode(), or open the store with "
            "skip_damaged=True to use the other rows"
        )

    def _unknown(self, row: int) -> UnknownRow:
        return UnknownRow(f"row {row} is not in version {self.version}: find() and ids() give rows")

    def _layout(self) -> Layout:
        if self._layout_found is None:
            found = ledger.layout(self._catalogue, self._edition.generation)
            self._layout_found = found or Layout()
        return self._layout_found

    def _listing(self, fresh: bool = False) -> _Listing:
        """Where everything is, read at one moment."""
        with self._catalogue.lock:
            if self._found is None or fresh:
                layout = self._layout()
                edition = self._edition
                with self._catalogue.view():
                    entries = ledger.segments(self._catalogue, edition.generation)
                    resting = self._catalogue.all(
                        "SELECT id, tensors, crc FROM resting WHERE generation = ? AND id <= ?"
                        " ORDER BY id",
                        edition.generation,
                        edition.last,
                    )
                    dead = self._lines.dead(edition.number)
                sound = rested(self._catalogue, layout, resting, self._skip_damaged)
                damaged = {row for row, _, _ in resting} if len(sound.ids) < len(resting) else set()
                damaged -= {*sound.ids.tolist(), *dead.tolist()} if damaged else set()
                found = [entry for entry in entries if entry.first <= edition.last]
                self._found = _Listing(found, sound, dead, len(damaged))
            return self._found

    def _segments(
        self, wanted: Callable[[Entry], bool] = lambda entry: True, strict: bool = False
    ) -> Iterator[tuple[Segment, int, np.ndarray]]:
        """The segments that are wanted by id, and then what rests; each with the id behind which
        its rows are new, and those that are dead."""
        after = self._first - 1
        while True:
            listing = self._listing()
            for entry in listing.entries:
                if entry.last <= after or not wanted(entry):
                    continue
                try:
                    segment = self._segment(entry, strict)
                except _Moved:
                    break  # go on with the segments that took its place
                if segment is not None:
                    yield segment, after, listing.dead
                    after = entry.last
            else:
                yield listing.resting, after, listing.dead
                return

    def _segment(self, entry: Entry, strict: bool = False) -> Segment | None:
        """An open segment; None if it is damaged and to be skipped."""
        segment = self._open.get(entry.file)
        if segment is None or segment.cut:
            try:
                segment = self._shelf.get(entry, self._layout())
            except (Damaged, KeyError) as fault:
                if entry not in self._listing(fresh=True).entries:
                    raise _Moved from None
                if strict or not self._skip_damaged:
                    raise
                rows = f"{entry.rows:,} rows were left out"
                warn(f"{rows}: {fault}", SkippedRows)
                return None
            self._open[entry.file] = segment
        return segment

    def _windows(
        self, segment: Segment, dead: np.ndarray, after: int, window: int | None
    ) -> Iterator[Segment]:
        begin = int(np.searchsorted(segment.ids, after, side="right"))
        end = int(np.searchsorted(segment.ids, self._edition.last, side="right"))
        step = window or max(1, end - begin)
        for start in range(begin, end, step):
            part = segment[start : min(start + step, end)]
            part.live = alive(part.ids, dead)
            yield part

    def _sizes(self) -> tuple[int, int]:
        """Bytes of all segments, and of one row."""
        width = self._layout().row_bytes + 8
        held = (entry for entry in self._listing().entries if entry.last >= self._first)
        return sum(entry.size for entry in held), width

    def _ids_of_segments(self) -> np.ndarray | None:
        """The live ids from the segments, which is fast; None where they do not tell them all."""
        found: list[Segment] = []
        try:
            listing = self._listing()
            for entry in listing.entries:
                segment = self._shelf.get(entry, self._layout())
                found.extend(self._windows(segment, listing.dead, -1, None))
            found.extend(self._windows(listing.resting, listing.dead, -1, None))
        except (Damaged, KeyError):
            return None
        live = [part.ids if part.live is None else part.ids[part.live] for part in found]
        ids = np.concatenate(live) if live else np.zeros(0, np.int64)
        return ids if len(ids) == len(self) else None


def rested(
    catalogue: Catalogue,
    layout: Layout,
    rows: Sequence[tuple[int, bytes, int]],
    skip_damaged: bool = False,
) -> Segment:
    """Resting rows (id, tensors, crc) as a segment in memory."""
    fine = [ledger.intact(*line) and layout.holds(line[1]) for line in rows]
    sound = [line for line, whole in zip(rows, fine, strict=True) if whole]
    if len(sound) < len(rows):
        row = rows[fine.index(False)][0]
        fault = catalogue.damaged(f"the tensors of row {row} are not what was written")
        if not skip_damaged:
            raise fault
        left = len(rows) - len(sound)
        warn(f"{left:,} rows were left out: {fault}", SkippedRows)
    ids = np.fromiter((row for row, _, _ in sound), np.int64, len(sound))
    return Segment(ids, layout.unpack([packed for _, packed, _ in sound]))


def alive(ids: np.ndarray, dead: np.ndarray) -> np.ndarray | None:
    """Which ids are not among the dead; None where none is. Both ascend.

    >>> alive(np.array([1, 4, 6]), np.array([2, 4])).tolist(), alive(np.array([1]), np.array([2]))
    ([True, False, True], None)
    """
    if not len(ids) or not len(dead):
        return None
    begin, end = np.searchsorted(dead, (ids[0], ids[-1] + 1))
    if begin == end:
        return None
    some = dead[begin:end]
    at = np.minimum(np.searchsorted(some, ids), len(some) - 1)
    live: np.ndarray = some[at] != ids
    return None if live.all() else live
