"""The error that handlers and checks raise to send an error response."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """An error response: its status, its message, and further fields of its JSON body."""

    def __init__(self, status: int, message: str, **data: Any):
        super().__init__(message)
        self.status, self.message, self.data = status, message, data
        self.headers: dict[str, str] = {}
