"""Σᵢ exp(−‖q − kᵢ‖²/2) vᵢ over the keys that can count, in few dimensions, on NumPy.

Keys lie in boxes of c each. No key of a box is nearer than its wall, so its mass is at most
c exp(−wall²/2); the exponential is convex, so it is at least c exp(−mean ‖q − k‖²/2). Let L be the
sum of the latter over all boxes and U that of the former over the boxes left unread: a row loses at
most U / L of its weight. Boxes are left unread, farthest first, while that is ≤ ¾ share. The last
quarter is for the rounding of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from qkv.util.caches import memoize

Numbers = np.ndarray[Any, Any]

KEYS_PER_BOX = 512
"""Keys per box, about: the fewer, the less is read in vain, but each box costs calls of NumPy."""

MAX_SCORES_PER_BLOCK = 2**18
"""Scores held at once: they stay in the cache between the product, the exponential and the sum."""

MAX_NATIVE_TERM = 64.0
"""Terms of the expanded square up to this keep the digits that the call's dtype has."""

MAX_FLOAT64_TERM = 1e8
"""And up to this in float64, on the way to float32. Beyond, differences are squared instead."""

UNREAD_SHARE_FRACTION = 0.75
"""The part of `share` that goes to boxes left unread; the rest is for the rounding of scores."""

MAX_LOG_MASS_GAP = {"float32": 50.0, "float64": 600.0}
"""How far below its bound the mass of a row may lie before exponentials vanish."""

MIN_EXPONENT = {"float32": -87.0, "float64": -708.0}
"""The exponential of less is no normal number, and those are slow."""


class Boxes(NamedTuple):
    """Keys in boxes of c each: what every box is, and what is in it.

    centre, half, mean (d, boxes); variance about the mean, radius about the centre, counts (boxes);
    points (d, boxes, c) as they are; columns (boxes, d + 2, c), the points about the centre,
    −‖·‖²/2 of that, and a one; values (boxes, c, d_v + 1), the last a one. The last box is filled
    up with copies of a key whose values and whose last one are 0; `order` (boxes · c) has the
    position of each, and m or more for these.
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
    """For queries (d, r): the boxes they read (r, boxes), and a bound on what they lose (r).

    `shift` (r) is near the top of a row's scores, and not below it but for rounding.
    """

    keep: Numbers
    lost_share_bound: Numbers
    shift: Numbers


def pack_points(points: Numbers, size: int) -> tuple[Numbers, int]:
    """An order of the points (d, m) in boxes of c ≈ size each, and c; m and above end the last.

    Each axis in turn is cut into parts of equal number, twice as many where the points spread
    twice as far, so that the boxes come out nearly square.
    """
    d, m = points.shape
    cuts = np.zeros(d, int)
    spread = np.maximum(points[:, :: max(m // 4096, 1)].std(axis=1), 1e-300)
    for _ in range(round(math.log2(max(m / size, 1)))):
        cuts[np.argmax(np.ldexp(spread, -cuts))] += 1
    boxes = 2 ** int(cuts.sum())
    c = -(-m // (boxes * 16)) * 16 if boxes > 1 else m  # rows that start where vectors do
    order = np.arange(boxes * c)
    parts = 1
    for axis in np.argsort(-cuts, kind="stable"):
        if not cuts[axis]:
            break
        low, high = points[axis].min(), points[axis].max()
        # One integer to sort: the coordinate above, the position below.
        code = np.full(boxes * c, 2**31 - 1, np.int64)
        code[:m] = (points[axis] - low) * ((2**31 - 1) / (high - low or 1.0))
        code <<= 32
        both = (code.take(order) | order).reshape(parts, -1)
        both.sort(axis=1)
        order = both.reshape(-1) & 0xFFFFFFFF
        parts <<= int(cuts[axis])
    return order[: -(-m // c) * c], c  # what fills up stands at the end


def build_boxes(key: Numbers, value: Numbers, size: int | None = None) -> Boxes:
    """The keys (d, m), float64, and their values (m, d_v), in boxes."""
    d, m = key.shape
    order, c = pack_points(key, size or KEYS_PER_BOX)
    filled = np.where(order < m, order, order[m - 1])  # copies of the last key of the last box
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
    variance += 1e-14 * radius**2  # rounding must not make a bound of it too good
    return Boxes(order, counts, centre, half, mean, variance, radius, points, columns, values)


def select_boxes(query: Numbers, boxes: Boxes, share: float) -> BoxSelection:
    """Which boxes each query (d, r) must read to lose at most `share` of its weight."""
    near, middle = box_distances(query, boxes, np.float32)
    if not middle.min(axis=1).max(initial=0) < 1e3:
        near, middle = box_distances(
            query, boxes, np.float64
        )  # the squares' own rounding would count
    least = middle.min(axis=1)  # and the nearest key is no farther
    mass = np.exp((middle - least[:, None]) * -0.5) @ boxes.counts.astype(near.dtype)
    bottom = np.log(mass) - 0.5 * least
    shift = (-0.5 * near.min(axis=1)).astype(np.float64)
    far = shift - bottom > MAX_LOG_MASS_GAP[str(boxes.values.dtype)]
    if far.any():
        # The boxes say too little about the top: its row looks for its nearest key.
        top = nearest_scores(query[:, far], boxes, near[far] <= least[far, None], share)
        shift[far] = top
        bottom[far] = np.maximum(bottom[far], top)
    cut, lost = find_cutoff(near, boxes.points.shape[-1], bottom, UNREAD_SHARE_FRACTION * share)
    return BoxSelection(
        near <= cut[:, None], lost * 1.001, shift
    )  # the bounds themselves were rounded


def box_distances(query: Numbers, boxes: Boxes, dtype: Any) -> tuple[Numbers, Numbers]:
    """‖q − k‖² for each box (r, boxes): no key has less, and the mean of its keys has no more.

    Both allow for the rounding of coordinates.
    """
    largest = max(float(np.abs(x).max(initial=0)) for x in (query, boxes.centre))
    slack = np.asarray(4 * float(np.finfo(dtype).eps) * largest, dtype)
    query, centre, half, mean = (
        x.astype(dtype) for x in (query, boxes.centre, boxes.half, boxes.mean)
    )
    half += slack
    near = np.zeros((query.shape[1], centre.shape[1]), dtype)
    middle = near + boxes.variance.astype(dtype)
    for axis, q in enumerate(query):
        apart = q[:, None] - centre[axis]
        np.abs(apart, out=apart)
        apart -= half[axis]
        np.maximum(apart, 0, out=apart)
        apart *= apart
        near += apart
        np.subtract(q[:, None], mean[axis], out=apart)
        np.abs(apart, out=apart)
        apart += slack
        apart *= apart
        middle += apart
    return near, middle


def find_cutoff(near: Numbers, c: int, bottom: Numbers, share: float) -> tuple[Numbers, Numbers]:
    """The ‖q − k‖² beyond which a row reads no box, and U / L, where log L is `bottom`."""
    away = np.sort(near, axis=1)
    mass = away * -0.5 - (bottom - math.log(c))[:, None]
    # Above 1 a box is not dropped, and a bound must not vanish.
    np.clip(mass, MIN_EXPONENT[str(mass.dtype)], 0, out=mass)
    unread = np.exp(mass, out=mass)[:, ::-1].cumsum(axis=1)
    dropped = np.sum(unread <= share, axis=1)
    rows = np.arange(len(near))
    cut = away[rows, np.maximum(away.shape[1] - 1 - dropped, 0)]
    # A box as near as the last one kept is kept with it.
    return cut, np.where(dropped > 0, unread[rows, dropped - 1], 0)


def nearest_scores(query: Numbers, boxes: Boxes, keep: Numbers, share: float) -> Numbers:
    """The score of each query's nearest key among the boxes (r, boxes) that may hold it."""
    top = np.full(query.shape[1], -np.inf)
    none = np.zeros_like(top)
    for _, rows, s, _ in iterate_scores(query, boxes, keep, none, share, np.dtype(np.float64)):
        top[rows] = np.maximum(top[rows], s.max(axis=1))
    return top


