"""The options of a call of `attend`, each with the plain formula that a user would write for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bench._pairwise import Case, cover_pairs, list_single_steps
from bench._plain import Array, Arrays, Plain, entmax, entmax15, sparsemax
from qkv import masks, scores, weightings
from qkv.frameworks import get_framework
from qkv.weightings import Elementwise

HIDDEN = 32
"""Units of the additive score."""
NONE = -math.inf
HIDDEN_SCORE = -1e4
"""The score of a masked pair where −∞ would make NaN of sums over a sorted row."""


class Size(NamedTuple):
    """Query (b, h, n, d), key and value (b, h_key, m, d)."""

    b: int
    h: int
    h_key: int
    n: int
    m: int
    d: int


CPU_SIZES = {
    "decode": Size(4, 4, 2, 1, 1024, 64),
    "decode long": Size(1, 2, 2, 1, 16_384, 64),
    "chunk": Size(4, 2, 2, 4, 512, 64),
    "batch": Size(16, 2, 2, 64, 64, 64),
    "256": Size(2, 4, 2, 256, 256, 32),
    "512": Size(1, 2, 2, 512, 512, 64),
    "1024": Size(1, 1, 1, 1024, 1024, 64),
}
CUDA_SIZES = {
    "decode": Size(64, 32, 8, 1, 4096, 128),
    "decode long": Size(1, 32, 8, 1, 131_072, 128),
    "chunk": Size(16, 16, 16, 4, 1024, 64),
    "batch": Size(64, 12, 12, 64, 64, 64),
    "1024": Size(8, 16, 16, 1024, 1024, 64),
    "1024 shared": Size(4, 32, 8, 1024, 1024, 128),
    "4096": Size(2, 8, 8, 4096, 4096, 64),
    "16384": Size(1, 4, 4, 16_384, 16_384, 64),
}
TEST_SIZES = {
    "decode": Size(2, 4, 2, 1, 24, 8),
    "chunk": Size(1, 2, 2, 4, 20, 8),
    "batch": Size(3, 2, 2, 12, 12, 8),
    "40": Size(1, 2, 1, 40, 40, 8),
}


Draw = Callable[..., Array]
"""draw(*shape): normal numbers in the dtype of the call."""


# Scores


@dataclass(frozen=True)
class Score:
    """build: what `attend` receives; formula: (o, q, k, arrays) → (…, n, m)."""

    build: Callable[[Plain, Arrays], Any]
    formula: Callable[[Plain, Array, Array, Arrays], Array]
    arrays: Callable[[Plain, Draw, Size], Arrays] = lambda *_: {}
    is_nonnegative: bool = False
    has_edge: bool = False
    """Whether rounding may change a score by much."""
    has_ties: bool = False
    """Whether many scores are equal, so that the k largest are not determined."""
    numbers_per_pair: Callable[[Plain, int], int] = lambda o, d: 1
    scale: Callable[[int], float] | None = None
    """The factor of the dot product, for a score that is nothing else."""


def _scaled_dot(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    return o.dot(q, k) / math.sqrt(q.shape[-1])


def _divide_by_8(o: Plain) -> Callable[[Array, Array], Array]:
    """Return one function object per framework, as a function at the top of a module is."""
    if o.name == "torch":  # as a user writes it: without an object of this benchmark
        return _divide_torch_by_8
    if o.name not in _FUNCTIONS:
        _FUNCTIONS[o.name] = lambda q, k: o.dot(q, k) / 8
    return _FUNCTIONS[o.name]


def _divide_torch_by_8(q: Array, k: Array) -> Array:
    return q @ k.mT / 8


def _new_function(o: Plain) -> Callable[[Array, Array], Array]:
    if o.name == "torch":
        return lambda q, k: (q @ k.mT / 64).tanh() * 8
    return lambda q, k: o.tanh(o.dot(q, k) / 64) * 8


def _closure(o: Plain, w: Array) -> Callable[[Array, Array], Array]:
    if o.name == "torch":
        return lambda q, k: (q * w.to(q.dtype)) @ k.mT / math.sqrt(q.shape[-1])
    return lambda q, k: o.dot(q * o.cast(w, q), k) / math.sqrt(q.shape[-1])


_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {}


@dataclass(frozen=True)
class Own:
    """A score of a user: a dataclass with an array."""

    w: Any

    def __call__(self, query: Array, key: Array) -> Array:
        return scores.ScaledDot()(query * self.w, key)


@dataclass(frozen=True)
class StudentT(scores.Score):
    """A user's subclass of Score: s = −log(1 + ‖q − k‖² / d), over all columns."""

    def __call__(self, query: Array, key: Array) -> Array:
        fw = get_framework(query)
        q2 = fw.xp.sum(query * query, axis=-1)[..., :, None]
        k2 = fw.xp.sum(key * key, axis=-1)[..., None, :]
        square = q2 + k2 - 2.0 * scores.Dot()(query, key)
        square = fw.xp.where(square > 0, square, square * 0.0)
        return -fw.xp.log1p(square / query.shape[-1])


