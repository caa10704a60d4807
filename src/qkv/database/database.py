"""A database that is asked by attention: D = {(k₁, v₁), …}, Attention(q, D) = Σᵢ α(q, kᵢ) vᵢ."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, TypedDict, Unpack, overload

from qkv.arrays import is_array
from qkv.database.schema import Cells, by_place, keyed, names, plain
from qkv.database.store import Store, folder
from qkv.database.writing import Writing, others
from qkv.errors import ArgumentError, CombinationError, DtypeError, callable_or_none, keywords
from qkv.frames import library_of
from qkv.types import NOTHING, K, Progress, Shaped, V

if TYPE_CHECKING:
    from qkv.database.encoders import EncoderLike
    from qkv.database.influence import Valuation
    from qkv.scores import ScoreLike
    from qkv.weightings import WeightingLike


READING = dict.fromkeys(
    ("mode", "readonly", "read_only"),
    "create=False to make none; many may read beside one that writes",
)
ON_DISK = " Database.from_columns(…, path=…) writes one to disk, and qkv.open(path) opens it."


class Settings(TypedDict, total=False):
    """What a database is told beside its rows."""

    key: str | Sequence[str]
    value: str | Sequence[str]
    encoder: EncoderLike | None
    unique: bool
    precision: str | None


class Database(Writing[K, V]):
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
    def __init__(self, data: Shaped, values: Any, **how: Unpack[Settings]) -> None: ...
    @overload
    def __init__(self, data: Mapping[K, V], **how: Unpack[Settings]) -> None: ...
    @overload
    def __init__(self, data: Iterable[tuple[K, V]], **how: Unpack[Settings]) -> None: ...
    @overload
    def __init__(self, data: Iterable[K], values: Iterable[V], **how: Unpack[Settings]) -> None: ...
    @overload
    def __init__(self, data: Any = None, values: Any = ..., **how: Unpack[Settings]) -> None: ...
    def __init__(
        self,
        data: Any = None,
        values: Any = NOTHING,
        *,
        key: str | Sequence[str] = "key",
        value: str | Sequence[str] = "value",
        encoder: EncoderLike | None = None,
        unique: bool = False,
        precision: str | None = None,
        **other: Any,
    ):
        keywords("Database()", other, Settings.__optional_keys__, ON_DISK)
        super().__init__(Store(None), key, value, encoder, unique, precision)
        if data is not None:
            self.add(data, values)

    def __getstate__(self) -> dict[str, Any]:
        """All but the view of its rows, which is made anew: a copy of one on disk is the same rows,
        opened again, and one in memory goes with its rows."""
        return {**vars(self), "_held": None, "_last": None}

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
        progress: Progress | None = None,
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
        keywords("from_columns()", other, cls.from_columns.__kwdefaults__)
        if not isinstance(columns, Mapping):
            raise DtypeError(f"columns must be a mapping of them, not {type(columns).__name__}")
        if not columns:
            raise ArgumentError("columns: there are none; a database needs a key and a value")
        told = [str(name) for name in columns]
        if len(set(told)) < len(told):
            raise ArgumentError(f"columns: two of them have the same name: {', '.join(told)}")
        callable_or_none(progress=progress)
        columns = dict(zip(told, map(by_place, columns.values()), strict=True))
        for name, cells in columns.items():
            if isinstance(cells, str | bytes) or not hasattr(cells, "__len__"):
                raise DtypeError(f"column {name!r} must be a list of cells, not {cells!r:.40}")
        keys = names(key) if key is not None else (_first_text(columns),)
        values = names(value, "value") if value is not None else others(columns, keys)
        wish = {"key": keys, "value": values, "unique": unique, "precision": precision}
        path = None if path is None else folder.named(path)
        if path is None or os.path.lexists(path):
            made = cls._on(Store(path), encoder=encoder, **wish)
            return made._imported(columns, progress)
        with folder.beside(path) as part:
            made = cls._on(Store(part), encoder=encoder, **wish)._imported(columns, progress)
            made.close()
        return cls._on(Store(path), encoder=made._encoder_wish, **wish)

    def _imported(self, columns: Cells, progress: Progress | None) -> Self:
        """The first rows, or an error and the store closed."""
        try:
            with self._alone():
                if self._schema is not None:
                    raise ArgumentError(
                        f"{self.path} holds a database already: open it and use extend, or choose "
                        "another path"
                    )
                columns = keyed(plain(columns), self._wish[0])
                self._write(columns, progress=progress, what="import")
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
        made._library = library_of(frame)
        return made

    @classmethod
    def from_dataset(cls, dataset: Any, **how: Any) -> Database:
        """One split of a Hugging Face data set; `how` as in `from_columns`.

        Lists of floats that are all of one length are vectors. One that is streamed is read to its
        end: `dataset.take(1000)` is less of it.

        >>> from datasets import Dataset
        >>> names = Dataset.from_dict({"name": ["Li", "Hu"], "label": [0, 1]})
        >>> Database.from_dataset(names, key="name", value="label").ask("Lii").to_frame()["key"][0]
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
        (`sources.MISSING`); `missing` gives other words for it, () none: then NA is text. `names`
        are the columns' where the first line is a row already.
        """
        from qkv.database import sources

        keywords("from_source()", how, cls.from_columns.__kwdefaults__)
        way: Any = {"table": table, "missing": missing, "names": names}
        read = sources.read(source, **way, progress=how.get("progress"))
        return cls.from_columns(read.columns, **how)

    def valuate(
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
        >>> D.valuate([(1.05, "low"), (1.15, "low"), (5.1, "high")]).worst(1)[0].key
        1.2
        """
        from qkv.database.influence import valuate

        how = (score, weighting, where, 1, tolerance, confidence)
        return valuate(self._asked(self._filled(), *how), pairs)


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
    keywords("open()", other, open.__kwdefaults__, elsewhere=READING)
    if isinstance(path, str) and "://" in path:
        raise ArgumentError(
            f"path: {path} is an address, and a database here is a folder: qkv.Client(url) asks a "
            "server, and what lies elsewhere is copied first"
        )
    store = Store(path, create=create, skip_damaged=skip_damaged)
    wish = {"key": key, "value": value, "unique": unique, "precision": precision}
    made = Database._on(store, encoder=encoder, **wish)
    if (key, value, unique, encoder, precision) != ("key", "value", False, None, None):
        try:
            _agrees(made, key, value, unique)
            _kept(made, precision)
        except BaseException:
            made.close()
            raise
    return made


