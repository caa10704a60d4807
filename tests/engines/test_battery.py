"""Every engine × score × weighting × mask × dtype × framework against the dense float64 answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

from qkv import scores, weightings
from qkv.engines import choice, triton
from qkv.testing import checks
from tests import cases
from tests.cases import LEARNED, SCORES, WEIGHTINGS, case
from tests.installed_frameworks import FRAMEWORKS, WITH_GRADIENTS
from tests.sampling import FULL, sample

pytestmark = pytest.mark.sample_of_module(36 * len(FRAMEWORKS))

FUNCTIONS_REFUSED = ("tensorflow", "mxnet")

CASES = cases.product() if FULL else cases.covering()
SPARSELY = (
    {"numpy": 2, "torch": 3, "jax": 80, "array_api_strict": 16, "tensorflow": 60, "mxnet": 8}
    if not FULL
    else {}
)  # one case in so many
# Triton's interpreter has tests/engines/triton, with quicker ones.
ENGINES = [e for e in choice.ENGINES_BY_NAME if e != "triton" or not triton.is_interpreted()]


def parametrize_cases(
    frameworks: list[Any], names: list[tuple[str, str, str]], one_in: int = 1
) -> Any:
    """Parametrize a test by framework and case: of each framework one case in so many."""
    chosen = []
    for fw in frameworks:
        # TensorFlow and MXNet cannot find the arrays that a function refers to.
        served = [n for n in names if n[0] != "own_function" or fw.name not in FUNCTIONS_REFUSED]
        count = -(-len(served) // (SPARSELY.get(fw.name, 1) * one_in))
        chosen += [pytest.param(fw, *n, id="-".join((fw.name, *n))) for n in sample(served, count)]
    return pytest.mark.parametrize(("fw", "score", "weighting", "mask"), chosen)


def check_engines(check: Callable[..., None], *arguments: Any) -> None:
    """Run a check with every engine that serves the case; `dense` and `streaming` serve all.

    None is qkv's own choice: on a CPU, short calls then run in `engines/whole_matrix.py`.
    """
    for engine in (*ENGINES, None):
        try:
            check(*arguments[:2], engine, *arguments[2:])
        except SkipTest:
            assert engine not in ("dense", "streaming")
        except Exception as error:
            error.add_note(f"by the engine {engine}")
            raise


@parametrize_cases(FRAMEWORKS, CASES)
def test_values(fw, score, weighting, mask):
    check_engines(checks.check_values, case(score, weighting, mask), fw)


@parametrize_cases(WITH_GRADIENTS, CASES)
def test_gradients(fw, score, weighting, mask):
    check_engines(checks.check_gradients, case(score, weighting, mask), fw)


EACH = [(s, "softmax", "causal_window") for s in SCORES] + [
    ("scaled_dot" if not w.needs_nonnegative else "triangular", name, "lengths")
    for name, w in {**WEIGHTINGS, **LEARNED}.items()
]


@parametrize_cases(FRAMEWORKS, EACH)
def test_dtypes(fw, score, weighting, mask):
    for dtype in set(checks.TOLERANCE) & set(fw.dtypes):
        check_engines(checks.check_dtype, case(score, weighting, mask), fw, dtype)


def check_gradients_of_dtype(one: Any, fw: Any, engine: str, dtype: str) -> None:
    inputs = one.make_arrays(fw, dtype)
    wide = {name: fw.make_array(x) for name, x in checks.to_float64(inputs).items()}
    with checks.with_small_blocks(one, fw, engine):
        actual = one.compute_gradients(fw, inputs, engine)
    for name, got, want in zip(
        inputs, actual, one.compute_gradients(fw, wide, "dense"), strict=True
    ):
        error, size = np.linalg.norm(got - want), np.linalg.norm(want) + 1
        assert error < 2 * checks.TOLERANCE[dtype] * size, f"wrong gradient of {name} in {dtype}"


@parametrize_cases(WITH_GRADIENTS, EACH, 1 if FULL else 3)
def test_gradients_of_each_dtype(fw, score, weighting, mask):
    for dtype in set(checks.TOLERANCE) & set(fw.dtypes):
        check_engines(check_gradients_of_dtype, case(score, weighting, mask), fw, dtype)


def test_every_score_and_weighting_is_listed():
    built = {type(scores.resolve(make(arrays))) for arrays, make in SCORES.values()}
    assert {*scores.NAMES.values()} <= built
    assert {*weightings.NAMES.values()} <= {type(w) for w in WEIGHTINGS.values()}
