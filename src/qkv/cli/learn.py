"""`qkv learn` and `calibrate`, which learn from pairs of a query and its right key; `qkv index`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import options, terminal
from qkv.cli.command import EXIT_OK, EXIT_STOPPED, Result
from qkv.cli.source import open_store, redact_source
from qkv.database import parsing
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.database import Database


PAIRS_HELP = "A table: the first column is the query, the second the right key"
Pairs = Annotated[str, options.make_argument("PAIRS", f"{PAIRS_HELP}.")]
WeightedPairs = Annotated[
    str, options.make_argument("PAIRS", f"{PAIRS_HELP}, an optional third the weight of the pair.")
]


def learn(
    path: options.Folder,
    pairs: WeightedPairs,
    epochs: Annotated[
        int, options.make_option("NUMBER", "Make at most this many passes over the pairs.", min=1)
    ] = 10,
    seconds: Annotated[
        float | None,
        options.make_option("NUMBER", "Stop after this many seconds and keep the best state."),
    ] = None,
    vectors: Annotated[
        bool, options.make_option("--vectors", "Learn the word vectors too. This needs many pairs.")
    ] = False,
    resume: Annotated[
        Path | None,
        options.make_option(
            "FILE", "Save the training state in FILE. If FILE exists, resume from it."
        ),
    ] = None,
    seed: Annotated[int, options.make_option("NUMBER", "Set the random seed.")] = 0,
    table: options.TableName = None,
) -> Result:
    """Learn from PAIRS of a query and its right key.

    Save the result as a new version of the database PATH. Of 100 or more pairs, a tenth is held
    out: print the recall on it before and after. Ctrl-C saves the best state so far, if any, and
    exits with 130.
    """
    with open_store(path) as database:
        columns = _read_pairs(pairs, table, database)
        with terminal.show_progress("learning") as progress:
            report = database.learn(
                list(zip(*columns[:3], strict=True)),
                epochs=epochs,
                budget_s=seconds,
                vectors=vectors,
                resume=resume,
                seed=seed,
                progress=progress,
            )
        code = EXIT_STOPPED if report.interrupted else EXIT_OK
        return _version_result(path, database.version, report, terminal.public_fields(report), code)


def calibrate(
    path: options.Folder,
    pairs: Pairs,
    coverage: Annotated[
        float,
        options.make_option(
            "SHARE", "Set the probability that the prediction set contains the right row."
        ),
    ] = 0.9,
    table: options.TableName = None,
) -> Result:
    """Calibrate prediction sets on PAIRS.

    Each later answer has a set of rows that contains the right row with the probability --coverage.
    If no row fits the query, the answer abstains. The calibration is saved as a new version of the
    database PATH. Use other pairs than for `qkv learn`.
    """
    with open_store(path) as database:
        columns = _read_pairs(pairs, table, database)
        calibration = database.calibrate(list(zip(*columns[:2], strict=True)), coverage)
        return _version_result(path, database.version, calibration, calibration.to_dict())


def index(
    path: options.Folder,
    recall: Annotated[
        float,
        options.make_option("SHARE", "Find at least this share of the ten best rows on average."),
    ] = 0.95,
    score: options.Score = None,
    drop: Annotated[bool, options.make_option("--drop", "Remove the index.")] = False,
) -> Result:
    """Build the index that `qkv ask --approximate` uses.

    Print what it achieves on held-out keys. After rows were added, the same command adds what is
    missing. Ctrl-C keeps the finished parts.
    """
    with open_store(path) as database:
        if drop:
            count = database.drop_index()
            text = f"removed {count:,} files" if count else "there was no index"
            return Result({"path": str(path), "removed": count}, lambda: terminal.print_line(text))
        with terminal.show_progress("indexing") as progress:
            report = database.index(
                recall=recall, score=parsing.parse_score(score), progress=progress
            )
        return _version_result(path, database.version, report, report.to_dict())


def _version_result(
    path: Path, version: int, report: Any, data: dict[str, Any], code: int = EXIT_OK
) -> Result:
    """Return the result of a command that saved `report` as a new version."""

    def print_version() -> None:
        terminal.print_line(str(report))
        terminal.print_line(
            f"saved as version {version}; --at {version - 1} reads the version before it", "dim"
        )

    return Result({"path": str(path), "version": version, **data}, print_version, code)


def _read_pairs(pairs: str, table: str | None, database: Database) -> list[list[Any]]:
    """Return the columns of a table of pairs. The first two are parsed like the keys."""
    from qkv.database import sources
    from qkv.database.sources.type_inference import parse_numbers

    text = database.info()["key_kind"] == "text"
    columns = list(sources.read(pairs, table=table, text=text).columns.values())
    if len(columns) < 2:
        raise ArgumentError(
            f"{redact_source(pairs)}: expected two columns, the query and its right key"
        )
    if text:  # in a workbook or SQLite, the cells may be numbers
        columns[:2] = [[str(cell) for cell in column] for column in columns[:2]]
        for position, column in enumerate(columns[2:], 2):  # weights are numbers
            if {*map(type, column)} <= {str, type(None)}:
                columns[position] = parse_numbers([cell or "" for cell in column], ())
    return columns
