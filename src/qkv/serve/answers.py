"""Results and errors as HTTP answers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from qkv.database import AbsentKey
from qkv.database.faults import (
    Closed,
    Damaged,
    DuplicateKey,
    Locked,
    UnknownVersion,
    Unreadable,
    Unwritable,
)
from qkv.errors import MissingExtra, QkvError
from qkv.serve import wire
from qkv.serve.route import Refused
from qkv.told import jsonable

STATUS: dict[type[QkvError], int] = {
    AbsentKey: 404,
    UnknownVersion: 404,
    DuplicateKey: 409,
    Locked: 409,
    MissingExtra: 501,
    Damaged: 500,
    Closed: 503,
    Unreadable: 503,
    Unwritable: 503,
}
"""What an error of ours is over HTTP; any other is 422: of the right form, but without meaning."""


def written(found: Any, status: int = 200, *, exactly: bool = False) -> Response:
    """A result as JSON."""
    if exactly:
        return Response(wire.dumps(found), status, media_type=wire.CELLS)
    try:
        text = orjson.dumps(found, _other, orjson.OPT_PASSTHROUGH_DATETIME)
        if b"null" in text:  # which is how orjson writes an infinity, too
            text = orjson.dumps(jsonable(found, _wide), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # an integer of more than 64 bits, half of a surrogate pair
        text = json.dumps(jsonable(found), separators=(",", ":")).encode()
    return Response(text, status, media_type="application/json")


def _other(x: Any) -> Any:
    """What orjson does not know; of arrays their JSON."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        return orjson.Fragment(orjson.dumps(_wide(x), option=orjson.OPT_SERIALIZE_NUMPY))
    return jsonable(x)


def _wide(x: np.ndarray) -> np.ndarray:
    """The digits that Python's own numbers have."""
    return np.asarray(x, dtype=np.float64 if x.dtype.kind == "f" else None, order="C")


def refusal(refused: Refused, *, exactly: bool = False) -> Response:
    told = {"error": refused.message, **refused.data}
    answer = written(told, refused.status, exactly=exactly)
    answer.headers.update(refused.headers)
    return answer


def refused_by(error: Exception) -> Refused | None:
    """An error of ours, or of the system, as a refusal; None for a bug."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, AbsentKey):
        return Refused(404, str(error), kind="AbsentKey", key=error.key, nearest=error.nearest)
    if isinstance(error, QkvError):
        found = (status for kind, status in STATUS.items() if isinstance(error, kind))
        return Refused(next(found, 422), _public(error), kind=type(error).__name__)
    if isinstance(error, MemoryError):
        return Refused(413, "there is not enough memory for this: ask for less at a time")
    return None


def _public(error: QkvError) -> str:
    """What an error says but where files lie and which process has them."""
    if isinstance(error, Locked):
        return "another process writes to this database: try again later"
    if not isinstance(error, OSError):
        return str(error)
    return re.sub(r"""(?<!\w)/[^:'"()]*/""", "", str(error))
