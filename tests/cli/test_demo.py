"""`qkv demo`."""

from __future__ import annotations

import json

import pytest

from tests.cli.run import qkv


class TestDemo:
    def test_the_stories(self) -> None:
        pytest.importorskip("wordllama")  # by letters alone, proofs are far from mathematics
        result = qkv("demo", "--json")
        assert result.exit_code == 0, result.output
        *stories, last = map(json.loads, result.stdout.splitlines())
        exact, near, major, salary = stories
        assert (exact["value"], exact["rows"][0]["weight"]) == ("Mu", 1.0)
        assert near["value"] == "Mu"
        assert near["rows"][0]["weight"] < 1
        assert major["value"] == "Jane Roe"
        assert 70 < salary["value"] < 80
        assert last["next"]
        assert "Try next" in qkv("demo").stdout
