"""Asks that come while others are computed are answered together, by one reading of the rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from qkv.database.errors import StoreClosedError
from qkv.serve import limits
from qkv.util.deadline import current_deadline, limit_time

AnswerFunction = Callable[[Any, list[Any]], Sequence[Any]]

WAIT_FRACTION, MAX_WAIT_SECONDS = 1 / 4, 0.05
"""How long a database waits for the next of those whom it has just answered: a part of the time
that they took, and some seconds at most; for all of them no longer than they took. Whoever asks
again by then is of the next batch, not of the one after: two halves read all rows twice."""


class Ask(NamedTuple):
    """Queries that wait for a batch."""

    asked: Any
    size: int
    characters: int
    deadline: float | None
    found: Future[Any]


class QueryBatcher:
    """A thread that computes one batch, and the asks that wait for the next.

    `answer(how, asked)` gives a result for each ask, or the exception that is its own. Asks are
    of one batch where their `how` is the same.

    >>> batches = QueryBatcher(lambda how, asked: [f"{how} {one}" for one in asked])
    >>> batches.submit_queries("hello", "Li").result()
    'hello Li'
    >>> batches.close()
    """

    def __init__(self, answer: AnswerFunction, seen: Callable[[int], object] = lambda size: None):
        self._answer_queries, self._observe_batch = answer, seen
        self._thread = ThreadPoolExecutor(1, "qkv-ask")
        self._lock = threading.Condition()
        self._waiting_by_options: dict[Hashable, list[Ask]] = {}
        self._busy = False
        self._expected_requests, self._pause_seconds, self._wait_deadline = 0, 0.0, 0.0
        """How many asked at once when the last batch ended, how long the next of them is waited
        for, and until when all are."""

    def submit_queries(
        self, how: Hashable, asked: Any, size: int = 1, characters: int = 0
    ) -> Future[Any]:
        """The answer to come; `size` is how many queries were asked, and `characters` how long
        their texts are together. Work for it stops at the deadline of whoever calls this."""
        found: Future[Any] = Future()
        with self._lock:
            ask = Ask(asked, size, characters, current_deadline(), found)
            self._waiting_by_options.setdefault(how, []).append(ask)
            # Whoever is at work looks for more before it ends.
            if not self._busy:
                try:
                    self._thread.submit(self._run_batches)
                except RuntimeError:
                    raise StoreClosedError("the database is no longer served") from None
                self._busy = True
            self._lock.notify()
        return found

    def _run_batches(self) -> None:
        while batch := self._next_batch():
            how, asks = batch
            asks = [ask for ask in asks if ask.found.set_running_or_notify_cancel()]
            if not asks:
                continue
            self._observe_batch(sum(ask.size for ask in asks))
            begin = time.monotonic()
            deadlines = [ask.deadline for ask in asks if ask.deadline is not None]
            try:
                # Nobody waits for an answer after the last deadline.
                with limit_time(max(deadlines) if len(deadlines) == len(asks) else None):
                    answers = self._answer_queries(how, [ask.asked for ask in asks])
            except BaseException as error:
                answers = [error] * len(asks)
            with self._lock:
                self._expected_requests = len(asks) + self._count_waiting()
                now = time.monotonic()
                self._pause_seconds = min(WAIT_FRACTION * (now - begin), MAX_WAIT_SECONDS)
                self._wait_deadline = now + max(now - begin, self._pause_seconds)
            for ask, answer in zip(asks, answers, strict=True):
                if isinstance(answer, BaseException):
                    ask.found.set_exception(answer)
                else:
                    ask.found.set_result(answer)

    def _next_batch(self) -> tuple[Any, list[Ask]] | None:
        """The asks that have waited longest, as many as one batch may hold."""
        with self._lock:
            if not self._waiting_by_options:
                self._busy = False
                return None
            while self._count_waiting() < self._expected_requests:
                left = min(self._pause_seconds, self._wait_deadline - time.monotonic())
                if left <= 0 or not self._lock.wait(left):
                    break
            how = next(iter(self._waiting_by_options))
            asks, taken, count, characters = self._waiting_by_options.pop(how), 0, 0, 0
            while taken < len(asks):
                count += asks[taken].size
                characters += asks[taken].characters
                if taken and (count > limits.MAX_QUERIES or characters > limits.TEXTS):
                    break
                taken += 1
            if asks[taken:]:
                self._waiting_by_options[how] = asks[taken:]  # behind the others
            return how, asks[:taken]

    def _count_waiting(self) -> int:
        return sum(map(len, self._waiting_by_options.values()))

    def close(self) -> None:
        """Answer what waits, and end."""
        self._thread.shutdown(wait=True)
