"""A matplotlib figure that belongs to its caller and shows itself in a notebook."""

import re
import warnings
from io import BytesIO
from typing import Any

import matplotlib.figure

from qkv.errors import warn_at_caller

_MISSING_GLYPH = re.compile(r"Glyph (\d+) .* missing from font\(s\) (.*)\.")


class Figure(matplotlib.figure.Figure):
    """A figure that pyplot does not know of: no window opens, and it is freed like any object.

    A notebook draws pyplot's figures only, so this one brings its own pictures: SVG for the page,
    PNG for exports that cannot read SVG.
    """

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As matplotlib's, with one warning of all letters that the font lacks."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            super().savefig(*args, **kwargs)
        lacks = dict[str, str]()
        for each in told:
            if found := _MISSING_GLYPH.match(str(each.message)):
                lacks[chr(int(found[1]))] = found[2]
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if lacks:
            letters = "".join([*lacks][:8]) + ("…" if len(lacks) > 8 else "")
            font = lacks[letters[0]]
            warn_at_caller(
                f"the font {font} lacks {letters}: boxes stand for them, unless "
                "matplotlib.rcParams['font.family'] lists a font that has them",
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
