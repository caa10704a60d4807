"""Cases that fail in other libraries: no keys, masked NaN, huge numbers."""

import importlib
import importlib.util
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import masks, scores, weightings
from qkv.attention import build_call
from qkv.engines import streaming
from qkv.frameworks import get_framework, to_numpy
from tests.sampling import FULL

pytestmark = pytest.mark.sample_of_module(200)

FRAMEWORKS = os.environ.get("QKV_TEST_FRAMEWORKS", "numpy,torch,jax,tensorflow").split(",")
QUICK = ("numpy", "torch")
"""Where a case costs so little that every weighting and engine can be tried."""

N, M, D, DV = 4, 6, 3, 2
NAN, INF = math.nan, math.inf


class Kit:
    """How one framework makes arrays and gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module = importlib.import_module(name)
            if name == "mxnet":
                self.module.npx.set_np()

    def __call__(self, x: Any, dtype: str | None = None) -> Any:
        """An array: float32 unless specified; booleans and integers unchanged."""
        x = np.asarray(x)
        dtype = dtype or ("float32" if x.dtype.kind == "f" else str(x.dtype))
        if self.name == "numpy":
            return x.astype(dtype)
        if self.name == "torch":
            return self.module.tensor(x).to(getattr(self.module, dtype))
        if self.name == "jax":
            return self.module.numpy.asarray(x).astype(dtype)
        if self.name == "mxnet":
            return self.module.np.array(x, dtype=dtype)
        return self.module.cast(self.module.constant(x), dtype)

    def pull(
        self, function: Callable[..., list[Any]]
    ) -> Callable[..., tuple[list[Any], list[Any]]]:
        """The outputs of function(*arrays), and ∂/∂arrays Σ slope · outputs, as NumPy.

        NumPy has no gradients: its list is empty.
        """
        run = getattr(self, f"_{self.name}")(function)

        def both(*arrays: Any) -> tuple[list[Any], list[Any]]:
            outputs, result = run(arrays)
            pairs = zip(arrays, result, strict=bool(result))
            filled = [
                np.zeros(get_framework(x).static_shape(x)) if g is None else to_numpy(g)
                for x, g in pairs
            ]
            return [to_numpy(y) for y in outputs], filled

        return both

    def slopes(self, outputs: Any) -> list[Any]:
        return [
            self(slope(get_framework(y).static_shape(y)), get_framework(y).dtype_name(y))
            for y in outputs
        ]

    def _numpy(self, function: Any) -> Any:
        return lambda arrays: (function(*arrays), [])

    def _torch(self, function: Any) -> Any:
        def run(arrays: Any) -> Any:
            arrays = [x.detach().requires_grad_() for x in arrays]
            outputs = function(*arrays)
            moved = [y for y in outputs if y.requires_grad]
            if not moved:
                return outputs, [None] * len(arrays)
            along = self.slopes(moved)
            return outputs, self.module.autograd.grad(moved, arrays, along, allow_unused=True)

        return run

    def _jax(self, function: Any) -> Any:
        @self.module.jit  # one program compiles sooner than its operations one by one
        def run(arrays: Any) -> Any:
            outputs, pull = self.module.vjp(lambda *x: list(function(*x)), *arrays)
            return outputs, pull(self.slopes(outputs))

        return run

    def _tensorflow(self, function: Any) -> Any:
        def run(arrays: Any) -> Any:
            with self.module.GradientTape() as tape:
                tape.watch(arrays)
                outputs = function(*arrays)
            return outputs, tape.gradient(outputs, arrays, self.slopes(outputs))

        return run

    def _mxnet(self, function: Any) -> Any:
        def run(arrays: Any) -> Any:
            arrays = [x.copy() for x in arrays]
            for x in arrays:
                x.attach_grad()
            with self.module.autograd.record():
                outputs = function(*arrays)
            self.module.autograd.backward(outputs, self.slopes(outputs))
            return outputs, [x.grad for x in arrays]

        return run


def slope(shape: tuple[int, ...]) -> np.ndarray:
    """What an output is multiplied by before it is summed and differentiated."""
    return np.cos(np.arange(math.prod(shape))).reshape(shape)


@cache
def kit_of(name: str) -> Kit:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return Kit(name)


@pytest.fixture
def kit(framework: str) -> Kit:
    return kit_of(framework)


WEIGHTINGS: dict[str, Any] = {
    "softmax": weightings.Softmax(),
    "hard": weightings.Hard(),
    "average": weightings.Average(),
    "normalized": weightings.Normalized(),
    "raw": weightings.Raw(),
    "sigmoid": weightings.Sigmoid(),
    "top 2": weightings.TopK(2),
    "sparsemax": weightings.Sparsemax(),
    "entmax": weightings.Entmax(1.5),
}
FEW = ("softmax", "top 2", "sparsemax")
SPARSE = ("hard", "top 2", "sparsemax", "entmax")
BOUNDED = tuple(name for name in WEIGHTINGS if name not in ("normalized", "raw"))
"""Those whose weights stay small though the scores do not."""


def score_of(weighting: str) -> Any:
    return scores.Epanechnikov(4.0) if weighting == "normalized" else scores.Dot()


def engines(framework: str, weighting: str = "softmax") -> list[str]:
    """ "blocks" is streaming with blocks of 2 × 3; "streaming" chooses its own, one here."""
    out = ["dense", "blocks"] + ["streaming"] * (framework in QUICK)
    return out + ["native"] * (framework == "torch" and weighting == "softmax")


def cases(
    few: tuple[str, ...] = FEW, every: tuple[str, ...] = tuple(WEIGHTINGS), **extra: Any
) -> Any:
    """framework × engine × weighting × one more: all where that is quick, a few elsewhere.

    JAX compiles each case anew, so one of them stands for it unless all are asked for.
    """
    more = next(iter(extra.values()), [None])
    table = []
    for framework in FRAMEWORKS:
        weights = every if framework in QUICK else few
        short = ("blocks", weights[0], more[0])
        for weighting, one in itertools.product(weights, more):
            for engine in engines(framework, weighting):
                if framework != "jax" or FULL or (engine, weighting, one) == short:
                    table.append((framework, engine, weighting, one)[: 3 + len(extra)])
    return pytest.mark.parametrize(("framework", "engine", "weighting", *extra), table)


each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
quick = pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name in QUICK])
SOFTMAX = {"few": ("softmax",), "every": ("softmax",)}
each_engine = cases(**SOFTMAX)


def everything(engine: str | None, q: Any, k: Any, v: Any, **options: Any) -> list[Any]:
    """The output through an engine, the weights and, where there is one, the log-sum-exp."""
    inputs = {"score": "dot", "weighting": "softmax", "mask": None} | options
    if isinstance(inputs["weighting"], str):
        inputs["weighting"] = WEIGHTINGS[inputs["weighting"]]
    alpha = qkv.weights(q, k, **inputs)
    lse = inputs["weighting"].has_lse and engine != "native"
    if engine == "blocks":
        call = replace(build_call(q, k, v, *inputs.values(), 0.0, None, None), wants_lse=lse)
        with call.fw.use_own_settings():
            out, result, _ = streaming.run(call, (2, 3))
        return [out, alpha, result[..., 0]] if lse else [out, alpha]
    if lse:
        out, result = qkv.attend(q, k, v, engine=engine, return_lse=True, **inputs)
        return [out, alpha, result]
    return [qkv.attend(q, k, v, engine=engine, **inputs), alpha]


# The kernel of torch refuses what is not finite, so there engine=None takes the next.


def attend(engine: str | None, q: Any, k: Any, v: Any, **options: Any) -> Any:
    return everything(engine, q, k, v, **options)[0]


def data(seed: int = 0, lead: tuple[int, ...] = ()) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((*lead, N, D), (*lead, M, D), (*lead, M, DV))
    return [rng.normal(size=shape) for shape in shapes]


def removed(q: Any, k: Any, v: Any, live: Any, score: Any, weighting: str) -> np.ndarray:
    """What a mask means: each query asks a database that has its live rows alone, in float64."""
    out = np.zeros((len(q), v.shape[-1]))
    for i, row in enumerate(np.broadcast_to(live, (len(q), len(k)))):
        if row.any():
            out[i] = qkv.attend(
                q[i : i + 1], k[row], v[row], score=score, weighting=WEIGHTINGS[weighting]
            )[0]
    return out


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    got, want = to_numpy(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def finite(arrays: list[Any]) -> None:
    assert all(np.isfinite(to_numpy(x)).all() for x in arrays)


# Sizes

# `native` refuses calls without anything to compute, and gradients of a mask.
not_native = pytest.mark.applies(lambda engine, **_: engine != "native")


@not_native
@cases()
def test_an_empty_database_answers_zero(kit: Kit, engine: str, weighting: str) -> None:
    arrays = kit(data()[0]), kit(np.zeros((0, D))), kit(np.zeros((0, DV)))
    options = {"score": score_of(weighting), "weighting": weighting}
    outputs, gradients = kit.pull(lambda *x: everything(engine, *x, **options))(*arrays)
    assert outputs[0].tolist() == [[0.0] * DV] * N
    assert outputs[1].shape == (N, 0)
    assert all(lse.tolist() == [-INF] * N for lse in outputs[2:])
    assert [g.shape for g in gradients] == [(N, D), (0, D), (0, DV)][: len(gradients)]
    assert not any(g.any() for g in gradients)


@not_native
@cases()
def test_no_queries_get_no_answers(kit: Kit, engine: str, weighting: str) -> None:
    arrays = kit(np.zeros((0, D))), kit(data()[1]), kit(data()[2])
    options = {"score": score_of(weighting), "weighting": weighting}
    outputs, gradients = kit.pull(lambda *x: everything(engine, *x, **options))(*arrays)
    assert [x.shape for x in outputs] == [(0, DV), (0, M), (0,)][: len(outputs)]
    assert [g.shape for g in gradients] == [(0, D), (M, D), (M, DV)][: len(gradients)]
    assert not any(g.any() for g in gradients)


@cases()
def test_one_row_is_the_answer(kit: Kit, engine: str, weighting: str) -> None:
    q, k, v = data(1)
    q, k, v = q[:1], k[:1], v[:1]
    score = score_of(weighting)
    alpha = {
        "raw": float(score(q, k)[0, 0]),
        "sigmoid": 1 / (1 + math.exp(-float(score(q, k)[0, 0]))),
    }.get(weighting, 1.0)
    out, result, *_ = everything(engine, kit(q), kit(k), kit(v), score=score, weighting=weighting)
    assert_close(out, alpha * v)
    assert_close(result, [[alpha]])


@each_engine
def test_width_one(kit: Kit, engine: str, weighting: str) -> None:
    q, k, v = [0.5, -1.0], [1.0, 2.0, -1.0], [3.0, 5.0, 7.0]
    e = [[math.exp(a * b) for b in k] for a in q]
    want = [[sum(w * x for w, x in zip(row, v, strict=True)) / sum(row)] for row in e]
    for score in ("dot", "scaled_dot"):
        out = attend(engine, *(kit(np.array(x)[:, None]) for x in (q, k, v)), score=score)
        assert_close(out, want)


@each_engine
def test_width_zero_compares_nothing(kit: Kit, engine: str, weighting: str) -> None:
    v = data()[2]
    out = attend(engine, kit(np.zeros((N, 0))), kit(np.zeros((M, 0))), kit(v), score="scaled_dot")
    assert_close(out, np.broadcast_to(v.mean(0), (N, DV)))
    none = attend(engine, *map(kit, data()[:2]), kit(np.zeros((M, 0))))
    assert to_numpy(none).shape == (N, 0)
    x = kit(np.zeros((1, 1, N, 0)))
    assert to_numpy(attend(engine, x, x, x, score=scores.ScaledDot(2.0))).shape == (1, 1, N, 0)


# Nothing to attend to

LIVE = np.array(
    [
        [1, 1, 0, 1, 0, 1],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ],
    bool,
)
DEAD = ~LIVE.any(-1)


def dead_masks(kit: Kit) -> dict[str, tuple[Any, np.ndarray]]:
    """Masks for a query (1, N, D) that leave rows 1 and 3, or all, without a key."""
    lengths = np.array([[3, 0, 5, 0]])
    at_most = np.arange(M) < lengths[0][:, None]
    odd = np.broadcast_to((np.arange(N) % 2 == 0)[:, None], (N, M))
    return {
        "boolean": (kit(LIVE), LIVE),
        "float": (kit(np.where(LIVE, 0.0, -INF)), LIVE),
        "both": (masks.window(M) & kit(np.where(LIVE, 0.0, -INF)), LIVE),
        "lengths": (masks.lengths(lengths), at_most),
        "length 0": (masks.lengths([0]), np.zeros((N, M), bool)),
        "custom": (masks.custom(lambda b, h, i, j: (i % 2 == 0) & (j >= 0)), odd),
        "far window": (masks.causal(offset=-N), np.zeros((N, M), bool)),
    }


def check_dead(kit: Kit, engine: str, weighting: str, mask: Any, live: np.ndarray) -> None:
    q, k, v = data(2)
    dead, unseen = ~live.any(-1), ~live.any(0)
    options = {"score": score_of(weighting), "weighting": weighting, "mask": mask}
    pull = kit.pull(lambda *x: everything(engine, *x, **options))
    (out, alpha, *lse), gradients = pull(*(kit(x[None]) for x in (q, k, v)))
    assert (out[0, dead] == 0).all()
    assert_close(out[0], removed(q, k, v, live, score_of(weighting), weighting))
    assert (alpha[0, ~live] == 0).all()
    assert_close(alpha @ v, out)
    if lse:
        assert np.array_equal(lse[0][0] == -INF, dead)
        assert np.isfinite(lse[0][0, ~dead]).all()
    finite(gradients)
    if gradients:
        dq, dk, dv = gradients
        assert not dq[0, dead].any()
        assert not dk[0, unseen].any() and not dv[0, unseen].any()
        assert live.any() == dv.any()


@pytest.mark.sample(35)
@cases()
def test_a_row_without_keys(kit: Kit, engine: str, weighting: str) -> None:
    check_dead(kit, engine, weighting, kit(LIVE), LIVE)


@cases(**SOFTMAX, kind=["float", "both", "lengths", "length 0", "custom", "far window"])
def test_a_row_without_keys_by_each_mask(kit: Kit, engine: str, weighting: str, kind: str) -> None:
    check_dead(kit, engine, weighting, *dead_masks(kit)[kind])


@not_native
@each_engine
def test_a_float_mask_of_minus_infinity_has_gradient_zero(
    kit: Kit, engine: str, weighting: str
) -> None:
    bias = kit(np.where(LIVE, 0.5, -INF))
    pull = kit.pull(lambda q, k, v, mask: everything(engine, q, k, v, mask=mask))
    _, gradients = pull(*map(kit, data(3)), bias)
    finite(gradients)
    if gradients:
        assert not gradients[3][~LIVE].any() and (gradients[3][LIVE] != 0).all()


@cases(few=("softmax",))
def test_a_query_of_nan_without_keys(kit: Kit, engine: str, weighting: str) -> None:
    """A padded query sees nothing, whatever stands there."""
    q, k, v = data(4)
    clean = np.where(DEAD[:, None], 0.0, q)
    q[1], q[3] = NAN, INF
    options = {"score": score_of(weighting), "weighting": weighting, "mask": kit(LIVE)}
    through = None if engine == "native" else engine
    pull = kit.pull(lambda *x: everything(through, *x, **options))
    outputs, gradients = pull(*map(kit, (q, k, v)))
    others, expected = pull(*map(kit, (clean, k, v)))
    assert_close(outputs[0], removed(clean, k, v, LIVE, score_of(weighting), weighting))
    for got, want in zip(outputs + gradients, others + expected, strict=True):
        assert_close(got, want)


# NaN


def hiding_masks(kit: Kit) -> dict[str, tuple[Any, np.ndarray]]:
    """Masks for a query (1, N, D) under which no query sees keys 4 and 5."""
    open_to = np.broadcast_to(np.arange(M) < 4, (N, M))
    allowed = open_to & (np.arange(M) != np.arange(N)[:, None])
    return {
        "causal": (masks.causal, np.tri(N, M, dtype=bool)),
        "lengths": (masks.lengths([4]), open_to),
        "boolean": (kit(allowed), allowed),
        "float": (kit(np.where(allowed, 0.25, -INF)), allowed),
        "window": (masks.window(0), np.eye(N, M, dtype=bool)),
        "combined": (
            masks.window(1) & kit(allowed),
            allowed & (np.tri(N, M, 1) - np.tri(N, M, -2) > 0),
        ),
    }


def poison_data(*rows: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Data with NaN and ±∞ in these rows of key and value, and the same with 0 there."""
    bad, clean = data(5), data(5)
    for at, row in enumerate(rows):
        bad[1][row] = [NAN, INF, 1.0] if at % 2 else [1.0, NAN, -INF]
        bad[2][row] = [INF, NAN] if at % 2 else [NAN, -INF]
        clean[1][row] = clean[2][row] = 0.0
    return bad, clean


