"""Every engine × score × weighting × mask × dtype × framework against the dense float64 answer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from qkv import scores, weightings
from qkv.engines import choice, triton
from qkv.testing import checks
from tests import cases
from tests.cases import LEARNED, SCORES, WEIGHTINGS, case
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS

FULL = bool(os.environ.get("QKV_FULL"))
CASES = cases.product() if FULL else cases.covering()
SPARSELY = (
    {} if FULL else {"jax": 16, "array_api_strict": 4, "tensorflow": 4, "mxnet": 4}
)  # one case in so many: each takes its time

# Triton's interpreter has tests/engines/triton, with quicker ones.
HERE = [e for e in choice.ENGINES_BY_NAME if e != "triton" or not triton.is_interpreted()]
engines = pytest.mark.parametrize("engine", HERE)


def some(given: list[Any], which: list[tuple[str, str, str]], one_in: int = 1) -> Any:
    """A test's frameworks and cases: of each framework one in so many."""
    chosen = [
        pytest.param(fw, *names, id="-".join((fw.name, *names)))
        for fw in given
        for names in which[:: SPARSELY.get(fw.name, 1) * one_in]
    ]
    return pytest.mark.parametrize(("fw", "score", "weighting", "mask"), chosen)


@engines
@some(FRAMEWORKS, CASES)
def test_values(fw, engine, score, weighting, mask):
    checks.check_values(case(score, weighting, mask), fw, engine)


@engines
@some(WITH_GRADIENTS, CASES)
def test_gradients(fw, engine, score, weighting, mask):
    checks.check_gradients(case(score, weighting, mask), fw, engine)


EACH = [(s, "softmax", "causal_window") for s in SCORES] + [
    ("scaled_dot" if not w.needs_nonnegative else "triangular", name, "lengths")
    for name, w in {**WEIGHTINGS, **LEARNED}.items()
]


@engines
@pytest.mark.parametrize("dtype", checks.TOLERANCE)
@some(FRAMEWORKS, EACH)
def test_dtypes(fw, engine, dtype, score, weighting, mask):
    if dtype not in fw.dtypes:
        pytest.skip(f"{fw.name} has no {dtype}")
    checks.check_dtype(case(score, weighting, mask), fw, engine, dtype)


@engines
@pytest.mark.parametrize("dtype", checks.TOLERANCE)
@some(WITH_GRADIENTS, EACH, 1 if FULL else 3)
def test_gradients_of_each_dtype(fw, engine, dtype, score, weighting, mask):
    if dtype not in fw.dtypes:
        pytest.skip(f"{fw.name} has no {dtype}")
    one = case(score, weighting, mask)
    given = one.make_arrays(fw, dtype)
    wide = {name: fw.make_array(x) for name, x in checks.to_float64(given).items()}
    with checks.with_small_blocks(one, fw, engine):
        found = one.compute_gradients(fw, given, engine)
    for name, got, want in zip(given, found, one.compute_gradients(fw, wide, "dense"), strict=True):
        error, size = np.linalg.norm(got - want), np.linalg.norm(want) + 1
        assert error < 2 * checks.TOLERANCE[dtype] * size, f"the gradient of {name} is off"


def test_every_score_and_weighting_is_listed():
    built = {type(scores.resolve(make(arrays))) for arrays, make in SCORES.values()}
    assert {*scores.NAMES.values()} <= built
    assert {*weightings.NAMES.values()} <= {type(w) for w in WEIGHTINGS.values()}
