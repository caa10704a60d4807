"""Pictures and pages on disk, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from qkv.errors import ArgumentError

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def write_file(path: Path, content: bytes) -> None:
    """Put the content in place of whatever the path held, by a rename."""
    from qkv.database.export.files import open_atomically

    with open_atomically(path) as file:
        file.write(content)


def check_suffix(path: Path, endings: Sequence[str]) -> None:
    """Refuse a file whose ending is none of these, before any work is done for it."""
    if path.suffix.lower() not in endings:
        raise ArgumentError(f"{path}: the name must end in {', '.join(endings)}")


def write_figure(path: Path, figure: Any) -> None:
    """A matplotlib figure, in the format that the path's ending names."""
    check_suffix(path, PICTURE_SUFFIXES)
    picture = BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(picture, format=kind, dpi=150, bbox_inches="tight", pad_inches=0.1)
    write_file(path, picture.getvalue())
