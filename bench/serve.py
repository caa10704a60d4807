"""How much time does `qkv serve` add to a query, and does it withstand load?

python -m bench.serve [--small] [--minutes 10]

100,000 × 256 rows on disk, with vectors or encoded texts as keys. One server process; 32
connections in another process each send a query, wait for the answer and send the next. Both share
the cores. The load uses plain sockets and checks only status and value. In between, this process
asks the same queries, 32 at a time. `ms` is the time per query: over all answered ones, or of a
batch divided by 32. Then rows are added over HTTP until the server is killed, and looked up in the
store.

--minutes only asks vectors for that long and measures the server's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import qkv
from bench._results import show, show_goals
from bench._side_by_side import SMALL, save_results, size

M, D, CONNECTIONS, QUERIES = size(100_000, 2_000), 256, 32, 512
SECONDS = 4 if SMALL else 60
ROUND = 2 if SMALL else 10
"""Seconds of load between two looks at the other side."""
VALUE = re.compile(rb'"value":([-0-9.e]+),"rows"')
LENGTH = re.compile(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", re.IGNORECASE)
SRC = Path(__file__).resolve().parent.parent / "src"
BOOKS = SRC.parent / "examples" / "data" / "books.csv"


@contextlib.contextmanager
def serving(store):
    """Start a server for this store; yield process and address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "qkv", "serve", str(store), "--write", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        client = qkv.Client(f"http://127.0.0.1:{port}")
        for _ in range(200):
            with contextlib.suppress(qkv.QkvError):
                client.databases()
                break
            if process.poll() is not None:
                raise RuntimeError(f"qkv serve ended with {process.returncode}")
            time.sleep(0.1)
        yield process, port
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


# The load: a process of its own, which prints what it saw.


