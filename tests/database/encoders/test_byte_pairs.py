"""The tokens of a few words are those of the tokenizer."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("wordllama")

from qkv.database.encoders import words
from qkv.database.encoders.byte_pairs import MAX_LETTERS, MAX_WORD_LETTERS, BytePairTokenizer
from qkv.errors import ArgumentError

LETTER = "abcdeeeiionrst'-.,!?(){}0123aé üßдж中日한😀\t\n\x00".replace(" ", "")


def test_pieces_are_the_tokens():
    rng = random.Random(0)
    made = {"".join(rng.choices(LETTER, k=rng.randint(1, 14))) for _ in range(3000)}
    made |= {"".join(rng.choices("abn", k=rng.randint(1, 30))) for _ in range(500)}
    known = "", "the", "alchemist", "counterrevolutionaries", "ANNAANNA", "aaaaaaaaaaaaaaaa", "…"
    texts = [*known, *made]
    pieces = words._load_byte_pairs()
    result = words._load_tokenizer().encode_batch_fast(texts, add_special_tokens=False)
    assert [pieces(text) for text in texts] == [x.ids for x in result]


@pytest.mark.parametrize("odd", ["a  b", "<s>", "▁the", "x" * (MAX_WORD_LETTERS + 1)])
def test_what_may_be_more_than_a_word_is_the_tokenizer_s(odd):
    assert (
        BytePairTokenizer.can_tokenize([])
        and BytePairTokenizer.can_tokenize(["a", "b"])
        and not BytePairTokenizer.can_tokenize(["a", odd])
    )
    assert not BytePairTokenizer.can_tokenize(["ab"] * MAX_LETTERS)


def test_one_piece_of_several_pairs_is_made_of_the_lowest():
    pieces = BytePairTokenizer({"▁": 9, "a": 7, "aa": 5, "aaa": 6, "▁a": 4, "▁aa": 8})
    assert pieces("aaaaaa") == [4, 5, 6]


def test_half_a_character_is_refused():
    with pytest.raises(ArgumentError, match="lone surrogate"):
        words._load_byte_pairs()("a\ud800")


def test_both_ways_give_the_same_vectors():
    texts = ["the alchemist", "Über  uns", "a < b"]
    encoder = words.Words()
    expected = encoder.tokens(texts)
    for few in (True, False):
        words._TOKEN_CACHE.clear()
        words._load_tokenizer.cache_clear()
        if not few:
            words._load_tokenizer()
        parts = [encoder.tokens([text])[0] for text in texts]
        assert np.concatenate(parts).tolist() == expected[0].tolist()
