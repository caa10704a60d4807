"""The default for text gives weights that a person can read."""

import csv
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.database.encoders import Characters, Lexical, Text, Words, load, text
from qkv.database.encoders.base import sharpness_for_rows
from qkv.errors import ArgumentError
from qkv.scores import ScaledDot
from tests.database.encoders.test_lexical import LATER, house_texts

pytest.importorskip("tokenizers")
pytest.importorskip("wordllama")

BOOKS = Path(__file__).parents[3] / "examples" / "data" / "books.csv"


@pytest.fixture(scope="module")
def books() -> list[dict[str, str]]:
    with BOOKS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ask(queries: list[str], keys: list[str]) -> np.ndarray:
    encoder = Text().fit(keys)
    return qkv.weights(*encoder.encode_pair(queries, keys), score=encoder.default_score(len(keys)))


def effective_rows(alpha: np.ndarray) -> np.ndarray:
    return np.exp(-(alpha * np.log(np.maximum(alpha, 1e-30))).sum(axis=-1))


def misspell(title: str, some: random.Random) -> list[str]:
    """A letter dropped, doubled, replaced, and two swapped, all in lower case."""
    title = title.lower()
    letters = [i for i, letter in enumerate(title) if letter.isalnum()]
    a, b, c = (some.choice(letters) for _ in range(3))
    swap = some.choice(letters[:-1])
    return [
        title[:a] + title[a + 1 :],
        title[:b] + title[b] + title[b:],
        title[:c] + some.choice("abcdefghijklmnopqrstuvwxyz") + title[c + 1 :],
        title[:swap] + title[swap + 1] + title[swap] + title[swap + 2 :],
    ]


def test_a_title_typed_right_takes_more_than_half(books: list[dict[str, str]]) -> None:
    titles = [book["title"] for book in books]
    for typed in (titles, [title.lower() for title in titles], [t.upper() for t in titles]):
        assert np.diag(ask(typed, titles)).min() > 0.5


def test_a_title_with_one_slip_takes_more_than_half(books: list[dict[str, str]]) -> None:
    titles, some = [book["title"] for book in books], random.Random(11)
    pairs = [(i, slip) for i, title in enumerate(titles) for slip in misspell(title, some)]
    right, queries = zip(*pairs, strict=True)
    weight = ask(list(queries), titles)[range(len(right)), right]
    assert (weight > 0.5).mean() > 0.98


def test_the_alchemist(books: list[dict[str, str]]) -> None:
    titles = [book["title"] for book in books]
    (alpha,) = ask(["the alchmist"], titles)
    assert titles[int(alpha.argmax())] == "The Alchemist"
    assert alpha.max() > 0.9


def test_a_vague_query_spreads(books: list[dict[str, str]]) -> None:
    vague = ["a book about love", "a novel about a family", "something sad", "an old story"]
    for column in ("title", "summary"):
        assert effective_rows(ask(vague, [book[column] for book in books])).min() > 10


PARAPHRASES = {
    "a man turns into an insect": "The Metamorphosis",
    "dinosaurs brought back to life in a theme park": "Jurassic Park",
    "children walk through a closet into a snowy magical kingdom": (
        "The Lion, the Witch and the Wardrobe"
    ),
    "teenagers forced to fight to the death on television": "The Hunger Games",
    "a spider saves a pig": "Charlotte's Web",
    "the discovery of the structure of DNA": "The Double Helix",
    "surviving the holocaust told as a comic with mice and cats": "Maus",
    "a portrait ages instead of the man": "The Picture of Dorian Gray",
    "evolution by natural selection": "On the Origin of Species",
    "living alone in a cabin in the woods": "Walden",
    "monks murdered in a monastery with a secret library": "The Name of the Rose",
    "the satan visits moscow with a black cat": "The Master and Margarita",
    "an unfaithful wife throws herself under a train": "Anna Karenina",
    "how our brain makes fast and slow decisions": "Thinking, Fast and Slow",
    "hobbits carry a magic ring to destroy it": "The Fellowship of the Ring",
    "young lovers from enemy families": "Romeo and Juliet",
    # These two it does not find: they share no word with the summary, and none near enough.
    "big brother watches everyone in a totalitarian state": "Nineteen Eighty-Four",
    "a robot companion for an ill child": "Klara and the Sun",
}


