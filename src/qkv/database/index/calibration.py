"""What an index finds, measured on held-out queries: its recall, and the weight that it misses.

The queries are vectors of keys, each without its own row. The weight of the rows that a search does
not find is estimated from the means of the lists. The ratio of the true to the estimated weight is
measured for every query. Its 5 % and 95 % quantiles, taken as in split-conformal prediction, give
an interval that holds for 90 % of new queries like the keys. If the interval begins at 0, fewer
queries are below it, so more may be above it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from qkv.answer_backend import MissingWeight
from qkv.database.encoders.base import Encoder
from qkv.database.index.metric import METRICS, IndexMetric, MetricName
from qkv.database.index.row_index import RowIndex, open_row_index, read_part_vectors
from qkv.database.table.view import TableView
from qkv.util.deadline import check_deadline

INTERVAL_LEVEL = 0.9
"""The share of queries for which the interval of the missing weight holds."""

QUERIES, QUERIES_OF_MANY_ROWS, MANY_ROWS = 1000, 400, 2**19
"""The number of held-out queries, and that for a table with many rows."""

MAX_MEASURED_SCORES = 2**31
"""The scores of all held-out queries with all rows. With more rows, there are fewer queries."""

MIN_QUERIES, MAX_RANGES = 100, 5
"""The least queries for an interval. With more, each range of estimates has its own interval."""

MAX_LOG_RATIO = 50.0

BEST_ROWS = 10
"""The recall is the share of this many best rows that are found."""

RERANKED_ROWS = 32
"""The recall is measured with this many rows, by their codes the nearest, that are read in full."""

RECALL_MARGIN = 1.645
"""The one-sided 95 % quantile of a normal number."""

MIN_LISTS, MAX_ROW_SHARE = 2, 0.25
"""The first effort reads this many lists. The last one finds at most this share of the rows."""

MAX_FOUND_ROWS = 2**17
"""No search finds more rows: FAISS sorts them, and a scan would soon be faster."""

FOUND_SHARE = 0.25
"""A search returns this share of the rows in the lists that it reads."""

UNLIKE_SHARE = 0.01
"""This share of the held-out queries counts as unlike the keys: their best row is too far away."""

ENOUGH_RECALL, ENOUGH_MISSING = 0.999, 1e-4
"""No larger search is measured after one with this recall and this missing weight."""

SMALLEST_WEIGHT = 1e-6
"""Smaller missing weights count as equal to this one."""

MIN_LOW_END = 1e-5
"""An interval that would begin at a smaller weight begins at 0."""

CONDITION_SHARES = 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001
"""The shares of the rows that pass the random conditions under which the index is measured."""

MIN_PASSING_ROWS = 100
"""A condition that fewer rows pass is not measured."""

MAX_CHANGED_SHARE = 0.1
"""The interval becomes invalid if a larger share of the rows has changed."""

MAX_SLOPE_CHANGE = 0.02
"""The interval holds for scores whose slope differs by at most this share."""

MAX_UNIT_ERROR = 3e-7
"""A vector has the length one if it differs by at most this: by the rounding of float32."""

MAX_SCORES_PER_BLOCK = 2**27
COLUMNS_PER_RUN = 128


@dataclass(frozen=True)
class Effort:
    """What a search with `lists` lists and `rows` rows achieved on the held-out queries.

    `recall` is the mean share of the ten best rows that were found. `missing` and `missing_90` are
    the median and the 90 % quantile of the missing weight. `ratios` has one line for each range of
    the estimated missing weight: its upper end, then the 5 % quantile, the median and the 95 %
    quantile of log((true + ε) / (estimated + ε)), where ε is the smallest weight.
    """

    lists: int
    rows: int
    recall: float
    missing: float
    missing_90: float
    ratios: tuple[tuple[float, float, float, float], ...]

    def correct_estimate(self, estimate: float, has_interval: bool) -> MissingWeight:
        """Return the missing weight for an estimate, corrected by the measured ratios.

        If these do not hold for the query, the estimate stays, and its error is not known.

        >>> Effort(1, 1, 1.0, 0.1, 0.2, ((1.0, -0.5, 0.0, 0.5),)).correct_estimate(0.1, False)
        MissingWeight(estimate=0.1, low=0.0, high=1.0)
        """
        if not has_interval:
            return MissingWeight(estimate, 0.0, 1.0)
        shifted = estimate + SMALLEST_WEIGHT
        ratios = next((x for x in self.ratios if estimate <= x[0]), self.ratios[-1])
        low, middle, high = (
            min(max(shifted * math.exp(x) - SMALLEST_WEIGHT, 0.0), 1.0) for x in ratios[1:]
        )
        return MissingWeight(middle, low if low >= MIN_LOW_END else 0.0, high)


@dataclass(frozen=True)
class IndexReport:
    """The result of `Database.index`: what the index achieves on held-out queries.

    `efforts` are searches of increasing size. `recall` is the requested one. All but 1 % of the
    queries have a best row of at least the similarity `min_similarity`.

    `rows_by_share` has pairs of a share and a number of rows. If a random share of the rows passes
    a condition, the ten best of them are found with this recall in the nearest lists that have so
    many rows in total. The other fields say for which score and rows the numbers hold.
    """

    metric: MetricName
    slope: float
    recall: float
    queries: int
    min_similarity: float
    rows: int
    indexed: int
    last: int
    encoded: int
    efforts: tuple[Effort, ...]
    rows_by_share: tuple[tuple[float, float], ...]

    def __repr__(self) -> str:
        text = f"{self.indexed:,} of {self.rows:,} rows are in the index"
        if not self.efforts and self.indexed:
            return f"{text}; it could not be measured, so all rows are scanned"
        if not self.efforts:
            return f"{text}; the others are scanned"
        effort = self.find_ranking_effort() or self.efforts[-1]
        return (
            f"{text}: {effort.recall:.3f} of the ten best rows are found in {effort.lists:,} lists "
            f"({self.queries:,} held-out queries)"
        )

    def find_ranking_effort(self) -> Effort | None:
        """Return the smallest effort with the requested recall, or None.

        The recall of few queries is uncertain, so it must be above the requested one by a margin:
        the lower end of its confidence interval, as if a query found all of its best rows or none.
        """
        least = find_least_recall(self.recall, self.queries)
        return next((effort for effort in self.efforts if effort.recall >= least), None)

    def find_needed_rows(self, share: float) -> float:
        """Return the rows of the nearest lists to read if this share of them passes a condition.

        Between the measured shares, the logarithms are interpolated. Below the smallest one, the
        number of rows that pass stays the same.
        """
        shares, rows = zip(*self.rows_by_share[::-1], strict=True)
        share = max(share, 1e-12)
        log_rows = float(np.interp(math.log(share), np.log(shares), np.log(rows)))
        return math.exp(log_rows) * max(float(shares[0]) / share, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for the settings of a store."""
        return asdict(self)

    @classmethod
    def read_from_view(cls, view: TableView) -> IndexReport | None:
        """Return the valid report of a store, cached with the view, or None."""
        # Another thread may clear the cache.
        cached: tuple[IndexReport | None] | None = view.index_cache.get("report")
        if cached is None:
            view.index_cache["report"] = cached = (cls.parse_settings(view.settings),)
        return cached[0]

    @classmethod
    def parse_settings(cls, settings: dict[str, Any]) -> IndexReport | None:
        """Return the report in the settings of a store, or None if there is no valid one."""
        stored = settings.get("index")
        if not isinstance(stored, dict) or {x.name for x in fields(cls)} != stored.keys():
            return None
        if stored["metric"] not in METRICS or not isinstance(stored["efforts"], list):
            return None
        others = "metric", "efforts", "rows_by_share"
        numbers = [x for name, x in stored.items() if name not in others]
        efforts = list(map(_parse_effort, stored["efforts"]))
        pairs = _parse_pairs(stored["rows_by_share"])
        if not all(map(_is_number, numbers)) or None in efforts or pairs is None:
            return None
        return cls(**stored | {"efforts": tuple(efforts), "rows_by_share": pairs})

    def as_metric(self) -> IndexMetric:
        return IndexMetric(self.metric, self.slope)

    def is_slope_measured(self, slope: float) -> bool:
        """Return whether the missing weights were measured for about this slope."""
        return abs(slope - self.slope) <= MAX_SLOPE_CHANGE * self.slope

    def has_interval(self, last_id: int, row_count: int, slope: float) -> bool:
        """Return whether the measured interval holds for the rows of a version and this slope."""
        added = last_id - self.last
        changed = added + (self.rows + added - row_count)
        return (
            self.queries >= MIN_QUERIES
            and self.is_slope_measured(slope)
            and changed <= MAX_CHANGED_SHARE * self.rows
        )


