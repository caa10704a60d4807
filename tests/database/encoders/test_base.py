"""What an encoder of one's own gets for nothing: its fields are what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import qkv
from qkv.database.encoders import ENCODERS, Encoder
from qkv.database.encoders.base import select_by_prefix


@dataclass(frozen=True)
class Offsets(Encoder):
    """Numbers less their mean, which `fit` finds."""

    scale: float = 1.0
    powers: tuple[int, ...] = (1, 2)
    mean: np.ndarray | None = field(default=None, compare=False)
    kind: ClassVar[str] = "offsets"

    @property
    def width(self) -> int:
        return len(self.powers)

    def fit(self, keys: Any) -> Encoder:
        return replace(self, mean=np.array([np.mean(keys)]))

    def encode(self, keys: Any) -> np.ndarray:
        x = self.scale * (np.asarray(keys, float) - self.mean)
        return np.stack([x**power for power in self.powers], axis=1).astype(np.float32)

    def __post_init__(self) -> None:
        object.__setattr__(self, "powers", tuple(self.powers))


def test_fields_are_settings_and_arrays() -> None:
    encoder = Offsets(2.0).fit([1.0, 3.0])
    assert encoder.settings() == {"kind": "offsets", "scale": 2.0, "powers": [1, 2]}
    assert encoder.arrays()["mean"].tolist() == [2.0]
    assert Offsets().arrays() == {}
    again = Offsets.build(encoder.settings(), encoder.arrays())
    assert again == encoder
    np.testing.assert_array_equal(again.encode([5.0]), [[6.0, 36.0]])


def test_a_database_keeps_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, "offsets", Offsets)
    with qkv.open(tmp_path / "d.qkv", encoder=Offsets(0.5)) as D:
        D.add([1.0, 2.0, 9.0], [10.0, 20.0, 90.0])
        before = D.ask(2.0).weights
    with qkv.open(tmp_path / "d.qkv") as D:
        assert D.encoder == Offsets(0.5) and D.encoder.arrays()["mean"].tolist() == [4.0]
        np.testing.assert_array_equal(D.ask(2.0).weights, before)


def test_under_takes_the_prefix_off() -> None:
    arrays = {"0.w": np.zeros(1), "1.w": np.ones(1), "10.w": np.ones(2)}
    assert list(select_by_prefix("1.", arrays)) == ["w"]
    assert select_by_prefix("1.", arrays)["w"] is arrays["1.w"]
