"""PyTorch: recognizes functions of the caller that compute a dot product, or a function of one.

`lambda q, k: q @ k.mT / 8` is `ScaledDot(1 / 8)`, which has fused kernels. The function runs twice
on tensors without data, because its factor may be a random number. Only the operations below are
accepted. Everything else, such as a captured tensor or a branch on the device, raises an error in
the function, which is then not recognized. So do operations in place: they could change an alias.

`lambda q, k: torch.tanh(q @ k.mT)` is a score_mod of the dot product: what the function does with
the products, it does with each of them alone. `make_score_mod` returns that score_mod. Kernels
translate it; operations that are not pointwise have no translation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

READS = frozenset({"shape", "size", "ndim", "dim", "dtype", "is_floating_point"})
TRANSPOSES = frozenset({"transpose", "swapaxes", "swapdims"})
PRODUCTS = frozenset({"matmul", "__matmul__", "bmm"})
FACTORS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
QUOTIENTS = frozenset({"div", "divide", "true_divide", "__truediv__"})


TENSOR_READS = frozenset({
    "shape", "size", "ndim", "dim", "numel", "nelement", "item", "tolist", "numpy", "stride",
    "is_contiguous", "storage_offset", "data_ptr", "untyped_storage", "element_size", "layout",
    "is_floating_point", "is_leaf", "grad", "data", "grad_fn", "requires_grad_", "names",
})  # fmt: skip
"""What a function may not read of the products, because it differs between tiles."""
OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "and", "rand",
    "or", "ror", "xor", "rxor", "invert", "pos",
)  # fmt: skip
CHECKED_ROWS, CHECKED_KEYS = 2, 3
"""The size of the call on which a score_mod is compared with its function."""


class NotRecognizedError(Exception):
    """The function does something else than a scaled dot product, or with it."""


_PRODUCTS: ContextVar[Tensor | None] = ContextVar("_PRODUCTS", default=None)
"""The products that a traced function gets; None: it gets a `TracedRows`."""


class TracedRows(Tensor):  # type: ignore[misc]
    """The queries, the keys or their products, without data.

    - role: "q", "k" or "s".
    - is_transposed: the last two axes are exchanged.
    - factor: the number that the rows or the products were multiplied by.
    """

    role: str
    is_transposed: bool
    factor: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in READS:
                return func(*args, **kwargs)
            found, products = _apply(name, args, kwargs), _PRODUCTS.get()
            if found.role != "s" or products is None:
                return found
            if found.is_transposed:
                raise NotRecognizedError
            return DotProducts(products if found.factor == 1 else products * found.factor)


class DotProducts:
    """Dot products in a function of the caller, which may do with them what keeps their shape.

    It stands for a tensor, but is none: a score_mod is traced by the identity of tensors.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in TENSOR_READS or _writes(name) or name == "__get__" or "out" in (kwargs or {}):
            raise NotRecognizedError
        given = [_unwrap(x) for x in args]
        found = func(*given, **{key: _unwrap(x) for key, x in (kwargs or {}).items()})
        if not isinstance(found, Tensor):
            raise NotRecognizedError
        return cls(found)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self._values, name)
        method = None if name.startswith("_") else getattr(Tensor, name, None)
        if not callable(method):
            raise NotRecognizedError
        return lambda *args, **named: self.__torch_function__(method, (), (self, *args), named)

    def _refuse(self, *_: Any) -> Any:
        raise NotRecognizedError

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = _refuse  # type: ignore[assignment]
    __getitem__ = __setitem__ = __contains__ = __hash__ = _refuse  # type: ignore[assignment]

    @staticmethod
    def modify(
        function: Callable[..., Any], shapes: Sequence[Sequence[int]], products: Tensor
    ) -> Tensor:
        """Return the scores that the function makes of these dot products of q and k.

        `shapes` are those of the query and the key in the call.
        """
        before = _PRODUCTS.set(products)
        try:
            rows = (_trace_rows(x, role, False, 1.0) for x, role in zip(shapes, "qk", strict=True))
            found = function(*rows)
        finally:
            _PRODUCTS.reset(before)
        if type(found) is not DotProducts:
            raise NotRecognizedError
        return found._values


def _writes(name: str) -> bool:
    """Return whether an operation of this name writes into its first argument."""
    return name.endswith("_") and not name.endswith("__")


def _unwrap(x: Any) -> Any:
    if type(x) in (tuple, list):
        return type(x)(map(_unwrap, x))
    return x._values if type(x) is DotProducts else x


def _add_operator(name: str) -> None:
    method = getattr(Tensor, name)

    def operate(self: DotProducts, *args: Any) -> Any:
        return DotProducts.__torch_function__(method, (), (self, *args))

    setattr(DotProducts, name, operate)


for _name in OPERATORS:
    _add_operator(f"__{_name}__")


