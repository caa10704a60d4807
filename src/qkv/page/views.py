"""What is shown, as the descriptors of views: `{"view", "title", "data"}`, arrays still arrays."""

from __future__ import annotations

from typing import Any

from qkv.answer import Answer, short
from qkv.errors import DtypeError
from qkv.page import heads

Descriptor = dict[str, Any]


def views(shown: Any) -> list[Descriptor]:
    """The views of an answer; or of several things, each in a tab.

    >>> from qkv import Database
    >>> [view] = views(Database({"Li": "Mu", "Smola": "Alex"}).ask("Li"))
    >>> view["view"], view["data"]["answer"]["value"]
    ('database', 'Mu')
    """
    if isinstance(shown, list | tuple):
        return [view for item in shown for view in views(item)]
    if isinstance(shown, dict) and "view" in shown:
        return [{"title": "", "data": {}} | shown]
    if isinstance(shown, Answer):
        return [answer(shown)]
    # By name: what captured a model has loaded its framework, and nothing else need.
    whole = f"{type(shown).__module__}.{type(shown).__name__}"
    if whole == "qkv.transformers.captured.Captured":
        return [heads.captured(shown)]
    if whole == "qkv.nn.capture.Seen":
        return [heads.seen(shown)]
    raise DtypeError(f"show takes an answer or captured heads, not {type(shown).__name__}")


def answer(found: Answer) -> Descriptor:
    rows = [{"key": row.key, "value": row.value} for row in found.rows]
    data = {"rows": rows, "query": found.query, "answer": found.to_dict()}
    return {"view": "database", "title": short(found.query, 40), "data": data}
