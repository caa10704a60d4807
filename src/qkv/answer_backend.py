"""The rows of an answer, and the backends that compute its further attributes on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import CombinationError
from qkv.frameworks import tree

SAME_WEIGHT_TOLERANCE = 1e-3
"""The weights of rows with the same key differ by less: their scores differ only by rounding."""


@dataclass(frozen=True, init=False)
class Row(tree.Record):
    """A row of the database with its weight.

    `index` is its position in the database: `answer.weights[row.index] == row.weight`. `record`
    maps all column names to their cells.
    """

    key: Any
    value: Any
    weight: float
    index: int
    record: Mapping[str, Any] = field(repr=False)

    # The generated constructor of a frozen dataclass takes four times as long.
    def __init__(
        self,
        key: Any,
        value: Any,
        weight: float,
        index: int,
        record: Mapping[str, Any] | None = None,
    ):
        fields = vars(self)
        fields["key"], fields["value"], fields["weight"] = key, value, weight
        fields["index"], fields["record"] = index, {} if record is None else record

    @property
    def displayed_key(self) -> Any:
        """The key; "row 7" instead of a vector, whose numbers say nothing to a reader."""
        return f"row {self.index:,}" if isinstance(self.key, np.ndarray) else self.key


class ValueWeight(NamedTuple):
    """A value, and the total weight of the rows that have it."""

    value: Any
    weight: float


class MissingWeight(NamedTuple):
    """The estimated weight of the rows that an approximate answer left out.

    It is between `low` and `high` for 90 % of queries like those with which the index was measured.
    """

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class SourceRows:
    """The rows of an answer, with everything needed to compute the answer again elsewhere.

    `keys` (r, d) and `query` (d,) are the vectors that the score compares. Both are None for a
    score that compares the keys themselves.
    """

    rows: list[Row]
    keys: np.ndarray | None
    query: np.ndarray | None
    encoder: Any
    score: Any
    weighting: Any
    column_names: tuple[str, str]
    """The names of the key and of the value. Several columns are joined to one name."""


def sum_top_weight(weights: np.ndarray) -> float:
    """Return the total of the weights (m,) that equal the largest one, up to rounding.

    >>> round(sum_top_weight(np.array([0.1, 0.4, 0.4, 0.1])), 3)
    0.8
    """
    if not len(weights):
        return 0.0
    size = np.abs(weights)
    return float(size[size >= size.max() * (1 - SAME_WEIGHT_TOLERANCE)].sum())


class AnswerBackend(ABC):
    """Computes the attributes of an answer that are not stored in it.

    The default methods are for an answer without access to the database.
    """

    @abstractmethod
    def compute_weights(self) -> np.ndarray:
        """Return the weights of all rows, (m,)."""

    @abstractmethod
    def compute_entropy(self) -> float:
        """Return −Σᵢ αᵢ ln αᵢ over all rows."""

    @abstractmethod
    def compute_spread(self) -> Any:
        """Return the weighted standard deviation of the values, or None if they are not numbers."""

    def build_fields(self) -> dict[str, Any]:
        """Return the fields of an answer that was made without them."""
        return {}

    def compute_value_shares(self) -> tuple[float, float] | None:
        """Return the shares of the weight of the answer's value and of the next value.

        It is for the value of the best-matching key; rows with this key count as having the value.
        None if the rows are not available.
        """
        return None

    def compute_top_weight(self) -> float:
        """Return the total weight of the rows that have the largest weight."""
        return sum_top_weight(self.compute_weights())

    @abstractmethod
    def rows_above(self, weight: float) -> list[Row]:
        """Return every row of at least this weight, heaviest first."""

    def compute_hint(self, rows: list[Row]) -> str:
        """Return advice about the query, or ""; `rows` are the heaviest rows."""
        return ""

    def confidence_factor(self, rows: list[Row]) -> float:
        """Return a number from 0 to 1 by which the confidence is multiplied.

        It is below 1 if something speaks against `rows`, the heaviest rows.
        """
        return 1.0

    def left_out_confidence(self, logit: float) -> float | None:
        """Return the share of right answers with this logit for keys that are left out.

        None if it is not known.
        """
        return None

    def is_value_of_own_key(self, rows: list[Row]) -> bool:
        """Return whether the query equals a key of numbers or dates, whose rows have the value."""
        return False

    def compute_expected_error(self) -> Any:
        """Return the expected error of a mean, or None; see `Answer.expected_error`."""
        return None

    def has_same_numbers(self, rows: list[Row]) -> bool:
        """Return whether the best key has every number of the query, and one of them is long."""
        return False

    def measure_mismatch(self, rows: list[Row]) -> float:
        """Return from 0 to 1 how much the words of the query and the best key differ.

        `rows` are the heaviest rows.
        """
        return 0.0

    def calibrate_logit(self, logit: float) -> float:
        """Return the logit of the confidence, as `calibrate` corrects it."""
        return logit

    @property
    def is_far(self) -> bool:
        """Whether the query is far from every key."""
        return False

    def prediction_set(self) -> list[Row]:
        """Return the rows of the prediction set, heaviest first."""
        raise CombinationError(
            "no prediction set: call calibrate(pairs) first, for this score and weighting"
        )

    def answer_without(self, position: int) -> Any:
        """Return the answer without the row at this position."""
        raise _detached_error()

    def compute_influence(self) -> Any:
        """Return the effect of each row on the value; see `Answer.influence`."""
        raise _detached_error()

    def collect_source(self, most: int) -> SourceRows | None:
        """Return at most `most` of the rows that took part, the heaviest; None if not available."""
        return None


class DetachedBackend(AnswerBackend):
    """The backend of a pickled answer, which contains the weights but not the database."""

    def __init__(
        self, rows: list[Row], weights: np.ndarray, entropy: float, spread: Any, error: Any = None
    ):
        self._rows, self._weights, self._entropy = rows, weights, entropy
        self._spread, self._expected_error = spread, error

    def compute_weights(self) -> np.ndarray:
        return self._weights

    def compute_entropy(self) -> float:
        return self._entropy

    def compute_spread(self) -> Any:
        return self._spread

    def compute_expected_error(self) -> Any:
        return self._expected_error

    def rows_above(self, weight: float) -> list[Row]:
        """Return the rows of at least this weight; raise if the answer does not contain all of
        them."""
        rows = [row for row in self._rows if row.weight >= weight]
        if len(rows) < (self._weights >= weight).sum():
            raise _detached_error()
        return rows


def _detached_error() -> CombinationError:
    return CombinationError(
        "this answer comes from a server or a pickle and does not contain all its rows: ask the "
        "database itself, qkv.open(path), or a copy of it"
    )
