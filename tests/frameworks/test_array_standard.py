"""`get_framework(x).xp` has the functions of the array standard 2023.12, with NumPy's values."""

from __future__ import annotations

import array_api_compat.numpy as numpy_standard
import numpy as np
import pytest

from qkv.frameworks import get_framework, to_numpy
from tests.installed_frameworks import FRAMEWORKS

SMALL = np.array([-0.9, -0.5, -0.0, 0.25, 0.5, 0.75])
REALS = np.array([-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 3.7])
POSITIVE = np.array([1e-3, 0.5, 1.0, 2.0, 8.0, 1000.0])
ABOVE_ONE = np.array([1.0, 1.5, 2.0, 10.0])
SPECIAL = np.array([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf, np.nan])
OTHERS = np.array([1.5, -2.0, 3.0, 0.5, -0.5, 4.0, 2.0, -1.0])
WHOLE, SHIFTS = np.array([-9, -3, 0, 5, 12], np.int32), np.array([0, 1, 2, 3, 4], np.int32)
BOOLS, FLAGS = np.array([True, False, True, False]), np.array([True, True, False, False])

ELEMENTWISE = {
    "abs": [(REALS,), (WHOLE,)],
    "acos": [(SMALL,)],
    "acosh": [(ABOVE_ONE,)],
    "add": [(REALS, OTHERS)],
    "asin": [(SMALL,)],
    "asinh": [(REALS,)],
    "atan": [(REALS,)],
    "atan2": [(REALS, OTHERS)],
    "atanh": [(SMALL,)],
    "bitwise_and": [(WHOLE, SHIFTS), (BOOLS, FLAGS)],
    "bitwise_invert": [(WHOLE,), (BOOLS,)],
    "bitwise_left_shift": [(WHOLE, SHIFTS)],
    "bitwise_or": [(WHOLE, SHIFTS), (BOOLS, FLAGS)],
    "bitwise_right_shift": [(WHOLE, SHIFTS)],
    "bitwise_xor": [(WHOLE, SHIFTS), (BOOLS, FLAGS)],
    "ceil": [(REALS,), (WHOLE,)],
    "clip": [(REALS, -1.0, 2.0)],
    "conj": [],
    "copysign": [(REALS, OTHERS)],
    "cos": [(REALS,)],
    "cosh": [(REALS,)],
    "divide": [(REALS, OTHERS)],
    "equal": [(REALS, OTHERS)],
    "exp": [(REALS,)],
    "expm1": [(REALS * 1e-6,)],
    "floor": [(REALS,), (WHOLE,)],
    "floor_divide": [(REALS, OTHERS)],
    "greater": [(REALS, OTHERS)],
    "greater_equal": [(REALS, OTHERS)],
    "hypot": [(REALS, OTHERS), (REALS * 1e200, OTHERS * 1e200), (SPECIAL[:-1], SPECIAL[:-1])],
    "imag": [],
    "isfinite": [(SPECIAL,), (WHOLE,)],
    "isinf": [(SPECIAL,), (WHOLE,)],
    "isnan": [(SPECIAL,), (WHOLE,)],
    "less": [(REALS, OTHERS)],
    "less_equal": [(REALS, OTHERS)],
    "log": [(POSITIVE,)],
    "log10": [(POSITIVE,)],
    "log1p": [(POSITIVE * 1e-9,)],
    "log2": [(POSITIVE,)],
    "logaddexp": [(REALS, OTHERS), (np.array([-np.inf, 3.0]), np.array([-np.inf, -np.inf]))],
    "logical_and": [(BOOLS, FLAGS)],
    "logical_not": [(BOOLS,)],
    "logical_or": [(BOOLS, FLAGS)],
    "logical_xor": [(BOOLS, FLAGS)],
    "maximum": [(REALS, OTHERS)],
    "minimum": [(REALS, OTHERS)],
    "multiply": [(REALS, OTHERS)],
    "negative": [(REALS,), (WHOLE,)],
    "not_equal": [(REALS, OTHERS)],
    "positive": [(REALS,)],
    "pow": [(POSITIVE, OTHERS[: len(POSITIVE)])],
    "real": [],
    "remainder": [(REALS, OTHERS)],
    "round": [(REALS,), (WHOLE,)],
    "sign": [(REALS,), (WHOLE,)],
    "signbit": [(SPECIAL[:-1],)],
    "sin": [(REALS,)],
    "sinh": [(REALS,)],
    "sqrt": [(POSITIVE,)],
    "square": [(REALS,)],
    "subtract": [(REALS, OTHERS)],
    "tan": [(REALS,)],
    "tanh": [(REALS,)],
    "trunc": [(REALS,), (WHOLE,)],
}
"""Arguments for every element-wise function of the standard; conj, real and imag take complex
numbers, which have their own test."""

