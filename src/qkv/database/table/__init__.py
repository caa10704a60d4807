"""The table of a database: schema, cells, columns, encoding and views."""
