"""The digests and records of rows: in the catalogue those of few, in bundles those of many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qkv.database.faults import Damaged, SkippedRows
from qkv.database.store import ledger, sizes
from qkv.database.store.bundles import GENERATION, LAYOUT, Bundle, Line
from qkv.database.store.catalogue import Catalogue, Edition, row_crc
from qkv.database.store.segments import Entry
from qkv.database.store.shelf import Shelf
from qkv.errors import warn

ROW = "SELECT id, digest, record, crc FROM rows"
LIVE = "id >= ? AND id <= ? AND (died IS NULL OR died > ?)"
"""Rows of a version: between its first id and its last, and not dead by then."""

FOUND = f"SELECT id FROM rows WHERE digest = ? AND {LIVE}"
YOUNGEST = f"{ROW} WHERE digest = ? AND {LIVE} ORDER BY id DESC LIMIT 1"
LATEST = f"{ROW} WHERE digest = ? AND died IS NULL ORDER BY id DESC LIMIT 1"
AMONG = "id IN (SELECT value FROM json_each(?))"

Span = tuple[int, int, int]
"""The first and the last id of some rows, and the version in which they live."""

ALWAYS = 0, 2**63 - 1, 2**63 - 1
"""The rows that live in the newest version, whichever that is."""


class _State(NamedTuple):
    """Where rows are, as long as the newest version is read from the same `edition`."""

    edition: Edition | None
    bundles: tuple[Bundle, ...]
    lost: tuple[Entry, ...]
    loose: bool
    """Whether the catalogue has rows of its own, or tells which have died."""
    known: dict[bytes, tuple[int, str]]
    """Short rows that were looked up, by their digest."""


_NOTHING = _State(None, (), (), True, {})


class Lines:
    """The rows of all versions, dead ones too, as far as a compaction has not dropped them.

    >>> from qkv.database.store import Store
    >>> store = Store()
    >>> _ = store.commit(records=["Li, Mu"], digests=[b"Li"])
    >>> store.at().records(store.at().find(b"Li"))
    ['Li, Mu']
    """

    def __init__(self, catalogue: Catalogue, shelf: Shelf, skip_damaged: bool = False) -> None:
        self.catalogue, self.shelf = catalogue, shelf
        self._skip_damaged = skip_damaged
        self._state = _NOTHING
        self._buried = 0, np.zeros(0, np.int64)

    def find(self, digest: bytes, span: Span) -> list[int]:
        """The ids of the rows with this digest that live, oldest first."""
        while True:
            state = self._now()
            found = []
            if state.loose:
                found = [row for (row,) in self.catalogue.all(FOUND, digest, *span)]
            among = range(span[0], span[1] + 1)
            more = [row for x in state.bundles for row in x.find(digest) if row in among]
            loose = self._loose(more) if more and state.loose else {}
            found += [row for row in more if row not in loose]
            if self._same(state):
                return sorted(found)

    def newest(self, digest: bytes, span: Span) -> Line | None:
        """The last row with this digest that lives; None where there is none."""
        while True:
            state = self._now()
            line = None
            if state.loose:
                one = self.catalogue.one
                line = one(LATEST, digest) if span is ALWAYS else one(YOUNGEST, digest, *span)
            if state.bundles:
                line = self._younger(state, digest, span, line)
            if self._same(state):
                return line

    def latest(self, digest: bytes) -> tuple[int, str] | None:
        """The id and the record of the last row with this digest in the newest version."""
        known = self._now().known
        found = known.get(digest)
        if found is None and (line := self.newest(digest, ALWAYS)) is not None:
            found = self.checked(line)
            if len(found[1]) <= sizes.SHORT:
                if len(known) >= sizes.KNOWN:
                    known.clear()
                known[digest] = found
        return found

    def _younger(self, state: _State, digest: bytes, span: Span, line: Line | None) -> Line | None:
        """The last row of a bundle of which the catalogue says nothing, or else this one."""
        first = span[0] if line is None else line[0] + 1
        for bundle in reversed(state.bundles):
            last = span[1]
            while (found := bundle.last(digest, first, last)) is not None:
                if not (state.loose and self._loose([found[0]])):
                    return found
                last = found[0] - 1
        return line

    def of(self, ids: Sequence[int] | np.ndarray, span: Span) -> dict[int, Line]:
        """The rows of these ids that live."""
        first, last, version = span
        wanted = [row for row in map(int, ids) if first <= row <= last]
        while True:
            state, found = self._now(), dict[int, Line]()
            known = self._loose(wanted) if state.loose else {}
            for row, (died, line) in known.items():
                if died is None or died > version:
                    found[row] = line
            if state.bundles:
                rest = np.array([row for row in wanted if row not in known], np.int64)
                for bundle in state.bundles:
                    found.update((line[0], line) for line in bundle.lines(rest))
            if self._same(state):
                return found

    def ids(self, span: Span) -> np.ndarray:
        """The ids of the rows that live, ascending."""
        while True:
            state = self._now()
            parts = [self._column(f"SELECT id FROM rows WHERE {LIVE}", *span)]
            if state.bundles:
                loose = self._column("SELECT id FROM rows")
                parts += [np.setdiff1d(x.ids, loose, assume_unique=True) for x in state.bundles]
            if self._same(state):
                ids = np.sort(np.concatenate(parts))
                return np.asarray(ids[(ids >= span[0]) & (ids <= span[1])])

    def _column(self, statement: str, *values: int) -> np.ndarray:
        found = self.catalogue.all(statement, *values)
        return np.fromiter((row for (row,) in found), np.int64, len(found))

    def dead(self, version: int) -> np.ndarray:
        """The ids that are dead in a version, or lost in bundles that are skipped; ascending."""
        dead = self._dead(version)
        if not self._skip_damaged:
            return dead
        lost = [np.arange(entry.first, entry.last + 1) for entry in self._now().lost]
        return np.unique(np.concatenate([dead, *lost]))

    def _dead(self, version: int) -> np.ndarray:
        """Those that are dead, remembered from one version to the next."""
        with self.catalogue.lock:
            newer = version >= self._buried[0]
            since, dead = self._buried if newer else (0, self._buried[1][:0])
            # Lost rows that a repair listed have died in version 0.
            statement = "SELECT id FROM rows WHERE died > ? AND died <= ?"
            more = self._column(statement, since or -1, version)
            if len(more):
                dead = np.sort(np.concatenate([dead, more]))
            if newer:
                self._buried = version, dead
            return dead

    def checked(self, line: Line) -> tuple[int, str]:
        """The id and the record of a row, refused where it is not what was written."""
        row, digest, record, crc = line
        if row_crc(row, digest, record) != crc:
            raise self.catalogue.damaged(f"row {row} is not what was written")
        return row, record

    def lift(self, ids: Sequence[int]) -> None:
        """Copy rows that are to die from their bundles into the catalogue."""
        if not self._now().bundles:
            return
        for start in range(0, len(ids), sizes.PAGE):
            some = ids[start : start + sizes.PAGE]
            known = self._loose(some)
            found = self.of([row for row in some if row not in known], (0, 2**63 - 1, 0))
            for line in found.values():
                self.checked(line)
            statement = "INSERT INTO rows (id, digest, record, crc) VALUES (?, ?, ?, ?)"
            self.catalogue.many(statement, found.values())
            # Elsewhere, too: where that line is lost, a repair must not bring the row back.
            ledger.rest(self.catalogue, GENERATION, found, [b""] * len(found))
        self._state = _NOTHING

    def _loose(self, ids: Sequence[int]) -> dict[int, tuple[int | None, Line]]:
        """What the catalogue itself has of these rows, and when they died."""
        found: dict[int, tuple[int | None, Line]] = {}
        statement = f"SELECT died, id, digest, record, crc FROM rows WHERE {AMONG}"
        for start in range(0, len(ids), sizes.PAGE):
            some = json.dumps(ids[start : start + sizes.PAGE])
            for died, *line in self.catalogue.all(statement, some):
                found[line[0]] = died, tuple(line)
        return found

    def _now(self) -> _State:
        """Where rows are now."""
        state = self._state  # another thread may put another one in its place
        while (newest := self.catalogue.newest()) is not state.edition:
            state = self._state = self._at(newest)
        return state

    def _at(self, newest: Edition) -> _State:
        entries = ledger.segments(self.catalogue, GENERATION)
        loose = self.catalogue.one("SELECT 1 FROM rows LIMIT 1") is not None
        bundles, lost = [], []
        for entry in entries:
            try:
                bundles.append(Bundle(self.shelf.get(entry, LAYOUT)))
            except (Damaged, KeyError) as fault:
                if self.catalogue.newest() is not newest:
                    return _NOTHING  # others took its place
                if not self._skip_damaged:
                    raise
                lost.append(entry)
                rows = f"{entry.rows:,} rows were left out"
                warn(f"{rows}: {fault}", SkippedRows)
        return _State(newest, tuple(bundles), tuple(lost), loose, {})

    def _same(self, state: _State) -> bool:
        """Whether what was read of the catalogue since is of this state, too."""
        return not (state.loose and state.bundles) or self.catalogue.newest() is state.edition
