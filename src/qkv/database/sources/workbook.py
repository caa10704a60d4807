"""Read a sheet of an Excel (.xlsx, .xlsm, .xlsb, .xls) or OpenDocument (.ods) workbook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkv.database.sources.table import (
    SourceError,
    Table,
    TableSelector,
    build_table,
    check_column_names,
    no_rows_error,
    to_plain_cell,
)
from qkv.errors import require_extra
from qkv.util.types import ProgressCallback

WORKBOOK_MAGIC = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")


def read_workbook(
    path: Path,
    selector: TableSelector,
    progress: ProgressCallback | None,
    missing: Sequence[str] | None,
) -> Table:
    """Read the selected sheet. By default, it is the only visible sheet that is not empty.

    The first row contains the column names. A column of whole numbers becomes ints. A date among
    cells of other types becomes ISO text. For a formula, the saved result is read. A cell is
    missing if it is empty, an error, or one of the words `missing`. Empty rows are skipped, and so
    are empty columns without a name.
    """
    with require_extra("tables", "reading a workbook needs python-calamine"):
        import python_calamine as calamine
    file = str(path)
    try:
        with calamine.load_workbook(path) as book:
            name = selector.choose_table(_list_sheets(calamine, book, selector.table), file)
            sheet = book.get_sheet_by_name(name)
            rows, (top, _) = sheet.to_python(), sheet.start or (0, 0)
    except calamine.PasswordError:
        raise SourceError(
            "the workbook is protected with a password: save it without a password", file=file
        ) from None
    except calamine.CalamineError as error:
        step = "open and save the workbook again, or save the sheet as CSV"
        raise SourceError(f"the workbook cannot be read ({error}): {step}", file=file) from None
    rows = [row for row in rows if any(x != "" for x in row)]
    columns = [column for column in zip(*rows, strict=True) if any(x != "" for x in column)]
    names = [str(*_floats_to_ints([to_plain_cell(column[0])])) for column in columns]
    check_column_names(names, file, top + 1)
    if len(rows) == 1:
        raise no_rows_error(file)
    if progress is not None:
        progress(len(rows) - 1, len(rows) - 1)
    words = {*(missing or ()), ""}
    cells = [
        _floats_to_ints(
            [None if isinstance(x, str) and x.strip() in words else x for x in column[1:]]
        )
        for column in columns
    ]
    return build_table(name, names, cells, file)


def _list_sheets(calamine: Any, book: Any, selected: str | None) -> list[str]:
    """Return the names of the visible sheets with content; of all sheets if one is selected."""
    sheets = [x for x in book.sheets_metadata if x.typ == calamine.SheetTypeEnum.WorkSheet]
    if selected is None:
        visible = calamine.SheetVisibleEnum.Visible
        sheets = [
            x for x in sheets if x.visible == visible and book.get_sheet_by_name(x.name).height
        ]
    return [x.name for x in sheets]


def _floats_to_ints(cells: list[Any]) -> list[Any]:
    """Return a column of whole numbers as ints, because Excel stores all numbers as floats.

    Other columns are returned unchanged.
    """
    floats = [x for x in cells if type(x) is float]
    if not all(x.is_integer() and abs(x) < 2**53 for x in floats):
        return cells
    return [int(x) if type(x) is float else x for x in cells]
