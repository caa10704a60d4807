"""What is chosen, read and refused, told to the logger "qkv" at DEBUG."""

from __future__ import annotations

import sys
from typing import Any


def warn_log(text: str, *values: Any) -> None:
    """Log what went wrong beside a call that did what it was asked for."""
    import logging

    logging.getLogger("qkv").warning(text, *values)


def debug_logger() -> Any:
    """The logger, where somebody listens to it; else None. Nobody does before logging is loaded.

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
