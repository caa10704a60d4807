"""What a mask says where its inner rule has nothing to say."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import masks
from qkv.arrays import to_numpy
from tests.frameworks import FRAMEWORKS


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("fw", FRAMEWORKS, ids=lambda fw: fw.name)
def test_the_opposite_of_everything_is_nothing(fw, engine):
    x = fw.make(np.ones((3, 2)))
    everything = masks.window(float("inf"))
    assert (to_numpy(qkv.attend(x, x, x, mask=everything, engine=engine)) == 1).all()
    assert (to_numpy(qkv.attend(x, x, x, mask=~everything, engine=engine)) == 0).all()
