"""A progress bar: in a terminal, where rich is there, on stderr; in a notebook below the cell."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from qkv.util.types import ProgressCallback

DELAY_SECONDS = 0.5
"""Seconds before a bar is worth its place on the screen."""
NOTEBOOK_INTERVAL_SECONDS = 0.1
"""Seconds between two pictures of it in a notebook, to which each is a message."""


@contextmanager
def progress_bar(label: str, total: int | None = None) -> Iterator[ProgressCallback]:
    """What to call with how much is done, and of how much; it does nothing where nobody looks, and
    shows nothing of what is done in a moment."""
    # Bars of two threads would draw over each other.
    alone = threading.current_thread() is threading.main_thread()
    drawn = _notebook_bar if in_notebook() else _terminal_bar
    if not alone or (drawn is _terminal_bar and not (sys.stderr.isatty() and find_spec("rich"))):
        yield lambda done, total: None
        return
    begun, shown = time.monotonic(), list[ProgressCallback]()
    with ExitStack() as stack:

        def report_progress(done: int, total: int | None) -> None:
            if not shown and time.monotonic() - begun > DELAY_SECONDS:
                shown.append(stack.enter_context(drawn(label, total)))
            for move in shown:
                move(done, total)

        yield report_progress


def in_notebook() -> bool:
    """Whether a cell of a notebook runs, and not IPython in a terminal."""
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


@contextmanager
def _terminal_bar(label: str, total: int | None) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def _notebook_bar(label: str, total: int | None) -> Iterator[ProgressCallback]:
    from IPython import display

    from qkv.util import formatting

    text: Any = display.Pretty
    place: Any = display.display(text(label), display_id=True)  # type: ignore[no-untyped-call]
    last = [0.0]

    def report_progress(done: int, total: int | None) -> None:
        if time.monotonic() - last[0] < NOTEBOOK_INTERVAL_SECONDS:
            return
        last[0] = time.monotonic()
        far = (
            f"{formatting.format_bar(done / total):<{formatting.BAR_WIDTH}} {done / total:4.0%}"
            if total
            else f"{done:,}"
        )
        place.update(text(f"{label} {far}"))

    try:
        yield report_progress
    finally:
        place.update(text(""))
