"""Which scores an index can serve, and how it compares vectors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from qkv.database.encoders.base import normalize_rows
from qkv.scores import Cosine, Dot, Gaussian, ScaledDot, Score
from qkv.weightings import Softmax, Weighting

MetricName = Literal["cosine", "dot", "distance"]
MAX_NUMBER = 1e15
"""An index holds no larger numbers, because their squares would overflow float32."""

METRICS: tuple[MetricName, ...] = ("cosine", "dot", "distance")


class IndexMetric(NamedTuple):
    """How an index compares vectors: a score is `slope` times this similarity.

    The similarity is qᵀk / (‖q‖ ‖k‖) for "cosine", qᵀk for "dot", and −‖q − k‖² / 2 for "distance".
    """

    name: MetricName
    slope: float

    @property
    def is_distance(self) -> bool:
        return self.name == "distance"

    def fits_float32(self, vectors: np.ndarray) -> bool:
        """Return whether float32 can hold the vectors and the squares of their distances."""
        return bool(np.abs(vectors).max(initial=0) <= MAX_NUMBER)

    def prepare_vectors(self, vectors: np.ndarray) -> np.ndarray:
        """Return vectors as float32, and with the length one for "cosine".

        >>> IndexMetric("cosine", 1.0).prepare_vectors(np.array([[3.0, 4.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929]]
        """
        if self.name == "cosine":
            return normalize_rows(vectors)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(vectors, np.float32)

    def compare_vectors(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Return the similarity of a prepared query (d,) to each key (c, d), float32.

        >>> IndexMetric("cosine", 1.0).compare_vectors(np.ones(1), np.array([[2.0], [-3.0]]))
        array([ 1., -1.], dtype=float32)
        """
        key = key.astype(np.float32, copy=False)
        if self.is_distance:
            offset = key - query
            return np.asarray(np.vecdot(offset, offset) * -0.5, np.float32)
        similarity = np.asarray(key @ query, np.float32)
        if self.name == "cosine":
            length = np.sqrt(np.vecdot(key, key))
            similarity /= np.where(length > 0, length, 1)
        return similarity


def find_metric(score: Score, width: int) -> IndexMetric | str:
    """Return the metric for a score of vectors with `width` numbers, or why there is none.

    >>> find_metric(Gaussian(0.5), 8)
    IndexMetric(name='distance', slope=4.0)
    >>> find_metric(Gaussian(np.ones(2)), 2)
    'an index needs one bandwidth for all columns'
    """
    if type(score) is Cosine and (temperature := _as_number(score.temperature)):
        return IndexMetric("cosine", 1 / temperature)
    if type(score) is Dot:
        return IndexMetric("dot", 1.0)
    if type(score) is ScaledDot and score.softcap is None:
        scale = width**-0.5 if score.scale is None else _as_number(score.scale)
        if scale is not None and scale > 0:
            return IndexMetric("dot", scale)
        return "an index needs a positive scale that is one number"
    if type(score) is Gaussian:
        bandwidth = _as_number(score.bandwidth)
        if bandwidth is None:
            return "an index needs one bandwidth for all columns"
        return IndexMetric("distance", bandwidth**-2)
    return f"an index cannot find the best rows of {type(score).__name__}"


def scale_by_temperature(metric: IndexMetric, weighting: Weighting) -> IndexMetric | None:
    """Return the metric of the scores of which a softmax takes the exponentials.

    None if the temperature is not one number.
    """
    temperature = _as_number(weighting.temperature) if isinstance(weighting, Softmax) else 1.0
    return None if temperature is None else metric._replace(slope=metric.slope / temperature)


def _as_number(x: object) -> float | None:
    """Return a number, or an array with a single one, as a float; None for anything else."""
    if isinstance(x, float | int):
        return float(x)
    if isinstance(x, np.ndarray | np.generic) and np.size(x) == 1:
        return float(np.asarray(x).reshape(()))
    return None
