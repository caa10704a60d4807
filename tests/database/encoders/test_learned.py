"""What was learned, as an encoder: pooled tokens and projections."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from qkv.database import learn
from qkv.database.encoders import (
    ENCODERS,
    Arrays,
    Characters,
    Columns,
    Encoder,
    Heads,
    Numbers,
    Text,
    Words,
    load,
)
from qkv.database.encoders.learned import (
    Learned,
    TokenBag,
    build_token_bag,
    extract_features,
    leaf_heads,
    pool_tokens,
    softmax_by_text,
)
from qkv.errors import ArgumentError
from qkv.scores import ScaledDot
from tests.database.learn.letters import ENGLISH, MADE_UP, PAIRS, Letters


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, "letters", Letters)


class TestPooling:
    def test_is_a_softmax_over_each_text(self) -> None:
        logits = np.array([0.0, np.log(3.0), 5.0, 1000.0, 1000.0])
        result = softmax_by_text(logits, np.array([0, 2, 2, 3, 5]))
        np.testing.assert_allclose(result, [0.25, 0.75, 1.0, 0.5, 0.5])

    def test_of_no_tokens_is_zero(self) -> None:
        table = np.ones((3, 2), np.float32)
        nothing = np.zeros(0, np.int64)
        assert softmax_by_text(np.zeros(0), np.array([0, 0])).shape == (0,)
        assert pool_tokens(table, np.zeros(0), nothing, np.array([0, 0])).tolist() == [[0, 0]]

    def test_sums_by_weight(self) -> None:
        table = np.array([[1.0, 0.0], [0.0, 1.0]])
        result = pool_tokens(
            table, np.array([0.25, 0.75, 1.0]), np.array([0, 1, 1]), np.array([0, 2, 2, 3])
        )
        assert result.tolist() == [[0.25, 0.75], [0, 0], [0, 1]]

    def test_bags_are_taken_and_thinned(self) -> None:
        full = build_token_bag(np.array([1, 2, 3, 4, 5, 6]), np.array([0, 2, 2, 5, 6]))
        subset = full.take_texts(np.array([2, 1, 0, 2]))
        assert subset.ids.tolist() == [3, 4, 5, 1, 2, 3, 4, 5]
        assert subset.offsets.tolist() == [0, 3, 3, 5, 8]
        assert subset.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
        thin = full.drop_tokens(np.array([True, False, False, True, True, False]))
        assert thin.ids.tolist() == [1, 4, 5]
        assert thin.offsets.tolist() == [0, 1, 1, 3, 3]
        assert thin.positions.tolist() == [0, 1, 2]

    def test_places_after_the_last_share_it(self) -> None:
        assert build_token_bag(np.arange(40), np.array([0, 40])).positions.max() == 31


class TestLearned:
    @pytest.mark.parametrize(
        ("base", "keys", "query"),
        [
            (Letters(), ENGLISH, "catt"),
            (Characters(64), ENGLISH, "catt"),
            (Heads([Characters(64), Letters()], [1, 3]), ENGLISH, "catt"),
            (Numbers(), [1.0, 5.0, 2.5], 2.4),
            (
                Columns([Heads([Letters(), "characters"]), Numbers()]),
                [("a", 1), ("b", 7)],
                ("b", None),
            ),
            (Columns([Letters(), Characters(64)], [1, 3]), [("a", "x"), ("b", "y")], "b"),
            (Arrays(), [[1.0, 2.0], [3.0, -1.0]], [1.0, 1.0]),
        ],
    )
    def test_begins_as_its_base(self, base: Encoder, keys: list[Any], query: Any) -> None:
        base = base.fit(keys)
        learned = Learned.from_base(base, len(keys), vectors=True)
        expected = base.encode_head([query], query=True) @ base.encode_head(keys).T
        actual = learned.encode_query([query]) @ learned.encode(keys).T
        np.testing.assert_allclose(actual, expected, atol=1e-5)

    def test_score_is_its_sharpness_and_follows_the_rows(self) -> None:
        base = Heads([Characters(64), Letters()], [1, 3])
        learned = Learned.from_base(base, 50)
        assert learned.weights == pytest.approx((0.25, 0.75))
        assert isinstance(learned.default_score(50), ScaledDot)
        assert learned.default_score(50).scale == pytest.approx(base.default_score(50).scale)
        assert learned.default_score(500).scale == pytest.approx(base.default_score(500).scale)

    def test_is_built_again_from_settings_and_arrays(self) -> None:
        base = Heads([Letters(), Characters(64, idf=True)]).fit(ENGLISH)
        learned, _ = learn.learn(base, ENGLISH, PAIRS, vectors=True, held_out=0, epochs=2)
        settings = json.loads(json.dumps(learned.settings()))
        arrays = {name: array.copy() for name, array in learned.arrays().items()}
        again = load(settings, arrays)
        assert isinstance(again, Learned)
        np.testing.assert_array_equal(again.encode(ENGLISH), learned.encode(ENGLISH))
        np.testing.assert_array_equal(again.encode_query(MADE_UP), learned.encode_query(MADE_UP))
        assert again.default_score(9).scale == learned.default_score(9).scale
        used = {ord(x) for word in MADE_UP for x in word}
        assert set(arrays["moved.0.query.vectors"]) == used, "only tokens that were seen are kept"

    def test_arrays_that_do_not_fit_are_refused(self) -> None:
        learned = Learned.from_base(Letters(), 3)
        arrays = learned.arrays()
        arrays["learned.0.key.w"] = np.eye(5, dtype=np.float32)
        with pytest.raises(ArgumentError, match="learn again"):
            load(learned.settings(), arrays)

    @pytest.mark.parametrize("query", ["Dracla", "a count from Transylvania who drinks blood"])
    def test_text_is_weighed_by_length(self, query: str) -> None:
        pytest.importorskip("wordllama")
        keys = ["Dracula", "A young man looks for hidden gold in the desert"]
        learned = Learned.from_base(Text(), 2)
        np.testing.assert_allclose(learned.encode(keys), Text().encode(keys), atol=1e-5)
        np.testing.assert_allclose(
            learned.encode_query([query]), Text().encode_query([query]), atol=1e-5
        )
        both = Columns([Text(), Numbers()]).fit([(key, 1.0) for key in keys])
        inner = Learned.from_base(both, 2)
        pairs = [(query, None), (None, 2.0)]
        np.testing.assert_allclose(inner.encode_query(pairs), both.encode_query(pairs), atol=1e-5)

    def test_fitted_text_starts_with_the_vectors_of_its_base(self) -> None:
        pytest.importorskip("wordllama")
        keys = [f"the {word} number {i}" for i, word in enumerate(["cat", "dog", "cow"] * 30)]
        base = Text().fit(keys)
        learned = Learned.from_base(base, len(keys))
        queries = ["the cta number 3", "a cow"]
        for new, old in ((learned.encode(keys), base.encode(keys)),):
            np.testing.assert_allclose(new, old, atol=1e-4)
        expected, found = (
            np.matmul(*(x.astype(float) for x in (query, key.T)))
            for query, key in (base.encode_pair(queries, keys), learned.encode_pair(queries, keys))
        )
        np.testing.assert_allclose(found, expected, atol=1e-3)

    def test_words_have_tokens(self) -> None:
        pytest.importorskip("wordllama")
        learned = Learned.from_base(Words(), 3)
        texts = ["a cat", "", "income tax"]
        np.testing.assert_allclose(learned.encode(texts), Words().encode(texts), atol=1e-5)
        assert isinstance(extract_features(Words(), texts, "key")[0].x, TokenBag)
        assert len(leaf_heads(Words())) == 1
