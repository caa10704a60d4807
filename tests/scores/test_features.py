"""The functions of a and b whose products make tanh(a + b): their values and their gradients."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.frameworks import to_numpy
from qkv.scores import tanh_factors, tanh_features
from tests.installed_frameworks import FRAMEWORKS

pytestmark = pytest.mark.sample_of_module(4)

RANGES = [1.0, 3.0, 0.2, 3.0, 3.0, 2.5]


@pytest.fixture(params=[1, 2, 8])
def units(request, monkeypatch):
    """Units of several shapes, in groups of one, two, or as many as are alike."""
    monkeypatch.setattr(tanh_factors, "UNITS_PER_GROUP", request.param)
    tanh_factors._cached_units.cache_clear()
    yield tanh_factors.build_units(RANGES, RANGES[::-1], 1e-9)
    tanh_factors._cached_units.cache_clear()


def sides(rows: int = 7) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    wide = [np.array(RANGES), np.array(RANGES[::-1])]
    return [rng.uniform(-1, 1, (2, rows, len(RANGES))) * limit for limit in wide]


@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_products_are_tanh(fw, units):
    a, b = sides()
    v = np.linspace(-1, 2, len(RANGES))
    f = to_numpy(tanh_features.evaluate_features(units, 0, fw.make_array(a)))
    g = to_numpy(tanh_features.evaluate_features(units, 1, fw.make_array(b), fw.make_array(v)))
    assert f.shape == g.shape == (2, 7, units.width)
    want = np.tanh(a[:, :, None] + b[:, None]) @ v
    np.testing.assert_allclose(f @ np.swapaxes(g, -1, -2), want, atol=1e-8)


@pytest.mark.parametrize("side", [0, 1])
def test_in_place_is_the_same(units, side):
    x, v = sides()[side], np.linspace(-1, 2, len(RANGES))
    full = np.concatenate(tanh_features._features_by_group(units, side, x, v)).T.reshape(2, 7, -1)
    np.testing.assert_allclose(tanh_features.evaluate_features(units, side, x, v), full, atol=1e-12)


@pytest.mark.parametrize("side", [0, 1])
def test_gradients_of_our_own(units, side):
    """Compared with torch's derivatives of the first and second order."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(sides(3)[side]).requires_grad_()
    v = torch.linspace(-1, 2, len(RANGES), dtype=torch.float64).requires_grad_()
    along = torch.randn(2, 3, units.width, dtype=torch.float64)

    def by_torch(*args):
        return torch.cat(tanh_features._features_by_group(units, side, *args)).mT.reshape(2, 3, -1)

    for inputs in ([x, v], [x]):
        got = torch.autograd.grad(
            tanh_features.evaluate_features(units, side, *inputs), inputs, along
        )
        want = torch.autograd.grad(by_torch(*inputs), inputs, along)
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-9)
    few = torch.from_numpy(sides(1)[side] * 0.9).requires_grad_()  # two rows: it moves each number
    assert torch.autograd.gradgradcheck(
        lambda x, v: tanh_features.evaluate_features(units, side, x, v), (few, v)
    )


def test_tanh_is_the_same_the_other_way_round():
    one, two = tanh_factors.find_factors(0.5, 4.0, 1e-6), tanh_factors.find_factors(4.0, 0.5, 1e-6)
    assert one.term_count == two.term_count and one.input_ranges == two.input_ranges[::-1]
    np.testing.assert_array_equal(one.even[0], two.odd[1])
    np.testing.assert_array_equal(one.odd[1], two.even[0])
