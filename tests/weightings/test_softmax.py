"""Softmax: what is dead has no part, in its weights or in the gradient of its temperature."""

from __future__ import annotations

import numpy as np
import pytest

from qkv import weightings


def test_the_temperature_s_gradient_does_not_meet_dead_scores():
    torch = pytest.importorskip("torch")
    s = torch.tensor([[1.0, 2.0, float("nan")], [0.5, -1.0, -float("inf")]])
    live, along = torch.tensor([[True, True, False]]), torch.tensor([1.0, -2.0, 3.0])
    found = []
    for scores, alive in ((s, live), (s[:, :2], live[:, :2])):
        t = torch.tensor(0.7, requires_grad=True)
        alpha = weightings.Softmax(t)(scores, alive)
        (alpha * along[: alpha.shape[1]]).sum().backward()
        found.append(float(t.grad))
    assert np.isfinite(found[0]) and abs(found[0] - found[1]) < 1e-6
