"""A progress bar on stderr, where that is a terminal and rich is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from qkv.types import Progress


@contextmanager
def bar(label: str, total: int) -> Iterator[Progress]:
    """What to call with how much is done; it does nothing where nobody looks."""
    if not sys.stderr.isatty() or not find_spec("rich"):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda done, total: shown.update(task, completed=done, total=total)
