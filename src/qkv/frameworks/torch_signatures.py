"""Signatures of a user's functions: equal if they compute the same from the same arguments.

A function is compared by its code and by what it reads: closure, defaults and globals. Tensors are
compared by dtype and axes, and collected, so that a cached translation reads the tensors of the
current call. Anything else that may change unnoticed, such as an attribute of an object or of a
class, has no signature.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

ATOM_TYPES = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
FIXED_PACKAGES = ("torch", "math", "builtins", "operator", "numpy", "qkv")
"""Packages whose modules and classes do not change."""


class NoSignatureError(Exception):
    """A function reads an object that may change unnoticed."""


class SignatureBuilder:
    """Builds signatures and collects the tensors that they mention, in order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._open: list[int] = []
        self._names: list[str] = []

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
        raise NoSignatureError

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
