"""The page: one small front end for notebook, server and file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, overload

from qkv.errors import ArgumentError, DtypeError, validate_file_path

__all__ = ["points", "show", "to_html"]


def __getattr__(name: str) -> Any:
    if name == "points":
        return importlib.import_module("qkv.page.points")
    raise AttributeError(f"module 'qkv.page' has no attribute {name!r}")


def show(*shown: Any) -> Any:
    """A live view of what is given, in a notebook, each in a tab.

    That is an answer, a database, captured heads, or a sentence, which attends to itself.
    """
    from qkv.database.database import ReadableDatabase
    from qkv.page.views import build_views
    from qkv.page.widget import Page

    found: list[dict[str, Any]] = []
    databases: dict[str, ReadableDatabase[Any, Any]] = {}
    for item in shown:
        for view in build_views(item):
            if isinstance(item, ReadableDatabase):
                name = f"{len(databases)}"
                databases[name] = item
                view["data"]["database"] = name
            found.append(view)
    return Page(found, databases)


@overload
def to_html(shown: Any, path: None = None, title: str | None = None) -> str: ...
@overload
def to_html(shown: Any, path: str | Path, title: str | None = None) -> None: ...
def to_html(shown: Any, path: str | Path | None = None, title: str | None = None) -> str | None:
    """The same as the text of one HTML file that needs no network, or, where `path` is given,
    written there: a notebook would print what comes back.

    >>> from qkv import Database
    >>> render_page = to_html(Database({"Li": "Mu", "Smola": "Alex"}).ask("Li"))
    >>> render_page.startswith("<!doctype html>")
    True
    """
    from qkv.database.export.files import open_atomically
    from qkv.page.html_file import render_page
    from qkv.page.views import build_views

    place = None if path is None else validate_file_path(path)
    if not isinstance(title, str | None):
        raise DtypeError(f"title must be text, not a {type(title).__name__}")
    found = build_views(shown)
    if not found:
        raise ArgumentError("to_html was given nothing to show")
    glance = getattr(shown, "_repr_html_", None)
    still = glance() if glance is not None else "This page needs JavaScript."
    text = render_page(found, title or found[0]["title"] or "qkv", still)
    if place is None:
        return text
    with open_atomically(place) as file:
        file.write(text.encode())
    return None
