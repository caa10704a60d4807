"""Every page of the gallery runs, with its asserts, and draws."""

from pathlib import Path

import pytest

from tools import gallery

pytest.importorskip("matplotlib")
pytest.importorskip("docutils")


@pytest.mark.sample(9)
@pytest.mark.parametrize("page", gallery.PAGES, ids=lambda page: page.stem)
def test_page_runs_and_draws(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gallery.run(page)
