"""A database in shards: the same questions, each answered by all shards together."""

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
    """The database at a path, or in several stores that are its shards, asked on Ray.

    `sources` is the path or URL of a store, which `shards` actors share out by its rows, or a list
    of stores with rows of their own. Each actor opens its segments where it runs: a path must lead
    to them on every machine; what a URL names is copied to the machine's `cache` by fsspec. Each
    shard has `replicas`, each with `cores`. `address` is that of a Ray that runs, as in `ray.init`,
    and `options` are Ray's for actors, such as resources; without them one is started here.

    A shard that ends is started again, and its query asked again. One that is not back after
    `timeout` seconds is an error, or with `partial` left out: then `answer.error_bound` counts the
    largest share that its rows can have. With `hedge` seconds, a second replica is asked where the
    first has not answered by then.

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
        given = [sources] if isinstance(sources, str | os.PathLike) else sources
        places = [_normalize_source(x) for x in given]
        if not places:
            raise ArgumentError("sources: name the path or the URL of at least one store")
        count = (len(places) if len(places) > 1 else 2) if shards is None else shards
        validate_sizes(shards=count, replicas=replicas, cores=cores)
        from qkv.cluster.ray import ActorPool

        held = assign_stores(len(places), count)
        workers = ActorPool(
            [{i: places[i] for i in own} for own in held],
            replicas=replicas,
            cores=cores,
            address=address,
            options=options or {},
            cache=None if cache is None else os.fspath(cache),
            timeout=timeout,
            hedge=hedge,
        )
        try:
            super().__init__(ShardSet(places, held, workers, partial))  # type: ignore[arg-type]
            self._view  # noqa: B018, so that stores that do not fit are told of now
        except BaseException:
            workers.close()
            raise

    @property
    def _shard_set(self) -> ShardSet:
        return self._store  # type: ignore[return-value]

    @property
    def _view(self) -> ShardedView:
        many = self._shard_set.open_snapshot(self._pinned_version)
        held = self._cached_view
        if not isinstance(held, ShardedView) or held.snapshot is not many:
            old, held = held, ShardedView(many, self._requested_encoder)  # type: ignore[arg-type]
            if old is not None:
                held.inherit_encoder(old)
            self._cached_view = held
        return held

    def _find_value(self, key: Any, default: Any) -> Any:
        return self._view.find_value(
            key, default
        )  # the shards know of no newer version than it has

    def _get_executor(self, view: Any, score: Any, weighting: Any, where: Any, *how: Any) -> Any:
        meant = self._check_ask_options(view, score, weighting, *how)
        return ShardedQueryExecutor(view, view.resolve_score(score), weighting, where, *meant)

    def _attend_encoded(
        self,
        view: Any,
        code: EncodedQuery,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        bound_options: dict[str, float | None],
    ) -> Array:
        if get_framework(code.code).is_abstract(code.code):
            raise FrameworkError(
                "attend asks other processes while it runs, so it cannot be traced: call it "
                "outside of jit, compile or tf.function"
            )

        near_to, fw = bound_options["tolerance"], get_framework(code.code)
        if near_to is not None and not fw.needs_gradient(
            [code.code, *tree.array_leaves(fw, (score, weighting))]
        ):
            given = EncodedQuery(to_numpy(code.code), code.sparse_positions)
            found = ShardedQueryExecutor(
                view, score, weighting, where, 1, near_to
            ).attend_within_tolerance(given)
            if found is not None:
                if where is not None and not found.any():
                    warn_no_rows(view.why_none_pass(where))
                return to_framework_array(fw, found, code.code)

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

    # Rows in and out

    def add(self, keys: Any, values: Any = UNSET) -> None:
        """One row, or many, as `Database.add`: on disk when this returns. Of several stores, a
        row's key says which has it, and what goes to one store goes in together."""
        self._check_writable()
        if len(self._shard_set.sources) == 1:
            self._shard_set.write_store(0, "add", keys, *(() if values is UNSET else (values,)))
            return
        pairs = as_pairs(
            keys, values, has_several_keys(keys, getattr(self._schema, "key_kind", None))
        )
        for source, some in self._route_to_stores(pairs, lambda pair: pair[0]).items():
            self._shard_set.write_store(source, "add", some)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows with named columns, as `Database.extend`."""
        self._check_writable()
        schema = self._view.schema
        for source, some in self._route_to_stores(list(rows), schema.row_key).items():
            self._shard_set.write_store(source, "extend", some)

    def update(self, key: Any, value: Any = UNSET) -> int:
        """Give a key another value, or each of a mapping or of pairs; how many were absent, and
        inserted."""
        if value is UNSET and not isinstance(key, Mapping | list):
            raise DtypeError("update takes a key and its value, or a mapping of them")
        pairs = as_pairs(key, value, False)
        absent = {self._view.schema.key_digest(key) for key, _ in pairs if key not in self}
        for source, some in self._route_to_stores(pairs, lambda pair: pair[0]).items():
            self._shard_set.write_store(source, "update", some)
        return len(absent)

    def remove(self, keys: Any) -> int:
        """Take out every row of these keys (one, or a list); how many rows went."""
        keys = (
            list(keys)
            if has_several_keys(keys, getattr(self._schema, "key_kind", None))
            else [keys]
        )
        dead: set[int] = set()
        for key in keys:
            found = self._view.find_ids(key)
            if not found:
                raise KeyNotFoundError(key, bound(self._nearest_keys, key))
            dead.update(found)
        for source, some in self._route_to_stores(keys, lambda key: key).items():
            self._shard_set.write_store(source, "remove", some)
        return len(dead)

    def _check_writable(self) -> None:
        if self._pinned_version is not None:
            raise CombinationError(
                f"version {self._pinned_version} is past and cannot change: write to the cluster "
                "itself"
            )

    def _route_to_stores(self, things: list[Any], key_of: Any) -> dict[int, list[Any]]:
        """What goes to each store: a key to that which has it already, else as its digest says."""
        self._check_writable()
        count, found = len(self._shard_set.sources), dict[int, list[Any]]()
        if count == 1:
            return {0: things} if things else {}
        many, schema = self._view.snapshot, self._schema
        digest = cells.key_digest if schema is None else schema.key_digest
        digests = [digest(key_of(thing)) for thing in things]
        owners = [int.from_bytes(some[:8], "big") % count for some in digests]
        for (_, slice), there in zip(
            many.slices, many.run_on_slices("find_digests", digests), strict=True
        ):
            for i in there:
                owners[i] = slice.source
        for thing, own in zip(things, owners, strict=True):
            found.setdefault(own, []).append(thing)
        return found

    # What it is

    def process_ids(self) -> list[int]:
        """The process of each shard."""
        return [process for process, _ in self._shard_set.process_stats()]

    def busy_seconds(self) -> list[float]:
        """The seconds that the process of each shard has worked."""
        return [seconds for _, seconds in self._shard_set.process_stats()]

    def __repr__(self) -> str:
        shards, told = len(self._shard_set.shards), ", ".join(self._shard_set.sources)
        return f"<Cluster {told}: {len(self):,} rows in {shards} shards>"


def _normalize_source(source: Any) -> str:
    """A URL, or a path as it is on any machine."""
    if not isinstance(source, str | os.PathLike):
        raise DtypeError(f"sources: a path or a URL is wanted, not {type(source).__name__}")
    told = os.fspath(source)
    return told if "://" in told else str(Path(told).absolute())
