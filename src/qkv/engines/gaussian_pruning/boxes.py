"""Boxes of keys: Σᵢ exp(−‖q − kᵢ‖²/2) vᵢ over boxes with non-negligible weight, in NumPy.

Each box holds c keys. The distance of a query to the box is a lower bound for its keys, so the mass
of the box is at most c exp(−distance²/2). The exponential is convex, so the mass is at least
c exp(−mean ‖q − k‖²/2). Let L be the sum of the lower bounds over all boxes, and U the sum of the
upper bounds over skipped boxes. A row loses at most U / L of its weight. Boxes are skipped,
farthest first, while U / L ≤ ¾ share. The last quarter allows for the rounding of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from qkv.util.caches import memoize

Numbers = np.ndarray[Any, Any]

KEYS_PER_BOX = 512
"""Approximate keys per box. Smaller boxes exclude more keys, but each box costs NumPy calls."""

MAX_SCORES_PER_BLOCK = 2**18
"""Scores in memory at once. They stay in the CPU cache between product, exponential and sum."""

MAX_NATIVE_TERM = 64.0
"""Largest term of ‖q‖² − 2qᵀk + ‖k‖² for which the call's dtype is precise enough."""

MAX_FLOAT64_TERM = 1e8
"""Largest term for which float64 is precise enough for float32 results.

For larger terms the differences q − k are squared.
"""

UNREAD_SHARE_FRACTION = 0.75
"""The part of `share` that skipped boxes may lose. The rest allows for the rounding of scores."""

MAX_LOG_MASS_GAP = {"float32": 50.0, "float64": 600.0}
"""Largest distance of a row's log mass from its bound at which exponentials do not underflow."""

MIN_EXPONENT = {"float32": -87.0, "float64": -708.0}
"""Smallest exponent with a normal result: denormal numbers are slow."""


class Boxes(NamedTuple):
    """Keys in boxes of c keys each.

    - centre, half (half of the side lengths), mean: (d, boxes).
    - variance about the mean, radius about the centre, counts: (boxes,).
    - points (d, boxes, c): the keys.
    - columns (boxes, d + 2, c): the keys minus the centre, −‖·‖²/2 of that, and 1.
    - values (boxes, c, d_v + 1): the values, and 1.
    - order (boxes · c): the position of each key; m or more for padding.

    Copies of a key pad the last box. In their rows of `values`, all columns are 0.
    """

    order: Numbers
    counts: Numbers
    centre: Numbers
    half: Numbers
    mean: Numbers
    variance: Numbers
    radius: Numbers
    points: Numbers
    columns: Numbers
    values: Numbers


class BoxSelection(NamedTuple):
    """For queries (d, r): which boxes they read (r, boxes), and a bound on the lost share (r,).

    `shift` (r,) is close to the largest score of a row and, except for rounding, not below it.
    """

    is_read: Numbers
    lost_share_bound: Numbers
    shift: Numbers


