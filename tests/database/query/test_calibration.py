"""The prediction set contains the right row at the stated rate, or the answer abstains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv import scores, weightings
from qkv.database.query.calibration import Calibration, lower_quantile_bound
from qkv.errors import ArgumentError, CombinationError, DtypeError

RNG = np.random.default_rng(5)
KEYS = RNG.normal(size=(150, 4)).astype(np.float32)
RIGHT = RNG.integers(0, 150, 1600)
QUERIES = KEYS[RIGHT] + 0.35 * RNG.normal(size=(1600, 4)).astype(np.float32)
PAIRS = [(query, KEYS[at]) for query, at in zip(QUERIES[:800], RIGHT[:800], strict=True)]
NEAR = scores.Gaussian(0.5)


def build_database(path: Path | None = None) -> qkv.Database:
    columns = {"key": KEYS, "value": np.arange(150.0)}
    return qkv.Database.from_columns(columns, key="key", value="value", path=path)


@pytest.fixture(scope="module")
def calibrated() -> qkv.Database:
    D = build_database()
    D.calibrate(PAIRS, score=NEAR)
    return D


def compute_coverage(D: qkv.Database, **options: object) -> float:
    answers = D.ask(QUERIES[800:], **options)
    result = zip(answers, RIGHT[800:], strict=True)
    return float(
        np.mean([right in {row.index for row in answer.prediction_set} for answer, right in result])
    )


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("weighting", ["softmax", "entmax15"])
def test_the_prediction_set_holds_the_right_row_at_the_stated_rate(
    coverage: float, weighting: str
) -> None:
    D = build_database()
    calibration = D.calibrate(PAIRS, coverage, score=NEAR, weighting=weighting)
    assert (calibration.coverage, calibration.pairs, calibration.rows) == (coverage, 800, 150)
    # Two standard deviations of what 600 and 800 draws allow.
    assert abs(compute_coverage(D, score=NEAR, weighting=weighting) - coverage) < 0.04


def test_the_set_is_by_weight_and_the_answer_abstains_without_one(calibrated: qkv.Database) -> None:
    calibration = Calibration.read_from_view(calibrated._view)
    assert calibration is not None
    answer = calibrated.ask(KEYS[3], score=NEAR)
    assert answer.coverage == 0.9 and not answer.abstains
    want = [row.index for row in answer.above(1e-6) if row.weight >= calibration.weight]
    assert [row.index for row in answer.prediction_set] == want and want[0] == 3
    assert "90 %" in answer.explain() and "90 %" in str(answer)


def test_a_foreign_question_is_far_from_all_rows_though_one_has_all_weight(
    calibrated: qkv.Database,
) -> None:
    answer = calibrated.ask(np.full(4, 40.0), score=NEAR)
    assert answer.rows[0].weight > 0.99
    assert answer.abstains and answer.prediction_set == []
    assert "abstains" in answer.explain() and "abstains" in str(answer)
    assert answer.to_dict()["abstains"] is True


def test_it_is_kept_in_the_store(tmp_path: Path) -> None:
    with build_database(tmp_path / "near.qkv") as D:
        before = D.version
        calibration = D.calibrate(PAIRS, score=NEAR)
        assert D.versions()[-1].what == "calibrate" and D.version == before + 1
        want = D.ask(QUERIES[-1], score=NEAR).prediction_set
        with pytest.raises(CombinationError, match=r"no prediction set: call calibrate"):
            D.at(before).ask(QUERIES[-1]).prediction_set  # noqa: B018
    with qkv.open(tmp_path / "near.qkv") as D:
        assert Calibration.read_from_view(D._view) == calibration
        assert [row.index for row in D.ask(QUERIES[-1], score=NEAR).prediction_set] == [
            r.index for r in want
        ]


def test_it_is_for_one_score_and_weighting(calibrated: qkv.Database) -> None:
    answer = calibrated.ask(KEYS[0])
    assert answer.coverage is None and "set" not in answer.to_dict()
    with pytest.raises(CombinationError, match="the query has score=None"):
        answer.abstains  # noqa: B018
    with pytest.raises(CombinationError, match="multiplicative"):
        calibrated.ask(KEYS[0], score=scores.Multiplicative(np.eye(4))).prediction_set  # noqa: B018


def test_rows_that_change_much_end_it() -> None:
    D = build_database()
    D.calibrate(PAIRS, score=NEAR)
    D.add(KEYS[:7] + 9, np.zeros(7))
    D.remove(list(KEYS[:7] + 9))
    assert D.ask(KEYS[9], score=NEAR).prediction_set
    D.add(KEYS[0] + 9, 1.0)
    D.add(KEYS[0] + 8, 1.0)
    with pytest.raises(
        CombinationError, match="16 rows were added or removed since the calibration on 150"
    ):
        D.ask(KEYS[9], score=NEAR).prediction_set  # noqa: B018
    D.calibrate(PAIRS, score=NEAR)
    assert D.ask(KEYS[9], score=NEAR).prediction_set
    D.encode()
    with pytest.raises(CombinationError, match="encoded again"):
        D.ask(KEYS[9], score=NEAR).prediction_set  # noqa: B018


def test_rows_that_share_the_right_key_are_one(calibrated: qkv.Database) -> None:
    D = qkv.Database([("Li", 1), ("Li", 2), ("Hu", 3), ("Wu", 4)])
    D.calibrate([("Li", "Li"), ("Hu", "Hu")] * 10)
    assert [row.value for row in D.ask("Li").prediction_set] == [1, 2]


def test_bounds_are_order_statistics() -> None:
    x = np.array([3.0, 1.0, 2.0, 2.0, 5.0, 4.0, 7.0, 6.0, 9.0])
    assert lower_quantile_bound(x, 0.1) == 1.0  # ⌊0.1 · 10⌋, though 1 − 0.9 is less than 0.1
    assert lower_quantile_bound(x, 1 - 0.9) == 1.0
    assert lower_quantile_bound(x, 0.2) == lower_quantile_bound(x, 0.3) == 2.0
    assert lower_quantile_bound(x, 0.09) == -math.inf


def test_ties_are_in_the_set() -> None:
    D = qkv.Database({"a": 1, "b": 2})
    calibration = D.calibrate([("a", "a"), ("b", "b")] * 20, weighting="hard")
    assert 0.9999 < calibration.weight < 1
    assert [row.key for row in D.ask("a", weighting="hard").prediction_set] == ["a"]
    # A right row without weight puts all rows into the set.
    D.calibrate([("a", "b"), ("b", "b")] * 20, weighting="hard")
    assert [row.key for row in D.ask("a", weighting="hard").prediction_set] == ["a", "b"]


def test_a_condition_leaves_its_rows(calibrated: qkv.Database) -> None:
    answer = calibrated.ask(KEYS[3], score=NEAR, where="value != 3")
    assert 3 not in {row.index for row in answer.prediction_set}


def test_an_invalid_calibration_is_not_read() -> None:
    D = build_database()
    stored = D.calibrate(PAIRS, score=NEAR).to_dict()
    json.dumps(stored, allow_nan=False)
    for wrong in ({}, [], {**stored, "weight": "much"}, {**stored, "rows": True}, {"weight": 0.5}):
        D._store.commit(settings=D._view.settings | {"promise": wrong})
        assert Calibration.read_from_view(D._view) is None
        assert D.ask(KEYS[0], score=NEAR).coverage is None


def test_what_it_refuses() -> None:
    D = build_database()
    with pytest.raises(ArgumentError, match="coverage must be between 0 and 1, not 90"):
        D.calibrate(PAIRS, 90)
    with pytest.raises(ArgumentError, match=r"coverage of 0\.99 needs at least 132 pairs, not 40"):
        D.calibrate(PAIRS[:40], 0.99)
    with pytest.raises(ArgumentError, match="pairs is empty"):
        D.calibrate([])
    with pytest.raises(DtypeError, match=r"pairs\[0\] must be \(query, right key\)"):
        D.calibrate([KEYS[0]])
    with pytest.raises(ArgumentError, match=r"pairs\[1\] has the right key"):
        D.calibrate([PAIRS[0], (KEYS[0], KEYS[0] + 1)])
    with pytest.raises(CombinationError, match="do not sum to 1"):
        D.calibrate(PAIRS, weighting=weightings.Raw())
    with pytest.raises(CombinationError, match="is read-only"):
        D.at(D.version).calibrate(PAIRS)
    assert Calibration.read_from_view(D._view) is None
