"""`ask` and `attend` over the rows that an index finds."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np

from qkv import weightings
from qkv.answer import Answer
from qkv.answer_backend import MissingWeight
from qkv.attention import (
    attend_rows,
    weigh_candidates,
)
from qkv.database.errors import IndexDamagedError
from qkv.database.index import best_rows
from qkv.database.index.calibration import BEST_ROWS, Effort, IndexReport, share_of_rest
from qkv.database.index.metric import IndexMetric, find_metric, scale_by_temperature
from qkv.database.index.row_index import (
    ConditionalSearch,
    FoundRows,
    RowIndex,
    forget_damaged_index,
    open_row_index,
)
from qkv.database.query.executor import MAX_CACHED_WEIGHTS_PER_BATCH, QueryExecutor
from qkv.database.table.row_selection import CandidateRows, RowSelection
from qkv.database.table.view import MAX_GATHERED_ROWS, TableView
from qkv.errors import ArgumentError, DtypeError, MissingExtraError
from qkv.frameworks import get_framework, is_array, to_numpy, tree
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import Candidates, WeighedRows
from qkv.scores import Score
from qkv.util.deadline import check_deadline
from qkv.util.types import Array
from qkv.weightings import Hard, Softmax, TopK, Weighting, WeightingLike

DEFAULT_MISSING_WEIGHT = 0.05
"""With `approximate=True`, half of the queries miss at most this weight."""

ROWS_PER_BEST_ROW = 3
"""The number of rows that are read in full for each of the k best rows."""

MIN_RERANKED_ROWS = 32
"""At least this many rows are read in full. The codes put nearly all of the ten best among them."""

MAX_SCANNED_ROWS = 128
"""Up to this number of rows are always scanned."""

MAX_UNINDEXED_SHARE = 0.5
"""If a larger share of the rows is in no index, all rows are scanned."""

MISSED_SHARE = 0.5
"""If a condition and the vectors depend on each other, a search is expected to miss at most this
share of the best rows that it may miss. The rest is for the error of this estimate.
"""

MAX_FOUND_ROWS_PER_BATCH = 2**22
"""The number of found rows in memory at a time, which limits the queries of a batch."""

NOTHING_MISSING = MissingWeight(0.0, 0.0, 0.0)
NO_PART_MESSAGE = "most rows are in no index: call D.index()"
CALIBRATION_MESSAGE = "the answer is approximate: ask without approximate="


def check_approximate(approximate: Any, tolerance: Any) -> float:
    """Check the argument `approximate`, and return the weight that may be missing."""
    if tolerance is not None:
        raise ArgumentError(
            "approximate and tolerance exclude each other: a tolerance is a proven bound, and an "
            "approximate answer has an estimate"
        )
    if isinstance(approximate, bool | np.bool_) and approximate:
        return DEFAULT_MISSING_WEIGHT
    if isinstance(approximate, bool) or not isinstance(approximate, int | float | np.number):
        raise DtypeError(
            f"approximate must be True, or the weight that may be missing, not {approximate!r}"
        )
    if not 0 < approximate < 1:
        raise ArgumentError(f"approximate must be between 0 and 1, not {approximate!r}")
    return float(approximate)


class SearchRefusedError(Exception):
    """A search cannot be completed, so the answer is exact."""


class ShardedExecutor(QueryExecutor, ABC):
    """An executor of rows in shards, which search their own indexes."""

    @abstractmethod
    def plan_search(self, missing_weight: float) -> SearchPlan | str:
        """Return how to find rows with the indexes, or why all rows must be scanned."""


@dataclass(frozen=True)
class SearchPlan:
    """How to find rows for a score and a weighting.

    `efforts` are tried in turn until the estimated missing weight is at most `missing_weight`. For
    weightings of the best rows it is None, and there is one effort. `min_best_score` is the best
    score that nearly all measured queries have at least. `has_few_best_rows` says that
    `best_rows` builds the answers. `conditional` says how to search under a condition.
    """

    row_index: RowIndex
    metric: IndexMetric
    selection: RowSelection
    efforts: tuple[Effort, ...]
    missing_weight: float | None
    has_interval: bool
    min_best_score: float
    has_few_best_rows: bool
    conditional: ConditionalSearch | None

    def search(self, view: TableView, queries: np.ndarray, effort: Effort) -> FoundRows:
        """Search the rows of the view with an effort."""
        return self.row_index.search(
            queries,
            effort.lists,
            effort.rows,
            self.metric,
            self.selection,
            self.missing_weight is not None,
            view.read_key_vectors_at,
            self.conditional,
        )

    @property
    def total(self) -> int:
        """The number of all rows."""
        return self.row_index.total

    def count_rows(self, executor: QueryExecutor, rest: Any) -> tuple[int, int]:
        """Return the numbers of rows that may take part, and of those without a value."""
        return executor.row_count, executor.missing_value_count

    def count_rows_read(self, candidates: int, rest: Any) -> int:
        """Return how many rows were read in full, for the number of candidates of a query."""
        return candidates

    def estimate_missing_weight(
        self, effort: Effort, candidates: np.ndarray, rest: Any, weighed: WeighedRows, i: int
    ) -> MissingWeight:
        """Return the estimated weight of the rows other than the candidates of query i.

        `rest` is the estimated log Σ exp(score) over these rows.
        """
        assert weighed.lse is not None
        estimate = share_of_rest(rest, float(weighed.lse[i]))
        # For a query unlike the keys, the measured ratios mean nothing.
        is_like_keys = float(weighed.best_score[i]) >= self.min_best_score
        return effort.correct_estimate(estimate, self.has_interval and is_like_keys)

    def describe(self, effort: Effort, rows: int, total: int, rest: Any = None) -> str:
        """Return the text that says how much was read with an effort."""
        more = "" if self.selection.mask is None else "or more "
        return (
            f"index, {effort.lists:,} {more}of {self.row_index.list_count:,} lists; "
            f"{rows:,} of {total:,} rows read"
        )

    @cached_property
    def unindexed(self) -> np.ndarray:
        """The positions of all selected rows without an index."""
        unindexed, mask = self.row_index.unindexed, self.selection.mask
        return unindexed if mask is None else unindexed[mask[unindexed]]

    def select_candidates(self, positions: np.ndarray) -> CandidateRows:
        """Return the rows that were found, and all selected rows without an index."""
        both = np.sort(np.concatenate([positions, self.unindexed]))
        return self.to_candidates(both)

    def to_candidates(self, positions: np.ndarray) -> CandidateRows:
        """Return the rows at ascending positions."""
        return CandidateRows(self.total, positions, self.selection.missing_count)


def plan_search(
    view: TableView,
    score: Score,
    weighting: Weighting,
    selection: RowSelection,
    missing_weight: float,
) -> SearchPlan | str:
    """Return how to find rows with the index, or why all rows must be scanned.

    The last plan is cached with the view.
    """
    arguments = score, weighting, selection
    cached = view.index_cache.get("plan")
    if cached and cached[1] == missing_weight and all(map(is_, arguments, cached[0])):
        plan: SearchPlan | str = cached[2]
        return plan
    plan = _make_plan(view, *arguments, missing_weight)
    # An array may have changed at the next call.
    if not any(is_array(x) for part in (score, weighting) for x in vars(part).values()):
        view.index_cache["plan"] = arguments, missing_weight, plan
    return plan


def _make_plan(
    view: TableView,
    score: Score,
    weighting: Weighting,
    selection: RowSelection,
    missing_weight: float,
) -> SearchPlan | str:
    metric = choose_metric(view, score, weighting)
    if isinstance(metric, str):
        return metric
    report = IndexReport.read_from_view(view)
    efforts = choose_efforts(
        report, view.setting_number("encoded"), metric, weighting, missing_weight
    )
    if isinstance(efforts, str):
        return efforts
    assert report is not None
    scaled = scale_by_temperature(metric, weighting)
    assert scaled is not None
    unscaled_slope, metric = metric.slope, scaled
    limit = missing_weight if type(weighting) is Softmax else None
    if selection.row_count <= max(2 * efforts[0].rows, MAX_SCANNED_ROWS):
        return "few rows pass the condition" if selection.mask is not None else "there are few rows"
    try:
        index = open_row_index(view, metric.name)
    except MissingExtraError:
        return 'faiss is not installed: pip install "qkv[index]"'
    if not index.parts or len(index.unindexed) > MAX_UNINDEXED_SHARE * index.total:
        return NO_PART_MESSAGE
    if index.total != len(view.ids):
        return "some rows could not be read"
    efforts = tuple(replace(x, lists=index.scale_lists(x.lists, report.indexed)) for x in efforts)
    conditional = None
    if limit is None and report.rows_by_share:
        conditional = _plan_conditional_search(report, index, weighting)
    has_interval = selection.mask is None and report.has_interval(
        view.snapshot.last_id, len(view), metric.slope
    )
    min_best_score = report.min_similarity * unscaled_slope
    has_few_best_rows = (
        isinstance(weighting, TopK)
        and weighting.k <= best_rows.MAX_BEST_ROWS
        and not len(index.unindexed)
        and (view.has_only_number_keys or not view.schema.can_pool_values)
    )
    return SearchPlan(
        index,
        metric,
        selection,
        efforts,
        limit,
        has_interval,
        min_best_score,
        has_few_best_rows,
        conditional,
    )


def choose_metric(view: TableView, score: Score, weighting: Weighting) -> IndexMetric | str:
    """Return how an index compares vectors for this call, or why no index can serve it."""
    if score.compares_keys:
        return "keys are compared themselves"
    if view.has_sparse_vectors:
        return "an index has no sparse vectors of words"
    metric = find_metric(score, view._vector_widths[0])
    if isinstance(metric, str):
        return metric
    if type(weighting) not in (Softmax, Hard, TopK):
        return f"an index cannot serve the weighting {type(weighting).__name__}"
    return metric


def choose_efforts(
    report: IndexReport | None,
    encoded: int,
    metric: IndexMetric,
    weighting: Weighting,
    missing_weight: float,
) -> tuple[Effort, ...] | str:
    """Return the searches to try in turn, or why the index cannot serve the call.

    `encoded` is the number of the store's encoding, and `metric` that of the score.
    """
    if report is None or report.encoded != encoded:
        return "there is no index: call D.index()"
    if not report.efforts:
        return "the index could not be measured" if report.indexed else NO_PART_MESSAGE
    if report.metric != metric.name:
        return (
            f"the index was built for the metric {report.metric}, not {metric.name}: pass this "
            "score to D.index()"
        )
    scaled = scale_by_temperature(metric, weighting)
    if scaled is None:
        return "an index needs one temperature"
    efforts = report.efforts
    if type(weighting) is Softmax:
        # The missing weights were measured for one slope. For another one, the estimates decide.
        is_measured = report.is_slope_measured(scaled.slope)
        efforts = tuple(
            x
            for x in efforts
            if x.recall >= report.recall and (x.missing <= missing_weight or not is_measured)
        )
        if not efforts:
            return "the weight is spread over too many rows"
    else:
        effort = report.find_ranking_effort()
        if effort is None:
            return f"the index does not reach a recall of {report.recall:g}"
        count = max((weighting.k if isinstance(weighting, TopK) else 1) * ROWS_PER_BEST_ROW, 1)
        rows = max(count, MIN_RERANKED_ROWS)
        if rows > effort.rows:
            larger = [x for x in report.efforts if x.rows >= rows]
            if not larger:
                return f"the weighting needs {rows:,} rows, and the index was not measured for them"
            effort = larger[0]
        efforts = (replace(effort, rows=rows),)
    return efforts


def _plan_conditional_search(
    report: IndexReport, index: RowIndex, weighting: Weighting
) -> ConditionalSearch:
    """Return how to find the best rows under a condition."""
    best = max(weighting.k, 1) if isinstance(weighting, TopK) else 1
    # The k best of a share are about as near as the ten best of a smaller share.
    factor = BEST_ROWS / max(best, BEST_ROWS)
    growth = index.measure_growth(report.indexed)

    def find_needed_rows(share: float) -> float:
        return growth * report.find_needed_rows(share * factor)

    return ConditionalSearch(find_needed_rows, best, MISSED_SHARE * (1 - report.recall) * best)


def answer_approximately(
    executor: QueryExecutor, queries: Any, missing_weight: float
) -> list[Answer]:
    """Return one answer for each query, over the rows that the index finds.

    If the index cannot serve the call, the answers are exact, and their `engine` says why.
    """
    while True:
        try:
            return _answer_queries(executor, queries, missing_weight)
        except IndexDamagedError as error:
            forget_damaged_index(executor.view, error)
        except SearchRefusedError as error:
            return _answer_exactly(executor, queries, str(error))


def _answer_queries(executor: QueryExecutor, queries: Any, missing_weight: float) -> list[Answer]:
    if isinstance(executor, ShardedExecutor):
        plan = executor.plan_search(missing_weight)
    else:
        components = executor.score, executor.weighting, executor.selection
        plan = plan_search(executor.view, *components, missing_weight)
    if isinstance(plan, str):
        return _answer_exactly(executor, queries, plan)
    if not len(queries):
        return []
    is_single = plan.has_few_best_rows and len(queries) == 1
    # The search itself finds out whether the numbers are finite.
    is_encoded = is_single and executor.view.are_encoded_vectors(queries)
    answers = _answer_one_query(executor, plan, queries) if is_encoded else None
    if answers is not None:
        return answers
    code = executor._encode_queries(queries).code
    if not plan.metric.fits_float32(code):
        return _answer_exactly(executor, queries, "a query has numbers that an index cannot hold")
    size = max(MAX_FOUND_ROWS_PER_BATCH // plan.efforts[0].rows, 1)
    size = min(size, best_rows.QUERIES_PER_BATCH) if plan.has_few_best_rows else size
    answers = []
    for start in range(0, len(queries), size):
        batch = queries[start : start + size], code[start : start + size]
        found = _answer_best_rows(executor, plan, *batch) if plan.has_few_best_rows else None
        answers += _answer_batch(executor, plan, *batch) if found is None else found
    return answers


def _answer_best_rows(
    executor: QueryExecutor,
    plan: SearchPlan,
    queries: Any,
    code: np.ndarray,
) -> list[Answer] | None:
    """Return one answer for each query, whose vectors are `code` (n, d), with its best rows.

    Return None if fewer rows were found than were searched for, or if scores may overflow.
    """
    effort, view, metric = plan.efforts[0], executor.view, plan.metric
    slopes = best_rows.find_slopes(metric, code)
    if slopes is None:
        return None
    # The length of a query changes no order.
    found = plan.search(view, np.ascontiguousarray(code, np.float32), effort).positions
    found.sort(axis=1)
    if found[:, 0].min() < 0:
        return None
    scored = best_rows.score_rows(view, metric, code, slopes, found)
    if scored is None:
        return None
    assert isinstance(executor.weighting, TopK)
    best = best_rows.BestRows(found, *scored, executor.weighting.k)
    return best_rows.build_answers(
        executor, queries, best, *_share_fields(executor, plan, found.shape[1])
    )


def _answer_one_query(
    executor: QueryExecutor, plan: SearchPlan, query: np.ndarray
) -> list[Answer] | None:
    """Return what `_answer_best_rows` returns for a single query vector (1, d), in less time.

    Return None if it cannot be answered like this.
    """
    effort, weighting = plan.efforts[0], executor.weighting
    assert isinstance(weighting, TopK)
    if effort.rows > best_rows.MAX_ROWS_PER_LOOP or query.dtype != np.float32:
        return None
    view, metric = executor.view, plan.metric
    square = float(query[0].dot(query[0]))
    if not best_rows.MIN_SQUARE < square < best_rows.MAX_SQUARE:
        return None
    positions = plan.search(view, query, effort).positions[0]
    positions.sort()
    if positions[0] < 0:
        return None
    best = best_rows.rank_rows_of_one_query(view, metric, query[0], square, positions, weighting.k)
    if best is None:
        return None
    shared = _share_fields(executor, plan, len(positions))
    return best_rows.build_answers(executor, query, best, *shared)


def _share_fields(
    executor: QueryExecutor, plan: SearchPlan, rows_read: int
) -> tuple[Callable[[np.ndarray], CandidateExecutor], dict[str, Any]]:
    """Return the cached result of `_build_shared_fields`."""
    cached = vars(executor).get("best_rows_fields")
    if cached is None or cached[0] is not plan or cached[1] != rows_read:
        cached = plan, rows_read, _build_shared_fields(executor, plan, rows_read)
        vars(executor)["best_rows_fields"] = cached
    shared: tuple[Callable[[np.ndarray], CandidateExecutor], dict[str, Any]] = cached[2]
    return shared


def _build_shared_fields(
    executor: QueryExecutor, plan: SearchPlan, rows_read: int
) -> tuple[Callable[[np.ndarray], CandidateExecutor], dict[str, Any]]:
    """Return what all answers with their best rows have in common.

    The first one is a function that makes the executor of an answer from its candidates.
    """
    effort, view = plan.efforts[0], executor.view

    def make_executor(positions: np.ndarray) -> CandidateExecutor:
        run = CandidateExecutor(executor, plan, plan.to_candidates(positions), 0.0, effort)
        vars(run)["component_names"] = executor.component_names
        return run

    return make_executor, {
        "value_is_mean": executor.value_is_mean,
        "total": executor.row_count,
        "missing": executor.missing_value_count,
        "is_normalized": True,
        "version": view.version,
        "error_bound": 1.0,
        "rows_read": rows_read,
        "missing_weight": None,
        "recall": effort.recall,
        "bound_is_probabilistic": False,
        "coverage": None,
        "engine": plan.describe(effort, rows_read, executor.row_count),
        **executor.component_names,
        "_library": executor.frame_library,
    }


def _answer_batch(
    executor: QueryExecutor,
    plan: SearchPlan,
    queries: Any,
    code: np.ndarray,
) -> list[Answer]:
    """Return one answer for each query, whose vectors are `code` (n, d)."""
    names, executor = executor.component_names, _without_index_hint(executor)
    answers: dict[int, Answer] = {}
    left = np.arange(len(queries))
    for effort in plan.efforts:
        found = plan.search(executor.view, plan.metric.prepare_vectors(code[left]), effort)
        weighed = _weigh_found_rows(executor, plan, code[left], found.positions)
        keeps_weights = len(queries) * effort.rows <= MAX_CACHED_WEIGHTS_PER_BATCH
        too_little = []
        rests = found.list_rests()
        for i, rest, (positions, row) in zip(left.tolist(), rests, weighed, strict=True):
            check_deadline()
            one = queries[i : i + 1]
            if not len(positions):
                answers[i] = _answer_exactly(executor, one, "the index found no row")[0]
                continue
            run = CandidateExecutor(executor, plan, plan.to_candidates(positions), rest, effort)
            vars(run)["component_names"] = names
            row = run.compute_weights(one, True)[0] if row is None else row
            missing = run.estimate_missing_weight(row, 0)
            if missing is None or missing.estimate <= (plan.missing_weight or 0):
                answers[i] = run._build_answer(queries[i], row, 0, keeps_weights, "")
            else:
                too_little.append(i)
        left = np.array(too_little, int)
        if not len(left):
            break
    for i in left.tolist():
        one = queries[i : i + 1]
        answers[i] = _answer_exactly(executor, one, "the index would miss too much weight")[0]
    return [answers[i] for i in range(len(queries))]


def _weigh_found_rows(
    executor: QueryExecutor, plan: SearchPlan, code: np.ndarray, found: np.ndarray
) -> list[tuple[np.ndarray, WeighedRows | None]]:
    """Return for each query (n, d) the ascending positions of its candidates, and their weights.

    The candidates are the rows `found` (n, c) and all rows without an index. The weights are None
    if they must be computed for the query alone, because there are many rows or scores overflow.
    """
    if found.shape[1] + len(plan.unindexed) > MAX_GATHERED_ROWS:
        return [(plan.select_candidates(at[at >= 0]).positions, None) for at in found]
    view, total = executor.view, plan.total
    rows = Candidates(
        own=np.sort(np.where(found < 0, total, found), axis=1),
        shared=plan.unindexed,
        total=total,
        read_keys=view.read_key_vectors_at,
        read_values=view.read_values_at if view.schema.can_pool_values else None,
        cache=view.key_terms_cache(),
    )
    return weigh_candidates(rows, code, executor.score, executor.weighting)


def _without_index_hint(executor: QueryExecutor) -> QueryExecutor:
    """Return an executor whose answers do not recommend the index."""
    executor = copy.copy(executor)
    vars(executor)["index_hint"] = ""
    return executor


def _answer_exactly(executor: QueryExecutor, queries: Any, why: str) -> list[Answer]:
    """Return exact answers whose `engine` says why the index was not used."""
    answers = _without_index_hint(executor).answer_queries(queries)
    for answer in answers:
        fields = vars(answer)
        fields["engine"] += f", exactly: {why}"
        if not answer.error_bound:  # there is one if shards of a cluster are lost
            fields["recall"], fields["missing_weight"] = 1.0, NOTHING_MISSING
    return answers


class CandidateExecutor(QueryExecutor):
    """Builds the answer to one query from some rows.

    `rest` is the estimated log Σ exp(score) of the other rows, as the plan needs it.
    """

    def __init__(
        self,
        executor: QueryExecutor,
        plan: SearchPlan,
        candidates: CandidateRows,
        rest: Any,
        effort: Effort,
    ) -> None:
        super().__init__(
            executor.view,
            executor.score,
            executor.weighting,
            candidates,
            executor.top,
            None,
            CALIBRATION_MESSAGE,
            executor.frame_library,
        )
        self.exact_executor, self.plan, self.effort = executor, plan, effort
        self.candidates, self.rest = candidates, rest
        vars(self)["index_hint"] = ""
        # The rows that may take part, not only those that are read.
        self.row_count, self.missing_value_count = plan.count_rows(executor, rest)
        self.where = executor.where

    def without_row(self, position: int) -> QueryExecutor:
        exact = self.exact_executor.without_row(position)
        positions = self.candidates.positions
        candidates = CandidateRows(
            self.candidates.total, positions[positions != position], self.candidates.missing_count
        )
        executor = CandidateExecutor(exact, self.plan, candidates, self.rest, self.effort)
        executor.row_count = self.row_count - 1
        return executor

    def _build_answer(
        self,
        query: Any,
        weighed: WeighedRows,
        i: int,
        keeps_weights: bool,
        engine: str,
        best: np.ndarray | None = None,
    ) -> Answer:
        effort = self.effort
        rows = self.plan.count_rows_read(self.candidate_count, self.rest)
        text = self.plan.describe(effort, rows, self.row_count, self.rest)
        answer = super()._build_answer(query, weighed, i, keeps_weights, text, best)
        fields = vars(answer)
        fields["rows_read"] = rows
        fields["error_bound"], fields["recall"] = 1.0, effort.recall
        fields["missing_weight"] = self.estimate_missing_weight(weighed, i)
        return answer

    def _read_records(self, positions: np.ndarray) -> list[dict[str, Any]]:
        return self.view.read_rows_at(positions)

    def estimate_missing_weight(self, weighed: WeighedRows, i: int) -> MissingWeight | None:
        """Return the estimated weight of the other rows; None if only the best rows are wanted."""
        if self.plan.missing_weight is None or weighed.lse is None:
            return None
        candidates = self.candidates.positions
        return self.plan.estimate_missing_weight(self.effort, candidates, self.rest, weighed, i)


def attend_approximately(
    view: TableView,
    code: EncodedQuery,
    score: Score,
    weighting: WeightingLike,
    make_plan: Callable[[Score, Weighting], SearchPlan | str],
) -> Array | None:
    """Return the output (n, d_v) over the rows that the index finds, with gradients.

    `make_plan` returns the plan for a score and a weighting with NumPy arrays. Return None if the
    index cannot serve the call.
    """
    while True:
        try:
            return _attend_with_index(view, code, score, weighting, make_plan)
        except IndexDamagedError as error:
            forget_damaged_index(view, error)
        except SearchRefusedError:
            return None


def _attend_with_index(
    view: TableView,
    code: EncodedQuery,
    score: Score,
    weighting: WeightingLike,
    make_plan: Callable[[Score, Weighting], SearchPlan | str],
) -> Array | None:
    query = code.code
    fw = get_framework(query)
    if code.sparse_positions is not None or not len(query) or fw.is_abstract(query):
        return None
    plan = make_plan(_to_host(score), _to_host(weightings.resolve(weighting)))
    if isinstance(plan, str):
        return None
    outs = []
    host = to_numpy(fw.detach(query))
    if not plan.metric.fits_float32(host):
        return None
    found = plan.search(view, plan.metric.prepare_vectors(host), plan.efforts[0])
    for i, candidates in enumerate(map(plan.select_candidates, found.list_positions())):
        if not len(candidates.positions):
            return None
        rows = view.open_vectors(candidates, value=True)
        outs.append(attend_rows(rows, query[i : i + 1], score=score, weighting=weighting))
    return fw.xp.concat(outs, axis=0)


def _to_host(component: Any) -> Any:
    """Return a score or weighting whose arrays are NumPy arrays."""
    leaves = [
        getattr(component, name, None) for name in getattr(type(component), "number_fields", ())
    ]
    if not any(map(is_array, leaves)):
        return component
    fw = get_framework(next(x for x in leaves if is_array(x)))
    return tree.map_arrays(fw, lambda x: to_numpy(fw.detach(x)), component)
