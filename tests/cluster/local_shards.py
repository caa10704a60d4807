"""Shards without Ray: in this process, with deaths and losses as a test wants them."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from ray import cloudpickle

from qkv.cluster.cluster import Cluster
from qkv.cluster.shard import Shard
from qkv.cluster.shard_set import Request, ShardSet, assign_stores
from qkv.database.errors import LostShardError, StoreUnreadableError


class Here:
    """Everything travels as bytes. `dies()` before a call: the shard forgets all it held."""

    def __init__(self, sources: Sequence[dict[int, str]], dies: Callable[[], bool]):
        self.sources, self.dies = sources, dies
        self.shards = [Shard(own, None, 1) for own in sources]
        self.lost: set[int] = set()

    def put_job(self, thing: Any) -> bytes:
        return cloudpickle.dumps(thing)  # type: ignore[no-any-return]

    def call_each(self, requests: Sequence[Request]) -> list[Any]:
        return [self.call_once(request) for request in requests]

    def call_once(self, request: Request) -> Any:
        shard, method, args = request
        if shard in self.lost:
            raise LostShardError(f"shard {shard} is lost", shard)
        if self.dies():
            self.shards[shard] = Shard(self.sources[shard], None, 1)
        args = pickle.loads(cloudpickle.dumps(args))
        args = tuple(
            pickle.loads(x) if isinstance(x, bytes) and method == "run" and i == 1 else x
            for i, x in enumerate(args)
        )
        try:
            result = getattr(self.shards[shard], method)(*args)
        except StoreUnreadableError as fault:
            raise LostShardError(str(fault), shard) from None
        return pickle.loads(cloudpickle.dumps(result))

    def close(self) -> None:
        pass


def cluster(
    places: Sequence[str],
    shards: int,
    *,
    partial: bool = False,
    dies: Callable[[], bool] = lambda: False,
) -> Cluster:
    """A cluster whose shards are here."""
    held = assign_stores(len(places), shards)
    workers = Here([{i: places[i] for i in own} for own in held], dies)
    made = Cluster._from_store(ShardSet(places, held, workers, partial))  # type: ignore[arg-type]
    made._view  # noqa: B018, as `Cluster` itself does
    return made
