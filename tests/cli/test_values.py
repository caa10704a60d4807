"""Conditions as the command line has them."""

from __future__ import annotations

from qkv.cli import values


class TestValues:
    def test_where_leaves_comparisons_alone(self) -> None:
        for text in ("a == 1", "a <= 1", "a >= 1", "a != 1", "'x=y' in a"):
            assert values.where([text]) == text
        assert values.where(["a=it's"]) == '`a` == "it\'s"'
        assert values.where(["a='Tis Pity"]) == '`a` == "\'Tis Pity"'
        assert values.where(['a="Li']) == "`a` == '\"Li'"
        assert values.where(["a='Li' and b > 1"]) == "`a` == 'Li' and b > 1"
        assert values.where(["first name=Li"]) == "`first name` == 'Li'"
        assert values.where(None) is None
