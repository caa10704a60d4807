"""Print tables, bars and progress, fitted to the terminal, and in colour if it has colours."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from qkv.errors import escape_control_characters
from qkv.util.progress import progress_bar as progress_bar
from qkv.util.types import ProgressCallback

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"bold": 1, "dim": 2, "red": 31}

UNLIMITED_WIDTH = 1 << 20
"""The width of output that is not a terminal, so that no cell is cut."""
COLUMN_GAP = "  "


def format_json(data: Any) -> str:
    """Return one line of strict JSON.

    NaN becomes null, arrays and tuples become lists, and control characters are escaped.

    >>> print(format_json({"key": ("Li", 1), "spread": float("nan"), "text": "\x9b31m"}))
    {"key": ["Li", 1], "spread": null, "text": "\\u009b31m"}
    """
    from qkv.util.formatting import to_jsonable

    text = json.dumps(to_jsonable(data), ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else json.dumps(x)[1:-1] for x in text)


def print_json(data: Any) -> None:
    """Print a line of JSON. Characters that stdout cannot encode are escaped."""
    line = format_json(data)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeError:
        line = json.dumps(json.loads(line))
    print(line, flush=True)


def format_cell(x: Any) -> str:
    """Format a key or a value on one line.

    >>> (
    ...     format_cell(3.14159265),
    ...     format_cell(("Li", 2)),
    ...     format_cell(None),
    ...     format_cell("two\\nlines"),
    ... )
    ('3.14159', 'Li, 2', '–', 'two lines')
    """
    if x is None:
        return "–"
    if isinstance(x, str):
        return " ".join(escape_control_characters(x).split())
    if isinstance(x, float):
        from qkv.util.formatting import format_number

        return format_number(x)
    if isinstance(x, bytes):
        return f"{len(x)} bytes"
    if isinstance(x, tuple | list):
        shown = [format_cell(v) for v in x[:8]]
        return ", ".join(shown + ["…"] * (len(x) > 8))
    if isinstance(x, Mapping):
        return ", ".join(
            f"{escape_control_characters(str(name))}: {format_cell(item)}"
            for name, item in x.items()
        )
    if hasattr(x, "tolist"):
        return format_cell(x.tolist())
    return escape_control_characters(x.isoformat() if hasattr(x, "isoformat") else str(x))


def format_with_spread(value: float, spread: float) -> str:
    """Format a mean and its spread, rounded to the second digit of the spread.

    >>> (
    ...     format_with_spread(74.7813, 4.92642),
    ...     format_with_spread(0.01234, 0.00031),
    ...     format_with_spread(5.0, 4e-154),
    ...     format_with_spread(-2e300, 1e308),
    ... )
    ('74.8 ± 4.9', '0.01234 ± 0.00031', '5 ± 0', '-2e+300 ± 1e+308')
    """
    if math.isnan(spread):  # some values are infinite
        return format_cell(value)
    if spread < abs(value) * sys.float_info.epsilon:
        spread = 0.0  # the mean has no digits that it could change
    if not 1e-15 < spread < 1e15 or abs(value) > 1e9 * spread:
        return f"{format_cell(value)} ± {format_cell(spread)}"
    digits = max(1 - math.floor(math.log10(spread)), 0)
    return f"{value:.{digits}f} ± {spread:.{digits}f}"


def public_fields(record: Any) -> dict[str, Any]:
    """Return the public fields of a dataclass by name."""
    names = (field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if not name.startswith("_")}


def print_pairs(data: Mapping[str, Any]) -> None:
    """Print each name and its value on a line of its own."""
    rows = [(name.replace("_", " "), format_cell(item)) for name, item in data.items()]
    print_table(("name", "what"), rows, uncut=["name"], heading=False)


def format_value(x: Any) -> str:
    """Format a value: text keeps its line breaks, and each column of a mapping gets a line."""
    if isinstance(x, Mapping):
        return "\n".join(
            f"{escape_control_characters(str(name))}: {format_cell(item)}"
            for name, item in x.items()
        )
    return escape_control_characters(x) if isinstance(x, str) else format_cell(x)


def render_bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Return a bar for a share between 0 and 1.

    >>> render_bar(0.5, 4), render_bar(0.5, 4, ascii_only=True)
    ('██', '##')
    """
    from qkv.util.formatting import format_bar as blocks

    share = share if share == share else 0.0
    return "#" * round(min(max(share, 0.0), 1.0) * width) if ascii_only else blocks(share, width)


