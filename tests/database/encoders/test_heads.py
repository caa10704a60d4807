from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import qkv
from qkv.database.encoders import (
    Arrays,
    Characters,
    Columns,
    Encoder,
    Exact,
    Heads,
    Learned,
    Numbers,
)
from qkv.database.encoders.base import normalize_rows
from qkv.errors import ArgumentError, CombinationError, DtypeError, ShapeError
from qkv.scores import (
    Additive,
    Boxcar,
    Cosine,
    Dot,
    Gated,
    Gaussian,
    Laplace,
    Multiplicative,
    ScaledDot,
    Score,
)

BOOKS = [("Dracula", 1897), ("Frankenstein", 1818), ("Solaris", 1961), ("Dune", 1965)]


def test_one_product_is_the_weighted_sum_of_cosines() -> None:
    keys, queries = ["Li", "Lipton", "Zhang"], ["Lee", "Zang"]
    heads = Heads([Characters(), Exact(64)], weights=[3, 1])
    got = heads.encode_query(queries) @ heads.encode(keys).T
    want = sum(
        weight * (encoder.encode(queries) @ encoder.encode(keys).T)
        for weight, encoder in ((0.75, Characters()), (0.25, Exact(64)))
    )
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert heads.weights == (0.75, 0.25)


def test_vectors_of_any_length_count_by_their_direction() -> None:
    keys = np.array([[3.0, 4.0], [0.0, 100.0]])
    both = Heads([Arrays(), Arrays()]).fit(keys)
    got = both.encode_query(keys) @ both.encode(keys).T
    np.testing.assert_allclose(got, normalize_rows(keys) @ normalize_rows(keys).T, atol=1e-6)


def test_columns_of_text_and_numbers_add_up() -> None:
    columns = Columns({"title": Characters(), "year": Numbers()}, {"title": 3}).fit(BOOKS)
    queries = [("Dracla", 1900), ("dune", 1960)]
    got = columns.encode_query(queries) @ columns.encode(BOOKS).T
    titles, years = zip(*BOOKS, strict=True)
    numbers = Numbers().fit(years)
    text = Characters().encode([q[0] for q in queries]) @ Characters().encode(titles).T
    number = numbers.default_score(1)(
        numbers.encode([q[1] for q in queries]), numbers.encode(years)
    )
    np.testing.assert_allclose(got, 0.75 * text + 0.25 * number, atol=1e-5)


def test_none_leaves_the_weight_to_the_other_columns() -> None:
    columns = Columns({"title": Characters(), "year": Numbers()}).fit(BOOKS)
    keys = columns.encode(BOOKS)
    title = Characters().encode(["Dracla"]) @ Characters().encode([b[0] for b in BOOKS]).T
    for query in (("Dracla", None), {"title": "Dracla"}, "Dracla"):
        np.testing.assert_allclose(columns.encode_query([query]) @ keys.T, title, atol=1e-5)
    assert not columns.encode_query([(None, None)]).any()


def test_one_value_is_asked_of_every_column_that_reads_it() -> None:
    rows = [("Dune", "Frank Herbert", 1965), ("Emma", "Jane Austen", 1815)]
    columns = Columns([Characters(), Characters(), Numbers()]).fit(rows)
    result = columns.encode_query(["jane asten", "dune", 1964]) @ columns.encode(rows).T
    assert result.argmax(axis=1).tolist() == [1, 0, 0]
    # A name that fills one column matches as well as if it had been asked of that column alone.
    assert result[1, 0] == pytest.approx(1, abs=0.15)


def test_heads_nest() -> None:
    inner = Heads([Characters(), Exact()])
    outer = Columns({"title": inner, "year": Numbers()}).fit(BOOKS)
    result = outer.encode_query(BOOKS) @ outer.encode(BOOKS).T
    assert result.argmax(axis=1).tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(np.diag(result), 0.5, atol=1e-5)  # a cosine of 1, a distance of 0
    assert outer.width == 256 + 256 + 3


