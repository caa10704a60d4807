"""What does the database cost? Import, open, exact, soft and filtered queries, memory, CPU."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import qkv
from bench._results import show
from bench._side_by_side import compare, keep, size
from qkv.weightings import TopK

TEXTS = size(100_000, 1_000)
M, D = size(1_000_000, 10_000), 256
LARGE = size(8, 1)
"""How many times M rows the large store has: 8 GB."""

SYLLABLES = "ba be bo da de do fa fi ga go ka ki la le lo ma mi mo na no pa pe ra ri ro sa so ta tu"


def words(rng, count):
    parts = np.array(SYLLABLES.split())
    return ["".join(parts[x]) for x in rng.integers(len(parts), size=(count, 3))]


def measured(work, ms, goal, found, met, **more):
    row = {
        "work": work,
        "sides": {"qkv": ({} if ms is None else {"ms": ms}) | more},
        "goals": [{"goal": goal, "found": found, "met": met}],
    }
    show(row)
    return row


def child(code, *args):
    """Return what a new process prints as JSON."""
    run = [sys.executable, "-c", code, *map(str, args)]
    return json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


OPEN = """
import json, sys, time
import numpy as np
import qkv, qkv.database.database
start = time.perf_counter()
D = qkv.open(sys.argv[1], create=False)
rows = len(D)
opened = time.perf_counter() - start
ids = np.random.default_rng(0).integers(0, rows, 500)
keys = D._view.snapshot.read_tensor("code", ids)
times = []
for key in keys:
    start = time.perf_counter()
    D[key]
    times.append(time.perf_counter() - start)
