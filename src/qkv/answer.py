"""The answer to a query: Σᵢ αᵢ vᵢ, the rows it comes from, and how certain it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never

import numpy as np

from qkv.answer_backend import (
    AnswerBackend,
    DetachedBackend,
    MissingWeight,
    Row,
    SourceRows,
    ValueWeight,
)
from qkv.errors import (
    ArgumentError,
    CombinationError,
    DtypeError,
    QkvError,
    format_plural,
    join_alternatives,
    validate_fraction,
    validate_sizes,
)
from qkv.util.data_frames import build_frame
from qkv.util.display import Displayable
from qkv.util.formatting import (
    BAR_WIDTH,
    bar_lengths,
    display_width,
    format_bar,
    format_number,
    format_one_line,
    format_weight,
    pad_to_width,
    to_jsonable,
)
from qkv.util.types import lazy_property

EXACT_MATCH_TEXT = "The query equals a key, which decides the answer"
BLENDED_MATCH_TEXT = "The query equals a key; the value is a mean over several rows"
CONFIDENCE_COEFFICIENTS = (-0.3, 0.6, 0.65)
"""The bias a and the factors b and c of the confidence σ(a + b logit(p₁) + c t ln(p₁ / p₂)).

p₁ and p₂ are the shares of the weight of the two heaviest values, and t is the part of p₁ that the
heaviest row has, together with rows of equal weight. They are fitted to the tasks of
`bench.retrieval`, with another seed than the one that it measures, and to names with typos. The
weight p₁ alone is too small for typos in large tables: many other rows share the rest, but none
comes near. The ratio p₁ / p₂ says so.
"""
MISMATCH_FACTOR = 2.0
"""The confidence is multiplied by e^(−this · mismatch), before a calibration.

The mismatch is that of the words of the query and the best key. The factor is chosen on names,
titles, phrases and identifiers, half of them without a right row.
"""
MAX_NUMBER_BONUS = 3.0
"""If the best key has the numbers of the query, min(t ln(p₁ / p₂), this) is added to the logit.

