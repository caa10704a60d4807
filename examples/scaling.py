"""How many machines does a table need, how long does a query take, and how long in the worst case?

    python examples/scaling.py [--rows 1e9 1e12] [--slow 0.01] [--factor 10]

The first table is the cost model of docs/scaling.md. The second table is a simulation. Every query
goes to all shards and is answered when the slowest shard has answered; of a thousand shards, one is
nearly always slow. The time of a shard has a gamma distribution around its mean. With probability
`slow` it takes `factor` times as long. A hedged request goes to a second replica if the first has
not answered by the 95th percentile of the times; the first answer counts. Times are in units of a
shard's mean.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np


class Machine(NamedTuple):
    """One machine: bytes for rows, and bytes read, operations and bytes sent per second."""

    memory: float = 400e9
    bandwidth: float = 200e9
    flops: float = 2e12
    network: float = 3e9
    call: float = 1e-3


class Plan(NamedTuple):
    """The result of `plan`: machines, bytes on each, and seconds of one batch by step."""

    machines: int
    held: float
    scan: float
    merge: float
    total: float


def plan(
    rows: float,
    machine: Machine = Machine(),  # noqa: B008, it cannot change
    *,
    width: int = 256,
    number: int = 4,
    batch: int = 1,
    pooled: int = 256,
    within: float | None = None,
    fan: int | None = None,
) -> Plan:
    """Return the fewest machines that hold the rows, or that answer a batch `within` some seconds.

    A batch takes two calls, the scan (the slower of reading and computing), and the transfer of
    states of batch × (pooled + 2) numbers from every machine. The states are merged where the query
    was asked, or in a tree in which each machine merges those of `fan` others.
    """
    held = rows * (width * number + 4 * pooled)
    flops, read = 2 * batch * rows * width, rows * width * number
    state = 4 * batch * (pooled + 2) / machine.network

    def timed(count: int) -> tuple[float, float, float]:
        scan = max(read / machine.bandwidth, flops / machine.flops) / count
        merge = state * count
        if fan is not None and count > fan:
            depth = math.ceil(math.log(count, fan))
            merge = depth * (fan * state + machine.call)
        return scan, merge, 2 * machine.call + scan + merge

    count = max(math.ceil(held / machine.memory), 1)
    if within is not None:
        while timed(count)[2] > within and timed(count + 1)[2] < timed(count)[2]:
            count = max(count + 1, math.floor(count * 1.02))
    return Plan(count, held / count, *timed(count))


def planned(rows: list[float], fan: int | None) -> None:
    print(f"{'rows':>7} {'bytes a number':>15} {'batch':>6} {'machines':>9} {'GB each':>8}  ms")
    for m in rows:
        for number in (4, 1):
            for batch in (1, 64):
                for within in (None, 0.1):
                    p = plan(m, number=number, batch=batch, within=within, fan=fan)
                    columns = f"{p.machines:>9,} {p.held / 1e9:>8.0f}  {1e3 * p.total:,.0f}"
                    print(f"{m:>7.0e} {number:>15} {batch:>6} {columns}")


def shard_times(rng: np.random.Generator, shape: tuple[int, int], slow: float, factor: float):
    """Return times (queries, shards) in units of the mean; a slow one is `factor` times longer."""
    times = rng.gamma(20.0, 1 / 20.0, size=shape)
    return np.where(rng.random(shape) < slow, factor * times, times)


def hedged(first: np.ndarray, second: np.ndarray, after: float) -> np.ndarray:
    """Return the times of requests that are sent again after `after`."""
    return np.where(first > after, np.minimum(first, after + second), first)


def waits(shards: int, slow: float, factor: float, queries: int, seed: int = 0) -> dict[str, float]:
    """Return median and 99th percentile of the slowest shard, without and with hedging."""
    rng = np.random.default_rng(seed)
    first, second = (shard_times(rng, (queries, shards), slow, factor) for _ in range(2))
    after = float(np.quantile(first, 0.95))
    plain, quick = first.max(axis=1), hedged(first, second, after).max(axis=1)
    return {
        "median": float(np.median(plain)),
        "p99": float(np.quantile(plain, 0.99)),
        "hedged median": float(np.median(quick)),
        "hedged p99": float(np.quantile(quick, 0.99)),
        "more requests": float((first > after).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs="+", default=[1e6, 1e9, 1e12])
    parser.add_argument("--fan", type=int, help="merge in a tree of so many branches")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--slow", type=float, default=0.01)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--queries", type=int, default=5_000)
    options = parser.parse_args()
    planned(options.rows, options.fan)
    print()
    names = ["median", "p99", "hedged median", "hedged p99", "more requests"]
    print(f"{'shards':>7}  " + "  ".join(f"{name:>13}" for name in names))
    for shards in options.shards:
        found = waits(shards, options.slow, options.factor, options.queries)
        print(f"{shards:>7}  " + "  ".join(f"{found[name]:>13.2f}" for name in names))


if __name__ == "__main__":
    main()
