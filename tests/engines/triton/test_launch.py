"""How kernels are started: what is compiled anew, and what is launched again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton

from qkv.engines.triton.launching import launch, launch_replay, precompile, tile_choice, workspace
from qkv.engines.triton.tile_functions import tiles
from qkv.engines.triton.tile_functions.records import intern_constexprs
from tests.engines.triton import formulas

PLAIN = tile_choice.Tile(1, 1, 1, 4, 3)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, launched):
        self.launched = launched

    def run(self, *args):
        self.launched.append(args)


class Kernel:
    """Stands for a kernel of Triton's: notes what is compiled, and what is launched after that.

    It is not specialized on the last of its numbers.
    """

    def __init__(self, names=("x", "y", "scale", "stride", "step", "n", "F")):
        self.made, self.launched, self.__name__ = [], [], "kernel"
        self.params = [
            SimpleNamespace(do_not_specialize=name in tiles.UNSPECIALIZED_NAMES) for name in names
        ]

    def warmup(self, *args, grid, **facts):
        self.made.append(grid)
        return Compiled(self.launched)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "COMPILED_KERNELS", {})
    monkeypatch.setattr(launch_replay, "LAUNCH_LISTS", launch_replay.LaunchListCache())
    monkeypatch.setattr(launch, "current_stream", lambda index: "stream")
    return Kernel()


X = torch.zeros(64)
SAME = ((3, 2), (X, None), (0.5,), (16, 1, 7), {"A": 1}, PLAIN)


def test_buffers_of_a_dry_run_are_not_recorded():
    with workspace.record_launches() as notes:
        precompile.find_missing_kernels(lambda: workspace.allocate_buffer(X, (3,)), False)
        made = workspace.allocate_buffer(X, (2,))
    assert [x is made for x in notes.buffers] == [True]


def test_a_compiled_kernel_is_launched_again(kernel):
    for _ in range(2):
        launch.launch_kernel(kernel, *SAME)
    assert kernel.made == [(3, 2, 1)]
    head = (3, 2, 1, "stream", "function", "metadata", None, None, None)
    facts = intern_constexprs({"A": 1})
    assert kernel.launched == [(*head, X.data_ptr(), None, 0.5, 16, 1, 7, facts)] * 2


@pytest.mark.parametrize(
    ("at", "other"),
    [
        pytest.param(1, (X.half(), None), id="dtype"),
        pytest.param(1, (X[1:], None), id="alignment"),
        pytest.param(1, (X, X), id="absence"),
        pytest.param(3, (17, 1, 7), id="no multiple of 16"),
        pytest.param(3, (16, 2, 7), id="no 1"),
        pytest.param(3, (16, 16, 7), id="a multiple of 16 for a 1"),
        pytest.param(3, (16, 1, 2**31), id="64 bits"),
        pytest.param(4, {"A": 2}, id="fact"),
        pytest.param(5, PLAIN._replace(warps=8), id="tile"),
    ],
)
def test_what_triton_specialises_on_is_compiled_anew(kernel, at, other):
    launch.launch_kernel(kernel, *SAME)
    launch.launch_kernel(kernel, *SAME[:at], other, *SAME[at + 1 :])
    assert len(kernel.made) == len(kernel.launched) == 2


@pytest.mark.parametrize(
    ("at", "other"), [(0, 5), (2, (0.25,)), (3, (32, 1, 9)), (3, (16, 1, 1)), (3, (16, 1, 32))]
)
def test_what_it_does_not_is_launched_at_once(kernel, at, other):
    launch.launch_kernel(kernel, *SAME)
    launch.launch_kernel(kernel, *SAME[:at], other, *SAME[at + 1 :])
    assert (len(kernel.made), len(kernel.launched)) == (1, 2)


@pytest.mark.parametrize("weighting", ["softmax", "entmax"])
def test_a_call_of_a_known_kind_is_one_launch(kernel, monkeypatch, weighting):
    """In other places, but of no other shape or scale."""
    from qkv.engines.triton.forward import forward

    monkeypatch.setattr(forward, "pool_kernel", kernel)
    monkeypatch.setattr(launch, "count_processors", lambda device: 1)
    monkeypatch.setattr(launch, "is_current_device", lambda device: True)

    def attend(scale=0.3, **shape):
        inputs = formulas.arrays_of(**{"b": 1, "h": 2, "n": 32, "m": 48, "w": 16, "d": 16} | shape)
        rows = {} if weighting == "softmax" else {"alpha": 1.5, "row_a": torch.zeros(1, 2, 32)}
        out, lse = formulas.attend(**inputs, scale=scale, weighting=weighting, **rows)
        return out, lse, inputs

    attend(scale=0.7), attend()
    monkeypatch.setattr(forward, "launch_pool", None)
    out, lse, inputs = attend()
    assert (len(kernel.made), len(kernel.launched)) == (1, 3)
    other, before, last = kernel.launched
    assert len(before) == len(last)
    at = [x.data_ptr() for x in (*inputs.values(), out, lse)]
    arrays, scales = 9, 15  # after the launcher's own: `Arrays`, and last `Scales`
    assert set(at) <= {*last[arrays], *last[arrays + 1 : scales]}, "it reads these and writes those"
    assert last[scales:] == before[scales:] and last[scales] != other[scales]
    with pytest.raises(TypeError):
        attend(m=47)
    with pytest.raises(TypeError):
        attend(bias=True)


@pytest.mark.parametrize(
    ("programs", "rows", "waves", "result"),
    [
        (128, 966, 4, (1, 16)),  # three of four processors are busy, and the parts would be two
        (128, 4096, 4, (4, 16)),
        (64, 1024, 4, (2, 8)),
        (128, 4096, 1, (1, 64)),
        (132, 4096, 4, (1, 64)),
        (1, 4096, 4, (8, 8)),
    ],
)
def test_a_loop_is_split_where_processors_are_idle(monkeypatch, programs, rows, waves, result):
    monkeypatch.setattr(launch, "count_processors", lambda device: 132)
    assert launch.split_loop(torch.device("cpu"), programs, rows, 64, waves) == result


@pytest.mark.parametrize(
    ("by_tile", "laid", "expected"), [(False, False, 0), (True, False, 1), (False, True, 1)]
)
def test_descriptors_of_rows_and_of_masks_get_memory(kernel, monkeypatch, by_tile, laid, expected):
    """A thread that has launched nothing before has no allocator."""
    placed = []
    monkeypatch.setattr(launch, "set_descriptor_memory", placed.append)
    tile = PLAIN._replace(uses_descriptors=by_tile)
    arguments = ((3, 2), (X, None), (0.5,), (16, 1, 7), {"A": 1, "LAID": laid}, tile)
    launch.launch_kernel(kernel, *arguments)
    assert len(placed) == expected


@pytest.mark.parametrize("limit", [{}, {"maxnreg": 128}])
def test_a_limit_of_registers_that_ptxas_refuses_is_dropped(limit):
    class Kernel:
        def warmup(self, *args, grid, **facts):
            if "maxnreg" in facts or not limit:
                raise triton.runtime.errors.PTXASError("Insufficient registers (128)")
            return SimpleNamespace(run=None, facts=facts)

    arguments = (Kernel(), (1,), (None,), {"F": 1} | limit, torch.device("cpu"))
    if not limit:
        with pytest.raises(triton.runtime.errors.PTXASError):
            launch._compile_kernel(*arguments)
        return
    assert launch._compile_kernel(*arguments).facts == {"F": 1}
