"""Size limits of a store. They are not part of the file format and may change."""

from __future__ import annotations

MAX_BUFFERED_ROWS = 4096
MAX_BUFFERED_BYTES = 8 << 20
"""New rows stay in the catalog until they reach either limit; then they become a segment."""

MIN_BUNDLE_ROWS = 2**14
"""A commit with at least this many rows writes their records to a bundle file."""

MAX_BUNDLE_BYTES = 1 << 30
"""Larger bundles are not merged with others."""

MAX_SEGMENT_BYTES = 256 << 20
"""Maximum size of one segment file."""

SEGMENTS_PER_MERGE = 16
"""This many consecutive small segments are merged into one. A segment is small below
MAX_SEGMENT_BYTES / SEGMENTS_PER_MERGE."""

ROWS_PER_PAGE = 2048
"""Rows per query to the catalog."""

MAX_CACHED_ROWS, MAX_CACHED_ROW_CHARACTERS = 4096, 1024
"""How many looked-up rows a reader caches, and the longest record that it caches."""

MAX_UNMAPPED_BYTES = 8 << 20
"""Files up to this size are read into memory instead of mapped. That needs no file descriptor, and
later changes to the file have no effect."""

MAX_RESIDENT_BYTES = 2 << 30
"""Bytes of mapped tensors that may stay resident after a scan."""

WINDOW_BYTES = 64 << 20
"""Bytes per read when a scan exceeds MAX_RESIDENT_BYTES."""
