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
    Bag,
    Learned,
    bag,
    features,
    leaves,
    pooled,
    pooling,
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
        found = pooling(logits, np.array([0, 2, 2, 3, 5]))
        np.testing.assert_allclose(found, [0.25, 0.75, 1.0, 0.5, 0.5])

    def test_of_no_tokens_is_zero(self) -> None:
        table = np.ones((3, 2), np.float32)
        nothing = np.zeros(0, np.int64)
        assert pooling(np.zeros(0), np.array([0, 0])).shape == (0,)
        assert pooled(table, np.zeros(0), nothing, np.array([0, 0])).tolist() == [[0, 0]]

    def test_sums_by_weight(self) -> None:
        table = np.array([[1.0, 0.0], [0.0, 1.0]])
        found = pooled(
            table, np.array([0.25, 0.75, 1.0]), np.array([0, 1, 1]), np.array([0, 2, 2, 3])
        )
        assert found.tolist() == [[0.25, 0.75], [0, 0], [0, 1]]

    def test_bags_are_taken_and_thinned(self) -> None:
        whole = bag(np.array([1, 2, 3, 4, 5, 6]), np.array([0, 2, 2, 5, 6]))
        some = whole.take(np.array([2, 1, 0, 2]))
        assert some.ids.tolist() == [3, 4, 5, 1, 2, 3, 4, 5]
        assert some.offsets.tolist() == [0, 3, 3, 5, 8]
        assert some.places.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
        thin = whole.thin(np.array([True, False, False, True, True, False]))
        assert thin.ids.tolist() == [1, 4, 5]
        assert thin.offsets.tolist() == [0, 1, 1, 3, 3]
        assert thin.places.tolist() == [0, 1, 2]

    def test_places_after_the_last_share_it(self) -> None:
        assert bag(np.arange(40), np.array([0, 40])).places.max() == 31


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
        learned = Learned.begin(base, len(keys), vectors=True)
        expected = base.head([query], query=True) @ base.head(keys).T
        found = learned.query([query]) @ learned.encode(keys).T
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def test_score_is_its_sharpness_and_follows_the_rows(self) -> None:
        base = Heads([Characters(64), Letters()], [1, 3])
        learned = Learned.begin(base, 50)
        assert learned.weights == pytest.approx((0.25, 0.75))
        assert isinstance(learned.score(50), ScaledDot)
        assert learned.score(50).scale == pytest.approx(base.score(50).scale)
        assert learned.score(500).scale == pytest.approx(base.score(500).scale)

    def test_is_built_again_from_settings_and_arrays(self) -> None:
        base = Heads([Letters(), Characters(64, idf=True)]).fit(ENGLISH)
        learned, _ = learn.learn(base, ENGLISH, PAIRS, vectors=True, held_out=0, epochs=2)
        settings = json.loads(json.dumps(learned.settings()))
        arrays = {name: array.copy() for name, array in learned.arrays().items()}
        again = load(settings, arrays)
        assert isinstance(again, Learned)
        np.testing.assert_array_equal(again.encode(ENGLISH), learned.encode(ENGLISH))
        np.testing.assert_array_equal(again.query(MADE_UP), learned.query(MADE_UP))
        assert again.score(9).scale == learned.score(9).scale
        used = {ord(x) for word in MADE_UP for x in word}
        assert set(arrays["moved.0.query.vectors"]) == used, "only tokens that were seen are kept"

    def test_arrays_that_do_not_fit_are_refused(self) -> None:
        learned = Learned.begin(Letters(), 3)
        arrays = learned.arrays()
        arrays["learned.0.key.w"] = np.eye(5, dtype=np.float32)
        with pytest.raises(ArgumentError, match="learn again"):
            load(learned.settings(), arrays)

    @pytest.mark.parametrize("query", ["Dracla", "a count from Transylvania who drinks blood"])
    def test_text_is_weighed_by_length(self, query: str) -> None:
        pytest.importorskip("wordllama")
        keys = ["Dracula", "A young man looks for hidden gold in the desert"]
        learned = Learned.begin(Text(), 2)
        np.testing.assert_allclose(learned.encode(keys), Text().encode(keys), atol=1e-5)
        np.testing.assert_allclose(learned.query([query]), Text().query([query]), atol=1e-5)
        both = Columns([Text(), Numbers()]).fit([(key, 1.0) for key in keys])
        inner = Learned.begin(both, 2)
        asked = [(query, None), (None, 2.0)]
        np.testing.assert_allclose(inner.query(asked), both.query(asked), atol=1e-5)

    def test_words_have_tokens(self) -> None:
        pytest.importorskip("wordllama")
        learned = Learned.begin(Words(), 3)
        texts = ["a cat", "", "income tax"]
        np.testing.assert_allclose(learned.encode(texts), Words().encode(texts), atol=1e-5)
        assert isinstance(features(Words(), texts, "key")[0].x, Bag)
        assert len(leaves(Words())) == 1
