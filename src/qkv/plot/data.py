"""What each picture shows, as numbers: `qkv.plot.data.heads` is the twin of `qkv.plot.heads`.

A twin takes what its picture takes, less the looks, and needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError, as_float, format_plural
from qkv.frameworks import to_numpy
from qkv.scores import Score, ScoreLike
from qkv.scores import resolve as score_of
from qkv.weightings import WeightingLike, pair_score_with_weighting
from qkv.weightings import resolve as weighting_of

Matrix: TypeAlias = "np.ndarray[Any, Any]"
Pool = Literal["max", "mean"]
Scores = ScoreLike | Sequence[ScoreLike] | Mapping[str, ScoreLike]

MATRICES = {
    2: "(queries, keys)",
    3: "(columns, queries, keys)",
    4: "(rows, columns, queries, keys)",
}
HEADS = {3: "(heads, n, m)", 4: "(layers, heads, n, m)"}
KERNELS: tuple[ScoreLike, ...] = ("gaussian", "laplace", "boxcar", "triangular", "epanechnikov")


class Cells(NamedTuple):
    """Matrices as they are drawn: `cells` (…, rows, columns), each of up to `block` entries."""

    cells: Matrix
    block: tuple[int, int]


class Bars(NamedTuple):
    """A name and a weight for each bar, the rest of all others last."""

    names: list[str]
    weights: list[float]


class Kernels(NamedTuple):
    """K(r) of each kernel by name, (p,), at the distances r (p,)."""

    distance: Matrix
    values: dict[str, Matrix]


class Fit(NamedTuple):
    """f(q) (p,) and its weights α(q, kᵢ) (p, m)."""

    fitted: Matrix
    weights: Matrix


class Regression(NamedTuple):
    """The fit of each score by name, at the queries (p,); keys and values (m,) by rising key."""

    query: Matrix
    key: Matrix
    value: Matrix
    fits: dict[str, Fit]


class Surfaces(NamedTuple):
    """s(q, k) of each score by name, (p, p): a row for each query, a column for each key."""

    query: Matrix
    key: Matrix
    values: dict[str, Matrix]


class Link(NamedTuple):
    query: int
    key: int
    weight: float


class Flow(NamedTuple):
    """Weights from token to token, (layers, n, n): of each layer alone, and of all up to it."""

    raw: Matrix
    rollout: Matrix


class Entropy(NamedTuple):
    """H (layers, heads) in nats, and log m, which it is where all m keys count alike."""

    entropy: Matrix
    max_entropy: float


def heatmaps(matrices: Any, most: tuple[int, int] | None = None, pool: Pool = "max") -> Cells:
    """The matrices as (rows, columns, queries, keys), NaN for infinities, pooled to `most`
    cells.

    A pooled cell is the entry of largest magnitude in its block ("max"), or their mean; NaN are
    left out.

    >>> heatmaps([[0.5, 0.1, 0.2, 0.2]], most=(1, 2)).cells
    array([[[[0.5, 0.2]]]])
    >>> heatmaps([[0.5, 0.1, 0.2, 0.2]], most=(1, 2), pool="mean").cells
    array([[[[0.3, 0.2]]]])
    """
    return pool_cells(as_grid(matrices), most, pool)


def bars(names: Sequence[str], weights: Sequence[float], *, others: int = 0) -> Bars:
    """αᵢ of each named row, and 1 − Σ αᵢ of `others` more rows, where that is anything.

    >>> bars(["Li", "Hu"], [0.75, 0.125], others=4)
    Bars(names=['Li', 'Hu', '4 other rows'], weights=[0.75, 0.125, 0.125])
    """
    if not (np.iterable(names) and np.ndim(weights) == 1):
        raise ShapeError("bars needs a list of names, and a weight for each of them")
    if len(names) != len(weights) or not len(names):
        raise ShapeError(
            f"bars needs one weight for each name, not {len(weights)} for {len(names)}"
        )
    all_names, all_weights = list(names), [float(weight) for weight in weights]
    rest = 1 - sum(all_weights)
    if others > 0 and rest > 0.0005:
        all_names.append(format_plural(others, "other row"))
        all_weights.append(rest)
    return Bars(all_names, all_weights)


def heads(weights: Any, most: tuple[int, int] = (48, 48), pool: Pool = "max") -> Cells:
    """α (layers, heads, n, m), pooled to `max_entropy` cells each as in `heatmaps`.

    >>> heads(np.ones((2, 3, 96, 96)) / 96).block
    (2, 2)
    """
    cells, kept = captured_cells(weights)
    cells, block = pool_cells(cells, most, pool)
    return Cells(cells, (block[0] * kept[0], block[1] * kept[1]))


def kernels(scores: Scores = KERNELS, reach: float = 2.5, points: int = 501) -> Kernels:
    """K(r) at distances r from −reach to reach: exp(s) of a score that softmax reads, s of one
    that cannot be negative and is a weight as it stands.

    >>> distance, values = kernels(["gaussian", "epanechnikov"], reach=1, points=5)
    >>> values["gaussian"].round(2)
    array([0.61, 0.88, 1.  , 0.88, 0.61])
    >>> values["epanechnikov"]
    array([0.  , 0.75, 1.  , 0.75, 0.  ])
    """
    reach = _require_positive(reach, "reach")
    r = np.linspace(-reach, reach, points)
    found = {
        name: (s, s(np.zeros((1, 1)), r[:, None])[0]) for name, s in scores_by_name(scores).items()
    }
    return Kernels(r, {n: x if s.is_nonnegative else np.exp(x) for n, (s, x) in found.items()})


def regression(
    key: Any,
    value: Any,
    scores: Scores = "gaussian",
    weighting: WeightingLike | None = None,
    query: Any = None,
) -> Regression:
    """f(q) = Σᵢ α(q, kᵢ) vᵢ, the estimator of Nadaraya and Watson, with its weights.

    key, value (m,); query (p,), else 128 of them along the keys. α is the softmax of the score, or
    the score over its sum where it cannot be negative; or what `weighting` makes of it. f(q) is NaN
    where no key is in reach.

    >>> fit = regression([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], "boxcar", query=[0.5]).fits["boxcar"]
    >>> fit.weights
    array([[0.5, 0.5, 0. ]])
    >>> fit.fitted
    array([1.5])
    """
    k, v = _as_vector(key, "key"), _as_vector(value, "value")
    if k.shape != v.shape:
        raise ShapeError(f"value has {v.size} entries; expected {k.size}, one per key")
    order = np.argsort(k, kind="stable")
    k, v = k[order], v[order]
    q = np.linspace(k[0], k[-1], 128) if query is None else _as_vector(query, "query")
    fits = {}
    for name, score in scores_by_name(scores).items():
        how = weighting_of(weighting or ("normalized" if score.is_nonnegative else "softmax"))
        alpha = np.asarray(how(pair_score_with_weighting(score, how)(q[:, None], k[:, None])))
        fits[name] = Fit(np.where(alpha.any(-1), alpha @ v, np.nan), alpha)
    return Regression(q, k, v, fits)


def surfaces(scores: Scores, reach: float = 2.0, points: int = 129) -> Surfaces:
    """s(q, k) for numbers q and k from −reach to reach.

    >>> surfaces("gaussian", reach=1, points=3).values["gaussian"]
    array([[-0. , -0.5, -2. ],
           [-0.5, -0. , -0.5],
           [-2. , -0.5, -0. ]])
    """
    reach = _require_positive(reach, "reach")
    at = np.linspace(-reach, reach, points)
    found = {
        name: np.asarray(s(at[:, None], at[:, None])) for name, s in scores_by_name(scores).items()
    }
    return Surfaces(at, at, found)


def alignment(weights: Any, least: float = 0.02) -> list[Link]:
    """The links from queries to keys whose α is at least `least`, strongest first.

    weights: (n, m).

    >>> alignment([[0.75, 0.25], [0.0, 1.0]])[:2]
    [Link(query=1, key=1, weight=1.0), Link(query=0, key=0, weight=0.75)]
    """
    if isinstance(least, bool) or not isinstance(least, Real):
        raise DtypeError(f"least must be a number, not {least!r}")
    matrix = as_grid(weights, "weights", {2: "(n, m)"})[0, 0]
    found = [Link(int(i), int(j), float(matrix[i, j])) for i, j in np.argwhere(matrix >= least)]
    return sorted(found, key=lambda link: -link.weight)


def flow(weights: Any) -> Flow:
    """Raw: Āₗ, the mean of a layer's heads. Rollout: Rₗ = ½(Āₗ + 1) Rₗ₋₁ with R₀ = 1.

    weights: (layers, heads, n, n). Half of what a layer passes on is what came in beside its
    attention (Abnar and Zuidema, 2020); `rollout[l, i, j]` is how much token i, after layer l, is
    made of the j-th word that was read.

    >>> raw, rollout = flow(np.full((2, 1, 2, 2), 0.5))
    >>> rollout
    array([[[0.75 , 0.25 ],
            [0.25 , 0.75 ]],
           [[0.625, 0.375],
            [0.375, 0.625]]])
    """
    alpha = require_unpooled(weights)
    layers, _, n, m = alpha.shape
    if n != m:
        raise ShapeError(f"weights has {n} queries and {m} keys; flow needs queries that are keys")
    raw = alpha.mean(1)
    steps, so_far = [], np.eye(n)
    for layer in range(layers):
        so_far = (raw[layer] + np.eye(n)) / 2 @ so_far
        steps.append(so_far)
    return Flow(raw, np.stack(steps))


def entropy(weights: Any) -> Entropy:
    """H = −Σⱼ αⱼ log αⱼ, the mean over a head's queries; a query that looks at nothing is left out.

    weights: (layers, heads, n, m). exp(H) keys count in effect.

    >>> alpha = np.stack([np.full((4, 4), 0.25), np.eye(4)])
    >>> entropy(alpha[None]).entropy.round(2)
    array([[1.39, 0.  ]])
    """
    alpha = require_unpooled(weights)
    found = np.full(alpha.shape[:2], np.nan)
    for at in np.ndindex(found.shape):
        rows = alpha[at].astype(np.float64)
        rows = rows[rows.sum(-1) > 0]
        if len(rows):
            logs = np.log(rows, where=rows > 0, out=np.zeros_like(rows))
            found[at] = 0.0 - (rows * logs).sum(-1).mean()
    return Entropy(found, float(np.log(alpha.shape[-1])))


def as_grid(
    matrices: Any, argument: str = "matrices", shapes: Mapping[int, str] = MATRICES
) -> Matrix:
    """The matrices as floating numbers with four axes, and NaN for infinities."""
    try:
        array = np.asarray(_to_nested_numpy(matrices))
    except ValueError:
        raise ShapeError(
            f"{argument} is ragged; expected as many keys in every row and as many queries in "
            "every matrix"
        ) from None
    if array.ndim not in shapes:
        expected = " or ".join(shapes.values())
        raise ShapeError(f"{argument} has shape {array.shape}; expected {expected}")
    if array.size == 0:
        raise ShapeError(f"{argument} has shape {array.shape}; expected at least one cell to draw")
    # NumPy files the narrow floats of machine learning under no kind of number.
    if array.dtype.kind not in "biuf" and "float" not in array.dtype.name:
        raise DtypeError(f"{argument} has dtype {array.dtype}; expected real numbers")
    short = array.dtype.itemsize <= 2 or array.dtype == np.float32
    array = array.astype(np.float32 if short else np.float64, copy=False)
    finite = np.isfinite(array)
    if not finite.all():
        array = np.where(finite, array, np.nan)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def captured_cells(weights: Any) -> Cells:
    """α of a model's heads, (layers, heads, n, m), as a capture kept them; one layer may come
    without its axis."""
    alpha = as_grid(getattr(weights, "weights", weights), "weights", HEADS)
    return Cells(alpha, getattr(weights, "block", (1, 1)))


def require_unpooled(weights: Any) -> Matrix:
    """The same, where no weight was pooled."""
    alpha, block = captured_cells(weights)
    if block != (1, 1):
        raise ArgumentError(
            f"weights holds the largest of each {block[0]} × {block[1]}, and all are needed: "
            "capture with a larger budget"
        )
    return alpha


def pool_cells(cells: Matrix, most: tuple[int, int] | None, pool: Pool) -> Cells:
    """At most so many cells in the last two axes; NaN where a block holds nothing else."""
    if pool not in ("max", "mean"):
        raise ArgumentError(f'pool must be "max" or "mean", not {pool!r}')
    sizes = cells.shape[-2:]
    counts = [min(size, max(1, m)) for size, m in zip(sizes, most or sizes, strict=True)]
    block = (-(-sizes[0] // counts[0]), -(-sizes[1] // counts[1]))
    if block == (1, 1):
        return Cells(cells, block)
    if pool == "mean":
        known = ~np.isnan(cells)
        number = _reduce_blocks(np.add, known.astype(np.int64), counts)
        total = _reduce_blocks(np.add, np.where(known, cells, 0), counts)
        return Cells(np.where(number > 0, total / np.maximum(number, 1), np.nan), block)
    low, high = _reduce_blocks(np.fmin, cells, counts), _reduce_blocks(np.fmax, cells, counts)
    return Cells(np.where(-low > high, low, high), block)


def scores_by_name(scores: Scores) -> dict[str, Score]:
    """The scores by what they are called: a name, a class with its numbers, or one's own."""
    if isinstance(scores, Mapping):
        return {str(name): score_of(score) for name, score in scores.items()}
    many: list[Any] = list(scores) if isinstance(scores, list | tuple) else [scores]
    found = {}
    for given in many:
        score = score_of(given)
        name = given if isinstance(given, str) else getattr(given, "__name__", None)
        found[name or type(score).__name__.lower()] = score
    if not found:
        raise ArgumentError("scores is empty: give the name of one, or several")
    if len(found) < len(many):
        raise ArgumentError("scores holds two of one name: name them, as in {'σ = 1': Gaussian(1)}")
    return found


def _reduce_blocks(how: Any, cells: Matrix, counts: list[int]) -> Matrix:
    for axis, count in zip((-2, -1), counts, strict=True):
        size = cells.shape[axis]
        if size > count:
            cells = how.reduceat(cells, np.arange(count) * size // count, axis=axis)
    return cells


def _to_nested_numpy(x: Any) -> Any:
    """Lists as they are, the arrays in them made NumPy's: NumPy cannot stack every tensor."""
    if isinstance(x, list | tuple):
        return [_to_nested_numpy(item) for item in x]
    return to_numpy(x) if hasattr(x, "shape") else x


def _as_vector(x: Any, argument: str) -> Matrix:
    try:
        array = to_numpy(x).astype(np.float64)
    except (TypeError, ValueError):
        raise DtypeError(f"{argument} must be numbers in a row, not {x!r:.40}") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not array.size:
        raise ShapeError(f"{argument} has shape {array.shape}; expected some numbers in a row")
    return array


def _require_positive(number: float, argument: str) -> float:
    if not isinstance(number, Real) or not 0 < as_float(number) < np.inf:
        raise ArgumentError(f"{argument} must be a number above 0, not {number!r}")
    return float(number)
