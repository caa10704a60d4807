"""Queries of a cluster: the shards compute partial results, which are merged here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any
from uuid import uuid4

import numpy as np

from qkv import partial_attention
from qkv.answer_backend import SourceRows
from qkv.cluster.approximate import plan_sharded_search
from qkv.cluster.shard import Job, SliceResult, SliceSoftmax, SoftmaxNormalizer
from qkv.cluster.shard_set import SentJob, ShardedSnapshot
from qkv.database.errors import LostShardError
from qkv.database.filter.expressions import PartialTableCondition
from qkv.database.index.approximate import SearchPlan, ShardedExecutor
from qkv.database.query.calibration import Calibration
from qkv.database.query.scan import MAX_SCORES_PER_BATCH, ScaledSquareSum, merge_square_sums
from qkv.database.table.row_selection import CandidateRows, RowSelection
from qkv.database.table.view import MAX_GATHERED_ROWS, TableView
from qkv.errors import CombinationError, format_plural
from qkv.frameworks import is_array, load_framework, to_numpy
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import RowChunk, StoredRows, WeighedRows
from qkv.scores import Score
from qkv.weightings import Hard, State, Weighting, WeightingLike
from qkv.weightings.error_bound import ErrorBound
from qkv.weightings.softmax import Softmax

MAX_PRECISE_LSE = 1e6
"""For a larger log-sum-exp, float64 has too few digits to scale the weights of a shard."""


class ShardedView(TableView):
    """A view of one version of all shards. The shards run the operations that read all rows."""

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
        ids = self.find_ids(key)
        return self.read_values(ids[-1:])[0] if ids else default

    def filter_rows(self, where: Any) -> np.ndarray | None:
        return self._gather_row_masks("filter_rows", self._shard_condition(where))

    def _shard_condition(self, where: Any, without: Collection[int] = ()) -> Any:
        """Return the condition to evaluate in the shards, with the cell types of the whole table.

        `without` lists lost shards.
        """
        if where is None or callable(where):
            return where
        return PartialTableCondition(
            where, self._count_cell_kinds(without) if without else self._all_cell_kinds
        )

    @cached_property
    def _all_cell_kinds(self) -> dict[str, np.ndarray]:
        return self._count_cell_kinds()

    def _count_cell_kinds(self, without: Collection[int] = ()) -> dict[str, np.ndarray]:
        """Return the number of cells of each kind, for every column except vectors."""
        schema = self.schema if self.is_initialized else None
        names = [x for x in schema.columns if x not in schema.vector_columns] if schema else []
        counts = self.snapshot.run_on_slices("count_cell_kinds", names, without=without)
        return {name: sum(each[name] for each in counts) for name in names}

    @cached_property
    def value_mask(self) -> np.ndarray | None:
        return self._gather_row_masks("value_mask")

    def _gather_row_masks(self, name: str, *args: Any) -> np.ndarray | None:
        """Return the masks (m,) of all slices, concatenated; None if no slice has a mask.

        `name` and `args` are a method of the view of a slice and its arguments.
        """
        masks = self.snapshot.run_on_slices("read_view", name, *args)
        if all(mask is None for mask in masks):
            return None
        slices = [slice for _, slice in self.snapshot.slices]
        return np.concatenate(
            [
                np.ones(slice.row_count, bool) if mask is None else mask
                for mask, slice in zip(masks, slices, strict=True)
            ]
        )

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

    def number_bounds(self, name: str, part: int | None = None) -> tuple[float, float] | None:
        if (name, part) not in self._number_bounds_cache:
            try:
                parts = self.snapshot.run_on_slices("read_view", "number_bounds", name, part)
            except LostShardError:
                return None
            present = [ends for ends in parts if ends is not None]
            ends = (min(x[0] for x in present), max(x[1] for x in present)) if present else None
            self._number_bounds_cache[name, part] = ends
        return self._number_bounds_cache[name, part]

    @cached_property
    def key_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        try:
            bounds = self.snapshot.run_on_slices("read_view", "key_bounds")
        except LostShardError:  # the remaining shards answer without the bounds
            return None
        lows, highs = zip(*bounds, strict=True)
        return np.min(lows, axis=0), np.max(highs, axis=0)

    def read_tensor_at(self, name: str, positions: np.ndarray) -> np.ndarray:
        flat = positions.reshape(-1)
        if not len(flat):
            dtype, dims = self.snapshot.tensor_type(name)
            return np.zeros((*positions.shape, *dims), dtype)
        read = np.asarray(self.snapshot.read_tensor(name, flat))
        return read.reshape(*positions.shape, *read.shape[1:])

    def _gather_rows(self, positions: np.ndarray, value_name: str) -> RowChunk:
        value = self.read_tensor_at(value_name, positions) if value_name else None
        scale = self.read_tensor_at("scale", positions) if self.is_int8 else None
        return RowChunk(self.read_tensor_at("code", positions), value, scale=scale)

    def _read_rows_at(self, positions: np.ndarray, value_name: str) -> Iterator[RowChunk]:
        for start in range(0, len(positions), MAX_GATHERED_ROWS):
            yield self._gather_rows(positions[start : start + MAX_GATHERED_ROWS], value_name)

    @cached_property
    def _key_sample(self) -> np.ndarray:
        shard, slice = self.snapshot.slices[0]
        request = shard, "run", ([slice], None, "read_view", "_key_sample")
        sample: np.ndarray = self.snapshot.shard_set.workers.call_each([request])[0][0]
        return sample

    @cached_property
    def _is_memory_scarce(self) -> bool:
        return False  # only few rows are read here

    def open_vectors(self, selection: RowSelection | None = None, **options: Any) -> StoredRows:
        if isinstance(selection, CandidateRows):
            return super().open_vectors(selection, **options)
        raise CombinationError(
            "the rows are in shards, but this call needs all vectors in one process: open the "
            "database itself with qkv.open"
        )

    def build_job(
        self,
        code: EncodedQuery,
        keys: Any,
        score: Score,
        weighting: Weighting,
        where: Any,
        excluded_position: int | None = None,
        without: Collection[int] = (),
        rows: str = "rows",
    ) -> Job:
        """Return the job that every shard evaluates for these queries."""
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
            excluded_position,
            rows,
        )


class ShardedWeights:
    """The weights of one query.

    `places` and `weights` are the positions and weights of the heaviest rows. `np.asarray` fetches
    the weights of all rows from the shards.
    """

    def __init__(
        self,
        sent_job: SentJob,
        normalizer: State | SoftmaxNormalizer,
        query_index: int,
        results: list[SliceResult],
        is_convex: bool,
    ):
        self.sent_job, self.normalizer, self.query_index = sent_job, normalizer, query_index
        places = np.concatenate([result.places[query_index] for result in results])
        weights = np.concatenate([result.weights[query_index] for result in results])
        size = weights if is_convex else np.abs(weights)
        order = np.lexsort((places, -size))[: np.count_nonzero(size)]
        self.places, self.weights = places[order], weights[order]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        lost = self.sent_job.without
        parts = iter(self.sent_job.run_on_slices("all_weights", self.normalizer, self.query_index))
        slices = self.sent_job.snapshot.slices
        weights = [np.zeros(s.row_count) if shard in lost else next(parts) for shard, s in slices]
        return np.concatenate(weights).astype(dtype or self.weights.dtype, copy=False)


class ShardedQueryExecutor(ShardedExecutor):
    """A `QueryExecutor` that sends queries to the shards and merges the results."""

    view: ShardedView

    def __init__(
        self,
        view: ShardedView,
        score: Score,
        weighting: WeightingLike,
        where: Any,
        top: int,
        tolerance: float | None,
        calibration: Calibration | str = "",
        library: str | None = None,
        confidence: float | None = None,
        excluded_position: int | None = None,
        rows: str = "rows",
    ):
        self.view, self.score, self.where, self.top = view, score, where, top
        self._rows = rows
        self._read_as, resolved = partial_attention.resolve_score_and_weighting(
            score, weighting, None
        )
        self.weighting, self.tolerance = resolved.limit_to_keys(len(view)), tolerance
        self.calibration, self.frame_library = calibration, library
        self._excluded_position = excluded_position
        self._rounded = tolerance is not None and view.is_int8 and view.vector_precision.has_codes
        if self._rounded and type(self.weighting) is not Softmax:
            raise CombinationError(
                "tolerance: a cluster with 8-bit vectors supports it only for softmax. Query "
                "without a tolerance, or store the vectors as float32"
            )
        self.selection = RowSelection(len(view))
        self.refused = ""
        self.row_count = self.missing_value_count = 0
        self._row_cache: dict[int, dict[str, Any]] = {}

    @property
    def candidate_positions(self) -> None:
        """None, because the shards return the weights of all rows."""

    def without_row(self, position: int) -> ShardedQueryExecutor:
        options = (self.top, self.tolerance, self.calibration, self.frame_library, None, position)
        made = ShardedQueryExecutor(self.view, self.score, self.weighting, self.where, *options)
        made.row_count, made.missing_value_count = self.row_count - 1, self.missing_value_count
        return made

    def plan_search(self, missing_weight: float) -> SearchPlan | str:
        return plan_sharded_search(self, missing_weight)

    def _scan_with_hard_weights(self) -> ShardedQueryExecutor:
        options = (1, None, "", None, None, self._excluded_position)
        return ShardedQueryExecutor(self.view, self.score, Hard(), self.where, *options)

    def _scan_rows_without_value(self) -> ShardedQueryExecutor:
        options = (self.where, 1, None, "", None, None, None, "rows_without_value")
        return ShardedQueryExecutor(self.view, self.score, Hard(), *options)

    def find_best_without_value(self, query: Any) -> tuple[float, dict[str, Any]] | None:
        try:
            return super().find_best_without_value(query)
        except LostShardError:
            return None

    def _positions_with_key(self, key: Any) -> np.ndarray:
        try:
            positions = np.asarray(self.view.find_ids(key), np.int64)
            allowed = self.view.select_mask(self.view.filter_rows(self.where)).mask
        except LostShardError:
            return np.zeros(0, np.int64)  # the heaviest rows that were read must do
        if self._excluded_position is not None:
            positions = positions[positions != self._excluded_position]
        return positions if allowed is None else positions[allowed[positions]]

    def compute_weights(self, queries: Any, value: bool) -> tuple[WeighedRows, str]:
        snapshot, lost = self.view.snapshot, dict[int, LostShardError]()
        while True:
            try:
                with load_framework("numpy").use_own_settings():
                    return self._merge_weights_of_shards(queries, lost)
            except LostShardError as error:
                shards = {shard for shard, _ in snapshot.slices}
                if not snapshot.shard_set.partial or shards <= {*lost, error.shard}:
                    raise
                lost[error.shard] = error

    def _merge_weights_of_shards(
        self, queries: Any, lost: dict[int, LostShardError], use_float64: bool = False
    ) -> tuple[WeighedRows, str]:
        """Query all shards except `lost`; return the merged weights and the engine text."""
        view, weighting = self.view, self.weighting
        compares_keys = self.score.compares_keys
        code = EncodedQuery(None) if compares_keys else self._encode_queries(queries)
        code = code._replace(code=code.code.astype(float)) if use_float64 else code
        keys = queries if compares_keys else None
        options = (self._excluded_position, lost, self._rows)
        job = view.build_job(code, keys, self._read_as, weighting, self.where, *options)
        sent_job = SentJob(view.snapshot, job, lost)
        top, ranked = self.rows_to_read, self.rows_to_rank
        skips_tolerance = compares_keys or (lost and not self._rounded)
        tolerance = None if skips_tolerance else self.tolerance
        normalizer, results, bound, read = self._ask_shards(
            sent_job, (top, ranked), tolerance, code.code
        )
        self.row_count, self.missing_value_count = np.sum(
            [result.row_counts for result in results], axis=0
        ).tolist()
        if lost and tolerance is None:
            bound = self._bound_lost_share(sent_job, code.code, lost)
        weights = [
            ShardedWeights(sent_job, normalizer, i, results, weighting.is_convex)
            for i in range(len(queries))
        ]
        self._prefetch_rows(weights, top, results)
        weighed = WeighedRows(
            partial_attention.finish_sums(
                partial_attention.merge_pairwise(
                    [result.sums for result in results], partial_attention.merge_sums
                )
            ),
            weights,  # type: ignore[arg-type]
            partial_attention.entropy_from_sums(
                *partial_attention.merge_pairwise(
                    [result.entropy_terms for result in results], np.add
                )
            ),
            self._final_lse(normalizer),
            np.max([result.best for result in results], axis=0),
            bound,
            self.row_count if read is None else read,
        )
        scores = weighed.best_score if weighed.lse is None else weighed.best_score + weighed.lse
        if self.row_count and not (compares_keys or use_float64 or np.isfinite(scores).all()):
            # The scores overflow float32: query again in float64.
            return self._merge_weights_of_shards(queries, lost, use_float64=True)
        return weighed, self._describe_engine(lost, read)

    def _ask_shards(
        self, sent_job: SentJob, counts: tuple[int, int], tolerance: float | None, query: Any
    ) -> tuple[State | SoftmaxNormalizer, list[SliceResult], Any, int | None]:
        """Send a job to the shards; `counts` are those of `_build_result`. Return four things:

        - the normalizer of the weights
        - the results of the slices
        - the bound on the error of the weights
        - the number of keys read in full, or None if the weights are exact
        """
        softmaxes: list[SliceSoftmax] = []
        if type(self.weighting) is Softmax:
            softmaxes = sent_job.run_on_slices("run_softmax", tolerance, *counts)
        error: Any = 0.0
        if softmaxes and tolerance is not None:
            # If every slice is within the tolerance, the merged weights are too: a quotient of
            # sums lies between the quotients of its terms.
            bound = partial_attention.merge_pairwise(
                [x.bound for x in softmaxes if x.bound is not None], ErrorBound.merge
            )
            if not self._rounded and not (bound.max_error <= tolerance).all():
                return self._ask_shards(sent_job, counts, None, query)
            if sent_job.without:
                bound = bound.merge(self._bound_lost_rows(sent_job, query))
            error = bound.max_error
        if not softmaxes or any(
            (np.abs(x.lse[np.isfinite(x.lse)]) > MAX_PRECISE_LSE).any() for x in softmaxes
        ):
            state = partial_attention.compute_output(sent_job, self.weighting)[1]
            return (
                state,
                sent_job.run_on_slices("finish_result", state, *counts),
                error if self._rounded else 0.0,
                None,
            )
        read = None
        if tolerance is not None:
            all_refused = all(x.refused_reason for x in softmaxes)
            self.refused = softmaxes[0].refused_reason if all_refused else ""
            read = None if self.refused else sum(x.keys_read for x in softmaxes)
        normalizer = SoftmaxNormalizer(
            partial_attention.merge_pairwise([x.lse for x in softmaxes], np.logaddexp), tolerance
        )
        results = [x.result.rescale_to(normalizer, x.lse) for x in softmaxes]
        return normalizer, results, error, read

    def attend_within_tolerance(self, code: EncodedQuery) -> np.ndarray | None:
        """Return the output (n, d_v) within the tolerance.

        Return None if the weighting has no error bound on shards.
        """
        if type(self.weighting) is not Softmax:
            return None
        query, outs = np.asarray(code.code), list[np.ndarray]()
        query = query.astype(np.result_type(query, np.float32), copy=False)
        step = max(MAX_SCORES_PER_BATCH // len(self.view), 1)
        for start in range(0, len(query), step):
            batch = EncodedQuery(query[start : start + step], code.sparse_positions)
            job = self.view.build_job(batch, None, self._read_as, self.weighting, self.where)
            sent_job = SentJob(self.view.snapshot, job)
            results = self._ask_shards(sent_job, (1, 1), self.tolerance, batch.code)[1]
            outs.append(
                partial_attention.finish_sums(
                    partial_attention.merge_pairwise(
                        [result.sums for result in results], partial_attention.merge_sums
                    )
                )
            )
        return np.concatenate(outs)

    def _final_lse(self, normalizer: State | SoftmaxNormalizer) -> Any:
        """Return the log-sum-exp (n,) over all rows, or None if the weighting has none."""
        if isinstance(normalizer, SoftmaxNormalizer):
            return normalizer.lse
        return self.weighting.lse_from_state(normalizer)[:, 0] if self.weighting.has_lse else None

    def _describe_engine(self, lost: dict[int, LostShardError], read: int | None) -> str:
        """Return the `engine` text of an answer: what the shards read, and which ones are lost."""
        slices = self.view.snapshot.slices
        shards = len({shard for shard, _ in slices} - lost.keys())
        kind = "exact index" if self.score.compares_keys else f"scan of {self.row_count:,} rows"
        if read is not None:
            kind = f"codes of {self.row_count:,} rows, {read:,} of them read in full,"
        text = f"{kind} by {format_plural(shards, 'shard')}"
        text += f", exactly: {self.refused}" if self.refused else ""
        if not lost:
            return text
        rows = sum(slice.row_count for shard, slice in slices if shard in lost)
        return f"{text}; {rows:,} rows are left out ({'; '.join(map(str, lost.values()))})"

    def _bound_lost_share(
        self, sent_job: SentJob, query: Any, lost: dict[int, LostShardError]
    ) -> np.ndarray:
        """Return the largest share of the weight (n,) that the rows of lost shards can have."""
        balls = sent_job.snapshot.lost_balls(lost)
        if self.score.compares_keys or self.view.has_sparse_vectors:
            max_scores = np.full(len(sent_job.job.keys if query is None else query), np.inf)
        else:
            max_scores = np.max([ball.max_score(query, self._read_as) for ball in balls], axis=0)
        return partial_attention.max_lost_share(
            sent_job, self.weighting, sum(ball.row_count for ball in balls), max_scores
        )

    def _bound_lost_rows(self, sent_job: SentJob, query: Any) -> ErrorBound:
        """Return the error bound for leaving out the lost shards.

        It is for the vectors before they were rounded to 8 bits.
        """
        balls = sent_job.snapshot.lost_balls(sent_job.without)
        max_scores = np.max(
            [ball.before_quantization().max_score(query, self._read_as) for ball in balls], axis=0
        )
        top = self.weighting.scale_scores(max_scores[:, None])[:, 0] + np.log(
            sum(ball.row_count for ball in balls)
        )
        none = np.zeros(len(top))
        return ErrorBound(top, none, none + 1, none)

    def _prefetch_rows(
        self, weights: list[ShardedWeights], top: int, results: list[SliceResult]
    ) -> None:
        """Read the heaviest rows of all queries with one request, and cache them."""
        cached = {position: row for result in results for position, row in result.rows.items()}
        positions = np.unique(
            np.concatenate([query_weights.places[:top] for query_weights in weights])
        ).tolist()
        new = [position for position in positions if position not in cached]
        self._row_cache = cached | (
            dict(zip(new, self.view.read_rows(new), strict=True)) if new else {}
        )

    def find_heaviest(self, alpha: Any, top: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(alpha, ShardedWeights):
            return super().find_heaviest(alpha, top)
        weights = alpha.weights[:top]
        return alpha.places[: len(weights)], weights

    def _read_records(self, places: np.ndarray) -> list[dict[str, Any]]:
        cached, wanted = self._row_cache, places.tolist()
        new = [position for position in wanted if position not in cached]
        rows = cached | (dict(zip(new, self.view.read_rows(new), strict=True)) if new else {})
        return [rows[position] for position in wanted]

    def sum_squared_deviations(self, alpha: Any, mean: np.ndarray) -> ScaledSquareSum:
        sums: list[ScaledSquareSum] = alpha.sent_job.run_on_slices(
            "sum_squared_deviations", alpha.normalizer, alpha.query_index, mean
        )
        return partial_attention.merge_pairwise(sums, merge_square_sums)

    def collect_source(self, query: Any, alpha: Any, most: int) -> SourceRows:
        view = self.view
        self.selection = view.select_mask(view.filter_rows(self.where))
        return super().collect_source(query, alpha, most)
