"""The sizes that a store works with. They may change from one release to the next."""

from __future__ import annotations

MAX_BUFFERED_ROWS = 4096
MAX_BUFFERED_BYTES = 8 << 20
"""New rows rest in the catalogue until there are so many, or so many bytes of them."""

MIN_BUNDLE_ROWS = 2**14
"""Rows of one commit from which their records make a bundle."""

MAX_BUNDLE_BYTES = 1 << 30
"""A bundle that is larger is not joined with others."""

MAX_SEGMENT_BYTES = 256 << 20
"""A segment is cut at this size."""

SEGMENTS_PER_MERGE = 16
"""So many small segments in a row become one; small is a 1/SEGMENTS_PER_MERGE of the size above."""

ROWS_PER_PAGE = 2048
"""Rows that are fetched from the catalogue at a time."""

MAX_CACHED_ROWS, MAX_CACHED_ROW_CHARACTERS = 4096, 1024
"""Rows that a reader remembers, and the longest text of such a row."""

MAX_UNMAPPED_BYTES = 8 << 20
"""Bytes up to which a segment is read whole and not mapped: that takes no descriptor, and whatever
happens to the file later does not matter."""

MAX_RESIDENT_BYTES = 2 << 30
"""Bytes of mapped tensors that may stay in memory after a scan."""

WINDOW_BYTES = 64 << 20
"""Bytes that are read at a time where there are more than that."""