def test_a_paraphrase_lands_in_the_top_three(books: list[dict[str, str]]) -> None:
    titles = [book["title"] for book in books]
    alpha = ask(list(PARAPHRASES), [book["summary"] for book in books])
    right = [titles.index(title) for title in PARAPHRASES.values()]
    place = (alpha > alpha[range(len(right)), right][:, None]).sum(axis=1)
    assert (place < 3).sum() >= 15


def test_lee_is_mostly_li() -> None:
    names = ["Zhang", "Lipton", "Li", "Smola", "Hu", "Werness"]
    lee, li, strange = ask(["Lee", "li", "Okonkwo"], names)
    assert lee[2] > 0.5
    assert li[2] > 0.9
    assert strange.max() < 0.6


@pytest.mark.parametrize("rows", [1, 2, 30, 20_000])
def test_it_holds_for_few_rows_and_for_many(rows: int, books: list[dict[str, str]]) -> None:
    rng = random.Random(5)
    words = sorted({word for book in books for word in book["summary"].split()})
    others = {" ".join(rng.choices(words, k=rng.randint(2, 5))) for _ in range(rows)}
    keys = ["One Hundred Years of Solitude", *sorted(others)][:rows]
    right, slip, vague = ask(
        ["one hundred years of solitude", "one hundred yaers of solitude", "something sad"],
        keys,
    )
    assert right[0] > 0.5
    assert slip[0] > 0.5
    assert effective_rows(vague) > min(rows / 2, 10)


def test_letters_count_in_short_texts_and_words_in_long_ones() -> None:
    shares = Text(half=10, rare=0.8).head_shares(["", "x" * 10, "x" * 90])
    np.testing.assert_allclose(shares, [[1, 0, 0.8], [0.5, 0.5, 0.8], [0.1, 0.9, 0.8]])


