"""The table of a database: its schema, cells, columns, the encoding of keys, and views."""
