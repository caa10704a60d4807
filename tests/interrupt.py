"""Ctrl-C at every place where it may fall, one after the other."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import qkv.database
from qkv.frameworks import threads

STORE = qkv.database.__path__[0]


@contextmanager
def cores(count: int) -> Iterator[None]:
    """So many threads of ours, however many cores there are."""
    with patch.object(threads, "CORE_COUNT", count):
        threads._job_queue.cache_clear()
        yield
        threads._job_queue.cache_clear()


def stopped(call: Callable[[], object], after: int, under: str | tuple[str, ...] = "") -> bool:
    """Whether Ctrl-C came before the call had ended: when so many functions of C had returned to
    files under these paths. Python looks for it then, and raises it where the call is."""
    left = after

    def profile(frame, event, arg):
        nonlocal left
        left -= event == "c_return" and frame.f_code.co_filename.startswith(under)
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    collects = gc.isenabled()
    gc.disable()  # else it may fall on what an earlier test left, where Python can only tell of it
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return False


def moments(call: Callable[[], object], under: str | tuple[str, ...] = STORE) -> Iterator[int]:
    """Let it be interrupted at its first place, its second, … and give each; at last it is not."""
    for after in itertools.count():
        early = stopped(call, after, under)
        yield after
        if not early:
            return