def check_hidden(kit: Kit, engine: str, weighting: str, kind: str, score: Any = None) -> None:
    bad, clean = poison_data(4, 5)
    mask, live = hiding_masks(kit)[kind]
    score = score_of(weighting) if score is None else score
    options = {"score": score, "weighting": weighting, "mask": mask}
    through = None if engine == "native" else engine
    pull = kit.pull(lambda *x: everything(through, *x, **options))
    outputs, gradients = pull(*(kit(x[None]) for x in bad))
    others, expected = pull(*(kit(x[None]) for x in clean))
    if isinstance(score, scores.Dot | scores.Epanechnikov):
        assert_close(outputs[0][0], removed(*clean, live, score, weighting))
    for got, want in zip(outputs + gradients, others + expected, strict=True):
        assert_close(got, want)
    for gradient in gradients[1:]:
        assert not gradient[0, 4:].any()


@pytest.mark.sample(60)
@cases(kind=["causal", "boolean"])
def test_nan_behind_a_mask(kit: Kit, engine: str, weighting: str, kind: str) -> None:
    check_hidden(kit, engine, weighting, kind)


@cases(**SOFTMAX, kind=["lengths", "float", "window", "combined"])
def test_nan_behind_each_mask(kit: Kit, engine: str, weighting: str, kind: str) -> None:
    check_hidden(kit, engine, weighting, kind)


