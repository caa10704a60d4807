"""What goes wrong where rows lie elsewhere."""

from __future__ import annotations

from qkv.database.faults import Unreadable


class LostShard(Unreadable, RuntimeError):
    """A shard does not answer, and was not back in time.

    `shard` is its number.
    """

    def __init__(self, told: str, shard: int):
        super().__init__(told)
        self.shard = shard
