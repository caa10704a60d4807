"""Rules of masks as expressions: which pairs a mask allows, as a function of b, h, q and k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.engines.call import Call
from qkv.engines.triton.pair_functions.expressions import Expressions, TranslationError, Value
from qkv.engines.triton.pair_functions.trace import trace_function
from qkv.frameworks import get_framework, is_array
from qkv.masks.band import Band, Dilated, GlobalTokens, Strided
from qkv.masks.base import AndMask, ArrayMask, Mask, NotMask, OrMask
from qkv.masks.functions import CustomMask
from qkv.masks.integers import MAX_POSITION
from qkv.masks.packed_sequences import KeySpans
from qkv.masks.sequences import Blocks, Documents, Lengths


class RuleTranslator:
    """Adds the rules of masks to the expressions of a call."""

    def __init__(self, call: Call, expressions: Expressions) -> None:
        self.call, self.expressions = call, expressions
        self.positions = {name: expressions.position(name) for name in "bhqk"}

    def translate(self, rule: Mask) -> Value:
        """Return whether the rule allows a pair; raise TranslationError if it has no expression."""
        made = self.expressions
        if isinstance(rule, AndMask | OrMask):
            sign = "&" if isinstance(rule, AndMask) else "|"
            return made.logical(sign, self.translate(rule.one), self.translate(rule.two))
        if isinstance(rule, NotMask):
            return made.logical_not(self.translate(rule.one))
        for kind, method in self._METHODS.items():
            if isinstance(rule, kind):
                return method(self, rule)  # type: ignore[no-any-return]
        raise TranslationError(f"the mask {type(rule).__name__} has no expression")

    def _custom(self, rule: CustomMask) -> Value:
        out = trace_function(
            rule.mask_mod, self.expressions, [*self.positions.values()], self.call.query.device
        )
        if out.kind != "bool":
            raise TranslationError("mask_mod does not return booleans")
        return out

    def _band(self, rule: Band) -> Value:
        made = self.expressions
        if rule.offset is None:
            # Not a constant, which would be compiled again for each length.
            last = Value("(z.m - z.n)", "int", slopes=(0.0, 0.0))
            at = self.positions["q"]
            at = made.add(at, last) if rule.align == "bottom_right" else at
        elif isinstance(rule.offset, int):
            at = made.add(self.positions["q"], made.constant(rule.offset))
        else:
            at = made.add(self.positions["q"], self._load_per_row(rule.offset))
        out: Value = made.constant(True)
        if rule.right is not None:
            end = made.add(at, made.constant(rule.right))
            out = made.compare("<=", self.positions["k"], end)
        if rule.left is not None:
            start = made.subtract(at, made.constant(rule.left))
            out = made.logical("&", out, made.compare(">=", self.positions["k"], start))
        return out

    def _strided(self, rule: Strided) -> Value:
        made = self.expressions
        distance = made.subtract(self.positions["q"], self.positions["k"])
        # Triton's remainder of a negative number is 0 for the same numbers.
        remainder = made.operate("({0} % {1})", "int", distance, made.constant(rule.step))
        return made.compare("==", remainder, made.constant(0))

    def _dilated(self, rule: Dilated) -> Value:
        return self.expressions.logical("&", self._band(rule.outer_band), self._strided(rule))

    def _global_tokens(self, rule: GlobalTokens) -> Value:
        made, count = self.expressions, self.expressions.constant(rule.count)
        near = [made.compare("<", self.positions[name], count) for name in "qk"]
        return made.logical("|", *near)

    def _lengths(self, rule: Lengths) -> Value:
        return self.expressions.compare("<", self.positions["k"], self._load_per_row(rule.valid))

    def _documents(self, rule: Documents) -> Value:
        ids = self._load_ids(rule.query_ids, "q"), self._load_ids(rule.key_ids, "k")
        return self.expressions.compare("==", *ids)

    def _key_spans(self, rule: KeySpans) -> Value:
        made, bounds, key = self.expressions, self._as_tensor(rule.bounds), self.positions["k"]
        start, end = (made.load(bounds, [made.constant(x), self.positions["q"]]) for x in (0, 1))
        return made.logical("&", made.compare(">=", key, start), made.compare("<", key, end))

    def _blocks(self, rule: Blocks) -> Value:
        made = self.expressions
        layout: Any = self.call.fw.cached_constant(rule.layout, self.call.query, "bool")
        at = [
            made.floor_divide(self.positions[name], made.constant(size))
            for name, size in zip("qk", rule.size, strict=True)
        ]
        lead = [self.positions["h"]] if layout.ndim > 2 else []
        return made.load(layout, [*lead, *at])

    def _array(self, rule: ArrayMask) -> Value:
        if rule.is_bias:
            raise TranslationError("a float mask is an array")
        values: Any = rule.values
        lead = values.ndim - 2
        if lead > 2:
            raise TranslationError("a mask with more than four axes is an array")
        names = ["b", "h"][2 - lead :] if len(self.call.lead) > 1 else ["h"][1 - lead :]
        return self.expressions.load(values, [self.positions[x] for x in (*names, "q", "k")])

    def _first_axis(self) -> Value:
        """Return the index of the first axis of the scores."""
        lead, made = self.call.lead, self.expressions
        if len(lead) < 2:
            return self.positions["h"]
        count = math.prod(lead[1:-1])
        return (
            made.floor_divide(self.positions["b"], made.constant(count))
            if count != 1
            else (self.positions["b"])
        )

    def _load_ids(self, ids: Any, name: str) -> Value:
        ids = self._as_tensor(ids)
        lead = [self._first_axis()] if ids.ndim == 2 else []
        return self.expressions.load(ids, [*lead, self.positions[name]])

    def _load_per_row(self, values: Any) -> Value:
        """Return one number for each sequence (B,) or each query (B, n); without a batch, (n,)."""
        values = self._as_tensor(values)
        at: Sequence[Value] = ()
        if values.ndim == 2:
            at = self._first_axis(), self.positions["q"]
        elif values.ndim == 1:
            at = (self._first_axis() if self.call.lead else self.positions["q"],)
        found = self.expressions.load(values, at)
        if found.kind != "long":
            return found
        low, high = map(self.expressions.constant, (-MAX_POSITION, MAX_POSITION))
        return self.expressions.cast(self.expressions.clamp(found, low, high, "long"), "int")

    def load_per_row_of_head(self, values: Tensor) -> Value:
        """Return one number of an array (…, n or 1, 1) that broadcasts to the scores."""
        if values.ndim > 4:
            raise TranslationError("a learned temperature has more than four axes")
        names = ["b", "h", "q", "k"] if len(self.call.lead) > 1 else ["h", "q", "k"]
        if values.ndim > len(names):
            raise TranslationError("a learned temperature has more axes than the scores")
        names = names[len(names) - values.ndim :]
        return self.expressions.load(values, [self.positions[x] for x in names])

    def _as_tensor(self, values: Any) -> Tensor:
        device = self.call.query.device
        if is_array(values) and get_framework(values) is self.call.fw:
            return values.to(device)
        return torch.as_tensor(values, device=device)

    _METHODS: ClassVar[dict[type, Any]] = {
        CustomMask: _custom,
        Band: _band,
        Dilated: _dilated,
        Strided: _strided,
        GlobalTokens: _global_tokens,
        Lengths: _lengths,
        Documents: _documents,
        KeySpans: _key_spans,
        Blocks: _blocks,
        ArrayMask: _array,
    }
