"""Scores of rows by their 8-bit codes, and what these lose; scores of few rows by their keys."""

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
"""Rows whose codes a core takes at a time for up to four queries. For more there are fewer, so that
what it makes of them stays near, but not so few that the steps between take as long."""

MAX_EXACT_KEYS_PER_BLOCK = 8192
"""Keys that are scored in float64 at a time."""

CLOSED_GATE_SLACK = 1e-290
"""More than a gate lets through where float64 has it shut, beside what it rounds by."""

MIN_BIAS_SIZE = np.float32(1e-30)
"""Added to the size of a bias that is not 0: what float32 rounds to 0 is still none."""

MAX_SOFTCAP = 1e36
"""A softcap from which on it bends no score that a softmax tells from others, and float32 does
not hold what is divided by it."""

FLOAT32_ROUNDING = 2.0**-24
"""What a float32 is rounded by."""


class QuantizedScores:
    """Rows and queries, and how a score is made of a key."""

    def __init__(self, rows: StoredRows, query: np.ndarray, score: Score, weighting: Weighting):
        self.rows, self.query, self.score, self.weighting = rows, query, score, weighting
        self.query_float64 = query.astype(float)
        self.temperature = float(getattr(weighting, "temperature", 1.0))
        some = rows.first_chunk()
        assert some is not None and some.quantized is not None
        self.keys_are_lost = some.is_lossy
        self.rows_read, self.largest_scores = 0, np.zeros(len(query))
        self._cut_cache: list[list[RowSpan]] | None = None
        self.rows_per_block = max(int(2 * MAX_CODED_ROWS_PER_BLOCK / max(len(query), 4) ** 0.5), 1)
        self.profile: Callable[..., Any] | None = getattr(score, "profile", None)
        form = self.affine_form(np.ones(1))
        self.phi, self.cap = np.asarray(form.query), form.softcap
        # What all scores of a query have in common counts where they are weights; where it does
        # not, they are without it here.
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
            and some.quantized.residual is not None
        ):
            room = np.empty((2, rows.shape[0]), np.float32)
            self._term_columns = rows.bounds_cache.setdefault((0, 0), room)  # no cut has 0 rows
        self.phi_norms = row_norms(self.phi) * FLOAT32_SUM_MARGIN
        # A gate moves by a quarter of what its logit does, times a score of at most ‖φ‖ ‖k‖.
        gate = self.phi[:0] if form.gate is None else np.asarray(form.gate[1], float)[None]
        self.gate_sensitivity = float(row_norms(gate).sum()) / 4 * FLOAT32_SUM_MARGIN
        self.gate_rounding = (
            1.0 if form.gate is None else 1 + np.asarray(form.gate[2]) / 4 * FLOAT32_SUM_MARGIN
        )
        self.quantized_queries = Int8Queries(np.concatenate([self.phi, gate]))

    def _window_rounding(self) -> tuple[float, float, np.ndarray | float]:
        """By how much the exact scan, which takes the differences of queries and keys in the
        query's dtype, may round r² near the edge of a window: what the length of a key is
        multiplied by, what ‖k‖² / width² is, and what is added for a query, (n,).

        With e = 2 u (‖q‖ + ‖k‖) / width, the length of a difference is off by at most e, and r² at
        r ≤ 1 by 2 e + e² beside what the sum of d squares loses. A row for which that decides is
        not proven to lie on either side of the edge: the exact scan may see it on the other.
        """
        if self.profile is None:
            return 0.0, 0.0, 0.0
        unit = float(np.finfo(self.query.dtype).eps) / 2
        width = float(self.score.width)  # type: ignore[attr-defined]
        own = row_norms(self.query_float64) / width
        summed = 4 * (self.query.shape[1] + 8) * unit
        return 4 * unit / width, 8 * unit**2, 4 * unit * own + 8 * unit**2 * own**2 + summed

    def affine_form(self, norm: np.ndarray) -> AffineForm:
        """φ, factor, bias and offset, cooled."""
        found = self.score.affine_form(self.query_float64, norm)
        assert found is not None
        over = self.temperature
        bias = None if found.bias is None else found.bias / over
        offset = None if found.offset is None else found.offset / over
        cap = None if found.softcap is None else found.softcap / over
        cap = cap if cap is None or cap < MAX_SOFTCAP else None
        return AffineForm(found.query / over, found.key_factor, bias, offset, cap, found.gate)

    def score_cut(self, cut: RowSpan) -> tuple[np.ndarray, ErrorTerms]:
        """Those of a cut (n, c), by its codes."""
        near, live = cut.chunk.quantized, cut.chunk.live
        assert near is not None
        s = self.quantized_queries.inner_products(near.code)
        if live is not None:
            s, near = s[:, live], near.slice_rows(live)
        if self.is_plain_product:
            scale, terms = self._plain_terms(cut, near)
            s *= scale
            return self._apply_softcap(s), terms
        factor, bias, terms = self.error_terms(near)
        s *= near.scale if factor is None else (near.scale * factor).astype(np.float32)
        if bias is not None:
            s += bias
        if self.gate is not None:
            s = self._apply_gate(s[:-1], s[-1])
        return self._apply_softcap(s), terms

    def _apply_gate(self, s: np.ndarray, logit: np.ndarray) -> np.ndarray:
        """Scores (n, c) behind a gate, by the keys' part (c,) of its logit."""
        assert self.gate is not None
        opened = np.asarray(self.gate[0], logit.dtype)[:, None] + logit
        return np.asarray(s / (1 + np.exp(-opened)))

    def _gate_error_factor(self, logit: np.ndarray, norm: np.ndarray, lost: float) -> np.ndarray:
        """How much of what a score and a logit have lost is lost behind the gate (n, c): little
        where it is shut, and where it is open nothing of the logit's, for σ′ ≤ exp(−|x|), ¼."""
        assert self.gate is not None
        opened = np.asarray(self.gate[0])[:, None] + logit
        reach = FLOAT32_SUM_MARGIN * (
            np.asarray(self.gate[2])[:, None] + 4 * self.gate_sensitivity * norm
        )
        steep = np.minimum(np.exp(-np.maximum(np.abs(opened) - lost * reach, 0)), 0.25)
        wide = np.exp(np.minimum(opened + lost * reach, 0))
        return np.asarray((wide + steep * reach) * FLOAT32_SUM_MARGIN + CLOSED_GATE_SLACK)

    def _apply_softcap(self, s: np.ndarray) -> np.ndarray:
        """In place: what bends scores brings no two of them further apart."""
        if self.cap is not None:
            s /= self.cap
            np.tanh(s, out=s)
            s *= self.cap
        return s

    def _plain_terms(self, cut: RowSpan, near: QuantizedKeys) -> tuple[np.ndarray, ErrorTerms]:
        """The scales and terms where no row has a factor or a bias: what no query has a part in is
        kept, and columns of a table that memory can hold."""
        at, kept, columns = (cut.start, cut.size), self.rows.bounds_cache, self._term_columns
        some = slice(cut.start, cut.start + cut.size)
        if at not in kept:
            terms = self.error_terms(near)[2]
            if columns is not None:
                columns[0, some], columns[1, some] = near.scale, terms.residual
            norm = terms.norm.max(keepdims=True)
            kept[at] = terms._replace(residual=None, norm=norm, known_maxima=terms.maxima)
        if columns is not None:
            scale, residual = columns[:, some]
        else:
            scale, residual = (
                None if x is None else np.ascontiguousarray(x) for x in (near.scale, near.residual)
            )
        return scale, kept[at]._replace(residual=residual)

    def error_terms(
        self, near: QuantizedKeys
    ) -> tuple[np.ndarray | None, np.ndarray | None, ErrorTerms]:
        """The factors and biases of rows (c,), if there are such, and what is to be known of them;
        a bias (n, c) has the offset in it."""
        norm, residual = near.norm, near.residual
        if norm is None:
            norm = near.scale * np.float32(127 * self.query.shape[1] ** 0.5)
        norm = np.ascontiguousarray(norm)
        residual = None if residual is None else np.ascontiguousarray(residual)
        factor = bias = told = None
        if not self.is_plain_product:
            form = self.affine_form(np.asarray(norm, float))
            if form.key_factor is not None:
                factor = np.asarray(form.key_factor)
                norm, residual = norm * factor, None if residual is None else residual * factor
            if form.bias is not None:
                bias = np.asarray(form.bias, np.float32)
                told = np.abs(bias) + MIN_BIAS_SIZE * (np.asarray(form.bias) != 0)
            if self.offset is not None:
                offset = self.offset.astype(np.float32)[:, None]
                bias = offset if bias is None else bias + offset
        grown = factor
        if self.gate is not None:
            grown = 1 + self.gate_sensitivity * np.asarray(norm, float)
            norm, residual = norm * grown, None if residual is None else residual * grown
        return factor, bias, ErrorTerms(residual, norm, told, _residual_spread(near, grown))

    def error_factors(self) -> ErrorFactors:
        """What the terms of codes are multiplied by."""
        length, unit = self.phi_norms, FLOAT32_ROUNDING
        rest = self.quantized_queries.residual_norm[: len(length)]
        if self.gate_sensitivity:  # what the gate's vector has lost, as if the queries had
            rest = np.maximum(
                rest,
                self.quantized_queries.residual_norm[-1]
                / (4 * self.gate_sensitivity)
                * FLOAT32_SUM_MARGIN
                * length,
            )
        lost = rest + unit * self.quantized_queries.rounding_count * length
        none = np.zeros(len(length))
        rounded = 16 * unit * length * self.gate_rounding
        by_length, by_square, _ = self._window_rounding()
        return ErrorFactors(
            length + lost, lost + rounded + by_length, none + 8 * unit + by_square, unit
        )

    def scan_codes(self) -> WeightScan:
        """The weights of all rows by their codes."""
        return WeightScan(
            self.rows.shape[0], self.error_factors(), self.score_cut, self.iterate_cuts(("near",))
        )

    def scan_keys(self) -> WeightScan:
        """The same by their keys, as the exact scan scores them."""
        m, width = self.rows.shape
        s = forward.score_rows(self.rows, self.query.astype(np.float32), self.score)
        s = self.weighting.scale_scores(s)
        # Which has the offset in it, and has rounded beside it.
        s -= self.shift.astype(np.float32)[:, None]
        least = np.float32(np.abs(self.shift).max(initial=0.0))
        unit = 4 * (width + 8) * FLOAT32_ROUNDING
        none = np.zeros(len(s))
        slack = ErrorFactors(
            none, unit * self.phi_norms * self.gate_rounding, none + unit, FLOAT32_ROUNDING
        )

        def score_exact_cut(cut: RowSpan) -> tuple[np.ndarray, ErrorTerms]:
            near = cut.chunk.quantized
            assert near is not None
            near = near if cut.chunk.live is None else near.slice_rows(cut.chunk.live)
            terms = self.error_terms(near)[2]
            bias = least + (np.zeros_like(terms.norm) if terms.bias is None else terms.bias)
            return s[:, cut.start : cut.start + cut.size], terms._replace(residual=None, bias=bias)

        self.rows_read = m
        return WeightScan(m, slack, score_exact_cut, self.iterate_cuts())

    def code_intervals(self) -> ScoreIntervals:
        """The scores of all rows by their codes, one by one."""
        slack = self.error_factors()
        found = ScoreIntervals(np.empty((len(self.query), self.rows.shape[0]), np.float32), slack)
        found.rounded = self._window_rounding()[2]

        def fill_cut(cut: RowSpan) -> None:
            at = slice(cut.start, cut.start + cut.size)
            found.scores[:, at], terms = self.score_cut(cut)
            found.terms[:, at] = terms.stack_terms()

        cuts = self.iterate_cuts(("near",))
        RowReader(get_framework(self.query)).reduce_spans(
            fill_cut, lambda one, two: None, None, cuts
        )
        found.exclude_disallowed(self.rows.allowed)
        return found

    def iterate_cuts(self, ahead: Collection[str] = ()) -> Iterable[list[RowSpan]]:
        """All rows; where memory can hold them, as they were read first."""
        if self.rows.reads_chunks_separately:
            return self.rows.iter_spans(self.rows_per_block, codes=True, ahead=ahead)
        if self._cut_cache is None:
            self._cut_cache = list(self.rows.iter_spans(self.rows_per_block, codes=True))
        return self._cut_cache

    def read_keys(self, at: np.ndarray) -> Iterator[tuple[slice, np.ndarray, QuantizedKeys]]:
        """Rows at places, some at a time: which they are, their keys, what bounds their codes."""
        begin = end = 0
        keys, nears = list[np.ndarray](), list[QuantizedKeys]()
        for cut in chain.from_iterable(self.iterate_cuts()):
            first, end = end, int(np.searchsorted(at, cut.start + cut.size))
            if end > first:
                keys.append(cut.read_keys_at(at[first:end] - cut.start))
                nears.append(cut.quantized_at(at[first:end] - cut.start))
            if keys and (end - begin >= MAX_EXACT_KEYS_PER_BLOCK or end == len(at)):
                known = (
                    None if x[0] is None else np.concatenate(x) for x in zip(*nears, strict=True)
                )
                yield slice(begin, end), np.concatenate(keys).astype(float), QuantizedKeys(*known)  # type: ignore[arg-type]
                begin, keys, nears = end, [], []

    def exact_scores(
        self, at: np.ndarray, steady: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The scores (n, c) of rows at places, by their keys in float64; the terms (3, c) of their
        codes; and how much the scores may be off. `steady` rounds equal keys alike, and knows
        that nothing is lost where nothing but zeros was multiplied."""
        n, width = self.phi.shape
        out, off, terms = np.empty((n, len(at))), np.empty((n, len(at))), np.empty((3, len(at)))
        for some, key, near in self.read_keys(at):
            form = self.affine_form(norm := np.sqrt(np.einsum("ij,ij->i", key, key)))
            if steady:
                s = np.stack([np.add.reduce(key * one, 1) for one in self.phi])
            else:
                s = self.phi @ key.T
            if form.key_factor is not None:
                s, norm = s * form.key_factor, norm * form.key_factor
            lost = 4 * (width + 8) * 2.0**-53
            told = np.outer(self.phi_norms, norm)
            if self.gate is not None:
                logit = np.add.reduce(key * self.gate[1], 1)
                s, told = (
                    self._apply_gate(s, logit),
                    told * self._gate_error_factor(logit, norm, lost),
                )
            bias = 0.0 if form.bias is None else np.asarray(form.bias)
            s = s + bias
            s = s if self.offset is None else s + self.offset[:, None]
            out[:, some], terms[:, some] = (
                self._apply_softcap(s),
                self.error_terms(near)[2].stack_terms(),
            )
            off[:, some] = lost * (told + np.abs(bias))
            if steady:
                off[:, some][(s == 0) & (np.abs(self.phi) @ np.abs(key).T == 0)] = 0
        self.rows_read += len(at)
        return out, terms, off

    def exact_intervals(self) -> ScoreIntervals:
        """The scores of all rows by their keys in float64."""
        m, width = self.rows.shape
        unit = 4 * (width + 8) * 2.0**-53
        none = np.zeros(len(self.phi))
        s = self.exact_scores(np.arange(m))[0]
        self.rows_read = m
        by_length, by_square, _ = self._window_rounding()
        steady = unit * self.phi_norms * self.gate_rounding + by_length
        slack = ErrorFactors(none, steady, none + unit + by_square, 2.0**-53)
        return self.code_intervals().with_exact_scores(s, slack)


def _residual_spread(near: QuantizedKeys, factor: np.ndarray | None) -> float:
    """How far the residuals of all rows reach together, as `scan.Terms` has it."""
    if near.block_spread is None or near.block is None or not len(near.block):
        return np.inf
    starts = np.append(0, np.flatnonzero(near.block[1:] != near.block[:-1]) + 1)
    if factor is None:
        wide = near.block_spread[starts]
    else:
        wide = np.maximum.reduceat(near.block_spread * factor, starts)
    return float(np.sqrt(np.square(wide, dtype=float).sum()))
