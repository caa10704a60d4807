"""What a person builds goes into a pickle and comes out equal, in another process too."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from qkv import masks, scores, weightings
from qkv.arrays import tree
from tests.cases import LEARNED, MASKS, SCORES, WEIGHTINGS

UNNAMED = ("modified", "own_class", "own_function", "custom")
"""Made of functions of the caller's, which are his to pickle."""


def even(b, h, i, j):
    return j % 2 == 0


def bent(s, b, h, i, j):
    return s * 0.5


THINGS: dict[str, Any] = {
    **{
        f"score {x}": scores.resolve(make(a)) for x, (a, make) in SCORES.items() if x not in UNNAMED
    },
    **{f"weighting {x}": how for x, how in (WEIGHTINGS | LEARNED).items()},
    **{
        f"mask {x}": masks.resolve(make(a))[0] if x != "float" else masks.array(a["mask"])
        for x, (a, make) in MASKS.items()
        if x not in (*UNNAMED, "none")
    },
    "mask custom": masks.custom(even),
    "mask global_tokens": masks.global_tokens(2),
    "score modified": scores.Modified(scores.Dot(), bent),
    "mask arrays": masks.causal & np.zeros((3, 3)),
    "mask either": masks.dilated(2, 3) | ~masks.strided(2) | masks.global_tokens(3),
}


def test_every_name_is_here():
    for room, what in ((scores, "score"), (weightings, "weighting")):
        kinds = {type(x) for name, x in THINGS.items() if name.startswith(what)}
        assert {*room.NAMES.values()} <= kinds
    assert {*masks.NAMES} - {name.partition(" ")[2] for name in THINGS} == set()


@pytest.mark.parametrize("name", THINGS)
def test_a_copy_is_equal(name):
    thing = THINGS[name]
    for made in (copy.deepcopy(thing), copy.copy(thing), pickle.loads(pickle.dumps(thing))):
        assert type(made) is type(thing) and made == thing and repr(made) == repr(thing)


def test_in_another_process():
    code = (
        "import pickle, sys; x = pickle.load(sys.stdin.buffer); pickle.dump(x, sys.stdout.buffer)"
    )
    mine = {
        name: x for name, x in THINGS.items() if "tests" not in pickle.dumps(x).decode("latin1")
    }
    assert len(mine) > len(THINGS) - 4
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(mine), capture_output=True, check=True
    )
    assert pickle.loads(run.stdout) == mine


def test_what_differs_is_not_equal():
    w = np.ones((2, 2))
    assert scores.Multiplicative(w) == scores.Multiplicative(w.copy())
    for other in (w * 2, w[:1], w.astype("float32")):
        assert scores.Multiplicative(w) != scores.Multiplicative(other)
    assert weightings.Softmax(np.array(1.0)) != weightings.Softmax(1.0)
    assert weightings.Softmax() == weightings.Softmax(1) and weightings.Softmax() != scores.Dot()
    assert masks.lengths([3, 4]) == masks.lengths([3, 4]) != masks.lengths([3, 5])
    assert masks.causal & masks.window(2) != masks.causal | masks.window(2)
    assert tree.same([1, (2.0,)], [1, (2.0,)]) and not tree.same([1], [1, 2])
    assert hash(masks.window(2)) == hash(masks.window(2))
