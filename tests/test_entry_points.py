"""One equation at every entry point: each score × weighting, against the formulas.

An entry point gets what it supports: four queries, of which one lies beyond every window and one
may see nothing, and seven keys, of which two do not count and hold NaN and ∞. What a mask leaves
out for `attend` was removed from the database.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

import qkv
from qkv import nn, onnx, scores, weightings
from qkv.database.errors import NoRowsMatchWarning
from qkv.engines import streaming
from qkv.errors import CombinationError, QkvError
from qkv.frameworks import get_framework
from qkv.scores.feature_map import draw_directions
from qkv.weightings.base import live_row_max, pool_by_weights
from tests import formulas
from tests.sampling import FULL

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.sample_of_module(600)

N, M, D, DV, HIDDEN = 4, 7, 3, 2, 4
FAR, SHUT = 2, 3
"""The query beyond every window, and the one that a mask leaves nothing."""
DEAD = (2, 5)
WIDTH = 2.2
SHARPNESS = float(np.random.default_rng(None if FULL else 5).uniform(0.5, 2.0))
"""How a user's weighting bends its scores: another in every run of `make test-full`."""

_rng = np.random.default_rng(11)


def _normal(*shape: int) -> np.ndarray:
    # What the database keeps, it keeps in float32.
    return _rng.normal(size=shape).astype("float32").astype(float)


QUERY, KEY, VALUE, ALONG = _normal(N, D), _normal(M, D), _normal(M, DV), _normal(N, DV)
QUERY[1] = KEY[4]
QUERY[FAR] += 3.0
LIVE = np.ones((N, M), bool)
LIVE[:, DEAD] = False
LIVE[SHUT] = False


# What a user may write


@dataclass(frozen=True)
class Near(scores.Score):
    """s = exp(−Σ w |q − k|), a score of one's own"""

    w: Any
    nonnegative: ClassVar[bool] = True

    def __call__(self, query, key):
        xp = get_framework(query).xp
        apart = xp.abs(query[..., :, None, :] - key[..., None, :, :])
        return xp.exp(-xp.sum(apart * self.w, axis=-1))


def weighted(w):
    """s = Σ w q k, as a function that has caught an array."""
    return lambda query, key: scores.Dot()(query * w, key)


@dataclass(frozen=True)
class Softplus(weightings.Weighting):
    """αᵢ = log(1 + e^sᵢ)ᵖ / Σⱼ log(1 + e^sⱼ)ᵖ, a weighting of one's own"""

    p: float
    is_convex: ClassVar[bool] = True
    needs_centre: ClassVar[bool] = True

    def bent(self, scores, live):
        fw = get_framework(scores)
        scores = fw.fill_unless(scores, live)
        top = fw.xp.maximum(scores, scores * 0.0)
        plus = top + fw.xp.log1p(fw.xp.exp(-fw.xp.abs(scores)))
        return plus, fw.fill_unless(plus**self.p, live)

    def weights(self, scores, live, k):
        _, bent = self.bent(scores, live)
        fw = get_framework(bent)
        return bent / fw.safe_divisor(fw.row_sum(bent))

    def init(self, rows, width):
        return get_framework(rows).full(rows.shape, 0.0, rows), *super().init(rows, width)

    def partial_state(self, scores, live, k, result, value, dropout_mask):
        _, bent = self.bent(scores, live)
        return get_framework(bent).row_sum(bent), pool_by_weights(bent, value, live, dropout_mask)

    def merge(self, one, two):
        return one[0] + two[0], one[1] + two[1]

    def finish(self, state, result):
        total, pooled = state
        out = pooled / get_framework(total).safe_divisor(total)
        return out, (total,), out

    def block_weights(self, scores, live, k, result):
        _, bent = self.bent(scores, live)
        return bent / get_framework(bent).safe_divisor(result[0])

    def score_gradient(self, scores, weight, along, centre, result):
        fw = get_framework(weight)
        plus, _ = self.bent(fw.fill_unless(scores, weight > 0), None)
        steep = self.p * plus ** (self.p - 1) * -fw.xp.expm1(-plus)
        return fw.fill_unless(steep, weight > 0) * (along - centre) / fw.safe_divisor(result[0])


