"""How much a request may ask for; more is refused by an error that names the limit."""

from __future__ import annotations

from qkv.page import bounds

BODY = 2**24
"""Bytes of a body."""
UPLOAD = 2**26
"""Bytes of a file that is uploaded."""
HELD = 2**28
"""Bytes of all bodies at a time."""
DEPTH = 200
"""Lists and objects within each other in a body."""
UPLOADS = 8
"""Uploaded files that are kept at a time, in memory."""
QUERIES = 1024
"""Queries of one request, and of the batch that concurrent requests make."""
TEXT = bounds.QUERY
"""Characters of a query, or of a key."""
TEXTS = 2**20
"""Characters of all queries of one request, and of the batch that concurrent requests make."""
CELL = bounds.CELL
"""Characters of a cell of a row that is added or uploaded."""
ROWS = 10_000
"""Rows of one request, in or out."""
TOP = 1000
"""Rows that an answer names."""
NUMBERS = 2**20
"""Numbers that one answer holds where they are not rows: weights, or what was pooled."""
SECONDS = 60.0
"""Until a request is answered, and its work stopped; one that writes is finished however long it
takes."""
UPLOAD_SECONDS = 300.0
"""Until an upload is read and encoded; then it is stopped, and nothing of it is kept."""
HEAD = 2**16
"""Bytes of a request's head."""
HEADER = 10.0
"""Seconds until a connection has sent the whole head of a request."""
UNREAD = 20.0
"""Seconds in which a connection must take some of the answer that waits for it."""
REQUESTS = 256
"""Requests at a time."""
CONNECTIONS = 512
"""Connections at a time, so that files are left for the databases."""
EACH = 128
"""Connections of one address, so that nobody takes them all."""
DATABASES = 64
"""Databases of one server, each with files of its own."""
