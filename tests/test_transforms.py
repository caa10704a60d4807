"""Every option under every transform gives what plain calls give."""

from __future__ import annotations

import pytest

from tests.transforms import OPTIONS, TORCH, made

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("transform", TORCH)
@pytest.mark.parametrize("option", OPTIONS)
def test_torch(option, transform):
    TORCH[transform](OPTIONS[option].call, made(OPTIONS[option], torch.tensor))
