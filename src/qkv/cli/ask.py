"""`qkv ask`, `get` and `plot`: questions to a database."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import files, options, screen, values
from qkv.cli.command import NOTHING, Result
from qkv.cli.source import cell, is_url, opened
from qkv.database import spelled
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.answer import Answer

BAR = 14
Query = Annotated[
    list[str],
    options.argument(
        "QUERY",
        "What to ask. A key of several columns: 'first, second'. "
        "With - each line of stdin is a query.",
    ),
]


def ask(
    source: options.Source,
    query: Query,
    key: options.Key = None,
    value: options.Value = None,
    score: options.Score = None,
    weighting: options.Weighting = None,
    top: options.Top = 5,
    where: options.Where = None,
    tolerance: options.Tolerance = None,
    encoder: options.Encoder = None,
    skip: options.Skip = False,
    read: options.Read = options.READ,
) -> Iterator[Result]:
    """Answer QUERY from all rows, the best matches most.

    Prints the value, then the heaviest rows with their weights, then how sure the answer is.
    """
    if source == "-" and query == ["-"]:
        raise ArgumentError("stdin cannot be both the table and the queries")
    how = _how(source, score, weighting, top) | {"tolerance": tolerance}
    with opened(source, read, key=key, value=value, encoder=encoder, skip=skip) as database:
        how["where"] = values.where(where, database.columns) if where else None
        for text in _queries(query):
            answer = database.ask(cell(database, text), **how)
            code = 0 if answer.rows else NOTHING
            yield Result(answer.to_dict(), functools.partial(draw, answer), code)


def get(
    source: options.Source,
    key_text: Annotated[str, options.argument("KEY", "The key, exactly.")],
    all_rows: Annotated[
        bool, options.option("--all", "Every value of a key that repeats, oldest first.")
    ] = False,
    key: options.Key = None,
    value: options.Value = None,
    read: options.Read = options.READ,
) -> Result:
    """Look KEY up exactly.

    Where several rows have it, the newest is printed; --all prints every one. Where none has it,
    the nearest keys are named and the exit code is 1.
    """
    with opened(source, read, key=key, value=value) as database:
        wanted = cell(database, key_text, "the key")
        newest = database[wanted]
        found = list(database.all(wanted)) or [newest]
    repeats, data = len(found) > 1, {"key": wanted, "values": found}
    if not all_rows:
        data = {"key": wanted, "value": newest} | ({"rows": len(found)} if repeats else {})

    def show() -> None:
        for item in found if all_rows else [newest]:
            screen.line(screen.text(item))
        if repeats and not all_rows:
            told = "rows have this key; this is the newest. --all prints them all."
            screen.note(f"{len(found):,} {told}")

    return Result(data, show)


def plot(
    source: options.Source,
    query: Query,
    output: Annotated[
        Path,
        options.option("--output -o FILE", "The picture: .png, .svg, .pdf; or .html for a page."),
    ] = Path("answer.png"),
    key: options.Key = None,
    value: options.Value = None,
    score: options.Score = None,
    weighting: options.Weighting = None,
    top: options.Top = 10,
    where: options.Where = None,
    encoder: options.Encoder = None,
    skip: options.Skip = False,
    read: options.Read = options.READ,
) -> Result:
    """Ask, and draw the answer's weights into a file."""
    if query == ["-"]:
        raise ArgumentError("plot draws one query: - would be many")
    kinds = (*files.PICTURES, ".html")
    files.check_name(output, kinds)
    if len(query) > 1 and query[-1].lower().endswith(kinds):
        raise ArgumentError(f"{query[-1]} is read as part of the query: name a file with --output")
    with opened(source, read, key=key, value=value, encoder=encoder, skip=skip) as database:
        how = _how(source, score, weighting, top)
        how["where"] = values.where(where, database.columns) if where else None
        answer = database.ask(cell(database, " ".join(query)), **how)
        if not answer.rows:
            return Result(answer.to_dict(), lambda: draw(answer), NOTHING)
        if output.suffix.lower() == ".html":
            files.write(output, answer.to_html().encode())
        else:
            files.write_figure(output, answer.plot())
    data = {**answer.to_dict(), "written": str(output)}
    return Result(data, lambda: screen.line(str(output)))


def _how(source: str, score: str | None, weighting: str | None, top: int) -> dict[str, Any]:
    known, weighting = not is_url(source), weighting or "softmax"  # a server knows its own names
    return {
        "score": spelled.score(score) if known else score,
        "weighting": spelled.weighting(weighting) if known else weighting,
        "top": top,
    }


def draw(answer: Answer) -> None:
    """The value, the rows with bars, and a line on how sure it is."""
    from qkv.told import figure, lengths

    if not answer.rows:
        screen.line(f"nothing: {answer.why_nothing}")
        return
    mean = isinstance(answer.value, float) and not answer.values and answer.shares
    value = screen.around(answer.value, answer.spread) if mean else screen.text(answer.value)
    screen.line(value, "bold")
    screen.line()
    plain = screen.ascii_only()
    width = min(BAR, screen.width() // 5)
    rows = [
        (
            screen.bar(long, width, ascii_only=plain),
            screen.percent(row.weight) if answer.shares else figure(row.weight),
            screen.cell(row.key),
            screen.cell(row.value),
        )
        for row, long in zip(answer.rows, lengths(row.weight for row in answer.rows), strict=True)
    ]
    screen.table(
        ("weight", "", "key", "value"), rows, right=[""], colour=["weight"], whole=["weight", ""]
    )
    screen.line()
    dot = "|" if plain else "·"
    parts = (
        f"effective rows {answer.effective_rows:,.1f} of {answer.total:,}",
        answer.sureness,
        answer.engine,
    )
    screen.line(f" {dot} ".join(parts) + _left(answer), "dim")
    if answer.error_bound:
        screen.line(answer.nearness, "dim")
    if answer.hint:
        screen.line(answer.hint, "bold")
    if answer.coverage is not None:
        screen.line(answer.fit, "bold" if answer.abstains else "dim")


def _left(answer: Answer) -> str:
    return f"; {answer.left_out} left out" if answer.missing else ""


def _queries(words: list[str]) -> Iterator[str]:
    if words != ["-"]:
        yield " ".join(words)
        return
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")