def every_score(kit: Kit) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    w, u, v = (kit(rng.normal(size=shape)) for shape in ((D, D), (D, D), (D,)))
    dot = scores.Dot()
    return {
        "scaled_dot": scores.ScaledDot(0.3, softcap=2.0),
        "cosine": scores.Cosine(),
        "gaussian": scores.Gaussian(),
        "laplace": scores.Laplace(),
        "triangular": scores.Triangular(3.0),
        "multiplicative": scores.Multiplicative(w),
        "additive": scores.Additive(w, u, v, v),
        "gated": scores.Gated(v, v),
        "modified": scores.Modified(dot, lambda s, b, h, i, j: s * 0.5),
        "function": lambda query, key: dot(query, key) * 0.5,
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("weighting", ["softmax", "sparsemax"])
def test_nan_behind_a_mask_where_cosine_is_lowered(kit: Kit, weighting: str) -> None:
    check_hidden(kit, "lowered", weighting, "causal", scores.Cosine())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_that_a_query_sees_where_cosine_is_lowered(kit: Kit) -> None:
    bad, clean = poison_data(4, 5)
    options = {"score": "cosine", "mask": kit(np.arange(M) < np.array([[4], [4], [4], [5]]))}
    pull = kit.pull(lambda *x: [qkv.attend(*x, engine="lowered", **options)])
    (out,), gradients = pull(*(kit(x[None]) for x in (bad[0], bad[1], clean[2])))
    assert np.isnan(out[0, 3]).all() and np.isfinite(out[0, :3]).all()
    for of_key in gradients[1:2]:
        assert np.isnan(of_key[0, 4]).all() and not of_key[0, 5].any()


@quick
@pytest.mark.parametrize("engine", ["dense", "blocks"])
@pytest.mark.parametrize("score", every_score(lambda x: x))  # type: ignore[arg-type]
def test_nan_behind_a_mask_for_each_score(kit: Kit, engine: str, score: str) -> None:
    check_hidden(kit, engine, "softmax", "causal", every_score(kit)[score])


@pytest.mark.sample(50)
@cases(causal=[False, True])
def test_nan_shows_where_it_is_live_and_only_there(
    kit: Kit, engine: str, weighting: str, causal: bool
) -> None:
    """Under a causal mask rows 0 and 1 do not see key 2; rows 2 and 3 do."""
    q, k, v = data(5)
    q = np.abs(q) + 0.5
    k[2] = q.mean(0) * 4  # so that every weighting gives it some weight
    score = scores.Epanechnikov(60.0) if weighting == "normalized" else scores.Dot()
    options = {"score": score, "weighting": weighting, "mask": masks.causal if causal else None}
    live = np.tri(N, M, dtype=bool) if causal else np.ones((N, M), bool)
    through = None if engine == "native" else engine
    run = kit.pull(lambda *x: [attend(through, *x, **options)])
    want = removed(q, k, v, live, score, weighting)
    hidden = ~live[:, 2]
    for which, bad in ((1, NAN), (2, NAN), (2, INF)):
        arrays = [x.copy() for x in (q, k, v)]
        arrays[which][2, 0] = bad
        out = run(*map(kit, arrays))[0][0]
        assert_close(out[hidden], want[hidden])
        if (which, weighting) == (1, "average"):  # it does not look at keys
            assert_close(out, want)
            continue
        shown = out[~hidden] if which == 1 else out[~hidden, :1]
        assert not np.isfinite(shown).any()
        if which == 2:
            assert_close(out[:, 1:], want[:, 1:])
    spoiled = q.copy()
    spoiled[1, 1] = NAN
    out = run(kit(spoiled), kit(k), kit(v))[0][0]
    assert_close(out[[0, 2, 3]], want[[0, 2, 3]])
    assert weighting == "average" or np.isnan(out[1]).all()


@cases(few=("softmax", "sparsemax"), every=("softmax", "sparsemax", "sigmoid", "hard"))
def test_nan_in_a_mask_of_floats_shows_and_rules_nothing_out(
    kit: Kit, engine: str, weighting: str
) -> None:
    arrays, bias = data(5), np.zeros((N, M))
    bias[1, 2], bias[2, 0] = NAN, -INF
    want = removed(*arrays, bias > -INF, scores.Dot(), weighting)
    through = None if engine == "native" else engine
    options = {"score": scores.Dot(), "weighting": weighting, "mask": kit(bias)}
    out = to_numpy(attend(through, *map(kit, arrays), **options))
    assert_close(out[[0, 2, 3]], want[[0, 2, 3]])
    assert np.isnan(out[1]).all()


@each_framework
@pytest.mark.parametrize("name", ["boxcar", "triangular", "epanechnikov"])
@pytest.mark.parametrize("weighting", ["raw", "normalized"])
def test_a_window_does_not_hide_a_nan(kit: Kit, name: str, weighting: str) -> None:
    key = kit([[0.0], [NAN], [0.1]])
    out = qkv.attend(kit([[0.0]]), key, kit([[1.0], [2.0], [3.0]]), score=name, weighting=weighting)
    assert np.isnan(to_numpy(out)).all()


@cases(few=("hard", "sparsemax"), every=SPARSE, bad=[NAN, INF, -INF])
def test_a_value_of_weight_zero_does_not_show(
    kit: Kit, engine: str, weighting: str, bad: float
) -> None:
    q, k = [[1.0], [-1.0]], [[9.0], [5.0], [-9.0], [-5.0], [0.0]]
    v = np.array([[1.0], [2.0], [3.0], [4.0], [bad]])
    out = attend(engine, *map(kit, (q, k, v)), weighting=weighting)
    w = 1 / (1 + math.exp(-4)) if weighting == "top 2" else 1.0
    assert_close(out, [[w * 1 + (1 - w) * 2], [w * 3 + (1 - w) * 4]])


@cases(few=("raw",), every=("raw", "normalized"))
def test_a_value_outside_the_window_does_not_show(kit: Kit, engine: str, weighting: str) -> None:
    q, k, v = [[0.0], [9.0]], [[0.0], [0.5], [9.0]], [[2.0], [4.0], [NAN]]
    out = to_numpy(attend(engine, *map(kit, (q, k, v)), score="boxcar", weighting=weighting))
    assert_close(out[0], [6.0 if weighting == "raw" else 3.0])
    assert np.isnan(out[1]).all()


# Sizes of numbers


@pytest.mark.sample(50)
@cases(few=("softmax", "sparsemax"), every=BOUNDED, width=[1, 2])
def test_scores_of_1e30(kit: Kit, engine: str, weighting: str, width: int) -> None:
    """Scores 1e30, −1e30, 1e30 and 0, and all of them negated."""
    v = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]])
    pull = kit.pull(lambda *x: everything(engine, *x, weighting=weighting))
    q, k = (np.zeros((rows, width)) for rows in (1, 4))
    for sign, top in ((1, [0, 2]), (-1, [1])):
        q[0, 0], k[:, 0] = sign * 1e15, [1e15, -1e15, 1e15, 0.0]
        one_hot = np.eye(4)[top].sum(0)
        alpha = {
            "hard": np.eye(4)[top[0]],
            "average": np.full(4, 0.25),
            "sigmoid": one_hot + np.eye(4)[3] / 2,
        }.get(weighting, one_hot / len(top))
        (out, weights, *lse), gradients = pull(*map(kit, (q, k, v)))
        assert_close(weights, [alpha])
        assert_close(out, [alpha @ v])
        for result in lse:
            assert_close(result / 1e30, [1.0])
        finite(gradients)
        if gradients and engine != "native":  # torch's kernel keeps the log-sum-exp alone
            assert_close(gradients[2], np.outer(alpha, slope((1, 2))))
        k[:, 0] = -1e15
        alpha = {
            "hard": np.eye(4)[0],
            "top 2": np.array([0.5, 0.5, 0, 0]),
            "sigmoid": np.full(4, float(sign < 0)),
        }.get(weighting, np.full(4, 0.25))
        assert_close(pull(*map(kit, (q, k, v)))[0][0], [alpha @ v])


