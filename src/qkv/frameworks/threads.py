"""One worker thread per core, for operations that release the interpreter's lock."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

from qkv.util.caches import memoize
from qkv.util.deadline import check_deadline, current_deadline, limit_time
from qkv.util.types import MergeFunction, PartialStateFunction

THREAD_NAME_PREFIX = "qkv-core"

CORE_COUNT = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
"""The number of cores. It is a constant, because torch.compile would trace a function."""


@functools.cache
def _job_queue() -> SimpleQueue[Callable[[], object]]:
    """Start the worker threads once and return their queue of jobs.

    A ThreadPoolExecutor takes its locks in Python, so Ctrl-C during a wait can leave a lock taken
    and lose a thread. The queue is state and not a cache: clearing it would leak threads.
    """
    jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def run_jobs() -> None:
        while not _shutdown_flag:
            jobs.get()()

    names = [f"{THREAD_NAME_PREFIX}-{number}" for number in range(CORE_COUNT)]
    workers = [threading.Thread(target=run_jobs, name=name, daemon=True) for name in names]
    atexit.register(_shut_down, jobs, workers)
    for worker in workers:
        worker.start()
    return jobs


_shutdown_flag: list[bool] = []
"""Not empty after Python began to shut down."""


def _shut_down(jobs: SimpleQueue[Callable[[], object]], workers: list[threading.Thread]) -> None:
    """Wait for running jobs. Otherwise Python ends the threads inside C++ code, which aborts."""
    _shutdown_flag.append(True)
    for _ in workers:
        jobs.put(bool)
    for worker in workers:
        if worker.is_alive():
            worker.join()


if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads and would wait for them forever.
    os.register_at_fork(after_in_child=_job_queue.cache_clear)


def single_threaded_blas() -> AbstractContextManager[object]:
    """Return a context in which BLAS uses one thread: two thread pools would slow each other."""
    return _threadpool_controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@memoize("frameworks.threadpool_controller")
def _threadpool_controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def is_worker_thread() -> bool:
    """Return whether this is a worker thread. In one, all cores are busy already."""
    return threading.current_thread().name.startswith(THREAD_NAME_PREFIX)


def submit_job(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Run a function in a worker thread; return a function that waits for the result.

    At shutdown and in a worker thread, the function runs at once: a worker might wait for itself.
    """
    outcome: list[tuple[Any, BaseException | None]] = []
    ready: SimpleQueue[None] = SimpleQueue()
    deadline = current_deadline()

    def run_job() -> None:
        try:
            with limit_time(deadline):
                outcome.append((function(*arguments), None))
        except BaseException as error:
            outcome.append((None, error))
        ready.put(None)

    def wait_for_result() -> Any:
        if not outcome:  # an interrupted wait may have emptied `ready` already
            ready.get()
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    run_job() if _shutdown_flag or is_worker_thread() else _job_queue().put(run_job)
    return wait_for_result


def map_parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return function(item) for every item, in order, computed on all cores."""
    items = list(items)
    out: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    remaining = iter(range(len(items)))

    def run_items() -> None:
        for at in remaining:
            try:
                check_deadline()
                out[at] = function(items[at])
            except BaseException as error:
                failed[at] = error
                deque(remaining, 0)

    try:
        for result in [submit_job(run_items) for _ in range(min(CORE_COUNT, len(items)))]:
            result()
    finally:
        deque(remaining, 0)  # drop the items that have not started, also after Ctrl-C
    if failed:
        raise failed[min(failed)]
    return out


def reduce_parallel(
    lift: PartialStateFunction, merge: MergeFunction, start: Any, items: Sequence[Any]
) -> Any:
    """Return the merged states of the items; each core merges consecutive items."""
    size = -(-len(items) // CORE_COUNT)

    def checked(item: Any) -> Any:
        check_deadline()
        return lift(item)

    def reduce_chunk(at: int) -> Any:
        return functools.reduce(merge, map(checked, items[at : at + size]))

    return functools.reduce(merge, map_parallel(reduce_chunk, range(0, len(items), size)), start)
