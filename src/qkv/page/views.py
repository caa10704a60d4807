"""What is shown, as the descriptors of views: `{"view", "title", "data"}`, arrays still arrays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from qkv import scores, weightings
from qkv.answer import Answer
from qkv.behind import Source
from qkv.database.encoders import Arrays, Characters, Encoder, Exact, Numbers
from qkv.database.leaving import Leaving
from qkv.errors import ArgumentError, DtypeError
from qkv.names import Names
from qkv.page.heads import LARGE, heads
from qkv.page.sentence import sentence
from qkv.shown import Headed
from qkv.told import short

Descriptor = dict[str, Any]

NAMES = ("database", "data", "sentence", "regression", "scores", "model")

MOST = 500
"""Rows of a database that a page holds; of more, the heaviest."""


def views(shown: Any) -> list[Descriptor]:
    """The views of an answer, a database or captured heads; or of several, each in a tab, by
    title where they are a dict.

    >>> from qkv import Database
    >>> [view] = views(Database({"Li": "Mu", "Smola": "Alex"}).ask("Li"))
    >>> view["view"], view["data"]["answer"]["value"]
    ('database', 'Mu')
    """
    if isinstance(shown, Headed):  # before dict, which it may be too
        weights, names, lengths, labels, whole = shown.heads(LARGE)
        return [heads(weights, names, lengths=lengths, labels=labels, whole=whole)]
    if isinstance(shown, list | tuple):
        return [view for item in shown for view in views(item)]
    if isinstance(shown, dict) and "view" in shown:
        if shown["view"] not in NAMES:
            raise ArgumentError(
                f"no view is called {shown['view']!r}: there are {', '.join(NAMES)}"
            )
        return [{"title": "", "data": {}} | shown]
    if isinstance(shown, dict):
        return [{**view, "title": name} for name, x in shown.items() for view in views(x)]
    if isinstance(shown, Answer):
        return [answer(shown)]
    if isinstance(shown, Leaving):
        return [database(shown)]
    if isinstance(shown, str):
        return [sentence(shown)]
    raise DtypeError(
        "show takes an answer, a database, captured heads or a sentence, not "
        f"{type(shown).__name__}"
    )


def database(shown: Any) -> Descriptor:
    """A database, asked for its first key."""
    title = "database" if shown.path is None else Path(shown.path).stem
    first = next(iter(shown), None)
    if first is None:
        return {"view": "database", "title": title, "data": {"rows": [], "query": ""}}
    return {**answer(shown.ask(first)), "title": title}


def answer(found: Answer) -> Descriptor:
    """An answer, with what it takes to ask its rows anew."""
    told = found.to_dict() | {"score": found.score, "weighting": found.weighting}
    told["values"] = [share._asdict() for share in found.values]
    data: dict[str, Any] = {"query": found.query, "answer": told}
    if isinstance(found.value, dict) and not found.values:  # several columns, each pooled
        data["columns"] = list(found.value)
    source, rows = found.source(MOST), found.rows
    if source is not None:
        rows = source.rows
        told["spread"] = found.spread
        names = dict(zip(("key", "value"), source.names, strict=True))
        data |= {"names": names, **_how(source, found.total + found.missing)}
    told["weights"] = np.array([row.weight for row in rows], np.float64)
    data["rows"] = [{"key": row.key, "value": row.value} for row in rows]
    return {"view": "database", "title": short(found.query, 40), "data": data}


def _how(source: Source, count: int) -> dict[str, Any]:
    """Score, weighting and vectors as the page's equation knows them, of `count` rows in all."""
    encoder = source.encoder
    score = named(scores.NAMES, source.score)
    own = named(scores.NAMES, encoder.score(count))
    found: dict[str, Any] = {
        "score": None if score == own else score,
        "weighting": named(weightings.NAMES, source.weighting),
        "encoder": encoder.kind,
        "told": None not in (score, own, named(weightings.NAMES, source.weighting)),
    }
    if source.keys is not None:
        found["vectors"] = {
            "keys": source.keys,
            "query": source.query,
            "encoder": encoder.kind,
            "score": own,
            "twin": _runs_here(encoder),
        }
    return found


def named(names: Names[Any], thing: Any) -> dict[str, Any] | None:
    """A score or weighting as its name and settings; None for what has no name.

    >>> named(scores.NAMES, scores.Gaussian(0.5))
    {'name': 'gaussian', 'bandwidth': 0.5}
    """
    name = names.name_of(type(thing))
    if name is None:
        return None
    settings = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    plain = {key: _plain(x) for key, x in settings.items() if x is not None}
    return None if NotImplemented in plain.values() else {"name": name, **plain}


def _plain(x: Any) -> Any:
    if isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, np.ndarray | np.generic):
        return x.tolist()
    return NotImplemented


def _runs_here(encoder: Encoder) -> bool:
    """Whether the page's encoder of that kind gives the same vectors."""
    if isinstance(encoder, Numbers):
        return encoder.units is None and encoder.bandwidth is None
    return encoder in (Arrays(), Characters(), Exact())
