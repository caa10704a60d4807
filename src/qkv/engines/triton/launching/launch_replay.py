"""Record the launches of a function once and replay them for other arrays of the same layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton.launching import launch, precompile, tile_choice, workspace
from qkv.engines.triton.launching.launch import Launch
from qkv.engines.triton.launching.workspace import LaunchRecording
from qkv.util import caches

Pointers = tuple[int | None, ...]
"""None and 0, then the pointers of the arguments, the results and the buffers, in this order."""


class LaunchStep(NamedTuple):
    """A launch, functions that select its arrays from `Pointers`, and Triton's launcher."""

    launch: Launch
    take_record: Callable[[Pointers], Any] | None
    take_rest: Callable[[Pointers], Any]
    run: Callable[..., None]
    launcher_arguments: tuple[Any, ...]


class LaunchList(NamedTuple):
    """The recorded launches of one call.

    - results: shape, strides and dtype of each result. Strides are None for a contiguous result
      with the dtype of the first argument.
    - matches_first_array: the only result has the shape and layout of the first argument.
    - workspace_size: elements of the one workspace that holds all buffers.
    - offsets, scratch_offset: where each buffer, and the descriptors, start in it (bytes).
    - slices: for each slice, the index of the whole array in `Pointers` and the offset in bytes.
    """

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
        """Return the results; None if a pointer is not aligned or the device is not current."""
        if odd & 15 or not launch.is_current_device(self.device_index):
            return None
        # Sizes one by one, and no dtype: PyTorch parses a tuple or a dtype twice as slowly.
        results = (
            [torch.empty_like(like)]
            if self.matches_first_array
            else [
                like.new_empty(*shape)
                if stride is None
                else like.new_empty_strided(shape, stride, dtype=dtype)
                for shape, stride, dtype in self.results
            ]
        )
        buffer = like.new_empty(self.workspace_size) if self.workspace_size else like
        start, stream = buffer.data_ptr(), launch.current_stream(self.device_index)
        result_pointers = map(Tensor.data_ptr, results)
        at: Any = (None, 0, *given, *result_pointers, *[start + x for x in self.offsets])
        at = (*at, *[at[i] + x for i, x in self.slices]) if self.slices else at
        has_hook = launch.has_launch_hook()
        if self.scratch_offset is not None:
            launch.set_descriptor_memory(start + self.scratch_offset)
        try:
            for made, record, rest, run, how in self.launches:
                arrays = rest(at) if record is None else (record(at), *rest(at))
                if has_hook:
                    made.enqueue(stream, arrays)
                else:
                    run(*made.grid, stream, *how, *arrays, *made.numbers)
        finally:
            if self.scratch_offset is not None:
                launch.set_descriptor_memory(None)
        return results[0] if self.is_single_result else tuple(results)


class LaunchListCache(dict[Any, LaunchList]):
    """Launch lists, keyed by everything except data pointers.

    `unreplayable` holds the keys of calls that cannot be replayed.
    """

    def __init__(self) -> None:
        self.unreplayable: set[Any] = set()

    def run_and_record(
        self, signature: Any, run: Callable[[], Any], given: Sequence[Tensor]
    ) -> Any:
        """Return the results of `run()` and cache its launches if they can be replayed.

        They can if only launches wrote the buffers and the results.
        """
        if signature in self.unreplayable:  # a recording would only keep arrays alive
            return run()
        before = [_write_count(x) for x in given]
        with workspace.record_launches() as recording:
            results = run()
        is_single = isinstance(results, Tensor)
        result_arrays = (results,) if is_single else results or ()
        if [_write_count(x) for x in given] != before or _is_unreplayable(
            recording, given, result_arrays
        ):
            if len(self.unreplayable) >= launch.MAX_CACHED_ENTRIES:
                self.unreplayable.clear()
            self.unreplayable.add(signature)
            return results
        steps = (
            None
            if tile_choice.TILE_OVERRIDES
            else _build_launch_list(recording, given, result_arrays, is_single)
        )
        if steps is not None:
            caches.insert_bounded(self, signature, steps, launch.MAX_CACHED_ENTRIES)
        return results

    def replay_or_record(
        self, signature: Any, run: Callable[[], Any], arrays: Sequence[Tensor]
    ) -> Any:
        """Return the results of `run()`, by a replay if its launches are cached.

        The signature must hold `describe_arrays(arrays)`.
        """
        steps = self.get(signature)
        results = None
        if steps is not None:
            given = tuple(map(Tensor.data_ptr, arrays))
            results = steps.replay(arrays[0], given, reduce(or_, given))
        return self.run_and_record(signature, run, arrays) if results is None else results


