"""What is special about NumPy: its loops run on threads of ours, and it sorts upwards only."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import qkv
from qkv.errors import DtypeError
from qkv.frameworks import load_framework, to_numpy

FORKED = """
import os
import numpy as np
import qkv

x = np.random.default_rng(0).normal(size=(8, 1024, 8))
want = qkv.attend(x, x, x, engine="streaming")
child = os.fork()
if child == 0:
    same = np.allclose(qkv.attend(x, x, x, engine="streaming"), want)
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0
"""

LIMITS = """
import numpy as np
from threadpoolctl import threadpool_info
import qkv

def threads():
    return [pool["num_threads"] for pool in threadpool_info()]

before = threads()
x = np.random.default_rng(0).normal(size=(8, 1024, 8))
qkv.attend(x, x, x, engine="streaming")
try:
    qkv.attend(x, x, x, engine="streaming", score=lambda q, k: 1 / 0)
except ZeroDivisionError:
    pass
assert threads() == before
"""


def exit_code(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert exit_code(FORKED) == 0


def test_the_caller_keeps_his_blas_threads() -> None:
    assert exit_code(LIMITS) == 0


@pytest.mark.parametrize("shape", [(1, 5000), (2, 2, 9001), (0, 5000), (3, 40)])
@pytest.mark.parametrize("k", [1, 7, 30])
def test_the_largest_of_a_long_row_are_those_of_a_sort(shape: tuple[int, ...], k: int) -> None:
    x = np.random.default_rng(0).integers(0, 300, size=shape).astype("float32")  # full of ties
    if x.size:
        rows = x.reshape(-1, shape[-1])
        rows[0, 3], rows[0, 17], rows[-1, 5:900] = -np.inf, np.nan, np.nan
    result, at = load_framework("numpy").stable_topk(x, k)
    order = np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(at, order)
    np.testing.assert_array_equal(result, np.take_along_axis(x, order, axis=-1))


def test_a_matrix_is_an_array_and_a_masked_one_is_refused():
    x = np.random.default_rng(0).normal(size=(3, 3))
    want = qkv.attend(x, x, x)
    for kind in (lambda x: x.view(np.matrix), np.ma.masked_array):
        for inputs in ((kind(x), x, x), (x, kind(x), x), (x, x, kind(x)), [kind(x)] * 3):
            for _ in range(2):  # the second finds a plan
                got = qkv.attend(*inputs)
                assert type(got) is np.ndarray
                np.testing.assert_allclose(got, want)
    hidden = np.ma.masked_array(x, mask=x > 0)
    for name in ("query", "key", "value"):
        with pytest.raises(DtypeError, match=f"{name} is a masked array"):
            qkv.attend(**{"query": x, "key": x, "value": x, name: hidden})
    with pytest.raises(DtypeError, match="query is a masked array"):
        qkv.weights(hidden, x)
    with pytest.raises(DtypeError, match="mask is a masked array"):
        qkv.attend(x, x, x, mask=np.ma.masked_array(x > 0, mask=x > 1))
    shown = to_numpy(np.ma.masked_array([[1, 2]], mask=[[False, True]]))
    np.testing.assert_array_equal(shown, [[1, np.nan]])
