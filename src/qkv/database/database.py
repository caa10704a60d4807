"""A database that is asked by attention: D = {(k₁, v₁), …}, Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, TypedDict, Unpack, overload

from qkv.database.storage import Store, folder
from qkv.database.table.schema import (
    ColumnData,
    as_column_names,
    drop_missing_keys,
    extract_cells,
    normalize_columns,
)
from qkv.database.writer import DatabaseWriter, other_columns
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    validate_callables,
    validate_keywords,
)
from qkv.frameworks import is_array
from qkv.util.data_frames import frame_library
from qkv.util.types import UNSET, K, ProgressCallback, Shaped, V

if TYPE_CHECKING:
    from qkv.database.encoders import EncoderLike
    from qkv.database.query.influence import Valuation
    from qkv.scores import ScoreLike
    from qkv.weightings import WeightingLike


OPEN_ARGUMENT_HINTS = dict.fromkeys(
    ("mode", "readonly", "read_only"),
    "create=False to make none; many may read beside one that writes",
)
ON_DISK_HINT = " Database.from_columns(…, path=…) writes one to disk, and qkv.open(path) opens it."


class DatabaseOptions(TypedDict, total=False):
    """What a database is told beside its rows."""

    key: str | Sequence[str]
    value: str | Sequence[str]
    encoder: EncoderLike | None
    unique: bool
    precision: str | None


class Database(DatabaseWriter[K, V]):
    """Keys and values, asked exactly by D[key] and softly by D.ask(query).

    `data` is a mapping, pairs (key, value), or the keys, whose `values` then come second; arrays
    (m, d) are m vectors. Keys may repeat, unless `unique`. Nothing is written to disk; `qkv.open`
    gives the same on disk.

    `key` and `value` name the columns. `encoder` turns keys into vectors that are compared: a name
    or an object of `qkv.database.encoders`; without one, the keys' type decides. `precision` is
    what the vectors are kept as: "float32", "float16", or "int8", a quarter of the bytes, with a
    bound on what that costs; without one, as they come, and those of text as int8.

    >>> D = Database({"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu"})
    >>> D["Li"]
    'Mu'
    >>> D.ask("Lipten").value
    'Zachary'
    >>> "Smola" in D, len(D)
    (False, 3)
    """

    @overload
    def __init__(self, data: Shaped, values: Any, **how: Unpack[DatabaseOptions]) -> None: ...
    @overload
    def __init__(self, data: Mapping[K, V], **how: Unpack[DatabaseOptions]) -> None: ...
    @overload
    def __init__(self, data: Iterable[tuple[K, V]], **how: Unpack[DatabaseOptions]) -> None: ...
    @overload
    def __init__(
        self, data: Iterable[K], values: Iterable[V], **how: Unpack[DatabaseOptions]
    ) -> None: ...
    @overload
    def __init__(
        self, data: Any = None, values: Any = ..., **how: Unpack[DatabaseOptions]
    ) -> None: ...
    def __init__(
        self,
        data: Any = None,
        values: Any = UNSET,
        *,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] = "value",
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        **other: Any,
    ):
        validate_keywords("Database()", other, DatabaseOptions.__optional_keys__, ON_DISK_HINT)
        super().__init__(Store(None), key, value, encoder, unique, precision)
        if data is not None:
            self.add(data, values)

    def __getstate__(self) -> dict[str, Any]:
        """All but the view of its rows, which is made anew: a copy of one on disk is the same rows,
        opened again, and one in memory goes with its rows."""
        return {**vars(self), "_cached_view": None, "_cached_executor": None}

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        *,
        key: str | Sequence[str] | None = None,
        value: str | Sequence[str] | None = None,
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        path: str | Path | None = None,
        progress: ProgressCallback | None = None,
        **other: Never,
    ) -> Database:
        """Named columns of one length, as `key` and `value` say; on disk where `path` is given.

        Without `key`, the first column of text is the key, or the first column; without `value`,
        a row's value is all its other columns. A row whose key is missing is skipped, with a
        warning that says how many were.

        >>> D = Database.from_columns(
        ...     {"name": ["Ann", "Bo"], "major": ["art", "law"]}, value="major"
        ... )
        >>> D["Bo"]
        'law'
        """
        validate_keywords("from_columns()", other, cls.from_columns.__kwdefaults__)
        if not isinstance(columns, Mapping):
            raise DtypeError(f"columns must be a mapping of them, not {type(columns).__name__}")
        if not columns:
            raise ArgumentError("columns: there are none; a database needs a key and a value")
        told = [str(name) for name in columns]
        if len(set(told)) < len(told):
            raise ArgumentError(f"columns: two of them have the same name: {', '.join(told)}")
        validate_callables(progress=progress)
        columns = dict(zip(told, map(extract_cells, columns.values()), strict=True))
        for name, cells in columns.items():
            if isinstance(cells, str | bytes) or not hasattr(cells, "__len__"):
                raise DtypeError(f"column {name!r} must be a list of cells, not {cells!r:.40}")
        keys = as_column_names(key) if key is not None else (_first_text_column(columns),)
        values = (
            as_column_names(value, "value") if value is not None else other_columns(columns, keys)
        )
        wish = {"key": keys, "value": values, "unique": unique, "precision": precision}
        path = None if path is None else folder.check_path(path)
        if path is None or os.path.lexists(path):
            made = cls._from_store(Store(path), encoder=encoder, **wish)
            return made._import_columns(columns, progress)
        with folder.build_store_folder(path) as part:
            made = cls._from_store(Store(part), encoder=encoder, **wish)._import_columns(
                columns, progress
            )
            made.close()
        return cls._from_store(Store(path), encoder=made._requested_encoder, **wish)

    def _import_columns(self, columns: ColumnData, progress: ProgressCallback | None) -> Self:
        """The first rows, or an error and the store closed."""
        try:
            with self._exclusive_lock():
                if self._schema is not None:
                    raise ArgumentError(
                        f"{self.path} holds a database already: open it and use extend, or choose "
                        "another path"
                    )
                columns = drop_missing_keys(normalize_columns(columns), self._requested_columns[0])
                self._write_rows(columns, progress=progress, what="import")
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def from_frame(cls, frame: Any, **how: Any) -> Database:
        """A data frame of pandas, polars or pyarrow, as which answers and rows come out again, or a
        query of DuckDB, duckdb.sql("FROM 'sales/**/*.parquet'"); `how` as in `from_columns`.

        >>> import pandas
        >>> students = pandas.DataFrame({"gpa": [3.1, 3.9], "salary": [70.0, 95.0]})
        >>> Database.from_frame(students, key="gpa", value="salary")[3.9]
        95.0
        """
        from qkv.database import sources

        made = cls.from_columns(sources.from_frame(frame).columns, **how)
        made._frame_library = frame_library(frame)
        return made

    @classmethod
    def from_dataset(cls, dataset: Any, **how: Any) -> Database:
        """One split of a Hugging Face data set; `how` as in `from_columns`.

        Lists of floats that are all of one length are vectors. One that is streamed is read to its
        end: `dataset.take(1000)` is less of it.

        >>> from datasets import Dataset
        >>> as_column_names = Dataset.from_dict({"name": ["Li", "Hu"], "label": [0, 1]})
        >>> Database.from_dataset(as_column_names, key="name", value="label").ask("Lii").to_frame()[
        ...     "key"
        ... ][0]
        'Li'
        """
        from qkv.database import sources

        return cls.from_columns(sources.from_dataset(dataset).columns, **how)

    @classmethod
    def from_source(
        cls,
        source: str | Path,
        *,
        table: str | None = None,
        missing: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        **how: Any,
    ) -> Database:
        """A CSV, TSV, JSON, Parquet, Arrow, Excel or SQLite file, a pattern of such files, as
        "logs/*.csv", or a PostgreSQL URL; `table` where it has several. `how` as in `from_columns`.

        In CSV and TSV an empty cell is missing, and so are NA, NaN, null and the like
        (`sources.MISSING_WORDS`); `missing` gives other words for it, () none: then NA is text.
        `as_column_names` are the columns' where the first line is a row already.
        """
        from qkv.database import sources

        validate_keywords("from_source()", how, cls.from_columns.__kwdefaults__)
        way: Any = {"table": table, "missing": missing, "names": names}
        read = sources.read(source, **way, progress=how.get("progress"))
        return cls.from_columns(read.columns, **how)

    def value_of_rows(
        self,
        pairs: Iterable[Any],
        *,
        score: ScoreLike | None = None,
        weighting: WeightingLike = "softmax",
        where: Any = None,
        tolerance: float | None = None,
        confidence: float | None = None,
    ) -> Valuation:
        """What each row does for the answers to (query, right value) pairs: by how much their loss
        would grow without it. A row that does harm may be mislabelled. The rest as in `ask`.

        >>> D = Database([(1.0, "low"), (1.1, "low"), (1.2, "high"), (5.0, "high"), (5.2, "high")])
        >>> D.value_of_rows([(1.05, "low"), (1.15, "low"), (5.1, "high")]).worst(1)[0].key
        1.2
        """
        from qkv.database.query.influence import compute_row_values

        how = (score, weighting, where, 1, tolerance, confidence)
        return compute_row_values(self._get_executor(self._nonempty_view(), *how), pairs)


def open(
    path: str | Path,
    *,
    create: bool = True,
    key: str | Sequence[str] = "key",
    value: str | Sequence[str] | None = "value",
    encoder: EncoderLike | None = None,
    unique: bool = False,
    precision: str | None = None,
    skip_damaged: bool = False,
    **other: Never,
) -> Database:
    """The database in the folder `path`, made empty where there is none unless `create=False`.

    `key`, `value`, `encoder`, `unique` and `precision` are for a new one; its first rows fix them,
    and others, or `unique` where keys may repeat, are refused from then on. Close it, or use it in
    a `with`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/names.qkv") as D:
    ...         D.add("Li", "Mu")
    ...     with open(f"{folder}/names.qkv") as D:
    ...         D["Li"]
    'Mu'
    """
    validate_keywords("open()", other, open.__kwdefaults__, elsewhere=OPEN_ARGUMENT_HINTS)
    if isinstance(path, str) and "://" in path:
        raise ArgumentError(
            f"path: {path} is an address, and a database here is a folder: qkv.Client(url) asks a "
            "server, and what lies elsewhere is copied first"
        )
    store = Store(path, create=create, skip_damaged=skip_damaged)
    wish = {"key": key, "value": value, "unique": unique, "precision": precision}
    made = Database._from_store(store, encoder=encoder, **wish)
    if (key, value, unique, encoder, precision) != ("key", "value", False, None, None):
        try:
            _check_same_columns(made, key, value, unique)
            _check_same_vectors(made, precision)
        except BaseException:
            made.close()
            raise
    return made


def _check_same_columns(made: Database, key: Any, value: Any, unique: bool) -> None:
    """Refuse what was asked for where the rows that are there were made otherwise."""
    about = made.info()
    given = {"key": "key" if key == "key" else as_column_names(key)}
    given["value"] = "value" if value in (None, "value") else as_column_names(value, "value")
    for what, name in given.items():
        have = about[what]  # type: ignore[literal-required]
        if have and name != what and list(name) != have:
            raise CombinationError(
                f"{what}: {made.path} has {', '.join(have)}, not {', '.join(name)}: open it "
                f"without {what}=, and by(key=…, value=…) is the same rows by other columns"
            )
    if unique and about["key"] and not about["unique"]:
        raise CombinationError(
            f"unique: the keys of {made.path} may repeat, as its first rows were told: open it "
            "without unique=, and copy it into a new one"
        )


def _check_same_vectors(made: Database, precision: str | None) -> None:
    """The same of the keys' vectors: of which encoder they are, in how many bits."""
    view, given = made._view, made._requested_encoder
    told = view.settings.get("encoder", {})
    if told and given is not None and given.kind not in _encoder_kinds(told):
        raise CombinationError(
            f"encoder: the keys of {made.path} were encoded by {told['kind']}, not {given.kind}: "
            "open it without encoder=, and encode(encoder) turns them into other vectors"
        )
    have = view.snapshot.tensor_type("code")
    if precision is not None and have is not None and have[0].name != precision:
        raise CombinationError(
            f"precision: the keys of {made.path} are kept in {have[0].name}, not {precision}: open "
            "it without precision=, and copy it into a new one"
        )


def _encoder_kinds(told: Any) -> Iterator[str]:
    """The kind of an encoder, by its settings, and those of the encoders in it."""
    if isinstance(told, dict):
        yield from [told["kind"]] if "kind" in told else []
    if isinstance(told, dict | list):
        for part in told.values() if isinstance(told, dict) else told:
            yield from _encoder_kinds(part)


def _first_text_column(columns: ColumnData) -> str:
    """The first column whose first cell that is not missing is text; else the first."""
    for name, column in columns.items():
        if is_array(column):
            continue
        first = next((column[i] for i in range(len(column)) if column[i] is not None), None)
        if isinstance(first, str):
            return name
    return next(iter(columns))
