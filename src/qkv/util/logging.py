"""Log to the logger "qkv": chosen engines and what was read at DEBUG, problems at WARNING."""

from __future__ import annotations

import sys
from typing import Any


def log_warning(text: str, *values: Any) -> None:
    """Log a problem that did not prevent the call from succeeding."""
    import logging

    logging.getLogger("qkv").warning(text, *values)


def debug_logger() -> Any:
    """Return the logger if DEBUG is enabled, otherwise None. This never imports `logging`.

    >>> import logging
    >>> logging.getLogger("qkv").setLevel(logging.DEBUG)
    >>> debug_logger().name
    'qkv'
    >>> logging.getLogger("qkv").setLevel(logging.NOTSET)
    >>> debug_logger()
    """
    logging = sys.modules.get("logging")
    if logging is None:
        return None
    logger = logging.getLogger("qkv")
    return logger if logger.isEnabledFor(logging.DEBUG) else None
