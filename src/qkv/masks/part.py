"""A rule as a process sees it that holds some of the keys."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.masks.base import Compound, Mask, Verdict
from qkv.types import At, Shape, Span


@dataclass(frozen=True)
class Within(Mask):
    """What a rule says of blocks of a call that lies at `at` of a larger one.

    `allowed` is the rule's own: a block knows the positions that it lies at.
    """

    rule: Mask
    at: At

    def verdict(self, rows: Span, cols: Span, n: int, m: int) -> Verdict:
        at = self.at
        rows = rows._replace(start=rows.start + at.row)
        cols = cols._replace(start=cols.start + self.shift)
        return self.rule.verdict(rows, cols, at.n, m if self.rule.keyed else at.m)

    def extent(self, rows: Span, n: int, m: int) -> tuple[int, int]:
        at = self.at
        rows = rows._replace(start=rows.start + at.row)
        found = self.rule.extent(rows, at.n, m if self.rule.keyed else at.m)
        start, end = (min(max(x - self.shift, 0), m) for x in found)
        return start, end

    def check(self, lead: Shape, n: int, m: int) -> None:
        self.rule.check(lead, self.at.n, m if self.rule.keyed else self.at.m)

    @property
    def shift(self) -> int:
        return 0 if self.rule.keyed else self.at.col


def seen(rule: Mask, at: At | None) -> Mask:
    """The rule for blocks of a call that lies there; None: it is the whole call.

    Positions are those of the whole; an array has a row for each query of the whole, and a column
    for each key that is here.

    >>> from qkv.masks import causal
    >>> seen(causal, At(0, 4, 8, 8)).extent(Span(0, 6), 8, 4)  # key 4 is the first one here
    (0, 2)
    """
    if at is None:
        return rule
    if isinstance(rule, Compound):
        return type(rule)(*(seen(part, at) for part in rule.parts))
    return Within(rule, at)
