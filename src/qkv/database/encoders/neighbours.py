"""Estimate how keys are compared, from the distances between neighbouring keys.

All estimates use a sample of the keys. The sample depends only on the number of keys, so equal keys
always give equal estimates.
"""

from __future__ import annotations

import math

import numpy as np

from qkv.database.encoders.base import normalize_rows

MAX_SAMPLED_KEYS = 4096
"""The number of keys among which neighbours are searched."""

MAX_SAMPLED_QUERIES = 256
"""The number of keys whose neighbours are searched."""

MAX_OTHER_WEIGHT = 1 / 3
"""A key gets at least 3/4 of the weight: all other keys together weigh at most this much of it."""

MAX_SAMPLED_NUMBERS, NUMBERS_PER_BLOCK = 512, 64
"""The number of number keys whose neighbours are searched, and how many at a time."""

EXEMPT_SHARE = 0.025
"""The share of the keys for which `MAX_OTHER_WEIGHT` may be exceeded. Near-duplicates are among
them."""

MIN_DIFFERENCE = 1e-12
"""Keys whose squared distance is at most this share of their squared length count as equal."""

MIN_EMBEDDING_WIDTH = 16
"""From this width on, columns that look alike may be the coordinates of an embedding."""

MIN_SPARSE_WIDTH = 8
"""From this width on, vectors without negative numbers and mostly of zeros have a direction."""

MAX_LENGTH_VARIATION = 0.01
"""Lengths whose relative standard deviation is at most this are equal."""

MAX_COMMON_SHARE = 0.9
"""If the mean key has more than this share of the squared length, directions hardly differ."""

MAX_STANDARD_DEVIATION_ERROR = 0.05
"""Columns with a mean of 0 and a standard deviation of 1, up to this error, are standardised."""

MAX_EMBEDDING_RATIO, MAX_EMBEDDING_OFFSET = 4.0, 1.5
"""In embeddings, few columns have a standard deviation above this multiple of the smallest, or a
mean beyond this multiple of the standard deviation."""

MAX_SAME_UNIT_RATIO = 3.0
"""Columns whose spreads differ by at most this factor share one bandwidth."""

QUANTILE_RANGES = ((25, 75, 1.349), (10, 90, 2.563), (2.5, 97.5, 3.92))
"""Percentiles, and the distance between them in a normal distribution with a deviation of 1."""


def sample_positions(count: int, size: int, stream: int = 0) -> np.ndarray:
    """Return at most `size` of the positions 0 … count − 1, ascending and without order in time.

    >>> sample_positions(3, 5).tolist(), len(sample_positions(1000, 5))
    ([0, 1, 2], 5)
    """
    if count <= size:
        return np.arange(count)
    return np.sort(np.random.default_rng([stream, count]).choice(count, size, replace=False))


def measure_spreads(rows: np.ndarray) -> np.ndarray:
    """Return the spread of each column (d,): the standard deviation without far outliers.

    It is the distance between two percentiles, but at most the standard deviation. A column of
    equal numbers has the spread 1.

    >>> column = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 1000.0])[:, None]
    >>> [round(x, 2) for x in measure_spreads(column).tolist()]
    [1.85]
    """
    deviation, spread = rows.std(axis=0), np.zeros(rows.shape[1])
    for low, high, normal_width in QUANTILE_RANGES:
        ends = np.percentile(rows, (low, high), axis=0)
        spread = np.where(spread > 0, spread, (ends[1] - ends[0]) / normal_width)
    spread = np.where((spread > 0) & (spread < deviation), spread, deviation)
    return np.where(spread > 0, spread, 1.0)


def compares_direction(rows: np.ndarray) -> bool:
    """Return whether vectors (r, d) should be compared by direction, and not by distance.

    Directions count if all lengths are equal, if most numbers are 0 and none is negative, or if
    there are many similar columns that are not standardised.

    >>> rng = np.random.default_rng(0)
    >>> embeddings, measurements = rng.normal(size=(99, 32)) * 3, rng.normal(size=(99, 4))
    >>> compares_direction(embeddings), compares_direction(measurements * [1, 10, 100, 1000])
    (True, False)
    """
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    rows, length = rows[length > 0], length[length > 0]
    if not len(rows):
        return False
    width, mean, deviation = rows.shape[1], rows.mean(axis=0), rows.std(axis=0)
    if mean @ mean > MAX_COMMON_SHARE * np.mean(length * length) and len(rows) > 1:
        return False
    if length.std() <= MAX_LENGTH_VARIATION * length.mean() and (width > 1 and len(rows) > 1):
        return True
    if width >= MIN_SPARSE_WIDTH and (rows >= 0).all() and np.mean(rows == 0) >= 0.5:
        return True
    if width < MIN_EMBEDDING_WIDTH or is_standardised(rows):
        return False
    low, high = np.quantile(deviation[deviation > 0], (0.1, 0.9)) if deviation.any() else (0, 1)
    offset = np.median(np.abs(mean) / np.where(deviation > 0, deviation, 1.0))
    return bool(high <= MAX_EMBEDDING_RATIO * low and offset <= MAX_EMBEDDING_OFFSET)


