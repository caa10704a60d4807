"""Gaussian look-up over the keys near enough to count: its values, its bound, its refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qkv import attention, scores
from qkv.engines import dense
from qkv.engines.gaussian_pruning import boxes as grid
from qkv.engines.gaussian_pruning import engine as near

rng = np.random.default_rng(13)


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    """Each test draws the same numbers whatever ran before it."""
    monkeypatch.setitem(globals(), "rng", np.random.default_rng(13))


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch):
    """So that few keys make many boxes, and few queries several chunks."""
    monkeypatch.setattr(grid, "KEYS_PER_BOX", 32)
    monkeypatch.setattr(near, "KEYS_PER_BOX", 32)
    monkeypatch.setattr(near, "MAX_QUERIES_PER_CHUNK", 40)
    monkeypatch.setattr(grid, "MAX_SCORES_PER_BLOCK", 32 * 24)


def request(query, key, value, sigma, weighting="softmax", tolerance=None, lse=False):
    score = scores.Gaussian(sigma)
    call = attention.build_call(query, key, value, score, weighting, None, 0.0, None, tolerance)
    return replace(call, wants_lse=lse)


def problem(d=3, n=90, m=1500, width=2, dtype="float64"):
    shapes = ((n, d), (m, d), (m, width))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def exact(query, key, value, sigma):
    """The output and the log-sum-exp, pair by pair in float64."""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    s = -0.5 * (((query[:, None] - key) / sigma) ** 2).sum(-1)
    top = s.max(axis=1, keepdims=True)
    weight = np.exp(s - top)
    total = weight.sum(axis=1, keepdims=True)
    return weight @ value / total, np.log(total) + top, weight / total


def moved(query, key, alpha, sigma):
    """How far two float64 weights α (…, n, m) may lie apart.

    A coordinate in units of σ is off by eps |x|/σ, so a score by δ = eps ‖q − k‖(‖q‖ + ‖k‖)/σ², and
    a weight by α times how far its δ may be from the row's mean: by nothing where it is 1.
    """
    apart = ((query[..., :, None, :] - key[..., None, :, :]) ** 2).sum(-1) ** 0.5
    norms = [(x**2).sum(-1) ** 0.5 for x in (query, key)]
    delta = apart * (norms[0][..., :, None] + norms[1][..., None, :]) * (2**-50 / sigma**2)
    mean = (alpha * delta).sum(-1, keepdims=True)
    return alpha * ((1 - alpha) * delta + mean - alpha * delta)


def check(call, sigma, atol, rtol=1e-12):
    inputs = [np.asarray(x, "float64") for x in (call.query, call.key, call.value)]
    want = exact(*inputs, sigma)
    assert near.unsupported_reason(call) is None
    out, lse, _ = near.run(call)
    off = moved(*inputs[:2], want[2], sigma) @ abs(inputs[2])
    assert (abs(out - want[0]) <= atol + off).all()
    np.testing.assert_allclose(lse, want[1], rtol=max(rtol, atol), atol=atol)


@pytest.mark.parametrize("sigma", [1e-6, 1e-3, 0.02, 0.2, 1.0, 30.0])
@pytest.mark.parametrize("d", range(1, 9))
def test_agrees_with_every_pair(d, sigma):
    check(request(*problem(d), sigma, lse=True), sigma, max(1e-11, 1e-15 / sigma))


@pytest.mark.parametrize("sigma", [1e-3, 0.02, 0.2, 1.0, 30.0])
@pytest.mark.parametrize("d", [1, 3, 8])
def test_agrees_in_float32(d, sigma):
    check(request(*problem(d, dtype="float32"), sigma, lse=True), sigma, 3e-6)


def left_out(call):
    """For each query, (…, n): the share of its weight that `run` leaves out, at most."""
    call = call.upcast()

    def unread(query, boxes):
        return (
            grid.select_boxes(query, boxes, near.droppable_share(call))
            .lost_share_bound[:, None]
            .astype(np.float64),
        )

    parts = [
        near._map_chunks(q, grid.build_boxes(k, v), unread)[0]
        for _, q, k, v in near._split_problems(call)
    ]
    return np.concatenate(parts).reshape(*call.lead, call.n)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, None])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.2])
def test_what_is_left_out_is_within_the_bound(sigma, tolerance, dtype):
    """The true share of the unread keys, and the error that follows from it."""
    query, key, value = problem(m=4000, dtype=dtype)
    call = request(query, key, value, sigma, tolerance=tolerance)
    share = near.droppable_share(call)
    bound = left_out(call)
    assert (bound <= share).all()

    scaled = [np.ascontiguousarray(x.T, "float64") / sigma for x in (query, key)]
    boxes = grid.build_boxes(scaled[1], value)
    actual = grid.select_boxes(scaled[0], boxes, share)
    assert actual.is_read.mean() < 0.8
    want, _, alpha = exact(query, key, value, sigma)
    of_key = np.empty(len(key), int)
    real = boxes.order < len(key)
    of_key[boxes.order[real]] = np.flatnonzero(real) // boxes.points.shape[-1]
    lost = np.where(actual.is_read[:, of_key], 0, alpha).sum(axis=1)
    assert (lost <= actual.lost_share_bound).all()
    if tolerance == 1e-2:
        assert lost.max() > 0

    diameter = np.linalg.norm(value.max(0) - value.min(0))
    error = np.linalg.norm(near.run(call)[0] - want, axis=1)
    rounding = 30 * np.finfo(dtype).eps
    assert (error <= (bound + share / 4 + rounding) * diameter).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_way_of_scoring_is_taken(dtype, monkeypatch):
    taken = set()
    for name in ("scores_by_differences", "float64_columns"):
        function = getattr(grid, name)
        monkeypatch.setattr(
            grid, name, lambda *x, name=name, function=function: taken.add(name) or function(*x)
        )
    query, key, value = problem(dtype=dtype)
    ways = {
        30.0: set(),
        0.02: {"float64_columns" if dtype == "float32" else "scores_by_differences"},
    }
    ways[1e-6] = {"scores_by_differences"}
    for sigma, way in ways.items():
        taken.clear()
        near.run(request(query, key, value, sigma))
        assert taken == way


def test_a_narrow_bandwidth_gives_the_nearest_key():
    query, key, value = problem(dtype="float32")
    out = near.run(request(query, key, value, 1e-12))[0]
    apart = ((query[:, None].astype("float64") - key) ** 2).sum(-1)
    np.testing.assert_array_equal(out, value[apart.argmin(axis=1)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_queries_far_from_all_keys(dtype):
    """Their weights are those of the keys that are least far, however small."""
    query, key, value = problem(dtype=dtype)
    query[::3] += 50
    query[0] += 3e4
    call = request(query, key, value, 0.3, lse=True)
    check(call, 0.3, 1e-4 if dtype == "float32" else 1e-8)


def test_keys_far_from_the_origin_keep_their_digits():
    query, key, value = problem()
    check(request(query + 1e4, key + 1e4, value, 0.3, lse=True), 0.3, 1e-9)


@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_keys_that_repeat(distinct):
    query, key, value = problem()
    key[:] = key[np.arange(len(key)) % distinct]
    check(request(query, key, value, 0.1, lse=True), 0.1, 1e-12)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 1000), (3, 33), (41, 31), (70, 1025)])
def test_any_number_of_queries_and_keys(n, m):
    check(request(*problem(n=n, m=m), 0.3, lse=True), 0.3, 1e-12)


def test_axes_of_very_different_spread():
    query, key, value = problem()
    for x in (query, key):
        x *= [1.0, 1e-3, 0.0]
    check(request(query, key, value, 0.05, lse=True), 0.05, 1e-12)


def test_the_temperature_widens_the_bandwidth():
    from qkv.weightings import Softmax

    query, key, value = problem()
    call = request(query, key, value, np.array(0.2), Softmax(np.array(2.25)), lse=True)
    check(call, 0.3, 1e-12)


LEADS = {
    "one": ((), (), ()),
    "keys shared by all": ((2, 3), (), ()),
    "one head of keys": ((2, 3), (1, 1), (1, 1)),
    "values of their own": ((2,), (), (2,)),
    "heads in groups": ((2, 4), (2, 2), (2, 2)),
}


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
def test_leading_axes(lead):
    shapes = ((20, 3), (300, 3), (300, 2))
    inputs = [rng.normal(size=(*a, *b)) for a, b in zip(lead, shapes, strict=True)]
    call = request(*inputs, 0.3, lse=True)
    for got, want in zip(near.run(call)[:2], dense.run(call)[:2], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert left_out(call).shape == (*lead[0], 20)


def compute_loss(out, lse):
    torch = pytest.importorskip("torch")
    return (out * torch.arange(1.0, 3.0)).sum() + (lse * torch.arange(45.0)[:, None]).sum()


def gradient_tolerance(query, key, value, sigma):
    """How far the gradients of `loss` may lie apart where the weights are `moved`."""
    torch = pytest.importorskip("torch")
    groups = query.shape[-3] // key.shape[-3] if min(query.ndim, key.ndim) > 2 else 1
    k, v = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (key, value))
    apart = (query[..., :, None, :] - k[..., None, :, :]) / sigma
    alpha = torch.softmax(apart.square().sum(-1) * -0.5, -1)
    moves = moved(query, k, alpha, sigma)
    along = (v * torch.arange(1.0, 3.0)).sum(-1)[..., None, :]
    off = (along - (alpha * along).sum(-1, keepdim=True)).abs()
    slope = moves * (off + torch.arange(45.0)[:, None]) + alpha * (moves * off).sum(-1, True)
    pairs = slope[..., None] * apart.abs() / sigma
    yield pairs.sum(-2)
    for x, like in (
        (pairs.sum(-3), key),
        (moves.sum(-2)[..., None] * torch.arange(1.0, 3.0), value),
    ):
        x = x.unflatten(-3, (-1, groups)).sum(-3) if groups > 1 else x
        yield x.sum_to_size(like.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sigma", [1e-3, 0.05, 0.5, 10.0])
@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
def test_gradients_on_torch(lead, sigma, dtype):
    """Of the output and of the log-sum-exp, against float64's own derivative of the equation."""
    torch = pytest.importorskip("torch")
    shapes = ((45, 3), (300, 3), (300, 2))
    host = [rng.normal(size=(*a, *b)) for a, b in zip(lead, shapes, strict=True)]
    host = [x.astype(dtype) for x in host]
    actual = []
    for engine, kind in ((near, dtype), (dense, "float64")):
        inputs = [torch.tensor(x.astype(kind), requires_grad=True) for x in host]
        compute_loss(*engine.run(request(*inputs, sigma, lse=True))[:2]).backward()
        actual.append([x.grad.double() for x in inputs])
    digits = 200 * torch.finfo(getattr(torch, dtype)).eps
    spread = gradient_tolerance(*(torch.tensor(x).double() for x in host), sigma)
    for got, want, allowed in zip(*actual, spread, strict=True):
        assert ((got - want).abs() <= digits * want.abs().max() + allowed).all()


