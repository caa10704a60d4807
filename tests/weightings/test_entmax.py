"""Entmax of any alpha, learned or not: values, and gradients to the scores and to alpha."""

from __future__ import annotations

import math
import pickle
from copy import deepcopy

import numpy as np
import pytest

import qkv
from qkv import masks, weightings
from qkv.engines import streaming
from qkv.errors import ArgumentError, DtypeError, ShapeError
from qkv.weightings import Entmax
from tests import formulas

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.sample_of_module(20)

ALPHAS = [0.2, 0.7, 1 - 1e-6, 1.0, 1 + 1e-9, 1.01, 1.3, 1.5, 2.0, 2 + 1e-9, 2.4, 3.0, 5.0]
rng = np.random.default_rng(11)
SCORES = rng.normal(size=(4, 9)) * 2
ALONG = rng.normal(size=SCORES.shape)
LIVE = rng.random(SCORES.shape) > 0.3
LIVE[3] = False


def compute_gradients(alpha, scores=SCORES, live=None):
    """Σ α · ALONG, and its gradients to the scores and to alpha."""
    s = torch.tensor(scores, requires_grad=True)
    a = torch.tensor(alpha, dtype=s.dtype, requires_grad=True)
    result = (Entmax(a)(s, live) * torch.tensor(ALONG)).sum()
    return result.detach(), *torch.autograd.grad(result, (s, a))


def near_one(s, alpha):
    """α to the first order in c = alpha − 1: p (1 + c (Σ p u²/2 − u²/2)), with softmax p = eᵘ."""
    top = s.max(-1, keepdims=True)
    u = s - top - np.log(np.exp(s - top).sum(-1, keepdims=True))
    p, square = np.exp(u), u * u / 2
    return p * (1 + (alpha - 1) * ((p * square).sum(-1, keepdims=True) - square))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("made", [float, np.array], ids=["number", "array"])
