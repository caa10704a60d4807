"""Take pictures of each view of the page, light and dark, into docs/pictures/page-*.png.

python -m tools.screenshots [VIEW …]
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from qkv.cli.weights import capture_model_weights
from qkv.page import to_html
from qkv.page.heads import heads_view
from qkv.page.sentence import sentence
from tests.browser import FLAGS, chromium
from tests.serve.process import serving
from tools.pictures import FOLDER, SENTENCE, shrink

BOOKS = "examples/data/books.csv"
WIDE, MOST_HIGH = 1280, 1000


def _head(page: Any) -> None:
    page.get_by_test_id("head-2-3").locator("visible=true").click()


def _word(page: Any) -> None:
    _head(page)
    page.get_by_test_id("word-15").locator("visible=true").hover()  # his


def _books(page: Any) -> None:
    page.get_by_test_id("data-key").select_option("summary")
    page.get_by_text("summary → ").wait_for()
    page.get_by_test_id("data-value").select_option("title")
    page.get_by_text(re.compile("summary → title$")).wait_for()
    page.get_by_test_id("data-query").fill("growing up in a war")
    page.get_by_test_id("data-row-0-weight").wait_for()


HANDS: dict[str, Callable[[Any], None]] = {
    "database": lambda page: None,
    "sentence": _word,
    "regression": lambda page: None,
    "scores": lambda page: None,
    "model": _head,
    "data": _books,
}
"""What is done in each view before its picture is taken."""


def written(folder: Path) -> str:
    """Return the address of one file with every view that needs no server."""
    seen, *_ = capture_model_weights(SENTENCE, (2, 3))
    names = [f"layer {i}" for i in range(len(seen.weights))]
    shown: list[Any] = [
        {"view": "database", "data": {"examples": True}},
        sentence(SENTENCE, model=True),
        {"view": "regression"},
        {"view": "scores"},
        heads_view(seen.weights, names, labels=seen.labels),
    ]
    to_html(shown, folder / "page.html", title="qkv")
    return (folder / "page.html").as_uri()


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        file = written(folder)
        with serving(BOOKS) as (server, _):
            for view, act in HANDS.items():
                for scheme in ("light", "dark") if not wanted or view in wanted else ():
                    page = browser.new_page(
                        viewport={"width": WIDE, "height": MOST_HIGH},
                        color_scheme=scheme,  # type: ignore[arg-type]
                        reduced_motion="reduce",
                    )
                    page.goto(server if view == "data" else file)
                    page.get_by_test_id(f"tab-{view}").click()
                    page.get_by_test_id(f"view-{view}").wait_for()
                    act(page)
                    page.wait_for_timeout(600)
                    height = page.evaluate("document.documentElement.scrollHeight")
                    page.set_viewport_size({"width": WIDE, "height": min(height, MOST_HIGH)})
                    shrink(page.screenshot(), FOLDER / f"page-{view}-{scheme}.png")
                    page.close()


if __name__ == "__main__":
    main(sys.argv[1:])
