"""Five kinds of vectors that people store as keys, and how they should be compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator


def make_unit_embeddings(rng: Generator, m: int = 400) -> np.ndarray:
    """Return embeddings of length 1 in 30 clusters."""
    centres = rng.normal(size=(30, 48))
    x = centres[rng.integers(30, size=m)] + 0.7 * rng.normal(size=(m, 48))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def make_raw_embeddings(rng: Generator, m: int = 400) -> np.ndarray:
    """Return embeddings whose lengths differ by a factor of ten, with a common direction."""
    x = make_unit_embeddings(rng, m) + 0.1 * rng.normal(size=48) / np.sqrt(48)
    return x * rng.lognormal(1, 0.5, size=(m, 1))


def make_tf_idf(rng: Generator, m: int = 400) -> np.ndarray:
    """Return the weights of words, as TF-IDF without normalization."""
    share = 1 / np.arange(1, 501)
    counts = np.array([rng.multinomial(n, share / share.sum()) for n in rng.integers(10, 60, m)])
    idf = np.log((1 + m) / (1 + (counts > 0).sum(axis=0))) + 1
    return counts * idf


def make_raw_measurements(rng: Generator, m: int = 400) -> np.ndarray:
    """Return height, income, a share, a thickness, an age and a distance."""
    return np.stack(
        [
            rng.normal(170, 10, m),
            rng.lognormal(10, 0.6, m),
            rng.uniform(0, 1, m),
            rng.normal(1e-3, 2e-4, m),
            rng.integers(18, 80, m).astype(float),
            rng.exponential(3e5, m),
        ],
        axis=1,
    )


def make_standardised_measurements(rng: Generator, m: int = 400) -> np.ndarray:
    """Return correlated measurements with a mean of 0 and a standard deviation of 1."""
    x = rng.normal(size=(m, 5)) @ rng.normal(size=(5, 20)) + 0.7 * rng.normal(size=(m, 20))
    return (x - x.mean(axis=0)) / x.std(axis=0)


VECTOR_KINDS: dict[str, tuple[Callable[..., np.ndarray], str]] = {
    "unit embeddings": (make_unit_embeddings, "cosine"),
    "raw embeddings": (make_raw_embeddings, "cosine"),
    "TF-IDF": (make_tf_idf, "cosine"),
    "standardised measurements": (make_standardised_measurements, "gaussian"),
    "raw measurements": (make_raw_measurements, "gaussian"),
}


def perturb_keys(keys: np.ndarray, at: np.ndarray, metric: str, rng: Generator) -> np.ndarray:
    """Return the keys at these positions with noise, and of how many k-NN still finds the row.

    The noise is 30 % of the distance to the nearest neighbour. Directions are changed among unit
    vectors, measurements in standard deviations.
    """
    x, back = _comparable(keys, metric)
    noise = rng.normal(size=(len(at), x.shape[1]))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    nearest = np.sort(_distances(x[at], x), axis=1)[:, 1:2]
    return (x[at] + 0.3 * nearest * noise) * back[at]


def nearest_rows(keys: np.ndarray, queries: np.ndarray, metric: str) -> np.ndarray:
    """Return the row that exact k-NN finds for each query."""
    x, back = _comparable(keys, metric)
    if metric == "cosine":
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    else:
        queries = queries / back[0]
    return _distances(queries, x).argmin(axis=1)


def _comparable(keys: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors that k-NN compares, and the factors (m, d) or (m, 1) to undo it."""
    if metric == "cosine":
        length = np.linalg.norm(keys, axis=1, keepdims=True)
        return keys / length, length
    deviation = np.broadcast_to(keys.std(axis=0), keys.shape)
    return keys / deviation, deviation


def _distances(queries: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(queries[:, None] - x, axis=2)
