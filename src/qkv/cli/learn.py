"""`qkv learn` and `calibrate`: what pairs of a query and its right key tell a database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from qkv.cli import options, terminal
from qkv.cli.command import EXIT_OK, EXIT_STOPPED, Result
from qkv.cli.source import open_store, redact_source
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.database import Database


PAIRS_HELP = "A table: its first column the query, its second the right key"
Pairs = Annotated[str, options.make_argument("PAIRS", f"{PAIRS_HELP}.")]
WeightedPairs = Annotated[
    str, options.make_argument("PAIRS", f"{PAIRS_HELP}, a third, if any, how much the pair counts.")
]


def learn(
    path: options.Folder,
    pairs: WeightedPairs,
    epochs: Annotated[
        int, options.make_option("NUMBER", "Go through the pairs at most so often.", min=1)
    ] = 10,
    seconds: Annotated[
        float | None, options.make_option("NUMBER", "Stop after so long and keep the best.")
    ] = None,
    vectors: Annotated[
        bool, options.make_option("--vectors", "Learn the words' vectors too; wants many pairs.")
    ] = False,
    resume: Annotated[
        Path | None,
        options.make_option("FILE", "Keep the state in FILE, and go on from it if it is there."),
    ] = None,
    seed: Annotated[int, options.make_option("NUMBER", "The same seed learns the same.")] = 0,
    table: options.TableName = None,
) -> Result:
    """Learn from PAIRS of a query and its right key.

    What was learned is kept as a new version of the database PATH. Prints the recall before and
    after, on pairs that were held out: a tenth of 100 or more, none of fewer. Ctrl-C keeps the best
    so far, and nothing where there is none; both end with 130.
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
        float, options.make_option("SHARE", "How often the set of an answer has the right row.")
    ] = 0.9,
    table: options.TableName = None,
) -> Result:
    """Learn from PAIRS when to be silent.

    From then on an answer has a set of rows, which holds the right one as often as --coverage says,
    or it abstains. That is kept as a new version of the database PATH. Give pairs that it did not
    learn from.
    """
    with open_store(path) as database:
        columns = _read_pairs(pairs, table, database)
        promise = database.calibrate(list(zip(*columns[:2], strict=True)), coverage)
        return _version_result(path, database.version, promise, promise.to_dict())


def _version_result(
    path: Path, version: int, found: Any, told: dict[str, Any], code: int = EXIT_OK
) -> Result:
    """What was found of pairs, and the version that has it."""

    def print_version() -> None:
        terminal.print_line(str(found))
        terminal.print_line(f"kept as version {version}; --at {version - 1} is how it was", "dim")

    return Result({"path": str(path), "version": version, **told}, print_version, code)


def _read_pairs(pairs: str, table: str | None, database: Database) -> list[list[Any]]:
    """The columns of a table of pairs, the first two of the kind that the keys are."""
    from qkv.database import sources
    from qkv.database.sources.type_inference import parse_numbers

    text = database.info()["key_kind"] == "text"
    columns = list(sources.read(pairs, table=table, text=text).columns.values())
    if len(columns) < 2:
        raise ArgumentError(
            f"{redact_source(pairs)}: expected two columns, the query and its right key"
        )
    if text:  # a workbook or SQLite may have kept them as numbers
        columns[:2] = [[str(cell) for cell in column] for column in columns[:2]]
        for place, column in enumerate(columns[2:], 2):  # weights are numbers
            if {*map(type, column)} <= {str, type(None)}:
                columns[place] = parse_numbers([cell or "" for cell in column], ())
    return columns