def make_score_mod(
    function: Any, query: Tensor, key: Tensor
) -> Callable[[Tensor, Any, Any, Any, Any], Tensor]:
    """Return the score_mod that makes the function's scores of q·k, in float32."""
    shapes = tuple(query.shape), tuple(key.shape)

    def score_mod(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return DotProducts.modify(function, shapes, s)

    return score_mod


def has_score_mod_of_products(function: Any, query: Tensor, key: Tensor) -> bool:
    """Return whether `make_score_mod` gives the function's scores, on a few rows.

    The caller must check that the score_mod is pointwise.
    """
    if query.ndim < 2 or key.ndim != query.ndim or query.shape[-1] != key.shape[-1]:
        return False
    rows = query[..., :CHECKED_ROWS, :].detach().float()
    keys = key[..., :CHECKED_KEYS, :].detach().float()
    try:
        with torch.no_grad():
            shapes, s = (rows.shape, keys.shape), rows @ keys.mT
            got, again = (DotProducts.modify(function, shapes, s) for _ in range(2))
            want = function(rows, keys)
            if not got.shape == again.shape == want.shape:
                return False
            close = torch.isclose(got, want, rtol=1e-2, atol=1e-2, equal_nan=True)
            # A random number would be part of the translation.
            return bool((close & ((got == again) | got.isnan())).all())
    except Exception:  # of any kind: the call runs the function on data, and reports the error
        return False


def find_dot_scale(function: Any, query: Tensor, key: Tensor) -> float | None:
    """Return c if the function computes c · q·k for float32 arrays of these shapes, else None."""
    if query.ndim < 2 or key.ndim != query.ndim or query.shape[-1] != key.shape[-1]:
        return None
    factor = _trace_factor(function, query, key)
    if factor is None or _trace_factor(function, query, key) != factor:
        return None
    return factor


def _trace_factor(function: Any, query: Tensor, key: Tensor) -> float | None:
    try:
        rows = (_trace_rows(x.shape, role, False, 1.0) for x, role in ((query, "q"), (key, "k")))
        found = function(*rows)
    except Exception:  # of any kind: the call runs the function on data, and reports the error
        return None
    if type(found) is not TracedRows or found.role != "s" or found.is_transposed:
        return None
    return found.factor if math.isfinite(found.factor) and found.factor > 0 else None


def _trace_rows(shape: Any, role: str, is_transposed: bool, factor: float) -> TracedRows:
    empty = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
    made: TracedRows = empty.as_subclass(TracedRows)
    made.role, made.is_transposed, made.factor = role, is_transposed, factor
    return made


def _apply(name: str, args: Any, kwargs: Any) -> TracedRows:
    if kwargs:
        raise NotRecognizedError
    if name in PRODUCTS and len(args) == 2:
        return _multiply_rows(*args)
    if name == "einsum":
        return _sum_products(*args)
    x, *rest = args
    if type(x) is not TracedRows:
        raise NotRecognizedError
    if (name == "mT" and not rest) or (name in TRANSPOSES and _exchanges_last_axes(x, rest)):
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        return _trace_rows(shape, x.role, not x.is_transposed, x.factor)
    if name in ("neg", "__neg__", "negative") and not rest:
        return _trace_rows(x.shape, x.role, x.is_transposed, -x.factor)
    if name in FACTORS | QUOTIENTS and len(rest) == 1 and type(rest[0]) in (int, float):
        factor = x.factor * rest[0] if name in FACTORS else x.factor / rest[0]
        return _trace_rows(x.shape, x.role, x.is_transposed, factor)
    raise NotRecognizedError


def _exchanges_last_axes(x: Tensor, axes: Any) -> bool:
    if len(axes) != 2 or any(type(axis) is not int for axis in axes):
        return False
    return sorted(axis % x.ndim for axis in axes) == [x.ndim - 2, x.ndim - 1]


def _multiply_rows(x: Any, y: Any) -> TracedRows:
    if type(x) is not TracedRows or type(y) is not TracedRows:
        raise NotRecognizedError
    factor = x.factor * y.factor
    if (x.role, y.role) == ("q", "k") and y.is_transposed and not x.is_transposed:
        return _trace_rows((*x.shape[:-1], y.shape[-1]), "s", False, factor)
    if (x.role, y.role) == ("k", "q") and y.is_transposed and not x.is_transposed:
        return _trace_rows((*x.shape[:-1], y.shape[-1]), "s", True, factor)
    raise NotRecognizedError


def _sum_products(equation: Any, *rows: Any) -> TracedRows:
    """Return the products of an equation such as "bhnd,bhmd->bhnm"."""
    if type(equation) is not str or [type(x) for x in rows] != [TracedRows] * 2:
        raise NotRecognizedError
    sides, _, out = equation.replace(" ", "").partition("->")
    names = sides.split(",")
    if [x.role for x in rows] == ["k", "q"]:
        names, rows = names[::-1], rows[::-1]
    if (
        len(names) != 2
        or [x.role for x in rows] != ["q", "k"]
        or any(x.is_transposed for x in rows)
    ):
        raise NotRecognizedError
    (*lead, i, d), (*other, j, e) = map(list, names)
    letters = [x for x in (*lead, i, j, d) if x != "."]
    if lead != other or d != e or len({*letters}) < len(letters) or [*out] != [*lead, i, j]:
        raise NotRecognizedError
    shape = (*rows[0].shape[:-1], rows[1].shape[-2])
    return _trace_rows(shape, "s", False, rows[0].factor * rows[1].factor)
