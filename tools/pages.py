"""Extensions of Sphinx for the docs: offline formulas, qkv's figures, plain-text docstrings."""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakSet

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from matplotlib.figure import Figure

SAVED: dict[str, Any] = {"dpi": 144, "bbox_inches": "tight", "pad_inches": 0.08}

LITERAL = re.compile(r"(``.*?``|`[^`]*`)|[*|]")
_seen: WeakSet[Figure] = WeakSet()


def drawn(names: dict[str, Any]) -> list[Figure]:
    """Return the figures among a page's variables that were not found before.

    `qkv.plot` does not register its figures with pyplot, so that no window opens: sphinx-gallery's
    own scraper does not see them.
    """
    found = []
    for value in names.values():
        if isinstance(value, Figure) and value not in _seen:
            _seen.add(value)
            found.append(value)
    return found


def pictures(block: Any, names: dict[str, Any], settings: dict[str, Any]) -> str:
    """A scraper for sphinx-gallery: the figures that a cell assigned or has as its last line."""
    from sphinx_gallery.scrapers import figure_rst

    paths = []
    for figure in drawn(names["example_globals"]):
        paths.append(next(names["image_path_iterator"]))
        figure.savefig(paths[-1], **SAVED)
    return str(figure_rst(paths, settings["src_dir"]))


def inline(translator: Any, node: nodes.math) -> None:
    """Return a formula as MathML, which browsers render themselves."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def display(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def prose(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Convert a plain-text docstring: escape stars, and make indented blocks literal."""
    done: list[str] = []
    literal = example = False
    for line in lines:
        indented, apart = line.startswith("    "), not done or not done[-1].strip()
        example = line.strip() != "" and (example or line.lstrip().startswith(">>>"))
        if indented and apart and not literal and not example:
            done += ["::", ""]
        literal = (indented and (literal or apart)) or (literal and not line.strip())
        done.append(line if literal or example else LITERAL.sub(_escaped, line))
    lines[:] = done


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[1] else "\\" + match[0]


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", prose)
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
