"""The execution of `ask`: a scan computes the weights of the rows, then answers are built."""

from __future__ import annotations

import math
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from qkv import partial_attention
from qkv.answer import MIN_DECISIVE_WEIGHT, Answer
from qkv.answer_backend import (
    SAME_WEIGHT_TOLERANCE,
    AnswerBackend,
    Row,
    SourceRows,
    ValueWeight,
    sum_top_weight,
)
from qkv.database.filter.expressions import as_text
from qkv.database.query.calibration import Calibration
from qkv.database.query.column_hint import other_column_hint
from qkv.database.query.far_queries import (
    RANKING_WEIGHTINGS,
    describe_far_query,
    far_ratio,
    find_number_columns,
    gap_ratio,
)
from qkv.database.query.influence import compute_influence
from qkv.database.query.key_match import (
    MIN_ONE_EDIT_SHARE,
    find_one_edit,
    is_sentence,
    measure_mismatch,
    missing_word_hint,
)
from qkv.database.query.number_hint import (
    DIFFERENT_NUMBERS_FACTOR,
    different_numbers_hint,
    has_same_numbers,
    have_different_whole_numbers,
)
from qkv.database.query.scan import RowScan, as_batch, identify_value
from qkv.database.table import cells
from qkv.database.table.encoding import SPELLING_ENCODERS, add_word_columns
from qkv.database.table.left_out_error import (
    ENCODER_KINDS,
    FAR_FACTOR,
    LeftOutError,
    distance_of_score,
)
from qkv.database.table.row_selection import RowSelection
from qkv.database.table.view import TableView
from qkv.errors import ArgumentError, CombinationError, format_plural, join_alternatives
from qkv.frameworks import is_array
from qkv.frameworks.stored_rows import WeighedRows
from qkv.scores import Score
from qkv.util.deadline import check_deadline
from qkv.util.formatting import format_number, format_one_line, quote_cell
from qkv.weightings import Hard, Softmax, TopK, Weighting, WeightingLike

MAX_CACHED_WEIGHTS_PER_BATCH = 2**24
"""The answers of a batch keep their weights up to this number in total.

In a larger batch, an answer computes its weights again when they are read.
"""

MIN_INDEX_HINT_ROWS = 10**6
"""With this many rows and an index, an exact answer says that an approximate one is faster."""

MAX_VOTING_ROWS = 1024
"""The number of rows whose values are compared, for the total weight of each value."""

MAX_VALUE_DIFFERENCE = 0.1
"""Numbers that differ from the value by at most this share of it agree with it."""

MAX_SAME_VALUE_DIFFERENCE = 0.05
"""A hint names the rows of one text key if a value differs from their mean by more than this."""

MIN_BEST_KEY_ROWS = 8
"""The number of rows that are read at least to find all rows with the best-matching key."""

MAX_COMPARED_VALUES = 64
"""So many rows show whether values repeat, as classes do."""

MIN_SCORE_ADVANTAGE, MAX_EXPONENT = 1e-3, 700.0
"""Scores with a smaller difference differ by rounding; e to a larger exponent overflows."""

MIN_LIKELY_WEIGHT = 0.5
"""With less weight, the best key does not look like the right one, and needs no hint."""

MAX_ERROR_SHARE, MIN_WRONG_SHARE = 0.7, 0.5
"""A hint says that nearby keys say little about the value if the expected error is above this share
of the standard deviation of the values, or if this share of the answers is wrong."""

NUMBERS_DISTANCE_FACTOR = 4.0
"""Between two numbers or dates, a number as value soon is like that of a left-out key."""

UNIFORM_ROW_SHARE = 0.98
"""If the number of effective rows is above this share of the rows, the weights count as uniform."""


