"""A byte-pair tokenizer for a few words. It starts faster than the real tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from qkv.database.table.cells import encode_utf8

MAX_LETTERS, MAX_WORD_LETTERS = 1 << 14, 256
"""Limits on the letters of all words and of one word. For more, the real tokenizer is faster."""

_SPECIAL_CHARACTERS = " ▁<"
_NO_NUMBER = sys.maxsize
_VOCABULARY_START, _VOCABULARY_END = b'"vocab":', b'"merges":'


class BytePairTokenizer:
    """Byte-pair encoding that needs only a vocabulary.

    It merges the neighbours whose merged piece has the lowest number. This is correct if the merges
    of the tokenizer are sorted by the number of their result, as they are in wordllama's file.

    >>> pieces = BytePairTokenizer(
    ...     {"▁": 9, "a": 5, "b": 6, "ab": 3, "▁a": 4, "<0xC3>": 1, "<0xA9>": 2}
    ... )
    >>> pieces("ab"), pieces("aé")
    ([9, 3], [4, 1, 2])
    """

    def __init__(self, vocabulary: dict[str, int]):
        self._number_by_piece = vocabulary

    @classmethod
    def from_file(cls, path: Path) -> BytePairTokenizer:
        """Read the vocabulary of a tokenizer file, but not its merges."""
        text = path.read_bytes()
        begin = text.index(_VOCABULARY_START) + len(_VOCABULARY_START)
        return cls(
            json.loads(text[begin : text.index(_VOCABULARY_END, begin)].rstrip().rstrip(b","))
        )

    @staticmethod
    def can_tokenize(words: Sequence[str]) -> bool:
        """Return whether the words are few and have no spaces or angle brackets.

        Several spaces, or text in angle brackets, may be special tokens.
        """
        if sum(map(len, words)) > MAX_LETTERS or max(map(len, words), default=0) > MAX_WORD_LETTERS:
            return False
        together = "".join(words)
        return not any(x in together for x in _SPECIAL_CHARACTERS)

    def __call__(self, word: str) -> list[int]:
        """Return the token ids of a word."""
        number, parts = self._number_by_piece, list[str]()
        for letter in f"▁{word}" if word else "":
            if letter in number:
                parts.append(letter)
            else:
                parts += [f"<0x{byte:02X}>" for byte in encode_utf8(letter)]
        get = number.get
        union = [get(left + right, _NO_NUMBER) for left, right in pairwise(parts)]
        while union and (first := min(union)) < _NO_NUMBER:
            position = (
                union.index(first) if union.count(first) == 1 else self._first_tie(union, parts)
            )
            parts[position : position + 2] = [parts[position] + parts[position + 1]]
            del union[position]
            if position:
                union[position - 1] = get(parts[position - 1] + parts[position], _NO_NUMBER)
            if position < len(union):
                union[position] = get(parts[position] + parts[position + 1], _NO_NUMBER)
        return [number[part] for part in parts]

    def _first_tie(self, union: list[int], parts: list[str]) -> int:
        """Return the position of the pair to merge first, if several pairs give the same piece."""
        number = self._number_by_piece
        return min(
            (joined, number[parts[position]], number[parts[position + 1]], position)
            for position, joined in enumerate(union)
        )[-1]
