"""Limits of requests and connections. An error names the limit that a request exceeds."""

from __future__ import annotations

from qkv.page import limits

MAX_BODY_BYTES = 2**24
"""Largest body of a request."""
MAX_UPLOAD_BYTES = 2**26
"""Largest uploaded file."""
MAX_TOTAL_BODY_BYTES = 2**28
"""Largest sum of all bodies that are being read or answered."""
MAX_JSON_DEPTH = 200
"""Nesting of lists and objects in a body."""
MAX_UPLOADS = 8
"""Uploaded databases held in memory at a time."""
MAX_QUERIES = 1024
"""Queries of one request, and of one batch of concurrent requests."""
MAX_TEXT_CHARACTERS = limits.MAX_QUERY_CHARACTERS
"""Characters of one query or key."""
MAX_BATCH_CHARACTERS = 2**20
"""Characters of all queries of one request, and of one batch of concurrent requests."""
MAX_CELL_CHARACTERS = limits.MAX_CELL_CHARACTERS
"""Characters of one cell of an added or uploaded row."""
MAX_ROWS = 10_000
"""Rows that one request may send or receive."""
MAX_TOP_ROWS = 1000
"""Rows that one answer lists (`top`)."""
MAX_NUMBERS = 2**20
"""Numbers in one response, such as weights or pooled values."""
REQUEST_TIMEOUT_SECONDS = 60.0
"""Time limit of a request. A write that has started is finished anyway."""
UPLOAD_TIMEOUT_SECONDS = 300.0
"""Time limit for reading and encoding an upload. After it the upload is discarded."""
MAX_HEAD_BYTES = 2**16
"""Largest head of a request."""
HEAD_TIMEOUT_SECONDS = 10.0
"""Time limit for a connection to send the head of a request."""
WRITE_TIMEOUT_SECONDS = 20.0
"""Time limit for a connection to read the next part of a response."""
MAX_REQUESTS = 256
"""Concurrent requests."""
MAX_CONNECTIONS = 512
"""Concurrent connections. The rest of the file descriptors is left to the databases."""
MAX_CONNECTIONS_PER_ADDRESS = 128
"""Concurrent connections from one address, so that one client cannot use all of them."""
MAX_DATABASES = 64
"""Databases of one server; each needs open files."""
