"""A progress bar on stderr, where that is a terminal and rich is there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from qkv.types import Progress

MOMENT = 0.5
"""Seconds before a bar is worth its place on the screen."""


@contextmanager
def bar(label: str, total: int | None = None) -> Iterator[Progress]:
    """What to call with how much is done, and of how much; it does nothing where nobody looks, and
    shows nothing of what is done in a moment."""
    # Bars of two threads would draw over each other.
    alone = threading.current_thread() is threading.main_thread()
    if not alone or not sys.stderr.isatty() or not find_spec("rich"):
        yield lambda done, total: None
        return
    begun, shown = time.monotonic(), list[Progress]()
    with ExitStack() as stack:

        def moved(done: int, total: int | None) -> None:
            if not shown and time.monotonic() - begun > MOMENT:
                shown.append(stack.enter_context(_drawn(label, total)))
            for move in shown:
                move(done, total)

        yield moved


@contextmanager
def _drawn(label: str, total: int | None) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda done, total: shown.update(task, completed=done, total=total)
