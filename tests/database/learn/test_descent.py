"""The candidates of a step, and when a descent stops."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from qkv.database import learn
from qkv.database.encoders import (
    Characters,
)
from qkv.database.encoders.learned import (
    Learned,
)
from qkv.database.learn import descent
from qkv.database.learn.task import build_task
from tests.database.learn.letters import ENGLISH, MADE_UP, PAIRS, Letters, top


def test_samples_negatives_when_keys_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MAX_FULL_CANDIDATES", 4)
    monkeypatch.setattr(descent, "MINING_SAMPLE_KEYS", 8)
    monkeypatch.setattr(descent, "FIRST_MINING_EPOCH", 0)
    encoder, report = learn.learn(
        Letters(), ENGLISH, PAIRS, held_out=0, vectors=True, batch=4, hard=2, epochs=20
    )
    assert report.after[1] >= 0.9
    assert top(encoder, MADE_UP, ENGLISH)[0] == 0


def test_mined_negatives_are_hard_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MAX_FULL_CANDIDATES", 4)
    monkeypatch.setattr(descent, "HARD_NEGATIVES_PER_PAIR", 2)
    keys = ["cat", "cats", "cat s", "dog", "dogs", "xyz"]
    pairs = [("cat", "cat"), ("cat", "cats"), ("dog", "dog")]
    task = build_task(Characters(64), keys, pairs, 0, 0)
    options = descent.TrainingOptions(1, False, 4, 1e-3, 1, 0.0, 1, None, 0)
    run = descent.GradientDescent(task, options, Learned.from_base(Characters(64), 6), 0.0)
    run.mine_hard_negatives(np.random.default_rng(0))
    assert run.hard_negatives is not None
    result = [{keys[i] for i in row} for row in run.hard_negatives]
    assert "cat s" in result[0] & result[1]
    assert not (result[0] | result[1]) & {"cat", "cats"}, "right keys are never wrong"
    assert "dogs" in result[2]
    assert "dog" not in result[2]


def test_keeps_the_best_epoch_and_stops() -> None:
    """Held-out pairs that contradict the others can only get worse."""
    held = [("cat", "cat"), ("dog", "dog")]
    wrong = [("cat", "dog"), ("dog", "cat"), ("cat", "tree")]
    encoder, report = learn.learn(
        Characters(64), ENGLISH, wrong, held_out=held, epochs=50, patience=2, rate=0.1
    )
    assert report.best < report.epochs < 50
    assert report.stopped == "no improvement for 2 epochs"
    assert report.after[1] == 1.0
    assert top(encoder, ["cat"], ENGLISH) == [0]


def test_budget() -> None:
    _, report = learn.learn(Letters(), ENGLISH, PAIRS, budget_s=1e-9, held_out=0)
    assert report.epochs == 1
    assert report.stopped == "stopped after 1e-09 s"


def test_ctrl_c_keeps_the_best_so_far() -> None:
    def stop(done: int, total: int | None) -> None:
        if done == 50:
            raise KeyboardInterrupt

    encoder, report = learn.learn(Letters(), ENGLISH, PAIRS, held_out=0, progress=stop)
    assert report.epochs == 2
    assert report.best == 2 and report.interrupted
    assert "interrupted in epoch 3: returned the best so far" in str(report)
    straight, _ = learn.learn(Letters(), ENGLISH, PAIRS, held_out=0)
    assert np.isfinite(encoder.encode_query(MADE_UP)).all()
    assert np.abs(encoder.encode_query(MADE_UP) - straight.encode_query(MADE_UP)).max() > 1e-3


def test_ctrl_c_before_the_first_best_is_whole_keeps_nothing() -> None:
    def profile(frame, event, arg) -> None:
        names = frame.f_code.co_name, frame.f_back.f_code.co_name  # a comprehension is inside
        if event == "c_return" and arg.__name__ == "copy" and "run_epoch" in names:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with pytest.raises(KeyboardInterrupt):
            learn.learn(Letters(), ENGLISH, PAIRS, held_out=0)
    finally:
        sys.setprofile(None)


def test_ctrl_c_before_anything_was_learned_is_raised() -> None:
    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn.learn(Letters(), ENGLISH, PAIRS, held_out=0, progress=stop)


def test_progress_counts_steps() -> None:
    seen: list[tuple[int, int | None]] = []
    learn.learn(Letters(), ENGLISH, PAIRS, epochs=2, held_out=0, progress=lambda *x: seen.append(x))
    assert seen == [(i, 40) for i in range(1, 41)]