def _agrees(made: Database, key: Any, value: Any, unique: bool) -> None:
    """Refuse what was asked for where the rows that are there were made otherwise."""
    about = made.info()
    given = {"key": "key" if key == "key" else names(key)}
    given["value"] = "value" if value in (None, "value") else names(value, "value")
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


def _kept(made: Database, precision: str | None) -> None:
    """The same of the keys' vectors: of which encoder they are, in how many bits."""
    view, given = made._view, made._encoder_wish
    told = view.settings.get("encoder", {})
    if told and given is not None and given.kind not in _kinds(told):
        raise CombinationError(
            f"encoder: the keys of {made.path} were encoded by {told['kind']}, not {given.kind}: "
            "open it without encoder=, and encode(encoder) turns them into other vectors"
        )
    have = view.snapshot.kind("code")
    if precision is not None and have is not None and have[0].name != precision:
        raise CombinationError(
            f"precision: the keys of {made.path} are kept in {have[0].name}, not {precision}: open "
            "it without precision=, and copy it into a new one"
        )


def _kinds(told: Any) -> Iterator[str]:
    """The kind of an encoder, by its settings, and those of the encoders in it."""
    if isinstance(told, dict):
        yield from [told["kind"]] if "kind" in told else []
    if isinstance(told, dict | list):
        for part in told.values() if isinstance(told, dict) else told:
            yield from _kinds(part)


def _first_text(columns: Cells) -> str:
    """The first column whose first cell that is not missing is text; else the first."""
    for name, column in columns.items():
        if is_array(column):
            continue
        first = next((column[i] for i in range(len(column)) if column[i] is not None), None)
        if isinstance(first, str):
            return name
    return next(iter(columns))
