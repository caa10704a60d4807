"""The store: rows, their tensors and the settings, as versions, in a folder or in memory.

A commit writes its segments, makes them durable, and then changes the catalogue in one transaction:
before that the store is the old one, after it the new one. docs/format.md describes the folder.
"""

from typing import TYPE_CHECKING, Any

from qkv.database.store.compaction import CompactReport
from qkv.database.store.snapshot import Snapshot
from qkv.database.store.store import Commit, Store, Version

if TYPE_CHECKING:
    from qkv.database.store.repair import Problem, check

__all__ = ["Commit", "CompactReport", "Problem", "Snapshot", "Store", "Version", "check"]


def __getattr__(name: str) -> Any:
    if name not in ("Problem", "check"):
        raise AttributeError(f"module 'qkv.database.store' has no attribute {name!r}")
    from qkv.database.store import repair  # which few need

    return getattr(repair, name)
