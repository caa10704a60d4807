"""Codes of vectors in 8 bits, with bounds on their rounding errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qkv.errors import unknown_name_error
from qkv.frameworks import threads
from qkv.frameworks.lazy import LazyArray, lazy_arrays
from qkv.frameworks.norms import residual_spread, row_norms
from qkv.frameworks.stored_rows import QuantizedKeys

VECTORS_PER_BLOCK = 4096
"""The number of vectors that share a bound on how much their residuals point the same way."""

VECTORS_PER_STRIP = 256
"""The number of vectors that are rounded at a time, so that they fit a core's cache."""

MIN_CODED_WIDTH = 32
"""Codes are stored for vectors of at least this width. Shorter vectors are read as fast."""

PRECISIONS = ("float32", "float16", "int8")
"""The types with which the vectors of keys can be stored."""

MIN_SCALE = 1e-37
"""The smallest scale whose inverse is a finite float32. Smaller vectors are rounded to 0."""

BOUND_NAMES = ("scale", "residual", "norm", "spread")

BOUND_TENSORS = ("near.bounds", "near.block")
"""The names of the tensors with the error bounds of codes."""


class VectorPrecision(NamedTuple):
    """How the vectors of keys are stored.

    `is_int8`: the vectors are stored only as 8-bit codes. `dtype`: the requested type; None keeps
    the type of the encoder. `has_codes`: 8-bit codes and their error bounds are stored too.
    """

    is_int8: bool
    dtype: str | None = None
    has_codes: bool = False


def check_precision(precision: str | None) -> str | None:
    """Return the precision; raise an error if there is no such precision."""
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise unknown_name_error("precision", precision, PRECISIONS)
    return precision


def quantize_int8(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (m, d) int8 and scales (m,) float32 of vectors (m, d).

    code · scale differs from the vector by at most 1/254 of its largest number.

    >>> code, scale = quantize_int8(np.array([[0.5, -1.27]]))
    >>> code.tolist(), f"{scale[0]:.2f}"
    ([[50, -127]], '0.01')
    """
    # `quantize_with_bounds` must round in the same way, because its bounds are for these codes.
    code, scale = _round_to_int8(vectors.astype(np.result_type(vectors, np.float32), copy=False))
    return code.astype(np.int8), scale


def _round_to_int8(
    vectors: np.ndarray, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, in the dtype of the vectors, and the scales.

    The codes are written to `out` if it is set.
    """
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
    """Return the codes of vectors (m, d) and their error bounds as tensors for `read_codes`.

    The tensors are `near` (m, d), `near.bounds` (m, 4) and `near.block` (m,). The row ids start at
    `first`. With `keep=False`, `near` is left out, because the vectors themselves are stored as
    codes.

    >>> made = quantize_with_bounds(np.array([[0.5, -1.27]], np.float32), 7)
    >>> made["near"].tolist(), made["near.block"].tolist()
    ([[50, -127]], [7])
    """
    vectors = np.asarray(vectors)
    count, kind = len(vectors), np.result_type(vectors.dtype, np.float32)
    code, block = np.empty(vectors.shape, np.int8), np.empty(count, np.uint32)
    bounds = np.empty((count, len(BOUND_NAMES)), np.float32)

    def quantize_block(start: int) -> None:
        block_rows = slice(start, start + VECTORS_PER_BLOCK)
        residuals = np.empty(vectors[block_rows].shape, kind)
        norm, residual = np.empty(len(residuals)), np.empty(len(residuals))
        with np.errstate(all="ignore"):
            for begin in range(0, len(residuals), VECTORS_PER_STRIP):
                strip = slice(begin, begin + VECTORS_PER_STRIP)
                rows = slice(
                    start + begin, min(start + begin + VECTORS_PER_STRIP, start + len(residuals))
                )
                key, rounded = vectors[rows].astype(kind, copy=False), residuals[strip]
                code[rows], bounds[rows, 0] = _round_to_int8(key, rounded)
                rounded *= bounds[rows, :1]
                np.subtract(key, rounded, out=rounded)
                # The bound on the residual may be loose, but scores need ‖k‖ in full precision.
                wide = key.astype(float, copy=False)
                norm[strip] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
                residual[strip] = row_norms(rounded)
            # Add the rounding errors of the product with the scale, and of the difference.
            lost = 2 * np.finfo(kind).eps * norm
            together = residual_spread(residuals, residual.max(initial=0.0)) + np.sqrt(lost @ lost)
            bounds[block_rows, 1], bounds[block_rows, 2] = _round_up(residual + lost), norm
            bounds[block_rows, 3] = _round_up(np.asarray(together, np.float32))
        block[block_rows] = (first + start) % 2**32

    if count <= VECTORS_PER_BLOCK:
        quantize_block(0)
    else:
        with threads.single_threaded_blas():
            threads.map_parallel(quantize_block, range(0, count, VECTORS_PER_BLOCK))
    made = dict(zip(BOUND_TENSORS, (bounds, block), strict=True))
    return {"near": code, **made} if with_codes else made


def quantize_lazily(vectors: np.ndarray, first: int) -> dict[str, LazyArray]:
    """Return the tensors of `quantize_with_bounds`. The threads that write them compute them."""
    return lazy_arrays(
        lambda start, stop: quantize_with_bounds(vectors[start:stop], first + start), len(vectors)
    )


def read_codes(tensors: Any) -> QuantizedKeys | None:
    """Return the codes and bounds among the tensors of rows; None if the rows have no codes."""
    bounds = tensors.get("near.bounds")
    if bounds is not None:
        code = tensors["near"] if "near" in tensors else tensors["code"]
        scale, residual, norm, spread = bounds.T
        return QuantizedKeys(code, scale, residual, norm, spread, tensors["near.block"])
    if "scale" in tensors and tensors["code"].dtype == np.int8:
        return QuantizedKeys(tensors["code"], tensors["scale"])
    return None


def _round_up(x: np.ndarray) -> np.ndarray:
    """Return upper bounds of numbers that were rounded to x."""
    return np.nextafter(x * np.float32(1 + 1e-6), np.float32(np.inf))
