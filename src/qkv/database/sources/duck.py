"""Large CSV and JSON lines by DuckDB, where it is installed: the same cells, sooner.

The readers beside say what a table means. DuckDB splits a file into cells of text where it surely
does so as they do, and they make values of them. Where it might not, these functions give None, and
the readers do all of it: what is wrong with a file is told by them alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

LARGE = 2**20
"""Bytes from which it pays to load DuckDB."""

T = TypeVar("T")
Run = Callable[[str], Any]
"""SQL in, an Arrow table out."""


class _Unsure(Exception):
    """DuckDB may read this otherwise than we do."""


def lines(path: Path, data: bytes) -> dict[str, list[str]] | None:
    """The columns of JSON lines, each cell as JSON; names in the order they first appear."""

    def read(run: Run, file: str) -> dict[str, list[str]]:
        # A comma before a bracket is an error of JSON that DuckDB forgives.
        kinds = run(
            "SELECT any_value(k), bool_or(odd) FROM (SELECT json_keys(json) AS k, "
            r"regexp_matches(json::VARCHAR, ',\s*[]}]') AS odd, row_number() OVER () AS n "
            f"FROM read_ndjson_objects({file})) GROUP BY k ORDER BY min(n)"
        )
        names = list(dict.fromkeys(name for keys in kinds[0].to_pylist() for name in keys or ()))
        # To DuckDB "a" and "A" are one column.
        if any(kinds[1].to_pylist()) or len({name.lower() for name in names}) < len(names):
            raise _Unsure
        types = ", ".join(f"{_literal(name)}: 'JSON'" for name in names)
        found = run(
            f"SELECT coalesce(COLUMNS(*), 'null') FROM read_json({file}, "
            f"format = 'newline_delimited', records = true, columns = {{{types}}})"
        )
        return {name: column.to_pylist() for name, column in zip(names, found.columns, strict=True)}

    return _tried(path, data, read)


def cells(path: Path, data: bytes, delimiter: str, width: int) -> list[list[str]] | None:
    """The columns of a CSV file of this width, each cell as text, that of the header first."""

    def read(run: Run, file: str) -> list[list[str]]:
        if width < 2 or not _regular(data, delimiter, width):
            raise _Unsure
        types = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(width))
        found = run(
            f"SELECT coalesce(COLUMNS(*), '') FROM read_csv({file}, auto_detect = false, "
            f"header = false, delim = {_literal(delimiter)}, quote = '\"', escape = '\"', "
            f"strict_mode = true, columns = {{{types}}})"
        )
        return [column.to_pylist() for column in found.columns]

    return _tried(path, data, read)


def _regular(data: bytes, delimiter: str, width: int) -> bool:
    """Whether quotes stand around whole cells, lines end alike, none is blank, and all have as many
    cells: one that is empty at the end of a line too long is forgiven by DuckDB."""
    returns, feeds = data.count(b"\r"), data.count(b"\n")
    if b"\0" in data or (returns and not returns == feeds == data.count(b"\r\n")):
        return False
    plain = b"\n" + (data.replace(b"\r", b"") if returns else data)
    if b"\n\n" in plain:
        return False
    marks = np.frombuffer(plain.removesuffix(b"\n").replace(b'""', b"") + b"\n", np.uint8)
    quotes, ends = marks == ord('"'), [ord(delimiter), ord("\n")]
    places = np.flatnonzero(quotes)
    outside = np.cumsum(quotes, dtype=np.uint8) & 1 == 0
    cells, lines = (np.count_nonzero((marks == end) & outside) for end in ends)
    return (
        len(places) % 2 == 0
        and cells == (lines - 1) * (width - 1)
        and bool(np.isin(marks[places[0::2] - 1], ends).all())
        and bool(np.isin(marks[places[1::2] + 1], ends).all())
    )


def _tried(path: Path, data: bytes, read: Callable[[Run, str], T]) -> T | None:
    """What `read` makes of a large file; None where DuckDB is not there, unsure, or fails."""
    place = str(path.absolute())
    # A name with wildcards would be many files; DuckDB's JSON takes no byte order mark.
    if len(data) < LARGE or re.search(r"[*?\[]", place) or data.startswith(b"\xef\xbb\xbf"):
        return None
    if find_spec("duckdb") is None or find_spec("pyarrow") is None:
        return None
    import duckdb

    # Nothing is written beside the file, and nothing is fetched.
    quiet = {"temp_directory": "", "autoinstall_known_extensions": "false"}
    with duckdb.connect(config=quiet) as connection:
        try:
            return read(
                lambda sql: connection.sql(sql).to_arrow_table(),
                f"{_literal(place)}, hive_partitioning = false",
            )
        except (duckdb.Error, _Unsure):
            return None
        except RuntimeError:  # as DuckDB tells of Ctrl-C
            raise KeyboardInterrupt from None


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
