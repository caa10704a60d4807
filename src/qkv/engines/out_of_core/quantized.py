"""Scores of all rows from 8-bit codes, with error bounds, and exact scores of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from qkv.engines.out_of_core import forward
from qkv.engines.out_of_core.scan import FLOAT32_SUM_MARGIN, ErrorFactors, ErrorTerms, WeightScan
from qkv.engines.out_of_core.score_intervals import ScoreIntervals
from qkv.frameworks import get_framework
from qkv.frameworks.int8 import Int8Queries
from qkv.frameworks.norms import row_norms
from qkv.frameworks.stored_rows import QuantizedKeys, RowReader, RowSpan, StoredRows
from qkv.scores import Score
from qkv.scores.base import AffineForm
from qkv.weightings import Weighting

MAX_CODED_ROWS_PER_BLOCK = 65536
"""Rows whose codes a core scores at a time for up to four queries. For n > 4 queries the number is
divided by √(n / 4). So the scores fit the cache, and the overhead per block stays small."""

MAX_EXACT_KEYS_PER_BLOCK = 8192
"""Keys that are scored in float64 at a time."""

CLOSED_GATE_SLACK = 1e-290
"""Added to the error factor of a gate, which float64 may round to 0."""

MIN_BIAS_SIZE = np.float32(1e-30)
"""Added to the size of a nonzero bias, which float32 may round to 0."""

MAX_SOFTCAP = 1e36
"""Softcaps from here on are ignored: they change no score that matters for a softmax, and scores
divided by them underflow in float32."""

FLOAT32_ROUNDING = 2.0**-24
"""Unit of rounding of float32."""


class QuantizedScores:
    """Scores of queries and stored rows, from codes or from keys, with error bounds."""

    def __init__(self, rows: StoredRows, query: np.ndarray, score: Score, weighting: Weighting):
        self.rows, self.query, self.score, self.weighting = rows, query, score, weighting
        self.query_float64 = query.astype(float)
        self.temperature = float(getattr(weighting, "temperature", 1.0))
        first_chunk = rows.first_chunk()
        assert first_chunk is not None and first_chunk.quantized is not None
        self.keys_are_lost = first_chunk.is_lossy
        self.rows_read, self.largest_scores = 0, np.zeros(len(query))
        self._cut_cache: list[list[RowSpan]] | None = None
        self.rows_per_block = max(int(2 * MAX_CODED_ROWS_PER_BLOCK / max(len(query), 4) ** 0.5), 1)
        self.profile: Callable[..., Any] | None = getattr(score, "profile", None)
        form = self.affine_form(np.ones(1))
        self.phi, self.cap = np.asarray(form.query), form.softcap
        # A softmax does not depend on the offset that all scores of a query share, so the scores
        # here omit it. Under a profile the scores are the weights, and the offset counts.
        common = np.zeros(len(query)) if form.offset is None else np.asarray(form.offset)
        self.offset = None if self.profile is None or form.offset is None else common
        self.shift = common if self.offset is None else np.zeros(len(query))
        self.gate = form.gate
        self.is_plain_product = all(
            x is None for x in (form.key_factor, form.bias, self.offset, form.gate)
        )
        self._term_columns: np.ndarray | None = None
        if (
            self.is_plain_product
            and not rows.reads_chunks_separately
            and first_chunk.quantized.residual is not None
        ):
            columns = np.empty((2, rows.shape[0]), np.float32)
            self._term_columns = rows.bounds_cache.setdefault((0, 0), columns)  # no span has 0 rows
        self.phi_norms = row_norms(self.phi) * FLOAT32_SUM_MARGIN
        # The slope of a sigmoid is at most ¼; a score is at most ‖φ‖ ‖k‖.
        gate = self.phi[:0] if form.gate is None else np.asarray(form.gate[1], float)[None]
        self.gate_sensitivity = float(row_norms(gate).sum()) / 4 * FLOAT32_SUM_MARGIN
        self.gate_rounding = (
            1.0 if form.gate is None else 1 + np.asarray(form.gate[2]) / 4 * FLOAT32_SUM_MARGIN
        )
        self.quantized_queries = Int8Queries(np.concatenate([self.phi, gate]))

    def _window_rounding(self) -> tuple[float, float, np.ndarray | float]:
        """Return bounds on the rounding of r² near the edge of a window by the exact scan.

        The bounds are the factor of ‖k‖, the factor of ‖k‖² / width², and the constant (n,) of each
        query. The exact scan subtracts queries and keys in the query's dtype with unit u. Let
        e = 2 u (‖q‖ + ‖k‖) / width. The length of a difference has an error of at most e. At r ≤ 1,
        r² has an error of at most 2 e + e², plus the rounding of the sum of d squares. If a row is
        within this distance of the edge, the exact scan may decide either way.
        """
        if self.profile is None:
            return 0.0, 0.0, 0.0
        unit = float(np.finfo(self.query.dtype).eps) / 2
        width = float(self.score.width)  # type: ignore[attr-defined]
        query_norms = row_norms(self.query_float64) / width
        sum_rounding = 4 * (self.query.shape[1] + 8) * unit
        return (
            4 * unit / width,
            8 * unit**2,
            4 * unit * query_norms + 8 * unit**2 * query_norms**2 + sum_rounding,
        )

    def affine_form(self, norm: np.ndarray) -> AffineForm:
        """Return the affine form of the score, divided by the temperature."""
        form = self.score.affine_form(self.query_float64, norm)
        assert form is not None
        temperature = self.temperature
        bias = None if form.bias is None else form.bias / temperature
        offset = None if form.offset is None else form.offset / temperature
        cap = None if form.softcap is None else form.softcap / temperature
        cap = cap if cap is None or cap < MAX_SOFTCAP else None
        return AffineForm(form.query / temperature, form.key_factor, bias, offset, cap, form.gate)

    def score_cut(self, cut: RowSpan) -> tuple[np.ndarray, ErrorTerms]:
        """Return the scores (n, c) of a span of rows from its codes, and their error terms."""
        codes, live = cut.chunk.quantized, cut.chunk.live
        assert codes is not None
        s = self.quantized_queries.inner_products(codes.code)
        if live is not None:
            s, codes = s[:, live], codes.slice_rows(live)
        if self.is_plain_product:
            scale, terms = self._plain_terms(cut, codes)
            s *= scale
            return self._apply_softcap(s), terms
        factor, bias, terms = self.error_terms(codes)
        s *= codes.scale if factor is None else (codes.scale * factor).astype(np.float32)
        if bias is not None:
            s += bias
        if self.gate is not None:
            s = self._apply_gate(s[:-1], s[-1])
        return self._apply_softcap(s), terms

    def _apply_gate(self, s: np.ndarray, logit: np.ndarray) -> np.ndarray:
        """Multiply scores (n, c) by the gate, given the keys' part (c,) of its logit."""
        assert self.gate is not None
        gate_input = np.asarray(self.gate[0], logit.dtype)[:, None] + logit
        return np.asarray(s / (1 + np.exp(-gate_input)))

    def _gate_error_factor(self, logit: np.ndarray, norm: np.ndarray, unit: float) -> np.ndarray:
        """Return the factor (n, c) by which the gate scales the relative errors of its inputs.

        The error of the score is multiplied by the gate σ(x), and that of the logit by its slope,
        σ′(x) ≤ min(exp(−|x|), ¼).
        """
        assert self.gate is not None
        gate_input = np.asarray(self.gate[0])[:, None] + logit
        input_error = FLOAT32_SUM_MARGIN * (
            np.asarray(self.gate[2])[:, None] + 4 * self.gate_sensitivity * norm
        )
        max_slope = np.minimum(
            np.exp(-np.maximum(np.abs(gate_input) - unit * input_error, 0)), 0.25
        )
        max_gate = np.exp(np.minimum(gate_input + unit * input_error, 0))
        return np.asarray(
            (max_gate + max_slope * input_error) * FLOAT32_SUM_MARGIN + CLOSED_GATE_SLACK
        )

    def _apply_softcap(self, s: np.ndarray) -> np.ndarray:
        """Apply the softcap in place. Its slope is at most 1, so errors do not grow."""
        if self.cap is not None:
            s /= self.cap
            np.tanh(s, out=s)
            s *= self.cap
        return s

    def _plain_terms(self, cut: RowSpan, codes: QuantizedKeys) -> tuple[np.ndarray, ErrorTerms]:
        """Return the scales and error terms for a score without factor and bias.

        They do not depend on the query, so they are cached.
        """
        cache_key, cache, columns = (
            (cut.start, cut.size),
            self.rows.bounds_cache,
            self._term_columns,
        )
        rows = slice(cut.start, cut.start + cut.size)
        if cache_key not in cache:
            terms = self.error_terms(codes)[2]
            if columns is not None:
                columns[0, rows], columns[1, rows] = codes.scale, terms.residual
            norm = terms.norm.max(keepdims=True)
            cache[cache_key] = terms._replace(residual=None, norm=norm, known_maxima=terms.maxima)
        if columns is not None:
            scale, residual = columns[:, rows]
        else:
            scale, residual = (
                None if x is None else np.ascontiguousarray(x)
                for x in (codes.scale, codes.residual)
            )
        return scale, cache[cache_key]._replace(residual=residual)

    def error_terms(
        self, codes: QuantizedKeys
    ) -> tuple[np.ndarray | None, np.ndarray | None, ErrorTerms]:
        """Return the factors (c,) and biases of the rows, or None, and their error terms.

        If the score has an offset, the bias is (n, c) and includes it.
        """
        norm, residual = codes.norm, codes.residual
        if norm is None:
            norm = codes.scale * np.float32(127 * self.query.shape[1] ** 0.5)
        norm = np.ascontiguousarray(norm)
        residual = None if residual is None else np.ascontiguousarray(residual)
        factor = bias = bias_size = None
        if not self.is_plain_product:
            form = self.affine_form(np.asarray(norm, float))
            if form.key_factor is not None:
                factor = np.asarray(form.key_factor)
                norm, residual = norm * factor, None if residual is None else residual * factor
            if form.bias is not None:
                bias = np.asarray(form.bias, np.float32)
                bias_size = np.abs(bias) + MIN_BIAS_SIZE * (np.asarray(form.bias) != 0)
            if self.offset is not None:
                offset = self.offset.astype(np.float32)[:, None]
                bias = offset if bias is None else bias + offset
        residual_factor = factor
        if self.gate is not None:
            residual_factor = 1 + self.gate_sensitivity * np.asarray(norm, float)
            norm, residual = (
                norm * residual_factor,
                None if residual is None else residual * residual_factor,
            )
        return (
            factor,
            bias,
            ErrorTerms(residual, norm, bias_size, _residual_spread(codes, residual_factor)),
        )

    def error_factors(self) -> ErrorFactors:
        """Return the multipliers of the error terms of scores from codes."""
        length, unit = self.phi_norms, FLOAT32_ROUNDING
        query_residual = self.quantized_queries.residual_norm[: len(length)]
        if self.gate_sensitivity:  # treat the gate vector as one more query
            query_residual = np.maximum(
                query_residual,
                self.quantized_queries.residual_norm[-1]
                / (4 * self.gate_sensitivity)
                * FLOAT32_SUM_MARGIN
                * length,
            )
        query_error = query_residual + unit * self.quantized_queries.rounding_count * length
        zeros = np.zeros(len(length))
        rounded = 16 * unit * length * self.gate_rounding
        by_length, by_square, _ = self._window_rounding()
        return ErrorFactors(
            length + query_error,
            query_error + rounded + by_length,
            zeros + 8 * unit + by_square,
            unit,
        )

    def scan_codes(self) -> WeightScan:
        """Return the weights of all rows from their codes."""
        return WeightScan(
            self.rows.shape[0], self.error_factors(), self.score_cut, self.iterate_cuts(("near",))
        )

    def scan_keys(self) -> WeightScan:
        """Return the weights of all rows from their keys, scored as in the exact scan."""
        m, width = self.rows.shape
        s = forward.score_rows(self.rows, self.query.astype(np.float32), self.score)
        s = self.weighting.scale_scores(s)
        # These scores include the offset, and are rounded at its magnitude.
        s -= self.shift.astype(np.float32)[:, None]
        shift_size = np.float32(np.abs(self.shift).max(initial=0.0))
        unit = 4 * (width + 8) * FLOAT32_ROUNDING
        zeros = np.zeros(len(s))
        factors = ErrorFactors(
            zeros, unit * self.phi_norms * self.gate_rounding, zeros + unit, FLOAT32_ROUNDING
        )

        def score_exact_cut(cut: RowSpan) -> tuple[np.ndarray, ErrorTerms]:
            codes = cut.chunk.quantized
            assert codes is not None
            codes = codes if cut.chunk.live is None else codes.slice_rows(cut.chunk.live)
            terms = self.error_terms(codes)[2]
            bias = shift_size + (np.zeros_like(terms.norm) if terms.bias is None else terms.bias)
            return s[:, cut.start : cut.start + cut.size], terms._replace(residual=None, bias=bias)

        self.rows_read = m
        return WeightScan(m, factors, score_exact_cut, self.iterate_cuts())

    def code_intervals(self) -> ScoreIntervals:
        """Return the scores of all rows from their codes, each with its own error."""
        factors = self.error_factors()
        intervals = ScoreIntervals(
            np.empty((len(self.query), self.rows.shape[0]), np.float32), factors
        )
        intervals.rounded = self._window_rounding()[2]

        def fill_cut(cut: RowSpan) -> None:
            at = slice(cut.start, cut.start + cut.size)
            intervals.scores[:, at], terms = self.score_cut(cut)
            intervals.terms[:, at] = terms.stack_terms()

        cuts = self.iterate_cuts(("near",))
        RowReader(get_framework(self.query)).reduce_spans(
            fill_cut, lambda one, two: None, None, cuts
        )
        intervals.exclude_disallowed(self.rows.allowed)
        return intervals

    def iterate_cuts(self, ahead: Collection[str] = ()) -> Iterable[list[RowSpan]]:
        """Iterate over all rows. The spans are cached if memory can hold the rows."""
        if self.rows.reads_chunks_separately:
            return self.rows.iter_spans(self.rows_per_block, codes_only=True, prefetch_fields=ahead)
        if self._cut_cache is None:
            self._cut_cache = list(self.rows.iter_spans(self.rows_per_block, codes_only=True))
        return self._cut_cache

    def read_keys(self, at: np.ndarray) -> Iterator[tuple[slice, np.ndarray, QuantizedKeys]]:
        """Yield slices of `at`, with the keys of those rows and the bounds of their codes."""
        begin = end = 0
        keys, codes = list[np.ndarray](), list[QuantizedKeys]()
        for cut in chain.from_iterable(self.iterate_cuts()):
            first, end = end, int(np.searchsorted(at, cut.start + cut.size))
            if end > first:
                keys.append(cut.read_keys_at(at[first:end] - cut.start))
                codes.append(cut.quantized_at(at[first:end] - cut.start))
            if keys and (end - begin >= MAX_EXACT_KEYS_PER_BLOCK or end == len(at)):
                fields = (
                    None if x[0] is None else np.concatenate(x) for x in zip(*codes, strict=True)
                )
                yield slice(begin, end), np.concatenate(keys).astype(float), QuantizedKeys(*fields)  # type: ignore[arg-type]
                begin, keys, codes = end, [], []

    def exact_scores(
        self, at: np.ndarray, is_reproducible: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return float64 scores (n, c) of rows, the terms (3, c) of their codes, and the errors.

        The errors (n, c) are those of the float64 scores. With `is_reproducible`, equal keys get
        equal scores, and a score whose products are all 0 has no error.
        """
        n, width = self.phi.shape
        scores, errors, terms = (
            np.empty((n, len(at))),
            np.empty((n, len(at))),
            np.empty((3, len(at))),
        )
        for rows, key, codes in self.read_keys(at):
            form = self.affine_form(norm := np.sqrt(np.einsum("ij,ij->i", key, key)))
            if is_reproducible:
                s = np.stack([np.add.reduce(key * phi, 1) for phi in self.phi])
            else:
                s = self.phi @ key.T
            if form.key_factor is not None:
                s, norm = s * form.key_factor, norm * form.key_factor
            unit = 4 * (width + 8) * 2.0**-53
            magnitude = np.outer(self.phi_norms, norm)
            if self.gate is not None:
                logit = np.add.reduce(key * self.gate[1], 1)
                s, magnitude = (
                    self._apply_gate(s, logit),
                    magnitude * self._gate_error_factor(logit, norm, unit),
                )
            bias = 0.0 if form.bias is None else np.asarray(form.bias)
            s = s + bias
            s = s if self.offset is None else s + self.offset[:, None]
            scores[:, rows], terms[:, rows] = (
                self._apply_softcap(s),
                self.error_terms(codes)[2].stack_terms(),
            )
            errors[:, rows] = unit * (magnitude + np.abs(bias))
            if is_reproducible:
                errors[:, rows][(s == 0) & (np.abs(self.phi) @ np.abs(key).T == 0)] = 0
        self.rows_read += len(at)
        return scores, terms, errors

    def exact_intervals(self) -> ScoreIntervals:
        """Return the scores of all rows from their keys in float64."""
        m, width = self.rows.shape
        unit = 4 * (width + 8) * 2.0**-53
        zeros = np.zeros(len(self.phi))
        s = self.exact_scores(np.arange(m))[0]
        self.rows_read = m
        by_length, by_square, _ = self._window_rounding()
        norm_factor = unit * self.phi_norms * self.gate_rounding + by_length
        factors = ErrorFactors(zeros, norm_factor, zeros + unit + by_square, 2.0**-53)
        return self.code_intervals().with_exact_scores(s, factors)


def _residual_spread(codes: QuantizedKeys, factor: np.ndarray | None) -> float:
    """Return the `spread` of `scan.ErrorTerms` for these rows."""
    if codes.block_spread is None or codes.block is None or not len(codes.block):
        return np.inf
    starts = np.append(0, np.flatnonzero(codes.block[1:] != codes.block[:-1]) + 1)
    if factor is None:
        spreads = codes.block_spread[starts]
    else:
        spreads = np.maximum.reduceat(codes.block_spread * factor, starts)
    return float(np.sqrt(np.square(spreads, dtype=float).sum()))
