"""Launches noted once, and made again for other arrays of the same shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import launch, precompile
from qkv.engines.triton import workspace as rooms
from qkv.engines.triton.launch import Launch
from qkv.engines.triton.workspace import LaunchRecording

Pointers = tuple[int | None, ...]
"""None and 0, then where arrays lie: those given, the results, and what is made between."""


class LaunchStep(NamedTuple):
    """A launch, what it takes of the places, those of its record of arrays first, and what Triton
    launches it by."""

    launch: Launch
    take_record: Callable[[Pointers], Any] | None
    take_rest: Callable[[Pointers], Any]
    run: Callable[..., None]
    launcher_arguments: tuple[Any, ...]


class LaunchList(NamedTuple):
    """Launches, which device they are `device_index`, the results' shapes, with strides and dtypes
    where they are not contiguous and of the first array's, whether there is one `is_single_result`,
    and whether that is `matches_first_array` the first array, the room of what lies between: its
    size, and where in it each array and descriptors begin, in bytes; and of which places, and from
    which byte, parts are taken."""

    launches: tuple[LaunchStep, ...]
    device_index: int | None
    results: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    is_single_result: bool
    matches_first_array: bool
    workspace_size: int
    offsets: tuple[int, ...]
    scratch_offset: int | None
    slices: tuple[tuple[int, int], ...]

    def replay(self, like: Tensor, given: tuple[int, ...], odd: int) -> Any:
        """The results; None where the arrays lie oddly or on a device that is not in use."""
        if odd & 15 or not launch.is_current_device(self.device_index):
            return None
        # One by one, and in the query's dtype: torch reads a tuple, and a dtype, for as long again.
        found = (
            [torch.empty_like(like)]
            if self.matches_first_array
            else [
                like.new_empty(*shape)
                if stride is None
                else like.new_empty_strided(shape, stride, dtype=dtype)
                for shape, stride, dtype in self.results
            ]
        )
        room = like.new_empty(self.workspace_size) if self.workspace_size else like
        start, stream = room.data_ptr(), launch.current_stream(self.device_index)
        of_results = map(Tensor.data_ptr, found)
        at: Any = (None, 0, *given, *of_results, *[start + x for x in self.offsets])
        at = (*at, *[at[i] + x for i, x in self.slices]) if self.slices else at
        hooked = launch.has_launch_hook()
        if self.scratch_offset is not None:
            launch.set_descriptor_memory(start + self.scratch_offset)
        try:
            for made, record, rest, run, how in self.launches:
                arrays = rest(at) if record is None else (record(at), *rest(at))
                if hooked:
                    made.enqueue(stream, arrays)
                else:
                    run(*made.grid, stream, *how, *arrays, *made.numbers)
        finally:
            if self.scratch_offset is not None:
                launch.set_descriptor_memory(None)
        return found[0] if self.is_single_result else tuple(found)


class LaunchListCache(dict[Any, LaunchList]):
    """Steps by all that they depend on but where the arrays lie; and which calls have none."""

    def __init__(self) -> None:
        self.unreplayable: set[Any] = set()

    def run_and_record(self, about: Any, run: Callable[[], Any], given: Sequence[Tensor]) -> Any:
        """The results of `run()`, which had these arrays, and its launches for later, if they alone
        filled all that they and the caller read."""
        if about in self.unreplayable:  # what notes hold would be held for nothing
            return run()
        before = [_write_count(x) for x in given]
        with rooms.record_launches() as notes:
            results = run()
        alone = isinstance(results, Tensor)
        found = (results,) if alone else results or ()
        if [_write_count(x) for x in given] != before or _is_unreplayable(notes, given, found):
            if len(self.unreplayable) >= launch.MAX_CACHED_ENTRIES:
                self.unreplayable.clear()
            self.unreplayable.add(about)
            return results
        steps = None if launch.TILE_OVERRIDES else _build_launch_list(notes, given, found, alone)
        if steps is not None:
            if len(self) >= launch.MAX_CACHED_ENTRIES:
                self.clear()
            self[about] = steps
        return results


def _write_count(x: Tensor) -> int:
    """How often torch wrote to it, where that is counted."""
    return 0 if x.is_inference() else x._version


def _is_unreplayable(
    notes: LaunchRecording, given: Sequence[Tensor], found: Sequence[Tensor]
) -> bool:
    """Whether torch made or wrote to an array that launches have or a result, or a result lies
    where another array did, which may be larger; the interpreter's launches are not noted."""
    used = notes.used_pointers
    known = {None, 0, *[x.data_ptr() for x in (*given, *found, *notes.buffers)]}
    known |= {x for x, base, _ in notes.slices if base in known}
    results = {x.data_ptr() for x in found if x.numel()}
    ours = (
        used and used <= known and results <= used and not results & notes.reusable_buffers.keys()
    )
    return not ours or any(map(_write_count, (*notes.buffers, *found)))


