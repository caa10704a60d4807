"""Limits on requests and connections. Error messages name the limit that a request exceeds."""

from __future__ import annotations

from qkv.page import limits

MAX_BODY_BYTES = 2**24
"""The size of a request's body."""
MAX_UPLOAD_BYTES = 2**26
"""The size of an uploaded file."""
MAX_TOTAL_BODY_BYTES = 2**28
"""The size of the bodies of all requests that are being read or answered."""
MAX_JSON_DEPTH = 200
"""The number of lists and objects inside each other in a body."""
MAX_UPLOADS = 8
"""The number of uploaded databases, which are in memory."""
MAX_QUERIES = 1024
"""The number of queries in one request, and in one batch of several requests."""
MAX_TEXT_CHARACTERS = limits.MAX_QUERY_CHARACTERS
"""The number of characters of one query or key."""
MAX_BATCH_CHARACTERS = 2**20
"""The number of characters of all queries in one request, and in one batch of several requests."""
MAX_CELL_CHARACTERS = limits.MAX_CELL_CHARACTERS
"""The number of characters of one cell in an added or uploaded row."""
MAX_ROWS = 10_000
"""The number of rows that one request may send or receive."""
MAX_TOP_ROWS = 1000
"""The number of rows that one answer may list (`top`)."""
MAX_NUMBERS = 2**20
"""The number of numbers in one response, such as weights or pooled values."""
REQUEST_TIMEOUT_SECONDS = 60.0
"""The time for a request. A write that has started always finishes."""
UPLOAD_TIMEOUT_SECONDS = 300.0
"""The time to read and encode an upload. After that, the server discards the upload."""
MAX_HEAD_BYTES = 2**16
"""The size of the head of a request: its first line and its headers."""
HEAD_TIMEOUT_SECONDS = 10.0
"""The time until a connection must have sent the head of a request."""
WRITE_TIMEOUT_SECONDS = 20.0
"""The time until a client must have read the next part of a response."""
MAX_REQUESTS = 256
"""The number of requests in progress."""
MAX_CONNECTIONS = 512
"""The number of open connections. Databases use the other file descriptors."""
MAX_CONNECTIONS_PER_ADDRESS = 128
"""The number of connections from one address, so that one client cannot use all of them."""
MAX_DATABASES = 64
"""The number of databases of one server. Each needs open files."""
