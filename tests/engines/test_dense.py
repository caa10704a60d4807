"""The equation as a function of `attend`'s arguments: 16 bits, shared heads, the best key."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.frameworks import to_numpy

torch = pytest.importorskip("torch")

MAKE = {
    "numpy": lambda x: np.asarray(x, "float32"),
    "float32": lambda x: torch.tensor(x, dtype=torch.float32),
    "float16": lambda x: torch.tensor(x, dtype=torch.float16),
    "bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
}
TOLERANCE = {"numpy": 2e-5, "float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}
OPTIONS = {
    "sigmoid": {"weighting": "sigmoid"},
    "hard": {"weighting": "hard"},
    "entmax15": {"weighting": "entmax15"},
    "raw cosine": {"score": "cosine", "weighting": "raw"},
    "window": {"score": scores.Epanechnikov(9.0), "weighting": "normalized"},
    "cold": {"weighting": weightings.Softmax(0.5), "score": scores.ScaledDot(softcap=2.0)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kind", MAKE)
def test_shared_heads_and_16_bits(kind, heads, options):
    rng = np.random.default_rng(0)
    shapes = (2, 4, 5, 8), (2, heads, 30, 8), (2, heads, 30, 3)
    given = [MAKE[kind](rng.normal(size=shape)) for shape in shapes]
    wide = [to_numpy(x).astype("float64") for x in given]
    wide[1:] = (x.repeat(4 // heads, axis=1) for x in wide[1:])
    want = qkv.attend(*wide, **options, engine="streaming")
    for _ in range(2):  # the second by the plan of the first
        got = qkv.attend(*given, **options)
        assert got.dtype == given[0].dtype
        np.testing.assert_allclose(to_numpy(got), want, atol=TOLERANCE[kind])


@pytest.mark.parametrize("kind", MAKE)
def test_the_best_key_is_the_first_and_nan_is_not_hidden(kind):
    query = MAKE[kind]([[1.0, 0.0], [0.0, 1.0], [np.nan, 0.0], [-1.0, 0.0]])
    key = MAKE[kind]([[2.0, -1.0], [2.0, 0.0], [0.0, np.inf]])
    value = MAKE[kind]([[1.0], [2.0], [np.inf]])
    for _ in range(2):
        got = to_numpy(qkv.attend(query, key[:2], value[:2], score="dot", weighting="hard"))
        np.testing.assert_array_equal(got[:, 0], [1.0, 2.0, np.nan, 1.0])
        got = to_numpy(qkv.attend(query[1:2], key, value, score="dot", weighting="hard"))
        np.testing.assert_array_equal(got, [[np.inf]])


def test_a_learned_score_in_16_bits_is_computed_in_32():
    rng = np.random.default_rng(0)
    given = [MAKE["bfloat16"](rng.normal(size=(7, 4))).requires_grad_() for _ in range(3)]
    scale = torch.tensor(0.7, dtype=torch.bfloat16, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in (*given, scale)]
    for _ in range(2):
        out = qkv.attend(*given, score=scores.ScaledDot(scale), weighting="sigmoid")
        got = torch.autograd.grad(out.sum(), [*given, scale])
        s = wide[0] @ wide[1].T * wide[3]
        want = torch.autograd.grad((torch.sigmoid(s) @ wide[2]).sum(), wide)
        assert out.dtype == torch.bfloat16
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=5e-2)
