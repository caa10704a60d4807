"""The same equation on more than one machine: `Cluster` asks shards of a database, on Ray;
`qkv.cluster.torch` attends to keys that the processes of a group hold."""

from __future__ import annotations
