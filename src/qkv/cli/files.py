"""Write plots and pages to disk atomically."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from qkv.errors import ArgumentError

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def write_file(path: Path, content: bytes) -> None:
    """Write the content to a temporary file and rename it to the path."""
    from qkv.database.export.files import open_atomically

    with open_atomically(path) as file:
        file.write(content)


def check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    """Raise `ArgumentError` unless the file name ends in one of these suffixes."""
    if path.suffix.lower() not in suffixes:
        raise ArgumentError(f"{path}: the name must end in {', '.join(suffixes)}")


def check_overwrite(path: Path, overwrite: bool) -> None:
    """Raise `ArgumentError` if the file exists and may not be overwritten."""
    if path.is_file() and not overwrite:
        raise ArgumentError(f"{path} exists: overwrite it with --overwrite, or choose another name")


def write_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure in the format of the path's suffix."""
    check_suffix(path, PICTURE_SUFFIXES)
    picture = BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(picture, format=kind, dpi=150, bbox_inches="tight", pad_inches=0.1)
    write_file(path, picture.getvalue())
