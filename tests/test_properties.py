"""What holds for every database: laws of scores, weightings, masks and engines, on random data."""

import importlib
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qkv
from qkv import masks, scores, weightings
from qkv.attention import build_call
from qkv.engines import streaming
from qkv.engines.call import make_block
from qkv.frameworks import to_numpy
from qkv.util.types import Span

pytestmark = pytest.mark.sample_of_module(60)

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.integers(1, 9)


def sample_examples(count: int) -> Any:
    """The same examples on every run, so that a failure is one for everybody."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def load(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed")


def assert_close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    got, want = to_numpy(got), to_numpy(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# Random data. A score is made for vectors of width D, so that one table serves all.

D, DV = 3, 2

SMOOTH: dict[str, Callable[[np.random.Generator], Any]] = {
    "dot": lambda rng: scores.Dot(),
    "capped": lambda rng: scores.ScaledDot(scale=0.7, softcap=2.0),
    "cosine": lambda rng: scores.Cosine(0.3),
    "gaussian": lambda rng: scores.Gaussian(0.8),
    "laplace": lambda rng: scores.Laplace(0.8),
    "multiplicative": lambda rng: scores.Multiplicative(rng.normal(size=(D, D))),
    "additive": lambda rng: scores.Additive(
        rng.normal(size=(4, D)), rng.normal(size=(4, D)), rng.normal(size=4), rng.normal(size=4)
    ),
    "gated": lambda rng: scores.Gated(rng.normal(size=D), rng.normal(size=D), 0.1),
}
"""Scores of any sign, in which a tie has probability zero."""

NONNEGATIVE: dict[str, Callable[[np.random.Generator], Any]] = {
    "boxcar": lambda rng: scores.Boxcar(2.0),
    "triangular": lambda rng: scores.Triangular(2.5),
    "epanechnikov": lambda rng: scores.Epanechnikov(2.0),
    "constant": lambda rng: scores.Constant(),
    "exact": lambda rng: scores.Exact(),
}

WEIGHTINGS: dict[str, Any] = {
    "softmax": weightings.Softmax(),
    "softmax at 0.4": weightings.Softmax(0.4),
    "hard": weightings.Hard(),
    "average": weightings.Average(),
    "normalized": weightings.Normalized(),
    "raw": weightings.Raw(),
    "sigmoid": weightings.Sigmoid(),
    "top 1": weightings.TopK(1),
    "top 3": weightings.TopK(3),
    "sparsemax": weightings.Sparsemax(),
    "entmax 1.5": weightings.Entmax(1.5),
    "entmax 1.2": weightings.Entmax(1.2),
}
CONVEX = [name for name, weighting in WEIGHTINGS.items() if weighting.is_convex]
SIMPLEX = ["softmax", "softmax at 0.4", "hard", "top 1", "top 3", "sparsemax", "entmax 1.5"]
"""Those that see differences of scores alone."""

each_weighting = pytest.mark.parametrize("name", WEIGHTINGS)


def score_for(name: str, rng: np.random.Generator) -> Any:
    """A random score that the weighting takes and, where it ranks, without ties."""
    weighting = WEIGHTINGS[name]
    if weighting.needs_nonnegative:
        table = NONNEGATIVE
    elif isinstance(weighting, weightings.Hard | weightings.TopK):
        table = SMOOTH
    else:
        table = SMOOTH | NONNEGATIVE
    return table[str(rng.choice(sorted(table)))](rng)


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def database(rng: np.random.Generator, n: int, m: int, lead: tuple[int, ...] = ()) -> list[Any]:
    key = rows(rng, *lead, m, D)
    query = rows(rng, *lead, n, D)
    if m:
        query[..., 0, :] = key[..., rng.integers(m), :]  # so that `exact` finds something
    return [query, key, rows(rng, *lead, m, DV)]


def in_blocks(
    size: tuple[int, int], q: Any, k: Any, v: Any, lse: bool = False, **options: Any
) -> tuple[Any, Any]:
    """The streaming engine with a block of this size: the output and the log-sum-exp."""
    settings = {"score": "scaled_dot", "weighting": "softmax", "mask": None, "dropout_p": 0.0}
    settings |= {"seed": None, "tolerance": None} | options
    call = replace(build_call(q, k, v, *settings.values()), wants_lse=lse)
    with call.fw.use_own_settings():
        return streaming.run(call, size)[:2]


# The database


@each_weighting
@sample_examples(12)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_the_order_of_rows_changes_nothing(name: str, seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    live = rng.random((n, m)) < 0.7
    options = {"score": score_for(name, rng), "weighting": WEIGHTINGS[name]}
    order, other = rng.permutation(m), rng.permutation(n)
    want = qkv.attend(q, k, v, mask=live, **options)
    assert_close(qkv.attend(q, k[order], v[order], mask=live[:, order], **options), want)
    assert_close(in_blocks((2, 2), q, k[order], v[order], mask=live[:, order], **options)[0], want)
    alpha = qkv.weights(q, k, mask=live, **options)
    assert_close(qkv.weights(q, k[order], mask=live[:, order], **options), alpha[:, order])
    assert_close(qkv.attend(q[other], k, v, mask=live[other], **options), want[other])


@pytest.mark.parametrize("name", SIMPLEX)
@sample_examples(12)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS, size=st.sampled_from([1e-3, 1.0, 50.0]))
def test_a_shift_of_the_scores_changes_nothing(
    name: str, seed: int, n: int, m: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    plain = score_for(name, rng) if name in ("hard", "top 1", "top 3") else scores.Dot()
    by_row = rng.normal(size=n) * size
    shifted = scores.Modified(plain, lambda s, b, h, i, j: s + by_row[i])
    moved = scores.resolve(lambda query, key: plain(query, key) + by_row[0])
    options = {"weighting": WEIGHTINGS[name], "mask": rng.random((n, m)) < 0.8}
    want = qkv.attend(q, k, v, score=plain, **options)
    for other in (shifted, moved):
        assert_close(qkv.attend(q, k, v, score=other, **options), want)
        assert_close(in_blocks((2, 3), q, k, v, score=other, **options)[0], want)
    if WEIGHTINGS[name].has_lse:
        shift = by_row / getattr(WEIGHTINGS[name], "temperature", 1.0)
        lse = qkv.attend(q, k, v, score=plain, return_lse=True, **options)[1]
        assert_close(qkv.attend(q, k, v, score=shifted, return_lse=True, **options)[1], lse + shift)


@pytest.mark.parametrize("name", CONVEX)
@sample_examples(15)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS, far=st.sampled_from([1.0, 1e3]))
def test_convex_weights_stay_in_the_hull(name: str, seed: int, n: int, m: int, far: float) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    options = {"score": score_for(name, rng), "weighting": WEIGHTINGS[name]}
    alpha = qkv.weights(q * far, k, **options)
    assert (alpha >= 0).all()
    total = alpha.sum(-1)
    some_weight = total > 0 if name == "normalized" else np.ones(n, bool)
    assert_close(total, some_weight.astype(float))
    directions = np.concatenate([np.eye(DV), -np.eye(DV), rows(rng, 20, DV)])
    full = qkv.attend(q * far, k, v, **options)
    for out in (full, in_blocks((1, 2), q * far, k, v, **options)[0]):
        along = directions @ v.T  # (directions, m): where each value lies
        reached = (directions @ out.T)[:, some_weight]
        assert (reached <= along.max(-1, keepdims=True) + 1e-12 * far).all()
        assert (reached >= along.min(-1, keepdims=True) - 1e-12 * far).all()
        assert (out[~some_weight] == 0).all()


@pytest.mark.parametrize("score", NONNEGATIVE)
@pytest.mark.parametrize("name", ["raw", "normalized", "sigmoid"])
@sample_examples(5)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_nonnegative_weights_stay_in_the_cone(
    name: str, score: str, seed: int, n: int, m: int
) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    options = {"score": NONNEGATIVE[score](rng), "weighting": name}
    out, alpha = qkv.attend(q, k, v, return_weights=True, **options)
    assert (alpha >= 0).all()
    assert_close(out, alpha @ v)  # a nonnegative combination of the values is in their cone
    towards = np.abs(rows(rng, 1, DV))
    apart = qkv.attend(q, k, v * np.sign(v @ towards.T), **options)
    assert (apart @ towards.T >= -1e-12).all()  # values on one side of a plane stay there


# The seeds


@sample_examples(20)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_the_four_special_cases_of_the_seeds(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    dots = q @ k.T

    def both(**options: Any) -> tuple[Any, Any]:
        out, alpha = qkv.attend(q, k, v, return_weights=True, **options)
        assert_close(out, alpha @ v)
        return out, alpha

    cone, alpha = both(score="epanechnikov", weighting="raw")
    near = np.maximum(0, 1 - ((q[:, None] - k) ** 2).sum(-1))
    assert_close(alpha, near)
    assert_close(cone, sum(near[:, i, None] * v[i] for i in range(m)))

    _, alpha = both(score="dot")
    assert_close(alpha, np.exp(dots) / np.exp(dots).sum(-1, keepdims=True))
    assert_close(alpha.sum(-1), np.ones(n))

    result, alpha = both(score="dot", weighting="hard")
    assert np.array_equal(alpha, np.eye(m)[dots.argmax(-1)])
    assert np.array_equal(result, v[dots.argmax(-1)])

    mean, alpha = both(score="dot", weighting="average")
    assert np.array_equal(alpha, np.full((n, m), 1 / m))
    assert_close(mean, np.broadcast_to(v.mean(0), (n, DV)))


def test_the_six_names() -> None:
    """D of the seeds: an exact match asks for one row."""
    names = ["Zhang", "Lipton", "Li", "Smola", "Hu", "Werness"]
    codes = np.array([[sum(map(ord, name)), len(name), ord(name[0])] for name in names], float)
    answers = np.arange(6.0)[:, None]
    for weighting in ("hard", "normalized", "raw"):
        got = qkv.attend(codes[2:3], codes, answers, score="exact", weighting=weighting)
        assert got.tolist() == [[2.0]]
    nobody = np.full((1, 3), -1.0)
    assert qkv.attend(nobody, codes, answers, score="exact", weighting="raw").tolist() == [[0.0]]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@sample_examples(10)
@given(seed=SEEDS, n=st.integers(1, 6))
def test_self_attention_row_by_row_by_hand(framework: str, seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    words, w_q, w_k, w_v = (rows(rng, *shape) for shape in [(n, 4), (4, D), (4, D), (4, DV)])
    q, k, v = words @ w_q, words @ w_k, words @ w_v
    want = []
    for i in range(n):
        weight = []
        for j in range(n):
            dot = 0.0
            for a in range(D):
                dot += q[i, a] * k[j, a]
            weight.append(math.exp(dot / math.sqrt(D)))
        mixed = [0.0] * DV
        for j in range(n):
            for a in range(DV):
                mixed[a] += weight[j] / sum(weight) * v[j, a]
        want.append(mixed)
    make = np.asarray if framework == "numpy" else load("torch").tensor
    for engine in ["dense", "streaming", None] + ["native"] * (framework == "torch"):
        assert_close(qkv.attend(make(q), make(k), make(v), engine=engine), want, 1e-12)
    assert_close(in_blocks((1, 1), make(q), make(k), make(v))[0], want, 1e-12)
    assert_close(qkv.scaled_dot_product_attention(make(q), make(k), make(v)), want, 1e-12)


@pytest.mark.parametrize("engine", ["dense", "streaming", "native", "blocks"])
@pytest.mark.parametrize("masked", [False, True])
@sample_examples(6)
@given(seed=SEEDS, m=st.integers(1, 7))
def test_the_gradient_is_the_covariance_of_the_keys(
    engine: str, masked: bool, seed: int, m: int
) -> None:
    """Exercise 2 of the seeds: for a(q, k) = qᵀk and k = v, ∇_q Attention = Cov_p[k]."""
    torch = load("torch")
    rng = np.random.default_rng(seed)
    k = rows(rng, m, D)
    query, live = rows(rng, D), np.ones(m, bool)
    if masked:
        live[rng.integers(m) :] = False
    keys = torch.tensor(k)
    options = {"score": "dot", "mask": torch.tensor(live) if masked else None}

    def attention(q: Any) -> Any:
        if engine == "blocks":
            return in_blocks((1, 2), q[None], keys, keys, **options)[0][0]
        return qkv.attend(q[None], keys, keys, engine=engine, **options)[0]

    p = np.where(live, np.exp(k @ query), 0.0)
    p /= p.sum() or 1.0
    mean = p @ k
    covariance = sum(p[i] * np.outer(k[i] - mean, k[i] - mean) for i in range(m))
    q = torch.tensor(query, requires_grad=True)
    assert_close(attention(q), mean)
    assert_close(torch.autograd.functional.jacobian(attention, q), covariance)
    one_by_one = [torch.autograd.grad(attention(q)[a], q)[0] for a in range(D)]
    assert_close(torch.stack(one_by_one), covariance)


# The monoid


def random_tree(rng: np.random.Generator, states: list[Any], merge: Callable[..., Any]) -> Any:
    """The states merged two neighbours at a time, in random order."""
    states = list(states)
    while len(states) > 1:
        i = int(rng.integers(len(states) - 1))
        states[i : i + 2] = [merge(*states[i : i + 2])]
    return states[0]


def random_cuts(rng: np.random.Generator, m: int) -> list[slice]:
    """The keys in random blocks, an empty one perhaps among them."""
    edges = sorted([0, m, *rng.integers(m + 1, size=rng.integers(6)).tolist()])
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def monoid_case(name: str, seed: int, ties: bool) -> tuple[Any, ...]:
    """A weighting, its scaled scores (n, m), what lives, positions, values, dropout's factor."""
    rng = np.random.default_rng(seed)
    weighting, n, m = WEIGHTINGS[name], 4, int(rng.integers(1, 12))
    s = rng.integers(-2, 3, (n, m)).astype(float) if ties else rng.normal(size=(n, m)) * 3
    s = np.abs(s) if weighting.needs_nonnegative else s
    live = None if rng.random() < 0.3 else rng.random((n, m)) < 0.7
    dropout_mask = None if rng.random() < 0.5 else rng.choice([0.0, 2.0], (n, m))
    k = np.arange(m, dtype=np.int32)[None]
    return rng, weighting, weighting.scale_scores(s), live, k, rows(rng, m, DV), dropout_mask


