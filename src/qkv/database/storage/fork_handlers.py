"""Forks: a child has a copy of its own of whatever lives in memory, whole and with free locks."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_REGISTERED: WeakSet[Any] = WeakSet()
_REGISTRY_LOCK = threading.RLock()
_held_locks: list[Any] = []


def register_fork_handler(thing: Any) -> None:
    """Let it be used by a child, too: its `quiet()` is a lock that can be had while nothing is half
    done, and `begin_anew()` forgets the threads of the parent, and what they hold."""
    with _REGISTRY_LOCK:  # one that is added while all are counted would end the counting
        _REGISTERED.add(thing)


# Python tells of an error in these and goes on, so that after a Ctrl-C in one the other is run. It
# looks for that when a call has ended: what is between two calls is done, or not begun.
def _before_fork() -> None:
    global _held_locks
    _REGISTRY_LOCK.acquire()
    for thing in list(_REGISTERED):
        lock = thing.fork_lock()
        _held_locks += [lock]
        lock.acquire()


def _after_fork() -> None:
    try:
        _release_locks()
    finally:
        _release_locks()


def _release_locks() -> None:
    if _REGISTRY_LOCK._is_owned():  # type: ignore[attr-defined]
        while _held_locks:
            lock = _held_locks[-1]
            ours = lock._is_owned()
            del _held_locks[-1]
            if ours:
                lock.release()
        _REGISTRY_LOCK.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for thing in list(_REGISTERED):
        thing.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
