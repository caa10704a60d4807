"""All shards as one store: which rows each has, what they say together, where new rows go."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv import parts
from qkv.arrays.ragged import Ragged, joined
from qkv.cluster.shard import Job, Profile, Slice
from qkv.database.faults import LostShard
from qkv.database.view import CHUNK
from qkv.errors import ArgumentError, CombinationError
from qkv.types import Arrays
from qkv.weightings import State

if TYPE_CHECKING:
    from qkv.cluster.ray import Actors  # who run the shards

FRESH = 1.0
"""Seconds for which the newest version that was seen is taken for the newest."""

MOST = 2**31 - 2
"""Rows whose positions can be told apart."""

Request = tuple[int, str, tuple[Any, ...]]
"""A shard, a method of `Shard`, and its arguments."""


def owners(sources: int, shards: int) -> list[list[int]]:
    """The stores of each shard: some to each, or some shards to each store.

    >>> owners(3, 2), owners(1, 2), owners(2, 3)
    ([[0, 1], [2]], [[0], [0]], [[0], [0], [1]])
    """
    if sources >= shards:
        edges = [-(-i * sources // shards) for i in range(shards + 1)]
        return [list(range(a, b)) for a, b in pairwise(edges)]
    return [[i * sources // shards] for i in range(shards)]


class Fleet:
    """The stores that a cluster reads, and those who read them."""

    def __init__(
        self, sources: Sequence[str], shards: list[list[int]], workers: Actors, partial: bool
    ):
        self.sources, self.shards, self.workers = sources, shards, workers
        self.partial, self.closed = partial, False
        self._newest: tuple[int, ...] = ()
        self._seen, self._writing = 0.0, threading.Lock()
        self._many: dict[tuple[int, ...], Many] = {}
        self.refresh()

    @property
    def path(self) -> Path | None:
        """Where the rows are written, if it is one place."""
        one = self.sources[0]
        return None if len(self.sources) > 1 or "://" in one else Path(one)

    def refresh(self) -> None:
        """Look for the newest version of every store."""
        every = self.workers.each([(i, "versions", ()) for i in range(len(self.shards))])
        newest = {source: version for found in every for source, version in found.items()}
        self._newest = tuple(newest[i] for i in range(len(self.sources)))
        self._seen = time.monotonic()

    def _current(self) -> tuple[int, ...]:
        if self.closed:
            raise CombinationError("the cluster is closed: make another one")
        if time.monotonic() - self._seen > FRESH:
            try:
                self.refresh()
            except LostShard:
                if not self.partial:
                    raise
                self._seen = time.monotonic()
        return self._newest

    @property
    def version(self) -> int:
        """The newest version; of several stores the sum of theirs, which grows with each."""
        return sum(self._current())

    def at(self, version: int | None = None) -> Many:
        wanted = self._current()
        if version is not None:
            if len(self.sources) > 1 and version != sum(wanted):
                raise CombinationError("several stores have no past in common: open one of them")
            wanted = (version,) if len(self.sources) == 1 else wanted
        if wanted not in self._many:
            self._many = {wanted: Many(self, wanted)}
        return self._many[wanted]

    def versions(self) -> list[Any]:
        if len(self.sources) > 1:
            raise CombinationError("several stores have no past in common: open one of them")
        return list(self.workers.each([(0, "history", (0,))])[0])

    def holder(self, source: int) -> int:
        """The shard that writes to a store."""
        return next(i for i, held in enumerate(self.shards) if source in held)

    def write(self, source: int, name: str, *args: Any) -> None:
        """One change of a store, made once: on disk when this returns."""
        if "://" in self.sources[source]:
            raise CombinationError(
                f"{self.sources[source]} is read and not written: add rows to a store on disk, and "
                "copy it there"
            )
        shard = self.holder(source)
        with self._writing:  # a version that another thread makes would be taken for this one's
            while True:
                before = self.workers.each([(shard, "versions", ())])[0][source]
                try:
                    self.workers.once((shard, "write", (source, name, *args)))
                except LostShard:  # it died: before the change was made, or after
                    if self.workers.each([(shard, "versions", ())])[0][source] == before:
                        continue
                break
            self.refresh()

    def processes(self) -> list[tuple[int, float]]:
        """A process of each shard, and the seconds that it has worked."""
        return self.workers.each([(i, "process", ()) for i in range(len(self.shards))])

    def close(self) -> None:
        self.closed = True
        self.workers.close()


class Many:
    """One version of all stores, as a snapshot is of one; a row's id is its place among all."""

    def __init__(self, fleet: Fleet, versions: tuple[int, ...]):
        self.fleet, self.versions = fleet, versions
        self.version = sum(versions)
        asked = [(fleet.holder(i), "about", (i, version)) for i, version in enumerate(versions)]
        self.abouts: list[Profile] = fleet.workers.each(asked)
        for name, about in zip(fleet.sources[1:], self.abouts[1:], strict=True):
            _alike(fleet.sources[0], self.abouts[0], name, about)
        self.slices: list[tuple[int, Slice]] = []
        at = 0
        for source, about in enumerate(self.abouts):
            holders = [i for i, held in enumerate(fleet.shards) if source in held]
            edges = [about.rows * i // len(holders) for i in range(len(holders) + 1)]
            for shard, (start, stop) in zip(holders, pairwise(edges), strict=True):
                if stop > start:
                    self.slices.append((shard, Slice(source, about.version, start, stop, at)))
                at += stop - start
        if at > MOST:
            raise ArgumentError(f"{at:,} rows are more than one cluster tells apart: {MOST:,}")
        self._rows = at
        self._balls: list[parts.Ball] | None = self.each("ball") if fleet.partial else None

    @property
    def begun(self) -> Profile:
        return next((about for about in self.abouts if about.settings), self.abouts[0])

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.begun.settings)

    @property
    def names(self) -> tuple[str, ...]:
        return self.begun.names

    def kind(self, name: str) -> Any:
        return self.begun.kinds.get(name)

    def arrays(self) -> dict[str, np.ndarray]:
        return self.begun.arrays

    def __len__(self) -> int:
        return self._rows

    def each(
        self, name: str, *args: Any, job: Any = None, without: Collection[int] = ()
    ) -> list[Any]:
        """A method of every leaf, in the order of their rows."""
        held: dict[int, list[Slice]] = {}
        for shard, slice in self.slices:
            if shard not in without:
                held.setdefault(shard, []).append(slice)
        asked = [(shard, "run", (some, job, name, *args)) for shard, some in held.items()]
        return list(chain.from_iterable(self.fleet.workers.each(asked)))

    def of(self, name: str, places: np.ndarray, *args: Any) -> list[tuple[np.ndarray, Any]]:
        """A method of the leaves that hold these rows: where each found stand, and what it is."""
        requests, where = [], []
        for shard, slice in self.slices:
            at = np.flatnonzero((places >= slice.origin) & (places < slice.origin + slice.rows))
            if len(at):
                requests.append((shard, "run", ([slice], None, name, *args, places[at])))
                where.append(at)
        found = self.fleet.workers.each(requests)
        return [(at, some[0]) for at, some in zip(where, found, strict=True)]

    def find(self, key: Any) -> list[int]:
        """The places of its rows. Each store finds a key by digests of its own kind."""
        return list(chain.from_iterable(self.each("find", key)))

    def records(self, places: Any) -> list[str]:
        places = np.asarray(places, np.int64)
        texts: dict[int, str] = {}
        for at, some in self.of("records", places):
            texts.update(zip(at.tolist(), some, strict=True))
        return [texts[i] for i in range(len(places))]

    def rows(self, places: Any = None) -> Any:
        """The rows, or those at these places, by place, (place, record), some at a time; of a
        cluster none is lost but with its shard."""
        if places is not None:
            places = np.sort(np.asarray(places, np.int64))
            for start in range(0, len(places), CHUNK):
                some = places[start : start + CHUNK]
                yield from zip(some.tolist(), self.records(some), strict=True)
            return
        for shard, slice in self.slices:
            for start in range(0, slice.rows, CHUNK):
                asked = (shard, "run", ([slice], None, "page", start))
                texts = self.fleet.workers.each([asked])[0][0]
                yield from enumerate(texts, slice.origin + start)

    def tensor(self, name: str, places: Any) -> Any:
        places = np.asarray(places, np.int64)
        found = self.of("tensor", places, name)
        order = np.argsort(np.concatenate([at for at, _ in found]))
        if isinstance(found[0][1], Ragged):
            return joined([some for _, some in found])[order]
        return np.concatenate([some for _, some in found])[order]

    def lost(self, shards: Collection[int]) -> list[parts.Ball]:
        """What is known of the keys of shards that are lost."""
        assert self._balls is not None
        held = zip(self.slices, self._balls, strict=True)
        return [ball for (shard, _), ball in held if shard in shards]


