"""Writing a database: rows in and out, keys encoded anew, each change a new version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Never

from qkv.database.errors import DuplicateKeyError, StaleFitWarning
from qkv.database.export.exportable import Exportable
from qkv.database.filter.column_chunk import has_any_value
from qkv.database.key_errors import KeyNotFoundError
from qkv.database.query.arguments import PARSER_BY_KIND, list_pairs
from qkv.database.reader import DatabaseReader
from qkv.database.table import cells, encoding
from qkv.database.table import columns as typed
from qkv.database.table.schema import (
    ColumnData,
    Schema,
    as_pairs,
    count_rows,
    drop_missing_keys,
    has_several_keys,
    match_keys_and_values,
    normalize_columns,
    rows_to_columns,
    stack_vectors,
    warn_partial_values,
)
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    QkvError,
    validate_callables,
    validate_keywords,
    warn_at_caller,
)
from qkv.frameworks import is_array, to_numpy
from qkv.frameworks.lazy import LazySequence
from qkv.util.types import UNSET, K, ProgressCallback, V

if TYPE_CHECKING:
    from qkv.database.encoders import EncoderLike
    from qkv.database.query.calibration import Calibration
    from qkv.scores import ScoreLike
    from qkv.weightings import WeightingLike

MAX_REFIT_ROWS = 2**17
"""Rows up to which an encoder that fits itself to the keys does so anew when they have doubled."""


class DatabaseWriter(Exportable, DatabaseReader[K, V]):
    """Rows that can be read and changed, unless a version is pinned."""

    def add(self, keys: Any, values: Any = UNSET) -> None:
        """One row, or many: lists and arrays are many keys with as many values.

        >>> from qkv import Database
        >>> D = Database()
        >>> D.add("Li", "Mu")
        >>> D.add(["Hu", "Smola"], ["Rachel", "Alex"])
        >>> list(D)
        ['Li', 'Hu', 'Smola']
        """
        if values is UNSET:
            self._add_pairs(keys)
            return
        many = has_several_keys(keys, getattr(self._schema, "key_kind", None))
        self._write_rows(
            self._build_columns(
                *(match_keys_and_values(keys, values) if many else ([keys], [values]))
            )
        )

    def _add_pairs(self, data: Any) -> None:
        if isinstance(data, Exportable):
            self.extend(data.rows())  # type: ignore[attr-defined]
            return
        pairs = as_pairs(data, UNSET, False)
        if pairs:
            keys, values = map(list, zip(*pairs, strict=True))
            self._write_rows(self._build_columns(keys, values))

    def extend(
        self, rows: Iterable[Mapping[str, Any]], *, progress: ProgressCallback | None = None
    ) -> None:
        """Rows with named columns; one without a key is skipped, with a warning.

        >>> from qkv import Database
        >>> D = Database(key="name", value="major")
        >>> D.extend([{"name": "John Doe", "major": "psychology", "year": 4}])
        >>> D["John Doe"]
        'psychology'
        """
        validate_callables(progress=progress)
        columns = rows_to_columns(rows)
        if columns:
            key = self._requested_columns[0] if self._schema is None else self._schema.key
            self._write_rows(drop_missing_keys(columns, key), progress=progress)

    def update(self, key: Any, value: Any = UNSET) -> int:
        """Give a key another value, in one step; how many keys were absent, and so were inserted.

        Where the key repeats, its newest row changes. A mapping, or a list of pairs, updates each
        of its keys; of equal ones the last counts.

        >>> from qkv import Database
        >>> D = Database({"Li": "Mu"})
        >>> D.update("Li", "Wei"), D.update("Hu", "Rachel")
        (0, 1)
        """
        if value is UNSET and not isinstance(key, Mapping | list):
            raise DtypeError("update takes a key and its value, or a mapping of them")
        pairs = as_pairs(key, value, False)
        with self._exclusive_lock():
            view = self._view
            if not view.is_initialized:
                self._add_pairs(list({cells.key_digest(k): (k, v) for k, v in pairs}.values()))
                return len(self)
            changed: dict[bytes, dict[str, Any]] = {}
            dead: dict[bytes, int] = {}
            for k, v in pairs:
                found, old = view.find_ids(k), None
                if found:  # the key stays as it was written, as in a dict
                    old = view.read_rows(found[-1:])[0]
                    k = view.schema.row_key(old)
                mark = view.schema.key_digest(k)
                row = {name: column[0] for name, column in self._build_columns([k], [v]).items()}
                if old is not None:
                    dead[mark] = found[-1]
                    row = {**old, **row}
                changed[mark] = row
            self._write_rows(
                rows_to_columns(changed.values()), remove=list(dead.values()), what="update"
            )
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
        keys = list(keys) if has_several_keys(keys, kind) else [keys]
        with self._exclusive_lock():
            view = self._view
            dead: dict[int, None] = {}
            for key in keys:
                found = view.find_ids(key)
                if not found:
                    raise KeyNotFoundError(key, partial(self._nearest_keys, key))
                dead.update(dict.fromkeys(found))
            self._store.commit(remove=list(dead), what="remove")
        return len(dead)

    def __delitem__(self, key: K) -> None:
        self.remove([key])

    def _build_columns(self, keys: Any, values: Any) -> ColumnData:
        """Keys and values under the names of their columns."""
        key, value, _ = self._requested_columns
        schema = self._schema
        if schema is not None:
            key, value = schema.key, schema.value
        named: ColumnData = {}
        if len(key) == 1:
            named[key[0]] = keys
        else:
            for k in keys:
                if not isinstance(k, tuple) or len(k) != len(key):
                    raise ArgumentError(
                        f"a key is {key}: a tuple of {len(key)}, not {cells.format_cell(k)}"
                    )
            named |= {name: [k[i] for k in keys] for i, name in enumerate(key)}
        value = value or ("value",)
        if len(value) == 1:
            return named | {value[0]: values}
        for v in values:
            if not isinstance(v, Mapping) or not set(v) <= set(value):
                raise ArgumentError(
                    f"a value is a mapping of {', '.join(value)}, not {cells.format_cell(v)}"
                )
        return named | {name: [v.get(name) for v in values] for name in value}

    def _check_writable(self) -> None:
        if self._pinned_version is not None:
            raise CombinationError(
                f"version {self._pinned_version} is past and cannot change: write to the "
                "database itself"
            )

    def _exclusive_lock(self) -> AbstractContextManager[object]:
        """The rows as they are now, until what is made of them is written."""
        self._check_writable()
        return self._store.exclusive_lock()

    def _write_rows(
        self,
        columns: ColumnData,
        *,
        remove: Sequence[int] = (),
        what: str = "add",
        progress: ProgressCallback | None = None,
    ) -> None:
        """Rows in, others out, as one version."""
        with self._exclusive_lock():
            columns = normalize_columns(columns)
            if count_rows(columns):
                self._encode_and_commit(columns, remove, what, progress)
                self._refit_encoder()

    def _encode_and_commit(
        self,
        columns: ColumnData,
        remove: Sequence[int],
        what: str,
        progress: ProgressCallback | None,
    ) -> None:
        view = self._view
        schema = view.schema if view.is_initialized else None
        if schema is None:
            key, value, unique = self._requested_columns
            schema = Schema.from_columns(columns, key, value or other_columns(columns, key), unique)
        columns = schema.fill_columns(columns)
        schema.check_types(columns)
        if (
            view.is_initialized
            and schema.with_number_values(columns) != schema
            and not has_any_value(view)
        ):
            schema = schema.with_number_values(columns)
            self._store.rewrite_tensors(
                encoding.add_value_tensor(view, len(schema.value), progress),
                settings=view.settings | {"schema": schema.to_dict()},
                arrays=view.snapshot.read_arrays(),
                what="numbers",
            )
            view = self._view
        keys = schema.keys_from_columns(columns)
        digests: Collection[bytes] = LazySequence(
            len(keys), partial(_compute_digests, keys, schema)
        )
        apart = schema.vector_columns
        kept = {name: _as_list(column) for name, column in columns.items() if name not in apart}
        records: Collection[str] = LazySequence(len(keys), partial(_dump_records, kept))
        if not kept:
            records = ["{}"] * len(keys)
        if schema.key_kind != "vector" or len(keys) <= encoding.KEYS_PER_BLOCK:
            # Of many vectors they are made while others write these.
            digests, records = list(digests), list(records)
        if schema.key_kind == "vector":
            keys = stack_vectors(keys, "key")
        first: dict[str, Any] | None = None
        arrays = None
        if view.is_initialized:
            encoder = view.encoder
        else:
            from qkv.database import encoders

            names = schema.key if len(schema.key) > 1 else ()
            wish = self._requested_encoder or encoders.default(keys, names)
            encoder, told = encoding.fit_encoder(wish, keys)
            arrays = encoder.arrays()
            first = {"schema": schema.to_dict(), "encoded": 1} | told
            if self._precision is not None:
                first["precision"] = self._precision
            self._requested_encoder = encoder
        how = (
            view.vector_precision
            if view.is_initialized
            else encoding.choose_precision(encoder, self._precision)
        )
        tensors = encoding.encode_keys(encoder, keys, how, view.snapshot.last_id + 1, progress)
        pooled = schema.build_value_array(columns)
        if pooled is not None:
            tensors["value"] = pooled
            if len(schema.value) > 1:
                warn_partial_values(pooled, schema.value)
        if encoding.stores_raw_keys(encoder, schema):
            tensors["key"] = keys
        beside = {name: pooled for name, role in apart.items() if role == "value"}
        tensors |= typed.build_column_tensors({**kept, **beside})
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
        except DuplicateKeyError as error:
            at = error.position
            raise DuplicateKeyError(
                f"the key {cells.format_cell(keys[at])} (row {at}) is there already or comes "
                "twice, and "
                "keys are unique here: update it, or leave it out",
                at,
            ) from None

    def _refit_encoder(self) -> None:
        """An encoder that fits itself to the keys is fitted anew when they have doubled.

        By then the rows are in, so that a failure is no error of theirs; the next ones try again.
        """
        try:
            fitted = self._view.setting_number("fitted")
            if fitted and 2 * fitted <= len(self) <= MAX_REFIT_ROWS:
                self.encode()
        except (QkvError, OSError, MemoryError) as fault:
            told = f"the rows were added, but the encoder was not fitted anew to them: {fault}"
            warn_at_caller(told, StaleFitWarning)

    def encode(
        self,
        encoder: EncoderLike | None = None,
        *,
        fit: bool = True,
        what: str = "encode",
        progress: ProgressCallback | None = None,
    ) -> None:
        """Turn all keys into vectors anew, as a new version: with another encoder, or fitted to
        the keys that are there now."""
        from qkv.database import encoders

        if not isinstance(what, str):
            raise DtypeError(f"what must be the name of the version, not {what!r}")
        validate_callables(progress=progress)
        with self._exclusive_lock():
            view = self._view
            if not len(view):
                raise CombinationError("there are no rows to encode yet: add some first")
            made = view.encoder if encoder is None else encoders.resolve(encoder)
            keys = view.read_all_keys()
            made, told = (
                encoding.fit_encoder(made, keys)
                if fit
                else (made, encoding.describe_encoder(made, 0))
            )
            # The count tells apart two encoders of the same settings with other arrays.
            told = view.settings | told | {"encoded": view.setting_number("encoded") + 1}
            blocks = encoding.reencode_rows(view, made, keys, progress)
            self._store.rewrite_tensors(blocks, settings=told, arrays=made.arrays(), what=what)
            self._requested_encoder = made

    def learn(
        self, pairs: Iterable[Any], *, progress: ProgressCallback | None = None, **how: Any
    ) -> Any:
        """Learn from (query, right key) pairs which keys a query means: see `qkv.database.learn`.

        The vectors that come of it are a new version; `at(version)` goes back. Gives the report.
        """
        from qkv.database.learn import learn

        validate_keywords("learn()", how, learn.__kwdefaults__)
        validate_callables(progress=progress)
        self._check_writable()
        view = self._nonempty_view()
        keys, pairs = view.read_all_keys(), list_pairs(pairs, "learn", "right key")
        if view.schema.key_kind in ("vector", *PARSER_BY_KIND):
            pairs = [_normalize_pair(view, keys, pair, i) for i, pair in enumerate(pairs)]
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
    ) -> Calibration:
        """Find out from (query, right key) pairs how much the right row weighs, so that answers
        have a `set`, which holds it with this probability, and abstain where none fits.

        The promise holds for questions of the pairs' kind, asked with this score and weighting. It
        is kept as a new version, and holds until keys are encoded anew or a tenth of the rows has
        changed.

        >>> from qkv import Database
        >>> D = Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu"})
        >>> slips = [("Zang", "Zhang"), ("Lee", "Li"), ("Liptn", "Lipton"), ("Zhnag", "Zhang")]
        >>> promise = D.calibrate(slips, coverage=0.7)
        >>> [row.key for row in D.ask("Lpton").prediction_set], D.ask("qwy").abstains
        (['Lipton'], True)
        """
        from qkv.database.query import calibration

        validate_keywords("calibrate()", other, DatabaseWriter.calibrate.__kwdefaults__)
        with self._exclusive_lock():
            view = self._nonempty_view()
            found = calibration.calibrate(view, pairs, coverage, score, weighting)
            told = view.settings | {"promise": found.to_dict()}
            self._store.commit(settings=told, what="calibrate")
        return found

    def compact(self, progress: ProgressCallback | None = None) -> Any:
        """Merge segments, drop removed rows, and forget past versions."""
        validate_callables(progress=progress)
        self._check_writable()
        self._cached_view = self._cached_executor = None  # it would keep an old version alive
        return self._store.compact(progress)


def other_columns(columns: ColumnData, key: Sequence[str]) -> tuple[str, ...]:
    """The columns that are not the key."""
    rest = tuple(name for name in columns if name not in key)
    if not rest:
        told = ", ".join(key)
        raise ArgumentError(
            f"there is no column beside the key {told} for a value: name the key as the value too, "
            f"value={told!r}"
        )
    return rest


def _normalize_pair(view: Any, keys: Any, pair: Any, place: int) -> Any:
    """A pair whose query is read of text, and whose right key is as it is kept: a vector may be
    rounded, a day a midnight."""
    if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
        return pair
    query, right, *weight = pair
    if (read := PARSER_BY_KIND.get(view.schema.key_kind)) is not None:
        query = read(query, f"learn: the query of pairs[{place}]")
    ids = view.find_ids(right)
    return (query, keys[int(view.ids.searchsorted(ids[-1]))] if ids else right, *weight)


def _dump_records(columns: ColumnData, start: int, stop: int) -> list[str]:
    return cells.dump_rows({name: column[start:stop] for name, column in columns.items()})


def _compute_digests(keys: Any, schema: Schema, start: int, stop: int) -> list[bytes]:
    try:
        return schema.key_digests(keys[start:stop])
    except ArgumentError:
        for i, key in enumerate(keys[start:stop], start):
            try:
                cells.key_digest(key)
            except ArgumentError as error:
                raise ArgumentError(f"key {i} (column {', '.join(schema.key)}): {error}") from None
        raise


def _as_list(column: Any) -> list[Any]:
    return list(to_numpy(column).tolist() if is_array(column) else column)
