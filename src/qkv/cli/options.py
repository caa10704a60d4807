"""The arguments and options that several commands share, each worded once."""

from __future__ import annotations

import functools
import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def _files(incomplete: str) -> list[str]:
    """The files and folders that begin so, for the shell's completion."""
    found = sorted(glob.glob(glob.escape(incomplete) + "*"))
    return [name + os.sep if os.path.isdir(name) else name for name in found]


def _scores(incomplete: str) -> list[str]:
    from qkv.scores import NAMES

    return [x for x in NAMES if x.startswith(incomplete) and not NAMES.needs(x)]


def _weightings(incomplete: str) -> list[str]:
    from qkv.weightings import NAMES

    names = (f"{x}:" if NAMES.needs(x) else x for x in NAMES)
    return [name for name in names if name.startswith(incomplete)]


def _encoders(incomplete: str) -> list[str]:
    from qkv.database.encoders import ENCODERS

    return [name for name in ENCODERS if name.startswith(incomplete)]


def _no_url(path: Path) -> Path:
    if str(path).startswith(("http:/", "https:/")):
        raise typer.BadParameter("this works on the folder itself, where it lies, not on a URL")
    return path


_FOLDER = "The folder of a database, such as books.qkv"
_named = functools.partial(typer.Argument, show_default=False, autocompletion=_files)
Source = Annotated[
    str,
    _named(
        metavar="SOURCE",
        help="A .qkv folder, the URL of one that is served, a CSV, TSV, JSON, Parquet, Arrow, "
        "Excel or SQLite file, a pattern of such ('logs/*.csv'), sqlite:///FILE?table=NAME, a "
        "PostgreSQL URL, or - for CSV on stdin.",
    ),
]
Folder = Annotated[Path, _named(metavar="PATH", help=f"{_FOLDER}.", callback=_no_url)]
Place = Annotated[str, _named(metavar="PATH", help=f"{_FOLDER}, or the URL of one that is served.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TEXT",
        envvar="QKV_TOKEN",
        help="What a server asks for, where the database is one's.",
        show_default=False,
    ),
]
Key = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        "-k",
        metavar="COLUMN",
        help="The column to ask by; give it again for a key of several columns.",
    ),
]
Value = Annotated[
    list[str] | None,
    typer.Option(
        "--value",
        "-v",
        metavar="COLUMN",
        help="The column to answer with; give it again for several columns.",
    ),
]
Table = Annotated[
    str | None,
    typer.Option("--table", metavar="NAME", help="Which table, where the source has several."),
]
Missing = Annotated[
    list[str] | None,
    typer.Option(
        "--missing",
        metavar="WORD",
        help="A word for a missing cell in CSV, in place of NA, NaN, null …; again for more. "
        "'' means none: then NA is text.",
    ),
]
Names = Annotated[
    str | None,
    typer.Option(
        "--names",
        metavar="NAME,…",
        help="The columns' names, for CSV whose first line is a row already.",
    ),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        "-e",
        metavar="NAME",
        help="How keys become vectors: words, characters, numbers … By default their type decides.",
        autocompletion=_encoders,
    ),
]
Score = Annotated[
    str | None,
    typer.Option(
        "--score",
        "-s",
        metavar="NAME",
        help="How keys are compared with the query: cosine, gaussian:0.5 …",
        autocompletion=_scores,
    ),
]
Weighting = Annotated[
    str | None,
    typer.Option(
        "--weighting",
        "-w",
        metavar="NAME",
        help="How scores become weights: softmax, hard, average, topk:5, entmax15 …",
        autocompletion=_weightings,
    ),
]
Top = Annotated[
    int, typer.Option("--top", "-n", metavar="ROWS", min=1, help="How many rows to show.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Only rows that pass: genre=fantasy, or \"1900 <= year < 1950 and 'war' in summary\". "
        "Given again, all must pass.",
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="ERROR",
        min=0.0,
        help="How far the weights may lie from the exact ones, proven: half the sum of the "
        "differences. A large store then reads few vectors in full.",
    ),
]
At = Annotated[
    int | None,
    typer.Option("--at", metavar="VERSION", help="As of this version; see `qkv versions`."),
]
Skip = Annotated[
    bool,
    typer.Option("--skip-damaged", help="Leave out rows whose file is damaged, and say how many."),
]


@dataclass(frozen=True)
class Read:
    """The options of every command that reads a SOURCE, as one parameter of its function."""

    at: At = None
    table: Table = None
    missing: Missing = None
    names: Names = None
    token: Token = None

    def of_tables(self) -> dict[str, Any]:
        """Those that mean nothing to a database.

        >>> Read(names="city, people").of_tables()["names"]
        ['city', 'people']
        """
        names = None if self.names is None else [name.strip() for name in self.names.split(",")]
        return {"table": self.table, "missing": self.missing or None, "names": names}


READ = Read()
