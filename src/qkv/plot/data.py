"""The numbers of each plot: `qkv.plot.data.heads` returns what `qkv.plot.heads` draws.

The functions take the arguments of the plots, except those for their style, and do not need
matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from qkv.errors import ArgumentError, DtypeError, ShapeError, as_float, format_plural
from qkv.frameworks import to_numpy
from qkv.scores import Score, ScoreLike
from qkv.scores import resolve as resolve_score
from qkv.weightings import WeightingLike, pair_score_with_weighting
from qkv.weightings import resolve as resolve_weighting

Matrix: TypeAlias = "np.ndarray[Any, Any]"
Pool = Literal["max", "mean"]
Scores = ScoreLike | Sequence[ScoreLike] | Mapping[str, ScoreLike]

MATRIX_AXES = {
    2: "(queries, keys)",
    3: "(columns, queries, keys)",
    4: "(rows, columns, queries, keys)",
}
HEAD_AXES = {3: "(heads, n, m)", 4: "(layers, heads, n, m)"}
KERNELS: tuple[ScoreLike, ...] = ("gaussian", "laplace", "boxcar", "triangular", "epanechnikov")


class Cells(NamedTuple):
    """Matrices to draw: `cells` (…, rows, columns); each cell pools up to `block` entries."""

    cells: Matrix
    block: tuple[int, int]


class Bars(NamedTuple):
    """The name and the weight of each bar; the sum of all other rows is last."""

    names: list[str]
    weights: list[float]


class Kernels(NamedTuple):
    """K(r) of each kernel by name, (p,), at the distances r (p,)."""

    distance: Matrix
    values: dict[str, Matrix]


class Fit(NamedTuple):
    """f(q), (p,), and its weights α(q, kᵢ), (p, m)."""

    fitted: Matrix
    weights: Matrix


class Regression(NamedTuple):
    """The fits at the queries (p,), by name of the score; keys and values (m,), sorted by key."""

    query: Matrix
    key: Matrix
    value: Matrix
    fits: dict[str, Fit]


class Surfaces(NamedTuple):
    """s(q, k) of each score by name, (p, p): one row per query, one column per key."""

    query: Matrix
    key: Matrix
    values: dict[str, Matrix]


class Link(NamedTuple):
    query: int
    key: int
    weight: float


class Flow(NamedTuple):
    """Weights between tokens, (layers, n, n): of each layer, and of all layers up to it."""

    raw: Matrix
    rollout: Matrix


class Entropy(NamedTuple):
    """H (layers, heads) in nats, and its maximum log m, reached if all m weights are equal."""

    entropy: Matrix
    max_entropy: float


def heatmaps(matrices: Any, most: tuple[int, int] | None = None, pool: Pool = "max") -> Cells:
    """Return matrices as (rows, columns, queries, keys), pooled to at most `most` cells.

    A pooled cell is the entry of largest magnitude in its block ("max"), or their mean. NaN is
    ignored, and infinities become NaN.

    >>> heatmaps([[0.5, 0.1, 0.2, 0.2]], most=(1, 2)).cells
    array([[[[0.5, 0.2]]]])
    >>> heatmaps([[0.5, 0.1, 0.2, 0.2]], most=(1, 2), pool="mean").cells
    array([[[[0.3, 0.2]]]])
    """
    return pool_cells(as_grid(matrices), most, pool)


def bars(names: Sequence[str], weights: Sequence[float], *, others: int = 0) -> Bars:
    """Return αᵢ of each named row, and 1 − Σ αᵢ of `others` more rows if it is not 0.

    >>> bars(["Li", "Hu"], [0.75, 0.125], others=4)
    Bars(names=['Li', 'Hu', '4 other rows'], weights=[0.75, 0.125, 0.125])
    """
    if not (np.iterable(names) and np.ndim(weights) == 1):
        raise ShapeError("bars needs a list of names, and a list with one weight per name")
    if len(names) != len(weights) or not len(names):
        raise ShapeError(
            f"bars needs one weight per name, not {len(weights)} weights for {len(names)} names"
        )
    all_names, all_weights = list(names), [float(weight) for weight in weights]
    remainder = 1 - sum(all_weights)
    if others > 0 and remainder > 0.0005:
        all_names.append(format_plural(others, "other row"))
        all_weights.append(remainder)
    return Bars(all_names, all_weights)


def heads(weights: Any, most: tuple[int, int] = (48, 48), pool: Pool = "max") -> Cells:
    """Return α (layers, heads, n, m), each head pooled to at most `most` cells as in `heatmaps`.

    >>> heads(np.ones((2, 3, 96, 96)) / 96).block
    (2, 2)
    """
    cells, captured_block = captured_cells(weights)
    cells, block = pool_cells(cells, most, pool)
    return Cells(cells, (block[0] * captured_block[0], block[1] * captured_block[1]))


def kernels(scores: Scores = KERNELS, reach: float = 2.5, points: int = 501) -> Kernels:
    """Return K(r) at distances r from −reach to reach.

    K is s for a score that is never negative, and exp(s), as in a softmax, for the others.

    >>> distance, values = kernels(["gaussian", "epanechnikov"], reach=1, points=5)
    >>> values["gaussian"].round(2)
    array([0.61, 0.88, 1.  , 0.88, 0.61])
    >>> values["epanechnikov"]
    array([0.  , 0.75, 1.  , 0.75, 0.  ])
    """
    reach = _require_positive(reach, "reach")
    r = np.linspace(-reach, reach, points)
    values = {}
    for name, score in scores_by_name(scores).items():
        s = score(np.zeros((1, 1)), r[:, None])[0]
        values[name] = s if score.is_nonnegative else np.exp(s)
    return Kernels(r, values)


def regression(
    key: Any,
    value: Any,
    scores: Scores = "gaussian",
    weighting: WeightingLike | None = None,
    query: Any = None,
) -> Regression:
    """Return f(q) = Σᵢ α(q, kᵢ) vᵢ, the Nadaraya–Watson estimator, with its weights.

    key, value (m,); query (p,), by default 128 values over the range of the keys. The default
    weighting is softmax, or `normalized` for a score that is never negative. f(q) is NaN if no key
    has weight.

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
        default = "normalized" if score.is_nonnegative else "softmax"
        chosen = resolve_weighting(weighting or default)
        adapted = pair_score_with_weighting(score, chosen)
        alpha = np.asarray(chosen(adapted(q[:, None], k[:, None])))
        fits[name] = Fit(np.where(alpha.any(-1), alpha @ v, np.nan), alpha)
    return Regression(q, k, v, fits)


