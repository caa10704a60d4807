"""What is asked, as the keys are, and how nearly the answer must be right."""

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
    """The arguments of `attend` beside the query."""

    score: ScoreLike | None
    weighting: WeightingLike
    where: Any
    tolerance: float | None
    confidence: float | None


class AskOptions(AttendOptions, total=False):
    """Those of `ask`."""

    top: int


ARGUMENT_HINTS = {
    x: step
    for x, step in FOREIGN_KEYWORDS.items()
    if step.split("=")[0] in AttendOptions.__optional_keys__
}
ARGUMENT_HINTS["mask"] = "where=, a condition on the rows"
TOP_K_HINT = "top=k to name k rows, weighting=weightings.TopK(k) to use no more"
"""Where that goes which `attend` of arrays, or another library, has an argument for."""


def parse_queries(view: TableView, query: Any) -> tuple[Any, bool]:
    """The queries as a list of cells or an array of vectors, and whether there is only one."""
    kind, names = view.schema.key_kind, view.schema.key
    batch, query = isinstance(query, Batch), as_cells(query, kind)
    shaped = is_array(query)
    if shaped and kind == "number":
        return to_numpy(_as_column(query))[:, 0].tolist(), len(query.shape) == 0
    if shaped and view.has_number_keys:
        return as_tuples(query, _columns(view))
    if shaped and kind == "date":
        raise DtypeError(_no_date(query, "query"))
    if shaped or kind == "vector":
        return _vectors(query, kind)
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
                told = "and every row would match it alike"
                raise ArgumentError(f"query {i} is empty, {told}: say what to look for")
        elif isinstance(one, dict) and not one and (len(names) > 1 or not view.find_ids(one)):
            told = f"query {i} is empty, and every row would match it alike: say what to look for"
            raise ArgumentError(f"{told} in {' or '.join(map(repr, names))}")
        elif kind == "text" and not view.encoder.accepts_any_query:
            told = f"not {quote_cell(one)} ({type(one).__name__})"
            raise DtypeError(f"query {i} must be text, as the keys are, {told}")
        elif kind == "number" and isinstance(one, datetime.date | datetime.time):
            raise DtypeError(f"query {i} must be a number, not {quote_cell(one)}")
    return queries, not many


def _is_one_key(view: TableView, query: list[Any]) -> bool:
    """Whether a list is one key: of JSON, or of several columns of numbers."""
    if view.schema.key_kind == "json":
        return cells.is_number_list(query)
    return is_flat(query) and view.has_number_keys


def _columns(view: TableView) -> str:
    return ", ".join(view.schema.key) if len(view.schema.key) > 1 else "a tuple of numbers"


def _vectors(query: Any, kind: str) -> tuple[np.ndarray, bool]:
    """Vectors (n, width), and whether there is only one."""
    try:
        array = to_numpy(query) if is_array(query) else as_floats(query)
    except DtypeError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise DtypeError(
            "query must be a vector of numbers, as the keys are, or a list of such, not "
            f"{quote_cell(query)}"
        ) from None
    if not array.ndim:
        told = "a vector" if kind == "vector" else f"{kind}, as the keys are, or their vector"
        raise DtypeError(f"query must be {told}, not the number {array}")
    return (array[None], True) if array.ndim == 1 else (array, False)


def _parse_key_parts(view: TableView, one: Any, what: str) -> Any:
    """A query of several columns, whose parts are read of text where they are."""
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
    """A date or time as it is, or of its ISO text: a day where that tells no hour."""
    if isinstance(one, str) and (found := parsing.parse_moment(one)) is not None:
        with contextlib.suppress(ValueError):
            return datetime.date.fromisoformat(one)
        return found
    if one is None or cells.cell_kind(one) == "date":
        return one
    raise DtypeError(_no_date(one, what))


def _no_date(one: Any, what: str) -> str:
    return f"{what} must be a date or its ISO text, as the keys are, not {quote_cell(one)}"


def _parse_number(one: Any, what: str) -> Any:
    """A number as it is, or of its text."""
    if not isinstance(one, str) or not one.strip():
        return one
    if (found := parsing.parse_number(one)) is None:
        raise DtypeError(f"{what} must be a number, not {quote_cell(one)}")
    return found


PARSER_BY_KIND = {"date": _parse_moment, "number": _parse_number}
"""What is read of text where keys are of these kinds, by whichever door it came."""


