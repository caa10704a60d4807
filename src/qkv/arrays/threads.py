"""One thread per core, for frameworks whose operations let go of the interpreter's lock."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from qkv.types import Lift, Merge

NAME = "qkv-core"

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Counted once, and not by a function: torch.compile would trace it."""


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix=NAME)


if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads, and would wait for them for ever.
    os.register_at_fork(after_in_child=_workers.cache_clear)


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


def each(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """function(item) for every item, on all cores, in the items' order; in this thread where it is
    one of ours, which would wait for itself."""
    return list(map(function, items) if inside() else _workers().map(function, items))


def reduced(lift: Lift, merge: Merge, start: Any, items: Sequence[Any]) -> Any:
    """The merged states of the items, each core merging its own run of them."""
    size = -(-len(items) // CORES)

    def some(at: int) -> Any:
        return functools.reduce(merge, map(lift, items[at : at + size]))

    return functools.reduce(merge, each(some, range(0, len(items), size)), start)
