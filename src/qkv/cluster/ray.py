"""Ray actors that run the shards: one for each shard and replica, with retries."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qkv.cluster.shard import Job, Shard
from qkv.cluster.shard_set import Request
from qkv.database.errors import LostShardError, StoreUnreadableError
from qkv.errors import ArgumentError, QkvError, missing_extra_error

try:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray import cloudpickle, exceptions
except ImportError:
    raise missing_extra_error("a cluster needs ray", "ray") from None

RESTART_POLL_SECONDS = 0.05
"""Seconds between two checks of an actor that is restarting."""

MAX_INLINE_BYTES = 2**16
"""A larger query goes to Ray's object store; a smaller query is sent with each call."""

MAX_START_TRIES = 3
"""Attempts to start Ray."""

OBJECT_STORE_BYTES = 256 << 20
"""The size of Ray's object store if Ray is started here. Queries and states are small."""


class ShardActor(Shard):
    """A shard that receives each request and returns each result as one byte string.

    Ray would serialize every argument and every array separately, which takes twice as long.
    """

    def call(self, packed: bytes, *objects: Any) -> bytes:
        """Run a request of `pack_request`; return its result as bytes.

        `objects` are the arguments that Ray has fetched from its object store.
        """
        method, args, positions = cloudpickle.loads(packed)
        for position, value in zip(positions, objects, strict=True):
            args[position] = value
        return cloudpickle.dumps(getattr(self, method)(*args))  # type: ignore[no-any-return]


def pack_request(request: Request) -> tuple[Any, ...]:
    """Return the arguments of `ShardActor.call`: the request as bytes, and object references."""
    _, method, args = request
    positions = [
        position for position, value in enumerate(args) if isinstance(value, ray.ObjectRef)
    ]
    plain = [None if position in positions else value for position, value in enumerate(args)]
    return cloudpickle.dumps((method, plain, positions)), *(
        args[position] for position in positions
    )


class ActorPool:
    """The actors of all shards: `replicas` actors for each shard.

    `sources[i]` maps the indices of the stores of shard i to their paths or URLs.
    """

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
        needed = len(sources) * replicas * cores
        if self._started_ray:
            start_ray(address, needed)
        available = ray.cluster_resources().get("CPU", 0)
        if "num_cpus" not in self._options and available < needed:
            self.close()
            raise ArgumentError(
                f"{len(sources)} shards × {replicas} replicas × {cores} cores need {needed} cores, "
                f"but Ray has {available:g}: lower shards, replicas or cores, or add machines"
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
        """Return what a request contains for this job.

        A small job is passed as it is. A large job is put into Ray's object store, and its
        reference is passed.
        """
        return job if getattr(job.query, "nbytes", 0) <= MAX_INLINE_BYTES else ray.put(job)

    def replicas_of(self, shard: int) -> list[Any]:
        return self._actors[shard]

    def replace_actor(self, shard: int, replica: int) -> None:
        """Start a new actor in the place of a dead one."""
        time.sleep(RESTART_POLL_SECONDS)
        self._actors[shard][replica] = self._create_actor(shard)

    def call_each(self, requests: Sequence[Request]) -> list[Any]:
        """Send all requests at the same time; return their results in order."""
        self._turn += 1
        pending = [_PendingRequest(self, request, self._turn) for request in requests]
        if self.hedge is None:
            try:  # waiting for all results in one call is fastest
                results = ray.get([item.first_ref for item in pending], timeout=self.timeout)
                return [cloudpickle.loads(result) for result in results]
            except exceptions.RayError:
                pass  # then wait for each request separately, with retries
        return [item.wait_for_result() for item in pending]

    def call_once(self, request: Request) -> Any:
        """Send a request to the first replica, without retries."""
        shard = request[0]
        try:
            return cloudpickle.loads(
                ray.get(self._actors[shard][0].call.remote(*pack_request(request)))
            )
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except exceptions.RayActorError:
            raise LostShardError(f"shard {shard} died during a request", shard) from None

    def close(self) -> None:
        """Kill the actors, and shut down Ray if this pool started it."""
        if not ray.is_initialized():
            return
        for actors in getattr(self, "_actors", []):
            for actor in actors:
                ray.kill(actor)
        self._actors = []
        if self._started_ray:
            ray.shutdown()


class _PendingRequest:
    """A request that was sent to one replica of a shard.

    If that replica does not answer, `wait_for_result` sends the request to the others.
    """

    def __init__(self, actors: ActorPool, request: Request, turn: int):
        self.actors, self.turn = actors, turn
        self.shard, self.packed_request = request[0], pack_request(request)
        self.deadline = time.monotonic() + actors.timeout
        self.replica_by_ref: dict[Any, int] = {}
        """The replica that computes each pending result, by the result's reference."""
        self.send_request()

    def send_request(self) -> None:
        """Send the request to the next replica."""
        replicas = self.actors.replicas_of(self.shard)
        self.turn = (self.turn + 1) % len(replicas)
        self.replica_by_ref[replicas[self.turn].call.remote(*self.packed_request)] = self.turn

    @property
    def first_ref(self) -> Any:
        """The reference of the result that was requested first."""
        return next(iter(self.replica_by_ref))

    def wait_for_result(self) -> Any:
        """Return the result of the first replica that answers, or raise `LostShardError`."""
        shard, reason = self.shard, "no replica answered within the timeout"
        tries = 2 * len(self.actors.replicas_of(shard))
        while tries and (remaining := self.deadline - time.monotonic()) > 0:
            hedge = self.actors.hedge if len(self.replica_by_ref) == 1 else None
            ready, _ = ray.wait(
                list(self.replica_by_ref), timeout=min(remaining, hedge or remaining)
            )
            if not ready:
                if hedge is not None:
                    self.send_request()
                continue
            replica = self.replica_by_ref.pop(ready[0])
            try:
                return cloudpickle.loads(ray.get(ready[0]))
            except exceptions.RayTaskError as error:
                if not isinstance(error.cause, StoreUnreadableError):
                    raise error.cause from None
                reason, tries = str(error.cause), tries - 1
            except exceptions.ActorDiedError:  # Ray does not restart this actor
                self.actors.replace_actor(shard, replica)
            except exceptions.RayActorError:
                time.sleep(RESTART_POLL_SECONDS)
            if not self.replica_by_ref:
                self.send_request()
        raise LostShardError(f"shard {shard} is lost: {reason}", shard)


def start_ray(address: str | None, cores: int) -> None:
    """Connect to the Ray cluster at an address, or start Ray on this machine."""
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"address: no Ray cluster answers at {address!r}: {error}"
            ) from None
        return
    # By default Ray's workers have the lowest CPU priority, but here users wait for their results.
    os.environ.setdefault("RAY_worker_niceness", "0")
    local: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        **quiet,
    }
    local["address"] = "local"  # start a new Ray, even if one runs here or RAY_ADDRESS is set
    for tries_left in reversed(range(MAX_START_TRIES)):
        try:
            ray.init(num_cpus=max(cores, os.cpu_count() or 1), **local)
            return
        except Exception as error:  # Ray's start times out on a busy machine
            ray.shutdown()
            if "timed out" not in str(error):
                raise
            if not tries_left:
                raise QkvError(
                    f"Ray did not start in {MAX_START_TRIES} tries of half a minute: the machine "
                    "is busy. Try later, or run `ray start --head` and pass address='auto'"
                ) from error
