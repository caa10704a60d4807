"""The sizes that a store works with. They may change from one release to the next."""

from __future__ import annotations

RESTING_ROWS = 4096
RESTING_BYTES = 8 << 20
"""New rows rest in the catalogue until there are so many, or so many bytes of them."""

BUNDLE_ROWS = 2**14
"""Rows of one commit from which their records make a bundle."""

BUNDLE_BYTES = 1 << 30
"""A bundle that is larger is not joined with others."""

SEGMENT_BYTES = 256 << 20
"""A segment is cut at this size."""

FEW = 16
"""So many small segments in a row become one; small is a 1/FEW of the size above."""

PAGE = 2048
"""Rows that are fetched from the catalogue at a time."""

KNOWN, SHORT = 4096, 1024
"""Rows that a reader remembers, and the longest text of such a row."""

READ = 8 << 20
"""Bytes up to which a segment is read whole and not mapped: that takes no descriptor, and whatever
happens to the file later does not matter."""

RESIDENT = 2 << 30
"""Bytes of mapped tensors that may stay in memory after a scan."""

WINDOW = 64 << 20
"""Bytes that are read at a time where there are more than that."""
