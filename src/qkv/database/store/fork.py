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


def _before() -> None:
    _ONE.acquire()
    for thing in list(_KNOWN):
        _held.append(thing.quiet())
        _held[-1].acquire()


def _after() -> None:
    while _held:
        _held.pop().release()
    _ONE.release()


def _in_child() -> None:
    _after()
    for thing in list(_KNOWN):
        thing.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