A number has no other spelling and no synonym: a key that has it is right more often than a key
with the same words. How far the value is ahead of the next one still counts, because other keys may
have the number too. The limit has the best likelihood on changelogs, packages and products.
"""
MIN_OTHER_WORDS = 0.2
"""The mismatch from which a query has other words than the best key."""
MAX_RELIABLE_LOGIT = 6.0
"""A larger logit says no more: a few wrong answers with one would spoil the fit of `calibrate`."""

MIN_SHARE = 1e-6
"""A smaller share of the weight counts as this one."""

MAX_CONFIDENCE = 0.99
"""No confidence is larger: typos can make one key out of another."""
MAX_LOGIT = 30.0
CONFIDENCE_WORDS = ((0.9, "sure"), (0.6, "fairly sure"), (0.0, "unsure"))
"""The words for a confidence, with the smallest confidence for each."""
SINGLE_ROW_WEIGHTINGS = ("Hard", "TopK(k=1)")
"""Beginnings of the names of weightings that show no competing row."""
MIN_DECISIVE_WEIGHT = 0.9
"""A row, a key or a value decides the answer if its weight is above this."""

SERIALIZED_FIELDS = (
    *(
        "query",
        "value",
        "mean",
        "value_is_mean",
        "rows",
        "entropy",
        "effective_rows",
        "total",
        "missing",
        "exact",
    ),
    *("error_bound", "rows_read", "bound_is_probabilistic", "engine", "hint"),
    *("confidence", "confidence_text", "expected_error"),
)
"""The attributes that `to_dict` contains."""
SERIALIZED_NAMES = {"bound_is_probabilistic": "statistical"}
"""Attributes that have another name in JSON."""

ROW_FIELDS = ("rows", "values", "value", "mean")
"""Fields that the backend builds when they are first read, if the answer was made without them."""

MAX_SERIALIZED_SET_ROWS = 100
"""The largest prediction set that `to_dict` contains."""
MIN_SHOWN_WEIGHT = 0.0005
"""The smallest weight that is not 0 when rounded to three decimals."""


@dataclass(frozen=True)
class Answer(Displayable):
    """The answer of a database to one query.

    - Keys of numbers or vectors: `value` is Σᵢ αᵢ vᵢ. This needs numbers in every key column.
    - Other keys, or `score="exact"`: `value` is that of the best-matching key (the mean of its
      rows).
    - Values that are neither numbers nor vectors: `value` is the value with the largest weight.

    No weighting changes which of these holds. `mean` is always Σᵢ αᵢ vᵢ; it is None if values are
    neither numbers nor vectors. Then `values` lists the distinct values with their total weights.
    `rows` are the heaviest rows. `entropy` is −Σ αᵢ ln αᵢ. `effective_rows` is e^entropy: about how
    many rows share the weight.

    >>> from qkv import Database
    >>> answer = Database({"Zhang": "Aston", "Li": "Mu", "Smola": "Alex"}).ask("Li")
    >>> answer.value, answer.rows[0].key
    ('Mu', 'Li')
    """

    query: Any
    value: Any
    rows: list[Row]
    values: list[ValueWeight]
    lse: float | None
    total: int
    """The number of rows that took part: they pass `where` and have a value."""
    mean: Any = field(kw_only=True, default_factory=lambda: None)
    """Σᵢ αᵢ vᵢ, the weighted mean over all rows; None if values are not numbers or vectors."""
    value_is_mean: bool = field(kw_only=True, default=False)
    """Whether `value` is `mean`: all columns of the key are numbers, or the key is a vector."""
    missing: int = field(kw_only=True, default=0)
    """The number of rows left out of the answer: they pass `where`, but their value is missing."""
    is_normalized: bool = field(kw_only=True, default=True)
    """Whether Σᵢ αᵢ = 1; False for weightings such as `raw` and `sigmoid`."""
    version: int = field(kw_only=True, default=0)
    """The version of the database that answered."""
    coverage: float | None = field(kw_only=True, default=None)
    """The probability that `prediction_set` contains the right row; None without calibration."""
    error_bound: float = field(kw_only=True, default=0.0)
    """An upper bound on ½ Σ |αᵢ − exact αᵢ|; 0 if the weights are exact up to rounding.

    It is 1 for an approximate answer, for which nothing is proven: see `missing_weight`.
    """
    rows_read: int = field(kw_only=True, default=0)
    """The number of keys that were read in full precision."""
    missing_weight: MissingWeight | None = field(kw_only=True, default=None)
    """The estimated weight of the rows that an approximate answer did not read.

    None without `approximate`, and for weightings of the best rows only.
    """
    recall: float | None = field(kw_only=True, default=None)
    """The share of the ten best rows that such an approximate answer reads, as measured when the
    index was built; 1 if all rows were read, and None without `approximate`."""
    bound_is_probabilistic: bool = field(kw_only=True, default=False)
    """Whether `error_bound` holds only with the requested confidence; False if it always holds."""
    engine: str
    score: str
    weighting: str
    _backend: AnswerBackend = field(repr=False, compare=False)
    _library: str | None = field(repr=False, compare=False, default=None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only a missing attribute gets here.
            if name in ROW_FIELDS and "_backend" in vars(self):
                for field_name, x in self._backend.build_fields().items():
                    vars(self).setdefault(field_name, x)
                return vars(self)[name]
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)

    @lazy_property
    def weights(self) -> np.ndarray:
        """The weights of all rows, (m,), in the order of the database."""
        return self._backend.compute_weights()

    @lazy_property
    def entropy(self) -> float:
        """−Σᵢ αᵢ ln αᵢ over all rows."""
        return self._backend.compute_entropy()

    @lazy_property
    def hint(self) -> str:
        """Advice about this query, or "" if there is none.

        It names a better score, or says that no row matches `where`, that the query equals the key
        of a row without a value, that it is far from every key, that the best key lacks a word of
        it, or that the rows of its key have different numbers.
        """
        return self._backend.compute_hint(self.rows)

    @lazy_property
    def spread(self) -> Any:
        """√(Σᵢ αᵢ (vᵢ − mean)²): the weighted standard deviation of the values.

        None if values are not numbers.
        """
        return self._backend.compute_spread()

    @lazy_property
    def expected_error(self) -> Any:
        """The root mean square error to expect from a mean over keys of numbers or vectors.

        It is measured on the rows of the table: each is left out, and its value compared with the
        answer from the other rows. At a key of the table it is smaller. A float, or a mapping for
        several columns. None if there is no estimate: with another score or weighting, with fewer
        than 8 rows, and for values that are not a mean of numbers.

        >>> import numpy as np
        >>> from qkv import Database
        >>> x = np.linspace(0, 10, 100)
        >>> Database(zip(x, np.sin(x))).ask(5.02).expected_error < 0.1
        True
        >>> Database(zip(x, np.sin(50 * x))).ask(5.02).expected_error > 0.5
        True
        """
        return self._backend.compute_expected_error()

    @lazy_property
    def prediction_set(self) -> list[Row]:
        """The rows that contain the right one with probability `coverage`, heaviest first.

        Raises `CombinationError` unless `Database.calibrate` was called for this score and
        weighting.
        """
        return self._backend.prediction_set()

    @property
    def abstains(self) -> bool:
        """Whether `prediction_set` is empty: no row fits the query well enough."""
        return not self.prediction_set

    def __getitem__(self, position: Any) -> Never:
        raise TypeError(
            "an answer has no items: use answer.value, answer.rows[0] for the best row, or "
            "to_dict()"
        )

    def without(self, row: Row | int) -> Answer:
        """Return the answer without this row, or without the row at this index.

        >>> from qkv import Database
        >>> answer = Database({"Zhang": "Aston", "Zang": "Wei", "Li": "Mu"}).ask("Zhang")
        >>> answer.without(answer.rows[0]).value
        'Wei'
        """
        position = row.index if isinstance(row, Row) else row
        if isinstance(position, bool) or not isinstance(position, int | np.integer):
            raise DtypeError(
                "without: row must be one of answer.rows, or the index of one, such as "
                f"answer.rows[0].index, not {position!r}"
            )
        answer: Answer = self._backend.answer_without(int(position))
        return answer

    def influence(self) -> Any:
        """Return the effect of each row i: the answer's `mean` minus its mean without row i.

        The result is (m,) for numbers, (m, d_v) for vectors, and a mapping for several columns. If
        `mean` is None, entry i says how much row i increases the weight of `value`.

        >>> from qkv import Database
        >>> Database([(1.0, 10.0), (2.0, 40.0)]).ask(1.5).influence().tolist()
        [-15.0, 15.0]
        """
        return self._backend.compute_influence()

    def __getstate__(self) -> dict[str, Any]:
        # A pickle contains the weights of all rows, but not the database.
        fields = {name: getattr(self, name) for name in ROW_FIELDS}
        state = vars(self) | fields | {"hint": self.hint, "confidence_text": self.confidence_text}
        if self.rows and not self.value_is_mean:
            state |= {"_value_shares": self._value_shares, "confidence": self.confidence}
        if self.coverage is not None:
            state["prediction_set"] = self.prediction_set
        backend = DetachedBackend(
            self.rows, self.weights, self.entropy, self.spread, self.expected_error
        )
        return state | {"_backend": backend}

    def __deepcopy__(self, memo: dict[int, Any]) -> Answer:
        names = ("query", "value", "mean", "rows", "values")
        return replace(self, **{name: deepcopy(getattr(self, name), memo) for name in names})

    @property
    def exact(self) -> bool:
        """Whether the query is text that equals a key, and that key has nearly all weight."""
        if not isinstance(self.query, str):
            return False
        weight = sum(row.weight for row in self.rows if row.key == self.query)
        if self.is_normalized:
            return weight > MIN_DECISIVE_WEIGHT
        return weight > 0 and self._top_share > MIN_DECISIVE_WEIGHT

    @property
    def _exact_match_text(self) -> str:
        """The sentence to show if the query equals a key.

        It depends on whether that key alone decides the value, or the value is a mean of several
        rows.
        """
        if not self.value_is_mean:
            return EXACT_MATCH_TEXT
        own = [row for row in self.rows if row.key == self.query]
        return (
            EXACT_MATCH_TEXT
            if own and _look_equal(self.value, _weighted_mean(own))
            else BLENDED_MATCH_TEXT
        )

    @property
    def _top_share(self) -> float:
        """The share of the weight that the heaviest row has.

        If the weights do not sum to 1, this is 1 / effective_rows, a lower bound.
        """
        return self.rows[0].weight if self.is_normalized else 1 / self.effective_rows

    @property
    def effective_rows(self) -> float:
        """e^entropy: about how many rows share the weight."""
        return math.exp(self.entropy) if self.rows else 0.0

    def above(self, weight: float) -> list[Row]:
        """Return every row of at least this weight, heaviest first.

        >>> from qkv import Database
        >>> answer = Database({1.0: 10.0, 2.0: 20.0, 9.0: 90.0}).ask(1.4, score="gaussian", top=1)
        >>> [row.key for row in answer.above(0.3)]
        [1.0, 2.0]
        """
        if not validate_fraction("above: weight", weight) > 0:
            raise ArgumentError(f"above: weight must be between 0 and 1, not {weight!r}")
        return self._backend.rows_above(weight)

    def _collect_source(self, most: int) -> SourceRows | None:
        """Return at most `most` of the rows that took part, the heaviest ones, in database order.

        Return None if the answer comes from a server or a pickle.
        """
        validate_sizes(most=most)
        return self._backend.collect_source(most)

    def explain(self) -> str:
        """Return one paragraph about the answer.

        It names the heaviest rows, and says how concentrated the weight is and which engine ran.

        >>> from qkv import Database
        >>> Database({"Li": "Mu", "Hu": "Rachel"}).ask("Li").explain()[:26]
        'Of 2 rows, Li counts 100 %'
        """
        total = format_plural(self.total, "row")
        if not self.total and self.hint:
            asked = f"No row answers {_format_in_sentence(self.query)}: " if self.missing else ""
            return f"{asked}{self.hint}."
        if not self.rows:
            return (
                f"No row answers {_format_in_sentence(self.query)}: every weight is 0 among {total}"
                f"{f', {self.missing_text} left out' if self.missing else ''} "
                f"({self.score}, {self.weighting}; {self.engine})."
            )
        first, *others = self.rows[:2]
        verb, to_text = (
            ("counts", _format_percent) if self.is_normalized else ("weighs", format_weight)
        )
        shown = (row for row in others if abs(row.weight) >= MIN_SHOWN_WEIGHT)
        second = "".join(
            f", {_format_in_sentence(row.displayed_key)} {to_text(row.weight)}" for row in shown
        )
        key = _format_in_sentence(first.displayed_key)
        parts = [f"Of {total}, {key} {verb} {to_text(first.weight)}{second}."]
        if self.exact:
            parts.append(f"{self._exact_match_text}.")
        effective = f"{self.effective_rows:,.1f}"
        parts.append(
            f"The weight is spread over about {effective} "
            f"row{'s' * (effective != '1.0')}: {self.confidence_text}."
        )
        if self.mean is not None:
            if self.is_normalized and isinstance(self.spread, float):
                parts.append(f"The values spread by {self.spread:.4g} around {self.mean:.4g}.")
        elif self.values and self.values[0].weight < 0.995 and len(self.values) > 1:
            best, next_ = self.values[:2]
            has = (
                f"has {to_text(best.weight)} of the weight"
                if self.is_normalized
                else to_text(best.weight)
            )
            parts.append(
                f"The value {_format_in_sentence(best.value)} {has}, "
                f"{_format_in_sentence(next_.value)} {to_text(next_.weight)}."
            )
        if self.coverage is not None:
            parts.append(f"{self._coverage_text}.")
        if self.error_bound:
            parts.append(f"{self._error_bound_text}.")
        if self.missing:
            parts.append(f"Left out: {self.missing_text}.")
        if self.hint:
            parts.append(f"{self.hint[0].upper()}{self.hint[1:]}.")
        parts.append(f"Scored by {self.score}, weighted by {self.weighting}; {self.engine}.")
        return " ".join(parts)

    @property
    def _coverage_text(self) -> str:
        """A sentence about the prediction set."""
        if self.coverage is None:
            return "Not calibrated"
        if self.abstains:
            return "The answer abstains: no row fits as well as in the calibration pairs"
        rows = format_plural(len(self.prediction_set), "row")
        probability = _format_percent(self.coverage)
        return f"The prediction set of {rows} contains the right row with {probability} probability"

    @property
    def _error_bound_text(self) -> str:
        """A sentence about the error bound, or about the rows that were left out."""
        read = f"{self.rows_read:,} keys were read in full"
        if self.recall is not None:
            found = (
                f"the index finds {_format_percent(self.recall)} of the ten best rows on average"
            )
            if self.missing_weight is None:
                return f"The rows come from an index: {found}; {read}"
            estimate, low, high = map(_format_percent, self.missing_weight)
            return (
                f"Rows that were not read have about {estimate} of the weight (an estimate: {low} "
                f"to {high} for 90 % of queries); {found}; {read}"
            )
        guarantee = "with the requested confidence" if self.bound_is_probabilistic else "guaranteed"
        return (
            f"The weights are within {self.error_bound:.2g} of the exact ones ({guarantee}); {read}"
        )

    @property
    def missing_text(self) -> str:
        """The number of rows without a value as text, such as "2 rows without a value"."""
        rows = format_plural(self.missing, "row")
        if isinstance(self.mean, dict):
            return f"{rows} that lack{'s' * (self.missing == 1)} {join_alternatives([*self.mean])}"
        return f"{rows} without a value"

    @property
    def why_nothing(self) -> str:
        """The reason why no row answers: no row passes `where`, or every weight is 0."""
        if not self.total and self.hint:
            return self.hint
        left_out = f"; {self.missing_text} left out" if self.missing else ""
        return f"every weight is 0 among {format_plural(self.total, 'row')}{left_out}"

    @lazy_property
    def confidence_text(self) -> str:
        """How sure the answer is: a word and `confidence`, such as "fairly sure (74 %)".

        If the value is a mean, the text says how many rows or keys share the weight, such as "a
        mean of a few rows". It says that a row or key "decides" only if its own value equals the
        answer's value.
        """
        if not self.rows:
            return "no answer"
        if not self.value_is_mean:
            return self._value_confidence_text()
        text, error = self._mean_confidence_text(), self.expected_error
        has_error = isinstance(error, float) and not self._backend.is_far
        return f"{text}, error about {error:.2g}" if has_error else text

    @lazy_property
    def _value_shares(self) -> tuple[float, float]:
        """The share of the weight of `value`, and that of the next value.

        Rows with the best-matching key count as having the value, if the value is that of this key.
        """
        if self.values:
            known = np.abs([share.weight for share in self.values])
            known = known / (1.0 if self.is_normalized else known.sum() or 1.0)
            return float(known[0]), float(known[1]) if len(known) > 1 else 0.0
        shares = self._backend.compute_value_shares()
        if shares is not None:
            return shares
        weights = sorted(abs(group.weight) for group in _group_rows(self.rows, "value"))
        return self._top_share, weights[-2] if len(weights) > 1 else 0.0

    @lazy_property
    def _top_weight(self) -> float:
        """The total weight of the rows that have the largest weight."""
        return self._backend.compute_top_weight()

    @lazy_property
    def confidence(self) -> float | None:
        """The estimated probability that `value` is right, if some row has the right value.

        It depends on the share of the weight that rows with this value have, and on how much more
        that is than the share of the next value. The estimate was fitted for text keys with the
        default score and weighting, among queries of which one row has the answer.

        It is higher if the best key has the numbers of the query, such as a year.

        It is lower if the best key lacks words of the query and has others, because the table may
        lack the key. It is lower if the query is far from every number or date of the keys, or if
        the rows of the best key have different numbers, or if a short query and the best key have
        different numbers. It is 0 if the query is a key whose value is missing.
        `Database.calibrate` corrects it on pairs. With keys of numbers and vectors, it is corrected
        on rows of the table that are left out, if some of them have the same value.

        None if the value is a mean, whose `spread` says more, or if the weights do not sum to 1 or
        all of it is given to one row (`hard`).

        >>> from qkv import Database
        >>> round(Database({"tea pot": "tea", "knife": "tools"}).ask("tea pott").confidence, 2)
        0.99
        """
        takes_one_row = self.weighting.startswith(SINGLE_ROW_WEIGHTINGS)
        if not self.rows or self.value_is_mean or not self.is_normalized or takes_one_row:
            return None
        if self._backend.is_value_of_own_key(self.rows):
            return MAX_CONFIDENCE
        logit = self._backend.calibrate_logit(self._confidence_logit)
        logit = min(max(logit, -MAX_LOGIT), MAX_LOGIT)
        probability = self._backend.left_out_confidence(self._confidence_logit)
        if probability is None:
            probability = 1 / (1 + math.exp(-logit))
        return min(probability, MAX_CONFIDENCE) * self._backend.confidence_factor(self.rows)

    @property
    def _confidence_logit(self) -> float:
        """The logit of the confidence, before a calibration or a hint changes it."""
        share, next_share = self._value_shares
        same_numbers = self._backend.has_same_numbers(self.rows)
        logit = float(confidence_logit(share, next_share, self._top_weight, same_numbers))
        # If many rows agree, the best key need not be the one that the query names.
        top_share = min(self._top_weight / max(share, MIN_SHARE), 1.0)
        mismatch = self._backend.measure_mismatch(self.rows) * top_share
        if not mismatch:
            return logit
        probability = math.exp(-MISMATCH_FACTOR * mismatch) / (1 + math.exp(-logit))
        return max(math.log(probability / (1 - probability)), -MAX_RELIABLE_LOGIT)

    @property
    def _has_other_words(self) -> bool:
        """Whether the best key lacks words of the query: the table may lack what was asked for.

        False if the answer comes from a server or a pickle; its `hint` says it.
        """
        return self._backend.measure_mismatch(self.rows) >= MIN_OTHER_WORDS

    def _value_confidence_text(self) -> str:
        """Return `confidence_text` for an answer whose value is that of some rows."""
        if self.confidence is None:
            if self.is_normalized:
                return "one row decides"
            share = self._value_shares[0]
            return next(word for least, word in CONFIDENCE_WORDS if share >= least)
        words = (word for least, word in CONFIDENCE_WORDS if self.confidence >= least)
        text = f"{next(words)} ({100 * self.confidence:.0f} %)"
        if self.confidence < CONFIDENCE_WORDS[0][0] and self.values and len(self.values) > 1:
            heaviest = _group_rows(self._heavy_rows(), "key")[0]
            has_several = len(_group_rows(heaviest.rows, "value")) > 1
            if heaviest.weight > MIN_DECISIVE_WEIGHT and has_several:
                return f"{text}, one key has several values"
        return text

    def _mean_confidence_text(self) -> str:
        """Return `confidence_text` for an answer whose value is a mean or a sum."""
        if self._backend.is_far:
            return "unsure, far from every key"
        if not self.is_normalized:
            if self._top_share > MIN_DECISIVE_WEIGHT and _look_equal(
                self.value, self.rows[0].value
            ):
                return "one row decides"
            return f"a sum of {'a few' if self.effective_rows < 4 else 'many'} rows"
        rows = self.rows[:1] if self._top_share > MIN_DECISIVE_WEIGHT else self._heavy_rows()
        keys, values = _group_rows(rows, "key"), _group_rows(rows, "value")
        kind = "row" if len(keys[0].rows) == 1 else "key"
        if keys[0].weight > MIN_DECISIVE_WEIGHT:
            if _look_equal(self.value, _weighted_mean(keys[0].rows)):
                return f"one {kind} decides"
            return f"a mean; one {kind} has {_format_percent(keys[0].weight)} of the weight"
        if values[0].weight > MIN_DECISIVE_WEIGHT and _look_equal(
            self.value, values[0].rows[0].value
        ):
            return "rows with the same value decide"
        alike = len(keys) < len(rows)
        effective = (
            self._effective_groups([key.weight for key in keys]) if alike else self.effective_rows
        )
        return f"a mean of {'a few' if effective < 4 else 'many'} {'keys' if alike else 'rows'}"

    def _heavy_rows(self) -> list[Row]:
        """Return every row with a weight of at least `MIN_SHOWN_WEIGHT`.

        If the answer does not have all of these rows, return `rows`.
        """
        shown = sum(row.weight for row in self.rows)
        if not self.is_normalized or len(self.rows) >= self.total or shown > 1 - MIN_SHOWN_WEIGHT:
            return self.rows
        try:
            return self._backend.rows_above(MIN_SHOWN_WEIGHT) or self.rows
        except QkvError:  # answers of a pickle or a server have only `rows`
            return self.rows

    def _effective_groups(self, weights: Any) -> float:
        """Return the effective number of groups (keys or values) with these weights.

        That is e^entropy. The remaining weight is treated as spread evenly over the remaining rows.
        """
        shares = np.abs(weights)
        remaining = max(1 - shares.sum(), 0) if self.is_normalized else 0.0
        shares = shares / (1 if self.is_normalized else shares.sum() or 1)
        entropy = -float((shares * np.log(np.where(shares > 0, shares, 1))).sum())
        if remaining > MIN_SHOWN_WEIGHT:
            entropy -= remaining * math.log(remaining / max(self.total - len(shares), 1))
        return math.exp(entropy)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as a dictionary of JSON values."""
        return {name: to_jsonable(x) for name, x in self._to_fields(_row_to_dict).items()}

    def _to_fields(self, row: Callable[[Row], Any]) -> dict[str, Any]:
        """Return the fields of `to_dict`; `row` converts a `Row`."""
        result = {
            SERIALIZED_NAMES.get(name, name): getattr(self, name) for name in SERIALIZED_FIELDS
        }
        result |= {"rows": list(map(row, self.rows))} | self._prediction_set_fields(row)
        if self.recall is not None:
            missing = self.missing_weight
            result |= {
                "missing_weight": None if missing is None else list(missing),
                "recall": self.recall,
            }
        return result | ({"hint": self.hint} if not self.total and self.hint else {})

    def _prediction_set_fields(self, row: Callable[[Row], Any]) -> dict[str, Any]:
        """Return the fields about the prediction set.

        The rows themselves are included only if there are at most `MAX_SERIALIZED_SET_ROWS`.
        """
        if self.coverage is None:
            return {}
        result = {
            "coverage": self.coverage,
            "abstains": self.abstains,
            "set_rows": len(self.prediction_set),
        }
        return result | (
            {"set": list(map(row, self.prediction_set))}
            if len(self.prediction_set) <= MAX_SERIALIZED_SET_ROWS
            else {}
        )

    def to_frame(self) -> Any:
        """Return the rows as a data frame of pandas, polars or pyarrow.

        The library is that of the frame from which the database was built, else an installed one.
        """
        columns: dict[str, list[Any]] = {
            name: [getattr(row, name) for row in self.rows]
            for name in ("key", "value", "weight", "index")
        }
        for row in self.rows:
            for name in row.record:
                if name not in columns:
                    columns[name] = [r.record.get(name) for r in self.rows]
        return build_frame(columns, self._library)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the weights as a matplotlib figure; save it if `path` is set."""
        from qkv.plot import bars, style

        if not self.rows:
            raise CombinationError(f"there is nothing to draw: {self.why_nothing}")
        figure = bars(
            [format_one_line(row.displayed_key, 44) for row in self.rows],
            [row.weight for row in self.rows],
            title=f"{format_one_line(self.query, 60)} → {format_one_line(self.value, 60)}",
            others=self.total - len(self.rows) if self.is_normalized else 0,
        )
        return style.save_figure(figure, path)

    def __str__(self) -> str:
        value = f"{format_one_line(self.query)} → {format_one_line(self.value, 60)}"
        if not self.rows:
            return f"{format_one_line(self.query)} → nothing: {self.why_nothing}"
        seen = [row for row in self.rows if abs(row.weight) >= MIN_SHOWN_WEIGHT] or self.rows[:1]
        remaining, more = 1 - sum(row.weight for row in seen), self.total - len(seen)
        names = [format_one_line(row.displayed_key, 32) for row in seen]
        weights = [format_weight(row.weight) for row in seen]
        lengths = bar_lengths(row.weight for row in seen)
        weight_width, key_width = max(map(len, weights)), max(map(display_width, names))
        lines = [
            f"  {weight:>{weight_width}} {format_bar(length):{BAR_WIDTH}} "
            f"{pad_to_width(name, key_width)}  {format_one_line(row.value, 40)}".rstrip()
            for row, weight, name, length in zip(seen, weights, names, lengths, strict=True)
        ]
        if more > 0 and not self.is_normalized and self._has_other_weight(seen):
            lines.append(
                f"  {'…':>{weight_width}} {'':{BAR_WIDTH}} {format_plural(more, 'more row')}"
            )
        elif more > 0 and remaining >= MIN_SHOWN_WEIGHT:
            lines.append(
                f"  {format_weight(remaining):>{weight_width}} {format_bar(remaining):{BAR_WIDTH}} "
                f"{format_plural(more, 'more row')}"
            )
        if self.exact:
            lines.append(f"  {self._exact_match_text}")
        if self.coverage is not None:
            lines.append(f"  {self._coverage_text}")
        if self.error_bound and self.recall is not None:
            lines.append(f"  {self._error_bound_text}")
        if self.hint:
            lines.append(f"  {self.hint}")
        left_out = f"; {self.missing_text} left out" if self.missing else ""
        lines.append(f"  effective rows {self.effective_rows:,.1f} of {self.total:,}{left_out}")
        return "\n".join([value, *lines])

    def _has_other_weight(self, seen: list[Row]) -> bool:
        """Return whether rows that are not in `seen` have weight.

        If they do, the entropy of all rows differs from that of the rows in `seen`.
        """
        sizes = np.abs([row.weight for row in seen])
        parts = sizes / (sizes.sum() or 1)
        entropy = -float((parts * np.log(np.where(parts, parts, 1))).sum())
        return abs(self.entropy - entropy) > 1e-4

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html

        longs = bar_lengths(row.weight for row in self.rows)
        cells = "".join(
            f"<tr><td class=w>{format_weight(row.weight)}</td><td class=b><i style='width:"
            f"{100 * long:.1f}%'></i></td>"
            f"<td>{html.escape(format_one_line(row.displayed_key, 200))}</td>"
            f"<td>{html.escape(format_one_line(row.value, 400))}</td></tr>"
            for row, long in zip(self.rows, longs, strict=True)
        )
        value = html.escape(format_one_line(self.value, 400)) if self.rows else "nothing"
        return (
            f"<style>{_CSS}</style><div class=qkv-answer>"
            f"<p class=q>{html.escape(format_one_line(self.query, 400))}</p><p class=v>{value}</p>"
            f"<table><thead><tr><th>weight</th><th></th><th>key</th><th>value</th></tr></thead>"
            f"<tbody>{cells}</tbody></table>"
            f"<p class=e>{html.escape(self.explain())}</p></div>"
        )


def confidence_logit(
    share: Any, next_share: Any, top_weight: Any, same_numbers: bool = False
) -> Any:
    """Return the logit of the confidence, from shares of the weight.

    `share` and `next_share` are those of the two heaviest values, and `top_weight` is the total
    weight of the rows that have the largest weight. They are numbers or arrays. `same_numbers` says
    that the best key has the numbers of the query.

    >>> round(float(confidence_logit(0.9, 0.05, 0.9)), 2)
    2.9
    """
    share, next_share = (np.clip(x, MIN_SHARE, 1 - 1e-4) for x in (share, next_share))
    bias, share_factor, margin_factor = CONFIDENCE_COEFFICIENTS
    # Many rows that agree a little are less convincing than one row that fits.
    margin = np.log(share / next_share) * np.minimum(top_weight / share, 1.0)
    logit = bias + share_factor * np.log(share / (1 - share)) + margin_factor * margin
    if same_numbers:
        logit = logit + np.minimum(margin, MAX_NUMBER_BONUS)
    return np.clip(logit, -MAX_RELIABLE_LOGIT, MAX_RELIABLE_LOGIT)


class _Group(NamedTuple):
    """Rows with the same key, or with the same value."""

    weight: float
    rows: list[Row]


def _group_rows(rows: list[Row], name: str) -> list[_Group]:
    """Group rows by `name`, which is "key" or "value"; the heaviest group comes first."""
    rows_by_cell: dict[Any, list[Row]] = {}
    for row in rows:
        rows_by_cell.setdefault(_hashable_cell(getattr(row, name)), []).append(row)
    groups = [
        _Group(sum(abs(row.weight) for row in members), members)
        for members in rows_by_cell.values()
    ]
    return sorted(groups, key=lambda group: -group.weight)


def _hashable_cell(cell: Any) -> Any:
    """Return a hashable object that is equal for equal cells."""
    if isinstance(cell, np.ndarray):
        return cell.shape, cell.tobytes()
    try:
        hash(cell)
    except TypeError:
        return json.dumps(to_jsonable(cell), sort_keys=True)
    return cell


def _weighted_mean(rows: list[Row]) -> Any:
    """Return the weighted mean of the rows' values: a float, a vector, or a mapping of columns."""
    values = [row.value for row in rows]
    if len(values) == 1:
        return values[0]
    weights = np.array([row.weight for row in rows])
    weights = weights / weights.sum()
    if isinstance(values[0], Mapping):
        names = values[0].keys()
        return {n: float(weights @ np.array([v[n] for v in values], float)) for n in names}
    return weights @ np.array([np.asarray(value, float) for value in values])


