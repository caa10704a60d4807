"""All shards as one store: which rows each has, what they say together, where new rows go."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv import partial_attention
from qkv.cluster.shard import Job, Slice, StoreProfile
from qkv.database.errors import LostShardError
from qkv.database.table.view import ROWS_PER_CHUNK
from qkv.errors import ArgumentError, CombinationError
from qkv.frameworks.ragged import Ragged, concat_ragged
from qkv.util.types import Arrays
from qkv.weightings import State

if TYPE_CHECKING:
    from qkv.cluster.ray import ActorPool  # who run the shards

VERSION_MAX_AGE_SECONDS = 1.0
"""Seconds for which the newest version that was seen is taken for the newest."""

MAX_ROWS = 2**31 - 2
"""Rows whose positions can be told apart."""

Request = tuple[int, str, tuple[Any, ...]]
"""A shard, a method of `Shard`, and its arguments."""


def assign_stores(sources: int, shards: int) -> list[list[int]]:
    """The stores of each shard: some to each, or some shards to each store.

    >>> assign_stores(3, 2), assign_stores(1, 2), assign_stores(2, 3)
    ([[0, 1], [2]], [[0], [0]], [[0], [0], [1]])
    """
    if sources >= shards:
        edges = [-(-i * sources // shards) for i in range(shards + 1)]
        return [list(range(a, b)) for a, b in pairwise(edges)]
    return [[i * sources // shards] for i in range(shards)]


class ShardSet:
    """The stores that a cluster reads, and those who read them."""

    def __init__(
        self, sources: Sequence[str], shards: list[list[int]], workers: ActorPool, partial: bool
    ):
        self.sources, self.shards, self.workers = sources, shards, workers
        self.partial, self.closed = partial, False
        self._newest_versions: tuple[int, ...] = ()
        self._refreshed_at, self._write_lock = 0.0, threading.Lock()
        self._snapshots: dict[tuple[int, ...], ShardedSnapshot] = {}
        self.refresh_versions()

    @property
    def path(self) -> Path | None:
        """Where the rows are written, if it is one place."""
        one = self.sources[0]
        return None if len(self.sources) > 1 or "://" in one else Path(one)

    def refresh_versions(self) -> None:
        """Look for the newest version of every store."""
        every = self.workers.call_each(
            [(i, "newest_versions", ()) for i in range(len(self.shards))]
        )
        newest = {source: version for found in every for source, version in found.items()}
        self._newest_versions = tuple(newest[i] for i in range(len(self.sources)))
        self._refreshed_at = time.monotonic()

    def _current_versions(self) -> tuple[int, ...]:
        if self.closed:
            raise CombinationError("the cluster is closed: make another one")
        if time.monotonic() - self._refreshed_at > VERSION_MAX_AGE_SECONDS:
            try:
                self.refresh_versions()
            except LostShardError:
                if not self.partial:
                    raise
                self._refreshed_at = time.monotonic()
        return self._newest_versions

    @property
    def version(self) -> int:
        """The newest version; of several stores the sum of theirs, which grows with each."""
        return sum(self._current_versions())

    def open_snapshot(self, version: int | None = None) -> ShardedSnapshot:
        wanted = self._current_versions()
        if version is not None:
            if len(self.sources) > 1 and version != sum(wanted):
                raise CombinationError("several stores have no past in common: open one of them")
            wanted = (version,) if len(self.sources) == 1 else wanted
        if wanted not in self._snapshots:
            self._snapshots = {wanted: ShardedSnapshot(self, wanted)}
        return self._snapshots[wanted]

    def versions(self) -> list[Any]:
        if len(self.sources) > 1:
            raise CombinationError("several stores have no past in common: open one of them")
        return list(self.workers.call_each([(0, "list_versions", (0,))])[0])

    def shard_of_store(self, source: int) -> int:
        """The shard that writes to a store."""
        return next(i for i, held in enumerate(self.shards) if source in held)

    def write_store(self, source: int, name: str, *args: Any) -> None:
        """One change of a store, made once: on disk when this returns."""
        if "://" in self.sources[source]:
            raise CombinationError(
                f"{self.sources[source]} is read and not written: add rows to a store on disk, and "
                "copy it there"
            )
        shard = self.shard_of_store(source)
        with self._write_lock:  # a version that another thread makes would be taken for this one's
            while True:
                before = self.workers.call_each([(shard, "newest_versions", ())])[0][source]
                try:
                    self.workers.call_once((shard, "write_store", (source, name, *args)))
                except LostShardError:  # it died: before the change was made, or after
                    if (
                        self.workers.call_each([(shard, "newest_versions", ())])[0][source]
                        == before
                    ):
                        continue
                break
            self.refresh_versions()

    def process_stats(self) -> list[tuple[int, float]]:
        """A process of each shard, and the seconds that it has worked."""
        return self.workers.call_each([(i, "process_stats", ()) for i in range(len(self.shards))])

    def close(self) -> None:
        self.closed = True
        self.workers.close()


class ShardedSnapshot:
    """One version of all stores, as a snapshot is of one; a row's id is its place among all."""

    def __init__(self, fleet: ShardSet, versions: tuple[int, ...]):
        self.shard_set, self.versions = fleet, versions
        self.version = sum(versions)
        asked = [
            (fleet.shard_of_store(i), "profile_store", (i, version))
            for i, version in enumerate(versions)
        ]
        self.profiles: list[StoreProfile] = fleet.workers.call_each(asked)
        for name, about in zip(fleet.sources[1:], self.profiles[1:], strict=True):
            _check_compatible(fleet.sources[0], self.profiles[0], name, about)
        self.slices: list[tuple[int, Slice]] = []
        at = 0
        for source, about in enumerate(self.profiles):
            holders = [i for i, held in enumerate(fleet.shards) if source in held]
            edges = [about.rows * i // len(holders) for i in range(len(holders) + 1)]
            for shard, (start, stop) in zip(holders, pairwise(edges), strict=True):
                if stop > start:
                    self.slices.append((shard, Slice(source, about.version, start, stop, at)))
                at += stop - start
        if at > MAX_ROWS:
            raise ArgumentError(f"{at:,} rows are more than one cluster tells apart: {MAX_ROWS:,}")
        self._rows = at
        self._balls: list[partial_attention.KeyBall] | None = (
            self.run_on_slices("bounding_ball") if fleet.partial else None
        )

    @property
    def base_profile(self) -> StoreProfile:
        return next((about for about in self.profiles if about.settings), self.profiles[0])

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.base_profile.settings)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return self.base_profile.names

    def tensor_type(self, name: str) -> Any:
        return self.base_profile.kinds.get(name)

    def read_arrays(self) -> dict[str, np.ndarray]:
        return self.base_profile.arrays

    def __len__(self) -> int:
        return self._rows

    def run_on_slices(
        self, name: str, *args: Any, job: Any = None, without: Collection[int] = ()
    ) -> list[Any]:
        """A method of every leaf, in the order of their rows."""
        held: dict[int, list[Slice]] = {}
        for shard, slice in self.slices:
            if shard not in without:
                held.setdefault(shard, []).append(slice)
        asked = [(shard, "run", (some, job, name, *args)) for shard, some in held.items()]
        return list(chain.from_iterable(self.shard_set.workers.call_each(asked)))

    def run_on_rows(
        self, name: str, places: np.ndarray, *args: Any
    ) -> list[tuple[np.ndarray, Any]]:
        """A method of the leaves that hold these rows: where each found stand, and what it is."""
        requests, where = [], []
        for shard, slice in self.slices:
            at = np.flatnonzero(
                (places >= slice.origin) & (places < slice.origin + slice.row_count)
            )
            if len(at):
                requests.append((shard, "run", ([slice], None, name, *args, places[at])))
                where.append(at)
        found = self.shard_set.workers.call_each(requests)
        return [(at, some[0]) for at, some in zip(where, found, strict=True)]

    def find_ids(self, key: Any) -> list[int]:
        """The places of its rows. Each store finds a key by digests of its own kind."""
        return list(chain.from_iterable(self.run_on_slices("find_positions", key)))

    def read_records(self, places: Any) -> list[str]:
        places = np.asarray(places, np.int64)
        texts: dict[int, str] = {}
        for at, some in self.run_on_rows("read_records", places):
            texts.update(zip(at.tolist(), some, strict=True))
        return [texts[i] for i in range(len(places))]

    def iterate_rows(self, places: Any = None) -> Any:
        """The rows, or those at these places, by place, (place, record), some at a time; of a
        cluster none is lost but with its shard."""
        if places is not None:
            places = np.sort(np.asarray(places, np.int64))
            for start in range(0, len(places), ROWS_PER_CHUNK):
                some = places[start : start + ROWS_PER_CHUNK]
                yield from zip(some.tolist(), self.read_records(some), strict=True)
            return
        for shard, slice in self.slices:
            for start in range(0, slice.row_count, ROWS_PER_CHUNK):
                asked = (shard, "run", ([slice], None, "read_page", start))
                texts = self.shard_set.workers.call_each([asked])[0][0]
                yield from enumerate(texts, slice.origin + start)

    def read_tensor(self, name: str, places: Any) -> Any:
        places = np.asarray(places, np.int64)
        found = self.run_on_rows("read_tensor", places, name)
        order = np.argsort(np.concatenate([at for at, _ in found]))
        if isinstance(found[0][1], Ragged):
            return concat_ragged([some for _, some in found])[order]
        return np.concatenate([some for _, some in found])[order]

    def lost_balls(self, shards: Collection[int]) -> list[partial_attention.KeyBall]:
        """What is known of the keys of shards that are lost."""
        assert self._balls is not None
        held = zip(self.slices, self._balls, strict=True)
        return [ball for (shard, _), ball in held if shard in shards]


