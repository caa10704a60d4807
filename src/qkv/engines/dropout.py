"""Dropout by a hash of the seed and each pair's position.

A hash, unlike a random stream, allows an engine to compute blocks separately and in any order. So
all engines, frameworks and block sizes drop the same weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.errors import DtypeError
from qkv.frameworks import find_framework, get_framework, is_array
from qkv.frameworks.base import Framework
from qkv.util.types import Array, Block

MAX_INT31 = 0x7FFFFFFF


def _to_signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix_bits(x: Array) -> Array:
    """Return lowbias32(x), the integer hash of Chris Wellons; multiplications wrap by design."""
    xp = get_framework(x).xp

    def shift_right(x: Array, bits: int) -> Array:
        # The array API has only an arithmetic shift, so the copies of the sign bit are masked.
        return xp.bitwise_and(xp.floor_divide(x, 1 << bits), (1 << (32 - bits)) - 1)

    x = xp.bitwise_xor(x, shift_right(x, 16)) * _to_signed(0x7FEB352D)
    x = xp.bitwise_xor(x, shift_right(x, 15)) * _to_signed(0x846CA68B)
    return xp.bitwise_xor(x, shift_right(x, 16))


def hash_dropout_factors(like: Array, p: float, seed: Array, block: Block) -> Array:
    """Return 0 with probability p, else 1 / (1 − p), for each pair of the block."""
    fw = get_framework(like)
    xp = fw.xp
    with fw.use_own_settings():
        x = _mix_bits(xp.bitwise_xor(_mix_bits(seed), block.b))
        x = _mix_bits(xp.bitwise_xor(x, block.h))
        x = _mix_bits(xp.bitwise_xor(x, block.q))
        x = _mix_bits(xp.bitwise_xor(x, block.k))
        is_kept = xp.bitwise_and(x, MAX_INT31) >= min(int(p * (MAX_INT31 + 1)), MAX_INT31)
        return fw.astype(is_kept, fw.dtype_name(like)) * (1 / (1 - p) if p < 1 else 0.0)


def draw_seed(seed: Any, query: Array) -> Any:
    """Return the seed of one call: the next number of a generator, or the seed itself.

    The first call with a signature reads its seed twice. Drawing the number before that advances
    the generator only once.
    """
    if seed is None or isinstance(seed, int | np.integer) or is_array(seed):
        return seed
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(MAX_INT31))
    fw = find_framework(query)
    return seed if fw is None else fw.seed_from_generator(seed)


def seed_array(fw: Framework, seed: Any, like: Array) -> Array:
    """Return a seed as an int32 array (1, 1) on the device of `like`.

    `seed` is an integer, an array with one integer, a generator of the framework or of NumPy, or
    None. For None, the framework draws a seed.
    """
    if seed is None:
        seed = fw.draw_seed(like)
    elif isinstance(seed, np.random.Generator):
        seed = draw_seed(seed, like)
    elif not isinstance(seed, int | np.integer):
        seed = fw.seed_from_generator(seed)
    if is_array(seed):
        shape, kind = fw.static_shape(seed), fw.dtype_name(seed)
        if "int" not in kind or any(size not in (1, None) for size in shape):
            raise DtypeError(f"seed must be one integer, not {kind} of shape {shape}")
        return fw.to_device_of(fw.astype(fw.xp.reshape(seed, (1, 1)), "int32"), like)
    return fw.array_from_host([[_to_signed(int(seed) & 0xFFFFFFFF)]], like, "int32")
