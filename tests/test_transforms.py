"""Every option under every transform gives what plain calls give."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks
from tests import cases
from tests.transforms import OPTIONS, TORCH, arrays, made

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("transform", TORCH)
@pytest.mark.parametrize("option", OPTIONS)
def test_torch(option, transform):
    TORCH[transform](OPTIONS[option].call, made(OPTIONS[option], torch.tensor))


COVERING = cases.covering()


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "jvp"])
@pytest.mark.parametrize("mask", cases.MASKS)
def test_torch_takes_every_two_of_score_weighting_and_mask(mask, transform):
    for names in COVERING:
        if names[2] != mask:
            continue
        case = cases.case(*names)
        order = sorted(case.arrays, key=lambda name: case.arrays[name].dtype.kind != "f")
        TORCH[transform](
            lambda *x, case=case, order=order: case.attend(dict(zip(order, x, strict=True))),
            lambda n, case=case, order=order: [torch.tensor(case.arrays[x]) for x in order],
        )


HOLDS = {
    "dilated": masks.dilated(1, 2) | masks.global_tokens(1),
    "strided": ~masks.strided(2),
    "bottom right": masks.causal(align="bottom_right") & masks.window(3),
    "blocks": masks.blocks(np.arange(100).reshape(10, 10) % 3 > 0, 4),
    "custom": masks.custom(lambda b, h, i, j: (i + j + h) % 2 == 0),
    "lengths": masks.lengths([3, 5]),
    "offset": masks.causal(offset=np.array([1, -1])),
}


@pytest.mark.parametrize("mask", HOLDS)
def test_every_mask_compiles_for_new_lengths(mask):
    TORCH["compile, new lengths"](
        lambda *x: qkv.attend(*x, mask=HOLDS[mask]),
        lambda n: [torch.tensor(x) for x in arrays(n)],
    )
