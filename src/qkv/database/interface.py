"""What a database in this process, in a cluster and on a server have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable


class DatabaseInfo(TypedDict):
    """The result of `Database.info`."""

    path: str | None
    rows: int
    version: int
    columns: list[str]
    key: list[str]
    value: list[str]
    key_kind: str | None
    value_kind: str | None
    unique: bool
    encoder: Any
    vectors: str | None
    bytes: int | None


@runtime_checkable
class RowSource(Protocol):
    """An object from which rows can be copied: it has the rows and the metadata of a database."""

    @property
    def path(self) -> Path | str | None: ...

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]: ...

    def info(self) -> DatabaseInfo: ...

    def describe(self) -> dict[str, dict[str, Any]]: ...
