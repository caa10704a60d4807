"""The gradients of −ln α, by hand and by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.arrays.ragged import columns, sparse
from qkv.database import learn
from qkv.database.encoders import (
    Characters,
)
from qkv.database.encoders.learned import (
    Bag,
    Input,
    bag,
)
from qkv.database.learn import gradients
from qkv.errors import ArgumentError
from tests.database.learn.letters import ENGLISH, PAIRS


def random_batch(dtype: Any) -> tuple[dict[str, np.ndarray], gradients.Batch]:
    """Three heads: of tokens (with an empty text), of vectors that keep their lengths, of words."""
    rng = np.random.default_rng(0)
    d, e, n, c, vocabulary = 5, 3, 4, 6, 7
    parameters = {"scales": rng.normal(size=3), "2.words": rng.normal(size=4)}
    for side in ("query", "key"):
        parameters[f"0.{side}.w"] = np.eye(d) + 0.3 * rng.normal(size=(d, d))
        parameters[f"0.{side}.logits"] = rng.normal(size=vocabulary)
        parameters[f"0.{side}.places"] = rng.normal(size=32)
        parameters[f"0.{side}.vectors"] = rng.normal(size=(vocabulary, d))
        parameters[f"1.{side}.w"] = np.eye(e) + 0.3 * rng.normal(size=(e, e))

    def texts(count: int, empty: int) -> Bag:
        lengths = rng.integers(1, 5, count)
        lengths[empty] = 0
        offsets = np.cumsum([0, *lengths])
        return bag(rng.integers(0, vocabulary, offsets[-1]), offsets)

    def vectors(count: int) -> np.ndarray:
        return rng.normal(size=(count, e)).astype(dtype)

    def words(count: int) -> Input:
        there = rng.random((count, 4)) < 0.8
        row, word = np.nonzero(there)
        return Input(sparse(row, 10 * word, rng.random(len(row)), count), rng.random(count))

    share = rng.random(n)
    own = words(n), words(c)
    # A word that no weight is learned for is left out.
    assert gradients.shared(*own, np.array([5, 10]))[1].tolist() == [10]
    shared, asked = gradients.shared(*own, np.array([0, 10, 15, 20, 30]))
    assert asked.tolist() == [0, 10, 20, 30]
    batch = gradients.Batch(
        query=[Input(texts(n, 2), rng.random(n).astype(dtype)), Input(vectors(n)), own[0]],
        key=[Input(texts(c, 5)), Input(vectors(c), rng.random(c).astype(dtype)), own[1]],
        right=np.array([0, 3, 3, 1]),
        share=(share / share.sum()).astype(dtype),
        barred=(np.array([0, 3]), np.array([4, 0])),
        cosines=(True, False, False),
        words={2: shared},
    )
    return {name: array.astype(dtype) for name, array in parameters.items()}, batch


class TestGradients:
    def test_by_hand_are_the_differences(self) -> None:
        parameters, batch = random_batch(np.float64)
        _, found = gradients.by_hand(parameters, batch)
        assert set(found) == set(parameters)
        for name, array in parameters.items():
            for at in list(np.ndindex(array.shape))[:40]:
                step = 1e-6
                sides = []
                for sign in (1, -1):
                    moved = array.copy()
                    moved[at] += sign * step
                    sides.append(gradients.by_hand({**parameters, name: moved}, batch)[0])
                slope = (sides[0] - sides[1]) / (2 * step)
                assert found[name][at] == pytest.approx(slope, abs=1e-7), (name, at)

    def test_words_are_the_products_of_sparse_vectors(self) -> None:
        _, batch = random_batch(np.float64)
        places = np.arange(0, 40, 10, dtype=np.uint32)
        query, key = (
            columns(side[2].x, places)[:, :-1] * side[2].length[:, None]
            for side in (batch.query, batch.key)
        )
        weight = np.array([1.0, 2.0, 0.5, 3.0])
        np.testing.assert_allclose(batch.words[2].scores(weight), query * weight @ key.T, rtol=1e-6)

    @pytest.mark.parametrize(("dtype", "within"), [(np.float64, 1e-12), (np.float32, 1e-5)])
    def test_by_torch_are_those_by_hand(self, dtype: Any, within: float) -> None:
        pytest.importorskip("torch")
        parameters, batch = random_batch(dtype)
        loss, ours = gradients.by_hand(parameters, batch)
        other, theirs = gradients.by_torch(parameters, batch)
        assert loss == pytest.approx(other, rel=within)
        assert set(ours) == set(theirs)
        for name, slope in ours.items():
            np.testing.assert_allclose(slope, theirs[name], rtol=within, atol=within, err_msg=name)

    def test_loss_is_minus_ln_alpha(self) -> None:
        parameters, batch = random_batch(np.float64)
        one = batch._replace(query=[batch.query[1]], key=[batch.key[1]], cosines=(False,), words={})
        own = {"0." + k.partition(".")[2]: v for k, v in parameters.items() if k.startswith("1.")}
        own["scales"] = parameters["scales"][1:2]
        q = batch.query[1].x @ own["0.query.w"].T
        k = batch.key[1].x @ own["0.key.w"].T * batch.key[1].length[:, None]
        s = np.exp(own["scales"][0]) * q @ k.T
        s[batch.barred] = -np.inf
        alpha = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
        expected = -(batch.share * np.log(alpha[np.arange(4), batch.right])).sum()
        assert gradients.by_hand(own, one)[0] == pytest.approx(expected)

    def test_unknown_framework(self) -> None:
        with pytest.raises(ArgumentError, match="did you mean 'torch'"):
            learn.learn(Characters(64), ENGLISH, PAIRS, framework="torhc")