def relative_mod(o: Plain) -> Callable[..., Array]:
    if o.name == "torch":  # as a user writes it: without an object of this benchmark
        return _subtract_distance
    if ("relative", o.name) not in _MODS:
        _MODS["relative", o.name] = lambda s, b, h, i, j: s - o.cast(o.abs(i - j), s) * 0.05
    return _MODS["relative", o.name]


def _subtract_distance(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
    return s - abs(i - j) * 0.05


_MODS: dict[Any, Callable[..., Array]] = {}


def _positions(o: Plain, s: Array) -> tuple[Array, Array]:
    return o.arange(s.shape[-2], s)[:, None], o.arange(s.shape[-1], s)[None, :]


def _relative_formula(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    s = _scaled_dot(o, q, k, a)
    i, j = _positions(o, s)
    return s - o.cast(o.abs(i - j), s) * 0.05


def alibi_score(o: Plain, a: Arrays) -> Any:
    slopes = a["score.slopes"]
    if o.name == "torch":
        return scores.Modified(
            scores.ScaledDot(), lambda s, b, h, i, j: s + slopes[h] * (j - i).to(s.dtype)
        )

    def score_mod(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        return s + o.take(slopes, h) * o.cast(j - i, s)

    return scores.Modified(scores.ScaledDot(), score_mod)


def _alibi_formula(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    s = _scaled_dot(o, q, k, a)
    i, j = _positions(o, s)
    return s + a["score.slopes"][:, None, None] * o.cast(j - i, s)


def table_score(o: Plain, a: Arrays) -> Any:
    table = a["score.table"]
    middle = table.shape[0] // 2
    if o.name == "torch":
        return scores.Modified(scores.ScaledDot(), lambda s, b, h, i, j: s + table[j - i + middle])

    def score_mod(s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        return s + o.take(table, j - i + middle)

    return scores.Modified(scores.ScaledDot(), score_mod)


def _table_formula(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    s = _scaled_dot(o, q, k, a)
    i, j = _positions(o, s)
    table = a["score.table"]
    return s + o.take(table, j - i + table.shape[0] // 2)


def _additive(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    hidden = (
        o.dot(q, a["score.w_query"])[..., :, None, :] + o.dot(k, a["score.w_key"])[..., None, :, :]
    )
    return o.sum(o.tanh(hidden) * a["score.v"])[..., 0]


def _gated(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    left = o.sum(q * a["score.w_query"])
    right = o.sum(k * a["score.w_key"])[..., 0][..., None, :]
    return o.sigmoid(left + right) * _scaled_dot(o, q, k, a)


def _capped(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    return 20.0 * o.tanh(_scaled_dot(o, q, k, a) / 20.0)


def _width(d: int) -> float:
    """The median distance of normal vectors: half of the keys are within it."""
    return math.sqrt(2 * d)


def _epanechnikov(o: Plain, q: Array, k: Array, a: Arrays) -> Array:
    return o.positive(1 - o.square_distance(q, k) / _width(q.shape[-1]) ** 2)


SCORES: dict[str, Score] = {
    "scaled_dot": Score(lambda o, a: "scaled_dot", _scaled_dot, scale=lambda d: 1 / math.sqrt(d)),
    "dot": Score(lambda o, a: "dot", lambda o, q, k, a: o.dot(q, k), scale=lambda d: 1.0),
    "scaled_dot(0.2)": Score(
        lambda o, a: scores.ScaledDot(0.2),
        lambda o, q, k, a: o.dot(q, k) * 0.2,
        scale=lambda d: 0.2,
    ),
    "softcap": Score(lambda o, a: scores.ScaledDot(softcap=20.0), _capped),
    "learned scale": Score(
        lambda o, a: scores.ScaledDot(a["score.scale"]),
        lambda o, q, k, a: o.dot(q, k) * a["score.scale"],
        lambda o, draw, size: {"scale": abs(draw()) * 0.01 + 0.15},
    ),
    "cosine": Score(
        lambda o, a: scores.Cosine(0.1), lambda o, q, k, a: o.dot(o.unit(q), o.unit(k)) / 0.1
    ),
    "multiplicative": Score(
        lambda o, a: scores.Multiplicative(a["score.w"]),
        lambda o, q, k, a: o.dot(o.matmul(q, a["score.w"]), k),
        lambda o, draw, size: {"w": draw(size.d, size.d) / size.d},
    ),
    "additive": Score(
        lambda o, a: scores.Additive(a["score.w_query"], a["score.w_key"], a["score.v"]),
        _additive,
        lambda o, draw, size: {
            "w_query": draw(HIDDEN, size.d) / math.sqrt(size.d),
            "w_key": draw(HIDDEN, size.d) / math.sqrt(size.d),
            "v": draw(HIDDEN) / 4,
        },
        numbers_per_pair=lambda o, d: 2 * HIDDEN,
    ),
    "gated": Score(
        lambda o, a: scores.Gated(a["score.w_query"], a["score.w_key"], score=scores.ScaledDot()),
        _gated,
        lambda o, draw, size: {
            "w_query": draw(size.d) / math.sqrt(size.d),
            "w_key": draw(size.d) / math.sqrt(size.d),
        },
    ),
    "gaussian": Score(
        lambda o, a: scores.Gaussian(4.0), lambda o, q, k, a: -o.square_distance(q, k) / 32
    ),
    "learned gaussian": Score(
        lambda o, a: scores.Gaussian(a["score.bandwidth"]),
        lambda o, q, k, a: -o.square_distance(q, k) / (2 * a["score.bandwidth"] ** 2),
        lambda o, draw, size: {"bandwidth": abs(draw()) * 0.01 + 4.0},
    ),
    "laplace": Score(
        lambda o, a: scores.Laplace(8.0),
        lambda o, q, k, a: -o.city_distance(q, k) / 8,
        numbers_per_pair=lambda o, d: 1 if o.name == "torch" else 2 * d,
    ),
    "boxcar": Score(
        lambda o, a: scores.Boxcar(_width(a["query"].shape[-1])),
        lambda o, q, k, a: o.cast(o.distance(q, k) <= _width(q.shape[-1]), q),
        is_nonnegative=True,
        has_edge=True,
        has_ties=True,
    ),
    "triangular": Score(
        lambda o, a: scores.Triangular(_width(a["query"].shape[-1])),
        lambda o, q, k, a: o.positive(1 - o.distance(q, k) / _width(q.shape[-1])),
        is_nonnegative=True,
        has_edge=True,
        has_ties=True,
    ),
    "epanechnikov": Score(
        lambda o, a: scores.Epanechnikov(_width(a["query"].shape[-1])),
        _epanechnikov,
        is_nonnegative=True,
        has_edge=True,
        has_ties=True,
    ),
    "constant": Score(
        lambda o, a: "constant",
        lambda o, q, k, a: o.ones((*q.shape[:-1], k.shape[-2]), q),
        is_nonnegative=True,
        has_ties=True,
    ),
    "exact": Score(
        lambda o, a: "exact",
        lambda o, q, k, a: o.equal(q, k),
        is_nonnegative=True,
        has_ties=True,
        numbers_per_pair=lambda o, d: d // 4,
    ),
    "relative": Score(
        lambda o, a: scores.Modified(scores.ScaledDot(), relative_mod(o)), _relative_formula
    ),
    "alibi": Score(
        alibi_score,
        _alibi_formula,
        lambda o, draw, size: {"slopes": abs(draw(size.h)) * 0.1},
    ),
    "relative table": Score(
        table_score,
        _table_formula,
        lambda o, draw, size: {"table": draw(2 * max(size.n, size.m) + 1)},
    ),
    "function": Score(
        lambda o, a: _divide_by_8(o), lambda o, q, k, a: o.dot(q, k) / 8, scale=lambda d: 1 / 8
    ),
    "new function": Score(  # each call defines it again
        lambda o, a: _new_function(o),
        lambda o, q, k, a: o.tanh(o.dot(q, k) / 64) * 8,
    ),
    "closure": Score(
        lambda o, a: _closure(o, a["score.w"]),
        lambda o, q, k, a: _scaled_dot(o, q * a["score.w"], k, a),
        lambda o, draw, size: {"w": draw(size.d)},
    ),
    "dataclass": Score(
        lambda o, a: Own(a["score.w"]),
        lambda o, q, k, a: _scaled_dot(o, q * a["score.w"], k, a),
        lambda o, draw, size: {"w": draw(size.d)},
    ),
    "subclass": Score(
        lambda o, a: StudentT(),
        lambda o, q, k, a: -o.log1p(o.square_distance(q, k) / q.shape[-1]),
    ),
}


# Weightings


@dataclass(frozen=True)
class Pairs:
    """Scores (…, n, m) with what a weighting may need beside them."""

    o: Plain
    scores: Array
    live: Array | None
    """Which pairs count; None: all of them."""
    arrays: Arrays
    distance: Callable[[], Array]

    def fill(self, other: float, temperature: Any = None) -> Array:
        s = self.scores if temperature is None else self.scores / temperature
        return s if self.live is None else self.o.where(self.live, s, other)

    def choose_best(self) -> Array:
        return self.o.argmax(self.fill(NONE))


@dataclass(frozen=True)
class Weighting:
    """build: what `attend` receives; weigh: scores to weights; pool: to an output, where a user
    would not make the weights."""

    build: Callable[[Arrays], Any]
    weigh: Callable[[Pairs], Array]
    pool: Callable[[Pairs, Array], Array] | None = None
    arrays: Callable[[Plain, Draw, Size], Arrays] = lambda *_: {}
    has_lse: bool = False
    needs_nonnegative: bool = False
    has_edge: bool = False
    temperature: float | None = None
    """The temperature of a softmax, for a weighting that is nothing else."""


@dataclass(frozen=True)
class Softplus(Elementwise):
    """A user's weighting: αᵢ = log(1 + exp(sᵢ))"""

    def weights(self, scores: Array, live: Any, k: Array) -> Array:
        fw = get_framework(scores)
        size = fw.xp.abs(scores)
        return fw.fill_unless(fw.xp.log1p(fw.xp.exp(-size)) + (scores + size) / 2, live)

    def score_gradient(
        self, scores: Array, weight: Array, weight_gradient: Array, centre: Array, row_facts: Any
    ) -> Array:
        return get_framework(scores).sigmoid(scores) * weight_gradient


def _normalized(p: Pairs) -> Array:
    s = p.fill(0.0)
    total = p.o.sum(s)
    return s / p.o.where(total == 0, 1.0, total)


def _normalized_uniform(p: Pairs) -> Array:
    return p.o.where(p.o.sum(p.fill(0.0)) == 0, _average(p), _normalized(p))


def _normalized_nearest(p: Pairs) -> Array:
    o, near = p.o, -p.distance()
    near = near if p.live is None else o.where(p.live, near, NONE)
    nearest = o.one_hot(o.argmax(near), near.shape[-1], near)
    return o.where(o.sum(p.fill(0.0)) == 0, nearest, _normalized(p))


def _average(p: Pairs) -> Array:
    o, s = p.o, p.scores
    live = o.ones(tuple(s.shape), s) if p.live is None else o.cast(p.live, s) + s * 0
    return live / o.sum(live)


def _pool_average(p: Pairs, v: Array) -> Array:
    o, n = p.o, p.scores.shape[-2]
    if p.live is None:
        return o.expand_rows(o.mean_rows(v), n)
    live = o.cast(p.live, v)
    out = o.matmul(live / o.sum(live), v)
    return out if out.shape[-2] == n else o.expand_rows(out, n)


def _top(k: int) -> Callable[[Pairs], Array]:
    def weigh(p: Pairs) -> Array:
        s = p.fill(NONE)
        least = p.o.kth_largest(s, min(k, s.shape[-1]))
        return p.o.softmax(p.o.where(s < least, NONE, s))

    return weigh


def _hard(p: Pairs) -> Array:
    return p.o.one_hot(p.choose_best(), p.scores.shape[-1], p.scores)


def _straight_through(p: Pairs) -> Array:
    soft = p.o.softmax(p.fill(NONE))
    return p.o.stop(_hard(p) - soft) + soft


WEIGHTINGS: dict[str, Weighting] = {
    "softmax": Weighting(
        lambda a: "softmax", lambda p: p.o.softmax(p.fill(NONE)), has_lse=True, temperature=1.0
    ),
    "softmax(0.7)": Weighting(
        lambda a: weightings.Softmax(0.7),
        lambda p: p.o.softmax(p.fill(NONE, 0.7)),
        has_lse=True,
        temperature=0.7,
    ),
    "learned softmax": Weighting(
        lambda a: weightings.Softmax(a["weighting.temperature"]),
        lambda p: p.o.softmax(p.fill(NONE, a_of(p, "temperature"))),
        arrays=lambda o, draw, size: {"temperature": abs(draw()) * 0.01 + 1.4},
        has_lse=True,
    ),
    "topk(8)": Weighting(lambda a: weightings.TopK(8), _top(8), has_edge=True),
    "topk(64)": Weighting(lambda a: weightings.TopK(64), _top(64), has_edge=True),
    "topk(256)": Weighting(lambda a: weightings.TopK(256), _top(256), has_edge=True),
    "hard": Weighting(
        lambda a: "hard", _hard, lambda p, v: p.o.take_rows(v, p.choose_best()), has_edge=True
    ),
    "straight_through": Weighting(
        lambda a: weightings.Hard(straight_through=True), _straight_through, has_edge=True
    ),
    "average": Weighting(lambda a: "average", _average, _pool_average),
    "normalized": Weighting(lambda a: "normalized", _normalized, needs_nonnegative=True),
    "normalized(uniform)": Weighting(
        lambda a: weightings.Normalized("uniform"), _normalized_uniform, needs_nonnegative=True
    ),
    "normalized(nearest)": Weighting(
        lambda a: weightings.Normalized("nearest"),
        _normalized_nearest,
        needs_nonnegative=True,
        has_edge=True,
    ),
    "raw": Weighting(lambda a: "raw", lambda p: p.fill(0.0)),
    "sigmoid": Weighting(lambda a: "sigmoid", lambda p: p.o.sigmoid(p.fill(NONE))),
    "sparsemax": Weighting(lambda a: "sparsemax", lambda p: sparsemax(p.o, p.fill(HIDDEN_SCORE))),
    "entmax15": Weighting(lambda a: "entmax15", lambda p: entmax15(p.o, p.fill(HIDDEN_SCORE))),
    "entmax(1.3)": Weighting(
        lambda a: weightings.Entmax(1.3), lambda p: entmax(p.o, p.fill(HIDDEN_SCORE), 1.3)
    ),
    "learned entmax": Weighting(
        lambda a: weightings.Entmax(a["weighting.alpha"]),
        lambda p: entmax(p.o, p.fill(HIDDEN_SCORE), a_of(p, "alpha")),
        arrays=lambda o, draw, size: {
            "alpha": o.sigmoid(draw(size.h, 1, 1)) * 0.4 + 1.3  # one for each head
        },
    ),
    "subclass": Weighting(lambda a: Softplus(), lambda p: p.o.softplus(p.fill(NONE))),
}


def a_of(p: Pairs, name: str) -> Array:
    return p.arrays[f"weighting.{name}"]


# Masks


@dataclass(frozen=True)
class Mask:
    """rule: what `attend` receives, from the framework and the arrays; allowed: which pairs count,
    (…, n, m) booleans that broadcast; bias: a float mask.

    `arrays` are arguments of the call. Every query must see a key.
    """

    rule: Callable[[Plain, Arrays, Size], Any]
    allowed: Callable[[Size], np.ndarray] | None = None
    arrays: Callable[[Plain, Draw, Size], Arrays] = lambda *_: {}
    bias: str | None = None


def _indices(size: Size) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(size.n)[:, None], np.arange(size.m)[None, :]


def _causal(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return j <= i


def _causal_to_end(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return j <= i + size.m - size.n


def _left(size: Size) -> int:
    return max(2, size.m // 16)


def _near(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return abs(j - i) <= _left(size)


def _global(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return (i < 16) | (j < 16) | _near(size)


def _dilated(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return ((i - j) % 4 == 0) & (abs(i - j) <= 4 * _left(size))


def _strided(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return (i - j) % 4 == 0


def _side(size: Size) -> int:
    return 64 if size.m >= 512 else 8


def _layout(size: Size) -> np.ndarray:
    side = _side(size)
    shape = -(-size.n // side), -(-size.m // side)
    layout = np.random.default_rng(5).random(shape) < 0.3
    layout |= np.arange(shape[0])[:, None] % shape[1] == np.arange(shape[1])
    return layout


def _blocks(size: Size) -> np.ndarray:
    side = _side(size)
    return _layout(size).repeat(side, 0).repeat(side, 1)[: size.n, : size.m]


def _valid(size: Size) -> np.ndarray:
    return np.random.default_rng(6).integers(size.m // 4 + 1, size.m + 1, size.b)


def _lengths(size: Size) -> np.ndarray:
    return np.arange(size.m) < _valid(size)[:, None, None, None]


def document_ids(size: Size) -> np.ndarray:
    """Five documents of different lengths."""
    return np.searchsorted(np.array([0.1, 0.35, 0.5, 0.85]) * size.m, np.arange(size.m), "right")


def _documents(size: Size) -> np.ndarray:
    ids = document_ids(size)
    return ids[size.m - size.n :, None] == ids[None, :]


def _causal_rule(size: Size) -> Any:
    return masks.causal if size.n == size.m else masks.causal(align="bottom_right")


def _documents_rule(o: Plain, size: Size) -> Any:
    ids = document_ids(size).astype("int32")
    return masks.documents(o.array(ids[size.m - size.n :]), o.array(ids))


def _scattered(size: Size) -> np.ndarray:
    allowed = np.random.default_rng(7).random((size.n, size.m)) > 0.3
    allowed[:, 0] = True
    return allowed


def _custom(o: Plain) -> Callable[..., Array]:
    if o.name == "torch":
        return _mask_thirds
    if ("custom", o.name) not in _MODS:
        _MODS["custom", o.name] = lambda b, h, i, j: (i + j) % 3 != 1
    return _MODS["custom", o.name]


def _mask_thirds(b: Array, h: Array, i: Array, j: Array) -> Array:
    return (i + j) % 3 != 1


def _custom_allowed(size: Size) -> np.ndarray:
    i, j = _indices(size)
    return (i + j) % 3 != 1


def _float(o: Plain, draw: Draw, size: Size) -> Arrays:
    return {"bias": draw(size.n, size.m)}


MASKS: dict[str, Mask] = {
    "none": Mask(lambda o, a, size: None),
    "causal": Mask(lambda o, a, size: "causal", _causal),
    "causal to end": Mask(lambda o, a, size: masks.causal(align="bottom_right"), _causal_to_end),
    "window": Mask(lambda o, a, size: masks.window(_left(size)), _near),
    "causal & window": Mask(
        lambda o, a, size: masks.causal & masks.window(_left(size)),
        lambda size: _causal(size) & _near(size),
    ),
    "dilated": Mask(lambda o, a, size: masks.dilated(_left(size), 4), _dilated),
    "strided": Mask(lambda o, a, size: masks.strided(4), _strided),
    "global": Mask(
        lambda o, a, size: masks.global_tokens(16),
        lambda size: (_indices(size)[0] < 16) | (_indices(size)[1] < 16),
    ),
    "global | window": Mask(
        lambda o, a, size: masks.global_tokens(16) | masks.window(_left(size)), _global
    ),
    "blocks": Mask(lambda o, a, size: masks.blocks(_layout(size), _side(size)), _blocks),
    "lengths": Mask(lambda o, a, size: masks.lengths(o.array(_valid(size))), _lengths),
    "documents": Mask(lambda o, a, size: _documents_rule(o, size), _documents),
    "documents & causal": Mask(
        lambda o, a, size: _documents_rule(o, size) & _causal_rule(size),
        lambda size: _documents(size) & _causal_to_end(size),
    ),
    "custom": Mask(lambda o, a, size: masks.custom(_custom(o)), _custom_allowed),
    "new custom": Mask(  # each call defines it again
        lambda o, a, size: masks.custom(lambda b, h, i, j: (i + 2 * j) % 3 != 1),
        lambda size: (_indices(size)[0] + 2 * _indices(size)[1]) % 3 != 1,
    ),
    "boolean (n, m)": Mask(
        lambda o, a, size: a["mask.allowed"],
        _scattered,
        lambda o, draw, size: {"allowed": o.array(_scattered(size))},
    ),
    "boolean (b, 1, 1, m)": Mask(
        lambda o, a, size: a["mask.allowed"],
        _lengths,
        lambda o, draw, size: {"allowed": o.array(_lengths(size))},
    ),
    "causal & boolean (b, 1, 1, m)": Mask(
        lambda o, a, size: masks.causal & a["mask.allowed"],
        lambda size: _causal(size) & _lengths(size),
        lambda o, draw, size: {"allowed": o.array(_lengths(size))},
    ),
    "float (n, m)": Mask(lambda o, a, size: a["mask.bias"], None, _float, "bias"),
    "causal & float (n, m)": Mask(
        lambda o, a, size: masks.causal & a["mask.bias"], _causal, _float, "bias"
    ),
    "float (h, n, m)": Mask(
        lambda o, a, size: a["mask.bias"],
        None,
        lambda o, draw, size: {"bias": draw(size.h, size.n, size.m)},
        "bias",
    ),
}
BUILT_PER_CALL = {"new custom"}

DROPOUT = {"none": 0.0, "0.1": 0.1}
RETURNS = ("output", "lse", "weights", "mean weights")


USUAL = {
    "score": "scaled_dot",
    "mask": "none",
    "weighting": "softmax",
    "returns": "output",
    "dropout": "none",
}


FACTORS = (
    "score", "mask", "weighting", "size", "returns", "dropout", "dtype", "direction", "mode",
)  # fmt: skip


def draw_cases(o: Plain, sizes: Mapping[str, Size], seed: int) -> list[Case]:
    """Return the calls that differ from the usual one in one option, then all pairs of options."""
    factors = make_factors(o, sizes)
    steps = list_single_steps(factors, is_valid, seed, USUAL)
    return cover_pairs(factors, is_valid, seed, USUAL, steps)


def make_factors(o: Plain, sizes: Mapping[str, Size]) -> dict[str, tuple[str, ...]]:
    return {
        "score": tuple(SCORES),
        "mask": tuple(MASKS),
        "weighting": tuple(WEIGHTINGS),
        "size": tuple(sizes),
        "returns": RETURNS,
        "dropout": tuple(DROPOUT),
        "dtype": o.dtypes,
        "direction": o.directions,
        "mode": o.modes,
    }


def is_valid(case: Case) -> bool:
    """Return whether these options, perhaps not all of a call, go together."""
    score, mask = SCORES.get(case.get("score", "")), MASKS.get(case.get("mask", ""))
    weighting = WEIGHTINGS.get(case.get("weighting", ""))
    if weighting is not None:
        if case.get("returns") == "lse" and not weighting.has_lse:
            return False
        if weighting.needs_nonnegative:
            if score is not None and not score.is_nonnegative:
                return False
            if mask is not None and mask.bias is not None:
                return False
        if case["weighting"] == "normalized(nearest)" and case.get("score") in (
            "constant",
            "exact",
        ):
            return False
    large = case.get("size") == "16384"
    return not (large and case.get("mask") == "float (h, n, m)")  # 2 GiB of mask


class Call:
    """A call of `attend` on drawn arrays, and the plain formula of the same."""

    def __init__(self, case: Case, size: Size, o: Plain, seed: int = 0) -> None:
        self.case, self.size, self.o = case, size, o
        self.score, self.weighting = SCORES[case["score"]], WEIGHTINGS[case["weighting"]]
        self.mask, self.p = MASKS[case["mask"]], DROPOUT[case["dropout"]]
        draw = o.normals(seed, case["dtype"])
        query, key, value = (
            draw(size.b, h, n, size.d)
            for h, n in ((size.h, size.n), (size.h_key, size.m), (size.h_key, size.m))
        )
        if case["score"] == "exact" and query.shape == key.shape:
            key = query
        self.arrays: Arrays = {"query": query, "key": key, "value": value}
        for part, option in (("score", self.score), ("weighting", self.weighting)):
            made = option.arrays(o, draw, size)
            self.arrays |= {f"{part}.{name}": x for name, x in made.items()}
        masked = {f"mask.{name}": x for name, x in self.mask.arrays(o, draw, size).items()}
        self.leaves = [*self.arrays, *(x for x in masked if x == "mask.bias")]
        """The names of the arrays that receive gradients."""
        self.arrays |= masked
        self.rule = self.mask.rule(o, self.arrays, size)
        if self.mask.allowed is not None:
            self.arrays["allowed"] = o.array(np.asarray(self.mask.allowed(size)))
        self.cotangent = draw(size.b, size.h, size.n, size.d)

    def options(self, arrays: Arrays) -> dict[str, Any]:
        """Return the keyword arguments of `attend`."""
        built = self.case["mask"] in BUILT_PER_CALL or any(x.startswith("mask.") for x in arrays)
        how: dict[str, Any] = {
            "score": self.score.build(self.o, arrays),
            "weighting": self.weighting.build(arrays),
            "mask": self.mask.rule(self.o, arrays, self.size) if built else self.rule,
        }
        if self.p:
            how |= {"dropout_p": self.p, "seed": self.o.seed}
        returns = self.case["returns"]
        if returns == "lse":
            how["return_lse"] = True
        if returns.endswith("weights"):
            how["return_weights"] = "mean" if returns == "mean weights" else True
        return how

    def formula(self, arrays: Arrays) -> Any:
        """Return what `attend` returns, by the plain formula."""
        o, size, returns = self.o, self.size, self.case["returns"]
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        if size.h_key != size.h:
            k, v = (o.repeat_heads(x, size.h // size.h_key) for x in (k, v))
        pooled = self.weighting.pool is not None and returns == "output" and not self.p
        if pooled and self.case["weighting"] == "average":
            s = q[..., :1]  # no score is needed
        else:
            s = self.score.formula(o, q, k, arrays)
            if self.mask.bias:
                s = s + arrays[f"mask.{self.mask.bias}"]
        pairs = Pairs(o, s, arrays.get("allowed"), arrays, lambda: o.distance(q, k))
        if pooled:
            assert self.weighting.pool is not None
            return self.weighting.pool(pairs, v)
        w = self.weighting.weigh(pairs)
        out = o.matmul(o.dropout(w, self.p) if self.p else w, v)
        if returns == "lse":
            temperature = self.weighting.temperature or arrays["weighting.temperature"]
            return out, o.logsumexp(pairs.fill(NONE, temperature))
        if returns == "output":
            return out
        return out, o.mean_heads(w) if returns == "mean weights" else w

    def describe(self) -> str:
        case, size = self.case, self.size
        parts = [case["score"], case["weighting"], case["mask"]]
        parts += [f"dropout {case['dropout']}"] * bool(self.p)
        parts += [case["returns"]] * (case["returns"] != "output")
        shape = f"B{size.b} H{size.h}" + f"/{size.h_key}" * (size.h_key != size.h)
        shape += f" n{size.n}" + f" m{size.m}" * (size.m != size.n) + f" d{size.d}"
        ways = "forward + backward" if case["direction"] == "both" else "forward"
        mode = "" if case["mode"] == "eager" else f", {case['mode']}"
        return f"{' · '.join(parts)} · {shape} {case['dtype']}, {ways}{mode}"