def cut(x: Any, part: slice) -> Any:
    return None if x is None else x[:, part]


@each_weighting
@pytest.mark.parametrize("ties", [False, True])
@sample_examples(25)
@given(seed=SEEDS)
def test_merge_is_associative(name: str, ties: bool, seed: int) -> None:
    rng, weighting, s, live, k, v, dropout_mask = monoid_case(name, seed, ties)
    exact = name == "hard"

    def same(one: Any, two: Any) -> bool:
        return np.array_equal(one, two) if exact else np.allclose(one, two, 1e-10, 1e-10)

    def blocks_of(shuffled: bool) -> list[slice]:
        parts = random_cuts(rng, s.shape[-1])
        return [parts[i] for i in rng.permutation(len(parts))] if shuffled else parts

    def along_a_tree(parts: list[slice]) -> Any:
        def fold(lift: Any, merge: Any, init: Any) -> Any:
            states = [lift(s[:, part], cut(live, part), k[:, part]) for part in parts]
            return random_tree(rng, states, merge)

        result = weighting.find_threshold(fold)
        states = [
            weighting.partial_state(
                s[:, part].copy(),
                cut(live, part),
                k[:, part],
                result,
                v[part],
                cut(dropout_mask, part),
            )
            for part in parts
        ]
        return result, random_tree(rng, states, weighting.merge)

    with np.errstate(all="ignore"):
        result, state = along_a_tree([slice(0, s.shape[-1])])
        out, known, centre = weighting.finish(state, result)
        alpha = weighting.weights(s, live, k)
        assert_close(weighting.block_weights(s, live, k, known), alpha)
        assert_close(out, (alpha if dropout_mask is None else alpha * dropout_mask) @ v)
        if weighting.has_lse:
            assert_close(weighting.lse_from_state(known), weighting.compute_lse(s, live, k))
        for shuffled in (False, True):
            other_found, other = along_a_tree(blocks_of(shuffled))
            other_out, other_known, other_centre = weighting.finish(other, other_found)
            assert same(other_out, out)
            assert all(same(a, b) for a, b in zip(other_known, known, strict=True))
            assert centre is None or same(other_centre, centre)
            assert not exact or all(map(np.array_equal, other, state))


