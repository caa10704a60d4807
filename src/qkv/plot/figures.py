"""A matplotlib figure that pyplot does not manage, and that a notebook can display."""

import re
import warnings
from io import BytesIO
from typing import Any

import matplotlib.figure

from qkv.errors import warn_at_caller

_MISSING_GLYPH = re.compile(r"Glyph (\d+) .* missing from font\(s\) (.*)\.")


class Figure(matplotlib.figure.Figure):
    """A figure outside of pyplot: it opens no window, and is freed like any object.

    Notebooks display only pyplot's figures by themselves, so this class provides SVG, and PNG for
    exports without SVG.
    """

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Save the figure as matplotlib does, with one warning for all glyphs that are missing."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().savefig(*args, **kwargs)
        missing = dict[str, str]()
        for each in caught:
            if match := _MISSING_GLYPH.match(str(each.message)):
                missing[chr(int(match[1]))] = match[2]
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if missing:
            letters = "".join([*missing][:8]) + ("…" if len(missing) > 8 else "")
            font = missing[letters[0]]
            warn_at_caller(
                f"the font {font} lacks {letters}, which are drawn as boxes: add a font that has "
                "them to matplotlib.rcParams['font.family']",
                UserWarning,
            )

    def _repr_png_(self) -> bytes:
        return self._render_bytes("png")

    def _repr_svg_(self) -> str:
        return self._render_bytes("svg").decode()

    def _render_bytes(self, kind: str) -> bytes:
        file = BytesIO()
        self.savefig(file, format=kind, bbox_inches="tight", pad_inches=0.05)
        return file.getvalue()
