"""How much do shards gain, what does a cluster add to a query, and how long is a failure?

python -m bench.cluster [--small]

200,000 × 256 rows on disk with values of 16 numbers, on Ray, with one core and one thread for each
actor. Batches of 64 queries run on 1, 2, 3 and 4 shards in turns. One query is asked of a cluster
and of the database in this process, also on one thread. Then queries run without a pause while an
actor is killed. Times are the minimum of many.

`load` is the number of processes that want a core. If it exceeds the cores, shards do not run in
parallel, and the goals use CPU time: that of the busiest shard for a batch, of all processes for
one query. The model of docs/scaling.md is printed with the CPU time of 1 to 4 shards.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

import qkv
from bench._results import show, show_goals
from bench._side_by_side import SMALL, Row, save_results, size
from qkv.frameworks import threads

M, D, WIDTH, BATCH = size(200_000, 4_000), 256, 16, 64
TURNS = 3 if SMALL else 15
SHARDS = (1, 2, 3, 4)
FREE = {"num_cpus": 0}
"""More actors than cores are here: Ray is not to count them."""


def made(folder: Path) -> Path:
    rng, path = np.random.default_rng(0), folder / "rows.qkv"
    with qkv.open(path) as database:
        for _ in range(4):
            keys = rng.normal(size=(M // 4, D)).astype("f4")
            database.add(keys, rng.normal(size=(M // 4, WIDTH)).astype("f4"))
    return path


def least(sides: dict, turns: int, clock=time.perf_counter) -> dict:
    """Return the minimum seconds of each side; they take turns."""
    found = {name: [] for name in sides}
    for side in sides.values():
        side()
    for _ in range(turns):
        for name, side in sides.items():
            start = clock()
            side()
            found[name].append(clock() - start)
    return {name: min(times) for name, times in found.items()}


def busiest(cluster, turns: int, side) -> float:
    """Return the minimum CPU seconds of the busiest shard."""
    found = []
    for _ in range(turns):
        before = cluster.busy_seconds()
        side()
        found.append(max(b - a for a, b in zip(before, cluster.busy_seconds(), strict=True)))
    return min(found)


def row(work: str, sides: dict, *goals: tuple) -> Row:
    sides_ms = {name: {"ms": 1e3 * seconds} for name, seconds in sides.items()}
    judged = [{"goal": name, "found": found, "met": bool(met)} for name, found, met in goals]
    made = {"work": work, "sides": sides_ms, "goals": judged, "load": os.getloadavg()[0]}
    show(made)
    return made


def rows():
    with tempfile.TemporaryDirectory() as folder:
        path = made(Path(folder))
        clusters = {n: qkv.cluster.Cluster(path, shards=n, options=FREE) for n in reversed(SHARDS)}
        try:
            threads.CORE_COUNT = 1  # in this process too
            with qkv.open(path) as database, threads.single_threaded_blas():
                yield from scaling(clusters)
                yield from overhead(database, clusters)
                yield from death(database, clusters[2])
        finally:
            for cluster in clusters.values():
                cluster.close()


def scaling(clusters: dict):
    query = np.random.default_rng(1).normal(size=(BATCH, D)).astype("f4")
    sides = {n: (lambda n=n: clusters[n].attend(query)) for n in SHARDS}
    found = least(sides, TURNS)
    worked = {n: busiest(clusters[n], TURNS, sides[n]) for n in SHARDS}
    gain, work = found[1] / found[2], worked[1] / worked[2]
    times = {"qkv": found[2], **{f"{n} shards": found[n] for n in SHARDS}}
    times |= {f"{n} shards, the busiest worked": worked[n] for n in SHARDS}
    goal = ("2 shards ≥ 1.6× the throughput of 1", gain, gain >= 1.6)
    if busy():
        goal = ("2 shards ≥ 1.6× the throughput of 1, by work", work, work >= 1.6)
    yield row(f"cluster: {BATCH} queries over {M:,} × {D}", times, goal)
    for n in SHARDS:
        sides = {"qkv": worked[n], "model": worked[1] / n}
        yield row(f"cluster: work of the busiest of {n} shards", sides)


def busy() -> bool:
    return os.getloadavg()[0] > len(os.sched_getaffinity(0)) + 1


def overhead(database, clusters: dict):
    query = np.random.default_rng(2).normal(size=D).astype("f4")
    cluster = clusters[1]
    sides = {"qkv": lambda: cluster.ask(query), "in this process": lambda: database.ask(query)}
    found = least(sides, 4 * TURNS)
    over = 1e3 * (found["qkv"] - found["in this process"])
    goal = ("≤ 5 ms over in-process", over, over <= 5)
    worked = least(sides, 2 * TURNS, time.process_time)
    shard = busiest(cluster, 2 * TURNS, lambda: cluster.ask(query))
    found |= {"here, worked": worked["qkv"], "shard, worked": shard}
    found |= {"in this process, worked": worked["in this process"]}
    if busy():
        over = 1e3 * (worked["qkv"] + shard - worked["in this process"])
        goal = ("≤ 5 ms over in-process, by work", over, over <= 5)
    yield row("cluster: one query", found, goal)


def death(database, cluster):
    query = np.random.default_rng(3).normal(size=(4, D)).astype("f4")
    want, outs, stop = database.attend(query), [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            outs.append((time.perf_counter(), cluster.attend(query)))

    thread = threading.Thread(target=load)
    thread.start()
    while len(outs) < 3:
        time.sleep(0.01)
    for process in cluster.process_ids()[1:]:
        os.kill(process, signal.SIGKILL)
    killed = time.perf_counter()
    while not any(at > killed + 0.5 for at, _ in list(outs)):
        time.sleep(0.01)
    time.sleep(1)
    stop.set()
    thread.join()
    gap = max(b - a for (a, _), (b, _) in pairwise(outs))
    wrong = sum(not np.allclose(out, want, rtol=1e-4, atol=1e-5) for _, out in outs)
    yield row(
        "cluster: an actor killed in mid-load, until the next answer",
        {"qkv": gap},
        ("≤ 10 s", gap, gap <= 10),
        ("no wrong answer", wrong, wrong == 0),
    )


if __name__ == "__main__":
    show_goals(save_results("cluster", rows()))
