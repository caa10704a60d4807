"""Timing two or more sides of one question in one run, and keeping what was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def times(sides: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """The best seconds of each side; they take turns, so that noise falls on all alike."""
    for side in sides.values():
        side()
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak_extra(function: Callable[[], Any]) -> float:
    """MiB of resident memory above the start while the function runs, sampled every 2 ms."""
    done = threading.Event()
    start = resident()
    highest = [start]

    def watch() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        done.set()
        watcher.join()
    return (highest[0] - start) / 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def machine() -> dict[str, Any]:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    packages = ("numpy", "torch", "jax", "tensorflow-cpu", "entmax")
    return {
        "cpu": model,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        **{name: of(name) for name in packages},
    }


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows and write them, with the machine, to results/name.json."""
    for row in rows:
        print(
            "  ".join(f"{k}: {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items())
        )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
