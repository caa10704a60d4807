"""`Expressions`: numbers of one pair as lines of Triton source, with their derivatives.

A `Value` is one number of a pair: its score, one of its positions b, h, q and k, a number loaded
from a captured tensor, or the result of an operation on those. Each operation adds one line.
`derivatives` differentiates a value in reverse order and adds the lines of the chain rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

KINDS = ("bool", "int", "long", "float")
"""The types of values, in the order of PyTorch's type promotion."""
TRITON_TYPES = {"bool": "tl.int1", "int": "tl.int32", "long": "tl.int64", "float": "tl.float32"}
MAX_NUMBERS = 24
"""Numbers that a kernel takes: lengths and offsets of captured tensors, and constants."""
MAX_CONSTANTS = 8
"""At most this many of these numbers are constants of the function. Further constants are compiled
into the kernel."""
MIN_PASSED_CONSTANT = 16
"""Smaller integers, such as 1, are part of the formula. Larger ones are passed as an argument."""
MAX_CAPTURED_ELEMENTS = 2**31
MAX_EXACT_INTEGER = 2**24
"""Up to here, sums of integers are exact in float32."""
MAX_SHORT_LENGTH = 2**22
"""The most queries or keys whose positions are computed in float32 (`F.SHORT`)."""


class TranslationError(Exception):
    """A function has no translation; the message says why."""


@dataclass(frozen=True, eq=False)
class Value:
    """One number of a pair.

    - text: its name in the source, or the literal of a constant `number`.
    - positions: the positions that it depends on. `by_distance`: on q and k only through q − k.
    - slopes: the factors of q and k if it is linear in both, else None.
    - is_monotone: whether it only grows, or only falls, with q − k, and depends on nothing else.
    - low: a number that it is never below.
    - has_score: whether it depends on the score or on a captured number that is learned.
    - sum_of: for an integer, the method of `Expressions` that makes it of its operands, if it makes
      the same number of floats.
    """

    text: str
    kind: str
    number: float | int | bool | None = None
    positions: frozenset[str] = frozenset()
    by_distance: bool = False
    slopes: tuple[float, float] | None = None
    is_nonnegative: bool = False
    is_monotone: bool = False
    low: float | None = None
    has_score: bool = False
    sum_of: str | None = None
    operands: tuple[Value, ...] = ()
    partials: tuple[Any, ...] | None = None
    """For each operand: its derivative as a function of the expressions, or None for 0."""


@dataclass(frozen=True, eq=False)
class Load:
    """A number loaded from a captured tensor at `indices`."""

    tensor: Tensor
    indices: tuple[Value, ...]
    value: Value


@dataclass(frozen=True, eq=False)
class CapturedTensor:
    """A captured tensor: the names of its offset in the packed array and of its axes' lengths."""

    tensor: Tensor
    is_float: bool
    offset: str | None
    lengths: tuple[str | None, ...]


