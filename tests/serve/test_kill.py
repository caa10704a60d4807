"""A row that was acknowledged is there, however the server ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path

import qkv
from tests.serve.process import serving


def test_no_acknowledged_row_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    path, kept = tmp_path / "kept.qkv", {"first"}
    with qkv.open(path, encoder="exact") as database:
        database.add("first", 0)
    with serving(path, "--write") as (url, server):
        client = qkv.Client(url, timeout=10)

        def add(writer: int) -> None:
            with contextlib.suppress(qkv.QkvError):
                for i in range(10_000):
                    key = f"{writer} {i}"
                    client.add("kept", key, i)
                    kept.add(key)

        writers = [threading.Thread(target=add, args=(writer,)) for writer in range(3)]
        for writer in writers:
            writer.start()
        while len(kept) < 20 and any(writer.is_alive() for writer in writers):
            time.sleep(0.01)
        server.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.join()
        client.close()
    assert len(kept) >= 20
    with qkv.open(path, create=False) as database:
        assert kept <= set(database)