def iterate_visits(keep: Numbers, boxes: Boxes) -> Iterator[tuple[int, Numbers]]:
    """Each box with the rows that read it, as many at a time as make a block."""
    step = max(MAX_SCORES_PER_BLOCK // boxes.points.shape[-1], 1)
    by_box = np.ascontiguousarray(keep.T)
    for box in np.flatnonzero(by_box.any(axis=1)):
        rows = np.flatnonzero(by_box[box])
        for at in range(0, len(rows), step):
            yield int(box), rows[at : at + step]


def scores_by_differences(query: Numbers, points: Numbers) -> Numbers:
    """−‖q − k‖²/2 of (d, r) and (d, c), in float64."""
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
    keep: Numbers,
    shift: Numbers,
    share: float,
    dtype: Any,
    by: float = 1.0,
) -> Iterator[tuple[int, Numbers, Numbers, float]]:
    """(−‖q − k‖²/2 − shift) · by for each box and the rows that read it, and a bound below them.

    The next overwrites them.
    """
    own, (d, _, c) = boxes.values.dtype, boxes.points.shape
    step = max(MAX_SCORES_PER_BLOCK // c, 1)
    side, room = np.ones((step, d + 2)), np.empty((step, c), dtype)
    short = max(MAX_NATIVE_TERM, share / float(np.finfo(own).eps) / 32)
    for box, rows in iterate_visits(keep, boxes):
        out, left = room[: len(rows)], side[: len(rows)]
        offset = query[:, rows] - boxes.centre[:, box, None]
        half = np.einsum("dr,dr->r", offset, offset) * 0.5
        away = math.sqrt(2 * half.max())
        term = boxes.radius[box] * away
        # The square expanded about the box's centre: only qᵀk is ever rounded when it is large.
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


def estimate_pair_cost(query: Numbers, boxes: Boxes, keep: Numbers, share: float) -> float:
    """What a pair takes on average by the way `iterate_scores` takes it, in units of the
    fastest."""
    own = boxes.values.dtype
    short = max(MAX_NATIVE_TERM, share / float(np.finfo(own).eps) / 32)
    apart = np.sqrt(np.sum((query[:, :, None] - boxes.centre[:, None]) ** 2, axis=0))
    term = (apart * boxes.radius)[keep]
    slow = 2.0 if own == np.float32 else 6.0
    return 1 + (slow - 1) * float(np.mean(term > short))


def iterate_weights(
    query: Numbers, boxes: Boxes, keep: Numbers, shift: Numbers, share: float
) -> Iterator[tuple[int, Numbers, Numbers]]:
    """exp(−‖q − k‖²/2 − shift) for each box and the rows that read it; the next overwrites it."""
    power, by = fast_exponential()
    dtype = boxes.values.dtype
    floor = MIN_EXPONENT[str(dtype)] * by
    for box, rows, s, least in iterate_scores(query, boxes, keep, shift, share, dtype, by):
        if least < floor:
            np.maximum(s, floor, out=s)
        yield box, rows, power(s, out=s)


@memoize("engines.fast_exponential")
def fast_exponential() -> tuple[Any, float]:
    """f and c with eˣ = f(c x): 2ˣ where NumPy has it in vectors, as then it takes half as long."""
    try:
        about = np.lib.introspect.opt_func_info(func_name="^exp2$")["exp2"]
        in_vectors = all("baseline" not in about[kind]["current"] for kind in ("ff", "dd"))
    except (AttributeError, KeyError, TypeError):
        in_vectors = False
    return (np.exp2, math.log2(math.e)) if in_vectors else (np.exp, 1.0)


def float64_columns(boxes: Boxes, box: int) -> Numbers:
    """The box's columns in float64."""
    offset = boxes.points[:, box] - boxes.centre[:, box, None]
    below = np.einsum("dc,dc->c", offset, offset) * -0.5
    return np.stack([*offset, below, np.ones_like(below)])


def pool_queries(query: Numbers, boxes: Boxes, share: float) -> tuple[Numbers, Numbers, Numbers]:
    """Σᵢ αᵢ vᵢ (r, d_v) and log Σᵢ exp(−‖q − kᵢ‖²/2) (r, 1) of queries (d, r), both float64.

    And what exp(score − log-sum-exp) times is α: far from all keys the log-sum-exp is so large that
    its last digit is one in α's middle.
    """
    found = select_boxes(query, boxes, share)
    sums = np.zeros((query.shape[1], boxes.values.shape[-1]))
    for box, rows, weight in iterate_weights(query, boxes, found.keep, found.shift, share):
        sums[rows] += weight @ boxes.values[box]
    total, shift = sums[:, -1:], found.shift[:, None]
    lse = np.log(total) + shift
    return sums[:, :-1] / total, lse, np.exp(lse - shift) / total


class BackwardInputs(NamedTuple):
    """What the way back needs of queries (d, r): the results of `pool_queries`, and the gradients
    of the first two, `output_gradient` (r, d_v) and `lse_gradient` (r, 1)."""

    out: Numbers
    lse: Numbers
    weight_factor: Numbers
    output_gradient: Numbers
    lse_gradient: Numbers


def query_gradients(
    query: Numbers,
    boxes: Boxes,
    share: float,
    kept: BackwardInputs,
    totals: tuple[Numbers, Numbers],
) -> Numbers:
    """The gradient of queries (d, r), (r, d), over the pairs that `pool_queries` read.

    Those of the keys (boxes, c, d) and values (boxes, c, d_v) are added to `totals`.
    """
    found = select_boxes(query, boxes, share)
    dtype = boxes.values.dtype
    along = (kept.output_gradient * kept.weight_factor).astype(dtype)
    level = np.sum(kept.out * kept.output_gradient, axis=1) - kept.lse_gradient[:, 0]
    level = (level * kept.weight_factor[:, 0]).astype(dtype)
    gained = np.zeros((query.shape[1], len(query)))
    d_key, d_value = totals
    for box, rows, alpha in iterate_weights(query, boxes, found.keep, kept.lse[:, 0], share):
        d_value[box] += alpha.T @ along[rows]
        slope = along[rows] @ boxes.values[box, :, :-1].T
        slope -= level[rows, None]
        slope *= alpha
        if boxes.counts[box] < len(boxes.values[box]):
            slope *= boxes.values[box, :, -1]
        key = boxes.columns[box, : len(query)].T
        near = (query[:, rows] - boxes.centre[:, box, None]).T.astype(dtype)
        gained[rows] += slope @ key - slope.sum(axis=1)[:, None] * near
        d_key[box] += slope.T @ near - slope.sum(axis=0)[:, None] * key
    return gained
