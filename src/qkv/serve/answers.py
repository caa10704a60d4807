"""Results and errors as HTTP answers."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from qkv.answer import jsonable
from qkv.database import AbsentKey
from qkv.database.faults import Closed, Damaged, DuplicateKey, Locked, UnknownVersion
from qkv.errors import MissingExtra, QkvError
from qkv.serve.route import Refused

STATUS: dict[type[QkvError], int] = {
    AbsentKey: 404,
    UnknownVersion: 404,
    DuplicateKey: 409,
    Locked: 409,
    MissingExtra: 501,
    Damaged: 500,
    Closed: 503,
}
"""What an error of ours is over HTTP; any other is 422: of the right form, but without meaning."""


def written(found: Any, status: int = 200) -> Response:
    """A result as JSON."""
    try:
        text = json.dumps(found, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(jsonable(found), separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def refusal(refused: Refused) -> Response:
    answer = written({"error": refused.message, **refused.data}, refused.status)
    answer.headers.update(refused.headers)
    return answer


def refused_by(error: Exception) -> Refused | None:
    """An error of ours, or of the system, as a refusal; None for a bug."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, AbsentKey):
        return Refused(404, str(error), key=jsonable(error.key), nearest=jsonable(error.nearest))
    if isinstance(error, QkvError):
        found = (status for kind, status in STATUS.items() if isinstance(error, kind))
        return Refused(next(found, 422), str(error))
    if isinstance(error, MemoryError):
        return Refused(413, "there is not enough memory for this: ask for less at a time")
    return None