@dataclass
class Expressions:
    """Lines of Triton source, in order."""

    lines: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    tensors: list[CapturedTensor] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    numbers: list[tuple[str, int, int]] = field(default_factory=list)
    """What each number of `z.c0 …` is: ("length", tensor, axis), ("offset", tensor, 0) or
    ("constant", number, 0)."""
    distance_indices: list[Value] = field(default_factory=list)
    """The indices of loads that `load_by_distance` reads."""
    _known: dict[Any, Value] = field(default_factory=dict)

    # Inputs

    @staticmethod
    def score() -> Value:
        return Value("s", "float", has_score=True)

    @staticmethod
    def position(name: str) -> Value:
        slopes = {"q": (1.0, 0.0), "k": (0.0, 1.0)}.get(name, (0.0, 0.0))
        text = {"q": "i", "k": "j"}.get(name, name)
        return Value(text, "int", positions=frozenset(name), slopes=slopes, is_nonnegative=True)

    @staticmethod
    def constant(number: float | int | bool) -> Value:
        kind = "bool" if isinstance(number, bool) else "int"
        if isinstance(number, float):
            kind = "float"
        elif not -(2**31) <= number < 2**31:
            kind = "long"
        text = repr(number)
        if isinstance(number, float) and not math.isfinite(number):
            text = f'float("{number}")'
        return Value(
            text, kind, number, slopes=(0.0, 0.0), is_nonnegative=number >= 0, low=float(number)
        )

    # Operations

    def operate(
        self, template: str, kind: str, *operands: Value, partials: Any = None,
        is_nonnegative: bool = False, slopes: tuple[float, float] | None = None,
        has_score: bool | None = None, is_monotone: bool = False, low: float | None = None,
        sum_of: str | None = None,
    ) -> Value:  # fmt: skip
        """Return the value of a template with `{0}`, `{1}` … for the operands."""
        text = template.format(*[x.text for x in operands])
        key = (text, kind, tuple(x.text for x in operands))
        if (known := self._known.get(key)) is not None:
            return known
        moved = [x for x in operands if x.positions & {"q", "k"}]
        if slopes is not None and slopes[0] == -slopes[1] != 0:
            by_distance = True
        else:
            by_distance = bool(moved) and all(x.by_distance for x in moved)
        # Of other positions and of numbers that differ between pairs it must not depend.
        is_linear = slopes is not None and slopes[0] == -slopes[1] != 0
        fixed = not any(x.positions or x.kind == "float" for x in operands if not x.is_monotone)
        is_monotone = is_linear or (is_monotone and fixed)
        name = f"v{len(self.lines)}"
        self.lines[name] = text, key[2]
        found = Value(
            name, kind,
            positions=frozenset().union(*[x.positions for x in operands]),
            by_distance=by_distance,
            slopes=slopes,
            is_nonnegative=is_nonnegative or kind == "bool" or (low is not None and low >= 0),
            is_monotone=is_monotone,
            low=low,
            has_score=any(x.has_score for x in operands) if has_score is None else has_score,
            sum_of=sum_of if kind in ("int", "long") else None,
            operands=operands,
            partials=partials,
        )  # fmt: skip
        self._known[key] = found
        return found

    def cast(self, x: Value, kind: str) -> Value:
        if x.kind == kind:
            return x
        if x.number is not None:
            make: Any = {"bool": bool, "float": float}.get(kind, int)
            made = self.constant(make(x.number))
            return made if kind != "long" else Value(made.text, kind, made.number, slopes=(0, 0))
        if kind == "bool":
            return self.operate("({0} != 0)", "bool", x)
        if kind == "float" and x.kind != "bool":
            quick = self._sum_in_floats(x)
            if quick is not None and x.sum_of is None:
                return quick[0]
            if quick is not None:
                return self.operate(
                    "({0} if F.SHORT else {1}.to(tl.float32))", "float", quick[0], x,
                    partials=(None, None), is_nonnegative=x.is_nonnegative, low=x.low,
                )  # fmt: skip
        return self.operate(
            "{0}.to(" + TRITON_TYPES[kind] + ")", kind, x,
            partials=(None,) if x.kind != "float" else (lambda g: g,),
            is_nonnegative=x.is_nonnegative, slopes=None if kind == "float" else x.slopes,
            is_monotone=x.is_monotone and kind != "float", low=x.low, sum_of="cast",
        )  # fmt: skip

    def _sum_in_floats(self, x: Value) -> tuple[Value, float] | None:
        """Return an integer computed in float32, and a bound of its size; None: it may be inexact.

        A GPU converts integers to floats at an eighth of the speed of other operations. A position
        is converted once for a row or a column, and a distance would be once for each pair.
        """
        if x.number is not None:
            return self.constant(float(x.number)), abs(x.number)
        if not x.operands and x.kind == "int" and x.slopes == (0.0, 0.0) and x.low is not None:
            passed = self.operate("tl.cast({0}, tl.float32)", "float", x)
            return passed, abs(x.low)
        if not x.operands and len(x.positions) == 1:
            found = self.operate("float_position({0}, F)", "float", x, is_nonnegative=True)
            return found, float(MAX_SHORT_LENGTH)
        if x.sum_of is None or any(y.kind not in ("int", "long") for y in x.operands):
            return None
        if x.sum_of == "cast":
            return self._sum_in_floats(x.operands[0])
        parts = [self._sum_in_floats(y) for y in x.operands]
        if any(y is None for y in parts):
            return None
        values, bounds = zip(*(y for y in parts if y is not None), strict=True)
        size = max(bounds) if x.sum_of in ("minimum", "maximum") else sum(bounds)
        if size > MAX_EXACT_INTEGER:
            return None
        if x.sum_of in ("minimum", "maximum"):
            return self.extreme(x.sum_of, *values), size
        return getattr(self, x.sum_of)(*values), size

    def _match(self, *operands: Value, kind: str | None = None) -> tuple[Value, ...]:
        kind = kind or max((x.kind for x in operands), key=KINDS.index)
        return tuple(self.cast(x, kind) for x in operands)

    def _pass_constant(self, x: Value) -> Value:
        """Return a large integer as an argument, so that kernels are not compiled for it."""
        if x.kind != "int" or x.number is None or abs(x.number) < MIN_PASSED_CONSTANT:
            return x
        number = ("constant", int(x.number), 0)
        if number in self.numbers:
            name = f"c{self.numbers.index(number)}"
        elif sum(what == "constant" for what, *_ in self.numbers) == MAX_CONSTANTS:
            return x
        else:
            name = self._add_number(*number)
        return Value(
            f"z.{name}", "int", slopes=(0.0, 0.0), is_nonnegative=x.number >= 0, low=float(x.number)
        )

    def add(self, a: Value, b: Value, kind: str | None = None) -> Value:
        a, b = self._match(a, b, kind=kind)
        if a.number == 0 or b.number == 0:
            return b if a.number == 0 else a
        a, b = self._pass_constant(a), self._pass_constant(b)
        slopes = None
        if a.slopes and b.slopes:
            slopes = a.slopes[0] + b.slopes[0], a.slopes[1] + b.slopes[1]
        return self.operate(
            "({0} + {1})", a.kind, a, b, partials=(lambda g: g, lambda g: g),
            is_nonnegative=a.is_nonnegative and b.is_nonnegative, slopes=slopes,
            is_monotone=a.is_monotone != b.is_monotone,
            low=None if a.low is None or b.low is None else a.low + b.low, sum_of="add",
        )  # fmt: skip

    def subtract(self, a: Value, b: Value, kind: str | None = None) -> Value:
        a, b = self._match(a, b, kind=kind)
        if b.number == 0:
            return a
        a, b = self._pass_constant(a), self._pass_constant(b)
        slopes = None
        if a.slopes and b.slopes:
            slopes = a.slopes[0] - b.slopes[0], a.slopes[1] - b.slopes[1]
        return self.operate(
            "({0} - {1})", a.kind, a, b, partials=(lambda g: g, self.negate), slopes=slopes,
            sum_of="subtract",
        )  # fmt: skip

    def multiply(self, a: Value, b: Value, kind: str | None = None) -> Value:
        a, b = self._match(a, b, kind=kind)
        if a.number == 1 or b.number == 1:
            return b if a.number == 1 else a
        if a.number is not None and b.number is not None:
            return self.constant(a.number * b.number)
        slopes = None
        for x, y in ((a, b), (b, a)):
            if x.number is not None and y.slopes:
                slopes = y.slopes[0] * x.number, y.slopes[1] * x.number
        return self.operate(
            "({0} * {1})", a.kind, a, b,
            partials=(lambda g: self.multiply(g, b), lambda g: self.multiply(g, a)),
            is_nonnegative=a.is_nonnegative and b.is_nonnegative, slopes=slopes,
        )  # fmt: skip

    def divide(self, a: Value, b: Value) -> Value:
        a, b = self._match(a, b, kind="float")
        if b.number:  # a product with the reciprocal is as good and faster
            return self.multiply(a, self.constant(1.0 / b.number))
        found: Value = self.operate(
            "({0} / {1})", "float", a, b,
            partials=(
                lambda g: self.divide(g, b),
                lambda g: self.negate(self.divide(self.multiply(g, self.divide(a, b)), b)),
            ),
            is_nonnegative=a.is_nonnegative and b.is_nonnegative,
        )  # fmt: skip
        return found

    def negate(self, x: Value) -> Value:
        if x.number is not None:
            return self.constant(-x.number)
        slopes = None if x.slopes is None else (-x.slopes[0], -x.slopes[1])
        return self.operate(
            "(-{0})", x.kind, x, partials=(self.negate,), slopes=slopes, sum_of="negate"
        )

    def remainder(self, a: Value, b: Value) -> Value:
        """Return a mod b with the sign of b, as in Python."""
        a, b = self._match(a, b)
        if a.kind == "float":
            quotient = self.operate("tl.floor({0} / {1})", "float", a, b)
            return self.operate(
                "({0} - {1} * {2})", "float", a, quotient, b,
                partials=(lambda g: g, None, lambda g: self.negate(self.multiply(g, quotient))),
            )  # fmt: skip
        if a.is_nonnegative and b.is_nonnegative:
            return self.operate("({0} % {1})", a.kind, a, b, is_nonnegative=True)
        some = self.operate("({0} % {1})", a.kind, a, b)
        return self.operate(
            "tl.where(({0} != 0) & (({0} < 0) != ({1} < 0)), {0} + {1}, {0})", a.kind, some, b,
            is_nonnegative=b.is_nonnegative,
        )  # fmt: skip

    def floor_divide(self, a: Value, b: Value) -> Value:
        a, b = self._match(a, b)
        if a.kind == "float":
            return self.operate("tl.floor({0} / {1})", "float", a, b)
        if a.is_nonnegative and b.is_nonnegative:
            return self.operate("({0} // {1})", a.kind, a, b, is_nonnegative=True)
        # Triton rounds to zero: subtract the remainder first, so that nothing is left to round.
        return self.operate("(({0} - {2}) // {1})", a.kind, a, b, self.remainder(a, b))

    def compare(self, sign: str, a: Value, b: Value) -> Value:
        a, b = map(self._pass_constant, self._match(a, b))
        return self.operate("({0} " + sign + " {1})", "bool", a, b, has_score=False)

    def logical(self, sign: str, a: Value, b: Value) -> Value:
        a, b = self._match(a, b, kind="bool")
        for x, y in ((a, b), (b, a)):
            if x.number is not None and sign in "&|":
                return y if bool(x.number) == (sign == "&") else x
        return self.operate("({0} " + sign + " {1})", "bool", a, b)

    def logical_not(self, x: Value) -> Value:
        x = self.cast(x, "bool")
        if x.number is not None:
            return self.constant(not x.number)
        return self.operate("({0} == 0)", "bool", x)

    def where(self, condition: Value, a: Value, b: Value, kind: str | None = None) -> Value:
        condition = self.cast(condition, "bool")
        a, b = self._match(a, b, kind=kind)
        if condition.number is not None:
            return a if condition.number else b
        zero = self.constant(0.0)
        return self.operate(
            "tl.where({0}, {1}, {2})", a.kind, condition, a, b,
            partials=(
                None,
                lambda g: self.where(condition, g, zero),
                lambda g: self.where(condition, zero, g),
            ),
            is_nonnegative=a.is_nonnegative and b.is_nonnegative,
        )  # fmt: skip

    def extreme(self, name: str, a: Value, b: Value) -> Value:
        """Return tl.maximum or tl.minimum; equal numbers share the gradient, as in PyTorch."""
        a, b = self._match(a, b)
        if a.kind != "float":
            lows = [x.low for x in (a, b) if x.low is not None]
            low = max(lows, default=None)
            if name == "minimum":
                low = min(lows) if len(lows) == 2 else None
            return self.operate(
                f"tl.{name}({{0}}, {{1}})", a.kind, a, b,
                is_nonnegative=(any if name == "maximum" else all)(
                    x.is_nonnegative for x in (a, b)
                ),
                is_monotone=a.is_monotone != b.is_monotone, low=low, sum_of=name,
            )  # fmt: skip
        sign = ">" if name == "maximum" else "<"

        def partial(g: Value, one: Value, two: Value) -> Value:
            half = self.where(
                self.compare("==", one, two), self.multiply(g, self.constant(0.5)),
                self.constant(0.0),
            )  # fmt: skip
            return self.where(self.compare(sign, one, two), g, half)

        return self.operate(
            f"tl.{name}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)", "float", a, b,
            partials=(lambda g: partial(g, a, b), lambda g: partial(g, b, a)),
        )  # fmt: skip

    def clamp(self, x: Value, low: Value | None, high: Value | None, kind: str) -> Value:
        x = self.cast(x, kind)
        inside: Value = self.constant(True)
        found = x
        for name, sign, bound in (("maximum", ">=", low), ("minimum", "<=", high)):
            if bound is not None:
                bound = self.cast(bound, kind)
                inside = self.logical("&", inside, self.compare(sign, x, bound))
                found = self.extreme(name, found, bound)
        if kind != "float":
            return found
        zero = self.constant(0.0)
        return self.operate(
            "{1}", "float", x, found, inside,
            partials=(lambda g: self.where(inside, g, zero), None, None),
        )  # fmt: skip

    def power(self, a: Value, b: Value, kind: str) -> Value:
        if b.number in (1, 2, 3):
            a = self.cast(a, kind)
            found = a
            for _ in range(int(b.number) - 1):
                found = self.multiply(found, a)
            return found
        if kind != "float":
            raise TranslationError("it raises integers to a power")
        a, b = self._match(a, b, kind="float")
        if b.number == 0.5:
            return self.unary("sqrt", a)
        if b.number == -1:
            return self.divide(self.constant(1.0), a)
        exact = b.number is not None and b.number == int(b.number)
        if a.number is not None and a.number > 0:
            logarithm: Value = self.constant(math.log2(a.number))
        else:
            logarithm = self.operate("tl.log2(tl.abs({0}))", "float", a)
        found = self.operate(
            "tl.exp2({0})", "float", self.multiply(b, logarithm), is_nonnegative=True
        )
        if not (a.is_nonnegative or exact):
            negative = self.compare("<", a, self.constant(0.0))
            found = self.where(negative, self.constant(math.nan), found)
        elif exact and b.number is not None and int(b.number) % 2:
            negative = self.compare("<", a, self.constant(0.0))
            found = self.where(negative, self.negate(found), found)
        ln2 = self.constant(math.log(2))

        def by_base(g: Value) -> Value:
            return self.multiply(self.multiply(g, b), self.divide(result, a))

        def by_exponent(g: Value) -> Value:
            return self.multiply(self.multiply(g, result), self.multiply(logarithm, ln2))

        result: Value = self.operate(
            "{2}", "float", a, b, found, partials=(by_base, by_exponent, None),
            is_nonnegative=a.is_nonnegative,
        )  # fmt: skip
        return result

    def unary(self, name: str, x: Value) -> Value:
        """Return one of the functions of `UNARY_FUNCTIONS` of a float."""
        template, derivative = UNARY_FUNCTIONS[name]
        x = self.cast(x, "float")

        def partial(g: Value) -> Value:
            return self.operate(
                "({2} * (" + derivative.format(x="{0}", y="{1}") + "))", "float", x, found, g
            )

        found: Value = self.operate(
            template, "float", x, partials=(None,) if derivative == "0" else (partial,),
            is_nonnegative=name in ("exp", "exp2", "sqrt", "rsqrt", "sigmoid", "relu"),
        )  # fmt: skip
        return found

    def absolute(self, x: Value) -> Value:
        if x.is_nonnegative:
            return x
        zero = self.constant(0.0)
        partials = None
        if x.kind == "float":
            partials = (
                lambda g: self.where(
                    self.compare(">", x, zero), g,
                    self.where(self.compare("<", x, zero), self.negate(g), zero),
                ),
            )  # fmt: skip
        return self.operate(
            "tl.abs({0})", x.kind, x, partials=partials, is_nonnegative=True, sum_of="absolute"
        )

    def detach(self, x: Value) -> Value:
        return self.operate("{0}", x.kind, x, is_nonnegative=x.is_nonnegative, has_score=False)

    # Captured tensors

    def load(self, tensor: Tensor, indices: Sequence[Value]) -> Value:
        """Return the number of a captured tensor at these indices, one for each axis."""
        if tensor.numel() == 0 or tensor.numel() >= MAX_CAPTURED_ELEMENTS:
            raise TranslationError(f"a captured tensor has {tensor.numel()} elements")
        if tensor.is_complex() or tensor.dtype == torch.float64:
            raise TranslationError(f"a captured tensor is of {tensor.dtype}")
        captured = self._add_tensor(tensor)
        at: Value | None = None
        distance: Value | None = None
        for index, length in zip(indices, captured.lengths, strict=True):
            if length is None:  # an axis of length 1
                continue
            size = Value(f"z.{length}", "int", is_nonnegative=True)
            if not index.is_nonnegative:
                index = self.operate(
                    "tl.where({0} < 0, {0} + {1}, {0})", index.kind, index, size,
                )  # fmt: skip
                index = self.extreme("maximum", index, self.constant(0))
            # Pairs beyond the arrays or the mask may have any index.
            index = self.operate(
                "tl.minimum({0}, {1} - 1)", index.kind, index, size, is_nonnegative=True,
                is_monotone=index.is_monotone,
            )  # fmt: skip
            index = self.cast(index, "int")
            # Only the last index may depend on the distance, and the others on b and h.
            distance = index if index.is_monotone and distance is None else None
            before = at
            if at is None:
                at = index
            else:
                at = self.operate("({0} * {1} + {2})", "int", at, size, index, is_nonnegative=True)
        source = "given.captured_floats" if captured.is_float else "given.captured_integers"
        where: tuple[Value, ...] = () if at is None else (at,)
        terms = [source, *(f"z.{x}" for x in (captured.offset,) if x), *["{0}" for _ in where]]
        fetch = "tl.load({})"
        if distance is not None and not (before and before.positions & {"q", "k"}):
            if distance not in self.distance_indices:
                self.distance_indices.append(distance)
            terms = terms[:-1]
            if before is not None:
                where = (*where, before)
                terms.append(f"{{1}} * z.{captured.lengths[-1]}")
            number = self.distance_indices.index(distance)
            fetch = f"load_by_distance_{number}({{}}, b, h, i, j, given, z, F)"
        kind = "float" if captured.is_float else "long"
        if not captured.is_float and tensor.dtype != torch.int64:
            kind = "int"
        cast = f".to({TRITON_TYPES[kind]})"
        learned = captured.is_float and tensor.requires_grad
        loaded = self.operate(
            f"{fetch.format(' + '.join(terms))}{cast}", kind, *where, has_score=learned
        )
        if learned and not any(x.value is loaded for x in self.loads):
            self.loads.append(Load(tensor, tuple(indices), loaded))
        return self.cast(loaded, "bool") if tensor.dtype == torch.bool else loaded

    def _add_tensor(self, tensor: Tensor) -> CapturedTensor:
        for known in self.tensors:
            if known.tensor is tensor:
                return known
        is_float, place = tensor.is_floating_point(), len(self.tensors)
        offset = None
        if any(x.is_float == is_float for x in self.tensors):
            offset = self._add_number("offset", place, 0)
        lengths = tuple(
            None if size == 1 else self._add_number("length", place, axis)
            for axis, size in enumerate(tensor.shape)
        )
        self.tensors.append(CapturedTensor(tensor, is_float, offset, lengths))
        return self.tensors[-1]

    def _add_number(self, what: str, tensor: int, axis: int) -> str:
        if len(self.numbers) == MAX_NUMBERS:
            raise TranslationError(f"the captured tensors have more than {MAX_NUMBERS} axes")
        self.numbers.append((what, tensor, axis))
        return f"c{len(self.numbers) - 1}"

    # Derivatives and source

    def derivatives(self, out: Value, gradient: Value, wanted: Sequence[Value]) -> list[Value]:
        """Return the gradients of the wanted values, given the gradient of `out`."""
        order: dict[str, Value] = {}

        def visit(x: Value) -> None:
            if x.has_score and x.text not in order:
                for y in x.operands:
                    visit(y)
                order[x.text] = x

        visit(out)
        sums: dict[str, Value] = {out.text: gradient}
        for x in reversed([*order.values()]):
            along = sums.get(x.text)
            if along is None or not x.partials:
                continue
            for operand, partial in zip(x.operands, x.partials, strict=True):
                if partial is None or not operand.has_score or operand.kind != "float":
                    continue
                new = partial(along)
                before = sums.get(operand.text)
                sums[operand.text] = new if before is None else self.add(before, new)
        return [sums.get(x.text, self.constant(0.0)) for x in wanted]

    def distance_sources(self) -> list[str]:
        """Return the sources of the functions `load_by_distance_0` …, which load a tile."""
        parameters = "b, h, i, j, given, z, F"
        sources = []
        for number, index in enumerate(self.distance_indices):
            name = f"distance_index_{number}"
            sources += [
                self.function_source(name, parameters, index, ""),
                LOAD_BY_DISTANCE.format(number=number, parameters=parameters, index=name),
            ]
        return sources

    def function_source(self, name: str, parameters: str, out: Value, like: str) -> str:
        """Return the source of a function that returns `out`, broadcast like `like`."""
        needed: set[str] = set()
        reached: set[str] = set()
        stack = [out.text]
        while stack:
            text = stack.pop()
            reached.add(text)
            if text in self.lines and text not in needed:
                needed.add(text)
                stack += self.lines[text][1]
        body = [f"    {x} = {text}" for x, (text, _) in self.lines.items() if x in needed]
        end = out.text
        if out.kind == "bool":
            if out.number is not None:  # a constant must become a tensor too
                end = "(i >= 0)" if out.number else "(i < 0)"
        elif like and like not in reached:
            end = f"{end} + tl.zeros_like({like})"
        return "\n".join(
            ["@triton.jit", f"def {name}({parameters}):", *body, f"    return {end}", ""]
        )


