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

from qkv.deadline import check_deadline, current_deadline, limit_time
from qkv.types import Lift, Merge

NAME = "qkv-core"

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Counted once, and not by a function: torch.compile would trace it."""


@functools.cache
def _jobs() -> SimpleQueue[Callable[[], object]]:
    """What the threads do next. The standard library's executor would lose a thread to a Ctrl-C
    that comes while somebody waits for a result: its locks are taken in Python."""
    jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def work() -> None:
        while not _over:
            jobs.get()()

    names = [f"{NAME}-{number}" for number in range(CORES)]
    workers = [threading.Thread(target=work, name=name, daemon=True) for name in names]
    atexit.register(_end, jobs, workers)
    for worker in workers:
        worker.start()
    return jobs


_over: list[bool] = []
"""Filled when Python ends."""


def _end(jobs: SimpleQueue[Callable[[], object]], workers: list[threading.Thread]) -> None:
    """Wait for what is under way: Python would end its threads inside C++, which aborts."""
    _over.append(True)
    for _ in workers:
        jobs.put(bool)
    for worker in workers:
        if worker.is_alive():
            worker.join()


if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_jobs.cache_clear)


def one_for_blas() -> AbstractContextManager[object]:
    """NumPy's products by the thread that asks for them: two pools would wait for each other."""
    return _controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@functools.cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def inside() -> bool:
    """Whether this is one of our threads: all cores are busy then."""
    return threading.current_thread().name.startswith(NAME)


def begin(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Let a thread of ours do it; what is given waits for the result, as often as it is called. In
    one of them, which might wait for itself, and when Python ends, it is done at once."""
    found: list[tuple[Any, BaseException | None]] = []
    ready: SimpleQueue[None] = SimpleQueue()
    deadline = current_deadline()

    def job() -> None:
        try:
            with limit_time(deadline):
                found.append((function(*arguments), None))
        except BaseException as error:
            found.append((None, error))
        ready.put(None)

    def result() -> Any:
        if not found:  # where an interrupt took what came from `ready`, it is
            ready.get()
        value, error = found[0]
        if error is not None:
            raise error
        return value

    job() if _over or inside() else _jobs().put(job)
    return result


def each(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """function(item) for every item, on all cores, in the items' order."""
    items = list(items)
    out: list[Any] = [None] * len(items)
    failed: dict[int, BaseException] = {}
    rest = iter(range(len(items)))

    def some() -> None:
        for at in rest:
            try:
                check_deadline()
                out[at] = function(items[at])
            except BaseException as error:
                failed[at] = error
                deque(rest, 0)

    try:
        for result in [begin(some) for _ in range(min(CORES, len(items)))]:
            result()
    finally:
        deque(rest, 0)  # what was not begun never is, after Ctrl-C too
    if failed:
        raise failed[min(failed)]
    return out


def reduced(lift: Lift, merge: Merge, start: Any, items: Sequence[Any]) -> Any:
    """The merged states of the items, each core merging its own run of them."""
    size = -(-len(items) // CORES)

    def checked(item: Any) -> Any:
        check_deadline()
        return lift(item)

    def some(at: int) -> Any:
        return functools.reduce(merge, map(checked, items[at : at + size]))

    return functools.reduce(merge, each(some, range(0, len(items), size)), start)
