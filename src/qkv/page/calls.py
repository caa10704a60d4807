"""What a page asks of Python, by name: the same in a notebook and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from qkv import scores
from qkv.database import encoders
from qkv.database.table.encoding import add_word_columns, encode_as_stored
from qkv.errors import ArgumentError
from qkv.frameworks.ragged import entry_positions
from qkv.page import sentence, tables, views
from qkv.page.limits import MAX_NUMBERS, MAX_TEXT_CHARACTERS, QUERY, check_count
from qkv.page.views import named_settings

Args = Mapping[str, Any]
Databases = MutableMapping[str, Any]


def encode_keys(args: Args, databases: Databases) -> dict[str, Any]:
    """The vectors of `keys` and of a `query`, and the score that compares them.

    They are those of the encoder of `database`, or of the `encoder` so named, fitted to the keys.
    """
    keys = args["keys"]
    if not isinstance(keys, list) or not keys:
        raise ArgumentError("keys must be a list of them")
    check_count(
        "characters of keys", sum(len(x) for x in keys if isinstance(x, str)), MAX_TEXT_CHARACTERS
    )
    if isinstance(query := args["query"], str):
        check_count("characters of a query", len(query), QUERY)
    if args.get("database") is not None:
        encoder = tables.find_database(args, databases).encoder or encoders.default(keys)
    else:
        encoder = encoders.resolve_name(args["encoder"]).fit(keys)
    check_count("numbers", len(keys) * encoder.width, MAX_NUMBERS)
    beside = encoder.encode_sparse(keys)
    if beside is not None:
        check_count(
            "numbers",
            len(keys) * (encoder.width + len(np.unique(entry_positions(beside)))),
            MAX_NUMBERS,
        )
    query, key = add_word_columns(encoder, [query], encode_as_stored(encoder, keys), beside)
    return {
        "keys": key,
        "query": query[0],
        "score": named_settings(scores.NAMES, encoder.default_score(len(keys))),
    }


def answer_query(args: Args, databases: Databases) -> dict[str, Any]:
    """What `ask` finds, with its heaviest rows and their vectors as a view shows them; `best` is
    the row with the largest score, and `at` its place among them or None."""
    found = tables.find_answer(args, databases)
    data: dict[str, Any] = views.answer_view(found)["data"]
    source = found._collect_source(views.MAX_ROWS)
    rows = [] if source is None else source.rows
    for best in tables.find_answer({**args, "weighting": "hard", "top": 1}, databases).rows:
        places = (i for i, row in enumerate(rows) if row.index == best.index)
        data["best"] = {"key": best.key, "value": best.value, "at": next(places, None)}
    return data


CALL_HANDLERS: dict[str, Callable[[Args, Databases], Any]] = {
    "ask": tables.ask_database,
    "answer": answer_query,
    "encode": encode_keys,
    "databases": tables.list_databases,
    "sentence": sentence.read_text_call,
    "model": sentence.read_heads_call,
    "rows": tables.list_rows,
    "versions": tables.list_versions,
    "upload": tables.upload_table,
    "columns": tables.rekey_database,
}


def run_call(name: str, args: Args, databases: Databases) -> Any:
    """The answer to one call, arrays still arrays; QkvError where it makes no sense.

    >>> from qkv import Database
    >>> names = Database({"Li": "Mu", "Smola": "Alex"})
    >>> run_call("ask", {"database": "names", "query": "Li"}, {"names": names})["value"]
    'Mu'
    """
    if name not in CALL_HANDLERS:
        raise ArgumentError(f"a page calls {', '.join(sorted(CALL_HANDLERS))}, not {name!r}")
    return CALL_HANDLERS[name](args, databases)
