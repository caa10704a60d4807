"""One name in, one table out: what kind of source it is, by address, first bytes, then ending."""

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
from qkv.database.sources.delimited import TextOptions
from qkv.database.sources.sql import TableSelector, mask_password, parse_selector
from qkv.database.sources.table import SourceError, Table
from qkv.database.sources.type_inference import MISSING_WORDS, infer_types
from qkv.errors import CombinationError, DtypeError
from qkv.util.logging import debug_logger
from qkv.util.types import ProgressCallback

FORMAT_BY_SUFFIX = {
    ending: kind
    for kind, endings in {
        "csv": ".csv .txt",
        "tsv": ".tsv .tab",
        "json": ".json .jsonl .ndjson",
        "parquet": ".parquet .pq",
        "arrow": ".arrow .arrows .feather .ipc",
        "sqlite": ".db .sqlite .sqlite3",
        "workbook": ".xlsx .xlsm .xlsb .xls .ods",
    }.items()
    for ending in endings.split()
}

_FORMAT_BY_MAGIC = {
    frames.PARQUET_MAGIC: "parquet",
    frames.ARROW_FILE_MAGIC: "arrow",
    frames.ARROW_STREAM_MAGIC: "arrow",
    sql.SQLITE_MAGIC: "sqlite",
}
_SNIFF_BYTES = 64 * 1024
"""How many bytes tell what a file is."""
_BINARY_FORMATS = {
    "parquet": "Parquet",
    "arrow": "Arrow",
    "sqlite": "SQLite",
    "workbook": "a workbook",
}
_KNOWN_SOURCES = (
    f"known are the endings {' '.join(FORMAT_BY_SUFFIX)}, sqlite:///file?table=name, "
    "postgresql://host/database?table=name, and - for CSV on standard input; text may be packed, "
    "as .csv.gz, .bz2 or .xz"
)


def read(
    source: str | Path,
    *,
    table: str | None = None,
    missing: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    text: Sequence[str] | bool = (),
    progress: ProgressCallback | None = None,
) -> Table:
    """The table in a file or a database, read and checked as a whole before any of it is returned.

    `source` is a CSV, TSV, JSON, JSON lines, Parquet, Arrow, Feather or SQLite file or a workbook
    of Excel's, known by its first bytes or its ending, text also packed, as "books.csv.gz"; a
    pattern of such files, as "logs/*.csv"; "sqlite:///file?table=name";
    "postgresql://…?table=name"; or "-", CSV on standard input. An address takes ?query=select… in
    place of ?table=. `table` names the table of a database that has several, or the sheet of a
    workbook. `missing` are the words for a missing cell in CSV, TSV and workbooks, by default those
    of pandas; an empty cell always is one. `names` are those of the columns of CSV or TSV whose
    first line is a row already, `text` those whose cells stay text, True all. `progress(done,
    total)` is called along the way, in whatever the source counts (bytes, rows, columns); `total`
    is None where it is not known.

    Raises `SourceError`, which names the file, the line and the column (from 1) and what to do, or
    `MissingExtraError` where a package is needed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "people.csv")
    ...     _ = path.write_text("name,age\\nLi,34\\n")
    ...     read(path)
    Table(name='people', columns={'name': ['Li'], 'age': [34]})
    """
    if not isinstance(source, str | Path):
        step = "; a data frame is from_frame(frame)" if hasattr(source, "columns") else ""
        told = f"source must be a path or an address, not a {type(source).__name__}{step}"
        raise DtypeError(told)
    words = (
        MISSING_WORDS
        if missing is None
        else _check_words(missing, "missing", "words, such as ['NA', '-']")
    )
    given = () if names is None else _check_words(names, "names", "names, one for each column")
    found = _read_source(source, table, TextOptions(words, given, text), progress)
    if log := debug_logger():
        log.debug("read %s: %d rows of %s", found.name, len(found), ", ".join(found.columns))
    return found


def _read_source(
    source: str | Path, table: str | None, lines: TextOptions, progress: ProgressCallback | None
) -> Table:
    if isinstance(source, str):
        if source == "-":
            _refuse_table(table, "standard input")
            data = files.read_stdin()
            files.refuse_foreign_formats(data, "stdin")
            return delimited.read_delimited(data, "stdin", "stdin", None, progress, lines)
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
            return _read_url(source, table, progress, lines)
        if not source.strip():
            raise SourceError(f"no file was named: {_KNOWN_SOURCES}")
        if glob.has_magic(source) and not os.path.lexists(source):
            return _read_pattern(source, TableSelector(table), progress, lines)
    return _read_file(Path(source), TableSelector(table), progress, lines)