@cases(**SOFTMAX, low=[-1e9, -1e30, float(np.finfo("float32").min)])
def test_a_large_negative_mask_is_a_number(
    kit: Kit, engine: str, weighting: str, low: float
) -> None:
    """−1e30 is no −∞: a row of them alone is no empty row."""
    q, k, v = data(8)
    bias = np.where(LIVE, 0.0, low)
    s = (q @ k.T + bias).astype("float32").astype(float)
    e = np.exp(s - s.max(-1, keepdims=True))
    assert_close(
        attend(engine, kit(q), kit(k), kit(v), mask=kit(bias)), e / e.sum(-1, keepdims=True) @ v
    )


@each_engine
def test_subnormal_numbers(kit: Kit, engine: str, weighting: str) -> None:
    """Kept where the framework keeps them; some flush them to zero, none makes a NaN."""
    small = 1e-40
    q, k = np.full((1, 2), small), np.array([[small, 0.0], [small, small]])
    v = np.array([[1 * small], [3 * small]])
    outputs, gradients = kit.pull(lambda *x: everything(engine, *x))(*map(kit, (q, k, v)))
    out = outputs[0]
    finite(outputs + gradients)
    flushed = kit.name not in QUICK and (out == 0).all()
    assert flushed or math.isclose(out[0, 0], 2 * small, rel_tol=1e-4)
    if kit.name in QUICK:
        alpha = qkv.weights(kit(q), kit(k), score=scores.Cosine(), weighting="raw")
        assert_close(alpha, [[math.sqrt(0.5), 1.0]], 1e-4)
        halves = scores.Modified("constant", lambda s, b, h, i, j: s * small)
        assert_close(
            qkv.weights(kit(q), kit(k), score=halves, weighting="normalized"), [[0.5, 0.5]]
        )


