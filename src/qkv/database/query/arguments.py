"""The arguments of `ask` and `attend`: queries, scores and tolerances."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from qkv.database import parsing
from qkv.database.query.inputs import Batch, as_cells, as_floats, as_tuple, as_tuples, is_flat
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


class AttendOptions(TypedDict, total=False):
    """The keyword arguments of `Database.attend`."""

    score: ScoreLike | None
    weighting: WeightingLike
    where: Any
    tolerance: float | None
    confidence: float | None


class AskOptions(AttendOptions, total=False):
    """The keyword arguments of `Database.ask`."""

    top: int


ARGUMENT_HINTS = {
    x: step
    for x, step in FOREIGN_KEYWORDS.items()
    if step.split("=")[0] in AttendOptions.__optional_keys__
}
ARGUMENT_HINTS["mask"] = "where=, a condition on the rows"
"""What to pass for an argument of `qkv.attend` or of another library."""

TOP_K_HINT = "top=k to list k rows, or weighting=weightings.TopK(k) to use only k rows"


def parse_queries(view: TableView, query: Any) -> tuple[Any, bool]:
    """Return queries as a list of cells or an array of vectors, and whether it is only one."""
    kind, names = view.schema.key_kind, view.schema.key
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
        queries = list(map(as_tuple, queries))
    if kind in PARSER_BY_KIND and not view.encoder.accepts_any_query:
        queries = [PARSER_BY_KIND[kind](one, f"query {i}") for i, one in enumerate(queries)]
    elif len(names) > 1 and not view.encoder.accepts_any_query:
        queries = [
            _parse_key_parts(view, one, f"query {i}")
            if isinstance(one, Mapping) or (isinstance(one, tuple) and len(one) == len(names))
            else one
            for i, one in enumerate(queries)
        ]
    for i, one in enumerate(queries):
        if isinstance(one, np.str_):
            queries[i] = one = str(one)
        if one is None and not view.encoder.accepts_any_query:
            raise ArgumentError(f"query {i} must not be None")
        if isinstance(one, str):
            cells.encode_utf8(one)
            if not one.strip() and not view.find_ids(one) and not view.encoder.accepts_any_query:
                raise ArgumentError(
                    f"query {i} is empty and would match every row equally: pass some text"
                )
        elif isinstance(one, dict) and not one and (len(names) > 1 or not view.find_ids(one)):
            raise ArgumentError(
                f"query {i} is empty and would match every row equally: pass a value for "
                f"{' or '.join(map(repr, names))}"
            )
        elif kind == "text" and not view.encoder.accepts_any_query:
            raise DtypeError(
                f"query {i} must be text, like the keys, not {quote_cell(one)} "
                f"({type(one).__name__})"
            )
        elif kind == "number" and isinstance(one, datetime.date | datetime.time):
            raise DtypeError(f"query {i} must be a number, not {quote_cell(one)}")
    return queries, not many


def _is_one_key(view: TableView, query: list[Any]) -> bool:
    """Return whether a list is one key: a JSON cell, or several columns of numbers."""
    if view.schema.key_kind == "json":
        return cells.is_number_list(query)
    return is_flat(query) and view.has_number_keys


def _key_text(view: TableView) -> str:
    return ", ".join(view.schema.key) if len(view.schema.key) > 1 else "a tuple of numbers"


def _parse_vectors(query: Any, kind: str) -> tuple[np.ndarray, bool]:
    """Return vectors (n, width), and whether it is a single one."""
    try:
        array = to_numpy(query) if is_array(query) else as_floats(query)
    except DtypeError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise DtypeError(
            "query must be a vector of numbers, like the keys, or a list of vectors, not "
            f"{quote_cell(query)}"
        ) from None
    if not array.ndim:
        expected = "a vector" if kind == "vector" else f"{kind}, like the keys, or their vector"
        raise DtypeError(f"query must be {expected}, not the number {array}")
    return (array[None], True) if array.ndim == 1 else (array, False)


def _parse_key_parts(view: TableView, one: Any, what: str) -> Any:
    """Parse the text parts of a query of several columns into numbers and dates."""
    given = one if isinstance(one, Mapping) else dict(zip(view.schema.key, one, strict=False))
    read = {
        name: PARSER_BY_KIND[view.key_kinds[name]](part, f"{what}, column {name!r},")
        for name, part in given.items()
        if isinstance(part, str) and view.key_kinds.get(name) in PARSER_BY_KIND
    }
    if isinstance(one, Mapping):
        return {**one, **read}
    return tuple(read.get(name, part) for name, part in given.items())


def _parse_moment(one: Any, what: str) -> Any:
    """Return a date or time, parsed from ISO text if necessary; text without an hour is a day."""
    if isinstance(one, str) and (found := parsing.parse_moment(one)) is not None:
        with contextlib.suppress(ValueError):
            return datetime.date.fromisoformat(one)
        return found
    if one is None or cells.cell_kind(one) == "date":
        return one
    raise DtypeError(_date_message(one, what))


def _date_message(one: Any, what: str) -> str:
    return f"{what} must be a date or ISO text, like the keys, not {quote_cell(one)}"


def _parse_number(one: Any, what: str) -> Any:
    """Return a number, parsed from text if necessary."""
    if not isinstance(one, str) or not one.strip():
        return one
    if (found := parsing.parse_number(one)) is None:
        raise DtypeError(f"{what} must be a number, not {quote_cell(one)}")
    return found


PARSER_BY_KIND = {"date": _parse_moment, "number": _parse_number}
"""Parsers of text queries, by the kind of the keys."""


def _as_column(query: Array) -> Array:
    """Return numbers as (n, 1)."""
    if tuple(query.shape[1:]) not in ((), (1,)):
        raise ShapeError(
            f"query has shape {tuple(query.shape)}, but each key is one number: expected "
            "(queries,) or (queries, 1)"
        )
    return get_framework(query).xp.reshape(query, (-1, 1))


def encode_numbers(view: TableView, query: Array) -> tuple[Array, bool]:
    """Encode an array of numbers as vectors (n, width); return whether it is a single key.

    The vectors are in the query's framework and have at least 32 bits. Gradients pass through if
    the encoder supports it (`Encoder.standardize_query`).
    """
    if view.schema.key_kind == "number":
        rows, single = _as_column(query), len(query.shape) == 0
    else:
        single = len(query.shape) < 2
        rows = get_framework(query).xp.reshape(query, (1, -1)) if single else query
        if len(rows.shape) > 2:
            as_tuples(query, _key_text(view))  # raises ShapeError
    found = view.encoder.standardize_query(rows)
    if found is not None:
        return found, single
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
    """Return the score; a default score gets its arrays in the query's framework, on its device."""
    chosen, fw = view.resolve_score(score), get_framework(query)
    if score is not None or fw.name == "numpy":
        return chosen
    return tree.map_arrays(
        load_framework("numpy"),
        lambda x: fw.array_from_host(x, query, fw.dtype_name(query)),
        chosen,
    )


def check_database_keywords(
    function: str, keywords: Collection[str], known: Collection[str]
) -> None:
    """Raise `TypeError` for an unknown keyword argument, and name the right one."""
    hints = {**ARGUMENT_HINTS, "k": TOP_K_HINT} if "top" in known else ARGUMENT_HINTS
    validate_keywords(function, keywords, known, elsewhere=hints)


def check_top(top: Any) -> None:
    """Check that `top` is an int above 0."""
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ArgumentError(f"top must be a number of rows of at least 1, not {top!r}")


def check_tolerance(tolerance: Any, confidence: Any) -> tuple[float | None, float | None]:
    """Check and return tolerance and confidence."""
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
    """Return pairs as a list."""
    if not isinstance(pairs, Iterable):
        raise DtypeError(
            f"{what}: pairs must be a list of (query, {right}) pairs, not {type(pairs).__name__}"
        )
    return list(pairs.items() if isinstance(pairs, Mapping) else pairs)


def split_pairs(
    view: TableView, pairs: Sequence[Any], what: str, right: str
) -> tuple[Any, list[Any]]:
    """Return the queries and the right keys or values of pairs."""
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