class QueryExecutor(RowScan):
    """A scan of the rows that also builds the answers.

    `top` is the number of rows in an answer. `calibration` is the calibration of the database, or
    the reason why there is none. `library` is the data frame library of the answers.
    """

    def __init__(
        self,
        view: TableView,
        score: Score,
        weighting: WeightingLike,
        selection: RowSelection,
        top: int,
        tolerance: float | None,
        calibration: Calibration | str = "",
        library: str | None = None,
        confidence: float | None = None,
    ):
        super().__init__(view, score, weighting, selection, tolerance, confidence)
        self.top, self.calibration, self.frame_library = top, calibration, library

    @cached_property
    def component_names(self) -> dict[str, str]:
        """The names of the score and the weighting in an answer."""
        return {
            "score": describe_component(self.score),
            "weighting": describe_component(self.weighting),
        }

    @cached_property
    def index_hint(self) -> str:
        """Advice to use the index, if there is one and the table is large; else ""."""
        has_index = "index" in self.view.settings
        if not has_index or self.row_count < MIN_INDEX_HINT_ROWS or self.tolerance is not None:
            return ""
        return f"approximate=True would read only a few of the {self.row_count:,} rows"

    def without_row(self, position: int) -> QueryExecutor:
        selection = self._selection_without(position)
        options = (self.top, self.tolerance, self.calibration, self.frame_library, self.confidence)
        executor = QueryExecutor(self.view, self.score, self.weighting, selection, *options)
        executor.missing_value_count, executor.where = self.missing_value_count, self.where
        return executor

    @cached_property
    def value_is_mean(self) -> bool:
        """Whether the value of an answer is Σᵢ αᵢ vᵢ, and not the value of one key.

        It is if values are numbers or vectors and all columns of the key are too. A score that
        compares the keys themselves takes no mean.
        """
        view = self.view
        return (
            view.schema.can_pool_values
            and view.has_only_number_keys
            and not self.score.compares_keys
        )

    @property
    def rows_to_read(self) -> int:
        """The number of the heaviest rows whose cells an answer needs."""
        if self.value_is_mean:
            return self.top
        is_pooled = self.view.schema.can_pool_values
        return max(self.top, MIN_BEST_KEY_ROWS if is_pooled else MAX_VOTING_ROWS)

    @property
    def rows_to_rank(self) -> int:
        """The number of the heaviest rows whose weights an answer or its confidence needs."""
        return self.top if self.value_is_mean else max(self.top, MAX_VOTING_ROWS)

    def answer_queries(self, queries: Any) -> list[Answer]:
        """Return one answer for each query."""
        can_pool, answers = self.view.schema.can_pool_values, []
        keeps_weights = len(queries) * len(self.view) <= MAX_CACHED_WEIGHTS_PER_BATCH
        needs_best_rows = (
            can_pool and not self.value_is_mean and type(self.weighting) not in RANKING_WEIGHTINGS
        )
        for batch, weighed, engine in self.run_batches(queries, can_pool):
            best_rows = self._find_best_rows(batch) if needs_best_rows else None
            for i, query in enumerate(batch):
                check_deadline()
                best = None if best_rows is None else best_rows[i]
                answers.append(self._build_answer(query, weighed, i, keeps_weights, engine, best))
        return answers

    def _scan_with_hard_weights(self) -> RowScan:
        """Return a scan of the same rows that gives all weight to the best row."""
        return RowScan(self.view, self.score, Hard(), self.selection)

    def _find_best_rows(self, queries: Any) -> list[np.ndarray]:
        """Return the position, (1,), of the row with the best score for each query; (0,) if
        there is none."""
        scan = self._scan_with_hard_weights()
        weighed, _ = scan.compute_weights(queries, value=False)
        return [scan.find_heaviest(weighed.weights[i], 1)[0] for i in range(len(queries))]

    def _value_of_best_key(
        self,
        positions: np.ndarray,
        weights: np.ndarray,
        records: list[dict[str, Any]],
        best: np.ndarray | None,
        pooled: np.ndarray,
    ) -> tuple[Any, np.ndarray]:
        """Return the value of the best-matching key, and the positions of the rows with this key.

        The value is the mean over these rows.

        `positions`, `weights` and `records` are those of the heaviest rows. `best` is the position
        of the best row, (1,), or None if it is the heaviest.
        """
        schema = self.view.schema
        if best is not None and len(best):
            positions, records, weights = best, self._read_records(best), weights[:0]
        key, size = schema.row_key(records[0]), np.abs(weights)
        # Rows with the same key have the same weight.
        tied_count = int(np.count_nonzero(size >= size[:1] * (1 - SAME_WEIGHT_TOLERANCE)))
        same, rows = positions[:1], records[:1]
        if not schema.unique:
            reads_all = tied_count < min(self.rows_to_read, len(size))
            if best is None and reads_all and not isinstance(self.weighting, Hard | TopK):
                digest = schema.key_digest(key) if tied_count > 1 else b""
                others = [
                    i
                    for i in range(1, tied_count)
                    if schema.key_digest(schema.row_key(records[i])) == digest
                ]
                same = positions[[0, *others]]
                rows = [records[i] for i in (0, *others)]
            elif len(all_same := self._positions_with_key(key)):
                same, rows = all_same, self._read_records(all_same)
        values = schema.build_value_array({x: [row[x] for row in rows] for x in schema.value})
        assert values is not None
        values = values.astype(float)
        mean = values[0] if (values == values[0]).all() else values.mean(axis=0)
        is_vector = schema.value_kind == "vector"
        return self.unpack_value(mean.astype(pooled.dtype) if is_vector else mean), same

    def sum_values(self, records: list[dict[str, Any]], weights: np.ndarray) -> list[ValueWeight]:
        """Return the distinct values of the heaviest rows, with their total weights."""
        values = self.view.schema.values_from_rows(records[:MAX_VOTING_ROWS])
        return _sum_weight_by_value(values, weights.tolist())

    def _find_rows_for_confidence(
        self, alpha: np.ndarray, positions: np.ndarray, weights: np.ndarray, keeps_weights: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and weights of heavy rows, from which the confidence is computed.

        `positions` and `weights` are those of the rows that were read. More rows are needed if the
        weights will not be kept, or if all these rows have the largest weight.
        """
        if self.value_is_mean or not len(weights):
            return positions[:0], weights[:0]
        size = np.abs(weights)
        all_equal = len(size) >= self.rows_to_read and size[-1] >= size[0] * (
            1 - SAME_WEIGHT_TOLERANCE
        )
        has_enough = keeps_weights or not self.view.schema.can_pool_values
        if has_enough and not all_equal:
            return positions, weights
        return self.find_heaviest(alpha, MAX_VOTING_ROWS)

    def _positions_with_key(self, key: Any) -> np.ndarray:
        """Return the positions of the rows with this key that take part in the answer."""
        positions = self.view.find_positions(self.view.find_ids(key))
        return np.asarray(positions[self.selection.are_selected(positions)])

    def _build_answer(
        self,
        query: Any,
        weighed: WeighedRows,
        i: int,
        keeps_weights: bool,
        engine: str,
        best: np.ndarray | None = None,
    ) -> Answer:
        """Build the answer for query i of a batch.

        `best` is the position of the row with the best score, (1,), or None if it is the heaviest.
        """
        alpha = weighed.weights[i]
        pooled = weighed.output[i] if self.view.schema.can_pool_values else None
        error = weighed.weight_error
        if isinstance(query, np.ndarray) and query.ndim == 0:
            query = query.item()
        positions, weights = self.find_heaviest(alpha, self.rows_to_read)
        records = self._read_records(positions)
        rows = self.rows_at_positions(positions[: self.top], weights[: self.top], records)
        value, mean, values, best_key_rows = None, None, [], positions[:0]
        if pooled is not None and (rows or np.isnan(pooled).any()):
            value = mean = self.unpack_value(pooled)
            if rows and not self.value_is_mean:
                value, best_key_rows = self._value_of_best_key(
                    positions, weights, records, best, pooled
                )
        elif records:
            values = self.sum_values(records, weights)
            value = values[0].value
        entropy = None if weighed.entropy is None else float(weighed.entropy[i])
        calibration = self.calibration
        is_familiar = isinstance(calibration, str) or weighed.best_score[i] >= calibration.best
        # The constructor of a frozen dataclass is several times slower.
        answer: Answer = object.__new__(Answer)
        vars(answer).update(
            query=query,
            value=value,
            mean=mean,
            value_is_mean=self.value_is_mean,
            rows=rows,
            values=values,
            total=self.row_count,
            missing=self.missing_value_count,
            is_normalized=self.weighting.is_convex,
            version=self.view.version,
            lse=None if weighed.lse is None else float(weighed.lse[i]),
            error_bound=float(error if isinstance(error, float) else error[i]),
            rows_read=weighed.rows_read,
            missing_weight=None,
            recall=None,
            bound_is_probabilistic=weighed.bound_is_probabilistic,
            coverage=None if isinstance(calibration, str) else calibration.coverage,
            engine=engine,
            **self.component_names,
            _backend=LocalBackend(
                self,
                query,
                alpha if keeps_weights else None,
                (value, mean, best_key_rows),
                entropy,
                is_familiar,
                float(weighed.best_score[i]),
                self._find_rows_for_confidence(alpha, positions, weights, keeps_weights),
            ),
            _library=self.frame_library,
        )
        return answer

    def collect_source(self, query: Any, alpha: np.ndarray, most: int) -> SourceRows:
        """Return at most `most` rows of an answer, with the vectors that the score compared."""
        view, order = self.view, np.arange(len(alpha))
        if self.candidate_positions is None and self.allowed_rows is not None:
            order = np.flatnonzero(self.allowed_rows)
        if len(order) > most:
            order = np.sort(self.rank_rows(alpha, most))
        keys = code = None
        if not self.score.compares_keys:
            ids = view.ids[self._row_positions(order)]
            keys = view.read_key_vectors(ids)
            code = self._encode_queries(query[None]).code if is_array(query) else None
            if code is None:
                words = (
                    view.snapshot.read_tensor("sparse", ids) if view.has_sparse_vectors else None
                )
                code, keys = add_word_columns(view.encoder, [query], keys, words)
            code = code[0]
        schema = view.schema
        return SourceRows(
            rows=self.rows_in_order(alpha, order),
            keys=keys,
            query=code,
            encoder=view.encoder,
            score=self.score,
            weighting=self.weighting,
            column_names=(", ".join(schema.key), ", ".join(schema.value)),
        )

    def _scan_rows_without_value(self) -> RowScan:
        """Return a scan that finds the best one of the rows that have no value."""
        selection = self.view.select_rows_without_value(self.where)
        return RowScan(self.view, self.score, Hard(), selection)

    def find_best_without_value(self, query: Any) -> tuple[float, dict[str, Any]] | None:
        """Return the best score of the rows that have no value, and the cells of that row.

        None if all rows have a value.
        """
        if not self.missing_value_count:
            return None
        scan = self._scan_rows_without_value()
        weighed, _ = scan.compute_weights(as_batch(query), value=False)
        at, _ = scan.find_heaviest(weighed.weights[0], 1)
        return (float(weighed.best_score[0]), self._read_records(at)[0]) if len(at) else None

    def missing_value_hint(self, query: Any) -> str:
        """Return a hint if the query is a key and all rows with this key lack a value; else ""."""
        schema = self.view.schema
        if is_array(query) and schema.key_kind != "vector":
            return ""
        rows = self.view.read_rows(self.view.find_ids(query))
        missing = [[name for name in schema.value if cells.is_missing(row[name])] for row in rows]
        if not rows or not all(
            x if schema.can_pool_values else len(x) == len(schema.value) for x in missing
        ):
            return ""
        return (
            f"{format_one_line(query)} is a key, but its row lacks "
            f"{join_alternatives(missing[-1])} and is left out"
        )


class LocalBackend(AnswerBackend):
    """Computes the attributes of an answer from the database in this process.

    `values` are the value, the mean, and the positions of the rows with the best-matching key.
    `weights` and `entropy` are None if they are computed when they are read. `is_familiar` is False
    if the best score is below the calibrated minimum; the prediction set is then empty.
    `heavy_rows` are the positions and weights of heavy rows, for the confidence.
    """

    def __init__(
        self,
        executor: QueryExecutor,
        query: Any,
        weights: Any,
        values: tuple[Any, Any, np.ndarray],
        entropy: float | None,
        is_familiar: bool,
        best_score: float,
        heavy_rows: tuple[np.ndarray, np.ndarray],
    ):
        self.executor, self.query, self.cached_weights = executor, query, weights
        self.value, self.mean, self.best_key_rows = values
        self.known_entropy, self.is_familiar = entropy, is_familiar
        self.best_score, self.heavy_rows = best_score, heavy_rows

    @cached_property
    def far_ratio(self) -> float:
        """How far the query is from the nearest key; above 1 if it is far from every key."""
        executor, encoder = self.executor, self.executor.view.encoder
        score = executor.view.resolve_score(None)
        if executor.score is not score or not executor.row_count:
            return 0.0
        if encoder.kind == "arrays":
            estimate = executor.view.left_out_error
            distance = distance_of_score(score, self.best_score)
            return 0.0 if estimate is None else distance / estimate.far_distance
        if encoder.kind != "numbers":
            columns = find_number_columns(executor.view, self.query)
            return max((column.far_ratio for column in columns), default=0.0)
        return far_ratio(encoder, score, self.best_score)  # type: ignore[arg-type]

    @property
    def is_far(self) -> bool:
        return self.far_ratio > 1

    @property
    def gap_ratio(self) -> float:
        """How far the query is from the nearest key; above 1, the confidence is divided by it."""
        encoder, ratio = self.executor.view.encoder, self.far_ratio
        if encoder.kind != "numbers" or not ratio:
            return ratio
        score = self.executor.view.resolve_score(None)
        return gap_ratio(encoder, score, self.best_score)  # type: ignore[arg-type]

    @cached_property
    def left_out_error(self) -> tuple[LeftOutError, float] | None:
        """The errors at left-out keys, and from 0 to 1 how much this query is like such a key.

        None without an estimate for this score and weighting.
        """
        executor = self.executor
        estimate, score = executor.view.left_out_error, executor.view.resolve_score(None)
        is_default = executor.score is score and _is_plain_softmax(executor.weighting)
        if estimate is None or not (is_default and executor.row_count):
            return None
        columns = len(executor.view.schema.value) if executor.value_is_mean else 1
        if bool(estimate.deviation) != executor.value_is_mean or len(estimate.at_keys) != columns:
            return None
        distance = distance_of_score(score, self.best_score)
        if executor.view.encoder.kind == "numbers" and executor.view.schema.can_pool_values:
            distance *= NUMBERS_DISTANCE_FACTOR
        return estimate, min(distance / estimate.distance, 1.0)

    def compute_expected_error(self) -> Any:
        if self.left_out_error is None or not self.executor.value_is_mean:
            return None
        estimate, share = self.left_out_error
        return self.executor.unpack_value(estimate.expect_error(share))

    def left_out_confidence(self, logit: float) -> float | None:
        if self.left_out_error is None or not isinstance(self.executor.calibration, str):
            return None
        estimate, share = self.left_out_error
        return estimate.expect_confidence(share, logit)

    def _left_out_hint(self) -> str:
        """Return a hint if nearby keys do not tell the value, else ""."""
        if self.left_out_error is None:
            return ""
        estimate, share = self.left_out_error
        errors = estimate.expect_error(share)
        if not estimate.deviation:
            if errors[0] < MIN_WRONG_SHARE:
                return ""
            return (
                f"if a row is left out, {100 * estimate.left_out[0]:.0f} % of the answers at its "
                "key are wrong: nearby keys say little about the value"
            )
        deviation = np.array(estimate.deviation)
        column = int((errors / np.where(deviation > 0, deviation, np.inf)).argmax())
        if errors[column] < MAX_ERROR_SHARE * deviation[column] or not deviation[column]:
            return ""
        name = self.executor.view.schema.value[column] if len(errors) > 1 else "the value"
        left_out, usual = (f"{x[column]:.2g}" for x in (estimate.left_out, estimate.deviation))
        return (
            f"nearby keys say little about {name}: the error is about {left_out} at the key of a "
            f"row that is left out, and the standard deviation of all values is {usual}"
        )

    def confidence_factor(self, rows: list[Row]) -> float:
        if self.executor.missing_value_count and self.executor.missing_value_hint(self.query):
            return 0.0
        ratio = self.gap_ratio
        factor = min(1 / ratio, 1.0) if ratio else 1.0
        if self.better_row_without_value is not None:
            factor /= 1 + math.exp(min(self.better_row_without_value[0], MAX_EXPONENT))
        if rows and have_different_whole_numbers(self.query, rows[0].key):
            factor *= DIFFERENT_NUMBERS_FACTOR
        else:
            share = self._find_one_edit(rows)[1]
            factor /= 1 + max(share - MIN_ONE_EDIT_SHARE, 0.0) / (1 - MIN_ONE_EDIT_SHARE)
        return factor

    def _find_one_edit(self, rows: list[Row]) -> tuple[str, float]:
        """Return "letter" or "digit" if the best key differs from the query by one, else "".

        Also return the share of the keys that differ so from another one.
        """
        if not rows or not self.compares_spelling:
            return "", 0.0
        query, key = self.query, rows[0].key
        is_text = isinstance(query, str) and isinstance(key, str)
        kind = find_one_edit(query, key) if is_text else ""
        return kind, self.executor.view.one_edit_share(kind) if kind else 0.0

    def _one_edit_hint(self, rows: list[Row]) -> str:
        """Return a hint if one letter often makes another key, and the best key differs so."""
        kind, share = self._find_one_edit(rows)
        if share <= MIN_ONE_EDIT_SHARE:
            return ""
        return (
            f"the best key, {format_one_line(rows[0].key)}, differs by one {kind}, as "
            f"{100 * share:.0f} % of the keys do from another: check that it is what you mean"
        )

    @cached_property
    def better_row_without_value(self) -> tuple[float, dict[str, Any]] | None:
        """How much better than the best row another one fits that has no value, and its cells.

        None if there is none. Numbers, dates and vectors are not names of rows: the rows around
        one without a value tell its value.
        """
        executor = self.executor
        if executor.view.encoder.kind in ENCODER_KINDS or not executor.row_count:
            return None
        if executor.score.compares_keys or not executor.weighting.is_convex:
            return None
        found = executor.find_best_without_value(self.query)
        if found is None or found[0] <= self.best_score + MIN_SCORE_ADVANTAGE:
            return None
        return found[0] - self.best_score, found[1]

    def _better_row_hint(self) -> str:
        """Return a hint if the best-matching row has no value, else ""."""
        if self.better_row_without_value is None:
            return ""
        schema, row = self.executor.view.schema, self.better_row_without_value[1]
        lacking = [name for name in schema.value if cells.is_missing(row[name])]
        return (
            f"the best match, {format_one_line(schema.row_key(row))}, lacks "
            f"{join_alternatives(lacking)} and is left out"
        )

    @property
    def compares_spelling(self) -> bool:
        """Whether keys are compared by their letters too, and not by meaning alone."""
        return self.executor.view.encoder.kind in SPELLING_ENCODERS

    def has_same_numbers(self, rows: list[Row]) -> bool:
        return bool(rows) and self.compares_spelling and has_same_numbers(self.query, rows[0].key)

    def measure_mismatch(self, rows: list[Row]) -> float:
        if not rows or not self.compares_spelling:
            return 0.0
        mismatch = measure_mismatch(self.query, rows[0].key)
        # Similar texts tell the class of a new text, although they have other words.
        tells_class = mismatch and is_sentence(self.query) and self._values_repeat()
        return 0.0 if tells_class else mismatch

    def _values_repeat(self) -> bool:
        """Return whether most of the heavy rows have the value of another one."""
        positions = self.heavy_rows[0][:MAX_COMPARED_VALUES]
        records = self.executor._read_records(positions)
        values = self.executor.view.schema.values_from_rows(records)
        return 2 * len(set(map(identify_value, values))) <= len(records)

    def calibrate_logit(self, logit: float) -> float:
        calibration = self.executor.calibration
        return logit if isinstance(calibration, str) else calibration.correct_logit(logit)

    def _several_values_hint(self, rows: list[Row]) -> str:
        """Return a hint if several rows have the best key, with different numbers; else ""."""
        executor, schema = self.executor, self.executor.view.schema
        if self.mean is None or schema.value_kind == "vector" or not rows:
            return ""
        positions = self.best_key_rows
        if executor.value_is_mean:
            best_key = rows[0].key
            same = [] if is_array(best_key) else [row for row in rows if row.key == best_key]
            if len(same) < 2 or sum(row.weight for row in same) < MIN_DECISIVE_WEIGHT:
                return ""
            positions = executor._positions_with_key(rows[0].key)
        if len(positions) < 2:
            return ""
        ids = executor.view.ids[positions]
        stored = np.asarray(executor.view.snapshot.read_tensor("value", ids), float)
        limit = MAX_VALUE_DIFFERENCE if executor.value_is_mean else MAX_SAME_VALUE_DIFFERENCE
        differs = measure_agreement(stored, stored.mean(axis=0), limit) < 1
        if not differs.any():
            return ""
        column = int(differs.any(axis=0).argmax())
        low, high = (
            format_number(float(x)) for x in (stored[:, column].min(), stored[:, column].max())
        )
        name = "values" if schema.value_kind == "number" else schema.value[column]
        return f"{len(positions):,} rows have this key, with {name} from {low} to {high}"

    def _find_own_values(self, rows: list[Row]) -> list[Any]:
        """Return the values of the heaviest rows whose key of numbers or dates equals the query.

        Return [] for other keys, scores and weightings: there, another key may be nearer.
        """
        executor, schema = self.executor, self.executor.view.schema
        if not rows or schema.key_kind in ("text", "vector") or schema.value_kind == "vector":
            return []
        is_default = executor.score is executor.view.resolve_score(None)
        if not is_default or type(executor.weighting) not in RANKING_WEIGHTINGS:
            return []
        if is_array(self.query) or is_array(rows[0].key) or rows[0].key != self.query:
            return []
        return [row.value for row in rows if row.key == self.query]

    def _agrees_with(self, values: list[Any]) -> np.ndarray:
        """Return which of these values are that of the answer: of numbers, about the same."""
        if self.mean is None:
            same = identify_value(self.value)
            return np.array([identify_value(value) == same for value in values])
        stored, value = (
            [[*x.values()] if isinstance(x, dict) else [x] for x in each]
            for each in (values, [self.value])
        )
        return np.asarray(measure_agreement(np.array(stored), value[0]).min(axis=1) == 1)

    def is_value_of_own_key(self, rows: list[Row]) -> bool:
        executor = self.executor
        if executor.value_is_mean or not self._find_own_values(rows):
            return False
        positions = executor._positions_with_key(rows[0].key)
        if not 0 < len(positions) <= MAX_VOTING_ROWS:
            return False
        own = executor.view.schema.values_from_rows(executor._read_records(positions))
        return bool(self._agrees_with(own).all())

    def _own_value_hint(self, rows: list[Row]) -> str:
        """Return a hint if the query is a key of numbers or dates with another value; else ""."""
        own = self._find_own_values(rows)
        if not own:
            return ""
        agrees = self._agrees_with(own)
        # Several rows with different numbers have a hint of their own.
        if agrees.any() if self.mean is None else (len(own) > 1 or agrees.all()):
            return ""
        shown = format_number(own[0]) if isinstance(own[0], float) else quote_cell(own[0])
        return (
            f"{format_one_line(self.query)} is a key whose own value is {shown}, but this answer "
            "also weighs other keys: look it up with D[key] or qkv get"
        )

    def _far_hint(self, rows: list[Row]) -> str:
        """Return a hint if the query is far from every key, else ""."""
        view = self.executor.view
        if not (rows and self.is_far):
            return ""
        for column in find_number_columns(view, self.query):
            if column.far_ratio > 1:
                return column.describe()
        if view.encoder.kind == "arrays":
            return (
                f"the query is far from every key: {FAR_FACTOR * self.far_ratio:.3g} times as far "
                "as any key is from its nearest"
            )
        code = view.encode_queries(as_batch(self.query))
        return describe_far_query(view, self.query, code, rows[0].key)

    def _row_weights(self) -> Any:
        """Return the weights of the rows that the executor reads."""
        if self.cached_weights is not None:
            return self.cached_weights
        return self.executor.compute_weights(as_batch(self.query), value=False)[0].weights[0]

    def compute_weights(self) -> np.ndarray:
        return self.executor.expand_to_all_rows(np.asarray(self._row_weights()))

    def compute_entropy(self) -> float:
        if self.known_entropy is not None:
            return self.known_entropy
        return float(partial_attention.compute_entropy(np.asarray(self._row_weights())[None])[0])

    def compute_spread(self) -> Any:
        executor, mean = self.executor, self.mean
        if mean is None:
            return None
        mean = np.asarray(list(mean.values()) if isinstance(mean, dict) else mean)
        total, scale = executor.sum_squared_deviations(self._row_weights(), mean)
        return executor.unpack_value(2 * scale * np.sqrt(np.maximum(total, 0)))

    def compute_value_shares(self) -> tuple[float, float] | None:
        executor = self.executor
        if self.mean is None or executor.value_is_mean:
            return None
        positions, weights = self.heavy_rows
        if self.cached_weights is not None:
            positions, weights = executor.find_heaviest(self.cached_weights, MAX_VOTING_ROWS)
        if not len(positions):
            return 0.0, 0.0
        value = list(self.value.values()) if isinstance(self.value, dict) else self.value
        stored = executor.view.snapshot.read_tensor("value", executor.view.ids[positions])
        is_equal = np.isclose(np.asarray(stored, float), np.atleast_1d(value), atol=0).all(axis=1)
        agreement = is_equal.astype(float)
        best = np.isin(positions, self.best_key_rows)
        is_vector = executor.view.schema.value_kind == "vector"
        agreement[best] = 1.0 if is_vector else measure_agreement(stored[best], value).min(axis=1)
        sizes = np.abs(weights.astype(float))
        own, rest = float(sizes @ agreement), sizes * (1 - agreement)
        others, group = np.unique(np.asarray(stored)[rest > 0], axis=0, return_inverse=True)
        next_size = np.bincount(group.reshape(-1), rest[rest > 0]).max() if len(others) else 0.0
        total = 1.0 if executor.weighting.is_convex else sizes.sum()
        return min(own / total, 1.0), float(next_size / total)

    def compute_top_weight(self) -> float:
        return sum_top_weight(self.heavy_rows[1])

    def rows_above(self, weight: float) -> list[Row]:
        alpha = np.asarray(self._row_weights())
        above = np.where(alpha >= weight, alpha, 0)
        count = max(int(np.count_nonzero(above)), 1)
        return self.executor.rows_at_positions(*self.executor.find_heaviest(above, count))

    def prediction_set(self) -> list[Row]:
        executor = self.executor
        if not self.is_familiar:
            return []
        if isinstance(executor.calibration, str):
            raise CombinationError(f"no prediction set: {executor.calibration}")
        alpha = np.asarray(self._row_weights())
        is_member = alpha >= executor.calibration.weight
        if executor.allowed_rows is not None and executor.candidate_positions is None:
            is_member &= executor.allowed_rows
        members = np.flatnonzero(is_member)
        return executor.rows_in_order(alpha, members[np.argsort(-alpha[members], kind="stable")])

    def answer_without(self, position: int) -> Answer:
        executor, rows = self.executor, len(self.executor.view.ids)
        if not 0 <= position < rows:
            raise ArgumentError(
                f"row {position} does not exist: rows are numbered 0 to {rows - 1:,}"
            )
        if not executor.selection.are_selected(np.array([position]))[0]:
            raise ArgumentError(
                f"row {position} did not take part in this answer, which is the same without it"
            )
        return executor.without_row(position).answer_queries(as_batch(self.query))[0]

    def compute_influence(self) -> Any:
        return compute_influence(
            self.executor,
            self.query,
            np.asarray(self._row_weights()),
            self.value if self.mean is None else self.mean,
        )

    def _missing_word_hint(self, rows: list[Row]) -> str:
        """Return the hint that the best key has another word than the query, or ""."""
        if not rows or not self.compares_spelling:
            return ""
        key = rows[0].key
        hint = missing_word_hint(self.query, key)
        if not hint or sum(x.weight for x in rows if x.key == key) < MIN_LIKELY_WEIGHT:
            return ""
        return hint

    def compute_hint(self, rows: list[Row]) -> str:
        executor = self.executor
        if not executor.row_count and executor.where is not None:
            if executor.missing_value_count:
                match = "matches" if executor.missing_value_count == 1 else "match"
                count = format_plural(executor.missing_value_count, "row")
                condition = as_text(executor.where)
                return f"{count} {match} {condition}, but none of them has a value"
            return executor.view.why_none_pass(executor.where)
        if executor.missing_value_count and (hint := executor.missing_value_hint(self.query)):
            return hint
        if rows and executor.missing_value_count and (hint := self._better_row_hint()):
            return hint
        if hint := self._far_hint(rows):
            return hint
        missing_word = self._missing_word_hint(rows)
        if not missing_word and (hint := self._several_values_hint(rows)):
            return hint
        if hint := self._own_value_hint(rows):
            return hint
        for row in rows[:1]:
            columns = executor.view.schema.key
            if hint := other_column_hint(self.query, row.key, row.record, columns):
                return hint
            if hint := different_numbers_hint(self.query, row.key):
                return hint
        if hint := missing_word or self._one_edit_hint(rows):
            return hint
        if rows and (hint := self._left_out_hint()):
            return hint
        if not rows or executor.score is not executor.view.resolve_score(None):
            return ""
        is_uniform = (
            executor.weighting.is_convex
            and executor.row_count > 1
            and self.compute_entropy() > math.log(executor.row_count * UNIFORM_ROW_SHARE)
        )
        if is_uniform and not _separates_scores(executor.weighting):
            return ""
        hint = executor.view.encoder.score_hint(self.query, rows[0].key, is_uniform)
        return hint or executor.index_hint

    def collect_source(self, most: int) -> SourceRows:
        return self.executor.collect_source(self.query, np.asarray(self._row_weights()), most)


def measure_agreement(
    stored: np.ndarray, value: Any, max_difference: float = MAX_VALUE_DIFFERENCE
) -> np.ndarray:
    """Return how well numbers (m, d) agree with the value (d,): 1 if they are close to it.

    For other numbers it is `max_difference`, divided by their relative difference.

    >>> measure_agreement(np.array([[4.9], [5.1], [10.0]]), 5.0).tolist()
    [[1.0], [1.0], [0.1]]
    >>> measure_agreement(np.array([[np.inf], [5.0]]), np.inf).tolist()
    [[1.0], [0.0]]
    """
    value, stored = np.atleast_1d(np.asarray(value, float)), np.asarray(stored, float)
    with np.errstate(invalid="ignore"):  # ∞ − ∞, and ∞ / ∞
        difference = np.where(stored == value, 0.0, np.abs(stored - value))
        limit = max_difference * np.broadcast_to(np.abs(value), difference.shape)
        ratio = limit / np.where(difference > 0, difference, 1.0)
    return np.where(np.isinf(difference), 0.0, np.where(difference <= limit, 1.0, ratio))


def _is_plain_softmax(weighting: Weighting) -> bool:
    """Return whether a weighting is the default one."""
    if not isinstance(weighting, Softmax) or weighting.sink is not None:
        return False
    return isinstance(weighting.temperature, int | float) and weighting.temperature == 1


def _separates_scores(weighting: Weighting) -> bool:
    """Return whether the weighting gives different weights to the scores 0 and 1."""
    weights = np.asarray(weighting(np.array([[0.0, 1.0]])))
    return bool(
        (partial_attention.compute_entropy(weights) < math.log(2 * UNIFORM_ROW_SHARE)).all()
    )


def _sum_weight_by_value(values: list[Any], weights: list[float]) -> list[ValueWeight]:
    """Return the distinct values with their total weights, the largest weight first."""
    if set(map(type, values)) == {str} and len(set(values)) == len(values) and min(weights) >= 0:
        return list(map(ValueWeight, values, weights))  # rows come with the heaviest first
    total: dict[Any, float] = {}
    first: dict[Any, Any] = {}
    for value, weight in zip(values, weights, strict=False):
        identity = value if type(value) is str else identify_value(value)
        total[identity] = total.get(identity, 0.0) + weight
        first.setdefault(identity, value)
    return sorted(map(ValueWeight, first.values(), total.values()), key=itemgetter(1), reverse=True)


def describe_component(component: Any) -> str:
    """Return the class of a score or weighting, with the numbers that differ from its defaults."""
    numbers = [
        f"{field.name}={number:.4g}"
        for field in getattr(component, "__dataclass_fields__", {}).values()
        if (number := getattr(component, field.name)) is not field.default
        and isinstance(number, int | float)
        and number != field.default
    ]
    name = type(component).__name__
    return f"{name}({', '.join(numbers)})" if numbers else name