def _look_equal(value: Any, other: Any) -> bool:
    """Return whether two averaged values look the same once they are formatted."""
    if isinstance(value, Mapping):
        return all(_look_equal(x, other[name]) for name, x in value.items())
    a, b = np.asarray(value, float), np.asarray(other, float)
    if a.ndim:
        return bool(np.array_equal(a.round(4), b.round(4), equal_nan=True))
    return format_number(float(a)) == format_number(float(b))


def _format_in_sentence(x: Any) -> str:
    """Format a cell for a sentence. A tuple contains commas, so it is put in parentheses."""
    return f"({format_one_line(x)})" if isinstance(x, tuple) else format_one_line(x)


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {"key": row.key, "value": row.value, "weight": row.weight, "index": row.index}


def _format_percent(share: float) -> str:
    return f"{100 * share:.3g} %"


# Only the bars are coloured: the style must suit light and dark notebooks.
_CSS = """
.qkv-answer{font:15px/1.5 system-ui,sans-serif;max-width:52rem}
.qkv-answer .q{opacity:.7;margin:0}.qkv-answer .v{font-size:1.5rem;margin:.1rem 0 .8rem}
.qkv-answer table{border-collapse:collapse;width:100%}
.qkv-answer th{font-weight:400;text-align:left;font-size:.85rem}
.qkv-answer th,.qkv-answer .e{opacity:.75}
.qkv-answer td,.qkv-answer th{padding:.25rem .7rem .25rem 0;vertical-align:top;
border-bottom:1px solid #8884;text-align:left;background:none}
.qkv-answer .w{font-variant-numeric:tabular-nums;width:3.5rem}
.qkv-answer .b{width:9rem;min-width:5rem}
.qkv-answer .b i{display:block;height:.8rem;margin-top:.35rem;background:#dc3a32;min-width:1px}
.qkv-answer .e{font-size:.9rem}
"""
