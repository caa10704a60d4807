"""Batch queries: all queries that arrive during a computation are answered by the next one."""

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
"""How long a batch waits for the next queries of the clients that were just answered.

It waits for this fraction of the duration of the last batch, but at most `MAX_WAIT_SECONDS`.
Without the wait, clients that query again would split into two batches, and each batch reads all
rows.
"""


class PendingRequest(NamedTuple):
    """One request that waits for a batch: its queries, and the future that gets the answers."""

    queries: Any
    size: int
    characters: int
    deadline: float | None
    future: Future[Any]


class QueryBatcher:
    """A thread that computes one batch of queries at a time, and a queue of waiting requests.

    `answer(options, queries)` returns a result or an exception for each request. Requests with
    equal options form a batch. `observe_batch` is called with the number of queries of each batch.

    >>> batches = QueryBatcher(lambda options, queries: [f"{options} {x}" for x in queries])
    >>> batches.submit_queries("hello", "Li").result()
    'hello Li'
    >>> batches.close()
    """

    def __init__(
        self, answer: AnswerFunction, observe_batch: Callable[[int], object] = lambda size: None
    ):
        self._answer_queries, self._observe_batch = answer, observe_batch
        self._thread = ThreadPoolExecutor(1, "qkv-ask")
        self._lock = threading.Condition()
        self._waiting_by_options: dict[Hashable, list[PendingRequest]] = {}
        self._busy = False
        self._expected_requests, self._pause_seconds, self._wait_deadline = 0, 0.0, 0.0
        """The wait before the next batch.

        It ends when `_expected_requests` requests are there, when none arrives for
        `_pause_seconds`, or at `_wait_deadline`.
        """

    def submit_queries(
        self, options: Hashable, queries: Any, size: int = 1, characters: int = 0
    ) -> Future[Any]:
        """Add the queries of one request to the next batch; return the future of their answers.

        `size` is the number of queries, and `characters` the length of their texts. The computation
        stops at the deadline of the caller.
        """
        future: Future[Any] = Future()
        with self._lock:
            request = PendingRequest(queries, size, characters, current_deadline(), future)
            self._waiting_by_options.setdefault(options, []).append(request)
            # A running thread checks for new requests before it ends.
            if not self._busy:
                try:
                    self._thread.submit(self._run_batches)
                except RuntimeError:
                    raise StoreClosedError("the server has closed this database") from None
                self._busy = True
            self._lock.notify()
        return future

    def _run_batches(self) -> None:
        while batch := self._next_batch():
            options, requests = batch
            requests = [x for x in requests if x.future.set_running_or_notify_cancel()]
            if not requests:
                continue
            self._observe_batch(sum(request.size for request in requests))
            begin = time.monotonic()
            deadlines = [x.deadline for x in requests if x.deadline is not None]
            try:
                # The batch may run until the last deadline of its requests.
                with limit_time(max(deadlines) if len(deadlines) == len(requests) else None):
                    answers = self._answer_queries(options, [x.queries for x in requests])
            except BaseException as error:
                answers = [error] * len(requests)
            with self._lock:
                self._expected_requests = len(requests) + self._count_waiting()
                now = time.monotonic()
                self._pause_seconds = min(WAIT_FRACTION * (now - begin), MAX_WAIT_SECONDS)
                self._wait_deadline = now + max(now - begin, self._pause_seconds)
            for request, answer in zip(requests, answers, strict=True):
                if isinstance(answer, BaseException):
                    request.future.set_exception(answer)
                else:
                    request.future.set_result(answer)

    def _next_batch(self) -> tuple[Any, list[PendingRequest]] | None:
        """Return the options and the requests of the next batch, or None if no request waits.

        The batch has the options of the oldest request.
        """
        with self._lock:
            if not self._waiting_by_options:
                self._busy = False
                return None
            while self._count_waiting() < self._expected_requests:
                wait_seconds = min(self._pause_seconds, self._wait_deadline - time.monotonic())
                if wait_seconds <= 0 or not self._lock.wait(wait_seconds):
                    break
            options = next(iter(self._waiting_by_options))
            requests, selected, count, characters = self._waiting_by_options.pop(options), 0, 0, 0
            while selected < len(requests):
                count += requests[selected].size
                characters += requests[selected].characters
                if selected and (
                    count > limits.MAX_QUERIES or characters > limits.MAX_BATCH_CHARACTERS
                ):
                    break
                selected += 1
            if requests[selected:]:
                # They now wait after the requests with other options.
                self._waiting_by_options[options] = requests[selected:]
            return options, requests[:selected]

    def _count_waiting(self) -> int:
        return sum(map(len, self._waiting_by_options.values()))

    def close(self) -> None:
        """Answer the waiting requests, then end the thread."""
        self._thread.shutdown(wait=True)
