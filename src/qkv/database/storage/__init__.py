"""The store: versions of rows, their tensors and settings, in a folder or in memory.

A commit writes its segments, syncs them to disk, and then changes the catalog in one transaction.
A crash before the transaction leaves the old version, a crash after it the new one.
docs/format.md describes the folder.

- `store`: `Store`, the entry point; `snapshot`: one version for readers
- `catalog`: the SQLite file; `commit_marker`: which commit was acknowledged last
- `segments`: layout and file format of tensors; `blob_storage`: reads and writes these files
- `records`: the text and digest of each row
- `writer`, `compaction`, `garbage`: what changes the files
- `lock`: one writer, pinned versions, forks; `safe_open`: opens regular files only
- `folder`: creates and recognizes a store's folder; `integrity_check`: check and repair
- `limits`: sizes
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
    from qkv.database.storage import integrity_check  # loaded on first use: few programs need it

    return getattr(integrity_check, name)
