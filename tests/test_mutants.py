"""Do the tests fail when they should? Each formula is broken in one place, and must be caught.

Every operator, comparison and number in the arithmetic of `scores/` and `weightings/` is changed,
one at a time; the checks below, against the plain formulas, must then fail. The checks also run
on the code as it is, where they must pass.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from qkv import scores, weightings
from qkv.errors import ArgumentError
from qkv.frameworks import load_framework
from tests import formulas
from tools import mutants as hand_written

torch = pytest.importorskip("torch")  # not in the environment of MXNet: once is enough

rng = np.random.default_rng(5)
N, M, D, DV, HIDDEN = 4, 6, 3, 2, 5
QUERY, KEY, VALUE = rng.normal(size=(N, D)), rng.normal(size=(M, D)), rng.normal(size=(M, DV))
QUERY[1] = KEY[2]  # one exact match
LIVE = rng.random((N, M)) > 0.3
LIVE[3] = False

SCORES = {
    "product": {
        "Dot": {},
        "ScaledDot": {"scale": 0.7, "softcap": 1.5},
        "Cosine": {"temperature": 0.6},
        "Multiplicative": {"w": rng.normal(size=(D, D))},
    },
    "distance": {"Gaussian": {"bandwidth": 0.8}, "Laplace": {"bandwidth": 0.8}},
    "window": {
        **{name: {"width": 2.0} for name in ("Boxcar", "Triangular", "Epanechnikov")},
        "RankingWindow": {"window": scores.Triangular(0.8)},
        "Constant": {},
        "Exact": {},
    },
    "additive": {
        "Additive": {
            "w_query": rng.normal(size=(HIDDEN, D)),
            "w_key": rng.normal(size=(HIDDEN, D)),
            "v": rng.normal(size=HIDDEN),
            "bias": rng.normal(size=HIDDEN),
        }
    },
    "gated": {"Gated": {"w_query": rng.normal(size=D), "w_key": rng.normal(size=D), "bias": 0.3}},
}
WEIGHTINGS = {
    "softmax": {"Softmax": {"temperature": 0.7}, "TopK": {"k": 2}},
    "hard": {"Hard": {}},
    "average": {"Average": {}},
    "normalized": {"Normalized": {}, "Raw": {}, "Sigmoid": {}},
    "entmax": {"Entmax": {"alpha": 1.4}, "Sparsemax": {}},
}
ALSO = {
    "Entmax": [{"alpha": alpha} for alpha in (1.5, 0.6, np.array([2.6]), np.array([1.7]))],
    "Hard": [{"straight_through": True}],
    "Normalized": [{"on_empty": on_empty} for on_empty in ("nan", "uniform", "nearest", "raise")],
}
SKIPPED = {"__post_init__", "__new__", "check_shapes", "check_row_state", "numbers_per_pair"}
SKIPPED |= {"exponent", "block_start", "initial_threshold", "solve_threshold", "newton_iteration"}
SKIPPED |= {"is_converged", "find_lowering", "incompatible_reason", "adapt_score"}
"""Not arithmetic of the result: arguments, block sizes, how fast a root is found, and when a score
is lowered or refused, which test_lowered.py and weightings/test_normalized.py are about."""

EQUIVALENT = {
    "product": {
        "2.0",  # what a zero vector is divided by
        "1e+30",  # and 1
        "x + fw.detach(x)",  # only in frameworks with gradients, which test_edges runs
    },
    "distance": {
        "sum_differences(query, key, 1) / self.bandwidth / -1.0",  # · −1 is / −1
        "x + self.centre[*[None] * (len(x.shape) - 1), ...]",  # both sides are shifted alike
        "norm_sum * norm_sum * scale < MAX_SQUARED_NORM_SUM",
        # At the limits themselves both ways are right.
        "rounding < unit * MAX_SQUARED_NORM_SUM",
        "error < tolerance",
        "reach * reach < MAX_SQUARED_NORM_SUM",
        "reach * (reach + offset) < MAX_SQUARED_NORM_SUM",
        "self.centre * self.bandwidth",  # moves the limit of the shorter form only
        "1e+150",  # and 1
    },
    "window": {
        # Which squares are computed exactly: tests/scores/test_distance.py.
        "abs(square - 1.0) < error",
        "square + 1.0",
        "2.0",
        "square >= 1.0 / 64",
        "1.0 * 64",
        "2 * np.sqrt(norms) / math.sqrt(float(centre @ centre))",
        "2 / np.sqrt(norms)",
        "total - offsets[:, None]",
        "0 / offsets",
        "scale / (query.shape[-1] + 8)",
        "query.shape[-1] - 8",
        # Which of two products of stored keys is taken: both are right.
        "most * scale < MAX_EXPANDED_SQUARE",
        "(most + float(offsets.max(initial=0))) * scale < MAX_EXPANDED_SQUARE",
        "(most + float(offsets.max(initial=0))) / scale",
        "most - float(offsets.max(initial=0))",
        "fw.detach(square) / -1.0",
        "s < 0",  # max(0, 0)
        "ones - fw.xp.sum(cols, axis=-1)[..., None, :]",  # zeros, there for their shape
        "x != x",
    },
    "softmax": {
        "fw.astype(fw.full(shape, 0.0, rows), 'int32') - NO_POSITION",  # where no key has a score
        "1.0",
        "least - scores",  # NaN either way
        "k < at",
        *("self.k < count", "self.k > count", "self.k > scores.shape[-1]"),  # k of k keys
        # The inherited method computes the same from two calls.
        "(type(self).weights, type(self).compute_lse) == (TopK.weights, TopK.compute_lse)",
    },
    "hard": {
        "fw.astype(fw.full(top.shape, 0.0, top), 'int32') - NO_POSITION",  # of no keys at all
        "fw.astype(fw.full(rows.shape, 0.0, rows), 'int32') - NO_POSITION",
        "1.0",
        "here - nan_scores",  # NaN either way
        "hard - (soft - fw.detach(soft))",  # 0 but for its gradient, which the battery sees
        "k / 0 + NO_POSITION",
        "at * 0 - NO_POSITION",  # no key is at either
        "at / 0",
        "two[1] >= one[1]",  # blocks come in order here; test_properties shuffles them
    },
    "average": {  # any constant, over its sum
        "fw.astype(scores == scores, fw.dtype_name(scores)) * 0.0 - 1.0",
        "2.0",
        "1.0",
        "scores != scores",
    },
    "normalized": {
        "super().live_ones(scores, None) / float('nan')",
        "scores < 0",  # max(0, 0)
    },
    "entmax": {
        "1.0",  # the sums of frameworks that cannot pick; the battery runs those
        "2.0",  # a start further below the root
        "0 >= scores.shape[-1] < MAX_SHORT_ROW_KEYS",  # the longer way
        "scores + top",  # in a graph of torch's, which test_transforms sees
        # Of these the gradient alone counts, which the battery sees.
        "get_framework(tau).detach(tau) - (moved - get_framework(tau).detach(moved))",
        "(mass - 1) * get_framework(slope).safe_divisor(slope)",
        "mass + 1",
    },
}
"""Changes that change no result, or none that this file's NumPy can reach."""


