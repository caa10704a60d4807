"""Signatures of a user's functions: equal if they compute the same from the same arguments.

A function is compared by its code and by what it reads: closure, defaults and globals. Tensors are
compared by dtype and axes, and collected, so that a cached translation reads the tensors of the
current call. An object that a function captures, such as `self` of a bound method, is compared by
its class, by what a call of it runs, and by those attributes whose names occur in the functions.
Anything else that may change unnoticed, such as an attribute of a class, has no signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

ATOM_TYPES = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
FIXED_PACKAGES = ("torch", "math", "builtins", "operator", "numpy", "qkv")
"""Packages whose modules and classes do not change."""
DYNAMIC_NAMES = frozenset([
    "getattr", "setattr", "hasattr", "vars", "dir", "eval", "exec", "globals", "locals",
    "attrgetter", "methodcaller", "__dict__", "__class__", "__getattribute__", "_parameters",
    "_buffers", "_modules",
])  # fmt: skip
"""Names in a function that may read attributes whose names are not in its code."""
PLAIN_SPECIAL_NAMES = frozenset([
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__str__",
    "__eq__", "__hash__", "__call__", "__module__", "__qualname__", "__doc__", "__dict__",
    "__weakref__",
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__static_attributes__", "__firstlineno__", "__match_args__", "__replace__",
    "__dataclass_fields__", "__dataclass_params__", "__setattr__", "__delattr__",
    "__orig_bases__", "__parameters__",
])  # fmt: skip
"""Special names that a class may define: reading an attribute of its objects runs none of them."""


class NoSignatureError(Exception):
    """A function reads an object that may change unnoticed."""


class SignatureBuilder:
    """Builds signatures and collects the tensors that they mention, in order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._objects: list[Any] = []
        self._all_names: set[str] = set()
        self._open: list[int] = []
        self._names: list[str] = []

    def build(self, x: Any) -> Hashable:
        """Return the signature of x, with what its functions read of the objects they capture."""
        found = self.describe(x)
        if not self._objects:
            return found
        while True:  # a method may read more names, and an attribute may be an object
            size = len(self._objects), len(self._all_names)
            names = sorted(self._all_names)
            if not DYNAMIC_NAMES.isdisjoint(names):
                raise NoSignatureError
            read = [self._describe_attributes(y, names) for y in self._objects]
            if size == (len(self._objects), len(self._all_names)):
                return found, *read

    def describe(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in ATOM_TYPES:
            return kind, x, str(x) if kind is float else None  # 0.0 and −0.0 are equal
        if isinstance(x, Tensor):
            return self.describe_tensor(x)
        if kind is FunctionType:
            return self._describe_function(x)
        if kind is partial:
            return "partial", self.describe(x.func), *map(self.describe, (x.args, x.keywords))
        if kind in (tuple, list):
            return kind, *map(self.describe, x)
        if kind is dict:
            return kind, *((self.describe(y), self.describe(z)) for y, z in x.items())
        if kind is BuiltinFunctionType or _is_fixed(x):
            return "identity", x
        if kind is ModuleType:  # compare the attributes that the function may read
            read = [(name, vars(x)[name]) for name in self._names if name in vars(x)]
            return "module", x, *((name, self.describe(value)) for name, value in read)
        if kind is MethodType:
            return "method", self.describe(x.__func__), self.describe(x.__self__)
        return self._describe_object(x)

    def _describe_object(self, x: Any) -> Hashable:
        """Return the class of an object; `build` adds its attributes."""
        if not (isinstance(getattr(x, "__dict__", None), dict) and _has_plain_attributes(type(x))):
            raise NoSignatureError
        known = next((i for i, y in enumerate(self._objects) if y is x), len(self._objects))
        if known < len(self._objects):
            return "object", type(x), known
        self._objects.append(x)
        return "object", type(x), known, self._describe_call(x)

    def _describe_call(self, x: Any) -> Hashable:
        """Return what a call of an object runs: `__call__`, or `forward` of a module."""
        is_module = isinstance(x, torch.nn.Module)
        name = "forward" if is_module else "__call__"
        owner = next((y for y in type(x).__mro__ if name in vars(y)), None)
        if owner is None:
            return None
        hooks = (vars(x).get(y) for y in ("_forward_hooks", "_forward_pre_hooks", name))
        if is_module and any(hooks):
            raise NoSignatureError
        if _is_fixed(owner):  # a module of PyTorch may read any of its numbers
            return tuple((y, self.describe(z)) for y, z in vars(x).items() if y[:1] != "_")
        return self.describe(vars(owner)[name])

    def _describe_attributes(self, x: Any, names: Sequence[str]) -> Hashable:
        is_module = isinstance(x, torch.nn.Module)
        held = {**x._parameters, **x._buffers} if is_module else {}
        if is_module and any(name in x._modules for name in names):
            raise NoSignatureError
        found = []
        for name in names:
            owner = next((y for y in type(x).__mro__ if name in vars(y)), None)
            if owner is not None or name in vars(x) or name in held:
                found.append((name, self._describe_attribute(x, name, owner, held)))
        return tuple(found)

    def _describe_attribute(
        self, x: Any, name: str, owner: type | None, held: dict[str, Any]
    ) -> Hashable:
        value = None if owner is None else vars(owner)[name]
        if isinstance(value, property):
            return "property", self.describe(value.fget)
        if hasattr(type(value), "__set__"):
            raise NoSignatureError
        if name in vars(x):
            return self.describe(vars(x)[name])
        if owner is None:
            return self.describe(held[name])
        if _is_fixed(owner):
            return "fixed", owner
        return self.describe(value.__func__ if isinstance(value, staticmethod) else value)

    def describe_tensor(self, x: Tensor) -> Hashable:
        if type(x) not in (Tensor, torch.nn.Parameter) or not 0 < x.numel() < 2**31:
            raise NoSignatureError
        if x.device.type == "cpu" and x.ndim == 0:  # its value becomes part of the source
            if x.requires_grad:
                raise NoSignatureError
            return "number", x.dtype, str(x.item())
        known = next((i for i, y in enumerate(self.tensors) if y is x), len(self.tensors))
        if known == len(self.tensors):
            self.tensors.append(x)
        ones = tuple(size == 1 for size in x.shape)
        return "tensor", known, x.dtype, x.device, ones, x.requires_grad

    def _describe_function(self, function: Any) -> Hashable:
        if id(function) in self._open:  # a recursive function
            raise NoSignatureError
        self._open.append(id(function))
        code, outer = function.__code__, self._names
        self._names = _global_names(code)
        self._all_names.update(self._names)
        try:
            held = [x.cell_contents for x in function.__closure__ or ()]
        except ValueError:  # an empty cell
            raise NoSignatureError from None
        held += [function.__defaults__, function.__kwdefaults__]
        known = function.__globals__
        names = [name for name in self._names if name in known]
        found = (
            "function", code, *map(self.describe, held), tuple(names),
            *(self.describe(known[name]) for name in names),
        )  # fmt: skip
        self._open.pop()
        self._names = outer
        return found


def _has_plain_attributes(kind: Any) -> bool:
    """Return whether reading an attribute of such objects runs no code but that of properties."""
    is_module = issubclass(kind, torch.nn.Module)
    if kind.__getattribute__ is not object.__getattribute__:
        return False
    if hasattr(kind, "__getattr__") and not (
        is_module and kind.__getattr__ is torch.nn.Module.__getattr__
    ):
        return False
    own = [x for x in kind.__mro__ if x is not object and not (is_module and _is_fixed(x))]
    names = {name for x in own for name in vars(x) if name.startswith("__")}
    if is_module and "__call__" in names:
        return False
    return names <= PLAIN_SPECIAL_NAMES and "__slots__" not in names


class FixedSignatureBuilder(SignatureBuilder):
    """Builds signatures of functions that hold nothing that they could change."""

    def describe(self, x: Any) -> Hashable:
        if type(x) in (list, dict):
            raise NoSignatureError
        return super().describe(x)


def _is_fixed(x: Any) -> bool:
    """Return whether x is a module, a class or an operator of a package that does not change."""
    if isinstance(x, ModuleType):
        return x.__name__.partition(".")[0] in FIXED_PACKAGES
    if isinstance(x, type):
        return x.__module__.partition(".")[0] in FIXED_PACKAGES
    return type(x).__module__.startswith("torch._ops")


def _global_names(code: CodeType) -> list[str]:
    """Return the names of globals and attributes in the code and in the functions inside it."""
    names = [*code.co_names]
    for x in code.co_consts:
        if isinstance(x, CodeType):
            names += _global_names(x)
    return names
