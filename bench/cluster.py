"""What do shards gain, what does a question cost on its way, and how long is one missed?

python -m bench.cluster [--small]

200,000 × 256 rows on disk with values of 16 numbers; on Ray, one core and one thread for each
actor. Batches of 64 queries are attended to by 1, 2, 3 and 4 shards in turns. One query is asked of
a cluster and of the database in this process, on one thread too. Then queries are asked without a
pause while an actor is killed. Times are the least of many, as the machine may be busy: `load` says
how many processes wanted its cores.

The model of docs/scaling.md, t(S) = call + merge · S + scan / min(S, cores), is fitted to 1 and 2
shards, and told beside what 3 and 4 take.
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
from bench._side_by_side import SMALL, Row, keep, size
from qkv.arrays import threads

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


def least(sides: dict, turns: int) -> dict:
    """The least seconds of each, in turns."""
    found = {name: [] for name in sides}
    for side in sides.values():
        side()
    for _ in range(turns):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}


def row(work: str, sides: dict, *goals: tuple) -> Row:
    told = {name: {"ms": 1e3 * seconds} for name, seconds in sides.items()}
    judged = [{"goal": name, "found": found, "met": bool(met)} for name, found, met in goals]
    made = {"work": work, "sides": told, "goals": judged, "load": os.getloadavg()[0]}
    show(made)
    return made


def rows():
    with tempfile.TemporaryDirectory() as folder:
        path = made(Path(folder))
        clusters = {n: qkv.cluster.Cluster(path, shards=n, options=FREE) for n in reversed(SHARDS)}
        try:
            threads.CORES = 1  # in this process too
            with qkv.open(path) as database, threads.one_for_blas():
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
    gain = found[1] / found[2]
    told = {"qkv": found[2], **{f"{n} shards": found[n] for n in SHARDS}}
    goal = "2 shards ≥ 1.6× the throughput of 1"
    yield row(f"cluster: {BATCH} queries over {M:,} × {D}", told, (goal, gain, gain >= 1.6))
    # One call costs the same whatever it asks: what a query of no rows takes.
    call = least({n: clusters[n].processes for n in SHARDS}, TURNS)
    merge = max((call[4] - call[1]) / 3, 0)
    scan, cores = found[1] - call[1], len(os.sched_getaffinity(0))
    for n in SHARDS:
        model = call[1] + merge * (n - 1) + scan / min(n, cores)
        yield row(f"cluster: model, {n} shards", {"qkv": found[n], "model": model})


def overhead(database, clusters: dict):
    query = np.random.default_rng(2).normal(size=D).astype("f4")
    small = qkv.Database(np.eye(4, D, dtype="f4"), np.eye(4, WIDTH, dtype="f4"))
    sides = {
        "qkv": lambda: clusters[1].ask(query),
        "in this process": lambda: database.ask(query),
        "4 rows in this process": lambda: small.ask(query),
    }
    found = least(sides, 4 * TURNS)
    over = 1e3 * (found["qkv"] - found["in this process"])
    yield row("cluster: one query", found, ("≤ 5 ms over in-process", over, over <= 5))


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
    for process in cluster.processes()[1:]:
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
    show_goals(keep("cluster", rows()))
