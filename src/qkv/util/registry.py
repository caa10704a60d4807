"""Classes by name, open to names of one's own: the tables of scores, weightings and encoders.

    @scores.register("mine")
    @dataclass(frozen=True)
    class Mine(scores.Score): …

A package that brings such classes names its module in the entry-point group `qkv.plugins`; it is
imported when a name is met that is not known.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from qkv.errors import ArgumentError, DtypeError, unknown_name_error
from qkv.util.keyword_hints import suggest_keywords

PLUGIN_GROUP = "qkv.plugins"
REGISTRY_VERSION = [0]
"""How often a name was given: what was kept by name is of its own edition."""
T = TypeVar("T")
ClassType = TypeVar("ClassType", bound=type)


class ClassRegistry(dict[str, type[T]], Generic[T]):
    """The classes of one sort by name; `module_name` is the module they are found in."""

    def __init__(self, room: str, base: type[T], **known: type[T]) -> None:
        super().__init__({name: suggest_keywords(kind) for name, kind in known.items()})
        self.module_name, self.base_class, self.role = room, base, base.__name__.lower()

    @overload
    def register(self, name: str, kind: ClassType) -> ClassType: ...
    @overload
    def register(self, name: str) -> Callable[[ClassType], ClassType]: ...
    def register(self, name: str, kind: Any = None) -> Any:
        """Give a class a name, by which every door then takes it; also as a decorator.

        The class comes back as it was. A name that is taken is refused, unless by the same class
        or an earlier version of it (a cell of a notebook that runs again).
        """
        if kind is None:
            return lambda kind: self.register(name, kind)
        what, base = self.role, self.base_class.__name__
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(
                f"{self.module_name}.register: the name must be a plain word such as 'mine', not "
                f"{name!r}"
            )
        if not (isinstance(kind, type) and issubclass(kind, self.base_class)):
            told = f"the class {kind.__name__}" if isinstance(kind, type) else repr(kind)
            raise DtypeError(
                f"{self.module_name}.register: {name!r} must name a subclass of "
                f"{self.module_name}.{base}, not "
                f"{told}: derive it from {base}, or pass it as {what}= without a name"
            )
        if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
            raise DtypeError(
                f"{self.module_name}.register: {kind.__name__} must be a frozen dataclass, so "
                "that equal "
                "ones are equal: write @dataclass(frozen=True) directly above it"
            )
        own = getattr(kind, "kind", name)  # what an encoder is called in its settings
        if own != name:
            raise ArgumentError(
                f"{self.module_name}.register: {kind.__name__}.kind is {own!r}: register it as that"
            )
        taken = self.get(name, kind)
        if _qualified_name(taken) != _qualified_name(kind):
            raise ArgumentError(
                f"{self.module_name}.register: {what} {name!r} is "
                f"{'.'.join(_qualified_name(taken))}: choose "
                "another name"
            )
        self[name] = kind
        REGISTRY_VERSION[0] += 1
        return kind

    def find_class(self, name: Any, advice: str = "") -> type[T]:
        """The class of a name; installed plug-ins are asked for one that is not known."""
        if name not in self:
            failed = load_plugins()
            if name not in self:
                more = advice + "".join(failed)
                raise unknown_name_error(self.role, name, self, more, self._find_alias(str(name)))
        return self[name]

    def _find_alias(self, word: str) -> str | None:
        """The name of what is called so elsewhere."""
        word = re.sub(r"\W+", "_", word[:80].lower())
        return next((x for x, kind in self.items() if word in vars(kind).get("aliases", ())), None)

    def name_of(self, kind: type) -> str | None:
        """The name that a class has here."""
        return next((name for name, known in self.items() if known is kind), None)

    def resolve(self, given: Any) -> T | None:
        """An object from its name or itself; None for what is neither."""
        if isinstance(given, self.base_class):
            return given
        if isinstance(given, str):
            return self.build_default(given)
        if isinstance(given, type):
            name = given.__name__
            raise DtypeError(f"{self.role} is the class {name}: build it, {name}(…)")
        return None

    def build_default(self, name: str) -> T:
        """The object of a name, with its defaults."""
        kind = self.find_class(name)
        try:
            return kind()
        except TypeError:
            needs = self.required_parameters(name)
            if not needs:
                raise
            ours = f"{self.module_name}." if kind.__module__.startswith("qkv.") else ""
            raise DtypeError(
                f"{self.role} {name!r} has parameters: build it, "
                f"{ours}{kind.__name__}({', '.join(needs)})"
            ) from None

    def required_parameters(self, name: str) -> list[str]:
        """The parameters that the class of a name cannot be built without."""
        return [p.name for p in self.list_parameters(name) if p.default is p.empty]

    def list_parameters(self, name: str) -> list[inspect.Parameter]:
        """What the class of a name takes, one by one."""
        given = inspect.signature(self.find_class(name)).parameters.values()
        return [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _qualified_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


_failed_plugins: list[str] | None = None


def load_plugins() -> list[str]:
    """Import every installed plug-in, once; what failed, in sentences."""
    global _failed_plugins
    if _failed_plugins is None:
        from importlib.metadata import entry_points

        _failed_plugins = []  # before they run, for a plug-in may ask for names itself
        for point in entry_points(group=PLUGIN_GROUP):
            try:
                point.load()
            except Exception as error:
                kind = type(error).__name__
                _failed_plugins.append(f" The plug-in {point.value} failed: {kind}: {error}.")
    return _failed_plugins
