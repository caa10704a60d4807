"""8-bit codes of vectors, with bounds on the rounding errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qkv.errors import unknown_name_error
from qkv.frameworks import threads
from qkv.frameworks.lazy import LazyArray, lazy_arrays
from qkv.frameworks.norms import residual_spread, row_norms
from qkv.frameworks.stored_rows import QuantizedKeys

VECTORS_PER_BLOCK = 4096
"""Vectors whose residuals share one bound on their joint spread."""

VECTORS_PER_STRIP = 256
"""Vectors that are rounded at a time; they fit into a core's cache."""

MIN_CODED_WIDTH = 32
"""The smallest width for which codes are stored; shorter vectors are as fast to read."""

PRECISIONS = ("float32", "float16", "int8")
"""The types that keys' vectors can be stored as."""

MIN_SCALE = 1e-37
"""The smallest scale whose inverse is a finite float32; smaller vectors are rounded to 0."""

BOUND_NAMES = ("scale", "residual", "norm", "spread")

BOUND_TENSORS = ("near.bounds", "near.block")
"""The tensors with the bounds of codes."""


class VectorPrecision(NamedTuple):
    """How the vectors of keys are stored.

    `is_int8`: only as 8-bit codes. `dtype`: the requested type, None to keep the encoder's.
    `has_codes`: with 8-bit codes and their error bounds next to the vectors.
    """

    is_int8: bool
    dtype: str | None = None
    has_codes: bool = False


def check_precision(precision: str | None) -> str | None:
    """Return the precision, after a check of its name."""
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise unknown_name_error("precision", precision, PRECISIONS)
    return precision


def quantize_int8(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, int8 (m, d), and scales, float32 (m,), of vectors (m, d).

    code · scale equals the vector up to 1/254 of its largest number.

    >>> code, scale = quantize_int8(np.array([[0.5, -1.27]]))
    >>> code.tolist(), f"{scale[0]:.2f}"
    ([[50, -127]], '0.01')
    """
    # The same rounding as in `quantize_with_bounds`, whose bounds are for these codes.
    code, scale = _round_to_int8(vectors.astype(np.result_type(vectors, np.float32), copy=False))
    return code.astype(np.int8), scale


def _round_to_int8(
    vectors: np.ndarray, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, in the dtype of the vectors, and the scales."""
    top = np.maximum(vectors.max(axis=1, initial=0.0), -vectors.min(axis=1, initial=0.0))
    scale = (top / 127).astype(np.float32)
    sound = np.isfinite(scale) & (scale > MIN_SCALE)
    code = np.multiply(vectors, (1 / np.where(sound, scale, 1))[:, None], out=out)
    if not sound.all():
        code[~sound] = 0
    return np.rint(code, out=code), scale


def quantize_with_bounds(
    vectors: np.ndarray, first: int, with_codes: bool = True
) -> dict[str, np.ndarray]:
    """Return the codes of vectors (m, d) and their bounds as tensors, which `read_codes` reads.

    The tensors are `near` (m, d), `near.bounds` (m, 4) and `near.block` (m,). Row ids start at
    `first`. With `with_codes=False`, `near` is left out, since the vectors are stored as codes.

    >>> made = quantize_with_bounds(np.array([[0.5, -1.27]], np.float32), 7)
    >>> made["near"].tolist(), made["near.block"].tolist()
    ([[50, -127]], [7])
    """
    vectors = np.asarray(vectors)
    count, kind = len(vectors), np.result_type(vectors.dtype, np.float32)
    code, block = np.empty(vectors.shape, np.int8), np.empty(count, np.uint32)
    bounds = np.empty((count, len(BOUND_NAMES)), np.float32)

    def quantize_block(start: int) -> None:
        at = slice(start, start + VECTORS_PER_BLOCK)
        left = np.empty(vectors[at].shape, kind)
        norm, residual = np.empty(len(left)), np.empty(len(left))
        with np.errstate(all="ignore"):
            for begin in range(0, len(left), VECTORS_PER_STRIP):
                strip = slice(begin, begin + VECTORS_PER_STRIP)
                here = slice(
                    start + begin, min(start + begin + VECTORS_PER_STRIP, start + len(left))
                )
                key, rounded = vectors[here].astype(kind, copy=False), left[strip]
                code[here], bounds[here, 0] = _round_to_int8(key, rounded)
                rounded *= bounds[here, :1]
                np.subtract(key, rounded, out=rounded)
                # A bound on the residual may be loose, but scores need ‖k‖ in full precision.
                wide = key.astype(float, copy=False)
                norm[strip] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
                residual[strip] = row_norms(rounded)
            # Rounding of the product with the scale and of the difference.
            lost = 2 * np.finfo(kind).eps * norm
            together = residual_spread(left, residual.max(initial=0.0)) + np.sqrt(lost @ lost)
            bounds[at, 1], bounds[at, 2] = _round_up(residual + lost), norm
            bounds[at, 3] = _round_up(np.asarray(together, np.float32))
        block[at] = (first + start) % 2**32

    if count <= VECTORS_PER_BLOCK:
        quantize_block(0)
    else:
        with threads.single_threaded_blas():
            threads.map_parallel(quantize_block, range(0, count, VECTORS_PER_BLOCK))
    made = dict(zip(BOUND_TENSORS, (bounds, block), strict=True))
    return {"near": code, **made} if with_codes else made


def quantize_lazily(vectors: np.ndarray, first: int) -> dict[str, LazyArray]:
    """Return the tensors of `quantize_with_bounds`, computed by the threads that write them."""
    return lazy_arrays(
        lambda start, stop: quantize_with_bounds(vectors[start:stop], first + start), len(vectors)
    )


def read_codes(tensors: Any) -> QuantizedKeys | None:
    """Return the quantized keys among the tensors of rows, or None if keys are not quantized."""
    bounds = tensors.get("near.bounds")
    if bounds is not None:
        code = tensors["near"] if "near" in tensors else tensors["code"]
        scale, residual, norm, spread = bounds.T
        return QuantizedKeys(code, scale, residual, norm, spread, tensors["near.block"])
    if "scale" in tensors and tensors["code"].dtype == np.int8:
        return QuantizedKeys(tensors["code"], tensors["scale"])
    return None


def _round_up(x: np.ndarray) -> np.ndarray:
    """Return an upper bound of the numbers that were rounded to x."""
    return np.nextafter(x * np.float32(1 + 1e-6), np.float32(np.inf))
