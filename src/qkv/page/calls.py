"""The calls that a page makes to Python, by name: the same in a notebook and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from qkv import attention, scores, weightings
from qkv.database import encoders
from qkv.database.table.encoding import add_word_columns, encode_as_stored
from qkv.errors import ArgumentError, unknown_name_error
from qkv.frameworks.ragged import entry_positions
from qkv.page import components, sentence, tables, views
from qkv.page.limits import MAX_NUMBERS, MAX_QUERY_CHARACTERS, MAX_TEXT_CHARACTERS, check_count

Args = Mapping[str, Any]
Databases = MutableMapping[str, Any]


def encode_keys(args: Args, databases: Databases) -> dict[str, Any]:
    """Return the vectors of `keys` and of a `query`, and the score that compares them.

    The encoder is that of `database`, or the one named `encoder`, fitted to the keys.
    """
    keys = args["keys"]
    if not isinstance(keys, list) or not keys:
        raise ArgumentError("keys must be a list that is not empty")
    check_count(
        "characters of keys", sum(len(x) for x in keys if isinstance(x, str)), MAX_TEXT_CHARACTERS
    )
    if isinstance(query := args["query"], str):
        check_count("characters of a query", len(query), MAX_QUERY_CHARACTERS)
    if args.get("database") is not None:
        encoder = tables.find_database(args, databases).encoder or encoders.default(keys)
    else:
        encoder = encoders.resolve_name(args["encoder"]).fit(keys)
    check_count("numbers", len(keys) * encoder.width, MAX_NUMBERS)
    sparse = encoder.encode_sparse(keys)
    if sparse is not None:
        check_count(
            "numbers",
            len(keys) * (encoder.width + len(np.unique(entry_positions(sparse)))),
            MAX_NUMBERS,
        )
    query, key = add_word_columns(encoder, [query], encode_as_stored(encoder, keys), sparse)
    return {
        "keys": key,
        "query": query[0],
        "score": components.named_settings(scores.NAMES, encoder.default_score(len(keys))),
    }


def weigh_keys(args: Args, databases: Databases) -> dict[str, Any]:
    """Return the score and the weight of each of `keys` for `query`, (m,) each.

    A page calls this for a `score` or `weighting` that it cannot compute itself. Keys where `live`
    is false get no weight.

    >>> args = {"keys": ["Li", "Hu"], "query": "Li", "encoder": "exact", "weighting": "hard"}
    >>> weigh_keys(args, {})["weights"]
    array([1., 0.])
    """
    encoded = encode_keys(args, databases)
    keys, query = np.asarray(encoded["keys"]), np.asarray(encoded["query"])
    score_spec = args.get("score") or encoded["score"]
    score = components.build_component(scores.NAMES, score_spec, keys.dtype)
    weighting = components.build_component(weightings.NAMES, args.get("weighting") or "softmax")
    live = args.get("live")
    mask = np.ones(len(keys), bool) if live is None else np.asarray(live, bool)
    if mask.shape != (len(keys),):
        raise ArgumentError(f"live must be a list of {len(keys)} booleans, one for each key")
    if score.compares_keys:
        found = components.score_by_equality(args["keys"], args["query"])
        weights = weighting(found[None], mask[None])[0]
    else:
        found = weighting.adapt_score(score)(query[None], keys)[0]
        weights = attention.weights(
            query[None], keys, score=score, weighting=weighting, mask=mask[None]
        )[0]
    return {
        "scores": np.asarray(found, np.float64),
        "weights": np.asarray(weights, np.float64),
        "is_convex": weighting.is_convex,
        "is_sparse": weighting.is_sparse,
    }


def weigh_grid(args: Args, databases: Databases) -> dict[str, Any]:
    """Return the scores, and the weights if a `weighting` is given, of vectors: (n, m) each.

    `queries` (n, d) and `keys` (m, d) are lists of lists. The page draws a score that it cannot
    compute itself from these numbers.
    """
    queries, keys = (np.asarray(args[name], np.float64) for name in ("queries", "keys"))
    if queries.ndim != 2 or keys.ndim != 2:
        raise ArgumentError("queries and keys must be lists of vectors of equal length")
    check_count("numbers", queries.size + keys.size + len(queries) * len(keys), MAX_NUMBERS)
    score = components.build_component(scores.NAMES, args["score"])
    result = {"scores": np.asarray(score(queries, keys), np.float64)}
    if args.get("weighting"):
        weighting = components.build_component(weightings.NAMES, args["weighting"])
        result["weights"] = np.asarray(
            attention.weights(queries, keys, score=score, weighting=weighting), np.float64
        )
    return result


def answer_query(args: Args, databases: Databases) -> dict[str, Any]:
    """Return the data of the view of an answer: its heaviest rows and their vectors.

    `best` is the row with the largest score, and `best["at"]` its position among the rows or None.
    """
    answer = tables.find_answer(args, databases)
    data: dict[str, Any] = views.answer_view(answer)["data"]
    source = answer._collect_source(views.MAX_ROWS)
    rows = [] if source is None else source.rows
    hard = tables.find_answer({**args, "weighting": "hard", "top": 1}, databases)
    for best in hard.rows:
        positions = (i for i, row in enumerate(rows) if row.index == best.index)
        data["best"] = {"key": best.key, "value": hard.value, "at": next(positions, None)}
    return data


def build_live_view(args: Args, databases: Databases) -> dict[str, Any]:
    """Return the data of the view Database for `database`, with the `query` if there is one.

    >>> from qkv import Database
    >>> build_live_view({"database": "names"}, {"names": Database({"Li": "Mu"})})["rows"]
    [{'key': 'Li', 'value': 'Mu'}]
    """
    database = tables.find_database(args, databases)
    has_query = args.get("query") not in (None, "")
    view = (
        views.answer_view(tables.find_answer(args, databases))
        if has_query
        else views.database_view(database)
    )
    return {**view["data"], "database": args["database"]}


CALL_HANDLERS: dict[str, Callable[[Args, Databases], Any]] = {
    "ask": tables.ask_database,
    "answer": answer_query,
    "live": build_live_view,
    "encode": encode_keys,
    "weigh": weigh_keys,
    "grid": weigh_grid,
    "databases": tables.list_databases,
    "sentence": sentence.read_text_call,
    "model": sentence.read_heads_call,
    "rows": tables.list_rows,
    "versions": tables.list_versions,
    "upload": tables.upload_table,
    "columns": tables.rekey_database,
}


def run_call(name: str, args: Args, databases: Databases) -> Any:
    """Run one call and return its result, with NumPy arrays; raise QkvError if it is invalid.

    >>> from qkv import Database
    >>> names = Database({"Li": "Mu", "Smola": "Alex"})
    >>> run_call("ask", {"database": "names", "query": "Li"}, {"names": names})["value"]
    'Mu'
    """
    if name not in CALL_HANDLERS:
        raise unknown_name_error("call", name, sorted(CALL_HANDLERS))
    return CALL_HANDLERS[name](args, databases)