def _check_compatible(first: str, one: StoreProfile, second: str, two: StoreProfile) -> None:
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


class SentJob:
    """A job as the leaves have it: what they find is merged in a tree of their order."""

    slice_methods = "fold", "state"
    """The methods of a leaf that fold a search, and give the weighting's state."""

    def __init__(self, many: ShardedSnapshot, job: Job, without: Collection[int] = ()):
        self.snapshot, self.job, self.without = many, job, without
        self.job_ref = many.shard_set.workers.put_job(job)

    def run_on_slices(self, name: str, *args: Any) -> list[Any]:
        return self.snapshot.run_on_slices(name, *args, job=self.job_ref, without=self.without)

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        return partial_attention.merge_pairwise(
            self.run_on_slices(self.slice_methods[0], lift, merge, init), merge
        )

    def state(self, found: State, width: int = 0) -> State:
        return partial_attention.merge_pairwise(
            self.run_on_slices(self.slice_methods[1], found, width), self.job.weighting.merge
        )


class DifferentiableJob(SentJob):
    """The same with values pooled in the query's framework, and with gradients."""

    slice_methods = "fold_passes", "pool_values"

    def compute_gradients(self, kept: State, gradients: Arrays) -> list[Any]:
        def add_gradients(one: list[Any], two: list[Any]) -> list[Any]:
            pairs = zip(one, two, strict=True)
            return [b if a is None else a if b is None else a + b for a, b in pairs]

        return partial_attention.merge_pairwise(
            self.run_on_slices("compute_gradients", kept, gradients), add_gradients
        )
