"""Readers of tables from files, databases and data frames."""

from __future__ import annotations

from qkv.database.sources.dispatch import read
from qkv.database.sources.formats import SourceFormat, SourceRequest, register_source
from qkv.database.sources.frames import from_dataset, from_frame
from qkv.database.sources.table import SourceError, Table
from qkv.database.sources.type_inference import MISSING_WORDS

__all__ = [
    "read",
    "from_dataset",
    "from_frame",
    "register_source",
    "SourceFormat",
    "SourceRequest",
    "Table",
    "SourceError",
    "MISSING_WORDS",
]