LOAD_BY_DISTANCE = """@triton.jit
def load_by_distance_{number}(source, {parameters}):
    first = {index}(b, h, tl.max(i), tl.min(j), given, z, F)
    last = {index}(b, h, tl.min(i), tl.max(j), given, z, F)
    found = tl.zeros_like(i + j).to(source.dtype.element_ty)
    if first == last:
        found = found + tl.load(source + first)
    else:
        found = gather(source, {index}(b, h, i, j, given, z, F), F)
    return found
"""
"""An index that only grows or only falls with the distance is the same for a whole tile if it is
the same at both ends. Of a table of distances up to r, only tiles near the diagonal need more."""

UNARY_FUNCTIONS = {
    "exp": ("tl.exp({0})", "{y}"),
    "exp2": ("tl.exp2({0})", f"{{y}} * {math.log(2)!r}"),
    "expm1": ("(tl.exp({0}) - 1.0)", "{y} + 1.0"),
    "log": ("tl.log({0})", "1.0 / {x}"),
    "log2": ("tl.log2({0})", f"{1 / math.log(2)!r} / {{x}}"),
    "log10": (f"(tl.log({{0}}) * {1 / math.log(10)!r})", f"{1 / math.log(10)!r} / {{x}}"),
    "log1p": ("tl.log(1.0 + {0})", "1.0 / (1.0 + {x})"),
    "sqrt": ("tl.sqrt({0})", "0.5 / {y}"),
    "rsqrt": ("tl.rsqrt({0})", "-0.5 * {y} * {y} * {y}"),
    "tanh": ("fast_tanh({0}, F.FAST)", "1.0 - {y} * {y}"),
    "sigmoid": ("(1.0 / (1.0 + tl.exp(-{0})))", "{y} * (1.0 - {y})"),
    "relu": ("tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
             "tl.where({x} > 0, 1.0, 0.0)"),
    "sin": ("tl.sin({0})", "tl.cos({x})"),
    "cos": ("tl.cos({0})", "-tl.sin({x})"),
    "erf": ("tl.erf({0})", f"{2 / math.sqrt(math.pi)!r} * tl.exp(-{{x}} * {{x}})"),
    "floor": ("tl.floor({0})", "0"),
    "ceil": ("tl.ceil({0})", "0"),
    "trunc": ("tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))", "0"),
    "sign": ("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))", "0"),
    "softplus": ("(tl.maximum({0}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({0}))))",
                 "1.0 / (1.0 + tl.exp(-{x}))"),
}  # fmt: skip
"""Functions of a float: the template, and the derivative in terms of argument x and result y."""
