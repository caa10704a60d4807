"""A server's own threads may use all cores."""

from __future__ import annotations

from qkv import Database
from qkv.arrays import threads
from qkv.serve.served import Kept, Served


def test_what_is_asked_is_not_taken_for_a_core_that_is_busy() -> None:
    served = Served()
    kept: Kept = served.put("names", Database({"Li": "Mu"}))
    try:
        assert not kept.writing.submit(threads.inside).result()
        assert not kept.batches._thread.submit(threads.inside).result()
        assert threads.each(lambda _: threads.inside(), [0]) == [True]
    finally:
        served.close()
