"""One HTML file, opened from disk."""

from pathlib import Path
from typing import Any

from qkv import Database
from qkv.page import to_html

NAMES = {"Zhang": "Aston", "Li": "Mu", "Smola": "Alex"}


def test_an_answer_opens_from_disk(page: Any, tmp_path: Path) -> None:
    found = Database(NAMES).ask("Li")
    to_html(found, tmp_path / "a.html")
    page.goto((tmp_path / "a.html").as_uri())
    assert page.get_by_test_id("answer-value").inner_text() == "Mu"
    shown = float(page.get_by_test_id("row-0-weight").inner_text())
    assert abs(shown - found.rows[0].weight) < 1e-3
