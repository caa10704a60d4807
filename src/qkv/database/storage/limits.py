"""Size limits of a store. They are not part of the file format and may change."""

from __future__ import annotations

MAX_BUFFERED_ROWS = 4096
MAX_BUFFERED_BYTES = 8 << 20
"""New rows stay in the catalog until they reach one of these limits. Then they become a segment."""

MIN_BUNDLE_ROWS = 2**14
"""A commit with at least this many rows writes their records to a bundle file."""

MAX_BUNDLE_BYTES = 1 << 30
"""A larger bundle is not merged with other bundles."""

MAX_SEGMENT_BYTES = 256 << 20
"""The maximum size of a segment file."""

SEGMENTS_PER_MERGE = 16
"""This many consecutive small segments are merged into one.

A segment is small if it has less than MAX_SEGMENT_BYTES / SEGMENTS_PER_MERGE bytes.
"""

ROWS_PER_PAGE = 2048
"""The number of rows that one query to the catalog returns."""

MAX_CACHED_ROWS, MAX_CACHED_ROW_CHARACTERS = 4096, 1024
"""The number of looked-up rows in a reader's cache, and the length of the longest record in it."""

MAX_UNMAPPED_BYTES = 8 << 20
"""A file up to this size is read into memory; a larger file is mapped.

Reading needs no file descriptor afterwards, and later changes of the file have no effect.
"""

MAX_RESIDENT_BYTES = 2 << 30
"""If the tensors of a scan are larger, their memory is released during the scan."""

WINDOW_BYTES = 64 << 20
"""The size of the parts in which such a scan reads the tensors."""

MAX_MAPPED_BYTES = 256 << 20
"""After reads at random positions have mapped so many bytes of files, their memory is released."""

MAPPED_BYTES_PER_READ = 64 << 10
"""The bytes that one such read counts, if the system does not say how many are in memory."""

READS_PER_CHECK = 64
"""After this number of reads at random positions, the bytes in memory are checked."""
