"""Large CSV by DuckDB, where it is installed: the same cells, sooner.

DuckDB splits a file into cells of text where it surely does so as `delimited` does. Where it might
not, this gives None, and that reader does all of it: what is wrong with a file it tells alone.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from qkv.database.sources.sql import literal

LARGE = 2**20
"""Bytes from which it pays to load DuckDB."""


def cells(path: Path, data: bytes, delimiter: str, width: int) -> list[list[str]] | None:
    """The columns of a large file of this width, each cell as text, that of the header first; None
    where DuckDB is not there, or may read it otherwise than we do."""
    place = str(path.absolute())
    # A name with wildcards would be many files.
    if len(data) < LARGE or width < 2 or re.search(r"[*?\[]", place):
        return None
    if find_spec("duckdb") is None or find_spec("pyarrow") is None:
        return None
    if data.startswith(b"\xef\xbb\xbf") or not _regular(data, delimiter, width):
        return None
    import duckdb

    types = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(width))
    # Nothing is written beside the file, and nothing is fetched.
    quiet = {"temp_directory": "", "autoinstall_known_extensions": "false"}
    with duckdb.connect(config=quiet) as connection:
        try:
            found = connection.sql(
                f"SELECT coalesce(COLUMNS(*), '') FROM read_csv({literal(place)}, "
                f"hive_partitioning = false, auto_detect = false, header = false, "
                f"delim = {literal(delimiter)}, quote = '\"', escape = '\"', "
                f"strict_mode = true, columns = {{{types}}})"
            ).to_arrow_table()
        except duckdb.Error:
            return None
        except RuntimeError:  # as DuckDB tells of Ctrl-C
            raise KeyboardInterrupt from None
        return [column.to_pylist() for column in found.columns]


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
