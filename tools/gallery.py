"""Run pages of examples/gallery and write their pictures into build/gallery.

python -m tools.gallery [PAGE …]      # all, or those whose names contain one of the words
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "examples" / "gallery").glob("*.py"))
TAB = re.compile(
    r"^#    \.\. tab-item:: (?P<name>.+)\n#\n#       \.\. code-block:: python\n#\n"
    r"(?P<code>(?:#(?:          .*)?\n)+)",
    re.MULTILINE,
)


def run(page: Path) -> list[Figure]:
    """Return the figures of a page's cells; fail if one of its asserts fails."""
    from tools.pages import drawn

    names: dict[str, Any] = {
        "__name__": "__main__"
    }  # no __file__: the docs and notebooks have none
    found, line = [], 0
    for cell in re.split(r"^(?=# %%)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        # The empty lines make a traceback name the page's own line.
        code = ast.parse("\n" * line + cell)
        if code.body and isinstance(last := code.body[-1], ast.Expr):
            shown = ast.Assign([ast.Name("___", ast.Store())], last.value)
            code.body[-1] = ast.copy_location(shown, last)
        with contextlib.chdir(page.parent):
            exec(compile(ast.fix_missing_locations(code), str(page), "exec"), names)
        found += drawn(names)
        line += cell.count("\n")
    return found


def tabs(page: Path) -> list[tuple[str, str]]:
    """Return the code in a page's framework tabs, which the page itself does not run."""
    text = page.read_text(encoding="utf-8")
    return [(tab["name"], textwrap.dedent(tab["code"].replace("#", "", 1).replace("\n#", "\n")))
            for tab in TAB.finditer(text)]  # fmt: skip


def main(words: list[str]) -> None:
    from tools.pages import SAVED

    out = ROOT / "build" / "gallery"
    out.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        if not words or any(word in page.stem for word in words):
            for at, figure in enumerate(run(page), 1):
                path = out / f"{page.stem}-{at}.png"
                figure.savefig(path, **SAVED)
                print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
