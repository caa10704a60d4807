"""Time several functions in turns; a slow one runs once, a fast one in bursts."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

BURST = 4e-3
"""Seconds of one turn, at least: the calls after the first do not share the cores with threads of
another side that still wait for work."""
MIN_ROUNDS, MAX_ROUNDS = 4, 25


class CallTimeoutError(RuntimeError):
    """A call took longer than its limit."""


@contextmanager
def limit_seconds(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Raise CallTimeoutError in the block after so many seconds, where the system has such timers.

    They are CPU seconds if the clock is `time.process_time`. A single operation is not interrupted:
    the error comes when it returns.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(*_: Any) -> None:
        raise CallTimeoutError(f"it took longer than {seconds:g} s")

    kinds = (signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_PROF, signal.SIGPROF)
    timer, event = kinds[clock is time.process_time]
    before = signal.signal(event, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(event, before)


def take_turns(
    sides: Mapping[str, Callable[[], Any]],
    settle: Callable[[], None],
    seconds: float,
    once: float,
    first: Mapping[str, float] | None = None,
    each: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the seconds of a call of each side, which were called before.

    It is the smallest of several times. Of CPU time it is the median, because that clock may stand
    still for milliseconds where the processor is shared.

    seconds: how long the turns go on, after MIN_ROUNDS. once: a call that takes longer than these
    seconds is not repeated. first: seconds of calls that were measured already. each: every call
    of a burst is timed alone; otherwise a burst is timed as a whole, as calls that are queued on a
    device are.
    """
    counts_cpu = clock is time.process_time
    summarize = statistics.median if counts_cpu else min
    burst = 3 * BURST if counts_cpu else BURST
    once_each, waited = dict(first or {}), dict(first or {})
    for name, side in sides.items():
        if name not in once_each:
            begin = time.perf_counter()
            once_each[name] = _time_burst(side, 1, settle, each, clock)
            waited[name] = max(time.perf_counter() - begin, once_each[name])
    turning = {name: side for name, side in sides.items() if once_each[name] <= once}
    found: dict[str, list[float]] = {name: [] for name in turning}
    counts = {name: max(1, min(500, round(burst / waited[name]))) for name in turning}
    begin, rounds = time.perf_counter(), 0
    while turning and rounds < MAX_ROUNDS:
        if rounds >= MIN_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for name, side in turning.items():
            short = counts[name] == 1 and once_each[name] < 10 * burst
            found[name].append(_time_burst(side, 2 if short else counts[name], settle, each, clock))
        rounds += 1
        if sum(once_each[name] for name in turning) > seconds:
            break  # one round takes longer than all were meant to
    return once_each | {name: summarize(times) for name, times in found.items()}


def _time_burst(
    side: Callable[[], Any],
    count: int,
    settle: Callable[[], None],
    each: bool,
    clock: Callable[[], float],
) -> float:
    """Return the seconds of one of `count` calls: the smallest, or the mean if not `each`."""
    settle()
    if each and clock is time.perf_counter:
        best = float("inf")
        for _ in range(count):
            begin = clock()
            side()
            settle()
            best = min(best, clock() - begin)
        return best
    begin = clock()
    for _ in range(count):
        side()
    settle()
    return max((clock() - begin) / count, 1e-6)
