"""The database: rows with a key and a value, looked up by key or queried with attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.database.database import Database, open
    from qkv.database.errors import KeyNotFoundError
    from qkv.database.storage import check_store

__all__ = ["KeyNotFoundError", "Database", "check_store", "open"]

_MODULE_BY_NAME = {
    "KeyNotFoundError": "errors",
    "Database": "database",
    "check_store": "storage",
    "open": "database",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(f"qkv.database.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module 'qkv.database' has no attribute {name!r}")