@cases(**SOFTMAX, scale=[1.0, 0.01])
def test_float16_does_not_overflow(kit: Kit, engine: str, weighting: str, scale: float) -> None:
    """qᵀk reaches 1.1e6, and float16 ends at 65,504."""
    rng = np.random.default_rng(9)
    q, k, v = (rng.uniform(-1, 1, size=shape) for shape in ((5, 8), (7, 8), (7, 2)))
    q, k, v = (kit(x * size, "float16") for x, size in ((q, 600), (k, 600), (v, 1)))
    exact = [to_numpy(x).astype(float) for x in (q, k, v)]
    assert np.abs(exact[0] @ exact[1].T).max() > 70_000
    want = qkv.attend(*exact, score=scores.ScaledDot(scale))
    out = attend(engine, q, k, v, score=scores.ScaledDot(scale))
    assert_close(out, want, 2e-3)
    full = qkv.attend(q, k, v, score=scores.ScaledDot(scale))
    assert get_framework(full).dtype_name(full) == "float16"
    alpha = qkv.weights(q, k, score=scores.ScaledDot(scale))
    assert get_framework(alpha).dtype_name(alpha) == "float16"
    assert_close(alpha, qkv.weights(*exact[:2], score=scores.ScaledDot(scale)), 2e-3)


