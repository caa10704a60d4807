"""Learning: its gradients, what it gains, what it refuses, how it stops and goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from qkv.database import gradients, learn
from qkv.database.encoders import (
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
    Input,
    Learned,
    bag,
    features,
    leaves,
    pooled,
    pooling,
)
from qkv.errors import ArgumentError, DtypeError, QkvError
from qkv.scores import ScaledDot

ENGLISH = ["cat", "dog", "house", "tree", "water", "bread", "night", "milk", "book", "hand"]
MADE_UP = ["zub", "kip", "hoam", "drev", "vada", "klib", "natt", "lait", "knig", "ruka"]
PAIRS = list(zip(MADE_UP, ENGLISH, strict=True))


@dataclass(frozen=True)
class Letters(Encoder):
    """Each letter a token: an encoder with tokens that needs nothing installed."""

    kind: ClassVar[str] = "letters"

    @property
    def table(self) -> np.ndarray:
        return np.random.default_rng(5).normal(size=(128, 12)).astype(np.float32)

    @property
    def width(self) -> int:
        return 12

    def tokens(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        lists = [[min(ord(x), 127) for x in key] for key in keys]
        offsets = np.cumsum([0, *map(len, lists)])
        return np.array([x for one in lists for x in one], np.int32), offsets

    def encode(self, keys: Any) -> np.ndarray:
        ids, offsets = self.tokens(keys)
        x = pooled(self.table, np.ones(len(ids), np.float32), ids, offsets)
        length = np.linalg.norm(x, axis=1, keepdims=True)
        return x / np.where(length == 0, 1, length)

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def build(cls, settings: Any, arrays: Any) -> Letters:
        return cls()


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv.database import encoders

    monkeypatch.setitem(encoders.ENCODERS, "letters", Letters)
    monkeypatch.setitem(encoders.ENCODERS, "learned", Learned)


def top(encoder: Encoder, queries: list[Any], keys: list[Any]) -> list[int]:
    scores = encoder.score(len(keys))(encoder.query(queries), encoder.encode(keys))
    return np.asarray(scores).argmax(axis=1).tolist()


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


def random_batch(dtype: Any) -> tuple[dict[str, np.ndarray], gradients.Batch]:
    """Two heads, one of tokens (with an empty text) and one of vectors that keeps its lengths."""
    rng = np.random.default_rng(0)
    d, e, n, c, vocabulary = 5, 3, 4, 6, 7
    parameters = {"scales": rng.normal(size=2)}
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

    share = rng.random(n)
    batch = gradients.Batch(
        query=[Input(texts(n, 2), rng.random(n).astype(dtype)), Input(vectors(n))],
        key=[Input(texts(c, 5)), Input(vectors(c), rng.random(c).astype(dtype))],
        right=np.array([0, 3, 3, 1]),
        share=(share / share.sum()).astype(dtype),
        barred=(np.array([0, 3]), np.array([4, 0])),
        cosines=(True, False),
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
        one = batch._replace(query=[batch.query[1]], key=[batch.key[1]], cosines=(False,))
        own = {"0." + k.partition(".")[2]: v for k, v in parameters.items() if k.startswith("1.")}
        own["scales"] = parameters["scales"][1:]
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


class TestLearn:
    @pytest.mark.parametrize("framework", ["numpy", "torch"])
    @pytest.mark.parametrize("vectors", [False, True])
    def test_learns_a_made_up_language(self, framework: str, vectors: bool) -> None:
        if framework == "torch":
            pytest.importorskip("torch")
        encoder, report = learn.learn(
            Heads([Letters(), Characters(64)]),
            ENGLISH,
            PAIRS,
            held_out=0,
            vectors=vectors,
            framework=framework,
        )
        assert report.before[1] < 0.5
        assert report.after[1] == 1.0
        assert top(encoder, MADE_UP, ENGLISH) == list(range(10))
        assert report.loss[-1] < report.loss[0] / 2
        assert report.framework == framework

    def test_numpy_and_torch_agree(self) -> None:
        pytest.importorskip("torch")
        both = [
            learn.learn(Letters(), ENGLISH, PAIRS, vectors=True, epochs=2, framework=name)[0]
            for name in ("numpy", "torch")
        ]
        one, other = (encoder.query(MADE_UP) @ encoder.encode(ENGLISH).T for encoder in both)
        np.testing.assert_allclose(one, other, atol=2e-3)

    def test_is_the_same_for_the_same_seed(self) -> None:
        runs = [learn.learn(Letters(), ENGLISH, PAIRS, seed=s, epochs=2)[0] for s in (3, 3, 4)]
        one, same, other = (run.query(MADE_UP) for run in runs)
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
        assert (encoder.query(keys) @ encoder.encode(keys).T).argmax(axis=1).tolist() == [
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
        scores = encoder.query(["zub"]) @ encoder.encode(ENGLISH).T
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

    def test_samples_negatives_when_keys_are_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(learn, "ALL", 4)
        monkeypatch.setattr(learn, "MINED", 8)
        monkeypatch.setattr(learn, "MINE_FROM", 0)
        encoder, report = learn.learn(
            Letters(), ENGLISH, PAIRS, held_out=0, vectors=True, batch=4, hard=2, epochs=20
        )
        assert report.after[1] >= 0.9
        assert top(encoder, MADE_UP, ENGLISH)[0] == 0

    def test_mined_negatives_are_hard_and_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(learn, "ALL", 4)
        monkeypatch.setattr(learn, "HARDEST", 2)
        keys = ["cat", "cats", "cat s", "dog", "dogs", "xyz"]
        pairs = [("cat", "cat"), ("cat", "cats"), ("dog", "dog")]
        task = learn._task(Characters(64), keys, pairs, 0, 0)
        how = learn._How(1, False, 4, 1e-3, 1, 0.0, 1, None, 0)
        run = learn._Run(task, how, gradients.by_hand, Learned.begin(Characters(64), 6), 0.0)
        run.mine(np.random.default_rng(0))
        assert run.hard is not None
        found = [{keys[i] for i in row} for row in run.hard]
        assert "cat s" in found[0] & found[1]
        assert not (found[0] | found[1]) & {"cat", "cats"}, "right keys are never wrong"
        assert "dogs" in found[2]
        assert "dog" not in found[2]

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


class TestStopping:
    def test_keeps_the_best_epoch_and_stops(self) -> None:
        """Held-out pairs that contradict the others can only get worse."""
        held = [("cat", "cat"), ("dog", "dog")]
        wrong = [("cat", "dog"), ("dog", "cat"), ("cat", "tree")]
        encoder, report = learn.learn(
            Characters(64), ENGLISH, wrong, held_out=held, epochs=50, patience=2, rate=0.1
        )
        assert report.best < report.epochs < 50
        assert report.stopped == "no better for 2 epochs"
        assert report.after[1] == 1.0
        assert top(encoder, ["cat"], ENGLISH) == [0]

    def test_budget(self) -> None:
        _, report = learn.learn(Letters(), ENGLISH, PAIRS, budget_s=1e-9, held_out=0)
        assert report.epochs == 1
        assert report.stopped == "the 1e-09 s were over"

    def test_ctrl_c_keeps_the_best_so_far(self) -> None:
        def stop(done: int, total: int | None) -> None:
            if done == 50:
                raise KeyboardInterrupt

        encoder, report = learn.learn(Letters(), ENGLISH, PAIRS, held_out=0, progress=stop)
        assert report.epochs == 2
        assert report.best == 2
        assert "interrupted in epoch 3: the best so far was kept" in str(report)
        straight, _ = learn.learn(Letters(), ENGLISH, PAIRS, held_out=0)
        assert np.isfinite(encoder.query(MADE_UP)).all()
        assert np.abs(encoder.query(MADE_UP) - straight.query(MADE_UP)).max() > 1e-3

    def test_progress_counts_steps(self) -> None:
        seen: list[tuple[int, int | None]] = []
        learn.learn(
            Letters(), ENGLISH, PAIRS, epochs=2, held_out=0, progress=lambda *x: seen.append(x)
        )
        assert seen == [(i, 40) for i in range(1, 41)]

    @pytest.mark.parametrize("when", [1, 3, 5])
    def test_resumes_to_the_same_end(
        self, when: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(learn, "ALL", 4)  # so that mined negatives must be kept as well
        how: dict[str, Any] = {"epochs": 6, "vectors": True, "held_out": PAIRS[:3], "batch": 4}
        straight, report = learn.learn(Letters(), ENGLISH, PAIRS, **how)
        path = tmp_path / "state.safetensors"

        def stop(done: int, total: int | None) -> None:
            if done == when * 20 + 7:
                raise KeyboardInterrupt

        learn.learn(Letters(), ENGLISH, PAIRS, resume=path, progress=stop, **how)
        assert [item.name for item in tmp_path.iterdir()] == [path.name]
        resumed, second = learn.learn(Letters(), ENGLISH, PAIRS, resume=path, **how)
        assert second.loss == report.loss
        assert second.best == report.best
        np.testing.assert_array_equal(resumed.query(MADE_UP), straight.query(MADE_UP))
        finished, third = learn.learn(Letters(), ENGLISH, PAIRS, resume=path, **how)
        assert third.loss == report.loss
        np.testing.assert_array_equal(finished.query(MADE_UP), straight.query(MADE_UP))

    def test_refuses_a_checkpoint_of_something_else(self, tmp_path: Any) -> None:
        path = tmp_path / "state.safetensors"
        learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, resume=path)
        with pytest.raises(learn.CheckpointError, match="other keys, pairs or settings"):
            learn.learn(Letters(), ENGLISH, PAIRS[:5], epochs=1, resume=path)
        with pytest.raises(learn.CheckpointError, match="other keys, pairs or settings"):
            learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, rate=0.1, resume=path)

    @pytest.mark.parametrize("damage", [b"", b"not a checkpoint at all, but text"])
    def test_refuses_a_damaged_checkpoint(self, damage: bytes, tmp_path: Any) -> None:
        path = tmp_path / "state.safetensors"
        path.write_bytes(damage)
        with pytest.raises(learn.CheckpointError, match=r"state\.safetensors"):
            learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, resume=path)
        assert path.read_bytes() == damage


class TestReport:
    def test_is_a_table(self) -> None:
        _, report = learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, held_out=0.2)
        lines = str(report).splitlines()
        assert lines[0].split() == ["recall", "at", "1", "at", "10", "at", "100"]
        assert lines[2].split() == ["after", *(f"{x:.3f}" for x in report.after.values())]
        assert lines[3] == "8 pairs to learn from, 2 held out, among 10 keys"
        assert report.after[10] == 1.0

    def test_sharpness_is_calibrated_on_what_was_held_out(self) -> None:
        """No other factor on τ gives the held-out pairs a lower −ln α."""
        held = PAIRS[:5]
        encoder, _ = learn.learn(Letters(), ENGLISH, PAIRS[5:], held_out=held, epochs=2)
        s = encoder.query([q for q, _ in held]) @ encoder.encode(ENGLISH).T

        def loss(factor: float) -> float:
            z = s.astype(np.float64) * encoder.sharpness * factor
            alpha = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
            return float(-np.log(alpha[np.arange(5), np.arange(5)]).mean())

        assert loss(1.0) <= min(loss(0.8), loss(1.25)) + 1e-6


class TestRefusals:
    @pytest.mark.parametrize(
        ("pairs", "said"),
        [
            ([], "pairs is empty"),
            (["ab"], r"pairs\[0\] must be"),
            ([("a", "cat"), ("a",)], r"pairs\[1\] must be"),
            ([("a", "cat"), ("b", "unicorn")], r"pairs\[1\] names the right key 'unicorn'"),
            ([("a", "cat", 0)], "weight 0; it must be above 0"),
            ([("a", "cat", float("nan"))], "weight nan"),
            ([(None, "cat")], r"pairs\[0\] has no query"),
        ],
    )
    def test_pairs(self, pairs: list[Any], said: str) -> None:
        with pytest.raises(QkvError, match=said):
            learn.learn(Characters(64), ENGLISH, pairs)

    @pytest.mark.parametrize(
        "how",
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
    def test_settings(self, how: dict[str, Any]) -> None:
        (name,) = how
        with pytest.raises(ArgumentError, match=name):
            learn.learn(Characters(64), ENGLISH, PAIRS, **how)

    def test_one_key_is_nothing_to_tell_apart(self) -> None:
        with pytest.raises(ArgumentError, match="two different keys"):
            learn.learn(Characters(64), ["a", "a"], [("x", "a")])

    def test_a_pair_that_is_no_pair(self) -> None:
        with pytest.raises(DtypeError, match="must be"):
            learn.learn(Characters(64), ENGLISH, [{"query": "a"}])
