"""The page: one front end for notebooks, the server and HTML files."""

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
    """Return a live view for a notebook, with one tab per argument.

    An argument is an answer, a database, captured heads, or a sentence, which attends to itself.
    """
    from qkv.database.database import ReadableDatabase
    from qkv.page.views import build_views
    from qkv.page.widget import Page

    views: list[dict[str, Any]] = []
    databases: dict[str, ReadableDatabase[Any, Any]] = {}
    for item in shown:
        for view in build_views(item):
            if isinstance(item, ReadableDatabase):
                name = f"{len(databases)}"
                databases[name] = item
                view["data"]["database"] = name
            views.append(view)
    return Page(views, databases)


@overload
def to_html(shown: Any, path: None = None, title: str | None = None) -> str: ...
@overload
def to_html(shown: Any, path: str | Path, title: str | None = None) -> None: ...
def to_html(shown: Any, path: str | Path | None = None, title: str | None = None) -> str | None:
    """Return the view as one HTML file that needs no network, or write it to `path`.

    `shown` is an argument of `show`, or a list or dict of them. With `path` the result is None.

    >>> from qkv import Database
    >>> text = to_html(Database({"Li": "Mu", "Smola": "Alex"}).ask("Li"))
    >>> text.startswith("<!doctype html>")
    True
    """
    from qkv.database.export.files import open_atomically
    from qkv.page.html_file import render_page
    from qkv.page.views import build_views

    target = None if path is None else validate_file_path(path)
    if not isinstance(title, str | None):
        raise DtypeError(f"title must be text, not a {type(title).__name__}")
    views = build_views(shown)
    if not views:
        raise ArgumentError("to_html got nothing to show: pass an answer, a database or heads")
    static_html = getattr(shown, "_repr_html_", None)
    fallback = static_html() if static_html is not None else "This page needs JavaScript."
    text = render_page(views, title or views[0]["title"] or "qkv", fallback)
    if target is None:
        return text
    with open_atomically(target) as file:
        file.write(text.encode())
    return None
