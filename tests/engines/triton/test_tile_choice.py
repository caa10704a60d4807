"""The tile of each pass: its size for every width, and the next smaller one."""

import pytest

pytest.importorskip("triton")
from qkv.engines.triton.launching import tile_choice
from qkv.errors import EngineError


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["pool", "split", "to_keys", "to_queries"])
def test_every_width_has_a_tile(name, size, monkeypatch):
    monkeypatch.setattr(tile_choice, "TILE_OVERRIDES", {})
    for w in (16, 64, 128, 256, 512, 4096):
        for d in (1, 64, 128, 256, 512):
            for plain in (True, False):
                tile = tile_choice.choose_tile(name, w, d, size, 64, plain, False)
                assert min(tile[:3]) >= 16
                assert tile.cols <= 256, "pieces of keys begin at multiples of 256"


def test_a_device_that_is_too_small_for_every_tile_is_an_error():
    tile = tile_choice.Tile(128, 128, 64, 8, 3)
    with pytest.raises(EngineError, match="no tile fits"):
        for _ in range(20):
            tile = tile_choice.shrink_tile(tile)


def test_a_gate_takes_a_smaller_tile_of_keys():
    sizes = (64, 64, 2, 4096, False, False)
    assert (
        tile_choice.choose_tile("to_keys", *sizes, gated=True).rows
        < tile_choice.choose_tile("to_keys", *sizes).rows
    )


def test_wide_values_get_all_registers_in_a_pass_by_columns():
    assert tile_choice.choose_column_tile("pool", 429, 128).registers == 128
    assert tile_choice.choose_column_tile("pool", 429, 200).registers is None
