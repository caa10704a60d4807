"""Rows that are read when they are needed, in place of the arrays key (m, d) and value (m, d_v)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qkv.arrays.base import Framework, Tiling
from qkv.arrays.ragged import Wide
from qkv.bar import bar
from qkv.deadline import check_deadline
from qkv.types import Array, Arrays, Lift, Merge, Shape, Span

CACHED = 2**18
"""Numbers of keys that are made floats at a time, so that they are compared in cache."""


class Near(NamedTuple):
    """8-bit codes beside rows: each key lies within `residual` of scale · code.

    code (c, d), and for each row: `scale`, `residual` and `norm` ‖k‖. Rows with the same number in
    `block` were rounded together: Σ (φ·(k − scale · code))² over them is at most `spread`² ‖φ‖²,
    for any φ. Every bound is rounded up. Where the keys are the codes themselves there is
    nothing but them and their scale.
    """

    code: np.ndarray
    scale: np.ndarray
    residual: np.ndarray | None = None
    norm: np.ndarray | None = None
    spread: np.ndarray | None = None
    block: np.ndarray | None = None

    def some(self, at: Any) -> Near:
        rest = (None if x is None else x[at] for x in self[2:])
        return Near(self.code[at], self.scale[at], *rest)


class Stored(NamedTuple):
    """Rows that lie together: key (c, d), value (c, d_v), and which of them live (None: all).

    Where there is a `scale` (c,), the vectors of the keys are scale · key, kept in 8 bits. `near`
    are codes beside the keys, or what is known of keys that are codes. `check` refuses rows whose
    file is not there any more.
    """

    key: np.ndarray | Wide
    value: np.ndarray | None = None
    live: np.ndarray | None = None
    scale: np.ndarray | None = None
    near: Near | None = None
    check: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:
        """Whether the vectors that were given are nowhere, but for a bound."""
        return self.scale is not None and self.near is not None and self.near.residual is not None

    def some(self, at: slice) -> Stored:
        near = None if self.near is None else self.near.some(at)
        value, live, scale = (None if x is None else x[at] for x in self[1:4])
        return Stored(self.key[at], value, live, scale, near, self.check)

    def scaled(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The keys that live, and what each is to be multiplied by."""
        if self.live is None:
            return np.asarray(self.key), self.scale
        scale = None if self.scale is None else self.scale[self.live]
        return np.asarray(self.key[self.live]), scale

    def vectors(self) -> np.ndarray:
        """The keys that live, as vectors."""
        key, scale = self.scaled()
        if scale is None:
            return key
        key = key.astype(scale.dtype)
        key *= scale[:, None]
        return key


class Cut(NamedTuple):
    """The rows at `start … start + size` among all that live, read when asked for."""

    start: int
    size: int
    stored: Stored
    allowed: np.ndarray | None = None
    first: None = None
    open: bool = False

    def check(self) -> None:
        """Before the rows are read: the system ends a process that reads what was cut off."""
        if self.stored.check is not None:
            self.stored.check()

    def key(self) -> np.ndarray:
        return self.stored.vectors()

    def vectors(self, at: np.ndarray) -> np.ndarray:
        """The keys of some of the rows."""
        stored = self.stored
        at = at if stored.live is None else np.flatnonzero(stored.live)[at]
        scale = None if stored.scale is None else stored.scale[at]
        return Stored(np.asarray(stored.key[at]), scale=scale).vectors()

    def near(self, at: np.ndarray) -> Near:
        """What bounds the codes of some of the rows, without the codes."""
        near, live = self.stored.near, self.stored.live
        assert near is not None
        at = at if live is None else np.flatnonzero(live)[at]
        known = (None if x is None else x[at] for x in near[2:4])
        return Near(near.code[:0], near.scale[at], *known)

    def value(self, at: np.ndarray | None = None) -> np.ndarray:
        """The values, or those of some of the rows."""
        value, live = self.stored.value, self.stored.live
        assert value is not None
        if at is not None:
            return np.asarray(value[at if live is None else np.flatnonzero(live)[at]])
        return np.asarray(value if live is None else value[live])

    def counts(self, fw: Framework, like: Array) -> Array | None:
        """Which of the rows are allowed, (1, c); None where all are."""
        return None if self.allowed is None else fw.constant(self.allowed[None], like, "bool")


