"""The registry of source formats: which function reads which file suffix or URL scheme.

A `SourceFormat` names a format, its reader, and how to recognize it. `register_source` adds one, so
that `read`, `Database.from_source` and the command line accept it:

    register_source(SourceFormat("INI", read_ini, suffixes=(".ini",)))

The built-in formats are in `BUILT_IN_FORMATS` of `qkv.database.sources.dispatch`. A package that
registers formats names its module in the entry-point group `qkv.plugins`. qkv imports this module
when a suffix or scheme is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from qkv.database.sources.table import Table, TableSelector
from qkv.database.sources.type_inference import MISSING_WORDS
from qkv.errors import ArgumentError, DtypeError
from qkv.util.registry import load_plugins
from qkv.util.types import ProgressCallback


@dataclass(frozen=True)
class TextOptions:
    """How to read the cells of delimited text.

    `missing` lists the words that mean a missing value. `names` are the column names of a file
    without a header line. `text` lists the columns that stay text; True means all columns. With
    `raw`, all cells stay text as in the file.
    """

    missing: Sequence[str] = MISSING_WORDS
    names: Sequence[str] = ()
    text: Sequence[str] | bool = ()
    raw: bool = False


DEFAULT_TEXT_OPTIONS = TextOptions()
DEFAULT_SELECTOR = TableSelector()


@dataclass(frozen=True)
class SourceRequest:
    """The arguments of a reader: one file or URL, and the options of `read`.

    `location` is the path or URL for error messages, without passwords. `name` is the file name
    without suffixes. For a file, `path` is set; for a text format, `data` has its decompressed
    bytes. For a URL, `url` is set.
    """

    location: str
    name: str
    path: Path | None = None
    url: str = ""
    data: bytes = b""
    selector: TableSelector = DEFAULT_SELECTOR
    text_options: TextOptions = DEFAULT_TEXT_OPTIONS
    progress: ProgressCallback | None = None

    @property
    def file(self) -> Path:
        """The path of the file. Only for a request that reads a file."""
        assert self.path is not None, f"{self.location} is not a file"
        return self.path


Reader: TypeAlias = Callable[[SourceRequest], Table]


@dataclass(frozen=True)
class SourceFormat:
    """One kind of source: its name, its reader, and how to recognize it.

    | field | meaning |
    |---|---|
    | `name` | the name in error messages, such as "Parquet" |
    | `read` | a function from a `SourceRequest` to a `Table`; it raises `SourceError` |
    | `suffixes` | file name endings with their dot, in lower case |
    | `schemes` | URL schemes, in lower case, without "://" |
    | `magic` | the first bytes of a binary format; one of them must match |
    | `is_container` | other formats have the same `magic`, so a file needs one of `suffixes` too |
    | `has_tables` | the reader uses `selector`, which `table=` sets |
    | `is_delimited` | the reader uses `text_options`, and returns text if `raw` is set |
    | `example` | a URL for the list of supported sources in error messages |
    """

    name: str
    read: Reader
    suffixes: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()
    is_container: bool = False
    has_tables: bool = False
    is_delimited: bool = False
    example: str = ""


_FORMATS: dict[str, SourceFormat] = {}


def register_source(source_format: SourceFormat) -> SourceFormat:
    """Add a format. `read`, `Database.from_source` and the command line then accept such sources.

    A format with the same name and the same reader replaces the earlier one, so that a notebook
    cell can run twice. Raises `ArgumentError` if another format has the name, a suffix or a scheme.

    >>> from qkv.database.sources import Table, read
    >>> def read_ini(request):
    ...     lines = request.data.decode().split()
    ...     names, values = zip(*(line.split("=") for line in lines))
    ...     return Table(request.name, {"name": list(names), "value": list(values)})
    >>> _ = register_source(SourceFormat("INI", read_ini, suffixes=(".ini",)))
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "window.ini")
    >>> _ = path.write_text("width=80\\nheight=24\\n")
    >>> read(path).columns
    {'name': ['width', 'height'], 'value': ['80', '24']}
    """
    if not isinstance(source_format, SourceFormat) or not callable(source_format.read):
        raise DtypeError(
            "register_source takes a SourceFormat with a function as its reader, not "
            f"{source_format!r}: write register_source(SourceFormat(name, read, suffixes=…))"
        )
    name = source_format.name
    for suffix in source_format.suffixes:
        if not re.fullmatch(r"\.[^./A-Z]+", suffix):
            raise ArgumentError(
                f"register_source: a suffix of {name} must be like '.ini' in lower case, not "
                f"{suffix!r}"
            )
    for scheme in source_format.schemes:
        if not re.fullmatch("[a-z][a-z0-9+.-]*", scheme):
            raise ArgumentError(
                f"register_source: a scheme of {name} must be like 'mysql' in lower case, not "
                f"{scheme!r}"
            )
    if not source_format.suffixes and not source_format.schemes and not source_format.magic:
        raise ArgumentError(
            f"register_source: {name} has no suffixes, schemes or magic, so qkv could not "
            "recognize a source: set at least one of them"
        )
    for other in _FORMATS.values():
        if other.name == name and _qualified_name(other.read) == _qualified_name(
            source_format.read
        ):
            continue
        shared = {*source_format.suffixes, *source_format.schemes} & {
            *other.suffixes,
            *other.schemes,
        }
        if other.name == name or shared:
            taken = f"the name {name!r}" if other.name == name else f"{min(shared)!r}"
            raise ArgumentError(
                f"register_source: {'.'.join(_qualified_name(other.read))} has registered {taken}: "
                "choose another name, suffix or scheme"
            )
    _FORMATS[name] = source_format
    return source_format


def _qualified_name(reader: Reader) -> tuple[str, str]:
    return reader.__module__, getattr(reader, "__qualname__", repr(reader))


def find_by_suffix(suffix: str) -> SourceFormat | None:
    """Return the format of a file suffix, or None.

    For an unknown suffix, load the plug-ins first.
    """
    return _find_format(lambda candidate: suffix.lower() in candidate.suffixes) if suffix else None


def find_by_scheme(scheme: str) -> SourceFormat | None:
    """Return the format of a URL scheme, or None.

    For an unknown scheme, load the plug-ins first.
    """
    return _find_format(lambda candidate: scheme.lower() in candidate.schemes)


def find_by_magic(opening: bytes) -> SourceFormat | None:
    """Return the format with these first bytes of a file, or None."""
    candidates = (x for x in _FORMATS.values() if x.magic and not x.is_container)
    return next((x for x in candidates if opening.startswith(x.magic)), None)


def _find_format(matches: Callable[[SourceFormat], bool]) -> SourceFormat | None:
    """Return the first format that matches. If there is none, load the plug-ins and try again."""
    result = next(filter(matches, _FORMATS.values()), None)
    if result is None:
        load_plugins()
        result = next(filter(matches, _FORMATS.values()), None)
    return result


def describe_formats() -> str:
    """Return a sentence with all supported sources, for error messages."""
    suffixes = " ".join(suffix for each in _FORMATS.values() for suffix in each.suffixes)
    examples = ", ".join(each.example for each in _FORMATS.values() if each.example)
    return (
        f"qkv reads files that end in {suffixes}, text also compressed (.csv.gz, .bz2, .xz); "
        f"{examples}; and - for CSV on standard input.{''.join(load_plugins())}"
    )
