"""Lists of tiles: they hold every tile with a pair that counts, the full ones first."""

from __future__ import annotations

import pytest
import torch

from qkv import masks
from qkv.attention import build_call
from qkv.engines import native
from qkv.engines import triton as engine
from qkv.engines.call import make_block
from qkv.engines.native import sdpa

if not (engine.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("no interpreter, no CUDA", allow_module_level=True)

from qkv.engines.triton.call_arrays import build_kernel_arrays
from qkv.engines.triton.launching.kernel_call import KernelCall
from qkv.engines.triton.pair_functions import tile_lists

pytestmark = pytest.mark.sample_of_module(8)

N, M = 45, 61
ROWS, COLS = 16, 8
RULES = {
    "documents": masks.documents(torch.arange(2 * N).reshape(2, N) // 9,
                                 torch.arange(2 * M).reshape(2, M) // 9),
    "causal custom": masks.custom(lambda b, h, q, k: (k // 8 == q // 16) | (h == k // 32))
    & masks.causal("bottom_right"),
    "window or global": masks.window(3) | masks.global_tokens(2),
    "layout": masks.blocks(torch.tensor([[1, 0], [1, 1]]), 31) & masks.lengths([61, 20]),
    "booleans": masks.array(torch.arange(N * M).reshape(N, M) % 300 < 160),
    "nothing": masks.strided(2) & ~masks.strided(2),
}  # fmt: skip


def list_tiles(mask, by_key, in_order=False):
    """Return the call, its lanes, and the lists as {(lane, tile): (full, partial)}."""
    q, k = torch.zeros(2, 2, N, 16), torch.zeros(2, 2, M, 16)
    call = build_call(q, k, k, "dot", "softmax", mask, 0.0, None, None)
    arrays, numbers, _ = build_kernel_arrays(call, False)
    lists = KernelCall(*arrays, *numbers).tile_lists
    assert lists.is_possible
    at, counts = lists.fill_lists(ROWS, COLS, by_key, in_order)
    own = -(-M // COLS) if by_key else -(-N // ROWS)
    result = {}
    for line, (full, partial) in enumerate(counts.tolist()):
        listed = at[line, : full + partial].tolist()
        result[divmod(line, own)] = listed[:full], listed[full:]
    return call, lists, result


@pytest.fixture(autouse=True)
def short_lists(monkeypatch):
    monkeypatch.setattr(tile_lists, "MIN_LISTED_LENGTH", 16)
    monkeypatch.setattr(tile_lists, "KINDS_PER_STEP", 2)  # several steps


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("by_key", [False, True])
def test_every_tile_is_full_or_partial_or_absent(name, by_key):
    call, lists, result = list_tiles(RULES[name], by_key)
    live = call.rule.allowed_pairs(make_block(call)).expand(2, 2, N, M)
    live = live[: lists.batches, : lists.heads].flatten(0, 1)
    for (lane, own), (full, partial) in result.items():
        for other in range(-(-N // ROWS) if by_key else -(-M // COLS)):
            i, j = (other, own) if by_key else (own, other)
            tile = live[lane, i * ROWS : (i + 1) * ROWS, j * COLS : (j + 1) * COLS]
            complete = tile.shape == (ROWS, COLS) and bool(tile.all())
            assert (other in full) == complete
            assert (other in partial) == (bool(tile.any()) and not complete)
        assert full == sorted(full) and partial == sorted(partial)


def test_a_list_in_order_has_no_full_tiles():
    _, _, result = list_tiles(RULES["documents"], False, in_order=True)
    assert any(partial for _, partial in result.values())
    assert all(not full and partial == sorted(partial) for full, partial in result.values())


def test_lanes_share_lists_unless_the_mask_differs():
    lanes = {name: list_tiles(rule, False)[1] for name, rule in RULES.items()}
    shapes = {name: (x.batches, x.heads) for name, x in lanes.items()}
    assert shapes == {
        "documents": (2, 1), "causal custom": (1, 2), "window or global": (1, 1), "layout": (2, 1),
        "booleans": (1, 1), "nothing": (1, 1),
    }  # fmt: skip


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("n", [1, 4, N])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal("bottom_right"),
        masks.custom(lambda b, h, q, k: (q + k) % 3 > 0),
        masks.lengths(torch.tensor([M - 3, 5])),
        torch.zeros(1, M),
        torch.ones(2, 1, 1, M, dtype=torch.bool),
    ],
    ids=["causal to the end", "custom", "lengths", "floats", "booleans"],
)
def test_masked_calls_are_chosen_without_reading_values(monkeypatch, mask, n, learns):
    def is_finite(*arrays):
        raise AssertionError("waits for the device")

    monkeypatch.setattr(sdpa, "is_finite", is_finite)
    monkeypatch.setattr(sdpa, "is_on_device", lambda call: True)
    q = torch.zeros(2, 64, n, 16, requires_grad=learns)
    k = torch.zeros(2, 64, M, 16)
    call = build_call(q, k, k, "scaled_dot", "softmax", mask, 0.0, None, None)
    is_faster = not learns or (call.bias is None and (n > 1 or call.rule.is_relative))
    assert native.shape_based_reason(call) == (
        "triton skips masked tiles and does not wait for the device" if is_faster else None
    )


def test_a_rule_of_any_size_is_evaluated_in_the_kernels(monkeypatch):
    monkeypatch.setattr(engine, "MAX_MASK_PAIRS", 100)
    q = torch.zeros(2, 2, N, 16)
    rule = masks.documents(torch.arange(N) // 9)
    call = build_call(q, q, q, "scaled_dot", "softmax", rule, 0.0, None, None)
    assert engine.unsupported_reason(call) is None
    tall = masks.custom(lambda b, h, q, k: q.expand(-1, k.shape[-1]).cumsum(-1) > 40)
    call = build_call(q, q, q, "scaled_dot", "softmax", tall, 0.0, None, None)
    assert "the kernels read at most 100 as an array" in engine.unsupported_reason(call)
    assert "read as an array: it uses aten.cumsum" in engine.describe(call)