class Rows:
    """m live rows. `read()` goes through them in their order; where they lie `apart`, each of
    the stored is done with before the next is read. `allowed` (m,) rules some of them out. `kept`
    has what scores have found out about the keys, (m,), by the kind of the score; `bounds` what
    the rows of a cut have at most, by its start and size, and sums over blocks of rows. `ahead` is
    `read` that is told which fields are wanted of all rows.

    >>> keys = np.arange(6.0).reshape(3, 2)
    >>> rows = Rows(lambda: [Stored(keys, live=np.array([True, False, True]))], (2, 2))
    >>> [[cut.key().tolist() for cut in cuts] for cuts in rows.cuts(2)]
    [[[[0.0, 1.0]], [[4.0, 5.0]]]]
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Stored]],
        shape: Shape,
        width: int = 0,
        allowed: np.ndarray | None = None,
        apart: bool = False,
        kept: dict[Any, np.ndarray] | None = None,
        bounds: dict[Any, Any] | None = None,
        ahead: Callable[[Collection[str]], Iterable[Stored]] | None = None,
    ):
        self.ahead = ahead or (lambda fields: read())
        self.read, self.allowed, self.apart = read, allowed, apart
        self.kept = {} if kept is None else kept
        self.bounds = {} if bounds is None else bounds
        self.shape, self.width = shape, width

    # Not attributes: a ring of references would hold the rows until the collector comes by.

    @property
    def key(self) -> Unread:
        return Unread(self, self.shape)

    @property
    def value(self) -> Unread:
        return Unread(self, (self.shape[0], self.width))

    def cuts(
        self, size: int, codes: bool = False, ahead: Collection[str] = ("key", "value")
    ) -> Cuts:
        """All rows in cuts; those whose `codes` alone are read need not be as short. The fields
        that are wanted of all rows may be read `ahead`."""
        return Cuts(self, size, codes, ahead)

    def first(self) -> Stored | None:
        """Some of the rows, to be looked at."""
        return next(iter(self.read()), None)

    def whole(self, fw: Framework, like: Array) -> tuple[Array, Array, Array | None]:
        """Every live row: key, value, and which are allowed, (1, m)."""
        held: list[list[np.ndarray]] = [[], []]
        for stored in self.read():
            live = slice(None) if stored.live is None else stored.live
            value = np.empty((len(stored.key), 0)) if stored.value is None else stored.value
            held[0].append(stored.vectors())
            held[1].append(value[live])
        key, value = (taken(fw, np.concatenate(x), like) for x in held)
        allowed = self.allowed
        return key, value, None if allowed is None else fw.constant(allowed[None], like, "bool")


class Weighed(NamedTuple):
    """What is known when all rows were read, for n queries: Σᵢ αᵢ vᵢ (n, d_v), α (n, m), the
    entropy (n,) of |α|, log Σ exp(score) (n,) for a weighting that has one, and the best score
    (n,).

    `error` (n,) is how far α may lie from the exact weights (½ Σ |difference|), 0 where it is as
    exact as the dtype, `statistical` where rows were drawn for it; `read` is how many keys were
    read in full; `bound` is the same as a monoid, where codes were read first; `refused` says why
    none were, though a tolerance allowed it; `sums` are what the output was made of, which those
    of other rows can be added to, and `scaled` (n, m) the scores behind α, if they were kept.
    """

    out: np.ndarray
    weights: np.ndarray
    entropy: np.ndarray | None
    lse: np.ndarray | None
    best: np.ndarray
    error: np.ndarray | float = 0.0
    read: int = 0
    bound: Any = None
    statistical: bool = False
    refused: str = ""
    sums: Any = None
    scaled: np.ndarray | None = None


class Unread(NamedTuple):
    """The keys or the values of rows, in the place of an array."""

    rows: Rows
    shape: Shape


@dataclass(eq=False)
class Cuts:
    """All rows in cuts of at most so many, in groups that are read together."""

    rows: Rows
    size: int
    codes: bool
    ahead: Collection[str]

    def __iter__(self) -> Iterator[list[Cut]]:
        if not self.rows.apart:
            yield [cut for group in self._groups(self.rows.read()) for cut in group]
            return
        # What is more than memory holds takes a while.
        done, total = 0, self.rows.shape[0]
        with bar("rows", total) as tell:
            for group in self._groups(self.rows.ahead(self.ahead)):
                yield group
                done += sum(cut.size for cut in group)
                tell(done, total)

    def _groups(self, parts: Iterable[Stored]) -> Iterator[list[Cut]]:
        at, allowed = 0, self.rows.allowed
        for stored in parts:
            rows, step, group = len(stored.key), self.size, []
            if not self.codes and (stored.scale is not None or isinstance(stored.key, Wide)):
                step = min(step, max(CACHED // max(stored.key.shape[1], 1), 512))
            for start in range(0, rows, step):
                check_deadline()
                some = stored if rows <= step else stored.some(slice(start, start + step))
                size = rows if some is stored else len(some.key)
                if some.live is not None:
                    size, whole = int(np.count_nonzero(some.live)), size
                    some = some._replace(live=None) if size == whole else some
                own = None if allowed is None else allowed[at : at + size]
                if size:
                    group.append(Cut(at, size, some, own))
                at += size
            yield group


class Reader:
    """The loops of a framework over rows that are read: no compiled loop can open a file."""

    def __init__(self, fw: Framework):
        self.fw = fw

    def fold(self, step: Callable[[Any, Cut], Any], carry: Any, cuts: Iterable[list[Cut]]) -> Any:
        for group in cuts:
            for cut in group:
                check_deadline()
                cut.check()
                carry = step(carry, cut)
        return carry

    def reduce(self, lift: Lift, merge: Merge, start: Any, cuts: Iterable[list[Cut]]) -> Any:
        if self.fw.equal_spans:
            return self.fold(lambda state, cut: merge(state, lift(cut)), start, cuts)

        def checked(cut: Cut) -> Any:
            check_deadline()
            cut.check()
            return lift(cut)

        for group in cuts:
            if len(group) == 1:
                start = merge(start, checked(group[0]))
            else:
                start = self.fw.reduce(checked, merge, start, group)  # type: ignore[arg-type]
        return start

    def tiled(self, pool: Callable[..., Arrays], tiling: Tiling) -> Arrays:
        return Framework.tiled(self.fw, pool, tiling)

    def sweep(self, step: Callable[[Any, Span, Any], Any], carry: Any, tiling: Tiling) -> Any:
        return Framework.sweep(self.fw, step, carry, tiling)


def taken(fw: Framework, x: np.ndarray | Wide, like: Array) -> Array:
    """An array that was read, as the framework's own beside `like`; where it can, not copied."""
    with warnings.catch_warnings():
        # Torch warns that the file must not be written to; nothing here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return fw.read(np.asarray(x), like, fw.dtype(like))
