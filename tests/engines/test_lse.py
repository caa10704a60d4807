"""The log-sum-exp of 16-bit inputs is float32, so that answers over parts of the keys merge."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.engines import choice
from qkv.errors import EngineError
from qkv.frameworks import get_framework, to_numpy
from tests.installed_frameworks import FRAMEWORKS

pytestmark = pytest.mark.sample_of_module(25)

M, N, D = 4096, 8, 4
rng = np.random.default_rng(5)
ARRAYS = rng.normal(size=(N, D)), rng.normal(size=(M, D)), rng.normal(size=(M, 2))
SIXTEEN = [(fw, x) for fw in FRAMEWORKS for x in ("float16", "bfloat16") if x in fw.dtypes]


def merge_parts(parts):
    """Of outputs and log-sum-exps, in float64."""
    outs, lses = (
        [to_numpy(x).astype("float64") for x in column] for column in zip(*parts, strict=True)
    )
    share = np.exp(np.stack(lses) - np.max(lses, axis=0))
    return np.einsum("pn,pnd->nd", share / share.sum(0), np.stack(outs))


@pytest.mark.parametrize("score", ["scaled_dot", "gaussian"])
@pytest.mark.parametrize(("fw", "dtype"), SIXTEEN, ids=lambda x: getattr(x, "name", x))
def test_two_halves_merge(fw, dtype, score):
    check_two_halves(fw, dtype, score, None)
    served = []
    for engine in choice.ENGINES_BY_NAME:
        if engine == "triton":
            continue
        try:
            check_two_halves(fw, dtype, score, engine)
        except EngineError:
            continue
        served.append(engine)
    assert {"dense", "streaming"} <= {*served}


def check_two_halves(fw, dtype, score, engine):
    query, key, value = (fw.make_array(x, dtype) for x in ARRAYS)
    options = {"score": score, "engine": engine, "return_lse": True}
    cuts = (slice(0, M // 2), slice(M // 2, M))
    parts = [qkv.attend(query, key[at], value[at], **options) for at in cuts]
    assert {get_framework(lse).dtype_name(lse) for _, lse in parts} == {"float32"}
    wide = [to_numpy(x).astype("float64") for x in (query, key, value)]
    want = qkv.attend(*wide, score=score, engine="dense")
    for at, (_, actual) in zip(cuts, parts, strict=True):
        half = qkv.attend(wide[0], wide[1][at], wide[2][at], **options | {"engine": "dense"})[1]
        np.testing.assert_allclose(
            to_numpy(actual), half, atol=1e-2 if dtype == "bfloat16" else 2e-3
        )
    bits = {"float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(merge_parts(parts), want, atol=bits * np.abs(want).max())
