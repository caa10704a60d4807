"""Encode text with word vectors from a file in the GloVe or word2vec format."""

from __future__ import annotations

import gzip
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
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
from qkv.errors import ArgumentError, QkvError
from qkv.util.caches import memoize
from qkv.util.keyword_hints import suggest_keywords
from qkv.util.progress import progress_bar

BLOCK_BYTES = 1 << 22
"""The number of bytes that are read at a time."""

_WORD_PATTERN = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_WORD_PART_PATTERN = re.compile(r"[^\W_]+")


class VectorFileError(QkvError, ValueError):
    """A vector file is damaged, or is not the file with which the keys were encoded."""


class VectorFileNotFoundError(QkvError, FileNotFoundError):
    """A vector file does not exist."""


@suggest_keywords
@dataclass(frozen=True)
class Vectors(Encoder):
    """x = mean of the vectors of the text's words; then x / ‖x‖. Without known words, x is 0.

    The file is GloVe text, word2vec text or word2vec binary, and may be gzipped. It is read when
    the first text is encoded. All words stay in memory, because queries may have words that no key
    has. With `limit`, only the first words of the file are used, which are usually the most common
    ones. A database stores the path of the file and a checksum, but not the vectors.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.txt"
    >>> _ = path.write_text("cat 1 0\\nkitten 0.8 0.6\\ntax 0 1\\n")
    >>> Vectors(path).encode(["A cat!", "the tax"]).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    path: str | os.PathLike[str]
    limit: int | None = None
    size: int | None = None
    checksum: str | None = None
    kind: ClassVar[str] = "vectors"
    reads_only_text: ClassVar[bool] = True
    int8_safe = True
    uses_cosine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(os.fspath(self.path)))
        if self.limit is not None and self.limit < 1:
            raise ArgumentError(f"Vectors: limit must be at least 1 word, not {self.limit!r}")

    @property
    def width(self) -> int:
        return self.size if self.size is not None else self.word_vectors.vectors.shape[1]

    @property
    def word_vectors(self) -> WordVectors:
        """The words and vectors of the file."""
        lexicon = read_word_vectors(Path(self.path), self.limit)
        if self.checksum is not None and lexicon.checksum != self.checksum:
            raise VectorFileError(
                f"{self.path} has changed since the keys were encoded: restore the old file, or "
                "encode the keys again"
            )
        return lexicon

    def fit(self, keys: Sequence[Any]) -> Vectors:
        lexicon = self.word_vectors
        return replace(self, size=lexicon.vectors.shape[1], checksum=lexicon.checksum)

    def encode(self, keys: Sequence[Any]) -> np.ndarray:
        lexicon, keys = self.word_vectors, to_texts(keys)
        out = np.zeros((len(keys), lexicon.vectors.shape[1]), np.float32)
        for i, text in enumerate(keys):
            rows = lexicon.find_rows(text)
            if rows:
                out[i] = lexicon.vectors[rows].mean(axis=0)
        return normalize_rows(out)

    def settings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": self.path,
            "limit": self.limit,
            "width": self.size,
            "checksum": self.checksum,
        }

    @classmethod
    def build(cls, settings: EncoderSettings, arrays: EncoderArrays) -> Vectors:
        _check_file_exists(Path(settings["path"]))
        return cls(*(settings[name] for name in ("path", "limit", "width", "checksum")))

    @classmethod
    def restore(
        cls, settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None
    ) -> Vectors:
        path = user_encoder.path if isinstance(user_encoder, cls) else settings["path"]
        return cls.build({**settings, "path": path}, arrays)


@dataclass(frozen=True)
class WordVectors:
    """The words of a file and their vectors (words, width).

    `index` is the row of each word, and `checksum` the checksum of the bytes that were read.
    """

    index: dict[str, int]
    vectors: np.ndarray
    checksum: str

    def find_rows(self, text: str) -> list[int]:
        """Return the rows of the known words of a text.

        A hyphenated word is looked up as a whole. If it is unknown, its parts are looked up.
        """
        rows = []
        for word in _WORD_PATTERN.findall(text):
            row = self._find_row(word)
            parts = [word] if row is not None else _WORD_PART_PATTERN.findall(word)
            rows += [row for row in map(self._find_row, parts) if row is not None]
        return rows

    def _find_row(self, word: str) -> int | None:
        """Return the row of a word, or of the word in lower case; None if both are unknown."""
        row = self.index.get(word)
        return self.index.get(word.lower()) if row is None else row


def read_word_vectors(path: Path, limit: int | None = None) -> WordVectors:
    """Return the words and vectors of a file. The result is cached until the file changes."""
    _check_file_exists(path)
    facts = path.stat()
    return _read_file(path, limit, facts.st_mtime_ns, facts.st_size)


def _check_file_exists(path: Path) -> None:
    if not path.is_file():
        raise VectorFileNotFoundError(
            f"Vectors: the file {path} does not exist: restore it, or pass "
            "encoder=Vectors(path) with another path"
        )


@memoize("encoders.vector_files", max_entries=2)
def _read_file(path: Path, limit: int | None, changed: int, size: int) -> WordVectors:
    """Read a file. `changed` and `size` are part of the cache key."""
    index: dict[str, int] = {}
    blocks: list[np.ndarray] = []
    digest = blake2b(digest_size=16)
    zipped = path.suffix == ".gz"
    with (
        open(path, "rb") as raw,
        gzip.GzipFile(fileobj=raw) if zipped else nullcontext(raw) as file,
        progress_bar(f"reading {path.name}", size) as advance,
    ):

        def read_chunk() -> bytes:
            try:
                data = file.read(BLOCK_BYTES)
            except (OSError, EOFError) as error:
                raise VectorFileError(f"{path}: damaged, {error}") from None
            digest.update(data)
            advance(raw.tell(), size)
            return data

        for words, vectors in _read_blocks(path, read_chunk):
            new = []
            for i, word in enumerate(words):
                if word not in index and (limit is None or len(index) < limit):
                    index[word] = len(index)
                    new.append(i)
            blocks.append(vectors if len(new) == len(vectors) else vectors[new])
            if limit is not None and len(index) >= limit:
                break
    if not index:
        raise VectorFileError(f"{path}: the file has no word vectors")
    return WordVectors(index, _concatenate_blocks(blocks), digest.hexdigest())


VectorBlock = tuple[list[str], np.ndarray]


def _read_blocks(path: Path, chunk: Callable[[], bytes]) -> Iterator[VectorBlock]:
    """Yield blocks of words and vectors of a file in any of the formats.

    `chunk()` returns the next bytes of the file, or b"" at its end.
    """
    data = chunk()
    first, _, after_header = data.partition(b"\n")
    fields = first.split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
        count, width = map(int, fields)
        if not 0 < width < 1 << 16:
            raise VectorFileError(
                f"{path}, line 1: vectors of {width} numbers are not supported, only of 1 to 65,535"
            )
        if _is_text(after_header, width):
            return _read_text(path, chunk, after_header, width, count)
        return _read_binary(path, chunk, after_header, width, count)
    if not _is_text(data, len(fields) - 1):
        raise VectorFileError(
            f"{path}, line 1: this is neither GloVe (a word and its numbers) nor word2vec (a line "
            "with the number of words and the length of the vectors)"
        )
    return _read_text(path, chunk, data, len(fields) - 1)


def _is_text(data: bytes, width: int) -> bool:
    """Return whether the first line of data is a word and `width` numbers."""
    numbers = data.partition(b"\n")[0].split()[1:]
    if not 0 < width <= len(numbers):
        return False
    try:
        return all(np.isfinite(float(number)) for number in numbers[-width:])
    except ValueError:
        return False


def _read_text(
    path: Path, chunk: Callable[[], bytes], rest: bytes, width: int, count: int | None = None
) -> Iterator[VectorBlock]:
    """Parse lines with a word and `width` numbers. `rest` are bytes that were read before.

    After a header there are `count` lines. Without a header, all lines are read.
    """
    start = 1 if count is None else 2
    line, more = start, True
    while more:
        data = chunk()
        more = bool(data)
        data = rest + data
        cut = data.rfind(b"\n") + 1 if more else len(data)
        lines, rest = data[:cut].split(b"\n"), data[cut:]
        if not lines[-1]:
            lines.pop()
        if lines:
            yield _parse_lines(path, lines, width, line)
            line += len(lines)
    if count is not None and line - start != count:
        raise VectorFileError(
            f"{path}: line 1 says that there are {count} words, but {line - start} follow: the "
            "file is truncated or damaged"
        )


def _parse_lines(path: Path, lines: list[bytes], width: int, line: int) -> VectorBlock:
    """Parse some lines; `line` is the number of the first one, for errors."""
    pairs = [text.rstrip().partition(b" ") for text in lines]
    if all(tail.count(b" ") == width - 1 for _, _, tail in pairs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                numbers = np.fromstring(
                    b" ".join(tail for _, _, tail in pairs), np.float32, sep=" "
                )
            except (DeprecationWarning, ValueError):
                # Some text is not a number. The code below finds the line.
                numbers = np.empty(0, np.float32)
        if len(numbers) == len(lines) * width and np.isfinite(numbers).all():
            return [_decode_word(word) for word, _, _ in pairs], numbers.reshape(-1, width)
    words, rows = [], []
    for i, text in enumerate(lines, line):
        word, *fields = text.rstrip().rsplit(b" ", width)  # a word may contain spaces
        try:
            row = [float(field) for field in fields]
        except ValueError:
            row = []
        if len(row) != width or not word or not np.isfinite(row).all():
            raise VectorFileError(
                f"{path}, line {i}: expected a word and {width} numbers, not "
                f"{_format_bytes(text)}: the file is damaged or truncated"
            )
        words.append(_decode_word(word))
        rows.append(row)
    return words, np.array(rows, np.float32)


def _read_binary(
    path: Path, chunk: Callable[[], bytes], rest: bytes, width: int, count: int
) -> Iterator[VectorBlock]:
    """Parse `count` records: a word, a space, and `width` little-endian float32.

    A newline may follow each record. `rest` are bytes that were read before.
    """
    size, done, position, data = 4 * width, 0, 0, rest
    while done < count:
        words: list[str] = []
        numbers = bytearray()
        while done < count:
            space = data.find(b" ", position)
            if space < 0 or space + 1 + size > len(data):
                break
            words.append(_decode_word(data[position:space].lstrip(b"\n")))
            numbers += data[space + 1 : space + 1 + size]
            position = space + 1 + size
            done += 1
        if words:
            vectors = np.frombuffer(bytes(numbers), "<f4").reshape(-1, width)
            bad = ~np.isfinite(vectors).all(axis=1)
            if bad.any():
                i = int(bad.argmax())
                raise VectorFileError(
                    f"{path}, word {done - len(words) + i + 1} ({words[i]!r}): expected {width} "
                    "finite numbers: the file is damaged"
                )
            yield words, vectors.astype(np.float32)
        if done < count:
            more = chunk()
            data, position = data[position:] + more, 0
            if not more or len(data) > 4 * BLOCK_BYTES:
                raise VectorFileError(
                    f"{path}: damaged or truncated after word {done} of {count} "
                    f"({_format_bytes(data[:60])} follows)"
                )


def _decode_word(word: bytes) -> str:
    return word.decode("utf-8", "replace")


def _format_bytes(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace"))


def _concatenate_blocks(blocks: list[np.ndarray]) -> np.ndarray:
    """Concatenate the blocks, and free the memory of each block once it is copied."""
    out = np.empty((sum(map(len, blocks)), blocks[0].shape[1]), np.float32)
    stop = len(out)
    while blocks:
        block = blocks.pop()
        out[stop - len(block) : stop] = block
        stop -= len(block)
    out.flags.writeable = False
    return out
