"""The temperature that suits what was held out."""

from __future__ import annotations

import numpy as np

from qkv.database import Database, learn
from qkv.database.encoders import Characters
from tests.database.learn.letters import ENGLISH, PAIRS, Letters


def test_sharpness_is_calibrated_on_what_was_held_out() -> None:
    """No other factor on τ gives the held-out pairs a lower −ln α."""
    held = PAIRS[:5]
    encoder, _ = learn.learn(Letters(), ENGLISH, PAIRS[5:], held_out=held, epochs=2)
    s = encoder.encode_query([q for q, _ in held]) @ encoder.encode(ENGLISH).T

    def loss(factor: float) -> float:
        z = s.astype(np.float64) * encoder.sharpness * factor
        alpha = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        return float(-np.log(alpha[np.arange(5), np.arange(5)]).mean())

    assert loss(1.0) <= min(loss(0.8), loss(1.25)) + 1e-6


def test_pairs_that_are_distinguished_make_it_no_sharper() -> None:
    """However often they are learned: each time τ was twenty times as sharp, up to infinity."""
    D = Database({f"key {i}": i for i in range(12)}, encoder=Characters(32))
    pairs = [("kee 1", "key 1"), ("ky 2", "key 2"), ("ke 9", "key 9")]
    result = [D.learn(pairs, epochs=1).sharpness for _ in range(6)]
    assert result[-1] < 4 * result[1], result