def surfaces(scores: Scores, reach: float = 2.0, points: int = 129) -> Surfaces:
    """Return s(q, k) for numbers q and k from −reach to reach.

    >>> surfaces("gaussian", reach=1, points=3).values["gaussian"]
    array([[-0. , -0.5, -2. ],
           [-0.5, -0. , -0.5],
           [-2. , -0.5, -0. ]])
    """
    reach = _require_positive(reach, "reach")
    axis = np.linspace(-reach, reach, points)
    column = axis[:, None]
    values = {name: np.asarray(s(column, column)) for name, s in scores_by_name(scores).items()}
    return Surfaces(axis, axis, values)


def alignment(weights: Any, least: float = 0.02) -> list[Link]:
    """Return the links from queries to keys with α of at least `least`, largest first.

    weights: (n, m).

    >>> alignment([[0.75, 0.25], [0.0, 1.0]])[:2]
    [Link(query=1, key=1, weight=1.0), Link(query=0, key=0, weight=0.75)]
    """
    if isinstance(least, bool) or not isinstance(least, Real):
        raise DtypeError(f"least must be a number, not {least!r}")
    matrix = as_grid(weights, "weights", {2: "(n, m)"})[0, 0]
    links = [Link(int(i), int(j), float(matrix[i, j])) for i, j in np.argwhere(matrix >= least)]
    return sorted(links, key=lambda link: -link.weight)


