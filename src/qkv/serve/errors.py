"""The exception that becomes an error response."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """An error response: its status, its message, and further fields of its JSON body.

    Handlers and checks raise it.
    """

    def __init__(self, status: int, message: str, **data: Any):
        super().__init__(message)
        self.status, self.message, self.data = status, message, data
        self.headers: dict[str, str] = {}
