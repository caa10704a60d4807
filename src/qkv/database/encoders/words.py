"""Encode text by the meaning of its words, with the token vectors of the package wordllama."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from qkv.database.encoders.base import (
    Encoder,
    EncoderArrays,
    EncoderSettings,
    normalize_rows,
    to_texts,
)
from qkv.database.encoders.byte_pairs import BytePairTokenizer
from qkv.database.encoders.characters import count_rows_with, split_blocks
from qkv.database.storage.segments import DTYPE_BY_CODE
from qkv.errors import ArgumentError, missing_extra_error
from qkv.util.caches import create_table, memoize
from qkv.util.keyword_hints import suggest_keywords

TEXTS_PER_BLOCK = 4096
MAX_MAPPED_TOKENS = 8192
"""Up to this number of tokens, only the vectors of these tokens are read from the file."""
MAX_GROUPED_TOKENS, TEXTS_PER_GROUP = 64, 256
"""The vectors of a text with more tokens are summed text by text.

Other texts are summed in groups: the first tokens of all texts, then the second tokens, and so on.
A group fits the processor's cache.
"""
IDF_EXPONENT, LENGTH_EXPONENT = 0.65, 0.25
"""How much the idf of a token, and the length of its vector, change its weight.

They are chosen on the tasks of `bench.retrieval`, with other seeds than those that it measures.
"""
MIN_TOKEN_LENGTH = 0.1
"""The shortest length of a token's vector, relative to the mean, that its weight depends on."""
MODEL_NAME = "l2_supercat_256"
TOKENIZER_PATH = ("tokenizers", "l2_supercat_tokenizer_config.json")

MAX_CACHED_WORDS, MAX_CACHED_LETTERS = 1 << 17, 32
"""The number of words in the token cache, and the length of the longest word in it."""
_TOKEN_CACHE: dict[str, bytes] = create_table("encoders.word_tokens")
_ID_CODE = "i"
_ID_DTYPE = np.dtype(_ID_CODE)


