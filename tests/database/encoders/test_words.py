import importlib.util
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import Characters, Words, base, default, load, words
from qkv.errors import ArgumentError, MissingExtraError

pytest.importorskip("tokenizers")
wordllama = pytest.importorskip("wordllama")

TEXTS = ["the cat sat", "a kitten", "Income Tax", "naïve 日本", "x"]


def test_it_is_wordllamas_embedding() -> None:
    folder = words.package_folder()
    model = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)
    want = model.embed(TEXTS, norm=True)
    np.testing.assert_allclose(Words(lower=False).encode(TEXTS), want, atol=1e-5)
    want = model.embed([text.lower() for text in TEXTS], norm=True)
    np.testing.assert_allclose(Words().encode(TEXTS), want, atol=1e-5)


def test_meaning_is_near() -> None:
    query = Words().encode_query(["a book about the ocean"])
    keys = ["the sea", "a tax form", "a parliament"]
    assert (query @ Words().encode(keys).T).argmax() == 0


def test_tokens_and_table_give_the_same_sum() -> None:
    encoder = Words()
    ids, offsets = encoder.tokens([*TEXTS, ""])
    assert offsets.tolist()[-1] == offsets.tolist()[-2] == len(ids)
    assert encoder.table.shape == (32000, encoder.width)
    one = encoder.table[ids[offsets[0] : offsets[1]]].mean(axis=0)
    np.testing.assert_allclose(one / np.linalg.norm(one), encoder.encode(TEXTS)[0], atol=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        encoder.table[0] = 0


@pytest.mark.parametrize("texts", [30, 3000])
def test_idf_weighs_tokens(texts: int) -> None:
    keys = [f"the cat number {i} of the street" for i in range(texts)]
    encoder = Words(idf=True).fit(keys)
    counts: dict[int, int] = {}
    for key in keys:
        for token in set(Words().tokens([key])[0].tolist()):
            counts[token] = counts.get(token, 0) + 1
    length = np.linalg.norm(Words().table, axis=1).astype(float)
    length = np.maximum(length / length[length > 0].mean(), 0.1)
    queries = ["the cat number 7 of the street", "a dog of the street"]
    vectors = encoder.encode([*keys, *queries])[len(keys) :]
    for query, vector in zip(queries, vectors, strict=True):
        ids = Words().tokens([query])[0]
        df = np.array([counts.get(token, 0) for token in ids.tolist()], float)
        weight = np.log(1 + (len(keys) - df + 0.5) / (df + 0.5)) ** 0.65 / length[ids] ** 0.25
        expected = weight @ Words().table[ids].astype(float)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=2e-3)
    np.testing.assert_allclose(encoder.encode(queries), vectors, atol=1e-6)
    restored = load(encoder.settings(), encoder.arrays())
    assert restored == encoder and restored != Words()
    np.testing.assert_array_equal(restored.encode(queries), encoder.encode(queries))


def test_idf_needs_a_fit_and_weights_of_all_tokens() -> None:
    with pytest.raises(ArgumentError, match="not fitted"):
        Words(idf=True).encode(["a"])
    with pytest.raises(ArgumentError, match="token_weights"):
        load(Words(idf=True).settings(), {"token_weights": np.ones(3, np.float16)})
    assert load(Words().settings(), {}) == Words()


def test_no_text_is_no_vector() -> None:
    assert not Words().encode([""]).any()


def test_it_loads_no_more_than_it_needs_and_sets_up_nothing() -> None:
    # wordllama's own loader configures the root logger and imports a network library.
    code = """if True:
        import json, logging, sys
        from qkv.database.encoders import Words
        Words().encode(["the cat"])
        print(json.dumps([logging.root.handlers == [], sorted(
            {"wordllama", "requests", "torch"} & set(sys.modules))]))"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(out.stdout) == [True, []]


def test_without_wordllama_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "wordllama" else real(name, *rest)

    settings = Words().settings()
    for module in (words, base):
        monkeypatch.setattr(module, "find_spec", without)
    words._load_table.cache_clear()
    words._map_table.cache_clear()
    with pytest.raises(MissingExtraError, match=r'pip install "qkv\[text\]"'):
        load(settings, {})
    with pytest.raises(MissingExtraError, match=r"qkv\[text\]"):
        Words().encode(["a"])
    assert default(["a", "b"]) == Characters()


def test_few_tokens_are_summed_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the cat sat on the mat", "", "naïve 日本", "x" * 90]
    encoders = Words(), Words(idf=True).fit(texts)
    few = [encoder.encode(texts) for encoder in encoders]
    monkeypatch.setattr(words, "MAX_MAPPED_TOKENS", -1)
    np.testing.assert_array_equal(few, [encoder.encode(texts) for encoder in encoders])


def test_long_and_short_texts_are_summed_alike() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 100, 700)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    table, ids = rng.normal(size=(50, 8)).astype("float32"), rng.integers(50, size=offsets[-1])
    rows = [table[x].astype(float).sum(axis=0) for x in np.split(ids, offsets[1:-1])]
    np.testing.assert_allclose(words.sum_by_text(table, ids, offsets), rows, atol=1e-4)


@pytest.mark.parametrize("most", [words.MAX_CACHED_WORDS, 3])
def test_a_text_has_the_tokens_that_its_tokenizer_gives_it_whole(monkeypatch, most) -> None:
    monkeypatch.setattr(words, "MAX_CACHED_WORDS", most)
    rng = np.random.default_rng(0)
    parts = [*"ab'-é日🙂\n\t<▁", " ", " ", " ", "the ", "<s>", "cat", "naïve", "x" * 40]
    texts = ["", " ", "  ", "a ", " a", "a  b", "a <s> b", "</s>a b", "▁", "a ▁ b", "a\n b"]
    texts += ["".join(rng.choice(parts, rng.integers(0, 9))) for _ in range(500)]
    ids, offsets = Words(lower=False).tokens(texts)
    full = words._load_tokenizer().encode_batch_fast(texts, add_special_tokens=False)
    assert [x.tolist() for x in np.split(ids, offsets[1:-1])] == [x.ids for x in full]
    assert Words().tokens([])[1].tolist() == [0]
