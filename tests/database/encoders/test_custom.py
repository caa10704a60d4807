from typing import Any

import numpy as np
import pytest

from qkv import Database
from qkv.database.encoders import Custom, custom, load
from qkv.database.encoders.base import sharpness_for_rows
from qkv.errors import ArgumentError, DtypeError, ShapeError


def lengths(keys: list[Any]) -> list[list[int]]:
    return [[len(key), 1] for key in keys]


def test_the_function_makes_the_vectors() -> None:
    encoder = Custom(lengths).fit(["Li"])
    assert encoder.width == 2
    np.testing.assert_array_equal(encoder.encode(["Li", "Zhang"]), [[2, 1], [5, 1]])


def test_every_key_is_nearest_to_itself() -> None:
    """By the cosine: a longer vector in nearly the same direction does not outweigh it."""
    rng = np.random.default_rng(0)
    vectors = dict(zip("abcdefgh", rng.normal(size=(8, 16)), strict=True))
    vectors["long"] = 50 * (vectors["a"] + 0.1 * rng.normal(size=16))
    encoder = Custom(lambda keys: [vectors[key] for key in keys], width=16)
    D = Database({key: key for key in vectors}, encoder=encoder)
    for key in vectors:
        assert D.ask(key).rows[0].key == key
    assert D.ask("b").rows[0].weight > 0.9
    code = np.array(list(vectors.values()), np.float32)
    unit = code / np.linalg.norm(code, axis=1, keepdims=True)
    scores = sharpness_for_rows(len(vectors)) * unit @ unit[0]
    alpha = np.exp(scores - scores.max())
    np.testing.assert_allclose(D.ask("a").weights, alpha / alpha.sum(), rtol=1e-4)
    with_scale = Custom(lambda keys: [7 * vectors[key] for key in keys], width=16)
    other = Database({key: key for key in vectors}, encoder=with_scale)
    np.testing.assert_allclose(other.ask("a").weights, D.ask("a").weights, rtol=1e-4)


def test_a_function_may_give_any_frameworks_array() -> None:
    torch = pytest.importorskip("torch")
    encoder = Custom(lambda keys: torch.ones(len(keys), 3), width=3)
    np.testing.assert_array_equal(encoder.encode(["a", "b"]), np.ones((2, 3)))


def test_settings_keep_the_import_path() -> None:
    encoder = Custom(lengths, width=2)
    assert encoder.settings()["name"] == f"{__name__}:lengths"
    assert load(encoder.settings(), {}) == encoder


def test_a_name_in_a_file_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"kind": "custom", "name": "subprocess:getoutput", "width": 3}
    with pytest.raises(ArgumentError, match=r"'subprocess:getoutput'.*encoder=Custom\(function\)"):
        load(settings, {})
    monkeypatch.setattr(custom, "_FUNCTION_BY_NAME", {})
    with pytest.raises(ArgumentError, match="encoder="):
        load(Custom(lambda keys: keys, width=1).settings(), {})


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        (lambda keys: [1, 2], ShapeError, r"must return \(1, width\)"),
        (lambda keys: np.ones((2, 2)), ShapeError, r"must return \(1, width\), not \(2, 2\)"),
        (lambda keys: np.ones((1, 5)), ShapeError, "returned 5 numbers per key, not 2"),
        (lambda keys: [["a", "b"]], DtypeError, "real numbers"),
        (lambda keys: [[1.0, float("nan")]], ArgumentError, "NaN or infinity for the key 'Li'"),
    ],
)
def test_a_wrong_result_is_refused(result: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Custom(result, width=2).encode(["Li"])


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(DtypeError, match="function of a list"):
        Custom("lengths")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="width="):
        _ = Custom(lengths).width
