"""tanh(a + b) as a short sum of products of a function of a and a function of b."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qkv.frameworks import threads
from qkv.util.caches import memoize

CHECKS_PER_NODE = 4
"""Points at which the error is measured, per point of interpolation and axis."""
RANGE_STEP = 1.1
"""Ranges are rounded up by at most this factor, so that many ranges share one set of functions."""
FINE_RANGE_STEP = 1.04
"""The same factor in the table of `build_pair_table`. There, a finer step costs nothing."""
MAX_COEFFICIENTS = 10
"""The most coefficients of a function in that table."""
BEND_RADIUS = 5.0
"""Argument beyond which the functions of the table are nearly constant."""
UNITS_PER_GROUP = 8
"""Units that are evaluated together: their polynomials fit the processor's cache."""
RISE_FACTOR = 1 / math.cos(math.pi / (2 * CHECKS_PER_NODE)) ** 2
"""Largest factor by which a polynomial exceeds its values at the measured points, on both axes."""


class TanhFactors(NamedTuple):
    """tanh(a + b) ≈ Σⱼ eⱼ(a) oⱼ(b) + Σⱼ oⱼ′(a) eⱼ′(b), e even and o odd, for |a| ≤ A and |b| ≤ B.

    The functions are the singular functions of the kernel tanh(a + b). Among all sums of that many
    products, this one has the least mean square error. A sine series, sin a cos b + cos a sin b,
    needs over 50 % more terms. Each function is p(y) or x p(y), with x = a / A, y = 2x² − 1, and p
    given by its coefficients (J, K) on the Chebyshev polynomials T₀, T₁, ….

    `error` bounds the difference everywhere in the rectangle. The error of interpolation at N
    points is at most 4 M ρ⁻ᴺ / (ρ − 1), because tanh is analytic in |Im| < π/2 (Bernstein). The
    remainder is a polynomial. Between 4 N Chebyshev points it exceeds its values there by at most
    a known factor.
    """

    input_ranges: tuple[float, float]
    even: tuple[np.ndarray, np.ndarray]
    """The coefficients of the products that are even in a: those of a's and of b's functions."""
    odd: tuple[np.ndarray, np.ndarray]
    error: float

    @property
    def term_count(self) -> int:
        """The number of products in the sum."""
        return len(self.even[0]) + len(self.odd[0])


def find_factors(query_range: float, key_range: float, error: float) -> TanhFactors:
    """Return the shortest sum of products that equals tanh(a + b) up to `error`; cached.

    The error bound is valid for |a| ≤ query_range and |b| ≤ key_range.

    >>> (
    ...     find_factors(4.0, 4.0, 1e-6).term_count,
    ...     find_factors(4.0, 4.0, 5e-3).term_count,
    ...     find_factors(0.5, 4.0, 1e-6).term_count,
    ... )
    (28, 12, 8)
    """
    return _factors_of_steps(_range_step(query_range), _range_step(key_range), error)


def _factors_of_steps(step_query: int, step_key: int, error: float) -> TanhFactors:
    if step_query <= step_key:
        return _compute_factors(step_query, step_key, error)
    swapped = _compute_factors(step_key, step_query, error)  # tanh(a + b) = tanh(b + a)
    return TanhFactors(
        swapped.input_ranges[::-1], swapped.odd[::-1], swapped.even[::-1], swapped.error
    )


def _range_step(input_range: float) -> int:
    return max(math.ceil(math.log(max(input_range, 0.05)) / math.log(RANGE_STEP)), -40)


@memoize("scores.tanh_factors", max_entries=4096)
def _compute_factors(step_query: int, step_key: int, error: float) -> TanhFactors:
    with threads.single_threaded_blas():  # the matrices are small, and other threads may be busy
        kernel = _TanhKernel((RANGE_STEP**step_query, RANGE_STEP**step_key), error)
        terms = kernel.sufficient_terms()
        factors = kernel.best_factors(terms)
        while factors.error > error and terms < len(kernel.singular_values):
            terms += 1
            factors = kernel.best_factors(terms)
        return factors


