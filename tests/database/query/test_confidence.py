"""The confidence of answers: what lowers it, and how `calibrate` corrects it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.database.query.confidence import fit_logit

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty"]


def measure_error(D: qkv.Database, pairs: list[tuple[str, str]]) -> float:
    """Return |share of right answers − mean confidence|."""
    answers = D.ask([query for query, _ in pairs])
    is_right = [a.value == D[key] for a, (_, key) in zip(answers, pairs, strict=True)]
    return float(abs(np.mean(is_right) - np.mean([a.confidence for a in answers])))


def test_a_row_with_another_number_is_never_sure() -> None:
    D = qkv.Database({"€20.50": "grinder", "€10.50": "kettle", "Room 150": "lab", "hall": "big"})
    for query in ("Room 250", "€25"):
        answer = D.ask(query)
        assert "has the number" in answer.hint
        assert answer.confidence is not None and answer.confidence <= 0.5
        assert answer.confidence_text.startswith("unsure")
    assert (D.ask("Rom 150").confidence or 0) > 0.9
    codes = qkv.Database({"Intel Corporation 82576NS": "a", "Broadcom MegaRAID SAS": "b"})
    assert (codes.ask("Intel Corporation 82r76NS").confidence or 0) > 0.9  # a typo in a code


@pytest.fixture
def pairs() -> list[tuple[str, str]]:
    """Queries that look like one key and ask, every other time, for the next one."""
    keys = [f"{a} {b}" for a in WORDS for b in WORDS if a != b]
    shown = [key[:4] + key[5:] for key in keys]
    return [(query, keys[i - (i % 2)]) for i, query in enumerate(shown)]


def test_calibrate_corrects_the_confidence(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    keys = [f"{a} {b}" for a in WORDS for b in WORDS if a != b]
    with qkv.open(tmp_path / "words.qkv", create=True) as D:
        D.extend({"key": key, "value": f"the value of {key}"} for key in keys)
        before = measure_error(D, pairs[44:])
        assert before > 0.15
        calibration = D.calibrate(pairs[:44], coverage=0.4)
        assert calibration.confidence_slope < 1 or calibration.confidence_bias < 0
        assert measure_error(D, pairs[44:]) < before / 2
        said = D.ask(pairs[0][0]).confidence
        assert D.ask(pairs[0][0], weighting="sparsemax").confidence != said  # for softmax alone
        other = D.ask(pairs[0][0])
    with qkv.open(tmp_path / "words.qkv") as D:
        assert D.ask(pairs[0][0]).confidence == said == other.confidence


def test_a_table_of_numbers_has_no_confidence_to_correct() -> None:
    D = qkv.Database([(float(x), float(x) ** 2) for x in range(30)])
    calibration = D.calibrate([(x + 0.1, float(x)) for x in range(30)], coverage=0.5)
    assert (calibration.confidence_bias, calibration.confidence_slope) == (0.0, 1.0)


def test_the_fit_needs_both_outcomes_only_weakly() -> None:
    """Pairs that are all right make the confidence higher, but not certain."""
    logit = np.linspace(0, 3, 20)
    bias, slope = fit_logit(logit, np.ones(20))
    assert 0 < bias < 3 and 0.5 < slope < 3
    bias, slope = fit_logit(logit, np.zeros(20))
    assert bias + 1.5 * slope < 0 and slope >= 0
    # Logits that do not tell which answers are right leave the share of right answers.
    bias, slope = fit_logit(np.full(400, 6.0), np.arange(400) % 10 == 0)
    assert slope == 0 and 1 / (1 + np.exp(-bias)) == pytest.approx(0.1, abs=0.01)
