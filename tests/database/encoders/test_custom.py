from typing import Any

import numpy as np
import pytest

from qkv.database.encoders import Custom, custom, load
from qkv.errors import ArgumentError, DtypeError, ShapeError


def lengths(keys: list[Any]) -> list[list[int]]:
    return [[len(key), 1] for key in keys]


def test_the_function_makes_the_vectors() -> None:
    encoder = Custom(lengths).fit(["Li"])
    assert encoder.width == 2
    np.testing.assert_array_equal(encoder.encode(["Li", "Zhang"]), [[2, 1], [5, 1]])


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
    monkeypatch.setattr(custom, "_SEEN", {})
    with pytest.raises(ArgumentError, match="encoder="):
        load(Custom(lambda keys: keys, width=1).settings(), {})


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        (lambda keys: [1, 2], ShapeError, r"must give \(1, width\)"),
        (lambda keys: np.ones((2, 2)), ShapeError, r"must give \(1, width\), not \(2, 2\)"),
        (lambda keys: np.ones((1, 5)), ShapeError, "gave 5 numbers a key, not 2"),
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
