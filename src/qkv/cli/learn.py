"""`qkv learn`: teach a database from pairs of a query and its right key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli import options, screen
from qkv.cli.command import OK, STOPPED, Result
from qkv.cli.source import named, stored
from qkv.errors import ArgumentError


def learn(
    path: options.Folder,
    pairs: Annotated[
        str,
        typer.Argument(
            metavar="PAIRS",
            help="A table: its first column the query, its second the right key, a third, if any, "
            "how much the pair counts.",
            show_default=False,
        ),
    ],
    epochs: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Go through the pairs at most so often.")
    ] = 10,
    seconds: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Stop after so long and keep the best.")
    ] = None,
    vectors: Annotated[
        bool, typer.Option("--vectors", help="Learn the words' vectors too; wants many pairs.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the state in FILE, and go on from it if it is there."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="The same seed learns the same.")] = 0,
    table: options.Table = None,
) -> Result:
    """Learn from PAIRS of a query and its right key.

    What was learned is kept as a new version of the database PATH. Prints the recall before and
    after, on pairs that were held out: a tenth of 100 or more, none of fewer. Ctrl-C keeps the best
    so far, and nothing where there is none; both end with 130.
    """
    from qkv.database import sources

    columns = list(sources.read(pairs, table=table).columns.values())
    if len(columns) < 2:
        raise ArgumentError(f"{named(pairs)}: expected two columns, the query and its right key")
    with stored(path) as database:
        if database.info()["key_kind"] == "text":
            # A column of text whose cells all happen to be numbers was read as numbers.
            columns[:2] = [[str(cell) for cell in column] for column in columns[:2]]
        with screen.progress("learning") as progress:
            report = database.learn(
                list(zip(*columns[:3], strict=True)),
                epochs=epochs,
                budget_s=seconds,
                vectors=vectors,
                resume=resume,
                seed=seed,
                progress=progress,
            )
        version = database.version
    data: dict[str, Any] = {"path": str(path), "version": version, **screen.fields(report)}

    def show() -> None:
        screen.line(str(report))
        screen.line(f"kept as version {version}; --at {version - 1} is how it was", "dim")

    return Result(data, show, STOPPED if report.interrupted else OK)
