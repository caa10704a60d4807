"""The store: versions of rows, their tensors and settings, in a folder or in memory.

A commit writes its segments, syncs them to disk, and then changes the catalog in one transaction.
A crash before the transaction leaves the old version, a crash after it the new one.
docs/format.md describes the folder.

Terms of these modules:

- record: a row's cells as JSON text; digest: a hash of the row's key, with which it is looked up
- live row: a row that a version contains, because no commit up to then has deleted it
- generation: the tensors that one encoder has computed; `rewrite_tensors` starts the next one
- bundle: a file with the records and digests of one large commit
- pin: a reader's lock on a version, which compaction must then keep

Modules:

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
    from qkv.database.storage.integrity_check import Problem, check_store

__all__ = ["Commit", "CompactReport", "Problem", "Snapshot", "Store", "Version", "check_store"]


def __getattr__(name: str) -> Any:
    if name not in ("Problem", "check_store"):
        raise AttributeError(f"module 'qkv.database.storage' has no attribute {name!r}")
    # Few programs need this module, so it is imported on first use.
    from qkv.database.storage import integrity_check

    return getattr(integrity_check, name)
