"""Does a store larger than memory answer within a gigabyte? 40 GB of vectors, CPU.

The files of the store are sparse, so they use little disk: each segment begins with real rows, and
all others are 0, like their codes. A separate process asks. It is measured by its peak resident
memory (VmHWM: allocated memory and mapped pages), and by the peak of each part, sampled every few
milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import qkv
from bench._results import show
from bench._side_by_side import save_results, size
from qkv.database.storage.catalog import SEGMENT_COLUMNS, VersionEntry, row_crc
from qkv.database.storage.segments import (
    IDS_TENSOR,
    SEGMENT_SUFFIX,
    SegmentEntry,
    iterate_file_chunks,
)

BYTES = size(40 * 10**9, 3 * 10**9)
D, THERE = 4096, 512
"""Numbers in a vector, and the rows of each segment that are there."""
PIECE = 256 << 20
MOST = 1000
"""Megabytes that may be resident."""


def make(path: Path) -> None:
    """Create a store of few rows, then segments that begin like its own."""
    rng = np.random.default_rng(0)
    with qkv.open(path) as database:
        database.add(rng.standard_normal((THERE, D), np.float32), np.arange(THERE, dtype=float))
        store = database._store
        with store._write_session("commit") as (catalogue, writer):
            number, last, rows, generation, settings = writer.newest_version
            first = SegmentEntry(*catalogue.fetch_one(f"SELECT {SEGMENT_COLUMNS} FROM segments"))
            source = store._blob_storage.read_segment(first, writer.layout)
            records = catalogue.fetch_all("SELECT record FROM rows ORDER BY id")
            each, entries, at = PIECE // (writer.layout.row_bytes + 8), [], last + 1
            while sum(entry.size for entry in entries) < BYTES:
                file = f"segment-{writer.next_file_number + len(entries):08d}{SEGMENT_SUFFIX}"
                made = _holed(path / file, np.arange(at, at + each), source, writer.layout)
                entries.append(SegmentEntry(file, generation, at, at + each - 1, each, made, b""))
                at += each

            def lines() -> Iterator[tuple[int, bytes, str, int]]:
                for i in range(last + 1, at):
                    digest, (record,) = i.to_bytes(16, "little"), records[i % THERE]
                    yield i, digest, record, row_crc(i, digest, record)

            with catalogue.write_transaction():
                catalogue.execute_many("INSERT INTO rows VALUES (?, ?, ?, ?, NULL)", lines())
                marks = ", ".join("?" * 7)
                catalogue.execute_many(
                    f"INSERT INTO segments ({SEGMENT_COLUMNS}) VALUES ({marks})", entries
                )
                catalogue.execute(
                    "UPDATE counters SET files = ?", writer.next_file_number + len(entries)
                )
                newest = VersionEntry(
                    number + 1, at - 1, rows + at - last - 1, generation, settings
                )
                catalogue.insert_version(newest, "add", at - last - 1, 0)
            store._writer_state = None


def _holed(path: Path, ids: np.ndarray, source, layout) -> int:
    """Write a segment with these ids and the first rows of another; return its bytes."""
    tensors = {IDS_TENSOR: ids, **{name: source.tensors[name] for name in layout.tensor_names}}
    columns = [(name, x.dtype, (len(ids), *x.shape[1:]), []) for name, x in tensors.items()]
    with open(path, "wb") as file:
        file.write(next(iterate_file_chunks(columns, {"layout": layout.to_text()})))
        for name, dtype, shape, _ in columns:
            begin = file.tell()
            file.write(np.ascontiguousarray(tensors[name]).data)
            file.seek(begin + dtype.itemsize * int(np.prod(shape)))
        file.truncate()
        return file.tell()


def _resident() -> dict[str, float]:
    """Return megabytes by Linux's name for them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        line[0][:-1]: int(line[1]) / 1e3
        for line in lines
        if line[0] in ("VmHWM:", "RssAnon:", "RssFile:")
    }


def ask(path: Path) -> None:
    """Ask once, and print time and memory."""
    most, done = {"RssAnon": 0.0, "RssFile": 0.0}, threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            now = _resident()
            most.update({name: max(x, now[name]) for name, x in most.items()})

    threading.Thread(target=look, daemon=True).start()
    query = np.random.default_rng(0).standard_normal((THERE, D), np.float32)[7]
    with qkv.open(path, create=False) as database:
        begin = time.perf_counter()
        answer = database.ask(query, tolerance=0.01)
        seconds = time.perf_counter() - begin
        rows = len(database)
    done.set()
    print(seconds, rows, answer.rows_read, answer.error_bound, answer.value, end=" ")
    print(_resident()["VmHWM"], most["RssAnon"], most["RssFile"])


def rows():
    with tempfile.TemporaryDirectory(prefix="qkv-bench-") as d:
        path = Path(d) / "large.qkv"
        make(path)
        held = sum(file.stat().st_size for file in path.glob("*"))
        command = [sys.executable, "-m", "bench.large", "ask", str(path)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, count, read, bound, value, most, own, mapped = map(float, output.split())
    found = {
        "work": f"one query over {count:,.0f} × {D} in {held / 1e9:.0f} GB, tolerance 0.01",
        "sides": {
            "qkv": {
                "ms": 1e3 * seconds,
                "rows read": read,
                "bound": bound,
                "MB resident": most,
                "MB of its own": own,
                "MB of files": mapped,
                "load": os.getloadavg()[0],
            }
        },
        "goals": [
            {"goal": f"< {MOST} MB resident, VmHWM", "found": most, "met": most < MOST},
            {"goal": "the row that was asked for", "found": value, "met": value == 7},
        ],
    }
    show(found)
    yield found


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        ask(Path(sys.argv[2]))
    else:
        save_results("large", rows())