@suggest_keywords
@dataclass(frozen=True)
class Words(Encoder):
    """x = mean of the vectors of the text's tokens; then x / ‖x‖. For empty text, x is 0.

    The vectors come from the installed package wordllama: nothing is downloaded. Case is ignored
    unless `lower` is False, because users seldom type capital letters.

    With `idf`, `fit` multiplies the vector e of a token by idf^0.65 (‖e‖ / mean)^(−1/4). Here idf
    is ln(1 + (m − df + ½)/(df + ½)), and df is the number of the m keys that have the token. So
    frequent words such as "the" count less, and so do the lengths of the vectors, which say how
    rare a word is in other texts.

    >>> encoder = Words()
    >>> cat, kitten, tax = encoder.encode(["a cat", "a kitten", "income tax"])
    >>> bool(cat @ kitten > 0.5 > cat @ tax)
    True
    """

    lower: bool = True
    idf: bool = False
    token_weights: np.ndarray | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = "words"
    aliases: ClassVar[tuple[str, ...]] = ("word2vec", "glove", "fasttext", "wordllama")
    reads_only_text: ClassVar[bool] = True
    int8_safe = True
    encodes_in_parallel = True
    uses_cosine: ClassVar[bool] = True

    @property
    def width(self) -> int:
        return int(_map_table().shape[1])

    @property
    def table(self) -> np.ndarray:
        """The vectors of all tokens, (vocabulary, width) float32, read-only."""
        return _load_table()

    def fit(self, keys: Sequence[Any]) -> Words:
        if not self.idf:
            return self
        keys, size = to_texts(keys), len(_map_table())
        count = np.zeros(size, np.int64)
        for _, block in split_blocks(keys, TEXTS_PER_BLOCK):
            ids, offsets = self.tokens(block)
            row = np.repeat(np.arange(len(block)), np.diff(offsets))
            count += count_rows_with(row, ids, size)
        idf = np.log1p((len(keys) - count + 0.5) / (count + 0.5))
        weights = idf**IDF_EXPONENT / _token_lengths() ** LENGTH_EXPONENT
        return replace(self, token_weights=weights.astype(np.float16))

    def tokens(self, keys: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of all texts (t,), and the offset of each text (m + 1,).

        >>> ids, offsets = Words().tokens(["the cat", ""])
        >>> ids.tolist(), offsets.tolist()
        ([278, 6635], [0, 2, 2])
        """
        keys = [text.lower() for text in to_texts(keys)] if self.lower else to_texts(keys)
        parts = [_split_words(text) for text in keys]
        ends = np.cumsum([len(part) for part in parts])
        pieces = _tokenize_words(list(chain.from_iterable(parts)))
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces)) // _ID_DTYPE.itemsize
        offsets = np.zeros(len(keys) + 1, np.int64)
        offsets[1:] = np.cumsum(sizes)[ends - 1] if len(keys) else 0
        return np.frombuffer(b"".join(pieces), _ID_DTYPE), offsets

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        keys = to_texts(keys)
        if self.idf and self.token_weights is None:
            raise ArgumentError("Words(idf=True) is not fitted: call fit(keys) first")
        out = np.empty((len(keys), self.width), np.float32)
        for start, block in split_blocks(keys, TEXTS_PER_BLOCK):
            ids, offsets = self.tokens(block)
            if len(ids) <= MAX_MAPPED_TOKENS:
                # Converting the vectors of all tokens to float32 would be slow.
                table = self._weigh_tokens(np.asarray(_map_table()[ids], np.float32), ids)
                ids = np.arange(len(ids))
            elif self.token_weights is None:
                table = self.table
            else:  # most of the tokens are in no text
                is_used = np.zeros(len(self.table), bool)
                is_used[ids] = True
                used = np.flatnonzero(is_used)
                table = self._weigh_tokens(self.table[used], used)
                ids = (np.cumsum(is_used) - 1)[ids]
            out[start : start + len(block)] = sum_by_text(table, ids, offsets)
        return normalize_rows(out)

    def _weigh_tokens(self, vectors: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the vectors of these tokens, multiplied by their weights."""
        if self.token_weights is None:
            return vectors
        weights: np.ndarray = self.token_weights[ids].astype(np.float32)
        return np.asarray(vectors * weights[:, None])

    def settings(self) -> dict[str, Any]:
        settings = {"kind": self.kind, "model": MODEL_NAME, "lower": self.lower}
        return settings | ({"idf": True} if self.idf else {})

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Words:
        package_folder()
        weights = arrays.get("token_weights")
        if weights is not None and weights.shape != (len(_map_table()),):
            raise ArgumentError(
                f"Words: the array 'token_weights' has the shape {weights.shape}, but wordllama "
                f"has {len(_map_table()):,} tokens: encode the keys again"
            )
        return cls(settings["lower"], bool(settings.get("idf", False)), weights)


def _split_words(text: str) -> list[str]:
    """Return the words of a text, if each word has the same tokens when it stands alone.

    Otherwise, return the whole text as one word. No token contains a single space. But several
    spaces, or text in angle brackets, may be one token.

    >>> _split_words("the cat"), _split_words("the  cat")
    (['the', 'cat'], ['the  cat'])
    """
    odd = "  " in text or "<" in text or "▁" in text or text[:1] == " " or text[-1:] == " "
    return [text] if odd else text.split(" ")


def _tokenize_words(words: list[str]) -> list[bytes]:
    """Return the token ids of each word, as the bytes of an int32 array."""
    # Look up each word only once: another thread may clear the cache at any time.
    found = list(map(_TOKEN_CACHE.get, words))
    missing = list(dict.fromkeys(w for w, ids in zip(words, found, strict=True) if ids is None))
    if not missing:
        return found  # type: ignore[return-value]
    added = {
        word: array(_ID_CODE, ids).tobytes()
        for word, ids in zip(missing, _token_ids(missing), strict=True)
    }
    if len(_TOKEN_CACHE) + len(added) > MAX_CACHED_WORDS:
        _TOKEN_CACHE.clear()
    _TOKEN_CACHE.update(
        (word, ids) for word, ids in added.items() if len(word) <= MAX_CACHED_LETTERS
    )
    return [added[w] if ids is None else ids for w, ids in zip(words, found, strict=True)]


def _token_ids(words: list[str]) -> Iterable[list[int]]:
    """Return the token ids of each word.

    For a few words, the tokenizer that is slow to load is not loaded.
    """
    if not _load_tokenizer.cache_info().currsize and BytePairTokenizer.can_tokenize(words):
        return map(_load_byte_pairs(), words)
    return (x.ids for x in _load_tokenizer().encode_batch_fast(words, add_special_tokens=False))


def sum_by_text(table: np.ndarray, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return Σ table[ids] over the tokens of each text, (m, width); 0 for a text without tokens."""
    out = np.zeros((len(offsets) - 1, table.shape[1]), np.float32)
    sizes = np.diff(offsets)
    for i in np.flatnonzero(sizes > MAX_GROUPED_TOKENS):
        out[i] = table[ids[offsets[i] : offsets[i + 1]]].sum(axis=0)
    short = np.flatnonzero(sizes <= MAX_GROUPED_TOKENS)
    # Sort them by length, the longest first, so that the texts with a j-th token come first.
    short = short[np.argsort(-sizes[short])]
    for start in range(0, len(short), TEXTS_PER_GROUP):
        texts = short[start : start + TEXTS_PER_GROUP]
        begin, lengths = offsets[texts], sizes[texts]
        total = np.zeros((len(texts), table.shape[1]), np.float32)
        for j in range(int(lengths[0])):
            count = int(np.searchsorted(-lengths, -j))
            total[:count] += table[ids[begin[:count] + j]]
        out[texts] = total
    return out


def package_folder() -> Path:
    """Return the folder of the package wordllama.

    Its own loader is not used, because that would configure logging and use the network.
    """
    spec = find_spec("wordllama")
    if spec is None or not spec.submodule_search_locations or find_spec("tokenizers") is None:
        raise missing_extra_error("Words needs wordllama", "text")
    return Path(spec.submodule_search_locations[0])


def _package_file(*parts: str) -> Path:
    """Return the path of a file of wordllama; raise if this version does not have the file."""
    path = package_folder().joinpath(*parts)
    if not path.is_file():
        raise missing_extra_error(
            f"Words: this version of wordllama has no {'/'.join(parts)}; install another one",
            "text",
        )
    return path


@memoize("encoders.tokenizer")
def _load_tokenizer() -> Any:
    """Load wordllama's tokenizer."""
    path = _package_file(*TOKENIZER_PATH)
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


@memoize("encoders.byte_pairs")
def _load_byte_pairs() -> BytePairTokenizer:
    """Load the vocabulary of wordllama's tokenizer."""
    return BytePairTokenizer.from_file(_package_file(*TOKENIZER_PATH))


@memoize("encoders.mapped_word_table")
def _map_table() -> np.ndarray:
    """Map the file with the vectors of all tokens into memory."""
    path = _package_file("weights", f"{MODEL_NAME}.safetensors")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))["embedding.weight"]
    begin = 8 + size + header["data_offsets"][0]
    return np.memmap(path, DTYPE_BY_CODE[header["dtype"]], "r", begin, tuple(header["shape"]))


@memoize("encoders.word_table")
def _load_table() -> np.ndarray:
    """Read the vectors of all tokens as float32."""
    table = np.array(_map_table(), np.float32)
    table.flags.writeable = False
    return table


@memoize("encoders.token_lengths")
def _token_lengths() -> np.ndarray:
    """Return the length of the vector of each token, relative to the mean of those above 0."""
    lengths = np.linalg.norm(np.asarray(_map_table(), np.float32), axis=1)
    lengths /= lengths[lengths > 0].mean()
    lengths = np.maximum(lengths, MIN_TOKEN_LENGTH)
    lengths.flags.writeable = False
    return np.asarray(lengths)
