"""The rows of a database elsewhere: under another key, as a frame, files, a picture, a glance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any

from qkv.database.errors import StoreClosedError
from qkv.errors import CombinationError, escape_control_characters, format_plural
from qkv.util.display import Displayable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkv.database.database import Database

HTML_ROWS, HTML_COLUMNS = 5, 12
"""Rows and columns that a notebook shows."""

MAX_LABELLED_KEYS = 100
"""Keys up to which a picture names each."""


class Exportable(Displayable):
    """What has rows, here, in shards or with a server, and so `columns`, `rows`, `ask`, `info`."""

    _frame_library: str | None = None

    def reindex(
        self: Any, key: str | Sequence[str], value: str | Sequence[str] | None = None, **how: Any
    ) -> Database:
        """The same rows with other columns as key and value; `how` as in `from_columns`.

        >>> from qkv import Database
        >>> D = Database.from_columns(
        ...     {"name": ["Ann", "Bo"], "major": ["art", "law"]}, value="major"
        ... )
        >>> D.reindex(key="major", value="name")["law"]
        'Bo'
        """
        from qkv.database.database import Database
        from qkv.database.table.schema import rows_to_columns

        made = Database.from_columns(rows_to_columns(self.rows()), key=key, value=value, **how)
        made._frame_library = self._frame_library
        return made

    by = reindex
    """Short for `reindex`."""

    def swap(self: Any, **how: Any) -> Database:
        """Key and value exchanged: "find people by major".

        >>> from qkv import Database
        >>> Database({"Li": "physics", "Hu": "history"}).swap()["history"]
        'Hu'
        """
        about = self.info()
        if not about["key"]:
            raise CombinationError("there are no rows to swap yet: add some first")
        made: Database = self.reindex(about["value"], about["key"], **how)
        return made

    def to_frame(self: Any, where: Any = None) -> Any:
        """All columns as a data frame: of the library of the frame that the rows came from, else of
        pandas or polars if one is loaded, else of what is installed of polars, pandas and pyarrow.
        `Database.from_frame` takes it back.

        >>> import pandas
        >>> from qkv import Database
        >>> Database({"Li": 34, "Mu": None}).to_frame()["value"].tolist()
        [34, <NA>]
        """
        from qkv.database.export import files

        return files.to_frame(self.columns, self.rows(where=where), self._frame_library)

    def to_csv(self: Any, path: str | PathLike[str], where: Any = None) -> int:
        """All columns as CSV, between tabs in a file.tsv, a missing cell empty; how many rows were
        written.

        CSV has no types: columns that `from_source` would read as others are named in a warning.
        """
        from qkv.database.export import files

        return files.write_file(path, self.columns, self.rows(where=where), ".csv", ".tsv")

    def to_parquet(self: Any, path: str | PathLike[str], where: Any = None) -> int:
        """All columns as Parquet, with their types; how many rows were written."""
        from qkv.database.export import files

        return files.write_file(path, self.columns, self.rows(where=where), ".parquet")

    def plot(self: Any, query: Any, path: str | PathLike[str] | None = None, **how: Any) -> Figure:
        """α of every key as a heatmap: a row for the query, or for each of a list of them; also
        saved where `path` is given. `how` is that of `ask`.

        >>> from qkv import Database
        >>> students = Database({"John Doe": "psychology", "Ada Byron": "mathematics"})
        >>> figure = students.plot("John Doe", score="exact", weighting="raw")  # one-hot
        >>> figure.axes[0].images[0].get_array().tolist()
        [[1.0, 0.0]]
        """
        from qkv.plot import heatmaps, style
        from qkv.util.formatting import format_one_line

        answers = self.ask(query, **how)
        answers = answers if isinstance(answers, list) else [answers]
        words: dict[str, Any] = {
            "yticks": [format_one_line(answer.query, 24) for answer in answers]
        }
        if len(self) <= MAX_LABELLED_KEYS:
            words["xticks"] = [format_one_line(key, 24) for key in self]
        wide, high = (min(max(0.62 * n, 1.6), 12.0) for n in (len(self), len(answers)))
        high = max(high, wide / 4)  # a picture is no flatter
        alpha = [answer.weights for answer in answers]
        figure = heatmaps(alpha, figsize=(wide, high), annotate=True, **words)
        return style.save_figure(figure, path)

    def _repr_html_(self: Any) -> str:
        """The name, the columns with their types, and the first rows."""
        import html

        from qkv.util.formatting import format_one_line

        name = html.escape(escape_control_characters(str(self.path or "in memory")))
        try:
            about = self.info()
        except StoreClosedError:
            return f"<div class=qkv-rows><p>{name}: closed</p></div>"
        if not about["key"]:
            return f"<div class=qkv-rows><p>{name}: empty</p></div>"
        roles = dict.fromkeys(about["value"], " · value") | dict.fromkeys(about["key"], " · key")
        shown, head, body = about["columns"][:HTML_COLUMNS], "", ""
        for column, kind in islice(self.describe().items(), HTML_COLUMNS):
            missing = f", {kind['missing']:,} missing" if kind["missing"] else ""
            told = f"{kind['type']}{missing}{roles.get(column, '')}"
            head += f"<th>{html.escape(format_one_line(column))}<br><small>{told}</small></th>"
        for row in self.rows(count=HTML_ROWS):
            cells = (
                "" if row[c] is None else html.escape(format_one_line(row[c], 80)) for c in shown
            )
            body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        count = about["rows"]
        more = {"more row": count - HTML_ROWS, "more column": len(about["columns"]) - HTML_COLUMNS}
        told = ", ".join(format_plural(rest, what) for what, rest in more.items() if rest > 0)
        rest = f"<p><small>and {told}</small></p>" if told else ""
        rows = f"{format_plural(count, 'row')}, version {about['version']}"
        return (
            f"<style>{_HTML_STYLE}</style><div class=qkv-rows><p><b>{name}</b>: {rows}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}</div>"
        )


_HTML_STYLE = """
.qkv-rows{font:14px/1.4 system-ui,sans-serif;overflow-x:auto}.qkv-rows p{margin:.3rem 0}
.qkv-rows table{border-collapse:collapse}.qkv-rows small{font-weight:400;opacity:.65}
.qkv-rows td,.qkv-rows th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;
border-bottom:1px solid #8884;max-width:22rem}
"""