@each_weighting
@sample_examples(15)
@given(seed=SEEDS)
def test_the_state_of_no_keys_is_the_identity(name: str, seed: int) -> None:
    _, weighting, s, live, k, v, dropout_mask = monoid_case(name, seed, ties=True)
    laws: list[tuple[Any, Any, Any]] = []

    def fold(lift: Any, merge: Any, init: Any) -> Any:
        state = lift(s, live, k)
        laws.append((merge, init(s[:, :1]), state))
        return state

    with np.errstate(all="ignore"):
        result = weighting.find_threshold(fold)
        state = weighting.partial_state(s.copy(), live, k, result, v, dropout_mask)
        laws.append((weighting.merge, weighting.init(s[:, :1], DV), state))
        for merge, empty, full in laws:
            for got in (merge(empty, full), merge(full, empty)):
                assert all(map(np.array_equal, got, full))
            assert all(map(np.array_equal, merge(empty, empty), empty))


# Engines

BLOCKS = [(1, 1), (1, 4), (3, 1), (2, 3), (4, 5), (50, 2), (2, 50), (50, 50)]


def random_mask(
    rng: np.random.Generator, n: int, m: int, float_too: bool = True, make: Any = np.asarray
) -> Any:
    live = make(rng.random((n, m)) < rng.choice([0.2, 0.7]))
    kinds = [
        None,
        live,
        masks.causal,
        masks.causal(align="bottom_right"),
        masks.window(int(rng.integers(4))),
        masks.dilated(1, 2) | masks.global_tokens(1),
        ~masks.strided(2),
        masks.causal & live,
        masks.custom(lambda b, h, i, j: (i + 2 * j) % 3 != 0),
        masks.blocks(rng.random((3, 3)) < 0.6, 4),
    ]
    if float_too:
        bias = make(np.where(live, rng.normal(size=(n, m)), -np.inf))
        kinds += [bias, masks.window(2) & bias]
    return kinds[rng.integers(len(kinds))]