@dataclass(frozen=True)
class Clipped(weightings.Softmax):
    """The softmax of 2 tanh(s/2): a subclass that scales in another way."""

    def scale_scores(self, scores):
        return 2.0 * get_framework(scores).xp.tanh(scores * 0.5)


@dataclass(frozen=True)
class Sunk(weightings.Softmax):
    """eˢ / (1 + Σ eˢ): a subclass whose row has one more key, of score and value 0."""

    is_convex: ClassVar[bool] = False
    has_lse: ClassVar[bool] = False

    def weights(self, scores, live, k):
        top, total = self.with_zero_score(live_row_max(scores, live), 0.0)
        e = get_framework(scores).fill_unless(get_framework(scores).xp.exp(scores - top), live)
        return e / (total + get_framework(e).row_sum(e))

    def with_zero_score(self, top, total):
        """The largest score and the sum relative to it, with one more score of 0."""
        xp = get_framework(top).xp
        new = xp.maximum(top, top * 0.0)
        new = get_framework(top).fill_unless(new, top > -math.inf)
        return new, total * xp.exp(get_framework(top).replace_nonfinite(top) - new) + xp.exp(-new)

    def finish(self, state, result):
        top, total, pooled = state
        new, total = self.with_zero_score(top, total)
        out = (
            pooled
            * get_framework(top).xp.exp(get_framework(top).replace_nonfinite(top) - new)
            / total
        )
        return out, (new, total), out


# Every case


