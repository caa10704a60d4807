"""The page has the figures of the results, and runs that learned nothing do not count."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from examples.recall import figures, train

PAGE = Path(__file__).parents[2] / "docs" / "recall.md"


def build_line(attention: str, seed: int, accuracy: float, task: str = "mqar") -> dict:
    lengths = {"8": accuracy, "16": accuracy / 2, "32": accuracy / 4}
    return {
        "task": task,
        "attention": attention,
        "seed": seed,
        "accuracy": lengths,
        "answer_weight": lengths,
        "curve": [8.0, 4.0, 1.0],
        "steps": 30,
    }


LINES = [
    build_line("softmax", 0, 1.0),
    build_line("softmax", 1, 0.8),
    build_line("softmax", 2, 0.1),
    build_line("hard", 0, 0.2),
    build_line("softmax", 0, 0.1, "hops"),
]


def test_runs_that_learned() -> None:
    results = figures.Results(LINES)
    summary = results.summarize("mqar", "softmax", 16)
    assert summary == pytest.approx((0.45, 0.4, 0.5, 2, 3))
    assert figures.format_cell(summary) == "45 (40–50), 2 of 3"
    assert results.summarize("mqar", "hard", 8) == (0.2, 0.2, 0.2, 0, 1)
    assert results.summarize("hops", "softmax", 8).learned == 0
    assert figures.format_cell(results.summarize("hops", "hard", 8)) == ""
    assert figures.format_table(results, 8).splitlines()[2:] == [
        "| softmax | 90 (80–100), 2 of 3 | – |"
    ]


def test_figures() -> None:
    drawn = figures.draw_all(figures.Results(LINES))
    names = ["lengths", "heat-map", "answer-weight", "positions", "scores", "losses"]
    assert list(drawn) == names
    (panel,) = drawn["losses"].axes
    assert [line.get_xdata().tolist() for line in panel.lines] == [[5.0, 15.0, 25.0]] * 3
    texts = [text.get_text() for text in drawn["heat-map"].axes[0].texts]
    assert texts == ["45  (2 of 3)", "not learned", "not learned", "not run"]
    assert len(drawn["lengths"].axes[0].containers) == 1


def test_lengths_that_were_not_measured() -> None:
    partly = build_line("hard", 0, 0.9)
    del partly["accuracy"]["32"]
    results = figures.Results([*LINES[:3], partly])
    assert results.lengths == [8, 16, 32]
    assert figures.format_cell(results.summarize("mqar", "hard", 8)) == "90, 1 of 1"
    assert figures.format_cell(results.summarize("mqar", "hard", 32)) == ""


def test_the_page_has_the_results() -> None:
    results = figures.Results(train.read_results(figures.RESULTS))
    table = figures.format_table(results, results.lengths[-1], figures.LOOK_UPS)
    assert table in PAGE.read_text(encoding="utf-8")
