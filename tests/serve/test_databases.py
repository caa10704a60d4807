"""A server's own threads may use all cores."""

from __future__ import annotations

from qkv import Database
from qkv.frameworks import threads
from qkv.serve.databases import DatabaseRegistry, ServedDatabase


def test_what_is_asked_is_not_taken_for_a_core_that_is_busy() -> None:
    served = DatabaseRegistry()
    entry: ServedDatabase = served.add_database("names", Database({"Li": "Mu"}))
    try:
        assert not entry.write_executor.submit(threads.is_worker_thread).result()
        assert not entry.batcher._thread.submit(threads.is_worker_thread).result()
        assert threads.map_parallel(lambda _: threads.is_worker_thread(), [0]) == [True]
    finally:
        served.close()
