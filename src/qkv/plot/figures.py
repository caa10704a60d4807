"""A matplotlib figure that belongs to its caller and shows itself in a notebook."""

from io import BytesIO

import matplotlib.figure


class Figure(matplotlib.figure.Figure):
    """A figure that pyplot does not know of: no window opens, and it is freed like any object.

    A notebook draws pyplot's figures only, so this one brings its own pictures: SVG for the page,
    PNG for exports that cannot read SVG.
    """

    def _repr_png_(self) -> bytes:
        return self._render("png")

    def _repr_svg_(self) -> str:
        return self._render("svg").decode()

    def _render(self, kind: str) -> bytes:
        file = BytesIO()
        self.savefig(file, format=kind, bbox_inches="tight", pad_inches=0.05)
        return file.getvalue()