@pytest.mark.sample(60)
@cases(few=FEW, dtype=["bfloat16", "float16"])
def test_sixteen_bits(kit: Kit, engine: str, weighting: str, dtype: str) -> None:
    """As good as the 16-bit numbers themselves: sums run in float32."""
    if dtype == "bfloat16":
        if kit.name == "mxnet":
            pytest.skip("mx.np has no bfloat16")
        pytest.importorskip("ml_dtypes")
    arrays = [kit(x, dtype) for x in data(10)]
    exact = [to_numpy(x).astype(float) for x in arrays]
    score = score_of(weighting)
    options = {"score": score, "weighting": weighting, "mask": kit(LIVE)}
    want = removed(*exact, LIVE, score, weighting)
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-3
    outputs, gradients = kit.pull(lambda *x: everything(engine, *x, **options))(*arrays)
    assert_close(outputs[0], want, tolerance)
    finite(outputs[:2] + gradients)
    full = qkv.attend(*arrays, **options | {"weighting": WEIGHTINGS[weighting]})
    assert get_framework(full).dtype_name(full) == dtype


@each_framework
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integers_are_refused(kit: Kit, which: int, dtype: str) -> None:
    arrays = [kit(x) for x in data()]
    arrays[which] = kit(np.ones(arrays[which].shape, dtype))
    came = get_framework(arrays[which]).dtype_name(arrays[which])
    with pytest.raises(TypeError, match=f"{('query', 'key', 'value')[which]} .*{came}.*float") as e:
        qkv.attend(*arrays)
    assert isinstance(e.value, qkv.QkvError)


