"""The same equation on more than one machine: `Cluster` asks shards of a database, on Ray;
`qkv.cluster.torch` attends to keys that the processes of a group hold."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.cluster.cluster import Cluster
    from qkv.cluster.stores import split
    from qkv.database.faults import LostShard

__all__ = ["Cluster", "LostShard", "split"]

_HOMES = {
    "Cluster": "qkv.cluster.cluster",
    "LostShard": "qkv.database.faults",
    "split": "qkv.cluster.stores",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "torch":
        return importlib.import_module("qkv.cluster.torch")
    raise AttributeError(f"module 'qkv.cluster' has no attribute {name!r}")
