"""The arguments of `ask` and `attend`: queries, scores and tolerances."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from qkv.database import parsing
from qkv.database.query.inputs import (
    Batch,
    as_cells,
    as_floats,
    as_named_tuple,
    as_tuple,
    as_tuples,
    find_named_cells,
    is_flat,
)
from qkv.database.table import cells
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError, validate_keywords
from qkv.frameworks import get_framework, is_array, load_framework, to_numpy, tree
from qkv.util.formatting import quote_cell
from qkv.util.keyword_hints import FOREIGN_KEYWORDS
from qkv.util.types import Array

if TYPE_CHECKING:
    from qkv.database.table.view import TableView
    from qkv.scores import Score, ScoreLike
    from qkv.weightings import WeightingLike


class DatabaseAttendOptions(TypedDict, total=False):
    """The keyword arguments of `Database.attend`."""

    score: ScoreLike | None
    weighting: WeightingLike
    where: Any
    tolerance: float | None
    confidence: float | None
    approximate: bool | float | None


class AskOptions(DatabaseAttendOptions, total=False):
    """The keyword arguments of `Database.ask`."""

    top: int


ARGUMENT_HINTS = {
    x: step
    for x, step in FOREIGN_KEYWORDS.items()
    if step.split("=")[0] in DatabaseAttendOptions.__optional_keys__
}
ARGUMENT_HINTS["mask"] = "where=, a condition on the rows"
ARGUMENT_HINTS |= dict.fromkeys(("filter", "filters"), "where=, a condition on the rows")
"""What to pass here for a keyword of `qkv.attend`, or of another library."""

TOP_K_HINT = "top=k to list k rows, or weighting=weightings.TopK(k) to use only k rows"


def parse_queries(view: TableView, query: Any) -> tuple[Any, bool]:
    """Return the queries, and whether there is only a single one.

    The queries are a list of cells, or an array (n, width) of vectors.
    """
    kind, names = view.schema.key_kind, view.schema.key
    if type(query) is np.ndarray and kind == "vector" and query.dtype.kind == "f" and query.ndim:
        return (query[None], True) if query.ndim == 1 else (query, False)
    query = find_named_cells(query, names, kind)
    batch, query = isinstance(query, Batch), as_cells(query, kind)
    shaped = is_array(query)
    if shaped and kind == "number":
        return to_numpy(_as_column(query))[:, 0].tolist(), len(query.shape) == 0
    if shaped and view.has_number_keys:
        return as_tuples(query, _key_text(view))
    if shaped and kind == "date":
        raise DtypeError(_date_message(query, "query"))
    if shaped or kind == "vector":
        return _parse_vectors(query, kind)
    many = batch or (isinstance(query, list) and not _is_one_key(view, query))
    queries = list(query) if many else [query]
    if kind == "tuple":
        queries = [as_named_tuple(as_tuple(query), names) for query in queries]
    if kind in PARSER_BY_KIND and not view.encoder.accepts_any_query:
        queries = [PARSER_BY_KIND[kind](cell, f"query {i}") for i, cell in enumerate(queries)]
    elif len(names) > 1 and not view.encoder.accepts_any_query:
        queries = [
            _parse_key_parts(view, cell, f"query {i}")
            if isinstance(cell, Mapping) or (isinstance(cell, tuple) and len(cell) == len(names))
            else cell
            for i, cell in enumerate(queries)
        ]
    for i, cell in enumerate(queries):
        if isinstance(cell, np.str_):
            queries[i] = cell = str(cell)
        if cell is None and not view.encoder.accepts_any_query:
            raise ArgumentError(f"query {i} must not be None")
        if isinstance(cell, str):
            cells.encode_utf8(cell)
            if not cell.strip() and not view.find_ids(cell) and not view.encoder.accepts_any_query:
                raise ArgumentError(
                    f"query {i} is empty and would match every row equally: pass some text"
                )
        elif isinstance(cell, dict) and not cell and (len(names) > 1 or not view.find_ids(cell)):
            raise ArgumentError(
                f"query {i} is empty and would match every row equally: pass a value for "
                f"{' or '.join(map(repr, names))}"
            )
        elif kind == "text" and not view.encoder.accepts_any_query:
            raise DtypeError(
                f"query {i} must be text, like the keys, not {quote_cell(cell)} "
                f"({type(cell).__name__}): "
                + (
                    f"pass {str(cell)!r}"
                    if isinstance(cell, int | float)
                    else "pass str, or reindex the rows by another key with by(key=…)"
                )
            )
        elif kind == "number" and isinstance(cell, datetime.date | datetime.time):
            raise DtypeError(f"query {i} must be a number, not {quote_cell(cell)}")
    return queries, not many


def _is_one_key(view: TableView, query: list[Any]) -> bool:
    """Return whether a list is one key: a JSON cell, or a key of several columns of numbers."""
    if view.schema.key_kind == "json":
        return cells.is_number_list(query)
    return is_flat(query) and view.has_number_keys


def _key_text(view: TableView) -> str:
    """Return the columns of the key as text for messages."""
    return ", ".join(view.schema.key) if len(view.schema.key) > 1 else "a tuple of numbers"


def _parse_vectors(query: Any, kind: str) -> tuple[np.ndarray, bool]:
    """Return vectors as an array (n, width), and whether there is only a single one."""
    try:
        array = to_numpy(query) if is_array(query) else as_floats(query)
    except DtypeError:
        raise
    except (TypeError, ValueError, OverflowError):
        widths = (
            [len(x) for x in query if hasattr(x, "__len__")]
            if isinstance(query, list | tuple)
            else []
        )
        reason = f": they have {widths[0]} numbers and {widths[-1]}" if len({*widths}) > 1 else ""
        raise DtypeError(
            "query must be a vector of numbers, like the keys, or a list of vectors of one length, "
            f"not {quote_cell(query)}{reason}"
        ) from None
    if not array.ndim:
        expected = "a vector" if kind == "vector" else f"{kind}, like the keys, or their vector"
        raise DtypeError(f"query must be {expected}, not the number {array}")
    return (array[None], True) if array.ndim == 1 else (array, False)


def _parse_key_parts(view: TableView, query: Any, what: str) -> Any:
    """Parse those parts of a query of several columns that are text for numbers or dates."""
    cells_by_column = (
        query if isinstance(query, Mapping) else dict(zip(view.schema.key, query, strict=False))
    )
    read = {
        name: PARSER_BY_KIND[view.key_kinds[name]](part, f"{what}, column {name!r},")
        for name, part in cells_by_column.items()
        if isinstance(part, str) and view.key_kinds.get(name) in PARSER_BY_KIND
    }
    if isinstance(query, Mapping):
        return {**query, **read}
    return tuple(read.get(name, part) for name, part in cells_by_column.items())


def _parse_moment(cell: Any, what: str) -> Any:
    """Return a date or time; parse ISO text. Text without a time of day is a date."""
    if isinstance(cell, str) and (moment := parsing.parse_moment(cell)) is not None:
        with contextlib.suppress(ValueError):
            return datetime.date.fromisoformat(cell)
        return moment
    if cell is None or cells.cell_kind(cell) == "date":
        return cell
    raise DtypeError(_date_message(cell, what))


def _date_message(cell: Any, what: str) -> str:
    return (
        f"{what} must be a date or ISO text, like the keys, not {quote_cell(cell)}: write it as "
        "2024-01-31, or 2024-01-31 12:00"
    )


def _parse_number(cell: Any, what: str) -> Any:
    """Return a number; parse text. Other cells are returned unchanged."""
    if not isinstance(cell, str) or not cell.strip():
        return cell
    if (number := parsing.parse_number(cell)) is None:
        raise DtypeError(f"{what} must be a number, not {quote_cell(cell)}")
    return number


PARSER_BY_KIND = {"date": _parse_moment, "number": _parse_number}
"""The functions that parse the text of a query, by the kind of the keys."""


def _as_column(query: Array) -> Array:
    """Return an array of numbers as (n, 1)."""
    if tuple(query.shape[1:]) not in ((), (1,)):
        raise ShapeError(
            f"query has shape {tuple(query.shape)}, but each key is one number: expected "
            "(queries,) or (queries, 1)"
        )
    return get_framework(query).xp.reshape(query, (-1, 1))


def encode_numbers(view: TableView, query: Array) -> tuple[Array, bool]:
    """Encode an array of numbers as vectors (n, width). Also return whether it was a single key.

    The vectors are in the query's framework and have at least 32 bits. Gradients pass through if
    the encoder supports them (`Encoder.standardize_query`).
    """
    if view.schema.key_kind == "number":
        rows, single = _as_column(query), len(query.shape) == 0
    else:
        single = len(query.shape) < 2
        rows = get_framework(query).xp.reshape(query, (1, -1)) if single else query
        if len(rows.shape) > 2:
            as_tuples(query, _key_text(view))  # this raises ShapeError
    vectors = view.encoder.standardize_query(rows)
    if vectors is not None:
        return vectors, single
    fw = get_framework(query)
    if fw.needs_gradient([query]):
        raise CombinationError(
            f"the encoder {view.encoder.kind} has no gradient for queries: detach the query, or "
            "call D.encode('numbers')"
        )
    host = to_numpy(rows)
    keys = (
        host[:, 0].tolist() if view.schema.key_kind == "number" else list(map(tuple, host.tolist()))
    )
    return fw.array_from_host(view.encode_queries(keys).code, query, "float32"), single


def resolve_score_like(view: TableView, score: ScoreLike | None, query: Array) -> Score:
    """Return the score object for `score`.

    If it is the default score, its arrays are moved to the query's framework and device.
    """
    chosen, fw = view.resolve_score(score), get_framework(query)
    if score is not None or fw.name == "numpy":
        return chosen
    return tree.map_arrays(
        load_framework("numpy"),
        lambda x: fw.array_from_host(x, query, fw.dtype_name(query)),
        chosen,
    )


def check_database_keywords(
    function: str, keywords: Collection[str], accepted: Collection[str]
) -> None:
    """Raise `TypeError` for an unknown keyword. The message names the right keyword."""
    hints = ARGUMENT_HINTS
    if "top" in accepted:
        names = ("limit", "n", "n_neighbors", "n_results", "num_results", "size", "top_k", "topk")
        hints = {**hints, "k": TOP_K_HINT} | {
            name: f"top={name} to list this many rows" for name in names
        }
    validate_keywords(function, keywords, accepted, elsewhere=hints)


def check_top(top: Any) -> None:
    """Raise `ArgumentError` unless `top` is an int above 0."""
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ArgumentError(f"top must be a number of rows, at least 1, not {top!r}")


def check_tolerance(tolerance: Any, confidence: Any) -> tuple[float | None, float | None]:
    """Check tolerance and confidence, and return them."""
    for name, x in (("tolerance", tolerance), ("confidence", confidence)):
        if x is None:
            continue
        if isinstance(x, bool) or not isinstance(x, int | float):
            raise DtypeError(f"{name} must be a number, not {x!r}")
    if tolerance is not None and not tolerance >= 0:
        raise ArgumentError(f"tolerance must be 0 or above, not {tolerance!r}")
    if confidence is not None and not 0 < confidence < 1:
        raise ArgumentError(f"confidence must be between 0 and 1, not {confidence!r}")
    if confidence is not None and tolerance is None:
        raise ArgumentError("confidence needs a tolerance: pass tolerance=0.01 too")
    return tolerance, confidence


def list_pairs(pairs: Any, what: str, right: str) -> list[Any]:
    """Return pairs as a list. `what` names the method and `right` the second part in messages."""
    if not isinstance(pairs, Iterable):
        raise DtypeError(
            f"{what}: pairs must be a list of (query, {right}) pairs, not {type(pairs).__name__}"
        )
    return list(pairs.items() if isinstance(pairs, Mapping) else pairs)


def split_pairs(
    view: TableView, pairs: Sequence[Any], what: str, right: str
) -> tuple[Any, list[Any]]:
    """Return the queries of all pairs, parsed, and their right keys or values."""
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DtypeError(f"{what}: pairs[{i}] must be (query, {right}), not {pair!r}")
    if not pairs:
        raise ArgumentError(f"{what}: pairs is empty: pass (query, {right}) pairs")
    queries = [query for query, _ in pairs]
    are_vectors = all(is_array(query) and len(query.shape) == 1 for query in queries)
    parsed, _ = parse_queries(
        view, np.stack(list(map(to_numpy, queries))) if are_vectors else Batch(queries)
    )
    return parsed, [answer for _, answer in pairs]
