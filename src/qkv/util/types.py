"""Types that all layers share: arrays, spans of rows, blocks of scores."""

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
"""Marks an argument that was not given; None is a valid value."""


class Closable:
    """An object that a `with` statement closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the resources of the object."""
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
    """Like `contextlib.contextmanager`, but release resources whenever Ctrl-C arrives.

    If Ctrl-C arrives between the `yield` and the body, contextlib leaves the generator suspended,
    with all its locks, as long as the traceback is alive.
    """

    @functools.wraps(begin)
    def build_manager(*args: Any, **named: Any) -> Any:
        return _ReleasingContextManager(begin, args, named)  # type: ignore[arg-type]

    return build_manager


Array: TypeAlias = Any
"""An array of any framework. No common base class exists, so this is a name for the reader."""


class Shaped(Protocol):
    """The attributes that arrays of all frameworks have."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


NestedLists: TypeAlias = list[Any] | tuple[Any, ...]
"""Nested lists of numbers; they become arrays of the framework of the other arguments, or NumPy."""

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeVar as Variable

    A = Variable("A", bound=Shaped, default=np.ndarray[Any, Any])
    K = Variable("K", default=Any)
    V = Variable("V", default=Any)
else:
    A, K, V = (TypeVar(name) for name in "AKV")
# A: input and output arrays have the same framework. K, V: the key and the value of a database.

Arrays: TypeAlias = tuple[Array, ...]

Gradients: TypeAlias = tuple[Array | None, ...]
"""Gradients, one for each array; None for zero."""

ArrayFunction: TypeAlias = Callable[..., Array]
"""A function of arrays."""

PullBack: TypeAlias = Callable[[Array], Gradients]
"""Maps the gradient of the output of a function to the gradients of its arrays."""

PartialStateFunction: TypeAlias = Callable[[Any], Any]
MergeFunction: TypeAlias = Callable[[Any, Any], Any]
"""Functions that build the state of a part, and merge two states."""

LiveMask: TypeAlias = Array | None
"""Booleans, True for pairs that count; None means all."""

DropoutMask: TypeAlias = Array | None
"""The dropout factor of each weight; None means no dropout."""

Shape: TypeAlias = tuple[int, ...]

ProgressCallback: TypeAlias = Callable[[int, int | None], None]
"""Called with (done, total); total is None if it is unknown."""


class Span(NamedTuple):
    """Rows `start … start + size` of one axis.

    If a framework needs spans of equal size, the last span overlaps the one before. Then
    `first_new` is its first row that the one before does not have. `is_unmasked` says that the mask
    allows all pairs of the span.
    """

    start: Any
    size: int
    first_new: Any = None
    is_unmasked: bool = False


class ShardPosition(NamedTuple):
    """The offset (`row`, `col`) of a call's queries and keys among the n × m of all processes."""

    row: int
    col: int
    n: int
    m: int


class lazy_property(Generic[T]):
    """A property that is computed once, like `functools.cached_property` but without a lock.

    Before Python 3.12, `cached_property` takes one lock for all instances. torch.compile cannot
    trace the lock, and a client that waits for a server in the same process can deadlock.
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
    """The position of a block of scores inside the n × m scores of a call.

    `q` (r, 1) and `k` (1, c) are the positions of the queries and keys, `b` and `h` those of the
    batch and the head. All four broadcast against (…, r, c), which has `lead_axes` leading axes.
    `make_positions(name)` computes them on first use. If several processes hold the keys, `rows`
    and all positions are global, and `cols` are local.
    """

    rows: Span
    cols: Span
    n: int
    m: int
    make_positions: Callable[[str], Array]
    lead_axes: int = 0
    static_pairs: Array | None = None
    """The pairs that a static mask allows (…, r, c), in NumPy, if a compiled call has them."""

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
