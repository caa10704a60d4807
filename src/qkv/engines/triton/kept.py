"""Launches noted once, and made again for other arrays of the same shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import ahead, launch
from qkv.engines.triton.launch import Launch, Notes

Places = tuple[int | None, ...]
"""None and 0, then where arrays lie: those given, the results, and what is made between."""


class Step(NamedTuple):
    """A launch, and what it takes of the places, those of its record of arrays first."""

    made: Launch
    record: Callable[[Places], Any] | None
    rest: Callable[[Places], Any]


class Steps(NamedTuple):
    """Launches, which device they are `at`, the results' shapes, with strides and dtypes where they
    are not contiguous and of the first array's, whether there is one `alone`, and the room of what
    lies between: its size, and where in it each array begins, in bytes."""

    launches: tuple[Step, ...]
    at: int | None
    results: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    alone: bool
    size: int
    offsets: tuple[int, ...]

    def again(self, like: Tensor, given: tuple[int, ...]) -> Any:
        """The results; None where the arrays lie oddly or on a device that is not in use."""
        if any(map((15).__and__, given)) or not launch.current(self.at):
            return None
        # One by one, and in the query's dtype: torch reads a tuple, and a dtype, for as long again.
        found = [
            like.new_empty(*shape)
            if stride is None
            else like.new_empty_strided(shape, stride, dtype=dtype)
            for shape, stride, dtype in self.results
        ]
        room = like.new_empty(self.size) if self.size else like
        start, stream = room.data_ptr(), launch.current_stream(self.at)
        of_results = map(Tensor.data_ptr, found)
        at = (None, 0, *given, *of_results, *[start + x for x in self.offsets])
        for made, record, rest in self.launches:
            if record is None:
                made.send(stream, *rest(at))
            else:
                made.send(stream, record(at), *rest(at))
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
    like = given[0]
    offsets, size = [], 0
    for x in notes.rooms:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // 128) * 128  # so that the next lies evenly
    at = (None, 0, *[x.data_ptr() for x in (*given, *found, *notes.rooms)])
    places = {x: i for i, x in reversed([*enumerate(at)])}
    used = {x for _, had in notes.launches for x in had}
    if any(x.data_ptr() not in used for x in found if x.numel()):  # torch made it
        return None
    if not used or any(x not in places or (x or 0) % 16 for x in used):
        return None  # the interpreter's launches are not noted
    steps = []
    for made, had in notes.launches:
        taken = [places[x] for x in had]
        record, rest = taken[: made.taken], taken[made.taken :]
        steps.append(Step(made, itemgetter(*record) if record else None, itemgetter(*rest)))
    results = tuple((tuple(x.shape), _stride(x, like), x.dtype) for x in found)
    index = like.device.index
    return Steps(tuple(steps), index, results, alone, size // like.element_size(), tuple(offsets))


def _stride(x: Tensor, like: Tensor) -> tuple[int, ...] | None:
    return None if x.dtype == like.dtype and x.ndim and x.is_contiguous() else x.stride()


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
        arrays = [x for x in given if isinstance(x, Tensor)]
        at = tuple(map(Tensor.data_ptr, arrays))
        # Launches know arrays by where they lie: one that is given twice is told from two.
        about = (
            function,
            *[
                (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x
                for x in given
            ],
            *map(at.index, at),
        )
        steps = KNOWN.get(about)
        found = None if steps is None else steps.again(arrays[0], at)
        if found is None:
            return KNOWN.note(about, lambda: function(*given), arrays)
        return found

    return again