def test_it_is_as_wide_as_its_heads() -> None:
    assert Text().width == 512
    vectors = Text().encode(["The Alchemist", "a longer text about a shepherd and his treasure"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_few_keys_are_not_fitted_to() -> None:
    keys = [f"key {i}" for i in range(63)]
    assert Text().fit(keys) == Text()
    before, after = (made.encode_sparse(keys) for made in (Text(), Text().fit([*keys, "one more"])))
    # Two places of each are those of the whole text; a word and its beginning have one each.
    assert before is not None and len(before.flat) == 2 * len(keys)
    assert after is not None and len(after.flat) == 6 * len(keys)


def test_the_temperature_is_fitted_and_kept(books: list[dict[str, str]]) -> None:
    summaries = [book["summary"] for book in books]
    made = Text(mix=False).fit(summaries)
    assert made.sharp > 1 and made == Text(mix=False).fit(summaries)
    assert made.default_score(300) == ScaledDot(made.sharp * sharpness_for_rows(300))
    assert load(made.settings(), made.arrays()) == made
    assert Text(mix=False).fit(["same"] * 100).sharp > 0
    assert Text(sharp=2.0).fit(summaries).sharp == 2.0


def mixed_scores(queries: list[str], keys: list[str]) -> np.ndarray:
    """The score of the docstring of Text in float64, from the heads alone."""
    parts = {"readFile": "read File", "TreeNode": "Tree Node"}
    sample = [" ".join([key, *(parts[w] for w in key.split() if w in parts)]) for key in keys]
    words, beginnings = (Lexical(b=0.4, prefix=n).fit(sample) for n in (None, 5))
    letters = Characters(idf=True).fit(keys)
    letters = replace(letters, table=np.sqrt(letters.table))
    heads = [letters, Words(idf=True).fit(sample), words, beginnings]
    out = np.zeros((len(queries), len(keys)))
    for i, query in enumerate(queries):
        count, length = len(query.split()), math.log((len(query) + 1) / math.exp(4))
        m = len(keys)
        df = [sum(word in key.lower().split() for key in sample) for word in query.split()]
        idf = [math.log(1 + (m - f + 0.5) / (f + 0.5)) for f in df]
        share = sum(x for x, f in zip(idf, df, strict=True) if f) / sum(idf)
        relative = math.log((count + 1) / (words.mean + 1))
        relative = min(max(relative, -2), 2)
        known = 0.5 if all(df) else -0.5
        about = [1, share - 0.7, length, relative]
        about += [math.log(sum(idf) / count / math.log(1 + m) + 0.1) + 0.5]
        about += [known, known * relative, relative**2]
        weights = np.exp(text.MIX_COEFFICIENTS @ about) / text.MIX_SHARPNESS
        for head, weight, exponent in zip(heads, weights, text.MIX_LENGTH_EXPONENTS, strict=True):
            one, all_keys = head.encode_pair([query], keys if head is heads[0] else sample)
            long = np.array([(len(key) + 1) / math.exp(4) for key in keys]) ** exponent
            out[i] += weight * long * (all_keys.astype(float) @ one[0].astype(float))
        asked = {
            *" ".join([query, *(parts[w] for w in query.split() if w in parts)]).lower().split()
        }
        has_all = [
            known > 0 and len(asked) > 2 and asked <= {*key.lower().split()} for key in sample
        ]
        own = [{*key.lower().split()} for key in sample]
        entries = np.array([len(x) + len({word[:5] for word in x}) + 2 for x in own])
        out[i] += np.where(has_all, 0.2 * (1 + 4 * len(asked) / entries), 0)
    return out


def test_the_mix_is_the_weighted_sum_of_its_heads() -> None:
    rng = random.Random(3)
    names = ["readFile", "window", "classifier", "banana", "TreeNode", "of", "the", "grass"]
    keys = [" ".join(rng.choices(names, k=rng.randint(2, 9))) for _ in range(100)]
    queries = ["read the file", "class bananas", "tree node of the unheard", "window grass the"]
    encoder = Text().fit(keys)
    assert encoder.is_mixed and encoder.names == ("characters", "words", "lexical", "beginnings")
    query, key = encoder.encode_pair(queries, keys)
    np.testing.assert_allclose(query @ key.T, mixed_scores(queries, keys), atol=2e-3)
    restored = load(json.loads(json.dumps(encoder.settings())), encoder.arrays())
    assert restored == encoder
    np.testing.assert_array_equal(restored.encode_query(queries), encoder.encode_query(queries))


def test_a_row_with_every_word_is_above_one_that_lacks_some() -> None:
    """Half of a name in another order; among the rows that have all words, short ones are first."""
    kinds = ("Adapter", "Controller", "Bridge", "Hub", "Camera", "Modem", "Device")
    short = "Acme 7500 Scanner Pro"
    long = "Acme Corporation 7500 Scanner (Multi Function Pro Device)"
    near = "Scanners Acme 7510 Pros Scanning Acme"
    keys = [long, near, short, *(f"Vendor {i} {kind}" for i in range(12) for kind in kinds)]
    D = qkv.Database(keys, keys)
    for query in ("7500 Acme pro", "scanner acme pro", "Pro Scanner 7500"):
        answers = [D.ask(query, top=3), *D.ask([query, "Hub 7", "nothing of it"], top=3)[:1]]
        for answer in answers:
            assert [row.key for row in answer.rows[:2]] == [short, long], query
            assert answer.rows[0].weight == pytest.approx(answers[0].rows[0].weight, rel=1e-5)
    source = D.ask("7500 Acme pro", top=5)._collect_source(5)
    assert source is not None and source.query is not None
    s = source.score(source.query[None], source.keys)[0]
    shown = np.array([row.weight for row in source.rows])
    np.testing.assert_allclose(np.exp(s - s.max()), shown / shown.max(), rtol=1e-4)


def test_a_store_from_before_the_mix_has_the_same_vectors() -> None:
    keys = [f"the red house number {i} on oak street" for i in range(70)]
    old = Text(mix=False).fit(keys)
    settings = {name: x for name, x in old.settings().items() if name != "mix"}
    loaded = load(settings, old.arrays())
    assert loaded == old and not loaded.mix and len(loaded.heads) == 3
    assert not loaded.fit(keys).is_mixed
    # These fields belong to the score without the mix.
    assert not any(Text(**some).mix for some in ({"half": 10}, {"rare": 1}, {"flat": 0}))
    assert Text().mix and Text(exact=0).mix and Text(sharp=2).mix


def test_identifiers_count_as_their_words() -> None:
    keys = ["readCsvFile", "TreeNode", "openWindow", *(f"other name {i}" for i in range(70))]
    D = qkv.Database(keys, list(range(len(keys))))
    for query, right in (("read csv", 0), ("window to open", 2), ("node of a tree", 1)):
        assert D.ask(query).rows[0].index == right
    assert text.split_identifiers(["iPhone", 3, "GitHub of myOwn", "plain"]) == [
        *("iPhone i Phone", 3, "GitHub of myOwn Git Hub my Own", "plain")
    ]


def test_rows_that_came_later_are_found_by_new_words() -> None:
    D = qkv.Database(house_texts(), list(range(70)))
    well = "the low house number 7 on oak street, with a well"
    D.add([*LATER, well], [100, 101, 102, 103])
    pairs = [("single 3", "single 3"), ("3 single", "single 3"), ("pine", LATER[2])]
    for query, key in [*pairs, ("well", well), ("oak house, well", well)]:
        first = D.ask(query).rows[0]
        assert first.key == key and first.weight > 0.8, (query, first)


def decided(D: qkv.Database, query: str) -> None:
    answer = D.ask(query)
    own = [i for i, key in enumerate(D) if key == query]
    assert answer.exact and answer.to_dict()["exact"] and answer.weights[own].sum() > 0.999
    line = "The query equals a key, which decides the answer"
    assert f"\n  {line}\n" in str(answer) and f" {line}. " in answer.explain()


def test_an_exact_key_decides(books: list[dict[str, str]]) -> None:
    titles = [book["title"] for book in books]
    # A longer one that has all its words twice, and letters and meaning nearly alike.
    keys = [*titles, "Emma", "Emma Emma", "emma", "Emma.", "Emma!", "Emma's", "EMMA", "Emma"]
    value = np.arange(float(len(keys)))[:, None]
    D = qkv.Database(keys, value)
    for title in (*titles[::60], "Emma.", "EMMA"):
        decided(D, title)
        np.testing.assert_allclose(
            D.attend([title])[0],
            value[[i for i, k in enumerate(keys) if k == title]].mean(axis=0),
            atol=0.01,
        )
    two = [i for i, key in enumerate(keys) if key == "Emma"]
    assert len(two) == 2
    decided(D, "Emma")
    np.testing.assert_allclose(D.ask("Emma").weights[two], 0.5, atol=1e-3)
    assert not D.ask("emma ").exact and "decides" not in str(D.ask("Ema"))
    assert not D.ask("Emma", where=lambda row: row["key"] != "Emma").exact


def test_an_exact_key_decides_among_few() -> None:
    names = ["Zhang", "Lipton", "Li", "Lee", "Hu", "Werness"]
    decided(qkv.Database(names, names), "Li")
    assert not qkv.Database({1.0: 2.0, 3.0: 4.0}).ask(1.0).exact


def test_a_database_that_grows_is_fitted(tmp_path: Path) -> None:
    with qkv.open(tmp_path / "d.qkv") as D:
        D.add([f"the key number {i}" for i in range(40)], list(range(40)))
        assert D.encoder == Text()
        D.add([f"another key {i}" for i in range(40)], list(range(40)))
        fitted = D.encoder
    assert isinstance(fitted, Text) and fitted.heads[2].rows == 80
    with qkv.open(tmp_path / "d.qkv", create=False) as D:
        assert D.encoder == fitted and D.ask("anothr key 7").rows[0].key == "another key 7"


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ArgumentError, match="sharp"):
        Text(sharp=0)
    with pytest.raises(ArgumentError, match="half"):
        Text(half=0)
    with pytest.raises(ArgumentError, match="rare"):
        Text(rare=-1)
    with pytest.raises(ArgumentError, match="use Heads"):
        Text(weights=[1, 3, 1])