def _alike(first: str, one: Profile, second: str, two: Profile) -> None:
    """Refuse stores whose rows cannot be compared with one query."""
    for name in ("schema", "encoder") if one.settings and two.settings else ():
        if one.settings.get(name) != two.settings.get(name):
            raise CombinationError(
                f"{first} and {second} differ in their {name}: shards of one database have the "
                "same; `qkv.cluster.split` makes them"
            )
    alike = one.arrays.keys() == two.arrays.keys()
    if not alike or any(not np.array_equal(x, two.arrays[n]) for n, x in one.arrays.items()):
        raise CombinationError(
            f"the encoders of {first} and {second} have learned other things: "
            "`qkv.cluster.split` makes shards of one database"
        )


class Sent:
    """A job as the leaves have it: what they find is merged in a tree of their order."""

    asks = "fold", "state"
    """The methods of a leaf that fold a search, and give the weighting's state."""

    def __init__(self, many: Many, job: Job, without: Collection[int] = ()):
        self.many, self.job, self.without = many, job, without
        self.ref = many.fleet.workers.put(job)

    def each(self, name: str, *args: Any) -> list[Any]:
        return self.many.each(name, *args, job=self.ref, without=self.without)

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        return parts.merged(self.each(self.asks[0], lift, merge, init), merge)

    def state(self, found: State, width: int = 0) -> State:
        return parts.merged(self.each(self.asks[1], found, width), self.job.weighting.merge)


class Attended(Sent):
    """The same with values pooled in the query's framework, and with gradients."""

    asks = "search", "pooled"

    def slopes(self, kept: State, gradients: Arrays) -> list[Any]:
        def add(one: list[Any], two: list[Any]) -> list[Any]:
            pairs = zip(one, two, strict=True)
            return [b if a is None else a if b is None else a + b for a, b in pairs]

        return parts.merged(self.each("slopes", kept, gradients), add)
