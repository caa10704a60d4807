"""Does the best key spell the words of a text query? If not, the table may lack the key.

A query of a name that no row has finds the most similar name, far ahead of all others. Its weight
cannot tell that from a typo, but the letters of the words can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from qkv.answer import MIN_OTHER_WORDS
from qkv.database.encoders.characters import normalize_text
from qkv.database.encoders.text import WORD_BORDER
from qkv.util.formatting import format_one_line

MAX_TEXT = 150
"""Longer texts are not compared: they say things in other words."""

NAME_WORDS = 4
"""In a query of n > 4 words, a mismatch counts 4 / n as much: it may say the same otherwise."""

MIN_LENGTH_RATIO = 0.3
"""Texts that differ more in length are not compared."""


USUAL_EDITS, LETTERS_PER_EDIT = 0.5, 4.0
"""A word of n letters with more edits than 0.5 + n / 4 is hardly a typo of another."""

LETTER_WITHOUT_SPACES = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""A letter of Chinese or Japanese."""

LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
"""The zeros of 007."""

LENGTH_FACTOR = 2.0
"""A mismatch counts as (shorter length / longer length)^this of the texts."""

MAX_COMPARED_TEXTS, ONE_EDIT_RUN, ONE_EDIT_RUNS, MAX_GROUP_PAIRS = 2048, 64, 32, 4
"""Whether texts differ by one letter: the number of texts of which all pairs are compared, the
length of a run of neighbours, the number of runs, and with how many words of a group each other one
is compared."""

MIN_ONE_EDIT_SHARE = 0.5
"""If more keys than this share differ from another one by one letter or digit, a near key may be
another one. With fewer, most typos are in other words than those that distinguish the keys."""

LENGTH_OFFSET = 3
"""It is added to both lengths, because few letters hardly change a short text."""


def count_edits(a: str, b: str) -> int:
    """Return how many letters must be inserted, deleted, replaced or swapped to turn a into b.

    >>> count_edits("jon", "john"), count_edits("smiht", "smith"), count_edits("", "tea")
    (1, 1, 3)
    """
    # Hyyrö's bit-parallel algorithm: bit i stands for the letter i of `a`.
    if not a or not b:
        return len(a) + len(b)
    positions: dict[str, int] = {}
    for i, letter in enumerate(a):
        positions[letter] = positions.get(letter, 0) | 1 << i
    every, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    up, down, diagonal, previous, edits = every, 0, 0, 0, len(a)
    for letter in b:
        equal = positions.get(letter, 0)
        swapped = ((~diagonal & equal) << 1) & previous
        diagonal = ((((equal & up) + up) ^ up) | equal | down | swapped) & every
        right, left = down | (~(diagonal | up) & every), diagonal & up
        edits += bool(right & last) - bool(left & last)
        right, left = ((right << 1) | 1) & every, (left << 1) & every
        up, down, previous = left | (~(diagonal | right) & every), right & diagonal, equal
    return edits


