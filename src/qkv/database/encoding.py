"""Keys turned into vectors: of new rows, and of all rows anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.database.schema import Schema
from qkv.database.view import View
from qkv.types import Progress

if TYPE_CHECKING:
    from qkv.database.encoders import Encoder

ENCODED = 8192
"""Keys that are encoded together, between two reports of progress."""


def fitted(wish: Encoder, keys: Any) -> tuple[Encoder, dict[str, Any]]:
    """The encoder fitted to the keys, and what the settings say: with twice how many it is fitted
    anew."""
    made = wish.fit(keys)
    learned = bool(made.arrays()) or made.settings() != wish.settings()
    return made, told(made, len(keys) if learned else wish.begins // 2)


def told(encoder: Encoder, keys: int) -> dict[str, Any]:
    """An encoder that was fitted to so many keys, as the settings of a database tell of it."""
    return {"encoder": encoder.settings(), "fitted": keys}


def encoded(encoder: Encoder, keys: Any, progress: Progress | None = None) -> np.ndarray:
    """The vectors of some keys, (m, width)."""
    if progress is None or len(keys) <= ENCODED:
        return np.asarray(encoder.encode(keys))
    out = []
    for start in range(0, len(keys), ENCODED):
        out.append(np.asarray(encoder.encode(keys[start : start + ENCODED])))
        progress(min(start + ENCODED, len(keys)), len(keys))
    return np.concatenate(out)


def keeps_keys(encoder: Encoder, schema: Schema) -> bool:
    """Whether keys that are vectors are kept beside what the encoder makes of them."""
    return schema.key_kind == "vector" and encoder.kind != "arrays"


def anew(
    view: View, encoder: Encoder, keys: Any, progress: Progress | None
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The ids and tensors of all rows of a view, block by block, with other vectors of its keys."""
    # All that live, those among them whose file is lost.
    ids, raw = view.snapshot.ids(), keeps_keys(encoder, view.schema)
    for start in range(0, len(ids), ENCODED):
        some, fresh = ids[start : start + ENCODED], keys[start : start + ENCODED]
        tensors = {"code": np.asarray(encoder.encode(fresh))}
        if raw:
            tensors["key"] = fresh
        tensors |= view.beside(some)
        if progress is not None:
            progress(start + len(some), len(ids))
        yield some, tensors
