"""Types that every layer shares: arrays, spans of rows, blocks of scores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
)

P = ParamSpec("P")
T = TypeVar("T")


class _Unset:
    def __repr__(self) -> str:
        return "…"


UNSET: Any = _Unset()
"""No value was given, or none was found; None is a value."""


class Closable:
    """What is closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class _ReleasingContextManager(contextlib._GeneratorContextManager[T]):
    def __enter__(self) -> T:
        try:
            return super().__enter__()
        except BaseException:
            self.gen.close()
            raise


def interruptible_contextmanager(
    begin: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """`contextlib.contextmanager`, which lets go wherever Ctrl-C comes: between a `yield` and the
    body, contextlib's generator stays as it is, with all its locks, while the traceback is kept."""

    @functools.wraps(begin)
    def build_manager(*args: Any, **named: Any) -> Any:
        return _ReleasingContextManager(begin, args, named)  # type: ignore[arg-type]

    return build_manager


Array: TypeAlias = Any
"""An array of any framework. No common base class exists, so this is a name for the reader."""


class Shaped(Protocol):
    """What an array of every framework has."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


NestedLists: TypeAlias = list[Any] | tuple[Any, ...]
"""Lists of lists of numbers, which become arrays like those beside them, or NumPy's."""

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeVar as Variable

    A = Variable("A", bound=Shaped, default=np.ndarray[Any, Any])
    K = Variable("K", default=Any)
    V = Variable("V", default=Any)
else:
    A, K, V = (TypeVar(name) for name in "AKV")
# A: the array that comes in is the array that goes out, of whatever framework. K, V: a key and a
# value of a database.

Arrays: TypeAlias = tuple[Array, ...]

Gradients: TypeAlias = tuple[Array | None, ...]
"""Gradients, one for each array; None for zero."""

ArrayFunction: TypeAlias = Callable[..., Array]
"""A function of arrays."""

PullBack: TypeAlias = Callable[[Array], Gradients]
"""From the gradient of what a function gives to those of its arrays."""

PartialStateFunction: TypeAlias = Callable[[Any], Any]
MergeFunction: TypeAlias = Callable[[Any, Any], Any]
"""A part as a state, and two states as one."""

LiveMask: TypeAlias = Array | None
"""Which pairs count, as booleans; None: all."""

DropoutMask: TypeAlias = Array | None
"""The factor that a dropout puts on each weight; None: there is no dropout."""

Shape: TypeAlias = tuple[int, ...]

ProgressCallback: TypeAlias = Callable[[int, int | None], None]
"""Called with how much is done, and of how much where that is known."""


class Span(NamedTuple):
    """Rows `start … start + size` of one axis.

    Where a framework needs spans of one size, the last overlaps its neighbour, and `first_new` is
    the first row that was not counted there. `is_unmasked` says that no mask needs to be looked at.
    """

    start: Any
    size: int
    first_new: Any = None
    is_unmasked: bool = False


class ShardPosition(NamedTuple):
    """Where the queries and keys of a call lie among n × m that several processes hold: at the
    query `row`, at the key `col`."""

    row: int
    col: int
    n: int
    m: int


class lazy_property(Generic[T]):
    """What is computed from the fields of an object, once, as by `functools.cached_property`.

    Before Python 3.12 that takes a lock, which torch.compile cannot trace, and one for all objects:
    whoever waits under it for another thread, as a client does for a server, may wait for himself.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, record: Any, kind: type | None = None) -> T:
        if record is None:
            return self  # type: ignore[return-value]
        return record.__dict__.setdefault(self.function.__name__, self.function(record))  # type: ignore[no-any-return]


@dataclass(eq=False)
class Block:
    """Where a block of scores lies inside the n × m of a call.

    `q` (r, 1) and `k` (1, c) are the positions of its queries and keys, `b` and `h` those of
    its batch and head, shaped to broadcast against (…, r, c), which has `lead_axes` leading axes.
    `place(name)` makes them when they are asked for. Where several processes hold the keys, `rows`
    and all positions are those of the whole, and `cols` are of the keys that are here.
    """

    rows: Span
    cols: Span
    n: int
    m: int
    make_positions: Callable[[str], Array]
    lead_axes: int = 0

    @lazy_property
    def q(self) -> Array:
        return self.make_positions("q")

    @lazy_property
    def k(self) -> Array:
        return self.make_positions("k")

    @lazy_property
    def b(self) -> Array:
        return self.make_positions("b")

    @lazy_property
    def h(self) -> Array:
        return self.make_positions("h")
