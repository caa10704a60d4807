"""What MXNet's arrays do differently, against NumPy in float64."""

from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.errors import FrameworkError

mx = pytest.importorskip("mxnet")
mx.npx.set_np()

RNG = np.random.default_rng(5)
X = RNG.normal(size=(2, 3, 2, 5, 3))


def array(x: Any) -> Any:
    return mx.np.array(x, dtype=np.asarray(x).dtype)


def run_both(x: np.ndarray, **options: Any) -> tuple[Any, Any]:
    """The same call on MXNet and on NumPy; an option that is a function makes it of an array."""

    def run(make: Any) -> Any:
        built = {k: f(make) if callable(f) else f for k, f in options.items()}
        return qkv.attend(*[make(x)] * 3, **built)

    return run(array), run(np.asarray)


def test_the_mean_of_heads_keeps_its_digits() -> None:
    actual, expected = run_both(X[0], return_weights="mean")
    np.testing.assert_allclose(actual[1].asnumpy(), expected[1], rtol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"weighting": lambda make: weightings.Entmax(make(1.4))},
        {"mask": lambda make: masks.lengths(make(2))},
    ],
    ids=["alpha", "lengths"],
)
def test_an_array_without_axes(options: dict[str, Any]) -> None:
    actual, expected = run_both(X[0, 0, 0], **options)
    np.testing.assert_allclose(actual.asnumpy(), expected, rtol=1e-12)


def test_a_learned_alpha_without_axes_has_a_gradient() -> None:
    x, alpha = array(X[0, 0, 0]), array(1.4)
    alpha.attach_grad()
    with mx.autograd.record():
        out = qkv.attend(x, x, x, weighting=weightings.Entmax(alpha)).sum()
    out.backward()
    host, h = X[0, 0, 0], 1e-6
    near = [
        qkv.attend(host, host, host, weighting=weightings.Entmax(1.4 + s)).sum() for s in (h, -h)
    ]
    assert float(alpha.grad) == pytest.approx((near[0] - near[1]) / (2 * h), rel=1e-6)


def test_three_leading_axes_and_a_score_that_compares_pairs() -> None:
    held = [RNG.normal(size=shape) for shape in ((6, 3), (6, 3), (6,))]
    actual, expected = run_both(X, score=lambda make: scores.Additive(*map(make, held)))
    np.testing.assert_allclose(actual.asnumpy(), expected, rtol=1e-12)


def test_what_is_no_array_of_mx_np_is_refused_by_name() -> None:
    new, old = array(X[0, 0, 0]), array(X[0, 0, 0]).as_nd_ndarray()
    weight = scores.Multiplicative(array(np.eye(3)).as_nd_ndarray())
    calls: dict[str, Any] = {
        "value is": lambda: qkv.attend(new, new, old),
        "mask is": lambda: qkv.attend(new, new, new, mask=array(np.eye(5)).as_nd_ndarray()),
        "array of the score or the weighting is": lambda: qkv.attend(new, new, new, score=weight),
    }
    for named, call in calls.items():
        with pytest.raises(FrameworkError, match=rf"{named} .*as_np_ndarray\(\)"):
            call()


def test_an_error_for_a_hybridized_block_names_the_next_step() -> None:
    class Attends(mx.gluon.HybridBlock):
        def forward(self, x: Any) -> Any:
            return qkv.attend(x, x, x, score="gaussian")

    block = Attends()
    block.hybridize()
    with pytest.raises(FrameworkError, match=r"query .*hybridize\(False\)"):
        block(array(X))
    block.hybridize(False)
    np.testing.assert_allclose(
        block(array(X)).asnumpy(), qkv.attend(X, X, X, score="gaussian"), rtol=1e-12
    )
