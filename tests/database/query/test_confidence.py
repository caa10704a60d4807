"""The confidence of answers: what lowers it, and how `calibrate` corrects it."""

from __future__ import annotations

import pickle
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


LIVES = {
    "English poet and friend of Coleridge (1774-1843)": "Southey",
    "United States satirical novelist and critic (1912-1989)": "McCarthy",
    "French painter noted for his decorative scenes (1877-1953)": "Dufy",
    "Italian novelist and poet (1785-1873)": "Manzoni",
    "Belgian playwright and poet (1862-1949)": "Maeterlinck",
}


def test_a_key_with_the_number_of_the_query_is_surer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = {"a poet who died in 1843": "Southey", "a painter, born 1877": "Dufy"}
    memory = qkv.Database(LIVES)
    answers = [memory.ask(query) for query in queries]
    assert [a.value for a in answers] == [*queries.values()]
    said = [a.confidence or 0 for a in answers]
    with qkv.open(tmp_path / "lives.qkv", create=True) as store:
        store.extend({"key": key, "value": value} for key, value in LIVES.items())
        assert [store.ask(query).confidence for query in queries] == pytest.approx(said, abs=0.02)
    assert [pickle.loads(pickle.dumps(a)).confidence for a in answers] == pytest.approx(said)
    monkeypatch.setattr("qkv.answer.MAX_NUMBER_BONUS", 0.0)
    before = [memory.ask(query).confidence or 0 for query in queries]
    assert all(0 < a < b <= 0.99 for a, b in zip(before, said, strict=True))


def test_a_shared_number_makes_no_other_key_sure() -> None:
    """The table lacks the row, and several keys have the year."""
    names = ["Ann Smithers", "Jörg Müller", "Maria da Silva", "Carla Okafor", "Dmitri Petrov"]
    staff = qkv.Database({f"{name}, joined 1998": name for name in names})
    for query in ("Yuki Takahashi, joined 1998", "Boris Lindqvist 1998", "1998"):
        assert (staff.ask(query).confidence or 0) < 0.6, query
    assert (staff.ask("Ann Smithers 1998").confidence or 0) > 0.9


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
        assert before > 0.2
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
