"""Encode text by its letters, so that texts with similar spelling match."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import Encoder, has_text_extra, normalize_rows, to_texts
from qkv.errors import ArgumentError
from qkv.util.caches import memoize
from qkv.util.deadline import check_deadline
from qkv.util.keyword_hints import suggest_keywords

TEXT_SEPARATOR = "\x1e"
SPACE_CODE = 32

SPELLING_ONLY_HINT = (
    'matched by spelling only: to match by meaning, run pip install "qkv[text]" and import the '
    "table again"
)

TEXTS_PER_BLOCK = 1024
"""The number of texts in a block. Their counts fit the processor's cache."""

MAX_CHARACTERS = 1 << 18
"""The number of characters in a block. Each takes about 200 bytes while it is encoded."""

IDF_TABLE_SIZE = 1 << 16
"""The number of entries in the idf table. N-grams with the same entry have the same weight."""

_DROPPED_CHARACTERS = dict.fromkeys([*map(ord, "'’‘ʼ`´"), *range(0x300, 0x370)])
"""Apostrophes and accents, which users often leave out."""

_KEPT_PUNCTUATION = set("#&@%*" + TEXT_SEPARATOR)

_IS_VOWEL = np.isin(np.arange(128), [ord(vowel) for vowel in "aeiouy"])


