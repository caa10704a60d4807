"""A progress bar: in a terminal, where rich is there, on stderr; in a notebook below the cell."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from qkv.types import Progress

MOMENT = 0.5
"""Seconds before a bar is worth its place on the screen."""
OFTEN = 0.1
"""Seconds between two pictures of it in a notebook, to which each is a message."""


@contextmanager
def bar(label: str, total: int | None = None) -> Iterator[Progress]:
    """What to call with how much is done, and of how much; it does nothing where nobody looks, and
    shows nothing of what is done in a moment."""
    # Bars of two threads would draw over each other.
    alone = threading.current_thread() is threading.main_thread()
    drawn = _shown if in_notebook() else _drawn
    if not alone or (drawn is _drawn and not (sys.stderr.isatty() and find_spec("rich"))):
        yield lambda done, total: None
        return
    begun, shown = time.monotonic(), list[Progress]()
    with ExitStack() as stack:

        def moved(done: int, total: int | None) -> None:
            if not shown and time.monotonic() - begun > MOMENT:
                shown.append(stack.enter_context(drawn(label, total)))
            for move in shown:
                move(done, total)

        yield moved


def in_notebook() -> bool:
    """Whether a cell of a notebook runs, and not IPython in a terminal."""
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


@contextmanager
def _drawn(label: str, total: int | None) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def _shown(label: str, total: int | None) -> Iterator[Progress]:
    from IPython import display

    from qkv import told

    text: Any = display.Pretty
    place: Any = display.display(text(label), display_id=True)  # type: ignore[no-untyped-call]
    last = [0.0]

    def moved(done: int, total: int | None) -> None:
        if time.monotonic() - last[0] < OFTEN:
            return
        last[0] = time.monotonic()
        far = f"{told.bar(done / total):<{told.BAR}} {done / total:4.0%}" if total else f"{done:,}"
        place.update(text(f"{label} {far}"))

    try:
        yield moved
    finally:
        place.update(text(""))
