"""Every option under every transform gives what plain calls give."""

from __future__ import annotations

import pytest

import qkv
from tests.transforms import OPTIONS, TORCH, arrays

torch = pytest.importorskip("torch")

HOLD = ("grad", "checkpoint", "autocast")


@pytest.mark.parametrize("transform", HOLD)
@pytest.mark.parametrize("option", OPTIONS)
def test_torch(option, transform):
    TORCH[transform](
        lambda *x: qkv.attend(*x, **OPTIONS[option]),
        lambda n: [torch.tensor(x) for x in arrays(n)],
    )