def pack_points(points: Numbers, size: int) -> tuple[Numbers, int]:
    """Return an order (boxes · c,) of the points (d, m), and c ≈ `size`, the points per box.

    Consecutive points of the order form a box. Entries of m or more, at the end, are padding. Each
    axis is cut into parts with equal numbers of points. An axis along which the points spread twice
    as far has twice as many parts, so that boxes are nearly cubes.
    """
    d, m = points.shape
    cuts = np.zeros(d, int)
    spread = np.maximum(points[:, :: max(m // 4096, 1)].std(axis=1), 1e-300)
    for _ in range(round(math.log2(max(m / size, 1)))):
        cuts[np.argmax(np.ldexp(spread, -cuts))] += 1
    boxes = 2 ** int(cuts.sum())
    c = -(-m // (boxes * 16)) * 16 if boxes > 1 else m  # a multiple of 16, for aligned rows
    order = np.arange(boxes * c)
    part_count = 1
    for axis in np.argsort(-cuts, kind="stable"):
        if not cuts[axis]:
            break
        low, high = points[axis].min(), points[axis].max()
        # One integer to sort: the coordinate in the upper bits, the position in the lower ones.
        code = np.full(boxes * c, 2**31 - 1, np.int64)
        code[:m] = (points[axis] - low) * ((2**31 - 1) / (high - low or 1.0))
        code <<= 32
        both = (code.take(order) | order).reshape(part_count, -1)
        both.sort(axis=1)
        order = both.reshape(-1) & 0xFFFFFFFF
        part_count <<= int(cuts[axis])
    return order[: -(-m // c) * c], c  # the padding is at the end


def build_boxes(key: Numbers, value: Numbers, size: int | None = None) -> Boxes:
    """Return the keys (d, m), float64, and their values (m, d_v), in boxes."""
    d, m = key.shape
    order, c = pack_points(key, size or KEYS_PER_BOX)
    filled = np.where(order < m, order, order[m - 1])  # pad with copies of the last key
    points = np.stack([along.take(filled) for along in key]).reshape(d, -1, c)
    low, high = points.min(axis=-1), points.max(axis=-1)
    centre, half = (low + high) / 2, (high - low) / 2
    columns = np.ones((points.shape[1], d + 2, c), value.dtype)
    square = np.zeros(points.shape[1:])
    for axis in range(d):
        offset = points[axis] - centre[axis, :, None]
        columns[:, axis] = offset
        offset *= offset
        square += offset
    columns[:, d] = square * -0.5
    values = np.ones((len(order), value.shape[-1] + 1), value.dtype)
    values[:, :-1] = value.take(filled, axis=0)
    values[order >= m] = 0
    values = values.reshape(-1, c, values.shape[-1])
    counts = np.sum(order.reshape(-1, c) < m, axis=1)
    radius = np.sqrt(square.max(axis=-1))
    mean = points.mean(axis=-1)
    mean[:, -1] = points[:, -1, : counts[-1]].mean(axis=-1)
    offset = mean - centre
    square[-1, counts[-1] :] = 0
    variance = square.sum(axis=-1) / counts - np.einsum("db,db->b", offset, offset)
    variance += 1e-14 * radius**2  # rounded numbers must still be an upper bound
    return Boxes(order, counts, centre, half, mean, variance, radius, points, columns, values)


def select_boxes(query: Numbers, boxes: Boxes, share: float) -> BoxSelection:
    """Return which boxes each query (d, r) must read to lose at most `share` of its weight."""
    nearest, mean_squares = box_distances(query, boxes, np.float32)
    if not mean_squares.min(axis=1).max(initial=0) < 1e3:  # float32 is not precise enough
        nearest, mean_squares = box_distances(query, boxes, np.float64)
    least = mean_squares.min(axis=1)  # the nearest key is at most this far
    mass = np.exp((mean_squares - least[:, None]) * -0.5) @ boxes.counts.astype(nearest.dtype)
    bottom = np.log(mass) - 0.5 * least
    shift = (-0.5 * nearest.min(axis=1)).astype(np.float64)
    far = shift - bottom > MAX_LOG_MASS_GAP[str(boxes.values.dtype)]
    if far.any():
        # The bounds are too loose for these queries: find the nearest key of each.
        top = nearest_scores(query[:, far], boxes, nearest[far] <= least[far, None], share)
        shift[far] = top
        bottom[far] = np.maximum(bottom[far], top)
    cut, lost = find_cutoff(nearest, boxes.points.shape[-1], bottom, UNREAD_SHARE_FRACTION * share)
    # The factor allows for the rounding of the bounds.
    return BoxSelection(nearest <= cut[:, None], lost * 1.001, shift)


def box_distances(query: Numbers, boxes: Boxes, dtype: Any) -> tuple[Numbers, Numbers]:
    """Return bounds on ‖q − k‖² for each box, both (r, boxes).

    The first is at most the minimum over the box's keys, the second at least their mean. Both allow
    for the rounding of coordinates.
    """
    largest = max(float(np.abs(x).max(initial=0)) for x in (query, boxes.centre))
    slack = np.asarray(4 * float(np.finfo(dtype).eps) * largest, dtype)
    query, centre, half, mean = (
        x.astype(dtype) for x in (query, boxes.centre, boxes.half, boxes.mean)
    )
    half += slack
    nearest = np.zeros((query.shape[1], centre.shape[1]), dtype)
    mean_squares = nearest + boxes.variance.astype(dtype)
    for axis, q in enumerate(query):
        apart = q[:, None] - centre[axis]
        np.abs(apart, out=apart)
        apart -= half[axis]
        np.maximum(apart, 0, out=apart)
        apart *= apart
        nearest += apart
        np.subtract(q[:, None], mean[axis], out=apart)
        np.abs(apart, out=apart)
        apart += slack
        apart *= apart
        mean_squares += apart
    return nearest, mean_squares


def find_cutoff(nearest: Numbers, c: int, bottom: Numbers, share: float) -> tuple[Numbers, Numbers]:
    """Return the ‖q − k‖² beyond which each row skips boxes, and the lost share U / L, both (r,).

    log L is `bottom`.
    """
    away = np.sort(nearest, axis=1)
    mass = away * -0.5 - (bottom - math.log(c))[:, None]
    # A box with a bound above 1 is never skipped, and a bound must not underflow to 0.
    np.clip(mass, MIN_EXPONENT[str(mass.dtype)], 0, out=mass)
    unread = np.exp(mass, out=mass)[:, ::-1].cumsum(axis=1)
    dropped = np.sum(unread <= share, axis=1)
    rows = np.arange(len(nearest))
    cut = away[rows, np.maximum(away.shape[1] - 1 - dropped, 0)]
    # A row also reads all boxes at the same distance as the last box that it reads.
    return cut, np.where(dropped > 0, unread[rows, dropped - 1], 0)


def nearest_scores(query: Numbers, boxes: Boxes, is_read: Numbers, share: float) -> Numbers:
    """Return the score of each query's nearest key, among the boxes `is_read` (r, boxes)."""
    top = np.full(query.shape[1], -np.inf)
    none = np.zeros_like(top)
    for _, rows, s, _ in iterate_scores(query, boxes, is_read, none, share, np.dtype(np.float64)):
        top[rows] = np.maximum(top[rows], s.max(axis=1))
    return top


def iterate_visits(is_read: Numbers, boxes: Boxes) -> Iterator[tuple[int, Numbers]]:
    """Yield each box with the rows that read it, in blocks of limited size."""
    step = max(MAX_SCORES_PER_BLOCK // boxes.points.shape[-1], 1)
    by_box = np.ascontiguousarray(is_read.T)
    for box in np.flatnonzero(by_box.any(axis=1)):
        rows = np.flatnonzero(by_box[box])
        for at in range(0, len(rows), step):
            yield int(box), rows[at : at + step]


def scores_by_differences(query: Numbers, points: Numbers) -> Numbers:
    """Return −‖q − k‖²/2 of queries (d, r) and keys (d, c), in float64."""
    total = np.zeros((query.shape[1], points.shape[1]))
    for q, k in zip(query, points, strict=True):
        apart = q[:, None] - k
        apart *= apart
        total -= apart
    total *= 0.5
    return total


def iterate_scores(
    query: Numbers,
    boxes: Boxes,
    is_read: Numbers,
    shift: Numbers,
    share: float,
    dtype: Any,
    by: float = 1.0,
) -> Iterator[tuple[int, Numbers, Numbers, float]]:
    """Yield for each box: its index, the rows that read it, their scores, and a lower bound.

    The scores (−‖q − k‖²/2 − shift) · by are at least the lower bound. The next iteration
    overwrites them.
    """
    own, (d, _, c) = boxes.values.dtype, boxes.points.shape
    step = max(MAX_SCORES_PER_BLOCK // c, 1)
    side, buffer = np.ones((step, d + 2)), np.empty((step, c), dtype)
    short = max(MAX_NATIVE_TERM, share / float(np.finfo(own).eps) / 32)
    for box, rows in iterate_visits(is_read, boxes):
        out, left = buffer[: len(rows)], side[: len(rows)]
        offset = query[:, rows] - boxes.centre[:, box, None]
        half = np.einsum("dr,dr->r", offset, offset) * 0.5
        away = math.sqrt(2 * half.max())
        term = boxes.radius[box] * away
        # The square is expanded about the box's centre: only a large qᵀk loses precision.
        left[:, :d] = offset.T
        left[:, d] = 1.0
        left[:, d + 1] = -(half + shift[rows])
        left *= by
        if term <= short and dtype == own:
            np.matmul(left.astype(dtype), boxes.columns[box], out=out)
        elif term <= MAX_FLOAT64_TERM and own == np.float32:
            out[:] = left @ float64_columns(boxes, box)
        else:
            s = scores_by_differences(query[:, rows], boxes.points[:, box])
            s -= shift[rows, None]
            np.multiply(s, by, out=out, casting="same_kind")
        least = -0.5 * (away + boxes.radius[box]) ** 2 - shift[rows].max()
        yield box, rows, out, least * by


def estimate_pair_cost(query: Numbers, boxes: Boxes, is_read: Numbers, share: float) -> float:
    """Return the mean cost of a pair in `iterate_scores`, relative to its fastest method."""
    own = boxes.values.dtype
    short = max(MAX_NATIVE_TERM, share / float(np.finfo(own).eps) / 32)
    apart = np.sqrt(np.sum((query[:, :, None] - boxes.centre[:, None]) ** 2, axis=0))
    term = (apart * boxes.radius)[is_read]
    slow = 2.0 if own == np.float32 else 6.0
    return 1 + (slow - 1) * float(np.mean(term > short))


def iterate_weights(
    query: Numbers, boxes: Boxes, is_read: Numbers, shift: Numbers, share: float
) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Yield each box, the rows that read it, and exp(−‖q − k‖²/2 − shift).

    The next iteration overwrites the weights.
    """
    power, by = fast_exponential()
    dtype = boxes.values.dtype
    lowest = MIN_EXPONENT[str(dtype)] * by
    for box, rows, s, least in iterate_scores(query, boxes, is_read, shift, share, dtype, by):
        if least < lowest:
            np.maximum(s, lowest, out=s)
        yield box, rows, power(s, out=s)


@memoize("engines.fast_exponential")
def fast_exponential() -> tuple[Any, float]:
    """Return f and c with eˣ = f(c x).

    f is exp2 if NumPy vectorizes exp2, which then takes half the time of exp.
    """
    try:
        info = np.lib.introspect.opt_func_info(func_name="^exp2$")["exp2"]
        is_vectorized = all("baseline" not in info[kind]["current"] for kind in ("ff", "dd"))
    except (AttributeError, KeyError, TypeError):
        is_vectorized = False
    return (np.exp2, math.log2(math.e)) if is_vectorized else (np.exp, 1.0)


def float64_columns(boxes: Boxes, box: int) -> Numbers:
    """Return the columns of a box in float64."""
    offset = boxes.points[:, box] - boxes.centre[:, box, None]
    below = np.einsum("dc,dc->c", offset, offset) * -0.5
    return np.stack([*offset, below, np.ones_like(below)])


def pool_queries(query: Numbers, boxes: Boxes, share: float) -> tuple[Numbers, Numbers, Numbers]:
    """Return Σᵢ αᵢ vᵢ (r, d_v) and log Σᵢ exp(−‖q − kᵢ‖²/2) (r, 1) of queries (d, r), in float64.

    The third result is a factor (r, 1): α = exp(score − log-sum-exp) · factor. Far from all keys,
    the log-sum-exp is so large that its rounding error matters for α. The factor corrects α.
    """
    selection = select_boxes(query, boxes, share)
    sums = np.zeros((query.shape[1], boxes.values.shape[-1]))
    for box, rows, weight in iterate_weights(
        query, boxes, selection.is_read, selection.shift, share
    ):
        sums[rows] += weight @ boxes.values[box]
    total, shift = sums[:, -1:], selection.shift[:, None]
    lse = np.log(total) + shift
    return sums[:, :-1] / total, lse, np.exp(lse - shift) / total


class BackwardInputs(NamedTuple):
    """The inputs of the backward pass for queries (d, r).

    `out`, `lse` and `weight_factor` are the results of `pool_queries`. `output_gradient` (r, d_v)
    and `lse_gradient` (r, 1) are the gradients of `out` and `lse`.
    """

    out: Numbers
    lse: Numbers
    weight_factor: Numbers
    output_gradient: Numbers
    lse_gradient: Numbers


def query_gradients(
    query: Numbers,
    boxes: Boxes,
    share: float,
    inputs: BackwardInputs,
    totals: tuple[Numbers, Numbers],
) -> Numbers:
    """Return the gradient (r, d) of queries (d, r), over the pairs that `pool_queries` read.

    The function also adds the gradients of keys (boxes, c, d) and values (boxes, c, d_v) to
    `totals`.
    """
    selection = select_boxes(query, boxes, share)
    dtype = boxes.values.dtype
    along = (inputs.output_gradient * inputs.weight_factor).astype(dtype)
    level = np.sum(inputs.out * inputs.output_gradient, axis=1) - inputs.lse_gradient[:, 0]
    level = (level * inputs.weight_factor[:, 0]).astype(dtype)
    gained = np.zeros((query.shape[1], len(query)))
    d_key, d_value = totals
    for box, rows, alpha in iterate_weights(
        query, boxes, selection.is_read, inputs.lse[:, 0], share
    ):
        d_value[box] += alpha.T @ along[rows]
        slope = along[rows] @ boxes.values[box, :, :-1].T
        slope -= level[rows, None]
        slope *= alpha
        if boxes.counts[box] < len(boxes.values[box]):
            slope *= boxes.values[box, :, -1]
        key = boxes.columns[box, : len(query)].T
        offset = (query[:, rows] - boxes.centre[:, box, None]).T.astype(dtype)
        gained[rows] += slope @ key - slope.sum(axis=1)[:, None] * offset
        d_key[box] += slope.T @ offset - slope.sum(axis=0)[:, None] * key
    return gained