@dataclass(frozen=True)
class Kind:
    """A score or a weighting: its arrays, how it is built of them, and its formula."""

    build: Callable[..., Any]
    formula: Callable[..., Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def of(self, arrays: dict[str, Any], prefix: str) -> Any:
        return self.build(*(arrays[f"{prefix}.{name}"] for name in self.arrays))


def window(name: str) -> Kind:
    kind = getattr(scores, name)
    return Kind(lambda: kind(WIDTH), lambda q, k: formulas.SCORES[name](q, k, WIDTH))


def _gated(q, k, w_query, w_key):
    return formulas.SCORES["Gated"](q, k, w_query, w_key, 0.0)


def _performer(q, k):
    """φ(q)·φ(k) for the default features, with φ(x) = exp(ωᵀx − ‖x‖²/2) of x / d^¼."""
    rows = draw_directions(D, 256, 0).T
    x, y = ([a / D**0.25 for a in row] for row in (q, k))
    half = (formulas.dot(x, x) + formulas.dot(y, y)) / 2
    return sum(
        math.exp(formulas.dot(w, x) + formulas.dot(w, y) - half) for w in rows.tolist()
    ) / len(rows)


SCORES: dict[str, Kind] = {
    "dot": Kind(lambda: "dot", formulas.dot),
    "scaled_dot": Kind(lambda: "scaled_dot", lambda q, k: formulas.dot(q, k) / math.sqrt(D)),
    "softcap": Kind(
        lambda: scores.ScaledDot(0.7, softcap=1.5),
        lambda q, k: formulas.SCORES["ScaledDot"](q, k, 0.7, 1.5),
    ),
    "cosine": Kind(lambda: "cosine", lambda q, k: formulas.SCORES["Cosine"](q, k, 1.0)),
    "gaussian": Kind(scores.Gaussian, formulas.SCORES["Gaussian"], {"sigma": np.array(1.2)}),
    "laplace": Kind(scores.Laplace, formulas.SCORES["Laplace"], {"b": np.array(0.9)}),
    "multiplicative": Kind(
        scores.Multiplicative, formulas.SCORES["Multiplicative"], {"w": _normal(D, D)}
    ),
    "additive": Kind(
        scores.Additive,
        formulas.additive,
        {
            "w_query": _normal(HIDDEN, D),
            "w_key": _normal(HIDDEN, D),
            "v": _normal(HIDDEN),
            "bias": _normal(HIDDEN),
        },
    ),
    "gated": Kind(scores.Gated, _gated, {"w_query": _normal(D), "w_key": _normal(D)}),
    "boxcar": window("Boxcar"),
    "triangular": window("Triangular"),
    "epanechnikov": window("Epanechnikov"),
    "constant": Kind(lambda: "constant", lambda q, k: 1.0),
    "exact": Kind(lambda: "exact", formulas.SCORES["Exact"]),
    "feature_map": Kind(
        lambda: "feature_map",
        lambda q, k: formulas.dot(*([x + 1 if x > 0 else math.exp(x) for x in y] for y in (q, k))),
    ),
    "performer": Kind(lambda: "performer", _performer),
    # Of every distance the same, because a formula here sees a pair and not its positions.
    "relative": Kind(
        scores.Relative,
        lambda q, k, bias: formulas.dot(q, k) / math.sqrt(D) + float(bias[0]),
        {"bias": np.array([0.3])},
    ),
    "decay": Kind(lambda: scores.Decay(0.0), formulas.dot),
    "own_modified": Kind(
        lambda w: scores.Modified(scores.Dot(), lambda s, b, h, q, k: s * w - 0.5),
        lambda q, k, w: formulas.dot(q, k) * float(w) - 0.5,
        {"w": np.array(1.4)},
    ),
    "own_score": Kind(
        Near,
        lambda q, k, w: math.exp(-sum(abs(a - b) * c for a, b, c in zip(q, k, w, strict=True))),
        {"w": np.abs(_normal(D))},
    ),
    "own_function": Kind(
        weighted, lambda q, k, w: formulas.dot([a * b for a, b in zip(q, w, strict=True)], k),
        {"w": _normal(D)},
    ),
}  # fmt: skip
WINDOWS = ("boxcar", "triangular", "epanechnikov")
NONNEGATIVE = (*WINDOWS, "constant", "exact", "feature_map", "performer", "own_score")


def on_empty(name: str, other: Callable[..., Any]) -> Kind:
    """s over its sum, or the other formula of the distances where that is 0."""
    return Kind(
        lambda: weightings.Normalized(name),
        lambda s, r: formulas.normalized(s) if sum(s) else other(r),
    )


def plain(build: Callable[..., Any], formula: Callable[..., Any]) -> Kind:
    return Kind(build, lambda s, r: formula(s))


def _sunk(s):
    e = [math.exp(x) for x in s]
    return [x / (1 + sum(e)) for x in e]


def _softplus(s):
    return formulas.normalized([math.log1p(math.exp(x)) ** SHARPNESS for x in s])


WEIGHTINGS: dict[str, Kind] = {
    "softmax": plain(lambda: "softmax", formulas.softmax),
    "temperature": Kind(
        weightings.Softmax,
        lambda s, r, t: formulas.softmax([x / float(t) for x in s]),
        {"t": np.array(0.6)},
    ),
    "hard": plain(lambda: "hard", formulas.one_hot),
    "straight_through": plain(lambda: weightings.Hard(straight_through=True), formulas.one_hot),
    "average": plain(lambda: "average", formulas.WEIGHTINGS["Average"]),
    "raw": plain(lambda: "raw", lambda s: s),
    "sigmoid": plain(lambda: "sigmoid", formulas.WEIGHTINGS["Sigmoid"]),
    "top2": plain(lambda: weightings.TopK(2), lambda s: formulas.top(s, 2)),
    "top_more_than_all": plain(lambda: weightings.TopK(50), formulas.softmax),
    "sparsemax": plain(lambda: "sparsemax", lambda s: formulas.entmax(s, 2)),
    "entmax15": plain(lambda: "entmax15", lambda s: formulas.entmax(s, 1.5)),
    "entmax13": plain(lambda: weightings.Entmax(1.3), lambda s: formulas.entmax(s, 1.3)),
    "sharp": plain(lambda: weightings.Entmax(2.5), lambda s: formulas.entmax(s, 2.5)),
    "alpha": Kind(
        weightings.Entmax, lambda s, r, a: formulas.entmax(s, float(a)), {"a": np.array(1.3)}
    ),
    "normalized": on_empty("zero", lambda r: [0.0] * len(r)),
    "or_nan": on_empty("nan", lambda r: [math.nan] * len(r)),
    "or_uniform": on_empty("uniform", lambda r: [1 / len(r)] * len(r)),
    "or_nearest": on_empty("nearest", lambda r: formulas.one_hot([-x for x in r])),
    "or_raise": on_empty("raise", lambda r: [0.0] * len(r)),
    "own_weighting": plain(lambda: Softplus(SHARPNESS), _softplus),
    "own_scale": plain(
        Clipped, lambda s: formulas.softmax([2 * math.tanh(x / 2) for x in s])
    ),
    "own_softmax": plain(Sunk, _sunk),
}  # fmt: skip
OVER_SUM = ("normalized", "or_nan", "or_uniform", "or_nearest", "or_raise")


def can_combine(score: str, weighting: str) -> bool:
    if weighting == "or_nearest":
        return score in WINDOWS
    return weighting not in OVER_SUM or score in NONNEGATIVE


@functools.cache
def empty(score: str, weighting: str) -> list[int]:
    """The queries that have keys of which none counts."""
    if weighting not in OVER_SUM:
        return []
    sums = alpha_of(leaves(score, "raw"), score, "raw").sum(axis=1)
    return [i for i in range(N) if i != SHUT and sums[i] == 0]


CASES = [(s, w) for s in SCORES for w in WEIGHTINGS if can_combine(s, w)]
REFUSED = [
    (s, w) for s in SCORES for w in OVER_SUM if not can_combine(s, w) and not s.startswith("own")
]
"""What a user's own score may be is not known, so nothing of it is refused."""


def each(cases: list[tuple[str, str]]) -> Any:
    return pytest.mark.parametrize(("score", "weighting"), cases, ids=["-".join(c) for c in cases])


pairs = each(CASES)
of_vectors = each([case for case in CASES if case[0] != "exact"])
"""Exact compares keys and not vectors: a database takes it in `ask` alone."""


def leaves(score: str, weighting: str) -> dict[str, np.ndarray]:
    inside = {f"score.{name}": x for name, x in SCORES[score].arrays.items()}
    inside |= {f"weighting.{name}": x for name, x in WEIGHTINGS[weighting].arrays.items()}
    return {"query": QUERY, "key": KEY, "value": VALUE, **inside}


def build_options(arrays: dict[str, Any], score: str, weighting: str) -> dict[str, Any]:
    return {
        "score": SCORES[score].of(arrays, "score"),
        "weighting": WEIGHTINGS[weighting].of(arrays, "weighting"),
    }


def alpha_of(arrays: dict[str, np.ndarray], score: str, weighting: str) -> np.ndarray:
    """α (n, m) by the formulas, a pair at a time."""
    compare, weigh = SCORES[score], WEIGHTINGS[weighting]
    first = [arrays[f"score.{name}"] for name in compare.arrays]
    second = [arrays[f"weighting.{name}"] for name in weigh.arrays]
    alpha = np.zeros((N, M))
    for i, q in enumerate(arrays["query"]):
        live = np.flatnonzero(LIVE[i])
        if len(live):
            keys = arrays["key"][live]
            s = [compare.formula(q, k, *first) for k in keys]
            alpha[i, live] = weigh.formula(s, [formulas.apart(q, k) for k in keys], *second)
    return alpha


@functools.cache
def truth(score: str, weighting: str) -> tuple[np.ndarray, np.ndarray]:
    """The output (n, d_v) and α (n, m)."""
    alpha = alpha_of(leaves(score, weighting), score, weighting)
    return alpha @ VALUE, alpha


@functools.cache
def compute_slopes(score: str, weighting: str) -> dict[str, tuple[np.ndarray, float]]:
    """Along a random direction for each leaf, the slope of Σ out · ALONG by differences."""
    base, rng, step = leaves(score, weighting), np.random.default_rng(1), 1e-6
    soft = "softmax" if weighting == "straight_through" else weighting

    def loss(arrays: dict[str, np.ndarray], weighting: str) -> float:
        out = alpha_of(arrays, score, weighting) @ arrays["value"]
        return float(np.sum((out * ALONG)[list_answered(score, weighting)]))

    result = {}
    for name, x in base.items():
        along = rng.normal(size=x.shape)
        which = weighting if name == "value" else soft
        if score == "exact" and name in ("query", "key"):
            result[name] = along, 0.0  # it is flat but for a jump
            continue
        ahead, behind = (loss({**base, name: x + s * step * along}, which) for s in (1, -1))
        result[name] = along, (ahead - behind) / (2 * step)
    return result


def list_answered(score: str, weighting: str) -> list[int]:
    """The queries whose answer is a number."""
    lost = empty(score, weighting) if weighting in ("or_nan", "or_raise") else ()
    return [i for i in range(N) if i not in lost]


def poison_keys(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The keys that do not count hold what must not reach an answer."""
    key, value = arrays["key"].copy(), arrays["value"].copy()
    key[DEAD[0]], value[DEAD[0]] = math.inf, math.inf
    key[DEAD[1]], value[DEAD[1]] = math.nan, math.nan
    return {**arrays, "key": key, "value": value}


def query_numbers(score: str, weighting: str) -> list[int]:
    """The queries that are asked together: "raise" would refuse all for one."""
    return list_answered(score, weighting) if weighting == "or_raise" else list(range(N))


def assert_close(actual: Any, want: np.ndarray, within: float = 1e-9) -> None:
    actual = actual.detach().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
    np.testing.assert_allclose(actual, want, atol=within, rtol=within)


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}


def descends(result: Any, arrays: dict[str, Any], score: str, weighting: str) -> None:
    """The gradients of every leaf among `arrays` are those of the formulas."""
    rows, numbers = list_answered(score, weighting), query_numbers(score, weighting)
    along, result = torch.tensor(ALONG[rows]), result[[numbers.index(i) for i in rows]]
    inputs = list(arrays.values())
    gradients: Any = [None] * len(inputs)
    if result.requires_grad:  # some weights move with no score
        gradients = torch.autograd.grad((result * along).sum(), inputs, allow_unused=True)
    for (name, x), gradient in zip(arrays.items(), gradients, strict=True):
        gradient = np.zeros(x.shape) if gradient is None else gradient.numpy()
        assert np.isfinite(gradient).all(), name
        direction, slope = compute_slopes(score, weighting)[name]
        size = np.abs(gradient * direction).sum() + 1
        assert abs((gradient * direction).sum() - slope) < 1e-6 * size, name


def test_every_name_is_a_case():
    one = {name: kind.of(leaves(name, "raw"), "score") for name, kind in SCORES.items()}
    two = {name: kind.of(leaves("dot", name), "weighting") for name, kind in WEIGHTINGS.items()}
    for table, cases in ((scores, one), (weightings, two)):
        missing = set(table.NAMES.values()) - {type(table.resolve(x)) for x in cases.values()}
        assert all(not kind.__module__.startswith("qkv.") for kind in missing)


@pytest.mark.parametrize("score", WINDOWS)
def test_the_far_query_is_beyond_every_window_and_no_other_is(score):
    assert empty(score, "normalized") == [FAR]


# attend, weights, and the weighting of given scores


@pairs
def test_attend(score, weighting):
    out, alpha = truth(score, weighting)
    rows = query_numbers(score, weighting)
    arrays = poison_keys(leaves(score, weighting))
    inputs = (arrays["query"][rows], arrays["key"], arrays["value"])
    options = {**build_options(arrays, score, weighting), "mask": LIVE[rows]}
    result, weights = qkv.attend(*inputs, **options, return_weights=True)
    assert_close(result, out[rows])
    assert_close(weights, alpha[rows])
    assert_close(qkv.attend(*inputs, **options), out[rows])
    assert_close(qkv.weights(*inputs[:2], **options), alpha[rows])


@pytest.mark.sample(350)
@pairs
@pytest.mark.parametrize("engine", [None, "streaming"])
def test_attend_by_torch_and_its_gradients(score, weighting, engine, monkeypatch):
    monkeypatch.setattr(streaming, "block_size", lambda call: (3, 2))  # borders are crossed
    rows = query_numbers(score, weighting)
    arrays = tensors(poison_keys(leaves(score, weighting)))
    inputs = (arrays["query"][rows], arrays["key"], arrays["value"])
    options = {**build_options(arrays, score, weighting), "mask": torch.tensor(LIVE[rows])}
    result = qkv.attend(*inputs, **options, engine=engine)
    assert_close(result, truth(score, weighting)[0][rows])
    descends(result, arrays, score, weighting)


@pairs
def test_the_gradients_of_weights(score, weighting):
    rows = query_numbers(score, weighting)
    arrays = tensors(poison_keys(leaves(score, weighting)))
    value = arrays.pop("value").detach().nan_to_num(0.0, 0.0)
    options = {**build_options(arrays, score, weighting), "mask": torch.tensor(LIVE[rows])}
    result = qkv.weights(arrays["query"][rows], arrays["key"], **options)
    assert_close(result, truth(score, weighting)[1][rows])
    descends(result @ value, arrays, score, weighting)


@pairs
def test_the_weighting_of_scores(score, weighting):
    rows = query_numbers(score, weighting)
    arrays = tensors(leaves(score, weighting))
    value, live = arrays.pop("value").detach(), torch.tensor(LIVE[rows])
    options = build_options(arrays, score, weighting)
    weigh = weightings.resolve(options["weighting"])
    compare = weigh.adapt_score(scores.resolve(options["score"]))
    computed = compare(arrays["query"][rows], arrays["key"])
    result = weigh(torch.where(live, computed, math.nan), live)
    assert_close(result, truth(score, weighting)[1][rows])
    descends(result @ value, arrays, score, weighting)


# Layers


@pytest.mark.sample(350)
@pairs
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_layer_and_its_gradients(score, weighting, need_weights):
    rows = query_numbers(score, weighting)
    arrays = tensors(poison_keys(leaves(score, weighting)))
    layer = nn.Attention(**build_options(arrays, score, weighting))
    inputs = (arrays["query"][rows], arrays["key"], arrays["value"], torch.tensor(LIVE[rows]))
    out, alpha = truth(score, weighting)
    result = layer(*inputs, need_weights=need_weights)
    if need_weights:
        result, weights = result
        assert_close(weights, alpha[rows])
    assert_close(result, out[rows])
    descends(result, arrays, score, weighting)


@pytest.mark.parametrize("weighting", ["softmax"])
@pytest.mark.parametrize("score", ["scaled_dot", "softcap"])
def test_the_onnx_operator(score, weighting):
    arrays = poison_keys(leaves(score, weighting))
    inputs = (arrays[name][None, None] for name in ("query", "key", "value"))
    capped = {"scale": 0.7, "softcap": 1.5} if score == "softcap" else {}
    actual, _, _, alpha = onnx.attention(*inputs, LIVE, **capped, qk_matmul_output_mode=3)
    out, want = truth(score, weighting)
    assert_close(actual[0, 0], out)
    assert_close(alpha[0, 0], want)


# The database


@pytest.fixture(scope="module", params=["memory", "disk"])
def place(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 3])
def database(request, place, tmp_path_factory):
    """The rows in one segment or several; those that do not count were removed."""
    path = tmp_path_factory.mktemp("entry_points") / "rows.qkv"
    made = qkv.Database() if place == "memory" else qkv.open(path)
    key, value = KEY.copy(), VALUE.copy()
    key[DEAD, :] = 1e6
    key[DEAD[1]] *= -1
    value[DEAD[0]], value[DEAD[1]] = math.inf, math.nan
    for rows in np.array_split(np.arange(M), request.param):
        made.add(key[rows], value[rows])
    made.remove(list(key[list(DEAD)]))
    assert len(made) == M - len(DEAD)
    yield made
    made.close()


HERE = [j for j in range(M) if j not in DEAD]


@pytest.mark.sample(500)
@pairs
def test_ask(database, score, weighting):
    out, alpha = truth(score, weighting)
    arrays = leaves(score, weighting)
    options = build_options(arrays, score, weighting)
    for i in query_numbers(score, weighting):
        where = (lambda row: False) if i == SHUT else None
        result = database.ask(QUERY[i], where=where, **options)
        assert_close(result.weights, alpha[i, HERE], 1e-5)
        if np.any(np.abs(alpha[i]) > 1e-6) or np.isnan(alpha[i]).any():
            # With score "exact" the value is that of the best-matching key.
            assert_close(result.mean, out[i], 1e-5)
            assert result.value_is_mean == (score != "exact")
        elif not alpha[i].any():  # no row has a say
            assert result.value is None and result.rows == []


@pytest.mark.sample(400)
@of_vectors
def test_the_database_attends(database, score, weighting):
    out, _ = truth(score, weighting)
    rows = [i for i in query_numbers(score, weighting) if i != SHUT]
    arrays = leaves(score, weighting)
    options = build_options(arrays, score, weighting)
    assert_close(database.attend(QUERY[rows], **options), out[rows])
    with pytest.warns(NoRowsMatchWarning, match="No rows match"):
        shut = database.attend(QUERY[rows], where=lambda row: False, **options)
    assert_close(shut, np.zeros((len(rows), DV)))


@pytest.mark.sample(300)
@of_vectors
def test_the_gradients_of_the_database(database, score, weighting):
    rows = query_numbers(score, weighting)
    arrays = tensors(leaves(score, weighting))
    options = build_options(arrays, score, weighting)
    del arrays["key"], arrays["value"]
    # The shut query's output is 0 whatever the rows say, so it gets a gradient of 0.
    result = database.attend(arrays["query"][rows], **options)
    result = torch.where(torch.tensor([[i != SHUT] for i in rows]), result, 0.0)
    assert_close(result, truth(score, weighting)[0][rows])
    descends(result, arrays, score, weighting)


# What is refused is refused everywhere


def entry_point_calls(score, weighting, rows, database):
    """Return each entry point with these queries as a function without arguments."""
    arrays = leaves(score, weighting)
    options = build_options(arrays, score, weighting)
    three = (QUERY[rows], KEY, VALUE)
    yield lambda: qkv.attend(*three, **options)
    yield lambda: qkv.weights(*three[:2], **options)
    yield lambda: nn.Attention(**options)(*map(torch.tensor, three))
    yield lambda: database.ask(QUERY[rows[0]], **options)
    if score != "exact":
        yield lambda: database.attend(QUERY[rows], **options)
        yield lambda: database.attend(torch.tensor(QUERY[rows], requires_grad=True), **options)


@each(REFUSED)
def test_what_means_nothing_is_refused(database, score, weighting):
    for call in entry_point_calls(score, weighting, [0], database):
        with pytest.raises(CombinationError):
            call()


@pytest.mark.parametrize("score", [*WINDOWS, "exact"])
def test_no_key_in_reach_is_an_error_where_it_should_be(database, score):
    for call in entry_point_calls(score, "or_raise", [FAR], database):
        with pytest.raises(QkvError, match="no key"):
            call()
