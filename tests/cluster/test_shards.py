"""What shards say together is what the database says: for any cut, tree, death and loss."""

import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qkv
from qkv import scores, weightings
from qkv.cluster import LostShardError, split, stores
from qkv.database.errors import NoRowsMatchWarning
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from qkv.page.views import build_views
from tests.cluster.local_shards import cluster

pytestmark = pytest.mark.sample_of_module(20)

PAIRS: list[tuple[Any, Any]] = [
    (None, "softmax"),
    ("dot", weightings.Softmax(0.3)),
    ("gaussian", "softmax"),
    ("dot", "hard"),
    ("dot", weightings.Hard(straight_through=True)),
    ("constant", "average"),
    (scores.Boxcar(1.5), "normalized"),
    (scores.Triangular(0.1), weightings.Normalized("nearest")),
    ("dot", weightings.TopK(3)),
    ("dot", "sparsemax"),
    ("gaussian", weightings.Entmax(1.5)),
    ("dot", weightings.Entmax(1.2)),
    ("dot", "sigmoid"),
    ("dot", "raw"),
    (scores.Laplace(0.7), "softmax"),
    ("exact", "raw"),
    ("exact", "softmax"),
    (scores.Gaussian(1e-25), "sparsemax"),  # narrower than float32 holds
    ("dot", weightings.Softmax(1e-39)),
]
QUIET = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
NUMBERS = count()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(2, 40))
    stores = draw(st.integers(1, min(3, rows)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Halves meet again and again, so that there are ties.
    key = np.round(rng.normal(size=(rows, 3)) * 2) / 2
    return {
        "key": key,
        "value": rng.normal(size=(rows, 2)),
        "query": np.concatenate([key[:1], np.round(rng.normal(size=(2, 3)) * 2) / 2]),
        "stores": stores,
        "shards": draw(st.integers(1, 4)),
        "rng": rng,
        "pair": draw(st.sampled_from(PAIRS)),
        "where": draw(st.booleans()),
    }


def build_shards(folder: Path, case: dict[str, Any]) -> tuple[qkv.Database, list[str]]:
    """The database, and the paths of the stores that hold its rows."""
    place = folder / str(next(NUMBERS))
    full = f"{place}-all.qkv"
    with qkv.open(full, key="k", value="v") as D:
        half = len(case["key"]) // 2
        for part in (slice(0, half), slice(half, None)):
            rows = zip(case["key"][part], case["value"][part], strict=True)
            D.extend([{"k": k, "v": v, "n": i} for i, (k, v) in enumerate(rows)])
    places = [full]
    if case["stores"] > 1:
        places = [f"{place}-{i}.qkv" for i in range(case["stores"])]
        split(full, places)
    return qkv.open(full), places


def test_equal_rows_of_huge_scores_share_their_weight(tmp_path: Path) -> None:
    key = np.array([[0.0, 0.0, 0.5], [0.0, -0.5, 0.5], [0.0, 1.0, 0.5]])
    with qkv.open(str(tmp_path / "a.qkv"), key="k", value="v") as D:
        for i, k in enumerate(key):
            D.extend([{"k": k, "v": float(i)}])
    with cluster([str(tmp_path / "a.qkv")], 2) as c:
        result = c.ask(key[:1], score="dot", weighting=weightings.Softmax(1e-39))[0]
    np.testing.assert_allclose(np.asarray(result.weights), np.full(3, 1 / 3), rtol=1e-6)
    assert result.value == pytest.approx(1.0)


@settings(max_examples=40, **QUIET)
@given(cases())
def test_answers_are_those_of_the_database(tmp_path: Path, case: dict[str, Any]) -> None:
    D, places = build_shards(tmp_path, case)
    options: dict[str, Any] = {"score": case["pair"][0], "weighting": case["pair"][1], "top": 4}
    if case["where"]:
        options["where"] = "n < 12"
    dies = lambda: case["rng"].random() < 0.2  # noqa: E731
    with D, cluster(places, case["shards"], dies=dies) as c:
        pairs = zip(D.ask(case["query"], **options), c.ask(case["query"], **options), strict=True)
        for one, other in pairs:
            near = {"rtol": 1e-6, "atol": 1e-6}
            np.testing.assert_allclose(other.weights, one.weights, **near)
            for name in ("value", "entropy", "spread", "lse"):
                np.testing.assert_allclose(
                    *(np.asarray(getattr(x, name), float) for x in (other, one)), **near
                )
            assert (other.total, other.missing, other.error_bound) == (one.total, one.missing, 0)
            if case["pair"][1] == "hard":
                assert [row.index for row in other.rows] == [row.index for row in one.rows]
        if case["pair"][0] != "exact":
            del options["top"]
            out, want = (x.attend(case["query"], **options) for x in (c, D))
            np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", ["constant", "scaled_dot", scores.Boxcar(2.0)])
def test_of_rows_alike_in_several_shards_the_lowest_come_first(tmp_path: Path, score: Any) -> None:
    rng = np.random.default_rng(3)
    # Eighths: no product is rounded, which equal rows of one matrix can be in two ways.
    queries = np.round(8 * rng.normal(size=(5, 3))) / 8
    keys = np.repeat(queries[:4], 3, axis=0)[rng.permutation(12)]
    full, two = str(tmp_path / "whole.qkv"), [str(tmp_path / f"{i}.qkv") for i in range(2)]
    with qkv.open(full) as D:
        D.add(keys, rng.normal(size=12))
        split(full, two)
        shards = cluster(two, 2)
        for query in [keys[0], queries[4], 50 * keys[1]]:
            actual, want = (x.ask(query, score=score, top=12).rows for x in (shards, D))
            assert all(row.weight > 0 for row in actual)
            assert [row.index for row in actual][: len(want)] == [row.index for row in want]


@pytest.mark.parametrize("where", [None, "n > 2"])
def test_rows_that_are_nearly_alike_come_by_their_weights(tmp_path: Path, where: Any) -> None:
    """Scores that are one digit of float32 apart, each in another shard than the next."""
    rng, near = np.random.default_rng(5), np.nextafter
    steps = [np.float32(8)]
    for _ in range(30):
        steps.append(near(steps[-1], np.float32(9)))
    keys = np.repeat(np.array(steps)[rng.permutation(31)], 2)[:, None]
    full, three = str(tmp_path / "whole.qkv"), [str(tmp_path / f"{i}.qkv") for i in range(3)]
    with qkv.open(full, key="k", value="v") as D:
        D.extend([{"k": key, "v": float(rng.normal()), "n": n} for n, key in enumerate(keys)])
        split(full, three)
        shards, options = cluster(three, 3), {"score": "dot", "top": 62, "where": where}
        actual, want = (x.ask(np.ones(1, "f4"), **options) for x in (shards, D))
        score = [-float(keys[row.index, 0]) for row in actual.rows]
        order = [row.index for row in actual.rows]
        assert order == [at for _, at in sorted(zip(score, order, strict=True))]
        assert order == [row.index for row in want.rows]
        weights = [row.weight for row in actual.rows]
        assert weights == sorted(weights, reverse=True)
        assert [actual.weights[at] for at in order] == weights


def test_approximate_is_checked(tmp_path: Path) -> None:
    """Without an index, a cluster reads all rows; it takes no other numbers than a database."""
    path = tmp_path / "s.qkv"
    with qkv.open(path, create=True) as made:
        made.add(np.eye(4), np.arange(4.0))
    D = cluster([str(path)], 1)
    exact = D.attend(np.eye(4), score="cosine")
    assert np.array_equal(D.attend(np.eye(4), score="cosine", approximate=True), exact)
    with pytest.raises(qkv.errors.ArgumentError, match="between 0 and 1"):
        D.attend(np.eye(4), score="cosine", approximate=2)


@pytest.mark.parametrize(
    ("score", "weighting"),
    [
        (scores.Gaussian(1e-25), weighting)
        for weighting in ("softmax", "hard", "sparsemax", weightings.TopK(3))
    ]
    + [(None, weightings.Softmax(1e-39))],
)
def test_scores_that_float32_does_not_hold(store: str, score: Any, weighting: Any) -> None:
    with qkv.open(store) as D, cluster([store], 2) as c:
        one, other = (x.ask(np.full(4, 0.1), score=score, weighting=weighting) for x in (D, c))
        np.testing.assert_allclose(other.value, one.value, rtol=1e-6)
        assert other.entropy == one.entropy == 0 and other.rows[0].index == one.rows[0].index
        made = c.attend(np.full(4, 0.1, "f4"), score=score, weighting=weighting)
        np.testing.assert_allclose(
            made, c.ask(np.full(4, 0.1, "f4"), score=score, weighting=weighting).value, rtol=1e-6
        )


def test_a_bound_counts_how_scores_are_rounded(tmp_path: Path) -> None:
    place = str(tmp_path / "far.qkv")
    with qkv.open(place) as D:
        D.add(np.full((8, 2), 1000.3, "f4"), np.arange(8.0))
    with cluster([place], 2, partial=True) as c:
        c._shard_set.workers.lost = {1}  # type: ignore[attr-defined]
        for query in np.linspace(1500, 2500, 12):
            for options in (
                {"score": "gaussian"},
                {"score": "dot"},
                {"score": scores.Laplace(0.01)},
                {"score": "dot", "weighting": weightings.Softmax(1e-39)},
            ):
                assert c.ask(np.full(2, query), **options).error_bound >= 0.5  # half of equal rows


def test_shards_are_weighed_by_all_digits(tmp_path: Path) -> None:
    """Where scores are so large that float32 holds no more than quarters of one."""
    rng, place = np.random.default_rng(0), str(tmp_path / "far.qkv")
    key = (1000 + rng.integers(0, 8, size=(60, 1)) / 4).astype("f4")  # whose squares float32 holds
    with qkv.open(place, create=True) as D, cluster([place], 3) as c:
        D.add(key, np.arange(60.0))
        c._shard_set.refresh_versions()
        for options in (
            {"score": "dot", "weighting": weightings.Softmax(512.0)},
            {"score": "gaussian"},
        ):
            one, other = (x.ask(np.array([2048.0]), **options) for x in (D, c))
            np.testing.assert_allclose(other.weights, one.weights, atol=1e-6)
            assert abs(one.lse) > 4000


@settings(max_examples=25, **QUIET)
@given(cases(), st.data())
def test_a_partial_answer_is_within_its_bound(
    tmp_path: Path, case: dict[str, Any], data: st.DataObject
) -> None:
    score, weighting = case["pair"]
    if not weightings.resolve(weighting).is_convex:
        weighting = "softmax"
    D, places = build_shards(tmp_path, case)
    with D, cluster(places, case["shards"], partial=True) as c:
        held = sorted({shard for shard, _ in c._view.snapshot.slices})
        lost = data.draw(st.sets(st.sampled_from(held), min_size=1))
        c._shard_set.workers.lost = lost
        options = {"score": score, "weighting": weighting}
        if lost == set(held):
            with pytest.raises(LostShardError):
                c.ask(case["query"], **options)
            return
        for one, other in zip(
            D.ask(case["query"], **options), c.ask(case["query"], **options), strict=True
        ):
            wrong = 0.5 * np.abs(one.weights - other.weights).sum()
            assert wrong <= other.error_bound + 1e-7
            assert other.error_bound <= 1
            assert "lost" in other.engine


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("store") / "numbers.qkv")
    rng = np.random.default_rng(0)
    with qkv.open(path) as D:
        D.add(rng.normal(size=(50, 4)).astype("f4"), rng.normal(size=(50, 2)).astype("f4"))
    return path


def test_the_bound_is_not_all_or_nothing(store: str) -> None:
    with cluster([store], 5, partial=True) as c:
        c._shard_set.workers.lost = {3}
        soft = c.ask(np.zeros(4), score="dot")
        assert soft.error_bound == pytest.approx(0.2, rel=1e-3)  # ten of fifty equal rows
        assert "10 rows are left out" in soft.explain()
        far = c.ask(np.full(4, 1e3), score="gaussian", weighting="hard")
        assert far.error_bound in (0, 1)


def test_a_lost_shard_is_an_error_unless_partial_answers_were_asked_for(store: str) -> None:
    with cluster([store], 2) as c:
        c._shard_set.workers.lost = {1}
        with pytest.raises(LostShardError, match="shard 1 is lost"):
            c.ask(np.zeros(4))
        with pytest.raises(LostShardError):
            c.attend(np.zeros(4))


def test_rows_at_some_places_are_those(store: str) -> None:
    with cluster([store], shards=3) as D:
        many = D._nonempty_view().snapshot
        every = dict(many.iterate_rows())
        for places in ([], [0], [4, 1, len(D) - 1]):
            assert [*many.iterate_rows(np.array(places))] == [
                (at, every[at]) for at in sorted(places)
            ]


def test_sums_repeat_to_the_bit(store: str) -> None:
    query = np.random.default_rng(1).normal(size=(3, 4)).astype("f4")
    outs = []
    for dies in (lambda: False, lambda: True):
        with cluster([store], 3, dies=dies) as c:
            outs.append((c.attend(query), np.stack([answer.value for answer in c.ask(query)])))
    for one, other in zip(*outs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("weighting", ["softmax", weightings.Entmax(1.5), weightings.TopK(3)])
def test_gradients_reach_query_and_score(store: str, weighting: Any) -> None:
    rng = np.random.default_rng(2)

    def slopes(D: Any) -> list[torch.Tensor]:
        query, w = (
            torch.tensor(np.random.default_rng(i).normal(size=s), requires_grad=True)
            for i, s in enumerate([(3, 4), (4, 4)])
        )
        out = D.attend(query, score=scores.Multiplicative(w), weighting=weighting)
        (out * torch.tensor(along)).sum().backward()
        return [query.grad, w.grad]

    along = rng.normal(size=(3, 2))
    with qkv.open(store) as D, cluster([store], 3, dies=lambda: True) as c:
        for one, other in zip(slopes(D), slopes(c), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


def test_many_queries_are_asked_in_turns(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv.partial_attention, "MAX_QUERIES_PER_BATCH", 2)
    query = np.random.default_rng(3).normal(size=(5, 4))
    warm = weightings.Softmax(np.array([[0.5], [1.0], [2.0], [3.0], [4.0]]))
    with qkv.open(store) as D, cluster([store], 2) as c:
        np.testing.assert_allclose(
            c.attend(query, weighting=warm), D.attend(query, weighting=warm), rtol=1e-6
        )


def test_it_is_a_database(tmp_path: Path) -> None:
    path = str(tmp_path / "names.qkv")
    with qkv.open(path, key="name", value="major") as D:
        D.extend({"name": f"name {i}", "major": f"m{i % 3}", "year": i} for i in range(9))
        with cluster([path], 4) as c:
            assert c["name 7"] == "m1" and "nobody" not in c and len(c) == 9
            assert list(c) == list(D) and list(c.rows(where="year > 5")) == list(
                D.rows(where="year > 5")
            )
            assert c.describe() == D.describe() and c.count("year > 5") == 3
            with pytest.raises(KeyError, match="the nearest are"):
                c["name 77"]
            answer, want = c.ask("name 3"), D.ask("name 3")
            assert answer.value == want.value
            for row, other in zip(answer.rows, want.rows, strict=True):
                assert (row.index, row.record) == (other.index, other.record)
                assert row.weight == pytest.approx(other.weight, rel=1e-5)
            assert [share.value for share in answer.values] == [s.value for s in want.values]
            assert [row.key for row in answer.above(0.05)] == [row.key for row in want.above(0.05)]
            source = answer._collect_source(5)
            assert source is not None and [row.index for row in source.rows] == [
                row.index
                for row in want._collect_source(5).rows  # type: ignore[union-attr]
            ]
            np.testing.assert_array_equal(source.keys, want._collect_source(5).keys)  # type: ignore[union-attr]
            less, least = answer.without(3), want.without(3)
            assert (less.value, less.rows[0].key) == (least.value, least.rows[0].key)
            assert c.at(1).ask("name 3").value == want.value
            assert [v.rows for v in c.versions()] == [v.rows for v in D.versions()]
            with pytest.raises(CombinationError, match="read-only"):
                c.at(1).add("x", "y")


def test_it_is_shown_as_a_database_is(tmp_path: Path) -> None:
    path = str(tmp_path / "names.qkv")
    with qkv.open(path) as D:
        D.add([f"name {i}" for i in range(5)], [f"m{i}" for i in range(5)])
        with cluster([path], 2) as c:
            (ours,), (full,) = (build_views(x) for x in (c, D))
            assert ours["title"] == full["title"] == "names"
            assert ours["data"]["rows"] == full["data"]["rows"]
            weights = [view["data"]["answer"]["weights"] for view in (ours, full)]
            np.testing.assert_allclose(*weights, atol=1e-6)
            assert c.to_html().startswith("<!doctype html>")
            assert list(c.swap().items()) == list(D.swap().items())


def test_a_key_that_is_met_answers_though_others_are_out_of_reach(tmp_path: Path) -> None:
    with qkv.open(tmp_path / "far.qkv") as D:
        D.add([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0])
    with cluster([str(tmp_path / "far.qkv")], 4) as c:
        assert c.ask(3.0, score=scores.Gaussian(1e-160)).value == 30.0


@pytest.mark.parametrize("lost", [False, True])
def test_what_may_be_compared_is_the_same_for_all_shards(tmp_path: Path, lost: bool) -> None:
    # One shard has the texts of a column, another its numbers.
    cells = ["a", "b", "a", None, 1, 2, 1, None]
    rows = [{"key": float(i), "value": 1.0, "x": cell} for i, cell in enumerate(cells)]
    with qkv.open(tmp_path / "mixed.qkv") as D:
        D.extend(rows)
        with cluster([str(tmp_path / "mixed.qkv")], 4, partial=lost) as c:
            for where in ("x == 1", "x != 'a'", {"x": "b"}, "not x == 2"):
                assert list(c.rows(where=where)) == list(D.rows(where=where))
                assert c.count(where) == D.count(where)
                near = pytest.approx(D.ask(2.0, where=where).weights)
                assert list(c.ask(2.0, where=where).weights) == near
            assert c.describe() == D.describe()
            assert (
                c._is_integer_column("value")
                and c._is_integer_column("key")
                and not c._is_integer_column("key", 2)
            )
            none = D.ask(2.0, where={"x": "z"})
            assert none.hint.startswith("No rows match where={'x': 'z'}; column 'x' has the values")
            assert c.ask(2.0, where={"x": "z"}).hint == none.hint
            for tolerance in (None, 0.1):
                with pytest.warns(NoRowsMatchWarning, match="No rows match"):
                    assert not c.attend([2.0], where={"x": "z"}, tolerance=tolerance).any()
            for where in ("x < 1", "key == 'a'"):
                with pytest.raises(DtypeError, match="text cannot be compared with numbers"):
                    c.ask(2.0, where=where)
            if lost:
                c._shard_set.workers.lost = {3}  # type: ignore[attr-defined]
                assert c.ask(2.0, where="x == 'a'").value == 1.0


@pytest.mark.parametrize("stores", [1, 2])
def test_rows_are_added_once_and_durably(tmp_path: Path, stores: int) -> None:
    full, rng = str(tmp_path / "all.qkv"), np.random.default_rng(0)
    with qkv.open(full) as D:
        D.add([f"key {i}" for i in range(8)], [float(i) for i in range(8)])
    places = [full]
    if stores == 2:
        places = [str(tmp_path / f"{i}.qkv") for i in range(2)]
        split(full, places)
    with cluster(places, 2, dies=lambda: rng.random() < 0.2) as c:
        c.add("key 8", 8.0)
        c.add(["key 9", "key 10"], [9.0, 10.0])
        c.add({"key 11": 11.0})
        with pytest.raises(ShapeError, match="there are 2 keys but 1 values"):
            c.add(["key 12", "key 13"], [12.0])
        with pytest.raises(DtypeError, match="data must be a mapping or pairs"):
            c.add("key 12")
        c.extend([{"key": "key 12", "value": 12.0}])
        assert c.update("key 3", 33.0) == 0 and c.update({"key 13": 13.0}) == 1
        assert c.update([("key 0", 1.0), ("key 0", 5.0), ("new", 1.0), ("new", 2.0)]) == 1
        assert c["key 0"] == 5.0 and c.get_all("new") == [2.0]
        assert c.remove(["new", "new"]) == 1
        assert c.remove("key 0") == 1
        assert len(c) == 13 and c["key 9"] == 9.0 and c["key 3"] == 33.0
        with pytest.raises(KeyError):
            c.remove("key 0")
    result = {key: value for place in places for key, value in qkv.open(place).items()}
    assert result == {f"key {i}": float(i) for i in range(1, 14)} | {"key 3": 33.0}


@pytest.mark.parametrize("stores", [1, 2])
def test_a_vector_is_one_key_and_rows_of_them_are_several(tmp_path: Path, stores: int) -> None:
    keys = np.arange(12.0).reshape(6, 2)
    with qkv.open(tmp_path / "all.qkv") as D:
        D.add(keys, np.arange(6.0))
    places = [str(tmp_path / f"{i}.qkv") for i in range(stores)]
    split(tmp_path / "all.qkv", places)
    with cluster(places, 2) as c:
        assert c.update(keys[1], 10.0) == 0 and c.update(np.array([9.0, 9.0]), 9.0) == 1
        assert (c[keys[1]], c[np.array([9.0, 9.0])]) == (10.0, 9.0)
        assert c.remove(keys[2]) == 1 and c.remove(keys[3:5]) == 2
        assert len(c) == 4 and keys[4] not in c


class Dying:
    """A shard that ends once it has written, before it says so."""

    def __init__(self, workers: Any):
        self.workers, self.left = workers, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.workers, name)

    def call_once(self, request: Any) -> Any:
        self.workers.call_once(request)
        self.left -= 1
        if self.left >= 0:
            raise LostShardError("it ended", 0)


def test_keys_that_are_rounded_are_found_in_what_was_split(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).normal(size=(6, 32)).astype("f4")
    with qkv.open(tmp_path / "all.qkv", precision="int8") as D:
        D.add(keys, list("abcdef"))
    places = [str(tmp_path / f"{i}.qkv") for i in range(2)]
    split(tmp_path / "all.qkv", places)
    with cluster(places, 2) as c:
        assert [c[key] for key in keys] == list("abcdef")
        assert c.remove([keys[0]]) == 1 and c.get(keys[0]) is None


def test_a_change_whose_answer_was_lost_is_not_made_again(store: str, tmp_path: Path) -> None:
    path = str(tmp_path / "new.qkv")
    split(store, [path])
    with cluster([path], 2) as c:
        c._shard_set.workers = Dying(c._shard_set.workers)
        c.add(np.zeros((1, 4), "f4"), np.zeros((1, 2), "f4"))
        assert len(c) == 51


def test_a_change_of_another_thread_is_not_taken_for_that_which_was_lost(
    store: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "new.qkv")
    split(store, [path])
    rows = [(np.full((1, 4), i, "f4"), np.zeros((1, 2), "f4")) for i in range(2)]
    with cluster([path], 1) as c:
        workers, other = c._shard_set.workers, threading.Thread(target=lambda: c.add(*rows[1]))

        def call_once(request: Any) -> Any:
            if other.ident is None:  # the shard ends before it does anything, while another adds
                other.start()
                other.join(0.3)
                raise LostShardError("it ended", 0)
            return workers.call_once(request)

        c._shard_set.workers = SimpleNamespace(
            call_each=workers.call_each, call_once=call_once, close=workers.close
        )
        c.add(*rows[0])
        other.join()
        assert len(c) == 52


def test_stores_of_different_databases_are_refused(store: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.qkv")
    with qkv.open(other) as D:
        D.add(["a", "b"], ["c", "d"])
    with pytest.raises(CombinationError, match="different settings of the schema"):
        cluster([store, other], 2).ask(np.zeros(4))


def test_split_refuses(store: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="exists already"):
        split(store, [store])
    with pytest.raises(ArgumentError, match="cannot be split into"):
        split(store, [tmp_path / str(i) for i in range(51)])


def test_what_a_bucket_names_stays_in_the_cache(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of object storage are any text: those that are no file of a store are not copied."""
    fsspec = pytest.importorskip("fsspec")
    local = fsspec.filesystem("file")
    result = local.find(store, detail=True)
    for name in ("../../escaped", "../escaped", "deep/lock", "evil.py"):
        result[f"{store}/{name}"] = {"size": 1}
    monkeypatch.setattr(type(local), "find", lambda self, root, detail: result)

    def get(self: Any, source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes() if Path(source).exists() else b"x")

    monkeypatch.setattr(type(local), "get_file", get)
    place = tmp_path / "a" / "cache"
    copy = stores.fetch_local_copy(f"file://{store}", str(place))
    names = {file.name for file in copy.iterdir()}
    assert "catalogue.sqlite" in names and not names & {"deep", "evil.py"}
    assert not list(tmp_path.rglob("*escaped*"))


def test_a_store_by_its_url(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    query = np.zeros(4)
    with qkv.open(store) as D, cluster([f"file://{store}"], 2) as c:
        np.testing.assert_allclose(c.ask(query).value, D.ask(query).value, rtol=1e-6)
        with pytest.raises(CombinationError, match="is read-only"):
            c.add(query, np.zeros(2))
    assert len(list((tmp_path / "qkv").iterdir())) == 1  # one copy for both
    for url, message in (("file:///nowhere.qkv", "there is no store"), ("no://x", "Protocol")):
        with pytest.raises(qkv.QkvError, match=message):
            cluster([url], 1)


def test_a_shard_that_begins_again_where_the_url_has_newer_rows(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("qkv.cluster.shard_set.VERSION_MAX_AGE_SECONDS", 0)
    place = str(tmp_path / "grows.qkv")
    split(store, [place])
    memory.put(place, "/shards/grows.qkv", recursive=True)
    with cluster(["memory://shards/grows.qkv"], 2) as c:
        assert len(c) == 50
        with qkv.open(place) as D:
            D.add(np.ones((7, 4), "f4"), np.zeros((7, 2), "f4"))
            for file in Path(place).iterdir():
                memory.put_file(str(file), f"/shards/grows.qkv/{file.name}")
            again = c._shard_set.workers
            again.shards[1] = type(again.shards[1])(again.sources[1], None, 1)  # type: ignore[attr-defined]
            assert len(c) == 57
            np.testing.assert_allclose(
                c.ask(np.ones(4)).value, D.ask(np.ones(4)).value, rtol=1e-5, atol=1e-6
            )


@settings(max_examples=8, **QUIET)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.sampled_from([0.2, 0.01]),
    st.booleans(),
    st.sampled_from([("dot", 1.0), ("gaussian", 0.05), ("cosine", 0.02)]),
)
def test_bounds_of_shards_merge(
    tmp_path: Path, seed: int, shards: int, tolerance: float, where: bool, by: tuple[str, float]
) -> None:
    """With a tolerance each shard reads its codes; a shard that forgets reads them again."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(400, 32)).astype(np.float32)
    place = str(tmp_path / f"{next(NUMBERS)}.qkv")
    query = key[:2] * rng.uniform(0.2, 1.5)
    dies = lambda: rng.random() < 0.2  # noqa: E731
    options: dict[str, Any] = {"score": by[0], "weighting": weightings.Softmax(by[1]), "top": 4}
    options["where"] = "n < 150" if where else None
    with qkv.open(place, key="k", value="v") as D:
        D.extend([{"k": k, "v": k[:2], "n": i} for i, k in enumerate(key)])
        with cluster([place], shards, dies=dies) as c:
            near = c.ask(query, tolerance=tolerance, **options)
            for result, true in zip(near, D.ask(query.astype(float), **options), strict=True):
                error = 0.5 * np.abs(result.weights - true.weights).sum()
                assert error <= result.error_bound + 1e-6 and result.error_bound <= tolerance
                assert "codes of" in result.engine and result.rows_read <= 400
                assert abs(result.lse - true.lse) < 2 * tolerance + 1e-5 * abs(true.lse) + 1e-5
                np.testing.assert_allclose(result.value, result.weights @ key[:, :2], atol=1e-5)
                assert true.weights[result.rows[0].index] >= true.rows[0].weight - 2 * tolerance


def test_bounds_of_shards_count_from_one_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that shards read in full weigh against the codes of other shards' rows, also where a
    query's scores have a part in common."""
    rng = np.random.default_rng(4)
    key = rng.normal(size=(3000, 48)).astype(np.float32)
    place, query = str(tmp_path / "d.qkv"), key[:4] * 0.7
    options: dict[str, Any] = {"score": scores.Gaussian(3.0), "weighting": weightings.Softmax(0.3)}
    true = options["score"](query.astype(float), key.astype(float)) / 0.3
    lse = np.logaddexp.reduce(true, axis=1)
    with qkv.open(place) as D:
        D.add(key, np.arange(3000.0))
        out = D.attend(query, **options)
    with cluster([place], 3) as c:
        near = c.ask(query, tolerance=0.01, **options)
        rough = c.ask(query[0], score="laplace", tolerance=0.01)
        assert rough.error_bound == 0 and "Laplace is not linear in the key" in rough.engine
        monkeypatch.setattr("qkv.cluster.query.MAX_SCORES_PER_BATCH", 3 * 3000)  # 3 queries, then 1
        output = c.attend(torch.from_numpy(query), tolerance=0.01, **options)
        np.testing.assert_allclose(output[:, 0], [x.value for x in near], rtol=1e-3)
        assert (np.abs(output.numpy() - out) <= 0.02 * 3000).all() and not torch.equal(
            output, c.attend(torch.from_numpy(query), **options)
        )
    for result, s, full in zip(near, true, lse, strict=True):
        assert 0.5 * np.abs(result.weights - np.exp(s - full)).sum() <= result.error_bound <= 0.01
        assert "codes of" in result.engine and 0 < result.rows_read < 3000
        assert abs(result.lse - full) < 0.02


def test_a_partial_answer_in_8_bits_counts_what_codes_lost(tmp_path: Path) -> None:
    """The rows of the lost shard have almost no weight."""
    rng = np.random.default_rng(5)
    key = rng.normal(size=(300, 48)).astype(np.float32)
    key[200:] *= 0.01
    place = str(tmp_path / "d.qkv")
    with qkv.open(place, precision="int8") as D:
        D.add(key, key[:, :2])
    off = []
    with cluster([place], 3, partial=True) as c:
        c._shard_set.workers.lost = {2}
        for query in rng.normal(size=(20, 48)).astype(np.float32):
            result = c.ask(query, score="dot", tolerance=0.9)
            s = key.astype(float) @ query
            alpha = np.exp(s - s.max())
            off.append(0.5 * np.abs(result.weights - alpha / alpha.sum()).sum())
            assert off[-1] <= result.error_bound < 0.9
            assert c.ask(query, score="dot").error_bound < result.error_bound  # as its codes say
    assert max(off) > 1e-4


def test_shards_in_8_bits_prove_softmax_alone(tmp_path: Path) -> None:
    key = np.random.default_rng(4).normal(size=(300, 48)).astype(np.float32)
    place = str(tmp_path / "d.qkv")
    with qkv.open(place, precision="int8") as D:
        D.add(key, key[:, :2])
    with cluster([place], 2) as c:
        assert 0 < c.ask(key[0], tolerance=0.5).error_bound <= 0.5
        for method in (c.ask, c.attend):
            with pytest.raises(
                CombinationError, match=r"8-bit vectors supports it only for softmax"
            ):
                method(key[0], tolerance=0.5, weighting="hard")
        assert c.ask(key[0], weighting="hard").error_bound == 0  # as its codes say


def test_arrays_are_keys_of_several_numbers(tmp_path: Path) -> None:
    """As those of a database: a tensor has its gradient through the encoder."""
    path = str(tmp_path / "pairs.qkv")
    rng = np.random.default_rng(0)
    keys, values = rng.normal(100, 20, (40, 2)), rng.normal(size=40)
    with qkv.open(path) as D:
        D.add([(tuple(k), v) for k, v in zip(keys.tolist(), values.tolist(), strict=True)])
        with cluster([path], 3) as c:
            for query in (keys[3], torch.tensor(keys[3]), keys[3].tolist(), tuple(keys[3])):
                assert c.ask(query).value == pytest.approx(D.ask(tuple(keys[3])).value, rel=1e-5)
                assert c[query] == values[3]
                np.testing.assert_allclose(c.attend(query), D.attend(query), rtol=1e-5)
            query_tensor = torch.tensor(keys[:2], requires_grad=True)
            grads = [
                torch.autograd.grad(x.attend(query_tensor).sum(), query_tensor)[0] for x in (c, D)
            ]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)
            assert grads[0].abs().min() > 0


@pytest.mark.parametrize("parts", [1, 2])
def test_a_cluster_uses_the_calibration_of_its_store(tmp_path: Path, parts: int) -> None:
    names = [f"name{i:03d}x{i * 7919 % 1000}" for i in range(200)]
    places = [str(tmp_path / "all.qkv")]
    with qkv.open(places[0]) as D:
        D.add(["gone", *names], list(range(201)))
        D.remove("gone")
        D.calibrate([(name[1:], name) for name in names[:100]], coverage=0.9)
        expected = [[row.key for row in D.ask(name[1:]).prediction_set] for name in names[:9]]
    if parts > 1:
        split(places[0], targets := [tmp_path / f"{i}.qkv" for i in range(parts)])
        places = [str(target) for target in targets]
    with cluster(places, shards=2) as c:
        actual = [[row.key for row in c.ask(name[1:]).prediction_set] for name in names[:9]]
        assert actual == expected and any(expected)
        with pytest.raises(CombinationError, match=r"qkv.open\(path\).calibrate\(pairs\)"):
            c.calibrate([("a", names[0])])
        c.add([f"new{i}" for i in range(50)], list(range(50)))
        with pytest.raises(CombinationError, match="50 rows were added or removed"):
            _ = c.ask(names[0][1:]).prediction_set
