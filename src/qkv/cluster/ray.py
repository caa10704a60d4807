"""Actors on Ray: one for each shard and replica, asked again where one does not answer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.cluster.shard import Job, Shard
from qkv.cluster.shard_set import Request
from qkv.database.errors import LostShardError, StoreUnreadableError
from qkv.errors import ArgumentError, MissingExtraError, QkvError

try:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray import cloudpickle, exceptions
except ImportError:
    raise MissingExtraError('a cluster needs ray: pip install "qkv[ray]"') from None

RESTART_POLL_SECONDS = 0.05
"""Seconds between two looks at an actor that starts again."""

MAX_INLINE_BYTES = 2**16
"""Bytes of queries that are sent sooner than they are put aside."""

MAX_START_TRIES = 3
"""How many times Ray is started where it gives up on itself."""

OBJECT_STORE_BYTES = 256 << 20
"""Bytes of shared memory for a Ray that is started here: queries and states are small."""


class ShardActor(Shard):
    """A shard that is asked, and answers, by one string of bytes: Ray wraps every argument, and
    every array of a result, by itself, which takes as long as the way there."""

    def call(self, packed: bytes, *put: Any) -> bytes:
        method, args, late = cloudpickle.loads(packed)
        for at, thing in zip(late, put, strict=True):
            args[at] = thing
        return cloudpickle.dumps(getattr(self, method)(*args))  # type: ignore[no-any-return]


def pack_request(request: Request) -> tuple[Any, ...]:
    """What `ShardActor.call` takes: the request as bytes, and beside it what was put aside."""
    _, method, args = request
    late = [at for at, thing in enumerate(args) if isinstance(thing, ray.ObjectRef)]
    plain = [None if at in late else thing for at, thing in enumerate(args)]
    return cloudpickle.dumps((method, plain, late)), *(args[at] for at in late)


class ActorPool:
    """`replicas` actors for each shard, of which `sources` are the stores of each."""

    def __init__(
        self,
        sources: Sequence[dict[int, str]],
        *,
        replicas: int,
        cores: int,
        address: str | None,
        options: Mapping[str, Any],
        cache: str | None,
        timeout: float,
        hedge: float | None,
    ):
        self._sources, self._cores, self._cache = sources, cores, cache
        self._options, self.timeout, self.hedge = dict(options), timeout, hedge
        self._started_ray = not ray.is_initialized()
        wanted = len(sources) * replicas * cores
        if self._started_ray:
            start_ray(address, wanted)
        have = ray.cluster_resources().get("CPU", 0)
        if "num_cpus" not in self._options and have < wanted:
            self.close()
            raise ArgumentError(
                f"{len(sources)} shards × {replicas} replicas × {cores} cores are {wanted} cores, "
                f"and Ray has {have:g}: pass fewer, or add machines"
            )
        self._actors: list[list[Any]] = [
            [self._create_actor(shard) for _ in range(replicas)] for shard in range(len(sources))
        ]
        self._turn = 0

    def _create_actor(self, shard: int) -> Any:
        options = {"num_cpus": self._cores, "max_restarts": -1, **self._options}
        actor = ray.remote(ShardActor).options(**options)
        return actor.remote(self._sources[shard], self._cache, self._cores)

    def put_job(self, job: Job) -> Any:
        """Where all actors read it, once for each machine; a few queries go with each call."""
        return job if getattr(job.query, "nbytes", 0) <= MAX_INLINE_BYTES else ray.put(job)

    def replicas_of(self, shard: int) -> list[Any]:
        """The replicas of a shard."""
        return self._actors[shard]

    def replace_actor(self, shard: int, replica: int) -> None:
        """Put a new actor in the place of one that is dead."""
        time.sleep(RESTART_POLL_SECONDS)
        self._actors[shard][replica] = self._create_actor(shard)

    def call_each(self, requests: Sequence[Request]) -> list[Any]:
        """The results, in the order of the requests."""
        self._turn += 1
        waiting = [_PendingRequest(self, request, self._turn) for request in requests]
        if self.hedge is None:
            try:  # all at once, which is quickest
                found = ray.get([one.first_ref for one in waiting], timeout=self.timeout)
                return [cloudpickle.loads(some) for some in found]
            except exceptions.RayError:
                pass  # each is then looked at by itself
        return [one.wait_for_result() for one in waiting]

    def call_once(self, request: Request) -> Any:
        """The same of the first replica alone, which is not asked again."""
        shard = request[0]
        try:
            return cloudpickle.loads(
                ray.get(self._actors[shard][0].call.remote(*pack_request(request)))
            )
        except exceptions.RayTaskError as fault:
            raise fault.cause from None
        except exceptions.RayActorError:
            raise LostShardError(f"shard {shard} ended while it was asked", shard) from None

    def close(self) -> None:
        """End the actors, and Ray where it was started for them."""
        if not ray.is_initialized():
            return
        for actors in getattr(self, "_actors", []):
            for actor in actors:
                ray.kill(actor)
        self._actors = []
        if self._started_ray:
            ray.shutdown()


class _PendingRequest:
    """A request on its way: to one replica, and to the next where that does not answer."""

    def __init__(self, actors: ActorPool, request: Request, turn: int):
        self.actors, self.turn = actors, turn
        self.shard, self.packed_request = request[0], pack_request(request)
        self.deadline = time.monotonic() + actors.timeout
        self.replica_by_ref: dict[Any, int] = {}
        """The replica that each reference was asked of."""
        self.send_request()

    def send_request(self) -> None:
        replicas = self.actors.replicas_of(self.shard)
        self.turn = (self.turn + 1) % len(replicas)
        self.replica_by_ref[replicas[self.turn].call.remote(*self.packed_request)] = self.turn

    @property
    def first_ref(self) -> Any:
        return next(iter(self.replica_by_ref))

    def wait_for_result(self) -> Any:
        """The first result that comes, of a replica that is there."""
        shard, told = self.shard, "it did not answer in time"
        tries = 2 * len(self.actors.replicas_of(shard))
        while tries and (left := self.deadline - time.monotonic()) > 0:
            late = self.actors.hedge if len(self.replica_by_ref) == 1 else None
            ready, _ = ray.wait(list(self.replica_by_ref), timeout=min(left, late or left))
            if not ready:
                if late is not None:
                    self.send_request()
                continue
            replica = self.replica_by_ref.pop(ready[0])
            try:
                return cloudpickle.loads(ray.get(ready[0]))
            except exceptions.RayTaskError as fault:
                if not isinstance(fault.cause, StoreUnreadableError):
                    raise fault.cause from None
                told, tries = str(fault.cause), tries - 1
            except exceptions.ActorDiedError:  # Ray will not start it again
                self.actors.replace_actor(shard, replica)
            except exceptions.RayActorError:
                time.sleep(RESTART_POLL_SECONDS)
            if not self.replica_by_ref:
                self.send_request()
        raise LostShardError(f"shard {shard} is lost: {told}", shard)


def start_ray(address: str | None, cores: int) -> None:
    """Join the Ray at an address, or start one here."""
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as fault:
            raise ArgumentError(f"address: no Ray answers at {address!r}: {fault}") from None
        return
    # Ray puts its workers behind all else on the machine; here they are what people wait for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    here: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        **quiet,
    }
    here["address"] = "local"  # and not one that runs here for others, or that RAY_ADDRESS names
    for left in reversed(range(MAX_START_TRIES)):
        try:
            ray.init(num_cpus=max(cores, os.cpu_count() or 1), **here)
            return
        except Exception as fault:  # Ray waits half a minute for its parts, a busy machine longer
            ray.shutdown()
            if "timed out" not in str(fault):
                raise
            if not left:
                raise QkvError(
                    f"Ray did not start in {MAX_START_TRIES} tries of half a minute: the machine "
                    "is busy. "
                    "Try later, or run `ray start --head` and pass address='auto'"
                ) from fault