def flow(weights: Any) -> Flow:
    """Return raw weights Āₗ, the mean of a layer's heads, and their rollout Rₗ = ½(Āₗ + 1) Rₗ₋₁.

    weights: (layers, heads, n, n). R₀ = 1, and half of the output of a layer is its residual input
    (Abnar and Zuidema, 2020). `rollout[l, i, j]` is the share of input token j in token i after
    layer l.

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
        raise ShapeError(
            f"weights has {n} queries and {m} keys, but flow needs as many keys as queries: pass "
            "the weights of self-attention"
        )
    raw = alpha.mean(1)
    rollouts, rollout = [], np.eye(n)
    for layer in range(layers):
        rollout = (raw[layer] + np.eye(n)) / 2 @ rollout
        rollouts.append(rollout)
    return Flow(raw, np.stack(rollouts))


def entropy(weights: Any) -> Entropy:
    """Return H = −Σⱼ αⱼ log αⱼ, the mean over a head's queries; queries without weight are ignored.

    weights: (layers, heads, n, m). exp(H) is the effective number of keys.

    >>> alpha = np.stack([np.full((4, 4), 0.25), np.eye(4)])
    >>> entropy(alpha[None]).entropy.round(2)
    array([[1.39, 0.  ]])
    """
    alpha = require_unpooled(weights)
    mean_entropy = np.full(alpha.shape[:2], np.nan)
    for at in np.ndindex(mean_entropy.shape):
        rows = alpha[at].astype(np.float64)
        rows = rows[rows.sum(-1) > 0]
        if len(rows):
            logs = np.log(rows, where=rows > 0, out=np.zeros_like(rows))
            mean_entropy[at] = 0.0 - (rows * logs).sum(-1).mean()
    return Entropy(mean_entropy, float(np.log(alpha.shape[-1])))


def as_grid(
    matrices: Any, argument: str = "matrices", shapes: Mapping[int, str] = MATRIX_AXES
) -> Matrix:
    """Return matrices as floats with four axes, and NaN for infinities."""
    try:
        array = np.asarray(_to_nested_numpy(matrices))
    except ValueError:
        raise ShapeError(
            f"{argument} is ragged; expected rows of equal length, and matrices of equal size"
        ) from None
    if array.ndim not in shapes:
        expected = " or ".join(shapes.values())
        raise ShapeError(f"{argument} has shape {array.shape}; expected {expected}")
    if array.size == 0:
        raise ShapeError(f"{argument} has shape {array.shape}; expected at least one cell to draw")
    # NumPy gives bfloat16 and the 8-bit floats no numeric kind.
    if array.dtype.kind not in "biuf" and "float" not in array.dtype.name:
        raise DtypeError(f"{argument} has dtype {array.dtype}; expected real numbers")
    short = array.dtype.itemsize <= 2 or array.dtype == np.float32
    array = array.astype(np.float32 if short else np.float64, copy=False)
    finite = np.isfinite(array)
    if not finite.all():
        array = np.where(finite, array, np.nan)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def captured_cells(weights: Any) -> Cells:
    """Return α (layers, heads, n, m) of an array or a capture; one layer needs no layer axis."""
    alpha = as_grid(getattr(weights, "weights", weights), "weights", HEAD_AXES)
    return Cells(alpha, getattr(weights, "block", (1, 1)))


def require_unpooled(weights: Any) -> Matrix:
    """Return α as `captured_cells` does; raise an error if the weights were pooled."""
    alpha, block = captured_cells(weights)
    if block != (1, 1):
        raise ArgumentError(
            f"weights was pooled to the largest weight of each block of {block[0]} × {block[1]}, "
            "but flow and entropy need every weight: capture with a larger budget"
        )
    return alpha


def pool_cells(cells: Matrix, most: tuple[int, int] | None, pool: Pool) -> Cells:
    """Pool the last two axes to at most `most` cells; a block of only NaN stays NaN."""
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
    """Return scores by name: the keys of a dict, or the name of each score or function."""
    if isinstance(scores, Mapping):
        return {str(name): resolve_score(score) for name, score in scores.items()}
    specs: list[Any] = list(scores) if isinstance(scores, list | tuple) else [scores]
    by_name = {}
    for spec in specs:
        score = resolve_score(spec)
        name = spec if isinstance(spec, str) else getattr(spec, "__name__", None)
        by_name[name or type(score).__name__.lower()] = score
    if not by_name:
        raise ArgumentError("scores is empty: pass at least one score")
    if len(by_name) < len(specs):
        raise ArgumentError(
            "scores has two of the same name: pass a dict, as in {'σ = 1': Gaussian(1)}"
        )
    return by_name


def _reduce_blocks(ufunc: Any, cells: Matrix, counts: list[int]) -> Matrix:
    for axis, count in zip((-2, -1), counts, strict=True):
        size = cells.shape[axis]
        if size > count:
            cells = ufunc.reduceat(cells, np.arange(count) * size // count, axis=axis)
    return cells


def _to_nested_numpy(x: Any) -> Any:
    """Convert the arrays in nested lists to NumPy, which cannot stack every tensor itself."""
    if isinstance(x, list | tuple):
        return [_to_nested_numpy(item) for item in x]
    return to_numpy(x) if hasattr(x, "shape") else x


def _as_vector(x: Any, argument: str) -> Matrix:
    try:
        array = to_numpy(x).astype(np.float64)
    except (TypeError, ValueError):
        raise DtypeError(f"{argument} must be a vector of numbers, not {x!r:.40}") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not array.size:
        raise ShapeError(f"{argument} has shape {array.shape}; expected a vector of numbers")
    return array


def _require_positive(number: float, argument: str) -> float:
    if not isinstance(number, Real) or not 0 < as_float(number) < np.inf:
        raise ArgumentError(f"{argument} must be a number above 0, not {number!r}")
    return float(number)