def find_edits(words: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return for each word the number of edits to the most similar one of the other words.

    Two neighbouring words may be one word on the other side. A letter alone is an initial. A word
    that sounds alike has one edit.

    >>> find_edits(["j", "foot", "ball", "club"], ["john", "football", "cup"])
    [0, 0, 0, 2]
    """
    single = dict.fromkeys(others)
    candidates = single | dict.fromkeys(a + b for a, b in pairwise(others))
    edits = [_count_least_edits(word, candidates) for word in words]
    initials, sounds = {word[0] for word in single}, set(map(_to_sound, single))
    for i, word in enumerate(words):
        if len(word) == 1 and word in initials and not word.isdigit():
            edits[i] = 0
        elif edits[i] > 1 and _to_sound(word) in sounds:
            edits[i] = 1
    for i, (a, b) in enumerate(pairwise(words)):
        if edits[i] + edits[i + 1]:
            joined = _count_least_edits(a + b, single)
            if joined <= USUAL_EDITS + len(a + b) / LETTERS_PER_EDIT:
                edits[i : i + 2] = min(edits[i], joined), min(edits[i + 1], joined)
    return edits


def _to_sound(word: str) -> str:
    """Return a word with equal vowels, and with repeated letters once, so that Lee is Li.

    >>> _to_sound("lee"), _to_sound("li"), _to_sound("smyth")
    ('la', 'la', 'smath')
    """
    return re.sub(r"(.)\1+", r"\1", re.sub("[aeiouy]", "a", word))


def _count_least_edits(word: str, others: Collection[str]) -> int:
    """Return the number of edits from a word to the most similar other one.

    It is at most the length of the word, and at most the number from which no typo is likely.
    """
    if word in others:
        return 0
    # More edits than this do not change the misfit.
    least = min(len(word), math.ceil(1 + USUAL_EDITS + len(word) / LETTERS_PER_EDIT))
    letters = set(word)
    for other in others:
        if abs(len(other) - len(word)) >= least:
            continue
        # Each letter that only one of the words has needs an edit.
        if len(letters.difference(other)) < least and len(set(other) - letters) < least:
            least = min(least, count_edits(word, other))
    return least


def _misfits(words: Sequence[str], edits: Sequence[int]) -> Iterator[float]:
    """Yield for each word how little it fits: from 0 for a typo to 1 for another word."""
    for word, count in zip(words, edits, strict=True):
        if len(word) == 1:
            yield float(count > 0)
        else:
            yield min(max(count - USUAL_EDITS - len(word) / LETTERS_PER_EDIT, 0.0), 1.0)


def is_sentence(query: Any) -> bool:
    """Return whether a query is a text that is too long for a name."""
    return isinstance(query, str) and len(split_words(query)) > NAME_WORDS


def split_words(text: str) -> list[str]:
    """Return the words of a text, and of identifiers the parts.

    Every letter of Chinese and Japanese, which write no spaces, is a word.

    >>> split_words("a MultiOutput Café_X")
    ['a', 'multi', 'output', 'cafe', 'x']
    """
    words = normalize_text(WORD_BORDER.sub(" ", text))
    return (words if words.isascii() else LETTER_WITHOUT_SPACES.sub(r" \g<0> ", words)).split()


def _mean_misfit(words: Sequence[str], others: Sequence[str]) -> float:
    """Return the mean misfit of the words; a word counts as the square root of its length."""
    weights = [math.sqrt(len(word)) for word in words]
    misfits = _misfits(words, find_edits(words, others))
    return sum(w * x for w, x in zip(weights, misfits, strict=True)) / sum(weights)


def measure_mismatch(query: Any, key: Any) -> float:
    """Return from 0 to 1 how much speaks against the key being what the query asks for.

    That is the smaller one of two shares: of the words of the query that the key lacks, and of
    those of the key that the query lacks. Typos count little. So do long queries and texts of other
    lengths, which need not have the same words. Tuples are compared cell by cell.

    >>> round(measure_mismatch("Jon Smithers", "Ann Smithers"), 2)
    0.28
    >>> measure_mismatch("Jon Smithers", "John Smither"), measure_mismatch("smith", "Ann Smith")
    (0.0, 0.0)
    """
    if isinstance(query, tuple) and isinstance(key, tuple) and len(query) == len(key):
        return max(map(measure_mismatch, query, key), default=0.0)
    if not (isinstance(query, str) and isinstance(key, str)) or query == key:
        return 0.0
    shorter, longer = sorted((len(query), len(key)))
    if longer > MAX_TEXT or shorter + LENGTH_OFFSET < MIN_LENGTH_RATIO * longer:
        return 0.0
    asked, found = split_words(query), split_words(key)
    if not asked or not found or asked == found or _are_joined(asked, found):
        return 0.0
    lengths = [len(" ".join(words)) + LENGTH_OFFSET for words in (asked, found)]
    factor = (min(lengths) / max(lengths)) ** LENGTH_FACTOR * min(1.0, NAME_WORDS / len(asked))
    mismatch = _mean_misfit(asked, found)
    return factor * min(mismatch, _mean_misfit(found, asked)) if mismatch else 0.0


def _are_joined(words: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether the words differ in their spaces, and in at most one letter."""
    a, b = "".join(words), "".join(others)
    return len(words) != len(others) and abs(len(a) - len(b)) <= 1 and count_edits(a, b) <= 1


class OneEdit(NamedTuple):
    """Shares of the keys that differ from another one by one letter, and by one digit."""

    letter: float
    digit: float


def find_one_edit(text: str, other: str) -> str:
    """Return "letter" or "digit" if one of them makes one text the other, and else "".

    It is inserted, deleted, replaced, or swapped with the next one. Upper case, accents, spaces,
    punctuation and zeros before a number do not count.

    >>> find_one_edit("Ann Lea", "ann lee"), find_one_edit("A-1", "A-12"), find_one_edit("a", "A")
    ('letter', 'digit', '')
    """
    a, b = (LEADING_ZEROS.sub("", "".join(split_words(x))) for x in (text, other))
    return _kind_of_edit(a, b) if _have_one_edit(a, b) else ""


def _have_one_edit(a: str, b: str) -> bool:
    if a == b or abs(len(a) - len(b)) > 1:
        return False
    shorter, longer = sorted((a, b), key=len)
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(shorter))
    rest, other = shorter[start:], longer[start:]
    if len(shorter) < len(longer):
        return rest == other[1:]
    return rest[1:] == other[1:] or (rest[:2] == other[1::-1] and rest[2:] == other[2:])


