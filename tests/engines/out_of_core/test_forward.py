"""Rows that are read piece by piece give what the equation gives on all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import qkv
import tests.cases
from qkv import attention, scores, weightings
from qkv.engines import streaming
from qkv.engines.out_of_core import backward as engines_read
from qkv.engines.out_of_core import forward as engine
from qkv.engines.out_of_core import key_terms
from qkv.errors import ArgumentError, CombinationError, FrameworkError
from qkv.frameworks import to_numpy
from qkv.frameworks.stored_rows import RowChunk, StoredRows
from qkv.weightings import Weighting
from tests.installed_frameworks import WITH_GRADIENTS

rng = np.random.default_rng(0)
ROWS, D = 700, 6
KEY, VALUE = rng.normal(size=(ROWS, D)), rng.normal(size=(ROWS, 3))
LIVE = rng.random(ROWS) > 0.2
LIVE[:250] = True
LIVE[500:560] = False
ALLOWED = rng.random(int(LIVE.sum())) > 0.3
QUERY = rng.normal(size=(4, D))
QUERY[3] += 9  # out of every window's reach
ALONG = rng.normal(size=(4, 3))


def read():
    for start in range(0, ROWS, 250):
        part = slice(start, start + 250)
        yield RowChunk(KEY[part], VALUE[part], LIVE[part] if start else None)


def store_rows(**options):
    return StoredRows(read, (int(LIVE.sum()), D), 3, **options)


@dataclass(frozen=True)
class Cubed(weightings.Softmax):
    """A weighting of the caller's own that is a softmax by its class alone."""

    def scale_scores(self, s):
        return s * s * s * 0.1


@dataclass(frozen=True)
class Squares(Weighting):
    """αᵢ = sᵢ² / 8, by the two methods that a weighting needs."""

    is_sparse: ClassVar[bool] = True

    def weights(self, s, live, k):
        return qkv.frameworks.get_framework(s).fill_unless(s * s / 8.0, live)

    def block_weights(self, s, live, k, result):
        return self.weights(s, live, k)

    def score_gradient(self, s, weight, along, centre, result):
        return along * s / 4.0


SCORES = {
    "dot": (scores.Dot, ()),
    "softcap": (lambda: scores.ScaledDot(softcap=2.0), ()),
    "gaussian": (lambda: scores.Gaussian(0.8), ()),
    "multiplicative": (scores.Multiplicative, (rng.normal(size=(D, D)),)),
    "function": (lambda: lambda q, k: scores.Dot()(q, k) * 0.5, ()),
    "positions": (lambda: scores.Modified(scores.Dot(), lambda s, b, h, i, j: s - j * 0.01), ()),
    "epanechnikov": (lambda: scores.Epanechnikov(4.0), ()),
}
WEIGHTINGS = {
    **tests.cases.WEIGHTINGS,
    "cubed": Cubed(),
    "squares": Squares(),
    "nan_if_empty": weightings.Normalized("nan"),
}
CASES = [
    (score, weighting)
    for score in SCORES
    for weighting, resolved_weighting in WEIGHTINGS.items()
    if score == "epanechnikov" or not resolved_weighting.needs_nonnegative
    if score in ("dot", "epanechnikov") or weighting in ("softmax", "top3", "straight_through")
]
FEW = [("multiplicative", "softmax"), ("dot", "top3"), ("epanechnikov", "nearest_if_empty")]
cases = pytest.mark.parametrize(("score", "weighting"), CASES)
each_allowed = pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["all", "some"])


def use_small_blocks(monkeypatch):
    """Cuts that do not divide what is stored, and more than one span of queries."""
    monkeypatch.setattr(streaming, "block_size", lambda call: (3, 64))
    monkeypatch.setattr(engine, "MAX_CACHED_SCORES", 256)


def dense(q, make, score, weighting, allowed):
    mask = None if allowed is None else make(allowed[None])
    options = {"score": score, "weighting": weighting, "mask": mask, "engine": "dense"}
    return qkv.attend(q, make(KEY[LIVE]), make(VALUE[LIVE]), return_weights=True, **options)


def compute_gradients(fw, loss, arrays):
    if fw.name != "jax":
        return fw.compute_gradients(loss, arrays)
    import jax

    return list(jax.grad(loss, argnums=tuple(range(len(arrays))))(*arrays))  # not traced by jit