def measure_index(
    view: TableView,
    metric: IndexMetric,
    recall: float,
    queries: np.ndarray | None = None,
    report_queries: Callable[[int], None] = lambda count: None,
) -> IndexReport:
    """Measure the index of a view on held-out queries.

    `queries` (n, d) replace the vectors of keys.
    """
    index = open_row_index(view, metric.name)
    rows, efforts, tops = index.total, list[Effort](), list[float]()
    shares = [x for x in CONDITION_SHARES if x * rows >= MIN_PASSING_ROWS]
    needed: list[list[np.ndarray]] = [[] for _ in shares]
    rng = np.random.default_rng(2)
    held_out: np.ndarray | None = None
    if index.parts and queries is None:
        count = min(QUERIES if rows < MANY_ROWS else QUERIES_OF_MANY_ROWS, rows // 2)
        count = min(count, max(MAX_MEASURED_SCORES // rows, MIN_QUERIES))
        held_out = np.sort(np.random.default_rng(1).choice(rows, count, replace=False))
        queries = _encode_keys_as_queries(view, held_out)
    if index.parts and queries is not None:
        prepared, reader = metric.prepare_vectors(queries), _KeyReader(view, metric, rows)
        steps = list(_choose_search_sizes(index))
        parts: list[list[np.ndarray]] = [[] for _ in steps]
        size = max(MAX_SCORES_PER_BLOCK // max(rows, 1), 16)
        for start in range(0, len(prepared), size):
            check_deadline()
            block = prepared[start : start + size]
            own = None if held_out is None else held_out[start : start + size]
            scores = _compute_scores(reader, block, own)
            for x, best in zip(needed, _find_best_of_shares(scores, shares, rng), strict=True):
                x.append(index.count_rows_to_read(block, metric, best))
            exact = _compute_exact_weights(scores)
            tops += (exact.top / metric.slope).tolist()
            for results, step in zip(parts, steps, strict=False):
                results.append(_measure_queries(index, block, own, exact, metric, *step))
                if not start and _finds_everything(results[0]):
                    steps = steps[: steps.index(step) + 1]
                    break
            report_queries(len(block))
        # Queries unlike the keys get no interval, so they must not widen that of the others.
        is_like_keys = np.array(tops) >= np.quantile(tops, UNLIKE_SHARE)
        for step, results in zip(steps, parts, strict=False):
            efforts.append(_summarize_effort(*step, np.concatenate(results), is_like_keys))
    return IndexReport(
        metric=metric.name,
        slope=metric.slope,
        recall=recall,
        queries=0 if queries is None else len(queries),
        min_similarity=float(np.quantile(tops, UNLIKE_SHARE)) if tops else 0.0,
        rows=rows,
        indexed=rows - len(index.unindexed),
        last=view.snapshot.last_id,
        encoded=view.setting_number("encoded"),
        efforts=tuple(efforts),
        rows_by_share=tuple(
            (share, _find_sufficient_rows(np.concatenate(x), recall))
            for share, x in zip(shares, needed, strict=True)
            if x
        ),
    )


def find_least_recall(recall: float, queries: int) -> float:
    """Return the least measured recall of so many queries that is surely at least `recall`.

    It is above `recall` by the margin of a confidence interval, as if a query found all of its best
    rows or none.

    >>> round(find_least_recall(0.95, 400), 4), round(find_least_recall(0.95, 10**9), 4)
    (0.9651, 0.95)
    """
    # The solution x of x − z √(x (1 − x) / n) = recall: the upper end of Wilson's interval.
    square = RECALL_MARGIN**2 / max(queries, 1)
    root = math.sqrt(square * (recall * (1 - recall) + square / 4))
    return (recall + square / 2 + root) / (1 + square)


def _find_best_of_shares(
    scores: np.ndarray, shares: list[float], rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield for each share the best rows (n, 10) among a random share of all rows.

    `scores` (n, m) are those of all rows.
    """
    random = rng.random(scores.shape[1], np.float32)
    for share in shares:
        if share == 1:
            yield find_best_columns(scores, BEST_ROWS)
            continue
        passing = np.flatnonzero(random < share)
        yield passing[find_best_columns(scores[:, passing], BEST_ROWS)]


def _find_sufficient_rows(needed: np.ndarray, recall: float) -> float:
    """Return how many rows to read, where `needed` (n, 10) must be read for each best row."""
    ascending = np.sort(needed, axis=None)
    least = find_least_recall(recall, len(needed))
    return max(float(ascending[math.ceil(least * len(ascending)) - 1]), 1.0)


def _encode_keys_as_queries(view: TableView, positions: np.ndarray) -> np.ndarray:
    """Return the vectors (n, d) of the keys at these positions, encoded as queries.

    Some encoders give a query another vector than the equal key, such as numbers among the columns
    of a key, where the inner product contains a squared distance.
    """
    if type(view.encoder).encode_query is Encoder.encode_query:
        return view.read_key_vectors(view.ids[positions])
    names = view.schema.key
    cells = [[row[name] for name in names] for row in view.read_rows_at(positions)]
    keys: Any = [x[0] if len(names) == 1 else tuple(x) for x in cells]
    if view.schema.key_kind == "vector":
        keys = np.stack(keys)
    return np.asarray(view.encode_queries(keys).code)


def _choose_search_sizes(index: RowIndex) -> list[tuple[int, int]]:
    """Return the numbers of lists and rows of searches: 2, 3, 4, 6, 8, 12, … lists."""
    sizes, lists = [], MIN_LISTS
    while lists < index.list_count:
        rows = max(int(lists * index.rows_per_list * FOUND_SHARE), RERANKED_ROWS)
        if rows > min(MAX_ROW_SHARE * index.total, MAX_FOUND_ROWS):
            break
        sizes.append((lists, rows))
        is_power_of_two = not lists & (lists - 1)
        lists = lists * 3 // 2 if is_power_of_two else lists * 4 // 3
    return sizes


class _KeyReader:
    """Reads the vectors of all keys for one block of queries after another.

    For "cosine", the lengths of the keys are computed once, and the similarities are divided by
    them. This takes a fraction of the time that it takes to normalize the keys for each block.
    """

    def __init__(self, view: TableView, metric: IndexMetric, rows: int) -> None:
        self.view, self.metric, self.rows = view, metric, rows
        self.factors: list[np.ndarray] = []

    def compute_scores(self, queries: np.ndarray) -> np.ndarray:
        """Return the scores of all rows for prepared queries, (n, m)."""
        metric, scores = self.metric, np.empty((len(queries), self.rows), np.float32)
        # Relative to the centre, the expanded square loses no precision far from the origin.
        centre = queries.mean(axis=0) if metric.is_distance else np.float32(0)
        start, slope, queries = 0, np.float32(metric.slope), queries - centre
        # A pass over all scores is saved, but the square of a length may overflow.
        factors = queries if metric.is_distance else slope * queries
        raw = metric._replace(name="dot") if metric.name == "cosine" else metric
        for i, part in enumerate(self.view.snapshot.list_parts()):
            part.segment.check_not_truncated()
            keys = read_part_vectors(part, raw, 0, len(part.segment.ids), part.segment.live)
            keys = keys - centre if metric.is_distance else keys
            block = scores[:, start : start + len(keys)]
            np.matmul(factors, keys.T, out=block)
            if i == len(self.factors):
                self.factors.append(self._compute_factor(keys))
            if len(self.factors[i]):
                block *= self.factors[i]
            elif metric.is_distance:
                block -= np.square(queries).sum(axis=1)[:, None] / 2
                block -= np.square(keys).sum(axis=1) / 2
                block *= slope
            start += len(keys)
        return scores

    def _compute_factor(self, keys: np.ndarray) -> np.ndarray:
        """Return 1 / ‖k‖, and 0 for zero vectors; nothing if the metric does not need it."""
        if self.metric.name != "cosine":
            return np.zeros(0, np.float32)
        length = np.sqrt(np.einsum("ij,ij->i", keys, keys, dtype=float))
        if np.abs(length - 1).max(initial=0) <= MAX_UNIT_ERROR:
            return np.zeros(0, np.float32)  # the keys have the length one already
        factor = np.divide(1, length, out=np.zeros_like(length), where=length > 0)
        return np.asarray(np.minimum(factor, np.finfo(np.float32).max).astype(np.float32))


class _ExactWeights(NamedTuple):
    """The weights of all rows for n queries.

    `weights` (n, m) are exp(score − `top`), where `top` (n,) is the best score, and `total` (n,)
    their sums. `best` (n, 10) are the best rows.
    """

    weights: np.ndarray
    top: np.ndarray
    total: np.ndarray
    best: np.ndarray


def _compute_scores(reader: _KeyReader, queries: np.ndarray, own: np.ndarray | None) -> np.ndarray:
    """Return the exact scores (n, m) of all rows; those of the rows `own` (n,) are −∞."""
    scores = reader.compute_scores(queries)
    if own is not None:
        scores[np.arange(len(own)), own] = -np.inf
    return scores


def _compute_exact_weights(scores: np.ndarray) -> _ExactWeights:
    """Return the weights of all rows. They overwrite their scores (n, m)."""
    best = find_best_columns(scores, BEST_ROWS)
    top = np.take_along_axis(scores, best, axis=1).max(axis=1)
    scores -= top[:, None]
    weights = np.exp(scores, out=scores)
    total = weights.sum(axis=1, dtype=float)
    return _ExactWeights(weights, top.astype(float), total, best)


def find_best_columns(x: np.ndarray, count: int) -> np.ndarray:
    """Return the columns of the `count` largest numbers in each row of x, (n, count), unordered.

    >>> find_best_columns(np.array([[3.0, 1.0, 2.0]]), 2).tolist()
    [[2, 0]]
    """
    rows = x.shape[1]
    runs = rows // COLUMNS_PER_RUN
    if runs <= count:
        last = max(rows - count, 0)
        return np.argpartition(x, last, axis=1)[:, last:]
    # The largest numbers are in runs with the largest maxima, and in the rest behind all runs.
    most = x[:, : runs * COLUMNS_PER_RUN].reshape(len(x), runs, COLUMNS_PER_RUN).max(axis=2)
    run = np.argpartition(most, runs - count, axis=1)[:, runs - count :]
    at = (run[:, :, None] * COLUMNS_PER_RUN + np.arange(COLUMNS_PER_RUN)).reshape(len(x), -1)
    rest = np.arange(runs * COLUMNS_PER_RUN, rows)
    at = np.concatenate([at, np.broadcast_to(rest, (len(x), len(rest)))], axis=1)
    order = np.argpartition(np.take_along_axis(x, at, axis=1), at.shape[1] - count, axis=1)
    return np.take_along_axis(at, order[:, at.shape[1] - count :], axis=1)


def _measure_queries(
    index: RowIndex,
    queries: np.ndarray,
    own: np.ndarray | None,
    exact: _ExactWeights,
    metric: IndexMetric,
    lists: int,
    rows: int,
) -> np.ndarray:
    """Return (recall, missing weight, estimated missing weight) of each query, (n, 3)."""
    found = index.search(queries, lists, rows, metric)
    out = np.empty((len(queries), 3))
    for i, positions in enumerate(found.list_positions()):
        if own is not None:
            positions = positions[positions != own[i]]
        reranked = np.concatenate([positions[:RERANKED_ROWS], index.unindexed])
        read = np.concatenate([positions, index.unindexed])
        sum_found = float(exact.weights[i, read].sum(dtype=float))
        with np.errstate(divide="ignore"):
            log_found = float(np.log(sum_found) + exact.top[i])
        out[i] = (
            (exact.best[i][:, None] == reranked).any(axis=1).mean(),
            min(max(1 - sum_found / exact.total[i], 0.0), 1.0),
            share_of_rest(float(found.log_rest[i]), log_found),
        )
    return out


def share_of_rest(log_rest: float, log_found: float) -> float:
    """Return the share of the weight that the rest has.

    >>> share_of_rest(0.0, 0.0)
    0.5
    """
    share = float(np.exp(log_rest - np.logaddexp(log_rest, log_found)))
    return 1.0 if np.isnan(share) else share


def _finds_everything(results: np.ndarray) -> bool:
    """Return whether a larger search would hardly find more."""
    recall, missing, _ = results.T
    return bool(recall.mean() > ENOUGH_RECALL and np.quantile(missing, 0.9) < ENOUGH_MISSING)


def _summarize_effort(
    lists: int, rows: int, results: np.ndarray, is_like_keys: np.ndarray
) -> Effort:
    """Return an effort from the results of all queries; its ratios are from those like the keys."""
    recall, missing, _ = results.T
    _, true, estimate = results[is_like_keys].T
    order = np.argsort(estimate, kind="stable")
    ranges = max(min(len(order) // MIN_QUERIES, MAX_RANGES), 1)
    parts = np.array_split(order, ranges)
    return Effort(
        lists=lists,
        rows=rows,
        recall=float(recall.mean()),
        missing=float(np.median(missing)),
        missing_90=float(np.quantile(missing, 0.9)),
        ratios=tuple(
            (float(estimate[x].max()), *_find_quantiles(true[x], estimate[x])) for x in parts
        ),
    )


def _find_quantiles(true: np.ndarray, estimate: np.ndarray) -> tuple[float, float, float]:
    """Return the lower end, the median and the upper end of an interval for a new ratio."""
    shifted = estimate + SMALLEST_WEIGHT
    ratio = np.sort(np.log(true + SMALLEST_WEIGHT) - np.log(shifted))
    error = 1 - INTERVAL_LEVEL
    low = max(interpolate_quantile(ratio, error / 2), -MAX_LOG_RATIO)
    # No weight is below an interval that begins at 0.
    end = shifted * math.exp(low) - SMALLEST_WEIGHT
    below = int(((end >= MIN_LOW_END) & (true < end)).sum())
    share_below = min((below + 1) / (len(ratio) + 1), error / 2) if below else 0.0
    high = -interpolate_quantile(-ratio[::-1], error - share_below)
    return low, float(np.median(ratio)), min(high, MAX_LOG_RATIO)


def interpolate_quantile(x: np.ndarray, share: float) -> float:
    """Return a bound such that a new number is below it with about this probability.

    The k-th smallest number of ascending x (n,) has the probability k / (n + 1). Between two of
    them, the bound is interpolated. Below the first one, it is −∞.

    >>> interpolate_quantile(np.arange(1.0, 20.0), 0.125)
    2.5
    """
    place = share * (len(x) + 1) - 1
    if place < 0:
        return -math.inf
    return float(np.interp(place, np.arange(len(x)), x))


def _parse_effort(stored: Any) -> Effort | None:
    """Return a stored effort, or None if it is not one."""
    names = {field.name for field in fields(Effort)}
    if not isinstance(stored, dict) or stored.keys() != names:
        return None
    ratios = stored["ratios"]
    lines = isinstance(ratios, list) and all(isinstance(x, list) and len(x) == 4 for x in ratios)
    if not lines or not ratios:
        return None
    numbers = [x for name, x in stored.items() if name != "ratios"]
    if not all(map(_is_number, (*numbers, *(x for line in ratios for x in line)))):
        return None
    if stored["lists"] < 1 or stored["rows"] < 1:
        return None
    return Effort(**stored | {"ratios": tuple(map(tuple, ratios))})


def _parse_pairs(stored: Any) -> tuple[tuple[float, float], ...] | None:
    """Return stored pairs of a share and a number of rows, or None if they are not that."""
    if not isinstance(stored, list):
        return None
    for pair in stored:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_number, pair)):
            return None
        if not (0 < pair[0] <= 1 and pair[1] >= 1):
            return None
    pairs = tuple((float(share), float(rows)) for share, rows in stored)
    is_descending = all(x[0] > y[0] for x, y in itertools.pairwise(pairs))
    return pairs if is_descending else None


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and bool(np.isfinite(x))
