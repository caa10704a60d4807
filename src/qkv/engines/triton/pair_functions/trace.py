"""Trace a function of tensors and translate each of its operations to an expression.

The function runs once, on tensors of one element: a score and the positions b, h, q and k. A
dispatch mode sees each operation and adds its expression. Nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkv.engines.triton.pair_functions.expressions import (
    UNARY_FUNCTIONS,
    Expressions,
    TranslationError,
    Value,
)

aten = torch.ops.aten
TRACED_SHAPE = (1, 1)


def trace_function(
    function: Callable[..., Any], expressions: Expressions, inputs: Sequence[Value],
    device: torch.device,
) -> Value:  # fmt: skip
    """Return the value of function(*inputs); raise TranslationError if it has no translation."""
    kinds = {"float": torch.float32, "int": torch.int32, "long": torch.int64, "bool": torch.bool}
    given = [torch.zeros(TRACED_SHAPE, dtype=kinds[x.kind], device=device) for x in inputs]
    recorder = _Recorder(expressions, given, inputs)
    try:
        with torch.enable_grad(), recorder:
            out = function(*given)
    except TranslationError:
        raise
    except Exception as error:
        raise TranslationError(
            f"it does not run on single numbers ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''})"
        ) from None
    if isinstance(out, bool | int | float):
        return expressions.constant(out)
    if not isinstance(out, Tensor) or out.numel() != 1 or out.ndim > len(TRACED_SHAPE):
        raise TranslationError("it does not return one number for each pair")
    return recorder.value_of(out)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Adds an expression for each operation on a traced tensor."""

    def __init__(
        self, expressions: Expressions, given: Sequence[Tensor], inputs: Sequence[Value]
    ) -> None:
        super().__init__()
        self.expressions = expressions
        self.values = {id(x): value for x, value in zip(given, inputs, strict=True)}
        self.kept_alive: list[Any] = [*given]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensors = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        self.kept_alive += tensors
        factory = func in CONSTANT_FACTORIES
        if not factory and not any(id(x) in self.values for x in tensors):
            return func(*args, **named)  # of captured tensors only
        if func is aten._local_scalar_dense.default:
            raise TranslationError("its Python code depends on the value of a tensor")
        if func._schema.is_mutable and id(args[0]) not in self.values:
            raise TranslationError("it writes into a captured tensor")
        result = func(*args, **named)
        out = result[0] if isinstance(result, tuple) else result  # the others are for gradients
        if not isinstance(out, Tensor):
            raise TranslationError(f"it uses {func}")
        if factory and out.numel() != 1:
            return out
        self.kept_alive.append(out)
        self.values[id(out)] = self.translate(func, args, named, out)
        if out.numel() != 1:
            raise TranslationError(f"{func} does not keep one number for each pair")
        return result

    def value_of(self, x: Any) -> Value:
        """Return the value of a traced tensor, of a number, or of a captured tensor."""
        if not isinstance(x, Tensor):
            if isinstance(x, bool | int | float):
                return self.expressions.constant(x)
            raise TranslationError(f"it uses an argument of type {type(x).__name__}")
        known = self.values.get(id(x))
        if known is not None:
            return known
        if x.numel() != 1:
            raise TranslationError(
                f"a captured tensor of shape {tuple(x.shape)} is not indexed by positions"
            )
        if x.device.type == "cpu" and not x.requires_grad and x.ndim == 0:
            return self.expressions.constant(x.item())  # as PyTorch's own number would be
        zero = self.expressions.constant(0)
        found = self.expressions.load(x, [zero] * x.ndim)
        self.values[id(x)] = found
        return found

    def translate(self, func: Any, args: Any, named: dict[str, Any], out: Tensor) -> Value:
        name = func._schema.name.removeprefix("aten::")
        if not func._schema.name.startswith("aten::"):
            raise TranslationError(f"it uses {func._schema.name}")
        in_place = name.endswith("_") and not name.endswith("__")
        rule = RULES.get(name.rstrip("_") if in_place else name)
        if rule is None:
            raise TranslationError(f"it uses {func}")
        return rule(self, args, named, _kind_of(out))


