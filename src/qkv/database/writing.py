"""Writing a database: rows in and out, keys encoded anew, each change a new version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from qkv.arrays import is_array, to_numpy
from qkv.arrays.made import Late
from qkv.database import cells, encoding
from qkv.database import columns as typed
from qkv.database.absent import AbsentKey
from qkv.database.faults import DuplicateKey, StaleFit
from qkv.database.leaving import Leaving
from qkv.database.piece import some_value
from qkv.database.queries import READ, listed
from qkv.database.reading import Reading
from qkv.database.schema import (
    Cells,
    Schema,
    keyed,
    length,
    matched,
    pairs_of,
    plain,
    several,
    tell_partial,
    transposed,
    vectors,
)
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    QkvError,
    callable_or_none,
    keywords,
    warn,
)
from qkv.types import NOTHING, K, Progress, V

if TYPE_CHECKING:
    from qkv.database.conformal import Promise
    from qkv.database.encoders import EncoderLike
    from qkv.scores import ScoreLike
    from qkv.weightings import WeightingLike

REFITTED = 2**17
"""Rows up to which an encoder that fits itself to the keys does so anew when they have doubled."""


class Writing(Leaving, Reading[K, V]):
    """Rows that can be read and changed, unless a version is pinned."""

    def add(self, keys: Any, values: Any = NOTHING) -> None:
        """One row, or many: lists and arrays are many keys with as many values.

        >>> from qkv import Database
        >>> D = Database()
        >>> D.add("Li", "Mu")
        >>> D.add(["Hu", "Smola"], ["Rachel", "Alex"])
        >>> list(D)
        ['Li', 'Hu', 'Smola']
        """
        if values is NOTHING:
            self._add_any(keys)
            return
        many = several(keys, getattr(self._schema, "key_kind", None))
        self._write(self._named(*(matched(keys, values) if many else ([keys], [values]))))

    def _add_any(self, data: Any) -> None:
        if isinstance(data, Leaving):
            self.extend(data.rows())  # type: ignore[attr-defined]
            return
        pairs = pairs_of(data, NOTHING, False)
        if pairs:
            keys, values = map(list, zip(*pairs, strict=True))
            self._write(self._named(keys, values))

    def extend(
        self, rows: Iterable[Mapping[str, Any]], *, progress: Progress | None = None
    ) -> None:
        """Rows with named columns; one without a key is skipped, with a warning.

        >>> from qkv import Database
        >>> D = Database(key="name", value="major")
        >>> D.extend([{"name": "John Doe", "major": "psychology", "year": 4}])
        >>> D["John Doe"]
        'psychology'
        """
        callable_or_none(progress=progress)
        columns = transposed(rows)
        if columns:
            key = self._wish[0] if self._schema is None else self._schema.key
            self._write(keyed(columns, key), progress=progress)

    def update(self, key: Any, value: Any = NOTHING) -> int:
        """Give a key another value, in one step; how many keys were absent, and so were inserted.

        Where the key repeats, its newest row changes. A mapping, or a list of pairs, updates each
        of its keys; of equal ones the last counts.

        >>> from qkv import Database
        >>> D = Database({"Li": "Mu"})
        >>> D.update("Li", "Wei"), D.update("Hu", "Rachel")
        (0, 1)
        """
        if value is NOTHING and not isinstance(key, Mapping | list):
            raise DtypeError("update takes a key and its value, or a mapping of them")
        pairs = pairs_of(key, value, False)
        with self._alone():
            view = self._view
            if not view.begun:
                self._add_any(list({cells.digest(k): (k, v) for k, v in pairs}.values()))
                return len(self)
            changed: dict[bytes, dict[str, Any]] = {}
            dead: dict[bytes, int] = {}
            for k, v in pairs:
                found, old = view.find(k), None
                if found:  # the key stays as it was written, as in a dict
                    old = view.rows(found[-1:])[0]
                    k = view.schema.key_of(old)
                mark = view.schema.digest(k)
                row = {name: column[0] for name, column in self._named([k], [v]).items()}
                if old is not None:
                    dead[mark] = found[-1]
                    row = {**old, **row}
                changed[mark] = row
            self._write(transposed(changed.values()), remove=list(dead.values()), what="update")
        return len(changed) - len(dead)

    def __setitem__(self, key: K, value: V) -> None:
        self.update(key, value)

    def remove(self, keys: Any) -> int:
        """Take out every row of these keys (one, or a list); how many rows went.

        A key that is absent is an error, and then nothing is taken out.

        >>> from qkv import Database
        >>> D = Database({"Li": "Mu", "Hu": "Rachel", "Wu": "Yi"})
        >>> D.remove(["Li", "Wu"]), list(D)
        (2, ['Hu'])
        """
        kind = getattr(self._schema, "key_kind", None)
        keys = list(keys) if several(keys, kind) else [keys]
        with self._alone():
            view = self._view
            dead: dict[int, None] = {}
            for key in keys:
                found = view.find(key)
                if not found:
                    raise AbsentKey(key, partial(self._nearest, key))
                dead.update(dict.fromkeys(found))
            self._store.commit(remove=list(dead), what="remove")
        return len(dead)

    def __delitem__(self, key: K) -> None:
        self.remove([key])

    def _named(self, keys: Any, values: Any) -> Cells:
        """Keys and values under the names of their columns."""
        key, value, _ = self._wish
        schema = self._schema
        if schema is not None:
            key, value = schema.key, schema.value
        named: Cells = {}
        if len(key) == 1:
            named[key[0]] = keys
        else:
            for k in keys:
                if not isinstance(k, tuple) or len(k) != len(key):
                    raise ArgumentError(
                        f"a key is {key}: a tuple of {len(key)}, not {cells.shown(k)}"
                    )
            named |= {name: [k[i] for k in keys] for i, name in enumerate(key)}
        value = value or ("value",)
        if len(value) == 1:
            return named | {value[0]: values}
        for v in values:
            if not isinstance(v, Mapping) or not set(v) <= set(value):
                raise ArgumentError(
                    f"a value is a mapping of {', '.join(value)}, not {cells.shown(v)}"
                )
        return named | {name: [v.get(name) for v in values] for name in value}

    def _writable(self) -> None:
        if self._pin is not None:
            raise CombinationError(
                f"version {self._pin} is past and cannot change: write to the database itself"
            )

    def _alone(self) -> AbstractContextManager[object]:
        """The rows as they are now, until what is made of them is written."""
        self._writable()
        return self._store.alone()

    def _write(
        self,
        columns: Cells,
        *,
        remove: Sequence[int] = (),
        what: str = "add",
        progress: Progress | None = None,
    ) -> None:
        """Rows in, others out, as one version."""
        with self._alone():
            columns = plain(columns)
            if length(columns):
                self._written(columns, remove, what, progress)
                self._refit()

    def _written(
        self, columns: Cells, remove: Sequence[int], what: str, progress: Progress | None
    ) -> None:
        view = self._view
        schema = view.schema if view.begun else None
        if schema is None:
            key, value, unique = self._wish
            schema = Schema.of(columns, key, value or others(columns, key), unique)
        columns = schema.fill(columns)
        schema.check(columns)
        if view.begun and schema.decided(columns) != schema and not some_value(view):
            schema = schema.decided(columns)
            self._store.recode(
                encoding.valued(view, len(schema.value), progress),
                settings=view.settings | {"schema": schema.to_dict()},
                arrays=view.snapshot.arrays(),
                what="numbers",
            )
            view = self._view
        keys = schema.keys_of(columns)
        digests: Collection[bytes] = Late(len(keys), partial(_digests, keys, schema))
        apart = schema.vectors
        kept = {name: _listed(column) for name, column in columns.items() if name not in apart}
        records: Collection[str] = Late(len(keys), partial(_records, kept))
        if not kept:
            records = ["{}"] * len(keys)
        if schema.key_kind != "vector" or len(keys) <= encoding.ENCODED:
            # Of many vectors they are made while others write these.
            digests, records = list(digests), list(records)
        if schema.key_kind == "vector":
            keys = vectors(keys, "key")
        first: dict[str, Any] | None = None
        arrays = None
        if view.begun:
            encoder = view.encoder
        else:
            from qkv.database import encoders

            names = schema.key if len(schema.key) > 1 else ()
            wish = self._encoder_wish or encoders.default(keys, names)
            encoder, told = encoding.fitted(wish, keys)
            arrays = encoder.arrays()
            first = {"schema": schema.to_dict(), "encoded": 1} | told
            if self._precision is not None:
                first["precision"] = self._precision
            self._encoder_wish = encoder
        how = view.kept if view.begun else encoding.how(encoder, self._precision)
        tensors = encoding.encoded(encoder, keys, how, view.snapshot.last + 1, progress)
        pooled = schema.pooled(columns)
        if pooled is not None:
            tensors["value"] = pooled
            if len(schema.value) > 1:
                tell_partial(pooled, schema.value)
        if encoding.keeps_keys(encoder, schema):
            tensors["key"] = keys
        beside = {name: pooled for name, role in apart.items() if role == "value"}
        tensors |= typed.tensors({**kept, **beside})
        try:
            self._store.commit(
                records=records,
                digests=digests,
                tensors=tensors,
                remove=remove,
                settings=first,
                arrays=arrays,
                unique=schema.unique,
                what=what,
            )
        except DuplicateKey as error:
            at = error.position
            raise DuplicateKey(
                f"the key {cells.shown(keys[at])} (row {at}) is there already or comes twice, and "
                "keys are unique here: update it, or leave it out",
                at,
            ) from None

    def _refit(self) -> None:
        """An encoder that fits itself to the keys is fitted anew when they have doubled.

        By then the rows are in, so that a failure is no error of theirs; the next ones try again.
        """
        try:
            fitted = self._view.count("fitted")
            if fitted and 2 * fitted <= len(self) <= REFITTED:
                self.encode()
        except (QkvError, OSError, MemoryError) as fault:
            told = f"the rows were added, but the encoder was not fitted anew to them: {fault}"
            warn(told, StaleFit)

    def encode(
        self,
        encoder: EncoderLike | None = None,
        *,
        fit: bool = True,
        what: str = "encode",
        progress: Progress | None = None,
    ) -> None:
        """Turn all keys into vectors anew, as a new version: with another encoder, or fitted to
        the keys that are there now."""
        from qkv.database import encoders

        if not isinstance(what, str):
            raise DtypeError(f"what must be the name of the version, not {what!r}")
        callable_or_none(progress=progress)
        with self._alone():
            view = self._view
            if not len(view):
                raise CombinationError("there are no rows to encode yet: add some first")
            made = view.encoder if encoder is None else encoders.resolve(encoder)
            keys = view.all_keys()
            made, told = encoding.fitted(made, keys) if fit else (made, encoding.told(made, 0))
            # The count tells apart two encoders of the same settings with other arrays.
            told = view.settings | told | {"encoded": view.count("encoded") + 1}
            blocks = encoding.anew(view, made, keys, progress)
            self._store.recode(blocks, settings=told, arrays=made.arrays(), what=what)
            self._encoder_wish = made

    def learn(self, pairs: Iterable[Any], *, progress: Progress | None = None, **how: Any) -> Any:
        """Learn from (query, right key) pairs which keys a query means: see `qkv.database.learn`.

        The vectors that come of it are a new version; `at(version)` goes back. Gives the report.
        """
        from qkv.database.learn import learn

        keywords("learn()", how, learn.__kwdefaults__)
        callable_or_none(progress=progress)
        self._writable()
        view = self._filled()
        keys, pairs = view.all_keys(), listed(pairs, "learn", "right key")
        if view.schema.key_kind in ("vector", *READ):
            pairs = [_as_kept(view, keys, pair, i) for i, pair in enumerate(pairs)]
        learned, report = learn(view.encoder, keys, pairs, progress=progress, **how)
        self.encode(learned, fit=False, what="learn", progress=progress)
        return report

    def calibrate(
        self,
        pairs: Iterable[Any],
        coverage: float = 0.9,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        **other: Never,
    ) -> Promise:
        """Find out from (query, right key) pairs how much the right row weighs, so that answers
        have a `set`, which holds it with this probability, and abstain where none fits.

        The promise holds for questions of the pairs' kind, asked with this score and weighting. It
        is kept as a new version, and holds until keys are encoded anew or a tenth of the rows has
        changed.

        >>> from qkv import Database
        >>> D = Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu"})
        >>> slips = [("Zang", "Zhang"), ("Lee", "Li"), ("Liptn", "Lipton"), ("Zhnag", "Zhang")]
        >>> promise = D.calibrate(slips, coverage=0.7)
        >>> [row.key for row in D.ask("Lpton").set], D.ask("qwy").abstains
        (['Lipton'], True)
        """
        from qkv.database import conformal

        keywords("calibrate()", other, Writing.calibrate.__kwdefaults__)
        with self._alone():
            view = self._filled()
            found = conformal.calibrate(view, pairs, coverage, score, weighting)
            told = view.settings | {"promise": found.to_dict()}
            self._store.commit(settings=told, what="calibrate")
        return found

    def compact(self, progress: Progress | None = None) -> Any:
        """Merge segments, drop removed rows, and forget past versions."""
        callable_or_none(progress=progress)
        self._writable()
        self._held = self._last = None  # it would keep an old version alive
        return self._store.compact(progress)


def others(columns: Cells, key: Sequence[str]) -> tuple[str, ...]:
    """The columns that are not the key."""
    rest = tuple(name for name in columns if name not in key)
    if not rest:
        told = ", ".join(key)
        raise ArgumentError(
            f"there is no column beside the key {told} for a value: name the key as the value too, "
            f"value={told!r}"
        )
    return rest


def _as_kept(view: Any, keys: Any, pair: Any, place: int) -> Any:
    """A pair whose query is read of text, and whose right key is as it is kept: a vector may be
    rounded, a day a midnight."""
    if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
        return pair
    query, right, *weight = pair
    if (read := READ.get(view.schema.key_kind)) is not None:
        query = read(query, f"learn: the query of pairs[{place}]")
    ids = view.find(right)
    return (query, keys[int(view.ids.searchsorted(ids[-1]))] if ids else right, *weight)


def _records(columns: Cells, start: int, stop: int) -> list[str]:
    return cells.records({name: column[start:stop] for name, column in columns.items()})


def _digests(keys: Any, schema: Schema, start: int, stop: int) -> list[bytes]:
    try:
        return schema.digests(keys[start:stop])
    except ArgumentError:
        for i, key in enumerate(keys[start:stop], start):
            try:
                cells.digest(key)
            except ArgumentError as error:
                raise ArgumentError(f"key {i} (column {', '.join(schema.key)}): {error}") from None
        raise


def _listed(column: Any) -> list[Any]:
    return list(to_numpy(column).tolist() if is_array(column) else column)
