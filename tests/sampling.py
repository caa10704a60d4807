"""Which cases of a large product run: all in `make test-full`, a sample of the day in `make test`.

The sample changes with the date, so that daily runs cover the product in time. A failure is
repeated with the date that the header of the run prints: `QKV_TEST_DAY=2026-11-18 make test`.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

FULL = os.environ.get("QKV_FULL") == "1"
# The workers of one run inherit the date of the process that started them.
DAY = os.environ.setdefault("QKV_TEST_DAY", datetime.date.today().isoformat())

SHARE = float(os.environ.get("QKV_TEST_SHARE", "0.25"))
"""The share of the time of the slow tests that a run spends on them."""

T = TypeVar("T")


def draw(case: object) -> bytes:
    """Return the number of the day for a case; a sample takes the lowest."""
    return hashlib.blake2b(f"{DAY} {case}".encode(), digest_size=8).digest()


def sample(
    cases: Iterable[T], count: int, always: Iterable[T] = (), name: Callable[[T], object] = repr
) -> list[T]:
    """Return `count` cases drawn by the date, after those of `always`; all of them in a full run.

    `name` must not depend on the process: no addresses.

    >>> sample(range(10), 2, always=[7])[0]
    7
    """
    first = list(always)
    remaining = [case for case in cases if case not in first]
    if FULL or len(remaining) <= count:
        return first + remaining
    drawn = sorted(range(len(remaining)), key=lambda i: draw(name(remaining[i])))[:count]
    return first + [remaining[i] for i in sorted(drawn)]


def read_slow_tests() -> dict[str, float]:
    """Return the seconds of one case of each function that `tools.slow_tests` has listed."""
    lines = Path(__file__).with_name("slow_tests.txt").read_text().splitlines()
    return {name: float(seconds) for seconds, name in (line.split(" ", 1) for line in lines)}


def sample_by_seconds(
    seconds: Mapping[T, float], share: float, name: Callable[[T], object]
) -> set[T]:
    """Return cases drawn by the date that need about this share of the seconds of all.

    >>> sample_by_seconds({"a": 1.0, "b": 1.0}, 1.0, str) == {"a", "b"}
    True
    >>> len(sample_by_seconds(dict.fromkeys("abcd", 1.0), 0.5, str))
    2
    """
    left, drawn = share * sum(seconds.values()), set()
    for case in sorted(seconds, key=lambda case: draw(name(case))):
        if seconds[case] / 2 < left:
            drawn.add(case)
            left -= seconds[case]
    return drawn
