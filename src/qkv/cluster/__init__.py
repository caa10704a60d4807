"""Attention on several machines.

- `Cluster` queries a database whose rows are split into shards; Ray runs the shards.
- `qkv.cluster.torch` attends to keys and values that are sharded over a torch.distributed group.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.cluster.cluster import Cluster
    from qkv.cluster.stores import split
    from qkv.database.errors import LostShardError

__all__ = ["Cluster", "LostShardError", "split"]

_MODULE_BY_NAME = {
    "Cluster": "qkv.cluster.cluster",
    "LostShardError": "qkv.database.errors",
    "split": "qkv.cluster.stores",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
    if name == "torch":
        return importlib.import_module("qkv.cluster.torch")
    raise AttributeError(f"module 'qkv.cluster' has no attribute {name!r}")
