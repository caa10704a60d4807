"""Asking: one reading of the rows for a batch of queries, made into answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv import attention, partial_attention, weightings
from qkv.answer import Answer
from qkv.answer_backend import AnswerBackend, Row, SourceRows, ValueWeight
from qkv.database.filter.expressions import as_text
from qkv.database.table import cells
from qkv.database.table.encoding import add_word_columns
from qkv.database.table.view import ROWS_PER_CHUNK, TableView
from qkv.errors import ArgumentError, CombinationError, format_plural, join_alternatives
from qkv.frameworks import is_array, to_numpy
from qkv.frameworks.ragged import EncodedQuery
from qkv.frameworks.stored_rows import WeighedRows
from qkv.scores import Score
from qkv.util.deadline import check_deadline
from qkv.util.formatting import format_one_line
from qkv.weightings import Weighting, WeightingLike

if TYPE_CHECKING:
    from qkv.database.query.calibration import Calibration

MAX_SCORES_PER_BATCH = 2**26
"""Scores that are held together: a batch of queries is cut to this."""

MAX_SPARSE_QUERIES_PER_BATCH = 64
"""Queries that are asked together where keys have words: each word is a column of its own."""

MAX_KEPT_WEIGHTS_PER_BATCH = 2**24
"""Weights of a batch that its answers keep; beyond it an answer finds them again when asked."""

ROWS_PER_RUN = 512
"""Neighbouring rows of which only the heaviest is looked at first."""

MAX_VOTING_ROWS = 1024
"""Rows whose values are compared to find the heaviest value."""

UNIFORM_ROW_SHARE = 0.98
"""The share of the rows that takes part where as good as all do alike."""

ScaledSquareSum = tuple[np.ndarray, np.ndarray]
"""A sum of squares, and the square root of what it is counted in."""


class QueryExecutor:
    """A score, a weighting and the rows that may answer; `answer_queries` asks them."""

    where: Any = None
    """The condition that these rows pass."""

    def __init__(
        self,
        view: TableView,
        score: Score,
        weighting: WeightingLike,
        live: np.ndarray | None,
        top: int,
        tolerance: float | None,
        promise: Calibration | str = "",
        library: str | None = None,
        confidence: float | None = None,
    ):
        self.view, self.score, self.weighting = view, score, weightings.resolve(weighting)
        self.top, self.tolerance, self.calibration = top, tolerance, promise
        self.frame_library, self.confidence = library, confidence
        self.allowed_rows, self.missing_value_count = view.mask_missing_values(live)
        self.row_count = (
            len(view.ids) if self.allowed_rows is None else int(np.count_nonzero(self.allowed_rows))
        )
        # Where few rows may answer, weights are of those alone.
        self.candidate_count = view.pick_rows(self.allowed_rows)[1]
        self.candidate_positions = None
        if self.allowed_rows is not None and self.candidate_count < len(view.ids):
            self.candidate_positions = np.flatnonzero(self.allowed_rows)

    @cached_property
    def component_names(self) -> dict[str, str]:
        """The score and the weighting, as an answer tells of them."""
        return {
            "score": describe_component(self.score),
            "weighting": describe_component(self.weighting),
        }

    @cached_property
    def _scan_text(self) -> str:
        return (
            f"{format_plural(self.candidate_count, 'row')} in "
            f"{format_plural(self.view.chunk_count, 'piece')}"
        )

    def answer_queries(self, queries: Any) -> list[Answer]:
        pools, found = self.view.schema.can_pool_values, []
        keep = len(queries) * len(self.view) <= MAX_KEPT_WEIGHTS_PER_BATCH
        for some, weighed, engine in self.run_batches(queries, pools):
            for i, query in enumerate(some):
                check_deadline()
                found.append(
                    self._build_answer(
                        query, weighed, i, keep, engine=engine, **self.component_names
                    )
                )
        return found

    def run_batches(
        self, queries: Any, value: bool, most: int = MAX_SCORES_PER_BATCH
    ) -> Iterator[tuple[Any, WeighedRows, str]]:
        """Queries that are asked together, what is known of them, and how that was found."""
        step = max(min(MAX_SCORES_PER_BATCH // len(self.view), most), 1)
        step = min(step, MAX_SPARSE_QUERIES_PER_BATCH) if self.view.has_sparse_vectors else step
        for start in range(0, len(queries), step):
            check_deadline()
            some = queries[start : start + step]
            yield some, *self.compute_weights(some, value)

    def without_row(self, place: int) -> QueryExecutor:
        """The same had the row at this place not been there."""
        live = (
            np.ones(len(self.view.ids), bool)
            if self.allowed_rows is None
            else self.allowed_rows.copy()
        )
        live[place] = False
        how = (self.top, self.tolerance, self.calibration, self.frame_library, self.confidence)
        made = QueryExecutor(self.view, self.score, self.weighting, live, *how)
        made.missing_value_count, made.where = self.missing_value_count, self.where
        return made

    def compute_weights(self, queries: Any, value: bool) -> tuple[WeighedRows, str]:
        view, code, matches = self.view, EncodedQuery(None), None
        if self.score.compares_keys:
            matches, engine = self.match_keys(queries), "exact index"
        else:
            code, engine = self._encode_queries(queries), f"scan of {self._scan_text}"
        found = attention.weigh_rows(
            view.open_vectors(self.allowed_rows, value=value, asked=code.sparse_positions),
            code.code,
            score=self.score,
            weighting=self.weighting,
            tolerance=self.tolerance,
            confidence=self.confidence,
            matches=matches,
        )
        if found.bound is not None:
            engine = f"codes of {self._scan_text}, {found.rows_read:,} of them read in full"
        elif found.refusal:
            engine += f", exactly: {found.refusal}"
        return found, engine

    def match_keys(self, queries: Any) -> np.ndarray:
        """1 where a row's key is the query, else 0, (n, m)."""
        ids = (
            self.view.ids
            if self.candidate_positions is None
            else self.view.ids[self.candidate_positions]
        )
        found = np.zeros((len(queries), len(ids)))
        for i, key in enumerate(queries):
            found[i, np.isin(ids, self.view.find_ids(key))] = 1.0
        return found

    def _encode_queries(self, queries: Any) -> EncodedQuery:
        given = is_array(queries) and self.view.schema.key_kind != "vector"  # not a text: a vector
        if not given:
            return self.view.encode_queries(queries)
        code = to_numpy(queries)
        self.view.check_query(EncodedQuery(code))
        if not np.isfinite(code).all():
            bad = int(np.isfinite(code).all(axis=1).argmin())
            raise ArgumentError(f"query {bad} holds NaN or infinity: no row is near it")
        return EncodedQuery(np.ascontiguousarray(code, dtype=np.result_type(code, np.float32)))

    def _build_answer(
        self, query: Any, found: WeighedRows, at: int, keep: bool, **told: Any
    ) -> Answer:
        alpha, pooled = (
            found.weights[at],
            found.output[at] if self.view.schema.can_pool_values else None,
        )
        error = found.weight_error
        if isinstance(query, np.ndarray) and query.ndim == 0:
            query = query.item()
        top = self.top if pooled is not None else max(self.top, MAX_VOTING_ROWS)
        places, weights = self.find_heaviest(alpha, top)
        records = self._read_records(places)
        rows = self.rows_at_positions(places[: self.top], weights[: self.top], records)
        value, values = None, []
        if pooled is not None and (rows or np.isnan(pooled).any()):
            value = self.unpack_value(pooled)
        elif records:
            held = self.view.schema.values_from_rows(records[:MAX_VOTING_ROWS])
            values = _sum_weight_by_value(held, weights.tolist())
            value = values[0].value
        entropy = None if found.entropy is None else float(found.entropy[at])
        fits = isinstance(self.calibration, str) or found.best_score[at] >= self.calibration.best
        answer: Answer = object.__new__(Answer)  # which sets its fields one by one, as it is frozen
        vars(answer).update(
            query=query,
            value=value,
            rows=rows,
            values=values,
            total=self.row_count,
            missing=self.missing_value_count,
            is_normalized=self.weighting.is_convex,
            version=self.view.version,
            lse=None if found.lse is None else float(found.lse[at]),
            error_bound=float(error if isinstance(error, float) else error[at]),
            rows_read=found.rows_read,
            bound_is_probabilistic=found.bound_is_probabilistic,
            coverage=None if isinstance(self.calibration, str) else self.calibration.coverage,
            **told,
            _backend=LocalBackend(self, query, alpha if keep else None, value, entropy, fits),
            _library=self.frame_library,
        )
        return answer

    def collect_source(self, query: Any, alpha: np.ndarray, most: int) -> SourceRows:
        view, order = self.view, np.arange(len(alpha))
        if self.candidate_positions is None and self.allowed_rows is not None:
            order = np.flatnonzero(self.allowed_rows)
        if len(order) > most:
            order = np.sort(self.rank_rows(alpha, most))
        keys = code = None
        if not self.score.compares_keys:
            places = order if self.candidate_positions is None else self.candidate_positions[order]
            ids = view.ids[places]
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

    def missing_value_hint(self, query: Any) -> str:
        """That the query is a key, where no row that has it has a value; else empty."""
        schema = self.view.schema
        if is_array(query) and schema.key_kind != "vector":
            return ""
        rows = self.view.read_rows(self.view.find_ids(query))
        lacks = [[name for name in schema.value if cells.is_missing(row[name])] for row in rows]
        if not rows or not all(
            x if schema.can_pool_values else len(x) == len(schema.value) for x in lacks
        ):
            return ""
        return (
            f"{format_one_line(query)} is a key, but its row lacks "
            f"{join_alternatives(lacks[-1])} and is left out"
        )

    def compute_full_weights(self, queries: Any) -> np.ndarray:
        """α of every row for each query, (n, m), 0 for those that were not asked."""
        return self.expand_to_all_rows(self.compute_weights(queries, value=False)[0].weights)

    def expand_to_all_rows(self, alpha: np.ndarray) -> np.ndarray:
        """Numbers (…, m) of all rows, 0 for those that were not asked."""
        if self.candidate_positions is None:
            return alpha
        out = np.zeros((*alpha.shape[:-1], len(self.view.ids)), alpha.dtype)
        out[..., self.candidate_positions] = alpha
        return out

    def rank_rows(self, alpha: np.ndarray, top: int) -> np.ndarray:
        """Places of the heaviest rows; of equal ones the lowest comes first."""
        size = alpha if self.weighting.is_convex else np.abs(alpha)
        if top >= len(size):
            near = (-size).argsort(kind="stable")
        else:
            # The heaviest lie where the maxima of short runs are among the largest.
            starts = np.arange(0, len(size), ROWS_PER_RUN)
            best = np.maximum.reduceat(size, starts)
            runs = starts[(best >= _kth_largest(best, top)) & (best > 0)]
            near = (runs[:, None] + np.arange(ROWS_PER_RUN)).reshape(-1)
            near = near[near < len(size)]
            if len(near):
                near = near[size[near] >= _kth_largest(size[near], top)]
            near = near[np.argsort(-size[near], kind="stable")][:top]
        found: np.ndarray = near[: np.count_nonzero(size[near] > 0)]  # NaN comes last
        return found

    def find_heaviest(self, alpha: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of the heaviest rows, and their weights."""
        order = self.rank_rows(alpha, top)
        return order if self.candidate_positions is None else self.candidate_positions[
            order
        ], alpha[order]

    def rows_in_order(self, alpha: np.ndarray, order: np.ndarray) -> list[Row]:
        """The rows of these weights in an order of their places."""
        return self.rows_at_positions(
            order if self.candidate_positions is None else self.candidate_positions[order],
            alpha[order],
        )

    def rows_at_positions(
        self, places: np.ndarray, weights: np.ndarray, records: list[dict[str, Any]] | None = None
    ) -> list[Row]:
        """The rows at some places, with these weights; the first records are theirs, if known."""
        records = self._read_records(places) if records is None else records
        records, schema = records[: len(places)], self.view.schema
        told = (schema.keys_from_rows(records), schema.values_from_rows(records), weights.tolist())
        return list(map(Row, *told, places.tolist(), records))

    def _read_records(self, places: np.ndarray) -> list[dict[str, Any]]:
        return self.view.read_rows(self.view.ids[places].tolist())

    def unpack_value(self, pooled: np.ndarray) -> Any:
        if self.view.schema.value_kind == "number":
            return float(pooled[0])
        if self.view.schema.value_kind == "numbers":
            return dict(zip(self.view.schema.value, map(float, pooled), strict=True))
        return pooled

    def sum_squared_deviations(self, alpha: np.ndarray, mean: np.ndarray) -> ScaledSquareSum:
        """Σᵢ αᵢ (vᵢ − mean)² / 4, in units of the square of the second array."""
        total = np.zeros_like(np.atleast_1d(mean), dtype=float)
        found = total, np.full_like(total, np.finfo(float).tiny)
        with np.errstate(invalid="ignore"):
            for group in self.view.open_vectors(self.allowed_rows, value=True).iter_spans(
                ROWS_PER_CHUNK, ahead=("value",)
            ):
                for cut in group:
                    some = alpha[cut.start : cut.start + cut.size]
                    used = np.flatnonzero(some)
                    # Halves, over the largest so far: no square goes beyond a float.
                    far = cut.read_values(used).astype(float) / 2 - mean / 2
                    size = np.maximum(np.abs(far).max(axis=0, initial=0), found[1])
                    found = merge_square_sums(found, (some[used] @ (far / size) ** 2, size))
        return found


class LocalBackend(AnswerBackend):
    """The weights `kept_weights` of one query and their entropy, None where they are found when
    asked for; its set is empty where the query does not `fit` what was promised."""

    def __init__(
        self,
        asked: QueryExecutor,
        query: Any,
        alpha: Any,
        value: Any,
        entropy: float | None,
        fits: bool,
    ):
        self.executor, self.query, self.kept_weights, self.value = asked, query, alpha, value
        self.known_entropy, self.fits_calibration = entropy, fits

    def _row_weights(self) -> Any:
        if self.kept_weights is not None:
            return self.kept_weights
        return self.executor.compute_weights(as_batch(self.query), value=False)[0].weights[0]

    def compute_weights(self) -> np.ndarray:
        return self.executor.expand_to_all_rows(np.asarray(self._row_weights()))

    def compute_entropy(self) -> float:
        if self.known_entropy is not None:
            return self.known_entropy
        return float(partial_attention.compute_entropy(np.asarray(self._row_weights())[None])[0])

    def compute_spread(self) -> Any:
        asked, value = self.executor, self.value
        if value is None or not asked.view.schema.can_pool_values:
            return None
        mean = np.asarray(list(value.values()) if isinstance(value, dict) else value)
        total, size = asked.sum_squared_deviations(self._row_weights(), mean)
        return asked.unpack_value(2 * size * np.sqrt(np.maximum(total, 0)))

    def rows_above(self, weight: float) -> list[Row]:
        alpha = np.asarray(self._row_weights())
        some = np.where(alpha >= weight, alpha, 0)
        count = max(int(np.count_nonzero(some)), 1)
        return self.executor.rows_at_positions(*self.executor.find_heaviest(some, count))

    def prediction_set(self) -> list[Row]:
        asked = self.executor
        if not self.fits_calibration:
            return []
        if isinstance(asked.calibration, str):
            raise CombinationError(f"the database promises no set: {asked.calibration}")
        alpha = np.asarray(self._row_weights())
        fits = alpha >= asked.calibration.weight
        if asked.allowed_rows is not None and asked.candidate_positions is None:
            fits &= asked.allowed_rows
        some = np.flatnonzero(fits)
        return asked.rows_in_order(alpha, some[np.argsort(-alpha[some], kind="stable")])

    def answer_without(self, place: int) -> Answer:
        asked, rows = self.executor, len(self.executor.view.ids)
        if not 0 <= place < rows:
            raise ArgumentError(f"row {place}: there are the rows 0 to {rows - 1:,}")
        if not (asked.allowed_rows is None or asked.allowed_rows[place]):
            raise ArgumentError(f"row {place} was not asked, so the answer is the same without it")
        return asked.without_row(place).answer_queries(as_batch(self.query))[0]

    def compute_influence(self) -> Any:
        from qkv.database.query.influence import compute_influence

        return compute_influence(
            self.executor, self.query, np.asarray(self._row_weights()), self.value
        )

    def compute_hint(self, rows: list[Row]) -> str:
        asked = self.executor
        if not asked.row_count and asked.where is not None:
            if asked.missing_value_count:
                match = "matches" if asked.missing_value_count == 1 else "match"
                told = (
                    f"{format_plural(asked.missing_value_count, 'row')} {match} "
                    f"{as_text(asked.where)}"
                )
                return f"{told}, but none of them has a value"
            return asked.view.why_none_pass(asked.where)
        if asked.missing_value_count and (told := asked.missing_value_hint(self.query)):
            return told
        if not rows or asked.score is not asked.view.resolve_score(None):
            return ""
        several = asked.weighting.is_convex and asked.row_count > 1
        flat = several and self.compute_entropy() > math.log(asked.row_count * UNIFORM_ROW_SHARE)
        if flat and not _separates_scores(asked.weighting):
            return ""
        return asked.view.encoder.score_hint(self.query, rows[0].key, flat)

    def collect_source(self, most: int) -> SourceRows:
        return self.executor.collect_source(self.query, np.asarray(self._row_weights()), most)


def _separates_scores(weighting: Weighting) -> bool:
    """Whether scores that are 1 apart have other weights: else rows look alike by its own doing."""
    found = np.asarray(weighting(np.array([[0.0, 1.0]])))
    return bool((partial_attention.compute_entropy(found) < math.log(2 * UNIFORM_ROW_SHARE)).all())


def merge_square_sums(one: ScaledSquareSum, two: ScaledSquareSum) -> ScaledSquareSum:
    """The sum of both, in the larger units."""
    size = np.maximum(one[1], two[1])
    return one[0] * (one[1] / size) ** 2 + two[0] * (two[1] / size) ** 2, size


def _sum_weight_by_value(values: list[Any], weights: list[float]) -> list[ValueWeight]:
    """The weight of each value, heaviest first."""
    total: dict[Any, float] = {}
    first: dict[Any, Any] = {}
    for value, weight in zip(values, weights, strict=False):
        name = value if type(value) is str else identify_value(value)
        total[name] = total.get(name, 0.0) + weight
        first.setdefault(name, value)
    return sorted(map(ValueWeight, first.values(), total.values()), key=itemgetter(1), reverse=True)


def identify_value(value: Any) -> Any:
    """What two values have in common if they are the same."""
    if type(value) is str:
        return value
    if type(value) is dict and _SCALAR_TYPES.issuperset(map(type, value.values())):
        return tuple((type(x), x) for x in value.values())
    return cells.dump_row({"value": value}).encode()


_SCALAR_TYPES = {str, int, bool, type(None)}


def as_batch(query: Any) -> Any:
    """A query as a batch of one."""
    return query[None] if is_array(query) else [query]


def _kth_largest(x: np.ndarray, k: int) -> Any:
    """The k-th largest number of x, or the least where there are fewer."""
    k = min(k, len(x))
    return np.partition(x, len(x) - k)[len(x) - k]


def describe_component(thing: Any) -> str:
    """The name of a score or weighting, with the numbers in it that are not its own defaults."""
    told = [
        f"{field.name}={number:.4g}"
        for field in getattr(thing, "__dataclass_fields__", {}).values()
        if (number := getattr(thing, field.name)) is not field.default
        and isinstance(number, int | float)
        and number != field.default
    ]
    return f"{type(thing).__name__}({', '.join(told)})" if told else type(thing).__name__
