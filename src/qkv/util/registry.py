"""Registries of classes by name: the scores, weightings and encoders, built in and registered.

    @scores.register("mine")
    @dataclass(frozen=True)
    class Mine(scores.Score): …

A package that defines such classes names its module in the entry-point group `qkv.plugins`. When
qkv meets an unknown name, it imports these modules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from qkv.errors import ArgumentError, DtypeError, unknown_name_error

PLUGIN_GROUP = "qkv.plugins"
REGISTRY_VERSION = [0]
"""The number of registrations so far. Caches whose keys contain names also contain this number."""
T = TypeVar("T")
ClassType = TypeVar("ClassType", bound=type)


class ClassRegistry(dict[str, type[T]], Generic[T]):
    """A dict from names to the subclasses of one base class.

    `module_name` is the public module of the classes, for error messages. `role` is the argument
    that accepts the names, such as "score".
    """

    def __init__(self, module_name: str, base_class: type[T], **classes: type[T]) -> None:
        super().__init__(classes)
        self.module_name, self.base_class = module_name, base_class
        self.role = base_class.__name__.lower()

    @overload
    def register(self, name: str, kind: ClassType) -> ClassType: ...
    @overload
    def register(self, name: str) -> Callable[[ClassType], ClassType]: ...
    def register(self, name: str, kind: Any = None) -> Any:
        """Register a class under a name that every entry point then accepts; also as a decorator.

        Return the class unchanged. Raise `ArgumentError` if another class has the name. A class
        with the same module and name is replaced, so that a notebook cell can run again.
        """
        if kind is None:
            return lambda kind: self.register(name, kind)
        what, base = self.role, self.base_class.__name__
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(
                f"{self.module_name}.register: the name must be an identifier such as 'mine', not "
                f"{name!r}"
            )
        if not (isinstance(kind, type) and issubclass(kind, self.base_class)):
            actual = f"the class {kind.__name__}" if isinstance(kind, type) else repr(kind)
            raise DtypeError(
                f"{self.module_name}.register: {name!r} must name a subclass of "
                f"{self.module_name}.{base}, not {actual}: derive it from {base}, or pass it as "
                f"{what}= without registering it"
            )
        if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
            raise DtypeError(
                f"{self.module_name}.register: {kind.__name__} must be a frozen dataclass, because "
                "caches compare instances: write @dataclass(frozen=True) directly above it"
            )
        own_name = getattr(kind, "kind", name)  # the name of an encoder in its settings
        if own_name != name:
            raise ArgumentError(
                f"{self.module_name}.register: {kind.__name__}.kind is {own_name!r}, not {name!r}: "
                "use the same name"
            )
        taken = self.get(name, kind)
        if _qualified_name(taken) != _qualified_name(kind):
            raise ArgumentError(
                f"{self.module_name}.register: {what} {name!r} is already "
                f"{'.'.join(_qualified_name(taken))}: choose another name"
            )
        self[name] = kind
        REGISTRY_VERSION[0] += 1
        return kind

    def find_class(self, name: Any, advice: str = "") -> type[T]:
        """Return the class of a name; import the installed plug-ins if it is unknown."""
        if name not in self:
            failures = load_plugins()
            if name not in self:
                more = advice + "".join(failures)
                raise unknown_name_error(self.role, name, self, more, self.find_alias(str(name)))
        return self[name]

    def find_alias(self, word: str) -> str | None:
        """Return our name for a name that other libraries use."""
        word = re.sub(r"\W+", "_", word[:80].lower())
        return next((x for x, kind in self.items() if word in vars(kind).get("aliases", ())), None)

    def name_of(self, kind: type) -> str | None:
        """Return the name of a class, or None."""
        return next((name for name, known in self.items() if known is kind), None)

    def resolve(self, name_or_instance: Any) -> T | None:
        """Return an instance for a name; return an instance unchanged, and None for other types."""
        if isinstance(name_or_instance, self.base_class):
            return name_or_instance
        if isinstance(name_or_instance, str):
            return self.build_default(name_or_instance)
        if isinstance(name_or_instance, type):
            name = name_or_instance.__name__
            raise DtypeError(f"{self.role} is the class {name}: pass an instance, {name}(…)")
        return None

    def build_default(self, name: str) -> T:
        """Return an instance with default parameters."""
        kind = self.find_class(name)
        try:
            return kind()
        except TypeError:
            required = self.required_parameters(name)
            if not required:
                raise
            prefix = f"{self.module_name}." if kind.__module__.startswith("qkv.") else ""
            raise DtypeError(
                f"{self.role} {name!r} has required parameters: pass "
                f"{prefix}{kind.__name__}({', '.join(required)})"
            ) from None

    def required_parameters(self, name: str) -> list[str]:
        """Return the names of the parameters without defaults."""
        return [p.name for p in self.list_parameters(name) if p.default is p.empty]

    def list_parameters(self, name: str) -> list[inspect.Parameter]:
        """Return the parameters of the class, without `*args` and `**kwargs`."""
        parameters = inspect.signature(self.find_class(name)).parameters.values()
        return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _qualified_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


_failed_plugins: list[str] | None = None


def load_plugins() -> list[str]:
    """Import every installed plug-in once; return a sentence for each that failed."""
    global _failed_plugins
    if _failed_plugins is None:
        from importlib.metadata import entry_points

        _failed_plugins = []  # set first: a plug-in may look up names while it is imported
        for point in entry_points(group=PLUGIN_GROUP):
            try:
                point.load()
            except Exception as error:
                kind = type(error).__name__
                _failed_plugins.append(f" The plug-in {point.value} failed: {kind}: {error}.")
    return _failed_plugins
