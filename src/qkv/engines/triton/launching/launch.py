"""Launch a kernel: split its loop, and look up or compile its binary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qkv.engines.triton.launching import precompile, workspace
from qkv.engines.triton.launching.tile_choice import Tile
from qkv.engines.triton.tile_functions.records import (
    IS_INTERPRETED,
    SPECIALIZED_SIZES,
    Constexprs,
    Scales,
    intern_constexprs,
)
from qkv.errors import EngineError
from qkv.util.caches import create_table, insert_bounded, memoize

MIN_ROWS_PER_PART = 512
"""Fewest rows in a part of a split loop. Smaller parts save less time than joining them takes."""

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""`torch.cuda.current_device` without its check that CUDA is initialized."""


@memoize("triton.processor_counts")
def count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@memoize("triton.tma_devices")
def has_tma(device: torch.device) -> bool:
    """Return whether the device copies tiles by TMA descriptors (Hopper and later)."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device)[0] >= 9)


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def set_descriptor_memory(at: int | None) -> None:
    """Place the descriptors of the next launches at this address; None: Triton allocates them.

    One address serves all launches of a replay, because each ends before the next starts. Reset it
    afterwards: launches of other libraries need their own memory.
    """
    triton.set_allocator(_allocate_scratch if at is None else lambda *_: at)


def is_interpreted() -> bool:
    return IS_INTERPRETED


class Launch(NamedTuple):
    """A launch that can be repeated for arrays of the same shapes, strides and dtypes.

    `numbers` are the kernel's arguments after its arrays. The first `record_length` arrays are
    passed as one tuple.
    """

    compiled: Any
    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    uses_descriptors: bool
    record_length: int

    @property
    def scratch_bytes(self) -> int:
        """The bytes of its descriptors."""
        if not self.uses_descriptors:
            return 0
        about = self.compiled.metadata
        return int(about.global_scratch_size * about.num_ctas * math.prod(self.grid))

    @property
    def launcher_arguments(self) -> tuple[Any, ...]:
        """The arguments of Triton's launcher between the stream and the arrays."""
        return self.compiled.function, self.compiled.packed_metadata, None, None, None

    def enqueue(self, stream: int, arrays: Sequence[Any]) -> None:
        """Launch with pointers. For a tensor, Triton would ask the driver for its device."""
        if self.uses_descriptors:
            set_descriptor_memory(None)  # a thread has its own
        if has_launch_hook():
            self.compiled[self.grid](*arrays, *self.numbers)
            return
        self.compiled.run(*self.grid, stream, *self.launcher_arguments, *arrays, *self.numbers)


class KernelKey(NamedTuple):
    """Everything that a kernel is compiled for; `str()` returns a readable name.

    `misalignments` are the pointers modulo 16. `integer_classes` are Triton's classes of integers:
    1, a multiple of 16 (2), any other (0).
    """

    name: str
    kernel: int
    tile: Tile
    device: torch.device
    constexprs: Constexprs
    dtypes: tuple[torch.dtype | None, ...]
    misalignments: tuple[int | None, ...]
    integer_classes: tuple[int, ...]

    def __str__(self) -> str:
        options = " ".join(str(x) for x in self.constexprs.values if type(x) is not bool)
        dtype = str(self.dtypes[0]).removeprefix("torch.")
        return f"{self.name.strip('_')} of {dtype}: {options}"


COMPILED_KERNELS: dict[KernelKey, Any] = create_table("triton.compiled_kernels")
"""Compiled kernels. Triton's own lookup takes longer."""
MAX_INT32 = 2**31 - 1
MAX_CACHED_ENTRIES = 4096
"""The most entries of the tables of kernels and of launch lists."""


