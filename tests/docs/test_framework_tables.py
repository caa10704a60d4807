"""docs/frameworks.md says what the tests of transforms run."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from tools import frameworks


def test_the_tables_are_those_of_the_tests():
    written = frameworks.MARKED.search(frameworks.PAGE.read_text(encoding="utf-8"))
    assert written is not None
    assert written[0] == frameworks.tables(), "run python tools/frameworks.py"
