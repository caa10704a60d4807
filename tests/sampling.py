"""Which cases of a large product run: all in `make test-full`, a sample of the day in `make test`.

The sample changes with the date, so that daily runs cover the product in time. A failure is
repeated with the date that the header of the run prints: `QKV_TEST_DAY=2026-11-18 make test`.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

FULL = os.environ.get("QKV_FULL") == "1"
# The workers of one run inherit the date of the process that started them.
DAY = os.environ.setdefault("QKV_TEST_DAY", datetime.date.today().isoformat())

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