def launch_kernel(
    kernel: Any, programs: int | tuple[int, ...], arrays: tuple[Any, ...],
    floats: tuple[float, ...], integer_arguments: tuple[Any, ...], constants: dict[str, Any],
    tile: Tile,
) -> None:  # fmt: skip
    """Launch a kernel with parameters in this order: arrays, floats, integers, `F`.

    Records (`Arrays`, `Scales`, `Strides`, `Sizes`) may come first in their group; the kernel takes
    each as one tuple.
    """
    programs = programs if isinstance(programs, tuple) else (programs,)
    grid = (*programs, 1, 1)[:3]
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    constexprs = intern_constexprs(constants)
    options_by_name: dict[str, Any] = {"F": constexprs} | options
    record_length = len(arrays[0]) if isinstance(arrays[0], tuple) else 0
    numbers = (
        (floats, *integer_arguments)
        if isinstance(floats, Scales)
        else (*floats, *integer_arguments)
    )
    if is_interpreted():
        kernel[grid](*arrays, *numbers, **options_by_name)
        return
    if tile.registers is not None:
        options_by_name["maxnreg"] = tile.registers
    if tile.early:
        options_by_name["launch_pdl"] = True
    flat = (*arrays[0], *arrays[1:]) if record_length else arrays
    pointers = [x if x is None else x.data_ptr() for x in flat]
    misalignments = tuple([x if x is None else x % 16 for x in pointers])
    device = flat[0].device
    if any(x is not None and x.device != device for x in flat):  # the kernel would read host memory
        devices = sorted({str(x.device) for x in flat if x is not None})
        raise EngineError(f"the arrays of a kernel are on {' and '.join(devices)}: move all to one")
    records = [x for x in integer_arguments if isinstance(x, tuple)]
    sizes = integer_arguments[len(records) :]
    integers = [*chain(*records), *sizes]
    if max(integers) <= MAX_INT32:
        # Triton compiles separately for 1, for multiples of 16, and for 64-bit integers.
        count = len(sizes)
        integers = [x[i] for x in records for i in SPECIALIZED_SIZES.get(type(x), range(len(x)))]
        integers += [sizes[i] for i in _specialized_integers(kernel, -1 - count, count)]
        integers = [x if x == 1 else 2 * (x % 16 == 0) for x in integers]
    dtypes = tuple([x if x is None else x.dtype for x in flat])
    key = KernelKey(
        kernel.__name__,
        id(kernel),
        tile,
        device,
        constexprs,
        dtypes,
        misalignments,
        tuple(integers),
    )
    compiled, dry_run_jobs = COMPILED_KERNELS.get(key), precompile.DRY_RUN_JOBS.get()
    if compiled is None:
        aligned_arrays: tuple[Any, ...] = dtypes
        if record_length:
            aligned_arrays = (type(arrays[0])(*dtypes[:record_length]), *dtypes[record_length:])
        compile_arrays = arrays if any(misalignments) else aligned_arrays
        compile_numbers = [
            _unspecialized_sizes(x) if type(x) in SPECIALIZED_SIZES else x for x in numbers
        ]
        job = partial(
            _compile_kernel,
            kernel,
            grid,
            (*compile_arrays, *compile_numbers),
            options_by_name,
            device,
        )
        if dry_run_jobs is None:
            precompile.compile_all_missing(COMPILED_KERNELS)
            compiled = COMPILED_KERNELS.get(key) or job()
            insert_bounded(COMPILED_KERNELS, key, compiled, MAX_CACHED_ENTRIES)
        elif compile_arrays is aligned_arrays:
            dry_run_jobs[key] = job
    if dry_run_jobs is not None:
        return
    # Triton's launcher skips compile-time arguments, but expects them in the list.
    has_descriptors = uses_descriptors(tile, constants)
    launch = Launch(compiled, grid, (*numbers, constexprs), has_descriptors, record_length)
    pointer_arguments = (
        (tuple(pointers[:record_length]), *pointers[record_length:]) if record_length else pointers
    )
    launch.enqueue(current_stream(device.index), pointer_arguments)
    recording = workspace.CURRENT_RECORDING.get()
    if recording is not None:
        recording.launches.append((launch, pointers))
        recording.kept_alive.extend(flat)


def uses_descriptors(tile: Tile, constants: dict[str, Any]) -> bool:
    """Return whether a kernel makes descriptors, of rows or of a mask array (`F.LAID`)."""
    return tile.uses_descriptors or bool(constants.get("LAID", False))


def _compile_kernel(
    kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], named: dict[str, Any],
    device: torch.device,
) -> Any:  # fmt: skip
    """Return the kernel compiled for these arrays or dtypes, with its launcher built."""
    with use_device(device):
        if isinstance(given[0], tuple):
            mocks = map(triton.MockTensor.wrap_dtype, given[0])
            given = (type(given[0])(*mocks), *given[1:])
        try:
            made = kernel.warmup(*given, grid=grid, **named)
        except triton.runtime.errors.PTXASError:
            if "maxnreg" not in named:
                raise
            # The limit of registers is for speed; some kernels do not fit into it.
            unlimited = {name: x for name, x in named.items() if name != "maxnreg"}
            made = kernel.warmup(*given, grid=grid, **unlimited)
        with suppress(
            triton.runtime.errors.OutOfResources
        ):  # a launch raises it again and takes a smaller tile
            made.run  # noqa: B018
        return made


def _unspecialized_sizes(sizes: Any) -> Any:
    """Return sizes for compilation that reveal only the specialized ones, and 32 or 64 bits."""
    kind, other = type(sizes), [7 + 2**40 * (x > MAX_INT32) for x in sizes]
    return kind(*[x if i in SPECIALIZED_SIZES[kind] else other[i] for i, x in enumerate(sizes)])


@memoize("triton.specialized_integers")
def _specialized_integers(kernel: Any, first: int, count: int) -> tuple[int, ...]:
    """Return which of `count` integer parameters, from the first on, the kernel specializes."""
    params = kernel.params[first:][:count]
    return tuple(i for i, param in enumerate(params) if not param.do_not_specialize)


def has_launch_hook() -> bool:
    """Return whether a Triton profiler hooks into launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def current_stream(index: int | None) -> int:
    return _stream_getter()(index)  # type: ignore[no-any-return]


@memoize("triton.stream_getter")
def _stream_getter() -> Any:
    return triton.runtime.driver.active.get_current_stream


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if is_current_device(device.index) else torch.cuda.device(device)


def is_current_device(index: int | None) -> bool:
    """Return whether this device is current; None, for a CPU, always is."""
    return index is None or bool(index == _current_device())


def split_loop(
    device: torch.device, programs: int, rows: int, block: int, waves: int
) -> tuple[int, int]:
    """Return the number of parts that a loop over the rows is split into, and tiles per part.

    A loop is not split if all processors are busy or its parts would be short. It is not split
    either if three quarters of the processors are busy and `waves` is 1 or the parts would be few:
    then the kernel that joins the parts takes longer than splitting saves.
    """
    processors, tiles, least = (
        count_processors(device),
        -(-rows // block),
        max(MIN_ROWS_PER_PART // block, 1),
    )
    full = programs >= 3 * processors // 4 and (waves == 1 or tiles < 4 * least)
    if programs >= processors or full or tiles < 2 * least:
        return 1, tiles
    span = max(-(-tiles * programs // (processors * waves)), least)
    return -(-tiles // span), span
