"""A SOURCE as it is shown."""

from __future__ import annotations

from tests.cli.run import data


class TestSource:
    def test_a_password_is_not_shown(self) -> None:
        fault = data("ask", "postgresql://li:secret@localhost/x", "q", "--at", 1, code=2)
        assert "postgresql://li@localhost/x" in fault["error"]
        assert "secret" not in fault["error"]
