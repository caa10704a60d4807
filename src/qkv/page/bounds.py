"""How much a page may bring or ask for: a small file can unpack to a large table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qkv.errors import ArgumentError, QkvError
from qkv.page import packed

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

    told = pyarrow.parquet.read_metadata(path)
    _shape(told.num_rows, told.num_columns)
    columns = [told.schema.column(i) for i in range(told.num_columns)]
    # Words that repeat are written once in the file, and are to be counted before they are not.
    words = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    wide = sum(max(column.length or 0, 0) for column in columns)
    few("bytes, unpacked", wide * told.num_rows, BYTES)
    groups = [told.row_group(i) for i in range(told.num_row_groups)]
    few("bytes, unpacked", sum(group.total_byte_size for group in groups), BYTES)
    with pyarrow.parquet.ParquetFile(path, read_dictionary=words) as opened:
        _size(opened.iter_batches(batch_size=4096))


def _arrow(path: Path) -> None:
    import pyarrow.ipc

    few("bytes, unpacked", packed.length(path.read_bytes()), BYTES)
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
    """What a column has with every cell written out: those of a dictionary may repeat."""
    from pyarrow import compute, types

    kind, rows = column.type, len(column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * rows + _bytes(column.flatten())
    if types.is_struct(kind):
        return rows + sum(map(_bytes, column.flatten()))
    if types.is_dictionary(kind):
        words = column.dictionary
        if _is_text(words.type):
            lengths = compute.take(compute.binary_length(words), column.indices)
            return 4 * rows + int(compute.sum(lengths).as_py() or 0)
        if types.is_primitive(words.type):
            return int(rows * (words.type.bit_width // 8 + 1))
    plain = types.is_primitive, types.is_null, types.is_decimal, types.is_fixed_size_binary
    if _is_text(kind) or any(known(kind) for known in plain):
        return int(column.nbytes)
    raise ArgumentError(
        f"a column of type {kind} may not come from a page: nobody knows its size before it is read"
    )


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kinds = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    return any(known(kind) for known in kinds)
