"""float32 parameters with 16-bit queries: computed in float32, with gradients in float32."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.errors import DtypeError
from qkv.frameworks import get_framework, to_numpy, tree
from tests.installed_frameworks import FRAMEWORKS

D, HIDDEN = 4, 3
HALVES = [
    pytest.param(fw, half, id=f"{fw.name} {half}")
    for fw in FRAMEWORKS
    for half in ("float16", "bfloat16")
    if half in fw.dtypes
]
_rng = np.random.default_rng(3)


def _normal(*shape: int) -> np.ndarray:
    return _rng.normal(size=shape)


QUERY, KEY, VALUE = _normal(2, 2, 6, D), _normal(2, 2, 7, D), _normal(2, 2, 7, D)

PARAMETERS: dict[str, dict[str, Any]] = {
    "entmax": {"weighting": weightings.Entmax(np.array(1.537))},
    "entmax of each head": {"weighting": weightings.Entmax(np.array([1.237, 1.537]))},
    "softmax": {"weighting": weightings.Softmax(np.array(0.737))},
    "multiplicative": {"score": scores.Multiplicative(_normal(D, D))},
    "additive": {
        "score": scores.Additive(
            _normal(HIDDEN, D), _normal(HIDDEN, D), _normal(HIDDEN), _normal(HIDDEN)
        )
    },
    "gated": {"score": scores.Gated(_normal(D), _normal(D), np.array(0.337))},
    "gaussian": {"score": scores.Gaussian(np.array(0.837))},
    "scaled dot": {"score": scores.ScaledDot(np.array(0.637))},
    "cosine": {"score": scores.Cosine(np.array(0.437))},
    "window": {"score": scores.Epanechnikov(np.array(4.037)), "weighting": "normalized"},
}


def build_records(fw: Any, name: str, dtype: str) -> dict[str, Any]:
    """The score and the weighting with their arrays in this framework and precision."""
    host = get_framework(np.ones(1))
    return {
        what: tree.map_arrays(host, lambda x: fw.make_array(x, dtype), record)
        for what, record in PARAMETERS[name].items()
    }


def compute_expected(fw: Any, half: str, name: str) -> np.ndarray:
    """The same in float64, of the numbers as 16 and as 32 bits hold them."""
    host = get_framework(np.ones(1))
    rounded = {
        what: tree.map_arrays(host, lambda x: x.astype(np.float32).astype(float), record)
        for what, record in PARAMETERS[name].items()
    }
    arrays = [np.asarray(to_numpy(fw.make_array(x, half)), float) for x in (QUERY, KEY, VALUE)]
    return qkv.attend(*arrays, **rounded, engine="dense")


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("fw", "half"), HALVES)
def test_they_are_computed_with_in_float32(fw: Any, half: str, name: str) -> None:
    check_dtype(fw, half, name, None)
    # The engines are the same for every framework, and the others take long to compile.
    for engine in ("dense", "streaming") if fw.name in ("numpy", "torch") else ():
        check_dtype(fw, half, name, engine)
    if fw.name in ("numpy", "torch"):
        with contextlib.suppress(qkv.errors.EngineError):
            check_dtype(fw, half, name, "lowered")


def check_dtype(fw: Any, half: str, name: str, engine: str | None) -> None:
    arrays = [fw.make_array(x, half) for x in (QUERY, KEY, VALUE)]
    options = build_records(fw, name, "float32")
    out = qkv.attend(*arrays, **options, engine=engine)
    assert get_framework(out).dtype_name(out) == half
    # One rounding to 16 bits, at the end.
    rounding = 2.0**-11 if half == "float16" else 2.0**-8
    want = compute_expected(fw, half, name)
    actual = np.asarray(to_numpy(out), float)
    np.testing.assert_allclose(actual, want, rtol=rounding, atol=2e-4 * np.abs(want).max())
    again = qkv.attend(*arrays, **options, engine=engine)  # by the cached choice
    np.testing.assert_array_equal(to_numpy(again), to_numpy(out))


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("fw", "half"), HALVES)
def test_every_entry_point_takes_them(fw: Any, half: str, name: str) -> None:
    arrays, options = (
        [fw.make_array(x, half) for x in (QUERY, KEY, VALUE)],
        build_records(fw, name, "float32"),
    )
    alpha = qkv.weights(*arrays[:2], **options)
    assert get_framework(alpha).dtype_name(alpha) == half
    out, other = qkv.attend(*arrays, **options, return_weights=True)
    assert get_framework(out).dtype_name(out) == get_framework(other).dtype_name(other) == half
    np.testing.assert_allclose(
        np.asarray(to_numpy(other), float), np.asarray(to_numpy(alpha), float), atol=2e-3
    )
    assert qkv.explain(*arrays, **options).engine == qkv.warm(*arrays, **options).engine


@pytest.mark.parametrize("engine", [None, "dense", "streaming"])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_their_gradients_are_float32(half: str, name: str, engine: Any) -> None:
    torch = pytest.importorskip("torch")
    if "torch" not in [fw.name for fw in FRAMEWORKS]:
        pytest.skip("torch is not among the frameworks of this run")
    fw = next(fw for fw in FRAMEWORKS if fw.name == "torch")
    inputs = [fw.make_array(x, half).requires_grad_() for x in (QUERY, KEY, VALUE)]
    options = build_records(fw, name, "float32")
    held = [
        x.requires_grad_()
        for x in tree.array_leaves(get_framework(inputs[0]), tuple(options.values()))
    ]
    slopes = torch.autograd.grad(
        qkv.attend(*inputs, **options, engine=engine).float().square().sum(), [*held, *inputs]
    )
    assert {x.dtype for x in slopes[: len(held)]} == {torch.float32}
    assert {x.dtype for x in slopes[len(held) :]} == {getattr(torch, half)}
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = build_records(fw, name, "float64")
    own = [
        x.requires_grad_()
        for x in tree.array_leaves(get_framework(inputs[0]), tuple(exact.values()))
    ]
    out = qkv.attend(*wide, **exact, engine="dense").square().sum()
    want = torch.autograd.grad(out, [*own, *wide])
    for actual, right in zip(slopes, want, strict=True):
        near = 0.05 * float(right.abs().max()) + 1e-3
        torch.testing.assert_close(actual.double(), right, rtol=0.05, atol=near)


@pytest.mark.parametrize("name", ["entmax", "multiplicative", "gaussian"])
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_their_gradients_are_float32_elsewhere(framework: str, name: str) -> None:
    fw = next((fw for fw in FRAMEWORKS if fw.name == framework), None)
    if fw is None:
        pytest.skip(f"{framework} is not among the frameworks of this run")
    arrays, options = (
        [fw.make_array(x, "bfloat16") for x in (QUERY, KEY, VALUE)],
        build_records(fw, name, "float32"),
    )
    own = get_framework(arrays[0])
    held = tree.array_leaves(own, tuple(options.values()))

    def loss(*parameters: Any) -> Any:
        fresh = tree.replace_arrays(own, tuple(options.values()), parameters)
        out = qkv.attend(*arrays, **dict(zip(options, fresh, strict=True)))
        return own.xp.sum(own.astype(out, "float32") ** 2)

    slopes = fw.gradients_of_floats(loss, held)
    assert [own.dtype_name(x) for x in slopes] == ["float32"] * len(held)
    assert all(np.isfinite(to_numpy(x)).all() and np.any(to_numpy(x)) for x in slopes)


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_a_float64_parameter_with_narrower_queries_is_an_error(fw: Any) -> None:
    for half in fw.dtypes:
        if half == "float64":
            continue
        arrays = [fw.make_array(x, half) for x in (QUERY, KEY, VALUE)]
        with pytest.raises(DtypeError, match=rf"query is {half} but .* is float64: cast one"):
            qkv.attend(*arrays, score=scores.Gaussian(fw.make_array(np.array(0.5), "float64")))
    if "float16" in fw.dtypes:  # and a parameter that is narrower than the query
        arrays = [fw.make_array(x, "float32") for x in (QUERY, KEY, VALUE)]
        with pytest.raises(DtypeError, match=r"query is float32 but .* is float16: cast one"):
            qkv.attend(*arrays, score=scores.Gaussian(fw.make_array(np.array(0.5), "float16")))
