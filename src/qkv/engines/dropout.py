"""Which weights are dropped: a hash of the seed and of each pair's position.

A hash, not a stream of random numbers: any block can be made by itself, in any order, and comes
out the same in every engine, framework and block size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.arrays import framework_of, is_array, of
from qkv.arrays.base import Framework
from qkv.errors import DtypeError
from qkv.types import Array, Block

BITS = 0x7FFFFFFF


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix(x: Array) -> Array:
    """Wellons' lowbias32: every bit of x reaches every bit of the result. Wraps by design."""
    xp = of(x).xp

    def shifted(x: Array, bits: int) -> Array:
        # The standard has only an arithmetic shift, so the sign's copies are cut off.
        return xp.bitwise_and(xp.floor_divide(x, 1 << bits), (1 << (32 - bits)) - 1)

    x = xp.bitwise_xor(x, shifted(x, 16)) * _signed(0x7FEB352D)
    x = xp.bitwise_xor(x, shifted(x, 15)) * _signed(0x846CA68B)
    return xp.bitwise_xor(x, shifted(x, 16))


def keep_factor(like: Array, p: float, seed: Array, block: Block) -> Array:
    """0 with probability p, else 1 / (1 − p), for each pair of the block."""
    fw = of(like)
    xp = fw.xp
    with fw.quiet():
        x = _mix(xp.bitwise_xor(_mix(seed), block.b))
        x = _mix(xp.bitwise_xor(x, block.h))
        x = _mix(xp.bitwise_xor(x, block.q))
        x = _mix(xp.bitwise_xor(x, block.k))
        kept = xp.bitwise_and(x, BITS) >= min(int(p * (BITS + 1)), BITS)
        return fw.astype(kept, fw.dtype(like)) * (1 / (1 - p) if p < 1 else 0.0)


def draw_seed(seed: Any, query: Array) -> Any:
    """The seed of one call, drawn once: a generator's next number, any other seed as it is.

    A first call of its kind looks at its arguments twice, and must not advance a generator twice.
    """
    if seed is None or isinstance(seed, int | np.integer) or is_array(seed):
        return seed
    if isinstance(seed, np.random.Generator):
        return int(seed.integers(BITS))
    fw = framework_of(query)
    return seed if fw is None else fw.seed_from(seed)


def seed_array(fw: Framework, seed: Any, like: Array) -> Array:
    """A seed or a generator of the framework or of NumPy, as one int32 array (1, 1) on the device
    of `like`."""
    if seed is None:
        seed = fw.fresh_seed(like)
    elif isinstance(seed, np.random.Generator):
        seed = draw_seed(seed, like)
    elif not isinstance(seed, int | np.integer):
        seed = fw.seed_from(seed)
    if is_array(seed):
        shape, kind = fw.shape(seed), fw.dtype(seed)
        if "int" not in kind or any(size not in (1, None) for size in shape):
            raise DtypeError(f"seed must be one whole number, not {kind} of shape {shape}")
        return fw.beside(fw.astype(fw.xp.reshape(seed, (1, 1)), "int32"), like)
    return fw.constant([[_signed(int(seed) & 0xFFFFFFFF)]], like, "int32")