X = np.array([[3.0, -1.0, 2.0], [0.5, 4.0, -2.0]])
Y = np.array([[1.0, 2.0, 0.0], [-3.0, 0.5, 1.0]])
POSITIONS = np.array([2, 0], np.int64)

CALLS = {
    "all": lambda xp, x, y, at: xp.all(x > 0, axis=1),
    "any": lambda xp, x, y, at: xp.any(x > 3, axis=0, keepdims=True),
    "arange": lambda xp, x, y, at: xp.arange(1, 7, 2, dtype=xp.int32),
    "argmax": lambda xp, x, y, at: xp.argmax(x, axis=1, keepdims=True),
    "argmin": lambda xp, x, y, at: xp.argmin(x),
    "argsort": lambda xp, x, y, at: xp.argsort(x, axis=1),
    "astype": lambda xp, x, y, at: xp.astype(x, xp.int32),
    "broadcast_arrays": lambda xp, x, y, at: xp.broadcast_arrays(x, y[:1, :])[1],
    "broadcast_to": lambda xp, x, y, at: xp.broadcast_to(x[:1, :], (4, 3)),
    "concat": lambda xp, x, y, at: xp.concat([x, y], axis=1),
    "concat_flat": lambda xp, x, y, at: xp.concat([x, y[0, :]], axis=None),
    "cumulative_sum": lambda xp, x, y, at: xp.cumulative_sum(x, axis=1, include_initial=True),
    "empty": lambda xp, x, y, at: xp.zeros_like(xp.empty((2, 3), dtype=xp.float32)),
    "empty_like": lambda xp, x, y, at: xp.zeros_like(xp.empty_like(x)),
    "expand_dims": lambda xp, x, y, at: xp.expand_dims(x, axis=1),
    "eye": lambda xp, x, y, at: xp.eye(2, 3, k=1, dtype=xp.float32),
    "flip": lambda xp, x, y, at: xp.flip(x),
    "flip_axis": lambda xp, x, y, at: xp.flip(x, axis=1),
    "full": lambda xp, x, y, at: xp.full((2, 2), 3.0, dtype=xp.float32),
    "full_like": lambda xp, x, y, at: xp.full_like(x, 3.0),
    "linspace": lambda xp, x, y, at: xp.linspace(0.0, 1.0, 5, dtype=xp.float32),
    "matmul": lambda xp, x, y, at: xp.matmul(x, xp.matrix_transpose(y)),
    "matmul_vector": lambda xp, x, y, at: xp.matmul(x, y[0, :]),
    "matmul_row": lambda xp, x, y, at: xp.matmul(x[:, 0], y),
    "max": lambda xp, x, y, at: xp.max(x, axis=1, keepdims=True),
    "mean": lambda xp, x, y, at: xp.mean(x, axis=0),
    "meshgrid": lambda xp, x, y, at: xp.meshgrid(x[0, :], y[:, 0])[0],
    "min": lambda xp, x, y, at: xp.min(x),
    "moveaxis": lambda xp, x, y, at: xp.moveaxis(x, 0, 1),
    "nonzero": lambda xp, x, y, at: xp.nonzero(y)[1],
    "ones": lambda xp, x, y, at: xp.ones((2, 2), dtype=xp.float32),
    "ones_like": lambda xp, x, y, at: xp.ones_like(x),
    "permute_dims": lambda xp, x, y, at: xp.permute_dims(x, (1, 0)),
    "prod": lambda xp, x, y, at: xp.prod(x, axis=1),
    "repeat": lambda xp, x, y, at: xp.repeat(x, 2, axis=1),
    "reshape": lambda xp, x, y, at: xp.reshape(x, (3, 2)),
    "roll": lambda xp, x, y, at: xp.roll(x, 1),
    "roll_axis": lambda xp, x, y, at: xp.roll(x, -1, axis=1),
    "searchsorted": lambda xp, x, y, at: xp.searchsorted(xp.sort(x[0, :]), y[0, :], side="right"),
    "sort": lambda xp, x, y, at: xp.sort(x, axis=0),
    "squeeze": lambda xp, x, y, at: xp.squeeze(x[:, :1], axis=1),
    "stack": lambda xp, x, y, at: xp.stack([x, y], axis=1),
    "std": lambda xp, x, y, at: xp.std(x, axis=1, correction=1.0),
    "sum": lambda xp, x, y, at: xp.sum(x, axis=0, keepdims=True),
    "take": lambda xp, x, y, at: xp.take(x, at, axis=1),
    "tensordot": lambda xp, x, y, at: xp.tensordot(x, y, axes=2),
    "tile": lambda xp, x, y, at: xp.tile(x, (2, 1)),
    "tril": lambda xp, x, y, at: xp.tril(x),
    "triu": lambda xp, x, y, at: xp.triu(x, k=1),
    "unique_all": lambda xp, x, y, at: xp.unique_all(xp.abs(y)).counts,
    "unique_counts": lambda xp, x, y, at: xp.unique_counts(xp.abs(y)).values,
    "unique_inverse": lambda xp, x, y, at: xp.unique_inverse(xp.abs(y)).inverse_indices,
    "unique_values": lambda xp, x, y, at: xp.unique_values(xp.abs(y)),
    "unstack": lambda xp, x, y, at: xp.unstack(x, axis=1)[2],
    "var": lambda xp, x, y, at: xp.var(x, axis=0),
    "vecdot": lambda xp, x, y, at: xp.vecdot(x, y, axis=-1),
    "where": lambda xp, x, y, at: xp.where(x > 0, x, y),
    "zeros": lambda xp, x, y, at: xp.zeros((2, 2), dtype=xp.float32),
    "zeros_like": lambda xp, x, y, at: xp.zeros_like(x),
}


