"""Conversion of table columns, numbers and categories, to vectors with a distance."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import ArgumentError, DtypeError, unknown_name_error

Numbers = np.ndarray[Any, Any]

DATE_TYPES = (date, timedelta, np.datetime64, np.timedelta64)


class Features(NamedTuple):
    """Vectors (m, D) of a table (m, d): numbers unchanged, then one feature per category.

    Two rows of different categories have the distance 1, of the same category 0. A category that
    was not in `fit` has the distance √½ from all. `source_column` (D,) is the column of each
    feature.
    """

    numeric: Numbers
    categories: dict[int, Numbers]
    source_column: Numbers

    @classmethod
    def from_table(cls, table: Numbers, categorical: Sequence[int]) -> Features:
        """Return the layout of a table with these categorical columns."""
        numeric = np.setdiff1d(np.arange(table.shape[1]), categorical)
        cells = {int(j): sorted(set(_category_names(table[:, j]))) for j in categorical}
        categories = {j: np.array(names, dtype=object) for j, names in cells.items()}
        owner = np.repeat(
            [*numeric, *categories], [1] * len(numeric) + [*map(len, categories.values())]
        )
        return cls(numeric, categories, owner.astype(np.intp))

    def to_vectors(self, table: Numbers) -> Numbers:
        """Return a table (n, d) as vectors (n, D).

        >>> table = np.array([[1.5, "b"], [2.5, "a"]], dtype=object)
        >>> Features.from_table(table, [1]).to_vectors(table).round(2)
        array([[1.5 , 0.  , 0.71],
               [2.5 , 0.71, 0.  ]])
        """
        if not self.categories:
            return table
        try:
            numbers = table[:, self.numeric].astype(np.float64)
        except (TypeError, ValueError) as error:
            at, kind, cell = find_non_number(table[:, self.numeric]) or (0, "no number", str(error))
            raise DtypeError(
                f"X: column {self.numeric[at]} holds {kind}, such as {cell!r}: name it in "
                "categorical=, or turn it into numbers first"
            ) from None
        if not np.isfinite(numbers).all():
            raise ArgumentError(
                "X: a column of numbers holds NaN or infinity: fill it, as AttentionTransformer "
                "does, or name it in categorical="
            )
        places = [
            _category_names(table[:, j])[:, None] == known for j, known in self.categories.items()
        ]
        return np.concatenate([numbers, *(x * np.sqrt(0.5) for x in places)], axis=1)

    @property
    def slope_mask(self) -> Numbers:
        """The features (D,) along which a line may have a slope."""
        return np.arange(len(self.source_column)) < len(self.numeric)

    def sum_by_column(self, places: Numbers) -> Numbers:
        """Sum (D,) over the features of each column, to (d,)."""
        width = len(self.numeric) + len(self.categories)
        return np.bincount(self.source_column, places, minlength=width)


def _category_names(column: Numbers) -> Numbers:
    """Return categories as text: 1 and 1.0 are equal, and missing is a category."""
    return np.array([str(_integer_if_whole(x)) for x in column], dtype=object)


def _integer_if_whole(cell: Any) -> Any:
    number = isinstance(cell, float | np.floating) and float(cell).is_integer()
    return int(cell) if number else cell


def find_non_number(table: Any, words: bool = True) -> tuple[Any, str, Any] | None:
    """Return the first column with words or dates, the kind, and one such cell."""
    cells = np.asarray(table, dtype=object)
    if cells.ndim != 2:
        return None
    names = getattr(table, "columns", range(cells.shape[-1]))
    for name, column in zip(names, cells.T, strict=False):
        for cell in column:
            if words and isinstance(cell, str) and not _is_number_text(cell):
                return name, "text", cell
            if isinstance(cell, DATE_TYPES):
                return name, "dates", cell
    return None


def _is_number_text(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def resolve_categorical(categorical: Any, names: Sequence[str] | None, width: int) -> list[int]:
    """Return the indices of categorical columns, given by index, name or mask."""
    if categorical is None:
        return []
    if isinstance(categorical, str) or not np.iterable(categorical):
        raise DtypeError(f"categorical must list columns: [{categorical!r}], not {categorical!r}")
    given = list(categorical)
    if len(given) == width and all(isinstance(x, bool | np.bool_) for x in given):
        return [int(j) for j in np.flatnonzero(given)]
    return sorted(
        {_column_index(x, list(names) if names is not None else [], width) for x in given}
    )


def _column_index(column: Any, names: list[str], width: int) -> int:
    if isinstance(column, str):
        if not names:
            raise ArgumentError(f"categorical names {column!r}, but X has no names: pass its index")
        if column not in names:
            raise unknown_name_error("column in categorical", column, names)
        return names.index(column)
    if not isinstance(column, int | np.integer) or not -width <= column < width:
        raise ArgumentError(f"categorical: X has {width} columns, but no column {column!r}")
    return int(column) % width
