"""HTTP responses for results and for errors."""

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
from qkv.serve.errors import RequestError
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
"""The status of each error. Any other `QkvError` gets 422: a valid request without an answer."""


def json_response(result: Any, status: int = 200, *, exactly: bool = False) -> Response:
    """Return a result as a JSON response.

    With `exactly`, cells of types that JSON lacks are tagged.
    """
    if exactly:
        return Response(encoding.dumps(result), status, media_type=encoding.CELLS_MEDIA_TYPE)
    try:
        text = orjson.dumps(result, _encode_default, orjson.OPT_PASSTHROUGH_DATETIME)
        if b"null" in text:  # orjson writes None as null, but also infinity and NaN
            text = orjson.dumps(
                to_jsonable(result, _widen_floats), option=orjson.OPT_SERIALIZE_NUMPY
            )
    except TypeError:  # an integer of more than 64 bits, or a lone surrogate
        text = json.dumps(to_jsonable(result), separators=(",", ":")).encode()
    return Response(text, status, media_type="application/json")


def _encode_default(x: Any) -> Any:
    """Convert an object of a type that orjson does not know."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        return orjson.Fragment(orjson.dumps(_widen_floats(x), option=orjson.OPT_SERIALIZE_NUMPY))
    return to_jsonable(x)


def _widen_floats(x: np.ndarray) -> np.ndarray:
    """Return floats as float64, so that orjson prints the digits that Python prints."""
    return np.asarray(x, dtype=np.float64 if x.dtype.kind == "f" else None, order="C")


def error_response(error: RequestError, *, exactly: bool = False) -> Response:
    """Return the response for an error. Its body is `{"error": message, …}`."""
    body = {"error": error.message, **error.data}
    response = json_response(body, error.status, exactly=exactly)
    response.headers.update(error.headers)
    return response


def to_request_error(error: Exception) -> RequestError | None:
    """Convert an expected error to a `RequestError`; return None for an unexpected one, a bug."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, KeyNotFoundError):
        return RequestError(
            404, str(error), kind="KeyNotFoundError", key=error.key, nearest=error.nearest_keys
        )
    if isinstance(error, QkvError):
        statuses = (status for kind, status in STATUS_BY_ERROR.items() if isinstance(error, kind))
        return RequestError(next(statuses, 422), _redact_message(error), kind=type(error).__name__)
    if isinstance(error, MemoryError):
        return RequestError(
            413, "the server does not have enough memory for this request: send a smaller one"
        )
    return None


def _redact_message(error: QkvError) -> str:
    """Return the message of an error without the server's paths and process ids."""
    if isinstance(error, StoreLockedError):
        return "another process is writing to this database: try again later"
    if not isinstance(error, OSError):
        return str(error)
    return re.sub(r"""(?<!\w)/[^:'"()]*/""", "", str(error))