print(json.dumps({"open": opened, "look": float(np.median(times)), "rows": rows}))
"""

ASK = """
import json, re, sys, time
from pathlib import Path
import numpy as np
import qkv
def peak():  # not getrusage, which starts at what the parent had
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
D = qkv.open(sys.argv[1], create=False)
query = np.random.default_rng(1).normal(size=int(sys.argv[2])).astype("float32")
before = peak()
start = time.perf_counter()
D.ask(query)
print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak(), "before": before}))
"""


def imported(folder):
    rng = np.random.default_rng(0)
    vocabulary = words(rng, 20_000)
    file = folder / "texts.csv"
    with file.open("w") as out:
        out.write("title,author,year\n")
        chosen = rng.integers(len(vocabulary), size=(TEXTS, 7))
        for row, year in zip(chosen, rng.integers(1500, 2020, TEXTS), strict=True):
            texts = [vocabulary[i] for i in row]
            out.write(f"{' '.join(texts[:5])},{' '.join(texts[5:])},{year}\n")
    start = time.perf_counter()
    with qkv.Database.from_source(file, key="title", path=folder / "texts.qkv") as database:
        seconds = time.perf_counter() - start
        assert len(database) == TEXTS
    work = f"import {TEXTS:,} rows of text from CSV, encoded by letters and words"
    yield measured(work, 1e3 * seconds, "≤ 4 s", seconds, seconds <= 4)
    size = sum(x.stat().st_size for x in (folder / "texts.qkv").iterdir()) / 1e6
    yield measured(f"{TEXTS:,} titles on disk", None, "≤ 80 MB", size, size <= 80, MB=size)


def shell(folder):
    """Time commands, each in its own process; the minimum of several."""
    stored, small = folder / "texts.qkv", folder / "small.csv"
    lines = (folder / "texts.csv").read_text().splitlines(keepends=True)[:301]
    small.write_text("".join(lines))
    title = lines[5].partition(",")[0]
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    env = os.environ | compiled  # as an installed package is, once it was used
    for command, source, goal in (("get", stored, 250), ("ask", stored, 400), ("ask", small, 500)):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            run = [sys.executable, "-m", "qkv", command, source, title]
            subprocess.run(run, check=True, capture_output=True, env=env)
            times.append(1e3 * (time.perf_counter() - start))
        work = f"qkv {command} on {TEXTS if source is stored else 300:,} titles, from the shell"
        yield measured(work, min(times), f"≤ {goal} ms", min(times), min(times) <= goal)


def fill(path, times):
    """Create a store of a multiple of M rows; return the seconds for adding them."""
    rng, seconds = np.random.default_rng(0), 0.0
    with qkv.open(path) as database:
        for _ in range(times):
            keys, values = rng.normal(size=(M, D)).astype("float32"), rng.normal(size=M)
            start = time.perf_counter()
            database.add(keys, values)
            seconds += time.perf_counter() - start
    return seconds


def rows():
    folder = Path(tempfile.mkdtemp(prefix="qkv-bench-"))
    try:
        yield from imported(folder)
        yield from shell(folder)
        path = folder / "million.qkv"
        seconds = fill(path, 1)
        yield measured(f"import {M:,} × {D} f32", 1e3 * seconds, "≤ 8 s", seconds, seconds <= 8)
        found = [child(OPEN, path) for _ in range(5)]
        opened, look = (min(x[name] for x in found) for name in ("open", "look"))
        yield measured(f"open {M:,} rows", 1e3 * opened, "≤ 50 ms", 1e3 * opened, opened <= 0.05)
        yield measured(f"D[key] in {M:,} rows", 1e3 * look, "≤ 15 µs", 1e6 * look, look <= 15e-6)
        yield soft(path)
        yield from otherwise(path)
        yield from learned(path)
        yield from filtered(path)
        yield large(folder / "large.qkv")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def soft(path):
    with qkv.open(path, create=False) as database:
        parts = [part.tensors for part in database._view.snapshot.iterate_segments()]
        arrays = [x for part in parts for x in (part["code"], part["value"])]

        def reading(query):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the file must not be written to
                for x in arrays:
                    torch.from_numpy(x).sum()

        rng = np.random.default_rng(1)
        return compare(
            f"ask, softmax over {M:,} × {D} f32 on disk",
            {"qkv": lambda query: database.ask(query) and None, "reading the same bytes": reading},
            [(rng.normal(size=D).astype("float32"),) for _ in range(3)],
            goals={"reading the same bytes": 1 / 1.3},
            rate=(sum(x.nbytes for x in arrays), "GB/s"),
            repeats=45,
        )


def otherwise(path):
    """Time another score and other weightings, against the default."""
    rng = np.random.default_rng(1)
    queries = [(rng.normal(size=D).astype("float32"),) for _ in range(3)]
    kinds = (
        ("cosine", {"score": "cosine"}, 1.1),
        ("TopK(10)", {"weighting": TopK(10)}, 1.2),
        ("hard", {"weighting": "hard"}, 1.2),
    )
    with qkv.open(path, create=False) as database:
        for name, how, most in kinds:

            def other(query, how=how):
                database.ask(query, **how)

            yield compare(
                f"ask, {name}, over {M:,} × {D} f32",
                {
                    "qkv": other,
                    "softmax of dot products": lambda query: database.ask(query) and None,
                },
                queries,
                goals={"softmax of dot products": 1 / most},
                repeats=15,
            )


def learned(path):
    """Time Σ αᵢ vᵢ and the gradient of the query, against torch on arrays in memory."""
    with qkv.open(path, create=False) as database:
        parts = [part.tensors for part in database._view.snapshot.iterate_segments()]
        key, value = (
            torch.from_numpy(np.concatenate([x[n] for x in parts])) for n in ("code", "value")
        )
        value = value.float()

        def ours(query):
            query = query.clone().requires_grad_()
            database.attend(query).sum().backward()

        def torchs(query):
            query = query.clone().requires_grad_()
            (torch.softmax(query @ key.T / D**0.5, -1) @ value).sum().backward()

        for n in (1, 16):
            yield compare(
                f"attend, forward and backward, {n} queries over {M:,} × {D} f32",
                {"qkv": ours, "torch in memory": torchs},
                [(torch.randn(n, D),) for _ in range(3)],
                goals={"torch in memory": 1 / 1.2},
                repeats=15,
            )


def filtered(path):
    """Time conditions that keep few, some and most rows; each is new, so none is cached."""
    rng, fresh = np.random.default_rng(1), itertools.count()
    queries = [(rng.normal(size=D).astype("float32"),) for _ in range(3)]
    with qkv.open(path, create=False) as database:

        def alone(query):
            database.ask(query)

        for share, bound, goal in (
            (0.001, -3.0902, 3),
            (0.1, -1.2816, 1 / 1.2),
            (0.9, 1.2816, 1 / 1.2),
        ):

            def where(query, bound=bound):
                database.ask(query, where=f"value < {bound + next(fresh) * 1e-9!r}")

            yield compare(
                f"ask where {100 * share:g} % of {M:,} rows × {D} pass",
                {"qkv": where, "without where": alone},
                queries,
                goals={"without where": goal},
                repeats=15,
            )


def large(path):
    fill(path, LARGE)
    found = child(ASK, path, D)
    bytes_ = LARGE * M * D * 4
    return measured(
        f"ask, softmax over {bytes_ / 1e9:.1f} GB on disk, resident memory",
        1e3 * found["seconds"],
        "≤ 500 MB resident",
        found["peak"] * 1.048576,
        found["peak"] * 1.048576 <= 500,
        **{"extra MiB": found["peak"] - found["before"]},
    )


if __name__ == "__main__":
    keep("database", rows())
