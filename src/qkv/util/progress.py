"""Progress bars: on stderr in a terminal if rich is installed, or below the cell of a notebook."""

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
"""How long work takes before a bar is shown."""
NOTEBOOK_INTERVAL_SECONDS = 0.1
"""The time between two updates in a notebook, because each one is a message."""


@contextmanager
def progress_bar(label: str, total: int | None = None) -> Iterator[ProgressCallback]:
    """Yield a callback (done, total) that shows a progress bar.

    The callback does nothing outside a terminal or notebook. Short work shows no bar.
    """
    # The bars of two threads would overwrite each other.
    is_main = threading.current_thread() is threading.main_thread()
    draw_bar = _notebook_bar if in_notebook() else _terminal_bar
    can_draw = draw_bar is _notebook_bar or (sys.stderr.isatty() and find_spec("rich"))
    if not is_main or not can_draw:
        yield lambda done, total: None
        return
    started, bars = time.monotonic(), list[ProgressCallback]()
    with ExitStack() as stack:

        def report_progress(done: int, total: int | None) -> None:
            if not bars and time.monotonic() - started > DELAY_SECONDS:
                bars.append(stack.enter_context(draw_bar(label, total)))
            for update_bar in bars:
                update_bar(done, total)

        yield report_progress


def in_notebook() -> bool:
    """Return whether this runs in a notebook, not in IPython in a terminal."""
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


@contextmanager
def _terminal_bar(label: str, total: int | None) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _notebook_bar(label: str, total: int | None) -> Iterator[ProgressCallback]:
    from IPython import display

    from qkv.util import formatting

    text: Any = display.Pretty
    handle: Any = display.display(text(label), display_id=True)  # type: ignore[no-untyped-call]
    last_update = [0.0]

    def report_progress(done: int, total: int | None) -> None:
        if time.monotonic() - last_update[0] < NOTEBOOK_INTERVAL_SECONDS:
            return
        last_update[0] = time.monotonic()
        progress = (
            f"{formatting.format_bar(done / total):<{formatting.BAR_WIDTH}} {done / total:4.0%}"
            if total
            else f"{done:,}"
        )
        handle.update(text(f"{label} {progress}"))

    try:
        yield report_progress
    finally:
        handle.update(text(""))
