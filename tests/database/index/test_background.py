"""The index that a thread builds: answers meanwhile, cancellation, and errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

import qkv
from qkv.database.index import segment_index
from qkv.database.storage import check_store
from qkv.errors import CombinationError
from tests.database.index.test_index_files import (  # noqa: F401
    OPTIONS,
    SCORE,
    create,
    is_indexed,
    make_keys,
    small_segments,
)

pytest.importorskip("faiss")


class Gate:
    """A progress callback at which the build waits."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, done, total):
        self.reached.set()
        assert self.opened.wait(60)


def make_database(path=None, rows=3000):
    x = make_keys(rows)
    columns = {"key": x, "value": np.arange(float(rows))}
    return x, qkv.Database.from_columns(columns, key="key", path=path)


def test_answers_meanwhile(tmp_path):
    x, D = make_database(tmp_path / "s.qkv")
    gate = Gate()
    with D:
        build = D.index(recall=0.9, score=SCORE, background=True, progress=gate)
        assert gate.reached.wait(60) and not build.is_done and "running" in repr(build)
        with pytest.raises(TimeoutError, match=r"not finished after 0\.01 s"):
            build.wait(0.01)
        answer = D.ask(x[5], **OPTIONS)
        assert answer.recall == 1 and answer.rows[0].index == 5 and not is_indexed(D, x[5])
        D.add(x[:1] + 100, [-1.0])  # a write does not wait
        assert D.ask(x[0] + 100, **OPTIONS).rows[0].value == -1
        for again in (False, True):
            with pytest.raises(CombinationError, match=r"wait\(\) for it or cancel\(\)"):
                D.index(score=SCORE, background=again)
        gate.opened.set()
        report = build.wait(60)
        assert build.is_done and report.indexed >= 2000 and repr(report) in repr(build)
        assert is_indexed(D, x[5]) and D.ask(x[0] + 100, **OPTIONS).rows[0].value == -1
        assert D.index(score=SCORE).indexed == report.indexed


def test_cancel(tmp_path):
    """Finished segments stay; the store is intact, and the index can be built again."""
    path = tmp_path / "s.qkv"
    x, D = make_database(path)
    with D:
        gate = Gate()
        build = D.index(score=SCORE, background=True, progress=gate)
        assert gate.reached.wait(60)
        build.cancel()
        gate.opened.set()
        with pytest.raises(CancelledError):
            build.wait(60)
        assert build.is_done and "Cancelled" in repr(build)
        assert not is_indexed(D, x[5]) and D.ask(x[5], **OPTIONS).rows[0].index == 5
        assert check_store(path) == []
        assert D.index(score=SCORE, background=True).wait(60).indexed and is_indexed(D, x[5])


def test_close_cancels(tmp_path):
    path = tmp_path / "s.qkv"
    _, D = make_database(path)
    gate = Gate()
    build = D.index(score=SCORE, background=True, progress=gate)
    assert gate.reached.wait(60)
    D.close()
    gate.opened.set()
    with pytest.raises((CancelledError, qkv.QkvError)):
        build.wait(60)
    assert check_store(path) == []


def test_errors(monkeypatch):
    """Wrong arguments raise at once, and an error of the thread in `wait`."""
    x, D = make_database(rows=1000)
    with pytest.raises(CombinationError, match="cannot find the best rows"):
        D.index(score="laplace", background=True)

    def fail(*args):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(segment_index, "build_arrays", fail)
        build = D.index(score=SCORE, background=True)
        with pytest.raises(MemoryError, match="no memory"):
            build.wait(60)
    assert D.ask(x[5], **OPTIONS).rows[0].index == 5


UNFINISHED = """
import sys
import qkv
from qkv.database.index import segment_index
from tests.database.index import test_index_files as t
segment_index.MIN_ROWS = 500
D = qkv.open(sys.argv[1])
D.index(score=t.SCORE, background=True)
"""


def test_the_process_ends_meanwhile(tmp_path):
    """The end of the process does not wait for the index."""
    path = tmp_path / "s.qkv"
    create(path)
    done = subprocess.run([sys.executable, "-c", UNFINISHED, str(path)], timeout=60)
    assert done.returncode == 0
    assert [x for x in check_store(path) if "left by" not in str(x)] == []
