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


FILLED_SHAPES = [
    ((96, 128), (96, 128)),
    ((96, 128), (1, 128)),
    ((3, 1, 64, 64), (2, 1, 64)),
    ((3, 1, 64, 64), (3, 2, 64, 64)),
]


@pytest.mark.parametrize("shapes", FILLED_SHAPES, ids=str)
@pytest.mark.parametrize("other", [0.0, -0.0, 1.0, -np.inf, np.nan])
def test_many_numbers_are_filled_by_their_bits(shapes, other):
    fw, rng = load_framework("numpy"), np.random.default_rng(0)
    x, live = rng.normal(size=shapes[0]).astype("f4"), rng.random(shapes[1]) > 0.3
    x.flat[:4] = np.nan, np.inf, -np.inf, -0.0
    kept = x.copy()
    want = np.where(live, x, np.float32(other))
    for given in (x, np.asfortranarray(x)):
        got = fw.fill_unless(given, live, other)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.view("i4"), want.view("i4"))
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_sigmoid_is_exact_for_small_results_and_does_not_overflow(dtype):
    fw = load_framework("numpy")
    for x in ([-3.0, 0.0, 7.0, 1e30], [-85.0, -100.0, -1e30, np.inf, -np.inf, np.nan]):
        x = np.array(x, dtype)
        with np.errstate(all="ignore"):
            want = 1 / (1 + np.exp(-x.astype(np.longdouble)))
        np.testing.assert_allclose(fw.sigmoid(x), want.astype(dtype), rtol=3e-7, atol=2e-44)


def test_a_function_has_a_plan_that_runs_the_function_of_each_call():
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 8)) for _ in range(3)]
    for i, factor in enumerate((1.0, -2.0, 0.5)):
        score = lambda q, k, x=factor: q @ k.T * x  # noqa: E731
        mask = qkv.masks.custom(lambda b, h, q, k, i=i: (q + k) % 3 != i)
        options = {"score": score, "mask": mask}
        assert qkv.explain(*inputs, **options).is_plan_cached == (i > 0)
        live = np.add.outer(np.arange(4), np.arange(4)) % 3 != i
        s = np.where(live, inputs[0] @ inputs[1].T * factor, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        want = w / w.sum(-1, keepdims=True) @ inputs[2]
        np.testing.assert_allclose(qkv.attend(*inputs, **options), want, atol=1e-12)


@pytest.mark.parametrize("weighting", ["softmax", "hard", "entmax15", "sigmoid", "raw"])
@pytest.mark.parametrize("bad", [1e30, np.nan, np.inf])
def test_masked_keys_of_a_function_do_not_reach_the_output(weighting, bad):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 6)).astype("f4") for n in (5, 9, 9))
    live = np.arange(9) < 6
    want = qkv.attend(q, k[:6], v[:6], score="dot", weighting=weighting)
    k[6:], v[6:] = bad, bad
    score = lambda q, k: (q @ k.T) * np.float32(1)  # noqa: E731
    for returned in (False, True):
        options = {"score": score, "weighting": weighting, "mask": live[None, :]}
        got = qkv.attend(q, k, v, **options, return_weights=returned)
        out = got[0] if returned else got
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-6)
        assert not returned or (got[1][:, 6:] == 0).all()
