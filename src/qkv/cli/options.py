"""The arguments and options that several commands share."""

from __future__ import annotations

import functools
import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def _complete_files(incomplete: str) -> list[str]:
    """Return the files and folders that begin with this text, for shell completion."""
    names = sorted(glob.glob(glob.escape(incomplete) + "*"))
    return [name + os.sep if os.path.isdir(name) else name for name in names]


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
        raise typer.BadParameter("this command needs a local folder, not a URL")
    return path


_FOLDER_HELP = "The folder of a database, such as books.qkv"


def make_option(form: str, help: str, **more: Any) -> Any:
    """Return an option; `form` is how the help shows it, such as "--key -k COLUMN".

    If `form` contains no flags, typer derives the flag from the name of the parameter.
    """
    flags = [word for word in form.split() if word.startswith("-")]
    metavar = next((word for word in form.split() if word not in flags), None)
    return typer.Option(*flags, metavar=metavar, help=help, **more)


def make_argument(metavar: str, help: str, **more: Any) -> Any:
    """Return a positional argument; `metavar` is how the help shows it."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


_path_argument = functools.partial(make_argument, autocompletion=_complete_files)
Source = Annotated[
    str,
    _path_argument(
        "SOURCE",
        "A .qkv folder, the URL of a served database, a CSV, TSV, JSON, Parquet, Arrow, Excel or "
        "SQLite file, a pattern of files ('logs/*.csv'), sqlite:///FILE?table=NAME, a PostgreSQL "
        "URL, or - for CSV on stdin.",
    ),
]
Folder = Annotated[Path, _path_argument("PATH", f"{_FOLDER_HELP}.", callback=_reject_url)]
FolderOrUrl = Annotated[
    str, _path_argument("PATH", f"{_FOLDER_HELP}, or the URL of a served database.")
]
Token = Annotated[
    str | None,
    make_option("--token TEXT", "Send this token to a qkv server.", envvar="QKV_TOKEN"),
]
Key = Annotated[
    list[str] | None,
    make_option(
        "--key -k COLUMN", "Use this column as the key. Repeat for a key of several columns."
    ),
]
Value = Annotated[
    list[str] | None,
    make_option("--value -v COLUMN", "Answer with this column. Repeat for several columns."),
]
TableName = Annotated[
    str | None, make_option("--table NAME", "Read this table or sheet of the source.")
]
Missing = Annotated[
    list[str] | None,
    make_option(
        "--missing WORD",
        "Read this word in CSV as a missing value, instead of NA, NaN, null and so on. "
        "Repeat for several. "
        "'' means no word.",
    ),
]
TextColumns = Annotated[
    list[str] | None,
    make_option(
        "--text COLUMN",
        "Keep this column of CSV as text, such as versions and codes. Repeat for several.",
    ),
]
Names = Annotated[
    str | None,
    make_option("--names NAME,…", "Name the columns of CSV without a header line."),
]
Encoder = Annotated[
    str | None,
    make_option(
        "--encoder -e NAME",
        "Convert keys to vectors with this encoder, such as words, characters or numbers. By "
        "default, the type of the keys decides.",
        autocompletion=_complete_encoders,
    ),
]
Score = Annotated[
    str | None,
    make_option(
        "--score -s NAME",
        "Compare keys with the query by this score, such as cosine or gaussian:0.5.",
        autocompletion=_complete_scores,
    ),
]
Weighting = Annotated[
    str | None,
    make_option(
        "--weighting -w NAME",
        "Convert scores to weights by this rule, such as softmax, hard, topk:5 or entmax15.",
        autocompletion=_complete_weightings,
    ),
]
Top = Annotated[int, make_option("--top -n ROWS", "Show this many rows.", min=1)]
Where = Annotated[
    list[str] | None,
    make_option(
        "--where CONDITION",
        'Use only rows that match: genre=fantasy, "genre=fantasy and year>1950", or '
        "\"1900 <= year < 1950 and 'war' in summary\". "
        "If repeated, all conditions must match.",
    ),
]
Tolerance = Annotated[
    float | None,
    make_option(
        "--tolerance ERROR",
        "Allow an error of the weights up to this: half the sum of the absolute differences from "
        "the exact weights. A large database then reads fewer vectors in full.",
        min=0.0,
    ),
]
Approximate = Annotated[
    float | None,
    make_option(
        "--approximate WEIGHT",
        "Read only rows that the index finds, until the estimated weight of all others is at most "
        "this, such as 0.05. `qkv index` builds the index.",
    ),
]
At = Annotated[
    int | None, make_option("--at VERSION", "Read this version; `qkv versions` lists them.")
]
Skip = Annotated[
    bool, make_option("--skip-damaged", "Skip rows in damaged files and report how many.")
]


@dataclass(frozen=True)
class ReadOptions:
    """The options of every command with a SOURCE, as one parameter of the command's function."""

    at: At = None
    table: TableName = None
    missing: Missing = None
    text: TextColumns = None
    names: Names = None
    token: Token = None

    def table_options(self) -> dict[str, Any]:
        """Return the options that are for tables only, by name; a database rejects them.

        >>> ReadOptions(names="city, people").table_options()["names"]
        ['city', 'people']
        """
        names = None if self.names is None else [name.strip() for name in self.names.split(",")]
        return {
            "table": self.table,
            "missing": self.missing or None,
            "text": self.text or None,
            "names": names,
        }


DEFAULT_READ_OPTIONS = ReadOptions()
