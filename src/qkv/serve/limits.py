"""How much a request may ask for; more is refused by an error that names the limit."""

from __future__ import annotations

from qkv.page import limits

MAX_BODY_BYTES = 2**24
"""Bytes of a body."""
MAX_UPLOAD_BYTES = 2**26
"""Bytes of a file that is uploaded."""
MAX_TOTAL_BODY_BYTES = 2**28
"""Bytes of all bodies at a time."""
MAX_JSON_DEPTH = 200
"""Lists and objects within each other in a body."""
MAX_UPLOADS = 8
"""Uploaded files that are kept at a time, in memory."""
MAX_QUERIES = 1024
"""Queries of one request, and of the batch that concurrent requests make."""
MAX_TEXT_CHARACTERS = limits.QUERY
"""Characters of a query, or of a key."""
TEXTS = 2**20
"""Characters of all queries of one request, and of the batch that concurrent requests make."""
CELL = limits.CELL
"""Characters of a cell of a row that is added or uploaded."""
MAX_ROWS = 10_000
"""Rows of one request, in or out."""
MAX_TOP_ROWS = 1000
"""Rows that an answer names."""
MAX_NUMBERS = 2**20
"""Numbers that one answer holds where they are not rows: weights, or what was pooled."""
REQUEST_TIMEOUT_SECONDS = 60.0
"""Until a request is answered, and its work stopped; one that writes is finished however long it
takes."""
UPLOAD_SECONDS = 300.0
"""Until an upload is read and encoded; then it is stopped, and nothing of it is kept."""
MAX_HEAD_BYTES = 2**16
"""Bytes of a request's head."""
HEAD_TIMEOUT_SECONDS = 10.0
"""Seconds until a connection has sent the whole head of a request."""
WRITE_TIMEOUT_SECONDS = 20.0
"""Seconds in which a connection must take some of the answer that waits for it."""
MAX_REQUESTS = 256
"""Requests at a time."""
MAX_CONNECTIONS = 512
"""Connections at a time, so that files are left for the databases."""
MAX_CONNECTIONS_PER_ADDRESS = 128
"""Connections of one address, so that nobody takes them all."""
MAX_DATABASES = 64
"""Databases of one server, each with files of its own."""
