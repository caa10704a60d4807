"""What is shown, as the descriptors of views: `{"view", "title", "data"}`, arrays still arrays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from qkv import scores, weightings
from qkv.answer import Answer
from qkv.answer_backend import SourceRows
from qkv.database.encoders import Arrays, Characters, Encoder, Exact, Numbers
from qkv.database.interface import RowSource
from qkv.errors import ArgumentError, DtypeError
from qkv.page.heads import MAX_HEAD_CELLS, heads_view
from qkv.page.sentence import sentence
from qkv.util.display import HeadsDisplayable
from qkv.util.formatting import format_one_line
from qkv.util.registry import ClassRegistry

Descriptor = dict[str, Any]

VIEW_NAMES = ("database", "data", "sentence", "regression", "scores", "model")

MAX_ROWS = 500
"""Rows of a database that a page holds; of more, the heaviest."""


def build_views(shown: Any) -> list[Descriptor]:
    """The views of an answer, a database or captured heads; or of several, each in a tab, by
    title where they are a dict.

    >>> from qkv import Database
    >>> [view] = build_views(Database({"Li": "Mu", "Smola": "Alex"}).ask("Li"))
    >>> view["view"], view["data"]["answer"]["value"]
    ('database', 'Mu')
    """
    if isinstance(shown, HeadsDisplayable):  # before dict, which it may be too
        weights, names, lengths, labels, whole = shown.head_weights(MAX_HEAD_CELLS)
        return [heads_view(weights, names, lengths=lengths, labels=labels, whole=whole)]
    if isinstance(shown, list | tuple):
        return [view for item in shown for view in build_views(item)]
    if isinstance(shown, dict) and "view" in shown:
        if shown["view"] not in VIEW_NAMES:
            raise ArgumentError(
                f"no view is called {shown['view']!r}: there are {', '.join(VIEW_NAMES)}"
            )
        return [{"title": "", "data": {}} | shown]
    if isinstance(shown, dict):
        return [{**view, "title": name} for name, x in shown.items() for view in build_views(x)]
    if isinstance(shown, Answer):
        return [answer_view(shown)]
    if isinstance(shown, RowSource):
        return [database_view(shown)]
    if isinstance(shown, str):
        return [sentence(shown)]
    raise DtypeError(
        "show takes an answer, a database, captured heads or a sentence, not "
        f"{type(shown).__name__}"
    )


def database_view(shown: Any) -> Descriptor:
    """A database, asked for its first key."""
    title = "database" if shown.path is None else Path(shown.path).stem
    first = next(iter(shown), None)
    if first is None:
        return {"view": "database", "title": title, "data": {"rows": [], "query": ""}}
    return {**answer_view(shown.ask(first)), "title": title}


def answer_view(found: Answer) -> Descriptor:
    """An answer, with what it takes to ask its rows anew."""
    told = found.to_dict() | {"score": found.score, "weighting": found.weighting}
    told["values"] = [share._asdict() for share in found.values]
    data: dict[str, Any] = {"query": found.query, "answer": told}
    if isinstance(found.value, dict) and not found.values:  # several columns, each pooled
        data["columns"] = list(found.value)
    source, rows = found._collect_source(MAX_ROWS), found.rows
    if source is not None:
        rows = source.rows
        told["spread"] = found.spread
        names = dict(zip(("key", "value"), source.column_names, strict=True))
        data |= {"names": names, **_scoring_data(source, found.total + found.missing)}
    told["weights"] = np.array([row.weight for row in rows], np.float64)
    data["rows"] = [{"key": row.key, "value": row.value} for row in rows]
    return {"view": "database", "title": format_one_line(found.query, 40), "data": data}


def _scoring_data(source: SourceRows, count: int) -> dict[str, Any]:
    """Score, weighting and vectors as the page's equation knows them, of `count` rows in all."""
    encoder = source.encoder
    score = named_settings(scores.NAMES, source.score)
    own = named_settings(scores.NAMES, encoder.default_score(count))
    found: dict[str, Any] = {
        "score": None if score == own else score,
        "weighting": named_settings(weightings.NAMES, source.weighting),
        "encoder": encoder.kind,
        "told": None not in (score, own, named_settings(weightings.NAMES, source.weighting)),
    }
    if source.keys is not None:
        found["vectors"] = {
            "keys": source.keys,
            "query": source.query,
            "encoder": encoder.kind,
            "score": own,
            "twin": _runs_in_browser(encoder),
        }
    return found


def named_settings(names: ClassRegistry[Any], thing: Any) -> dict[str, Any] | None:
    """A score or weighting as its name and settings; None for what has no name.

    >>> named_settings(scores.NAMES, scores.Gaussian(0.5))
    {'name': 'gaussian', 'bandwidth': 0.5}
    """
    name = names.name_of(type(thing))
    if name is None:
        return None
    settings = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    plain = {key: _plain_setting(x) for key, x in settings.items() if x is not None}
    return None if NotImplemented in plain.values() else {"name": name, **plain}


def _plain_setting(x: Any) -> Any:
    if isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, np.ndarray | np.generic):
        return x.tolist()
    return NotImplemented


def _runs_in_browser(encoder: Encoder) -> bool:
    """Whether the page's encoder of that kind gives the same vectors."""
    if isinstance(encoder, Numbers):
        return encoder.units is None and encoder.bandwidth is None
    return encoder in (Arrays(), Characters(), Exact())