class _TanhKernel:
    """tanh(a + b) on a rectangle, sampled finely enough for a fraction of the error."""

    def __init__(self, input_ranges: tuple[float, float], error: float) -> None:
        self.input_ranges, self.error = input_ranges, error
        points, self.interpolation_error = _point_count(max(input_ranges), error / 8)
        self.svd_parts = [_scaled_svd(x) for x in self.even_odd_halves(_chebyshev_nodes(points))]
        self.singular_values = np.sort(np.concatenate([size for _, size, _ in self.svd_parts]))[
            ::-1
        ]
        self.fine_nodes = _chebyshev_nodes(CHECKS_PER_NODE * points)
        self.exact_halves = self.even_odd_halves(self.fine_nodes)

    def even_odd_halves(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the part of the kernel that is even in a, and the part that is odd."""
        left, right = self.input_ranges[0] * x[:, None], self.input_ranges[1] * x
        one, two = np.tanh(right + left), np.tanh(right - left)
        return [(one + two) / 2, (one - two) / 2]

    def sufficient_terms(self) -> int:
        """Return a number of products that meets the error, before coefficients are truncated."""
        order = [(size, odd, i) for odd, (_, sizes, _) in enumerate(self.svd_parts)
                 for i, size in enumerate(sizes)]  # fmt: skip
        order.sort(reverse=True)
        both = [
            (
                _evaluate_polynomials(_chebyshev_coefficients(left, odd), odd, self.fine_nodes),
                _evaluate_polynomials(
                    _chebyshev_coefficients(right, 1 - odd), 1 - odd, self.fine_nodes
                ),
            )
            for odd, (left, _, right) in enumerate(self.svd_parts)
        ]
        # The sum of the maxima of the omitted products bounds their sum. This gives the bisection
        # an upper limit that is rarely much too large.
        most = [np.abs(left).max(1) * np.abs(right).max(1) for left, right in both]
        left_out = np.cumsum([most[odd][i] for _, odd, i in order[::-1]])[::-1]
        spare = (self.error - self.interpolation_error) / RISE_FACTOR - self.interpolation_error
        low, high = 1, min(int(np.sum(left_out > spare)) + 1, len(order))
        while low < high:  # the error decreases with the number of products
            middle = max((low + high) // 2, high - 3)
            off = np.zeros(())
            for odd, (left, right) in enumerate(both):
                count = sum(1 for item in order[:middle] if item[1] == odd)
                off = off + np.abs(left[:count].T @ right[:count] - self.exact_halves[odd])
            if (
                float(off.max()) + self.interpolation_error
            ) * RISE_FACTOR + self.interpolation_error <= self.error:
                high = middle
            else:
                low = middle + 1
        return low

    def best_factors(self, terms: int) -> TanhFactors:
        """Return the best sum of this many products, with its error bound."""
        least = self.singular_values[min(terms, len(self.singular_values)) - 1]
        halves, difference = [], np.zeros(())
        for odd, part in enumerate(self.svd_parts):
            one, two = _leading_polynomials(part, least, odd, self.error)
            half = _evaluate_polynomials(one, odd, self.fine_nodes).T @ _evaluate_polynomials(
                two, 1 - odd, self.fine_nodes
            )
            difference = difference + np.abs(half - self.exact_halves[odd])
            halves.append((one, two))
        bound = (
            float(difference.max()) + self.interpolation_error
        ) * RISE_FACTOR + self.interpolation_error
        return TanhFactors(self.input_ranges, halves[0], halves[1], bound)


def _chebyshev_nodes(points: int) -> np.ndarray:
    """Return the positive half of an even number of Chebyshev points."""
    return np.cos(np.pi * (np.arange(points // 2) + 0.5) / points)


def _point_count(input_range: float, error: float, bent: bool = False) -> tuple[int, float]:
    """Return how many points per axis keep the interpolation error below `error`, and its bound.

    With `bent` the points are Chebyshev points of the argument of `_unbend`.
    """
    high = 0.8 * math.pi / 2  # |tanh| ≤ max(1, tan v) where |Im| ≤ v
    largest = max(1.0, math.tan(high))
    edge = (np.linspace(0, input_range, 65) + 1j * high) / input_range
    if bent:
        edge = edge * np.sqrt(
            (1 + input_range**2 / BEND_RADIUS**2) / (1 + (edge * input_range / BEND_RADIUS) ** 2)
        )
    rho = float(np.abs(edge + np.sqrt(edge - 1) * np.sqrt(edge + 1)).min())

    def interpolation_error(n: int) -> float:
        along = 4 * largest * rho ** (1 - n) / (rho - 1)
        return along * (2 + 2 / math.pi * math.log(n))  # first axis, then second

    n = 8
    while interpolation_error(n) > error:
        n += 4
    return n, interpolation_error(n)


def _scaled_svd(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    left, size, right = np.linalg.svd(kernel)
    return left.T * np.sqrt(size)[:, None], size, right * np.sqrt(size)[:, None]


def _leading_polynomials(
    part: tuple[np.ndarray, ...], least: float, odd: int, error: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the functions of a and of b with singular values of at least `least`."""
    left, size, right = part
    count = int((size >= least).sum())
    return _truncated_coefficients(left[:count], odd, error), _truncated_coefficients(
        right[:count], 1 - odd, error
    )


def _chebyshev_coefficients(values: np.ndarray, odd: int) -> np.ndarray:
    """Return the coefficients of p, from the function's values at the nodes."""
    half = values.shape[-1]
    if odd:
        values = values / _chebyshev_nodes(2 * half)
    angles = np.pi * (np.arange(half) + 0.5) / half  # of y at the nodes of x
    coefficients = 2 / half * values @ np.cos(angles[:, None] * np.arange(half))
    coefficients[:, 0] /= 2
    return np.asarray(coefficients)


def _truncated_coefficients(values: np.ndarray, odd: int, error: float) -> np.ndarray:
    """Return the coefficients of p without a tail that is negligible for this error."""
    coefficients = _chebyshev_coefficients(values, odd)
    is_significant = np.abs(coefficients).sum(0)[::-1].cumsum()[::-1] > error / 16
    return np.asarray(coefficients[:, : max(int(is_significant.sum()), 1)])


def _evaluate_polynomials(coefficients: np.ndarray, odd: int, x: np.ndarray) -> np.ndarray:
    """Return the values of the functions at x, (J, r)."""
    orders = np.arange(coefficients.shape[-1])[:, None]
    values = np.asarray(coefficients @ np.cos(2 * np.arccos(x) * orders))
    return values * x if odd else values


@memoize("scores.tanh_pair_tables")
def build_pair_table(pairs: int, error: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ranges A in ascending order, relative errors, and coefficients, for CUDA kernels.

    For |a|, |b| ≤ A, tanh(a + b) ≈ m(a) + m(b) + Σⱼ eⱼ(a) oⱼ(b) + oⱼ(a) eⱼ(b), with m and o odd
    and e even. All pairs together are within the error. The terms m(a) and m(b) need no product
    and are most of the sum. The fit of the first j pairs minimizes a weighted mean square that
    emphasizes small arguments, because few arguments are as large as the largest.

    Errors (2, ranges, pairs) of the first j pairs are divided by `error`. The first is 2/3 of the
    maximum, or 2.5 times the mean if that is larger. The second, for gradients, is the maximum, or
    twice the mean error of the derivatives. Coefficients (ranges, 2 · pairs + 1, K) are those of
    e, then of o / x and m / x, on T₀, T₁, … of 2x² − 1. Here x = bent(a) / bent(A) with
    bent(a) = a / √(1 + a²/BEND_RADIUS²), which needs a third fewer coefficients than a / A.
    """
    input_ranges, errors, coefficients = [], [], []
    for step in itertools.count(-15):
        input_range = FINE_RANGE_STEP**step
        (largest, mean, slope), parts = _fit_pairs(input_range, pairs, error)
        if largest[-1] > error:
            break
        input_ranges.append(input_range)
        errors.append(np.maximum([largest / 1.5, largest], [2.5 * mean, 2 * slope]) / error)
        coefficients.append(parts)
    longest = max(x.shape[-1] for x in coefficients)
    padded = [np.pad(x, ((0, 0), (0, longest - x.shape[-1]))) for x in coefficients]
    return np.array(input_ranges), np.stack(errors, 1), np.array(padded)


def _fit_pairs(input_range: float, pairs: int, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors (3, j) of the first j pairs, and the coefficients.

    The errors are the maximum, the mean, and the mean of the derivatives.
    """
    top = input_range / math.sqrt(1 + input_range**2 / BEND_RADIUS**2)
    points, slip = _point_count(input_range, error / 64, bent=True)
    points = max(points, 2 * pairs)
    x, fine = _chebyshev_nodes(points), _chebyshev_nodes(CHECKS_PER_NODE * points)
    (kernel, *slopes), (exact, *_) = (_even_half(_unbend(top * at)) for at in (x, fine))
    # Density of a / A in the mean square: uniform, plus a normal distribution whose standard
    # deviation is a fifth of the range.
    near, steep = _unbend(top * x) / input_range, top * (1 - (top * x / BEND_RADIUS) ** 2) ** -1.5
    share = (0.2 + np.exp(-((near / 0.2) ** 2) / 2)) * steep * np.sqrt((1 - x**2) / (1 - near**2))
    share /= share.sum()
    mean, root = share @ kernel, np.sqrt(share)
    left, _, right = _scaled_svd(root[:, None] * (kernel - mean) * root)
    values = (left[:pairs] / root, right[:pairs] / root, mean[None])
    parts = [
        _truncated_coefficients(some, odd, error / 4)[:, :MAX_COEFFICIENTS]
        for some, odd in zip(values, (0, 1, 1), strict=True)
    ]
    (e, o, m), (e_fine, o_fine, m_fine) = (
        [_evaluate_polynomials(p, odd, at) for p, odd in zip(parts, (0, 1, 1), strict=True)]
        for at in (x, fine)
    )
    de, do, dm = (
        _evaluate_polynomials(slope.weights[0], int(slope.odd), x) / steep
        for slope in (_differentiate_half(HalfFactors(i > 0, p[None])) for i, p in enumerate(parts))
    )
    off = []
    for j in range(1, pairs + 1):
        gap = np.abs(e_fine[:j].T @ o_fine[:j] + m_fine - exact)
        along, across = de[:j].T @ o[:j] - slopes[0], e[:j].T @ do[:j] + dm - slopes[1]
        # The odd half is the transpose of the even one.
        most = (float((gap + gap.T).max()) + slip) * RISE_FACTOR + slip
        means = ((e[:j].T @ o[:j] + m - kernel) ** 2 * 2, along**2 + across**2)
        off.append((most, *(math.sqrt(share @ mean @ share) for mean in means)))
    longest = max(p.shape[-1] for p in parts)
    padded = [np.pad(p, ((0, 0), (0, longest - p.shape[-1]))) for p in parts]
    return np.array(off).T, np.concatenate(padded)


def _unbend(x: np.ndarray) -> np.ndarray:
    """Return a for x = bent(a)."""
    return np.asarray(x / np.sqrt(1 - (x / BEND_RADIUS) ** 2))


def _even_half(a: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the part of tanh(a + b) that is even in a, and its derivatives along a and b."""
    one, two = np.tanh(a + a[:, None]), np.tanh(a - a[:, None])
    return (one + two) / 2, (two**2 - one**2) / 2, 1 - (one**2 + two**2) / 2


class HalfFactors(NamedTuple):
    """The functions of one variable (a or b) in half of the products: the even or the odd half.

    tanh(a + b) ≈ Σⱼ fⱼ(a) gⱼ(b). A function is p(y) or x p(y), p a polynomial with coefficients
    `weights` (units, J, K): J functions, K coefficients.
    """

    odd: bool
    """True: the functions are x p(y). False: they are p(y)."""
    weights: np.ndarray


class UnitGroup(NamedTuple):
    """Consecutive units with the same number of products; halves[side] holds one side's halves."""

    start: int
    end: int
    halves: tuple[tuple[HalfFactors, HalfFactors], tuple[HalfFactors, HalfFactors]]


class HiddenUnits:
    """The factors of every hidden unit, each for its own range, in groups of equal shape.

    `order` lists the units group by group. `input_ranges` holds one array per side, in the units'
    order.
    """

    def __init__(self, steps: tuple[tuple[int, int], ...], error: float) -> None:
        factors = [_factors_of_steps(*pair, error) for pair in steps]
        shapes = [(len(f.even[0]), len(f.odd[0])) for f in factors]
        self.order = sorted(range(len(factors)), key=lambda unit: shapes[unit])
        self.input_ranges = tuple(
            np.array([f.input_ranges[side] for f in factors]) for side in (0, 1)
        )
        self.errors = np.array([f.error for f in factors])
        self.width = sum(f.term_count for f in factors)
        self.groups = []
        for _, run in itertools.groupby(enumerate(self.order), lambda item: shapes[item[1]]):
            places = list(run)
            for at in range(0, len(places), UNITS_PER_GROUP):
                members = places[at : at + UNITS_PER_GROUP]
                parts = [factors[unit] for _, unit in members]
                one, two = (_stack_halves(parts, side) for side in (0, 1))
                self.groups.append(UnitGroup(members[0][0], members[-1][0] + 1, (one, two)))

    @functools.cached_property
    def derivative_groups(self) -> list[UnitGroup]:
        """The derivatives of all functions, in the same layout."""
        return [
            group._replace(halves=(_differentiate_side(one), _differentiate_side(two)))
            for group in self.groups
            for one, two in (group.halves,)
        ]

    def __repr__(self) -> str:
        return f"{self.width} products"


def build_units(
    query_range: Sequence[float], key_range: Sequence[float], error: float
) -> HiddenUnits:
    """Return the factors of units with these ranges; cached."""
    pairs = zip(query_range, key_range, strict=True)
    return _cached_units(tuple((_range_step(a), _range_step(b)) for a, b in pairs), error)


_cached_units = memoize("scores.tanh_hidden_units", max_entries=64)(HiddenUnits)


def _stack_halves(parts: list[TanhFactors], side: int) -> tuple[HalfFactors, HalfFactors]:
    even, odd = (
        _pad_and_stack([getattr(f, name)[side] for f in parts]) for name in ("even", "odd")
    )
    return HalfFactors(bool(side), even), HalfFactors(not side, odd)


def _pad_and_stack(parts: list[np.ndarray]) -> np.ndarray:
    longest = max(x.shape[-1] for x in parts)
    out = np.zeros((len(parts), len(parts[0]), longest))
    for place, x in zip(out, parts, strict=True):
        place[:, : x.shape[-1]] = x
    return out


def _differentiate_side(
    side: tuple[HalfFactors, HalfFactors],
) -> tuple[HalfFactors, HalfFactors]:
    return _differentiate_half(side[0]), _differentiate_half(side[1])


def _differentiate_half(half: HalfFactors) -> HalfFactors:
    """Return the derivatives: (p(y))′ = 4x p′(y), and (x p(y))′ = p(y) + 2 (1 + y) p′(y)."""
    from numpy.polynomial.chebyshev import chebder

    p = np.moveaxis(half.weights, -1, 0)
    dp = chebder(p) if len(p) > 1 else np.zeros_like(p)
    if not half.odd:
        return HalfFactors(True, np.moveaxis(4 * dp, 0, -1))
    out = p.copy()
    out[: len(dp)] += 2 * dp
    # y T₀ = T₁ and y Tₖ = (Tₖ₊₁ + Tₖ₋₁) / 2
    out[1 : len(dp) + 1] += dp[: len(out) - 1]
    out[: len(dp) - 1] += dp[1:]
    if len(out) > 1:
        out[1] += dp[0]
    return HalfFactors(False, np.moveaxis(out, 0, -1))
