"""What holds for every encoder: shapes, settings that build it again, a score that can be used."""

import json
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.database.encoders import (
    ENCODERS,
    Arrays,
    Characters,
    Columns,
    Custom,
    Encoder,
    Exact,
    Heads,
    Lexical,
    Numbers,
    Sentences,
    Text,
    Vectors,
    Words,
    load,
    resolve,
)
from qkv.errors import ArgumentError, DtypeError
from qkv.testing import check_encoder

TEXTS = ["The Alchemist", "Dracula", "", "Frankenstein; or, The Modern Prometheus", "죄와 벌", "!?"]
GLOVE = Path(__file__).with_name("glove.txt")


def lengths(keys: list[Any]) -> list[list[int]]:
    return [[len(key), 1] for key in keys]


CASES: dict[str, tuple[Encoder, list[Any]]] = {
    "arrays": (Arrays(), [np.array([1.0, 2.0]), np.array([0.5, -1.0]), np.array([3.0, 0.0])]),
    "characters": (Characters(), TEXTS),
    "characters idf": (Characters(64, (1, 4), 0, idf=True), TEXTS),
    "columns": (
        Columns({"title": "characters", "year": "numbers"}),
        [("Dracula", 1897), ("Frankenstein", 1818), ("Solaris", 1961)],
    ),
    "custom": (Custom(lengths), TEXTS),
    "exact": (Exact(), ["a", 1, b"a", ("a", 2.5), {"a": [1]}]),
    "heads": (Heads({"letters": Characters(32, idf=True), "same": Exact(64)}, [3, 1]), TEXTS),
    "lexical": (Lexical(), ["the cat sat", "the dog ran", "a cow lay down", "죄와 벌"]),
    "numbers": (Numbers(), [(1.0, 200), (2.0, 100), (4.0, 500)]),
    "text": (Text(), TEXTS),
    "vectors": (Vectors(GLOVE), ["cat", "a kitten", "tax", "unheard"]),
    "words": (Words(), TEXTS),
}

CASE = pytest.mark.parametrize("name", CASES)


def fit_encoder(name: str) -> tuple[Encoder, list[Any]]:
    if name in ("text", "words"):
        pytest.importorskip("tokenizers")
        pytest.importorskip("wordllama")
    encoder, keys = CASES[name]
    return encoder.fit(keys), keys


def test_every_encoder_is_here() -> None:
    # Sentences has tests of its own, for it is slow; so has what was learned.
    assert {name.split()[0] for name in CASES} == set(ENCODERS) - {"sentences", "learned"}
    assert all(kind == encoder.kind for kind, encoder in ENCODERS.items())


@CASE
def test_what_holds_for_every_encoder(name: str) -> None:
    encoder, keys = fit_encoder(name)
    check_encoder(encoder, keys)
    settings = json.loads(json.dumps(encoder.settings(), allow_nan=False))
    assert load(settings, encoder.arrays()) == encoder
    for copy in (pickle.loads(pickle.dumps(encoder)), deepcopy(encoder)):
        assert copy == encoder
        np.testing.assert_array_equal(copy.encode(keys), encoder.encode(keys))


@pytest.mark.applies(lambda name: name != "custom")  # its function is the caller's
@CASE
def test_a_key_is_nearest_to_itself(name: str) -> None:
    encoder, keys = fit_encoder(name)
    known = np.flatnonzero(np.abs(encoder.encode_pair(keys, keys)[1]).sum(axis=1) > 0)
    keys = [keys[i] for i in known]
    alpha = qkv.weights(*encoder.encode_pair(keys, keys), score=encoder.default_score(len(keys)))
    assert alpha.argmax(axis=1).tolist() == list(range(len(keys)))


@CASE
def test_as_a_head_its_similarity_is_a_dot_product_of_at_most_one(name: str) -> None:
    encoder, keys = fit_encoder(name)
    similarity = encoder.encode_head(keys, query=True) @ encoder.encode_head(keys).T
    assert similarity.shape == (len(keys), len(keys))
    assert similarity.max() <= 1 + 1e-4
    assert not encoder.encode_head([None, keys[0]], query=True)[0].any()
    assert encoder.encode_head(keys).shape == (len(keys), encoder.head_width)


def test_names_resolve() -> None:
    assert resolve("characters") == Characters()
    assert resolve("text") == Text()
    assert resolve(["characters", "exact"]) == Heads([Characters(), Exact()])
    assert resolve(Sentences()) == Sentences()
    assert resolve(lengths) == Custom(lengths)
    assert resolve("math:fsum") == Custom(__import__("math").fsum)


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ("charcters", ArgumentError, "did you mean 'characters'"),
        ("bert", ArgumentError, "did you mean 'sentences'"),
        ("bm25", ArgumentError, "did you mean 'lexical'"),
        ("vectors", DtypeError, "required parameters: pass"),
        (Characters, DtypeError, "pass an instance"),
        ("qkv_no_module:f", ArgumentError, "cannot be imported"),
        ("math:nothing", ArgumentError, "cannot be imported"),
        (3, DtypeError, "must be a name"),
    ],
)
def test_bad_names_are_refused(bad: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        resolve(bad)


def test_settings_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown encoder 'wrds'"):
        load({"kind": "wrds"}, {})


@pytest.mark.parametrize("encoder", [Characters(), Exact(), Arrays(2), Numbers()])
def test_one_text_is_no_list_of_keys(encoder: Encoder) -> None:
    with pytest.raises((DtypeError, ArgumentError)):
        encoder.encode("Li")