@each_weighting
@sample_examples(20)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_dense_is_streaming_for_every_block(name: str, seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    weighting = WEIGHTINGS[name]
    q, k, v = database(rng, n, m)
    options = {
        "score": score_for(name, rng),
        "weighting": weighting,
        "mask": random_mask(rng, n, m, not weighting.needs_nonnegative),
    }
    lse = weighting.has_lse
    want, *rest = qkv.attend(
        q, k, v, engine="dense", return_weights=True, return_lse=lse, **options
    )
    assert_close(rest[-1] @ v, want)
    assert_close(rest[-1], qkv.weights(q, k, **options))
    for size in BLOCKS:
        out, actual = in_blocks(size, q, k, v, lse, **options)
        if name == "hard":
            assert np.array_equal(out, want)
        assert_close(out, want)
        if lse:
            assert_close(actual[..., 0], rest[0])


@each_weighting
@sample_examples(4)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_the_gradients_of_streaming_are_those_of_dense(
    name: str, seed: int, n: int, m: int
) -> None:
    torch = load("torch")
    rng = np.random.default_rng(seed)
    weighting = WEIGHTINGS[name]
    q, k, v = (torch.tensor(x, requires_grad=True) for x in database(rng, n, m))
    mask = rng.random((n, m)) < 0.7
    options = {"weighting": weighting, "mask": torch.tensor(mask), "score": "dot"}
    if weighting.needs_nonnegative:
        options["score"] = "epanechnikov"
    along = torch.tensor(rows(rng, n, DV))

    def pulled(out: Any) -> tuple[Any, ...]:
        return torch.autograd.grad(out, [q, k, v], along, allow_unused=True, materialize_grads=True)

    want = pulled(qkv.attend(q, k, v, engine="dense", **options))
    for size in ((1, 1), (2, 3), (50, 50)):
        for got, expected in zip(pulled(in_blocks(size, q, k, v, **options)[0]), want, strict=True):
            assert_close(got, expected, 1e-8)


@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
@sample_examples(40)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS, live=st.sampled_from([0.3, 0.8, 1.0]))
def test_native_is_dense_for_every_mask(score: str, seed: int, n: int, m: int, live: float) -> None:
    torch = load("torch")
    rng = np.random.default_rng(seed)
    arrays = [torch.tensor(x, requires_grad=True) for x in database(rng, n, m, (2, 2))]
    allowed = rng.random((n, m)) < live
    rule = random_mask(rng, n, m, float_too=False, make=torch.tensor)
    bias = torch.tensor(np.where(allowed, rng.normal(size=(n, m)) * 2, -np.inf))
    along = torch.tensor(rows(rng, 2, 2, n, DV))
    for mask in (rule, bias, bias if rule is None else masks.array(rule) & bias):
        options = {"score": score, "weighting": weightings.Softmax(0.7), "mask": mask}
        want, got = (
            qkv.attend(*arrays, engine=engine, **options) for engine in ("dense", "native")
        )
        assert_close(got, want)
        for one, two in zip(
            torch.autograd.grad(got, arrays, along),
            torch.autograd.grad(want, arrays, along),
            strict=True,
        ):
            assert_close(one, two)


