"""One thread per core, for frameworks whose operations let go of the interpreter's lock."""

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

from qkv.util.deadline import check_deadline, current_deadline, limit_time
from qkv.util.types import MergeFunction, PartialStateFunction

THREAD_NAME_PREFIX = "qkv-core"

CORE_COUNT = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
"""Counted once, and not by a function: torch.compile would trace it."""


@functools.cache
def _job_queue() -> SimpleQueue[Callable[[], object]]:
    """What the threads do next. The standard library's executor would lose a thread to a Ctrl-C
    that comes while somebody waits for a result: its locks are taken in Python."""
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
"""Filled when Python ends."""


def _shut_down(jobs: SimpleQueue[Callable[[], object]], workers: list[threading.Thread]) -> None:
    """Wait for what is under way: Python would end its threads inside C++, which aborts."""
    _shutdown_flag.append(True)
    for _ in workers:
        jobs.put(bool)
    for worker in workers:
        if worker.is_alive():
            worker.join()


if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_job_queue.cache_clear)


def single_threaded_blas() -> AbstractContextManager[object]:
    """NumPy's products by the thread that asks for them: two pools would wait for each other."""
    return _threadpool_controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@functools.cache
def _threadpool_controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def is_worker_thread() -> bool:
    """Whether this is one of our threads: all cores are busy then."""
    return threading.current_thread().name.startswith(THREAD_NAME_PREFIX)


def submit_job(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Let a thread of ours do it; what is given waits for the result, as often as it is called. In
    one of them, which might wait for itself, and when Python ends, it is done at once."""
    found: list[tuple[Any, BaseException | None]] = []
    ready: SimpleQueue[None] = SimpleQueue()
    deadline = current_deadline()

    def run_job() -> None:
        try:
            with limit_time(deadline):
                found.append((function(*arguments), None))
        except BaseException as error:
            found.append((None, error))
        ready.put(None)

    def wait_for_result() -> Any:
        if not found:  # where an interrupt took what came from `ready`, it is
            ready.get()
        value, error = found[0]
        if error is not None:
            raise error
        return value

    run_job() if _shutdown_flag or is_worker_thread() else _job_queue().put(run_job)
    return wait_for_result


def map_parallel(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """function(item) for every item, on all cores, in the items' order."""
    items = list(items)
    out: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    rest = iter(range(len(items)))

    def run_items() -> None:
        for at in rest:
            try:
                check_deadline()
                out[at] = function(items[at])
            except BaseException as error:
                failed[at] = error
                deque(rest, 0)

    try:
        for result in [submit_job(run_items) for _ in range(min(CORE_COUNT, len(items)))]:
            result()
    finally:
        deque(rest, 0)  # what was not begun never is, after Ctrl-C too
    if failed:
        raise failed[min(failed)]
    return out


def reduce_parallel(
    lift: PartialStateFunction, merge: MergeFunction, start: Any, items: Sequence[Any]
) -> Any:
    """The merged states of the items, each core merging its own run of them."""
    size = -(-len(items) // CORE_COUNT)

    def checked(item: Any) -> Any:
        check_deadline()
        return lift(item)

    def reduce_chunk(at: int) -> Any:
        return functools.reduce(merge, map(checked, items[at : at + size]))

    return functools.reduce(merge, map_parallel(reduce_chunk, range(0, len(items), size)), start)
