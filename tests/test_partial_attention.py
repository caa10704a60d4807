"""Rows that several hold: the tree in which their states meet, and what is known of lost ones."""

import numpy as np
import pytest

from qkv import partial_attention, scores
from qkv.frameworks.stored_rows import RowChunk, StoredRows


def test_states_meet_in_one_tree_for_one_number_of_them() -> None:
    assert (
        partial_attention.merge_pairwise(["a", "b", "c"], lambda one, two: f"({one}{two})")
        == "((ab)c)"
    )
    assert partial_attention.merge_pairwise(["a"], lambda one, two: "") == "a"


@pytest.mark.parametrize(
    "score",
    [
        scores.Dot(),
        scores.ScaledDot(),
        scores.Gaussian(0.5),
        scores.Gaussian(np.array([0.1, 50.0])),  # a metric in which a ball is no ball
        scores.Boxcar(3.0),
        scores.Triangular(4.0),
        scores.Epanechnikov(4.0),
        scores.Laplace(),
        scores.Cosine(),
    ],
    ids=repr,
)
def test_no_key_of_a_ball_scores_above_its_most(score: scores.Score) -> None:
    rng = np.random.default_rng(0)
    key = rng.normal(size=(400, 2))
    query = np.concatenate([rng.normal(size=(40, 2)) * 5, key[:5]])
    ball = partial_attention.KeyBall.enclose_rows(
        StoredRows(lambda: iter([RowChunk(key)]), key.shape)
    )
    most = ball.max_score(query, score)
    assert (score(query, key).max(axis=1) <= most).all()
    assert ball.row_count == 400
    if score.is_linear or score.is_radial:
        assert np.isfinite(most).all()