def _build_launch_list(
    notes: LaunchRecording, given: Sequence[Tensor], found: Sequence[Tensor], alone: bool
) -> LaunchList | None:
    """None where arrays lie oddly, or overlap here and may not elsewhere."""
    like, used, results = given[0], notes.used_pointers, {x.data_ptr() for x in found}
    parts = [x for x in notes.slices if x[0] in used and x[2]]
    wanted = used.union(base for _, base, _ in parts) - results
    rooms = [x for x in notes.buffers if x.data_ptr() in wanted]
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
        record, rest = taken[: made.record_length], taken[made.record_length :]
        takes = _make_getter(record) if record else None, _make_getter(rest)
        steps.append(LaunchStep(made, *takes, made.compiled.run, made.launcher_arguments))
    scratch = max(made.scratch_bytes for made, _ in notes.launches)
    room = -(-(size + scratch) // like.element_size()), tuple(offsets), size if scratch else None
    told = tuple((tuple(x.shape), _result_stride(x, like), x.dtype) for x in found)
    alike = alone and told[0][:2] == (like.shape, None) and like.is_contiguous()
    about = (like.device.index, told, alone, alike)
    return LaunchList(tuple(steps), *about, *room, tuple(cuts.values()))


def _make_getter(at: list[int]) -> Any:
    """What takes these of the places, as a tuple of one too."""
    return itemgetter(*at) if len(at) > 1 else itemgetter(slice(at[0], at[0] + 1))


def _result_stride(x: Tensor, like: Tensor) -> tuple[int, ...] | None:
    return None if x.dtype == like.dtype and x.ndim and x.is_contiguous() else x.stride()


class ReplayedCall:
    """Calls by launches alone: `run(*arrays)` gives the output, of the first array's dtype, and
    makes what lies between by `workspace.allocate_buffer`.

    What the launches depend on beside the sizes of the first two, strides and places must not
    change; no width is 0.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.cache = LaunchListCache()

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
        steps = self.cache.get(about)
        found = None if steps is None else steps.replay(query, given, odd)
        if found is None:
            run = partial(self.run, query, key, value, *more)
            with precompile.compile_together(run):
                found = self.cache.run_and_record(about, run, (query, key, value, *more))
        return found


LAUNCH_LISTS = LaunchListCache()
"""Those of the functions that go `replay_launches`."""


def replay_launches(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays and numbers, an array first, by its launches alone where they are known.

    It gives new arrays, one alone or several, and makes those that lie between by
    `workspace.allocate_buffer`.
    """

    @wraps(function)
    def replay_or_run(*given: Any) -> Any:
        if rooms.CURRENT_RECORDING.get() is not None or precompile.DRY_RUN_JOBS.get() is not None:
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
        steps = LAUNCH_LISTS.get(kind)
        found = None if steps is None else steps.replay(arrays[0], at, reduce(or_, at))
        if found is None:
            return LAUNCH_LISTS.run_and_record(kind, lambda: function(*given), arrays)
        return found

    return replay_or_run
