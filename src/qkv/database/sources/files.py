"""Read the bytes and the text of files. Errors say what to do."""

from __future__ import annotations

import codecs
import difflib
import importlib
import sys
import zlib
from pathlib import Path

from qkv.database.sources.table import SourceError

_FOREIGN_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image", "give a table"),
    (b"\xff\xd8\xff", "a JPEG image", "give a table"),
    (b"GIF8", "a GIF image", "give a table"),
    (b"%PDF-", "a PDF document", "give a table"),
    (b"PK\x03\x04", "a ZIP archive or an Excel workbook", "extract it, or rename it to .xlsx"),
    (b"PK\x05\x06", "an empty ZIP archive", "give a table"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel workbook", "rename it to .xls"),
    (b"\x1f\x8b", "gzip data", "rename it to .gz, or decompress it with gunzip"),
    (b"BZh", "bzip2 data", "rename it to .bz2, or decompress it with bunzip2"),
    (b"\xfd7zXZ\x00", "xz data", "rename it to .xz, or decompress it with unxz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data", "decompress it with unzstd"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "extract it"),
    (b"\x89HDF\r\n\x1a\n", "HDF5 data", "save the table as Parquet or CSV"),
    (b"\x93NUMPY", "a NumPy array", "load it with numpy.load and add its rows"),
    (b"\x7fELF", "a program", "give a table"),
    (b"FEA1", "Feather version 1", "save it again with pyarrow.feather.write_feather"),
)
"""The first bytes of files that are not tables, what they are, and the next step."""

_UNSUPPORTED_BOMS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_contents(path: Path, size: int = -1) -> bytes:
    """Return all bytes of a file, or the first `size`; raise `SourceError` if it is empty."""
    try:
        with path.open("rb") as file:
            data = file.read(size)
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from None
    return check_not_empty(data, str(path))


DECOMPRESSOR_BY_SUFFIX = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
"""The module that decompresses files with this last suffix."""


def read_decompressed(path: Path) -> bytes:
    """Return the decompressed bytes of a file; raise `SourceError` if they are empty."""
    compressed = read_contents(path)
    module = importlib.import_module(DECOMPRESSOR_BY_SUFFIX[path.suffix.lower()])
    module_error = getattr(module, "LZMAError", zlib.error)
    try:
        data: bytes = module.decompress(compressed)
    except (OSError, EOFError, ValueError, module_error) as error:
        raise SourceError(
            f"cannot be decompressed ({error}): the file is truncated or has another format; copy "
            "it again",
            file=str(path),
        ) from None
    return check_not_empty(data, str(path))


def read_stdin() -> bytes:
    """Return all bytes of standard input; raise `SourceError` if there are none."""
    return check_not_empty(sys.stdin.buffer.read(), "stdin")


def check_not_empty(data: bytes, file: str) -> bytes:
    """Return the bytes; raise `SourceError` if there are none, or only whitespace."""
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise SourceError("the file is empty: there is nothing to read", file=file)
    return data


def unreadable_error(path: Path, error: Exception) -> SourceError:
    """Return the error for a file that cannot be opened.

    It names the most similar name in the folder.
    """
    file = str(path)
    try:
        if path.is_dir():
            return SourceError(
                "this is a folder: pass one of its files, or open a database with qkv.open",
                file=file,
            )
    except (OSError, ValueError):
        pass
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if not path.parent.is_dir():
            return SourceError(
                f"no such file, because there is no folder {str(path.parent)!r}: check the path",
                file=file,
            )
        try:
            siblings = [other.name for other in path.parent.iterdir()]
        except OSError:
            siblings = []
        nearest = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "check the name and the folder"
        return SourceError(f"no such file: {hint}", file=file)
    if isinstance(error, PermissionError):
        return SourceError("permission denied: allow this user to read it (chmod u+r)", file=file)
    reason = getattr(error, "strerror", None) or str(error)
    return SourceError(f"cannot be opened: {reason}", file=file)


def refuse_foreign_formats(data: bytes, file: str) -> None:
    """Raise `SourceError` if the first bytes belong to a format that is not a table."""
    for magic, kind, step in _FOREIGN_FORMATS:
        if data.startswith(magic):
            raise SourceError(f"this looks like {kind}, not like a table: {step}", file=file)


def decode_utf8(data: bytes, file: str) -> str:
    """Decode UTF-8 text without its byte order mark.

    An error names the wrong byte and its position.
    """
    for mark, encoding in _UNSUPPORTED_BOMS:
        if data.startswith(mark):
            raise SourceError(
                f"the text is {encoding}, not UTF-8: convert it with "
                f"iconv -f {encoding} -t UTF-8 {file} > utf8.txt",
                file=file,
                line=1,
                column=1,
            )
    data = data.removeprefix(codecs.BOM_UTF8)
    nul = data.find(b"\0")
    try:
        decoded = data.decode() if nul < 0 else data[:nul].decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        raise error_at(
            f"byte 0x{data[error.start]:02x} is not UTF-8 text: save it as 'CSV UTF-8' in the "
            "spreadsheet, or convert the file from its encoding, for example with "
            f"iconv -f WINDOWS-1252 -t UTF-8 {file} > utf8.txt",
            before,
            len(before),
            file,
        ) from None
    if nul >= 0:
        raise error_at(
            "a NUL byte, which text cannot contain: the file is damaged, binary, or UTF-16. "
            f"Convert UTF-16 with iconv -f UTF-16LE -t UTF-8 {file} > utf8.txt",
            decoded,
            len(decoded),
            file,
        )
    return decoded


def error_at(problem: str, text: str, position: int, file: str) -> SourceError:
    """Return the error for a problem at a position of a text."""
    line, column = line_and_column(text[:position])
    return SourceError(problem, file=file, line=line, column=column)


def line_and_column(before: str) -> tuple[int, int]:
    """Return the line and the column, counted from 1, of the character that follows this text.

    >>> line_and_column("a,b\\r\\n1,")
    (2, 3)
    """
    before = before.replace("\r\n", "\n").replace("\r", "\n")
    return before.count("\n") + 1, len(before) - before.rfind("\n")
