"""Launches noted once, and made again for other arrays of the same shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import ahead, launch
from qkv.engines.triton.launch import Launch, Notes

Places = tuple[int | None, ...]
"""None and 0, then where arrays lie: those given, the results, and what is made between."""


class Step(NamedTuple):
    """A launch, what it takes of the places, those of its record of arrays first, where in the room
    its scratch begins, if it has some, and what Triton launches it by."""

    made: Launch
    record: Callable[[Places], Any] | None
    rest: Callable[[Places], Any]
    scratch: int | None
    run: Callable[..., None]
    how: tuple[Any, ...]


class Steps(NamedTuple):
    """Launches, which device they are `at`, the results' shapes, with strides and dtypes where they
    are not contiguous and of the first array's, whether there is one `alone`, and whether that is
    `like` the first array, and the room of what lies between: its size, and where in it each array
    begins, in bytes."""

    launches: tuple[Step, ...]
    at: int | None
    results: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    alone: bool
    like: bool
    size: int
    offsets: tuple[int, ...]

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
        at = (None, 0, *given, *of_results, *[start + x for x in self.offsets])
        hooked = launch.hooked()
        for made, record, rest, scratch, run, how in self.launches:
            arrays = rest(at) if record is None else (record(at), *rest(at))
            if hooked:
                made.send(stream, arrays)
            elif scratch is None:
                run(*made.grid, stream, *how, *arrays, *made.numbers)
            else:
                given = (*made.grid, stream, *how, *arrays, *made.numbers)
                launch.lent(start + scratch, run, given)
        return found[0] if self.alone else tuple(found)


class Launches(dict[Any, Steps]):
    """Steps by all that they depend on but where the arrays lie."""

    def note(self, about: Any, run: Callable[[], Any], given: Sequence[Tensor]) -> Any:
        """The results of `run()`, which had these arrays, and its launches for later, if all were
        noted, had no arrays but those known here, and torch wrote to none of them."""
        before = [_version(x) for x in given]
        with launch.noted() as notes:
            results = run()
        alone = isinstance(results, Tensor)
        found = (results,) if alone else results or ()
        after = [_version(x) for x in (*given, *notes.rooms, *found)]
        written = after[: len(given)] != before or any(after[len(given) :])
        steps = None if written or launch.OVERRIDE else _steps(notes, given, found, alone)
        if steps is not None:
            if len(self) >= launch.MOST:
                self.clear()
            self[about] = steps
        return results


def _version(x: Tensor) -> int:
    """How often torch wrote to it, where that is counted."""
    return 0 if x.is_inference() else x._version


def _steps(
    notes: Notes, given: Sequence[Tensor], found: Sequence[Tensor], alone: bool
) -> Steps | None:
    like, results = given[0], {x.data_ptr() for x in found}
    used = {x for _, had in notes.launches for x in had}
    rooms = [x for x in notes.rooms if x.data_ptr() in used - results]
    offsets, size = [], 0
    for x in rooms:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // 128) * 128  # so that the next lies evenly
    at = (None, 0, *[x.data_ptr() for x in (*given, *found, *rooms)])
    places = {x: i for i, x in reversed([*enumerate(at)])}
    if any(x.data_ptr() not in used for x in found if x.numel()):  # torch made it
        return None
    if not used or any(x not in places or (x or 0) % 16 for x in used):
        return None  # the interpreter's launches are not noted
    steps = []
    for made, had in notes.launches:
        taken, scratch = [places[x] for x in had], made.scratch
        record, rest = taken[: made.taken], taken[made.taken :]
        parts = itemgetter(*record) if record else None, itemgetter(*rest)
        steps.append(Step(made, *parts, size if scratch else None, made.compiled.run, made.how))
        size += -(-scratch // 128) * 128
    told = tuple((tuple(x.shape), _stride(x, like), x.dtype) for x in found)
    alike = alone and told[0][:2] == (like.shape, None) and like.is_contiguous()
    room = size // like.element_size(), tuple(offsets)
    return Steps(tuple(steps), like.device.index, told, alone, alike, *room)


def _stride(x: Tensor, like: Tensor) -> tuple[int, ...] | None:
    return None if x.dtype == like.dtype and x.ndim and x.is_contiguous() else x.stride()


class Repeat:
    """Calls by launches alone: `run(*arrays)` gives the output, of the first array's dtype, and
    makes what lies between by `launch.new`.

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

    It gives new arrays, one alone or several, and makes those that lie between by `launch.new`.
    """

    @wraps(function)
    def again(*given: Any) -> Any:
        if launch.NOTES.get() is not None or ahead.LISTED.get() is not None:
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
