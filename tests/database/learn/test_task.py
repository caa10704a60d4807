"""What learning gains, what it reports, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.database import learn
from qkv.database.encoders import (
    Arrays,
    Characters,
    Columns,
    Heads,
    Lexical,
    Numbers,
)
from qkv.database.table.encoding import add_word_columns, encode_as_stored
from qkv.errors import ArgumentError, DtypeError, QkvError
from tests.database.learn.letters import ENGLISH, MADE_UP, PAIRS, Letters, top


class TestLearn:
    @pytest.mark.parametrize("vectors", [False, True])
    def test_learns_a_made_up_language(self, vectors: bool) -> None:
        encoder, report = learn.learn(
            Heads([Letters(), Characters(64)]),
            ENGLISH,
            PAIRS,
            held_out=0,
            vectors=vectors,
        )
        assert report.before[1] < 0.5
        assert report.after[1] == 1.0
        assert top(encoder, MADE_UP, ENGLISH) == list(range(10))
        assert report.loss[-1] < report.loss[0] / 2

    def test_learns_which_words_count(self) -> None:
        keys = [f"{a} {b}" for a in "uvwxyz" for b in "abcdef"]
        # The second word tells and the first misleads, though both are as rare.
        pairs = [(f"{a} {key[2]}", key) for a, key in zip("vwxyzu" * 6, keys, strict=True)]
        text = Heads([Lexical(), Characters(64)], weights=[50, 1]).fit(keys)
        encoder, report = learn.learn(text, keys, pairs, held_out=0, epochs=40)
        assert report.loss[-1] < 0.8 * report.loss[0]
        words = encoder.parameters["0.words"]
        weight_by_code = dict(zip(text.heads[0].codes.tolist(), words.tolist(), strict=True))
        first, second = (
            [weight_by_code[int(code)] for code in Lexical().fit(list(part)).codes]
            for part in ("uvwxyz", "abcdef")
        )
        assert min(second) > max(first) + 0.5
        query, key = encoder.encode_pair(["v a"], keys)
        s = (query @ key.T)[0]
        assert s[keys.index("u a")] > s[keys.index("v b")]

    def test_a_database_learns_words_and_keeps_them(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        words = [f"word{i}" for i in range(60)]
        keys = [" ".join(rng.choice(words, 4, replace=False)) for _ in range(80)]
        with qkv.open(tmp_path / "d", encoder=Heads([Lexical(), Characters(64)])) as D:
            D.add(keys, np.arange(80.0)[:, None])
            D.learn([(" ".join(key.split()[:2]), key) for key in keys], epochs=2, held_out=0)
            queries = [key.split()[1] for key in keys[:5]]
            before = D.attend(queries)
            made = D.encoder
        assert any(made.parameters["0.words"])
        with qkv.open(tmp_path / "d") as D:
            np.testing.assert_array_equal(D.attend(queries), before)
            code = encode_as_stored(D.encoder, keys)
            query, key = add_word_columns(D.encoder, queries, code, D.encoder.encode_sparse(keys))
            alpha = qkv.weights(query, key, score=D.encoder.default_score(80))
            np.testing.assert_allclose(before, alpha @ np.arange(80.0)[:, None], rtol=1e-4)

    def test_is_the_same_for_the_same_seed(self) -> None:
        runs = [learn.learn(Letters(), ENGLISH, PAIRS, seed=s, epochs=2)[0] for s in (3, 3, 4)]
        one, same, other = (run.encode_query(MADE_UP) for run in runs)
        np.testing.assert_array_equal(one, same)
        assert np.abs(one - other).max() > 1e-4

    def test_generalises_to_held_out_queries(self) -> None:
        """A linear map that 90 pairs show is right for the other 10 too."""
        rng = np.random.default_rng(1)
        keys = rng.normal(size=(100, 8)).astype(np.float32)
        queries = keys @ rng.normal(size=(8, 8)).astype(np.float32)
        pairs = [(list(q), list(k)) for q, k in zip(queries.tolist(), keys.tolist(), strict=True)]
        held = pairs[:10]
        encoder, report = learn.learn(
            Arrays().fit(keys),
            keys.tolist(),
            pairs[10:],
            held_out=held,
            epochs=40,
            rate=0.01,
            patience=40,
        )
        assert report.before[1] < 0.5
        assert report.after[1] >= 0.9
        assert encoder.kind == "learned"

    def test_an_array_of_keys(self) -> None:
        keys = np.eye(4, dtype=np.float32)
        pairs = [(keys[i], keys[(i + 1) % 4]) for i in range(4)]
        encoder, _ = learn.learn(Arrays().fit(keys), keys, pairs, held_out=0, epochs=20, rate=0.01)
        assert (encoder.encode_query(keys) @ encoder.encode(keys).T).argmax(axis=1).tolist() == [
            1,
            2,
            3,
            0,
        ]

    def test_weights_of_clicks_decide(self) -> None:
        """Two queries of one vector: the key with more clicks wins."""
        keys = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]
        for few, many in ((0, 1), (1, 0)):
            pairs = [([0.5, 0.5], keys[few], 1), ([1.0, 1.0], keys[many], 30)]
            encoder, _ = learn.learn(Arrays().fit(keys), keys, pairs, held_out=0)
            assert top(encoder, [[2.0, 2.0]], keys) == [many]

    def test_a_query_may_have_several_right_keys(self) -> None:
        """Neither counts as wrong for the other, in the loss or in the ranks."""
        pairs = [("zub", "cat"), ("zub", "dog"), ("kip", "tree"), ("hoam", "milk")]
        encoder, report = learn.learn(Characters(64), ENGLISH, pairs, held_out=0, epochs=10)
        assert report.after[1] == 1.0
        scores = encoder.encode_query(["zub"]) @ encoder.encode(ENGLISH).T
        assert set(np.argsort(scores[0])[-2:]) == {0, 1}

    def test_repeated_keys_are_one_candidate(self) -> None:
        _, report = learn.learn(Characters(64), ENGLISH * 3, PAIRS, held_out=0, epochs=1)
        assert report.keys == 10

    def test_learning_goes_on_from_what_was_learned(self) -> None:
        first, one = learn.learn(Letters(), ENGLISH, PAIRS, held_out=0)
        second, report = learn.learn(first, ENGLISH, PAIRS, held_out=0, epochs=1, vectors=True)
        assert second.base == Letters()
        assert report.before == one.after
        assert report.before[1] > one.before[1]
        assert "0.key.vectors" in second.parameters
        assert "0.key.vectors" not in first.parameters

    def test_text_with_no_tokens(self) -> None:
        encoder, _ = learn.learn(Letters(), ["", "a", "b"], [("", "a"), ("x", "b")], held_out=0)
        assert np.isfinite(encoder.encode(["", "a"])).all()

    def test_columns(self) -> None:
        keys = [("cat", 1.0), ("dog", 2.0), ("cow", 3.0)]
        base = Columns([Letters(), Numbers()]).fit(keys)
        pairs = [(("zub", None), keys[0]), (("kip", None), keys[1]), ((None, 3.0), keys[2])]
        encoder, report = learn.learn(base, keys, pairs, held_out=0, vectors=True)
        assert report.after[1] == 1.0
        assert top(encoder, [("kip", None)], keys) == [1]


class TestReport:
    def test_is_a_table(self) -> None:
        _, report = learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, held_out=0.2)
        lines = str(report).splitlines()
        assert lines[0].split() == ["recall", "at", "1", "at", "10", "at", "100"]
        assert lines[2].split() == ["after", *(f"{x:.3f}" for x in report.after.values())]
        assert lines[3] == "8 training pairs, 2 held out, among 10 keys"
        assert report.after[10] == 1.0 and not report.interrupted

    def test_says_that_it_was_asked_on_what_it_learned(self) -> None:
        _, report = learn.learn(Letters(), ENGLISH, PAIRS, epochs=1)
        lines = str(report).splitlines()
        assert report.held_out == 0 and "measured on the training pairs" in lines[0]
        assert lines[4] == "10 training pairs, none held out, among 10 keys"


class TestRefusals:
    @pytest.mark.parametrize(
        ("pairs", "said"),
        [
            ([], "pairs is empty"),
            (["ab"], r"pairs\[0\] must be"),
            ([("a", "cat"), ("a",)], r"pairs\[1\] must be"),
            ([("a", "cat"), ("b", "unicorn")], r"pairs\[1\] has the right key 'unicorn'"),
            ([("a", "cat", 0)], "must be above 0, not 0"),
            ([("a", "cat", float("nan"))], "must be above 0, not nan"),
            ([(None, "cat")], r"pairs\[0\] has no query"),
        ],
    )
    def test_pairs(self, pairs: list[Any], said: str) -> None:
        with pytest.raises(QkvError, match=said):
            learn.learn(Characters(64), ENGLISH, pairs)

    @pytest.mark.parametrize(
        "options",
        [
            {"epochs": -1},
            {"epochs": 1.5},
            {"batch": 0},
            {"rate": 0},
            {"rate": float("nan")},
            {"dropout": 1},
            {"held_out": 1},
            {"held_out": -0.1},
            {"hard": -1},
            {"patience": 0},
            {"budget_s": 0},
        ],
    )
    def test_settings(self, options: dict[str, Any]) -> None:
        (name,) = options
        with pytest.raises(ArgumentError, match=name):
            learn.learn(Characters(64), ENGLISH, PAIRS, **options)

    def test_one_key_is_nothing_to_tell_apart(self) -> None:
        with pytest.raises(ArgumentError, match="two different keys"):
            learn.learn(Characters(64), ["a", "a"], [("x", "a")])

    def test_a_pair_that_is_no_pair(self) -> None:
        with pytest.raises(DtypeError, match="must be"):
            learn.learn(Characters(64), ENGLISH, [{"query": "a"}])