def test_lists_of_integers_are_numbers() -> None:
    assert qkv.attend([[1]], [[1], [1]], [[2], [4]]).tolist() == [[3.0]]


# Memory


def strange_views(framework: str) -> Iterator[tuple[str, Callable[[np.ndarray], Any]]]:
    """Arrays that hold the same numbers as x (…, r, w) in another layout."""
    if framework == "numpy":

        def reverse(x: np.ndarray) -> Any:
            return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]

        yield "transposed", lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        yield "stepped", lambda x: np.repeat(np.repeat(x, 2, -2), 3, -1)[..., ::2, ::3]
        yield "reversed", reverse
        yield "fortran", np.asfortranarray
        yield (
            "offset",
            lambda x: np.frombuffer(b"\0" * 3 + x.tobytes(), x.dtype, offset=3).reshape(x.shape),
        )
        yield "read only", lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)
        yield "other bytes", lambda x: x.astype(x.dtype.newbyteorder())
    else:
        torch = kit_of("torch").module
        yield "transposed", lambda x: torch.tensor(x).mT.contiguous().mT
        yield (
            "stepped",
            lambda x: torch.tensor(np.repeat(np.repeat(x, 2, -2), 3, -1))[..., ::2, ::3],
        )
        yield "part", lambda x: torch.tensor(np.pad(x, ((1, 2), (3, 1))))[1:-2, 3:-1]


@quick
@pytest.mark.parametrize("weighting", ["softmax", "top 2", "sparsemax"])
def test_the_layout_of_memory_changes_nothing(kit: Kit, weighting: str) -> None:
    arrays = data(11)
    options = {"weighting": weighting, "mask": kit(LIVE)}
    want = to_numpy(attend("dense", *(kit(x, "float64") for x in arrays), **options))
    for name, view in strange_views(kit.name):
        strange = [view(x) for x in arrays]
        for engine in engines(kit.name, weighting):
            out = attend(engine, *strange, **options)
            np.testing.assert_allclose(to_numpy(out), want, 1e-12, 1e-12, err_msg=name)
        if kit.name == "torch":
            pull = kit.pull(lambda *x: everything("blocks", *x, **options))
            own = [kit(x, "float64") for x in arrays]
            for one, two in zip(pull(*strange)[1], pull(*own)[1], strict=True):
                assert_close(one, two, 1e-10)


@quick
@pytest.mark.parametrize("weighting", ["softmax", "hard", "sparsemax"])
def test_arrays_that_share_their_numbers(kit: Kit, weighting: str) -> None:
    """Stride 0: one query for all batches, one key for all rows, one value for all."""
    q, k, v = data(12)
    full = [np.broadcast_to(q[:1], (2, N, D)), np.broadcast_to(k, (2, M, D))]
    full.append(np.broadcast_to(v[:, :1], (2, M, DV)))
    own = [kit(np.array(x), "float64") for x in full]
    if kit.name == "numpy":
        shared = full
    else:
        parts = (q[:1], k, v[:, :1])
        shared = [kit(x, "float64").expand(*y.shape) for x, y in zip(parts, full, strict=True)]
    live = np.broadcast_to(LIVE[:1], (N, M))
    mask = live if kit.name == "numpy" else kit(live[:1]).expand(N, M)
    want = to_numpy(attend("dense", *own, weighting=weighting, mask=kit(np.array(live))))
    for engine in engines(kit.name, weighting):
        assert_close(attend(engine, *shared, weighting=weighting, mask=mask), want, 1e-12)
    if kit.name == "torch":
        bases = [kit(x, "float64") for x in (q[:1], k, v[:, :1])]

        def gradients(engine: str) -> list[Any]:
            def function(*bases: Any) -> list[Any]:
                arrays = [x.expand(*y.shape) for x, y in zip(bases, full, strict=True)]
                return everything(engine, *arrays, weighting=weighting, mask=mask)

            return kit.pull(function)(*bases)[1]

        want = gradients("dense")
        for engine in ("blocks", "streaming"):
            for one, two in zip(gradients(engine), want, strict=True):
                assert_close(one, two, 1e-10)