@suggest_keywords
@dataclass(frozen=True)
class Characters(Encoder):
    """x_b = Σ_g ±w(g) over the n-grams g of the text's words with hash(g) = b; then x / ‖x‖.

    N-grams have `n[0]` to `n[1]` letters. A word has one space of padding on each side, so that its
    first and last letters count more. The order of words counts a little: the last letter of a
    word, a space and the first letter of the next word also form an n-gram. Case, accents and
    punctuation are ignored.

    Each word counts a second time with the weight `sounds`: all vowels are equal, and repeated
    letters count once. So Lee is near Li. The hash is fixed: a text has the same vector on every
    machine.

    With `idf`, `fit` multiplies the weight of an n-gram by ln((1 + m) / (1 + df)) + 1. Here df is
    the number of the m keys that have the n-gram.

    >>> encoder = Characters()
    >>> right, slip, other = encoder.encode(["The Alchemist", "the alchmist", "Dracula"])
    >>> bool(right @ slip > 0.7), bool(abs(right @ other) < 0.2)
    (True, True)
    """

    width: int = 256
    n: tuple[int, int] = (2, 3)
    sounds: float = 0.5
    idf: bool = False
    table: np.ndarray | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = "characters"
    aliases: ClassVar[tuple[str, ...]] = ("letters", "ngrams", "trigrams", "fuzzy")
    reads_only_text: ClassVar[bool] = True
    int8_safe = True
    encodes_in_parallel = True
    uses_cosine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        low, high = self.n
        object.__setattr__(self, "n", (int(low), int(high)))
        if not 1 <= low <= high <= 16:
            raise ArgumentError(f"Characters: n must be two lengths from 1 to 16, not {self.n}")
        if not 8 <= self.width <= 1 << 20:
            raise ArgumentError(f"Characters: width must be from 8 to {1 << 20}, not {self.width}")
        if not 0 <= self.sounds <= 100:
            raise ArgumentError(f"Characters: sounds must be from 0 to 100, not {self.sounds!r}")

    def fit(self, keys: Sequence[Any]) -> Characters:
        if not self.idf:
            return self
        count = np.zeros(IDF_TABLE_SIZE, np.int64)
        for _, block in split_blocks(to_texts(keys)):
            row, code, _ = self._weigh_ngrams(block)
            count += count_rows_with(row, code >> np.uint32(16), IDF_TABLE_SIZE)
        table = np.log((1 + len(keys)) / (1.0 + count)) + 1
        return replace(self, table=table.astype(np.float32))

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        keys = to_texts(keys)
        if self.idf and self.table is None:
            raise ArgumentError("Characters(idf=True) is not fitted: call fit(keys) first")
        out = np.empty((len(keys), self.width), np.float32)
        for start, block in split_blocks(keys):
            row, code, weight = self._weigh_ngrams(block)
            # The high bits choose the position in the vector, and the lowest bit chooses the sign.
            position = (code.astype(np.uint64) * np.uint64(self.width)) >> np.uint64(32)
            weight = np.where(code & np.uint32(1), weight, -weight)
            if self.table is not None:
                weight *= self.table[code >> np.uint32(16)]
            cell = row * self.width + position.astype(np.int64)
            count = np.bincount(cell, weight, len(block) * self.width)
            out[start : start + len(block)] = count.reshape(len(block), self.width)
        return normalize_rows(out)

    def score_hint(self, query: Any, key: Any, flat: bool) -> str:
        return "" if query == key or has_text_extra() else SPELLING_ONLY_HINT

    def _weigh_ngrams(self, block: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the row, hash and weight, each (g,), of every n-gram of the texts."""
        letters, row = to_letters(block)
        parts = [(*pair, 1.0) for pair in hash_ngrams(letters, row, self.n, seed=2166136261)]
        if self.sounds:
            heard = hash_ngrams(*to_sounds(letters, row), self.n, seed=84696351)
            parts += [(*pair, float(self.sounds)) for pair in heard]
        if not parts:
            return row[:0], letters[:0], np.empty(0, np.float32)
        rows, codes, weights = zip(*parts, strict=True)
        weight = np.repeat(np.array(weights, np.float32), [len(code) for code in codes])
        return np.concatenate(rows), np.concatenate(codes), weight


def count_rows_with(row: np.ndarray, entry: np.ndarray, size: int) -> np.ndarray:
    """Return, for each number below `size`, in how many rows it is an entry: (size,).

    >>> count_rows_with(np.array([0, 0, 1]), np.array([2, 2, 2]), 4).tolist()
    [0, 0, 2, 0]
    """
    cells = row * size + entry
    cells.sort()  # np.unique is ten times slower
    is_first = np.ones(len(cells), bool)
    np.not_equal(cells[1:], cells[:-1], out=is_first[1:])
    return np.bincount(cells[is_first] % size, minlength=size)


def split_blocks(keys: list[str], most: int = TEXTS_PER_BLOCK) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the first text, texts) of blocks of texts.

    A block has at most `most` texts and at most MAX_CHARACTERS characters.

    >>> list(split_blocks(["a", "b", "c"], 2))
    [(0, ['a', 'b']), (2, ['c'])]
    """
    start = 0
    while start < len(keys):
        check_deadline()
        block, total = keys[start : start + most], 0
        for count, text in enumerate(block):
            total += len(text)
            if total > MAX_CHARACTERS:
                block = block[: max(count, 1)]
                break
        yield start, block
        start += len(block)


def normalize_text(text: str) -> str:
    """Return text without case, accents and compatibility forms. Punctuation becomes a space.

    >>> normalize_text("Les Misérables: Gulliver’s C++")
    'les miserables  gullivers c++'
    """
    if text.isascii():
        return text.encode().translate(*_build_ascii_translation()).decode()
    return _replace_punctuation(_decompose(text).casefold())


MAX_ACCENTS_PER_LETTER = 30
"""The number of accents that a letter may have in Unicode's stream-safe format."""


def _decompose(text: str) -> str:
    """Return the text in the Unicode form NFKD.

    Python sorts the marks of a letter in quadratic time. So a long run of marks is cut into pieces,
    which are normalized one by one.

    >>> _decompose("é") == "e\u0301"
    True
    """
    marks = [x for x in set(text) if unicodedata.combining(unicodedata.normalize("NFKD", x)[0])]
    if not marks:
        return unicodedata.normalize("NFKD", text)
    run = f"[{re.escape(''.join(marks))}]{{{MAX_ACCENTS_PER_LETTER}}}"
    cuts = [0, *(found.end() for found in re.finditer(run, text)), len(text)]
    return "".join(unicodedata.normalize("NFKD", text[i:j]) for i, j in pairwise(cuts))


def _replace_punctuation(text: str) -> str:
    """Replace punctuation and control characters by spaces; drop apostrophes and accents."""
    table: dict[int, str | None] = dict(_DROPPED_CHARACTERS)
    for letter in set(text) - _KEPT_PUNCTUATION:
        if unicodedata.category(letter)[0] in "PZC":
            table.setdefault(ord(letter), " ")
    return text.translate(table)


@memoize("encoders.ascii_table")
def _build_ascii_translation() -> tuple[bytes, bytes]:
    """Return the table of `bytes.translate` that normalizes ASCII, and the bytes to delete."""
    made = [_replace_punctuation(chr(i).casefold()) for i in range(128)]
    table = bytes(ord(x) if x else 0 for x in made) + bytes(range(128, 256))
    return table, bytes(i for i, x in enumerate(made) if not x)


def to_letters(block: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the letters of all texts as code points, (t,) uint32, and their rows, (t,).

    There is one space between two words.
    """
    joined = TEXT_SEPARATOR.join(block)
    if joined.count(TEXT_SEPARATOR) != len(block) - 1:
        joined = TEXT_SEPARATOR.join(text.replace(TEXT_SEPARATOR, " ") for text in block)
    joined = f" {normalize_text(joined)} "
    if joined.isascii():
        letters = np.frombuffer(joined.encode(), np.uint8).astype(np.uint32)
    else:
        code = joined.encode("utf-32-le", "surrogatepass")
        letters = np.frombuffer(code, "<u4").astype(np.uint32)
    ends = letters == ord(TEXT_SEPARATOR)
    letters[ends] = SPACE_CODE
    # A separator becomes the space before the first word of the next text.
    row = np.cumsum(ends)
    first = np.ones(len(letters), bool)
    first[1:] = (letters[1:] != SPACE_CODE) | (letters[:-1] != SPACE_CODE) | (row[1:] != row[:-1])
    return letters[first], row[first]


def to_sounds(letters: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the letters with all vowels equal and without repetitions, and their rows."""
    letters = np.where(_IS_VOWEL[np.minimum(letters, 127)], np.uint32(ord("a")), letters)
    new = np.ones(len(letters), bool)
    new[1:] = (letters[1:] != letters[:-1]) | (row[1:] != row[:-1])
    return letters[new], row[new]


def hash_ngrams(
    letters: np.ndarray, row: np.ndarray, n: tuple[int, int], seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, for each length, the rows (r,) and the 32-bit hashes (r,) of all n-grams."""
    inside = letters != SPACE_CODE
    code = np.full(len(letters), seed, np.uint32)
    # An n-gram may begin or end with the space at the border of a word, but may not cross it.
    in_word = np.ones(len(letters), bool)
    for length in range(1, n[1] + 1):
        count = len(letters) - length + 1
        if count <= 0:
            return
        code = (code[:count] ^ letters[length - 1 :]) * np.uint32(16777619)
        if length == 1:
            is_ngram = inside
        elif length == 2:
            is_ngram = inside[:-1] | inside[1:]
        else:
            in_word = in_word[:count] & inside[length - 2 : length - 2 + count]
            is_ngram = in_word
        if length == 3:  # one letter on each side of a space is allowed: the order of words counts
            is_ngram = in_word | (inside[:-2] & inside[2:] & (row[:-2] == row[2:]))
        if length >= n[0]:
            yield row[:count][is_ngram], mix_hash(code[is_ngram])


def mix_hash(code: np.ndarray) -> np.ndarray:
    """Return the last step of the hash MurmurHash3: every bit depends on every bit of the code."""
    code = (code ^ (code >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    code = (code ^ (code >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    code ^= code >> np.uint32(16)
    return code
