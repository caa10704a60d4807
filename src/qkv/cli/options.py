"""The arguments and options that several commands share, each worded once."""

from __future__ import annotations

import functools
import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def _complete_files(incomplete: str) -> list[str]:
    """The files and folders that begin so, for the shell's completion."""
    found = sorted(glob.glob(glob.escape(incomplete) + "*"))
    return [name + os.sep if os.path.isdir(name) else name for name in found]


def _complete_scores(incomplete: str) -> list[str]:
    from qkv.scores import NAMES

    return [x for x in NAMES if x.startswith(incomplete) and not NAMES.required_parameters(x)]


def _complete_weightings(incomplete: str) -> list[str]:
    from qkv.weightings import NAMES

    names = (f"{x}:" if NAMES.required_parameters(x) else x for x in NAMES)
    return [name for name in names if name.startswith(incomplete)]


def _complete_encoders(incomplete: str) -> list[str]:
    from qkv.database.encoders import ENCODERS

    return [name for name in ENCODERS if name.startswith(incomplete)]


def _reject_url(path: Path) -> Path:
    if str(path).startswith(("http:/", "https:/")):
        raise typer.BadParameter("this works on the folder itself, where it lies, not on a URL")
    return path


_FOLDER_HELP = "The folder of a database, such as books.qkv"


def make_option(form: str, help: str, **more: Any) -> Any:
    """An option in the form that its help shows, "--key -k COLUMN"; without flags, by the name of
    its parameter."""
    flags = [word for word in form.split() if word.startswith("-")]
    metavar = next((word for word in form.split() if word not in flags), None)
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def make_argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


_path_argument = functools.partial(make_argument, autocompletion=_complete_files)
Source = Annotated[
    str,
    _path_argument(
        "SOURCE",
        "A .qkv folder, the URL of one that is served, a CSV, TSV, JSON, Parquet, Arrow, "
        "Excel or SQLite file, a pattern of such ('logs/*.csv'), sqlite:///FILE?table=NAME, a "
        "PostgreSQL URL, or - for CSV on stdin.",
    ),
]
Folder = Annotated[Path, _path_argument("PATH", f"{_FOLDER_HELP}.", callback=_reject_url)]
FolderOrUrl = Annotated[
    str, _path_argument("PATH", f"{_FOLDER_HELP}, or the URL of one that is served.")
]
Token = Annotated[
    str | None,
    make_option(
        "--token TEXT", "What a server asks for, where the database is one's.", envvar="QKV_TOKEN"
    ),
]
Key = Annotated[
    list[str] | None,
    make_option(
        "--key -k COLUMN", "The column to ask by; give it again for a key of several columns."
    ),
]
Value = Annotated[
    list[str] | None,
    make_option(
        "--value -v COLUMN", "The column to answer with; give it again for several columns."
    ),
]
TableName = Annotated[
    str | None, make_option("--table NAME", "Which table, where the source has several.")
]
Missing = Annotated[
    list[str] | None,
    make_option(
        "--missing WORD",
        "A word for a missing cell in CSV, in place of NA, NaN, null …; again for more. "
        "'' means none: then NA is text.",
    ),
]
Names = Annotated[
    str | None,
    make_option("--names NAME,…", "The columns' names, for CSV whose first line is a row already."),
]
Encoder = Annotated[
    str | None,
    make_option(
        "--encoder -e NAME",
        "How keys become vectors: words, characters, numbers … By default their type decides.",
        autocompletion=_complete_encoders,
    ),
]
Score = Annotated[
    str | None,
    make_option(
        "--score -s NAME",
        "How keys are compared with the query: cosine, gaussian:0.5 …",
        autocompletion=_complete_scores,
    ),
]
Weighting = Annotated[
    str | None,
    make_option(
        "--weighting -w NAME",
        "How scores become weights: softmax, hard, average, topk:5, entmax15 …",
        autocompletion=_complete_weightings,
    ),
]
Top = Annotated[int, make_option("--top -n ROWS", "How many rows to show.", min=1)]
Where = Annotated[
    list[str] | None,
    make_option(
        "--where CONDITION",
        'Only rows that pass: genre=fantasy, "genre=fantasy and year>1950", or '
        "\"1900 <= year < 1950 and 'war' in summary\". "
        "Given again, all must pass.",
    ),
]
Tolerance = Annotated[
    float | None,
    make_option(
        "--tolerance ERROR",
        "How far the weights may lie from the exact ones, proven: half the sum of the "
        "differences. A large store then reads few vectors in full.",
        min=0.0,
    ),
]
At = Annotated[int | None, make_option("--at VERSION", "As of this version; see `qkv versions`.")]
Skip = Annotated[
    bool, make_option("--skip-damaged", "Leave out rows whose file is damaged, and say how many.")
]


@dataclass(frozen=True)
class ReadOptions:
    """The options of every command that reads a SOURCE, as one parameter of its function."""

    at: At = None
    table: TableName = None
    missing: Missing = None
    names: Names = None
    token: Token = None

    def table_options(self) -> dict[str, Any]:
        """Those that mean nothing to a database.

        >>> ReadOptions(names="city, people").table_options()["names"]
        ['city', 'people']
        """
        names = None if self.names is None else [name.strip() for name in self.names.split(",")]
        return {"table": self.table, "missing": self.missing or None, "names": names}


DEFAULT_READ_OPTIONS = ReadOptions()