@pytest.mark.sample(4)
@quick
@pytest.mark.parametrize("weighting", ["softmax", "hard", "top 2", "sparsemax"])
def test_a_million_keys(kit: Kit, weighting: str) -> None:
    rng = np.random.default_rng(13)
    m = 2**20
    q, k, v = (rng.normal(size=shape).astype("float32") for shape in ((1, 4), (m, 4), (m, 2)))
    s = (q.astype(float) @ k.T.astype(float))[0]
    order = np.argsort(-s)
    if weighting == "softmax":
        alpha = np.exp(s - s.max())
    elif weighting == "sparsemax":
        ranked = s[order]
        tau = (np.cumsum(ranked) - 1) / np.arange(1, m + 1)
        alpha = np.maximum(0, s - tau[(ranked > tau).sum() - 1])
    else:
        alpha = np.where(np.arange(m) >= (1 if weighting == "hard" else 2), 0, np.exp(s[order]))
        alpha = alpha[np.argsort(order)]
    want = [alpha / alpha.sum() @ v]
    arrays = [kit(x) for x in (q, k, v)]
    kind = {"score": "dot", "weighting": WEIGHTINGS[weighting]}
    assert_close(qkv.attend(*arrays, engine="streaming", **kind), want, 1e-4)
    assert_close(qkv.attend(*arrays, **kind), want, 1e-4)
    if kit.name == "numpy":
        assert qkv.explain(*arrays, **kind).engine == "streaming"
    elif weighting == "softmax":
        pull = kit.pull(lambda *x: [qkv.attend(*x, engine="streaming", **kind)])
        assert_close(
            pull(*arrays)[1][2] * m, np.outer(alpha / alpha.sum() * m, slope((1, 2))), 1e-3
        )


# Manners


def nasty(kit: Kit) -> Iterator[tuple[list[Any], Any]]:
    """Calls that make a careless implementation complain."""
    q, k, v = data(14)
    yield [kit(x) for x in (q, k, v)], kit(LIVE)
    yield [kit(x) for x in (q * 1e15, k * 1e15, v)], masks.causal
    yield [kit(x[None]) for x in poison_data(4, 5)[0]], masks.lengths([4])
    yield [kit(x) for x in (q, k * 0, v * 1e-40)], None
    yield [kit(x) for x in (np.where(DEAD[:, None], NAN, q), k, v)], kit(np.where(LIVE, 0.0, -INF))
    yield [kit(q), kit(k[:0]), kit(v[:0])], None


@pytest.mark.sample(25)
@cases(few=("softmax",))
def test_no_warning_leaks(
    kit: Kit, engine: str, weighting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    through = None if engine == "native" else engine
    options = {"score": score_of(weighting), "weighting": weighting}
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        for arrays, mask in list(nasty(kit))[:: 3 if kit.name == "jax" else 1]:
            if weighting == "normalized" and masks.resolve(mask)[1] is not None:
                continue
            kit.pull(lambda *x, m=mask: everything(through, *x, mask=m, **options))(*arrays)
    assert [str(w.message) for w in leaked] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.applies(lambda framework, **_: framework not in ("jax", "tensorflow"))  # constant
@cases(few=("softmax", "sparsemax"))
def test_inputs_are_never_written_to(kit: Kit, engine: str, weighting: str) -> None:
    inputs = data(15)
    arrays = [kit(x) for x in inputs]
    mask = kit(LIVE)
    if weighting != "normalized" and engine != "native":
        mask = kit(np.where(LIVE, 0.5, -INF))
    before = [to_numpy(x).copy() for x in (*arrays, mask)]
    if kit.name == "numpy":
        for x in (*arrays, mask):
            x.flags.writeable = False
    options = {"score": score_of(weighting), "weighting": weighting, "mask": mask}
    out = attend(engine, *arrays, **options)
    kit.pull(lambda *x: everything(engine, *x, **options))(*arrays)
    for x, old in zip((*arrays, mask), before, strict=True):
        assert np.array_equal(to_numpy(x), old)
    if kit.name == "numpy":
        assert not any(np.shares_memory(out, x) for x in (*arrays, mask))
    if kit.name == "torch":
        assert all(x._version == 0 for x in arrays)


@each_framework
def test_the_callers_settings_stay_his(kit: Kit) -> None:
    """No seed is drawn, no setting is changed, nothing is patched."""
    torch = kit.module if kit.name == "torch" else None

    def state() -> Any:
        result: list[Any] = [np.geterr(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
        if torch:
            result += [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()]
            result += [torch.get_rng_state().tolist(), torch.nn.functional.softmax]
        return result

    arrays = [kit(x) for x in data()]
    before = state()
    for engine in engines(kit.name):
        attend(engine, *arrays)
    qkv.attend(*arrays, dropout_p=0.5, seed=3)
    with pytest.raises(qkv.QkvError):
        qkv.attend(*arrays, score="nonsense")
    assert state() == before
