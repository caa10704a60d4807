"""Results and errors as HTTP answers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from qkv.database import KeyNotFoundError
from qkv.database.errors import (
    DuplicateKeyError,
    StoreClosedError,
    StoreDamagedError,
    StoreLockedError,
    StoreUnreadableError,
    StoreUnwritableError,
    VersionNotFoundError,
)
from qkv.errors import MissingExtraError, QkvError
from qkv.serve import encoding
from qkv.serve.route import RequestError
from qkv.util.formatting import to_jsonable

STATUS_BY_ERROR: dict[type[QkvError], int] = {
    KeyNotFoundError: 404,
    VersionNotFoundError: 404,
    DuplicateKeyError: 409,
    StoreLockedError: 409,
    MissingExtraError: 501,
    StoreDamagedError: 500,
    StoreClosedError: 503,
    StoreUnreadableError: 503,
    StoreUnwritableError: 503,
}
"""What an error of ours is over HTTP; any other is 422: of the right form, but without meaning."""


def json_response(found: Any, status: int = 200, *, exactly: bool = False) -> Response:
    """A result as JSON."""
    if exactly:
        return Response(encoding.dumps(found), status, media_type=encoding.CELLS_MEDIA_TYPE)
    try:
        text = orjson.dumps(found, _encode_default, orjson.OPT_PASSTHROUGH_DATETIME)
        if b"null" in text:  # which is how orjson writes an infinity, too
            text = orjson.dumps(
                to_jsonable(found, _widen_floats), option=orjson.OPT_SERIALIZE_NUMPY
            )
    except TypeError:  # an integer of more than 64 bits, half of a surrogate pair
        text = json.dumps(to_jsonable(found), separators=(",", ":")).encode()
    return Response(text, status, media_type="application/json")


def _encode_default(x: Any) -> Any:
    """What orjson does not know; of arrays their JSON."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        return orjson.Fragment(orjson.dumps(_widen_floats(x), option=orjson.OPT_SERIALIZE_NUMPY))
    return to_jsonable(x)


def _widen_floats(x: np.ndarray) -> np.ndarray:
    """The digits that Python's own numbers have."""
    return np.asarray(x, dtype=np.float64 if x.dtype.kind == "f" else None, order="C")


def error_response(refused: RequestError, *, exactly: bool = False) -> Response:
    told = {"error": refused.message, **refused.data}
    answer = json_response(told, refused.status, exactly=exactly)
    answer.headers.update(refused.headers)
    return answer


def to_request_error(error: Exception) -> RequestError | None:
    """An error of ours, or of the system, as a refusal; None for a bug."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, KeyNotFoundError):
        return RequestError(
            404, str(error), kind="KeyNotFoundError", key=error.key, nearest=error.nearest_keys
        )
    if isinstance(error, QkvError):
        found = (status for kind, status in STATUS_BY_ERROR.items() if isinstance(error, kind))
        return RequestError(next(found, 422), _redact_message(error), kind=type(error).__name__)
    if isinstance(error, MemoryError):
        return RequestError(413, "there is not enough memory for this: ask for less at a time")
    return None


def _redact_message(error: QkvError) -> str:
    """What an error says but where files lie and which process has them."""
    if isinstance(error, StoreLockedError):
        return "another process writes to this database: try again later"
    if not isinstance(error, OSError):
        return str(error)
    return re.sub(r"""(?<!\w)/[^:'"()]*/""", "", str(error))
