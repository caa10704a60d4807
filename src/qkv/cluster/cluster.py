"""A database in shards: the same questions, each answered by all shards together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any

from qkv import parts
from qkv.arrays import of, to_numpy, tree
from qkv.arrays.ragged import Query
from qkv.arrays.rows import taken
from qkv.cluster.asking import Gathered, Spread
from qkv.cluster.fleet import Attended, Fleet, owners
from qkv.database import cells
from qkv.database.absent import AbsentKey
from qkv.database.faults import warn_no_rows
from qkv.database.leaving import Leaving
from qkv.database.reading import Reading
from qkv.database.schema import pairs_of, several
from qkv.errors import ArgumentError, CombinationError, DtypeError, FrameworkError, sizes
from qkv.scores import Score
from qkv.types import NOTHING, Array
from qkv.weightings import Weighting, WeightingLike

Place = str | os.PathLike[str]


class Cluster(Leaving, Reading[Any, Any]):
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
        sources: Place | Sequence[Place],
        *,
        shards: int | None = None,
        replicas: int = 1,
        cores: int = 1,
        address: str | None = None,
        options: Mapping[str, Any] | None = None,
        cache: Place | None = None,
        timeout: float = 60.0,
        hedge: float | None = None,
        partial: bool = False,
    ):
        given = [sources] if isinstance(sources, str | os.PathLike) else sources
        places = [_place(x) for x in given]
        if not places:
            raise ArgumentError("sources: name the path or the URL of at least one store")
        count = (len(places) if len(places) > 1 else 2) if shards is None else shards
        sizes(shards=count, replicas=replicas, cores=cores)
        from qkv.cluster.ray import Actors

        held = owners(len(places), count)
        workers = Actors(
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
            super().__init__(Fleet(places, held, workers, partial))  # type: ignore[arg-type]
            self._view  # noqa: B018, so that stores that do not fit are told of now
        except BaseException:
            workers.close()
            raise

    @property
    def _fleet(self) -> Fleet:
        return self._store  # type: ignore[return-value]

    @property
    def _view(self) -> Spread:
        many = self._fleet.at(self._pin)
        held = self._held
        if not isinstance(held, Spread) or held.snapshot is not many:
            old, held = held, Spread(many, self._encoder_wish)  # type: ignore[arg-type]
            if old is not None:
                held.inherit(old)
            self._held = held
        return held

    def _value(self, key: Any, default: Any) -> Any:
        return self._view.value(key, default)  # the shards know of no newer version than it has

    def _asked(self, view: Any, score: Any, weighting: Any, where: Any, *how: Any) -> Any:
        meant = self._meant(view, score, weighting, *how)
        return Gathered(view, view.score(score), weighting, where, *meant)

    def _attended(
        self,
        view: Any,
        code: Query,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        near: dict[str, float | None],
    ) -> Array:
        if of(code.code).unknown(code.code):
            raise FrameworkError(
                "attend asks other processes while it runs, so it cannot be traced: call it "
                "outside of jit, compile or tf.function"
            )

        near_to, fw = near["tolerance"], of(code.code)
        if near_to is not None and not fw.needs_gradient(
            [code.code, *tree.leaves(fw, (score, weighting))]
        ):
            given = Query(to_numpy(code.code), code.asked)
            found = Gathered(view, score, weighting, where, 1, near_to).attended(given)
            if found is not None:
                if where is not None and not found.any():
                    warn_no_rows(view.why_none_pass(where))
                return taken(fw, found, code.code)

        def begin(query: Array, score: Score, weighting: Weighting) -> Attended:
            job = view.job(Query(query, code.asked), None, score, weighting, where)
            return Attended(view.snapshot, job)

        shape = len(view), code.code.shape[-1], view._widths[1]
        out = parts.across(begin, code.code, shape, score=score, weighting=weighting)
        if where is not None and not to_numpy(fw.detach(out)).any():
            warn_no_rows(view.why_none_pass(where))
        return fw.astype(out, fw.dtype(code.code))

    # Rows in and out

    def add(self, keys: Any, values: Any = NOTHING) -> None:
        """One row, or many, as `Database.add`: on disk when this returns. Of several stores, a
        row's key says which has it, and what goes to one store goes in together."""
        self._writable()
        if len(self._fleet.sources) == 1:
            self._fleet.write(0, "add", keys, *(() if values is NOTHING else (values,)))
            return
        pairs = pairs_of(keys, values, several(keys, getattr(self._schema, "key_kind", None)))
        for source, some in self._routed(pairs, lambda pair: pair[0]).items():
            self._fleet.write(source, "add", some)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows with named columns, as `Database.extend`."""
        self._writable()
        schema = self._view.schema
        for source, some in self._routed(list(rows), schema.key_of).items():
            self._fleet.write(source, "extend", some)

    def update(self, key: Any, value: Any = NOTHING) -> int:
        """Give a key another value, or each of a mapping or of pairs; how many were absent, and
        inserted."""
        if value is NOTHING and not isinstance(key, Mapping | list):
            raise DtypeError("update takes a key and its value, or a mapping of them")
        pairs = pairs_of(key, value, False)
        absent = {self._view.schema.digest(key) for key, _ in pairs if key not in self}
        for source, some in self._routed(pairs, lambda pair: pair[0]).items():
            self._fleet.write(source, "update", some)
        return len(absent)

    def remove(self, keys: Any) -> int:
        """Take out every row of these keys (one, or a list); how many rows went."""
        keys = list(keys) if several(keys, getattr(self._schema, "key_kind", None)) else [keys]
        dead: set[int] = set()
        for key in keys:
            found = self._view.find(key)
            if not found:
                raise AbsentKey(key, bound(self._nearest, key))
            dead.update(found)
        for source, some in self._routed(keys, lambda key: key).items():
            self._fleet.write(source, "remove", some)
        return len(dead)

    def _writable(self) -> None:
        if self._pin is not None:
            raise CombinationError(
                f"version {self._pin} is past and cannot change: write to the cluster itself"
            )

    def _routed(self, things: list[Any], key_of: Any) -> dict[int, list[Any]]:
        """What goes to each store: a key to that which has it already, else as its digest says."""
        self._writable()
        count, found = len(self._fleet.sources), dict[int, list[Any]]()
        if count == 1:
            return {0: things} if things else {}
        many, schema = self._view.snapshot, self._schema
        digest = cells.digest if schema is None else schema.digest
        digests = [digest(key_of(thing)) for thing in things]
        owners = [int.from_bytes(some[:8], "big") % count for some in digests]
        for (_, slice), there in zip(many.slices, many.each("has", digests), strict=True):
            for i in there:
                owners[i] = slice.source
        for thing, own in zip(things, owners, strict=True):
            found.setdefault(own, []).append(thing)
        return found

    # What it is

    def processes(self) -> list[int]:
        """The process of each shard."""
        return [process for process, _ in self._fleet.processes()]

    def worked(self) -> list[float]:
        """The seconds that the process of each shard has worked."""
        return [seconds for _, seconds in self._fleet.processes()]

    def __repr__(self) -> str:
        shards, told = len(self._fleet.shards), ", ".join(self._fleet.sources)
        return f"<Cluster {told}: {len(self):,} rows in {shards} shards>"


def _place(source: Any) -> str:
    """A URL, or a path as it is on any machine."""
    if not isinstance(source, str | os.PathLike):
        raise DtypeError(f"sources: a path or a URL is wanted, not {type(source).__name__}")
    told = os.fspath(source)
    return told if "://" in told else str(Path(told).absolute())
