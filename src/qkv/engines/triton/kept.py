"""Launches noted once, and made again for other arrays of the same shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import ahead, launch, rooms
from qkv.engines.triton.launch import Launch
from qkv.engines.triton.rooms import Notes

Places = tuple[int | None, ...]
"""None and 0, then where arrays lie: those given, the results, and what is made between."""


class Step(NamedTuple):
    """A launch, what it takes of the places, those of its record of arrays first, and what Triton
    launches it by."""

    made: Launch
    record: Callable[[Places], Any] | None
    rest: Callable[[Places], Any]
    run: Callable[..., None]
    how: tuple[Any, ...]


class Steps(NamedTuple):
    """Launches, which device they are `at`, the results' shapes, with strides and dtypes where they
    are not contiguous and of the first array's, whether there is one `alone`, and whether that is
    `like` the first array, the room of what lies between: its size, and where in it each array
    and descriptors begin, in bytes; and of which places, and from which byte, parts are taken."""

    launches: tuple[Step, ...]
    at: int | None
    results: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    alone: bool
    like: bool
    size: int
    offsets: tuple[int, ...]
    scratch: int | None
    cuts: tuple[tuple[int, int], ...]

    def again(self, like: Tensor, given: tuple[int, ...], odd: int) -> Any:
        """The results; None where the arrays lie oddly or on a device that is not in use."""
        if odd & 15 or not launch.current(self.at):
            return None
        # One by one, and in the query's dtype: torch reads a tuple, and a dtype, for as long again.
        found = (
            [torch.empty_like(like)]
            if self.like
            else [
                like.new_empty(*shape)
                if stride is None
                else like.new_empty_strided(shape, stride, dtype=dtype)
                for shape, stride, dtype in self.results
            ]
        )
        room = like.new_empty(self.size) if self.size else like
        start, stream = room.data_ptr(), launch.current_stream(self.at)
        of_results = map(Tensor.data_ptr, found)
        at: Any = (None, 0, *given, *of_results, *[start + x for x in self.offsets])
        at = (*at, *[at[i] + x for i, x in self.cuts]) if self.cuts else at
        hooked = launch.hooked()
        if self.scratch is not None:
            launch.lend(start + self.scratch)
        try:
            for made, record, rest, run, how in self.launches:
                arrays = rest(at) if record is None else (record(at), *rest(at))
                if hooked:
                    made.send(stream, arrays)
                else:
                    run(*made.grid, stream, *how, *arrays, *made.numbers)
        finally:
            if self.scratch is not None:
                launch.lend(None)
        return found[0] if self.alone else tuple(found)


class Launches(dict[Any, Steps]):
    """Steps by all that they depend on but where the arrays lie; and which calls have none."""

    def __init__(self) -> None:
        self.lost: set[Any] = set()

    def note(self, about: Any, run: Callable[[], Any], given: Sequence[Tensor]) -> Any:
        """The results of `run()`, which had these arrays, and its launches for later, if they alone
        filled all that they and the caller read."""
        if about in self.lost:  # what notes hold would be held for nothing
            return run()
        before = [_version(x) for x in given]
        with rooms.noted() as notes:
            results = run()
        alone = isinstance(results, Tensor)
        found = (results,) if alone else results or ()
        if [_version(x) for x in given] != before or _lost(notes, given, found):
            if len(self.lost) >= launch.MOST:
                self.lost.clear()
            self.lost.add(about)
            return results
        steps = None if launch.OVERRIDE else _steps(notes, given, found, alone)
        if steps is not None:
            if len(self) >= launch.MOST:
                self.clear()
            self[about] = steps
        return results


def _version(x: Tensor) -> int:
    """How often torch wrote to it, where that is counted."""
    return 0 if x.is_inference() else x._version


def _lost(notes: Notes, given: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Whether torch made or wrote to an array that launches have or a result, or a result lies
    where another array did, which may be larger; the interpreter's launches are not noted."""
    used = notes.used
    known = {None, 0, *[x.data_ptr() for x in (*given, *found, *notes.rooms)]}
    known |= {x for x, base, _ in notes.cuts if base in known}
    results = {x.data_ptr() for x in found if x.numel()}
    ours = used and used <= known and results <= used and not results & notes.spare.keys()
    return not ours or any(map(_version, (*notes.rooms, *found)))


