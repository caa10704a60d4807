"""The store: rows, their tensors and the settings, as versions, in a folder or in memory.

A commit writes its segments, makes them durable, and then changes the catalogue in one transaction:
before that the store is the old one, after it the new one. docs/format.md describes the folder.
"""

from qkv.database.store.compaction import CompactReport
from qkv.database.store.repair import Problem, check
from qkv.database.store.snapshot import Snapshot
from qkv.database.store.store import Commit, Store, Version

__all__ = ["Commit", "CompactReport", "Problem", "Snapshot", "Store", "Version", "check"]
