"""A limit on the time that a computation takes: loops over blocks of work check it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from qkv.errors import QkvError

_DEADLINE: ContextVar[float | None] = ContextVar("qkv-deadline", default=None)


class DeadlineError(QkvError, TimeoutError):
    """A computation reached its deadline, and was stopped."""


def current_deadline() -> float | None:
    """When the work of this thread or task must end, by `time.monotonic`; None: never."""
    return _DEADLINE.get()


@contextlib.contextmanager
def limit_time(deadline: float | None) -> Iterator[None]:
    """Stop what runs inside at this `time.monotonic`; None stops nothing.

    >>> with limit_time(time.monotonic() - 1):
    ...     check_deadline()
    Traceback (most recent call last):
    qkv.util.deadline.DeadlineError: the work took longer than its time limit: ask for less at a
    time
    """
    token = _DEADLINE.set(deadline)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_deadline() -> None:
    """Raise DeadlineError if the deadline has passed. Called between two blocks of work."""
    deadline = _DEADLINE.get()
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineError("the work took longer than its time limit: ask for less at a time")