def _kind_of_edit(a: str, b: str) -> str:
    digits = ([letter for letter in word if letter.isdigit()] for word in (a, b))
    return "letter" if next(digits) == next(digits) else "digit"


def measure_one_edit(keys: Sequence[Any]) -> OneEdit:
    """Return the shares of texts that differ from another one by one letter, and by one digit.

    Texts of more than `MAX_TEXT` characters are not compared. Of more than `MAX_COMPARED_TEXTS`
    texts, neighbours in alphabetical order are compared, forwards and backwards: those in
    `ONE_EDIT_RUNS` runs.

    >>> measure_one_edit(["A1", "A2", "A3", "bread"])
    OneEdit(letter=0.0, digit=0.75)
    """
    texts = {key for key in keys if isinstance(key, str) and len(key) <= MAX_TEXT}
    if len(texts) <= MAX_COMPARED_TEXTS:
        words = {"".join(split_words(text)) for text in texts}
        return _share_of_pairs(_pairs_with_one_edit(words), len(words))
    orders = (
        sorted(texts, key=str.casefold),
        sorted(texts, key=lambda text: text[::-1].casefold()),
    )
    shares = []
    for order in orders:
        starts = np.linspace(0, len(order) - ONE_EDIT_RUN, ONE_EDIT_RUNS, dtype=int).tolist()
        compared, pairs = set[str](), []
        for start in starts:
            words_of_run = [
                "".join(split_words(text)) for text in order[start : start + ONE_EDIT_RUN]
            ]
            compared.update(words_of_run)
            pairs += [pair for pair in pairwise(words_of_run) if _have_one_edit(*pair)]
        shares.append(_share_of_pairs(pairs, len(compared)))
    return OneEdit(*(1 - (1 - a) * (1 - b) for a, b in zip(*shares, strict=True)))


def _share_of_pairs(pairs: Iterable[tuple[str, str]], count: int) -> OneEdit:
    near: dict[str, set[str]] = {"letter": set(), "digit": set()}
    for pair in pairs:
        near[_kind_of_edit(*pair)].update(pair)
    return OneEdit(*(len(words) / max(count, 1) for words in near.values()))


def _pairs_with_one_edit(words: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of words with one edit: nearly every word that has one is in a pair."""
    # Such words are equal if at most one letter of each is deleted.
    by_variant: dict[str, list[str]] = {}
    for word in words:
        for variant in {word, *(word[:i] + word[i + 1 :] for i in range(len(word)))}:
            by_variant.setdefault(variant, []).append(word)
    for group in by_variant.values():
        for i, word in enumerate(group[1:], start=1):
            for other in group[max(i - MAX_GROUP_PAIRS, 0) : i]:
                if _have_one_edit(word, other):
                    yield word, other


def missing_word_hint(query: Any, key: Any) -> str:
    """Return a hint if the best key lacks a word of the query and may be another one; else "".

    >>> missing_word_hint("Jon Smithers", "Ann Smithers")
    "the best key, Ann Smithers, has no word like 'Jon': check that it is what you mean"
    >>> missing_word_hint("Jon Smithers", "John Smithers")
    ''
    """
    if measure_mismatch(query, key) < MIN_OTHER_WORDS or isinstance(query, tuple):
        return ""
    asked, found = split_words(query), split_words(key)
    misfits = list(_misfits(asked, find_edits(asked, found)))
    word = asked[misfits.index(max(misfits))]
    spelled = next((x for x in query.split() if split_words(x) == [word]), word)
    return (
        f"the best key, {format_one_line(key)}, has no word like {spelled!r}: "
        "check that it is what you mean"
    )
