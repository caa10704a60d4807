"""Reading a database: exactly by D[key], softly by `ask`, with gradients by `attend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, Unpack, overload

import numpy as np

from qkv.arrays import is_array, of
from qkv.arrays.ragged import Query
from qkv.database import cells, codes, columns
from qkv.database.absent import AbsentKey
from qkv.database.faults import Closed, warn_no_rows
from qkv.database.queries import (
    Asking,
    How,
    as_queries,
    at_most,
    encode_numbers,
    known,
    nearness,
    score_beside,
)
from qkv.database.query_input import Batch, as_cells
from qkv.database.schema import Schema, names
from qkv.database.store import Store, folder
from qkv.database.view import CHUNK, View
from qkv.errors import ArgumentError, CombinationError, DtypeError, counted, printable
from qkv.log import listener
from qkv.names import EDITION
from qkv.types import NOTHING, A, Array, Closing, K, Shaped, T, V

# Loaded when something is asked or encoded: an exact look-up needs none of it.
if TYPE_CHECKING:
    from qkv.answer import Answer
    from qkv.database.ask import Asked
    from qkv.database.encoders import Encoder, EncoderLike
    from qkv.scores import Score, ScoreLike
    from qkv.weightings import WeightingLike


class Info(TypedDict):
    """What a database is."""

    path: str | None
    rows: int
    version: int
    columns: list[str]
    key: list[str]
    value: list[str]
    key_kind: str | None
    value_kind: str | None
    unique: bool
    encoder: Any
    vectors: str | None
    bytes: int | None


class Reading(Closing, Generic[K, V]):
    """The rows of a store, of its newest version or of the one that is pinned."""

    def __init__(
        self,
        store: Store,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] | None = "value",
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        pin: int | None = None,
    ):
        self._store, self._pin = store, pin
        self._precision = codes.checked(precision)
        self._wish = (names(key), None if value is None else names(value, "value"), unique)
        self._encoder_wish: Encoder | None = None
        if encoder is not None:
            from qkv.database import encoders

            self._encoder_wish = encoders.resolve(encoder)
        self._held: View | None = None
        self._last: tuple[tuple[Any, ...], Asked] | None = None
        self._library: str | None = None

    @classmethod
    def _on(cls, store: Store, **wish: Any) -> Self:
        made = cls.__new__(cls)
        Reading.__init__(made, store, **wish)
        return made

    @property
    def path(self) -> Path | None:
        return self._store.path

    @property
    def version(self) -> int:
        return self._store.version if self._pin is None else self._pin

    @property
    def columns(self) -> tuple[str, ...]:
        schema = self._schema
        return () if schema is None else schema.columns

    @property
    def encoder(self) -> Encoder | None:
        """What turns keys into vectors; None before the first row."""
        view = self._view
        return view.encoder if view.begun else self._encoder_wish

    @property
    def _view(self) -> View:
        """The newest version, or the one that is pinned."""
        newest = self._store.version  # a store that was closed says so
        version = newest if self._pin is None else self._pin
        held = self._held  # another thread may put another one in its place
        if held is None or held.version != version:
            old, held = held, View(self._store.at(self._pin), self._encoder_wish)
            if old is not None:
                held.inherit(old)
            self._held, self._last = held, None
            if log := listener():
                place = self.path or "a database in memory"
                log.debug("read %s, version %d: %d rows", place, version, len(held))
        return held

    @property
    def _schema(self) -> Schema | None:
        view = self._view
        return view.schema if view.begun else None

    def __len__(self) -> int:
        return len(self._view)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: Any) -> bool:
        return bool(self._view.find(key))

    def __iter__(self) -> Iterator[K]:
        return self.keys()

    def keys(self) -> Iterator[K]:
        return (key for key, _ in self.items())

    def values(self) -> Iterator[V]:
        return (value for _, value in self.items())

    def items(self) -> Iterator[tuple[K, V]]:
        """Every (key, value), oldest first."""
        view = self._view
        for _, row in view.all_rows():
            yield view.schema.key_of(row), view.schema.value_of(row)

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Every row with all its columns, oldest first; of those that pass `where`, `count` from
        the one numbered `start`.

        >>> from qkv import Database
        >>> D = Database({"Li": 34, "Mu": 29, "Hu": 41})
        >>> list(D.rows(where="value > 30", start=1))
        [{'key': 'Hu', 'value': 41}]
        """
        for name, number in (("start", start), ("count", 0 if count is None else count)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ArgumentError(f"{name} must be a number of rows, not {number!r}")
        view = self._view
        if where is None and start == 0 and count is None:
            return (row for _, row in view.all_rows())
        passed = view.where(where)
        ids = (view.ids if passed is None else view.ids[passed])[start:][:count].tolist()
        chunks = (ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK))
        return (row for some in chunks for row in view.rows(some))

    def count(self, where: Any = None) -> int:
        """How many rows pass a condition.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29, "Hu": 41}).count("value > 30")
        2
        """
        passed = self._view.where(where)
        return len(self) if passed is None else int(passed.sum())

    def why_no_rows(self, where: Any) -> str:
        """That no row passes a condition, with values that its columns have; empty where some do.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29}).why_no_rows("value > 40")
        "No rows match where='value > 40'; column 'value' has the values 34, 29"
        """
        return self._view.why_none_pass(where)

    def whole(self, name: str, bits: int = 64) -> bool:
        """Whether a column of numbers has ints alone, of so many bits each.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).whole("value")
        True
        """
        return self._view.whole(name, bits)

    def __getitem__(self, key: K) -> V:
        """The value of the newest row with exactly this key."""
        value: V = self._value(key, NOTHING)
        if value is NOTHING:
            raise AbsentKey(key, partial(self._nearest, key))
        return value

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: T) -> V | T: ...
    def get(self, key: K, default: Any = None) -> Any:
        """The value of the newest row with this key; the default where there is none."""
        return self._value(key, default)

    def _value(self, key: Any, default: Any) -> Any:
        held = self._held
        if held is None or self._pin is not None or not held.begun or held.apart:
            return self._view.value(key, default)
        return held.latest(key, default)  # which need not ask first whether there is a newer one

    def all(self, key: K) -> list[V]:
        """The value of every row with this key, oldest first; an empty list where there is none."""
        view = self._view
        return view.values(view.find(key))

    def _nearest(self, key: Any) -> list[Any]:
        answer = self.ask(key, top=3) if len(self) else []
        rows = [] if isinstance(answer, list) else answer.rows
        return list({cells.shown(row.key): row.key for row in rows}.values())

    @overload
    def ask(self, query: Shaped, **options: Unpack[Asking]) -> Any: ...
    @overload
    def ask(self, query: list[Any], **options: Unpack[Asking]) -> list[Answer]: ...
    @overload
    def ask(self, query: Any, **options: Unpack[Asking]) -> Answer: ...
    def ask(
        self,
        query: Any,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        top: int = 5,
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
        **other: Any,
    ) -> Any:
        """Σᵢ α(q, kᵢ) vᵢ as an `Answer`: its value, its rows and their weights. A list of queries
        (or an array with a query in each row) gives a list of answers. Where keys are several
        numbers, a list or array of that length is one key.

        `score` compares vectors of query and key (by default as the encoder says), "exact" the keys
        themselves. Vectors of your own, embeddings or measurements, are compared by q·k/√d, to
        which length counts, so that a row asked by its own vector may come second: "cosine" goes
        by direction, "gaussian" by distance. The answer's `hint` says where that matters.

        `top` rows are named. `where` leaves some rows out: {"genre": "poetry"}, "year > 1950 and
        genre != 'poetry'", or a function of a row, which makes Python read every row where
        conditions look at columns.

        With a `tolerance` ε the weights are proven to lie that near to the exact ones (½ Σ |αᵢ −
        exact αᵢ| ≤ ε), which needs few of the keys in full: the answer says its `error_bound` and
        the `rows_read`. With a `confidence` such as 0.999 the bound may come from rows that were
        drawn, and holds with that probability; then `statistical` is True.

        >>> from qkv import Database
        >>> D = Database([(3.1, 70.0), (3.5, 82.0), (3.6, 86.0), (4.0, 95.0)])
        >>> D.ask(3.55, score="gaussian", weighting="hard").value
        82.0
        """
        if other:
            known("ask()", other, Asking.__optional_keys__)
        view = self._filled()
        queries, single = as_queries(view, query)
        asked = self._asked(view, score, weighting, where, top, tolerance, confidence)
        answers = asked.answers(queries)
        return answers[0] if single else answers

    def _asked(self, view: View, score: Any, weighting: Any, where: Any, *how: Any) -> Any:
        """What makes answers of queries; the last is kept, as most questions are put alike."""
        given, last = (view, score, weighting, where, *how, EDITION[0]), self._last
        if last is not None and all(map(is_, given, last[0])):
            return last[1]
        from qkv.database.ask import Asked

        meant = self._meant(view, score, weighting, *how)
        made = Asked(view, view.score(score), weighting, view.where(where), *meant)
        made.where = where
        # A condition that is no text may mean something else the next time.
        self._last = (given, made) if where is None or type(where) is str else None
        return made

    def _meant(
        self, view: View, score: Any, weighting: Any, top: Any, tolerance: Any, confidence: Any
    ) -> tuple[Any, ...]:
        """What `Asked` is told beside score, weighting and rows, where that means anything."""
        from qkv import parts
        from qkv.database.conformal import kept

        at_most(top)
        parts.one_framework({"query": view.ids}, score=score, weighting=weighting)
        near, sure = nearness(tolerance, confidence)
        return top, near, kept(view, score, weighting), self._library, sure

    @overload
    def attend(self, query: A, **options: Unpack[How]) -> A: ...
    @overload
    def attend(self, query: Any, **options: Unpack[How]) -> np.ndarray: ...
    def attend(
        self,
        query: Array,
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
        **other: Any,
    ) -> Array:
        """Σᵢ α(q, kᵢ) vᵢ in the query's framework, with gradients: (n, d) → (n, d_v), (d) → (d_v).

        A query means what it means to `ask`. A key of one or several numbers is scaled as the keys
        were, and its gradient passes through that. Text is encoded first, and has no gradient; an
        array of floats is its encoded vector. `tolerance` and `confidence` are those of `ask`, for
        a query that needs no gradient.

        >>> from qkv import Database
        >>> import numpy as np
        >>> D = Database(np.eye(2), np.array([[10.0], [20.0]]))
        >>> D.attend(np.array([[0.0, 0.0]]))
        array([[15.]])
        """
        from qkv.database.ask import WORDY

        known("attend()", other, How.__optional_keys__)
        view = self._filled()
        if not view.schema.pools:
            raise CombinationError(
                f"the values are of type {view.schema.value_kind}, and only numbers can be pooled: "
                "use ask, which names the heaviest value"
            )
        batch, given = isinstance(query, Batch), query
        query = query if batch else as_cells(query, view.schema.key_kind)
        numbers = is_array(query) and (view.schema.key_kind == "number" or view.has_number_keys)
        if numbers:
            query, single = encode_numbers(view, query)
            code = Query(query)
        elif is_array(query) and view.schema.key_kind != "date":  # a vector, as the keys' are
            single = len(query.shape) == 1
            code = Query(query[None] if single else query)
        else:
            queries, single = as_queries(view, query)
            if view.wordy and len(queries) > WORDY:
                parts = (Batch(queries[at : at + WORDY]) for at in range(0, len(queries), WORDY))
                how = How(score=score, weighting=weighting, where=where, tolerance=tolerance)
                how["confidence"] = confidence
                return np.concatenate([self.attend(some, **how) for some in parts])
            code = view.encoded(queries)
        view.check(code)
        chosen = score_beside(view, score, code.code)
        if chosen.compares_keys:
            raise ArgumentError("attend compares vectors: score='exact' is for ask")
        near = dict(zip(("tolerance", "confidence"), nearness(tolerance, confidence), strict=True))
        out = self._attended(view, code, chosen, weighting, where, near)
        if numbers and (kept := of(given).dtype(given)).startswith(("float", "bfloat")):
            out = of(out).astype(out, kept)
        return out[0] if single else out

    def _attended(
        self,
        view: View,
        code: Query,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        near: dict[str, float | None],
    ) -> Array:
        """The output (n, d_v) of queries that are encoded."""
        from qkv.attention import over

        allowed = view.having_values(view.where(where))[0]
        if where is not None and allowed is not None and not allowed.any():
            warn_no_rows(view.why_none_pass(where))
        rows = view.vectors(allowed, value=True, asked=code.asked)
        return over(rows, code.code, score=score, weighting=weighting, **near)

    def _filled(self) -> View:
        view = self._view
        if not len(view):
            what = "the database" if self.path is None else f"the database {self.path}"
            raise CombinationError(f"{what} is empty, so it has no answer: add rows first")
        return view

    def at(self, version: int) -> Self:
        """The database as it was at a version, to be read."""
        if isinstance(version, bool) or not isinstance(version, int | np.integer):
            raise DtypeError(
                f"at: version must be a whole number, as in versions(), not {version!r}"
            )
        past = type(self)._on(self._store, pin=int(version))
        assert past._view.snapshot.version == version
        past._library = self._library
        return past

    def versions(self) -> list[Any]:
        """Every version that is kept, oldest first."""
        return self._store.versions()

    def info(self) -> Info:
        """What it is: rows, columns, types, encoder, versions, size."""
        schema = self._schema
        told = self._view.settings.get("encoder")
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
            "encoder": told if isinstance(told, dict) else None,
            "vectors": self._view.precision,
            "bytes": None if self.path is None else folder.size(self.path),
        }

    def describe(self) -> dict[str, dict[str, Any]]:
        """The type of each column, and how many of its cells are missing.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).describe()["value"]
        {'type': 'number', 'missing': 1}
        """
        view, found = self._view, {}
        for name in self.columns:
            role = view.schema.vectors.get(name)
            if role == "key":
                found[name] = {"type": "vector", "missing": 0}
                continue
            census = view.census(name)
            kind = "vector" if role else columns.told(census)
            if census[columns.TEXT] and view.dated(name):
                kind = kind.replace(columns.KINDS[columns.TEXT], "date")
            found[name] = {"type": kind, "missing": int(census[columns.MISSING])}
        return found

    def close(self) -> None:
        if self._pin is None:
            self._store.close()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        try:
            schema, rows = self._schema, len(self)
        except Closed:
            return f"<Database {where}: closed>"
        if schema is None:
            return f"<Database {where}: empty>"
        names = printable(f"{', '.join(schema.key)} → {', '.join(schema.value)}")
        past = "" if self._pin is None else f", version {self._pin}"
        return f"<Database {where}: {counted(rows, 'row')}, {names}{past}>"
