"""Build one row of a table: several sides, timed in turns, with errors and goals."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from bench._clocks import Cpu
from bench._results import show, write

Side = Callable[..., Any]
Row = dict[str, Any]

SMALL = "--small" in sys.argv or bool(os.environ.get("QKV_BENCH_SMALL"))


def size(full: int, small: int) -> int:
    return small if SMALL else full


def peer(module: str) -> Any:
    """Return a module to measure against, or None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def mute(side: Side) -> Side:
    """Return the side without its result, unless it is the one asked for."""

    def muted(*given: Any) -> None:
        side(*given)

    return muted


def input_sets(make: Callable[[], tuple[Any, ...]], clock: Any = None) -> list[tuple[Any, ...]]:
    """Return three or more sets of inputs that together exceed the cache."""
    cache = 0 if SMALL else (clock or Cpu()).cache
    sets: list[tuple[Any, ...]] = []
    total = 0
    while len(sets) < 3 or total <= cache:
        sets.append(make())
        total += sum(getattr(x, "nbytes", 0) for x in sets[-1])
    return sets


def times(
    sides: dict[str, Side],
    repeats: int = 9,
    sets: Sequence[tuple[Any, ...]] = ((),),
    clock: Any = None,
    limit: float = 60.0,
) -> dict[str, float]:
    """Return the median seconds of each side, warm; they take turns, so noise affects all alike.

    After `limit` seconds three rounds are enough.
    """
    clock = clock or Cpu()
    given = itertools.cycle(sets)
    for side in sides.values():
        side(*next(given))
    runs: dict[str, list[Any]] = {name: [] for name in sides}
    begin = time.perf_counter()
    for turn in range(2 if SMALL else repeats):
        if turn >= 3 and time.perf_counter() - begin > limit:
            break
        for name, side in sides.items():
            runs[name].append(clock.start(side, next(given)))
    return {name: statistics.median(map(clock.seconds, found)) for name, found in runs.items()}


def compare(
    work: str,
    sides: dict[str, Side | None],
    sets: Sequence[tuple[Any, ...]] = ((),),
    *,
    exact: Side | None = None,
    goals: dict[str | tuple[str, ...], float] | None = None,
    most: float | None = None,
    no_worse_than: str | None = None,
    rate: tuple[float, str] | None = None,
    repeats: int = 9,
    clock: Any = None,
) -> Row:
    """Return a row of the table, and print it. The side in question is called "qkv".

    sides: functions of one of the sets; None is a peer that is not installed, and a side that
    returns None has no error. exact: the outputs in float64 for a set. goals: the wanted speedup
    over a peer, or over the fastest of several. most: the limit in MiB above the start.
    no_worse_than: the side whose error is the limit for qkv's. rate: the work of one call, and its
    unit.
    """
    clock = clock or Cpu()
    found: dict[str, dict[str, Any]] = {name: {} for name in sides}
    try:
        want = exact(*sets[0]) if exact else None
    except Exception as error:
        want = None
        print(f"{work}: no float64 to compare with: {_describe_error(error)}")
    runs = {}
    for name, side in sides.items():
        if side is None:
            found[name]["note"] = "not installed"
            continue
        try:
            got = side(*sets[0])
            if want is not None and got is not None:
                found[name]["error"] = relative_error(got, want)
            del got
            if clock.sees_memory:
                found[name]["extra MiB"] = clock.peak(side, sets[0])
            runs[name] = side
        except Exception as error:
            found[name]["note"] = _describe_error(error)
    del want
    try:
        timed = times(runs, repeats, sets, clock)
    except Exception as error:
        timed = {}
        print(f"{work}: not timed: {_describe_error(error)}")
    for name, seconds in timed.items():
        found[name]["ms"] = 1e3 * seconds
        if rate:
            found[name][rate[1]] = rate[0] / seconds / {"G": 1e9, "T": 1e12}[rate[1][0]]
    row = {"work": work, "sides": found, "goals": []}
    for names, least in (goals or {}).items():
        names = (names,) if isinstance(names, str) else names
        _judge(row, f"≥ {least:.3g}× {' and '.join(names)}", speedup(row, *names), least)
    if most is not None:
        _judge(row, f"≤ {most:g} MiB", found["qkv"].get("extra MiB"), most, upward=False)
    if no_worse_than is not None:
        bound = found[no_worse_than].get("error")
        goal = f"error ≤ that of {no_worse_than}"
        _judge(row, goal, found["qkv"].get("error"), bound, upward=False)
    show(row)
    return row


def speedup(row: Row, *names: str) -> float | None:
    """Return the speedup of qkv over the fastest of these sides."""
    sides = row["sides"]
    peers = [sides[name]["ms"] for name in names if "ms" in sides[name]]
    ours = sides.get("qkv", {}).get("ms")
    return min(peers) / ours if ours and peers else None


def _judge(
    row: Row, goal: str, found: float | None, bound: float | None, upward: bool = True
) -> None:
    met = None
    if found is not None and bound is not None:
        met = found >= bound if upward else found <= bound
    row["goals"].append({"goal": goal, "found": found, "met": met})


def relative_error(got: Any, want: Sequence[Any]) -> float:
    """Return the maximum over outputs of ‖got − want‖ / ‖want‖."""
    import torch

    got = got if isinstance(got, tuple | list) else [got]
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        x = torch.as_tensor(x).detach().to(y.device).double().reshape(y.shape)
        gap = float(torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(y))
        worst = gap if math.isnan(gap) else max(worst, gap)
        if math.isnan(worst):
            break
    return worst


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def save_results(name: str, rows: Iterable[Row], replace: bool = True) -> list[Row]:
    """Write the rows to results/name.json, each as soon as it is measured.

    replace: the rows replace the file; otherwise rows of other work stay in it.
    """
    done: list[Row] = []
    for row in _guarded(name, rows):
        done.append(row)
        if not SMALL:
            write(name, done, replace)
    return done


def _guarded(name: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows until one fails, so that the next script still runs."""
    try:
        yield from rows
    except Exception as error:
        print(f"{name}: {_describe_error(error)}", file=sys.stderr)
