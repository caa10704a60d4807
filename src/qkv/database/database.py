"""A database that is asked by attention: D = {(k₁, v₁), …}, Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qkv import scores, weightings
from qkv.answer import Answer
from qkv.arrays import is_array, of, to_numpy
from qkv.database import cells, encoders, scan
from qkv.database.ask import Asked
from qkv.database.encoders import Encoder
from qkv.database.faults import DuplicateKey
from qkv.database.schema import Columns, Schema, length, transposed, vectors
from qkv.database.store import Store
from qkv.database.view import View
from qkv.errors import ArgumentError, CombinationError, DtypeError, QkvError, ShapeError
from qkv.types import Array
from qkv.weightings import Weighting

Progress = Callable[[int, int | None], None]

NOTHING: Any = object()
"""No value was given; None is a value."""

AT_ONCE = 2**26
"""Scores that are held together: a batch of queries is cut to this."""

HELD = 2**24
"""Weights of a batch that its answers keep; beyond it an answer finds them again when asked."""

ENCODED = 8192
"""Keys that are encoded together, between two reports of progress."""

REFITTED = 2**17
"""Rows up to which an encoder that fits itself to the keys does so anew when they have doubled."""


class AbsentKey(QkvError, KeyError):
    """No row has the key. Its text names the nearest keys, looked up when it is read."""

    def __init__(self, key: Any, nearest: Callable[[], Sequence[Any]]):
        super().__init__(key)
        self.key, self._nearest = key, nearest

    @property
    def nearest(self) -> list[Any]:
        try:
            return list(self._nearest())
        except QkvError:
            return []

    def __str__(self) -> str:
        near = self.nearest
        hint = f": the nearest are {', '.join(map(repr, near))}" if near else ""
        return f"no row has the key {self.key!r}{hint}"


class Database:
    """Keys and values, asked exactly by D[key] and softly by D.ask(query).

    `data` is a mapping, pairs (key, value), or the keys, whose `values` then come second; arrays
    (m, d) are m vectors. Keys may repeat, unless `unique`. Nothing is written to disk; `qkv.open`
    gives the same on disk.

    `key` and `value` name the columns. `encoder` turns keys into vectors that are compared: a name
    or an object of `qkv.database.encoders`; without one, the keys' type decides.

    >>> D = Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu"})
    >>> D["Li"]
    'Mu'
    >>> D.ask("Lipten").value
    'Zachary'
    >>> "Smola" in D, len(D)
    (False, 3)
    """

    def __init__(
        self,
        data: Any = None,
        values: Any = NOTHING,
        *,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] = "value",
        encoder: str | Encoder | None = None,
        unique: bool = False,
    ):
        self._begin(Store(None), key, value, encoder, unique)
        if data is not None:
            self.add(data, values)

    def _begin(
        self,
        store: Store,
        key: str | Sequence[str],
        value: str | Sequence[str] | None,
        encoder: str | Encoder | None,
        unique: bool,
        pin: int | None = None,
    ) -> Database:
        self._store, self._pin = store, pin
        self._wish = (_names(key), None if value is None else _names(value), unique)
        self._encoder_wish = None if encoder is None else encoders.resolve(encoder)
        self._held: View | None = None
        return self

    @classmethod
    def _on(cls, store: Store, pin: int | None = None, **wish: Any) -> Database:
        asked: dict[str, Any] = {"key": "key", "value": "value", "encoder": None, "unique": False}
        return cls.__new__(cls)._begin(store, **(asked | wish), pin=pin)

    # Making one

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        *,
        key: str | Sequence[str] | None = None,
        value: str | Sequence[str] | None = None,
        encoder: str | Encoder | None = None,
        unique: bool = False,
        path: str | Path | None = None,
        progress: Progress | None = None,
    ) -> Database:
        """Named columns of one length, as `key` and `value` say; on disk where `path` is given.

        Without `key`, the first column of text is the key, or the first column; without `value`,
        a row's value is all its other columns.

        >>> D = Database.from_columns(
        ...     {"name": ["Ann", "Bo"], "major": ["art", "law"]}, value="major"
        ... )
        >>> D["Bo"]
        'law'
        """
        if not columns:
            raise ArgumentError("columns: there are none; a database needs a key and a value")
        columns = {str(name): column for name, column in columns.items()}
        keys = _names(key) if key is not None else (_first_text(columns),)
        values = _names(value) if value is not None else _others(columns, keys)
        fresh = path is not None and not Path(path).exists()
        made = cls._on(Store(path), key=keys, value=values, encoder=encoder, unique=unique)
        if path is not None and made._schema is not None:
            made.close()
            raise ArgumentError(
                f"{path} holds a database already: open it and use extend, or choose another path"
            )
        try:
            made._write(columns, progress=progress, what="import")
        except BaseException:
            made.close()
            if fresh and path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return made

    @classmethod
    def from_frame(cls, frame: Any, **how: Any) -> Database:
        """A data frame of pandas, polars or pyarrow; `how` as in `from_columns`.

        >>> import pandas
        >>> students = pandas.DataFrame({"gpa": [3.1, 3.9], "salary": [70.0, 95.0]})
        >>> Database.from_frame(students, key="gpa", value="salary")[3.9]
        95.0
        """
        from qkv.database import sources

        return cls.from_columns(sources.from_frame(frame).columns, **how)

    @classmethod
    def from_source(cls, source: str | Path, *, table: str | None = None, **how: Any) -> Database:
        """A CSV, TSV, JSON lines, Parquet, Arrow or SQLite file, or a PostgreSQL URL."""
        from qkv.database import sources

        read = sources.read(source, table=table, progress=how.get("progress"))
        return cls.from_columns(read.columns, **how)

    # Reading exactly

    @property
    def path(self) -> Path | None:
        return self._store.path

    @property
    def version(self) -> int:
        return self._store.version if self._pin is None else self._pin

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self._schema is None else self._schema.columns

    @property
    def encoder(self) -> Encoder | None:
        """What turns keys into vectors; None before the first row."""
        return self._view.encoder if self._view.schema else self._encoder_wish

    @property
    def _view(self) -> View:
        """The newest version, or the one that is pinned."""
        if self._held is None or self._held.snapshot.version != self.version:
            old, self._held = self._held, View(self._store.at(self._pin), self._encoder_wish)
            if old is not None:
                self._held.inherit(old)
        return self._held

    @property
    def _schema(self) -> Schema | None:
        return self._view.schema

    def __len__(self) -> int:
        return len(self._view)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: Any) -> bool:
        return bool(self._view.find(key))

    def __iter__(self) -> Iterator[Any]:
        return self.keys()

    def keys(self) -> Iterator[Any]:
        return (key for key, _ in self.items())

    def values(self) -> Iterator[Any]:
        return (value for _, value in self.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Every (key, value), oldest first."""
        view = self._view
        for _, row in view.all_rows():
            yield view.plan.key_of(row), view.plan.value_of(row)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row with all its columns, oldest first."""
        return (row for _, row in self._view.all_rows())

    def __getitem__(self, key: Any) -> Any:
        """The value of the newest row with exactly this key."""
        view = self._view
        found = view.find(key)
        if not found:
            raise AbsentKey(key, partial(self._nearest, key))
        return view.values(found[-1:])[0]

    def get(self, key: Any, default: Any = None) -> Any:
        view = self._view
        found = view.find(key)
        return view.values(found[-1:])[0] if found else default

    def all(self, key: Any) -> list[Any]:
        """The value of every row with this key, oldest first; an empty list where there is none."""
        view = self._view
        return view.values(view.find(key))

    def _nearest(self, key: Any) -> list[Any]:
        return [row.key for row in self.ask(key, top=3).rows] if len(self) else []

    # Writing

    def add(self, keys: Any, values: Any = NOTHING) -> None:
        """One row, or many: lists and arrays are many keys with as many values.

        >>> D = Database()
        >>> D.add("Li", "Mu")
        >>> D.add(["Hu", "Smola"], ["Rachel", "Alex"])
        >>> list(D)
        ['Li', 'Hu', 'Smola']
        """
        if values is NOTHING:
            self._add_any(keys)
            return
        many = self._many(keys)
        if not many:
            keys, values = [keys], [values]
        elif isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise DtypeError(f"values must be as many as the keys, not one {type(values).__name__}")
        keys = keys if is_array(keys) else list(keys)
        values = values if is_array(values) else list(values)
        if len(keys) != len(values):
            raise ShapeError(f"{len(keys)} keys came with {len(values)} values")
        self._write(self._named(keys, values))

    def _add_any(self, data: Any) -> None:
        if isinstance(data, Database):
            self.extend(data.rows())
            return
        pairs = data.items() if isinstance(data, Mapping) else data
        try:
            pairs = [(key, value) for key, value in pairs]
        except (TypeError, ValueError):
            raise DtypeError(
                "data must be a mapping or pairs (key, value); keys and values apart are "
                "Database(keys, values)"
            ) from None
        if pairs:
            keys, values = map(list, zip(*pairs, strict=True))
            self._write(self._named(keys, values))

    def extend(
        self, rows: Iterable[Mapping[str, Any]], *, progress: Progress | None = None
    ) -> None:
        """Rows with named columns.

        >>> D = Database(key="name", value="major")
        >>> D.extend([{"name": "John Doe", "major": "psychology", "year": 4}])
        >>> D["John Doe"]
        'psychology'
        """
        columns = transposed(rows)
        if columns:
            self._write(columns, progress=progress)

    def update(self, key: Any, value: Any = NOTHING) -> None:
        """Give a key another value, in one step; a key that is absent is added.

        Where the key repeats, its newest row changes. A mapping updates each of its keys.
        """
        if value is not NOTHING:
            pairs = [(key, value)]
        elif isinstance(key, Mapping):
            pairs = list(key.items())
        else:
            raise DtypeError("update takes a key and its value, or a mapping of them")
        view = self._view
        if view.schema is None:
            self._add_any(pairs)
            return
        changed: dict[bytes, dict[str, Any]] = {}
        dead: dict[bytes, int] = {}
        for k, v in pairs:
            found, mark = view.find(k), cells.digest(k)
            row = {name: column[0] for name, column in self._named([k], [v]).items()}
            if found:
                dead[mark] = found[-1]
                row = {**view.rows(found[-1:])[0], **row}
            changed[mark] = row
        self._write(transposed(changed.values()), remove=list(dead.values()), what="update")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.update(key, value)

    def remove(self, keys: Any) -> int:
        """Take out every row of these keys (one, or a list); how many rows went.

        A key that is absent is an error, and then nothing is taken out.
        """
        keys = list(keys) if self._many(keys) else [keys]
        view = self._view
        dead: dict[int, None] = {}
        for key in keys:
            found = view.find(key)
            if not found:
                raise AbsentKey(key, partial(self._nearest, key))
            dead.update(dict.fromkeys(found))
        self._writable()
        self._store.commit(remove=list(dead), what="remove")
        return len(dead)

    def __delitem__(self, key: Any) -> None:
        self.remove([key])

    def _many(self, keys: Any) -> bool:
        """Whether these are several keys rather than one."""
        kind = None if self._schema is None else self._schema.key_kind
        if is_array(keys):
            return len(keys.shape) > (1 if kind == "vector" else 0)
        return isinstance(keys, list | range | set | frozenset) or (
            isinstance(keys, Iterator) or hasattr(keys, "to_list")
        )

    def _named(self, keys: Any, values: Any) -> Columns:
        """Keys and values under the names of their columns."""
        key, value, _ = self._wish
        schema = self._schema
        if schema is not None:
            key, value = schema.key, schema.value
        named: Columns = {}
        if len(key) == 1:
            named[key[0]] = keys
        else:
            for k in keys:
                if not isinstance(k, tuple) or len(k) != len(key):
                    raise ArgumentError(f"a key is {key}: a tuple of {len(key)}, not {k!r}")
            named |= {name: [k[i] for k in keys] for i, name in enumerate(key)}
        value = value or ("value",)
        if len(value) == 1:
            return named | {value[0]: values}
        for v in values:
            if not isinstance(v, Mapping) or not set(v) <= set(value):
                raise ArgumentError(f"a value is a mapping of {', '.join(value)}, not {v!r}")
        return named | {name: [v.get(name) for v in values] for name in value}

    def _writable(self) -> None:
        if self._pin is not None:
            raise CombinationError(
                f"version {self._pin} is past and cannot change: write to the database itself"
            )

    def _write(
        self,
        columns: Columns,
        *,
        remove: Sequence[int] = (),
        what: str = "add",
        progress: Progress | None = None,
    ) -> None:
        """Rows in, others out, as one version."""
        self._writable()
        schema, first = self._schema, {}
        arrays = None
        if length(columns) == 0:
            return
        if schema is None:
            key, value, unique = self._wish
            schema = Schema.of(columns, key, value or _others(columns, key), unique)
        columns = schema.fill(columns)
        schema.check(columns)
        keys = schema.keys_of(columns)
        digests = _digests(keys, schema)
        if schema.key_kind == "vector":
            keys = vectors(keys, "key")
        if self._schema is not None:
            encoder = self._view.encoder
        else:
            names = schema.key if len(schema.key) > 1 else ()
            wish = self._encoder_wish or encoders.default(keys, names)
            encoder = wish.fit(keys)
            arrays = encoder.arrays()
            first = {
                "schema": schema.to_dict(),
                "encoder": encoder.settings(),
                "fitted": len(keys) if _differ(encoder, wish) else 0,
                "encoded": 1,
            }
            self._encoder_wish = encoder
        tensors = {"code": _encode(encoder, keys, progress)}
        pooled = schema.pooled(columns)
        if pooled is not None:
            tensors["value"] = pooled
        apart = set()
        if schema.value_kind == "vector":
            apart.add(schema.value[0])
        if schema.key_kind == "vector":
            apart.add(schema.key[0])
            if encoder.kind != "arrays":
                tensors["key"] = keys
        kept = {name: _listed(column) for name, column in columns.items() if name not in apart}
        size = length(columns)
        records = [
            cells.dumps({name: column[i] for name, column in kept.items()}) for i in range(size)
        ]
        try:
            self._store.commit(
                records=records,
                digests=digests,
                tensors=tensors,
                remove=remove,
                settings=first or None,
                arrays=arrays,
                unique=schema.unique,
                what=what,
            )
        except DuplicateKey as error:
            at = error.position
            raise DuplicateKey(
                f"the key {keys[at]!r} (row {at}) is there already or comes twice, and keys are "
                "unique here: update it, or leave it out",
                at,
            ) from None
        self._refit()

    def _refit(self) -> None:
        """An encoder that fits itself to the keys is fitted anew when they have doubled."""
        fitted = self._view.settings["fitted"]
        if fitted and 2 * fitted <= len(self) <= REFITTED:
            self.encode()

    def encode(
        self,
        encoder: str | Encoder | None = None,
        *,
        fit: bool = True,
        what: str = "encode",
        progress: Progress | None = None,
    ) -> None:
        """Turn all keys into vectors anew, as a new version: with another encoder, or fitted to
        the keys that are there now."""
        self._writable()
        view = self._view
        if not len(view):
            raise CombinationError("there are no rows to encode yet: add some first")
        made = view.encoder if encoder is None else encoders.resolve(encoder)
        keys, ids, snapshot = view.all_keys(), view.ids, view.snapshot
        raw = view.plan.key_kind == "vector" and made.kind != "arrays"
        wish = made
        if fit:
            made = wish.fit(keys)
        told = view.settings | {
            "encoder": made.settings(),
            "fitted": len(keys) if fit and _differ(made, wish) else 0,
            "encoded": view.settings["encoded"] + 1,
        }

        def blocks() -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
            for start in range(0, len(ids), ENCODED):
                some = ids[start : start + ENCODED]
                fresh = keys[start : start + ENCODED]
                tensors = {"code": np.asarray(made.encode(fresh))}
                if raw:
                    tensors["key"] = fresh
                if "value" in snapshot.names:
                    tensors["value"] = snapshot.tensor("value", some)
                if progress is not None:
                    progress(start + len(some), len(ids))
                yield some, tensors

        self._store.recode(blocks(), settings=told, arrays=made.arrays(), what=what)
        self._encoder_wish = made

    # Other tables of the same rows

    def by(
        self,
        key: str | Sequence[str],
        value: str | Sequence[str] | None = None,
        *,
        encoder: str | Encoder | None = None,
        unique: bool = False,
        path: str | Path | None = None,
        progress: Progress | None = None,
    ) -> Database:
        """The same rows with other columns as key and value: a new database.

        >>> D = Database.from_columns(
        ...     {"name": ["Ann", "Bo"], "major": ["art", "law"]}, value="major"
        ... )
        >>> D.by(key="major", value="name")["law"]
        'Bo'
        """
        columns = transposed(self.rows())
        return Database.from_columns(
            columns,
            key=key,
            value=value,
            encoder=encoder,
            unique=unique,
            path=path,
            progress=progress,
        )

    def swap(self, **how: Any) -> Database:
        """Key and value exchanged: "find people by major"."""
        schema = self._schema
        if schema is None:
            raise CombinationError("there are no rows to swap yet: add some first")
        return self.by(schema.value, schema.key, **how)

    # Asking

    def ask(
        self,
        query: Any,
        *,
        score: Any = None,
        weighting: str | Weighting = "softmax",
        top: int = 5,
        where: Any = None,
        tolerance: float | None = None,
    ) -> Any:
        """Σᵢ α(q, kᵢ) vᵢ as an `Answer`: its value, its rows and their weights. A list of queries
        (or an array with a query in each row) gives a list of answers.

        `score` compares vectors of query and key (by default as the encoder says), "exact" the keys
        themselves. `top` rows are named. `where` leaves some rows out: {"genre": "poetry"},
        "year > 1950 and genre != 'poetry'", or a function of a row.

        >>> D = Database([(3.1, 70.0), (3.5, 82.0), (3.6, 86.0), (4.0, 95.0)])
        >>> D.ask(3.55, score="gaussian", weighting="hard").value
        82.0
        """
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise ArgumentError(f"top must be a number of rows of at least 1, not {top!r}")
        weighting = weightings.resolve(weighting)
        view = self._filled()
        queries, single = self._queries(query)
        chosen = view.encoder.score(len(view)) if score is None else scores.resolve(score)
        live = view.where(where)
        asked = Asked(view, chosen, weighting, live, top, tolerance)
        step = max(AT_ONCE // len(view), 1)
        keep = len(queries) * len(view) <= HELD
        answers: list[Answer] = []
        for start in range(0, len(queries), step):
            answers += asked.answers(queries[start : start + step], keep)
        return answers[0] if single else answers

    def attend(
        self,
        query: Array,
        *,
        score: Any = None,
        weighting: str | Weighting = "softmax",
        where: Any = None,
        tolerance: float | None = None,
    ) -> Array:
        """Σᵢ α(q, kᵢ) vᵢ in the query's framework, with gradients: (n, d) → (n, d_v), (d) → (d_v).

        The query lives where the encoded keys do. A number is standardised as the keys were, and
        its gradient goes through that; text is encoded first, and has none.

        >>> D = Database(np.eye(2), np.array([[10.0], [20.0]]))
        >>> D.attend(np.array([[0.0, 0.0]]))
        array([[15.]])
        """
        view = self._filled()
        if not view.plan.pools:
            raise CombinationError(
                f"the values are of type {view.plan.value_kind}, and only numbers can be pooled: "
                "use ask, which names the heaviest value"
            )
        if not is_array(query):
            queries, single = self._queries(query)
            query = view.encoder.query(queries)
        elif view.plan.key_kind == "number":
            query, single = _differentiable(view.encoder, query)
        else:
            single = len(query.shape) == 1
            query = query[None] if single else query
        view.check(query)
        chosen = view.encoder.score(len(view)) if score is None else scores.resolve(score)
        if isinstance(chosen, scores.Exact):
            raise ArgumentError("attend compares vectors: score='exact' is for ask")
        read = view.pieces(view.where(where), value=True)
        weighting = weightings.resolve(weighting)
        out = scan.attend(read, query, chosen, weighting, tolerance=tolerance)
        return out[0] if single else out

    def _filled(self) -> View:
        view = self._view
        if not len(view):
            raise CombinationError("the database is empty, so it has no answer: add rows first")
        return view

    def _queries(self, query: Any) -> tuple[Any, bool]:
        """The queries, and whether there is only one."""
        kind = self._view.plan.key_kind
        if kind == "vector" or (is_array(query) and kind != "number"):
            array = scan.host(query)
            return (array[None], True) if array.ndim == 1 else (array, False)
        if is_array(query):
            array = to_numpy(query)
            return array.reshape(-1).tolist(), array.ndim == 0
        queries = query if isinstance(query, list) else [query]
        for text in queries:
            if isinstance(text, str):
                cells.check_text(text)
        return queries, queries is not query

    # Learning

    def learn(self, pairs: Iterable[Any], *, progress: Progress | None = None, **how: Any) -> Any:
        """Learn from (query, right key) pairs which keys a query means: see `learn.learn`.

        The vectors that come of it are a new version; `at(version)` goes back. Gives the report.
        """
        from qkv.database import learn

        self._writable()
        view = self._filled()
        learned, report = learn.learn(
            view.encoder, view.all_keys(), list(pairs), progress=progress, **how
        )
        self.encode(learned, fit=False, what="learn", progress=progress)
        return report

    # Keeping

    def at(self, version: int) -> Database:
        """The database as it was at a version, to be read."""
        past = Database._on(self._store, pin=version)
        assert past._view.snapshot.version == version
        return past

    def versions(self) -> list[Any]:
        """Every version that is kept, oldest first."""
        return self._store.versions()

    def compact(self, progress: Progress | None = None) -> Any:
        """Merge segments, drop removed rows, and forget past versions."""
        self._writable()
        self._held = None  # it would keep an old version alive
        return self._store.compact(progress)

    def info(self) -> dict[str, Any]:
        """What it is: rows, columns, types, encoder, versions, size."""
        schema = self._schema
        size = None
        if self.path is not None:
            size = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        return {
            "path": None if self.path is None else str(self.path),
            "rows": len(self),
            "version": self.version,
            "columns": list(self.columns),
            "key": [] if schema is None else list(schema.key),
            "value": [] if schema is None else list(schema.value),
            "key_kind": None if schema is None else schema.key_kind,
            "value_kind": None if schema is None else schema.value_kind,
            "unique": self._wish[2] if schema is None else schema.unique,
            "encoder": self._view.settings.get("encoder"),
            "bytes": size,
        }

    def close(self) -> None:
        if self._pin is None:
            self._store.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def __repr__(self) -> str:
        schema = self._schema
        where = "in memory" if self.path is None else str(self.path)
        if schema is None:
            return f"<Database {where}: empty>"
        names = f"{', '.join(schema.key)} → {', '.join(schema.value)}"
        past = "" if self._pin is None else f", version {self._pin}"
        return f"<Database {where}: {len(self):,} rows, {names}{past}>"


def open(
    path: str | Path,
    *,
    create: bool = True,
    key: str | Sequence[str] = "key",
    value: str | Sequence[str] | None = "value",
    encoder: str | Encoder | None = None,
    unique: bool = False,
    skip_damaged: bool = False,
) -> Database:
    """The database in the folder `path`, made empty where there is none unless `create=False`.

    `key`, `value`, `encoder` and `unique` are for a new one; its first rows fix them. Close it, or
    use it in a `with`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/names.qkv") as D:
    ...         D.add("Li", "Mu")
    ...     with open(f"{folder}/names.qkv") as D:
    ...         D["Li"]
    'Mu'
    """
    store = Store(path, create=create, skip_damaged=skip_damaged)
    return Database._on(store, key=key, value=value, encoder=encoder, unique=unique)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found:
        raise ArgumentError("name at least one column")
    return found


def _first_text(columns: Columns) -> str:
    texts = (
        name
        for name, column in columns.items()
        if len(column) and not is_array(column) and isinstance(column[0], str)
    )
    return next(texts, next(iter(columns)))


def _others(columns: Columns, key: Sequence[str]) -> tuple[str, ...]:
    rest = tuple(name for name in columns if name not in key)
    if not rest:
        raise ArgumentError(f"there is no column beside the key {', '.join(key)} for a value")
    return rest


def _digests(keys: Any, schema: Schema) -> list[bytes]:
    try:
        return cells.digests(keys)
    except ArgumentError:
        for i, key in enumerate(keys):
            try:
                cells.digest(key)
            except ArgumentError as error:
                raise ArgumentError(f"key {i} (column {', '.join(schema.key)}): {error}") from None
        raise


def _encode(encoder: Encoder, keys: Any, progress: Progress | None) -> np.ndarray:
    if progress is None or len(keys) <= ENCODED:
        return np.asarray(encoder.encode(keys))
    out = []
    for start in range(0, len(keys), ENCODED):
        out.append(np.asarray(encoder.encode(keys[start : start + ENCODED])))
        progress(min(start + ENCODED, len(keys)), len(keys))
    return np.concatenate(out)


def _differ(fitted: Encoder, wish: Encoder) -> bool:
    """Whether an encoder has learned something of the keys it was fitted to."""
    return bool(fitted.arrays()) or fitted.settings() != wish.settings()


def _differentiable(encoder: Encoder, query: Array) -> tuple[Array, bool]:
    """Numbers (n,) or one () as (n, 1) in the keys' units, and whether it is one."""
    single = len(query.shape) == 0
    column = of(query).xp.reshape(query, (-1, 1))
    if not isinstance(encoder, encoders.Numbers) or encoder.mean is None or encoder.unit is None:
        return encoder.query(to_numpy(column)[:, 0].tolist()), single
    return (column - encoder.mean[0]) / encoder.unit[0], single


def _listed(column: Any) -> list[Any]:
    return list(to_numpy(column).tolist() if is_array(column) else column)
