import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.database.encoders import Exact
from qkv.errors import ArgumentError

KEYS = ["Li", b"Li", 1, "1", (1, "a"), ("1", "a"), {"a": 1, "b": 2}, [1, 2], 2.5]


def test_equal_keys_have_one_code_and_others_none_of_it() -> None:
    x = Exact().encode(KEYS)
    same = x @ x.T
    assert (np.diag(same) == 1).all()
    assert np.abs(same - np.eye(len(KEYS))).max() < 0.3
    twins = Exact().encode([1, 1.0, True, {"b": 2, "a": 1}, {"a": 1, "b": 2}])
    assert (twins[:3] == twins[0]).all()
    assert (twins[3] == twins[4]).all()


def test_the_exact_score_is_exact() -> None:
    x = Exact().encode(KEYS)
    np.testing.assert_array_equal(scores.Exact()(x, x), np.eye(len(KEYS)))


@pytest.mark.parametrize("rows", [2, 100, 20_000])
def test_an_equal_key_takes_the_weight_and_a_strange_one_leaves_it_spread(rows: int) -> None:
    encoder = Exact()
    keys = encoder.encode(range(rows))
    right, strange = qkv.weights(
        encoder.encode_query([1, "else"]), keys, score=encoder.default_score(rows)
    )
    assert right.argmax() == 1
    assert right[1] > 0.98
    entropy = -(strange * np.log(strange)).sum()
    assert np.exp(entropy) > rows / 3


@pytest.mark.parametrize("width", [0, 63, 100, 1024])
def test_bad_widths_are_refused(width: int) -> None:
    with pytest.raises(ArgumentError, match="width"):
        Exact(width)
