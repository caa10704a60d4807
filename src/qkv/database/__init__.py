"""The database: keys and values that are kept, found, and attended to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.database.absent import AbsentKey
    from qkv.database.database import Database, open
    from qkv.database.store import check

__all__ = ["AbsentKey", "Database", "check", "open"]

_HOMES = {"AbsentKey": "absent", "Database": "database", "check": "store", "open": "database"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"qkv.database.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'qkv.database' has no attribute {name!r}")
