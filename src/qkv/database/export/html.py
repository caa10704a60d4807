"""The HTML that a notebook shows for a database."""

from __future__ import annotations

import html
from itertools import islice

from qkv.database.errors import StoreClosedError
from qkv.database.interface import RowSource
from qkv.errors import escape_control_characters, format_plural
from qkv.util.formatting import format_one_line

MAX_HTML_ROWS, MAX_HTML_COLUMNS = 5, 12
"""The numbers of rows and columns that a notebook shows."""


def render_html(source: RowSource) -> str:
    """Return HTML with the database's name, its columns with their types, and its first rows."""
    name = html.escape(escape_control_characters(str(source.path or "in memory")))
    try:
        info = source.info()
    except StoreClosedError:
        return f"<div class=qkv-rows><p>{name}: closed</p></div>"
    if not info["key"]:
        return f"<div class=qkv-rows><p>{name}: empty</p></div>"
    roles = dict.fromkeys(info["value"], " · value") | dict.fromkeys(info["key"], " · key")
    shown, head, body = info["columns"][:MAX_HTML_COLUMNS], "", ""
    for column, kind in islice(source.describe().items(), MAX_HTML_COLUMNS):
        missing = f", {kind['missing']:,} missing" if kind["missing"] else ""
        label = f"{kind['type']}{missing}{roles.get(column, '')}"
        head += f"<th>{html.escape(format_one_line(column))}<br><small>{label}</small></th>"
    for row in source.rows(count=MAX_HTML_ROWS):
        cells = ("" if row[c] is None else html.escape(format_one_line(row[c], 80)) for c in shown)
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    hidden = {
        "more row": info["rows"] - MAX_HTML_ROWS,
        "more column": len(info["columns"]) - MAX_HTML_COLUMNS,
    }
    counts = ", ".join(format_plural(n, noun) for noun, n in hidden.items() if n > 0)
    footer = f"<p><small>and {counts}</small></p>" if counts else ""
    rows = f"{format_plural(info['rows'], 'row')}, version {info['version']}"
    return (
        f"<style>{_HTML_STYLE}</style><div class=qkv-rows><p><b>{name}</b>: {rows}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}</div>"
    )


_HTML_STYLE = """
.qkv-rows{font:14px/1.4 system-ui,sans-serif;overflow-x:auto}.qkv-rows p{margin:.3rem 0}
.qkv-rows table{border-collapse:collapse}.qkv-rows small{font-weight:400;opacity:.65}
.qkv-rows td,.qkv-rows th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;
border-bottom:1px solid #8884;max-width:22rem}
"""
