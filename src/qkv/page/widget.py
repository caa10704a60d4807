"""The page in a notebook, as a widget."""

from __future__ import annotations

from typing import Any

from qkv.errors import MissingExtra

try:
    import anywidget
    import traitlets
except ImportError:
    raise MissingExtra("show needs anywidget: pip install 'qkv[widget]'") from None

from qkv.page.file import module
from qkv.page.pack import pack


class Page(anywidget.AnyWidget):  # type: ignore[misc]
    """Views, and the bytes that their data refer to."""

    _esm = module()
    views: Any = traitlets.List().tag(sync=True)
    buffers: Any = traitlets.List().tag(sync=True)

    def __init__(self, views: list[dict[str, Any]]) -> None:
        packed, buffers = pack(views)
        super().__init__(views=packed, buffers=buffers)
