"""Answers from shards: the same as a database's, of which no shard has seen all rows."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np

from qkv import partial_attention as parts
from qkv.answer_backend import SourceRows
from qkv.cluster.shard import Job, SliceResult, SliceSoftmax, SoftmaxNormalizer
from qkv.cluster.shard_set import SentJob, ShardedSnapshot
from qkv.database.errors import LostShardError
from qkv.database.filter.expressions import PartialTableCondition
from qkv.database.query.calibration import Calibration
from qkv.database.query.executor import MAX_VOTING_ROWS, QueryExecutor
from qkv.database.query.scan import MAX_SCORES_PER_BATCH, ScaledSquareSum, merge_square_sums
from qkv.database.table.view import TableView
from qkv.errors import CombinationError, format_plural
from qkv.frameworks import is_array, load_framework, to_numpy
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import WeighedRows
from qkv.scores import Score
from qkv.weightings import State, Weighting, WeightingLike
from qkv.weightings.error_bound import ErrorBound
from qkv.weightings.softmax import Softmax

MAX_PRECISE_LSE = 1e6
"""A log-sum-exp from which on a float has too few digits left for the sum of its exponentials."""


class ShardedView(TableView):
    """One version of rows that shards hold; what looks at all of them is done by the shards."""

    snapshot: ShardedSnapshot  # type: ignore[assignment]

    @cached_property
    def _ids_and_chunk_count(self) -> tuple[np.ndarray, int]:
        return np.arange(len(self)), len(self.snapshot.slices)

    def find_ids(self, key: Any) -> list[int]:
        return (
            self.snapshot.find_ids(to_numpy(key) if is_array(key) else key)
            if self.is_initialized
            else []
        )

    def find_value(self, key: Any, default: Any) -> Any:
        found = self.find_ids(key)
        return self.read_values(found[-1:])[0] if found else default

    def filter_rows(self, wish: Any) -> np.ndarray | None:
        return self._collect_marks("filter_rows", self._shard_condition(wish))

    def _shard_condition(self, wish: Any, without: Collection[int] = ()) -> Any:
        """A condition as the leaves are told it: what may be compared is the same for all."""
        if wish is None or callable(wish):
            return wish
        return PartialTableCondition(
            wish, self._count_cell_kinds(without) if without else self._all_cell_kinds
        )

    @cached_property
    def _all_cell_kinds(self) -> dict[str, np.ndarray]:
        return self._count_cell_kinds()

    def _count_cell_kinds(self, without: Collection[int] = ()) -> dict[str, np.ndarray]:
        """The census of every column but those of vectors."""
        schema = self.schema if self.is_initialized else None
        names = [x for x in schema.columns if x not in schema.vector_columns] if schema else []
        found = self.snapshot.run_on_slices("count_cell_kinds", names, without=without)
        return {name: sum(each[name] for each in found) for name in names}

    @cached_property
    def value_mask(self) -> np.ndarray | None:
        return self._collect_marks("value_mask")

    def _collect_marks(self, name: str, *args: Any) -> np.ndarray | None:
        """Which rows the leaves mark, (m,); None where all do."""
        found = zip(
            self.snapshot.run_on_slices("read_view", name, *args), self.snapshot.slices, strict=True
        )
        parts = [
            (np.ones(slice.row_count, bool), False) if some is None else (some, True)
            for some, (_, slice) in found
        ]
        return np.concatenate([some for some, _ in parts]) if any(x for _, x in parts) else None

    def cell_kind_counts(self, name: str) -> np.ndarray:
        if name in self._all_cell_kinds:
            return self._all_cell_kinds[name]
        return sum(each[name] for each in self.snapshot.run_on_slices("count_cell_kinds", [name]))  # type: ignore[no-any-return]

    def is_integer_column(self, name: str, bits: int = 64) -> bool:
        return all(self.snapshot.run_on_slices("read_view", "is_integer_column", name, bits))

    def is_date_column(self, name: str) -> bool:
        return any(self.snapshot.run_on_slices("read_view", "is_date_column", name))

    @cached_property
    def _vector_widths(self) -> tuple[int, int]:
        code, value = (self.snapshot.tensor_type(name) for name in ("code", "value"))
        return code[1][0], 0 if value is None else value[1][0]

    def open_vectors(self, *_: Any, **__: Any) -> Any:
        raise CombinationError("the rows lie in shards: open the database itself for this")

    def build_job(
        self,
        code: EncodedQuery,
        keys: Any,
        score: Score,
        weighting: Weighting,
        where: Any,
        but: int | None = None,
        without: Collection[int] = (),
    ) -> Job:
        return Job(
            uuid4().hex,
            code.code,
            code.sparse_positions,
            keys,
            score,
            weighting,
            self._shard_condition(where, without),
            len(self),
            self.schema.can_pool_values,
            but,
        )


class ShardedWeights:
    """The weights of one query's answer: those of its heaviest rows are here, others are asked."""

    def __init__(
        self,
        asked: SentJob,
        known: State | SoftmaxNormalizer,
        i: int,
        found: list[SliceResult],
        convex: bool,
    ):
        self.sent_job, self.normalizer, self.query_index = asked, known, i
        places = np.concatenate([some.places[i] for some in found])
        weights = np.concatenate([some.weights[i] for some in found])
        size = weights if convex else np.abs(weights)
        order = np.lexsort((places, -size))[: np.count_nonzero(size)]
        self.places, self.weights = places[order], weights[order]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        lost = self.sent_job.without
        found = iter(self.sent_job.run_on_slices("all_weights", self.normalizer, self.query_index))
        slices = self.sent_job.snapshot.slices
        every = [np.zeros(s.row_count) if shard in lost else next(found) for shard, s in slices]
        return np.concatenate(every).astype(dtype or self.weights.dtype, copy=False)


