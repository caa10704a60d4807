import random
import string
from itertools import pairwise

import numpy as np
import pytest

from qkv.database import Database
from qkv.database.encoders import Characters, characters
from qkv.errors import ArgumentError


def wrap(number: int) -> int:
    return number & 0xFFFFFFFF


def scramble(code: int) -> int:
    code = wrap((code ^ code >> 16) * 0x85EBCA6B)
    code = wrap((code ^ code >> 13) * 0xC2B2AE35)
    return code ^ code >> 16


def encode_by_definition(text: str, width: int, n: tuple[int, int], sounds: float) -> np.ndarray:
    """The definition, one n-gram at a time."""
    out = np.zeros(width)

    def count(words: list[str], seed: int, weight: float) -> None:
        grams = [f"{a[-1]} {b[0]}" for a, b in pairwise(words)] if n[0] <= 3 <= n[1] else []
        for word in words:
            padded = f" {word} "
            for size in range(n[0], n[1] + 1):
                grams += [padded[i : i + size] for i in range(len(padded) - size + 1)]
        for gram in grams:
            if gram.strip():
                code = seed
                for letter in gram:
                    code = wrap((code ^ ord(letter)) * 16777619)
                code = scramble(code)
                out[code * width >> 32] += weight * (1 if code & 1 else -1)

    words = text.lower().split()
    count(words, 2166136261, 1.0)
    heard = []
    for word in words:
        word = "".join("a" if letter in "aeiouy" else letter for letter in word)
        heard.append("".join(x for x, y in zip(word, " " + word, strict=False) if x != y))
    count(heard, 84696351, sounds)
    return out / (np.linalg.norm(out) or 1)


@pytest.mark.parametrize("n", [(1, 1), (1, 3), (2, 3), (3, 5)])
@pytest.mark.parametrize("sounds", [0.0, 0.5])
def test_it_is_its_definition(n: tuple[int, int], sounds: float) -> None:
    rng = random.Random(4)
    texts = ["the alchemist", "a", "", "aa b", "book keeper", "x" * 40]
    texts += ["".join(rng.choices("abcé ", k=rng.randrange(12))) for _ in range(40)]
    texts = [text.replace("é", "q") for text in texts]
    got = Characters(100, n, sounds).encode(texts)
    np.testing.assert_allclose(
        got, [encode_by_definition(t, 100, n, sounds) for t in texts], atol=1e-6
    )


def test_the_hash_never_changes() -> None:
    # Stored vectors would no longer match: a new hash needs a new kind of encoder.
    vector = Characters(16, (2, 2), 0).encode(["Li"])[0]
    want = np.zeros(16)
    want[[7, 10, 14]] = -1, 1, 1
    np.testing.assert_allclose(vector * np.sqrt(3), want, rtol=1e-6)


def similarity(a: str, b: str) -> float:
    first, second = Characters().encode([a, b])
    return float(first @ second)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("The Alchemist", "the ALCHEMIST"),
        ("Les Misérables", "les miserables"),
        ("Les Mise\u0301rables", "Les Misérables"),
        ("Gulliver's Travels", "gullivers travels"),
        ("Gulliver’s Travels", "Gulliver's Travels"),
        ("Catch-22", "catch 22"),
        ("Straße", "STRASSE"),
        ("ﬁne", "fine"),
        ("  spaced   out ", "spaced out"),
    ],
)
def test_case_accents_and_punctuation_do_not_count(a: str, b: str) -> None:
    assert similarity(a, b) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("a", "b"), [("C++", "C#"), ("かき", "かぎゃ"), ("죄와 벌", "벌과 죄수")])
def test_what_differs_stays_apart(a: str, b: str) -> None:
    assert similarity(a, b) < 0.95


@pytest.mark.parametrize(
    "slip", ["the alchmist", "teh alchemist", "the allchemist", "the alchemizt", "thealchemist"]
)
def test_a_slip_is_near(slip: str) -> None:
    assert similarity(slip, "The Alchemist") > 0.6
    assert similarity(slip, "The Stranger") < 0.45


def test_the_order_of_words_counts() -> None:
    assert 0.8 < similarity("man and woman", "woman and man") < 0.99


def test_lee_sounds_like_li() -> None:
    names = ["Zhang", "Lipton", "Li", "Smola", "Hu", "Werness"]
    result = Characters().encode(names) @ Characters().encode(["Lee"])[0]
    assert names[int(result.argmax())] == "Li"
    assert np.sort(result)[-1] > np.sort(result)[-2] + 0.15


def test_texts_may_hold_anything() -> None:
    odd = ["a\x1eb", "a b", "\x00", "\ud800", "new\nline", "new line", "\U0001f600", ""]
    vectors = Characters().encode(odd)
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[0], vectors[1])
    np.testing.assert_allclose(vectors[4], vectors[5])
    assert not vectors[-1].any()


def test_many_texts_are_as_one_by_one() -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices(string.ascii_letters + " é", k=9)) for _ in range(2500)]
    encoder = Characters(64)
    together = encoder.encode(texts)
    for i in (0, 1023, 1024, 2047, 2048, 2499):
        np.testing.assert_allclose(together[i], encoder.encode([texts[i]])[0], atol=1e-6)


def test_idf_favours_what_few_keys_have() -> None:
    keys = [f"the book of {word}" for word in ("sand", "night", "rain", "salt", "stone", "moss")]
    plain, fitted = Characters(), Characters(idf=True).fit(keys)
    query = ["of sand"]
    lead = []
    for encoder in (plain, fitted):
        s = (encoder.encode_query(query) @ encoder.encode(keys).T)[0]
        lead.append(s[0] - s[1:].max())
    assert lead[1] > lead[0]
    m, df = 6, 6
    assert fitted.table is not None
    assert fitted.table.min() == pytest.approx(np.log((1 + m) / (1 + df)) + 1)
    assert fitted.table.max() == pytest.approx(np.log(1 + m) + 1)


def test_idf_needs_keys_first() -> None:
    with pytest.raises(ArgumentError, match="fitted"):
        Characters(idf=True).encode(["a"])


@pytest.mark.parametrize("bad", [{"width": 4}, {"n": (0, 2)}, {"n": (3, 2)}, {"sounds": -1}])
def test_bad_parameters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        Characters(**bad)  # type: ignore[arg-type]


def test_without_word_vectors_an_answer_says_that_only_spelling_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    books = Database({"The Alchemist": 1988, "Dracula": 1897}, encoder="characters")
    monkeypatch.setattr(characters, "has_text_extra", lambda: False)
    assert 'pip install "qkv[text]"' in books.ask("the alchmist").hint
    assert "spelling only" in str(books.ask("the alchmist"))
    assert books.ask("Dracula").hint == ""
    monkeypatch.setattr(characters, "has_text_extra", lambda: True)
    assert books.ask("the alchmist").hint == ""


def test_none_is_refused_with_its_row() -> None:
    with pytest.raises(ArgumentError, match="key 1"):
        Characters().encode(["a", None])
