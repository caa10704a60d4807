"""A descent that goes on from where it was interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.database import learn
from qkv.database.learn import descent
from tests.database.learn.letters import ENGLISH, MADE_UP, PAIRS, Letters


@pytest.mark.parametrize("when", [1, 3, 5])
def test_resumes_to_the_same_end(when: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        descent, "MAX_FULL_CANDIDATES", 4
    )  # so that mined negatives must be kept as well
    options: dict[str, Any] = {"epochs": 6, "vectors": True, "held_out": PAIRS[:3], "batch": 4}
    straight, report = learn.learn(Letters(), ENGLISH, PAIRS, **options)
    path = tmp_path / "state.safetensors"

    def stop(done: int, total: int | None) -> None:
        if done == when * 20 + 7:
            raise KeyboardInterrupt

    learn.learn(Letters(), ENGLISH, PAIRS, resume=path, progress=stop, **options)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    resumed, second = learn.learn(Letters(), ENGLISH, PAIRS, resume=path, **options)
    assert second.loss == report.loss
    assert second.best == report.best
    np.testing.assert_array_equal(resumed.encode_query(MADE_UP), straight.encode_query(MADE_UP))
    finished, third = learn.learn(Letters(), ENGLISH, PAIRS, resume=path, **options)
    assert third.loss == report.loss
    np.testing.assert_array_equal(finished.encode_query(MADE_UP), straight.encode_query(MADE_UP))


def test_refuses_a_checkpoint_of_something_else(tmp_path: Any) -> None:
    path = tmp_path / "state.safetensors"
    learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, resume=path)
    with pytest.raises(learn.CheckpointError, match="other keys, pairs or settings"):
        learn.learn(Letters(), ENGLISH, PAIRS[:5], epochs=1, resume=path)
    with pytest.raises(learn.CheckpointError, match="other keys, pairs or settings"):
        learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, rate=0.1, resume=path)


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint at all, but text"])
def test_refuses_a_damaged_checkpoint(damage: bytes, tmp_path: Any) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(damage)
    with pytest.raises(learn.CheckpointError, match=r"state\.safetensors"):
        learn.learn(Letters(), ENGLISH, PAIRS, epochs=1, resume=path)
    assert path.read_bytes() == damage
