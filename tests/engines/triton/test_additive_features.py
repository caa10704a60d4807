"""The additive score as a dot product: features against their polynomials and against tanh."""

from __future__ import annotations

import pytest
import torch

from qkv.engines.triton import TANH_ERROR, TANH_FUNCTION_PAIRS
from qkv.engines.triton.additive.additive_features import (
    FeatureInputs,
    build_tables,
    compute_features,
    count_gradient_parts,
    fill_gradients,
    fit_units,
    unit_ranges,
)
from qkv.scores.tanh_factors import build_pair_table

pytestmark = pytest.mark.sample_of_module(7)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE, _, GRID = build_tables(TANH_FUNCTION_PAIRS, TANH_ERROR, 1.0, DEVICE)
REACHES, OFF, SERIES = (
    torch.tensor(x, device=DEVICE) for x in build_pair_table(TANH_FUNCTION_PAIRS, TANH_ERROR)
)
REACH = GRID[0]
LAST = len(REACH) - 1
WIDEST = float(REACH[LAST])


def features_grad(dphi, dpsi, moved_a, moved_b, known):
    """da, db, and parts of dv."""
    a, b, v = known[:3]
    parts = torch.empty(count_gradient_parts(a, b, moved_a), v.shape[0], device=DEVICE)
    into = torch.empty_like(a), torch.empty_like(b), parts
    fill_gradients(dphi, dpsi, moved_a, moved_b, known, into)
    return into


def saturate(x):
    return x / (1 + x * x / 25) ** 0.5


def polynomials(x, v, rows, key):
    """The features in float64 by the powers of T's definition, differentiable, and what is added
    for each row alone."""
    z = saturate(x) / saturate(REACHES[rows])
    y = 2 * z * z - 1
    terms = [torch.ones_like(y), y]
    while len(terms) < SERIES.shape[-1]:
        terms.append(2 * y * terms[-1] - terms[-2])
    result = [sum(c[:, k] * term for k, term in enumerate(terms)) for c in SERIES[rows].unbind(1)]
    even, odd, main = (
        result[:TANH_FUNCTION_PAIRS],
        [z * f for f in result[TANH_FUNCTION_PAIRS:-1]],
        z * result[-1],
    )
    both = zip(odd, even, strict=True) if key else zip(even, odd, strict=True)
    columns = torch.stack([f for pair in both for f in pair], -2)
    return (columns * v if key else columns).flatten(-2), (main * v).sum(-1)


def fit_table_units(a, b, v):
    return fit_units(unit_ranges(a, b), v, TABLE, GRID)


def random_tensor(*shape, scale=1.0, dtype=torch.float32):
    x = (torch.rand(shape, device=DEVICE) * 2 - 1) * scale
    return x.to(dtype)


def first_rows(*arrays):
    """The row of the table for each unit, by its definition."""
    reach = torch.cat([x.reshape(-1, x.shape[-1]) for x in arrays]).float().abs().amax(0)
    return torch.searchsorted(REACH, reach)


@pytest.mark.parametrize(
    ("reach_a", "reach_b", "row"),
    [
        (0.5, 0.1, 0),
        (float(REACH[7]), 0.2, 7),
        (0.1, float(REACH[7]) + 1e-3, 8),
        (0.1, WIDEST, LAST),
        (WIDEST + 0.01, 1.0, None),
        (1.0, float("inf"), None),
        (float("nan"), 1.0, None),
    ],
)
@pytest.mark.parametrize("h", [5, 131])
def test_each_unit_has_the_first_row_of_the_table_that_reaches(h, reach_a, reach_b, row):
    a, b = random_tensor(2, 7, h, scale=0.05), random_tensor(3, h, scale=0.05)
    a[1, 3, -2], b[2, -2] = -reach_a, reach_b
    fit, beyond, _ = fit_table_units(a, b, random_tensor(h))
    assert beyond.tolist() == [int(row is None)]
    rows = torch.zeros(h, dtype=torch.long, device=DEVICE)
    rows[-2] = LAST if row is None else row
    torch.testing.assert_close(fit[0], 1 / saturate(REACH[rows]), rtol=1e-6, atol=0)
    assert torch.equal(fit[1:], TABLE[rows].reshape(h, -1).mT)


