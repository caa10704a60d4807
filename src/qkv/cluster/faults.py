"""What goes wrong where rows lie elsewhere."""

from __future__ import annotations

from typing import Any

from qkv.database.faults import Unreadable


class LostShard(Unreadable, RuntimeError):
    """A shard does not answer, and was not back in time.

    `shard` is its number.
    """

    def __init__(self, told: str, shard: int):
        super().__init__(told)
        self.shard = shard

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.shard)