@pytest.mark.parametrize("seed", range(8))
def test_one_key_has_all_the_weight_to_the_last_digits(seed):
    """Where the nearest key is hundreds of bandwidths away, the log-sum-exp has few digits left
    behind the point; the weight 1 of that key has them all."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(seed)
    query, key, value = (
        torch.tensor(draw.normal(size=shape), requires_grad=True)
        for shape in ((45, 3), (300, 3), (300, 2))
    )
    sigma = 1e-4
    compute_loss(*near.run(request(query, key, value, sigma, lse=True))[:2]).backward()
    with torch.no_grad():
        apart = query[:, None] - key
        first, second = apart.norm(dim=-1).topk(2, largest=False).values.T / sigma
        alone = (second**2 - first**2) / 2 > 40
        at = apart.norm(dim=-1).argmin(1)
        pull = (key[at] - query) / sigma**2 * torch.arange(45.0)[:, None]
    assert alone.sum() > 40
    assert ((query.grad - pull)[alone].abs() <= 1e-14 * pull.abs().max()).all()


def test_second_derivatives_on_torch():
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x, requires_grad=True) for x in problem(n=4, m=70)]

    def second(engine):
        out = engine.run(request(*inputs, 0.5))[0]
        (first,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs)

    for got, want in zip(second(near), second(dense), strict=True):
        torch.testing.assert_close(got, want)


def test_two_backward_passes_give_the_same_digits():
    torch = pytest.importorskip("torch")

    def gradients(host=problem(dtype="float32")):  # noqa: B008
        inputs = [torch.tensor(x, requires_grad=True) for x in host]
        near.run(request(*inputs, 0.2))[0].sum().backward()
        return [x.grad for x in inputs]

    for one, two in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_widened(dtype):
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x).to(getattr(torch, dtype)) for x in problem()]
    call = request(*inputs, 0.3)
    assert near.unsupported_reason(call) is None
    want = exact(*(x.double().numpy() for x in inputs), 0.3)[0]
    np.testing.assert_allclose(near.run(call)[0].numpy(), want, atol=3e-6)


def refusals():
    from qkv import masks, weightings

    query, key, value = problem(n=20, m=50)
    call = request(query, key, value, 0.3)
    hole = key.copy()
    hole[7, 1] = np.nan
    peak = value.copy()
    peak[3] = np.inf
    return {
        "only the Gaussian score": replace(call, score=scores.Laplace()),
        "only softmax, not Hard": replace(call, weighting=weightings.Hard()),
        "mask": replace(call, rule=masks.causal),
        "does not store the weights": replace(call, wants_weights=True),
        "array is empty": request(query[:0], key, value, 0.3),
        "only one bandwidth": request(query, key, value, np.full((2, 1, 1), 0.3)),
        "not finite": replace(call, key=hole),
        "an argument is not finite": replace(call, value=peak),
        "too small": request(query, key, value, 1e-200),
        "or the bandwidth": request(query, key, value, np.array(-1.0)),
    }


@pytest.mark.parametrize("word", refusals())
def test_a_refusal_says_why(word):
    assert word in near.unsupported_reason(refusals()[word])


def test_other_frameworks_are_refused():
    jnp = pytest.importorskip("jax").numpy
    call = request(*(jnp.asarray(x, "float32") for x in problem(n=4, m=8)), 0.3)
    assert "not jax" in near.unsupported_reason(call)


def test_torch_refusals():
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x) for x in problem(n=4, m=8)]
    learned = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert "no gradient" in near.unsupported_reason(request(*inputs, learned))
    with torch.no_grad():
        assert near.unsupported_reason(request(*inputs, learned)) is None

    def record_reason(query):
        reasons.append(near.unsupported_reason(request(query, *inputs[1:], 0.3)))
        return query

    reasons: list[str | None] = []
    torch.func.vmap(record_reason)(torch.stack([inputs[0]] * 2))
    assert reasons == ["it reads array values, which are unknown while the call is traced"]


def test_what_does_not_pay_is_declined():
    x = np.zeros((1, 1))
    big = np.broadcast_to(x, (10**7, 3))
    call = request(np.zeros((1000, 3)), big, big, 1.0)
    assert near.shape_based_reason(call) is near.slower_reason(call) is None
    assert "are too few" in near.shape_based_reason(request(np.zeros((1, 3)), big, big, 1.0))
    assert "are too few" in near.shape_based_reason(request(*problem(), 1.0))
    wide = np.broadcast_to(x, (10**5, 9))
    assert "9 dimensions" in near.shape_based_reason(request(np.zeros((1000, 9)), wide, wide, 1.0))


def test_a_product_that_serves_is_left_all_the_pairs(monkeypatch):
    """Where boxes rule little out and are too wide for the plain product."""
    monkeypatch.setattr(near, "MIN_PAIRS", 1)
    inputs = problem(d=8, m=4000)
    call = request(*inputs, 0.4)
    assert near.estimate_work(call)[1] > 2
    assert "more slowly than dot products" in near.slower_reason(call)
    assert near.slower_reason(request(*inputs, 30.0)) is None
    assert near.slower_reason(request(*inputs, 1e-3)) is None


def test_description_tells_what_is_read_and_what_may_be_lost():
    inputs = problem(m=4000)
    description = near.describe(request(*inputs, 0.05, tolerance=1e-6))
    assert description.startswith("reads about ")
    assert description.endswith("drops at most 1e-06 of each row's weight")
    assert math.isclose(near.droppable_share(request(*inputs, 1.0, tolerance=0.0)), 2**-52)
    assert "nearly all" in near.describe(request(*inputs, 9.0))
