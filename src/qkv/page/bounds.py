"""How much a page may bring or ask for: a small file can unpack to a large table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qkv.errors import ArgumentError, QkvError

ROWS = 1_000_000
COLUMNS = 1_000
CELLS = 10_000_000
BYTES = 2**27
"""Of all cells, unpacked."""
NUMBERS = 2**20
"""Of the vectors that one call gives."""
TEXT = 2**20
"""Characters of a query, or of the keys that one call encodes."""

_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_NAME = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')


def check(path: Path, form: str) -> None:
    """Refuse a file that would be more than these, before it is read as a whole."""
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3"):
        raise ArgumentError(f"this is SQLite, not {form}: export a table of it")
    form = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), form)
    match form:
        case "parquet" | "arrow":
            _unpacked(path, form)
        case "jsonl":
            names: set[bytes] = set()
            for found in _NAME.finditer(data):
                names.add(found[1])
                few("different names", len(names), COLUMNS)
            rows = data.count(b"\n") + 1 if data.lstrip()[:1] == b"{" else data.count(b"{")
            few("rows", rows, ROWS)
            few("cells", rows * len(names), CELLS)
        case _:
            lines = data.count(b"\n") or data.count(b"\r")
            few("lines", lines, ROWS)
            first = re.match(rb"[^\r\n]*", data)
            assert first is not None
            few("columns", max(map(first[0].count, (b",", b";", b"\t", b"|"))) + 1, COLUMNS)
            few("cells", lines + max(map(data.count, (b",", b";", b"\t", b"|"))), CELLS)


def few(what: str, count: int, most: int) -> None:
    """Refuse more than so many."""
    if count > most:
        raise ArgumentError(f"at most {most:,} {what} may come from a page: ask in Python for more")


def _unpacked(path: Path, form: str) -> None:
    try:
        import pyarrow
    except ImportError:
        return  # whoever reads it says so
    try:
        (_parquet if form == "parquet" else _arrow)(path)
    except QkvError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError):
        return  # likewise what is wrong with it


def _parquet(path: Path) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as opened:
        told = opened.metadata
        _shape(told.num_rows, told.num_columns)
        groups = [told.row_group(i) for i in range(told.num_row_groups)]
        few("bytes, unpacked", sum(group.total_byte_size for group in groups), BYTES)
        _size(opened.iter_batches(batch_size=4096))


def _arrow(path: Path) -> None:
    import pyarrow.ipc

    with pyarrow.OSFile(str(path)) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        if not is_file:
            _size(pyarrow.ipc.open_stream(opened))
            return
        reader = pyarrow.ipc.open_file(opened)
        _size(reader.get_batch(i) for i in range(reader.num_record_batches))


def _shape(rows: int, columns: int) -> None:
    few("rows", rows, ROWS)
    few("columns", columns, COLUMNS)
    few("cells", rows * columns, CELLS)


def _size(batches: Any) -> None:
    """The rows and bytes of batches, as many as may be."""
    rows = size = 0
    for batch in batches:
        rows += batch.num_rows
        _shape(rows, batch.num_columns)
        batch.validate(full=True)
        size += sum(map(_bytes, batch.columns))
        few("bytes, unpacked", size, BYTES)


def _bytes(column: Any) -> int:
    """What a column has with every cell written out: one of a dictionary may repeat."""
    from pyarrow import compute, types

    if not types.is_dictionary(column.type):
        return int(column.nbytes)
    words = column.dictionary
    if not (types.is_string(words.type) or types.is_large_string(words.type)):
        return int(column.nbytes + len(column) * (words.nbytes // max(1, len(words)) + 1))
    lengths = compute.take(compute.binary_length(words), column.indices)
    return int(compute.sum(lengths).as_py() or 0)
