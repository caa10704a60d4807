"""The rows of a database elsewhere: as a frame, as files, as a glance in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any

from qkv.database.reading import Reading
from qkv.database.view import CHUNK
from qkv.errors import ArgumentError, printable
from qkv.shown import Shown
from qkv.types import K, V

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GLANCE, WIDE = 5, 12
"""Rows and columns that a notebook shows."""

NAMED = 100
"""Keys up to which a picture names each."""


class Leaving(Shown, Reading[K, V]):
    """Rows that can be read, and taken elsewhere."""

    def rows(
        self, *, where: Any = None, start: int = 0, count: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Every row with all its columns, oldest first; of those that pass `where`, `count` from
        the one numbered `start`.

        >>> from qkv import Database
        >>> D = Database({"Li": 34, "Mu": 29, "Hu": 41})
        >>> list(D.rows(where="value > 30", start=1))
        [{'key': 'Hu', 'value': 41}]
        """
        for name, number in (("start", start), ("count", count or 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ArgumentError(f"{name} must be a number of rows, not {number!r}")
        view = self._view
        if where is None and start == 0 and count is None:
            return (row for _, row in view.all_rows())
        passed = view.where(where)
        ids = (view.ids if passed is None else view.ids[passed])[start:][:count].tolist()
        chunks = (ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK))
        return (row for some in chunks for row in view.rows(some))

    def count(self, where: Any = None) -> int:
        """How many rows pass a condition.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": 29, "Hu": 41}).count("value > 30")
        2
        """
        passed = self._view.where(where)
        return len(self) if passed is None else int(passed.sum())

    def whole(self, name: str) -> bool:
        """Whether a column of numbers has ints alone, of 64 bits each.

        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).whole("value")
        True
        """
        return self._view.whole(name)

    def to_frame(self, where: Any = None) -> Any:
        """All columns as a data frame: of the library of the frame that the rows came from, else of
        pandas or polars if one is loaded, else of what is installed of polars, pandas and pyarrow.
        `Database.from_frame` takes it back.

        >>> import pandas
        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).to_frame()["value"].tolist()
        [34, <NA>]
        """
        from qkv.database import export

        return export.to_frame(self.columns, self.rows(where=where), self._library)

    def to_csv(self, path: str | PathLike[str], where: Any = None) -> int:
        """All columns as CSV, a missing cell empty; how many rows were written.

        CSV has no types: columns that `from_source` would read as others are named in a warning.
        """
        from qkv.database import export

        return export.write(path, self.columns, self.rows(where=where), ".csv")

    def to_parquet(self, path: str | PathLike[str], where: Any = None) -> int:
        """All columns as Parquet, with their types; how many rows were written."""
        from qkv.database import export

        return export.write(path, self.columns, self.rows(where=where), ".parquet")

    def plot(self, query: Any, path: str | PathLike[str] | None = None, **how: Any) -> Figure:
        """α of every key as a heatmap: a row for the query, or for each of a list of them; also
        saved where `path` is given. `how` is that of `ask`.

        >>> from qkv import Database
        >>> students = Database({"John Doe": "psychology", "Ada Byron": "mathematics"})
        >>> figure = students.plot("John Doe", score="exact", weighting="raw")  # one-hot
        >>> figure.axes[0].images[0].get_array().tolist()
        [[1.0, 0.0]]
        """
        from qkv.plot import heatmaps
        from qkv.told import short

        answers = self.ask(query, **how)
        answers = answers if isinstance(answers, list) else [answers]
        words: dict[str, Any] = {"yticks": [short(answer.query, 24) for answer in answers]}
        if len(self) <= NAMED:
            words["xticks"] = [short(key, 24) for key in self.keys()]
        wide, high = (min(max(0.5 * n, 1.6), 12.0) for n in (len(self), len(answers)))
        alpha = [answer.weights for answer in answers]
        figure = heatmaps(alpha, figsize=(wide, high), annotate=True, **words)
        if path is not None:
            figure.savefig(path, dpi=160, bbox_inches="tight")
        return figure

    def _repr_html_(self) -> str:
        """The name, the columns with their types, and the first rows."""
        from qkv.told import short

        schema, name = self._schema, html.escape(printable(str(self.path or "in memory")))
        if schema is None:
            return f"<div class=qkv-rows><p>{name}: empty</p></div>"
        roles = dict.fromkeys(schema.value, " · value") | dict.fromkeys(schema.key, " · key")
        shown, head, body = schema.columns[:WIDE], "", ""
        for column, about in islice(self.describe().items(), WIDE):
            missing = f", {about['missing']:,} missing" if about["missing"] else ""
            told = f"{about['type']}{missing}{roles.get(column, '')}"
            head += f"<th>{html.escape(short(column))}<br><small>{told}</small></th>"
        for row in self.rows(count=GLANCE):
            cells = ("" if row[c] is None else html.escape(short(row[c], 80)) for c in shown)
            body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        more = {"rows": len(self) - GLANCE, "columns": len(schema.columns) - WIDE}
        told = ", ".join(f"{count:,} more {what}" for what, count in more.items() if count > 0)
        rest = f"<p><small>and {told}</small></p>" if told else ""
        rows = f"{len(self):,} row{'' if len(self) == 1 else 's'}, version {self.version}"
        return (
            f"<style>{_STYLE}</style><div class=qkv-rows><p><b>{name}</b>: {rows}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}</div>"
        )


_STYLE = """
.qkv-rows{font:14px/1.4 system-ui,sans-serif;overflow-x:auto}.qkv-rows p{margin:.3rem 0}
.qkv-rows table{border-collapse:collapse}.qkv-rows small{font-weight:400;opacity:.65}
.qkv-rows td,.qkv-rows th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;
border-bottom:1px solid #8884;max-width:22rem}
"""
