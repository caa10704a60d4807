"""The tokens of a few words, in a tenth of the time that the tokenizer takes to be loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from qkv.database.cells import utf8

LETTERS = 512
"""Letters of words that are worth it."""

_ODD = " ▁<"
_BEGIN, _END = b'"vocab":', b'"merges":'


class Pieces:
    """Byte pairs, by the numbers of the `vocabulary` alone: of neighbours whose union is a piece,
    those with the lowest number are joined first. Where merges are listed by the number of what
    they make, as in wordllama's file, that is what they say.

    >>> pieces = Pieces({"▁": 9, "a": 5, "b": 6, "ab": 3, "▁a": 4, "<0xC3>": 1, "<0xA9>": 2})
    >>> pieces("ab"), pieces("aé")
    ([9, 3], [4, 1, 2])
    """

    def __init__(self, vocabulary: dict[str, int]):
        self._number = vocabulary

    @classmethod
    def read(cls, path: Path) -> Pieces:
        """Of a tokenizer's file, whose merges are not read."""
        text = path.read_bytes()
        begin = text.index(_BEGIN) + len(_BEGIN)
        return cls(json.loads(text[begin : text.index(_END, begin)].rstrip().rstrip(b",")))

    @staticmethod
    def fits(words: Sequence[str]) -> bool:
        """Whether these words are few, and words: several spaces, or what is in angles, may be
        pieces of their own."""
        return sum(map(len, words)) <= LETTERS and not any(
            x in word for word in words for x in _ODD
        )

    def __call__(self, word: str) -> list[int]:
        number, parts = self._number, list[str]()
        for letter in f"▁{word}" if word else "":
            if letter in number:
                parts.append(letter)
            else:
                parts += [f"<0x{byte:02X}>" for byte in utf8(letter)]
        while True:
            joined = [
                (number[one + two], number[one], number[two], at)
                for at, (one, two) in enumerate(pairwise(parts))
                if one + two in number
            ]
            if not joined:
                return [number[part] for part in parts]
            at = min(joined)[-1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
