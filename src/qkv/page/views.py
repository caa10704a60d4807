"""View descriptors, `{"view", "title", "data"}` with NumPy arrays, of the objects to show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from qkv import scores, weightings
from qkv.answer import Answer
from qkv.answer_backend import SourceRows
from qkv.database.encoders import Arrays, Characters, Encoder, Exact, Numbers
from qkv.database.interface import RowSource
from qkv.errors import ArgumentError, DtypeError
from qkv.page.components import list_registered, named_settings, score_by_equality
from qkv.page.heads import MAX_HEAD_CELLS, heads_view
from qkv.page.sentence import sentence
from qkv.util.display import HeadsDisplayable
from qkv.util.formatting import format_one_line

Descriptor = dict[str, Any]

VIEW_NAMES = ("database", "data", "sentence", "regression", "scores", "model")
VIEWS_WITH_SCORES = ("database", "data", "scores")
"""Views in which a reader chooses among all registered scores and weightings."""

MAX_KEYS_TO_ASK = 10
"""The first keys of a database, among which the page looks for a question."""

MAX_QUESTION_LETTERS, MIN_WORD_LETTERS = 40, 5
"""The longest key that becomes a question, and the shortest word that loses a letter."""

MAX_ROWS = 500
"""Rows of a database that the page holds; the heaviest ones of a larger database."""


def build_views(shown: Any) -> list[Descriptor]:
    """Return the views of an answer, a database, captured heads or a sentence.

    A list or dict of them gives one view each; the keys of a dict are the titles.

    >>> from qkv import Database
    >>> [view] = build_views(Database({"Li": "Mu", "Smola": "Alex"}).ask("Li"))
    >>> view["view"], view["data"]["answer"]["value"]
    ('database', 'Mu')
    """
    if isinstance(shown, HeadsDisplayable):  # before dict, which it may be too
        weights, names, lengths, labels, has_all = shown.head_weights(MAX_HEAD_CELLS)
        return [heads_view(weights, names, lengths=lengths, labels=labels, has_all_weights=has_all)]
    if isinstance(shown, list | tuple):
        return [view for item in shown for view in build_views(item)]
    if isinstance(shown, dict) and "view" in shown:
        if shown["view"] not in VIEW_NAMES:
            raise ArgumentError(
                f"no view is named {shown['view']!r}: the views are {', '.join(VIEW_NAMES)}"
            )
        view: Descriptor = {"title": "", "data": {}} | shown
        if view["view"] in VIEWS_WITH_SCORES:
            view["data"] = {"registered": list_registered()} | view["data"]
        return [view]
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
    """Return the view of a database, with a question that is similar to one of its keys."""
    title = "database" if shown.path is None else Path(shown.path).stem
    keys = list(islice(iter(shown), MAX_KEYS_TO_ASK))
    if not keys:
        data = {"rows": [], "query": "", "registered": list_registered()}
        return {"view": "database", "title": title, "data": data}
    return {**answer_view(shown.ask(suggest_question(keys))), "title": title}


def suggest_question(keys: Sequence[Any]) -> Any:
    """Return a query that is similar to a key but equal to none, or else the first key.

    For text, the longest word of a key loses its middle letter. For numbers, it is a number between
    two keys.

    >>> suggest_question(["Emma", "The Alchemist"]), suggest_question([3, 40])
    ('the alchmist', 21.5)
    """
    numbers = (
        [x for x in dict.fromkeys(keys) if isinstance(x, int | float)] if _are_cells(keys) else []
    )
    if len(numbers) > 1:
        return float(f"{(numbers[0] + numbers[1]) / 2:.6g}")
    for key in keys:
        if isinstance(key, str) and len(key) <= MAX_QUESTION_LETTERS:
            words = key.split()
            longest = max(words, key=len, default="")
            if len(longest) >= MIN_WORD_LETTERS and longest.isalpha():
                middle = len(longest) // 2
                misspelled = longest[:middle] + longest[middle + 1 :]
                return " ".join(misspelled if x == longest else x for x in words).lower()
    return keys[0]


def _are_cells(keys: Sequence[Any]) -> bool:
    """Return whether the keys are numbers or text, and not vectors, tuples or other objects."""
    return all(isinstance(x, int | float | str) and not isinstance(x, bool) for x in keys)


def answer_view(answer: Answer) -> Descriptor:
    """Return the view of an answer, with the data that the page needs to recompute it."""
    fields = answer.to_dict() | {"score": answer.score, "weighting": answer.weighting}
    fields["values"] = [share._asdict() for share in answer.values]
    data: dict[str, Any] = {
        "query": answer.query,
        "answer": fields,
        "registered": list_registered(),
    }
    if isinstance(answer.mean, dict):  # several columns of numbers
        data["columns"] = list(answer.mean)
    source, rows = answer._collect_source(MAX_ROWS), answer.rows
    if source is not None:
        rows = source.rows
        fields["spread"] = answer.spread
        names = dict(zip(("key", "value"), source.column_names, strict=True))
        data |= {"names": names, **_scoring_data(source, answer.total + answer.missing)}
        fields["shares"] = answer.is_normalized
        fields["scores"] = _source_scores(source, answer)
    fields["weights"] = np.array([row.weight for row in rows], np.float64)
    data["rows"] = [{"key": row.key, "value": row.value} for row in rows]
    return {"view": "database", "title": format_one_line(answer.query, 40), "data": data}


def _scoring_data(source: SourceRows, count: int) -> dict[str, Any]:
    """Return the score, weighting and vectors for the page; `count` is the number of all rows."""
    encoder = source.encoder
    score = named_settings(scores.NAMES, source.score)
    own = named_settings(scores.NAMES, encoder.default_score(count))
    data: dict[str, Any] = {
        "score": None if score == own else score,
        "weighting": named_settings(weightings.NAMES, source.weighting),
        "encoder": encoder.kind,
        "is_named": None not in (score, own, named_settings(weightings.NAMES, source.weighting)),
    }
    if source.keys is not None:
        data["vectors"] = {
            "keys": source.keys,
            "query": source.query,
            "encoder": encoder.kind,
            "score": own,
            "twin": _runs_in_browser(encoder),
        }
    return data


def _source_scores(source: SourceRows, answer: Answer) -> np.ndarray | None:
    """Return the score of each row that the page holds, (r,); None if it cannot be recomputed.

    A score without a name may depend on the positions of the keys, so it needs all of them.
    """
    if source.keys is None:
        return score_by_equality([row.key for row in source.rows], answer.query)
    has_all_rows = len(source.rows) == answer.total + answer.missing
    if named_settings(scores.NAMES, source.score) is None and not has_all_rows:
        return None
    assert source.query is not None
    adapted = source.weighting.adapt_score(source.score)
    return np.asarray(adapted(source.query[None], source.keys)[0], np.float64)


def _runs_in_browser(encoder: Encoder) -> bool:
    """Return whether the page's own encoder of this kind gives the same vectors."""
    if isinstance(encoder, Numbers):
        return encoder.units is None and encoder.bandwidth is None
    return encoder in (Arrays(), Characters(), Exact())