def _kind_of(x: Tensor) -> str:
    if x.is_complex():
        raise TranslationError("it uses complex numbers")
    if x.is_floating_point():
        return "float"
    return {torch.bool: "bool", torch.int64: "long"}.get(x.dtype, "int")


CONSTANT_FACTORIES = {
    aten.scalar_tensor.default, aten.full.default, aten.zeros.default, aten.ones.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default,
}  # fmt: skip
"""Operations that make one number without reading any."""

Rule = Callable[[_Recorder, Any, dict[str, Any], str], Value]


def _binary(method: str) -> Rule:
    def apply(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
        made, (a, b) = recorder.expressions, map(recorder.value_of, args[:2])
        alpha = named.get("alpha", 1)
        if alpha != 1:
            b = made.multiply(b, made.constant(alpha), kind)
        return getattr(made, method)(a, b, kind)  # type: ignore[no-any-return]

    return apply


def _reversed_subtract(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    made, (a, b) = recorder.expressions, map(recorder.value_of, args[:2])
    if named.get("alpha", 1) != 1:
        a = made.multiply(a, made.constant(named["alpha"]), kind)
    return made.subtract(b, a, kind)


def _divide(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
    made, (a, b) = recorder.expressions, map(recorder.value_of, args[:2])
    mode = named.get("rounding_mode")
    if mode is None:
        return made.divide(a, b)
    if mode == "floor":
        return made.cast(made.floor_divide(a, b), kind)
    if kind == "float":
        return made.unary("trunc", made.divide(a, b))
    return made.operate("({0} // {1})", kind, *(made.cast(x, kind) for x in (a, b)))


def _plain(method: str) -> Rule:
    """Return a rule for a method of two values."""
    return lambda recorder, args, named, kind: recorder.expressions.cast(
        getattr(recorder.expressions, method)(*map(recorder.value_of, args[:2])), kind
    )


def _compare(sign: str) -> Rule:
    return lambda recorder, args, named, kind: recorder.expressions.compare(
        sign, *map(recorder.value_of, args[:2])
    )


def _logical(sign: str) -> Rule:
    return lambda recorder, args, named, kind: recorder.expressions.logical(
        sign, *map(recorder.value_of, args[:2])
    )


def _bitwise(sign: str) -> Rule:
    def apply(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
        made, (a, b) = recorder.expressions, map(recorder.value_of, args[:2])
        if kind == "bool":
            return made.logical(sign, a, b)
        a, b = made.cast(a, kind), made.cast(b, kind)
        both = a.is_nonnegative and b.is_nonnegative
        return made.operate("({0} " + sign + " {1})", kind, a, b, is_nonnegative=both)

    return apply


def _not(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    made, x = recorder.expressions, recorder.value_of(args[0])
    return made.logical_not(x) if kind == "bool" else made.operate("(~{0})", kind, x)


def _unary(name: str) -> Rule:
    return lambda recorder, args, named, kind: recorder.expressions.cast(
        recorder.expressions.unary(name, recorder.value_of(args[0])), kind
    )


def _negate(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    return recorder.expressions.negate(recorder.value_of(args[0]))


def _absolute(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    return recorder.expressions.absolute(recorder.value_of(args[0]))


def _square(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    x = recorder.value_of(args[0])
    return recorder.expressions.multiply(x, x)


def _reciprocal(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    made = recorder.expressions
    return made.divide(made.constant(1.0), recorder.value_of(args[0]))


def _silu(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    made, x = recorder.expressions, recorder.value_of(args[0])
    return made.multiply(x, made.unary("sigmoid", x))


def _log_sigmoid(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    made, x = recorder.expressions, recorder.value_of(args[0])
    return made.negate(made.unary("softplus", made.negate(x)))


def _softplus(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
    given = dict(zip(("beta", "threshold"), args[1:], strict=False)) | named
    if given.get("beta", 1) != 1 or given.get("threshold", 20) != 20:
        raise TranslationError("it uses softplus with another beta or threshold")
    return recorder.expressions.unary("softplus", recorder.value_of(args[0]))


def _where(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    condition, x, other = map(recorder.value_of, args[:3])
    return recorder.expressions.where(condition, x, other, kind=kind)


def _masked_fill(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    x, condition, other = map(recorder.value_of, args[:3])
    return recorder.expressions.where(condition, other, x, kind=kind)


def _clamp(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
    low = args[1] if len(args) > 1 else named.get("min")
    high = args[2] if len(args) > 2 else named.get("max")
    low, high = (None if x is None else recorder.value_of(x) for x in (low, high))
    return recorder.expressions.clamp(recorder.value_of(args[0]), low, high, kind)


def _clamp_min(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    x, low = map(recorder.value_of, args[:2])
    return recorder.expressions.clamp(x, low, None, kind)


def _clamp_max(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    x, high = map(recorder.value_of, args[:2])
    return recorder.expressions.clamp(x, None, high, kind)


def _power(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    base, exponent = map(recorder.value_of, args[:2])
    return recorder.expressions.power(base, exponent, kind)


def _cast(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    return recorder.expressions.cast(recorder.value_of(args[0]), kind)


def _constant(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
    number = named.get("fill_value", args[0] if args else 0)
    return recorder.expressions.cast(recorder.expressions.constant(number), kind)


def _full(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
    number = args[1] if len(args) > 1 else named["fill_value"]
    return recorder.expressions.cast(recorder.expressions.constant(number), kind)


def _new_full(recorder: _Recorder, args: Any, named: dict[str, Any], kind: str) -> Value:
    number = args[2] if len(args) > 2 else named["fill_value"]
    return recorder.expressions.cast(recorder.expressions.constant(number), kind)


def _fixed(number: int) -> Rule:
    return lambda recorder, args, named, kind: recorder.expressions.cast(
        recorder.expressions.constant(number), kind
    )


def _index(recorder: _Recorder, args: Any, named: Any, kind: str) -> Value:
    tensor, indices = args[:2]
    if id(tensor) in recorder.values:
        raise TranslationError("it indexes a tensor that depends on positions")
    if len(indices) != tensor.ndim or any(x is None for x in indices):
        raise TranslationError(
            f"it indexes a captured tensor of {tensor.ndim} axes by {len(indices)} positions"
        )
    if any(x.dtype == torch.bool for x in indices):
        raise TranslationError("it indexes a captured tensor by booleans")
    return recorder.expressions.load(tensor, [recorder.value_of(x) for x in indices])


RULES: dict[str, Rule] = {
    **{name: _unary(name) for name in UNARY_FUNCTIONS if name != "softplus"},
    "add": _binary("add"),
    "sub": _binary("subtract"),
    "mul": _binary("multiply"),
    "rsub": _reversed_subtract,
    "div": _divide,
    "true_divide": _divide,
    "floor_divide": _plain("floor_divide"),
    "remainder": _plain("remainder"),
    "neg": _negate,
    "abs": _absolute,
    "sgn": _unary("sign"),
    "square": _square,
    "reciprocal": _reciprocal,
    "silu": _silu,
    "log_sigmoid_forward": _log_sigmoid,
    "softplus": _softplus,
    "pow": _power,
    "minimum": lambda r, args, named, kind: r.expressions.extreme(
        "minimum", *map(r.value_of, args[:2])
    ),
    "maximum": lambda r, args, named, kind: r.expressions.extreme(
        "maximum", *map(r.value_of, args[:2])
    ),
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "where": _where,
    "masked_fill": _masked_fill,
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "logical_not": lambda r, args, named, kind: r.expressions.logical_not(r.value_of(args[0])),
    "bitwise_and": _bitwise("&"),
    "bitwise_or": _bitwise("|"),
    "bitwise_xor": _bitwise("^"),
    "__and__": _bitwise("&"),
    "__or__": _bitwise("|"),
    "__xor__": _bitwise("^"),
    "bitwise_left_shift": _bitwise("<<"),
    "bitwise_right_shift": _bitwise(">>"),
    "__lshift__": _bitwise("<<"),
    "__rshift__": _bitwise(">>"),
    "bitwise_not": _not,
    "scalar_tensor": _constant,
    "full": _full,
    "full_like": _full,
    "new_full": _new_full,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _fixed(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _fixed(1)),
    **dict.fromkeys(("_to_copy", "clone", "alias", "lift_fresh", "expand"), _cast),
    "detach": lambda r, args, named, kind: r.expressions.detach(r.value_of(args[0])),
    "index": _index,
}
"""How each operation becomes an expression, by its name in ATen."""