def is_standardised(rows: np.ndarray) -> bool:
    """Return whether each column has a mean of 0 and a standard deviation of 1."""
    error = np.maximum(np.abs(rows.mean(axis=0)), np.abs(rows.std(axis=0) - 1))
    return bool((error <= MAX_STANDARD_DEVIATION_ERROR).all())


def fit_direction(rows: np.ndarray, count: int) -> float | None:
    """Return the temperature of the cosine for a sample (r, d) of `count` vectors.

    Return None if no two vectors differ in direction.
    """
    unit = normalize_rows(rows).astype(float)
    unit = unit[unit.any(axis=1)]
    queries = unit[sample_positions(len(unit), MAX_SAMPLED_QUERIES, 1)]
    distance = 1 - queries @ unit.T
    distance[distance <= 1e-6] = math.inf  # float32 hardly tells these directions apart
    return fit_temperature(distance, count)


def fit_distance(rows: np.ndarray, count: int) -> np.ndarray | None:
    """Return the bandwidths (d,) or (1,) of the Gaussian for a sample (r, d) of `count` vectors.

    Columns with similar spreads get one bandwidth. Return None if all vectors are equal.
    """
    spread = np.ones(1) if is_standardised(rows) else measure_spreads(rows)
    if spread.max() <= MAX_SAME_UNIT_RATIO * spread.min():
        spread = np.median(spread, keepdims=True)
    rows = (rows - rows.mean(axis=0)) / spread
    square = np.einsum("ij,ij->i", rows, rows)
    at = sample_positions(len(rows), MAX_SAMPLED_QUERIES, 1)
    distance = (square[at][:, None] + square) / 2 - rows[at] @ rows.T
    distance[distance <= MIN_DIFFERENCE * (square[at][:, None] + square)] = math.inf
    temperature = fit_temperature(distance, count)
    return None if temperature is None else spread * math.sqrt(temperature)


def fit_neighbour_distance(rows: np.ndarray, count: int) -> float | None:
    """Return how far the ⌊√m⌋-th nearest other key is from a key, in the median of the keys.

    `rows` (r, d) is a sample of the m = `count` keys. Equal keys do not count. Return None if all
    keys are equal.

    >>> fit_neighbour_distance(np.array([[0.0], [1.0], [2.0], [3.0], [900.0]]), 5)
    2.0
    """
    rank = min(max(round(math.isqrt(count) * len(rows) / count), 1), len(rows) - 1)
    at, found = sample_positions(len(rows), MAX_SAMPLED_NUMBERS, 1), [np.zeros(0)]
    for start in range(0, len(at) if rank else 0, NUMBERS_PER_BLOCK):
        difference = rows[at[start : start + NUMBERS_PER_BLOCK], None] - rows
        distance = np.sqrt(np.einsum("ijk,ijk->ij", difference, difference))
        distance[distance == 0] = math.inf
        nearest = np.partition(distance, rank - 1, axis=1)[:, :rank]
        # With fewer other keys, the farthest one counts.
        nearest[np.isinf(nearest)] = -math.inf
        found.append(nearest.max(axis=1))
    distances = np.concatenate(found)
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else None


def fit_temperature(distance: np.ndarray, count: int) -> float | None:
    """Return the largest temperature τ at which a key still gets most of the weight.

    `distance` (n, r) are the distances of n keys to a sample of `count` keys, ∞ for the key itself
    and for equal keys. A row with distance x has the weight e^(−x/τ), relative to an equal key.
    Return None if no distance is finite.

    >>> distance = np.array([[np.inf, 1.0], [1.0, np.inf]])
    >>> round(float(fit_temperature(distance, 2) * np.log(3)), 2)  # e^(−1/τ) = 1/3
    1.0
    """
    finite = distance[np.isfinite(distance)]
    if not len(finite):
        return None
    limit = MAX_OTHER_WEIGHT * max(distance.shape[1] - 1, 1) / max(count - 1, 1)
    exempt = int(EXEMPT_SHARE * len(distance))
    # At `low` no row exceeds the limit, and at `high` every row with a neighbour does.
    low = float(finite.min()) / math.log(distance.shape[1] / limit + 1)
    high = 4 * float(finite.max())
    while high > 1.005 * low:
        middle = math.sqrt(low * high)
        exceeds = np.exp(distance / -middle).sum(axis=1) > limit
        # The weight of the others grows with τ, so these rows need not be compared again.
        if np.count_nonzero(exceeds) > exempt:
            high, distance = middle, distance[exceeds]
        else:
            low, exempt = middle, exempt - int(np.count_nonzero(exceeds))
            distance = distance[~exceeds]
    return low
