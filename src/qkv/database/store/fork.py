"""Forks: a child has a copy of its own of whatever lives in memory, whole and with free locks."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_KNOWN: WeakSet[Any] = WeakSet()
_ONE = threading.RLock()
_held: list[Any] = []


def survive(thing: Any) -> None:
    """Let it be used by a child, too: its `quiet()` is a lock that can be had while nothing is half
    done, and `begin_anew()` forgets the threads of the parent, and what they hold."""
    with _ONE:  # one that is added while all are counted would end the counting
        _KNOWN.add(thing)


# Python tells of an error in these and goes on, so that after a Ctrl-C in one the other is run. It
# looks for that when a call has ended: what is between two calls is done, or not begun.
def _before() -> None:
    global _held
    _ONE.acquire()
    for thing in list(_KNOWN):
        lock = thing.quiet()
        _held += [lock]
        lock.acquire()


def _after() -> None:
    try:
        _let_go()
    finally:
        _let_go()


def _let_go() -> None:
    if _ONE._is_owned():  # type: ignore[attr-defined]
        while _held:
            lock = _held[-1]
            ours = lock._is_owned()
            del _held[-1]
            if ours:
                lock.release()
        _ONE.release()


def _in_child() -> None:
    _after()
    for thing in list(_KNOWN):
        thing.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
