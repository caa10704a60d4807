"""A study: attention as associative recall. See README.md."""