def check_score(cls, name, settings):
    want = [[formulas.SCORES[name](q, k, **settings) for k in KEY] for q in QUERY]
    np.testing.assert_allclose(cls(**settings)(QUERY, KEY), want, rtol=1e-9, atol=1e-12)
    if hasattr(cls, "find_lowering") and name not in ("Laplace", "ScaledDot"):
        _check_lowered(cls(**settings), want)
    if name == "ScaledDot":
        learned, known = cls(np.array(0.7)), 0.7 * QUERY @ KEY.T
        np.testing.assert_allclose(learned(QUERY, KEY), known, rtol=1e-9)
        product = learned.dot_product_form(QUERY, KEY).compute_scores()
        np.testing.assert_allclose(product, known, rtol=1e-9)
        _check_affine(cls(0.7), known)
        plain = cls()(QUERY, KEY)
        np.testing.assert_allclose(plain, QUERY @ KEY.T / np.sqrt(D), rtol=1e-9)
    if name in AFFINE:
        _check_affine(cls(**settings), AFFINE[name](want))
    if name == "Gated":
        plain = cls(**settings | {"bias": None})
        _check_affine(plain, plain(QUERY, KEY))
    if name in ("Boxcar", "Triangular", "Epanechnikov"):
        edges = np.zeros((1, 1)), np.array([[2.0], [0.0], [np.nan]])
        at_edges = [float(name == "Boxcar"), 1.0, np.nan]
        np.testing.assert_array_equal(cls(2.0)(*edges)[0], at_edges)
        learned = [torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, *edges)]
        scored = cls(**settings)(*learned[:2]).detach()
        np.testing.assert_allclose(scored, want, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(cls(2.0)(*learned[2:])[0].detach(), at_edges)
        _check_centred_window(cls)
    if name == "Cosine":
        huge = cls(**settings)(QUERY * 1e200, KEY)
        np.testing.assert_allclose(huge, want, rtol=1e-9)
        assert (cls()(np.zeros((1, D)), KEY) == 0).all()
        _check_aside(cls(**settings), want)
    if name == "Gaussian":
        quick = cls.__call__.__globals__["QuickGaussian"](**settings)
        np.testing.assert_allclose(quick(QUERY, KEY), want, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(quick(QUERY + 1e6, KEY + 1e6), want, atol=1e-6)
        sharp, near = type(quick)(1e-6), QUERY + 1e-6
        apart = (1e6 * (QUERY[:, None] - near) ** 2 * 1e6).sum(-1) / -2
        np.testing.assert_allclose(sharp(QUERY, near), apart, rtol=1e-9)
        # Heads with a bandwidth each, two of which share their keys.
        own, shared = np.array([0.5, 0.8, 1.1, 1.4]), np.stack([KEY, KEY + 0.1])
        each = cls(own[:, None, None]).find_lowering(QUERY[None], shared, None, "float64")[0]
        far = ((QUERY[None, :, None] - shared.repeat(2, 0)[:, None]) ** 2).sum(-1)
        expanded = each(np.stack([QUERY] * 4), shared)
        np.testing.assert_allclose(expanded, far / (-2 * own[:, None, None] ** 2), atol=1e-9)
        _check_range(cls(**settings))
        _check_centred(cls)


def _check_range(score):
    """The error of the expanded square follows from the largest norms."""
    width = np.broadcast_to(score.bandwidth, D)
    want = [(((x - KEY.mean(0)) / width) ** 2).sum(-1).max() for x in (QUERY, KEY)]
    np.testing.assert_allclose(score.measure_range(QUERY, KEY), want, rtol=1e-9)
    for dtype, unit in (("float64", 2.0**-53), ("float32", 2.0**-24)):
        assert score.error_in_range((4.0, 9.0), D, None, dtype) == 25 * unit * (D + 3)
        assert isinstance(score.error_in_range((1e4, 1e4), D, None, dtype), str)
        assert isinstance(score.error_in_range((1e4, 1e4), D, 1e-30, dtype), str)
        far = score.error_in_range((1e4, 1e4), D, 1.0, dtype)
        np.testing.assert_allclose(far, 4e4 * unit * (D + 3), rtol=1e-9)


def _check_centred(cls):
    """Terms of the keys give the same scores, near the origin, far from it, and in a tiny scale."""
    module = cls.adapt_to_keys.__globals__
    least = module["MIN_EXPANDED_COLUMNS"]
    sample = np.random.default_rng(3).normal(size=(5, least))
    adapted = cls(0.5).adapt_to_keys(sample)
    np.testing.assert_allclose(adapted.centre, sample.mean(0))
    assert type(cls(np.ones(least)).adapt_to_keys(sample)) is type(adapted)
    for other, columns in ((cls(0.5), least - 1), (cls(np.ones((2, 1, 1))), least)):
        assert other.adapt_to_keys(sample[:, :columns]) is other
    for bandwidth in (0.7, np.linspace(0.6, 1.4, D)):
        for shift, scale, within in ((0, 1, 1e-12), (9, 1, 1e-12), (1e8, 1, 1e-10), (0, 1e3, 1e-3)):
            query, key = scale * QUERY + shift, scale * KEY + shift
            score = module["CentredGaussian"](bandwidth, key.mean(0))
            want = -0.5 * (((query[:, None] - key) / bandwidth) ** 2).sum(-1)
            actual = score.score_with_key_terms(query, key, score.key_terms(key))
            np.testing.assert_allclose(actual, want, rtol=1e-9, atol=within)
        sharp = module["CentredGaussian"](bandwidth * 1e-6, KEY.mean(0))
        near = QUERY + 1e-6
        apart = -0.5 * (((QUERY[:, None] - near) / (bandwidth * 1e-6)) ** 2).sum(-1)
        actual = sharp.score_with_key_terms(QUERY, near, sharp.key_terms(near))
        np.testing.assert_allclose(actual, apart, rtol=1e-9)
        assert sharp.key_terms(KEY * 1e16) is None
        same = module["CentredGaussian"](bandwidth, KEY.mean(0) + 1)
        assert (same.score_with_key_terms(KEY, KEY, same.key_terms(KEY)) <= 0).all()


def _check_centred_window(cls):
    """Squares of stored keys give the same r², unless the keys are far away."""
    module = cls.adapt_to_keys.__globals__
    least = module["MIN_EXPANDED_COLUMNS"]
    sample = np.random.default_rng(3).normal(size=(5, least))
    np.testing.assert_allclose(cls(2.0).adapt_to_keys(sample).centre, sample.mean(0))
    for other, columns in ((2.0, least - 1), (np.ones(least), least), (1e-7, least), (1e7, least)):
        window = cls(other)
        assert window.adapt_to_keys(sample[:, :columns]) is window
    for shift, scale in ((0, 1), (9, 1), (1e4, 1), (3, 1e3)):
        query, key = scale * QUERY + shift, scale * KEY + shift
        score = module["CentredWindow"](2.0 * scale, cls(2.0 * scale), key.mean(0))
        terms = score.key_terms(key)
        want = ((query[:, None] - key) ** 2).sum(-1) / (2.0 * scale) ** 2
        square = score._expand_square(query, key, terms)
        np.testing.assert_allclose(square, want, rtol=1e-9, atol=1e-9)
        actual = score.score_with_key_terms(query, key, terms)
        np.testing.assert_array_equal(actual, score.profile(square))
    assert score.key_terms(KEY * 1e19) is None
    score = module["CentredWindow"](2.0, cls(2.0), KEY.mean(0))
    far = 9 * KEY
    assert score._expand_square(QUERY, far, score.key_terms(far)) is None
    apart = score.score_with_key_terms(QUERY, far, score.key_terms(far))
    np.testing.assert_array_equal(apart, cls(2.0)(QUERY, far))


NEGATIVE_SQUARES = -((QUERY[:, None] - KEY) ** 2).sum(-1) / 2.0**2
AFFINE = {
    **dict.fromkeys(("Dot", "Cosine", "Multiplicative", "Gaussian", "Gated"), lambda want: want),
    **dict.fromkeys(("Boxcar", "Triangular", "Epanechnikov"), lambda want: NEGATIVE_SQUARES),
}


def _check_affine(score, want):
    """As a product with the keys themselves, of which one is 0, it is the same."""
    keys = np.concatenate([KEY, np.zeros((1, D))])
    form = score.affine_form(QUERY, np.linalg.norm(keys, axis=-1))
    actual = form.query @ keys.T
    for part in (form.key_factor, form.bias):
        assert part is None or np.isfinite(part).all()
    actual = actual if form.key_factor is None else actual * form.key_factor
    actual = actual if form.bias is None else actual + form.bias
    actual = actual if form.offset is None else actual + form.offset[:, None]
    if form.gate is not None:
        opens, w_key, most = form.gate
        actual = actual / (1 + np.exp(-opens[:, None] - keys @ w_key))
        sums = np.abs(QUERY * score.w_query).sum(-1) + abs(score.bias or 0)
        np.testing.assert_allclose(most, sums, rtol=1e-9)
    np.testing.assert_allclose(actual[:, :-1], want, rtol=1e-9, atol=1e-12)


def _check_aside(score, want):
    """What is kept of the keys serves every query, unless their squares would be no numbers."""
    keys = np.concatenate([KEY, np.zeros((1, D))])
    actual = score.score_with_key_terms(QUERY, keys, score.key_terms(keys))
    np.testing.assert_allclose(actual[:, :-1], want, rtol=1e-9, atol=1e-12)
    assert (actual[:, -1] == 0).all()
    assert score.key_terms(KEY * 1e16) is score.key_terms(KEY * 1e-16) is None


def _check_lowered(score, want):
    """As a dot product it is the same, in whichever form."""
    for tolerance, dtype in ((1e-9, "float64"), (None, "bfloat16"), (None, "float32")):
        near = score.find_lowering(QUERY, KEY, tolerance, dtype)
        if isinstance(near, str):
            continue
        form = near[0].dot_product_form(QUERY, KEY)
        np.testing.assert_allclose(form.compute_scores(), want, atol=near[1] + 1e-9)
        np.testing.assert_allclose(near[0](QUERY, KEY), want, atol=near[1] + 1e-9)


NUMPY = load_framework("numpy")


def check_weighting(cls, name, settings):
    weighting = cls(**settings)
    if name == "Hard" and NUMPY.has_fast_argmax:  # then without it
        NUMPY.has_fast_argmax = False
        try:
            check_weighting(cls, name, settings)
        finally:
            NUMPY.has_fast_argmax = True
    with np.errstate(all="ignore"):
        for raw in (KEY_SCORES, np.round(KEY_SCORES)):  # the second has ties
            scores = np.abs(raw) if weighting.needs_nonnegative else raw
            for live in (LIVE, np.ones_like(LIVE)):
                _check_rows(weighting, name, settings, scores, live)
        if name == "Normalized":
            _check_empty(weighting, name, settings)
        out, result, _ = weighting.finish(
            weighting.init(np.zeros((N, 1)), DV), weighting.find_threshold(_no_blocks)
        )
        assert (out == 0).all()
        assert not weighting.has_lse or (weighting.lse_from_state(result) == -np.inf).all()
        if name != "Average":
            _check_nan(weighting, np.abs(KEY_SCORES))
        if name == "Hard":
            _check_dropout(weighting)


def _check_dropout(weighting):
    factors, k = np.where(rng.random((N, M)) < 0.5, 0.0, 2.0), np.arange(M)[None, :]
    state = weighting.partial_state(KEY_SCORES.copy(), LIVE, k, (), VALUE, factors)
    want = (weighting.weights(KEY_SCORES, LIVE, k) * factors) @ VALUE
    np.testing.assert_allclose(state[2], want, atol=1e-12)


def _check_empty(weighting, name, settings):
    """Rows 0 and 2 have no score above 0: none at all, or a distance in the place of it."""
    scores = np.abs(KEY_SCORES)
    scores[[0, 2]] = -scores[[0, 2]] if weighting.on_empty == "nearest" else 0.0
    if weighting.on_empty == "nearest":
        scores[1, 0] *= -1
    if not weighting.raises_on_empty:
        return _check_rows(weighting, name, settings, scores, LIVE)
    k = np.arange(M)[None, :]
    weighting.check_row_state(_in_blocks(weighting, np.abs(KEY_SCORES), LIVE, k)[1])
    for refused in (
        lambda: weighting.weights(scores, LIVE, k),
        lambda: weighting.check_row_state(_in_blocks(weighting, scores, LIVE, k)[1]),
    ):
        try:
            refused()
        except ArgumentError as error:
            assert "2 queries have" in str(error)
        else:
            raise AssertionError("two rows without weights went unnoticed")


def _no_blocks(lift, merge, init):
    return init(np.zeros((N, 1)))


def _check_nan(weighting, scores):
    """A NaN shows in its own row, and only there."""
    scores[1, 2] = np.nan
    k, live = np.arange(M)[None, :], np.ones_like(LIVE)
    alpha = weighting.weights(scores, live, k)
    assert not np.isinf(alpha).any()
    spoiled = np.isnan(alpha).any(-1)
    in_blocks = np.isnan(_in_blocks(weighting, scores, live, k)[0]).any(-1)
    for result in (spoiled, in_blocks):
        np.testing.assert_array_equal(result, [False, True, False, False])


KEY_SCORES = rng.normal(size=(N, M)) * 2


def _check_entmax(weighting, scores, live, k, want):
    """All keys in one block; and the steps that a framework takes which cannot pick scores."""
    out = weighting.pool_whole_rows(scores.copy(), live, k, VALUE, None)
    np.testing.assert_allclose(out, want @ VALUE, atol=1e-8)
    s, any_key = weighting.scale_scores(scores), live.any(-1, keepdims=True)
    top = np.where(any_key, np.where(live, s, -np.inf).max(-1, keepdims=True), 0.0)

    def fold(lift, merge, init):
        return lift(s, live, k)

    tau = weighting.solve_threshold(fold, top)
    for actual in (tau, weighting.refine_threshold(fold, top, tau)):
        np.testing.assert_allclose(
            weighting.block_weights(s, live, k, (top, actual)), want, atol=1e-8
        )


KNOWN = {}
"""What the plain formulas give, which no change here changes."""


def _plain(name, scores, live, settings):
    cache_key = name, repr(settings), scores.tobytes(), live.tobytes()
    if cache_key not in KNOWN:
        KNOWN[cache_key] = formulas.weights(name, scores, live, **settings)
    return KNOWN[cache_key]


def _check_rows(weighting, name, settings, scores, live):
    want = _plain(name, scores, live, settings)
    s, k = weighting.scale_scores(scores), np.arange(M)[None, :]
    np.testing.assert_allclose(weighting.weights(s, live, k), want, atol=1e-8)
    if live.all() and not np.isnan(want).any():
        np.testing.assert_allclose(weighting.weights(s, None, k), want, atol=1e-8)
        out = weighting.pool_whole_rows(scores.copy(), None, k, VALUE, None)
        np.testing.assert_allclose(out, want @ VALUE, atol=1e-8)
        if hasattr(weighting, "solve_threshold"):  # a shift of the row moves no weight
            np.testing.assert_allclose(weighting.weights(s - 5.0, None, k), want, atol=1e-8)
    out, actual, centre = _in_blocks(weighting, s, live, k)
    np.testing.assert_allclose(out, want @ VALUE, atol=1e-8)
    alpha = weighting.block_weights(s, live, k, actual)
    np.testing.assert_allclose(alpha, want, atol=1e-8)
    np.testing.assert_allclose(
        weighting.pool_values(want, VALUE, live, None), want @ VALUE, atol=1e-8
    )
    moving = weighting.value_gradient_weights(want)
    np.testing.assert_array_equal(moving, np.nan_to_num(want))  # NaN moves nothing
    if hasattr(weighting, "solve_threshold"):
        _check_entmax(weighting, scores, live, k, want)
    if weighting.has_lse:
        inside = np.where(want > 0, s, -np.inf)
        largest = np.where(live.any(-1), inside.max(-1), 0)
        lse = np.log(np.exp(inside - largest[:, None]).sum(-1)) + largest
        np.testing.assert_allclose(weighting.lse_from_state(actual)[:, 0], lse, atol=1e-8)
        np.testing.assert_allclose(weighting.compute_lse(s, live, k)[:, 0], lse, atol=1e-8)
        both = weighting.weights_and_lse(s, live, k)
        np.testing.assert_allclose(both[1][:, 0], lse, atol=1e-8)
        np.testing.assert_allclose(both[0], weighting.weights(s, live, k), atol=1e-8)
    if weighting.is_differentiable and len(np.unique(scores)) == scores.size:
        _check_slope(weighting, s, live, k, alpha, actual, centre)


def _in_blocks(weighting, s, live, k):
    parts = [slice(0, 2), slice(2, 3), slice(3, M)]

    def fold(lift, merge, init):
        state = init(np.zeros((N, 1)))
        for part in parts:
            state = merge(state, lift(s[:, part].copy(), live[:, part], k[:, part]))
        return state

    result = weighting.find_threshold(fold)
    state = weighting.init(np.zeros((N, 1)), DV)
    for part in parts:
        block = s[:, part].copy(), live[:, part], k[:, part]
        lifted = weighting.partial_state(*block, result, VALUE[part], None)
        state = weighting.merge(state, lifted)
    return weighting.finish(state, result)


def _check_slope(weighting, s, live, k, alpha, actual, centre):
    along_out = np.linspace(-1, 2, N * DV).reshape(N, DV)
    pull = 0.0 if centre is None else (centre * along_out).sum(-1, keepdims=True)
    got = np.where(live, weighting.score_gradient(s, alpha, along_out @ VALUE.T, pull, actual), 0)
    soft = weightings.Softmax() if hasattr(weighting, "straight_through") else weighting
    step = 1e-6
    moved = step * np.eye(s.size).reshape(s.size, *s.shape)  # each score alone
    ahead, behind = (
        (soft.weights(s + by, live, k) @ VALUE * along_out).sum((-2, -1)) for by in (moved, -moved)
    )
    want = (ahead - behind).reshape(s.shape) / (2 * step)
    np.testing.assert_allclose(got, want, atol=1e-5)


SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Gt: ast.LtE,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


def sites(tree):
    """What can be broken: (node, what to do to it), in the order of the file."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in SKIPPED:
            continue
        in_messages = {id(x) for node in ast.walk(function) for x in _words(node)}
        for node in ast.walk(function):
            if id(node) in in_messages:
                continue
            if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
                yield node, "op"
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
                yield node, "ops"
            elif isinstance(node, ast.Constant) and isinstance(node.value, float):
                yield node, "value"


def _words(node):
    """Annotations (`Array | None`) and subscripts are not arithmetic."""
    inside = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.Subscript):
        inside.append(node.slice)
    return [x for part in inside if part is not None for x in ast.walk(part)]


def mutants(package, module):
    """(what was changed, the module so changed)"""
    path = importlib.import_module(f"qkv.{package}.{module}").__file__
    tree = ast.parse(Path(path).read_text())
    for node, what in list(sites(tree)):
        right = getattr(node, what)
        if what == "op":
            node.op = SWAPS[type(right)]()
        elif what == "ops":
            node.ops = [SWAPS[type(right[0])](), *right[1:]]
        else:
            node.value = right + 1.0 if abs(right) != float("inf") else 0.0
        label, code = f"line {node.lineno}: {ast.unparse(node)}", compile(tree, path, "exec")
        setattr(node, what, right)
        changed = types.ModuleType(f"qkv.{package}.{module}")
        sys.modules["qkv_mutant"] = changed  # a dataclass looks its module up
        changed.__name__ = "qkv_mutant"
        exec(code, changed.__dict__)
        yield label, changed


TABLE = [("scores", module, names, check_score) for module, names in SCORES.items()] + [
    ("weightings", module, names, check_weighting) for module, names in WEIGHTINGS.items()
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("package", "module", "names", "check"), TABLE, ids=lambda x: str(x)[:20])
def test_every_mutant_is_caught(package, module, names, check):
    cases = [
        (name, case) for name, settings in names.items() for case in (settings, *ALSO.get(name, ()))
    ]

    def check_all(of):
        for i, (name, case) in enumerate(cases):
            try:
                check(getattr(of, name), name, case)
            except Exception:
                cases.insert(0, cases.pop(i))  # what has caught this change likely has the next
                raise

    check_all(importlib.import_module(f"qkv.{package}.{module}"))
    caught, survivors = 0, []
    for label, changed in mutants(package, module):
        try:
            check_all(changed)
        except Exception:
            caught += 1
        else:
            survivors.append(label)
    unknown = [x for x in survivors if x.partition(": ")[2] not in EQUIVALENT.get(module, ())]
    assert caught
    assert not unknown, f"{len(unknown)} changes went unnoticed"


def test_every_weighting_is_checked():
    checked = {name for names in WEIGHTINGS.values() for name in names}
    assert {kind.__name__ for kind in weightings.NAMES.values()} == checked


@pytest.mark.parametrize("mutant", hand_written.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_hand_written_mutant_changes_one_place_and_names_tests_that_exist(mutant):
    assert hand_written.snippet_count(mutant) == 1
    assert mutant.snippet != mutant.replacement
    named = [part for part in mutant.tests.split() if part.startswith("tests/")]
    assert named
    for part in named:
        path, _, function = part.partition("::")
        assert (hand_written.ROOT / path).exists(), path
        assert not function or f"def {function}(" in (hand_written.ROOT / path).read_text(), part


def test_there_are_60_hand_written_mutants_of_different_names():
    assert len({mutant.name for mutant in hand_written.MUTANTS}) == len(hand_written.MUTANTS) == 60