@pytest.mark.sample(15)
@pytest.mark.applies(
    lambda fw, score, weighting, allowed: (  # each shape takes the others seconds
        fw.name == "torch"
        or (allowed is not None and (score, weighting) in FEW[: 1 if fw.name == "jax" else 3])
    )
)
@pytest.mark.parametrize("fw", WITH_GRADIENTS, ids=lambda fw: fw.name)
@each_allowed
@cases
def test_attend_and_its_gradients(fw, score, weighting, allowed, monkeypatch):
    if fw.name == "torch":
        use_small_blocks(monkeypatch)
    make, held = SCORES[score]
    resolved_weighting = WEIGHTINGS[weighting]
    arrays = [fw.make_array(x) for x in (QUERY, *held)]
    actual = []
    for attend in (
        lambda q, s: attention.attend_rows(
            store_rows(allowed=allowed), q, score=s, weighting=resolved_weighting
        ),
        lambda q, s: dense(q, fw.make_array, s, resolved_weighting, allowed)[0],
    ):

        def loss(q, *held, attend=attend):
            out = attend(q, make(*held))
            xp = qkv.frameworks.get_framework(out).xp
            return xp.sum(out * fw.make_array(ALONG)) + xp.sum(q) * 0.0  # some have no backward

        actual.append([to_numpy(attend(arrays[0], make(*arrays[1:])))])
        actual[-1] += compute_gradients(fw, loss, arrays)
    for got, want in zip(*actual, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.sample(12)
@each_allowed
@pytest.mark.parametrize("weighting", ["softmax", "top3", "sparsemax", "cubed", "squares", "hard"])
@pytest.mark.parametrize("score", [scores.Dot(), scores.ScaledDot(0.7), scores.Cosine()])
def test_scores_that_are_held_give_the_same_gradient(score, weighting, allowed, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(streaming, "block_size", lambda call: (4, 64))
    resolved_weighting, actual, left = WEIGHTINGS[weighting], [], []
    leave = streaming.SavedScores.take_blocks
    monkeypatch.setattr(
        streaming.SavedScores, "take_blocks", lambda self: left.append(1) or leave(self)
    )
    for most in (2**25, 0):
        monkeypatch.setattr(engines_read, "MAX_SAVED_SCORES", most)
        q = torch.tensor(QUERY, requires_grad=True)
        out = attention.attend_rows(
            store_rows(allowed=allowed), q, score=score, weighting=resolved_weighting
        )
        for _ in range(2):  # the saved arrays serve a second backward too
            out.backward(torch.tensor(ALONG), retain_graph=True)
        actual.append(None if q.grad is None else q.grad.numpy())
    linear = not isinstance(score, scores.Cosine)
    assert len(left) == (linear and resolved_weighting.is_differentiable and weighting != "cubed")
    q = torch.tensor(QUERY, requires_grad=True)
    (
        2 * dense(q, torch.tensor, score, resolved_weighting, allowed)[0] * torch.tensor(ALONG)
    ).sum().backward()
    for got in actual:
        want = np.zeros_like(QUERY) if q.grad is None else q.grad
        got = np.zeros_like(QUERY) if got is None else got
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


def test_a_score_that_only_inherits_from_a_product_is_scored_as_it_is():
    class Cube(scores.Dot, new_formula=True):
        def __call__(self, query, key):
            return super().__call__(query, key) ** 3

    assert scores.Dot().is_linear and scores.ScaledDot(3.0).is_linear
    assert not Cube().is_linear and not scores.ScaledDot(softcap=2.0).is_linear


@each_allowed
@pytest.mark.parametrize("apart", [False, True])
@cases
def test_the_weights_of_every_row(score, weighting, apart, allowed, monkeypatch):
    use_small_blocks(monkeypatch)
    make, held = SCORES[score]
    options, s = WEIGHTINGS[weighting], make(*held)
    out, alpha = dense(QUERY, np.asarray, s, options, allowed)
    got = attention.weigh_rows(
        store_rows(allowed=allowed, reads_chunks_separately=apart),
        QUERY,
        score=s,
        weighting=options,
    )
    np.testing.assert_allclose(got.output, out, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(got.weights, alpha, rtol=1e-9, atol=1e-11)
    with np.errstate(all="ignore"):
        mass = np.abs(alpha) / np.abs(alpha).sum(axis=1, keepdims=True)
        entropy = -np.where(mass > 0, mass * np.log(mass), 0).sum(axis=1)
    np.testing.assert_allclose(engine.get_entropy(got), entropy, atol=1e-9)
    assert (got.lse is not None) == options.has_lse
    if options.has_lse:
        mask = None if allowed is None else allowed[None]
        options = {"score": s, "weighting": options, "mask": mask, "return_lse": True}
        _, lse = qkv.attend(QUERY, KEY[LIVE], VALUE[LIVE], engine="dense", **options)
        np.testing.assert_allclose(got.lse, lse, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_kept_of_the_keys_changes_no_answer(dtype, monkeypatch):
    use_small_blocks(monkeypatch)
    key = KEY.astype(dtype)
    key[:250] *= np.array(1e15 if dtype == "float32" else 1e150, dtype)  # whose squares overflow
    key[300], key[301], key[302:] = 0, key[301] * 1e-10, key[302:] * 1e-5
    parts = [RowChunk(x) for x in np.split(key, [250, 500])]
    rows, query = StoredRows(lambda: parts, key.shape), QUERY.astype(dtype)
    want = scores.Cosine(0.3)(QUERY, key.astype("float64"))
    for _ in range(2):
        got = engine.score_rows(rows, query, scores.Cosine(0.3))
        np.testing.assert_allclose(got, want, atol=4e-6 if dtype == "float32" else 1e-14)
    (terms,) = rows.key_terms_cache.arrays.values()
    assert (terms[:250] == key_terms.UNUSABLE).all() and np.isfinite(terms[350:]).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("fw", ["numpy", *WITH_GRADIENTS], ids=lambda fw: getattr(fw, "name", fw))
def test_attend_computes_the_terms_of_each_key_once(fw, monkeypatch):
    """attend normalized all keys again in every call: 14 times the time of ask."""
    use_small_blocks(monkeypatch)
    key = np.array(KEY)
    key[:250] *= 1e150  # no terms, because the squares overflow
    key[300] = 0
    parts = [RowChunk(k, v) for k, v in zip(np.split(key, 2), np.split(VALUE, 2), strict=True)]
    rows, computed = StoredRows(lambda: parts, key.shape, 3), []
    original = scores.Cosine.key_terms

    def counted(score, key):
        computed.append(len(key))
        return original(score, key)

    monkeypatch.setattr(scores.Cosine, "key_terms", counted)
    make = np.asarray if fw == "numpy" else fw.make_array
    query, temperature = make(QUERY), make(np.array(0.3))

    def attend(query, temperature):
        options = {"score": scores.Cosine(temperature), "weighting": "softmax"}
        return attention.attend_rows(rows, query, **options)

    with np.errstate(over="ignore"):
        want = qkv.attend(QUERY, key, VALUE, score=scores.Cosine(0.3), engine="dense")
        for _ in range(2):
            np.testing.assert_allclose(to_numpy(attend(query, temperature)), want, atol=1e-9)
            assert sum(computed) == ROWS
        attention.weigh_rows(rows, QUERY, score=scores.Cosine(2.0), weighting="softmax")
        assert sum(computed) == ROWS  # ask shares them
    if fw == "numpy":
        return

    def loss(attend):
        return lambda q, t: qkv.frameworks.get_framework(q).xp.sum(attend(q, t) * make(ALONG))

    def dense(q, t):
        score = scores.Cosine(t)
        return qkv.attend(q, make(key), make(VALUE), score=score, engine="dense")

    got, want = (compute_gradients(fw, loss(x), [query, temperature]) for x in (attend, dense))
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(to_numpy(one), to_numpy(two), rtol=1e-8, atol=1e-10)


def test_the_terms_of_keys_have_the_precision_of_the_query():
    key = KEY.astype("f4")
    rows = StoredRows(lambda: [RowChunk(key, VALUE)], key.shape, 3)
    for dtype in ("float32", "float64"):
        query = QUERY.astype(dtype)
        got = attention.attend_rows(rows, query, score="cosine", weighting="softmax")
        want = qkv.attend(QUERY, key.astype(float), VALUE, score="cosine", engine="dense")
        np.testing.assert_allclose(got, want, atol=1e-6 if dtype == "float32" else 1e-13)
    assert len(rows.key_terms_cache.arrays) == 2


def test_what_means_nothing_is_refused():
    options = {"score": "dot", "weighting": "normalized"}
    for function in (attention.attend_rows, attention.weigh_rows):
        with pytest.raises(CombinationError, match="can be negative"):
            function(store_rows(), QUERY, **options)
        strict = {"score": "boxcar", "weighting": weightings.Normalized("raise")}
        with pytest.raises(ArgumentError, match="have no key within"):
            function(store_rows(), QUERY, **strict)


def test_a_trace_cannot_read():
    jax = pytest.importorskip("jax")
    with pytest.raises(FrameworkError, match="outside jit"):
        jax.jit(lambda q: attention.attend_rows(store_rows(), q, score="dot", weighting="softmax"))(
            QUERY
        )


def test_the_gradient_for_k_equal_v_is_the_covariance_of_the_keys():
    """∇_q Attention = Cov_p[k], of the seeds."""
    torch = pytest.importorskip("torch")
    same = StoredRows(lambda: [RowChunk(KEY, KEY)], (ROWS, D), D)
    q = torch.tensor(QUERY[:1], requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(
        lambda q: attention.attend_rows(same, q, score="dot", weighting="softmax"), q
    )[0, :, 0]
    p = np.exp(KEY @ QUERY[0])
    p /= p.sum()
    centred = KEY - p @ KEY
    np.testing.assert_allclose(jacobian, (centred * p[:, None]).T @ centred, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("weighting", "forth"), [("softmax", 1), ("entmax15", 1)])
def test_how_often_the_rows_are_read(weighting, forth):
    """Rows are read once in forward, whatever the weighting needs first, and once in backward."""
    torch = pytest.importorskip("torch")
    reads = []

    def counted():
        reads.append(0)
        for block in read():
            reads[-1] += 1
            yield block

    q = torch.tensor(QUERY, requires_grad=True)
    rows = StoredRows(counted, (int(LIVE.sum()), D), 3)
    out = attention.attend_rows(rows, q, score="dot", weighting=weighting)
    scored = sum(reads)
    out.sum().backward()
    assert reads[-1] == 3 and sum(reads) == scored + 3
    reads.clear()
    attention.weigh_rows(
        StoredRows(counted, (int(LIVE.sum()), D), 0), QUERY, score="dot", weighting=weighting
    )
    assert reads == [3]


def test_second_derivatives():
    torch = pytest.importorskip("torch")
    q = torch.tensor(QUERY[:2], requires_grad=True)
    for rows in (store_rows(), store_rows(allowed=ALLOWED)):
        assert torch.autograd.gradgradcheck(
            lambda q, rows=rows: attention.attend_rows(rows, q, score="dot", weighting="softmax"), q
        )


def test_what_lies_apart_is_done_with_before_the_next(monkeypatch):
    use_small_blocks(monkeypatch)
    done = []

    class Watched(scores.Dot, new_formula=True):
        def __call__(self, query, key):
            done.append(len(key))
            return super().__call__(query, key)

    def lazily():
        for i, some in enumerate(read()):
            assert sum(done) >= 200 * i
            yield some

    rows = StoredRows(lazily, (int(LIVE.sum()), D), 3, reads_chunks_separately=True)
    attention.weigh_rows(rows, QUERY, score=Watched(), weighting="softmax")
    done.clear()
    attention.attend_rows(rows, QUERY[:3], score=Watched(), weighting="softmax")


def test_a_value_that_does_not_count_cannot_spoil_the_sum():
    value = np.array([[1.0], [np.nan], [3.0]])
    rows = StoredRows(lambda: [RowChunk(np.zeros((3, 1)), value)], (3, 1), 1)
    np.testing.assert_array_equal(
        engine.pool_values(rows, np.array([[0.5, 0.0, 0.5]]), mean=False)[0], [[2.0]]
    )
    assert np.isnan(engine.pool_values(rows, np.array([[0.5, 0.1, 0.4]]), mean=False)[0]).all()
    for function in (
        attention.attend_rows,
        lambda *a, **options: attention.weigh_rows(*a, **options).output,
    ):
        rows = StoredRows(rows.read_chunks, (3, 1), 1, np.array([True, False, True]))
        out = function(rows, np.zeros((1, 1)), score="dot", weighting="softmax")
        np.testing.assert_array_equal(out, [[2.0]])


def test_the_sum_keeps_the_values_digits():
    rows = StoredRows(
        lambda: [RowChunk(np.eye(2, dtype="f4"), np.array([[123456789.0], [0]]))], (2, 2), 1
    )
    out = attention.weigh_rows(
        rows, np.eye(2, dtype="f4")[:1], score="dot", weighting="hard"
    ).output
    assert out.tolist() == [[123456789.0]]


@pytest.mark.parametrize("weighting", ["softmax", "hard", "entmax15"])
def test_every_row_ruled_out_gives_nought(weighting):
    torch = pytest.importorskip("torch")
    rows = store_rows(allowed=np.zeros(int(LIVE.sum()), bool))
    q = torch.tensor(QUERY, requires_grad=True)
    out = attention.attend_rows(rows, q, score="dot", weighting=weighting)
    assert (out == 0).all()
    out.sum().backward()
    assert q.grad is None or (q.grad == 0).all()
    result = attention.weigh_rows(rows, QUERY, score="dot", weighting=weighting)
    assert (
        not result.weights.any()
        and not result.output.any()
        and not engine.get_entropy(result).any()
    )


@pytest.mark.parametrize("weighting", ["softmax", "hard", "entmax15", "average"])
def test_no_queries(weighting):
    options = {"score": "dot", "weighting": weighting}
    assert attention.attend_rows(store_rows(), QUERY[:0], **options).shape == (0, 3)
    assert attention.attend_rows(store_rows(allowed=ALLOWED), QUERY[:0], **options).shape == (0, 3)
    result = attention.weigh_rows(store_rows(), QUERY[:0], **options)
    assert result.output.shape == (0, 3) and result.weights.shape == (0, int(LIVE.sum()))


def test_a_function_s_own_array_has_its_gradient():
    torch = pytest.importorskip("torch")
    w = torch.tensor(rng.normal(size=D), requires_grad=True)
    q, k, v = (torch.tensor(x) for x in (QUERY, KEY[LIVE], VALUE[LIVE]))

    def score(query, key):
        return (query * w) @ key.mT

    got, want = (
        torch.autograd.grad((out * torch.tensor(ALONG)).sum(), w)[0]
        for out in (
            attention.attend_rows(store_rows(), q, score=score, weighting="softmax"),
            qkv.attend(q, k, v, score=score, engine="dense"),
        )
    )
    np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.parametrize("weighting", ["softmax", "hard", "sparsemax"])
@pytest.mark.parametrize("allowed", [None, np.array([True, False, True])])
def test_scores_that_float64_does_not_hold_are_refused_as_by_attend(weighting, allowed):
    # They were answered as if there were nothing to look at.
    key, options = np.array([[1.0], [2.0], [3.0]]), {"weighting": weighting}
    rows = StoredRows(lambda: [RowChunk(key, 10 * key)], (3, 1), 1, allowed)
    near, far = np.array([[3.0]]), np.array([[2.2]])
    options["score"] = scores.Gaussian(1e-160)
    assert attention.attend_rows(rows, near, **options).tolist() == [[30.0]]
    assert attention.weigh_rows(rows, near, **options).weights.tolist() == [[0.0, 0.0, 1.0]]
    for function in (attention.attend_rows, attention.weigh_rows):
        with pytest.raises(ArgumentError, match="overflow float64"):
            function(rows, far, **options)
    none = StoredRows(lambda: [RowChunk(key, key)], (3, 1), 1, np.zeros(3, bool))
    assert attention.attend_rows(none, far, **options).tolist() == [[0.0]]
    assert attention.weigh_rows(none, far, **options).weights.tolist() == [[0.0] * 3]


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    "weighting",
    ["softmax", "entmax15", "sigmoid", "hard", weightings.TopK(3), weightings.Normalized("zero")],
    ids=str,
)
def test_queries_that_fit_the_cache_are_weighed_at_once(monkeypatch, weighting, allowed):
    """The entropy of their weights is computed when it is read."""
    rows = StoredRows(read, (int(LIVE.sum()), D), 3, ALLOWED if allowed else None)
    score = "boxcar" if isinstance(weighting, weightings.Normalized) else "scaled_dot"

    def weigh():
        return attention.weigh_rows(rows, QUERY[:3], score=score, weighting=weighting)

    want = weigh()
    monkeypatch.setattr(engine, "MAX_CACHED_SCORES", 900)  # one or two of three queries
    got = weigh()
    monkeypatch.setattr(engine, "MAX_SCORES_WITHOUT_ENTROPY", 0)
    in_blocks = weigh()
    assert got.entropy is None and in_blocks.entropy is not None
    for other in (got, in_blocks):
        np.testing.assert_allclose(other.weights, want.weights, atol=1e-12)
        np.testing.assert_allclose(other.output, want.output, atol=1e-12)
        np.testing.assert_allclose(engine.get_entropy(other), engine.get_entropy(want), atol=1e-9)
        assert (other.lse is None) == (want.lse is None)
        if want.lse is not None:
            np.testing.assert_allclose(other.lse, want.lse)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_attending_with_all_weights_and_in_blocks(monkeypatch, dtype):
    rows = StoredRows(read, (int(LIVE.sum()), D), 3, ALLOWED)
    query = QUERY[:3].astype(dtype)
    for score in ("scaled_dot", "gaussian", "constant", "cosine", scores.Laplace(2.0)):
        for weighting in ("softmax", "entmax15", "raw", "sigmoid"):
            options = {"score": score, "weighting": weighting}
            got = attention.attend_rows(rows, query, **options)
            with monkeypatch.context() as patch:
                patch.setattr(attention, "MAX_STORED_WEIGHTS", 0)
                want = attention.attend_rows(rows, query, **options)
            assert got.dtype == want.dtype == query.dtype
            close = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-10}[dtype]
            np.testing.assert_allclose(got, want, rtol=close, atol=close)
