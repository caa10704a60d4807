"""`qkv ask`, `get` and `plot`: query a database."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import arguments, files, options, terminal
from qkv.cli.command import EXIT_NOTHING_FOUND, Result
from qkv.cli.source import is_url, open_source, parse_key
from qkv.database import parsing
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.answer import Answer

MAX_BAR_CHARACTERS = 14
Query = Annotated[
    list[str],
    options.make_argument(
        "QUERY",
        "The query. For a key of several columns, write 'first, second'. "
        "With -, each line of stdin is a query.",
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
    approximate: options.Approximate = None,
    encoder: options.Encoder = None,
    skip: options.Skip = False,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Iterator[Result]:
    """Answer QUERY from all rows, weighted by how well they match.

    Print the value, the rows with the largest weights, and how certain the answer is.
    """
    if source == "-" and query == ["-"]:
        raise ArgumentError(
            "SOURCE and QUERY cannot both be -: stdin is either the table or the queries"
        )
    query_options = build_query_options(source, score, weighting, top) | {"tolerance": tolerance}
    if approximate is not None:
        query_options["approximate"] = approximate
    with open_source(source, read, key=key, value=value, encoder=encoder, skip=skip) as database:
        condition = arguments.join_conditions(where, database.columns) if where else None
        for text in _read_queries(query):
            answer = database.ask(parse_key(database, text), where=condition, **query_options)
            code = 0 if answer.rows else EXIT_NOTHING_FOUND
            data = answer.to_dict() | ({} if answer.mean is None else {"spread": answer.spread})
            text = _index_advice(answer, source, score) if approximate is not None else ""
            yield Result(data, functools.partial(print_answer, answer, text), code)


def get(
    source: options.Source,
    key_text: Annotated[str, options.make_argument("KEY", "The exact key.")],
    all_rows: Annotated[
        bool, options.make_option("--all", "Print every row with the key, oldest first.")
    ] = False,
    key: options.Key = None,
    value: options.Value = None,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Result:
    """Look up KEY exactly.

    If several rows have it, print the newest. If no row has it, print the nearest keys and exit
    with 1.
    """
    with open_source(source, read, key=key, value=value) as database:
        parsed_key = parse_key(database, key_text, "the key")
        newest = database[parsed_key]
        values = list(database.get_all(parsed_key)) or [newest]
    repeats, data = len(values) > 1, {"key": parsed_key, "values": values}
    if not all_rows:
        data = {"key": parsed_key, "value": newest} | ({"rows": len(values)} if repeats else {})

    def print_values() -> None:
        for item in values if all_rows else [newest]:
            terminal.print_line(terminal.format_value(item))
        if repeats and not all_rows:
            terminal.print_note(
                f"{len(values):,} rows have this key; this is the newest. --all prints them all."
            )

    return Result(data, print_values)


def plot(
    source: options.Source,
    query: Query,
    output: Annotated[
        Path,
        options.make_option(
            "--output -o FILE", "Write to this file: .png, .svg, .pdf, or .html for a page."
        ),
    ] = Path("answer.png"),
    key: options.Key = None,
    value: options.Value = None,
    score: options.Score = None,
    weighting: options.Weighting = None,
    top: options.Top = 10,
    where: options.Where = None,
    encoder: options.Encoder = None,
    skip: options.Skip = False,
    read: options.ReadOptions = options.DEFAULT_READ_OPTIONS,
) -> Result:
    """Answer QUERY and plot its weights into a file."""
    if query == ["-"]:
        raise ArgumentError("plot takes one query, not -")
    kinds = (*files.PICTURE_SUFFIXES, ".html")
    files.check_suffix(output, kinds)
    if len(query) > 1 and query[-1].lower().endswith(kinds):
        raise ArgumentError(
            f"{query[-1]} is taken as a part of the query: name the output file with --output"
        )
    with open_source(source, read, key=key, value=value, encoder=encoder, skip=skip) as database:
        query_options = build_query_options(source, score, weighting, top)
        condition = arguments.join_conditions(where, database.columns) if where else None
        answer = database.ask(
            parse_key(database, " ".join(query)), where=condition, **query_options
        )
        if not answer.rows:
            return Result(answer.to_dict(), lambda: print_answer(answer), EXIT_NOTHING_FOUND)
        if output.suffix.lower() == ".html":
            files.write_file(output, answer.to_html().encode())
        else:
            files.write_figure(output, answer.plot())
    data = {**answer.to_dict(), "written": str(output)}
    return Result(data, lambda: terminal.print_line(str(output)))


def print_answer(answer: Answer, advice: str = "") -> None:
    """Print the value, the heaviest rows with bars, and how concentrated the weight is.

    `advice` is printed below.
    """
    from qkv.util.formatting import bar_lengths, format_weight

    if not answer.rows:
        terminal.print_line(f"nothing: {answer.why_nothing}")
        return
    terminal.print_line(_format_answer_value(answer), "bold")
    terminal.print_line()
    plain = terminal.is_ascii_only()
    width = min(MAX_BAR_CHARACTERS, terminal.terminal_width() // 5)
    rows = [
        (
            terminal.render_bar(length, width, ascii_only=plain),
            terminal.format_percent(row.weight)
            if answer.is_normalized
            else format_weight(row.weight),
            terminal.format_cell(row.displayed_key),
            terminal.format_cell(row.value),
        )
        for row, length in zip(
            answer.rows, bar_lengths(row.weight for row in answer.rows), strict=True
        )
    ]
    terminal.print_table(
        ("weight", "", "key", "value"), rows, right=[""], colour=["weight"], uncut=["weight", ""]
    )
    terminal.print_line()
    dot = "|" if plain else "·"
    parts = (
        f"effective rows {answer.effective_rows:,.1f} of {answer.total:,}",
        answer.confidence_text,
        answer.engine,
    )
    terminal.print_line(f" {dot} ".join(parts) + _left_out_note(answer), "dim")
    if answer.error_bound:
        terminal.print_line(answer._error_bound_text, "dim")
    if answer.hint:
        terminal.print_line(answer.hint, "bold")
    if answer.coverage is not None:
        terminal.print_line(answer._coverage_text, "bold" if answer.abstains else "dim")
    if advice:
        terminal.print_line(advice, "bold")


def _index_advice(answer: Answer, source: str, score: str | None) -> str:
    """Return which command builds the index that an exact answer lacked, or ""."""
    reason = answer.engine.partition(", exactly: ")[2]
    is_other = reason.startswith("the index was built for the metric")
    is_missing = reason.startswith("there is no index") and Path(source).is_dir()
    if not is_other and not is_missing:
        return ""
    path = "PATH" if is_url(source) else shlex.quote(source)
    command = f"qkv index {path}" + (f" --score {shlex.quote(score)}" if score else "")
    wrong, _, metric = reason.partition(", not ")
    metric = metric.partition(":")[0]
    why = f"{wrong}: `{command}` replaces it by one for {metric}" if is_other else ""
    return f"All rows were read, because {why or f'there is no index: `{command}` builds it'}."


def build_query_options(
    source: str, score: str | None, weighting: str | None, top: int
) -> dict[str, Any]:
    """Return the arguments of `ask` for these options."""
    # The server parses the names: it may have registered others than this process.
    is_local, weighting = not is_url(source), weighting or "softmax"
    return {
        "score": parsing.parse_score(score) if is_local else score,
        "weighting": parsing.parse_weighting(weighting) if is_local else weighting,
        "top": top,
    }


def _format_answer_value(answer: Answer) -> str:
    """Return the value of an answer as text, with the mean and the spread of numbers."""
    value, mean = terminal.format_value(answer.value), answer.mean
    if not (isinstance(mean, float) and answer.is_normalized):
        return value
    with_spread = terminal.format_with_spread(mean, answer.spread)
    return with_spread if answer.value_is_mean else f"{value}  (mean of all rows {with_spread})"


def _left_out_note(answer: Answer) -> str:
    return f"; {answer.missing_text} left out" if answer.missing else ""


def _read_queries(words: list[str]) -> Iterator[str]:
    if words != ["-"]:
        yield " ".join(words)
        return
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")
