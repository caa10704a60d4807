"""What goes wrong where rows lie elsewhere."""

from __future__ import annotations

from qkv.errors import QkvError


class Unreadable(QkvError, OSError):
    """A shard's rows cannot be read where they should lie."""


class LostShard(QkvError, RuntimeError):
    """A shard does not answer, and was not back in time.

    `shard` is its number.
    """

    def __init__(self, told: str, shard: int):
        super().__init__(told)
        self.shard = shard
