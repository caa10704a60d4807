"""All shards of a cluster as one store: versions, snapshots, requests and merged results."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qkv import partial_attention
from qkv.cluster.shard import Job, Slice, StoreProfile
from qkv.database.encoders.arrays import ESTIMATED_SETTINGS
from qkv.database.errors import LostShardError
from qkv.database.table.view import ROWS_PER_CHUNK
from qkv.errors import ArgumentError, CombinationError
from qkv.frameworks.ragged import Ragged, concat_ragged
from qkv.util.types import Arrays
from qkv.weightings import State

VERSION_MAX_AGE_SECONDS = 1.0
"""A cluster asks its shards for new versions if its last answer is older than this."""

MAX_ROWS = 2**31 - 2
"""The largest number of rows of a cluster: positions must fit in 32 bits."""

Request = tuple[int, str, tuple[Any, ...]]
"""The index of a shard, the name of a method of `Shard`, and the arguments of the call."""


class Workers(Protocol):
    """The methods of an object that runs the shards: Ray actors, or in tests this process."""

    def put_job(self, job: Job, /) -> Any:
        """Return what requests contain for this job: the job itself, or a reference to it."""

    def call_each(self, requests: Sequence[Request], /) -> list[Any]:
        """Send all requests, with retries; return their results in order."""

    def call_once(self, request: Request, /) -> Any:
        """Send one request without retries; return its result."""

    def close(self) -> None: ...


def assign_stores(sources: int, shards: int) -> list[list[int]]:
    """Return the indices of the stores of each shard.

    A shard may have several stores, or several shards may share one store.

    >>> assign_stores(3, 2), assign_stores(1, 2), assign_stores(2, 3)
    ([[0, 1], [2]], [[0], [0]], [[0], [0], [1]])
    """
    if sources >= shards:
        edges = [-(-i * sources // shards) for i in range(shards + 1)]
        return [list(range(a, b)) for a, b in pairwise(edges)]
    return [[i * sources // shards] for i in range(shards)]


class ShardSet:
    """The stores of a cluster, and the workers that read them."""

    def __init__(
        self, sources: Sequence[str], shards: list[list[int]], workers: Workers, partial: bool
    ):
        self.sources, self.shards, self.workers = sources, shards, workers
        self.partial, self.closed = partial, False
        self._newest_versions: tuple[int, ...] = ()
        self._refreshed_at, self._write_lock = 0.0, threading.Lock()
        self._snapshots: dict[tuple[int, ...], ShardedSnapshot] = {}
        self.refresh_versions()

    @property
    def path(self) -> Path | None:
        """The path of the store; None if there are several stores, or the store is at a URL."""
        first = self.sources[0]
        return None if len(self.sources) > 1 or "://" in first else Path(first)

    def refresh_versions(self) -> None:
        """Ask the shards for the newest version of every store."""
        answers = self.workers.call_each(
            [(i, "newest_versions", ()) for i in range(len(self.shards))]
        )
        newest = {source: version for answer in answers for source, version in answer.items()}
        self._newest_versions = tuple(newest[i] for i in range(len(self.sources)))
        self._refreshed_at = time.monotonic()

    def _current_versions(self) -> tuple[int, ...]:
        """Return the newest versions of all stores; they may be `VERSION_MAX_AGE_SECONDS` old."""
        if self.closed:
            raise CombinationError("the cluster is closed: create another one")
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
        """The newest version. With several stores, it is the sum of their versions."""
        return sum(self._current_versions())

    def open_snapshot(self, version: int | None = None) -> ShardedSnapshot:
        """Return a snapshot of a version; None means the newest version."""
        wanted = self._current_versions()
        if version is not None:
            if len(self.sources) > 1 and version != sum(wanted):
                raise CombinationError(
                    "several stores have no common versions: open one of them with qkv.open"
                )
            wanted = (version,) if len(self.sources) == 1 else wanted
        if wanted not in self._snapshots:
            self._snapshots = {wanted: ShardedSnapshot(self, wanted)}
        return self._snapshots[wanted]

    def versions(self) -> list[Any]:
        if len(self.sources) > 1:
            raise CombinationError(
                "several stores have no common versions: open one of them with qkv.open"
            )
        return list(self.workers.call_each([(0, "list_versions", (0,))])[0])

    def shard_of_store(self, source: int) -> int:
        """Return the index of the shard that writes to a store."""
        return next(i for i, stores in enumerate(self.shards) if source in stores)

    def write_store(self, source: int, name: str, *args: Any) -> None:
        """Change a store exactly once. The change is on disk when this returns.

        `name` and `args` are a method of `Database` and its arguments.
        """
        if "://" in self.sources[source]:
            raise CombinationError(
                f"{self.sources[source]} is read-only, because it is a URL: add the rows to a "
                "store on disk, and upload that store"
            )
        shard = self.shard_of_store(source)
        with self._write_lock:  # so that no other thread adds a version in between
            while True:
                before = self.workers.call_each([(shard, "newest_versions", ())])[0][source]
                try:
                    self.workers.call_once((shard, "write_store", (source, name, *args)))
                except LostShardError:  # the actor died: was the change made before that?
                    if (
                        self.workers.call_each([(shard, "newest_versions", ())])[0][source]
                        == before
                    ):
                        continue
                break
            self.refresh_versions()

    def process_stats(self) -> list[tuple[int, float]]:
        """Return (process id, CPU seconds) of one actor of each shard."""
        return self.workers.call_each([(i, "process_stats", ()) for i in range(len(self.shards))])

    def close(self) -> None:
        self.closed = True
        self.workers.close()


class ShardedSnapshot:
    """A snapshot of all stores. The id of a row is its position among all rows of the cluster."""

    def __init__(self, shard_set: ShardSet, versions: tuple[int, ...]):
        self.shard_set, self.versions = shard_set, versions
        self.version = sum(versions)
        requests = [
            (shard_set.shard_of_store(i), "profile_store", (i, version))
            for i, version in enumerate(versions)
        ]
        self.profiles: list[StoreProfile] = shard_set.workers.call_each(requests)
        for name, profile in zip(shard_set.sources[1:], self.profiles[1:], strict=True):
            _check_compatible(shard_set.sources[0], self.profiles[0], name, profile)
        self.slices: list[tuple[int, Slice]] = []
        row_count = 0
        for source, profile in enumerate(self.profiles):
            holders = [i for i, stores in enumerate(shard_set.shards) if source in stores]
            edges = [profile.rows * i // len(holders) for i in range(len(holders) + 1)]
            for shard, (start, stop) in zip(holders, pairwise(edges), strict=True):
                if stop > start:
                    self.slices.append(
                        (shard, Slice(source, profile.version, start, stop, row_count))
                    )
                row_count += stop - start
        if row_count > MAX_ROWS:
            raise ArgumentError(f"a cluster can have at most {MAX_ROWS:,} rows, not {row_count:,}")
        self._rows = row_count
        self._balls: list[partial_attention.KeyBall] | None = (
            self.run_on_slices("bounding_ball") if shard_set.partial else None
        )

    @property
    def base_profile(self) -> StoreProfile:
        """The profile of the first store that has settings, else of the first store."""
        return next((profile for profile in self.profiles if profile.settings), self.profiles[0])

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.base_profile.settings)

    @property
    def last_id(self) -> int:
        """The number of row ids that all stores have used, minus 1.

        A calibration counts the rows that were added since by this number.
        """
        return sum(profile.last_id + 1 for profile in self.profiles) - 1

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return self.base_profile.tensor_names

    def tensor_type(self, name: str) -> Any:
        return self.base_profile.tensor_types.get(name)

    def read_arrays(self) -> dict[str, np.ndarray]:
        return self.base_profile.arrays

    def __len__(self) -> int:
        return self._rows

    def run_on_slices(
        self, name: str, *args: Any, job: Any = None, without: Collection[int] = ()
    ) -> list[Any]:
        """Call the method `name` of the evaluator of every slice; return the results in row order.

        `without` lists shards to skip.
        """
        slices_by_shard: dict[int, list[Slice]] = {}
        for shard, slice in self.slices:
            if shard not in without:
                slices_by_shard.setdefault(shard, []).append(slice)
        requests = [
            (shard, "run", (slices, job, name, *args)) for shard, slices in slices_by_shard.items()
        ]
        return list(chain.from_iterable(self.shard_set.workers.call_each(requests)))

    def run_on_rows(
        self, name: str, positions: np.ndarray, *args: Any
    ) -> list[tuple[np.ndarray, Any]]:
        """Call the method `name` of the slices that have these rows.

        Return (indices into `positions`, result) for each such slice.
        """
        requests, indices = [], []
        for shard, slice in self.slices:
            selected = np.flatnonzero(
                (positions >= slice.origin) & (positions < slice.origin + slice.row_count)
            )
            if len(selected):
                requests.append((shard, "run", ([slice], None, name, *args, positions[selected])))
                indices.append(selected)
        results = self.shard_set.workers.call_each(requests)
        return [(selected, result[0]) for selected, result in zip(indices, results, strict=True)]

    def find_ids(self, key: Any) -> list[int]:
        """Return the positions of the rows with this key.

        Each store computes the key's digest itself.
        """
        return list(chain.from_iterable(self.run_on_slices("find_positions", key)))

    def read_records(self, positions: Any) -> list[str]:
        positions = np.asarray(positions, np.int64)
        texts: dict[int, str] = {}
        for selected, records in self.run_on_rows("read_records", positions):
            texts.update(zip(selected.tolist(), records, strict=True))
        return [texts[i] for i in range(len(positions))]

    def iterate_rows(self, positions: Any = None) -> Any:
        """Yield (position, record) in ascending order, of all rows or of these positions."""
        if positions is not None:
            positions = np.sort(np.asarray(positions, np.int64))
            for start in range(0, len(positions), ROWS_PER_CHUNK):
                page = positions[start : start + ROWS_PER_CHUNK]
                yield from zip(page.tolist(), self.read_records(page), strict=True)
            return
        for shard, slice in self.slices:
            for start in range(0, slice.row_count, ROWS_PER_CHUNK):
                request = (shard, "run", ([slice], None, "read_page", start))
                texts = self.shard_set.workers.call_each([request])[0][0]
                yield from enumerate(texts, slice.origin + start)

    def read_tensor(self, name: str, positions: Any) -> Any:
        positions = np.asarray(positions, np.int64)
        parts = self.run_on_rows("read_tensor", positions, name)
        order = np.argsort(np.concatenate([selected for selected, _ in parts]))
        if isinstance(parts[0][1], Ragged):
            return concat_ragged([part for _, part in parts])[order]
        return np.concatenate([part for _, part in parts])[order]

    def lost_balls(self, shards: Collection[int]) -> list[partial_attention.KeyBall]:
        """Return the balls that contain the keys of each slice of these shards."""
        assert self._balls is not None
        pairs = zip(self.slices, self._balls, strict=True)
        return [ball for (shard, _), ball in pairs if shard in shards]


def _check_compatible(
    first: str, first_profile: StoreProfile, second: str, second_profile: StoreProfile
) -> None:
    """Raise `CombinationError` unless both stores have the same schema and encoder."""
    for name in ("schema", "encoder") if first_profile.settings and second_profile.settings else ():
        first_settings, second_settings = (
            _vector_settings(profile.settings.get(name))
            for profile in (first_profile, second_profile)
        )
        if first_settings != second_settings:
            raise CombinationError(
                f"{first} and {second} have different settings of the {name}, but shards of one "
                f"database must have the same {name}: create them with `qkv.cluster.split`"
            )
    same_names = first_profile.arrays.keys() == second_profile.arrays.keys()
    if not same_names or any(
        not np.array_equal(x, second_profile.arrays[n]) for n, x in first_profile.arrays.items()
    ):
        raise CombinationError(
            f"the encoders of {first} and {second} have learned different parameters: create "
            "shards of one database with `qkv.cluster.split`"
        )


def _vector_settings(settings: Any) -> Any:
    """Return settings without those that do not change the vectors of keys.

    The first store with settings says how a cluster compares vectors.
    """
    if not isinstance(settings, dict) or settings.get("kind") != "arrays":
        return settings
    return {name: x for name, x in settings.items() if name not in ESTIMATED_SETTINGS}


class SentJob:
    """A job that all slices evaluate. The results of the slices are merged pairwise, in order."""

    slice_methods = "fold", "state"
    """The methods of `SliceEvaluator` that `fold` and `state` call."""

    def __init__(self, snapshot: ShardedSnapshot, job: Job, without: Collection[int] = ()):
        self.snapshot, self.job, self.without = snapshot, job, without
        self.job_ref = snapshot.shard_set.workers.put_job(job)

    def run_on_slices(self, name: str, *args: Any) -> list[Any]:
        return self.snapshot.run_on_slices(name, *args, job=self.job_ref, without=self.without)

    def fold(self, lift: Any, merge: Any, init: Any) -> State:
        """Merge what each slice computes from its scores.

        `lift` maps scores to a state, `merge` merges two states, and `init` is the empty state.
        """
        return partial_attention.merge_pairwise(
            self.run_on_slices(self.slice_methods[0], lift, merge, init), merge
        )

    def state(self, threshold: State, width: int = 0) -> State:
        """Return the merged states of the weighting."""
        return partial_attention.merge_pairwise(
            self.run_on_slices(self.slice_methods[1], threshold, width), self.job.weighting.merge
        )


class DifferentiableJob(SentJob):
    """A sent job that pools values in the query's framework, and computes gradients."""

    slice_methods = "fold_passes", "pool_values"

    def compute_gradients(self, state: State, gradients: Arrays) -> list[Any]:
        """Return the gradient of each array, summed over the slices; None for an unused array."""

        def add_gradients(first: list[Any], second: list[Any]) -> list[Any]:
            pairs = zip(first, second, strict=True)
            return [b if a is None else a if b is None else a + b for a, b in pairs]

        return partial_attention.merge_pairwise(
            self.run_on_slices("compute_gradients", state, gradients), add_gradients
        )
