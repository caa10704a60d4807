"""The page and its data as one HTML file that works without a network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import struct
from importlib import resources
from typing import Any

from qkv.page.packing import find_deferred_buffers, pack_arrays
from qkv.util.caches import memoize

_PAGE_TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{module}'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>body{{margin:0;background:light-dark(#fff,#14181d)}}</style>
<body>
<noscript>{fallback}</noscript>
<script type="application/octet-stream" id="qkv-page">{data}</script>
<script type="module" async>{code}</script>
{parts}</html>
"""
_PART_TEMPLATE = '<script type="application/octet-stream" id="qkv-part-{at}">{data}</script>\n'


@memoize("page.module_text")
def read_module() -> str:
    """Return the ES module of the page."""
    return resources.files("qkv.page").joinpath("static/qkv.js").read_text(encoding="utf-8")


def render_page(views: list[dict[str, Any]], title: str, fallback: str = "") -> str:
    """Return the views as an HTML file; browsers without scripts show `fallback`.

    The data is base64, so it cannot become markup. The content security policy allows only the
    page's own script and no network access. The weights of a large model are stored per head after
    the script, and decompressed when a head is opened.

    >>> "</html>" in render_page([{"view": "scores", "title": "Scores", "data": {}}], "Scores")
    True
    """
    code, (data, parts) = read_module(), _bundle_views(views)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii")
    return _PAGE_TEMPLATE.format(
        module=f"sha256-{digest}",
        title=html.escape(title),
        fallback=fallback,
        data=data,
        code=code,
        parts="".join(_PART_TEMPLATE.format(at=at, data=part) for at, part in parts.items()),
    )


def _bundle_views(views: list[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """Return [length of the JSON, u32][JSON][buffers], and the parts of large buffers by name."""
    packed, buffers = pack_arrays(views)
    sizes = find_deferred_buffers(packed, buffers)
    parts = {
        f"{i}-{k}": _compress_base64(buffers[i][k * size : (k + 1) * size])
        for i, size in sizes.items()
        for k in range(len(buffers[i]) // size)
    }
    buffers = [b"" if i in sizes else x for i, x in enumerate(buffers)]
    head = {"views": packed, "sizes": [len(x) for x in buffers], "parts": sizes}
    text = json.dumps(head, ensure_ascii=False, allow_nan=False).encode()
    return _compress_base64(b"".join([struct.pack("<I", len(text)), text, *buffers])), parts


def _compress_base64(data: bytes) -> str:
    """Return data as base64 of gzip, without a timestamp: equal pages are equal files."""
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")