def format_percent(weight: float) -> str:
    """Format a weight as a percentage.

    >>> format_percent(0.623), format_percent(0.004), format_percent(0.0), format_percent(1.0)
    ('62 %', '0.4 %', '0 %', '100 %')
    """
    if weight != weight:
        return "NaN"
    if 0 < weight < 0.00005:
        return "<0.01 %"
    x = 100 * weight
    digits = 0 if x == 0 or abs(x) >= 9.95 else 1 if abs(x) >= 0.095 else 2
    return f"{x:.{digits}f} %"


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether a stream, by default stdout, is a terminal."""
    stream = stream or sys.stdout
    return bool(getattr(stream, "isatty", lambda: False)())


def make_console() -> Console:
    """Return a rich console for the current stdout, because `sys.stdout` may have been replaced."""
    from rich.console import Console

    width = None if is_terminal() else UNLIMITED_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def is_ascii_only(stream: TextIO | None = None) -> bool:
    """Return whether the stream's encoding lacks the block characters that bars use."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    try:
        "█▏·→".encode(encoding)
    except (UnicodeError, LookupError):
        return True
    return False


def make_encodable(stream: TextIO) -> None:
    """Set the stream to print a question mark for characters that its encoding does not have."""
    fails = ("strict", "surrogateescape")  # in the C locale, Python uses the second one
    if isinstance(stream, io.TextIOWrapper) and stream.errors in fails:
        stream.reconfigure(errors="replace")


def print_line(text: str = "", style: str = "") -> None:
    """Print a line on stdout without wrapping it."""
    print(apply_style(text, style))


def apply_style(text: str, style: str) -> str:
    """Return the text in one of STYLES if stdout supports styles. rich would be slow to import."""
    shown = "FORCE_COLOR" in os.environ or (is_terminal() and os.environ.get("TERM") != "dumb")
    coloured = STYLES.get(style, 0) >= 30
    if not (style and text and shown) or (coloured and os.environ.get("NO_COLOR")):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def terminal_width() -> int:
    """Return the width of the terminal in characters; `UNLIMITED_WIDTH` for other output."""
    return shutil.get_terminal_size().columns if is_terminal() else UNLIMITED_WIDTH


def print_note(text: str) -> None:
    """Print a line on stderr: notes are not part of the result."""
    make_encodable(sys.stderr)
    print(escape_control_characters(text), file=sys.stderr)


def count_fitting_columns(lines: Sequence[Sequence[str]], min_characters: int = 8) -> int:
    """Return how many columns fit the terminal if cells are cut to `min_characters`.

    The result is at least one.
    """
    from rich.cells import cell_len

    available, count = terminal_width() + len(COLUMN_GAP), 0
    for column in zip(*lines, strict=True):
        available -= min(max(map(cell_len, column)), min_characters) + len(COLUMN_GAP)
        if available < 0:
            break
        count += 1
    return max(count, 1)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    colour: Sequence[str] = (),
    uncut: Sequence[str] = (),
    heading: bool = True,
) -> None:
    """Print a table on stdout. In a terminal, long cells are cut and end with an ellipsis.

    `right`, `colour` and `uncut` list the headings of the columns that are right-aligned, red, or
    never cut.
    """
    from rich.cells import cell_len, set_cell_size

    lines = [headings, *rows] if heading else rows
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    if is_terminal():
        cut = [i for i, name in enumerate(headings) if name not in uncut]
        available = terminal_width() - sum(widths) - len(COLUMN_GAP) * (len(widths) - 1)
        available += sum(widths[i] for i in cut)
        for left, i in zip(
            range(len(cut), 0, -1), sorted(cut, key=widths.__getitem__), strict=True
        ):
            widths[i] = max(min(widths[i], available // left), 2)
            available -= widths[i]
    for cells in lines:
        drawn: list[str] = []
        for name, size, item in zip(headings, widths, cells, strict=True):
            if cell_len(item) > size:
                item = set_cell_size(item, size - 1) + "…"
            pad = " " * (size - cell_len(item))
            style = "dim" if cells is headings else "red" if name in colour else ""
            shown = apply_style(item, style)
            drawn.append(pad + shown if name in right else shown + pad)
        print(COLUMN_GAP.join(drawn).rstrip())


@contextlib.contextmanager
def show_progress(label: str) -> Iterator[ProgressCallback | None]:
    """Show a progress bar on stderr; yield the function (done, total) that moves it.

    Yields None if stderr is not a terminal. The bar does not appear if the work is short.
    """
    if not is_terminal(sys.stderr):
        yield None
        return
    with progress_bar(label) as moved:
        yield moved