def test_values(alpha, made):
    actual = Entmax(made(alpha))(SCORES, LIVE)
    np.testing.assert_allclose(actual.sum(-1), LIVE.any(-1), atol=1e-14)
    if 0 < abs(alpha - 1) < 1e-3:  # where plain Python has no digits left
        want, within = near_one(SCORES, alpha), 50 * (alpha - 1) ** 2 + 1e-14
        np.testing.assert_allclose(Entmax(made(alpha))(SCORES), want, atol=within)
    else:
        want = formulas.weights("Entmax", SCORES, LIVE, alpha=alpha)
        np.testing.assert_allclose(actual, want, atol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_gradient_of_alpha_is_that_of_differences(alpha):
    (_, _, got), step = compute_gradients(alpha), 1e-6
    ahead, behind = (float(compute_gradients(alpha + side * step)[0]) for side in (1, -1))
    assert abs(float(got) - (ahead - behind) / (2 * step)) < 1e-7 * (1 + abs(float(got)))


@pytest.mark.parametrize("alpha", [1.01, 1.3, 1.5, 1.9])
def test_the_gradient_of_alpha_is_that_of_the_paper(alpha):
    """Correia et al. 2019, proposition 1: with p̃ ∝ p^(2 − alpha) and h = −p log p,
    ∂p/∂alpha = (p − p̃)/(alpha − 1)² + (h − p̃ Σ h)/(alpha − 1)."""
    p = Entmax(np.array(alpha))(SCORES)
    lean = np.where(p > 0, np.where(p > 0, p, 1) ** (2 - alpha), 0)
    lean /= lean.sum(-1, keepdims=True)
    h = -p * np.log(np.where(p > 0, p, 1))
    c = alpha - 1
    want = (p - lean) / c**2 + (h - lean * h.sum(-1, keepdims=True)) / c
    assert abs(float(compute_gradients(alpha)[2]) - (want * ALONG).sum()) < 1e-10 / c**2


def test_at_one_it_is_softmax_and_its_gradient_a_series():
    actual, ds, da = compute_gradients(1.0)
    soft = torch.tensor(SCORES, requires_grad=True)
    want = (torch.softmax(soft, -1) * torch.tensor(ALONG)).sum()
    assert abs(float(actual - want.detach())) < 1e-14
    np.testing.assert_allclose(ds, torch.autograd.grad(want, soft)[0], atol=1e-14)
    series = near_one(SCORES, 2.0) - near_one(SCORES, 1.0)
    assert abs(float(da) - (series * ALONG).sum()) < 1e-13


@pytest.mark.parametrize("alpha", [1.001, 1.25, 1.5, 1.8, 2.0])
def test_the_same_as_a_library_of_its_own(alpha):
    entmax = pytest.importorskip("entmax")
    s = torch.tensor(SCORES, requires_grad=True)
    a = torch.tensor(alpha, dtype=s.dtype, requires_grad=True)
    theirs = (entmax.entmax_bisect(s, a, n_iter=100) * torch.tensor(ALONG)).sum()
    ours = compute_gradients(alpha)
    assert abs(float(theirs.detach() - ours[0])) < 1e-11
    for got, want in zip(ours[1:], torch.autograd.grad(theirs, (s, a)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.7, 2.5, 4.0])
def test_second_derivatives(alpha):
    s = torch.tensor(SCORES, requires_grad=True)
    a = torch.tensor(alpha, dtype=s.dtype, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s, a: Entmax(a)(s) * torch.tensor(ALONG), (s, a))


SHAPES = [(), (1,), (4,), (4, 1, 1), (30, 1), (2, 1, 30, 1), (2, 4, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_for_all_for_each_head_or_for_each_row(shape, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (7, 9))
    inputs = [torch.tensor(rng.normal(size=(2, 4, 30, 5)), requires_grad=True) for _ in range(3)]
    alpha = torch.tensor(rng.uniform(0.4, 2.6, size=shape), requires_grad=True)
    mask = masks.causal & masks.lengths([17, 30])
    along = torch.tensor(rng.normal(size=(2, 4, 30, 5)))
    actual = []
    for engine in ("dense", "streaming"):
        options = {"weighting": Entmax(alpha), "mask": mask, "engine": engine}
        out = qkv.attend(*inputs, **options, dropout_p=0.2, seed=3)
        actual.append([out, *torch.autograd.grad((out * along).sum(), [*inputs, alpha])])
    for one, two in zip(*actual, strict=True):
        np.testing.assert_allclose(one.detach(), two.detach(), atol=1e-9)
    wide = (alpha[:, None, None] if shape == (4,) else alpha).detach()
    wide = wide.expand(2, 4, 30, 1) if len(shape) else wide
    alone = Entmax(float(wide[1, 2, 21, 0] if len(shape) else wide))
    want = qkv.attend(*(x[1, 2] for x in inputs), weighting=alone, mask=masks.causal)[21]
    row = qkv.attend(*inputs, weighting=Entmax(alpha), mask=masks.causal)[1, 2, 21]
    np.testing.assert_allclose(row.detach(), want.detach(), atol=1e-9)
    both = qkv.attend(*inputs, weighting=Entmax(alpha), mask=mask, return_weights=True)
    np.testing.assert_allclose((both[1] @ inputs[2]).detach(), both[0].detach(), atol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_a_row_that_is_empty_or_not_finite(alpha, engine):
    q, k, v = (torch.tensor(rng.normal(size=(6, 4)), requires_grad=True) for _ in range(3))
    a = torch.tensor(alpha, dtype=q.dtype, requires_grad=True)
    live = torch.ones(6, 6, dtype=torch.bool)
    live[2] = False
    out = qkv.attend(q, k, v, weighting=Entmax(a), mask=live, engine=engine)
    assert (out[2] == 0).all()
    for x in torch.autograd.grad(out.sum(), (q, k, v, a)):
        assert torch.isfinite(x).all()
    spoiled = q.detach().clone()
    spoiled[1, 0] = math.nan
    result = qkv.attend(spoiled, k, v, weighting=Entmax(a), mask=live, engine=engine)
    assert torch.isnan(result[1]).all()
    keep = [0, 2, 3, 4, 5]
    np.testing.assert_allclose(result[keep].detach(), out[keep].detach(), atol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 2.5])
def test_scores_of_any_size(alpha):
    s = np.array([[1e30, -1e30, 1e30, 0.0], [-1e30, -1e30, -1e30, -1e30]])
    want = [[0.5, 0, 0.5, 0], [0.25] * 4]
    np.testing.assert_allclose(Entmax(np.array(alpha))(s), want, atol=1e-12)
    low = np.array([[0.0, -math.inf]], np.float32)
    np.testing.assert_allclose(Entmax(np.array(alpha, np.float32))(low), [[1, 0]], atol=1e-14)


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0, 1.5, 3.0])
def test_a_score_that_is_minus_infinity_has_no_weight(alpha):
    scores = np.array([[-np.inf, -np.inf], [0.0, -np.inf], [-np.inf, 1.0]])
    for made in (float, np.array):
        np.testing.assert_array_equal(Entmax(made(alpha))(scores), [[0, 0], [1, 0], [0, 1]])


def test_a_large_alpha_still_sums_to_one():
    for dtype in (np.float32, np.float64):
        result = Entmax(np.array(20.0, dtype))(SCORES.astype(dtype))
        np.testing.assert_allclose(result.sum(-1), 1, atol=1e-6)


def test_many_rows_at_once():
    """More scores than a piece holds, with an alpha for each row."""
    s, alpha = rng.normal(size=(2600, 512)), rng.uniform(0.5, 2.5, size=(2600, 1))
    result = Entmax(alpha)(s)
    for i in (0, 1300, 2599):
        np.testing.assert_allclose(result[i], formulas.entmax(s[i].tolist(), alpha[i]), atol=1e-9)


def test_a_compiled_graph_searches_in_one_node_for_a_learned_alpha_too():
    torch = pytest.importorskip("torch")
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    def attend(query, alpha):
        return qkv.attend(query, query, query, weighting=Entmax(alpha), mask="causal")

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    alpha = torch.tensor([0.7, 1.0, 1.5, 2.6], dtype=torch.float64, requires_grad=True)
    for n in (3, 4, 5):
        query = torch.randn(4, n, 2, dtype=torch.float64, requires_grad=True)
        got, want = compiled(query, alpha), attend(query, alpha)
        torch.testing.assert_close(got, want)
        slopes = [torch.autograd.grad(x.square().sum(), (query, alpha)) for x in (got, want)]
        torch.testing.assert_close(*slopes)
    assert len(graphs) == 2
    assert [name for name in graphs[1] if "qkv" in name] == ["qkv.rows"] * 2  # the search, the sum
    assert len(graphs[1]) < 400


def test_a_number_between_stays_on_its_own_path():
    assert type(Entmax(1.5)) is Entmax and type(Entmax(2)) is Entmax
    assert type(Entmax()) is Entmax and Entmax() == Entmax(1.5)
    for alpha in (np.array(1.5), 1.0, 2.5):
        assert isinstance(Entmax(alpha), Entmax) and type(Entmax(alpha)) is not Entmax
        assert repr(Entmax(alpha)) == f"Entmax(alpha={alpha!r})"
        for copy in (deepcopy(Entmax(alpha)), pickle.loads(pickle.dumps(Entmax(alpha)))):
            assert copy == Entmax(alpha) and type(copy) is type(Entmax(alpha))


@pytest.mark.parametrize("alpha", [0, -1.0, math.inf, math.nan])
def test_an_alpha_that_means_nothing(alpha):
    with pytest.raises(ArgumentError, match=r"Entmax: alpha must be (above 0|finite)"):
        Entmax(alpha)


def test_an_alpha_that_is_none():
    for alpha in ("1.5", None, True):
        with pytest.raises(DtypeError, match="Entmax: alpha must be a number"):
            Entmax(alpha)


@pytest.mark.parametrize("shape", [(3,), (4, 1), (4, 6, 6), (3, 1, 1), (1, 1, 1, 1)])
def test_an_alpha_that_does_not_fit(shape):
    x = np.zeros((4, 6, 2))
    with pytest.raises(ShapeError, match=r"alpha.*head.*\(4, 6, 1\)"):
        qkv.attend(x, x, x, weighting=Entmax(np.full(shape, 1.5)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_fewer_bits(dtype):
    alpha = np.array([0.6, 1.0, 1.6, 2.5], dtype)
    q, k, v = (rng.normal(size=(4, 50, 8)).astype(dtype) for _ in range(3))
    actual = qkv.attend(q, k, v, weighting=Entmax(alpha))
    wide = (x.astype("float64") for x in (q, k, v))
    want = qkv.attend(*wide, weighting=Entmax(alpha.astype("float64")))
    assert actual.dtype == dtype
    atol = {"float32": 1e-5, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(actual[:3], want[:3], atol=atol)
    # Above 2 a weight leaves 0 steeper than its score: of the last digit ε it makes ε^(1/(α − 1)).
    steep = 4 * float(np.finfo(dtype).eps) ** (1 / 1.5)
    np.testing.assert_allclose(actual[3], want[3], atol=max(atol, steep))


@pytest.mark.parametrize("alpha", [1 + 1e-12, 1 + 1e-7, 1.001, 1.03])
@pytest.mark.parametrize("keys", [50, 200])
def test_a_number_near_one_keeps_its_digits(alpha, keys):
    scores = (3 * rng.normal(size=(3, keys))).astype("float32")
    want = Entmax(np.array(alpha))(scores.astype("float64"))
    if alpha < 1.0001:
        np.testing.assert_allclose(want, near_one(scores.astype("float64"), alpha), atol=1e-9)
    np.testing.assert_allclose(Entmax(alpha)(scores), want, atol=5e-7)
    np.testing.assert_allclose(Entmax(alpha)(scores.astype("float64")), want, atol=1e-13)
    query, key, value = np.eye(3, dtype="float32"), scores.T.copy(), np.eye(keys, dtype="float32")
    actual = qkv.attend(query, key, value, score="dot", weighting=Entmax(alpha))
    np.testing.assert_allclose(actual, want, atol=5e-7)


def test_the_number_of_keys_does_not_matter():
    for alpha in (0.5, 1.0, 3.0):
        result = weightings.Entmax(np.array(alpha))(np.zeros((1, 5000)))
        np.testing.assert_allclose(result, 1 / 5000, rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)])
def test_a_learned_alpha_of_each_head_has_its_derivatives(shape):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(4)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    scores = (2 * draw(3, 2, 4, 9)).requires_grad_()
    alpha = (torch.sigmoid(draw(*shape)) * 0.8 + 1.1).requires_grad_()
    at = torch.arange(9)[None]
    for live in (None, draw(3, 1, 4, 9) > -0.5, torch.zeros(4, 9, dtype=torch.bool)):
        slope = draw(3, 2, 4, 9)
        results = []
        for weigh in (Entmax(alpha).weights, Entmax(alpha).weights_by_search):
            weight = weigh(scores, live, at)
            results.append([weight, *torch.autograd.grad(weight, (scores, alpha), slope)])
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y)
    first = scores[:1, :, :2]
    assert torch.autograd.gradgradcheck(lambda s, a: Entmax(a).weights(s, None, at), (first, alpha))
