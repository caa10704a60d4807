"""Behind an answer: the rows that it names, and who is asked for what it does not hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import CombinationError
from qkv.frameworks import tree


@dataclass(frozen=True, init=False)
class Row(tree.Record):
    """One pair of the database, and how much it counted.

    `index` is its place among the rows, so that `answer.weights[row.index] == row.weight`;
    `record` has all its columns.
    """

    key: Any
    value: Any
    weight: float
    index: int
    record: Mapping[str, Any] = field(repr=False)

    # A frozen class sets its fields one by one, in four times as long: most of what a row costs.
    def __init__(
        self,
        key: Any,
        value: Any,
        weight: float,
        index: int,
        record: Mapping[str, Any] | None = None,
    ):
        own = vars(self)
        own["key"], own["value"], own["weight"] = key, value, weight
        own["index"], own["record"] = index, {} if record is None else record


class ValueWeight(NamedTuple):
    """A value, and the weight of all rows that hold it."""

    value: Any
    weight: float


@dataclass(frozen=True)
class SourceRows:
    """Rows with their vectors: what it takes to ask them again elsewhere.

    `keys` (r, d) and `query` (d) are what the score compares, or None where it compares the keys
    themselves.
    """

    rows: list[Row]
    keys: np.ndarray | None
    query: np.ndarray | None
    encoder: Any
    score: Any
    weighting: Any
    column_names: tuple[str, str]
    """What the key and the value are called."""


class AnswerBackend(ABC):
    """Who answered, to be asked for what an answer does not hold; by default from elsewhere, so
    that the rows themselves are not there."""

    @abstractmethod
    def compute_weights(self) -> np.ndarray:
        """α of every row, (m,)."""

    @abstractmethod
    def compute_entropy(self) -> float:
        """What `Answer.compute_entropy` is."""

    @abstractmethod
    def compute_spread(self) -> Any:
        """What `Answer.compute_spread` is."""

    @abstractmethod
    def rows_above(self, weight: float) -> list[Row]:
        """Every row of at least this weight, heaviest first."""

    def compute_hint(self, rows: list[Row]) -> str:
        """What `Answer.compute_hint` is, of its heaviest rows."""
        return ""

    def prediction_set(self) -> list[Row]:
        """The rows of which one is the right one, heaviest first."""
        raise CombinationError(
            "the database promises no set: it was not calibrated, or not for such questions"
        )

    def answer_without(self, place: int) -> Any:
        """The answer had the row at this place not been there."""
        raise _detached_error()

    def compute_influence(self) -> Any:
        """What `Answer.compute_influence` is."""
        raise _detached_error()

    def collect_source(self, most: int) -> SourceRows | None:
        """All rows that were asked, or the `most` heaviest; None where they are not there."""
        return None


class DetachedBackend(AnswerBackend):
    """Behind an answer from a pickle: what it said."""

    def __init__(self, rows: list[Row], weights: np.ndarray, entropy: float, spread: Any):
        self._rows, self._weights, self._entropy, self._spread = rows, weights, entropy, spread

    def compute_weights(self) -> np.ndarray:
        return self._weights

    def compute_entropy(self) -> float:
        return self._entropy

    def compute_spread(self) -> Any:
        return self._spread

    def rows_above(self, weight: float) -> list[Row]:
        """Those of the rows that were named, if they are all of at least this weight."""
        found = [row for row in self._rows if row.weight >= weight]
        if len(found) < (self._weights >= weight).sum():
            raise _detached_error()
        return found


def _detached_error() -> CombinationError:
    return CombinationError(
        "the answer came from a server or a pickle, without its rows: ask the database itself, "
        "qkv.open(path), or a copy of it"
    )