def _as_column(query: Array) -> Array:
    """Numbers as (n, 1); a table of them is none, as each key is one number."""
    if tuple(query.shape[1:]) not in ((), (1,)):
        told = "but the keys are numbers: expected (queries,) or (queries, 1)"
        raise ShapeError(f"query has shape {tuple(query.shape)}, {told}")
    return get_framework(query).xp.reshape(query, (-1, 1))


def encode_numbers(view: TableView, query: Array) -> tuple[Array, bool]:
    """An array of numbers as vectors (n, width) in its framework, and whether it is a single key.

    The gradient goes through where the encoder is arithmetic on the numbers (`Encoder.moved`).
    Vectors have at least 32 bits.
    """
    if view.schema.key_kind == "number":
        rows, single = _as_column(query), len(query.shape) == 0
    else:
        single = len(query.shape) < 2
        rows = get_framework(query).xp.reshape(query, (1, -1)) if single else query
        if len(rows.shape) > 2:
            as_tuples(query, _columns(view))  # which refuses it
    found = view.encoder.standardize_query(rows)
    if found is not None:
        return found, single
    fw = get_framework(query)
    if fw.needs_gradient([query]):
        raise CombinationError(
            f"the encoder {view.encoder.kind} has no gradient for its queries: detach the query, "
            "or encode the keys by numbers alone, D.encode('numbers')"
        )
    host = to_numpy(rows)
    keys = (
        host[:, 0].tolist() if view.schema.key_kind == "number" else list(map(tuple, host.tolist()))
    )
    return fw.array_from_host(view.encode_queries(keys).code, query, "float32"), single


def score_beside(view: TableView, score: ScoreLike | None, query: Array) -> Score:
    """The score to compare queries by; the arrays of the default one go where the query is."""
    chosen, fw = view.resolve_score(score), get_framework(query)
    if score is not None or fw.name == "numpy":
        return chosen
    return tree.map_arrays(
        load_framework("numpy"),
        lambda x: fw.array_from_host(x, query, fw.dtype_name(query)),
        chosen,
    )


def check_database_keywords(door: str, given: Collection[str], names: Collection[str]) -> None:
    """Refuse an argument that a door of a database does not have, and say where it goes here."""
    few = {"k": TOP_K_HINT} if "top" in names else {}
    validate_keywords(door, given, names, elsewhere={**ARGUMENT_HINTS, **few})


def check_top(top: Any) -> None:
    """Refuse a `top` that is no number of rows."""
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ArgumentError(f"top must be a number of rows of at least 1, not {top!r}")


def check_tolerance(tolerance: Any, confidence: Any) -> tuple[float | None, float | None]:
    """How near an answer must be, and how surely; refused where that means nothing."""
    for name, x in (("tolerance", tolerance), ("confidence", confidence)):
        if x is None:
            continue
        if isinstance(x, bool) or not isinstance(x, int | float):
            raise DtypeError(f"{name} must be a number, not {x!r}")
    if tolerance is not None and not tolerance >= 0:
        raise ArgumentError(f"tolerance must be 0 or above, not {tolerance!r}")
    if confidence is not None and not 0 < confidence < 1:
        raise ArgumentError(f"confidence must lie between 0 and 1, not {confidence!r}")
    if confidence is not None and tolerance is None:
        raise ArgumentError("confidence is that of a tolerance: pass tolerance=0.01 with it")
    return tolerance, confidence


def list_pairs(pairs: Any, what: str, right: str) -> list[Any]:
    """The pairs of an iterable of them."""
    if not isinstance(pairs, Iterable):
        told = f"(query, {right}) pairs, not {type(pairs).__name__}"
        raise DtypeError(f"{what}: pairs must be a list of {told}")
    return list(pairs.items() if isinstance(pairs, Mapping) else pairs)


def split_pairs(
    view: TableView, pairs: Sequence[Any], what: str, right: str
) -> tuple[Any, list[Any]]:
    """The queries of (query, right …) pairs, and what is right of each."""
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DtypeError(f"{what}: pairs[{i}] must be (query, {right}), not {pair!r}")
    if not pairs:
        raise ArgumentError(f"{what}: pairs is empty; it takes (query, {right}) pairs")
    asked = [query for query, _ in pairs]
    vectors = all(is_array(query) and len(query.shape) == 1 for query in asked)
    queries, _ = parse_queries(
        view, np.stack(list(map(to_numpy, asked))) if vectors else Batch(asked)
    )
    return queries, [wish for _, wish in pairs]