def describe_arrays(arrays: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the shapes and strides, and which arrays are the same: launches know only pointers."""
    given = tuple(map(Tensor.data_ptr, arrays))
    return *map(Tensor.size, arrays), *map(Tensor.stride, arrays), *map(given.index, given)


def _write_count(x: Tensor) -> int:
    """Return how often PyTorch wrote to x; 0 for inference tensors, which do not count."""
    return 0 if x.is_inference() else x._version


def _is_unreplayable(
    recording: LaunchRecording, given: Sequence[Tensor], found: Sequence[Tensor]
) -> bool:
    """Return whether a replay would give wrong results.

    It would in these cases:

    - PyTorch allocated or wrote an array that launches use.
    - A result shares memory with a reused buffer.
    - Nothing was recorded, as under the interpreter.
    """
    used = recording.used_pointers
    known = {None, 0, *[x.data_ptr() for x in (*given, *found, *recording.buffers)]}
    known |= {x for x, base, _ in recording.slices if base in known}
    results = {x.data_ptr() for x in found if x.numel()}
    ours = (
        used
        and used <= known
        and results <= used
        and not results & recording.reusable_buffers.keys()
    )
    return not ours or any(map(_write_count, (*recording.buffers, *found)))


def _build_launch_list(
    recording: LaunchRecording, given: Sequence[Tensor], found: Sequence[Tensor], is_single: bool
) -> LaunchList | None:
    """Return the launch list; None if pointers are unaligned, or slices overlap by chance."""
    like, used, results = given[0], recording.used_pointers, {x.data_ptr() for x in found}
    parts = [x for x in recording.slices if x[0] in used and x[2]]
    wanted = used.union(base for _, base, _ in parts) - results
    buffers = [x for x in recording.buffers if x.data_ptr() in wanted]
    offsets, size = [], 0
    for x in buffers:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // 128) * 128  # the next buffer starts aligned
    at = (None, 0, *[x.data_ptr() for x in (*given, *found, *buffers)])
    places = {x: i for i, x in reversed([*enumerate(at)])}
    cuts = {x: (places[base], by) for x, base, by in parts}
    if len(cuts) < len(parts) or cuts.keys() & places or any((x or 0) % 16 for x in used):
        return None
    places |= {x: i for i, x in enumerate(cuts, len(at))}
    steps = []
    for made, had in recording.launches:
        taken = [places[x] for x in had]
        record, rest = taken[: made.record_length], taken[made.record_length :]
        takes = _make_getter(record) if record else None, _make_getter(rest)
        steps.append(LaunchStep(made, *takes, made.compiled.run, made.launcher_arguments))
    scratch = max(made.scratch_bytes for made, _ in recording.launches)
    layout = -(-(size + scratch) // like.element_size()), tuple(offsets), size if scratch else None
    result_layouts = tuple((tuple(x.shape), _result_stride(x, like), x.dtype) for x in found)
    matches_first_array = (
        is_single and result_layouts[0][:2] == (like.shape, None) and like.is_contiguous()
    )
    about_results = (like.device.index, result_layouts, is_single, matches_first_array)
    return LaunchList(tuple(steps), *about_results, *layout, tuple(cuts.values()))


def _make_getter(at: list[int]) -> Any:
    """Return a function that selects these indices as a tuple."""
    return itemgetter(*at) if len(at) > 1 else itemgetter(slice(at[0], at[0] + 1))


def _result_stride(x: Tensor, like: Tensor) -> tuple[int, ...] | None:
    return None if x.dtype == like.dtype and x.ndim and x.is_contiguous() else x.stride()


class ReplayedCall:
    """A function of arrays whose later calls only replay launches.

    `run(*arrays)` returns one output with the dtype of the first array. It allocates with
    `workspace.allocate_buffer`. Its launches may depend only on the sizes of the first two arrays,
    on strides, and on which arguments are the same array. No width is 0.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.cache = LaunchListCache()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        # Launches know arrays by pointer, so the key says which arguments are the same array. This
        # runs in every call: three arrays are written out, and contiguous ones need no strides.
        given: tuple[int, ...]
        q, k, v = given = query.data_ptr(), key.data_ptr(), value.data_ptr()
        pointer_bits, strides = q | k | v, None
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            strides = query.stride(), key.stride(), value.stride()
        signature: tuple[Any, ...] = query.numel(), key.numel(), q == k, k == v, q == v, strides
        if more:
            given = (*given, *map(Tensor.data_ptr, more))
            signature = (*signature, *map(Tensor.stride, more), *map(given.index, given))
            pointer_bits = reduce(or_, given)
        steps = self.cache.get(signature)
        output = None if steps is None else steps.replay(query, given, pointer_bits)
        if output is None:
            run = partial(self.run, query, key, value, *more)
            with precompile.compile_together(run):
                output = self.cache.run_and_record(signature, run, (query, key, value, *more))
        return output


LAUNCH_LISTS = LaunchListCache()
"""The launch lists of all functions that `replay_launches` decorates."""
caches.register("triton.launch_lists", LAUNCH_LISTS)


def replay_launches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its launches replayed in later calls.

    Its first argument is an array, the others are arrays or numbers. It returns one or several new
    arrays and allocates with `workspace.allocate_buffer`.
    """

    @wraps(function)
    def replay_or_run(*given: Any) -> Any:
        if (
            workspace.CURRENT_RECORDING.get() is not None
            or precompile.DRY_RUN_JOBS.get() is not None
        ):
            return function(*given)
        arrays: list[Tensor] = []
        signature: list[Any] = [function]
        for x in given:
            if isinstance(x, Tensor):
                arrays.append(x)
                signature.append((x.shape, x.stride(), x.dtype, x.get_device()))
            else:
                signature.append(x)
        at = tuple(map(Tensor.data_ptr, arrays))
        # Launches know arrays by pointer, so the key says which arguments are the same array.
        key = (*signature, *map(at.index, at))
        steps = LAUNCH_LISTS.get(key)
        results = None if steps is None else steps.replay(arrays[0], at, reduce(or_, at))
        if results is None:
            return LAUNCH_LISTS.run_and_record(key, lambda: function(*given), arrays)
        return results

    return replay_or_run