@pytest.mark.sample(12)
@pytest.mark.parametrize("h", [20, 64, 131])
@pytest.mark.parametrize(("least", "most"), [(0.5, 0.5), (3.0, 3.5), (0.5, 6.0), (6.0, 6.0)])
@pytest.mark.parametrize("fine", [1.0, 0.125])
@pytest.mark.parametrize("slopes", [0, 1])
def test_the_width_is_that_of_the_fewest_pairs_that_are_near_enough(h, least, most, fine, slopes):
    reach, v = torch.linspace(least, most, h, device=DEVICE), random_tensor(h)
    off = OFF[slopes][torch.searchsorted(REACH, reach)] / fine
    enough = ((off * v.abs()[:, None]).sum(0) <= v.abs().sum()).tolist()
    pairs = enough.index(True) + 1 if True in enough else TANH_FUNCTION_PAIRS
    coefficients, *grids = build_tables(TANH_FUNCTION_PAIRS, TANH_ERROR, fine, DEVICE)
    width = fit_units(reach[None], v, coefficients, grids[slopes])[2]
    assert width.tolist() == [min(-(-2 * h * pairs // 64) * 64, 2 * h * TANH_FUNCTION_PAIRS)]


def mixed_scale_tensor(*shape, scale):
    """Units of unlike reach, from a tenth of the scale to all of it."""
    return random_tensor(*shape, scale=scale) * torch.linspace(0.1, 1.0, shape[-1], device=DEVICE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape_a", "shape_b", "scale"),
    [
        ((3, 17, 5), (2, 5), 0.8),
        ((2, 1, 3, 64), (1, 41, 64), WIDEST),
        ((2, 130), (19, 130), 3),
    ],
)
def test_values_and_gradients_are_those_of_the_polynomials(shape_a, shape_b, scale):
    a, b, v = (
        mixed_scale_tensor(*shape_a, scale=scale),
        mixed_scale_tensor(*shape_b, scale=scale),
        random_tensor(shape_a[-1]),
    )
    rows = first_rows(a, b)
    assert len(rows.unique()) > 1
    known = FeatureInputs(a, b, v, *fit_table_units(a, b, v), TANH_FUNCTION_PAIRS)
    width = int(known.width)
    exact = [x.double().requires_grad_() for x in (a, b, v)]
    sides = [polynomials(x, exact[2], rows, key=x is exact[1]) for x in exact[:2]]
    want = [side[0][..., :width] for side in sides] + [side[1] for side in sides]
    actual = compute_features(known)
    got = [x[..., :width] for x in actual[:2]] + list(actual[2:])
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=3e-6 * two.abs().max().item())
    along = [torch.randn_like(x) for x in actual]
    da, db, parts = features_grad(*along, known)
    cotangents = [x[..., :width].double() for x in along[:2]] + [x.double() for x in along[2:]]
    expected = torch.autograd.grad(want, exact, cotangents)
    for one, two in zip((da, db, parts.sum(0)), expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=0, atol=1e-5 * two.abs().max().item())
    along[2].zero_()
    for one, two in zip(
        features_grad(*along, known),
        features_grad(*along[:2], None, *along[3:], known),
        strict=True,
    ):
        torch.testing.assert_close(one.sum(0), two.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, TANH_ERROR), (torch.bfloat16, 3 * TANH_ERROR)]
)
def test_their_product_is_the_score(dtype, error):
    a, b = (mixed_scale_tensor(rows, 8, scale=WIDEST).to(dtype) for rows in (40, 30))
    v = random_tensor(8)
    actual = compute_features(
        FeatureInputs(a, b, v, *fit_table_units(a, b, v), TANH_FUNCTION_PAIRS)
    )
    assert actual[0].dtype == actual[1].dtype == dtype
    want = (torch.tanh(a.double()[:, None] + b.double()[None]) * v.double()).sum(-1)
    phi, psi, one, two = (x.double() for x in actual)
    off = (phi @ psi.mT + one[:, None] + two - want).abs().max()
    assert off < error * v.abs().sum()


def test_one_unit_beyond_the_table_and_all_features_and_gradients_are_zero():
    a, b, v = random_tensor(4, 6), random_tensor(3, 6), random_tensor(6)
    b[1, 2] = 2 * WIDEST
    known = FeatureInputs(a, b, v, *fit_table_units(a, b, v), TANH_FUNCTION_PAIRS)
    result = compute_features(known)
    along = [torch.ones_like(x) for x in result]
    for x in (*result, *features_grad(*along, known)):
        assert not x.any()


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows(n, m):
    a, b, v = random_tensor(n, 6), random_tensor(m, 6), random_tensor(6)
    known = FeatureInputs(a, b, v, *fit_table_units(a, b, v), TANH_FUNCTION_PAIRS)
    result = compute_features(known)
    assert [tuple(x.shape) for x in result] == [
        (n, 12 * TANH_FUNCTION_PAIRS),
        (m, 12 * TANH_FUNCTION_PAIRS),
        (n,),
        (m,),
    ]
    da, db, parts = features_grad(*result, known)
    assert da.shape == a.shape
    assert db.shape == b.shape
    assert parts.sum(0).shape == v.shape


def test_arrays_need_not_be_contiguous():
    a, b, v = random_tensor(6, 10), random_tensor(6, 7), random_tensor(6)
    plain = a.mT.contiguous(), b.mT.contiguous(), v
    fits = fit_table_units(a.mT, b.mT, v)
    for one, two in zip(
        (*fits, *compute_features(FeatureInputs(a.mT, b.mT, v, *fits, TANH_FUNCTION_PAIRS))),
        (
            *fit_table_units(*plain),
            *compute_features(FeatureInputs(*plain, *fits, TANH_FUNCTION_PAIRS)),
        ),
        strict=True,
    ):
        assert torch.equal(one, two)
