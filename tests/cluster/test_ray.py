"""The real thing: one Ray, started once, for all that needs one. So this is one test."""

import os
import signal
import subprocess
import sys
import threading
import time
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from starlette.testclient import TestClient

import qkv
from qkv import weightings
from qkv.cluster import Cluster, LostShardError
from qkv.errors import ArgumentError
from qkv.serve.app import create_app
from qkv.serve.databases import open_sources
from qkv.serve.security import Access
from tests.sampling import sample

QUICK = str(Path(__file__).parent / "quick")
RNG = np.random.default_rng(0)
KEYS, VALUES = RNG.normal(size=(600, 8)).astype("f4"), RNG.normal(size=(600, 3)).astype("f4")
QUERY = KEYS[:5] * 2


def test_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([QUICK, *sys.path]))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # no caller asked for that one
    path = tmp_path / "numbers.qkv"
    with qkv.open(path) as D:
        D.add(KEYS, VALUES)
    from qkv.cluster.ray import start_ray

    start_ray(None, 2)
    try:
        with qkv.open(path) as D, Cluster(path, shards=2, timeout=600) as c:
            check_answers_and_gradients(D, c)
            check_deaths(D, c)
            check_writes(D, c)
        # Each starts processes of its own.
        for check in sample(
            [check_replicas, check_served, check_lost_stores], 1, name=attrgetter("__name__")
        ):
            check(path, tmp_path)
        check_errors(path, tmp_path)
    finally:
        ray.shutdown()


def check_answers_and_gradients(D: qkv.Database, c: Cluster) -> None:
    for weighting in ("softmax", "hard", weightings.TopK(3), weightings.Entmax(1.5)):
        for one, other in zip(
            D.ask(QUERY, weighting=weighting), c.ask(QUERY, weighting=weighting), strict=True
        ):
            np.testing.assert_allclose(other.value, one.value, rtol=1e-5, atol=1e-6)
            assert [row.index for row in other.rows] == [row.index for row in one.rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "qkv.cluster.ray.MAX_INLINE_BYTES", 0
        )  # as if there were many queries: they are stored as an object
        np.testing.assert_allclose(c.attend(QUERY), D.attend(QUERY), rtol=1e-5, atol=1e-6)
    query = torch.tensor(QUERY, requires_grad=True)
    slopes = [
        torch.autograd.grad(x.attend(query, weighting="sparsemax").square().sum(), query)[0]
        for x in (D, c)
    ]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-4, atol=1e-5)


def check_deaths(D: qkv.Database, c: Cluster) -> None:
    """No answer is wrong while shards are killed, and all are there."""
    want, actual = D.attend(QUERY), []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            actual.append(c.attend(QUERY))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for process in c.process_ids():
            os.kill(process, signal.SIGKILL)
        seen = len(actual)
        end = time.monotonic() + 600
        while len(actual) < seen + 3 and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert len(actual) >= seen + 3
    for out in actual:
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def check_writes(D: qkv.Database, c: Cluster) -> None:
    c.add(np.ones((2, 8), "f4"), np.zeros((2, 3), "f4"))
    assert len(c) == len(D) == 602
    np.testing.assert_array_equal(c[np.ones(8, "f4")], np.zeros(3))


def check_replicas(path: Path, folder: Path) -> None:
    """While one replica is away, the other answers; a slow one is not waited for."""
    with qkv.open(path) as D:
        want = D.attend(QUERY)
    free = {"num_cpus": 0}
    with Cluster(path, shards=1, replicas=2, options=free, hedge=0.2, timeout=600) as c:
        for _ in range(2):
            np.testing.assert_allclose(c.attend(QUERY), want, rtol=1e-5, atol=1e-6)
        os.kill(c.process_ids()[0], signal.SIGSTOP)
        stopped = c._shard_set.workers.replicas_of(0)
        for _ in range(3):
            np.testing.assert_allclose(c.attend(QUERY), want, rtol=1e-5, atol=1e-6)
        assert len(stopped) == 2


def check_served(path: Path, folder: Path) -> None:
    served = open_sources([path], shards=1)
    try:
        with TestClient(
            create_app(served, Access(None, None, True)), base_url="http://127.0.0.1"
        ) as web:
            query = QUERY[0].tolist()
            answer = web.post("/v1/databases/numbers/ask", json={"query": query}).json()
            assert "by 1 shard" in answer["engine"] and answer["total"] == 602
            row = {"key": [2.0] * 8, "value": [1.0] * 3}
            web.post("/v1/databases/numbers/rows", json={"rows": [row]}).raise_for_status()
            assert web.get("/v1/databases/numbers/info").json()["rows"] == 603
    finally:
        served.close()


def check_lost_stores(path: Path, folder: Path) -> None:
    """Stores whose disk is gone: an error, or a partial answer."""
    places = [folder / f"{i}.qkv" for i in range(2)]
    qkv.cluster.split(path, places)
    free = {"num_cpus": 0}
    with Cluster(places, options=free, timeout=600, partial=True) as c:
        full = c.ask(QUERY[0]).weights
        places[1].rename(folder / "gone")
        os.kill(c.process_ids()[1], signal.SIGKILL)
        part = c.ask(QUERY[0])
        wrong = 0.5 * np.abs(full - part.weights).sum()
        assert 0 < wrong <= part.error_bound <= 1
        c._shard_set.partial = False
        with pytest.raises(LostShardError, match="does not exist"):
            c.ask(QUERY[0])


def check_errors(path: Path, folder: Path) -> None:
    with pytest.raises(ArgumentError, match="Ray has"):
        Cluster(path, shards=99)
    with pytest.raises(qkv.QkvError, match="does not exist"):
        Cluster(folder / "nowhere.qkv", shards=1, options={"num_cpus": 0})


def test_ray_is_an_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import qkv\n"
        "try: qkv.cluster.Cluster('x.qkv')\n"
        "except qkv.QkvError as error: print(error)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout == 'a cluster needs ray: pip install "qkv[ray]"\n'


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="at least one store"):
        Cluster([])
    with pytest.raises(ArgumentError, match="shards must be"):
        Cluster("x.qkv", shards=0)
    with pytest.raises(TypeError, match="paths or URLs"):
        Cluster([3])  # type: ignore[list-item]