def test_arrays_keep_each_heads_own() -> None:
    heads = Heads([Characters(idf=True), Characters(32, idf=True)]).fit(["a", "b", "ab"])
    assert sorted(heads.arrays()) == ["0.table", "1.table"]


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: Heads([]), DtypeError, "heads must be a list"),
        (lambda: Heads("characters"), DtypeError, "heads must be a list"),
        (lambda: Heads(["charcters"]), ArgumentError, "did you mean"),
        (lambda: Heads(["exact"], weights=[1, 2]), ShapeError, "2 weights but 1 heads"),
        (lambda: Heads(["exact"], weights=[-1]), ArgumentError, "0 or more"),
        (lambda: Heads(["exact"], weights=[0]), ArgumentError, "not all 0"),
        (lambda: Heads({"a": "exact"}, {"b": 1}), ArgumentError, "weights has the names b"),
    ],
)
def test_bad_heads_are_refused(build: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build()


@pytest.mark.parametrize(
    ("query", "error", "says"),
    [
        (("Dune",), ShapeError, "key 0 must be a tuple of 2 columns"),
        ({"titel": "Dune"}, ArgumentError, "no column 'titel': columns are title, year"),
        (b"Dune", DtypeError, "no column can encode"),
        (("Dune", "old"), DtypeError, "must be a number, not 'old'"),
    ],
)
def test_bad_queries_are_refused(query: Any, error: type[Exception], says: str) -> None:
    columns = Columns({"title": Characters(), "year": Numbers()}).fit(BOOKS)
    with pytest.raises(error, match=says):
        columns.encode_query([query])


def test_a_missing_cell_is_refused_with_its_row() -> None:
    rows = [("Dune", 1965), ("Emma", None)]
    columns = Columns([Characters(), Numbers()])
    with pytest.raises(DtypeError, match="key 1 must be a number, not None"):
        columns.fit(rows)


@dataclass(frozen=True)
class Years(Encoder):
    """A person's own encoder: numbers as they are, compared by `custom_score`."""

    custom_score: Any = None
    kind: ClassVar[str] = "years"

    @property
    def width(self) -> int:
        return 2

    def encode(self, keys: Any) -> np.ndarray:
        return np.array([[key, 1.0] for key in keys], np.float32)

    def default_score(self, rows: int) -> Score:
        return self.custom_score or super().default_score(rows)

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def build(cls, settings: Any, arrays: Any) -> Encoder:
        return cls()


ADDITIVE = Additive(np.eye(2), np.eye(2), np.ones(2))
OWN = [
    None,
    Dot(),
    ScaledDot(),
    Cosine(0.5),
    Multiplicative(np.array([[1.0, 0.5], [0.0, -2.0]])),
    Gaussian(0.7),
    Gaussian(np.array([0.7, 2.0])),
]


@pytest.mark.parametrize("custom_score", OWN, ids=str)
@pytest.mark.parametrize("wrap", [lambda x: Heads([x, Exact()], [1, 0]), Learned.from_base])
def test_an_encoder_of_ones_own_ranks_as_it_does_alone(custom_score: Any, wrap: Any) -> None:
    keys, queries = [0.5, -1.0, 1.25, 3.0, 2.0], [1.2, -3.0, 2.4]
    alone = Years(custom_score)
    together = wrap(alone, 5) if wrap == Learned.from_base else wrap(alone)
    want = np.asarray(
        alone.default_score(5)(alone.encode_query(queries), alone.encode(keys)), float
    )
    got = together.encode_query(queries) @ together.encode(keys).T
    # The heads' common factor takes the place of a scale; the score of learning keeps it.
    ratio = (want - want.mean(axis=1, keepdims=True)) / (got - got.mean(axis=1, keepdims=True))
    assert (want.argsort(axis=1) == got.argsort(axis=1)).all()
    np.testing.assert_allclose(ratio, np.full_like(ratio, ratio[0, 0]), rtol=1e-3)
    if wrap == Learned.from_base:
        score = together.default_score(5)(together.encode_query(queries), together.encode(keys))
        np.testing.assert_allclose(score, want, rtol=1e-3, atol=1e-4)


def test_a_custom_score_counts_next_to_other_heads() -> None:
    keys = [("Li", 1.0), ("Li", 3.0), ("Smola", 2.9)]
    both = Columns([Characters(), Years(Gaussian())]).fit(keys)
    D = qkv.Database([*keys], [0, 1, 2], encoder=both)
    assert [D.ask(("Li", year)).rows[0].value for year in (1.1, 2.8)] == [0, 1]


@pytest.mark.parametrize(
    "score", [Laplace(), Boxcar(), ScaledDot(softcap=1.0), ADDITIVE, Gated(*np.eye(2))], ids=str
)
def test_a_score_that_is_no_product_is_refused_as_a_head(score: Any) -> None:
    with pytest.raises(CombinationError, match=r"Years.*not a dot product.*without other heads"):
        Heads([Years(score), Exact()]).encode([1.0, 2.0])
