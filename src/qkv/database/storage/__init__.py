"""The store: rows, their tensors and the settings, as versions, in a folder or in memory.

A commit writes its segments, makes them durable, and then changes the catalogue in one transaction:
before that the store is the old one, after it the new one. docs/format.md describes the folder.
"""

from typing import TYPE_CHECKING, Any

from qkv.database.storage.compaction import CompactReport
from qkv.database.storage.snapshot import Snapshot
from qkv.database.storage.store import Commit, Store, Version

if TYPE_CHECKING:
    from qkv.database.storage.integrity_check import Problem, check

__all__ = ["Commit", "CompactReport", "Problem", "Snapshot", "Store", "Version", "check"]


def __getattr__(name: str) -> Any:
    if name not in ("Problem", "check"):
        raise AttributeError(f"module 'qkv.database.storage' has no attribute {name!r}")
    from qkv.database.storage import integrity_check  # which few need

    return getattr(integrity_check, name)
