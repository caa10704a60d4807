"""What a person builds goes into a pickle and comes out equal, in another process too."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.cluster import LostShardError
from qkv.database.errors import DuplicateKeyError
from qkv.frameworks import tree
from tests.cases import LEARNED, MASKS, SCORES, WEIGHTINGS

UNNAMED = ("modified", "own_class", "own_function", "custom")
"""Made of functions of the caller's, which are his to pickle."""


def is_even(b, h, i, j):
    return j % 2 == 0


def halve_score(s, b, h, i, j):
    return s * 0.5


THINGS: dict[str, Any] = {
    **{
        f"score {x}": scores.resolve(make(a)) for x, (a, make) in SCORES.items() if x not in UNNAMED
    },
    **{f"weighting {x}": weighting for x, weighting in (WEIGHTINGS | LEARNED).items()},
    **{
        f"mask {x}": masks.resolve(make(a))[0] if x != "float" else masks.array(a["mask"])
        for x, (a, make) in MASKS.items()
        if x not in (*UNNAMED, "none")
    },
    "mask custom": masks.custom(is_even),
    "mask global_tokens": masks.global_tokens(2),
    "score modified": scores.Modified(scores.Dot(), halve_score),
    "mask arrays": masks.causal & np.zeros((3, 3)),
    "mask either": masks.dilated(2, 3) | ~masks.strided(2) | masks.global_tokens(3),
}


def test_every_name_is_here():
    for module, what in ((scores, "score"), (weightings, "weighting")):
        kinds = {type(x) for name, x in THINGS.items() if name.startswith(what)}
        assert {*module.NAMES.values()} <= kinds
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
    custom = {
        name: x for name, x in THINGS.items() if "tests" not in pickle.dumps(x).decode("latin1")
    }
    assert len(custom) > len(THINGS) - 4
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(custom), capture_output=True, check=True
    )
    assert pickle.loads(run.stdout) == custom


def test_what_differs_is_not_equal():
    w = np.ones((2, 2))
    assert scores.Multiplicative(w) == scores.Multiplicative(w.copy())
    for other in (w * 2, w[:1], w.astype("float32")):
        assert scores.Multiplicative(w) != scores.Multiplicative(other)
    assert weightings.Softmax(np.array(1.0)) != weightings.Softmax(1.0)
    assert weightings.Softmax() == weightings.Softmax(1) and weightings.Softmax() != scores.Dot()
    assert masks.lengths([3, 4]) == masks.lengths([3, 4]) != masks.lengths([3, 5])
    assert masks.causal & masks.window(2) != masks.causal | masks.window(2)
    assert tree.records_equal([1, (2.0,)], [1, (2.0,)]) and not tree.records_equal([1], [1, 2])
    assert hash(masks.window(2)) == hash(masks.window(2))


# Databases and what they say


def _filled(path: Any = None) -> Any:
    D = qkv.Database() if path is None else qkv.open(path)
    D.add([1.0, 2.0, 4.0], [10.0, 20.0, 40.0])
    D.add([8.0], [80.0])
    D.remove(2.0)
    return D


def test_a_database_in_memory_goes_with_all_its_versions():
    D = _filled()
    for made in (pickle.loads(pickle.dumps(D)), copy.deepcopy(D)):
        assert made.ask(3.0).weights.tolist() == D.ask(3.0).weights.tolist()
        assert list(made.at(1).items()) == list(D.at(1).items()) and made.version == 3
        made.add(9.0, 90.0)
        assert made[9.0] == 90.0 and 9.0 not in D and (len(made), len(D)) == (4, 3)
    both = pickle.loads(pickle.dumps((D, D.at(2))))
    both[0].update(1.0, 11.0)
    assert both[1].at(4)[1.0] == 11.0 and both[1].version == 2, "one store, as it was"


def test_a_database_on_disk_is_opened_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with _filled("a.qkv") as D:
        sent = pickle.dumps((D, D.at(2)))
        other = copy.deepcopy(D)
        D.update(1.0, 11.0)
        assert other[1.0] == 11.0
    other.close()
    with pytest.raises(qkv.QkvError, match="closed"):
        pickle.dumps(D)
    code = (
        "import os, pickle, sys; os.chdir('/'); D, old = pickle.load(sys.stdin.buffer)\n"
        "print(D[1.0], old[2.0], len(D), old.version)"
    )
    run = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert run.stdout.split() == [b"11.0", b"20.0", b"3", b"2"]
    (tmp_path / "a.qkv").rename(tmp_path / "b.qkv")
    with pytest.raises(qkv.QkvError, match="does not exist"):
        pickle.loads(sent)


def test_an_answer_says_the_same_elsewhere():
    D = qkv.Database([(float(i), float(i * i)) for i in range(60)])
    D.calibrate([(i + 0.1, float(i)) for i in range(50)])
    none, few = D.ask(3.2, where="value > 1e9"), _filled().ask([1.0, 5.0])[1]
    for answer in (D.ask(3.2, top=2), none, few):
        there = pickle.loads(pickle.dumps(answer))
        assert (
            repr(there) == repr(answer) and there == answer and there.explain() == answer.explain()
        )
        assert there.weights.tolist() == answer.weights.tolist() and there.spread == answer.spread
        assert there.coverage is None or there.prediction_set == answer.prediction_set
        assert there.above(0.99) == answer.above(0.99)
        for what in (there.influence, lambda there=there: there.without(0)):
            with pytest.raises(qkv.QkvError, match="ask the database"):
                what()
    answer = D.ask(3.2, top=2)
    with pytest.raises(qkv.QkvError, match="ask the database"):
        pickle.loads(pickle.dumps(answer)).above(1e-6)
    here = copy.deepcopy(answer)
    assert here.rows == answer.rows and here.rows is not answer.rows
    assert here.without(3).value == answer.without(3).value, "the database is still there"


def test_what_is_raised_comes_out_of_a_pool():
    D = qkv.Database({"Zhang": 1, "Li": 2})
    with pytest.raises(KeyError) as result:
        D["Zang"]
    error = result.value
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert str(made) == str(error) and made.key == "Zang" and made.nearest_keys[0] == "Zhang"
    for error in (DuplicateKeyError("told", 3), LostShardError("told", 1)):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == "told" and vars(again) == vars(error)
