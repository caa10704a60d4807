"""A server as a process of its own, and a table of books for it to serve."""

from __future__ import annotations

import contextlib
import re
import select
from collections.abc import Iterator
from typing import Any

from tests.cli.run import process


@contextlib.contextmanager
def serving(*arguments: object, env: dict[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """`qkv serve` of these sources and options: its address, and the process."""
    with process("serve", *arguments, "--port", 0, env=env) as server:
        try:
            ready, _, _ = select.select([server.stderr], [], [], 300)
            line = server.stderr.readline() if ready else "nothing"
            result = re.search(r"http://\S+?(?=;)", line)
            assert result, f"qkv serve said {line!r}"
            yield result[0], server
        finally:
            server.terminate()
            server.communicate(timeout=300)
