"""Read a table from a file, a pattern of files, a URL or standard input.

The scheme of a URL decides its format. For a file, the first bytes decide, then the suffix.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from qkv.database.sources import delimited, files, frames, json, sql, workbook
from qkv.database.sources.formats import (
    SourceFormat,
    SourceRequest,
    TextOptions,
    describe_formats,
    find_by_magic,
    find_by_scheme,
    find_by_suffix,
    register_source,
)
from qkv.database.sources.table import SourceError, Table, TableSelector
from qkv.database.sources.type_inference import MISSING_WORDS, infer_types
from qkv.errors import CombinationError, DtypeError
from qkv.util.logging import debug_logger
from qkv.util.types import ProgressCallback

_SNIFF_BYTES = 64 * 1024
"""The number of bytes of a file that are read to recognize its format."""
_REMOTE_FILE_SCHEMES = ("http", "https", "ftp", "s3", "gs")


def _read_delimited(request: SourceRequest, delimiter: str | None) -> Table:
    return delimited.read_delimited(
        request.data,
        request.name,
        request.location,
        delimiter,
        request.progress,
        request.text_options,
    )


def _read_csv(request: SourceRequest) -> Table:
    return _read_delimited(request, None)


def _read_tsv(request: SourceRequest) -> Table:
    return _read_delimited(request, "\t")


def _read_json(request: SourceRequest) -> Table:
    return json.read_json(request.data, request.name, request.location, request.progress)


def _read_parquet(request: SourceRequest) -> Table:
    return frames.from_file(request.file, "Parquet", request.progress)


def _read_arrow(request: SourceRequest) -> Table:
    return frames.from_file(request.file, "Arrow", request.progress)


def _read_workbook(request: SourceRequest) -> Table:
    missing = request.text_options.missing
    return workbook.read_workbook(request.file, request.selector, request.progress, missing)


def _read_sqlite(request: SourceRequest) -> Table:
    return sql.read_sqlite(request.file, request.selector, request.progress)


def _read_sqlite_url(request: SourceRequest) -> Table:
    if not re.match(r"sqlite:///.", request.url, re.IGNORECASE):
        raise SourceError(
            "a SQLite URL has three slashes before the file: sqlite:///file?table=…",
            file=request.location,
        )
    url, selector = sql.parse_selector(request.url, request.selector.table)
    path = Path(unquote(url.partition("?")[0][len("sqlite:///") :]))
    if files.read_contents(path, len(sql.SQLITE_MAGIC)) != sql.SQLITE_MAGIC:
        raise _wrong_format_error(path, "SQLite")
    return sql.read_sqlite(path, selector, request.progress)


def _read_postgres(request: SourceRequest) -> Table:
    return sql.read_postgres(
        *sql.parse_selector(request.url, request.selector.table), request.progress
    )


_CSV_FORMAT = SourceFormat("CSV", _read_csv, suffixes=(".csv", ".txt"), is_delimited=True)
_JSON_FORMAT = SourceFormat("JSON", _read_json, suffixes=(".json", ".jsonl", ".ndjson"))
BUILT_IN_FORMATS = (
    _CSV_FORMAT,
    SourceFormat("TSV", _read_tsv, suffixes=(".tsv", ".tab"), is_delimited=True),
    _JSON_FORMAT,
    SourceFormat(
        "Parquet", _read_parquet, suffixes=(".parquet", ".pq"), magic=(frames.PARQUET_MAGIC,)
    ),
    SourceFormat(
        "Arrow",
        _read_arrow,
        suffixes=(".arrow", ".arrows", ".feather", ".ipc"),
        magic=(frames.ARROW_FILE_MAGIC, frames.ARROW_STREAM_MAGIC),
    ),
    SourceFormat(
        "SQLite",
        _read_sqlite,
        suffixes=(".db", ".sqlite", ".sqlite3"),
        magic=(sql.SQLITE_MAGIC,),
        has_tables=True,
    ),
    SourceFormat(
        "a workbook",
        _read_workbook,
        suffixes=(".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"),
        magic=workbook.WORKBOOK_MAGIC,
        is_container=True,
        has_tables=True,
    ),
    SourceFormat(
        "a SQLite URL",
        _read_sqlite_url,
        schemes=("sqlite",),
        has_tables=True,
        example="sqlite:///file?table=name",
    ),
    SourceFormat(
        "PostgreSQL",
        _read_postgres,
        schemes=("postgresql", "postgres"),
        has_tables=True,
        example="postgresql://host/database?table=name",
    ),
)
"""The formats of qkv itself; `read` looks them up by suffix, magic bytes or scheme."""

for _built_in in BUILT_IN_FORMATS:
    register_source(_built_in)


def read(
    source: str | Path,
    *,
    table: str | None = None,
    missing: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    text: Sequence[str] | bool | None = None,
    progress: ProgressCallback | None = None,
) -> Table:
    """Read a table from a file, a pattern of files, a URL or standard input.

    The whole source is read and checked before the table is returned. `source` is one of these:

    - a file in CSV, TSV, JSON, JSON lines, Parquet, Arrow, Feather or SQLite, or an Excel workbook;
      its first bytes or its suffix decide. Text may be compressed, as in "books.csv.gz".
    - a pattern of such files, such as "logs/*.csv"
    - "sqlite:///file?table=name" or "postgresql://…?table=name"; ?query=select… replaces ?table=
    - "-" for CSV on standard input
    - a source of a format that `register_source` added

    `table` selects the table of a database, or the sheet of a workbook. `missing` lists the words
    that mean a missing value in CSV, TSV and workbooks; the default is that of pandas. An empty
    cell is always missing. `names` are the column names of CSV or TSV without a header line. `text`
    lists the columns that stay text; True means all columns.

    `progress(done, total)` is called with a number of bytes, rows or columns. `total` is None if it
    is unknown.

    Raises `SourceError` with the file, the line and the column (counted from 1) and the next step.
    If a package is missing, raises `MissingExtraError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "people.csv")
    ...     _ = path.write_text("name,age\\nLi,34\\n")
    ...     read(path)
    Table(name='people', columns={'name': ['Li'], 'age': [34]})
    """
    if not isinstance(source, str | Path):
        step = "; read a data frame with from_frame(frame)" if hasattr(source, "columns") else ""
        raise DtypeError(f"source must be a path or a URL, not a {type(source).__name__}{step}")
    missing_words = (
        MISSING_WORDS
        if missing is None
        else _check_words(missing, "missing", "words, such as ['NA', '-']")
    )
    column_names = (
        () if names is None else _check_words(names, "names", "names, one for each column")
    )
    options = TextOptions(missing_words, column_names, text or ())
    result = _read_source(source, table, options, progress)
    if log := debug_logger():
        log.debug("read %s: %d rows of %s", result.name, len(result), ", ".join(result.columns))
    return result


def _read_source(
    source: str | Path, table: str | None, options: TextOptions, progress: ProgressCallback | None
) -> Table:
    """Read a source; see `read`."""
    if isinstance(source, str):
        if source == "-":
            _refuse_table(table, "standard input")
            data = files.read_stdin()
            files.refuse_foreign_formats(data, "stdin")
            return _CSV_FORMAT.read(
                SourceRequest("stdin", "stdin", data=data, text_options=options, progress=progress)
            )
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
            return _read_url(source, table, options, progress)
        if not source.strip():
            raise SourceError(f"the name of the source is empty: {describe_formats()}")
        if glob.has_magic(source) and not os.path.lexists(source):
            return _read_pattern(source, TableSelector(table), options, progress)
    return _read_file(Path(source), TableSelector(table), options, progress)


def _read_pattern(
    pattern: str,
    selector: TableSelector,
    options: TextOptions,
    progress: ProgressCallback | None,
) -> Table:
    """Read the rows of all files that match a pattern, in the order of their names.

    If a file does not have a column, its rows lack this cell. The types of columns of delimited
    text are inferred when all files are read.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    paths = [path for path in paths if not path.is_dir()]
    if not paths:
        raise SourceError(
            "no file matches this pattern: check the pattern and the folder", file=pattern
        )
    formats = [find_by_suffix(_uncompressed_name(path).suffix) for path in paths]
    is_text = all(
        source_format is not None and source_format.is_delimited for source_format in formats
    )
    absent = "" if is_text else None
    columns: dict[str, list[Any]] = {}
    for done, path in enumerate(paths, start=1):
        rows_before = len(next(iter(columns.values()), []))
        part = _read_file(path, selector, replace(options, raw=is_text), None)
        for name in part.columns:
            if name not in columns:
                columns[name] = [absent] * rows_before
        for name, cells in columns.items():
            cells += part.columns.get(name) or [absent] * len(part)
        if progress is not None:
            progress(done, len(paths))
    if is_text:
        columns = infer_types(columns, options.missing, options.text)
    return Table(Path(pattern).stem, columns)


def _check_words(words: Sequence[str], argument: str, expected: str) -> Sequence[str]:
    """Return a list of words; raise `DtypeError` for anything else."""
    if (
        not isinstance(words, Iterable)
        or isinstance(words, str)
        or not all(isinstance(word, str) for word in words)
    ):
        raise DtypeError(f"{argument} must be a list of {expected}, not {words!r}")
    return words


def _read_url(
    url: str, table: str | None, options: TextOptions, progress: ProgressCallback | None
) -> Table:
    """Read the table at a URL."""
    scheme = url.partition(":")[0].lower()
    location = sql.mask_password(url)
    if scheme == "file":
        path = Path(unquote(urlsplit(url).path))
        return _read_file(path, TableSelector(table), options, progress)
    source_format = find_by_scheme(scheme)
    if source_format is None:
        step = "download the file first" if scheme in _REMOTE_FILE_SCHEMES else describe_formats()
        raise SourceError(f"{scheme}:// URLs are not supported: {step}", file=location)
    if not source_format.is_delimited:
        _refuse_names(options, location)
    if not source_format.has_tables:
        _refuse_table(table, location)
    return source_format.read(
        SourceRequest(
            location,
            Path(unquote(urlsplit(url).path)).stem,
            url=url,
            selector=TableSelector(table),
            text_options=options,
            progress=progress,
        )
    )


def _read_file(
    path: Path,
    selector: TableSelector,
    options: TextOptions,
    progress: ProgressCallback | None,
) -> Table:
    is_compressed = path.suffix.lower() in files.DECOMPRESSOR_BY_SUFFIX
    # A pipe can be read only once, so its content is kept.
    can_reread = os.path.isfile(path) and not is_compressed
    if can_reread:
        opening = files.read_contents(path, _SNIFF_BYTES)
    else:
        opening = files.read_decompressed(path) if is_compressed else files.read_contents(path)
    source_format = _recognize_format(opening, path)
    if not source_format.is_delimited:
        _refuse_names(options, str(path))
    if source_format.magic and not can_reread:
        problem = (
            "in a compressed file: decompress it"
            if is_compressed
            else "from a pipe: save it to a file"
        )
        raise SourceError(f"{source_format.name} {problem} first", file=str(path))
    if not source_format.has_tables:
        _refuse_table(selector.table, str(path))
    data = b""
    if not source_format.magic:
        data = files.read_contents(path) if can_reread else opening
    return source_format.read(
        SourceRequest(
            str(path),
            _uncompressed_name(path).stem,
            path=path,
            data=data,
            selector=selector,
            text_options=options,
            progress=progress,
        )
    )


def _recognize_format(opening: bytes, path: Path) -> SourceFormat:
    """Return the format of a file. The first bytes decide, then the suffix, then the content."""
    inner_path = _uncompressed_name(path)
    by_suffix = find_by_suffix(inner_path.suffix)
    if by_suffix is not None and by_suffix.magic and opening.startswith(by_suffix.magic):
        return by_suffix
    by_magic = find_by_magic(opening)
    if by_magic is not None:
        return by_magic
    files.refuse_foreign_formats(opening, str(path))
    if by_suffix is not None and by_suffix.magic:
        raise _wrong_format_error(path, by_suffix.name)
    return by_suffix or _sniff_format(opening, inner_path)


def _uncompressed_name(path: Path) -> Path:
    """Return the path without a suffix such as .gz."""
    return path.with_suffix("") if path.suffix.lower() in files.DECOMPRESSOR_BY_SUFFIX else path


def _sniff_format(opening: bytes, path: Path) -> SourceFormat:
    """Return the text format that the content looks like; raise `SourceError` if there is none."""
    # The opening may end in the middle of a character.
    text = opening.decode("utf-8-sig", errors="ignore")
    if text.lstrip()[:1] in ("{", "["):
        return _JSON_FORMAT
    if "\0" not in text and delimited.sniff_delimiter(text)[1]:
        return _CSV_FORMAT
    suffix = f"The suffix {path.suffix!r} is unknown" if path.suffix else "There is no suffix"
    raise SourceError(
        f"the format is not recognized. {suffix}, and the contents do not look like a table: "
        f"rename the file; {describe_formats()}",
        file=str(path),
    )


def _wrong_format_error(path: Path, format_name: str) -> SourceError:
    return SourceError(
        f"this is not {format_name}: the first bytes do not match the suffix. Copy the file again, "
        "or rename it to its real format",
        file=str(path),
    )


def _refuse_names(options: TextOptions, location: str) -> None:
    """Raise `CombinationError` if `names=` is set for a source that has column names."""
    if options.names:
        raise CombinationError(
            f"names= is for CSV and TSV without a header line, but {sql.mask_password(location)} "
            "has column names: leave names= out"
        )


def _refuse_table(table: str | None, location: str) -> None:
    """Raise `CombinationError` if `table=` is set for a source with a single table."""
    if table is not None:
        raise CombinationError(
            f"table={table!r} selects a table of a database, but {location} is a single table: "
            "leave table= out"
        )
