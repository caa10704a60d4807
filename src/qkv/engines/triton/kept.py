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
    """A launch, what it takes of the places (those of its record of arrays first), its numbers."""

    made: Launch
    record: Callable[[Places], Any] | None
    rest: Callable[[Places], Any]
    numbers: tuple[Any, ...]


class Steps(NamedTuple):
    """Launches, which device they are `at`, the results' shapes, with their dtypes where they are
    not the first array's, and the room of what lies between: its size, and where in it each array
    begins, in bytes."""

    launches: tuple[Step, ...]
    at: int | None
    results: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
    size: int
    offsets: tuple[int, ...]

    def again(self, like: Tensor, given: tuple[int, ...]) -> list[Tensor] | None:
        """The results; None where the arrays lie oddly or on a device that is not in use."""
        if any(map((15).__and__, given)) or not launch.current(self.at):
            return None
        # One by one, and in the query's dtype: torch reads a tuple, and a dtype, for as long again.
        found = [
            like.new_empty(*shape) if dtype is None else like.new_empty(shape, dtype=dtype)
            for shape, dtype in self.results
        ]
        room = like.new_empty(self.size)
        start, stream = room.data_ptr(), launch.current_stream(self.at)
        of_results = map(Tensor.data_ptr, found)
        at = (None, 0, *given, *of_results, *[start + x for x in self.offsets])
        for made, record, rest, numbers in self.launches:
            if record is None:
                made.send(stream, *rest(at), *numbers)
            else:
                made.send(stream, record(at), *rest(at), *numbers)
        return found


class Launches(dict[Any, Steps]):
    """Steps by all that they depend on but where the arrays lie."""

    def note(
        self, about: Any, run: Callable[[], Any], given: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The results of `run()`, which had these arrays, and its launches for later, if all were
        noted, had no arrays but those known here, and torch wrote to none of them."""
        before = [_version(x) for x in given]
        with launch.noted() as notes:
            found: tuple[Tensor, ...] = run()
        after = [_version(x) for x in (*given, *notes.rooms, *found)]
        written = after[: len(given)] != before or any(after[len(given) :])
        steps = None if written or launch.OVERRIDE else _steps(notes, given, found)
        if steps is not None:
            if len(self) >= launch.MOST:
                self.clear()
            self[about] = steps
        return found


def _version(x: Tensor) -> int:
    """How often torch wrote to it, where that is counted."""
    return 0 if x.is_inference() else x._version


def _steps(notes: Notes, given: Sequence[Tensor], found: tuple[Tensor, ...]) -> Steps | None:
    if not notes.launches:  # the interpreter's are not noted
        return None
    like = given[0]
    offsets, size = [], 0
    for x in notes.rooms:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // 128) * 128  # so that the next lies evenly
    at = (None, 0, *[x.data_ptr() for x in (*given, *found, *notes.rooms)])
    places = {x: i for i, x in reversed([*enumerate(at)])}
    filled = {x for note in notes.launches if note is not None for x in note[1]}
    if any(x.data_ptr() not in filled for x in found if x.numel()):  # torch made it
        return None
    steps = []
    for note in notes.launches:
        if note is None or any(x not in places or (x or 0) % 16 for x in note[1]):
            return None
        made, had, floats = note
        taken = [places[x] for x in had]
        record, rest = taken[: made.taken], taken[made.taken :]
        first = itemgetter(*record) if record else None
        steps.append(Step(made, first, itemgetter(*rest), (*floats, *made.numbers)))
    results = tuple(
        (tuple(x.shape), None if x.dtype == like.dtype and x.ndim else x.dtype) for x in found
    )
    index = like.device.index
    return Steps(tuple(steps), index, results, size // like.element_size(), tuple(offsets))


KNOWN = Launches()
"""Those of the functions that are `kept`."""


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays and numbers, an array first, by its launches alone where they are known.

    It gives new contiguous arrays, and makes those that lie between by `launch.new`.
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
        return tuple(found)

    return again
