"""Measure seconds and MiB of one call, on the CPU and on a CUDA device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAUSE = 0.25
"""Seconds before each run on the CPU: the threads of the side before may still be spinning."""


class Cpu:
    """Wall-clock time."""

    # A process keeps what it once had, so only a first call shows what it takes.
    sees_memory = False

    @property
    def cache(self) -> int:
        """The bytes of the last-level cache."""
        sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        return max((int(p.read_text().strip().rstrip("K")) * 1024 for p in sizes), default=2**25)

    def start(self, function: Callable[..., Any], given: tuple[Any, ...]) -> float:
        """Run the function; the result is for `seconds`."""
        time.sleep(PAUSE)
        begin = time.perf_counter()
        function(*given)
        return time.perf_counter() - begin

    def seconds(self, run: float) -> float:
        return run

    def peak(self, function: Callable[..., Any], given: tuple[Any, ...] = ()) -> float:
        """Return the peak of resident memory above the start in MiB, sampled every 2 ms."""
        done = threading.Event()
        begin = _resident()
        highest = [begin]

        def watch() -> None:
            while not done.wait(0.002):
                highest[0] = max(highest[0], _resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            function(*given)
        finally:
            done.set()
            watcher.join()
        return (highest[0] - begin) / 2**20


class Cuda:
    """CUDA events. Calls are queued, so launch time overlaps with earlier work."""

    sees_memory = True

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda

    @property
    def cache(self) -> int:
        return int(self.cuda.get_device_properties(0).L2_cache_size)

    def start(self, function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, Any]:
        begin, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(*given)
        end.record()
        return begin, end

    def seconds(self, run: tuple[Any, Any]) -> float:
        begin, end = run
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def peak(self, function: Callable[..., Any], given: tuple[Any, ...] = ()) -> float:
        """Return the peak of allocated memory above the start in MiB, including the output."""
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        begin = self.cuda.memory_allocated()
        function(*given)
        self.cuda.synchronize()
        return float(self.cuda.max_memory_allocated() - begin) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
