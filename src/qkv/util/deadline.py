"""A time limit for computations, which check it between blocks of work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from qkv.errors import QkvError

_DEADLINE: ContextVar[float | None] = ContextVar("qkv-deadline", default=None)


class DeadlineError(QkvError, TimeoutError):
    """A computation was stopped at its deadline."""


def current_deadline() -> float | None:
    """Return the deadline of this thread or task in `time.monotonic`; None means no limit."""
    return _DEADLINE.get()


@contextlib.contextmanager
def limit_time(deadline: float | None) -> Iterator[None]:
    """Stop the work inside the `with` statement at this `time.monotonic`; None sets no limit.

    >>> with limit_time(time.monotonic() - 1):
    ...     check_deadline()
    Traceback (most recent call last):
    qkv.util.deadline.DeadlineError: the computation exceeded its time limit: request fewer rows or
    queries at a time
    """
    token = _DEADLINE.set(deadline)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_deadline() -> None:
    """Raise `DeadlineError` if the deadline has passed."""
    deadline = _DEADLINE.get()
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineError(
            "the computation exceeded its time limit: request fewer rows or queries at a time"
        )
