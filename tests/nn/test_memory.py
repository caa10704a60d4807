"""A database as a layer: what it answers, what it learns, what it forgets."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv import scores, weightings  # noqa: E402
from qkv.nn import Memory, MultiplicativeScore  # noqa: E402

CHANCE = np.random.default_rng(0)
KEYS, VALUES = CHANCE.normal(size=(40, 4)), CHANCE.normal(size=(40, 3))
QUERY = torch.tensor(CHANCE.normal(size=(2, 5, 8)), requires_grad=True)
"""Two heads of four numbers each."""


def facts(keys=KEYS, values=VALUES):
    return qkv.Database(keys.astype(np.float32), values)


OWN_SCORE = facts().encoder.default_score(len(KEYS))


def dense(query, weighting, score=OWN_SCORE, keys=KEYS, values=VALUES):
    """Every head by itself, in float64."""
    keys = torch.tensor(keys.astype(np.float32)).double()
    values = torch.as_tensor(values)
    options = {"score": score, "weighting": weighting, "engine": "dense"}
    heads = [qkv.attend(x, keys, values, **options) for x in query.split(4, -1)]
    return torch.cat(heads, -1)


@pytest.mark.parametrize("weighting", [weightings.TopK(6), weightings.TopK(90), "softmax", "hard"])
@pytest.mark.parametrize("score", [None, "gaussian"])
def test_heads_attend_to_the_rows(weighting, score):
    memory = Memory(facts(), heads=2, score=score, weighting=weighting)
    want, actual = dense(QUERY, weighting, score or OWN_SCORE), memory(QUERY)
    torch.testing.assert_close(actual, want, rtol=1e-9, atol=1e-9)
    if weighting != "hard":
        along = torch.ones_like(want)
        one, two = (torch.autograd.grad(x, QUERY, along)[0] for x in (actual, want))
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighting", [weightings.TopK(6), "softmax"])
def test_near_by_a_tolerance(weighting):
    memory = Memory(facts(), heads=2, weighting=weighting, tolerance=0.01)
    want = dense(QUERY, weighting)
    with torch.no_grad():
        error = (memory(QUERY) - want).abs().max()
    assert error <= 2 * 0.01 * np.abs(VALUES).max()  # the sum of |α′ − α| is at most 2ε
    torch.testing.assert_close(memory(QUERY), want, rtol=1e-9, atol=1e-9)


def test_gradients_by_gradcheck():
    memory = Memory(facts(), heads=2, weighting=weightings.TopK(5))
    assert torch.autograd.gradcheck(memory, QUERY, fast_mode=True)


def test_a_learned_score_learns():
    memory = Memory(facts(), score=MultiplicativeScore, weighting=weightings.TopK(7)).double()
    query = QUERY[..., :4]
    want = dense(query, weightings.TopK(7), scores.Multiplicative(memory.score.w))
    along = torch.ones_like(want)
    one, two = (torch.autograd.grad(x, memory.score.w, along)[0] for x in (memory(query), want))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert list(memory.state_dict()) == ["score.w"]


def test_a_step_moves_the_rows_that_were_looked_at():
    database = facts()
    before = database.version
    memory = Memory(database, weighting=weightings.TopK(3), learn=True)
    keys = torch.tensor(KEYS.astype(np.float32)).double().requires_grad_()
    values = torch.tensor(VALUES, requires_grad=True)
    queries = QUERY[..., :4].detach()[0], QUERY[..., 4:].detach()[0]
    for query in queries:  # gradients of both add up
        memory(query).square().sum().backward()
        options = {"score": OWN_SCORE, "weighting": weightings.TopK(3)}
        out = qkv.attend(query, keys, values, **options, engine="dense")
        out.square().sum().backward()
    touched = (values.grad != 0).any(-1) | (keys.grad != 0).any(-1)
    assert memory.step(lr=0.1) == touched.sum() < 40
    assert memory.step(lr=0.1) == 0
    with torch.no_grad():
        keys -= 0.1 * keys.grad
        values -= 0.1 * values.grad
    want = qkv.attend(queries[0], keys, values, **options)
    torch.testing.assert_close(memory(queries[0]), want, rtol=1e-5, atol=1e-5)
    assert database.version > before and len(database) == 40
    old = Memory(database.at(before), weighting=weightings.TopK(3))
    torch.testing.assert_close(old(queries[0]), dense(queries[0], weightings.TopK(3)))


def test_a_row_that_was_taken_out_does_not_come_back_by_a_step():
    database = qkv.Database(torch.eye(3), torch.tensor([[10.0], [20.0], [30.0]]))
    memory = Memory(database, weighting=weightings.TopK(2), learn=True)
    memory(3 * torch.eye(3)).sum().backward()
    assert memory.forget(torch.eye(3)[1]) == 1
    assert memory.step(lr=0.1) == 2
    assert len(database) == 2 and torch.eye(3)[1].numpy() not in database
    memory(torch.eye(3)).sum().backward()
    database.remove(list(database))
    database.add(torch.eye(3)[:1], torch.tensor([[40.0]]))
    assert memory.step(lr=0.1) == 0 and len(database) == 1


@pytest.mark.parametrize(("loss", "lr"), [(float("nan"), 0.1), (1.0, float("inf"))])
def test_a_step_that_goes_nowhere_leaves_the_rows_alone(loss, lr):
    database = facts()
    memory = Memory(database, weighting=weightings.TopK(3), learn=True)
    (loss * memory(QUERY[0, :, :4].detach())).sum().backward()
    before = database.version
    with pytest.raises(ValueError, match="NaN or infinite, so none is changed"):
        memory.step(lr=lr)
    assert database.version == before


def test_values_of_text_keys_learn_and_keep_their_columns():
    database = qkv.Database(key="name", value=["a", "b"])
    database.extend({"name": name, "a": i, "b": -i, "no": i} for i, name in enumerate("xyz"))
    memory = Memory(database, weighting=weightings.TopK(1), learn=True)
    memory(torch.tensor(database.encoder.encode(["y"]))).sum().backward()
    assert memory.step(lr=0.5) == 1
    assert database["y"] == {"a": 0.5, "b": -1.5}
    assert [row["no"] for row in database.rows()] == [0, 2, 1]


@pytest.mark.parametrize("weighting", [weightings.TopK(4), "softmax"])
def test_what_is_forgotten_was_never_there(weighting):
    memory = Memory(facts(), heads=2, weighting=weighting)
    at = int(np.argmax(KEYS @ QUERY.detach().numpy()[0, 0, :4]))
    is_other = np.arange(40) != at
    never = Memory(facts(KEYS[is_other], VALUES[is_other]), heads=2, weighting=weighting)
    assert not torch.equal(memory(QUERY), never(QUERY))
    assert memory.forget(KEYS[at].astype(np.float32)) == 1
    torch.testing.assert_close(memory(QUERY), never(QUERY), rtol=0, atol=1e-12)


def test_what_an_encoder_learned_is_forgotten_too():
    keys = [0.0, 1.0, 2.0, 500.0]
    memory = Memory(qkv.Database(keys, [1.0, 2.0, 3.0, 4.0]), weighting=weightings.TopK(2))
    never = Memory(qkv.Database(keys[:3], [1.0, 2.0, 3.0]), weighting=weightings.TopK(2))
    memory.forget(500.0)
    query = torch.tensor([[0.3], [1.6]])
    assert torch.equal(memory(query), never(query))


def test_fewer_rows_than_are_asked_for_and_rows_without_a_value():
    database = qkv.Database([1.0, 2.0, 3.0], [10.0, None, 30.0])
    query = torch.tensor([[2.0], [2.5]], requires_grad=True)
    few, all_of_them = (
        Memory(database, weighting=x, score="gaussian")(query)
        for x in (weightings.TopK(8), "softmax")
    )
    torch.testing.assert_close(few, all_of_them)
    assert few[0].item() == pytest.approx(20.0)
    slopes = [torch.autograd.grad(x.sum(), query)[0] for x in (few, all_of_them)]
    torch.testing.assert_close(*slopes)


def test_copies_and_pickles_open_the_same_store(tmp_path):
    path = tmp_path / "facts.qkv"
    with qkv.open(path) as database:
        database.add(KEYS.astype(np.float32), VALUES)
    memory = Memory(path, heads=2)
    want = memory(QUERY)
    saved = io.BytesIO()
    torch.save(memory, saved)
    saved.seek(0)
    copies = (
        copy.deepcopy(memory),
        pickle.loads(pickle.dumps(memory)),
        torch.load(saved, weights_only=False),
    )
    for other in copies:
        assert torch.equal(other(QUERY), want)
        assert str(path) in repr(other)
        other.database.close()
    inside = Memory(facts(), heads=2)
    assert copy.deepcopy(inside).database is inside.database
    other = pickle.loads(pickle.dumps(inside))
    assert torch.equal(other(QUERY), inside(QUERY))
    assert other.forget(KEYS[0]) and len(other.database) + 1 == len(inside.database)


def test_compiled_around():
    memory = Memory(facts(), heads=2, weighting=weightings.TopK(5))
    layer = torch.compile(torch.nn.Sequential(torch.nn.Tanh(), memory), backend="eager")
    query = QUERY.detach()
    torch.testing.assert_close(layer(query), memory(query.tanh()))


def test_refusals(tmp_path):
    with pytest.raises(TypeError, match="must be a Database"):
        Memory({"a": 1})
    with pytest.raises(FileNotFoundError):
        Memory(tmp_path / "nowhere.qkv")
    with pytest.raises(ValueError, match="TopK"):
        Memory(facts(), weighting="softmax", learn=True)
    with pytest.raises(ValueError, match="multiple of 3 heads"):
        Memory(facts(), heads=3)(QUERY)
    with pytest.raises(ValueError, match="vectors of 4"):
        Memory(facts())(QUERY)
    with pytest.raises(ValueError, match="only numbers can be pooled"):
        Memory(qkv.Database({"a": "b"}))(torch.zeros(1, 4))
    with pytest.raises(TypeError, match="query must be a torch tensor"):
        Memory(facts())(np.zeros((1, 4)))


@pytest.mark.parametrize("weighting", [weightings.TopK(2), "softmax"])
def test_a_memory_of_pairs_of_numbers_takes_their_own_units(weighting):
    D = qkv.Database({(100.0, 1.0): 1.0, (120.0, 3.0): 2.0, (160.0, 2.0): 4.0})
    memory = Memory(D, weighting=weighting)
    query = torch.tensor([[100.0, 1.0], [130.0, 2.0]], requires_grad=True)
    out = memory(query)
    want = [answer.value for answer in D.ask(query, weighting=weighting)]
    assert out[:, 0].tolist() == pytest.approx(want, rel=1e-4)
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert grad.abs().min() > 0
