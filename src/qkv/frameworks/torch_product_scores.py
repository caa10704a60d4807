"""PyTorch: functions of the caller that change rows, multiply them, and change the products.

`lambda q, k: torch.tanh((q * w) @ k.mT)` is a score_mod of the dot product of φ = q · w and ψ = k.
The function runs with a `Rows` for the queries and one for the keys. What it does to one of them
gives φ and ψ. What it does to the products, it does with each of them alone, so it is a score_mod.
Kernels translate the score_mod; operations that are not pointwise have no translation.

Everything else is refused: operations on queries and keys that are no product, operations in
place, and whatever reads the shape or a value of the products, which are computed in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from qkv.frameworks.torch_dot_scale import PRODUCTS, NotRecognizedError, find_dot_scale

ROW_READS = frozenset({
    "shape", "size", "ndim", "dim", "dtype", "device", "is_floating_point", "numel", "is_cuda",
    "is_cpu", "requires_grad",
})  # fmt: skip
PRODUCT_READS = frozenset({
    "shape", "size", "ndim", "dim", "numel", "nelement", "item", "tolist", "numpy", "stride",
    "is_contiguous", "storage_offset", "data_ptr", "untyped_storage", "element_size",
    "is_floating_point", "requires_grad_",
})  # fmt: skip
"""Methods that a function may not call of the products."""
OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "and", "rand",
    "or", "ror", "xor", "rxor", "invert", "matmul", "rmatmul",
)  # fmt: skip
CHECKED_ROWS, CHECKED_KEYS = 2, 3
"""The size of the call on which a score_mod is compared with its function."""

ScoreMod = Callable[[Tensor, Any, Any, Any, Any], Tensor]


class ProductFoundError(Exception):
    """The function multiplies φ and ψ; it stops there, because nobody asked for its scores."""

    def __init__(self, phi: Tensor, psi: Tensor) -> None:
        super().__init__()
        self.phi, self.psi = phi, psi


class ProductKind(NamedTuple):
    """How a function uses dot products.

    - has_own_rows: they are not those of q and k themselves.
    - scale: the scores are this number times the products; None: they are something else.
    """

    has_own_rows: bool
    scale: float | None


class _Run:
    """One run of a function: the products that it gets, and the rows that it multiplied.

    Without products, the function stops where it multiplies rows.
    """

    def __init__(self, products: Tensor | None) -> None:
        self.products = products
        self.factors: Any = None


_RUN: ContextVar[_Run] = ContextVar("_RUN")


class _Proxy:
    """Stands for a tensor, but is none: tracing a score_mod knows tensors by their identity."""

    _values: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":  # a property
            name = func.__self__.__name__
        proxies = [x for x in tree_leaves((args, named)) if isinstance(x, _Proxy)]
        if any(type(x) is DotProducts for x in proxies):
            return _apply_to_products(name, func, args, named)
        return _apply_to_rows(name, func, args, named, proxies)

    def __getattr__(self, name: str) -> Any:
        member = None if name.startswith("_") else getattr(Tensor, name, None)
        if member is None:
            raise NotRecognizedError
        if not callable(member):
            return self.__torch_function__(member.__get__, (), (self,))
        return lambda *args, **named: self.__torch_function__(member, (), (self, *args), named)

    def _refuse(self, *_: Any) -> Any:
        raise NotRecognizedError

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = _refuse
    __setitem__ = __contains__ = __hash__ = _refuse

    def __getitem__(self, at: Any) -> Any:
        return self.__torch_function__(Tensor.__getitem__, (), (self, at))


class Rows(_Proxy):
    """Rows of queries ("q") or of keys ("k"); `recipe` says how they were made."""

    def __init__(self, values: Tensor, role: str, recipe: Any) -> None:
        self._values, self._role, self._recipe = values, role, recipe


class DotProducts(_Proxy):
    """Products of rows."""

    def __init__(self, values: Tensor) -> None:
        self._values = values


def _add_operator(name: str) -> None:
    method = getattr(Tensor, name)

    def operate(self: _Proxy, *args: Any) -> Any:
        return self.__torch_function__(method, (), (self, *args))

    setattr(_Proxy, name, operate)


for _name in OPERATORS:
    _add_operator(f"__{_name}__")


def _apply_to_products(name: str, func: Any, args: Any, named: dict[str, Any]) -> Any:
    if name == "dtype" or name == "device":
        return getattr(args[0]._values, name)
    if name in PRODUCT_READS or _writes(name, named) or name == "__getitem__":
        raise NotRecognizedError
    if any(type(x) is Rows for x in tree_leaves((args, named))):
        raise NotRecognizedError
    found = func(*tree_map(_unwrap, args), **tree_map(_unwrap, named))
    if not isinstance(found, Tensor):
        raise NotRecognizedError
    return DotProducts(found)


def _apply_to_rows(
    name: str, func: Any, args: Any, named: dict[str, Any], rows: Sequence[Any]
) -> Any:
    if name in ROW_READS:
        return func(*tree_map(_unwrap, args), **named)
    roles = {x._role for x in rows}
    if len(roles) > 1:
        return _multiply_rows(name, args, named)
    if _writes(name, named):
        raise NotRecognizedError
    first = rows[0]
    like = first._values

    def prepare(x: Any) -> Any:
        if isinstance(x, Rows):
            return x._values
        return x.to("meta") if isinstance(x, Tensor) and like.device.type == "meta" else x

    found = func(*tree_map(prepare, args), **tree_map(prepare, named))
    if not isinstance(found, Tensor):
        raise NotRecognizedError
    recipe = name, tuple(_describe(x) for x in tree_leaves((args, named)))
    return Rows(found, first._role, recipe)


def _describe(x: Any) -> Any:
    if isinstance(x, Rows):
        return x._recipe
    return ("tensor", id(x)) if isinstance(x, Tensor) else (type(x), x)


def _multiply_rows(name: str, args: Any, named: dict[str, Any]) -> DotProducts:
    """Return the products that the run gives; raise ProductFoundError if it gives none."""
    if named or not ((name in PRODUCTS and len(args) == 2) or name == "einsum"):
        raise NotRecognizedError
    one, two = args[-2:] if name != "einsum" else _sort_factors(args)
    if [getattr(x, "_role", None) for x in (one, two)] != ["q", "k"]:
        raise NotRecognizedError
    phi, psi = one._values, two._values if name == "einsum" else two._values.mT
    if phi.ndim < 2 or psi.ndim != phi.ndim or phi.shape[-1] != psi.shape[-1]:
        raise NotRecognizedError
    run = _RUN.get()
    if run.products is None:
        raise ProductFoundError(phi, psi)
    factors = name == "einsum", one._recipe, two._recipe, phi.shape, psi.shape
    if run.factors not in (None, factors):  # other products than the first
        raise NotRecognizedError
    run.factors = factors
    return DotProducts(run.products)


def _sort_factors(args: Any) -> Any:
    """Return the queries and the keys of an equation such as "bhnd,bhmd->bhnm"."""
    equation, *rows = args
    if type(equation) is not str or [type(x) for x in rows] != [Rows, Rows]:
        raise NotRecognizedError
    sides, _, out = equation.replace(" ", "").partition("->")
    names = sides.split(",")
    if [x._role for x in rows] == ["k", "q"]:
        names, rows = names[::-1], rows[::-1]
    if len(names) != 2:
        raise NotRecognizedError
    (*lead, i, d), (*other, j, e) = map(list, names)
    letters = [x for x in (*lead, i, j, d) if x != "."]
    if lead != other or d != e or len({*letters}) < len(letters) or [*out] != [*lead, i, j]:
        raise NotRecognizedError
    return rows


def _writes(name: str, named: dict[str, Any]) -> bool:
    """Return whether an operation of this name writes into an argument."""
    return named.get("out") is not None or (name.endswith("_") and not name.endswith("__"))


def _unwrap(x: Any) -> Any:
    return x._values if isinstance(x, _Proxy) else x


@contextmanager
def _running(products: Tensor | None) -> Iterator[None]:
    before = _RUN.set(_Run(products))
    try:
        yield
    finally:
        _RUN.reset(before)


class ProductFunction:
    """What a function of the caller does with dot products."""

    @staticmethod
    def modify(
        function: Callable[..., Any], shapes: Sequence[Sequence[int]], products: Tensor
    ) -> Tensor:
        """Return the scores that the function makes of these dot products.

        `shapes` are those of the query and the key in the call.
        """
        rows = [torch.empty(x, dtype=torch.float32, device="meta") for x in shapes]
        with _running(products):
            found = function(Rows(rows[0], "q", "q"), Rows(rows[1], "k", "k"))
        if type(found) is not DotProducts:
            raise NotRecognizedError
        return found._values

    @staticmethod
    def find_rows(function: Callable[..., Any], query: Tensor, key: Tensor) -> Sequence[Tensor]:
        """Return φ and ψ, the rows that the function multiplies."""
        try:
            with _running(None):
                function(Rows(query, "q", "q"), Rows(key, "k", "k"))
        except ProductFoundError as found:
            fits = (x.shape[:-1] == y.shape[:-1] for x, y in ((found.phi, query), (found.psi, key)))
            if all(fits):
                return found.phi, found.psi
        raise NotRecognizedError


def find_product(function: Any, query: Tensor, key: Tensor) -> ProductKind | None:
    """Return how the function computes scores from dot products; None: in no known way.

    The scores are compared on a few rows. The caller must check that the score_mod is pointwise.
    """
    if query.ndim < 2 or key.ndim != query.ndim or query.shape[-1] != key.shape[-1]:
        return None
    q = query[..., :CHECKED_ROWS, :].detach().float()
    k = key[..., :CHECKED_KEYS, :].detach().float()
    try:
        with torch.no_grad():
            whole = (torch.empty(x.shape, device="meta") for x in (query, key))
            ProductFunction.find_rows(function, *whole)
            phi, psi = ProductFunction.find_rows(function, q, k)
            shapes, s = (q.shape, k.shape), phi @ psi.mT
            got, again = (ProductFunction.modify(function, shapes, s) for _ in range(2))
            want = function(q, k)
            if not got.shape == again.shape == want.shape:
                return None
            close = torch.isclose(got, want, rtol=1e-2, atol=1e-2, equal_nan=True)
            # A random number would be part of the translation.
            if not bool((close & ((got == again) | got.isnan())).all()):
                return None
    except Exception:  # of any kind: the call runs the function on data, and reports the error
        return None
    shapes = query.shape, key.shape
    scale = find_dot_scale(
        lambda x, y: ProductFunction.modify(function, shapes, x @ y.mT), query, key
    )
    return ProductKind(not (_is_same_view(phi, q) and _is_same_view(psi, k)), scale)


def _is_same_view(x: Tensor, y: Tensor) -> bool:
    return bool(x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())


def find_product_rows(function: Any, query: Tensor, key: Tensor) -> Sequence[Tensor]:
    """Return φ and ψ of the function, computed in float32, in the dtype of the query."""
    phi, psi = ProductFunction.find_rows(function, query.float(), key.float())
    return phi.to(query.dtype), psi.to(query.dtype)


def make_score_mod(function: Any, query: Tensor, key: Tensor) -> ScoreMod:
    """Return what a function does with dot products as a score_mod, in float32."""
    shapes = tuple(query.shape), tuple(key.shape)

    def score_mod(s: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return ProductFunction.modify(function, shapes, s)

    return score_mod