@pytest.fixture(params=FRAMEWORKS, ids=lambda fw: fw.name)
def fw(request):
    return request.param


def _namespace(fw):
    return get_framework(fw.make_array([1.0])).xp


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(fw, name):
    function = getattr(_namespace(fw), name)
    for arguments in ELEMENTWISE[name]:
        inputs = [fw.make_array(x) if isinstance(x, np.ndarray) else x for x in arguments]
        with np.errstate(all="ignore"):
            expected = getattr(numpy_standard, name)(*arguments)
        np.testing.assert_allclose(to_numpy(function(*inputs)), expected, rtol=2e-7, atol=1e-15)


@pytest.mark.parametrize("name", CALLS)
def test_other_functions(fw, name):
    if (fw.name, name) == ("torch", "unique_all"):
        pytest.skip("torch does not give the first position of a value")
    call = CALLS[name]
    result = call(_namespace(fw), *map(fw.make_array, (X, Y, POSITIONS)))
    np.testing.assert_allclose(to_numpy(result), call(numpy_standard, X, Y, POSITIONS), rtol=2e-7)


@pytest.mark.parametrize("name", ["conj", "real", "imag"])
def test_complex_numbers(fw, name):
    if fw.name == "mxnet":
        pytest.skip("MXNet has no complex numbers")
    xp, x = _namespace(fw), np.array([1 + 2j, -3 - 4j])
    result = getattr(xp, name)(xp.asarray(x.tolist(), dtype=xp.complex128))
    np.testing.assert_allclose(to_numpy(result), getattr(np, name)(x))


def test_data_types(fw):
    xp = _namespace(fw)
    assert xp.isdtype(xp.float32, "real floating") and xp.isdtype(xp.int32, ("bool", "integral"))
    assert not xp.isdtype(xp.float64, xp.float32)
    assert xp.finfo(xp.float32).eps == np.finfo(np.float32).eps
    assert xp.iinfo(xp.int32).max == 2**31 - 1
    assert xp.can_cast(xp.float32, xp.float64)
    assert xp.result_type(xp.float32, xp.float64) == xp.float64
    assert (xp.pi, xp.e, xp.inf, xp.newaxis) == (np.pi, np.e, np.inf, None) and xp.nan != xp.nan


def test_a_score_may_use_any_function(fw):
    from qkv import attend

    query, key, value = (fw.make_array(x) for x in (X, Y, X))

    def score(query, key):
        xp = get_framework(query).xp
        return xp.log1p(xp.abs(xp.matmul(query, xp.matrix_transpose(key))))

    scores = np.log1p(np.abs(X @ Y.T))
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    result = attend(query, key, value, score=score)
    np.testing.assert_allclose(to_numpy(result), weights @ X, rtol=1e-6)
