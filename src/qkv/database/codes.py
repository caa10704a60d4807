"""8-bit codes of vectors, and how far each vector may lie from its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.arrays.rows import Near
from qkv.errors import unknown

BLOCK = 4096
"""Vectors whose residuals are bounded together."""

NARROW = 32
"""Numbers in a vector from which codes are kept beside it: fewer are read as fast as they are."""

PRECISIONS = ("float32", "float16", "int8")
"""The numbers that keys' vectors can be kept as."""

LEAST = 1e-37
"""The least scale whose inverse float32 has: smaller numbers are rounded to 0."""

BOUNDS = ("scale", "residual", "norm", "spread")


def checked(precision: str | None) -> str | None:
    """The precision that is asked for, refused where there is none of that name."""
    if precision is not None and precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    return precision


def in_8_bits(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(m, d) → int8 (m, d) and float32 (m,), whose product is the vectors to 1/254 of the largest
    number of each.

    >>> code, scale = in_8_bits(np.array([[0.5, -1.27]]))
    >>> code.tolist(), f"{scale[0]:.2f}"
    ([[50, -127]], '0.01')
    """
    top = np.maximum(vectors.max(axis=1, initial=0.0), -vectors.min(axis=1, initial=0.0))
    scale = (top / 127).astype(np.float32)
    sound = np.isfinite(scale) & (scale > LEAST)
    code = vectors * (1 / np.where(sound, scale, 1))[:, None]
    code[~sound] = 0
    return np.rint(code, out=code).astype(np.int8), scale


def near(vectors: np.ndarray, first: int, keep: bool = True) -> dict[str, np.ndarray]:
    """The codes of vectors (m, d), of rows with ids from `first` on, as tensors: `near` (m, d),
    `near.bounds` (m, 4) and `near.block` (m,), which `found` reads. Without `keep`, the bounds
    alone: the vectors are kept as codes themselves.

    >>> made = near(np.array([[0.5, -1.27]], np.float32), 7)
    >>> made["near"].tolist(), made["near.block"].tolist()
    ([[50, -127]], [7])
    """
    code, scale = in_8_bits(np.asarray(vectors))
    bounds, block = np.empty((len(code), len(BOUNDS)), np.float32), np.empty(len(code), np.uint32)
    with np.errstate(all="ignore"):
        for start in range(0, len(code), BLOCK):
            at = slice(start, start + BLOCK)
            key = vectors[at].astype(float)
            left = key - code[at] * scale[at, None].astype(float)
            norms = (np.sqrt(np.einsum("ij,ij->i", x, x)) for x in (left, key))
            bounds[at, 0] = scale[at]
            bounds[at, 1], bounds[at, 2] = (norm.astype(np.float32) for norm in norms)
            bounds[at, 1] = _up(bounds[at, 1])
            bounds[at, 3] = _up(np.asarray(_spread(left), np.float32))
            block[at] = (first + start) % 2**32
    made = {"near.bounds": bounds, "near.block": block}
    return {"near": code, **made} if keep else made


def found(tensors: Any) -> Near | None:
    """The codes among the tensors of some rows; None where they have none."""
    bounds = tensors.get("near.bounds")
    if bounds is not None:
        code = tensors["near"] if "near" in tensors else tensors["code"]
        scale, residual, norm, spread = bounds.T
        return Near(code, scale, residual, norm, spread, tensors["near.block"])
    if "scale" in tensors and tensors["code"].dtype == np.int8:
        return Near(tensors["code"], tensors["scale"])
    return None


def _spread(left: np.ndarray) -> float:
    """√λ, of the largest λ of Σ r rᵀ over residuals (m, d); rounded up by more than it may lose."""
    rows, width = left.shape
    size = float(np.abs(left).max(initial=0.0))
    if not size or not np.isfinite(size):
        return size
    left = left / size
    gram = left.T @ left if rows > width else left @ left.T
    try:
        most = float(np.linalg.eigvalsh(gram)[-1])
    except np.linalg.LinAlgError:
        most = np.inf
    whole = float(np.trace(gram)) * (1 + 1e-9)
    return float(size * np.sqrt(min(most * (1 + 1e-6) + 1e-9 * whole, whole)))


def _up(x: np.ndarray) -> np.ndarray:
    """Not less than the number that was rounded to x."""
    return np.nextafter(x * np.float32(1 + 1e-6), np.float32(np.inf))