class ShardedQueryExecutor(QueryExecutor):
    """A score, a weighting and a condition; `answers` asks the shards."""

    view: ShardedView

    def __init__(
        self,
        view: ShardedView,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        top: int,
        tolerance: float | None,
        promise: Calibration | str = "",
        library: str | None = None,
        confidence: float | None = None,
        but: int | None = None,
    ):
        self.view, self.score, self.where, self.top = view, score, where, top
        self._read_as, known = parts.resolve_score_and_weighting(score, weighting, None)
        self.weighting, self.tolerance = known.limit_to_keys(len(view)), tolerance
        self.calibration, self.frame_library, self._excluded_position = promise, library, but
        self._rounded = tolerance is not None and view.is_int8 and view.vector_precision.has_codes
        if self._rounded and type(self.weighting) is not Softmax:
            raise CombinationError(
                "tolerance: shards prove it for softmax alone, and the vectors are kept in 8 bits. "
                "Ask without one, or keep them as float32"
            )
        self.allowed_rows = self.candidate_positions = None
        self.refused = ""
        self.row_count = self.missing_value_count = 0
        self._row_cache: dict[int, dict[str, Any]] = {}

    def without_row(self, place: int) -> ShardedQueryExecutor:
        how = (self.top, self.tolerance, self.calibration, self.frame_library, None, place)
        return ShardedQueryExecutor(self.view, self.score, self.weighting, self.where, *how)

    def compute_weights(self, queries: Any, value: bool) -> tuple[WeighedRows, str]:
        many, lost = self.view.snapshot, dict[int, LostShardError]()
        while True:
            try:
                with load_framework("numpy").compute_context():
                    return self._gather_weights(queries, lost)
            except LostShardError as fault:
                held = {shard for shard, _ in many.slices}
                if not many.shard_set.partial or held <= {*lost, fault.shard}:
                    raise
                lost[fault.shard] = fault

    def _gather_weights(
        self, queries: Any, lost: dict[int, LostShardError], wide: bool = False
    ) -> tuple[WeighedRows, str]:
        view, weighting = self.view, self.weighting
        keyed = self.score.compares_keys
        code = EncodedQuery(None) if keyed else self._encode_queries(queries)
        code = code._replace(code=code.code.astype(float)) if wide else code
        keys = queries if keyed else None
        job = view.build_job(
            code, keys, self._read_as, weighting, self.where, self._excluded_position, lost
        )
        asked = SentJob(view.snapshot, job, lost)
        top = self.top if view.schema.can_pool_values else max(self.top, MAX_VOTING_ROWS)
        near = None if keyed or (lost and not self._rounded) else self.tolerance
        known, found, bound, read = self._ask_shards(asked, top, near, code.code)
        self.row_count, self.missing_value_count = np.sum(
            [some.row_counts for some in found], axis=0
        ).tolist()
        if lost and near is None:
            bound = self._bound_lost_share(asked, code.code, lost)
        each = [
            ShardedWeights(asked, known, i, found, weighting.is_convex) for i in range(len(queries))
        ]
        self._prefetch_rows(each, top, found)
        weighed = WeighedRows(
            parts.finish_sums(
                parts.merge_pairwise([some.sums for some in found], parts.merge_sums)
            ),
            each,  # type: ignore[arg-type]
            parts.entropy_from_sums(
                *parts.merge_pairwise([some.entropy_terms for some in found], np.add)
            ),
            self._final_lse(known),
            np.max([some.best for some in found], axis=0),
            bound,
            self.row_count if read is None else read,
        )
        told = weighed.best_score if weighed.lse is None else weighed.best_score + weighed.lse
        if self.row_count and not (keyed or wide or np.isfinite(told).all()):
            return self._gather_weights(
                queries, lost, wide=True
            )  # float32 does not hold the scores
        return weighed, self._describe_engine(lost, read)

    def _ask_shards(
        self, asked: SentJob, top: int, tolerance: float | None, query: Any
    ) -> tuple[State | SoftmaxNormalizer, list[SliceResult], Any, int | None]:
        """What is known of the weights, and the heaviest; how far they may be off, and the keys
        that were read for it: None where they are exact."""
        found: list[SliceSoftmax] = []
        if type(self.weighting) is Softmax:
            found = asked.run_on_slices("run_softmax", tolerance, top)
        error: Any = 0.0
        if found and tolerance is not None:
            # Each keeps to the tolerance, and so do all: quotients of sums lie between theirs.
            bound = parts.merge_pairwise(
                [x.bound for x in found if x.bound is not None], ErrorBound.merge
            )
            if not self._rounded and not (bound.max_error <= tolerance).all():
                return self._ask_shards(asked, top, None, query)
            error = (
                bound.merge(self._bound_lost_rows(asked, query)) if asked.without else bound
            ).max_error
        if not found or any(
            (np.abs(x.lse[np.isfinite(x.lse)]) > MAX_PRECISE_LSE).any() for x in found
        ):
            state = parts.compute_output(asked, self.weighting)[1]
            return (
                state,
                asked.run_on_slices("finish_result", state, top),
                error if self._rounded else 0.0,
                None,
            )
        read = None
        if tolerance is not None:
            self.refused = found[0].refused_reason if all(x.refused_reason for x in found) else ""
            read = None if self.refused else sum(x.keys_read for x in found)
        known = SoftmaxNormalizer(
            parts.merge_pairwise([x.lse for x in found], np.logaddexp), tolerance
        )
        return known, [x.result.rescale_to(known, x.lse) for x in found], error, read

    def attend_within_tolerance(self, code: EncodedQuery) -> np.ndarray | None:
        """The output (n, d_v) within the tolerance; None where none is proven."""
        if type(self.weighting) is not Softmax:
            return None
        query, outs = np.asarray(code.code), list[np.ndarray]()
        query = query.astype(np.result_type(query, np.float32), copy=False)
        step = max(MAX_SCORES_PER_BATCH // len(self.view), 1)
        for at in range(0, len(query), step):
            some = EncodedQuery(query[at : at + step], code.sparse_positions)
            job = self.view.build_job(some, None, self._read_as, self.weighting, self.where)
            asked = SentJob(self.view.snapshot, job)
            found = self._ask_shards(asked, 1, self.tolerance, some.code)[1]
            outs.append(
                parts.finish_sums(
                    parts.merge_pairwise([some.sums for some in found], parts.merge_sums)
                )
            )
        return np.concatenate(outs)

    def _final_lse(self, known: State | SoftmaxNormalizer) -> Any:
        if isinstance(known, SoftmaxNormalizer):
            return known.lse
        return self.weighting.lse_from_state(known)[:, 0] if self.weighting.has_lse else None

    def _describe_engine(self, lost: dict[int, LostShardError], read: int | None) -> str:
        slices = self.view.snapshot.slices
        shards = len({shard for shard, _ in slices} - lost.keys())
        kind = "exact index" if self.score.compares_keys else f"scan of {self.row_count:,} rows"
        if read is not None:
            kind = f"codes of {self.row_count:,} rows, {read:,} of them read in full,"
        told = f"{kind} by {format_plural(shards, 'shard')}"
        told += f", exactly: {self.refused}" if self.refused else ""
        if not lost:
            return told
        rows = sum(slice.row_count for shard, slice in slices if shard in lost)
        return f"{told}; {rows:,} rows are lost ({'; '.join(map(str, lost.values()))})"

    def _bound_lost_share(
        self, asked: SentJob, query: Any, lost: dict[int, LostShardError]
    ) -> np.ndarray:
        """The largest share that the rows of lost shards can have."""
        balls = asked.snapshot.lost_balls(lost)
        if self.score.compares_keys or self.view.has_sparse_vectors:
            most = np.full(len(asked.job.keys if query is None else query), np.inf)
        else:
            most = np.max([ball.max_score(query, self._read_as) for ball in balls], axis=0)
        return parts.max_lost_share(
            asked, self.weighting, sum(ball.row_count for ball in balls), most
        )

    def _bound_lost_rows(self, asked: SentJob, query: Any) -> ErrorBound:
        """What the rows of lost shards can have, before they were kept in 8 bits."""
        balls = asked.snapshot.lost_balls(asked.without)
        most = np.max(
            [ball.before_quantization().max_score(query, self._read_as) for ball in balls], axis=0
        )
        top = self.weighting.scale_scores(most[:, None])[:, 0] + np.log(
            sum(ball.row_count for ball in balls)
        )
        none = np.zeros(len(top))
        return ErrorBound(top, none, none + 1, none)

    def _prefetch_rows(
        self, each: list[ShardedWeights], top: int, found: list[SliceResult]
    ) -> None:
        """Bring the rows that answers name, all at once."""
        known = {place: row for some in found for place, row in some.rows.items()}
        named = np.unique(np.concatenate([one.places[:top] for one in each])).tolist()
        new = [place for place in named if place not in known]
        self._row_cache = known | (
            dict(zip(new, self.view.read_rows(new), strict=True)) if new else {}
        )

    def find_heaviest(self, alpha: Any, top: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(alpha, ShardedWeights):
            return super().find_heaviest(alpha, top)
        some = alpha.weights[:top]
        return alpha.places[: len(some)], some

    def _read_records(self, places: np.ndarray) -> list[dict[str, Any]]:
        known, wanted = self._row_cache, places.tolist()
        new = [place for place in wanted if place not in known]
        rows = known | (dict(zip(new, self.view.read_rows(new), strict=True)) if new else {})
        return [rows[place] for place in wanted]

    def sum_squared_deviations(self, alpha: Any, mean: np.ndarray) -> ScaledSquareSum:
        found: list[ScaledSquareSum] = alpha.sent_job.run_on_slices(
            "sum_squared_deviations", alpha.normalizer, alpha.query_index, mean
        )
        return parts.merge_pairwise(found, merge_square_sums)

    def collect_source(self, query: Any, alpha: Any, most: int) -> SourceRows:
        view = self.view
        self.allowed_rows, _ = view.mask_missing_values(view.filter_rows(self.where))
        return super().collect_source(query, alpha, most)
