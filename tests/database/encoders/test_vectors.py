import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from qkv.database.encoders import Vectors, load
from qkv.database.encoders.vectors import (
    VectorFileError,
    VectorFileNotFoundError,
    read_word_vectors,
)

WORDS = ["the", "cat", "don't", "New-York", "straße", "night"]
NUMBERS = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def glove(words: list[str] = WORDS, numbers: np.ndarray = NUMBERS) -> bytes:
    rows = (f"{w} {' '.join(f'{x:.9g}' for x in v)}" for w, v in zip(words, numbers, strict=True))
    return ("\n".join(rows) + "\n").encode()


def text() -> bytes:
    return b"6 5\n" + glove()


def binary(newline: bytes = b"\n") -> bytes:
    rows = (w.encode() + b" " + v.tobytes() for w, v in zip(WORDS, NUMBERS, strict=True))
    return b"6 5\n" + newline.join(rows)


FORMATS = {
    "glove": glove(),
    "glove, dos": glove().replace(b"\n", b"\r\n"),
    "glove, no last line end": glove()[:-1],
    "word2vec text": text(),
    "word2vec binary": binary(),
    "word2vec binary, no line ends": binary(b""),
}


def write_file(folder: Path, data: bytes, name: str = "vectors") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("file", ["vectors", "vectors.gz"])
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_every_format_gives_the_same_table(
    name: str, file: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FORMATS[name]
    if block == 7:  # blocks end in the middle of words and numbers, but the header is whole
        monkeypatch.setattr("qkv.database.encoders.vectors.BLOCK_BYTES", 90)
    table = read_word_vectors(write_file(tmp_path, data, file))
    assert list(table.index) == WORDS
    np.testing.assert_array_equal(table.vectors, NUMBERS)


def test_a_text_is_the_mean_of_its_words(tmp_path: Path) -> None:
    encoder = Vectors(write_file(tmp_path, glove()))
    texts = ["the cat", "The  CAT, unheard!", "don't", "New-York night", "the-cat", "", "what?"]
    got = encoder.encode(texts)
    row = dict(zip(WORDS, NUMBERS, strict=True))
    the_cat = row["the"] + row["cat"]
    sums = [the_cat, the_cat, row["don't"], row["New-York"] + row["night"], the_cat]
    want = [x / np.linalg.norm(x) for x in sums]
    np.testing.assert_allclose(got[:5], want, atol=1e-6)
    assert not got[5:].any()


def test_words_may_hold_spaces_and_come_twice(tmp_path: Path) -> None:
    data = glove(["cat", ". . .", "cat", "dog", "x", "y"])
    table = read_word_vectors(write_file(tmp_path, data))
    assert list(table.index) == ["cat", ". . .", "dog", "x", "y"]
    np.testing.assert_array_equal(table.vectors, NUMBERS[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("data", [glove(), binary()])
def test_a_limit_keeps_the_first_words(data: bytes, tmp_path: Path) -> None:
    table = read_word_vectors(write_file(tmp_path, data), 2)
    assert list(table.index) == WORDS[:2]
    np.testing.assert_array_equal(table.vectors, NUMBERS[:2])


def lines(*changed: tuple[int, bytes]) -> bytes:
    rows = glove().split(b"\n")
    for i, line in changed:
        rows[i - 1] = line
    return b"\n".join(rows)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "neither GloVe"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "line 1"),
        (b"just some words here\n", "line 1"),
        (lines((3, b"cat 1 2 3")), "line 3: expected a word and 5 numbers, not 'cat 1 2 3'"),
        (lines((4, b"cat 1 2 x 4 5")), "line 4"),
        (lines((5, b"cat 1 2 nan 4 5")), "line 5"),
        # One number too many and one too few must not cancel out.
        (lines((2, b"cat 1 2 3 4"), (3, b"dog 1 2 3 4 5 6")), "line 2"),
        (lines((6, b"")), "line 6"),
        (text()[:-30], "line 7"),
        (text().replace(b"6 5", b"7 5"), "there are 7 words, but 6 follow"),
        (binary()[:-3], "truncated after word 5 of 6"),
        (b"9 5\n" + binary()[4:], "truncated after word 6 of 9"),
        (binary().replace(NUMBERS[2].tobytes(), b"\xff" * 20), r"word 3 \(\"don't\"\)"),
        (b"6 0\n", "vectors of 0 numbers"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(data: bytes, says: str, tmp_path: Path) -> None:
    path = write_file(tmp_path, data)
    with pytest.raises(VectorFileError, match=says) as error:
        read_word_vectors(path)
    assert str(path) in str(error.value)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path, glove(), "vectors.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(VectorFileError, match=r"vectors\.gz: damaged"):
        read_word_vectors(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path, glove())
    settings = json.loads(json.dumps(Vectors(path).fit([]).settings()))
    path.unlink()
    for opened in (lambda: load(settings, {}), lambda: Vectors(path).encode(["a"])):
        with pytest.raises(VectorFileNotFoundError, match=r"vectors does not exist") as error:
            opened()
        assert isinstance(error.value, FileNotFoundError)


def test_another_file_in_its_place_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path, glove())
    encoder = Vectors(path).fit([])
    write_file(tmp_path, glove(numbers=NUMBERS * 2))
    with pytest.raises(VectorFileError, match="has changed"):
        load(encoder.settings(), {}).encode(["cat"])


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        Vectors("somewhere", limit=0)
