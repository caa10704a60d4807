"""`Cluster`: a database whose rows are split into shards, with the methods of a single database."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any

from qkv import partial_attention
from qkv.cluster.query import ShardedQueryExecutor, ShardedView
from qkv.cluster.shard_set import DifferentiableJob, ShardSet, assign_stores
from qkv.database.database import ReadableDatabase
from qkv.database.errors import KeyNotFoundError, warn_no_rows
from qkv.database.index.approximate import SearchPlan, attend_approximately, check_approximate
from qkv.database.table import cells
from qkv.database.table.schema import as_pairs, has_several_keys
from qkv.errors import ArgumentError, CombinationError, DtypeError, FrameworkError, validate_sizes
from qkv.frameworks import get_framework, to_numpy, tree
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import to_framework_array
from qkv.scores import Score
from qkv.util.types import UNSET, Array
from qkv.weightings import Weighting, WeightingLike

StorePath = str | os.PathLike[str]


class Cluster(ReadableDatabase[Any, Any]):
    """A database whose rows are split into shards; Ray actors answer the queries.

    `sources` is the path or the URL of one store, or a list of stores. The rows of one store are
    divided among `shards` shards. Each actor reads its rows on the machine where it runs. A path
    must therefore exist on every machine. A store at a URL is copied by fsspec to the folder
    `cache` of each machine.

    Each shard has `replicas` actors with `cores` CPU cores each. `address` is the address
    of a running Ray, as in `ray.init`; by default, Ray is started here. `options` are Ray's options
    for actors, such as resources.

    Ray restarts an actor that dies, and the cluster sends the query again. If a shard does not
    answer within `timeout` seconds, the query raises `LostShardError`. With `partial=True`, the
    answer leaves the shard out instead, and `answer.error_bound` includes the largest weight that
    the lost rows can have. With `hedge`, a second replica is queried if the first has not answered
    within `hedge` seconds.

    >>> import qkv
    >>> with qkv.cluster.Cluster("big.qkv", shards=2) as c:  # doctest: +SKIP
    ...     c.ask("the alchemist").value
    """

    def __init__(
        self,
        sources: StorePath | Sequence[StorePath],
        *,
        shards: int | None = None,
        replicas: int = 1,
        cores: int = 1,
        address: str | None = None,
        options: Mapping[str, Any] | None = None,
        cache: StorePath | None = None,
        timeout: float = 60.0,
        hedge: float | None = None,
        partial: bool = False,
    ):
        paths = [sources] if isinstance(sources, str | os.PathLike) else sources
        locations = [_normalize_source(path) for path in paths]
        if not locations:
            raise ArgumentError("sources: pass the path or the URL of at least one store")
        count = (len(locations) if len(locations) > 1 else 2) if shards is None else shards
        validate_sizes(shards=count, replicas=replicas, cores=cores)
        from qkv.cluster.ray import ActorPool

        assigned = assign_stores(len(locations), count)
        workers = ActorPool(
            [{i: locations[i] for i in stores_of_shard} for stores_of_shard in assigned],
            replicas=replicas,
            cores=cores,
            address=address,
            options=options or {},
            cache=None if cache is None else os.fspath(cache),
            timeout=timeout,
            hedge=hedge,
        )
        try:
            super().__init__(ShardSet(locations, assigned, workers, partial))  # type: ignore[arg-type]
            self._view  # noqa: B018, raises now for stores that do not match
        except BaseException:
            workers.close()
            raise

    @property
    def _shard_set(self) -> ShardSet:
        return self._store  # type: ignore[return-value]

    @property
    def _view(self) -> ShardedView:
        """The view of the newest version, or of the version that `at` pinned."""
        snapshot = self._shard_set.open_snapshot(self._pinned_version)
        view = self._cached_view
        if not isinstance(view, ShardedView) or view.snapshot is not snapshot:
            old, view = view, ShardedView(snapshot, self._requested_encoder)  # type: ignore[arg-type]
            if old is not None:
                view.inherit_encoder(old)
            self._cached_view = view
        return view

    def _find_value(self, key: Any, default: Any) -> Any:
        return self._view.find_value(key, default)

    def _build_executor(
        self,
        view: Any,
        score: Any,
        weighting: Any,
        where: Any,
        *options: Any,
        rows: str = "rows",
    ) -> Any:
        checked = self._check_ask_options(view, score, weighting, *options)
        arguments = (view, view.resolve_score(score), weighting, where, *checked, None, rows)
        return ShardedQueryExecutor(*arguments)

    _get_executor = _build_executor

    def _attend_encoded(
        self,
        view: Any,
        code: EncodedQuery,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        bound_options: dict[str, float | None],
        approximate: bool | float | None = None,
    ) -> Array:
        if get_framework(code.code).is_abstract(code.code):
            raise FrameworkError(
                "attend queries other processes while it runs and cannot be traced: call it "
                "outside of jit, compile or tf.function"
            )

        tolerance, fw = bound_options["tolerance"], get_framework(code.code)
        if approximate is not None and approximate is not False:
            missing_weight = check_approximate(approximate, tolerance)

            def make_plan(score: Score, weighting: Weighting) -> SearchPlan | str:
                executor = ShardedQueryExecutor(view, score, weighting, where, 1, None)
                return executor.plan_search(missing_weight)

            out = attend_approximately(view, code, score, weighting, make_plan)
            if out is not None:
                return out
        if tolerance is not None and not fw.needs_gradient(
            [code.code, *tree.array_leaves(fw, (score, weighting))]
        ):
            query = EncodedQuery(to_numpy(code.code), code.sparse_positions)
            out = ShardedQueryExecutor(
                view, score, weighting, where, 1, tolerance
            ).attend_within_tolerance(query)
            if out is not None:
                if where is not None and not out.any():
                    warn_no_rows(view.why_none_pass(where))
                return to_framework_array(fw, out, code.code)

        def send_job(query: Array, score: Score, weighting: Weighting) -> DifferentiableJob:
            job = view.build_job(
                EncodedQuery(query, code.sparse_positions), None, score, weighting, where
            )
            return DifferentiableJob(view.snapshot, job)

        shape = len(view), code.code.shape[-1], view._vector_widths[1]
        out = partial_attention.attend_across(
            send_job, code.code, shape, score=score, weighting=weighting
        )
        if where is not None and not to_numpy(fw.detach(out)).any():
            warn_no_rows(view.why_none_pass(where))
        return fw.astype(out, fw.dtype_name(code.code))

    # Writing

    def add(self, keys: Any, values: Any = UNSET) -> None:
        """Add one or many rows, like `Database.add`. The rows are on disk when the call returns.

        With several stores, the digest of a new key selects the store; a known key stays in its
        store. Each store gets its rows in one commit.
        """
        self._check_writable()
        if len(self._shard_set.sources) == 1:
            self._shard_set.write_store(0, "add", keys, *(() if values is UNSET else (values,)))
            return
        pairs = as_pairs(
            keys, values, has_several_keys(keys, getattr(self._schema, "key_kind", None))
        )
        for source, part in self._route_to_stores(pairs, lambda pair: pair[0]).items():
            self._shard_set.write_store(source, "add", part)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows with named columns, like `Database.extend`."""
        self._check_writable()
        schema = self._view.schema
        for source, part in self._route_to_stores(list(rows), schema.row_key).items():
            self._shard_set.write_store(source, "extend", part)

    def update(self, key: Any, value: Any = UNSET) -> int:
        """Set the value of one key, or of each key in a mapping or a list of pairs.

        Return the number of keys that did not exist and were added.
        """
        if value is UNSET and not isinstance(key, Mapping | list):
            raise DtypeError("update takes a key and its value, or a mapping of keys to values")
        pairs = as_pairs(key, value, False)
        absent = {self._view.schema.key_digest(key) for key, _ in pairs if key not in self}
        for source, part in self._route_to_stores(pairs, lambda pair: pair[0]).items():
            self._shard_set.write_store(source, "update", part)
        return len(absent)

    def remove(self, keys: Any) -> int:
        """Remove all rows with this key, or with the keys of a list.

        Return the number of removed rows.
        """
        keys = (
            list(keys)
            if has_several_keys(keys, getattr(self._schema, "key_kind", None))
            else [keys]
        )
        removed: set[int] = set()
        for key in keys:
            ids = self._view.find_ids(key)
            if not ids:
                raise KeyNotFoundError(key, bound(self._nearest_keys, key))
            removed.update(ids)
        for source, part in self._route_to_stores(keys, lambda key: key).items():
            self._shard_set.write_store(source, "remove", part)
        return len(removed)

    def _check_writable(self) -> None:
        if self._pinned_version is not None:
            raise CombinationError(
                f"version {self._pinned_version} is read-only, because at() selected it: write to "
                "the cluster itself"
            )

    def _route_to_stores(self, items: list[Any], key_of: Any) -> dict[int, list[Any]]:
        """Group items by the index of their store; `key_of` returns the key of an item.

        A key stays in the store that has it. The digest of a new key selects its store.
        """
        self._check_writable()
        count, routed = len(self._shard_set.sources), dict[int, list[Any]]()
        if count == 1:
            return {0: items} if items else {}
        snapshot, schema = self._view.snapshot, self._schema
        key_digest = cells.key_digest if schema is None else schema.key_digest
        digests = [key_digest(key_of(item)) for item in items]
        owners = [int.from_bytes(digest[:8], "big") % count for digest in digests]
        positions = snapshot.run_on_slices("find_digests", digests)
        for (_, slice), existing in zip(snapshot.slices, positions, strict=True):
            for i in existing:
                owners[i] = slice.source
        for item, owner in zip(items, owners, strict=True):
            routed.setdefault(owner, []).append(item)
        return routed

    def calibrate(self, *_: Any, **__: Any) -> Any:
        """Raise `CombinationError`: a cluster uses the calibration of its store."""
        raise CombinationError(
            "a cluster cannot calibrate: call calibrate on the database itself, "
            "qkv.open(path).calibrate(pairs), before qkv.cluster.split. The cluster then uses it"
        )

    # Information

    def process_ids(self) -> list[int]:
        """Return the process id of one actor of each shard."""
        return [process for process, _ in self._shard_set.process_stats()]

    def busy_seconds(self) -> list[float]:
        """Return the CPU seconds used so far by one actor of each shard."""
        return [seconds for _, seconds in self._shard_set.process_stats()]

    def __repr__(self) -> str:
        shards, sources = len(self._shard_set.shards), ", ".join(self._shard_set.sources)
        return f"<Cluster {sources}: {len(self):,} rows in {shards} shards>"


def _normalize_source(source: Any) -> str:
    """Return a URL as it is, and a path as an absolute path."""
    if not isinstance(source, str | os.PathLike):
        raise DtypeError(f"sources must be paths or URLs, not {type(source).__name__}")
    text = os.fspath(source)
    return text if "://" in text else str(Path(text).absolute())