def _read_pattern(
    pattern: str, chosen: TableSelector, progress: ProgressCallback | None, lines: TextOptions
) -> Table:
    """The rows of all files that fit a pattern, in the order of their names.

    A column that a file lacks is missing in its rows. Those of CSV are typed when all are there.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    paths = [path for path in paths if not path.is_dir()]
    if not paths:
        raise SourceError("no file fits this pattern: check it and the folder", file=pattern)
    text = {FORMAT_BY_SUFFIX.get(_unpacked_name(path).suffix.lower()) for path in paths} <= {
        "csv",
        "tsv",
    }
    columns: dict[str, list[Any]] = {}
    for done, path in enumerate(paths, start=1):
        before = len(next(iter(columns.values()), []))
        found = _read_file(path, chosen, None, replace(lines, raw=text))
        for name in found.columns:
            if name not in columns:
                columns[name] = ["" if text else None] * before
        for name, cells in columns.items():
            cells += found.columns.get(name) or ["" if text else None] * len(found)
        if progress is not None:
            progress(done, len(paths))
    if text:
        columns = infer_types(columns, lines.missing, lines.text)
    return Table(Path(pattern).stem, columns)


def _check_words(words: Sequence[str], what: str, wanted: str) -> Sequence[str]:
    if (
        not isinstance(words, Iterable)
        or isinstance(words, str)
        or not all(isinstance(word, str) for word in words)
    ):
        raise DtypeError(f"{what} must be a list of {wanted}, not {words!r}")
    return words


def _read_url(
    url: str, table: str | None, progress: ProgressCallback | None, lines: TextOptions
) -> Table:
    scheme = url.partition(":")[0].lower()
    if scheme != "file":
        _refuse_names(lines, url)
    if scheme == "sqlite":
        if not re.match(r"sqlite:///.", url, re.IGNORECASE):
            raise SourceError(
                "an address of SQLite has three slashes and then the file: sqlite:///file?table=…",
                file=url,
            )
        rest, chosen = parse_selector(url, table)
        path = Path(unquote(rest.partition("?")[0][len("sqlite:///") :]))
        if files.read_contents(path, len(sql.SQLITE_MAGIC)) != sql.SQLITE_MAGIC:
            raise _wrong_format_error(path, "sqlite")
        return sql.read_sqlite(path, chosen, progress)
    if scheme in ("postgresql", "postgres"):
        return sql.read_postgres(*parse_selector(url, table), progress)
    if scheme == "file":
        return _read_file(Path(unquote(urlsplit(url).path)), TableSelector(table), progress, lines)
    step = (
        "download the file first"
        if scheme in ("http", "https", "ftp", "s3", "gs")
        else _KNOWN_SOURCES
    )
    raise SourceError(f"addresses with {scheme}:// are not read: {step}", file=url)


def _read_file(
    path: Path, chosen: TableSelector, progress: ProgressCallback | None, lines: TextOptions
) -> Table:
    packed = path.suffix.lower() in files.DECOMPRESSOR_BY_SUFFIX
    # A pipe can be read only once.
    regular = os.path.isfile(path) and not packed
    whole = files.read_unpacked if packed else files.read_contents
    opening = files.read_contents(path, _SNIFF_BYTES) if regular else whole(path)
    inner = _unpacked_name(path)
    named = FORMAT_BY_SUFFIX.get(inner.suffix.lower())
    kind = next(
        (kind for magic, kind in _FORMAT_BY_MAGIC.items() if opening.startswith(magic)), None
    )
    if named == "workbook" and opening.startswith(workbook.WORKBOOK_MAGIC):
        kind = named  # a ZIP archive by its first bytes
    else:
        files.refuse_foreign_formats(opening, str(path))
    if kind is None and named in _BINARY_FORMATS:
        raise _wrong_format_error(path, named)
    kind = kind or named or _sniff_format(opening, inner)
    if kind not in ("csv", "tsv"):
        _refuse_names(lines, str(path))
    if kind in _BINARY_FORMATS and not regular:
        how = "packed: unpack it" if packed else "from a pipe: save it to a file"
        raise SourceError(f"{_BINARY_FORMATS[kind]} {how} first", file=str(path))
    if kind == "sqlite":
        return sql.read_sqlite(path, chosen, progress)
    if kind == "workbook":
        return workbook.read_workbook(path, chosen, progress, lines.missing)
    _refuse_table(chosen.table, str(path))
    if kind in ("parquet", "arrow"):
        return frames.from_file(path, _BINARY_FORMATS[kind], progress)
    data = files.read_contents(path) if regular else opening
    if kind == "json":
        return json.read_json(data, inner.stem, str(path), progress)
    delimiter = "\t" if kind == "tsv" else None
    return delimited.read_delimited(data, inner.stem, str(path), delimiter, progress, lines)


def _unpacked_name(path: Path) -> Path:
    """What a file is named inside of what it is packed in."""
    return path.with_suffix("") if path.suffix.lower() in files.DECOMPRESSOR_BY_SUFFIX else path


def _sniff_format(opening: bytes, path: Path) -> str:
    """The kind of a text whose ending says nothing."""
    # The opening may end within a character.
    text = opening.decode("utf-8-sig", errors="ignore")
    if text.lstrip()[:1] in ("{", "["):
        return "json"
    if "\0" not in text and delimited.sniff_delimiter(text)[1]:
        return "csv"
    ending = f"the ending {path.suffix!r}" if path.suffix else "a name without ending"
    raise SourceError(
        f"{ending} tells no format, and neither do the contents: rename it; {_KNOWN_SOURCES}",
        file=str(path),
    )


def _wrong_format_error(path: Path, kind: str) -> SourceError:
    return SourceError(
        f"not {_BINARY_FORMATS[kind]}, whatever its name says (its first bytes are wrong): copy "
        "it again, "
        "or rename it to what it is",
        file=str(path),
    )


def _refuse_names(lines: TextOptions, file: str) -> None:
    if lines.names:
        raise CombinationError(
            f"names= is for CSV and TSV without a line of names, and {mask_password(file)} has "
            "names of its own: leave it out"
        )


def _refuse_table(table: str | None, file: str) -> None:
    if table is not None:
        raise CombinationError(
            f"table={table!r} chooses a table of a database, and {file} has only one: leave it out"
        )