def request(query):
    body = json.dumps({"query": query}).encode()
    head = (
        "POST /v1/databases/rows/ask HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Sends its next query when the last one is answered."""

    def __init__(self, requests, expected, at, until, seen):
        self.requests, self.expected, self.at = requests, expected, at
        self.until, self.seen = until, seen
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.send()

    def send(self):
        self.heard, self.size = bytearray(), None
        self.begin = time.perf_counter()
        if self.begin < self.until:
            self.transport.write(self.requests[self.at])
        else:
            self.done.set_result(None)
            self.transport.close()

    def data_received(self, data):
        self.heard += data
        if self.size is None and (found := LENGTH.search(self.heard)):
            self.size = found.end() + int(found[1])
        if self.size is None or len(self.heard) < self.size:
            return
        self.seen["seconds"].append(time.perf_counter() - self.begin)
        value = VALUE.search(self.heard) if self.heard.startswith(b"HTTP/1.1 200") else None
        right = value and abs(float(value[1]) - self.expected[self.at]) < 1e-4
        self.seen["errors"] += not right
        self.at = (self.at + 1) % len(self.requests)
        self.send()

    def connection_lost(self, error):
        if not self.done.done():
            self.seen["errors"] += 1
            self.done.set_result(None)


async def load(port, path, seconds):
    given = np.load(path)
    requests = [request(query.tolist()) for query in given["queries"]]
    seen = {"seconds": [], "errors": 0}
    begin = time.perf_counter()
    starts = range(0, QUERIES, QUERIES // CONNECTIONS)
    each = [
        Connection(requests, given["expected"], start, begin + seconds, seen) for start in starts
    ]
    loop = asyncio.get_running_loop()
    for one in each:
        await loop.create_connection(lambda one=one: one, "127.0.0.1", port)
    await asyncio.gather(*(one.done for one in each))
    print(json.dumps(seen | {"elapsed": time.perf_counter() - begin}))


def memory(process):
    """Return the MiB of private memory, without mapped files."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def vectors(count, rng):
    """Return keys or queries: numbers with six digits in JSON."""
    return rng.standard_normal((count, D)).round(6)


def texts(count, rng):
    """Return keys or queries: four words out of a few thousand."""
    words = sorted(set(re.findall("[a-z]{3,}", BOOKS.read_text(encoding="utf-8").lower())))
    return [" ".join(some) for some in np.array(words)[rng.integers(len(words), size=(count, 4))]]


def measured(folder, seconds, keys):
    """Return the times of queries in this process and over HTTP, single and together, the errors,
    and the server's memory after each round.
    """
    rng = np.random.default_rng(0)
    how = {} if keys is vectors else {"encoder": "words"}
    columns = {"key": keys(M, rng), "value": rng.standard_normal(M)}
    store = folder / keys.__name__ / "rows.qkv"
    store.parent.mkdir()
    database = qkv.Database.from_columns(columns, key="key", path=store, **how)
    queries = keys(QUERIES, rng)
    expected = [answer.value for answer in database.ask(queries)]
    np.savez(folder / "load.npz", queries=queries, expected=expected)
    batches = [queries[at : at + CONNECTIONS] for at in range(0, QUERIES, CONNECTIONS)]
    took, waits, sizes = [], [], []
    errors = elapsed = 0
    with database, serving(store) as (process, port):
        for turn in range(max(round(seconds / ROUND), 1) + 1):
            words = ["load", port, folder / "load.npz", ROUND]
            command = [sys.executable, "-m", "bench.serve", *map(str, words)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for batch in batches[:4] if SMALL else batches:
                begin = time.perf_counter()
                database.ask(batch)
                took.append(time.perf_counter() - begin)
            sizes.append(memory(process))
            if turn:  # the first round warms up
                seen = json.loads(output)
                waits += seen["seconds"]
                errors += seen["errors"]
                elapsed += seen["elapsed"]
    return took, waits, elapsed, errors, sizes


def flat(sizes):
    half = len(sizes) // 2 + 1
    growth = max(sizes[half:]) - max(sizes[1:half], default=sizes[0])
    return goal("≤ 16 MiB more in the second half", growth, lambda x: x <= 16)


def under_load(folder, seconds, keys):
    took, waits, elapsed, errors, sizes = measured(folder, seconds, keys)
    p50, p99 = 1e3 * np.quantile(waits, [0.5, 0.99])
    served, alone = 1e3 * elapsed / len(waits), 1e3 * statistics.median(took) / CONNECTIONS
    row = {
        "work": f"{CONNECTIONS} connections ask {M:,} × {D} {keys.__name__}, {seconds:g} s",
        "sides": {
            "qkv": {"ms": served, "p50 ms": p50, "p99 ms": p99, "MiB": sizes[-1]},
            "in-process, 32 at a time": {"ms": alone},
        },
        "goals": [
            goal("≥ 60 % of in-process", alone / served, lambda x: x >= 0.6),
            goal("p99 ≤ 5× p50", p99 / p50, lambda x: x <= 5),
            goal("no errors", errors, lambda x: x == 0),
            flat(sizes),
        ],
    }
    show(row)
    return row


def remembered(folder, minutes):
    _, waits, _, errors, sizes = measured(folder, 60 * minutes, vectors)
    row = {
        "work": f"{CONNECTIONS} connections for {minutes:g} minutes: the server's memory",
        "sides": {
            "qkv": {"answers": len(waits), "MiB at first": sizes[0], "MiB at last": sizes[-1]}
        },
        "goals": [goal("no errors", errors, lambda x: x == 0), flat(sizes)],
    }
    show(row)
    return row


def goal(name, found, holds):
    return {"goal": name, "found": float(found), "met": bool(holds(found))}


def killed(folder, rounds=2 if SMALL else 10):
    """Return the acknowledged rows that are missing after kill −9 under load."""
    store = folder / "kept.qkv"
    with qkv.open(store) as database:
        database.add("first", 0)
    kept = {"first"}
    for turn in range(rounds):
        with serving(store) as (process, port):
            client = qkv.Client(f"http://127.0.0.1:{port}", timeout=10)

            def add(writer, turn=turn, client=client):
                with contextlib.suppress(qkv.QkvError):
                    for i in range(1_000_000):
                        key = f"{turn} {writer} {i}"
                        client.add("kept", key, i)
                        kept.add(key)

            writers = [threading.Thread(target=add, args=(writer,)) for writer in range(4)]
            for writer in writers:
                writer.start()
            before = len(kept)
            while len(kept) == before and process.poll() is None:
                time.sleep(0.01)  # the first row loads the encoder
            time.sleep(0.1 + 0.1 * turn)
            process.send_signal(signal.SIGKILL)
            process.wait()
            for writer in writers:
                writer.join()
    with qkv.open(store, create=False) as database:
        lost = len(kept - set(database))
    row = {
        "work": f"kill −9 in mid-load, {rounds} times",
        "sides": {"qkv": {"acknowledged": len(kept)}},
        "goals": [goal("no acknowledged row lost", lost, lambda x: x == 0)],
    }
    show(row)
    return row


def rows(minutes=None):
    with tempfile.TemporaryDirectory() as folder:
        if minutes is not None:
            yield remembered(Path(folder), minutes)
            return
        yield under_load(Path(folder), SECONDS, vectors)
        yield under_load(Path(folder), SECONDS, texts)
        yield killed(Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        asyncio.run(load(int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
    else:
        at = sys.argv.index("--minutes") if "--minutes" in sys.argv else None
        minutes = float(sys.argv[at + 1]) if at else None
        show_goals(save_results("serve" if minutes is None else "serve_memory", rows(minutes)))
