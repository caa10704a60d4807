"""What a page asks of Python, by name: the same in a notebook and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from qkv import scores
from qkv.arrays.ragged import places
from qkv.database import encoders
from qkv.database.encoding import at_words, kept
from qkv.errors import ArgumentError
from qkv.page import sentence, tables, views
from qkv.page.bounds import NUMBERS, QUERY, TEXT, few
from qkv.page.views import named

Args = Mapping[str, Any]
Databases = MutableMapping[str, Any]


def encode(args: Args, databases: Databases) -> dict[str, Any]:
    """The vectors of `keys` and of a `query`, and the score that compares them.

    They are those of the encoder of `database`, or of the `encoder` so named, fitted to the keys.
    """
    keys = args["keys"]
    if not isinstance(keys, list) or not keys:
        raise ArgumentError("keys must be a list of them")
    few("characters of keys", sum(len(x) for x in keys if isinstance(x, str)), TEXT)
    if isinstance(query := args["query"], str):
        few("characters of a query", len(query), QUERY)
    if args.get("database") is not None:
        encoder = tables.chosen(args, databases).encoder or encoders.default(keys)
    else:
        encoder = encoders.named(args["encoder"]).fit(keys)
    few("numbers", len(keys) * encoder.width, NUMBERS)
    beside = encoder.sparse(keys)
    if beside is not None:
        few("numbers", len(keys) * (encoder.width + len(np.unique(places(beside)))), NUMBERS)
    query, key = at_words(encoder, [query], kept(encoder, keys), beside)
    return {
        "keys": key,
        "query": query[0],
        "score": named(scores.NAMES, encoder.score(len(keys))),
    }


def answer(args: Args, databases: Databases) -> dict[str, Any]:
    """What `ask` finds, with its heaviest rows and their vectors as a view shows them; `best` is
    the row with the largest score, and `at` its place among them or None."""
    found = tables.asked(args, databases)
    data: dict[str, Any] = views.answer(found)["data"]
    source = found.source(views.MOST)
    rows = [] if source is None else source.rows
    for best in tables.asked({**args, "weighting": "hard", "top": 1}, databases).rows:
        places = (i for i, row in enumerate(rows) if row.index == best.index)
        data["best"] = {"key": best.key, "value": best.value, "at": next(places, None)}
    return data


CALLS: dict[str, Callable[[Args, Databases], Any]] = {
    "ask": tables.ask,
    "answer": answer,
    "encode": encode,
    "databases": tables.databases,
    "sentence": sentence.call,
    "model": sentence.model,
    "rows": tables.rows,
    "versions": tables.versions,
    "upload": tables.upload,
    "columns": tables.columns,
}


def call(name: str, args: Args, databases: Databases) -> Any:
    """The answer to one call, arrays still arrays; QkvError where it makes no sense.

    >>> from qkv import Database
    >>> names = Database({"Li": "Mu", "Smola": "Alex"})
    >>> call("ask", {"database": "names", "query": "Li"}, {"names": names})["value"]
    'Mu'
    """
    if name not in CALLS:
        raise ArgumentError(f"a page calls {', '.join(sorted(CALLS))}, not {name!r}")
    return CALLS[name](args, databases)