def _steps(
    notes: Notes, given: Sequence[Tensor], found: Sequence[Tensor], alone: bool
) -> Steps | None:
    """None where arrays lie oddly, or overlap here and may not elsewhere."""
    like, used, results = given[0], notes.used, {x.data_ptr() for x in found}
    parts = [x for x in notes.cuts if x[0] in used and x[2]]
    wanted = used.union(base for _, base, _ in parts) - results
    rooms = [x for x in notes.rooms if x.data_ptr() in wanted]
    offsets, size = [], 0
    for x in rooms:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // 128) * 128  # so that the next lies evenly
    at = (None, 0, *[x.data_ptr() for x in (*given, *found, *rooms)])
    places = {x: i for i, x in reversed([*enumerate(at)])}
    cuts = {x: (places[base], by) for x, base, by in parts}
    if len(cuts) < len(parts) or cuts.keys() & places or any((x or 0) % 16 for x in used):
        return None
    places |= {x: i for i, x in enumerate(cuts, len(at))}
    steps = []
    for made, had in notes.launches:
        taken = [places[x] for x in had]
        record, rest = taken[: made.taken], taken[made.taken :]
        takes = _taking(record) if record else None, _taking(rest)
        steps.append(Step(made, *takes, made.compiled.run, made.how))
    scratch = max(made.scratch for made, _ in notes.launches)
    room = -(-(size + scratch) // like.element_size()), tuple(offsets), size if scratch else None
    told = tuple((tuple(x.shape), _stride(x, like), x.dtype) for x in found)
    alike = alone and told[0][:2] == (like.shape, None) and like.is_contiguous()
    about = (like.device.index, told, alone, alike)
    return Steps(tuple(steps), *about, *room, tuple(cuts.values()))


def _taking(at: list[int]) -> Any:
    """What takes these of the places, as a tuple of one too."""
    return itemgetter(*at) if len(at) > 1 else itemgetter(slice(at[0], at[0] + 1))


def _stride(x: Tensor, like: Tensor) -> tuple[int, ...] | None:
    return None if x.dtype == like.dtype and x.ndim and x.is_contiguous() else x.stride()


class Repeat:
    """Calls by launches alone: `run(*arrays)` gives the output, of the first array's dtype, and
    makes what lies between by `rooms.new`.

    What the launches depend on beside the sizes of the first two, strides and places must not
    change; no width is 0.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.known = Launches()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        # Launches know arrays by where they lie, so one that is given twice is told from two. Each
        # call asks all this: for three arrays it is spelled out, and strides are those of arrays
        # that have no gaps, where one may ask for that alone.
        given: tuple[int, ...]
        q, k, v = given = query.data_ptr(), key.data_ptr(), value.data_ptr()
        odd, strides = q | k | v, None
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            strides = query.stride(), key.stride(), value.stride()
        about: tuple[Any, ...] = query.numel(), key.numel(), q == k, k == v, q == v, strides
        if more:
            given = (*given, *map(Tensor.data_ptr, more))
            about = (*about, *map(Tensor.stride, more), *map(given.index, given))
            odd = reduce(or_, given)
        steps = self.known.get(about)
        found = None if steps is None else steps.again(query, given, odd)
        if found is None:
            run = partial(self.run, query, key, value, *more)
            with ahead.together(run):
                found = self.known.note(about, run, (query, key, value, *more))
        return found


KNOWN = Launches()
"""Those of the functions that go `by_launches`."""


def by_launches(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays and numbers, an array first, by its launches alone where they are known.

    It gives new arrays, one alone or several, and makes those that lie between by `rooms.new`.
    """

    @wraps(function)
    def again(*given: Any) -> Any:
        if rooms.NOTES.get() is not None or ahead.LISTED.get() is not None:
            return function(*given)
        arrays: list[Tensor] = []
        about: list[Any] = [function]
        for x in given:
            if isinstance(x, Tensor):
                arrays.append(x)
                about.append((x.shape, x.stride(), x.dtype, x.get_device()))
            else:
                about.append(x)
        at = tuple(map(Tensor.data_ptr, arrays))
        # Launches know arrays by where they lie: one that is given twice is told from two.
        kind = (*about, *map(at.index, at))
        steps = KNOWN.get(kind)
        found = None if steps is None else steps.again(arrays[0], at, reduce(or_, at))
        if found is None:
            return KNOWN.note(kind, lambda: function(*given), arrays)
        return found

    return again
