"""Selected rows give what a mask over all rows gives."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv import scores
from qkv.database.table.row_selection import RowSelection

rng = np.random.default_rng(0)
KEY, VALUE = rng.normal(size=(400, 6)).astype("f4"), rng.normal(size=(400, 2)).astype("f4")
GROUP = rng.integers(0, 100, 400)


def build(path=None, **options):
    columns = {"k": KEY, "v": VALUE, "g": GROUP.tolist()}
    return qkv.Database.from_columns(columns, key="k", value="v", path=path, **options)


def test_few_rows_are_read_alone():
    mask = np.arange(8) < 2
    few, many = RowSelection(8, mask), RowSelection(8, ~mask)
    assert few.positions.tolist() == [0, 1] and few.read_count == 2 and few.read_mask is None
    assert many.positions is None and many.read_count == 8 and many.read_mask is many.mask
    assert RowSelection(8, np.ones(8, bool)).mask is None
    none = RowSelection(8, np.zeros(8, bool))
    assert none.row_count == 0 and none.positions is None and not none.read_mask.any()


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("limit", [3, 60, 100])
@pytest.mark.parametrize("tolerance", [None, 0.2])
@pytest.mark.parametrize("score", [scores.Cosine(0.2), scores.ScaledDot()])
def test_ask_and_attend_use_the_rows_that_pass(precision, limit, tolerance, score, tmp_path):
    options = {} if precision is None else {"precision": precision}
    with build(tmp_path / "d.qkv", **options) as database:
        database.remove(KEY[:40])
        live = np.arange(400) >= 40
        query = rng.normal(size=(3, 6)).astype("f4")
        close = {"atol": 0.05 if precision or tolerance else 1e-5}
        for _ in range(2):  # the second call finds the selection
            for bound in (limit, 100):
                passes = live & (bound > GROUP)
                settings = {"score": score, "where": f"g < {bound}", "tolerance": tolerance}
                want = qkv.attend(query, KEY[passes], VALUE[passes], score=score)
                alpha = qkv.weights(query, KEY[passes], score=score)
                np.testing.assert_allclose(database.attend(query, **settings), want, **close)
                for i, answer in enumerate(database.ask(query, **settings)):
                    np.testing.assert_allclose(answer.value, want[i], **close)
                    weights = answer.weights
                    assert not weights[~passes[live]].any()
                    np.testing.assert_allclose(weights[passes[live]], alpha[i], **close)


def test_gradients_of_selected_rows():
    torch = pytest.importorskip("torch")
    database, passes = build(), GROUP < 10
    q = torch.tensor(rng.normal(size=(3, 6)), requires_grad=True)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    key, value = (torch.tensor(x[passes].astype(float)) for x in (KEY, VALUE))
    score = scores.Cosine(temperature)
    for _ in range(2):
        got = torch.autograd.grad(
            database.attend(q, score=score, where="g < 10").square().sum(), [q, temperature]
        )
        want = torch.autograd.grad(
            qkv.attend(q, key, value, score=score).square().sum(), [q, temperature]
        )
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two)


def test_an_answer_without_a_selected_row():
    database = build()
    passes = np.flatnonzero(GROUP < 10)
    answer = database.ask(KEY[0], where="g < 10", score=scores.ScaledDot())
    other = answer.without(int(passes[1]))
    remaining = np.delete(passes, 1)
    want = qkv.attend(KEY[:1], KEY[remaining], VALUE[remaining])[0]
    np.testing.assert_allclose(other.value, want, rtol=1e-5)
    assert other.total == len(remaining)