LONG: dict[str, Any] = {
    "causal": masks.causal,
    "bottom right": masks.causal(align="bottom_right"),
    "window": masks.window(20),
    "window and globals": masks.window(10) | masks.global_tokens(3),
    "two windows": masks.window(5) | masks.custom(lambda b, h, i, j: j - i > 220),
    "not the window": ~masks.window(40),
    "dilated": masks.dilated(4, 30),
    "documents": masks.documents(np.arange(300) // 70, np.arange(280) // 70),
    "bias": np.linspace(-3, 3, 300 * 280).reshape(300, 280),
    "causal bias": masks.causal & np.linspace(-3, 3, 300 * 280).reshape(300, 280),
    "half a bias": np.where(np.arange(280) < 130, -np.inf, np.linspace(-3, 3, 280))[None],
}


@pytest.mark.parametrize("name", LONG)
def test_engines_agree_over_many_blocks(name: str) -> None:
    """300 × 280: more than one block for every engine, and none that fits evenly."""
    torch = load("torch")
    rng = np.random.default_rng(0)
    q, k, v = rows(rng, 300, D), rows(rng, 280, D), rows(rng, 280, DV)
    s = np.broadcast_to(q @ k.T, (300, 280))
    call = build_call(q, k, v, "dot", "softmax", LONG[name], 0.0, None, None)
    live = call.rule.allowed_pairs(make_block(call, Span(0, 300), Span(0, 280)))
    live = True if live is None else live  # None: all pairs count
    s = np.where(live, s + (0 if call.bias is None else call.bias), -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    want = e / np.maximum(e.sum(-1, keepdims=True), 1e-300) @ v
    assert_close(qkv.attend(q, k, v, score="dot", mask=LONG[name], engine="dense"), want)
    assert_close(qkv.attend(q, k, v, score="dot", mask=LONG[name], engine="streaming"), want)
    assert_close(in_blocks((64, 48), q, k, v, score="dot", mask=LONG[name])[0], want)
    tensors = [torch.tensor(x) for x in (q, k, v)]
    mask = masks.array(LONG[name])
    if name == "causal bias":
        mask = masks.causal & torch.tensor(LONG["bias"])
    elif call.bias is not None:
        mask = torch.tensor(LONG[name])
    assert_close(qkv.attend(*tensors, score="dot", mask=mask, engine="native"), want)


@sample_examples(15)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_the_log_sum_exp(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    live = rng.random((n, m)) < 0.6
    want = [
        math.log(sum(math.exp(q[i] @ k[j] / 2) for j in range(m) if live[i, j]))
        if live[i].any()
        else -math.inf
        for i in range(n)
    ]
    options = {"score": "dot", "weighting": weightings.Softmax(2.0), "mask": live}
    assert_close(qkv.attend(q, k, v, return_lse=True, **options)[1], np.array(want))


# Weightings with a second face


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@sample_examples(8)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_straight_through_is_hard_forward_and_soft_backward(
    engine: str, seed: int, n: int, m: int
) -> None:
    torch = load("torch")
    rng = np.random.default_rng(seed)
    arrays = [torch.tensor(x, requires_grad=True) for x in database(rng, n, m)]
    along, mask = torch.tensor(rows(rng, n, DV)), torch.tensor(rng.random((n, m)) < 0.7)
    result = {}
    for name, weighting in {
        "hard": weightings.Hard(),
        "soft": weightings.Softmax(),
        "both": weightings.Hard(straight_through=True),
    }.items():
        options = {"score": "gaussian", "weighting": weighting, "mask": mask, "engine": engine}
        out, alpha = qkv.attend(*arrays, return_weights=True, **options)
        pulled = [
            torch.autograd.grad(
                y, arrays, g, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for y, g in ((out, along), (alpha, along @ arrays[2].detach().T))
        ]
        result[name] = (out, alpha, *pulled)
    for at in (0, 1):
        assert_close(result["both"][at], result["hard"][at])
    for at in (2, 3):
        dq, dk, dv = result["both"][at]
        assert_close(dq, result["soft"][at][0])
        assert_close(dk, result["soft"][at][1])
        assert_close(dv, result["hard"][at][2])


@pytest.mark.parametrize("score", ["boxcar", "triangular", "epanechnikov"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_normalized_when_every_weight_is_zero(framework: str, score: str) -> None:
    """Query 0 has a key in its window, query 1 has none, query 2 may not look at all."""
    make = np.asarray if framework == "numpy" else load("torch").tensor
    q, k, v = (make(np.array(x)[:, None]) for x in ([0.0, 5.0, 5.0], [0.0, 3.0, 9.0], [1.0, 2, 4]))
    mask = make(np.array([[True] * 3, [True, True, False], [False] * 3]))
    nan = math.nan
    for on_empty, answer, alpha in (
        ("zero", 0.0, [0.0, 0.0]),
        ("nan", nan, [nan, nan]),
        ("uniform", 1.5, [0.5, 0.5]),
        ("nearest", 2.0, [0.0, 1.0]),
    ):
        for engine in ("dense", "streaming"):
            out, result = qkv.attend(
                *(q, k, v),
                score=score,
                weighting=weightings.Normalized(on_empty),
                mask=mask,
                engine=engine,
                return_weights=True,
            )
            assert_close(out, [[1.0], [answer], [0.0]])
            assert_close(result[:, :2], [[1.0, 0.0], alpha, [0.0, 0.0]])
            assert on_empty == "nan" or not to_numpy(result)[:, 2].any()


# Sparse weightings


@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 1.8, 2])
@sample_examples(25)
@given(seed=SEEDS, m=st.integers(1, 40), size=st.sampled_from([0.0, 0.1, 1.0, 20.0]))
def test_entmax_solves_its_problem(alpha: float, seed: int, m: int, size: float) -> None:
    """p = max(0, (α − 1) s − τ)^(1/(α − 1)) with one τ a row, and Σ p = 1."""
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(5, m)) * size
    weighting = weightings.Sparsemax() if alpha == 2 else weightings.Entmax(alpha)
    p = weighting(s)
    assert (p >= 0).all()
    assert_close(p.sum(-1), np.ones(5))
    slack = (alpha - 1) * s - p ** (alpha - 1)  # τ where p > 0, and at most τ elsewhere
    tau = np.where(p > 0, slack, -np.inf).max(-1, keepdims=True)
    on = p > 1e-6
    assert np.abs(np.where(on, slack - tau, 0)).max() < 1e-8
    assert (slack <= tau + 1e-8).all()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax_bisect"])
@sample_examples(15)
@given(seed=SEEDS, m=st.integers(1, 30), size=st.sampled_from([0.3, 3.0]))
def test_entmax_agrees_with_the_entmax_package(name: str, seed: int, m: int, size: float) -> None:
    torch, entmax = load("torch"), load("entmax")
    rng = np.random.default_rng(seed)
    s = torch.tensor(rng.normal(size=(4, m)) * size, requires_grad=True)
    along = torch.tensor(rng.normal(size=(4, m)))
    theirs, ours = {
        "sparsemax": (entmax.sparsemax, weightings.Sparsemax()),
        "entmax15": (entmax.entmax15, weightings.Entmax(1.5)),
        "entmax_bisect": (
            lambda x, dim: entmax.entmax_bisect(x, 1.3, dim, n_iter=60),
            weightings.Entmax(1.3),
        ),
    }[name]
    assert_close(ours(s), theirs(s, -1), 1e-9)
    assert_close(
        torch.autograd.grad(ours(s), s, along)[0],
        torch.autograd.grad(theirs(s, -1), s, along)[0],
        1e-7,
    )


# Dropout


@sample_examples(8)
@given(seed=SEEDS, p=st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_is_fair(seed: int, p: float) -> None:
    q, k = np.zeros((2, 3, 60, 1)), np.zeros((2, 3, 70, 1))
    plain = qkv.weights(q, k)
    factor = qkv.weights(q, k, dropout_p=p, seed=seed) / plain
    included = factor > 0
    np.testing.assert_allclose(factor, np.where(included, 1 / (1 - p), 0.0), rtol=1e-12)
    deviation = math.sqrt(p * (1 - p) / included.size)
    assert abs((1 - included.mean()) - p) < 5 * deviation
    assert abs(factor.mean() - 1) < 5 * deviation / (1 - p)
    # No batch, head, query or key looks like its neighbour.
    expected = p * p + (1 - p) ** 2
    for axis in range(4):
        first, second = (np.delete(included, at, axis) for at in (0, -1))
        assert abs((first == second).mean() - expected) < 0.05
    assert not np.array_equal(included, qkv.weights(q, k, dropout_p=p, seed=seed + 1) > 0)


@sample_examples(24)
@given(
    seed=SEEDS, p=st.sampled_from([0.0, 0.3, 0.7, 1.0]), lead=st.sampled_from([(), (3,), (2, 3)])
)
def test_one_seed_drops_the_same_in_every_block(seed: int, p: float, lead: tuple[int, ...]) -> None:
    q, k, v = database(np.random.default_rng(seed), 5, 7, lead)
    options = {"mask": masks.causal, "dropout_p": p, "seed": seed}
    want, alpha = qkv.attend(q, k, v, return_weights=True, engine="dense", **options)
    assert_close(alpha @ v, want)
    assert_close(qkv.weights(q, k, **options), alpha)
    assert_close(qkv.attend(q, k, v, engine="streaming", **options), want)
    for size in ((1, 1), (2, 3), (9, 9)):
        assert_close(in_blocks(size, q, k, v, **options)[0], want)
    if p == 1:
        assert not want.any() and not alpha.any()


@pytest.mark.parametrize("framework", ["torch", "jax.numpy", "tensorflow"])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_one_seed_drops_the_same_in_every_framework(framework: str, p: float) -> None:
    q, k, v = (x.astype("float32") for x in database(np.random.default_rng(1), 5, 7, (2, 3)))
    options = {"mask": masks.causal, "dropout_p": p, "seed": 2**32 - 5}
    want, alpha = qkv.attend(q, k, v, return_weights=True, **options)
    module = load(framework)
    make = getattr(module, "asarray", None) or module.constant
    out, other = qkv.attend(*map(make, (q, k, v)), return_weights=True, engine="dense", **options)
    assert np.array_equal(to_numpy(other) > 0, alpha > 0)
    assert_close(out, want, 1e-5)
    assert_close(in_blocks((2, 3), *map(make, (q, k, v)), **options)[0], want, 1e-5)


# Heads


@each_weighting
@sample_examples(6)
@given(
    seed=SEEDS,
    heads=st.sampled_from([(4, 2, 2), (4, 1, 4), (4, 4, 2), (6, 2, 3), (6, 3, 1), (2, 1, 1)]),
    batched=st.booleans(),
)
def test_shared_heads_are_repeated_heads(
    name: str, seed: int, heads: tuple[int, int, int], batched: bool
) -> None:
    rng = np.random.default_rng(seed)
    n, m = 3, 5
    widths = ((n, D), (m, D), (m, DV))
    q, k, v = (rows(rng, 2, h, *size) for h, size in zip(heads, widths, strict=True))
    if not batched:
        k, v = k[0], v[:1]
    options = {
        "score": score_for(name, rng),
        "weighting": WEIGHTINGS[name],
        "mask": rng.random((2, 1, n, m)) < 0.7,
    }
    full = [np.repeat(x, heads[0] // x.shape[-3], -3) for x in (k, v)]
    full = [np.broadcast_to(x, (2, *x.shape[-3:])) for x in full]
    want, alpha = qkv.attend(q, *full, return_weights=True, engine="dense", **options)
    for b, h in itertools.product(range(2), range(heads[0])):
        alone = options | {"mask": options["mask"][b, 0]}
        assert_close(want[b, h], qkv.attend(q[b, h], full[0][b, h], full[1][b, h], **alone))
    assert_close(qkv.attend(q, k, v, engine="dense", **options), want)
    assert_close(in_blocks((2, 2), q, k, v, **options)[0], want)
    assert_close(qkv.weights(q, k, **options), alpha)


@pytest.mark.parametrize("engine", ["dense", "streaming", "native"])
@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 4), (6, 2, 3)])
def test_shared_heads_gather_the_gradients_of_their_group(
    engine: str, heads: tuple[int, int, int]
) -> None:
    torch = load("torch")
    rng = np.random.default_rng(0)
    widths = ((3, D), (5, D), (5, DV))
    shared = [
        torch.tensor(rows(rng, 2, h, *size), requires_grad=True)
        for h, size in zip(heads, widths, strict=True)
    ]
    along = torch.tensor(rows(rng, 2, heads[0], 3, DV))
    want = torch.autograd.grad(
        qkv.attend(
            *(x.repeat_interleave(heads[0] // x.shape[1], 1) for x in shared), engine="dense"
        ),
        shared,
        along,
    )
    got = torch.autograd.grad(qkv.attend(*shared, engine=engine), shared, along)
    for one, two in zip(got, want, strict=True):
        assert_close(one, two)


# Masks. Each is defined once more, pair by pair: rule(b, h, i, j, n, m).

Rule = Callable[[int, int, int, int, int, int], bool]


def mask_and_rule(rng: np.random.Generator, n: int, m: int, lead: tuple[int, int]) -> Any:
    batch, heads = lead
    left, right, step, count = (int(x) for x in rng.integers((0, 0, 1, 0), (5, 5, 4, 4)))
    offset = int(rng.integers(-3, 4))
    per_batch = rng.integers(-2, 4, batch)
    valid, each = rng.integers(0, m + 1, batch), rng.integers(0, m + 1, (batch, n))
    layout = rng.random((n // 2 + 1, m // 3 + 1)) < 0.5
    by_head = rng.random((heads, n // 2 + 1, m // 2 + 1)) < 0.5
    ids, key_ids = np.sort(rng.integers(3, size=n)), rng.integers(3, size=m)
    batch_ids, batch_key_ids = rng.integers(3, size=(batch, n)), rng.integers(3, size=(batch, m))
    flat, full = rng.random((n, m)) < 0.5, rng.random((batch, heads, n, m)) < 0.5
    by_key = rng.random((batch, 1, 1, m)) < 0.5
    bias = np.where(flat, 0.5, -np.inf)
    table: list[tuple[Any, Rule]] = [
        (masks.causal, lambda b, h, i, j, n, m: j <= i),
        (masks.causal(), lambda b, h, i, j, n, m: j <= i),
        (masks.causal(align="bottom_right"), lambda b, h, i, j, n, m: j <= i + m - n),
        (masks.causal(offset=offset), lambda b, h, i, j, n, m: j <= i + offset),
        (masks.causal(offset=per_batch), lambda b, h, i, j, n, m: j <= i + per_batch[b]),
        (masks.window(left), lambda b, h, i, j, n, m: i - left <= j <= i + left),
        (masks.window(left, right), lambda b, h, i, j, n, m: i - left <= j <= i + right),
        (
            masks.window(left, right, align="bottom_right"),
            lambda b, h, i, j, n, m: i + m - n - left <= j <= i + m - n + right,
        ),
        (
            masks.dilated(left, step),
            lambda b, h, i, j, n, m: j in [i + step * t for t in range(-left, left + 1)],
        ),
        (masks.strided(step), lambda b, h, i, j, n, m: abs(i - j) % step == 0),
        (masks.global_tokens(count), lambda b, h, i, j, n, m: i < count or j < count),
        (masks.blocks(layout, (2, 3)), lambda b, h, i, j, n, m: layout[i // 2, j // 3]),
        (masks.blocks(by_head, 2), lambda b, h, i, j, n, m: by_head[h, i // 2, j // 2]),
        (masks.lengths(valid), lambda b, h, i, j, n, m: j < valid[b]),
        (masks.lengths(each), lambda b, h, i, j, n, m: j < each[b, i]),
        (masks.documents(ids, key_ids), lambda b, h, i, j, n, m: ids[i] == key_ids[j]),
        (
            masks.documents(batch_ids, batch_key_ids),
            lambda b, h, i, j, n, m: batch_ids[b, i] == batch_key_ids[b, j],
        ),
        (
            masks.custom(lambda b, h, i, j: (b + 2 * h + i * j) % 3 == 0),
            lambda b, h, i, j, n, m: (b + 2 * h + i * j) % 3 == 0,
        ),
        (masks.array(flat), lambda b, h, i, j, n, m: flat[i, j]),
        (masks.array(full), lambda b, h, i, j, n, m: full[b, h, i, j]),
        (masks.array(by_key), lambda b, h, i, j, n, m: by_key[b, 0, 0, j]),
        (masks.window(left, None), lambda b, h, i, j, n, m: i - left <= j <= i + left),
        (masks.window(math.inf, right), lambda b, h, i, j, n, m: j <= i + right),
        (masks.window(left, math.inf), lambda b, h, i, j, n, m: i - left <= j),
        (masks.array(bias), lambda b, h, i, j, n, m: bias[i, j] > -np.inf),
    ]
    return table


KINDS = len(mask_and_rule(np.random.default_rng(0), 2, 2, (1, 1)))
BOOLEAN = KINDS - 1  # the last is a float mask, which combines by & alone


def check_mask(mask: Any, want: np.ndarray, rng: np.random.Generator, lookups: int = 12) -> None:
    """allowed() of random blocks is that part of `want`, verdict() never contradicts it."""
    *lead, n, m = want.shape
    q, k = np.zeros((*lead, n, 1)), np.zeros((m, 1))
    call = build_call(q, k, k, "dot", "softmax", mask, 0.0, None, None)
    spans = [(Span(0, n), Span(0, m))]
    for _ in range(lookups):
        (top, bottom), (left, right) = (
            sorted(rng.choice(size + 1, 2, replace=False)) for size in (n, m)
        )
        spans.append((Span(int(top), int(bottom - top)), Span(int(left), int(right - left))))
    for across, down in spans:
        part = want[
            ..., across.start : across.start + across.size, down.start : down.start + down.size
        ]
        allowed = call.rule.allowed_pairs(make_block(call, across, down))
        got = np.broadcast_to(True if allowed is None else allowed, part.shape)
        assert np.array_equal(got, part), mask
        verdict = call.rule.block_verdict(across, down, n, m)
        assert verdict in (True, False, None)
        assert verdict is not True or part.all(), mask
        assert verdict is not False or not part.any(), mask


def brute_force(rule: Rule, n: int, m: int, lead: tuple[int, int]) -> np.ndarray:
    every = itertools.product(*map(range, (*lead, n, m)))
    return np.array([bool(rule(*at, n, m)) for at in every]).reshape(*lead, n, m)


@pytest.mark.parametrize("kind", range(KINDS))
@sample_examples(8)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_a_mask_is_its_rule(kind: int, seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    lead = (2, 3)
    mask, rule = mask_and_rule(rng, n, m, lead)[kind]
    want = brute_force(rule, n, m, lead)
    check_mask(mask, want, rng)
    alpha = qkv.weights(np.zeros((*lead, n, 1)), np.zeros((m, 1)), weighting="average", mask=mask)
    counts = want.sum(-1, keepdims=True)
    assert_close(alpha, want / np.where(counts == 0, 1, counts))


@sample_examples(80)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS, size=st.integers(1, 5))
def test_masks_are_a_boolean_algebra(seed: int, n: int, m: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    lead = (2, 2)
    table = mask_and_rule(rng, n, m, lead)[:BOOLEAN]

    def expression(size: int) -> tuple[Any, np.ndarray]:
        if size <= 1:
            mask, rule = table[rng.integers(len(table))]
            return mask, brute_force(rule, n, m, lead)
        kind = rng.choice(["and", "or", "not"])
        one, yes = expression(size // 2 + 1 if size > 2 else 1)
        if kind == "not":
            return ~one, ~yes
        two, other = expression(size - size // 2 - 1)
        if rng.random() < 0.2:  # a plain array on either side
            two = np.array(other)
            one, two = (one, two) if rng.random() < 0.5 else (two, one)
        return (one & two, yes & other) if kind == "and" else (one | two, yes | other)

    mask, want = expression(size)
    mask = masks.array(mask)
    check_mask(mask, want, rng)
    check_mask(~mask, ~want, rng, 3)
    check_mask(mask | ~mask, np.ones_like(want), rng, 3)
    check_mask(mask & ~mask, np.zeros_like(want), rng, 3)


@sample_examples(20)
@given(seed=SEEDS, n=LENGTHS, m=LENGTHS)
def test_float_masks_add_up(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = database(rng, n, m)
    live = rng.random((n, m)) < 0.7
    one, two = (rng.normal(size=shape) for shape in ((n, m), (1, m)))
    ruled = np.where(live, one, -np.inf)
    biased = scores.resolve(lambda query, key: query @ key.swapaxes(-1, -2) + one + two)
    want = qkv.attend(q, k, v, score=biased, mask=masks.causal & live)
    got = qkv.attend(q, k, v, score="dot", mask=masks.causal & ruled & two)
    assert_close(got, want)


# PyTorch's signature


@sample_examples(120)
@given(
    seed=SEEDS,
    axes=st.integers(2, 4),
    n=LENGTHS,
    m=LENGTHS,
    mask=st.sampled_from([None, "boolean", "float", "causal"]),
    scale=st.sampled_from([None, 0.3, 2.0]),
    gqa=st.booleans(),
    double=st.booleans(),
)
def test_scaled_dot_product_attention_is_torchs(
    seed: int,
    axes: int,
    n: int,
    m: int,
    mask: str | None,
    scale: float | None,
    gqa: bool,
    double: bool,
) -> None:
    torch = load("torch")
    rng = np.random.default_rng(seed)
    dtype = torch.float64 if double else torch.float32
    lead = (2, 4)[4 - axes :] if axes > 2 else ()
    fewer = (*lead[:-1], 2) if gqa and lead else lead
    q, k, v = (
        torch.tensor(rows(rng, *shape), dtype=dtype)
        for shape in ((*lead, n, D), (*fewer, m, D), (*fewer, m, DV))
    )
    options: dict[str, Any] = {"scale": scale, "is_causal": mask == "causal"}
    options |= {"enable_gqa": True} if gqa and axes == 4 else {}
    if gqa and axes == 3:  # torch shares heads on four axes only
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    if mask in ("boolean", "float"):
        shape = [(n, m), (1, m), (*lead, n, m), (*(1 for _ in lead), n, 1)]
        live = rng.random(shape[rng.integers(4)]) < rng.choice([0.6, 1.0])
        live[..., 0] = True
        bias = np.where(live, rng.normal(size=live.shape), -np.inf)
        options["attn_mask"] = torch.tensor(live if mask == "boolean" else bias)
        if mask == "float":
            options["attn_mask"] = options["attn_mask"].to(dtype)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    tolerance = 1e-10 if double else 2e-5
    got = qkv.scaled_dot_product_attention(q, k, v, **options)
    assert got.dtype == dtype
    assert_close(got, want, tolerance)
    on_host = {name: to_numpy(x) if torch.is_tensor(x) else x for name, x in options.items()}
    again = qkv.scaled_dot_product_attention(*map(to_numpy, (q, k, v)), **on_host)
    assert again.dtype == to_numpy(q).dtype
    assert_close(again, want, tolerance)
